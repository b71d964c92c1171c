"""Mixture of experts: exact top-k routing and the routed experts' three stages.

Expert weights are stacked on their first dim. MXFP4 weights come as packed nibbles and E8M0 scales
(``mxfp4.py``); others as plain tensors. ``rank`` i32 [1] tells an expert-parallel rank which ids are its own.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

from ..ir import DISJOINT, PARTIAL, REPLICATED, Placement, Value, shard
from ._registry import Attrs, Need, Shaped, Traffic, expect, need_replicated, op, replicated
from ._torch import torch
from .mxfp4 import unpack_mxfp4
from .mxfp8 import round_to_mxfp8


def _infer_topk(inputs: Sequence[Value], attrs: Attrs) -> list[Shaped]:
    rows = inputs[0].shape[0]
    return [((rows, attrs["top_k"]), "i32"), ((rows, attrs["top_k"]), "fp32")]


@op(infer=_infer_topk, place=replicated(2), outputs=2, aten=17)
def router_topk(
    logits: torch.Tensor, bias: torch.Tensor, *, top_k: int, groups: int, topk_groups: int,
    renormalize: bool, scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert ids i32 [T, k] in falling order of ``sigmoid(logits) + bias``, and their fp32 weights [T, k].

    logits and bias fp32. The bias selects only; weights are the sigmoids, renormalised (+ 1e-20) and scaled.
    Ties go to the lower id and NaN ranks last with weight 0, so ids are distinct and in range for any input.
    With groups, only experts of the ``topk_groups`` groups with the largest top-2 sums can be chosen.
    """
    scores = torch.sigmoid(logits.float())
    scores = torch.where(scores.isnan(), torch.zeros((), device=scores.device), scores)
    # below every number, but above the experts of groups that were not chosen
    last = torch.full((), torch.finfo(torch.float32).min, device=scores.device)
    choice = torch.where(logits.isnan(), last, scores + bias.float())
    if groups > 1:
        grouped = choice.unflatten(-1, (groups, -1))
        best = grouped.topk(2, -1).values.sum(-1).sort(dim=-1, descending=True, stable=True).indices
        chosen = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(1, best[:, :topk_groups], True)
        choice = torch.where(chosen[..., None], grouped, torch.full((), -torch.inf, device=scores.device))
        choice = choice.flatten(1)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids.to(torch.int32), weights * scaling


def distinct_experts(rows: int, experts: int, top_k: int) -> float:
    """Expected number of different experts that ``rows`` uniformly routed rows use."""
    return experts * (1.0 - (1.0 - top_k / experts) ** rows)


