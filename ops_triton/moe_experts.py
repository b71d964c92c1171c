"""Routed MXFP4 experts: W1 and W3 with their activation, W2 with the weighted sum, or all of it in one launch.

Contract: ``x`` bf16 [T, D], any row stride; ``ids`` i32 and ``weights`` fp32 [T, k]; ``w1 w3`` u8 [E, I, D/2]
with scales [E, I, D/32]; ``w2`` u8 [E, D, I/2] with scales [E, D, I/32]; ``rank`` i32 [1] on the device says
which ids of an expert-parallel step are here. ``act`` [T, k, I] and ``out`` [T, D]; what absent experts would add
is exactly zero. Widths are multiples of 32 and nothing is padded in memory: 192 stays 192.

Layout: see ``moe_tiles.py``; a thread holds one scale group of each row of its block. A block of gate_up is ``rows``
rows of W1 and of W3 of one expert over all of D (112 groups on 128 threads), ``steps`` times with the next rows on
their way. A block of down is ``columns`` columns of one token over all its experts (16 experts, 2 lanes each, 3 groups
a lane), so the weighted sum never leaves the block: no partial sums, no atomics, one order of addition. Blocks of the
same rows of all pairs are neighbours in the grid, so an expert that several tokens chose comes from memory once and
then from L2; with ``dedupe`` the block of its first pair serves all its pairs and decodes once for two. In the chained
form blocks of down follow those of gate_up in one grid, load their weights at once and spin until their token's
activations are counted complete.

Waits: gate_up triggers its dependents after its own wait, on purpose: when a later kernel starts, everything that
gate_up waited for, ``ids`` above all, is complete, so down reads ids and its weights before its wait. Down
triggers first thing. The chained form waits and triggers as gate_up does.
Numerics: ``moe_tiles.py``: sums of 16 products in fp16, relative to the group's largest activation (4e-4 of
the result, where a bf16 rounding is 1.7e-3), the rest fp32; weights are exact for every scale byte, 255 is NaN.
With activation "mxfp8" rows are rounded to MXFP8 in the kernel as the op does, and then follow the same path.

Arithmetic for a TP16 rank on an H200: 17.5 MB at one row, 132 MB at 8 (120 experts): floors 6.3 and 32 us. gate_up
at one row: 384 blocks of 8 + 8 rows, 29 KB each, three a multiprocessor, all loads in flight at once; down: 224 blocks
of 16 columns, 26 KB. A group of 32 costs 68 instructions, 36 of them on the integer pipes, and 20 to 30 around it: at
8 rows 20 us of issue in gate_up and 10 in down, against 32 us of memory. Measured: not in this
form; an earlier one took 6.5 + 5.9 us at one row and 31 + 24 at 8 (one H200, TP16, triton 3.6).
Portable: NVIDIA-only assembly is behind PORTABLE, dependent launch behind DEPENDENT_LAUNCH.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..compiler.call import Call, Launch
from .activations import NONE, SILU, SITU, activate
from .launching import KernelLaunch, launch_options, row_stride
from .moe_menu import span_and_depth, together
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
    """``rows`` of W1 and of W3, or ``columns`` of W2, at a time; a block does ``steps`` times as many."""

    rows: int = 8
    columns: int = 16
    steps: int = 1
    warps: int = 4
    dedupe: bool = False


# W1 and W3


@triton.jit
def _store_rows(g, u, pair, rows, act_ptr, gate_ptr, up_ptr, INTER: tl.constexpr, ACTIVATION: tl.constexpr,
                BETA: tl.constexpr, LINEAR_BETA: tl.constexpr):
    at = pair * INTER + rows
    if ACTIVATION == 0:
        tl.store(gate_ptr + at, g.to(gate_ptr.dtype.element_ty), mask=rows < INTER)
        tl.store(up_ptr + at, u.to(up_ptr.dtype.element_ty), mask=rows < INTER)
    else:
        a = activate(g, u, ACTIVATION, BETA, LINEAR_BETA)
        tl.store(act_ptr + at, a.to(act_ptr.dtype.element_ty), mask=rows < INTER)


@triton.jit
def _count_ready(ready_ptr, token, CHAINED: tl.constexpr):
    """Counts one finished block of a token's activations."""
    if CHAINED:
        # every thread's store comes before the release by one of them
        tl.debug_barrier()
        tl.atomic_add(ready_ptr + token, 1, sem="release", scope="gpu")


