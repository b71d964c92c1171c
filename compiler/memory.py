"""Where every tensor lives: views share storage, storages have lifetimes, lifetimes get arena offsets."""
from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .call import Scratch
from .ir import DTYPE_BYTES, Graph
from .kernel import Region
from .ops import OPS

ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Tensor:
    """A view of a buffer: ``offset`` and ``stride`` in elements of ``dtype``."""

    buffer: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Buffer:
    """A storage. ``kind``: arena, output, weight, state, cache, index (step inputs), or zeroed (kernels leave it zero).

    Only arena buffers have an offset.
    ``first`` and ``last`` are the launches between which the content is alive.
    """

    kind: str
    bytes: int
    offset: int = 0
    first: int = 0
    last: int = 0


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def lay_out(
    graph: Graph, regions: tuple[Region, ...], scratch: Sequence[Mapping[str, tuple[str, Scratch]]] = (),
    at_work: Sequence[tuple[int, int]] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Buffer], int]:
    """Tensors by value name, buffers by name, and the bytes of the arena, for launches in this order.

    ``scratch`` has for each launch its workspace: (tensor name, what is wanted) by the kernel's name for it;
    ``at_work`` the first and last launch beside which it may run, itself when None.
    """
    at_work = at_work or [(index, index) for index in range(len(regions))]
    tensors = _tensors(graph, regions)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for index, region in enumerate(regions):
        for name in (*region.inputs, *region.outputs):
            root = tensors[name].buffer
            first[root] = min(first.get(root, index), at_work[index][0])
            last[root] = max(last.get(root, index), at_work[index][1])
    outputs = {tensors[name].buffer for name in graph.outputs}
    buffers: dict[str, Buffer] = {}
    for name in first:
        value = graph.values[name]
        kind = value.role if value.role != "activation" else "output" if name in outputs else "arena"
        kind = "index" if name in graph.inputs else kind
        buffers[name] = Buffer(kind, value.nbytes, 0, first[name], last[name])
    for index, wanted in enumerate(scratch):
        for name, want in wanted.values():
            tensors[name] = Tensor(name, 0, want.shape, contiguous(want.shape), want.dtype)
            size = math.prod(want.shape) * DTYPE_BYTES[want.dtype]
            buffers[name] = Buffer("zeroed" if want.zeroed else "arena", size, 0, *at_work[index])
    ordered = dict(sorted(buffers.items(), key=lambda item: (item[1].first, item[0])))
    return tensors, *_assign(ordered)


def _tensors(graph: Graph, regions: tuple[Region, ...]) -> dict[str, Tensor]:
    """Every value that a launch reads or writes, as a view of its root buffer."""
    tensors: dict[str, Tensor] = {}
    for name, value in graph.values.items():
        if name not in graph.producer:
            tensors[name] = Tensor(name, 0, value.shape, contiguous(value.shape), value.dtype)
    for node in graph.nodes:
        definition = OPS[node.op]
        for index, name in enumerate(node.outputs):
            value = graph.values[name]
            source = definition.alias.get(index)
            if definition.kind == "view":
                base = tensors[node.inputs[0]]
                start = base.offset + node.attrs["start"] * base.stride[node.attrs["dim"]]
                tensors[name] = Tensor(base.buffer, start, value.shape, base.stride, value.dtype)
            elif source is not None:
                tensors[name] = tensors[node.inputs[source]]
            else:
                tensors[name] = Tensor(name, 0, value.shape, contiguous(value.shape), value.dtype)
    used = {name for region in regions for name in (*region.inputs, *region.outputs)} | set(graph.outputs)
    return {name: tensor for name, tensor in tensors.items() if name in used}


def _assign(buffers: dict[str, Buffer]) -> tuple[dict[str, Buffer], int]:
    """Offsets by a sweep over the launches: the smallest hole that fits, else the end of the arena."""
    placed = dict(buffers)
    holes: list[tuple[int, int]] = []  # (offset, bytes), by offset, never adjacent
    top = 0
    expiring: dict[int, list[tuple[int, int]]] = {}
    current = -1
    for name, buffer in buffers.items():  # in order of first use
        if buffer.kind != "arena":
            continue
        while current < buffer.first - 1:
            current += 1
            for hole in expiring.pop(current, []):
                _release(holes, hole)
        size = -(-buffer.bytes // ALIGNMENT) * ALIGNMENT
        fitting = [hole for hole in holes if hole[1] >= size]
        if fitting:
            offset, length = min(fitting, key=lambda hole: hole[1])
            holes.remove((offset, length))
            if length > size:
                bisect.insort(holes, (offset + size, length - size))
        else:
            offset, length = holes[-1] if holes and sum(holes[-1]) == top else (top, 0)
            if length:
                holes.pop()
            top = offset + size
        placed[name] = Buffer(buffer.kind, buffer.bytes, offset, buffer.first, buffer.last)
        expiring.setdefault(buffer.last, []).append((offset, size))
    return placed, top


def _release(holes: list[tuple[int, int]], hole: tuple[int, int]) -> None:
    """Puts a hole back and joins it with its neighbours."""
    at = bisect.bisect(holes, hole)
    if at < len(holes) and sum(hole) == holes[at][0]:
        hole = (hole[0], hole[1] + holes.pop(at)[1])
    if at and sum(holes[at - 1]) == hole[0]:
        at -= 1
        before = holes.pop(at)
        hole = (before[0], before[1] + hole[1])
    holes.insert(at, hole)
