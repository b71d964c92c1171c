"""A Kimi-delta-attention layer between its projections: gate projection, short convolution, decay gate, delta rule
and gated output norm, for one row a sequence or for the 2 to 8 rows of a verify step.

Contract: ``q``, ``k``, ``v``, ``gate`` [T, H*D], ``beta`` [T, H] and ``f_a`` [T, R] bf16 with any row stride; ``f_b``
bf16 [H*D, R]; convolution weights fp32 [H*D, 4]; ``window`` bf16 [slots + 1, L + 2, 3*H*D] and ``state`` fp32 or bf16
[slots + 1, H, D, D] updated in place; ``y`` bf16 [T, H*D]. For L > 1 also ``record`` fp32 [slots + 1, L, 3, H, D] and
``accepted``: the accepted rows of the record are folded into the state, which is then written; the new rows start
from it and leave only a record. Without a record ``state`` is [slots + 1, L, H, D, D]: the rows start from the state
behind the accepted one and leave one each. A sequence whose slot is -1 gives zeros and touches nothing; so does a row
whose position is -1 (its raw inputs do enter the window, as in the op). ``slots``, ``positions`` and ``accepted`` are
read on the device and must be there before the step's first launch.

Layout: grid (splits, heads, sequences). The rows of a head's state (its value channels) are independent, so ``splits``
blocks share a head; each keeps its [D / splits, D] of the state in registers and repeats the small work on q, k and
the decay. Only the norm needs the whole head: every block leaves its outputs in ``mixed``, and the last one to arrive
applies norm and gate. The last one also writes what all blocks of the head have read: the q and k channels of the
window, and k and decay of the record. It resets the counter. The gate projection runs on the matrix units, rows padded
to 16, with the weights as operands in registers before the wait.
In a verify step a block hands q, k, v and decay of its rows from the tiles where they are made to the vectors of the
recurrence through ``private``, which no other block reads; the recurrence itself has no barrier. ``mixed`` then has
four places a value: the output, e for the record, and two that keep the stores aligned.

Waits: state, window, record and all weights are read before the wait for the producers. That is legal because the
last kernel that wrote them belongs to the previous step, which is complete before this step's first kernel starts;
for the same reason a verify step writes the folded state before the wait. Everything else is written after it. The
trigger is the first instruction.
Numerics: fp32 throughout, one rounding at each store. The gate projection uses exact bf16 products. A decode row uses
``o = S (decay q) + e (k . q)`` with one sweep over the old state.
Bytes for H = 6, D = R = 128, one row: state 0.79 MB (read and written), f_b 0.20 MB, the rest 0.03 MB: floor on an
H200 (2.35 us + bytes / 4.44 TB/s) 2.6 us. Measured: 6.0 us at one row, 9.5 for 8 verify rows
(one H200, TP16, triton 3.6).
Portable: NVIDIA-only calls are behind DEPENDENT_LAUNCH.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..compiler.call import Call
from .activations import sigmoid
from .kda_decode_menu import QUERY, TAPS, private_rows
from .launching import INTERPRET, KernelLaunch, await_producers, launch_options, row_stride, start_dependents


@dataclass(frozen=True)
class Config:
    """``splits`` thread blocks a head. With 8 warps a vector of 128 is loaded where it is used, with 4 it is moved."""

    splits: int = 8
    warps: int = 8


@triton.jit
def _silu(x):
    return x * sigmoid(x)


@triton.jit
def _log_decay(x, rate, LOWER_BOUND: tl.constexpr):
    """x is the raw gate plus its bias. Softplus is linear above 20."""
    if LOWER_BOUND is None:
        return -rate * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    else:
        return LOWER_BOUND * sigmoid(rate * x)


@triton.jit
def _load_taps(weight, channel):
    """Four taps of each channel, oldest first: 16 bytes a thread, where loads of one tap are strided."""
    return tl.load(weight + channel[:, None] * 4 + tl.arange(0, 4)[None, :])


@triton.jit
def _taps(taps):
    even, odd = tl.split(tl.reshape(taps, (taps.shape[0], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _here(loaded, slot):
    """``loaded`` as it is, since the slot is not negative.

    Triton moves a tensor to the layout of its use right after it is loaded, with a barrier that the loads after it do
    not pass: each would wait for memory in turn. It does so after a select, which stands behind all loads.
    """
    return tl.where(slot >= 0, loaded, 0.0)


@triton.jit
def _add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _project(x, weight, WIDEN: tl.constexpr):
    """weight [D, R] times x [R, 16], transposed to [16, D]. Both stand in memory along R."""
    if WIDEN:
        return tl.dot(tl.trans(x.to(tl.float32)), tl.trans(weight.to(tl.float32)), input_precision="ieee")
    else:
        return tl.dot(tl.trans(x), tl.trans(weight))


@triton.jit
def _arrive(arrivals, head, SPLITS: tl.constexpr):
    """Whether this block is the last of its head. All reads and writes of the block come before its arrival."""
    tl.debug_barrier()
    last = True
    if SPLITS > 1:
        last = tl.atomic_add(arrivals + head, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    return last


@triton.jit
def _push_row(window, channel, x, CHANNELS: tl.constexpr):
    """The window of the next row, for channels that no other block reads any more."""
    at = window + channel
    middle = tl.load(at + CHANNELS)
    newest = tl.load(at + 2 * CHANNELS)
    # a channel is held by several threads: all must have read it
    tl.debug_barrier()
    tl.store(at, middle)
    tl.store(at + CHANNELS, newest)
    tl.store(at + 2 * CHANNELS, x)


@triton.jit
def _load_old(window, channel, CHANNELS: tl.constexpr):
    """The three inputs before this row, oldest first."""
    at = window + channel
    return tl.load(at), tl.load(at + CHANNELS), tl.load(at + 2 * CHANNELS)


@triton.jit
def _past(old, tap0, tap1, tap2):
    """What the rows before contribute to a convolution."""
    return old[0].to(tl.float32) * tap0 + old[1].to(tl.float32) * tap1 + old[2].to(tl.float32) * tap2


@triton.jit
def _decode(f_a, f_b, q, k, v, gate, beta, window, weight_q, weight_k, weight_v, a_log, dt_bias, norm, state, slots,
            positions, y, mixed, arrivals,
            HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr, SCALE: tl.constexpr,
            LOWER_BOUND: tl.constexpr, EPS: tl.constexpr, STRIDE_F_A: tl.constexpr, STRIDE_Q: tl.constexpr,
            STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr, STRIDE_GATE: tl.constexpr, STRIDE_BETA: tl.constexpr,
            STRIDE_Y: tl.constexpr, WIDEN: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    start_dependents(DEPENDENT_LAUNCH)
    V: tl.constexpr = D // SPLITS
    P: tl.constexpr = HEADS * D
    CHANNELS: tl.constexpr = 3 * P
    head = tl.program_id(1)
    row = tl.program_id(2)
    index = tl.arange(0, D)
    column = head * D + index
    value = head * D + tl.program_id(0) * V + tl.arange(0, V)
    low = tl.arange(0, R)
    row16 = tl.arange(0, 16)  # the matrix units want 16 rows
    slot = tl.load(slots + row).to(tl.int64)
    q_taps, k_taps, v_taps = _load_taps(weight_q, column), _load_taps(weight_k, column), _load_taps(weight_v, value)
    rate = tl.load(a_log + head)
    bias = tl.load(dt_bias + column)
    if slot < 0:
        await_producers(DEPENDENT_LAUNCH)
        tl.store(y + row * STRIDE_Y + value, tl.zeros((V,), tl.float32).to(y.dtype.element_ty))
    else:
        state_at = state + slot * (HEADS * D * D) + value[:, None] * D + index[None, :]
        window += slot * (3 * CHANNELS)
        q_old = _load_old(window, column, CHANNELS)
        k_old = _load_old(window, P + column, CHANNELS)
        v_old = _load_old(window, 2 * P + value, CHANNELS)
        old = tl.load(state_at)
        projection = tl.load(f_b + column[:, None] * R + low[None, :])
        old = _here(old.to(tl.float32), slot)
        q0, q1, q2, q3 = _taps(_here(q_taps, slot))
        k0, k1, k2, k3 = _taps(_here(k_taps, slot))
        v0, v1, v2, v3 = _taps(_here(v_taps, slot))
        q_past = _past(q_old, q0, q1, q2)
        k_past = _past(k_old, k0, k1, k2)
        v_past = _past(v_old, v0, v1, v2)
        rate = tl.exp(rate)
        await_producers(DEPENDENT_LAUNCH)

        x_q = tl.load(q + row * STRIDE_Q + column)
        x_k = tl.load(k + row * STRIDE_K + column)
        x_v = tl.load(v + row * STRIDE_V + value)
        strength = sigmoid(tl.load(beta + row * STRIDE_BETA + head).to(tl.float32))
        live = tl.load(positions + row) >= 0
        # last, because all loads above start before it is waited for
        x_low = tl.load(f_a + row * STRIDE_F_A + row16[None, :] * 0 + low[:, None], mask=(row16 < 1)[None, :],
                        other=0.0)

        query = _silu(q_past + x_q.to(tl.float32) * q3)
        key = _silu(k_past + x_k.to(tl.float32) * k3)
        target = _silu(v_past + x_v.to(tl.float32) * v3)
        # unit length comes as factors of sums, off the path from q and k to the state
        q_q, k_k, k_q = tl.reduce((query * query, key * key, key * query), 0, _add3)
        q_unit = tl.rsqrt(q_q + 1e-6) * SCALE
        k_unit = tl.rsqrt(k_k + 1e-6)
        raw = tl.sum(_project(x_low, projection, WIDEN), axis=0)  # of rows that are zero but the first
        decay = tl.exp(_log_decay(raw + bias, rate, LOWER_BOUND))
        decayed = old * decay[None, :]
        seen, kept = tl.reduce((decayed * key[None, :], decayed * query[None, :]), 1, _add2)
        error = strength * (target - k_unit * seen) * k_unit
        out = tl.where(live, q_unit * (kept + k_q * error), 0.0)

        if SPLITS > 1:
            tl.store(mixed + row * P + value, out)
        last = _arrive(arrivals, row * HEADS + head, SPLITS)
        # after the arrival, which would otherwise wait for these stores
        if live:
            tl.store(state_at, (decayed + error[:, None] * key[None, :]).to(state.dtype.element_ty))
        _push_row(window, 2 * P + value, x_v, CHANNELS)
        if last:
            x_gate = tl.load(gate + row * STRIDE_GATE + column).to(tl.float32)
            scale = tl.load(norm + index)
            if SPLITS > 1:
                whole = tl.load(mixed + row * P + column, cache_modifier=".cg")
                tl.store(arrivals + row * HEADS + head, 0)
            else:
                whole = out
            normed = whole * tl.rsqrt(tl.sum(whole * whole, axis=0) / D + EPS) * scale * sigmoid(x_gate)
            tl.store(y + row * STRIDE_Y + column, tl.where(live, normed, 0.0).to(y.dtype.element_ty))
            _push_row(window, column, x_q, CHANNELS)
            _push_row(window, P + column, x_k, CHANNELS)


@triton.jit
def _fold(state_at, record, kept, part, HEADS: tl.constexpr, D: tl.constexpr, L: tl.constexpr):
    """The state after the accepted rows of the record. Rows beyond them are not read."""
    current = tl.load(state_at).to(tl.float32)
    index = tl.arange(0, D)
    for t in tl.static_range(L):
        at = record + t * (3 * HEADS * D)
        real = tl.full((D,), t, tl.int32) < kept
        error = tl.load(at + part, mask=tl.full(part.shape, t, tl.int32) < kept, other=0.0)
        key = tl.load(at + HEADS * D + index, mask=real, other=0.0)
        decay = tl.exp(tl.load(at + 2 * HEADS * D + index, mask=real, other=0.0))
        current = current * decay[None, :] + error[:, None] * key[None, :]
        if part.shape[0] > 32 and t % 4 == 3:
            # the loads of eight rows at once do not fit the registers
            tl.debug_barrier()
    return current


@triton.jit
def _window_tap(window, channel, first, row, TAP: tl.constexpr, CHANNELS: tl.constexpr):
    """For each row of a tile, the input ``3 - TAP`` rows before it, where that lies in the window; else zero."""
    at = row + TAP
    return tl.load(window + (first + at)[:, None] * CHANNELS + channel[None, :], mask=(at < 3)[:, None], other=0.0)


@triton.jit
def _load_old_rows(window, channel, first, row, CHANNELS: tl.constexpr):
    return (_window_tap(window, channel, first, row, 0, CHANNELS),
            _window_tap(window, channel, first, row, 1, CHANNELS),
            _window_tap(window, channel, first, row, 2, CHANNELS))


@triton.jit
def _step_tap(x, channel, row, TAP: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr):
    """The same where it lies in this step."""
    at = row + (TAP - 3)
    return tl.load(x + at[:, None] * STRIDE + channel[None, :], mask=((at >= 0) & (row < L))[:, None], other=0.0)


@triton.jit
def _convolve(past, x, channel, row, live, tap0, tap1, tap2, tap3, L: tl.constexpr, STRIDE: tl.constexpr):
    """The whole convolution and its SiLU, zeros on padding rows, and the raw rows."""
    newest = _step_tap(x, channel, row, 3, L, STRIDE)
    total = (past + newest.to(tl.float32) * tap3[None, :]
             + _step_tap(x, channel, row, 2, L, STRIDE).to(tl.float32) * tap2[None, :]
             + _step_tap(x, channel, row, 1, L, STRIDE).to(tl.float32) * tap1[None, :]
             + _step_tap(x, channel, row, 0, L, STRIDE).to(tl.float32) * tap0[None, :])
    return tl.where(live[:, None], _silu(total), 0.0), newest


@triton.jit
def _push_rows(window, channel, kept, x, row, L: tl.constexpr, CHANNELS: tl.constexpr):
    """The window of the next step, two rows of history and this step's, for channels that no other block reads."""
    middle = tl.load(window + kept * CHANNELS + channel)
    newest = tl.load(window + (kept + 1) * CHANNELS + channel)
    tl.debug_barrier()
    tl.store(window + channel, middle)
    tl.store(window + CHANNELS + channel, newest)
    tl.store(window + (2 + row)[:, None] * CHANNELS + channel[None, :], x, mask=(row < L)[:, None])


