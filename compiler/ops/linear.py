"""Projections, views of them, and elementwise epilogues."""
from __future__ import annotations

import math
from collections.abc import Sequence

from ..ir import DISJOINT, PARTIAL, REPLICATED, Placement, Value, shard
from ._registry import Attrs, Need, Shaped, Traffic, expect, free, like, op, replicated, split_along
from ._torch import torch


def _infer_linear(inputs: Sequence[Value], attrs: Attrs) -> list[Shaped]:
    x, weight = inputs
    expect(x.shape[-1] == weight.shape[1], f"linear: x {x.shape} against weight {weight.shape}")
    return [((*x.shape[:-1], weight.shape[0]), attrs.get("out_dtype") or x.dtype)]


def _place_linear(inputs: Sequence[Value], attrs: Attrs) -> list[Placement]:
    x, weight = inputs
    if weight.placement == shard(1):
        if x.placement != shard(len(x.shape) - 1):
            raise Need(0, shard(len(x.shape) - 1))
        return [PARTIAL]
    if x.placement != REPLICATED:
        raise Need(0)
    return [shard(len(x.shape) - 1) if weight.placement == shard(0) else REPLICATED]


def _count_linear(inputs: Sequence[Value], outputs: Sequence[Value], attrs: Attrs) -> Traffic:
    moved = sum(v.nbytes for v in (*inputs, *outputs))
    return Traffic(moved, 2 * math.prod(outputs[0].shape) * inputs[1].shape[1])


@op(infer=_infer_linear, place=_place_linear, count=_count_linear)
def linear(x: torch.Tensor, weight: torch.Tensor, *, out_dtype: str | None = None) -> torch.Tensor:
    """``x @ weight.T``: x [T, K], weight [N, K], result [T, N]; ``out_dtype`` names the stored dtype."""
    return x.float() @ weight.float().T


def _infer_slice(inputs: Sequence[Value], attrs: Attrs) -> list[Shaped]:
    (x,) = inputs
    dim, start, stop = attrs["dim"], attrs["start"], attrs["stop"]
    expect(0 <= start < stop <= x.shape[dim], f"slice [{start}, {stop}) of {x.shape} along {dim}")
    return [(tuple(stop - start if i == dim else n for i, n in enumerate(x.shape)), x.dtype)]


def _place_slice(inputs: Sequence[Value], attrs: Attrs) -> list[Placement]:
    if inputs[0].placement.kind == "shard" and inputs[0].placement.dim == attrs["dim"]:
        raise Need(0)
    return [inputs[0].placement]


@op(infer=_infer_slice, place=_place_slice, count=free, alias={0: 0}, kind="view", aten=0)
def slice(x: torch.Tensor, *, dim: int, start: int, stop: int) -> torch.Tensor:
    """A view of ``[start, stop)`` along ``dim``; no launch."""
    return x.narrow(dim, start, stop - start)


def _place_add(inputs: Sequence[Value], attrs: Attrs) -> list[Placement]:
    left, right = (v.placement for v in inputs)
    if left == right:
        return [left]  # sums of partial sums stay partial
    for index, (mine, other) in enumerate(((left, right), (right, left))):
        if mine.kind in ("partial", "disjoint"):
            raise Need(index, other)
        if mine.kind == "shard" and other == REPLICATED:
            raise Need(index)
    raise Need(0)


@op(infer=like(0), place=_place_add, aten=4)
def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Elementwise sum of two tensors of one shape."""
    return left.float() + right.float()


@op(infer=like(0), place=replicated(), aten=4)
def residual_add(prefix: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """The running sum of the residual stream. Whole on every rank: a split one costs a hop more a layer."""
    return prefix.float() + delta.float()


def _place_gate_up(inputs: Sequence[Value], attrs: Attrs) -> list[Placement]:
    # zero in, zero out: rows of absent experts may pass before the sum over ranks
    if all(v.placement == DISJOINT for v in inputs):
        return [DISJOINT]
    last = len(inputs[0].shape) - 1
    return list(split_along((last, last), (last,))(inputs, attrs))


@op(infer=like(0), place=_place_gate_up, aten=12)
def situ_and_mul(
    gate: torch.Tensor, up: torch.Tensor, *, beta: float, linear_beta: float
) -> torch.Tensor:
    """``beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta)`` (Kimi K3, 4 and 25)."""
    gate, up = gate.float(), up.float()
    activated = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
    return activated * (linear_beta * torch.tanh(up / linear_beta))


@op(infer=like(0), place=_place_gate_up, aten=6)
def silu_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``gate sigmoid(gate) * up`` (Kimi-Linear)."""
    gate = gate.float()
    return gate * torch.sigmoid(gate) * up.float()


@op(infer=like(0), place=split_along((1, 1), (1,)), aten=5)
def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """``x * sigmoid(gate)``: the output gate of MLA."""
    return x.float() * torch.sigmoid(gate.float())
