"""Evaluate weight recipes for one rank, reading only the ranges that the rank needs.

A recipe is walked from the top with the range that is wanted of it. The range moves down to the checkpoint
tensors, and each read lands in its place in the preallocated weight. This file does not know files: it reads
a ``TensorSource`` (``checkpoint.py``, ``random_weights.py``, or a dict of tensors).

A float that is stored in another float dtype than the recipe's is converted once, to the dtype that the kernels read
(``conversion.py``).
"""
from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from ..compiler.errors import BindError, CheckpointError, ConversionWarning, GraphError
from ..compiler.recipe import Cat, Leaf, Mul, Recipe, Reshape, Shard, Slice, StackLeaf, Zeros, leaves, shape_of
from .boxes import Box, reshaped, shifted, sizes, whole
from .conversion import DTYPE_NAMES, TORCH_DTYPES, Kinds, can_stand_for, is_rounded, rounding_note

_FIX = "  fix: pass the checkpoint that the plan was compiled for, with its published names"


@dataclass(frozen=True, slots=True)
class Weight:
    """What a plan says of one weight: how to make it, and the dtype that the kernels read."""

    recipe: Recipe
    dtype: str


class Loadable(Protocol):
    """What loading needs of a weight: ``Weight`` here, or the record of a plan."""

    @property
    def recipe(self) -> Recipe: ...

    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor. ``file`` and ``offset`` order the reads; both are empty for tensors in memory."""

    shape: tuple[int, ...]
    dtype: str
    file: str = ""
    offset: int = 0


class TensorSource(Protocol):
    """Where checkpoint tensors come from."""

    def find(self, name: str) -> TensorInfo | None:
        """The tensor of this name, or None."""

    def read(self, name: str, box: Box) -> Tensor:
        """The part ``box`` of a tensor that ``find`` knows. Raises ``CheckpointError``."""


class StateDictSource:
    """Tensors in memory, by their checkpoint names."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def find(self, name: str) -> TensorInfo | None:
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        return TensorInfo(tuple(tensor.shape), DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)))

    def read(self, name: str, box: Box) -> Tensor:
        return self.tensors[name][tuple(slice(*r) for r in box)]


def source_of(checkpoint: TensorSource | Mapping[str, Tensor]) -> TensorSource:
    """``checkpoint`` itself, or a dict of tensors as a source. Raises BindError: it is neither, such as a path."""
    if isinstance(checkpoint, Mapping):
        return StateDictSource(checkpoint)
    if not hasattr(checkpoint, "read"):
        raise BindError(f"{checkpoint!r} is no checkpoint\n  fix: pass k3plan.Checkpoint(folder), or a state dict")
    return checkpoint


