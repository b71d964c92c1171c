"""Projections of 1 to 64 rows: ``x @ weight.T`` with an epilogue, bound by the bytes of the weights.

Contract: ``x`` bf16 [T, K] with any row stride, ``weight`` bf16 [N, K] row-major, outputs bf16 or fp32 by the dtype of
their tensors. In the same launch, when the pattern has them: ``router`` [R, K] of the same rows with fp32 ``logits``;
``a = activation(gate, up)`` where gate and up are the last rows of ``weight``; ``y = f + other``, or
``y = other sigmoid(f)``. Values that nobody reads outside are not written. (The output gate of MLA is no epilogue where
its projection is merged with the others of the same rows, long before there is anything to gate.)

Layout: a block computes ``rows`` output rows of all T. Its rows of gate and up alternate, so that both of a pair meet
in one thread. Form "fma" keeps fp32 sums in registers, every thread loads 16 bytes of each row at a time and one tile
ahead; the block's threads split K, and a tree adds them once at the end. Form "dot" feeds the matrix units, T padded
to 16, 32 or 64, weights through a pipeline of asynchronous copies. ``split`` blocks share the K of a tile: partial
sums go to scratch and the last block to arrive adds them in order (deterministic) and resets its counter.

Waits: the first weight tile is loaded before the wait for the producers; x, ``other`` and the scratch are touched
after it. The trigger is the first instruction.
Numerics: products and sums in fp32, one rounding at the store; activations on the fp32 sums (tanh through exp).
Bytes: N K 2 + T (K + N) 2, so 3216 x 7168 at one row is 46.1 MB; its floor on an H200 (2.35 us + bytes / 4.44 TB/s)
is 12.7 us. Measured: 13.6 us at one row, 17.6 at 8, of 3206 x 7168 (one H200, TP16, triton 3.6).
The gate: not timed yet.
Portable: NVIDIA-only calls are behind DEPENDENT_LAUNCH.
"""
# ruff: noqa: SIM102, SIM108 - a constexpr condition must stand alone
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..compiler.call import Call, Launch
from .activations import NONE, SILU, SITU, activate, sigmoid
from .launching import INTERPRET, KernelLaunch, await_producers, launch_options, row_stride, start_dependents
from .skinny_linear_menu import count_tiles, padded_rows

ADD, GATE = 1, 2  # OTHER, what becomes of ``other``; 0 without it
NORM_TILE = tl.constexpr(8192)  # elements that are squared at a time


@dataclass(frozen=True)
class Config:
    """``rows`` output rows a block, ``block`` elements of K a step, ``split`` blocks along K."""

    form: str = "fma"  # "fma" or "dot"
    rows: int = 4
    block: int = 1024
    split: int = 1
    warps: int = 4
    stages: int = 1