@triton.jit
def _unit_rows(x):
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)[:, None]


@triton.jit
def _store_sums(at, out, error, index):
    """Stores out and error [V] side by side, four places a value, from the layout in which a tile [V, D] leaves its
    row sums. As vectors they would first move to another layout, with two barriers each."""
    both = tl.where((index == 0)[None, :], out[:, None], error[:, None])
    tl.store(at[:, None] + index[None, :], both, mask=(index < 2)[None, :])


@triton.jit
def _private_row(private, beta, index, part_index, t: tl.constexpr, L: tl.constexpr, D: tl.constexpr,
                 V: tl.constexpr, STRIDE_BETA: tl.constexpr):
    """q, k, decay [D], v [V] and beta of row t."""
    return (tl.load(private + t * D + index), tl.load(private + (L + t) * D + index),
            tl.load(private + (2 * L + t) * D + index), tl.load(private + 3 * L * D + t * V + part_index),
            tl.load(beta + t * STRIDE_BETA).to(tl.float32))


@triton.jit
def _verify(f_a, f_b, q, k, v, gate, beta, window, weight_q, weight_k, weight_v, a_log, dt_bias, norm, state, record,
            slots, positions, accepted, y, private, mixed, arrivals,
            HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr, SCALE: tl.constexpr,
            LOWER_BOUND: tl.constexpr, EPS: tl.constexpr, STRIDE_F_A: tl.constexpr, STRIDE_Q: tl.constexpr,
            STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr, STRIDE_GATE: tl.constexpr, STRIDE_BETA: tl.constexpr,
            STRIDE_Y: tl.constexpr, WIDEN: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
            L: tl.constexpr, ROWS: tl.constexpr, PRIVATE: tl.constexpr, STATE_A_ROW: tl.constexpr):
    start_dependents(DEPENDENT_LAUNCH)
    V: tl.constexpr = D // SPLITS
    P: tl.constexpr = HEADS * D
    CHANNELS: tl.constexpr = 3 * P
    split = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    first_row = sequence * L
    row = tl.arange(0, ROWS)
    row16 = tl.arange(0, 16)  # the matrix units want 16 rows
    inside = (row < L)[:, None]
    inside16 = (row16 < L)[:, None]
    index = tl.arange(0, D)
    column = head * D + index
    part_index = tl.arange(0, V)
    part = split * V + part_index
    value = head * D + part
    low = tl.arange(0, R)
    slot = tl.load(slots + sequence).to(tl.int64)
    q_taps, k_taps, v_taps = _load_taps(weight_q, column), _load_taps(weight_k, column), _load_taps(weight_v, value)
    rate = tl.load(a_log + head)
    bias = tl.load(dt_bias + column)
    y += first_row * STRIDE_Y
    if slot < 0:
        await_producers(DEPENDENT_LAUNCH)
        zeros = tl.zeros((ROWS, V), tl.float32).to(y.dtype.element_ty)
        tl.store(y + row[:, None] * STRIDE_Y + value[None, :], zeros, mask=inside)
    else:
        kept = tl.minimum(tl.maximum(tl.load(accepted + sequence), 1), L)
        window += slot * ((L + 2) * CHANNELS)
        q_old = _load_old_rows(window, column, kept - 1, row, CHANNELS)
        k_old = _load_old_rows(window, P + column, kept - 1, row, CHANNELS)
        v_old = _load_old_rows(window, 2 * P + value, kept - 1, row, CHANNELS)
        state_at = state + slot * ((L if STATE_A_ROW else 1) * P * D) + value[:, None] * D + index[None, :]
        if STATE_A_ROW:
            current = tl.load(state_at + (kept - 1) * (P * D)).to(tl.float32)
        else:
            record += slot * (L * 3 * P) + head * D
            current = _fold(state_at, record, kept, part, HEADS, D, L)
        projection = tl.load(f_b + column[:, None] * R + low[None, :])
        q0, q1, q2, q3 = _taps(_here(q_taps, slot))
        k0, k1, k2, k3 = _taps(_here(k_taps, slot))
        v0, v1, v2, v3 = _taps(_here(v_taps, slot))
        q_past = _past(q_old, q0[None, :], q1[None, :], q2[None, :])
        k_past = _past(k_old, k0[None, :], k1[None, :], k2[None, :])
        v_past = _past(v_old, v0[None, :], v1[None, :], v2[None, :])
        rate = tl.exp(rate)
        # a small tile is held by several threads: all must have read it
        tl.debug_barrier()
        if not STATE_A_ROW:
            tl.store(state_at, current.to(state.dtype.element_ty))
        await_producers(DEPENDENT_LAUNCH)

        live = tl.load(positions + first_row + row, mask=row < L, other=-1) >= 0
        live16 = tl.load(positions + first_row + row16, mask=row16 < L, other=-1) >= 0
        queries, x_q = _convolve(q_past, q + first_row * STRIDE_Q, column, row, live, q0, q1, q2, q3, L, STRIDE_Q)
        keys, x_k = _convolve(k_past, k + first_row * STRIDE_K, column, row, live, k0, k1, k2, k3, L, STRIDE_K)
        targets, x_v = _convolve(v_past, v + first_row * STRIDE_V, value, row, live, v0, v1, v2, v3, L, STRIDE_V)
        x_low = tl.load(f_a + (first_row + row16)[None, :] * STRIDE_F_A + low[:, None], mask=(row16 < L)[None, :],
                        other=0.0)
        keys = _unit_rows(keys)
        log_decay = _log_decay(_project(x_low, projection, WIDEN) + bias[None, :], rate, LOWER_BOUND)

        private += ((sequence * HEADS + head) * SPLITS + split) * PRIVATE
        at = private + row[:, None] * D + index[None, :]
        tl.store(at, _unit_rows(queries) * SCALE, mask=inside)
        tl.store(at + L * D, keys, mask=inside)
        tl.store(private + 2 * L * D + row16[:, None] * D + index[None, :],
                 tl.where(live16[:, None], tl.exp(log_decay), 1.0), mask=inside16)
        tl.store(private + 3 * L * D + row[:, None] * V + part_index[None, :], targets, mask=inside)
        tl.debug_barrier()

        beta += first_row * STRIDE_BETA + head
        query, key, decay, target, strength = _private_row(private, beta, index, part_index, 0, L, D, V, STRIDE_BETA)
        for t in tl.static_range(L):
            # one row ahead, so that the loads' latency hides behind the sums
            q_next, k_next, d_next, v_next, b_next = _private_row(
                private, beta, index, part_index, t + 1 if t + 1 < L else t, L, D, V, STRIDE_BETA)
            current = current * decay[None, :]
            error = sigmoid(strength) * (target - tl.sum(current * key[None, :], axis=1))
            current += error[:, None] * key[None, :]
            out = tl.sum(current * query[None, :], axis=1)
            _store_sums(mixed + ((first_row + t) * P + value) * 4, out, error, index)
            if STATE_A_ROW:
                tl.store(state_at + t * (P * D), current.to(state.dtype.element_ty))
            query, key, decay, target, strength = q_next, k_next, d_next, v_next, b_next

        last = _arrive(arrivals, sequence * HEADS + head, SPLITS)
        if not STATE_A_ROW:
            errors = tl.load(mixed + ((first_row + row)[:, None] * P + value[None, :]) * 4 + 1, mask=inside, other=0.0)
            tl.store(record + row[:, None] * (3 * P) + part[None, :], errors, mask=inside)
        _push_rows(window, 2 * P + value, kept, x_v, row, L, CHANNELS)
        if last:
            x_gate = tl.load(gate + (first_row + row)[:, None] * STRIDE_GATE + column[None, :], mask=inside, other=0.0)
            scale = tl.load(norm + index)
            whole = tl.load(mixed + ((first_row + row)[:, None] * P + column[None, :]) * 4, mask=inside, other=0.0,
                            cache_modifier=".cg")
            if SPLITS > 1:
                tl.store(arrivals + sequence * HEADS + head, 0)
            normed = whole * tl.rsqrt(tl.sum(whole * whole, axis=1) / D + EPS)[:, None] * scale[None, :]
            normed = tl.where(live[:, None], normed * sigmoid(x_gate.to(tl.float32)), 0.0)
            tl.store(y + row[:, None] * STRIDE_Y + column[None, :], normed.to(y.dtype.element_ty), mask=inside)
            _push_rows(window, column, kept, x_q, row, L, CHANNELS)
            _push_rows(window, P + column, kept, x_k, row, L, CHANNELS)
            if not STATE_A_ROW:
                tl.store(record + P + row[:, None] * (3 * P) + index[None, :], keys, mask=inside)
                tl.store(record + 2 * P + row16[:, None] * (3 * P) + index[None, :], log_decay, mask=inside16)


