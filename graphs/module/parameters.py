"""Parameters with a checkpoint's names and shapes over the weights that the kernels read.

A checkpoint tensor that a weight holds as it is (a projection, its rows in a merged projection, one expert of a
stack) becomes a parameter that IS that part of the weight: a view, no second copy. What a weight only contains in
another form (a product, a slice for each head, another dtype, one rank's part) stays a tensor of its own, and
``write_packed`` makes the weight from it again, into the same storage. Decides which of the two a tensor is; a
recipe says what a weight is made of.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...compiler.errors import CheckpointError
from ...compiler.recipe import Cat, Leaf, Recipe, Reshape, StackLeaf, shape_of
from ..boxes import whole
from ..load import TORCH_DTYPES, Loadable, TensorSource, find_stored, load_weights, stored_tensors
from .addresses import Held


class Tree(nn.Module):
    """A namespace: submodules for the parts of dotted names. Calls ``touched`` when a tensor of it is set or moved."""

    touched: Callable[[], None]

    def __init__(self, touched: Callable[[], None]) -> None:
        super().__init__()
        self.__dict__["touched"] = touched

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, Tensor):
            self.touched()

    def _apply(self, fn: Any, recurse: bool = True) -> Tree:
        self.touched()
        return super()._apply(fn, recurse)

    def at(self, path: Sequence[str]) -> Tree:
        """The tree at ``path`` below this one, made on the way."""
        tree = self
        for part in path:
            found = tree._modules.get(part)
            if not isinstance(found, Tree):
                found = Tree(self.touched)
                tree.add_module(part, found)
            tree = found
        return tree


@dataclass(frozen=True)
class Parameters:
    """Where each checkpoint tensor lives. ``views`` are parts of weights, ``apart`` are tensors of their own."""

    views: Mapping[str, Tensor]
    apart: Mapping[str, Tensor]
    packed: frozenset[str]  # weights that are made from tensors apart
    parts_of: Mapping[str, str]  # name of a view -> the weight that it is a part of

    @property
    def all(self) -> dict[str, Tensor]:
        return {**self.views, **self.apart}


def lay_parameters(weights: Mapping[str, Loadable], ranks: Sequence[Mapping[str, Tensor]],
                   source: TensorSource) -> Parameters:
    """Parameters over the loaded weights of every bound rank; those apart are read from ``source``."""
    views: dict[str, Tensor] = {}
    parts_of: dict[str, str] = {}
    packed = set()
    for name, weight in weights.items():
        found = dict(_stored_parts(ranks[0][name], weight.recipe, source)) if len(ranks) == 1 else None
        if found is None or None in found.values() or views.keys() & found.keys():
            packed.add(name)
        else:
            views.update({stored: part for stored, part in found.items() if part is not None})
            parts_of.update(dict.fromkeys(found, name))
    apart: dict[str, Tensor] = {}
    device = next(iter(ranks[0].values())).device
    for names, shape, _ in stored_tensors(weights[name].recipe for name in packed):
        stored = find_stored(source, names)[0]
        if stored not in views and stored not in apart:
            apart[stored] = source.read(stored, whole(shape)).to(device, copy=True).contiguous()
    return Parameters(views, apart, frozenset(packed), parts_of)


def _stored_parts(out: Tensor, recipe: Recipe, source: TensorSource) -> Iterator[tuple[str, Tensor | None]]:
    """Each checkpoint tensor of ``recipe`` and its place in ``out``; None where ``out`` does not hold it as it is."""
    match recipe:
        case Leaf(names, _, dtype):
            yield find_stored(source, names)[0], out if out.dtype == TORCH_DTYPES[dtype] else None
        case StackLeaf(_, count, _, dtype):
            for e, (names, _, _) in zip(range(count), stored_tensors([recipe]), strict=True):
                yield find_stored(source, names)[0], out[e] if out.dtype == TORCH_DTYPES[dtype] else None
        case Cat(dim, parts):
            start = 0
            for part in parts:
                length = shape_of(part)[dim]
                yield from _stored_parts(out.narrow(dim, start, length), part, source)
                start += length
        case Reshape(_, part) if out.is_contiguous():
            yield from _stored_parts(out.view(shape_of(part)), part, source)
        case _:
            for names, _, _ in stored_tensors([recipe]):
                yield find_stored(source, names)[0], None


def write_packed(weights: Mapping[str, Loadable], names: Iterable[str], ranks: Mapping[int, Mapping[str, Tensor]],
                 source: TensorSource) -> None:
    """Makes the named weights again from ``source``, into their storage; ``ranks`` maps a rank to its weights."""
    wanted = {name: weights[name] for name in names}
    for index, tensors in ranks.items():
        load_weights(source, wanted, index, device=next(iter(tensors.values())).device, into=tensors)


def hang(root: Tree, tensors: Mapping[str, Tensor], prefix: str = "") -> dict[str, Held]:
    """Registers each tensor below ``root`` under its name without ``prefix``, as a frozen parameter: a decode step
    never learns. Returns a look-up of what the module holds, by full name."""
    held: dict[str, Held] = {}
    for name, tensor in tensors.items():
        *path, leaf = name.removeprefix(prefix).split(".")
        owner = root.at(path)
        owner.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
        held[name] = partial(owner._parameters.get, leaf)
    return held


def pull_back(root: Tree, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
    """Parameters that were replaced: copies their values into ``tensors`` and hangs those again."""
    for name, tensor in tensors.items():
        *path, leaf = name.removeprefix(prefix).split(".")
        owner = root.at(path)
        held = owner._parameters[leaf]
        if held is not None and held.data_ptr() != tensor.data_ptr():
            bytes_for_numbers = held.dtype != tensor.dtype and torch.uint8 in (held.dtype, tensor.dtype)
            if held.shape != tensor.shape or bytes_for_numbers:
                said, read = (f"{t.dtype} of shape {list(t.shape)}" for t in (held, tensor))
                raise CheckpointError(f"{name}: {said}, the plan reads {read}\n"
                                      "  fix: load the checkpoint that the plan was compiled for")
            tensor.copy_(held)
            owner.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
