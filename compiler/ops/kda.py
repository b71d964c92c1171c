"""Kimi delta attention: short convolution, decay gate, gated delta rule.

Rows of a step are ``[sequences, query]`` flattened. ``slots`` i32 [S] names each sequence's state, -1 for
none; ``positions`` i32 [T] is -1 on padding rows. States have one slot more than a caller may name: the last
is scratch, so that padding has a place to write without a branch on the host.

With ``query`` above 1 (a verify step) nothing that a draft row does is final, and ``accepted`` i32 [S] of the NEXT
step (1..query, at least the first row) says how many rows are. There are two ways to roll back: ``kda_verify`` keeps a
record of the step's rows, of which the next step folds in the accepted ones; ``kda_verify_slots`` keeps the state
behind every row, of which the next step reads the accepted one's.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

from ..ir import Value
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
    infer=_infer_conv, count=_count_conv, alias={3: 3}, outputs=4,
    place=split_along((1, 1, 1, 2, 0, 0, 0), (1, 1, 1, 2)), aten=30,
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
    y = torch.stack([rows[:, t : t + query] * weight[:, t] for t in range(taps)]).sum(0)
    y = (y * torch.sigmoid(y)).flatten(0, 1)
    y = torch.where((positions >= 0)[:, None], y, torch.zeros_like(y))
    state.index_copy_(0, slot, torch.cat([window[:, 1:], x.to(state.dtype)], 1))
    out_q, out_k, out_v = y.split([q.shape[1], k.shape[1], v.shape[1]], -1)
    return out_q, out_k, out_v, state


def _infer_gate(inputs: Sequence[Value], attrs: Attrs) -> list[Shaped]:
    raw, a_log, dt_bias = inputs
    expect(dt_bias.shape == raw.shape[1:] and raw.shape[1] % a_log.shape[0] == 0, "kda_gate: shapes")
    return [(raw.shape, "fp32")]


@op(infer=_infer_gate, place=split_along((1, 0, 0), (1,)), aten=7)
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


def _check_delta(inputs: Sequence[Value]) -> None:
    q, v, log_decay, beta, state = inputs[0], inputs[2], inputs[3], inputs[4], inputs[5]
    heads, values, keys = state.shape[-3:]
    expect(q.shape == log_decay.shape and beta.shape[1] == heads, "delta rule: rows")
    expect(v.shape[1] == heads * values and q.shape[1] == heads * keys, "delta rule: heads")


def _infer_delta(inputs: Sequence[Value], attrs: Attrs) -> list[Shaped]:
    _check_delta(inputs)
    return [(inputs[2].shape, inputs[2].dtype), (inputs[5].shape, inputs[5].dtype)]


def _count_delta(inputs: Sequence[Value], outputs: Sequence[Value], attrs: Attrs) -> Traffic:
    states = outputs[1:]
    rows = sum(v.nbytes for v in inputs[:5]) + outputs[0].nbytes
    sequences = inputs[0].shape[0] // attrs.get("query", 1)
    touched = 2 * sequences * sum(s.nbytes // s.shape[0] for s in states)
    per_row = 8 * math.prod(states[0].shape[1:])
    return Traffic(rows + touched, per_row * inputs[0].shape[0])


@op(infer=_infer_delta, place=split_along((1,) * 6, (1, 1)), count=_count_delta, alias={1: 5},
    outputs=2, aten=37)
def kda_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor,
    state: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row of the gated delta rule a sequence; the state is updated in place.

    q, k, log_decay [S, H*K], v [S, H*V], beta (before its sigmoid) [S, H], state [slots + 1, H, V, K].
    With q and k scaled to unit length (eps 1e-6) and q by K^-1/2:
    ``S = S decay``; ``e = sigmoid(beta) (v - S k)``; ``S = S + e k^T``; ``o = S q``, o [S, H*V].
    Padding rows give zeros and change nothing.
    """
    slot = torch.where(slots < 0, state.shape[0] - 1, slots).long()
    current = state[slot].float()
    out, states, _ = _recur(q, k, v, log_decay, beta, current, positions, 1)
    state.index_copy_(0, slot, states[:, 0].to(state.dtype))
    return out, state


def _infer_verify(inputs: Sequence[Value], attrs: Attrs) -> list[Shaped]:
    _check_delta(inputs)
    expect(inputs[6].shape[1] == attrs["query"], "kda_verify: rows of the record")
    return [(inputs[2].shape, inputs[2].dtype)] + [(s.shape, s.dtype) for s in inputs[5:7]]


@op(infer=_infer_verify, place=split_along((1,) * 6 + (3,), (1, 1, 3)), count=_count_delta, alias={1: 5, 2: 6},
    outputs=3, aten=166)
