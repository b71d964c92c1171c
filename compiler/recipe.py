"""How a weight is made from checkpoint tensors: a small expression, the same on every rank.

A recipe is data. It goes into the plan as JSON and the loader evaluates it for one rank by reading only the
byte ranges that the rank needs (``graphs/load.py``). This file decides shapes; it reads nothing.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Union

from .errors import GraphError


@dataclass(frozen=True, slots=True)
class Leaf:
    """One checkpoint tensor. ``names`` are alternatives, the first that exists is read."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str  # "bf16" | "fp32" | "u8"


@dataclass(frozen=True, slots=True)
class StackLeaf:
    """``count`` tensors of one shape, stacked on a new leading dim; ``{e}`` in a name is the index."""

    names: tuple[str, ...]
    count: int
    item_shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Zeros:
    """Rows that no checkpoint has: padding to a width that kernels like."""

    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cat:
    """Parts joined along ``dim``."""

    dim: int
    parts: tuple[Recipe, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """``part`` restricted to ``[start, stop)`` along ``dim``."""

    dim: int
    start: int
    stop: int
    part: Recipe


@dataclass(frozen=True, slots=True)
class Reshape:
    """``part`` viewed with another shape, row-major."""

    shape: tuple[int, ...]
    part: Recipe


@dataclass(frozen=True, slots=True)
class Mul:
    """Elementwise product in fp32 (the folded AttnRes score vector)."""

    left: Recipe
    right: Recipe


@dataclass(frozen=True, slots=True)
class Shard:
    """Part ``rank`` of ``parts`` equal contiguous parts of ``part`` along ``dim``."""

    dim: int
    parts: int
    part: Recipe


Recipe = Union[Leaf, StackLeaf, Zeros, Cat, Slice, Reshape, Mul, Shard]


def shape_of(recipe: Recipe) -> tuple[int, ...]:
    """Shape of the evaluated recipe on one rank."""
    match recipe:
        case Leaf() | Zeros():
            return recipe.shape
        case StackLeaf():
            return (recipe.count, *recipe.item_shape)
        case Cat(dim, parts):
            shapes = [shape_of(p) for p in parts]
            joined = sum(s[dim] for s in shapes)
            return tuple(joined if i == dim else n for i, n in enumerate(shapes[0]))
        case Slice(dim, start, stop, part):
            return tuple(stop - start if i == dim else n for i, n in enumerate(shape_of(part)))
        case Reshape(shape, part):
            if math.prod(shape) != math.prod(shape_of(part)):
                raise GraphError(f"reshape of {shape_of(part)} to {shape} changes the element count")
            return shape
        case Mul(left, _):
            return shape_of(left)
        case Shard(dim, parts, part):
            shape = shape_of(part)
            if shape[dim] % parts:
                raise GraphError(f"dim {dim} of {shape} does not divide by {parts}")
            return tuple(n // parts if i == dim else n for i, n in enumerate(shape))
    raise GraphError(f"unknown recipe node {recipe!r}")


def leaves(recipe: Recipe) -> Iterator[Leaf | StackLeaf]:
    """Every checkpoint tensor that the recipe names, left to right."""
    match recipe:
        case Leaf() | StackLeaf():
            yield recipe
        case Cat(_, parts):
            for part in parts:
                yield from leaves(part)
        case Mul(left, right):
            yield from leaves(left)
            yield from leaves(right)
        case Slice() | Reshape() | Shard():
            yield from leaves(recipe.part)


def differs_by_rank(recipe: Recipe) -> bool:
    """Whether ranks hold different parts."""
    match recipe:
        case Shard():
            return True
        case Cat(_, parts):
            return any(differs_by_rank(part) for part in parts)
        case Mul(left, right):
            return differs_by_rank(left) or differs_by_rank(right)
        case Slice() | Reshape():
            return differs_by_rank(recipe.part)
    return False


def to_json(recipe: Recipe) -> Any:
    """The recipe as nested JSON lists: ``[kind, ...]``."""
    match recipe:
        case Leaf(names, shape, dtype):
            return ["tensor", list(names), list(shape), dtype]
        case StackLeaf(names, count, item_shape, dtype):
            return ["stack", list(names), count, list(item_shape), dtype]
        case Zeros(shape):
            return ["zeros", list(shape)]
        case Cat(dim, parts):
            return ["cat", dim, [to_json(p) for p in parts]]
        case Slice(dim, start, stop, part):
            return ["slice", dim, start, stop, to_json(part)]
        case Reshape(shape, part):
            return ["reshape", list(shape), to_json(part)]
        case Mul(left, right):
            return ["mul", to_json(left), to_json(right)]
        case Shard(dim, parts, part):
            return ["shard", dim, parts, to_json(part)]
    raise GraphError(f"unknown recipe node {recipe!r}")


def from_json(data: Any) -> Recipe:
    """Inverse of ``to_json``."""
    kind, *rest = data
    match kind:
        case "tensor":
            return Leaf(tuple(rest[0]), tuple(rest[1]), rest[2])
        case "stack":
            return StackLeaf(tuple(rest[0]), rest[1], tuple(rest[2]), rest[3])
        case "zeros":
            return Zeros(tuple(rest[0]))
        case "cat":
            return Cat(rest[0], tuple(from_json(p) for p in rest[1]))
        case "slice":
            return Slice(rest[0], rest[1], rest[2], from_json(rest[3]))
        case "reshape":
            return Reshape(tuple(rest[0]), from_json(rest[1]))
        case "mul":
            return Mul(from_json(rest[0]), from_json(rest[1]))
        case "shard":
            return Shard(rest[0], rest[1], from_json(rest[2]))
    raise GraphError(f"unknown recipe kind {kind!r}")