INPUTS = ("f_a", "f_b", "q", "k", "v", "gate", "beta", "window", "weight_q", "weight_k", "weight_v", "a_log",
          "dt_bias", "norm", "state", "slots", "positions", "y")
ROW_INPUTS = ("f_a", "q", "k", "v", "gate", "beta", "y")


def bind(call: Call) -> KernelLaunch:
    """The launch for ``call``; pattern names as in ``kda_decode_menu.py``."""
    config = Config(**call.config)
    query = call.attrs["q_act"]["query"]
    names = INPUTS if query == 1 else (*INPUTS, "accepted")
    tensors = {name: call.tensors[name] for name in names}
    if query > 1:
        tensors["record"] = call.tensors.get("record", tensors["state"])
    constants = _constants(call, config, query)
    _check(tensors, constants, query)
    scratch = ("mixed", "arrivals") if query == 1 else ("private", "mixed", "arrivals")
    tensors |= {name: call.scratch.get(name, tensors["y"]) for name in scratch}
    if query > 1:
        constants |= {"L": query, "ROWS": 1 << (query - 1).bit_length(),
                      "PRIVATE": private_rows(query, constants["D"], config.splits),
                      "STATE_A_ROW": "record" not in call.tensors}
    grid = (config.splits, constants["HEADS"], tensors["slots"].shape[0])
    return KernelLaunch(_decode if query == 1 else _verify, grid, tensors, constants, config.warps, 1,
                        launch_options(call.dependent_launch))


