"""Attention of a decode step over the paged latent cache of multi-head latent attention, split along the context.

Contract: ``query`` bf16 [T, H, R + r] contiguous, T = S sequences x L rows; ``cache`` bf16 or fp8_e4m3
[pages + 1, page, R + r]; ``page_table`` i32 [S, pages of the planned context]; ``positions`` i32 [T], -1 is padding.
Result ``mixed`` bf16 [T, H, R], or with ``w_uv`` bf16 [H, v, R] and perhaps ``gate`` bf16 [T, H*v] (any row stride) the
projected and gated rows ``o`` bf16 [T, H*v]. A row sees the entries up to its own position, so rows of one sequence
are causal among themselves. Entries past the last position are never read; padding rows give exact zeros.

Layout: grid (splits, tiles of query rows, sequences). ``splits`` comes from the planned context, never from the live
length. All L x H rows of a sequence (padded to 16, 32 or 64) share each tile of ``block`` entries: scores are
entries x query^T and the mix is entries^T x weights^T, so that both products have a tall first operand and the tile is
stored in shared memory once. Each split leaves its mix, already divided by its sum, and log2 of that sum.
A split of one tile holds it in registers. More tiles of bf16 pass through a pipeline of asynchronous copies, whose
addresses come from the split's part of the page table, held in registers; more tiles of fp8 are loaded into registers
one ahead (in words of 4 bytes: a loop that carries single bytes takes a register for each), since they must be
converted on the way to shared memory. The splits meet in one of two ways: "last", the last block of a sequence to
arrive adds them up (few splits); "launch", a second kernel does, parallel over heads and ``columns`` of the latent,
with the projection out of latent space behind it; there the last block of a head adds the columns' parts and applies
the gate. Arrival counters are left at zero.

Waits: entries before the first position of this step were written by earlier steps, which are complete; a tile that
holds only such entries is loaded before the wait. Positions and page table are step inputs. Weights ``w_uv`` are
loaded before the wait of the second kernel. The trigger is the first instruction.
Numerics: fp32 softmax in base 2, weights rounded to bf16 for the product, fp32 sums; one rounding of the result.
``kv_scale`` multiplies the scores and the result. Partial mixes are fp32 or bf16 by the dtype of the scratch.
Bytes at context 8192: 9.4 MB (bf16) or 4.7 MB (fp8) a sequence; floor on an H200 (2.35 us + bytes / 4.44 TB/s) 4.5 or
3.4 us. Measured: 9.8 us at one row, context 8192, bf16, with 32 entries on 4 warps; 17.5 at 8 verify
rows (one H200, TP16, triton 3.6).
Portable: NVIDIA-only calls are behind DEPENDENT_LAUNCH.
"""
from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import Any

import torch
import triton
import triton.language as tl

from ..compiler.call import Call, Launch
from ..compiler.launches import LaunchSequence
from .launching import (
    INTERPRET,
    KernelLaunch,
    await_producers,
    launch_options,
    row_stride,
    start_dependents,
)
from .mla_menu import ROW_TILE, padded

LAST, LAUNCH = 1, 2  # MERGE; 0 is a single split
MERGE_ELEMENTS = 8192  # of partial results in the registers of 4 warps at once


@dataclass(frozen=True)
class Config:
    """``splits`` blocks a sequence and ``tile`` query rows, each over tiles of ``block`` entries; ``columns``,
    ``group`` (rows a block) and ``merge_warps`` are those of the second kernel, ``partial`` the dtype of the splits'
    mixes."""

    splits: int = 128
    block: int = 64
    tile: int = ROW_TILE
    warps: int = 8
    stages: int = 1
    merge: str = "launch"  # or "last"
    partial: str = "fp32"  # or "bf16"
    columns: int = 64
    group: int = 1
    merge_warps: int = 4


@triton.jit
def round_to(x, TYPE: tl.constexpr, PRODUCT: tl.constexpr):
    """fp32 ``x`` as TYPE. The interpreter (PRODUCT is fp32) cuts bits off for bf16 and forgets a carry for fp8."""
    if PRODUCT == tl.float32:  # noqa: SIM300
        bits = x.to(tl.int32, bitcast=True)
        if TYPE == tl.bfloat16:  # noqa: SIM300
            x = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
        elif TYPE == tl.float8e4nv:  # noqa: SIM300
            x = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    return x.to(TYPE)