def _count_experts(inputs: Sequence[Value], outputs: Sequence[Value], attrs: Attrs) -> Traffic:
    x, ids, _, *weights = inputs
    local = weights[0].shape[0]
    used = distinct_experts(ids.shape[0], attrs["experts"], ids.shape[1]) * local / attrs["experts"]
    if local < attrs["experts"] and ids.shape[0] * ids.shape[1] < 4 * attrs["experts"]:
        used = expected_max_experts(ids.shape[0] * ids.shape[1], attrs["experts"] // local)
    read = round(min(used, local) * sum(w.nbytes for w in weights) / local)
    split = attrs["experts"] // local
    flops = 2 * math.prod(outputs[0].shape) * x.shape[-1] * len(outputs) // split
    return Traffic(read + x.nbytes + sum(v.nbytes for v in outputs), flops)


def expected_max_experts(pairs: int, ranks: int) -> float:
    """Expected load of the fullest of ``ranks`` when ``pairs`` experts fall on them uniformly.

    Each rank's load is taken as Poisson and the ranks as independent (16 pairs: 4.2 on 8 ranks, 3.1 on 16).
    """
    mean, term, at_most, below, expected = pairs / ranks, math.exp(-pairs / ranks), 0.0, 0.0, 0.0
    for load in range(pairs + 1):
        at_most = min(at_most + term, 1.0)
        expected += load * (at_most**ranks - below)
        below = at_most**ranks
        term *= mean / (load + 1)
    return expected


def _place_experts(inputs: Sequence[Value], attrs: Attrs, split_dim: int) -> Placement | None:
    """Placement of the stacked weights: whole, split inside each expert, or whole experts a rank."""
    placement = inputs[3].placement
    need_replicated(inputs, [1, 2])
    if placement not in (REPLICATED, shard(0), shard(split_dim)):
        raise Need(3)
    return placement


def _place_gate_up(inputs: Sequence[Value], attrs: Attrs) -> list[Placement]:
    placement = _place_experts(inputs, attrs, 1)
    need_replicated(inputs, [0])
    return [{shard(0): DISJOINT, shard(1): shard(2)}.get(placement, REPLICATED)] * 2  # type: ignore[arg-type]


def _place_down(inputs: Sequence[Value], attrs: Attrs) -> list[Placement]:
    placement, x = _place_experts(inputs, attrs, 2), inputs[0].placement
    wanted = {shard(0): DISJOINT, shard(2): shard(2)}.get(placement, REPLICATED)  # type: ignore[arg-type]
    if x != wanted:
        raise Need(0, wanted)
    return [{shard(0): DISJOINT, shard(2): PARTIAL}.get(placement, REPLICATED)]  # type: ignore[arg-type]


def _infer_gate_up(inputs: Sequence[Value], attrs: Attrs) -> list[Shaped]:
    x, ids, _, gate, *_ = inputs
    packed = 2 if attrs["format"] == "mxfp4" else 1
    expect(gate.shape[2] * packed == x.shape[1], f"experts_gate_up: x {x.shape}, weights {gate.shape}")
    return [((*ids.shape, gate.shape[1]), x.dtype)] * 2


def _expert(weights: Sequence[torch.Tensor], index: int, format: str) -> torch.Tensor:
    """One expert's matrix in fp32; ``weights`` is (packed, scale) or (plain,)."""
    if format == "mxfp4":
        return unpack_mxfp4(weights[0][index], weights[1][index])
    return weights[0][index].float()


def _each_expert(ids: torch.Tensor, rank: torch.Tensor, local: int, experts: int):
    """Local index, rows and pair columns of every expert in use here; absent experts are skipped."""
    base = int(rank) * local if local < experts else 0
    for expert in ids.unique().tolist():
        if base <= expert < base + local:
            rows, columns = (ids == expert).nonzero(as_tuple=True)
            yield expert - base, rows, columns


@op(infer=_infer_gate_up, place=_place_gate_up, count=_count_experts, outputs=2, aten=614)
def experts_gate_up(
    x: torch.Tensor, ids: torch.Tensor, rank: torch.Tensor, *weights: torch.Tensor,
    experts: int, format: str, activation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """W1 and W3 of each row's experts: x [T, D], ids [T, k], results gate and up [T, k, I].

    ``weights``: w1, w3 [E, I, D] or, for MXFP4, w1, w3 packed u8 [E, I, D/2] and their scales [E, I, D/32].
    ``activation`` "mxfp8" rounds the rows of x to MXFP8 first. Pairs of absent experts are zero.
    """
    w1, w3 = weights[0::2], weights[1::2]
    x = round_to_mxfp8(x) if activation == "mxfp8" else x.float()
    gate = torch.zeros(*ids.shape, w1[0].shape[1], device=x.device)
    up = torch.zeros_like(gate)
    for index, rows, columns in _each_expert(ids, rank, w1[0].shape[0], experts):
        gate[rows, columns] = x[rows] @ _expert(w1, index, format).T
        up[rows, columns] = x[rows] @ _expert(w3, index, format).T
    return gate, up


def _infer_down(inputs: Sequence[Value], attrs: Attrs) -> list[Shaped]:
    x, ids, _, down, *_ = inputs
    packed = 2 if attrs["format"] == "mxfp4" else 1
    expect(down.shape[2] * packed == x.shape[2], f"experts_down: x {x.shape}, weights {down.shape}")
    return [((*ids.shape, down.shape[1]), x.dtype)]


@op(infer=_infer_down, place=_place_down, count=_count_experts, aten=324)
def experts_down(
    x: torch.Tensor, ids: torch.Tensor, rank: torch.Tensor, *weights: torch.Tensor,
    experts: int, format: str, activation: str,
) -> torch.Tensor:
    """W2 of each pair: x [T, k, I], w2 [E, D, I] (MXFP4: packed and scale), result [T, k, D]."""
    x = round_to_mxfp8(x) if activation == "mxfp8" else x.float()
    y = torch.zeros(*ids.shape, weights[0].shape[1], device=x.device)
    for index, rows, columns in _each_expert(ids, rank, weights[0].shape[0], experts):
        y[rows, columns] = x[rows, columns] @ _expert(weights, index, format).T
    return y


def _infer_combine(inputs: Sequence[Value], attrs: Attrs) -> list[Shaped]:
    y = inputs[0]
    return [((y.shape[0], y.shape[2]), y.dtype)]


def _place_combine(inputs: Sequence[Value], attrs: Attrs) -> list[Placement]:
    need_replicated(inputs, [1])
    placement = inputs[0].placement
    if placement.kind == "shard":
        raise Need(0)
    return [REPLICATED if placement == REPLICATED else PARTIAL]


@op(infer=_infer_combine, place=_place_combine, aten=3)
def experts_combine(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``sum_j weights[t, j] y[t, j]``: y [T, k, D], weights fp32 [T, k], result [T, D]."""
    return torch.einsum("tkd,tk->td", y.float(), weights.float())
