"""What an op is: one torch function that is its meaning, and three rules about it (shape, placement, bytes).

The body of an op computes in fp32 and returns fp32 unless its docstring says otherwise; whoever runs it
rounds to the declared dtype of the value (``graphs/bind.py``) or keeps fp32 (``graphs/reference.py``).
Ops that update a cache or a state write in place and return that same tensor; ``alias`` says so.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import GraphError, ShardError
from ..ir import REPLICATED, Placement, Value, shard

Attrs = Mapping[str, Any]
Shaped = tuple[tuple[int, ...], str]  # shape, dtype
Infer = Callable[[Sequence[Value], Attrs], Sequence[Shaped]]
Place = Callable[[Sequence[Value], Attrs], Sequence[Placement]]


@dataclass(frozen=True)
class Traffic:
    """Bytes that must move through device memory once, and operations that must be done."""

    bytes: int
    flops: int


Count = Callable[[Sequence[Value], Sequence[Value], Attrs], Traffic]


class Need(Exception):
    """A placement rule asks for input ``index`` to be brought to ``placement`` first."""

    def __init__(self, index: int, placement: Placement = REPLICATED) -> None:
        super().__init__(index, placement)
        self.index, self.placement = index, placement


@dataclass(frozen=True)
class OpDef:
    """One op. ``alias`` maps an output index to the input index whose storage it updates in place.

    ``aten``: kernels that torch launches for it on a GPU, those that round its results into place included, for one
    row of Kimi K3 (8 blocks, 16 experts, verify steps of 8 rows). ``tests/plan/test_aten_counts.py`` counts them.
    """

    name: str
    fn: Callable[..., Any]
    infer: Infer
    place: Place
    count: Count
    alias: Mapping[int, int] = field(default_factory=dict)
    outputs: int = 1
    kind: str = "compute"  # "compute", "view" (no launch) or "comm" (all ranks together)
    aten: int = 1


OPS: dict[str, OpDef] = {}


def op(
    *, infer: Infer, place: Place, count: Count | None = None,
    alias: Mapping[int, int] | None = None, outputs: int = 1, kind: str = "compute", aten: int = 1,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declares the decorated function as the op of its own name."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        name = fn.__name__
        if name in OPS:
            raise GraphError(f"op {name} is declared twice")
        OPS[name] = OpDef(name, fn, infer, place, count or streamed, alias or {}, outputs, kind, aten)
        return fn

    return register


# shape rules


def like(index: int, dtype: str | None = None) -> Infer:
    """One output with the shape of input ``index``; dtype of it too, unless given."""
    return lambda inputs, attrs: [(inputs[index].shape, dtype or inputs[index].dtype)]


def expect(condition: bool, text: str) -> None:
    """Raises GraphError: shapes given to an op do not fit."""
    if not condition:
        raise GraphError(text)


# placement rules


def need_replicated(inputs: Sequence[Value], indices: Sequence[int] | None = None) -> None:
    """Asks for each listed input (all of them by default) to be whole on every rank."""
    for index in range(len(inputs)) if indices is None else indices:
        if inputs[index].placement != REPLICATED:
            raise Need(index)


def replicated(outputs: int = 1) -> Place:
    """All inputs whole, all outputs whole."""

    def place(inputs: Sequence[Value], attrs: Attrs) -> list[Placement]:
        need_replicated(inputs)
        return [REPLICATED] * outputs

    return place


def split_along(in_dims: Sequence[int | None], out_dims: Sequence[int | None]) -> Place:
    """Split together or not at all: where one listed input is split along its dim, all of them must be.

    ``None`` marks an input or output that stays whole. Inputs past the list stay whole.
    """

    def place(inputs: Sequence[Value], attrs: Attrs) -> list[Placement]:
        dims = list(in_dims[: len(inputs)]) + [None] * (len(inputs) - len(in_dims))
        split = [d is not None and v.placement == shard(d) for v, d in zip(inputs, dims, strict=True)]
        any_split = any(split)
        for index, (value, dim) in enumerate(zip(inputs, dims, strict=True)):
            if dim is None or not any_split:
                if value.placement != REPLICATED:
                    raise Need(index)
            elif not split[index]:
                if value.placement.kind != "partial":
                    raise ShardError(f"{value.name} is {value.placement} where its peers are split along {dim}")
                raise Need(index, shard(dim))
        return [shard(d) if d is not None and any_split else REPLICATED for d in out_dims]

    return place


# byte rules


def streamed(inputs: Sequence[Value], outputs: Sequence[Value], attrs: Attrs) -> Traffic:
    """Every input read once and every output written once; one operation an output element."""
    moved = sum(v.nbytes for v in inputs) + sum(v.nbytes for v in outputs)
    return Traffic(moved, sum(math.prod(v.shape) for v in outputs))


def free(inputs: Sequence[Value], outputs: Sequence[Value], attrs: Attrs) -> Traffic:
    """Views."""
    return Traffic(0, 0)
