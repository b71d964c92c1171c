"""The ops of Kimi delta attention one a launch: short convolution, decay gate, delta rule of one row or of several.

Contract: as the ops say. ``q``, ``k``, ``v``, ``raw``, ``beta`` and ``log_decay`` are bf16 or fp32 rows with any row
stride; ``window`` [slots + 1, L + 2, 3P], ``state`` [slots + 1, H, V, K] and ``record`` fp32 [slots + 1, L, 3, H, K],
or ``state`` [slots + 1, L, H, V, K] alone, are contiguous and updated in place. Outputs are written for every row:
zeros where the position is -1 and where the sequence has no slot. A sequence without a slot leaves window, state and
record alone; a padding row of one with a slot enters window and record, as in the op, and never the state.

Layout: convolution (channels, one of q, k and v, sequence), a thread keeps its channel's taps and the sliding window in
registers; delta rule (splits, head, sequence): the rows of a head's state are independent, so ``splits`` blocks share
a head, each holding its [V / splits, K] in registers, read once and written once. In a verify step all blocks of a head
read keys and decays of the old record and only their own errors; so errors are written where they are made, and the
last block of a head to arrive writes keys and decays and resets the counter.

Waits: weights, window, state and record are loaded before the wait for the producers, because the kernel that wrote
them last belongs to the step before; everything is written after it. The trigger is the first instruction.
Numerics: fp32, one rounding at each store. ``o = S (decay q) + e (k . q)`` takes one sweep over the old state.
Bytes for H = 6, V = K = 128, one row: state 0.79 MB, read and written: floor on an H200 (2.35 us + bytes / 4.44 TB/s)
2.5 us. Measured: delta rule 2.4 us at one row, convolution 1.6, gate
1.3 (one H200, TP16, triton 3.6).
Portable: NVIDIA-only calls are behind DEPENDENT_LAUNCH.
"""
# ruff: noqa: SIM108 - a constexpr condition must stand alone
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from ..compiler.call import Call
from .activations import sigmoid
from .kda_parts_menu import QUERY, TAPS
from .launching import KernelLaunch, await_producers, launch_options, row_stride, start_dependents
from .pointwise import Config as GateConfig


@dataclass(frozen=True)
class ConvConfig:
    """``channels`` of one of q, k and v a thread block."""

    channels: int = 128
    warps: int = 4


@dataclass(frozen=True)
class RuleConfig:
    """``splits`` thread blocks a head."""

    splits: int = 8
    warps: int = 4


@triton.jit
def _convolve(x, weight, y, window, channel, real, slot, kept, first_row, positions, L: tl.constexpr,
              CHANNELS: tl.constexpr, START: tl.constexpr, STRIDE_X: tl.constexpr, STRIDE_Y: tl.constexpr,
              DEPENDENT_LAUNCH: tl.constexpr):
    """All rows of one sequence for some channels of one of q, k and v, whose channels begin at START of the window."""
    x += first_row * STRIDE_X + channel
    y += first_row * STRIDE_Y + channel
    if slot < 0:
        await_producers(DEPENDENT_LAUNCH)
        for t in tl.static_range(L):
            tl.store(y + t * STRIDE_Y, tl.zeros(channel.shape, tl.float32).to(y.dtype.element_ty), mask=real)
    else:
        tap0 = tl.load(weight + channel * 4, mask=real, other=0.0).to(tl.float32)
        tap1 = tl.load(weight + channel * 4 + 1, mask=real, other=0.0).to(tl.float32)
        tap2 = tl.load(weight + channel * 4 + 2, mask=real, other=0.0).to(tl.float32)
        tap3 = tl.load(weight + channel * 4 + 3, mask=real, other=0.0).to(tl.float32)
        at = window + slot * ((L + 2) * CHANNELS) + START + channel
        old = at + (kept - 1) * CHANNELS
        x0 = tl.load(old, mask=real, other=0.0).to(tl.float32)
        x1 = tl.load(old + CHANNELS, mask=real, other=0.0).to(tl.float32)
        x2 = tl.load(old + 2 * CHANNELS, mask=real, other=0.0).to(tl.float32)
        await_producers(DEPENDENT_LAUNCH)
        # a channel may be held by several threads: all must have read the window
        tl.debug_barrier()
        tl.store(at, x1.to(window.dtype.element_ty), mask=real)
        tl.store(at + CHANNELS, x2.to(window.dtype.element_ty), mask=real)
        for t in tl.static_range(L):
            newest = tl.load(x + t * STRIDE_X, mask=real, other=0.0).to(tl.float32)
            total = x0 * tap0 + x1 * tap1 + x2 * tap2 + newest * tap3
            out = tl.where(tl.load(positions + first_row + t) >= 0, total * sigmoid(total), 0.0)
            tl.store(y + t * STRIDE_Y, out.to(y.dtype.element_ty), mask=real)
            tl.store(at + (2 + t) * CHANNELS, newest.to(window.dtype.element_ty), mask=real)
            x0, x1, x2 = x1, x2, newest


