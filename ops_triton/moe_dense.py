"""Routed experts with plain weights (Kimi-Linear): W1 and W3 with their activation, W2 with the weighted sum.

Contract: as in ``moe_experts.py`` with ``w1 w3`` [E, I, D] and ``w2`` [E, D, I] in bf16 or fp32, any widths.
Layout: a block is ``rows`` rows of one pair's expert, or ``rows`` columns of a token over its experts one by one;
K in steps of ``block``. Blocks of the same rows of all pairs are neighbours, so an expert that several tokens
chose comes from memory once and then from L2.
Waits: everything after the wait for the producers: the first loads need ids. gate_up triggers its dependents
after it, see ``moe_experts.py``.
Numerics: fp32 products and sums. Bytes of Kimi-Linear (top 8 of 256, D 2304, I 1024) at one row: 113 MB, 28 us.
Measured: not yet.
Portable: NVIDIA-only calls are behind DEPENDENT_LAUNCH.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from ..compiler.call import Call, Launch
from .activations import NONE, SILU, SITU, activate
from .launching import KernelLaunch, await_producers, launch_options, row_stride, start_dependents
from .moe_tiles import first_expert


@dataclass(frozen=True)
class Config:
    """``rows`` weight rows a block, ``block`` elements of K a step."""

    rows: int = 4
    block: int = 1024
    warps: int = 4


@triton.jit
def _products(x_at, w_at, rows, real_rows, K: tl.constexpr, BK: tl.constexpr, R: tl.constexpr):
    """fp32 [R]: rows of a row-major matrix of K columns times one vector."""
    acc = tl.zeros((R, BK), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        x = tl.load(x_at + k, mask=k < K, other=0.0).to(tl.float32)
        w = tl.load(w_at + rows[:, None] * K + k[None, :], mask=real_rows[:, None] & (k < K)[None, :], other=0.0,
                    eviction_policy="evict_first").to(tl.float32)
        acc += w * x[None, :]
    return tl.sum(acc, 1)


@triton.jit
def _dense_gate_up(x_ptr, ids_ptr, rank_ptr, w1_ptr, w3_ptr, act_ptr, gate_ptr, up_ptr, STRIDE_X: tl.constexpr,
                   PAIRS: tl.constexpr, TOP_K: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, INTER: tl.constexpr,
                   LOCAL: tl.constexpr, EXPERTS: tl.constexpr, R: tl.constexpr, ACTIVATION: tl.constexpr,
                   BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    await_producers(DEPENDENT_LAUNCH)
    start_dependents(DEPENDENT_LAUNCH)
    pair = tl.program_id(0) % PAIRS
    rows = (tl.program_id(0) // PAIRS) * R + tl.arange(0, R)
    real = rows < INTER
    local = tl.load(ids_ptr + pair) - first_expert(rank_ptr, LOCAL, EXPERTS)
    g = tl.zeros((R,), tl.float32)
    u = tl.zeros((R,), tl.float32)
    if (local >= 0) & (local < LOCAL):
        at = local.to(tl.int64) * (INTER * K)
        x_at = x_ptr + (pair // TOP_K) * STRIDE_X
        g = _products(x_at, w1_ptr + at, rows, real, K, BK, R)
        u = _products(x_at, w3_ptr + at, rows, real, K, BK, R)
    at_out = pair * INTER + rows
    if ACTIVATION == 0:
        tl.store(gate_ptr + at_out, g.to(gate_ptr.dtype.element_ty), mask=real)
        tl.store(up_ptr + at_out, u.to(up_ptr.dtype.element_ty), mask=real)
    else:
        a = activate(g, u, ACTIVATION, BETA, LINEAR_BETA)
        tl.store(act_ptr + at_out, a.to(act_ptr.dtype.element_ty), mask=real)


@triton.jit
def _dense_down(act_ptr, ids_ptr, rank_ptr, weights_ptr, w2_ptr, out_ptr, STRIDE_OUT: tl.constexpr,
                TOKENS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
                WIDTH: tl.constexpr, LOCAL: tl.constexpr, EXPERTS: tl.constexpr, R: tl.constexpr,
                COMBINE: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    """One output row a "token": the sum over its SLOTS experts, or one pair's row as it is."""
    start_dependents(DEPENDENT_LAUNCH)
    await_producers(DEPENDENT_LAUNCH)
    token = tl.program_id(0) % TOKENS
    rows = (tl.program_id(0) // TOKENS) * R + tl.arange(0, R)
    real = rows < WIDTH
    base = first_expert(rank_ptr, LOCAL, EXPERTS)
    total = tl.zeros((R,), tl.float32)
    for slot in range(SLOTS):
        pair = token * SLOTS + slot
        local = tl.load(ids_ptr + pair) - base
        if (local >= 0) & (local < LOCAL):
            y = _products(act_ptr + pair * K, w2_ptr + local.to(tl.int64) * (WIDTH * K), rows, real, K, BK, R)
            if COMBINE:
                y *= tl.load(weights_ptr + pair)
            total += y
    tl.store(out_ptr + token * STRIDE_OUT + rows, total.to(out_ptr.dtype.element_ty), mask=real)


def bind(call: Call) -> Launch:
    """x, ids, rank, w1, w3 -> act, or gate and up; act, ids, rank, w2 -> pairs, or with weights out."""
    config = Config(**call.config)
    for name in ("ids", "w1", "w3", "w2", "weights"):
        tensor = call.get(name)
        assert tensor is None or tensor.is_contiguous(), f"strided {name}"
    return _bind_gate_up(call, config) if "gate" in call.attrs else _bind_down(call, config)


def _bind_gate_up(call: Call, config: Config) -> Launch:
    tensors, activation = call.tensors, call.attrs.get("act")
    x, ids, w1 = tensors["x"], tensors["ids"], tensors["w1"]
    assert w1.shape[2] == x.shape[1], f"x {x.shape}, w1 {w1.shape}"
    outputs = {name: call.get(name) for name in ("act", "gate", "up")}
    stand_in = next(t for t in outputs.values() if t is not None)
    pointers = {name: tensors[name] for name in ("x", "ids", "rank", "w1", "w3")}
    pointers |= {name: stand_in if t is None else t for name, t in outputs.items()}
    constants: dict[str, Any] = {
        "STRIDE_X": row_stride(x), "PAIRS": ids.numel(), "TOP_K": ids.shape[1], "K": x.shape[1], "BK": config.block,
        "INTER": w1.shape[1], "LOCAL": w1.shape[0], "EXPERTS": call.attrs["gate"]["experts"], "R": config.rows,
        "ACTIVATION": NONE if activation is None else SITU if "beta" in activation else SILU,
        "BETA": (activation or {}).get("beta", 1.0), "LINEAR_BETA": (activation or {}).get("linear_beta", 1.0),
        "DEPENDENT_LAUNCH": call.dependent_launch,
    }
    grid = ids.numel() * triton.cdiv(w1.shape[1], config.rows)
    return KernelLaunch(_dense_gate_up, (grid,), {f"{n}_ptr": t for n, t in pointers.items()}, constants, config.warps,
                        1, launch_options(call.dependent_launch))


def _bind_down(call: Call, config: Config) -> Launch:
    tensors, combine = call.tensors, "out" in call.attrs
    act, ids, w2 = tensors["act"], tensors["ids"], tensors["w2"]
    assert act.is_contiguous(), f"strided act {act.shape}"
    assert w2.shape[2] == act.shape[2], f"act {act.shape}, w2 {w2.shape}"
    out = tensors["out"] if combine else tensors["pairs"].flatten(0, 1)
    pointers = {"act": act, "ids": ids, "rank": tensors["rank"], "weights": tensors.get("weights", act), "w2": w2,
                "out": out}
    constants: dict[str, Any] = {
        "STRIDE_OUT": row_stride(out), "TOKENS": out.shape[0], "TOP_K": ids.shape[1],
        "SLOTS": ids.shape[1] if combine else 1, "K": w2.shape[2], "BK": config.block, "WIDTH": w2.shape[1],
        "LOCAL": w2.shape[0], "EXPERTS": call.attrs["pairs"]["experts"], "R": config.rows, "COMBINE": combine,
        "DEPENDENT_LAUNCH": call.dependent_launch,
    }
    grid = out.shape[0] * triton.cdiv(w2.shape[1], config.rows)
    return KernelLaunch(_dense_down, (grid,), {f"{n}_ptr": t for n, t in pointers.items()}, constants, config.warps, 1,
                        launch_options(call.dependent_launch))