def _stride(rows: torch.Tensor) -> int:
    """0 for a single row, so that loads need not allow for the alignment of others."""
    return row_stride(rows) if rows.shape[0] > 1 else 0


def _constants(call: Call, config: Config, query: int) -> dict[str, Any]:
    heads, width, _ = call.tensors["state"].shape[-3:]
    assert width % config.splits == 0, f"{config.splits} splits of {width} values"
    assert config.splits == 1 or call.scratch, "a split needs its scratch"
    return {
        "HEADS": heads, "D": width, "R": call.tensors["f_b"].shape[1], "SPLITS": config.splits,
        "SCALE": width**-0.5, "LOWER_BOUND": call.attrs["decay"]["lower_bound"], "EPS": call.attrs["y"]["eps"],
        **{f"STRIDE_{name.upper()}": _stride(call.tensors[name]) for name in ROW_INPUTS},
        "WIDEN": INTERPRET, "DEPENDENT_LAUNCH": call.dependent_launch,
    }


def _check(tensors: dict[str, torch.Tensor], constants: dict[str, Any], query: int) -> None:
    heads, width = constants["HEADS"], constants["D"]
    sequences = tensors["slots"].shape[0]
    assert 1 <= query <= QUERY, f"{query} rows a sequence"
    assert tensors["q"].shape == (sequences * query, heads * width), f"q {tensors['q'].shape}, {sequences} sequences"
    assert tensors["window"].shape[1:] == (TAPS + query - 2, 3 * heads * width), f"window {tensors['window'].shape}"
    assert tensors["f_b"].shape[0] == heads * width, f"f_b {tensors['f_b'].shape}"
    if query > 1:
        kept = (query, heads, width, width) if tensors["record"] is tensors["state"] else (query, 3, heads, width)
        assert tensors["record"].shape[1:] == kept, f"record or states {tensors['record'].shape}"
    for name, tensor in tensors.items():
        assert name in ROW_INPUTS or tensor.is_contiguous(), f"{name} is strided: {tensor.shape} {tensor.stride()}"