def kda_verify(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor,
    state: torch.Tensor, record: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor,
    accepted: torch.Tensor, *, query: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``kda_delta_rule`` over ``query`` rows of each sequence in order, with a rollback.

    record fp32 [slots + 1, query, 3, H, K] holds (e, k, log decay) of the previous step's rows (K = V). The
    first ``accepted`` of them are folded into the state first; that is the only write to the state. The rows
    of this step then start from it and leave their own record.
    """
    slot = torch.where(slots < 0, state.shape[0] - 1, slots).long()
    current = _fold(state[slot].float(), record[slot], accepted.long().clamp(1, query))
    state.index_copy_(0, slot, current.to(state.dtype))
    out, _, rows = _recur(q, k, v, log_decay, beta, current, positions, query)
    record.index_copy_(0, slot, rows.to(record.dtype))
    return out, state, record


def _infer_slots(inputs: Sequence[Value], attrs: Attrs) -> list[Shaped]:
    expect(inputs[5].shape[1] == attrs["query"], "kda_verify_slots: states of a sequence")
    return _infer_delta(inputs, attrs)


def _count_slots(inputs: Sequence[Value], outputs: Sequence[Value], attrs: Attrs) -> Traffic:
    """One state of a sequence is read, one a row is written."""
    state, sequences = outputs[1], inputs[0].shape[0] // attrs["query"]
    rows = sum(v.nbytes for v in inputs[:5]) + outputs[0].nbytes
    touched = sequences * (1 + attrs["query"]) * (state.nbytes // math.prod(state.shape[:2]))
    return Traffic(rows + touched, 8 * math.prod(state.shape[2:]) * inputs[0].shape[0])


@op(infer=_infer_slots, place=split_along((1,) * 5 + (2,), (1, 2)), count=_count_slots, alias={1: 5}, outputs=2,
    aten=118)
def kda_verify_slots(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor,
    state: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, accepted: torch.Tensor, *, query: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``kda_delta_rule`` over ``query`` rows of each sequence in order, each row's state kept.

    state [slots + 1, query, H, V, K] holds the states behind the rows of the previous step. The rows start from
    number ``accepted`` of them and replace them all. Behind a padding row stands the state before it.
    """
    slot = torch.where(slots < 0, state.shape[0] - 1, slots).long()
    current = state[slot, accepted.long().clamp(1, query) - 1].float()
    out, states, _ = _recur(q, k, v, log_decay, beta, current, positions, query)
    state.index_copy_(0, slot, states.to(state.dtype))
    return out, state


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _recur(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor,
    current: torch.Tensor, positions: torch.Tensor, query: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output [T, H*V], states [S, L, H, V, K] behind each row, and the record [S, L, 3, H, K] of all rows."""
    heads, width = current.shape[1], current.shape[3]

    def split(x: torch.Tensor) -> torch.Tensor:
        return x.float().unflatten(-1, (heads, -1)).unflatten(0, (-1, query))  # [S, L, H, *]

    q4, k4, v4, decay = _unit(split(q)) * width**-0.5, _unit(split(k)), split(v), split(log_decay)
    rate = torch.sigmoid(split(beta))  # [S, L, H, 1]
    live = (positions >= 0).unflatten(0, (-1, query))[:, :, None, None]
    rows, errors, states = [], [], []
    for t in range(query):
        decayed = current * torch.exp(decay[:, t])[:, :, None, :]
        error = rate[:, t] * (v4[:, t] - torch.einsum("shvk,shk->shv", decayed, k4[:, t]))
        updated = decayed + error[..., None] * k4[:, t][:, :, None, :]
        out = torch.einsum("shvk,shk->shv", updated, q4[:, t])
        rows.append(torch.where(live[:, t], out, torch.zeros_like(out)))
        errors.append(error)
        current = torch.where(live[:, t, :, :, None], updated, current)
        states.append(current)
    result = torch.stack(rows, 1).flatten(0, 1).flatten(1)
    record = torch.stack([torch.stack(errors, 1), k4, decay], 2) if v4.shape == k4.shape else result
    return result, torch.stack(states, 1), record


def _fold(state: torch.Tensor, record: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
    """State [S, H, V, K] after the first ``accepted`` [S] rows of ``record`` [S, L, 3, H, K]."""
    for t in range(record.shape[1]):
        error, key, log_decay = record[:, t].float().unbind(1)
        folded = state * torch.exp(log_decay)[:, :, None, :] + error[..., None] * key[:, :, None, :]
        state = torch.where((t < accepted)[:, None, None, None], folded, state)
    return state
