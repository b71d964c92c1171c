"""Kimi delta attention: short convolution, decay gate, gated delta rule.

Rows of a step are ``[sequences, query]`` flattened. ``slots`` i32 [S] names each sequence's state, -1 for
none; ``positions`` i32 [T] is -1 on padding rows. States have one slot more than a caller may name: the last
is scratch, so that padding has a place to write without a branch on the host.

With ``query`` above 1 (a verify step) nothing that a draft row does is final. The step keeps a record of its
rows, and ``accepted`` i32 [S] of the NEXT step (1..query, at least the first row) says how many to fold in.
"""
from __future__ import annotations

import math
from typing import Sequence

from ..ir import REPLICATED, Placement, Value
from ._registry import Attrs, Shaped, Traffic, expect, op, split_along
from ._torch import torch


def _infer_conv(inputs: Sequence[Value], attrs: Attrs) -> list[Shaped]:
    q, k, v, state, weight = inputs[:5]
    query, taps = attrs["query"], weight.shape[1]
    expect(state.shape[1] == taps + query - 2, f"kda_conv: state {state.shape} for {taps} taps, {query} rows")
    expect(state.shape[2] == q.shape[1] + k.shape[1] + v.shape[1], "kda_conv: channels of the state")
    return [(x.shape, x.dtype) for x in (q, k, v)] + [(state.shape, state.dtype)]


def _count_conv(inputs: Sequence[Value], outputs: Sequence[Value], attrs: Attrs) -> Traffic:
    state = inputs[3]
    moved = sum(v.nbytes for i, v in enumerate(inputs) if i != 3) + sum(v.nbytes for v in outputs[:3])
    sequences = inputs[0].shape[0] // attrs["query"]
    touched = 2 * sequences * state.nbytes // state.shape[0]
    return Traffic(moved + touched, 8 * sum(math.prod(v.shape) for v in outputs[:3]))