@triton.jit
def _load_rows(w1_ptr, w3_ptr, s1_ptr, s3_ptr, first, left, GROUPS: tl.constexpr, LANES: tl.constexpr,
               R: tl.constexpr, EVEN: tl.constexpr):
    """Words and scale bytes of R rows of W1 and of W3 from row ``first`` on, of which ``left`` exist."""
    i = tl.arange(0, R)[:, None]
    words = tl.arange(0, LANES * 4)[None, :]
    lanes = tl.arange(0, LANES)[None, :]
    real_words = (words < GROUPS * 4) & (EVEN | (i < left))
    real = (lanes < GROUPS) & (EVEN | (i < left))
    # one base, so that rows are constant offsets
    at = first * (GROUPS * 4) + (i * (GROUPS * 4) + words)
    w1 = load_words(w1_ptr + at, real_words, R, LANES)
    w3 = load_words(w3_ptr + at, real_words, R, LANES)
    at = first * GROUPS + (i * GROUPS + lanes)
    b1 = tl.load(s1_ptr + at, mask=real, other=0, eviction_policy="evict_first")
    b3 = tl.load(s3_ptr + at, mask=real, other=0, eviction_policy="evict_first")
    return w1, w3, b1, b3


@triton.jit
def _serve_pairs(loaded, every, same, pair, rows, x_at, x_real, act_ptr, gate_ptr, up_ptr, ready_ptr,
                 STRIDE_X: tl.constexpr, TOP_K: tl.constexpr, IDS: tl.constexpr, LANES: tl.constexpr,
                 INTER: tl.constexpr, ROUND: tl.constexpr, ACTIVATION: tl.constexpr, BETA: tl.constexpr,
                 LINEAR_BETA: tl.constexpr, CHAINED: tl.constexpr, PORTABLE: tl.constexpr):
    """All pairs of an expert, two at a time, with weights that stay in registers."""
    w1, w3, b1, b3 = loaded
    c1 = scale_of(b1)
    c3 = scale_of(b3)
    current = pair
    while current < IDS:
        token = current // TOP_K
        x, factor = load_activations(x_at + token * STRIDE_X, x_real, LANES, ROUND, PORTABLE)
        second = next_pair(every, same, current, IDS)
        if second < IDS:
            other = second // TOP_K
            y, factor_y = load_activations(x_at + other * STRIDE_X, x_real, LANES, ROUND, PORTABLE)
            gx, gy = dot_groups_of_two(w1, x, y, PORTABLE)
            g = tl.sum(gx * (c1 * factor), 1)
            g_other = tl.sum(gy * (c1 * factor_y), 1)
            ux, uy = dot_groups_of_two(w3, x, y, PORTABLE)
            u = tl.sum(ux * (c3 * factor), 1)
            u_other = tl.sum(uy * (c3 * factor_y), 1)
            _store_rows(g, u, current, rows, act_ptr, gate_ptr, up_ptr, INTER, ACTIVATION, BETA, LINEAR_BETA)
            _store_rows(g_other, u_other, second, rows, act_ptr, gate_ptr, up_ptr, INTER, ACTIVATION, BETA, LINEAR_BETA)
            _count_ready(ready_ptr, token, CHAINED)
            _count_ready(ready_ptr, other, CHAINED)
            current = next_pair(every, same, second, IDS)
        else:
            g = tl.sum(dot_groups(w1, x, PORTABLE) * (c1 * factor), 1)
            u = tl.sum(dot_groups(w3, x, PORTABLE) * (c3 * factor), 1)
            _store_rows(g, u, current, rows, act_ptr, gate_ptr, up_ptr, INTER, ACTIVATION, BETA, LINEAR_BETA)
            _count_ready(ready_ptr, token, CHAINED)
            current = IDS