@triton.jit
def _address(cache, page, start, BLOCK: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr):
    """Where each entry of a tile begins, [BLOCK, 1]. A page for the whole tile makes one address with offsets."""
    i = tl.arange(0, BLOCK)
    if PAGE % BLOCK == 0:
        return cache + (page * PAGE + start % PAGE) * WIDTH + i[:, None] * WIDTH
    else:
        return cache + ((page * PAGE + (start + i) % PAGE) * WIDTH)[:, None]


@triton.jit
def _page_of(table, start, first, last, BLOCK: tl.constexpr, PAGE: tl.constexpr):
    """Page of the tile, or of each entry; 0 outside of [first, last]."""
    if PAGE % BLOCK == 0:
        page = tl.load(table + start // PAGE, mask=(start >= first) & (start <= last), other=0)
    else:
        token = start + tl.arange(0, BLOCK)
        page = tl.load(table + token // PAGE, mask=(token >= first) & (token <= last), other=0)
    return tl.maximum(page, 0).to(tl.int64)


@triton.jit
def _select_page(pages, start, first, BLOCK: tl.constexpr, PAGE: tl.constexpr, HELD: tl.constexpr):
    """The same from the split's own pages, held in registers: a look-up in memory would stop the pipeline."""
    held = tl.arange(0, HELD)
    if PAGE % BLOCK == 0:
        page = tl.sum(tl.where(held == start // PAGE - first // PAGE, pages, 0), axis=0)
    else:
        wanted = (start + tl.arange(0, BLOCK)) // PAGE - first // PAGE
        page = tl.sum(tl.where(held[None, :] == wanted[:, None], pages[None, :], 0), axis=1)
    return tl.maximum(page, 0).to(tl.int64)


@triton.jit
def _load_tile(at, start, first, last, latent, rest, BLOCK: tl.constexpr, R: tl.constexpr, REST: tl.constexpr):
    """Entries ``start`` + [0, BLOCK) that lie in [first, last], the others as ``latent`` and ``rest`` have them."""
    token = start + tl.arange(0, BLOCK)
    wanted = ((token >= first) & (token <= last))[:, None]
    return (tl.load(at + tl.arange(0, R)[None, :], mask=wanted, other=latent),
            tl.load(at + R + tl.arange(0, REST)[None, :], mask=wanted, other=rest))


@triton.jit
def _halves(x, TYPE: tl.constexpr, SHIFT: tl.constexpr):
    """The two halves of each value side by side, as TYPE of half the width."""
    return tl.reshape(tl.join(x.to(TYPE), (x >> SHIFT).to(TYPE)), (x.shape[0], 2 * x.shape[1]))


@triton.jit
def _bytes_of(words, ENTRY: tl.constexpr, PRODUCT: tl.constexpr):
    """Words of 4 bytes as 1-byte values ENTRY, in the dtype of the product."""
    return _halves(_halves(words, tl.int16, 16), tl.int8, 8).to(ENTRY, bitcast=True).to(PRODUCT)


@triton.jit
def _mix_tile(k, k_rest, query, query_rest, start, position, best, total, acc, BLOCK: tl.constexpr,
              SCALE: tl.constexpr):
    """One tile of entries added to a running softmax: k [BLOCK, R], query [N, R], acc [R, N]."""
    token = start + tl.arange(0, BLOCK)
    # "ieee" matters in the interpreter only, where the operands are fp32
    scores = tl.dot(k, tl.trans(query), input_precision="ieee")
    scores = tl.dot(k_rest, tl.trans(query_rest), scores, input_precision="ieee")
    scores = tl.where(token[:, None] <= position[None, :], scores * SCALE, float("-inf"))
    above = tl.maximum(best, tl.max(scores, axis=0))
    base = tl.where(above == float("-inf"), 0.0, above)
    weight = tl.exp2(scores - base[None, :])
    fade = tl.exp2(best - base)
    acc = tl.dot(tl.trans(k), weight.to(k.dtype), acc * fade[None, :], input_precision="ieee")
    return above, total * fade + tl.sum(weight, axis=0), acc


@triton.jit
def _add_splits(partial, log_sum, first, rows, position, real, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
                ROWS: tl.constexpr, R: tl.constexpr, N: tl.constexpr):
    """Mix of all splits for a tile of rows, fp32 [N, R]; splits that a row does not reach are not read."""
    column = tl.arange(0, R)
    best = tl.full((N,), float("-inf"), tl.float32)
    for split in range(SPLITS):
        mine = real & (split * CHUNK <= position)
        best = tl.maximum(best, tl.load(log_sum + first + split * ROWS + rows, mask=mine, other=float("-inf"),
                                        cache_modifier=".cg"))
    base = tl.where(best == float("-inf"), 0.0, best)
    total = tl.zeros((N,), tl.float32)
    acc = tl.zeros((N, R), tl.float32)
    for split in range(SPLITS):
        mine = real & (split * CHUNK <= position)
        row = first + split * ROWS + rows
        weight = tl.exp2(tl.load(log_sum + row, mask=mine, other=float("-inf"), cache_modifier=".cg") - base)
        mix = tl.load(partial + row[:, None] * R + column[None, :], mask=mine[:, None], other=0.0,
                      cache_modifier=".cg")
        total += weight
        acc += weight[:, None] * mix.to(tl.float32)
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def _attend(query, cache, positions, page_table, mixed, partial, log_sum, arrivals,
            L: tl.constexpr, LP: tl.constexpr, HEADS: tl.constexpr, R: tl.constexpr, REST: tl.constexpr,
            PAGE: tl.constexpr, PAGES: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
            SPLITS: tl.constexpr, SCALE: tl.constexpr, KV_SCALE: tl.constexpr, MERGE: tl.constexpr,
            HELD: tl.constexpr, STAGES: tl.constexpr, PRODUCT: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    start_dependents(DEPENDENT_LAUNCH)
    ROWS: tl.constexpr = L * HEADS
    WIDTH: tl.constexpr = R + REST
    CHUNK: tl.constexpr = TILES * BLOCK
    split = tl.program_id(0)
    sequence = tl.program_id(2)
    rows = tl.program_id(1) * N + tl.arange(0, N)  # of the sequence: row of the step, then head
    real = rows < ROWS
    steps = tl.arange(0, LP)
    every = tl.load(positions + sequence * L + steps, mask=steps < L, other=-1)
    last = tl.max(every, axis=0)
    oldest_new = tl.min(tl.where(every >= 0, every, 2147483647), axis=0)
    position = tl.load(positions + sequence * L + rows // HEADS, mask=real, other=-1)
    table = page_table + sequence * PAGES
    start = split * CHUNK
    column = tl.arange(0, R)
    rest_column = R + tl.arange(0, REST)
    PIPELINED: tl.constexpr = TILES > 1 and cache.dtype.element_ty == tl.bfloat16
    # entries of 1 byte in a loop are carried as words
    PACK: tl.constexpr = 4 if TILES > 1 and not PIPELINED else 1
    NONE: tl.constexpr = 0 if PACK > 1 else 0.0
    source = cache
    if PACK > 1:
        source = cache.to(tl.pointer_type(tl.int32), bitcast=True)
    # the first tile is loaded now, unless it has entries of this step
    before = tl.where(start + BLOCK <= oldest_new, last, -1)
    if not PIPELINED:
        page = _page_of(table, start, 0, before, BLOCK, PAGE)
        latent, rest = _load_tile(_address(source, page, start, BLOCK, PAGE, WIDTH // PACK), start, 0, before,
                                  NONE, NONE, BLOCK, R // PACK, REST // PACK)
    else:
        held = start // PAGE + tl.arange(0, HELD)
        pages = tl.load(table + held, mask=held < PAGES, other=0)
    await_producers(DEPENDENT_LAUNCH)

    if start <= last:
        query_at = query + (sequence * ROWS + rows)[:, None] * WIDTH
        wide = tl.load(query_at + column[None, :], mask=real[:, None], other=0.0).to(PRODUCT)
        wide_rest = tl.load(query_at + rest_column[None, :], mask=real[:, None], other=0.0).to(PRODUCT)
        best = tl.full((N,), float("-inf"), tl.float32)
        total = tl.zeros((N,), tl.float32)
        acc = tl.zeros((R, N), tl.float32)
        if PIPELINED:
            for tile in tl.range(tl.minimum((last - start) // BLOCK + 1, TILES), num_stages=STAGES):
                here = start + tile * BLOCK
                page = _select_page(pages, here, start, BLOCK, PAGE, HELD)
                latent, rest = _load_tile(_address(cache, page, here, BLOCK, PAGE, WIDTH), here, 0, last, NONE, NONE,
                                          BLOCK, R, REST)
                best, total, acc = _mix_tile(latent.to(PRODUCT), rest.to(PRODUCT), wide, wide_rest, here, position,
                                             best, total, acc, BLOCK, SCALE)
        else:
            page = _page_of(table, start, before + 1, last, BLOCK, PAGE)
            latent, rest = _load_tile(_address(source, page, start, BLOCK, PAGE, WIDTH // PACK), start, before + 1,
                                      last, latent, rest, BLOCK, R // PACK, REST // PACK)
            if TILES == 1:
                best, total, acc = _mix_tile(latent.to(PRODUCT), rest.to(PRODUCT), wide, wide_rest, start, position,
                                             best, total, acc, BLOCK, SCALE)
            else:
                end = tl.minimum(last, start + CHUNK - 1)
                for here in tl.range(start, end + 1, BLOCK, num_stages=1):
                    k = _bytes_of(latent, cache.dtype.element_ty, PRODUCT)
                    k_rest = _bytes_of(rest, cache.dtype.element_ty, PRODUCT)
                    page = _page_of(table, here + BLOCK, 0, end, BLOCK, PAGE)
                    latent, rest = _load_tile(_address(source, page, here + BLOCK, BLOCK, PAGE, WIDTH // PACK),
                                              here + BLOCK, 0, end, NONE, NONE, BLOCK, R // PACK, REST // PACK)
                    best, total, acc = _mix_tile(k, k_rest, wide, wide_rest, here, position, best, total, acc, BLOCK,
                                                 SCALE)
        mix = acc / tl.where(total > 0, total, 1.0)[None, :]
        if MERGE == 0:
            out = mixed + (sequence * ROWS + rows)[None, :] * R + column[:, None]
            tl.store(out, (mix * KV_SCALE).to(mixed.dtype.element_ty), mask=real[None, :])
        else:
            row = (sequence * SPLITS + split) * ROWS + rows
            tl.store(partial + row[None, :] * R + column[:, None], round_to(mix, partial.dtype.element_ty, PRODUCT),
                     mask=real[None, :], cache_modifier=".cg")
            tl.store(log_sum + row, best + tl.log2(total), mask=real, cache_modifier=".cg")
    elif MERGE == 0:
        nothing = tl.zeros((N, R), tl.float32).to(mixed.dtype.element_ty)
        tl.store(mixed + (sequence * ROWS + rows)[:, None] * R + column[None, :], nothing, mask=real[:, None])
    if MERGE == 1:
        # every thread's store comes before the release by one of them
        tl.debug_barrier()
        counter = arrivals + sequence * tl.num_programs(1) + tl.program_id(1)
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            tl.store(counter, 0)
            whole = _add_splits(partial, log_sum, sequence * (SPLITS * ROWS), rows, position, real, SPLITS, CHUNK,
                                ROWS, R, N)
            out = mixed + (sequence * ROWS + rows)[:, None] * R + column[None, :]
            tl.store(out, (whole * KV_SCALE).to(mixed.dtype.element_ty), mask=real[:, None])


@triton.jit
def _merge(partial, log_sum, positions, w_uv, gate, mixed, out, parts, arrivals,
           L: tl.constexpr, HEADS: tl.constexpr, R: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, T: tl.constexpr,
           SPLITS: tl.constexpr, SP: tl.constexpr, BATCH: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
           COLUMNS: tl.constexpr, KV_SCALE: tl.constexpr, PROJECT: tl.constexpr, GATED: tl.constexpr,
           STRIDE_GATE: tl.constexpr, PRODUCT: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    """The splits of GROUP rows of one head, for COLUMNS of the latent; PROJECT: those columns' part of ``w_uv``."""
    start_dependents(DEPENDENT_LAUNCH)
    ROWS: tl.constexpr = L * HEADS
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2) * GROUP + tl.arange(0, GROUP)  # of the step
    real = row < T
    column = chunk * COLUMNS + tl.arange(0, COLUMNS)
    value = tl.arange(0, VP)
    position = tl.load(positions + row, mask=real, other=-1)
    if PROJECT:
        weight = tl.load(w_uv + (head * V + value)[:, None] * R + column[None, :], mask=(value < V)[:, None], other=0.0)
    await_producers(DEPENDENT_LAUNCH)

    # row of split 0 of this head in the partial results
    first = (row // L) * (SPLITS * ROWS) + (row % L) * HEADS + head
    split = tl.arange(0, SP)
    reached = (split[:, None] < SPLITS) & (split[:, None] * CHUNK <= position[None, :])
    sums = tl.load(log_sum + first[None, :] + split[:, None] * ROWS, mask=reached, other=float("-inf"))
    best = tl.max(sums, axis=0)
    best = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(tl.exp2(sums - best[None, :]), axis=0)
    mix = tl.zeros((GROUP, COLUMNS), tl.float32)
    for start in tl.range(0, SP, BATCH, num_stages=1):
        some = start + tl.arange(0, BATCH)
        mine = (some[:, None] < SPLITS) & (some[:, None] * CHUNK <= position[None, :])
        at = first[None, :] + some[:, None] * ROWS
        share = tl.exp2(tl.load(log_sum + at, mask=mine, other=float("-inf")) - best[None, :])
        tile = tl.load(partial + at[:, :, None] * R + column[None, None, :], mask=mine[:, :, None], other=0.0)
        mix += tl.sum(tile.to(tl.float32) * share[:, :, None], axis=0)
    mix = mix * (KV_SCALE / tl.where(total > 0, total, 1.0))[:, None]
    if PROJECT:
        if GROUP == 1:
            part = tl.sum(weight.to(tl.float32) * mix, axis=1)[None, :]
        else:
            part = tl.dot(mix.to(PRODUCT), tl.trans(weight.to(PRODUCT)), input_precision="ieee")
        at = parts + (row[:, None] * HEADS + head) * V + value[None, :]
        inside = real[:, None] & (value < V)[None, :]
        tl.store(at + chunk * (T * HEADS * V), part, mask=inside, cache_modifier=".cg")
        # every thread's store comes before the release by one of them
        tl.debug_barrier()
        counter = arrivals + tl.program_id(2) * HEADS + head
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == R // COLUMNS - 1:
            tl.store(counter, 0)
            whole = tl.zeros((GROUP, VP), tl.float32)
            for other in range(R // COLUMNS):
                whole += tl.load(at + other * (T * HEADS * V), mask=inside, other=0.0, cache_modifier=".cg")
            if GATED:
                opening = tl.load(gate + row[:, None] * STRIDE_GATE + head * V + value[None, :], mask=inside, other=0.0)
                whole = whole / (1.0 + tl.exp(-opening.to(tl.float32)))
            # zero whatever the gate of a padding row is
            whole = tl.where((position >= 0)[:, None], whole, 0.0)
            tl.store(out + (row[:, None] * HEADS + head) * V + value[None, :], whole.to(out.dtype.element_ty),
                     mask=inside)
    else:
        tl.store(mixed + (row[:, None] * HEADS + head) * R + column[None, :], mix.to(mixed.dtype.element_ty),
                 mask=real[:, None])


def bind(call: Call) -> Launch:
    """The launch for ``call``; pattern names as in ``mla_menu.py``."""
    config = Config(**call.config)
    sizes = _sizes(call, config)
    out = call.get("y") if call.get("y") is not None else call.get("o")
    alone = out is None
    attend = _attend_launch(call, config, sizes, call.tensors["mixed"] if alone else call.tensors["query"])
    if alone and (config.merge == "last" or config.splits == 1):
        return attend
    return LaunchSequence((attend, _merge_launch(call, config, sizes, out)))


def _sizes(call: Call, config: Config) -> dict[str, int]:
    """Dimensions, with the tiles of a split from the planned context."""
    query, cache, table = (call.tensors[n] for n in ("query", "cache", "page_table"))
    attend = call.attrs["mixed"]
    rows, heads, width = query.shape
    context = table.shape[1] * cache.shape[1]
    tiles = -(-context // (config.splits * config.block))
    assert rows == table.shape[0] * attend["query"], f"{rows} rows, {table.shape[0]} sequences x {attend['query']}"
    assert cache.shape[2] == width, f"cache {cache.shape}, query {query.shape}"
    assert cache.dtype in (torch.bfloat16, torch.float8_e4m3fn), f"cache {cache.dtype}"
    assert query.dtype == torch.bfloat16, f"query {query.dtype}"
    for name in ("query", "cache", "positions", "page_table"):
        assert call.tensors[name].is_contiguous(), f"{name} is strided: {call.tensors[name].stride()}"
    return {"T": rows, "L": attend["query"], "HEADS": heads, "R": attend["latent"], "REST": width - attend["latent"],
            "PAGE": cache.shape[1], "PAGES": table.shape[1], "TILES": tiles, "SEQUENCES": table.shape[0]}


def _attend_launch(call: Call, config: Config, sizes: dict[str, int], mixed: torch.Tensor) -> KernelLaunch:
    attrs, rows = call.attrs["mixed"], sizes["L"] * sizes["HEADS"]
    tile = min(config.tile, padded(rows, 16))
    alone = call.get("y") is None and call.get("o") is None
    merge = LAUNCH if config.merge == "launch" or not alone else LAST
    if alone and config.splits == 1:
        merge = 0
    # pages of a split, one more where it begins inside of one
    held = padded(sizes["TILES"] * config.block // sizes["PAGE"] + 2)
    assert merge == 0 or call.scratch, "splits need their scratch"
    tensors = {name: call.tensors[name] for name in ("query", "cache", "positions", "page_table")} | {"mixed": mixed}
    tensors |= {name: call.scratch.get(name, mixed) for name in ("partial", "log_sum", "arrivals")}
    constants: dict[str, Any] = {
        name: sizes[name] for name in ("L", "HEADS", "R", "REST", "PAGE", "PAGES", "TILES")} | {
        "LP": padded(sizes["L"]), "N": tile, "BLOCK": config.block, "SPLITS": config.splits,
        "SCALE": attrs["scale"] * attrs["kv_scale"] * log2(2.718281828459045), "KV_SCALE": attrs["kv_scale"],
        "MERGE": merge, "STAGES": config.stages, "HELD": held, "PRODUCT": tl.float32 if INTERPRET else tl.bfloat16,
        "DEPENDENT_LAUNCH": call.dependent_launch}
    return KernelLaunch(_attend, (config.splits, -(-rows // tile), sizes["SEQUENCES"]), tensors, constants,
                        config.warps, config.stages, launch_options(call.dependent_launch))


def _merge_launch(call: Call, config: Config, sizes: dict[str, int], out: torch.Tensor | None) -> KernelLaunch:
    project = out is not None
    w_uv, gate = call.get("w_uv"), call.get("gate")
    value = w_uv.shape[1] if w_uv is not None else 1
    assert sizes["R"] % config.columns == 0, f"{config.columns} columns of {sizes['R']}"
    assert w_uv is None or (w_uv.is_contiguous() and w_uv.dtype == torch.bfloat16), f"w_uv {w_uv.shape} {w_uv.dtype}"
    target = out if out is not None else call.tensors["mixed"]
    assert target.is_contiguous(), f"result {target.shape} {target.stride()}"
    splits = padded(config.splits)
    # a load of bf16 takes a register for each value until it is widened
    held = MERGE_ELEMENTS * config.merge_warps // 4 // (2 if config.partial == "bf16" else 1)
    tensors = {name: call.scratch[name] for name in ("partial", "log_sum")} | {
        "positions": call.tensors["positions"], "w_uv": target if w_uv is None else w_uv,
        "gate": target if gate is None else gate, "mixed": target, "out": target}
    tensors |= {name: call.scratch.get(name, target) for name in ("parts", "arrivals")}
    constants: dict[str, Any] = {name: sizes[name] for name in ("T", "L", "HEADS", "R")} | {
        "V": value, "VP": padded(value, 16 if config.group > 1 else 1), "SPLITS": config.splits, "SP": splits,
        "BATCH": min(splits, max(1, held // (config.group * config.columns))),
        "CHUNK": sizes["TILES"] * config.block, "GROUP": config.group, "COLUMNS": config.columns,
        "KV_SCALE": call.attrs["mixed"]["kv_scale"], "PROJECT": project, "GATED": gate is not None,
        "STRIDE_GATE": 0 if gate is None else row_stride(gate), "PRODUCT": tl.float32 if INTERPRET else tl.bfloat16,
        "DEPENDENT_LAUNCH": call.dependent_launch}
    grid = (sizes["R"] // config.columns, sizes["HEADS"], -(-sizes["T"] // config.group))
    return KernelLaunch(_merge, grid, tensors, constants, config.merge_warps, 1,
                        launch_options(call.dependent_launch))