@triton.jit
def _conv(q, k, v, window, weight_q, weight_k, weight_v, slots, positions, accepted, q_act, k_act, v_act,
          P_Q: tl.constexpr, P_K: tl.constexpr, P_V: tl.constexpr, L: tl.constexpr, C: tl.constexpr,
          STRIDE_Q: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr, STRIDE_Q_ACT: tl.constexpr,
          STRIDE_K_ACT: tl.constexpr, STRIDE_V_ACT: tl.constexpr, ACCEPTED: tl.constexpr,
          DEPENDENT_LAUNCH: tl.constexpr):
    start_dependents(DEPENDENT_LAUNCH)
    CHANNELS: tl.constexpr = P_Q + P_K + P_V
    channel = tl.program_id(0) * C + tl.arange(0, C)
    part = tl.program_id(1)
    sequence = tl.program_id(2)
    slot = tl.load(slots + sequence).to(tl.int64)
    if ACCEPTED:
        kept = tl.minimum(tl.maximum(tl.load(accepted + sequence), 1), L)
    else:
        kept = 1
    first = sequence * L
    if part == 0:
        _convolve(q, weight_q, q_act, window, channel, channel < P_Q, slot, kept, first, positions, L, CHANNELS, 0,
                  STRIDE_Q, STRIDE_Q_ACT, DEPENDENT_LAUNCH)
    elif part == 1:
        _convolve(k, weight_k, k_act, window, channel, channel < P_K, slot, kept, first, positions, L, CHANNELS, P_Q,
                  STRIDE_K, STRIDE_K_ACT, DEPENDENT_LAUNCH)
    else:
        _convolve(v, weight_v, v_act, window, channel, channel < P_V, slot, kept, first, positions, L, CHANNELS,
                  P_Q + P_K, STRIDE_V, STRIDE_V_ACT, DEPENDENT_LAUNCH)


@triton.jit
def _log1p(x):
    """x at least 0."""
    return tl.where(x < 1e-3, x - 0.5 * x * x, tl.log(1.0 + x))


