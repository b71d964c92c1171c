"""The two ends of a step: rows of the embedding table, and logits with the greedy choice among them.

Contract: ``logits = x weight^T`` fp32 [T, V] for x bf16 [T, K] (any row stride) and weight bf16 [V, K], written only
when somebody reads them; ``key`` i64 [T] as in the op ``argmax_key``: the logit as an ordered integer above the
inverted id (of the whole vocabulary: ``rank`` V before this rank's), so that the maximum over ranks picks the winner
and the lower id wins a tie. NaN ranks below every number, -0.0 equals +0.0. ``token`` i32 [T] is the id inside the
key, -1 on padding rows. With ``norm`` [K] bf16 or fp32 the logits are those of ``rms_norm(x, norm)``,
which is not written, of at most 8 rows. ``embed`` gives zeros for token -1 and for tokens of other ranks.

Layout of the logits: a block computes ``rows`` rows of the weight for all T, in the forms of ``skinny_linear`` ("fma"
or "dot"), and raises each row's best key, kept as an unsigned number whose zero is below every key. The last block
to arrive writes keys or tokens and leaves best keys and counter at zero. For the norm every block squares and adds all
of x itself, then rounds each tile of the normed rows to bf16 on its way to the products.

Waits: the first tiles of weight and norm and the rank are loaded before the wait. The trigger is the first instruction.
Numerics: bf16 products, fp32 sums; the choice is made on the fp32 sums. The norm is rounded as the op's result is.
Bytes: V K 2 + T (2 K + 4 V), 10240 x 7168 at one row 146.8 MB: floor on an H200 (2.35 us + bytes / 4.44 TB/s) 35.4 us;
cuBLAS 43.3 us without the choice. Measured: 38.2 us with it, at one row (one H200, TP16, triton 3.6). With the norm
42.1 (53.3 at 8 rows): each block reads x twice and the norm once, from L2 or L1.
Portable: NVIDIA-only calls are behind DEPENDENT_LAUNCH.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..compiler.call import Call, Launch
from .launching import INTERPRET, KernelLaunch, await_producers, launch_options, row_stride, start_dependents
from .skinny_linear import _sum_dot, _sum_fma
from .skinny_linear_menu import padded_rows


@dataclass(frozen=True)
class Config:
    """``rows`` rows of the weight a block, ``block`` elements of K a step."""

    form: str = "fma"
    rows: int = 4
    block: int = 1024
    warps: int = 4
    stages: int = 1


@triton.jit
def _key(logit, token):
    """The op's key of each logit, as i64."""
    logit = tl.where(logit == 0.0, 0.0, logit)
    bits = logit.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = tl.where(logit != logit, -2147483648, ordered).to(tl.int64)
    return (ordered << 32) | (4294967295 - token.to(tl.int64))


@triton.jit
def _token(key):
    return (4294967295 - (key & 4294967295)).to(tl.int32)