@op(
    infer=_infer_conv, count=_count_conv, alias={3: 3},
    place=split_along((1, 1, 1, 2, 0, 0, 0), (1, 1, 1, 2)),
)
def kda_conv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: torch.Tensor,
    weight_q: torch.Tensor, weight_k: torch.Tensor, weight_v: torch.Tensor,
    slots: torch.Tensor, positions: torch.Tensor, accepted: torch.Tensor | None = None, *, query: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Causal depthwise convolution and SiLU. q, k, v [T, P]; weights fp32 [P, W], last tap is the current row.

    state [slots + 1, W + query - 2, 3P] holds raw inputs, oldest first: W - 2 rows of history and the rows
    of the previous step. The window of the first row ends at the last accepted one of them.
    """
    taps = weight_q.shape[1]
    weight = torch.cat([weight_q, weight_k, weight_v]).float()
    x = torch.cat([q, k, v], -1).unflatten(0, (-1, query))  # [S, L, 3P]
    slot = torch.where(slots < 0, state.shape[0] - 1, slots).long()
    old = state[slot]
    kept = torch.ones_like(slot) if accepted is None else accepted.long().clamp(1, query)
    window_rows = (kept - 1)[:, None] + torch.arange(taps - 1, device=x.device)
    window = old.gather(1, window_rows[:, :, None].expand(-1, -1, old.shape[2]))
    rows = torch.cat([window.float(), x.float()], 1)  # [S, W - 1 + L, 3P]
    y = sum(rows[:, t : t + query] * weight[:, t] for t in range(taps))
    y = (y * torch.sigmoid(y)).flatten(0, 1)
    y = torch.where((positions >= 0)[:, None], y, torch.zeros_like(y))
    state.index_copy_(0, slot, torch.cat([window[:, 1:], x.to(state.dtype)], 1))
    out_q, out_k, out_v = y.split([q.shape[1], k.shape[1], v.shape[1]], -1)
    return out_q, out_k, out_v, state


def _infer_gate(inputs: Sequence[Value], attrs: Attrs) -> list[Shaped]:
    raw, a_log, dt_bias = inputs
    expect(dt_bias.shape == raw.shape[1:] and raw.shape[1] % a_log.shape[0] == 0, "kda_gate: shapes")
    return [(raw.shape, "fp32")]


@op(infer=_infer_gate, place=split_along((1, 0, 0), (1,)))
def kda_gate(
    raw: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, *, lower_bound: float | None
) -> torch.Tensor:
    """Log decay fp32 [T, H*K] from the raw gate [T, H*K], a_log fp32 [H] and dt_bias fp32 [H*K].

    With a lower bound b (Kimi K3, -5): ``b sigmoid(exp(a_log) (raw + dt_bias))``.
    Without (Kimi-Linear): ``-exp(a_log) softplus(raw + dt_bias)``, softplus linear above 20.
    """
    x = (raw.float() + dt_bias.float()).unflatten(-1, (a_log.shape[0], -1))
    rate = torch.exp(a_log.float())[:, None]
    if lower_bound is not None:
        return (lower_bound * torch.sigmoid(rate * x)).flatten(-2)
    return (-rate * torch.nn.functional.softplus(x, threshold=20.0)).flatten(-2)


def _infer_delta(inputs: Sequence[Value], attrs: Attrs) -> list[Shaped]:
    q, v, log_decay, beta, state = inputs[0], inputs[2], inputs[3], inputs[4], inputs[5]
    heads = state.shape[1]
    expect(q.shape == log_decay.shape and beta.shape[1] == heads, "kda_delta_rule: shapes")
    expect(v.shape[1] == heads * state.shape[2] and q.shape[1] == heads * state.shape[3], "kda_delta_rule: heads")
    return [(v.shape, v.dtype)] + [(s.shape, s.dtype) for s in inputs[5 : 6 + (attrs["query"] > 1)]]


def _count_delta(inputs: Sequence[Value], outputs: Sequence[Value], attrs: Attrs) -> Traffic:
    states = outputs[1:]
    rows = sum(v.nbytes for v in inputs[:5]) + outputs[0].nbytes
    sequences = inputs[0].shape[0] // attrs["query"]
    touched = 2 * sequences * sum(s.nbytes // s.shape[0] for s in states)
    per_row = 8 * states[0].nbytes // states[0].shape[0] // 4
    return Traffic(rows + touched, per_row * inputs[0].shape[0])


def _place_delta(inputs: Sequence[Value], attrs: Attrs) -> list[Placement]:
    verify = attrs["query"] > 1
    in_dims = (1, 1, 1, 1, 1, 1, 3) if verify else (1, 1, 1, 1, 1, 1)
    placed = split_along(in_dims, (1, 1, 3) if verify else (1, 1))(inputs, attrs)
    return list(placed) or [REPLICATED]


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


@op(infer=_infer_delta, place=_place_delta, count=_count_delta, alias={1: 5, 2: 6})
def kda_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor,
    state: torch.Tensor, *rest: torch.Tensor, query: int,
) -> tuple[torch.Tensor, ...]:
    """Gated delta rule over each sequence's rows in order.

    q, k, log_decay [T, H*K], v [T, H*V], beta (before its sigmoid) [T, H], state [slots + 1, H, V, K];
    ``rest`` is ``slots, positions`` for one row and ``record, slots, positions, accepted`` for a verify step,
    record fp32 [slots + 1, query, 3, H, K] holding (e, k, log decay) of the previous step's rows (K = V).
    With q and k scaled to unit length (eps 1e-6) and q by K^-1/2, on each live row:
    ``S = S decay``; ``e = sigmoid(beta) (v - S k)``; ``S = S + e k^T``; ``o = S q``.
    Returns o [T, H*V] and the updated state (and record); padding rows give zeros and change nothing.
    """
    verify = query > 1
    record, (slots, positions) = (rest[0], rest[1:3]) if verify else (None, rest)
    heads, width = state.shape[1], state.shape[3]
    slot = torch.where(slots < 0, state.shape[0] - 1, slots).long()
    split = lambda x, n: x.float().unflatten(-1, (heads, n)).unflatten(0, (-1, query))  # noqa: E731
    q4, k4 = _unit(split(q, width)) * width**-0.5, _unit(split(k, width))
    v4, decay4 = split(v, state.shape[2]), split(log_decay, width)
    rate = torch.sigmoid(beta.float()).unflatten(0, (-1, query))[..., None]  # [S, L, H, 1]
    live = (positions >= 0).unflatten(0, (-1, query))[:, :, None, None]
    current = state[slot].float()  # [S, H, V, K]
    if verify:
        assert record is not None
        current = _fold(current, record[slot], rest[3].long().clamp(1, query))
        state.index_copy_(0, slot, current.to(state.dtype))
    rows, errors = [], []
    for t in range(query):
        decayed = current * torch.exp(decay4[:, t])[:, :, None, :]
        error = rate[:, t] * (v4[:, t] - torch.einsum("shvk,shk->shv", decayed, k4[:, t]))
        updated = decayed + error[..., None] * k4[:, t][:, :, None, :]
        out = torch.einsum("shvk,shk->shv", updated, q4[:, t])
        rows.append(torch.where(live[:, t], out, torch.zeros_like(out)))
        errors.append(error)
        current = torch.where(live[:, t, :, :, None], updated, current)
    result = torch.stack(rows, 1).flatten(0, 1).flatten(1)
    if not verify:
        state.index_copy_(0, slot, current.to(state.dtype))
        return result, state
    assert record is not None
    record.index_copy_(0, slot, torch.stack([torch.stack(errors, 1), k4, decay4], 2).to(record.dtype))
    return result, state, record


def _fold(state: torch.Tensor, record: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
    """State [S, H, V, K] after the first ``accepted`` [S] rows of ``record`` [S, L, 3, H, K]."""
    for t in range(record.shape[1]):
        error, key, log_decay = record[:, t].float().unbind(1)
        folded = state * torch.exp(log_decay)[:, :, None, :] + error[..., None] * key[:, :, None, :]
        state = torch.where((t < accepted)[:, None, None, None], folded, state)
    return state