@triton.jit
def _tile_rows(tile, R: tl.constexpr, TILES_ROUTER: tl.constexpr, TILES_PLAIN: tl.constexpr, ROUTER: tl.constexpr,
               PLAIN: tl.constexpr, PAIRS: tl.constexpr):
    """Weight rows of a tile (of ``router`` or of ``weight``) and which of them exist."""
    i = tl.arange(0, R)
    if tile < TILES_ROUTER:
        rows = tile * R + i
        real = rows < ROUTER
    elif tile < TILES_ROUTER + TILES_PLAIN:
        rows = (tile - TILES_ROUTER) * R + i
        real = rows < PLAIN
    else:
        pair = (tile - TILES_ROUTER - TILES_PLAIN) * (R // 2) + i // 2
        rows = PLAIN + pair + (i % 2) * PAIRS
        real = pair < PAIRS
    return rows, real


@triton.jit
def _store(acc, tile, rows, real, logits_ptr, f_ptr, a_ptr, y_ptr, other_ptr,
           M: tl.constexpr, MP: tl.constexpr, R: tl.constexpr, TILES_ROUTER: tl.constexpr, TILES_PLAIN: tl.constexpr,
           PAIRS: tl.constexpr, STRIDE_LOGITS: tl.constexpr, STRIDE_F: tl.constexpr, STRIDE_A: tl.constexpr,
           STRIDE_Y: tl.constexpr, STRIDE_OTHER: tl.constexpr, HAS_F: tl.constexpr, OTHER: tl.constexpr,
           ACTIVATION: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr):
    """Epilogue of one finished tile, acc fp32 [MP, R]."""
    m = tl.arange(0, MP)
    mask = (m < M)[:, None] & real[None, :]
    if tile < TILES_ROUTER:
        tl.store(logits_ptr + m[:, None] * STRIDE_LOGITS + rows[None, :], acc, mask=mask)
    else:
        if OTHER != 0:
            other = tl.load(other_ptr + m[:, None] * STRIDE_OTHER + rows[None, :], mask=mask, other=0.0).to(tl.float32)
            y = acc + other if OTHER == 1 else other * sigmoid(acc)
            tl.store(y_ptr + m[:, None] * STRIDE_Y + rows[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
        if HAS_F:
            tl.store(f_ptr + m[:, None] * STRIDE_F + rows[None, :], acc.to(f_ptr.dtype.element_ty), mask=mask)
        if ACTIVATION != 0:
            if tile >= TILES_ROUTER + TILES_PLAIN:
                gate, up = tl.split(tl.reshape(acc, (MP, R // 2, 2)))
                a = activate(gate, up, ACTIVATION, BETA, LINEAR_BETA)
                pair = (tile - TILES_ROUTER - TILES_PLAIN) * (R // 2) + tl.arange(0, R // 2)
                at = a_ptr + m[:, None] * STRIDE_A + pair[None, :]
                tl.store(at, a.to(a_ptr.dtype.element_ty), mask=(m < M)[:, None] & (pair < PAIRS)[None, :])


@triton.jit
def _row_scales(x_ptr, M: tl.constexpr, MP: tl.constexpr, K: tl.constexpr, STRIDE_X: tl.constexpr, EPS: tl.constexpr):
    """fp32 [MP]: the factor of each row in its RMS norm. One reduction, at the end, so that loads overlap."""
    C: tl.constexpr = NORM_TILE // MP
    m = tl.arange(0, MP)[:, None]
    k = tl.arange(0, C)[None, :]
    squares = tl.zeros((MP, C), tl.float32)
    for start in tl.static_range(0, K, C):
        x = tl.load(x_ptr + m * STRIDE_X + start + k, mask=(m < M) & (start + k < K), other=0.0).to(tl.float32)
        squares += x * x
    return tl.rsqrt(tl.sum(squares, axis=1) / K + EPS)


@triton.jit
def _normed(x, scale, norm):
    """Rows of an RMS norm, rounded as the op's result is."""
    return (x.to(tl.float32) * scale * norm.to(tl.float32)).to(x.dtype)


@triton.jit
def _sum_fma(x_ptr, w_ptr, rows, real, k_start, M: tl.constexpr, MP: tl.constexpr, K: tl.constexpr,
             STRIDE_X: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr, EVEN_K: tl.constexpr,
             DEPENDENT_LAUNCH: tl.constexpr, norm_ptr=None, NORM: tl.constexpr = False, EPS: tl.constexpr = 0.0):
    """fp32 [MP, R] over STEPS x BK elements of K, in registers; of the rows' RMS norm with NORM."""
    LANES: tl.constexpr = BK // 8
    k = (tl.arange(0, LANES)[:, None] * 8 + tl.arange(0, 8)[None, :])[None, None, :, :] + k_start
    m = tl.arange(0, MP)[:, None, None, None]
    w_at = w_ptr + (rows.to(tl.int64) * K)[None, :, None, None] + k
    x_at = x_ptr + m * STRIDE_X + k
    w_real = real[None, :, None, None]
    w_next = tl.load(w_at, mask=w_real if EVEN_K else w_real & (k < K), other=0.0, eviction_policy="evict_first")
    if NORM:
        norm = tl.load(norm_ptr + k, mask=k < K, other=0.0)
    await_producers(DEPENDENT_LAUNCH)
    if NORM:
        scale = _row_scales(x_ptr, M, MP, K, STRIDE_X, EPS)[:, None, None, None]
    acc = tl.zeros((MP, R, LANES), dtype=tl.float32)
    for step in range(STEPS - 1):
        w = w_next
        x_real = m < M if EVEN_K else (m < M) & (k + step * BK < K)
        x = tl.load(x_at + step * BK, mask=x_real, other=0.0)
        ahead = w_real if EVEN_K else w_real & (k + (step + 1) * BK < K)
        w_next = tl.load(w_at + (step + 1) * BK, mask=ahead, other=0.0, eviction_policy="evict_first")
        if NORM:
            x = _normed(x, scale, norm)
            norm = tl.load(norm_ptr + k + (step + 1) * BK, mask=k + (step + 1) * BK < K, other=0.0)
        acc += tl.sum(x.to(tl.float32) * w.to(tl.float32), axis=3)
    x_real = m < M if EVEN_K else (m < M) & (k + (STEPS - 1) * BK < K)
    x = tl.load(x_at + (STEPS - 1) * BK, mask=x_real, other=0.0)
    if NORM:
        x = _normed(x, scale, norm)
    acc += tl.sum(x.to(tl.float32) * w_next.to(tl.float32), axis=3)
    return tl.sum(acc, axis=2)


@triton.jit
def _sum_dot(x_ptr, w_ptr, rows, real, k_start, M: tl.constexpr, MP: tl.constexpr, K: tl.constexpr,
             STRIDE_X: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
             EVEN_K: tl.constexpr, WIDEN: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr, norm_ptr=None,
             NORM: tl.constexpr = False, EPS: tl.constexpr = 0.0):
    """fp32 [MP, R] over STEPS x BK elements of K, on the matrix units; of the rows' RMS norm with NORM."""
    k = tl.arange(0, BK) + k_start
    m = tl.arange(0, MP)
    w_at = w_ptr + (rows.to(tl.int64) * K)[None, :] + k[:, None]
    x_at = x_ptr + m[:, None] * STRIDE_X + k[None, :]
    w_real, x_real = real[None, :], (m < M)[:, None]
    w = tl.load(w_at, mask=w_real if EVEN_K else w_real & (k < K)[:, None], other=0.0, eviction_policy="evict_first")
    if NORM:
        norm = tl.load(norm_ptr + k, mask=k < K, other=0.0)
    await_producers(DEPENDENT_LAUNCH)
    x = tl.load(x_at, mask=x_real if EVEN_K else x_real & (k < K)[None, :], other=0.0)
    if NORM:
        scale = _row_scales(x_ptr, M, MP, K, STRIDE_X, EPS)[:, None]
        x = _normed(x, scale, norm[None, :])
    if WIDEN:
        acc = tl.dot(x.to(tl.float32), w.to(tl.float32), input_precision="ieee")
    else:
        acc = tl.dot(x, w)
    for step in tl.range(1, STEPS, num_stages=STAGES):
        here = k + step * BK < K
        x = tl.load(x_at + step * BK, mask=x_real if EVEN_K else x_real & here[None, :], other=0.0)
        w = tl.load(w_at + step * BK, mask=w_real if EVEN_K else w_real & here[:, None], other=0.0,
                    eviction_policy="evict_first")
        if NORM:
            norm = tl.load(norm_ptr + k + step * BK, mask=here, other=0.0)
            x = _normed(x, scale, norm[None, :])
        if WIDEN:
            acc = tl.dot(x.to(tl.float32), w.to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, w, acc)
    return acc


@triton.jit
def _skinny_linear(x_ptr, weight_ptr, router_ptr, logits_ptr, f_ptr, a_ptr, y_ptr, other_ptr, partial_ptr,
                   arrivals_ptr,
                   M: tl.constexpr, MP: tl.constexpr, K: tl.constexpr, ROUTER: tl.constexpr, PLAIN: tl.constexpr,
                   PAIRS: tl.constexpr, TILES_ROUTER: tl.constexpr, TILES_PLAIN: tl.constexpr, TILES: tl.constexpr,
                   STRIDE_X: tl.constexpr, STRIDE_LOGITS: tl.constexpr, STRIDE_F: tl.constexpr,
                   STRIDE_A: tl.constexpr, STRIDE_Y: tl.constexpr, STRIDE_OTHER: tl.constexpr, HAS_F: tl.constexpr,
                   OTHER: tl.constexpr, ACTIVATION: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr,
                   DOT: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr, SPLIT: tl.constexpr,
                   STAGES: tl.constexpr, EVEN_K: tl.constexpr, WIDEN: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    start_dependents(DEPENDENT_LAUNCH)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    rows, real = _tile_rows(tile, R, TILES_ROUTER, TILES_PLAIN, ROUTER, PLAIN, PAIRS)
    w_ptr = weight_ptr
    if TILES_ROUTER > 0:
        if tile < TILES_ROUTER:
            w_ptr = router_ptr
    k_start = part * (STEPS * BK)
    if DOT:
        acc = _sum_dot(x_ptr, w_ptr, rows, real, k_start, M, MP, K, STRIDE_X, R, BK, STEPS, STAGES, EVEN_K, WIDEN,
                       DEPENDENT_LAUNCH)
    else:
        acc = _sum_fma(x_ptr, w_ptr, rows, real, k_start, M, MP, K, STRIDE_X, R, BK, STEPS, EVEN_K, DEPENDENT_LAUNCH)
    if SPLIT > 1:
        inside = tl.arange(0, MP)[:, None] * R + tl.arange(0, R)[None, :]
        at = partial_ptr + tile * (MP * R) + inside
        tl.store(at + part * (TILES * MP * R), acc, cache_modifier=".cg")
        # every thread's store comes before the release by one of them
        tl.debug_barrier()
        last = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
        if last:
            acc = tl.load(at, cache_modifier=".cg")
            for other_part in range(1, SPLIT):
                acc += tl.load(at + other_part * (TILES * MP * R), cache_modifier=".cg")
            tl.store(arrivals_ptr + tile, 0)
            _store(acc, tile, rows, real, logits_ptr, f_ptr, a_ptr, y_ptr, other_ptr, M, MP, R, TILES_ROUTER,
                   TILES_PLAIN, PAIRS, STRIDE_LOGITS, STRIDE_F, STRIDE_A, STRIDE_Y, STRIDE_OTHER, HAS_F, OTHER,
                   ACTIVATION, BETA, LINEAR_BETA)
    else:
        _store(acc, tile, rows, real, logits_ptr, f_ptr, a_ptr, y_ptr, other_ptr, M, MP, R, TILES_ROUTER,
               TILES_PLAIN, PAIRS, STRIDE_LOGITS, STRIDE_F, STRIDE_A, STRIDE_Y, STRIDE_OTHER, HAS_F, OTHER,
               ACTIVATION, BETA, LINEAR_BETA)


def bind(call: Call) -> Launch:
    """The launch for ``call``; pattern names as in ``skinny_linear_menu.py``."""
    x, weight, router = call.tensors["x"], call.tensors["weight"], call.get("router")
    config = Config(**call.config)
    rows, columns = x.shape
    assert weight.is_contiguous(), f"weight {weight.shape} has strides {weight.stride()}"
    assert weight.shape[1] == columns, f"weight {weight.shape} against x {x.shape}"
    assert x.dtype == weight.dtype == torch.bfloat16, f"x {x.dtype}, weight {weight.dtype}"
    assert 1 <= rows <= 64, f"{rows} rows"
    tensors = {"x": x, "weight": weight, "router": router if router is not None else weight}
    outputs = {name: call.get(name) for name in ("logits", "f", "a", "y", "other")}
    if "gated" in call.tensors:
        outputs["other"] = call.tensors["gated"]
    stand_in = next(t for t in outputs.values() if t is not None)
    tensors |= {name: stand_in if t is None else t for name, t in outputs.items()}
    tensors |= {name: call.scratch.get(name, stand_in) for name in ("partial", "arrivals")}
    strides = {f"STRIDE_{name.upper()}": row_stride(tensors[name]) for name in ("x", *outputs)}
    constants = strides | _shape(call, config) | _epilogue(call)
    return KernelLaunch(
        _skinny_linear, (constants["TILES"], config.split), {f"{name}_ptr": t for name, t in tensors.items()},
        constants, config.warps, config.stages, launch_options(call.dependent_launch))


def _shape(call: Call, config: Config) -> dict[str, Any]:
    x, router = call.tensors["x"], call.get("router")
    pairs = 0
    if "a" in call.attrs:
        pairs = call.attrs["up"]["stop"] - call.attrs["up"]["start"]
    groups = (0 if router is None else router.shape[0], call.tensors["weight"].shape[0] - 2 * pairs, pairs)
    tiles = count_tiles(call.config, *groups)
    steps = -(-x.shape[1] // (config.block * config.split))
    assert config.form == "dot" or config.block % 8 == 0, f"block {config.block}"
    assert config.split == 1 or call.scratch, "a split needs its scratch"
    return {
        "M": x.shape[0], "MP": padded_rows(config.form, x.shape[0]), "K": x.shape[1], "ROUTER": groups[0],
        "PLAIN": groups[1], "PAIRS": pairs, "TILES_ROUTER": tiles[0], "TILES_PLAIN": tiles[1], "TILES": sum(tiles),
        "DOT": config.form == "dot", "R": config.rows, "BK": config.block, "STEPS": steps, "SPLIT": config.split,
        "STAGES": config.stages, "EVEN_K": x.shape[1] == steps * config.block * config.split, "WIDEN": INTERPRET,
        "DEPENDENT_LAUNCH": call.dependent_launch,
    }


def _epilogue(call: Call) -> dict[str, Any]:
    activation = call.attrs.get("a")
    beta = (activation or {}).get("beta", 1.0)
    other = 0 if "y" not in call.attrs else GATE if "gated" in call.tensors else ADD
    return {
        "HAS_F": call.get("f") is not None, "OTHER": other,
        "ACTIVATION": NONE if activation is None else SITU if "beta" in activation else SILU,
        "BETA": beta, "LINEAR_BETA": (activation or {}).get("linear_beta", 1.0),
    }
