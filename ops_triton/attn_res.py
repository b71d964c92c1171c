"""Attention residuals in one launch: add the delta, mix up to 8 blocks and the prefix, norm. Plain norms as well.

Contract: ``prefix`` bf16 [T, D] and ``delta`` (optional) give ``p = bf16(prefix + delta)``; with the blocks bf16
[T, D] (``rest``, oldest first) and ``score`` fp32 [D]: ``s_j = (v_j . score) rsqrt(mean v_j^2 + eps)``, softmax over
the sources, mix, and ``h = mix rsqrt(mean mix^2 + eps) weight`` (the mix itself without ``weight``). All rows are
computed; padding rows hold numbers that nobody uses. ``p`` and ``h`` may be the storage of ``prefix``.

Layout: a row is shared by D / ``columns`` blocks of threads. Each holds a tile of 16 rows in registers: the sources,
and the score split into three bf16 rows that sum to it exactly. One product of the tile with its own transpose on the
matrix units is every number that the row needs: ``v_i . v_j`` and ``v_j . score``; the norm of the mix follows from
them as ``sum p_i p_j (v_i . v_j)``, so that blocks exchange once. The exchange is a mailbox of 8-byte words, the fp32
bits below an epoch, so that data and flag arrive together and nothing is zeroed between launches. A row's epoch is
counted up by one of its blocks after the exchange, which every block entered after reading it.

Waits: ``score`` and ``weight`` are loaded before the wait; blocks, prefix and delta after it (an earlier kernel than
the previous one may still be running before it). The trigger is the first instruction. Blocks of one row spin on each
other: they are neighbours in launch order, so a row is resident as soon as its last block is, whatever runs beside it,
and dependents start only when every block of this launch has.
Numerics: bf16 products are exact, sums fp32, ``p`` is rounded to bf16 before it is used, ``h`` is rounded once.
Bytes: (blocks + 3) D 2 + 6 D a row and 4 D + 2 D of weights; 8 blocks, one row: 0.2 MB, nothing against the latency of
two dependent passes. Target on an H200 2.5 us; best public Triton kernel 7.8 us. Measured: 4.1 us with one block and
4.4 with eight at one row, 4.3 and 4.7 at 8 rows (one H200, TP16, triton 3.6).
Portable: NVIDIA-only calls are behind DEPENDENT_LAUNCH. In the interpreter, where blocks run one after the other, the
two halves of the exchange are two launches.
"""
# ruff: noqa: SIM102 - a constexpr condition must stand alone
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..compiler.call import Call, Launch
from ..compiler.launches import LaunchSequence
from .attn_res_menu import BLOCKS, slices
from .launching import (
    COLLECT,
    INTERPRET,
    PUBLISH,
    WHOLE,
    KernelLaunch,
    await_producers,
    launch_options,
    row_stride,
    start_dependents,
)


@dataclass(frozen=True)
class Config:
    """``columns`` of a row a block of threads, a power of two."""

    columns: int = 1024
    warps: int = 4


@dataclass(frozen=True)
class NormConfig:
    """One block of threads a row."""

    warps: int = 4