@triton.jit
def _gate(raw, a_log, dt_bias, decay, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
          STRIDE_RAW: tl.constexpr, STRIDE_DECAY: tl.constexpr, LOWER_BOUND: tl.constexpr, R: tl.constexpr,
          C: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    start_dependents(DEPENDENT_LAUNCH)
    row = (tl.program_id(1) * R + tl.arange(0, R))[:, None]
    index = tl.program_id(0) * C + tl.arange(0, C)
    column = index[None, :]
    real = (row < ROWS) & (column < COLUMNS)
    rate = tl.exp(tl.load(a_log + index // WIDTH, mask=index < COLUMNS, other=0.0).to(tl.float32))[None, :]
    bias = tl.load(dt_bias + index, mask=index < COLUMNS, other=0.0).to(tl.float32)[None, :]
    await_producers(DEPENDENT_LAUNCH)
    x = tl.load(raw + row * STRIDE_RAW + column, mask=real, other=0.0).to(tl.float32) + bias
    if LOWER_BOUND is None:
        y = -rate * tl.where(x > 20.0, x, _log1p(tl.exp(tl.minimum(x, 20.0))))
    else:
        y = LOWER_BOUND * sigmoid(rate * x)
    tl.store(decay + row * STRIDE_DECAY + column, y.to(decay.dtype.element_ty), mask=real)


@triton.jit
def _row(current, q, k, v, log_decay, beta, SCALE: tl.constexpr):
    """One row over the state [V, K]: output and error [V], and the new state."""
    q_unit = tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * SCALE
    k_unit = tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
    k_q = tl.sum(k * q, axis=0)
    decayed = current * tl.exp(log_decay)[None, :]
    seen = tl.sum(decayed * k[None, :], axis=1)
    kept = tl.sum(decayed * q[None, :], axis=1)
    error = sigmoid(beta) * (v - k_unit * seen)
    out = q_unit * (kept + k_q * k_unit * error)
    return out, error, decayed + error[:, None] * (k * k_unit)[None, :]


@triton.jit
def _delta_rule(q, k, v, log_decay, beta, state, slots, positions, o, HEADS: tl.constexpr, V: tl.constexpr,
                K: tl.constexpr, SPLITS: tl.constexpr, SCALE: tl.constexpr, STRIDE_Q: tl.constexpr,
                STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr, STRIDE_DECAY: tl.constexpr, STRIDE_BETA: tl.constexpr,
                STRIDE_O: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    start_dependents(DEPENDENT_LAUNCH)
    head = tl.program_id(1)
    row = tl.program_id(2)
    part = tl.program_id(0) * (V // SPLITS) + tl.arange(0, V // SPLITS)
    index = tl.arange(0, K)
    column = head * K + index
    value = head * V + part
    slot = tl.load(slots + row).to(tl.int64)
    live = tl.load(positions + row) >= 0
    if (slot >= 0) & live:
        at = state + slot * (HEADS * V * K) + value[:, None] * K + index[None, :]
        current = tl.load(at).to(tl.float32)
        await_producers(DEPENDENT_LAUNCH)
        x_q = tl.load(q + row * STRIDE_Q + column).to(tl.float32)
        x_k = tl.load(k + row * STRIDE_K + column).to(tl.float32)
        x_v = tl.load(v + row * STRIDE_V + value).to(tl.float32)
        x_decay = tl.load(log_decay + row * STRIDE_DECAY + column).to(tl.float32)
        strength = tl.load(beta + row * STRIDE_BETA + head).to(tl.float32)
        out, _, current = _row(current, x_q, x_k, x_v, x_decay, strength, SCALE)
        tl.store(o + row * STRIDE_O + value, out.to(o.dtype.element_ty))
        tl.store(at, current.to(state.dtype.element_ty))
    else:
        await_producers(DEPENDENT_LAUNCH)
        tl.store(o + row * STRIDE_O + value, tl.zeros((V // SPLITS,), tl.float32).to(o.dtype.element_ty))


@triton.jit
def _fold(current, record, kept, part, HEADS: tl.constexpr, K: tl.constexpr, L: tl.constexpr):
    """The state after the first ``kept`` rows of the record; the others are not read."""
    index = tl.arange(0, K)
    for t in range(L):
        if t < kept:
            at = record + t * (3 * HEADS * K)
            error = tl.load(at + part).to(tl.float32)
            key = tl.load(at + HEADS * K + index).to(tl.float32)
            decay = tl.exp(tl.load(at + 2 * HEADS * K + index).to(tl.float32))
            current = current * decay[None, :] + error[:, None] * key[None, :]
    return current


@triton.jit
def _write_keys(record, k, log_decay, head, first_row, HEADS: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
                STRIDE_K: tl.constexpr, STRIDE_DECAY: tl.constexpr):
    """Keys of unit length and log decays of this step's rows, for a head whose old ones nobody needs any more."""
    index = tl.arange(0, K)
    column = head * K + index
    for t in range(L):
        key = tl.load(k + (first_row + t) * STRIDE_K + column).to(tl.float32)
        decay = tl.load(log_decay + (first_row + t) * STRIDE_DECAY + column).to(tl.float32)
        at = record + t * (3 * HEADS * K) + index
        tl.store(at + HEADS * K, key * tl.rsqrt(tl.sum(key * key, axis=0) + 1e-6))
        tl.store(at + 2 * HEADS * K, decay)


@triton.jit
def _verify(q, k, v, log_decay, beta, state, slots, positions, o, record, accepted, arrivals, HEADS: tl.constexpr,
            V: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, SCALE: tl.constexpr, STRIDE_Q: tl.constexpr,
            STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr, STRIDE_DECAY: tl.constexpr, STRIDE_BETA: tl.constexpr,
            STRIDE_O: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr, L: tl.constexpr):
    start_dependents(DEPENDENT_LAUNCH)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    part = tl.program_id(0) * (V // SPLITS) + tl.arange(0, V // SPLITS)
    index = tl.arange(0, K)
    column = head * K + index
    value = head * V + part
    first_row = sequence * L
    slot = tl.load(slots + sequence).to(tl.int64)
    if slot >= 0:
        kept = tl.minimum(tl.maximum(tl.load(accepted + sequence), 1), L)
        at = state + slot * (HEADS * V * K) + value[:, None] * K + index[None, :]
        record += slot * (L * 3 * HEADS * K) + head * K
        current = _fold(tl.load(at).to(tl.float32), record, kept, part, HEADS, K, L)
        await_producers(DEPENDENT_LAUNCH)
        # a small tile is held by several threads: all must have read it and the record
        tl.debug_barrier()
        tl.store(at, current.to(state.dtype.element_ty))
        for t in range(L):
            row = first_row + t
            x_q = tl.load(q + row * STRIDE_Q + column).to(tl.float32)
            x_k = tl.load(k + row * STRIDE_K + column).to(tl.float32)
            x_v = tl.load(v + row * STRIDE_V + value).to(tl.float32)
            x_decay = tl.load(log_decay + row * STRIDE_DECAY + column).to(tl.float32)
            strength = tl.load(beta + row * STRIDE_BETA + head).to(tl.float32)
            live = tl.load(positions + row) >= 0
            out, error, updated = _row(current, x_q, x_k, x_v, x_decay, strength, SCALE)
            tl.store(o + row * STRIDE_O + value, tl.where(live, out, 0.0).to(o.dtype.element_ty))
            tl.store(record + t * (3 * HEADS * K) + part, error)
            current = tl.where(live, updated, current)
        last = True
        if SPLITS > 1:
            tl.debug_barrier()
            last = tl.atomic_add(arrivals + sequence * HEADS + head, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        if last:
            _write_keys(record, k, log_decay, head, first_row, HEADS, K, L, STRIDE_K, STRIDE_DECAY)
            if SPLITS > 1:
                tl.store(arrivals + sequence * HEADS + head, 0)
    else:
        await_producers(DEPENDENT_LAUNCH)
        for t in range(L):
            tl.store(o + (first_row + t) * STRIDE_O + value,
                     tl.zeros((V // SPLITS,), tl.float32).to(o.dtype.element_ty))


@triton.jit
def _verify_slots(q, k, v, log_decay, beta, state, slots, positions, o, accepted, HEADS: tl.constexpr,
                  V: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, SCALE: tl.constexpr, STRIDE_Q: tl.constexpr,
                  STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr, STRIDE_DECAY: tl.constexpr,
                  STRIDE_BETA: tl.constexpr, STRIDE_O: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr, L: tl.constexpr):
    """From the accepted row's state, and every row's state is written."""
    start_dependents(DEPENDENT_LAUNCH)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    part = tl.program_id(0) * (V // SPLITS) + tl.arange(0, V // SPLITS)
    index = tl.arange(0, K)
    column = head * K + index
    value = head * V + part
    first_row = sequence * L
    slot = tl.load(slots + sequence).to(tl.int64)
    if slot >= 0:
        kept = tl.minimum(tl.maximum(tl.load(accepted + sequence), 1), L)
        at = state + slot * (L * HEADS * V * K) + value[:, None] * K + index[None, :]
        current = tl.load(at + (kept - 1) * (HEADS * V * K)).to(tl.float32)
        await_producers(DEPENDENT_LAUNCH)
        # a small tile is held by several threads: all must have read it
        tl.debug_barrier()
        for t in range(L):
            row = first_row + t
            x_q = tl.load(q + row * STRIDE_Q + column).to(tl.float32)
            x_k = tl.load(k + row * STRIDE_K + column).to(tl.float32)
            x_v = tl.load(v + row * STRIDE_V + value).to(tl.float32)
            x_decay = tl.load(log_decay + row * STRIDE_DECAY + column).to(tl.float32)
            strength = tl.load(beta + row * STRIDE_BETA + head).to(tl.float32)
            live = tl.load(positions + row) >= 0
            out, _, updated = _row(current, x_q, x_k, x_v, x_decay, strength, SCALE)
            tl.store(o + row * STRIDE_O + value, tl.where(live, out, 0.0).to(o.dtype.element_ty))
            current = tl.where(live, updated, current)
            tl.store(at + t * (HEADS * V * K), current.to(state.dtype.element_ty))
    else:
        await_producers(DEPENDENT_LAUNCH)
        for t in range(L):
            tl.store(o + (first_row + t) * STRIDE_O + value,
                     tl.zeros((V // SPLITS,), tl.float32).to(o.dtype.element_ty))


def bind_conv(call: Call) -> KernelLaunch:
    """The launch of ``kda_conv``, with or without ``accepted``."""
    config = ConvConfig(**call.config)
    query = call.attrs["q_act"]["query"]
    sequences = call.tensors["slots"].shape[0]
    names = ("q", "k", "v", "window", "weight_q", "weight_k", "weight_v", "slots", "positions", "q_act", "k_act",
             "v_act")
    tensors = {name: call.tensors[name] for name in names}
    widths = [tensors[name].shape[1] for name in "qkv"]
    window = tensors["window"]
    assert 1 <= query <= QUERY, f"{query} rows a sequence"
    assert tensors["q"].shape[0] == sequences * query, f"{tensors['q'].shape[0]} rows of {sequences} sequences"
    assert window.shape[1:] == (TAPS + query - 2, sum(widths)), f"window {window.shape}"
    assert all(tensors[f"weight_{n}"].shape[1] == TAPS for n in "qkv"), "taps"
    for name in names[3:9]:
        assert tensors[name].is_contiguous(), f"{name} is strided: {tensors[name].stride()}"
    accepted = call.get("accepted")
    constants = {
        "P_Q": widths[0], "P_K": widths[1], "P_V": widths[2], "L": query, "C": config.channels,
        **{f"STRIDE_{name.upper()}": row_stride(tensors[name]) for name in ("q", "k", "v", "q_act", "k_act", "v_act")},
        "ACCEPTED": accepted is not None, "DEPENDENT_LAUNCH": call.dependent_launch,
    }
    tensors["accepted"] = tensors["slots"] if accepted is None else accepted
    grid = (-(-max(widths) // config.channels), 3, sequences)
    return KernelLaunch(_conv, grid, tensors, constants, config.warps, 1, launch_options(call.dependent_launch))


def bind_gate(call: Call) -> KernelLaunch:
    """The launch of ``kda_gate``."""
    config = GateConfig(**call.config)
    tensors = {name: call.tensors[name] for name in ("raw", "a_log", "dt_bias", "decay")}
    rows, columns = tensors["raw"].shape
    heads = tensors["a_log"].numel()
    assert tensors["dt_bias"].shape == (columns,), f"dt_bias {tensors['dt_bias'].shape}"
    assert columns % heads == 0, f"{columns} channels of {heads} heads"
    assert tensors["a_log"].is_contiguous(), f"a_log is strided: {tensors['a_log'].stride()}"
    constants = {
        "ROWS": rows, "COLUMNS": columns, "WIDTH": columns // heads, "STRIDE_RAW": row_stride(tensors["raw"]),
        "STRIDE_DECAY": row_stride(tensors["decay"]), "LOWER_BOUND": call.attrs["decay"]["lower_bound"],
        "R": config.rows, "C": config.columns, "DEPENDENT_LAUNCH": call.dependent_launch,
    }
    grid = (-(-columns // config.columns), -(-rows // config.rows))
    return KernelLaunch(_gate, grid, tensors, constants, config.warps, 1, launch_options(call.dependent_launch))


def bind_rule(call: Call) -> KernelLaunch:
    """The launch of ``kda_delta_rule``, ``kda_verify`` or ``kda_verify_slots``."""
    config = RuleConfig(**call.config)
    query = call.attrs["o"].get("query", 0)
    names = ("q", "k", "v", "log_decay", "beta", "state", "slots", "positions", "o")
    tensors = {name: call.tensors[name] for name in names}
    sequences, (heads, values, keys) = tensors["slots"].shape[0], tensors["state"].shape[-3:]
    assert tensors["q"].shape == (sequences * max(query, 1), heads * keys), f"q {tensors['q'].shape}"
    assert tensors["v"].shape == (sequences * max(query, 1), heads * values), f"v {tensors['v'].shape}"
    assert tensors["state"].is_contiguous(), f"state is strided: {tensors['state'].stride()}"
    assert values % config.splits == 0, f"{config.splits} splits of {values} values"
    constants = {
        "HEADS": heads, "V": values, "K": keys, "SPLITS": config.splits, "SCALE": keys**-0.5,
        **{f"STRIDE_{name.upper()}": row_stride(tensors[name]) for name in ("q", "k", "v", "beta", "o")},
        "STRIDE_DECAY": row_stride(tensors["log_decay"]), "DEPENDENT_LAUNCH": call.dependent_launch,
    }
    if not query:
        kernel = _delta_rule
    elif "record" not in call.tensors:
        kernel, tensors["accepted"], constants["L"] = _verify_slots, call.tensors["accepted"], query
        assert tensors["state"].shape[1] == query, f"{tensors['state'].shape[1]} states of {query} rows"
    else:
        kernel = _verify
        tensors["record"], tensors["accepted"] = call.tensors["record"], call.tensors["accepted"]
        tensors["arrivals"] = call.scratch.get("arrivals", tensors["slots"])
        shape = (query, 3, heads, keys)
        assert values == keys, f"{values} values and {keys} keys a head"
        assert tensors["record"].shape[1:] == shape, f"record {tensors['record'].shape}"
        assert tensors["record"].is_contiguous(), f"record is strided: {tensors['record'].stride()}"
        assert config.splits == 1 or "arrivals" in call.scratch, "a split needs its counters"
        constants["L"] = query
    return KernelLaunch(kernel, (config.splits, heads, sequences), tensors, constants, config.warps, 1,
                        launch_options(call.dependent_launch))