@triton.jit
def _gate_up_block(pid, x_ptr, ids_ptr, rank_ptr, w1_ptr, w3_ptr, s1_ptr, s3_ptr, act_ptr, gate_ptr, up_ptr, ready_ptr,
                   STRIDE_X: tl.constexpr, PAIRS: tl.constexpr, IDS: tl.constexpr, TOP_K: tl.constexpr,
                   GROUPS: tl.constexpr, LANES: tl.constexpr, INTER: tl.constexpr, LOCAL: tl.constexpr,
                   EXPERTS: tl.constexpr, R: tl.constexpr, STEPS: tl.constexpr, DEDUPE: tl.constexpr,
                   ROUND: tl.constexpr, ACTIVATION: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr,
                   CHAINED: tl.constexpr, PORTABLE: tl.constexpr):
    EVEN: tl.constexpr = INTER % (R * STEPS) == 0
    pair = pid % PAIRS
    start = (pid // PAIRS) * (R * STEPS)
    expert = tl.load(ids_ptr + pair)
    local = expert - first_expert(rank_ptr, LOCAL, EXPERTS)
    here = (local >= 0) & (local < LOCAL)
    inside = tl.arange(0, LANES * 32)
    x_at = x_ptr + inside
    x_real = inside < GROUPS * 32
    if here:
        row = local.to(tl.int64) * INTER + start
        if DEDUPE:
            every = tl.arange(0, IDS)
            same = tl.load(ids_ptr + every, mask=every < PAIRS, other=-1) == expert
            if tl.min(tl.where(same, every, IDS), 0) == pair:
                for step in range(STEPS):
                    begin = start + step * R
                    loaded = _load_rows(w1_ptr, w3_ptr, s1_ptr, s3_ptr, row + step * R, INTER - begin, GROUPS, LANES, R,
                                        EVEN)
                    # keeps the loads of x, which are waited for soon, from standing before those of the weights
                    tl.debug_barrier()
                    _serve_pairs(loaded, every, same, pair, begin + tl.arange(0, R), x_at, x_real, act_ptr, gate_ptr,
                                 up_ptr, ready_ptr, STRIDE_X, TOP_K, IDS, LANES, INTER, ROUND, ACTIVATION, BETA,
                                 LINEAR_BETA, CHAINED, PORTABLE)
        else:
            w1, w3, b1, b3 = _load_rows(w1_ptr, w3_ptr, s1_ptr, s3_ptr, row, INTER - start, GROUPS, LANES, R, EVEN)
            tl.debug_barrier()
            token = pair // TOP_K
            x, factor = load_activations(x_at + token * STRIDE_X, x_real, LANES, ROUND, PORTABLE)
            for step in tl.static_range(STEPS):
                begin = start + step * R
                if step + 1 < STEPS:
                    # the next rows are on their way while these are multiplied
                    n1, n3, m1, m3 = _load_rows(w1_ptr, w3_ptr, s1_ptr, s3_ptr, row + (step + 1) * R,
                                                INTER - begin - R, GROUPS, LANES, R, EVEN)
                g = tl.sum(dot_groups(w1, x, PORTABLE) * (scale_of(b1) * factor), 1)
                u = tl.sum(dot_groups(w3, x, PORTABLE) * (scale_of(b3) * factor), 1)
                _store_rows(g, u, pair, begin + tl.arange(0, R), act_ptr, gate_ptr, up_ptr, INTER, ACTIVATION, BETA,
                            LINEAR_BETA)
                _count_ready(ready_ptr, token, CHAINED)
                if step + 1 < STEPS:
                    w1, w3, b1, b3 = n1, n3, m1, m3
    else:
        zero = tl.zeros((R,), tl.float32)
        for step in range(STEPS):
            _store_rows(zero, zero, pair, start + step * R + tl.arange(0, R), act_ptr, gate_ptr, up_ptr, INTER,
                        ACTIVATION, BETA, LINEAR_BETA)
            _count_ready(ready_ptr, pair // TOP_K, CHAINED)


@triton.jit
def _gate_up(x_ptr, ids_ptr, rank_ptr, w1_ptr, w3_ptr, s1_ptr, s3_ptr, act_ptr, gate_ptr, up_ptr,
             STRIDE_X: tl.constexpr, PAIRS: tl.constexpr, IDS: tl.constexpr, TOP_K: tl.constexpr,
             GROUPS: tl.constexpr, LANES: tl.constexpr, INTER: tl.constexpr, LOCAL: tl.constexpr,
             EXPERTS: tl.constexpr, R: tl.constexpr, STEPS: tl.constexpr, DEDUPE: tl.constexpr, ROUND: tl.constexpr,
             ACTIVATION: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, PORTABLE: tl.constexpr,
             DEPENDENT_LAUNCH: tl.constexpr):
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    _gate_up_block(tl.program_id(0), x_ptr, ids_ptr, rank_ptr, w1_ptr, w3_ptr, s1_ptr, s3_ptr, act_ptr, gate_ptr,
                   up_ptr, ids_ptr, STRIDE_X, PAIRS, IDS, TOP_K, GROUPS, LANES, INTER, LOCAL, EXPERTS, R, STEPS, DEDUPE,
                   ROUND, ACTIVATION, BETA, LINEAR_BETA, False, PORTABLE)


# W2, all experts of a token in one block


@triton.jit
def _await_token(ready_ptr, token, TOKENS: tl.constexpr, BLOCKS_UP: tl.constexpr, BLOCKS_DOWN: tl.constexpr):
    """Spins until a token's activations are complete; the last block of the token leaves its counters zero."""
    count = tl.atomic_add(ready_ptr + token, 0, sem="acquire", scope="gpu")
    while count < BLOCKS_UP:
        count = tl.atomic_add(ready_ptr + token, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()
    passed = tl.atomic_add(ready_ptr + TOKENS + token, 1, sem="acq_rel", scope="gpu")
    if passed == BLOCKS_DOWN - 1:
        tl.store(ready_ptr + token, 0)
        tl.store(ready_ptr + TOKENS + token, 0)


@triton.jit
def _await_activations(ready_ptr, token, TOKENS: tl.constexpr, BLOCKS_UP: tl.constexpr, BLOCKS_DOWN: tl.constexpr,
                       CHAINED: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    if CHAINED:
        _await_token(ready_ptr, token, TOKENS, BLOCKS_UP, BLOCKS_DOWN)
    elif DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
    else:
        # keeps the loads of activations behind those of the weights
        tl.debug_barrier()


@triton.jit
def _load_columns(w2_ptr, s2_ptr, at_words, real_words, at, real, begin, GROUPS: tl.constexpr, SPAN: tl.constexpr,
                  DEPTH: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, EVEN: tl.constexpr):
    """Words and scale bytes of R columns from ``begin`` on, DEPTH times; the lanes' experts are at ``at``."""
    i = tl.arange(0, R)[:, None]
    inside = EVEN | (begin + i < WIDTH)
    found = ()
    for part in tl.static_range(DEPTH):
        byte = tl.load(s2_ptr + (at + begin * GROUPS)[None, :] + (i * GROUPS + part * SPAN),
                       mask=real[None, :] & inside, other=0, eviction_policy="evict_first")
        w2 = load_words(w2_ptr + (at_words + begin * (GROUPS * 4))[None, :] + (i * GROUPS + part * SPAN) * 4,
                        real_words[None, :] & inside, R, LANES)
        found = found + ((w2, byte),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _sum_experts(token, first, start, base, act_ptr, ids_ptr, weights_ptr, w2_ptr, s2_ptr, out_ptr, ready_ptr,
                 STRIDE_OUT: tl.constexpr, TOKENS: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr,
                 SPAN: tl.constexpr, DEPTH: tl.constexpr, TOGETHER: tl.constexpr, WIDTH: tl.constexpr,
                 LOCAL: tl.constexpr, R: tl.constexpr, STEPS: tl.constexpr, ROUND: tl.constexpr,
                 BLOCKS_UP: tl.constexpr, BLOCKS_DOWN: tl.constexpr, CHAINED: tl.constexpr, STORE: tl.constexpr,
                 PORTABLE: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    """Slots ``first`` to ``first + TOGETHER - 1`` of a token: SPAN lanes each, DEPTH groups of a row a lane. Stores the
    sums, or gives back those of the last R columns."""
    LANES: tl.constexpr = TOGETHER * SPAN
    EVEN: tl.constexpr = WIDTH % (R * STEPS) == 0
    ids = ids_ptr + token * TOP_K + first
    left = TOP_K - first
    # once for words, 4 of 8 numbers a lane, once for lanes: scales and routing weights. Both loads of ids go past the
    # first-level cache, which may hold an older step's
    word = tl.arange(0, LANES * 4)
    slot = word // (SPAN * 4)
    inside = word % (SPAN * 4)
    local = tl.load(ids + slot, mask=slot < left, other=-1, cache_modifier=".cg") - base
    real_words = (slot < left) & (local >= 0) & (local < LOCAL) & (inside < GROUPS * 4)
    at_words = local.to(tl.int64) * (WIDTH * GROUPS * 4) + inside
    lane = tl.arange(0, LANES)
    slot = lane // SPAN
    inside = lane % SPAN
    local = tl.load(ids + slot, mask=slot < left, other=-1, cache_modifier=".cg") - base
    real = (slot < left) & (local >= 0) & (local < LOCAL) & (inside < GROUPS)
    at = local.to(tl.int64) * (WIDTH * GROUPS) + inside
    loaded = _load_columns(w2_ptr, s2_ptr, at_words, real_words, at, real, start, GROUPS, SPAN, DEPTH, LANES, WIDTH, R,
                           EVEN)
    _await_activations(ready_ptr, token, TOKENS, BLOCKS_UP, BLOCKS_DOWN, CHAINED, DEPENDENT_LAUNCH)
    weight = tl.load(weights_ptr + token * TOP_K + first + slot, mask=real, other=0.0)[None, :]
    number = tl.arange(0, LANES * 32)
    x_slot = number // (SPAN * 32)
    x_inside = number % (SPAN * 32)
    x_at = act_ptr + (token * TOP_K + first + x_slot) * (GROUPS * 32) + x_inside
    x_real = (x_slot < left) & (x_inside < GROUPS * 32)
    rows_of_x = ()
    for part in tl.static_range(DEPTH):
        x, factor = load_activations(x_at + part * (SPAN * 32), x_real, LANES, ROUND, PORTABLE)
        rows_of_x = rows_of_x + ((x, factor * weight),)  # type: ignore[assignment]  # noqa: RUF005
    total = tl.zeros((R,), tl.float32)
    for step in tl.static_range(STEPS):
        begin = start + step * R
        now = loaded
        if step + 1 < STEPS:
            # the next columns are on their way while these are multiplied
            loaded = _load_columns(w2_ptr, s2_ptr, at_words, real_words, at, real, begin + R, GROUPS, SPAN, DEPTH,
                                   LANES, WIDTH, R, EVEN)
        products = tl.zeros((R, LANES), tl.float32)
        for part in tl.static_range(DEPTH):
            products += dot_groups(now[part][0], rows_of_x[part][0], PORTABLE) * (
                scale_of(now[part][1]) * rows_of_x[part][1])
        # an absent expert's activations may be anything: select, never multiply by zero
        total = tl.sum(tl.where(real[None, :], products, 0.0), 1)
        if STORE:
            rows = begin + tl.arange(0, R)
            tl.store(out_ptr + token * STRIDE_OUT + rows, total.to(out_ptr.dtype.element_ty), mask=rows < WIDTH)
    return total


@triton.jit
def _down_block(pid, act_ptr, ids_ptr, rank_ptr, weights_ptr, w2_ptr, s2_ptr, out_ptr, ready_ptr,
                STRIDE_OUT: tl.constexpr, TOKENS: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr,
                SPAN: tl.constexpr, DEPTH: tl.constexpr, TOGETHER: tl.constexpr, WIDTH: tl.constexpr,
                LOCAL: tl.constexpr, EXPERTS: tl.constexpr, R: tl.constexpr, STEPS: tl.constexpr, ROUND: tl.constexpr,
                BLOCKS_UP: tl.constexpr, BLOCKS_DOWN: tl.constexpr, CHAINED: tl.constexpr, PORTABLE: tl.constexpr,
                DEPENDENT_LAUNCH: tl.constexpr):
    token = pid % TOKENS
    base = first_expert(rank_ptr, LOCAL, EXPERTS)
    if TOGETHER >= TOP_K:
        _sum_experts(token, 0, (pid // TOKENS) * (R * STEPS), base, act_ptr, ids_ptr, weights_ptr, w2_ptr, s2_ptr,
                     out_ptr, ready_ptr, STRIDE_OUT, TOKENS, TOP_K, GROUPS, SPAN, DEPTH, TOGETHER, WIDTH, LOCAL, R,
                     STEPS, ROUND, BLOCKS_UP, BLOCKS_DOWN, CHAINED, True, PORTABLE, DEPENDENT_LAUNCH)
    else:
        _await_activations(ready_ptr, token, TOKENS, BLOCKS_UP, BLOCKS_DOWN, CHAINED, DEPENDENT_LAUNCH)
        for step in range(STEPS):
            begin = (pid // TOKENS) * (R * STEPS) + step * R
            total = tl.zeros((R,), tl.float32)
            for first in range(0, TOP_K, TOGETHER):
                slot = first + tl.arange(0, TOGETHER)
                local = tl.load(ids_ptr + token * TOP_K + slot, mask=slot < TOP_K, other=-1) - base
                if tl.max(((slot < TOP_K) & (local >= 0) & (local < LOCAL)).to(tl.int32), 0) > 0:
                    total += _sum_experts(token, first, begin, base, act_ptr, ids_ptr, weights_ptr, w2_ptr, s2_ptr,
                                          out_ptr, ready_ptr, STRIDE_OUT, TOKENS, TOP_K, GROUPS, SPAN, DEPTH, TOGETHER,
                                          WIDTH, LOCAL, R, 1, ROUND, BLOCKS_UP, BLOCKS_DOWN, False, False, PORTABLE,
                                          False)
            rows = begin + tl.arange(0, R)
            tl.store(out_ptr + token * STRIDE_OUT + rows, total.to(out_ptr.dtype.element_ty), mask=rows < WIDTH)


@triton.jit
def _down(act_ptr, ids_ptr, rank_ptr, weights_ptr, w2_ptr, s2_ptr, out_ptr,
          STRIDE_OUT: tl.constexpr, TOKENS: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr,
          SPAN: tl.constexpr, DEPTH: tl.constexpr, TOGETHER: tl.constexpr, WIDTH: tl.constexpr, LOCAL: tl.constexpr,
          EXPERTS: tl.constexpr, R: tl.constexpr, STEPS: tl.constexpr, ROUND: tl.constexpr, PORTABLE: tl.constexpr,
          DEPENDENT_LAUNCH: tl.constexpr):
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_launch_dependents()
    _down_block(tl.program_id(0), act_ptr, ids_ptr, rank_ptr, weights_ptr, w2_ptr, s2_ptr, out_ptr, ids_ptr, STRIDE_OUT,
                TOKENS, TOP_K, GROUPS, SPAN, DEPTH, TOGETHER, WIDTH, LOCAL, EXPERTS, R, STEPS, ROUND, 0, 0, False,
                PORTABLE, DEPENDENT_LAUNCH)


@triton.jit
def _chain(x_ptr, ids_ptr, rank_ptr, weights_ptr, w1_ptr, w3_ptr, s1_ptr, s3_ptr, w2_ptr, s2_ptr, act_ptr, out_ptr,
           ready_ptr, STRIDE_X: tl.constexpr, STRIDE_OUT: tl.constexpr, TOKENS: tl.constexpr, IDS: tl.constexpr,
           TOP_K: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr, INTER: tl.constexpr, SPAN: tl.constexpr,
           DEPTH: tl.constexpr, TOGETHER: tl.constexpr, WIDTH: tl.constexpr, LOCAL: tl.constexpr,
           EXPERTS: tl.constexpr, R: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr, DEDUPE: tl.constexpr,
           ROUND: tl.constexpr, ACTIVATION: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr,
           PORTABLE: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    BLOCKS: tl.constexpr = (INTER + R * STEPS - 1) // (R * STEPS)
    UP: tl.constexpr = BLOCKS * TOKENS * TOP_K
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    # blocks start in the order of their ids, so those that spin never keep out those that they wait for
    if pid < UP:
        _gate_up_block(pid, x_ptr, ids_ptr, rank_ptr, w1_ptr, w3_ptr, s1_ptr, s3_ptr, act_ptr, act_ptr, act_ptr,
                       ready_ptr, STRIDE_X, TOKENS * TOP_K, IDS, TOP_K, GROUPS, LANES, INTER, LOCAL, EXPERTS, R,
                       STEPS, DEDUPE, ROUND, ACTIVATION, BETA, LINEAR_BETA, True, PORTABLE)
    else:
        _down_block(pid - UP, act_ptr, ids_ptr, rank_ptr, weights_ptr, w2_ptr, s2_ptr, out_ptr, ready_ptr, STRIDE_OUT,
                    TOKENS, TOP_K, INTER // 32, SPAN, DEPTH, TOGETHER, WIDTH, LOCAL, EXPERTS, COLUMNS, STEPS, ROUND,
                    BLOCKS * STEPS * TOP_K, (WIDTH + COLUMNS * STEPS - 1) // (COLUMNS * STEPS), True, PORTABLE, False)


def _bind_gate_up(call: Call, config: Config) -> Launch:
    """x, ids, rank, w1, w3, s1, s3 -> act, or gate and up."""
    tensors = call.tensors
    x, ids, w1 = tensors["x"], tensors["ids"], tensors["w1"]
    constants = _gate_up_constants(call, config)
    outputs = {name: call.get(name) for name in ("act", "gate", "up")}
    stand_in = next(t for t in outputs.values() if t is not None)
    pointers = {"x": x, "ids": ids, "rank": tensors["rank"], **_packed(tensors, "w1", "w3"),
                "s1": tensors["s1"], "s3": tensors["s3"]}
    pointers |= {name: stand_in if t is None else _whole(t) for name, t in outputs.items()}
    grid = ids.numel() * triton.cdiv(w1.shape[1], config.rows * config.steps)
    constants |= {"PAIRS": ids.numel(), "DEPENDENT_LAUNCH": call.dependent_launch}
    return _launch(_gate_up, grid, pointers, constants, config, call)


def _bind_down(call: Call, config: Config) -> Launch:
    """act, ids, rank, weights, w2, s2 -> out."""
    tensors = call.tensors
    act, out = _whole(tensors["act"]), tensors["out"]
    constants = _down_constants(call, config) | {
        "GROUPS": act.shape[2] // 32, "R": config.columns, "STEPS": config.steps,
        "DEPENDENT_LAUNCH": call.dependent_launch}
    pointers = {"act": act, "ids": tensors["ids"], "rank": tensors["rank"], "weights": _whole(tensors["weights"]),
                **_packed(tensors, "w2"), "s2": tensors["s2"], "out": out}
    grid = out.shape[0] * triton.cdiv(out.shape[1], config.columns * config.steps)
    return _launch(_down, grid, pointers, constants, config, call)


def _bind_chain(call: Call, config: Config) -> Launch:
    """All of it: x, ids, rank, weights, w1, w3, s1, s3, w2, s2 -> out."""
    tensors, out = call.tensors, call.tensors["out"]
    pointers = {name: tensors[name] for name in ("x", "ids", "rank", "s1", "s3", "s2", "out")}
    pointers |= {"weights": _whole(tensors["weights"]), **_packed(tensors, "w1", "w3", "w2"), **call.scratch}
    constants = _gate_up_constants(call, config) | _down_constants(call, config) | {
        "COLUMNS": config.columns, "DEPENDENT_LAUNCH": call.dependent_launch}
    grid = tensors["ids"].numel() * triton.cdiv(tensors["w1"].shape[1], config.rows * config.steps)
    grid += out.shape[0] * triton.cdiv(out.shape[1], config.columns * config.steps)
    return _launch(_chain, grid, pointers, constants, config, call)


def bind(call: Call) -> Launch:
    """The launch for ``call``: which of the three forms follows from the pattern's lines."""
    config = Config(**call.config)
    ids = call.tensors["ids"]
    assert ids.dtype == torch.int32, f"ids {ids.dtype}"
    _whole(ids)
    if "gate" in call.attrs and "out" in call.attrs:
        return _bind_chain(call, config)
    return _bind_gate_up(call, config) if "gate" in call.attrs else _bind_down(call, config)


def _launch(kernel: Any, grid: int, pointers: Mapping[str, torch.Tensor], constants: Mapping[str, Any],
            config: Config, call: Call) -> Launch:
    return KernelLaunch(kernel, (grid,), {f"{name}_ptr": tensor for name, tensor in pointers.items()}, constants,
                        config.warps, 1, launch_options(call.dependent_launch))


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.is_contiguous(), f"strided {tensor.shape} {tensor.stride()}"
    return tensor


def _packed(tensors: Mapping[str, torch.Tensor], *names: str) -> dict[str, torch.Tensor]:
    """Packed weights as words of 8 numbers."""
    return {name: _whole(tensors[name]).view(torch.int32) for name in names}


def _gate_up_constants(call: Call, config: Config) -> dict[str, Any]:
    x, ids, w1 = call.tensors["x"], call.tensors["ids"], call.tensors["w1"]
    attrs, activation = call.attrs["gate"], call.attrs.get("act")
    groups = x.shape[1] // 32
    assert w1.shape[2] * 2 == x.shape[1] == groups * 32, f"x {x.shape}, w1 {w1.shape}"
    assert call.tensors["s1"].shape[2] == groups, f"x {x.shape}, scales {call.tensors['s1'].shape}"
    kind = NONE if activation is None else SITU if "beta" in activation else SILU
    return {
        "STRIDE_X": row_stride(x), "IDS": triton.next_power_of_2(ids.numel()), "TOP_K": ids.shape[1], "GROUPS": groups,
        "LANES": triton.next_power_of_2(groups), "INTER": w1.shape[1], "LOCAL": w1.shape[0],
        "EXPERTS": attrs["experts"], "R": config.rows, "STEPS": config.steps, "DEDUPE": config.dedupe,
        "ROUND": attrs["activation"] == "mxfp8", "ACTIVATION": kind, "BETA": (activation or {}).get("beta", 1.0),
        "LINEAR_BETA": (activation or {}).get("linear_beta", 1.0), "PORTABLE": PORTABLE,
    }


def _down_constants(call: Call, config: Config) -> dict[str, Any]:
    out, ids, w2 = call.tensors["out"], call.tensors["ids"], call.tensors["w2"]
    attrs = call.attrs["pairs"]
    span, depth = span_and_depth(w2.shape[2] // 16)
    side = together(ids.shape[1], span, config.warps, whole=w2.shape[0] < attrs["experts"])
    assert w2.shape[1] == out.shape[1], f"w2 {w2.shape}, out {out.shape}"
    return {
        "STRIDE_OUT": row_stride(out), "TOKENS": ids.shape[0], "TOP_K": ids.shape[1], "SPAN": span, "DEPTH": depth,
        "TOGETHER": side, "WIDTH": w2.shape[1], "LOCAL": w2.shape[0], "EXPERTS": attrs["experts"],
        "ROUND": attrs["activation"] == "mxfp8", "PORTABLE": PORTABLE,
    }