def load_weights(
    source: TensorSource,
    weights: Mapping[str, Loadable],
    rank: int = 0,
    *,
    device: str | torch.device = "cpu",
    progress: bool = False,
    into: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Make every weight for ``rank``: name -> contiguous tensor of the recipe's shape in ``Weight.dtype``.

    ``into`` has tensors to fill, by weight; without it they are allocated on ``device``.

    Weights are made file by file, and the reads of a file are sorted by offset. ``progress`` draws a bar of
    bytes when standard error is a terminal. Raises ``CheckpointError`` when a tensor is missing, differs from
    what the recipe says, or cannot be read; ``BindError`` when ``rank`` is outside a recipe's parts. A
    ``ConversionWarning`` names tensors that lost digits.
    """
    made: dict[str, Tensor] = {}
    first = {name: _place(source, weight.recipe) for name, weight in weights.items()}
    order = sorted(weights, key=first.__getitem__)
    total = sum(prod(shape_of(w.recipe)) * TORCH_DTYPES[w.dtype].itemsize for w in weights.values())
    rounded: Kinds = {}
    with torch.no_grad(), _progress(total, progress) as advance:
        for _, group in groupby(order, key=lambda name: first[name][0]):
            filler = _Filler(source, rank)
            for name in group:
                recipe, dtype = weights[name].recipe, TORCH_DTYPES[weights[name].dtype]
                shape = shape_of(recipe)
                made[name] = torch.empty(shape, dtype=dtype, device=device) if into is None else into[name]
                filler.fill(made[name], recipe, whole(shape))
            filler.run(advance)
            rounded |= filler.rounded
    if rounded:
        warnings.warn(rounding_note(rounded, "lost digits when read as"), ConversionWarning, stacklevel=2)
    return {name: made[name] for name in weights}


def stored_tensors(recipes: Iterable[Recipe]) -> Iterator[tuple[tuple[str, ...], tuple[int, ...], str]]:
    """Every (alternative names, shape, dtype) that the recipes read, stacks expanded, in order."""
    for recipe in recipes:
        for leaf in leaves(recipe):
            if isinstance(leaf, Leaf):
                yield leaf.names, leaf.shape, leaf.dtype
            else:
                for e in range(leaf.count):
                    yield _item_names(leaf.names, e), leaf.item_shape, leaf.dtype


@dataclass(frozen=True, slots=True)
class _Read:
    info: TensorInfo
    name: str
    box: Box
    out: Tensor


class _Filler:
    """Collects the reads that fill some tensors, then runs them in file order, then the steps that follow."""

    def __init__(self, source: TensorSource, rank: int) -> None:
        self.source = source
        self.rank = rank
        self.reads: list[_Read] = []
        self.steps: list[Callable[[], object]] = []  # inner before outer
        self.rounded: Kinds = {}

    def run(self, advance: Callable[[int], None]) -> None:
        for read in sorted(self.reads, key=lambda r: (r.info.file, r.info.offset)):
            part = self.source.read(read.name, read.box)
            read.out.copy_(part)
            stored, kept = read.info.dtype, read.out.dtype
            if is_rounded(stored, DTYPE_NAMES[kept]) and not torch.equal(part.to(kept).to(part.dtype), part):
                self.rounded[read.name] = (stored, DTYPE_NAMES[kept])
            advance(read.out.nbytes)
        for step in self.steps:
            step()

    def fill(self, out: Tensor, recipe: Recipe, box: Box) -> None:
        """Arrange that ``out`` receives the part ``box`` of ``recipe``."""
        match recipe:
            case Leaf(names, shape, dtype):
                self._read(out, names, shape, dtype, box)
            case StackLeaf(names, _, shape, dtype):
                for row, e in enumerate(range(*box[0])):
                    self._read(out[row], _item_names(names, e), shape, dtype, box[1:])
            case Zeros():
                out.zero_()
            case Cat(dim, parts):
                self._fill_cat(out, dim, parts, box)
            case Slice(dim, start, _, part):
                self.fill(out, part, shifted(box, dim, start))
            case Shard(dim, count, part):
                if not 0 <= self.rank < count:
                    raise BindError(f"rank {self.rank} has no part of a weight that is split into {count}")
                self.fill(out, part, shifted(box, dim, shape_of(recipe)[dim] * self.rank))
            case Reshape(_, part):
                self._fill_reshape(out, recipe, part, box)
            case Mul(left, right):
                if shape_of(left) != shape_of(right):
                    raise GraphError(f"product of shapes {shape_of(left)} and {shape_of(right)}")
                a, b = (torch.empty(out.shape, dtype=torch.float32, device=out.device) for _ in range(2))
                self.fill(a, left, box)
                self.fill(b, right, box)
                self.steps.append(lambda: out.copy_(a * b))

    def _read(
        self, out: Tensor, names: tuple[str, ...], shape: tuple[int, ...], dtype: str, box: Box
    ) -> None:
        name, info = find_stored(self.source, names)
        if info.shape != shape or not can_stand_for(info.dtype, dtype):
            raise CheckpointError(
                f"tensor {name}: the plan reads {dtype} {list(shape)}, found {info.dtype} {list(info.shape)}\n{_FIX}"
            )
        if (dtype == "u8") != (out.dtype == torch.uint8):
            raise GraphError(f"tensor {name}: {dtype} bytes cannot become {out.dtype}")
        self.reads.append(_Read(info, name, box, out))

    def _fill_cat(self, out: Tensor, dim: int, parts: tuple[Recipe, ...], box: Box) -> None:
        start, stop = box[dim]
        begin = 0
        for part in parts:
            end = begin + shape_of(part)[dim]
            low, high = max(start, begin), min(stop, end)
            if low < high:
                inner = (*box[:dim], (low - begin, high - begin), *box[dim + 1 :])
                self.fill(out.narrow(dim, low - start, high - low), part, inner)
            begin = end

    def _fill_reshape(self, out: Tensor, recipe: Reshape, part: Recipe, box: Box) -> None:
        moved = reshaped(box, recipe.shape, shape_of(part))
        if moved.exact and out.is_contiguous():
            self.fill(out.view(sizes(moved.inner)), part, moved.inner)
            return
        buffer = torch.empty(sizes(moved.inner), dtype=out.dtype, device=out.device)
        self.fill(buffer, part, moved.inner)

        def carve() -> None:
            flat = buffer.view(moved.run_sizes)
            for dim, (start, length) in enumerate(moved.keeps):
                flat = flat.narrow(dim, start, length)
            out.copy_(flat.reshape(moved.kept_sizes)[tuple(slice(*r) for r in moved.wanted)])

        self.steps.append(carve)


def _item_names(names: tuple[str, ...], index: int) -> tuple[str, ...]:
    return tuple(name.replace("{e}", str(index)) for name in names)


def find_stored(source: TensorSource, names: tuple[str, ...]) -> tuple[str, TensorInfo]:
    """The first of ``names`` that ``source`` has, and what it has there. Raises CheckpointError: it has none."""
    for name in names:
        info = source.find(name)
        if info is not None:
            return name, info
    raise CheckpointError(f"the checkpoint has no tensor {' or '.join(names)}\n{_FIX}")


def _place(source: TensorSource, recipe: Recipe) -> tuple[str, int]:
    """File and offset of the first tensor that the recipe reads."""
    for names, _, _ in stored_tensors([recipe]):
        info = find_stored(source, names)[1]
        return (info.file, info.offset)
    return ("", 0)


@contextmanager
def _progress(total: int, wanted: bool) -> Iterator[Callable[[int], None]]:
    """A function that advances a bar of bytes; it does nothing without a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not (wanted and console.is_terminal):
        yield lambda count: None
        return
    columns = ("loading weights", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)
