"""W2 of routed MXFP4 experts for many rows: each distinct expert decoded once for two of its pairs; and the plain
sum.

Contract: as in ``moe_experts.py``: ``act`` [T, k, I], ``ids``, ``rank``, ``w2`` u8 [E, D, I/2], scales [E, D,
I/32]. Gives ``pairs`` [T, k, D], or ``out`` [T, D], the sum over a token's experts by ``weights`` fp32 [T, k].
The third kernel computes that sum from ``pairs`` alone. Pairs of absent experts are exactly zero.

Layout: a block is ``columns`` columns of one expert: threads along its groups first (6 of 8 lanes at I = 192),
rows beyond. The block of an expert's first pair serves all its pairs, two at a time, weights staying in
registers. For the sum each block writes fp32 rows to scratch and counts itself for the token; the block that
finds all the others counted adds the token's k rows in order of j (deterministic) and leaves the counter zero.
Waits: ids and weights before the wait for the producers (see ``moe_experts.py``), activations after it. The
trigger is the first instruction.
Numerics: ``moe_tiles.py``; the sum is fp32 from fp32 rows. Bytes at 64 rows of a TP16 rank: 210 MB of weights
(610 experts) and 29 MB of partial sums, most of them in L2: 50 to 56 us.
Measured: not in this form (an earlier one: 6.4 us at one row, 34 at 8, one H200, TP16, triton 3.6).
Portable: NVIDIA-only assembly is behind PORTABLE, dependent launch behind DEPENDENT_LAUNCH.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..compiler.call import Call, Launch
from .launching import KernelLaunch, await_producers, launch_options, row_stride, start_dependents
from .moe_tiles import (
    PORTABLE,
    dot_groups,
    dot_groups_of_two,
    first_expert,
    load_activations,
    load_words,
    next_pair,
    scale_of,
)

# read before the wait although a kernel of this step wrote it: see Waits
EARLY = ("ids_ptr",)


@dataclass(frozen=True)
class Config:
    """``columns`` of W2 a block."""

    columns: int = 128
    warps: int = 4


@triton.jit
def _finish(y, pair, rows, real_rows, ids_ptr, weights_ptr, base, y_ptr, out_ptr, arrivals_ptr, block,
            BLOCKS: tl.constexpr, STRIDE_OUT: tl.constexpr, TOP_K: tl.constexpr, KP: tl.constexpr,
            WIDTH: tl.constexpr, LOCAL: tl.constexpr, COMBINE: tl.constexpr):
    """Writes one pair's columns; the last of a token's pairs adds them up."""
    tl.store(y_ptr + pair * WIDTH + rows, y.to(y_ptr.dtype.element_ty), mask=real_rows)
    if COMBINE:
        token = pair // TOP_K
        # every thread's store comes before the release by one of them
        tl.debug_barrier()
        counter = arrivals_ptr + token * BLOCKS + block
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == TOP_K - 1:
            tl.store(counter, 0)
            slot = tl.arange(0, KP)
            local = tl.load(ids_ptr + token * TOP_K + slot, mask=slot < TOP_K, other=-1) - base
            here = (slot < TOP_K) & (local >= 0) & (local < LOCAL)
            weight = tl.load(weights_ptr + token * TOP_K + slot, mask=here, other=0.0)
            at = (token * TOP_K + slot)[:, None] * WIDTH + rows[None, :]
            parts = tl.load(y_ptr + at, mask=here[:, None] & real_rows[None, :], other=0.0, cache_modifier=".cg")
            total = tl.sum(tl.where(here[:, None], parts.to(tl.float32) * weight[:, None], 0.0), 0)
            tl.store(out_ptr + token * STRIDE_OUT + rows, total.to(out_ptr.dtype.element_ty), mask=real_rows)


@triton.jit
def _down_by_pair(act_ptr, ids_ptr, rank_ptr, weights_ptr, w2_ptr, s2_ptr, y_ptr, out_ptr, arrivals_ptr,
                  STRIDE_OUT: tl.constexpr, PAIRS: tl.constexpr, IDS: tl.constexpr, TOP_K: tl.constexpr,
                  KP: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
                  LOCAL: tl.constexpr, EXPERTS: tl.constexpr, R: tl.constexpr, ROUND: tl.constexpr,
                  COMBINE: tl.constexpr, PORTABLE: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    start_dependents(DEPENDENT_LAUNCH)
    BLOCKS: tl.constexpr = (WIDTH + R - 1) // R
    pair = tl.program_id(0) % PAIRS
    block = tl.program_id(0) // PAIRS
    rows = block * R + tl.arange(0, R)
    real_rows = rows < WIDTH
    every = tl.arange(0, IDS)
    base = first_expert(rank_ptr, LOCAL, EXPERTS)
    expert = tl.load(ids_ptr + pair, cache_modifier=".cg")
    same = tl.load(ids_ptr + every, mask=every < PAIRS, other=-1, cache_modifier=".cg") == expert
    local = expert - base
    here = (local >= 0) & (local < LOCAL)
    if here:
        if tl.min(tl.where(same, every, IDS), 0) == pair:
            row = local.to(tl.int64) * WIDTH + rows
            words = tl.arange(0, LANES * 4)
            lanes = tl.arange(0, LANES)
            w2 = load_words(w2_ptr + row[:, None] * (GROUPS * 4) + words[None, :],
                            real_rows[:, None] & (words < GROUPS * 4)[None, :], R, LANES)
            byte = tl.load(s2_ptr + row[:, None] * GROUPS + lanes[None, :],
                           mask=real_rows[:, None] & (lanes < GROUPS)[None, :], other=0, eviction_policy="evict_first")
            await_producers(DEPENDENT_LAUNCH)
            if not DEPENDENT_LAUNCH:
                # keeps the loads of activations behind those of the weights
                tl.debug_barrier()
            scale = scale_of(byte)
            inside = tl.arange(0, LANES * 32)
            x_real = inside < GROUPS * 32
            current = pair
            while current < IDS:
                second = next_pair(every, same, current, IDS)
                x, factor = load_activations(act_ptr + current * (GROUPS * 32) + inside, x_real, LANES, ROUND, PORTABLE)
                if second < IDS:
                    z, factor_z = load_activations(act_ptr + second * (GROUPS * 32) + inside, x_real, LANES, ROUND,
                                                   PORTABLE)
                    products, products_z = dot_groups_of_two(w2, x, z, PORTABLE)
                    y = tl.sum(products * (scale * factor), 1)
                    y_second = tl.sum(products_z * (scale * factor_z), 1)
                    _finish(y, current, rows, real_rows, ids_ptr, weights_ptr, base, y_ptr, out_ptr, arrivals_ptr,
                            block, BLOCKS, STRIDE_OUT, TOP_K, KP, WIDTH, LOCAL, COMBINE)
                    _finish(y_second, second, rows, real_rows, ids_ptr, weights_ptr, base, y_ptr, out_ptr,
                            arrivals_ptr, block, BLOCKS, STRIDE_OUT, TOP_K, KP, WIDTH, LOCAL, COMBINE)
                    current = next_pair(every, same, second, IDS)
                else:
                    y = tl.sum(dot_groups(w2, x, PORTABLE) * (scale * factor), 1)
                    _finish(y, current, rows, real_rows, ids_ptr, weights_ptr, base, y_ptr, out_ptr, arrivals_ptr,
                            block, BLOCKS, STRIDE_OUT, TOP_K, KP, WIDTH, LOCAL, COMBINE)
                    current = IDS
    else:
        await_producers(DEPENDENT_LAUNCH)
        _finish(tl.zeros((R,), tl.float32), pair, rows, real_rows, ids_ptr, weights_ptr, base, y_ptr, out_ptr,
                arrivals_ptr, block, BLOCKS, STRIDE_OUT, TOP_K, KP, WIDTH, LOCAL, COMBINE)


@triton.jit
def _combine(pairs_ptr, weights_ptr, out_ptr, STRIDE_OUT: tl.constexpr, TOKENS: tl.constexpr, TOP_K: tl.constexpr,
             WIDTH: tl.constexpr, R: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    start_dependents(DEPENDENT_LAUNCH)
    token = tl.program_id(0) % TOKENS
    rows = (tl.program_id(0) // TOKENS) * R + tl.arange(0, R)
    await_producers(DEPENDENT_LAUNCH)
    total = tl.zeros((R,), tl.float32)
    for slot in tl.static_range(TOP_K):
        part = tl.load(pairs_ptr + (token * TOP_K + slot) * WIDTH + rows, mask=rows < WIDTH, other=0.0)
        total += part.to(tl.float32) * tl.load(weights_ptr + token * TOP_K + slot)
    tl.store(out_ptr + token * STRIDE_OUT + rows, total.to(out_ptr.dtype.element_ty), mask=rows < WIDTH)


def bind(call: Call) -> Launch:
    """act, ids, rank, w2, s2 -> pairs; with weights -> out."""
    config, tensors = Config(**call.config), call.tensors
    act, ids, w2 = tensors["act"], tensors["ids"], tensors["w2"]
    combine = "out" in call.attrs
    for name in ("act", "ids", "w2", "s2"):
        assert tensors[name].is_contiguous(), f"{name} {tensors[name].shape} {tensors[name].stride()}"
    groups = act.shape[2] // 32
    assert w2.shape[2] == groups * 16, f"act {act.shape}, w2 {w2.shape}"
    y = call.scratch["partial"] if combine else tensors["pairs"]
    out = tensors["out"] if combine else y
    attrs = call.attrs["pairs"]
    constants: dict[str, Any] = {
        "STRIDE_OUT": row_stride(out), "PAIRS": ids.numel(), "IDS": triton.next_power_of_2(ids.numel()),
        "TOP_K": ids.shape[1], "KP": triton.next_power_of_2(ids.shape[1]), "GROUPS": groups,
        "LANES": triton.next_power_of_2(groups), "WIDTH": w2.shape[1], "LOCAL": w2.shape[0],
        "EXPERTS": attrs["experts"], "R": config.columns, "ROUND": attrs["activation"] == "mxfp8", "COMBINE": combine,
        "PORTABLE": PORTABLE, "DEPENDENT_LAUNCH": call.dependent_launch,
    }
    pointers = {
        "act": act, "ids": ids, "rank": tensors["rank"], "weights": tensors.get("weights", y),
        "w2": w2.view(torch.int32), "s2": tensors["s2"], "y": y, "out": out,
        "arrivals": call.scratch.get("arrivals", ids),
    }
    grid = ids.numel() * triton.cdiv(w2.shape[1], config.columns)
    return KernelLaunch(_down_by_pair, (grid,), {f"{n}_ptr": t for n, t in pointers.items()}, constants, config.warps,
                        1, launch_options(call.dependent_launch))


def bind_combine(call: Call) -> Launch:
    """pairs, weights -> out."""
    pairs, weights, out = (call.tensors[name] for name in ("pairs", "weights", "out"))
    assert pairs.is_contiguous(), f"pairs {pairs.shape} {pairs.stride()}"
    assert weights.is_contiguous(), f"weights {weights.shape} {weights.stride()}"
    config = Config(**call.config)
    constants = {"STRIDE_OUT": row_stride(out), "TOKENS": pairs.shape[0], "TOP_K": pairs.shape[1],
                 "WIDTH": pairs.shape[2], "R": config.columns, "DEPENDENT_LAUNCH": call.dependent_launch}
    grid = pairs.shape[0] * triton.cdiv(pairs.shape[2], config.columns)
    pointers = {"pairs_ptr": pairs, "weights_ptr": weights, "out_ptr": out}
    return KernelLaunch(_combine, (grid,), pointers, constants, config.warps, 1, launch_options(call.dependent_launch))
