"""Boundaries 2 and 3: the graph of one decode step. Data only; meaning lives in ``compiler/ops``."""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .recipe import Recipe

DTYPE_BYTES: dict[str, int] = {
    "bf16": 2, "fp32": 4, "fp8_e4m3": 1, "u8": 1, "i32": 4, "i64": 8,
}
ROLES = ("activation", "weight", "state", "cache", "index")


@dataclass(frozen=True, slots=True)
class Placement:
    """How a value lies on the ranks of the tensor-parallel group.

    ``replicated``: equal on all. ``shard``: rank r holds part r along ``dim``. ``partial``: the value is the
    ``reduce`` over the ranks' tensors. ``disjoint``: partial by sum, and every element is non-zero on one
    rank at most (what expert parallelism makes), so that zero-preserving ops may be applied before the sum.
    """

    kind: str = "replicated"
    dim: int = 0
    reduce: str = "sum"

    def __str__(self) -> str:
        return {"shard": f"shard({self.dim})", "partial": f"partial({self.reduce})"}.get(self.kind, self.kind)


REPLICATED = Placement()
PARTIAL = Placement("partial")
PARTIAL_MAX = Placement("partial", reduce="max")
DISJOINT = Placement("disjoint")


def shard(dim: int) -> Placement:
    """The value is split along ``dim``."""
    return Placement("shard", dim)


@dataclass(frozen=True, slots=True)
class Axis:
    """A dimension that may be split over ranks: its name in errors, and the elements that stay together."""

    name: str  # "attention heads", "shared expert intermediate", "vocabulary", ...
    dim: int
    unit: int = 1


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the step. Shapes are global before the sharding pass and one rank's after it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str = "activation"
    placement: Placement = REPLICATED
    axis: Axis | None = None  # weights, states and caches: the dimension that a rule may split
    recipe: Recipe | None = None  # weights: how to make it from the checkpoint

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Node:
    """One op applied to named values. ``attrs`` holds compile-time scalars only."""

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    layer: int | None = None
    stage: str = ""  # "attn", "mlp", "embed" or "head"


@dataclass(frozen=True)
class Graph:
    """Nodes in a valid execution order. A value has one producer; an in-place update makes a new name."""

    nodes: tuple[Node, ...]
    values: Mapping[str, Value]
    inputs: tuple[str, ...]  # index inputs and step tensors, in call order
    outputs: tuple[str, ...]

    @cached_property
    def producer(self) -> dict[str, Node]:
        return {out: node for node in self.nodes for out in node.outputs}

    @cached_property
    def consumers(self) -> dict[str, list[Node]]:
        found: dict[str, list[Node]] = {name: [] for name in self.values}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                found[name].append(node)
        return found