@triton.jit
def _products(tile, COLUMNS: tl.constexpr, WARPS: tl.constexpr, WIDEN: tl.constexpr):
    """fp32 [16, 16] of all products of the tile's rows. Each warp takes its share of the columns."""
    if WIDEN:
        wide = tile.to(tl.float32)
        return tl.dot(wide, tl.trans(wide), input_precision="ieee")
    if WARPS == 1:
        return tl.dot(tile, tl.trans(tile))
    parts = tl.permute(tl.reshape(tile, (16, WARPS, COLUMNS // WARPS)), (1, 0, 2))
    return tl.sum(tl.dot(parts, tl.permute(parts, (0, 2, 1))), axis=0)


@triton.jit
def _exchange(gram, needed, mailbox_ptr, epoch_ptr, epoch, row, part, SLICES: tl.constexpr,
              SLICES_PADDED: tl.constexpr, PHASE: tl.constexpr):
    """The sum of ``gram`` over the blocks of a row; ``epoch`` is the flag of this launch."""
    i = tl.arange(0, 16)
    box = mailbox_ptr + row * (SLICES * 256)
    if PHASE != 2:
        # every thread has read the epoch before any sends what the block that counts it up waits for
        tl.debug_barrier()
        word = (gram.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) | (epoch.to(tl.int64) << 32)
        tl.store(box + part * 256 + i[:, None] * 16 + i[None, :], word, mask=needed)
    if PHASE != 1:
        s = tl.arange(0, SLICES_PADDED)[:, None]
        wanted = (s < SLICES) & tl.reshape(needed, (1, 256))
        at = box + s * 256 + tl.arange(0, 256)[None, :]
        words = tl.load(at, mask=wanted, other=0, volatile=True)
        # the condition reads what the loop carries and nothing else: triton 3.6 fails on a loop whose results are fewer
        while tl.max(tl.max(tl.where(wanted & ((words >> 32).to(tl.int32) != epoch), 1, 0), axis=0), axis=0) > 0:
            words = tl.load(at, mask=wanted, other=0, volatile=True)
        values = (words & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
        gram = tl.reshape(tl.sum(tl.where(wanted, values, 0.0), axis=0), (16, 16))
        # all blocks of the row have read the epoch before they wrote what was awaited here
        if part == SLICES - 1:
            tl.store(epoch_ptr + row, epoch)
    return gram


@triton.jit
def _attn_res(prefix_ptr, delta_ptr, score_ptr, weight_ptr, p_ptr, h_ptr, mailbox_ptr, epoch_ptr, b0_ptr, b1_ptr,
              b2_ptr, b3_ptr, b4_ptr, b5_ptr, b6_ptr, b7_ptr,
              D: tl.constexpr, COLUMNS: tl.constexpr, SLICES: tl.constexpr, SLICES_PADDED: tl.constexpr,
              NB: tl.constexpr, EPS: tl.constexpr, OUT_EPS: tl.constexpr, STRIDE_PREFIX: tl.constexpr,
              STRIDE_DELTA: tl.constexpr, STRIDE_BLOCK: tl.constexpr, STRIDE_P: tl.constexpr,
              STRIDE_H: tl.constexpr, HAS_DELTA: tl.constexpr, HAS_P: tl.constexpr, NORM: tl.constexpr,
              PHASE: tl.constexpr, WARPS: tl.constexpr, WIDEN: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    start_dependents(DEPENDENT_LAUNCH)
    part = tl.program_id(0)
    row = tl.program_id(1)
    j = tl.arange(0, 16)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    real = (column < D)[None, :]
    source = j[:, None]
    score = tl.load(score_ptr + column[None, :] + source * 0, mask=real & (source >= 13), other=0.0)
    if NORM:
        weight = tl.load(weight_ptr + column, mask=column < D, other=0.0)
    await_producers(DEPENDENT_LAUNCH)
    if SLICES > 1:
        epoch = tl.load(epoch_ptr + row, volatile=True) + 1

    # one load for the whole tile, each row from its own base
    base = tl.where(source == NB, prefix_ptr + row * STRIDE_PREFIX, b0_ptr + row * STRIDE_BLOCK)
    if NB > 1:
        base = tl.where(source == 1, b1_ptr + row * STRIDE_BLOCK, base)
    if NB > 2:
        base = tl.where(source == 2, b2_ptr + row * STRIDE_BLOCK, base)
    if NB > 3:
        base = tl.where(source == 3, b3_ptr + row * STRIDE_BLOCK, base)
    if NB > 4:
        base = tl.where(source == 4, b4_ptr + row * STRIDE_BLOCK, base)
    if NB > 5:
        base = tl.where(source == 5, b5_ptr + row * STRIDE_BLOCK, base)
    if NB > 6:
        base = tl.where(source == 6, b6_ptr + row * STRIDE_BLOCK, base)
    if NB > 7:
        base = tl.where(source == 7, b7_ptr + row * STRIDE_BLOCK, base)
    tile = tl.load(base + column[None, :], mask=real & (source <= NB), other=0.0)
    if HAS_DELTA:
        delta_at = delta_ptr + row * STRIDE_DELTA + column[None, :] + source * 0
        delta = tl.load(delta_at, mask=real & (source == NB), other=0.0)
        tile = (tile.to(tl.float32) + delta.to(tl.float32)).to(tl.bfloat16)
    if HAS_P:
        if PHASE != 1:
            p_at = p_ptr + row * STRIDE_P + column[None, :] + source * 0
            tl.store(p_at, tile, mask=real & (source == NB))

    # score = high + middle + low exactly: 24 bits in three times 8
    high = score.to(tl.bfloat16).to(tl.float32)
    middle = (score - high).to(tl.bfloat16).to(tl.float32)
    piece = tl.where(source == 13, high, tl.where(source == 14, middle, score - high - middle))
    rows = tl.where(source >= 13, piece.to(tl.bfloat16), tile)
    gram = _products(rows, COLUMNS, WARPS, WIDEN)
    # row 15 takes the scores, the sum of the three pieces' rows
    scores = tl.sum(tl.where(j[:, None] >= 13, gram, 0.0), axis=0)
    gram = tl.where(j[:, None] == 15, scores[None, :], gram)
    needed = (j[None, :] <= NB) & ((j[:, None] <= NB) | (j[:, None] == 15))
    if SLICES > 1:
        gram = _exchange(gram, needed, mailbox_ptr, epoch_ptr, epoch, row, part, SLICES, SLICES_PADDED, PHASE)
    if PHASE != 1:
        square = tl.sum(tl.where(j[:, None] == j[None, :], gram, 0.0), axis=0)
        scores = tl.sum(tl.where(j[:, None] == 15, gram, 0.0), axis=0)
        scores = tl.where(j <= NB, scores * tl.rsqrt(square / D + EPS), float("-inf"))
        weights = tl.exp(scores - tl.max(scores, axis=0))
        weights = weights / tl.sum(weights, axis=0)
        mix = tl.sum(weights[:, None] * tile.to(tl.float32), axis=0)
        if NORM:
            pairs = tl.sum(tl.where(j[:, None] <= NB, gram, 0.0) * weights[None, :], axis=1)
            mean = tl.sum(tl.where(j <= NB, pairs * weights, 0.0), axis=0) / D
            mix = mix * tl.rsqrt(tl.maximum(mean, 0.0) + OUT_EPS) * weight.to(tl.float32)
        tl.store(h_ptr + row * STRIDE_H + column, mix.to(h_ptr.dtype.element_ty), mask=column < D)


@triton.jit
def _norm(x_ptr, delta_ptr, weight_ptr, p_ptr, h_ptr, D: tl.constexpr, WIDTH: tl.constexpr, EPS: tl.constexpr,
          STRIDE_X: tl.constexpr, STRIDE_DELTA: tl.constexpr, STRIDE_P: tl.constexpr, STRIDE_H: tl.constexpr,
          HAS_DELTA: tl.constexpr, HAS_P: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    start_dependents(DEPENDENT_LAUNCH)
    row = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    real = column < D
    weight = tl.load(weight_ptr + column, mask=real, other=0.0)
    await_producers(DEPENDENT_LAUNCH)
    x = tl.load(x_ptr + row * STRIDE_X + column, mask=real, other=0.0).to(tl.float32)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + row * STRIDE_DELTA + column, mask=real, other=0.0)
        rounded = (x + delta.to(tl.float32)).to(tl.bfloat16)
        x = rounded.to(tl.float32)
        if HAS_P:
            tl.store(p_ptr + row * STRIDE_P + column, rounded, mask=real)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / D + EPS)
    tl.store(h_ptr + row * STRIDE_H + column, (x * scale * weight.to(tl.float32)).to(h_ptr.dtype.element_ty), mask=real)


def bind(call: Call) -> Launch:
    """The launch for ``call``: attention residuals with or without the add and the norm."""
    prefix, score, h = call.tensors["prefix"], call.tensors["score"], call.tensors["h"]
    config = Config(**call.config)
    rows, columns = prefix.shape
    assert 1 <= len(call.rest) <= BLOCKS, f"{len(call.rest)} blocks"
    strides = {row_stride(block) for block in call.rest}
    assert len(strides) == 1, f"blocks with strides {strides}"
    assert all(block.dtype == prefix.dtype == torch.bfloat16 for block in call.rest), "sources must be bf16"
    assert score.is_contiguous(), f"score has strides {score.stride()}"
    norm = "m" in call.attrs
    count = slices(call.config, columns)
    p, delta = call.get("p"), call.get("delta")
    tensors = {
        "prefix": prefix, "delta": prefix if delta is None else delta, "score": score,
        "weight": call.tensors["weight"] if norm else score, "p": h if p is None else p, "h": h,
        "mailbox": call.scratch.get("mailbox", h), "epoch": call.scratch.get("epoch", h),
        **{f"b{i}": call.rest[min(i, len(call.rest) - 1)] for i in range(BLOCKS)},
    }
    constants = {
        "D": columns, "COLUMNS": config.columns, "SLICES": count, "SLICES_PADDED": triton.next_power_of_2(count),
        "NB": len(call.rest), "EPS": call.attrs["m" if norm else "h"]["eps"], "OUT_EPS": call.attrs["h"]["eps"],
        "STRIDE_PREFIX": row_stride(prefix), "STRIDE_DELTA": row_stride(tensors["delta"]),
        "STRIDE_BLOCK": strides.pop(), "STRIDE_P": row_stride(tensors["p"]), "STRIDE_H": row_stride(h),
        "HAS_DELTA": delta is not None, "HAS_P": p is not None, "NORM": norm, "PHASE": WHOLE,
        "WARPS": config.warps, "WIDEN": INTERPRET, "DEPENDENT_LAUNCH": call.dependent_launch,
    }
    launch = KernelLaunch(_attn_res, (count, rows), {f"{name}_ptr": t for name, t in tensors.items()}, constants,
                          config.warps, 1, launch_options(call.dependent_launch))
    return _in_phases(launch) if INTERPRET and count > 1 else launch


def _in_phases(launch: KernelLaunch) -> Launch:
    """Two launches, for where the blocks of a row do not run at the same time."""
    halves = [{**launch.constants, "PHASE": phase} for phase in (PUBLISH, COLLECT)]
    return LaunchSequence(tuple(
        KernelLaunch(launch.kernel, launch.grid, launch.pointers, constants, launch.num_warps) for constants in halves))


def bind_norm(call: Call) -> Launch:
    """The launch for ``call``: RMS norm of rows, with the residual add before it where the pattern has one."""
    x = call.tensors["prefix"] if "p" in call.attrs else call.tensors["x"]
    weight, h, p, delta = call.tensors["weight"], call.tensors["h"], call.get("p"), call.get("delta")
    config = NormConfig(**call.config)
    rows, columns = x.shape
    assert weight.shape == (columns,), f"weight {weight.shape} for rows of {columns}"
    tensors = {"x": x, "delta": x if delta is None else delta, "weight": weight, "p": h if p is None else p, "h": h}
    constants = {
        "D": columns, "WIDTH": triton.next_power_of_2(columns), "EPS": call.attrs["h"]["eps"],
        "STRIDE_X": row_stride(x), "STRIDE_DELTA": row_stride(tensors["delta"]),
        "STRIDE_P": row_stride(tensors["p"]), "STRIDE_H": row_stride(h), "HAS_DELTA": delta is not None,
        "HAS_P": p is not None, "DEPENDENT_LAUNCH": call.dependent_launch,
    }
    return KernelLaunch(_norm, (rows,), {f"{name}_ptr": t for name, t in tensors.items()}, constants, config.warps, 1,
                        launch_options(call.dependent_launch))
