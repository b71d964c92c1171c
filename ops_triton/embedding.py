"""The ends of the step, one op a launch: look-up of token rows, the greedy choice as a key, and the id inside a key.

Contract: ``embed``: tokens i32 [T], table [V, D] of this rank, ``rank`` i32 [1], result [T, D]: zeros for tokens of
other ranks and for -1. ``argmax_key``: logits [T, V] with any row stride, keys i64 [T]: the logit as an ordered
integer above, the inverted id below, so that the largest key is the largest logit and the lowest id among equals; NaN
ranks below every number and -0 equals +0. ``token_of_key``: i32 [T], -1 where the position is negative.

Layout: embed (columns, rows). argmax (splits, rows): each block keeps one key a lane and reduces once; with several
splits the last block of a row to arrive takes the largest of their keys and resets the counter.
Waits: everything is read after the wait for the producers. The trigger is the first instruction.
Numerics: exact.
Bytes: 10240 logits of a TP16 rank are 41 kB a row: a boundary (1.2 us on an H200). Measured: not measured yet.
Portable: NVIDIA-only calls are behind DEPENDENT_LAUNCH.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..compiler.call import Call
from .launching import KernelLaunch, await_producers, launch_options, row_stride, start_dependents
from .pointwise_menu import power_of_two

TOKENS = 128  # keys of one thread block of ``token_of_key``


@dataclass(frozen=True)
class EmbedConfig:
    """``columns`` of one row a thread block."""

    columns: int = 1024
    warps: int = 4


@dataclass(frozen=True)
class KeyConfig:
    """``splits`` thread blocks a row, each ``block`` logits at a time."""

    splits: int = 1
    block: int = 1024
    warps: int = 4


@triton.jit
def _embed(tokens, table, rank, y, ENTRIES: tl.constexpr, D: tl.constexpr, STRIDE_Y: tl.constexpr, C: tl.constexpr,
           DEPENDENT_LAUNCH: tl.constexpr):
    start_dependents(DEPENDENT_LAUNCH)
    row = tl.program_id(1)
    column = tl.program_id(0) * C + tl.arange(0, C)
    real = column < D
    await_producers(DEPENDENT_LAUNCH)
    token = tl.load(tokens + row)
    entry = token.to(tl.int64) - tl.load(rank).to(tl.int64) * ENTRIES
    out = y + row * STRIDE_Y + column
    if (token >= 0) & (entry >= 0) & (entry < ENTRIES):
        x = tl.load(table + entry * D + column, mask=real, other=0.0).to(tl.float32)
        tl.store(out, x.to(y.dtype.element_ty), mask=real)
    else:
        tl.store(out, tl.zeros((C,), tl.float32).to(y.dtype.element_ty), mask=real)


@triton.jit
def _keys(x, index):
    """i64 keys of fp32 logits with their ids."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    ordered = tl.where(x != x, -2147483648, ordered)
    return (ordered << 32) | (4294967295 - index)


@triton.jit
def _argmax(logits, rank, key, best, arrivals, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, SPLITS: tl.constexpr,
            SPLITS_PADDED: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    start_dependents(DEPENDENT_LAUNCH)
    LOWEST: tl.constexpr = -9223372036854775808
    row = tl.program_id(1)
    split = tl.program_id(0)
    column = split * (STEPS * BLOCK) + tl.arange(0, BLOCK)
    logits += row.to(tl.int64) * STRIDE
    found = tl.full((BLOCK,), LOWEST, tl.int64)
    await_producers(DEPENDENT_LAUNCH)
    first = tl.load(rank).to(tl.int64) * COLUMNS
    for step in range(STEPS):
        here = column + step * BLOCK
        x = tl.load(logits + here, mask=here < COLUMNS, other=0.0).to(tl.float32)
        found = tl.maximum(found, tl.where(here < COLUMNS, _keys(x, here + first), LOWEST))
    mine = tl.max(found, axis=0)
    if SPLITS == 1:
        tl.store(key + row, mine)
    else:
        tl.store(best + row * SPLITS + split, mine)
        tl.debug_barrier()
        if tl.atomic_add(arrivals + row, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            index = tl.arange(0, SPLITS_PADDED)
            every = tl.load(best + row * SPLITS + index, mask=index < SPLITS, other=LOWEST, cache_modifier=".cg")
            tl.store(key + row, tl.max(every, axis=0))
            tl.store(arrivals + row, 0)


@triton.jit
def _token(key, positions, token, ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    start_dependents(DEPENDENT_LAUNCH)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = row < ROWS
    await_producers(DEPENDENT_LAUNCH)
    low = tl.load(key + row, mask=real, other=0) & 4294967295
    live = tl.load(positions + row, mask=real, other=-1) >= 0
    tl.store(token + row, tl.where(live, 4294967295 - low, -1).to(tl.int32), mask=real)


def bind_embed(call: Call) -> KernelLaunch:
    """The launch of ``embed``."""
    config = EmbedConfig(**call.config)
    tokens, table, rank, y = (call.tensors[name] for name in ("tokens", "table", "rank", "y"))
    entries, columns = table.shape
    assert table.is_contiguous(), f"the table is strided: {table.stride()}"
    assert y.shape == (tokens.shape[0], columns), f"rows {y.shape} of {columns} columns"
    constants = {"ENTRIES": entries, "D": columns, "STRIDE_Y": row_stride(y), "C": config.columns,
                 "DEPENDENT_LAUNCH": call.dependent_launch}
    pointers = {"tokens": tokens, "table": table, "rank": rank, "y": y}
    return KernelLaunch(_embed, (-(-columns // config.columns), tokens.shape[0]), pointers, constants, config.warps, 1,
                        launch_options(call.dependent_launch))


def bind_key(call: Call) -> KernelLaunch:
    """The launch of ``argmax_key``."""
    config = KeyConfig(**call.config)
    logits, rank, key = (call.tensors[name] for name in ("logits", "rank", "key"))
    rows, columns = logits.shape
    assert key.dtype == torch.int64, f"keys {key.dtype}"
    assert config.splits == 1 or call.scratch, "a split needs its scratch"
    constants = {
        "COLUMNS": columns, "STRIDE": row_stride(logits), "SPLITS": config.splits,
        "SPLITS_PADDED": power_of_two(config.splits), "STEPS": -(-columns // (config.splits * config.block)),
        "BLOCK": config.block, "DEPENDENT_LAUNCH": call.dependent_launch,
    }
    pointers = {"logits": logits, "rank": rank, "key": key, "best": call.scratch.get("best", key),
                "arrivals": call.scratch.get("arrivals", rank)}
    return KernelLaunch(_argmax, (config.splits, rows), pointers, constants, config.warps, 1,
                        launch_options(call.dependent_launch))


def bind_token(call: Call) -> KernelLaunch:
    """The launch of ``token_of_key``."""
    key, positions, token = (call.tensors[name] for name in ("key", "positions", "token"))
    assert key.shape == positions.shape == token.shape, f"keys {key.shape}, positions {positions.shape}"
    constants = {"ROWS": key.shape[0], "BLOCK": TOKENS, "DEPENDENT_LAUNCH": call.dependent_launch}
    return KernelLaunch(_token, (-(-key.shape[0] // TOKENS),), {"key": key, "positions": positions, "token": token},
                        constants, 4, 1, launch_options(call.dependent_launch))