@triton.jit
def _logits(x_ptr, w_ptr, rank_ptr, positions_ptr, logits_ptr, out_ptr, best_ptr, arrivals_ptr, norm_ptr,
            M: tl.constexpr, MP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, TILES: tl.constexpr,
            STRIDE_X: tl.constexpr, DOT: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr,
            STAGES: tl.constexpr, EVEN_K: tl.constexpr, HAS_LOGITS: tl.constexpr, TOKENS: tl.constexpr,
            NORM: tl.constexpr, EPS: tl.constexpr, WIDEN: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    start_dependents(DEPENDENT_LAUNCH)
    rows = tl.program_id(0) * R + tl.arange(0, R)
    real = rows < V
    offset = tl.load(rank_ptr) * V
    if DOT:
        acc = _sum_dot(x_ptr, w_ptr, rows, real, 0, M, MP, K, STRIDE_X, R, BK, STEPS, STAGES, EVEN_K, WIDEN,
                       DEPENDENT_LAUNCH, norm_ptr, NORM, EPS)
    else:
        acc = _sum_fma(x_ptr, w_ptr, rows, real, 0, M, MP, K, STRIDE_X, R, BK, STEPS, EVEN_K, DEPENDENT_LAUNCH,
                       norm_ptr, NORM, EPS)
    m = tl.arange(0, MP)
    if HAS_LOGITS:
        tl.store(logits_ptr + m[:, None] * V + rows[None, :], acc, mask=(m < M)[:, None] & real[None, :])
    # the sign turned: unsigned order, and zero below every key
    lowest: tl.constexpr = -9223372036854775808
    keys = tl.where(real[None, :], _key(acc, offset + rows[None, :]), lowest)
    best = (tl.max(keys, axis=1) ^ lowest).to(tl.uint64, bitcast=True)
    best_at = best_ptr.to(tl.pointer_type(tl.uint64), bitcast=True) + m
    tl.atomic_max(best_at, best, mask=m < M, sem="relaxed", scope="gpu")
    # every thread's update comes before the release by one of them
    tl.debug_barrier()
    if tl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu") == TILES - 1:
        tl.store(arrivals_ptr, 0)
        key = tl.load(best_ptr + m, mask=m < M, other=0, cache_modifier=".cg") ^ lowest
        # a row is held by several threads: all must have read it
        tl.debug_barrier()
        tl.store(best_ptr + m, tl.zeros((MP,), tl.int64), mask=m < M)
        if TOKENS:
            live = tl.load(positions_ptr + m, mask=m < M, other=-1) >= 0
            tl.store(out_ptr + m, tl.where(live, _token(key), -1), mask=m < M)
        else:
            tl.store(out_ptr + m, key, mask=m < M)


@triton.jit
def _argmax(logits_ptr, rank_ptr, positions_ptr, out_ptr, V: tl.constexpr, BLOCK: tl.constexpr,
            TOKENS: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    start_dependents(DEPENDENT_LAUNCH)
    row = tl.program_id(0)
    offset = tl.load(rank_ptr) * V
    await_producers(DEPENDENT_LAUNCH)
    lowest: tl.constexpr = -9223372036854775808
    best = tl.full((BLOCK,), lowest, tl.int64)
    for start in range(0, V, BLOCK):
        token = start + tl.arange(0, BLOCK)
        logit = tl.load(logits_ptr + row.to(tl.int64) * V + token, mask=token < V, other=0.0)
        best = tl.maximum(best, tl.where(token < V, _key(logit, offset + token), lowest))
    key = tl.max(best, axis=0)
    if TOKENS:
        live = tl.load(positions_ptr + row) >= 0
        tl.store(out_ptr + row, tl.where(live, _token(key), -1))
    else:
        tl.store(out_ptr + row, key)


@triton.jit
def _tokens(key_ptr, positions_ptr, out_ptr, M: tl.constexpr, MP: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    start_dependents(DEPENDENT_LAUNCH)
    await_producers(DEPENDENT_LAUNCH)
    m = tl.arange(0, MP)
    key = tl.load(key_ptr + m, mask=m < M, other=0)
    live = tl.load(positions_ptr + m, mask=m < M, other=-1) >= 0
    tl.store(out_ptr + m, tl.where(live, _token(key), -1), mask=m < M)


@triton.jit
def _embed(tokens_ptr, table_ptr, rank_ptr, rows_ptr, V: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr,
           DEPENDENT_LAUNCH: tl.constexpr):
    start_dependents(DEPENDENT_LAUNCH)
    row = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.load(tokens_ptr + row)
    local = token - tl.load(rank_ptr) * V
    # as a width: no column of a token that is padding or elsewhere
    width = tl.where((token >= 0) & (local >= 0) & (local < V), D, 0)
    values = tl.load(table_ptr + local.to(tl.int64) * D + column, mask=column < width, other=0.0)
    await_producers(DEPENDENT_LAUNCH)
    tl.store(rows_ptr + row * D + column, values, mask=column < D)


def _padded(count: int) -> int:
    return 1 << (count - 1).bit_length()


def bind(call: Call) -> Launch:
    """Logits and keys, or tokens where they follow on the same rank, of ``x`` or of its RMS norm; names as in
    ``head_menu.py``."""
    config = Config(**call.config)
    x, weight, logits = call.tensors["x"], call.tensors["weight"], call.get("logits")
    rows, columns = x.shape
    tokens, norm = "token" in call.attrs, call.get("norm")
    out = call.tensors["token" if tokens else "key"]
    assert norm is None or norm.shape == (columns,), f"norm {None if norm is None else norm.shape} for x {x.shape}"
    assert weight.is_contiguous(), f"weight {weight.shape} {weight.stride()}"
    assert x.dtype == weight.dtype == torch.bfloat16, f"x {x.dtype}, weight {weight.dtype}"
    assert logits is None or logits.is_contiguous(), f"logits {logits.stride()}"
    steps = -(-columns // config.block)
    tiles = -(-weight.shape[0] // config.rows)
    tensors = {"x_ptr": x, "norm_ptr": weight if norm is None else norm, "w_ptr": weight,
               "rank_ptr": call.tensors["rank"], "out_ptr": out,
               "positions_ptr": call.tensors["positions"] if tokens else call.tensors["rank"],
               "logits_ptr": out if logits is None else logits, "best_ptr": call.scratch["best"],
               "arrivals_ptr": call.scratch["arrivals"]}
    constants = {"M": rows, "MP": padded_rows(config.form, rows), "K": columns, "V": weight.shape[0], "TILES": tiles,
                 "STRIDE_X": row_stride(x), "DOT": config.form == "dot", "R": config.rows, "BK": config.block,
                 "STEPS": steps, "STAGES": config.stages, "EVEN_K": columns == steps * config.block,
                 "HAS_LOGITS": logits is not None, "TOKENS": tokens, "NORM": norm is not None,
                 "EPS": 0.0 if norm is None else call.attrs["h"]["eps"], "WIDEN": INTERPRET,
                 "DEPENDENT_LAUNCH": call.dependent_launch}
    return KernelLaunch(_logits, (tiles,), tensors, constants, config.warps, config.stages,
                        launch_options(call.dependent_launch))


def bind_key(call: Call) -> Launch:
    """``argmax_key`` of given logits, or the token at once."""
    logits, tokens = call.tensors["logits"], "token" in call.attrs
    assert logits.is_contiguous(), f"logits {logits.stride()}"
    tensors = {"logits_ptr": logits, "rank_ptr": call.tensors["rank"],
               "positions_ptr": call.tensors["positions" if tokens else "rank"],
               "out_ptr": call.tensors["token" if tokens else "key"]}
    constants = {"V": logits.shape[1], "BLOCK": min(2048, _padded(logits.shape[1])), "TOKENS": tokens,
                 "DEPENDENT_LAUNCH": call.dependent_launch}
    return KernelLaunch(_argmax, (logits.shape[0],), tensors, constants, call.config["warps"], 1,
                        launch_options(call.dependent_launch))


def bind_token(call: Call) -> Launch:
    """``token_of_key``."""
    key = call.tensors["key"]
    tensors = {"key_ptr": key, "positions_ptr": call.tensors["positions"], "out_ptr": call.tensors["token"]}
    constants = {"M": key.shape[0], "MP": _padded(key.shape[0]), "DEPENDENT_LAUNCH": call.dependent_launch}
    return KernelLaunch(_tokens, (1,), tensors, constants, 1, 1, launch_options(call.dependent_launch))


def bind_embed(call: Call) -> Launch:
    """``embed``."""
    tokens, table, rows = (call.tensors[n] for n in ("tokens", "table", "rows"))
    assert table.is_contiguous(), f"table {table.stride()}"
    assert rows.is_contiguous(), f"rows {rows.stride()}"
    columns = min(call.config["columns"], _padded(table.shape[1]))
    tensors = {"tokens_ptr": tokens, "table_ptr": table, "rank_ptr": call.tensors["rank"], "rows_ptr": rows}
    constants = {"V": table.shape[0], "D": table.shape[1], "COLUMNS": columns,
                 "DEPENDENT_LAUNCH": call.dependent_launch}
    return KernelLaunch(_embed, (-(-table.shape[1] // columns), tokens.shape[0]), tensors, constants,
                        call.config["warps"], 1, launch_options(call.dependent_launch))
