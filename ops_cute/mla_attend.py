"""Attention of a decode step over the paged latent cache of multi-head latent attention, in one launch.

Contract: as ``ops_triton/mla_decode.py``. ``query`` bf16 [T, H, R + r] contiguous, T = S sequences x L rows; ``cache``
bf16 or fp8_e4m3 [pages + 1, page, R + r]; ``page_table`` i32 [S, pages of the planned context]; ``positions`` i32 [T],
-1 is padding. Result ``mixed`` bf16 [T, H, R]. A row sees the entries up to its own position, so rows of one sequence
are causal among themselves. Entries past the last position are never read; padding rows give exact zeros. R and r are
multiples of 16. The L x H query rows of a sequence go in tiles of up to 48, each of which reads the entries.

Layout: at most one block on each multiprocessor. A block has one tile of query rows and a contiguous part of one
sequence's planned context: the multiprocessors over sequences and row tiles, never the live length, fix the parts.
* The copier, a warp of its own, has the copy engine fetch entries row by row into tiles of 32 or 64. In shared memory
  a row takes an odd number of 16 bytes, so that reading 8 rows side by side has no bank conflict. A part that fits is
  there as a whole; longer ones stream through a ring of tiles. Rows of the last tile that no position reaches get its
  first entry again, so that nothing that is no number is multiplied by the weight 0;
* entries of fp8 become bf16, exactly, in one of two tiles beside the ring, before the wait where the part is one tile;
* scores: entries are the 16 rows of the matrix instruction, 8 query rows its columns. 8 warps share 64 entries and
  quarters of the columns, or 32 entries; operands of the query, which lies in shared memory, serve two tiles of 16;
* softmax: 8 lanes have a query row; the sums over the warps' columns are formed here. Rows go side by side;
* mix: a warp has R / 8 latent columns. Entries are read transposed (``ldmatrix.trans``), so columns are the tall
  operand and the tile is the same that the scores read;
* parts meet inside the launch (``mla_attend_merge.py``), in one hop through L2 that all blocks take part in.
Two barriers of the warps that multiply stand around the softmax of a tile, one more behind the conversion of fp8.

Why one hop and no clusters: at one row a block leaves 6 KB of mixes and reads as much. Distributed shared memory would
add a hop and a barrier, for bytes that take 0.2 us; and blocks that wait for each other must all be resident, which
clusters of 8 are on 128 multiprocessors or on fewer, as a chip's defects have it. The last block of a sequence alone
would add up 0.8 MB.

Waits: entries before the first position of this step were written by earlier steps, which are complete; they are on
their way before the wait, as many as there are slots. Positions and the page table are step inputs. The query, the
entries of this step and the workspace come after it. The trigger is the first instruction. The workspace has two parts
in turn (``epochs``, counted by each block for itself); a block zeroes what it left in the launch before, which nobody
reads any more. A block waits for others only after it has left its own part, so the launch ends if all blocks run at
once: there is at most one for each multiprocessor, and no later launch starts before all of them have started.
Numerics: fp32 sums and softmax in base 2, weights rounded to bf16 for the product, mixes of parts to bf16 (or fp32,
``partial``), one rounding of the result. ``kv_scale`` multiplies the scores and the result. Equal inputs give equal
bits: no order of addition depends on time.

Arithmetic for a TP16 rank of Kimi K3, context 8192: 9.4 MB a sequence in bf16, 4.7 in fp8; floor on an H200 (2.35 us +
bytes / 4.44 TB/s) 4.5 or 3.4 us at one sequence whatever its rows, 19.4 or 10.9 at 8, 138 or 70 at 64. One sequence:
128 blocks of 64 entries, 74 KB, all of them under way before the wait. Flops 0.14 G a sequence at one row, 0.86 at 8
verify rows: 1.7 us at half of the matrix units' rate. Between blocks 0.8 MB at one row of a sequence; 6.3 at 8 verify
rows, written, read and zeroed. Shared memory, 128 bytes a cycle, 64 entries: 1,100 cycles for entries twice; at 48
query rows 900 more for the query and 800 for scores on their way between warps.
Measured on an H200 (TP16, context 8192, bf16, cold, dependent launch): one row 8.7 us alone and 7.8 in the step, where
``triton.mla_attend`` takes 9.1 and 12.4; 8 sequences 22.3 alone, Triton 32.8. Verify rows, fp8 and 64 sequences were
not timed. On sm_100a and sm_103a it only compiles.
"""
from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64

from ..compiler.call import Call, Launch
from .launching import KernelLaunch, await_producers, named, start_dependents
from .mla_attend_merge import (
    NONE,
    add,
    find_rows,
    fold,
    keep,
    merge_parts,
    over_lanes,
    over_lanes_each,
    publish_mix,
    publish_sums,
)
from .mla_attend_plan import (
    BORROWED,
    LENT,
    MOST_BLOCKS,
    PARITIES,
    ROW_LANES,
    STEP,
    TILE_ROWS,
    WARP_ROWS,
    Config,
    Static,
    per,
)
from .moe_parts import (
    arrive,
    await_phase,
    copy_bulk,
    expect_bytes,
    init_barriers,
    load_matrices,
    multiprocessors,
    publish_barriers,
    stream_policy,
)
from .primitives import (
    WARP,
    Words,
    exp2,
    flag,
    load_shared,
    load_words,
    mma,
    pack,
    ptx,
    reciprocal,
    select,
    store_shared,
    store_words,
)
from .shared_memory import FRAGMENT

LOG2_E = 1.4426950408889634
FAR = 0x7FFFFFFF  # past every position
CONSUMERS, COUNTED = 1, 2  # named barriers: of the warps that multiply; of all, that know the number of the launch
AT_ONCE = 16  # fragments of the query that a thread has under way

# instructions


def load_matrices_transposed(at: Any) -> Words:
    """As ``load_matrices`` of 4, each matrix transposed: lane 4 r + q gets of column r the rows 2 q and 2 q + 1."""
    return list(ptx("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];", [Int32] * 4, [at]))


def widen(word: Any) -> Words:
    """The four e4m3 of a word as two words of bf16, which is exact."""
    return list(ptx(
        "{ .reg .b16 l, h, a, b, c, d; .reg .b32 x, y; .reg .f32 e, f, g, i; mov.b32 {l, h}, $2; "
        "cvt.rn.f16x2.e4m3x2 x, l; cvt.rn.f16x2.e4m3x2 y, h; mov.b32 {a, b}, x; mov.b32 {c, d}, y; "
        "cvt.f32.f16 e, a; cvt.f32.f16 f, b; cvt.f32.f16 g, c; cvt.f32.f16 i, d; "
        "cvt.rn.bf16x2.f32 $0, f, e; cvt.rn.bf16x2.f32 $1, i, g; }", [Int32] * 2, [word], pure=True))


# the copier


def _sources(at: Any, sequence: Any, start: Any, live: Any, number: Any, low: Any, high: Any, lane: Any,
             p: Static) -> tuple[list[Any], list[Any]]:
    """Of this lane's rows of tile ``number``: where their entries lie, and whether their positions are in [low, high).
    Rows past the part's last live entry have the tile's first one again, so that no row holds what is no number; past
    the last tile there is nothing."""
    places, guards = [], []
    for begin in range(0, p.tile, WARP):
        row = number * p.tile + begin + lane
        position = start + select(row < live, row, number * p.tile)
        wanted = (position >= low) & (position < high) & (number * p.tile < live)
        if begin + WARP > p.tile:
            wanted = wanted & (lane < p.tile - begin)
        guard = flag(wanted)
        table = at.page_table.toint() + Int64(sequence * p.pages + position // p.page) * 4
        page = cutlass.max(load_words(table, 1, guard=guard)[0], Int32(0))
        entry = Int64(page) * p.page + Int64(position % p.page)
        places.append(at.cache.toint() + entry * p.row_bytes)
        guards.append(guard)
    return places, guards


def _copy(sources: tuple[list[Any], list[Any]], number: Any, lane: Any, shared: Any, policy: Any, where: Any,
          p: Static) -> None:
    slot = number % p.slots
    to = shared + where["ring"] + slot * p.slot_bytes + lane * p.slot_pitch
    for i, (source, guard) in enumerate(zip(*sources, strict=True)):
        copy_bulk(to + i * WARP * p.slot_pitch, source, Int32(p.row_bytes), shared + where["full"] + slot * 8, policy,
                  guard)


@cute.jit
def _announce(number: Any, lane: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """The copies of tile ``number`` may begin."""
    if lane == 0:
        expect_bytes(shared + where["full"] + number % p.slots * 8, Int32(p.row_bytes * p.tile))
    cute.arch.sync_warp()


@cute.jit
def _copy_early(at: Any, sequence: Any, start: Any, live: Any, oldest: Any, tiles: Any, lane: Any, shared: Any,
                where: cutlass.Constexpr, p: cutlass.Constexpr):
    """Before the wait: as many tiles as there are slots, but for entries of this step."""
    policy = stream_policy()
    for number in cutlass.range(cutlass.min(tiles, Int32(p.slots)), unroll=1):
        sources = _sources(at, sequence, start, live, number, Int32(0), oldest, lane, p)
        _announce(number, lane, shared, where, p)
        _copy(sources, number, lane, shared, policy, where, p)


@cute.jit
def _copy_late(at: Any, sequence: Any, start: Any, live: Any, oldest: Any, tiles: Any, lane: Any, shared: Any,
               where: cutlass.Constexpr, p: cutlass.Constexpr):
    """After it: what is left of those tiles."""
    policy = stream_policy()
    first = cutlass.max(oldest - start, Int32(0)) // p.tile
    for number in cutlass.range(first, cutlass.min(tiles, Int32(p.slots)), 1, unroll=1):
        sources = _sources(at, sequence, start, live, number, oldest, Int32(FAR), lane, p)
        _copy(sources, number, lane, shared, policy, where, p)


@cute.jit
def _copy_rest(at: Any, sequence: Any, start: Any, live: Any, tiles: Any, lane: Any, shared: Any,
               where: cutlass.Constexpr, p: cutlass.Constexpr):
    """The other tiles, as slots become free. The next one's pages are looked up while one is handed over."""
    policy = stream_policy()
    places, guards = _sources(at, sequence, start, live, Int32(p.slots), Int32(0), Int32(FAR), lane, p)
    for number in cutlass.range(p.slots, tiles, 1, unroll=1):
        following = _sources(at, sequence, start, live, number + 1, Int32(0), Int32(FAR), lane, p)
        await_phase(shared + where["empty"] + number % p.slots * 8, ((number // p.slots) & 1) ^ 1)
        _announce(number, lane, shared, where, p)
        _copy((places, guards), number, lane, shared, policy, where, p)
        places, guards = following


@cute.jit
def _clear(at: Any, other: Any, block: Any, lane: Any, p: cutlass.Constexpr):
    """Zeroes what this block left in the launch before, which nobody reads any more."""
    row = Int64(other * MOST_BLOCKS + block)
    mixes = at.mixes.toint() + row * (p.fragments * FRAGMENT)
    for index in cutlass.range(lane, p.fragments, WARP, unroll=4):
        store_words(mixes + Int64(index) * FRAGMENT, [Int32(0)] * 4)
    sums = at.sums.toint() + row * (4 * p.rows)
    for index in cutlass.range(lane, p.rows // 4, WARP, unroll=1):
        store_words(sums + Int64(index) * FRAGMENT, [Int32(0)] * 4)


# the products


def _convert(slot: Any, to: Any, thread: Any, p: Static) -> None:
    """A slot's entries as bf16, 8 values of a thread at a time."""
    across, count = p.width // 8, p.tile * (p.width // 8)
    begins = range(0, count, 32 * p.warps)
    for first in range(0, len(begins), AT_ONCE // 2):
        some = [begin + thread for begin in begins[first : first + AT_ONCE // 2]]
        whole = begins[first : first + AT_ONCE // 2][-1] + 32 * p.warps <= count
        pieces = some if whole else [cutlass.min(piece, Int32(count - 1)) for piece in some]
        pairs = [load_shared(slot + piece * 8, 2) for piece in pieces]
        for piece, pair in zip(pieces, pairs, strict=True):
            words = [half for word in pair for half in widen(word.bitcast(Int32))]
            store_shared(to + piece // across * p.pitch + piece % across * FRAGMENT,
                         [word.bitcast(Float32) for word in words])


@cute.jit
def _convert_only_tile(now: Any, thread: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """Of a part that is one tile, if it is to be done ``now``: its entries as bf16, when they are there."""
    if cutlass.const_expr(p.converts and p.tiles == 1):  # noqa: SIM102 - the second one is a branch of the kernel
        if now:
            await_phase(shared + where["full"], Int32(0))
            _convert(shared + where["ring"], shared + where["converted"], thread, p)


def _stage_query(source: Any, real: Any, thread: Any, shared: Any, where: Any, p: Static) -> None:
    """All rows of the query into shared memory, zeros for those that are none."""
    across = p.width // 8
    pieces = [32 * p.warps * i for i in range(per(p.rows * across, 32 * p.warps))]
    for first in range(0, len(pieces), AT_ONCE):
        words = []
        for begin in pieces[first : first + AT_ONCE]:
            piece = begin + thread
            words.append(load_words(source + Int64(piece) * FRAGMENT, guard=flag(piece < real * across)))
        for begin, four in zip(pieces[first:], words, strict=False):
            piece = begin + thread
            to = shared + where["query"] + piece // across * p.pitch + piece % across * FRAGMENT
            store_shared(to, [word.bitcast(Float32) for word in four], guard=flag(piece < p.rows * across))


def _multiply_scores(tile: Any, warp: Any, lane: Any, shared: Any, where: Any, p: Static) -> None:
    """This warp's columns of a stack of 16 entries each times all query rows, into their place in shared memory."""
    first, part = warp % p.stacks * (STEP * p.stack), warp // p.stacks
    chains = max(1, 4 // (p.groups * p.stack))
    sums = [[[Float32(0.0)] * 4 for _ in range(p.groups * p.stack)] for _ in range(chains)]
    column = part * (2 * STEP * p.own_steps)
    a_at = tile + (first + (lane & 15)) * p.pitch + (lane >> 4) * FRAGMENT + column
    b_at = shared + where["query"] + (lane & 7) * p.pitch + (lane >> 3) * FRAGMENT + column
    for pair in range(per(p.own_steps, 2)):
        here = min(2, p.own_steps - 2 * pair)
        a = [[load_matrices(a_at + j * STEP * p.pitch + 2 * STEP * (2 * pair + i)) for i in range(here)]
             for j in range(p.stack)]
        for group in range(p.groups):
            b = load_matrices(b_at + group * TILE_ROWS * p.pitch + 4 * STEP * pair, 2 * here)
            for i in range(here):
                chain = sums[(2 * pair + i) % chains]
                for j in range(p.stack):
                    at = group * p.stack + j
                    chain[at] = mma(a[j][i], b[2 * i : 2 * i + 2], chain[at])
    r, q = lane >> 2, lane & 3
    to = shared + where["scores"] + ((part * p.rows + 2 * q) * p.score_pitch + first + r) * 4
    for at in range(p.groups * p.stack):
        group, j = divmod(at, p.stack)
        for v in range(4):
            place = to + ((group * TILE_ROWS + v % 2) * p.score_pitch + STEP * j + v // 2 * 8) * 4
            store_shared(place, [fold(add, [chain[at][v] for chain in sums])])


def _own_row(i: int, warp: Any, lane: Any, p: Static) -> Any:
    """The query rows whose softmax the 8 lanes of a group do; some do the last one again."""
    return cutlass.min(warp * WARP_ROWS + lane // ROW_LANES + i * p.warps * WARP_ROWS, Int32(p.rows - 1))


def _load_scores(row: Any, first: Any, limit: Any, lane: Any, shared: Any, where: Any, p: Static) -> list[Any]:
    """A lane's scores of a query row: those of ``vector`` entries, and of as many further on. Beyond ``limit`` nothing
    is seen."""
    found = []
    for begin in range(0, p.tile, ROW_LANES * p.vector):
        own = begin + lane % ROW_LANES * p.vector
        at = shared + where["scores"] + (row * p.score_pitch + own) * 4
        scores = load_shared(at, p.vector)
        for part in range(1, p.parts):
            more = load_shared(at + part * (4 * p.rows * p.score_pitch), p.vector)
            scores = [a + b for a, b in zip(scores, more, strict=True)]
        found += [select(first + own + n <= limit, score * p.scale, Float32(NONE)) for n, score in enumerate(scores)]
    return found


def _weigh(best: list[Any], total: list[Any], limits: list[Any], first: Any, warp: Any, lane: Any, shared: Any,
           where: Any, p: Static) -> tuple[list[Any], list[Any]]:
    """A running softmax over a tile whose first entry is ``first``: weights, what fades the sums so far, and the
    reciprocal of the weights' sum. Rows go side by side, so that none waits for another's exchange between lanes."""
    rows = [_own_row(i, warp, lane, p) for i in range(p.own_rows)]
    scores = [_load_scores(row, first, limit, lane, shared, where, p)
              for row, limit in zip(rows, limits, strict=True)]
    above = [fold(cute.arch.fmax, [old, *own]) for old, own in zip(best, scores, strict=True)]
    above = over_lanes_each(cute.arch.fmax, above, 1, ROW_LANES)
    base = [select(one > NONE, one, Float32(0.0)) for one in above]
    weights = [[exp2(score - low) for score in own] for own, low in zip(scores, base, strict=True)]
    fades = [exp2(old - low) for old, low in zip(best, base, strict=True)]
    sums = over_lanes_each(add, [fold(add, own) for own in weights], 1, ROW_LANES)
    total = [old * fade + new for old, fade, new in zip(total, fades, sums, strict=True)]
    for row, own, fade, whole in zip(rows, weights, fades, total, strict=True):
        to = shared + where["weights"] + row * p.weight_pitch + lane % ROW_LANES * (2 * p.vector)
        words = [word.bitcast(Float32) for word in pack(own)]
        for i in range(0, len(words), p.vector // 2):
            store_shared(to + 4 * ROW_LANES * i, words[i : i + p.vector // 2])
        inverse = select(whole > 0.0, reciprocal(whole), Float32(0.0))
        store_shared(shared + where["fade"] + row * 4, [fade], guard=flag(lane % ROW_LANES == 0))
        store_shared(shared + where["inverse"] + row * 4, [inverse], guard=flag(lane % ROW_LANES == 0))
    return above, total


def _fade(mix: Any, lane: Any, shared: Any, where: Any, p: Static) -> list[Any]:
    """``mix`` as weights of a new base count it."""
    mix = list(mix)
    for group in range(p.groups):
        fade = load_shared(shared + where["fade"] + (group * TILE_ROWS + 2 * (lane & 3)) * 4, 2)
        for i in range(p.column_tiles):
            at = 4 * (i * p.groups + group)
            mix[at : at + 4] = [value * fade[v % 2] for v, value in enumerate(mix[at : at + 4])]
    return mix


def _multiply_mix(mix: list[Any], columns: range, tile: Any, warp: Any, lane: Any, shared: Any, where: Any,
                  p: Static) -> list[Any]:
    """Some tiles of this warp's latent columns of the mix, plus a tile of entries times their weights."""
    mix = list(mix)
    a_at = tile + ((lane >> 4) * 8 + (lane & 7)) * p.pitch + ((lane >> 3) & 1) * FRAGMENT + warp * (2 * p.own_columns)
    b_at = shared + where["weights"] + (lane & 7) * p.weight_pitch + (lane >> 3) * FRAGMENT
    for pair in range(per(p.entry_tiles, 2)):
        here = min(2, p.entry_tiles - 2 * pair)
        b = [load_matrices(b_at + group * TILE_ROWS * p.weight_pitch + 4 * STEP * pair, 2 * here)
             for group in range(p.groups)]
        for i, column in enumerate(columns):
            for k in range(here):
                a = load_matrices_transposed(a_at + (2 * pair + k) * STEP * p.pitch + 2 * STEP * column)
                for group in range(p.groups):
                    at = 4 * (i * p.groups + group)
                    mix[at : at + 4] = mma(a, b[group][2 * k : 2 * k + 2], mix[at : at + 4])
    return mix


@cute.jit
def _find_tile(number: Any, thread: Any, lane: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """Where tile ``number`` lies in bf16, once it is there."""
    slot = number % p.slots
    tile = shared + where["ring"] + slot * p.slot_bytes
    if cutlass.const_expr(p.converts and p.tiles == 1):
        tile = shared + where["converted"]
    else:
        await_phase(shared + where["full"] + slot * 8, (number // p.slots) & 1)
    if cutlass.const_expr(p.converts and p.tiles > 1):
        # all warps have done with the tile before the last one, which lay there
        to = shared + where["converted"] + (number & 1) * p.tile_bytes
        _convert(tile, to, thread, p)
        _free(slot, lane, shared, where, p)
        tile = to
        cute.arch.barrier(barrier_id=CONSUMERS, number_of_threads=32 * p.warps)
    return tile


@cute.jit
def _free(slot: Any, lane: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """This warp has read the slot."""
    if cutlass.const_expr(p.tiles > p.slots):
        cute.arch.sync_warp()
        if lane == 0:
            arrive(shared + where["empty"] + slot * 8)


@cute.jit
def _weigh_tile(best: Any, total: Any, limits: Any, number: Any, start: Any, thread: Any, warp: Any, lane: Any,
                shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """Where tile ``number`` lies, and the softmax with it; its weights are in shared memory."""
    tile = _find_tile(number, thread, lane, shared, where, p)
    if warp < p.parts * p.stacks:
        _multiply_scores(tile, warp, lane, shared, where, p)
    cute.arch.barrier(barrier_id=CONSUMERS, number_of_threads=32 * p.warps)
    best, total = _weigh(best, total, limits, start + number * p.tile, warp, lane, shared, where, p)
    cute.arch.barrier(barrier_id=CONSUMERS, number_of_threads=32 * p.warps)
    return tile, best, total


@cute.jit
def _attend(at: Any, limits: Any, query: Any, start: Any, tiles: Any, early: Any, real: Any, thread: Any, warp: Any,
            lane: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """The warps that multiply: this block's part of the context for all its query rows."""
    _stage_query(query, real, thread, shared, where, p)
    _convert_only_tile(early == 0, thread, shared, where, p)
    cute.arch.barrier(barrier_id=CONSUMERS, number_of_threads=32 * p.warps)
    best, total = [Float32(NONE)] * p.own_rows, [Float32(0.0)] * p.own_rows
    plates = [range(i, min(i + p.together, p.column_tiles)) for i in range(0, p.column_tiles, p.together)]
    if cutlass.const_expr(p.tiles == 1):
        tile, best, total = _weigh_tile(best, total, limits, Int32(0), start, thread, warp, lane, shared, where, p)
        publish_sums(at, best, total, shared, where, p)
        # some columns are on their way while others are multiplied, and hold no registers: the warp's barrier keeps
        # the assembler from multiplying all of them first
        for columns in plates:
            nothing = [Float32(0.0)] * (4 * p.groups * len(columns))
            mix = _multiply_mix(nothing, columns, tile, warp, lane, shared, where, p)
            publish_mix(at, mix, columns, shared, where, p)
            cute.arch.sync_warp()
    else:
        mix = [Float32(0.0)] * p.sums
        for number in cutlass.range(tiles, unroll=1):
            tile, best, total = _weigh_tile(best, total, limits, number, start, thread, warp, lane, shared, where, p)
            mix = _multiply_mix(_fade(mix, lane, shared, where, p), range(p.column_tiles), tile, warp, lane, shared,
                                where, p)
            if cutlass.const_expr(not p.converts):
                _free(number % p.slots, lane, shared, where, p)
        publish_sums(at, best, total, shared, where, p)
        _publish_all(at, mix, plates, shared, where, p)


def _publish_all(at: Any, mix: list[Any], plates: list[range], shared: Any, where: Any, p: Static) -> None:
    each = 4 * p.groups
    for columns in plates:
        publish_mix(at, mix[each * columns.start : each * columns.stop], columns, shared, where, p)


# the launch


def _find_positions(at: Any, sequence: Any, lane: Any, p: Static) -> tuple[Any, Any]:
    """The last position of a sequence, and the first one of this step; -1 and something far where all is padding."""
    last, oldest = Int32(-1), Int32(FAR)
    for begin in range(0, p.query, WARP):
        row = cutlass.min(begin + lane, Int32(p.query - 1))
        position = load_words(at.positions.toint() + Int64(sequence * p.query + row) * 4, 1)[0]
        last = cutlass.max(last, position)
        oldest = cutlass.min(oldest, select(position >= 0, position, Int32(FAR)))
    return over_lanes(cutlass.max, last, 1, WARP), over_lanes(cutlass.min, oldest, 1, WARP)


def _find_limits(at: Any, sequence: Any, first: Any, end: Any, warp: Any, lane: Any, p: Static) -> list[Any]:
    """The last entry before ``end`` that each of this lane's query rows may see; -1 for none. ``first``: query row of
    the sequence that is row 0 here."""
    found = []
    for i in range(p.own_rows):
        row = first + _own_row(i, warp, lane, p)
        step = cutlass.min(row, Int32(p.queries - 1)) // p.heads
        position = load_words(at.positions.toint() + Int64(sequence * p.query + step) * 4, 1)[0]
        found.append(cutlass.min(select(row < p.queries, position, Int32(-1)), end - 1))
    return found


@cute.jit
def _start(thread: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    if thread == 0:
        init_barriers(shared + where["full"], p.slots, 1)
        init_barriers(shared + where["empty"], p.slots, p.warps)
        publish_barriers()


@cute.kernel
def _mla_attend(arguments: Any, names: cutlass.Constexpr, p: cutlass.Constexpr):
    start_dependents(p.dependent)
    at = named(names, arguments)
    where = p.place(p.slots, p.tiles)
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
    shared = cute.arch.get_dyn_smem(cutlass.Uint8, 128).toint()
    _start(thread, shared, where, p)
    job, split = block // p.splits, block % p.splits
    sequence, first_row, real = find_rows(job, p)
    last, oldest = _find_positions(at, sequence, lane, p)
    start = split * p.chunk
    live = cutlass.min(cutlass.max(last + 1 - start, Int32(0)), Int32(p.chunk))
    tiles = (live + p.tile - 1) // p.tile
    limits = _find_limits(at, sequence, first_row, start + live, warp, lane, p)
    cute.arch.sync_threads()
    if warp == p.warps:
        _copy_early(at, sequence, start, live, oldest, tiles, lane, shared, where, p)
    early = flag((live > 0) & (start + live <= oldest))
    _convert_only_tile((warp < p.warps) & (early == 1), thread, shared, where, p)
    await_producers(p.dependent)
    epochs = at.epochs.toint() + Int64(block) * 4
    epoch = load_words(epochs, 1)[0]
    mine, other = epoch & 1, (epoch & 1) ^ 1
    if warp >= p.warps:
        if cutlass.const_expr(p.lends):
            cute.arch.setmaxregister_decrease(LENT)
        if warp == p.warps:
            _copy_late(at, sequence, start, live, oldest, tiles, lane, shared, where, p)
            cute.arch.barrier(barrier_id=COUNTED, number_of_threads=32 * p.warps + 32)
            if lane == 0:
                store_words(epochs, [epoch + 1])
            _clear(at, other, block, lane, p)
            if cutlass.const_expr(p.tiles > p.slots):
                _copy_rest(at, sequence, start, live, tiles, lane, shared, where, p)
    else:
        if cutlass.const_expr(p.lends):
            cute.arch.setmaxregister_increase(BORROWED)
        cute.arch.barrier_arrive(barrier_id=COUNTED, number_of_threads=32 * p.warps + 32, aligned=False)
        keep(mine, (last + p.chunk) // p.chunk, shared, where)
        cute.arch.sync_warp()
        if live > 0:
            query = at.query.toint() + Int64(sequence * p.queries + first_row) * (2 * p.width)
            _attend(at, limits, query, start, tiles, early, real, thread, warp, lane, shared, where, p)
        merge_parts(at, shared, where, p)


def bind(call: Call) -> Launch:
    """query, cache, positions, page_table -> mixed."""
    config, attrs = Config(**call.config), call.attrs["mixed"]
    names = ("query", "cache", "positions", "page_table", "mixed")
    tensors = {name: call.tensors[name] for name in names}
    query, cache, table = (tensors[name] for name in ("query", "cache", "page_table"))
    for name, tensor in tensors.items():
        assert tensor.is_contiguous(), f"{name} is strided: {tensor.shape} {tensor.stride()}"
        aligned = tensor.is_meta or tensor.dtype == torch.int32 or tensor.data_ptr() % FRAGMENT == 0
        assert aligned, f"{name} begins at {tensor.data_ptr():#x}"
    assert query.dtype == tensors["mixed"].dtype == torch.bfloat16, f"query {query.dtype}, {tensors['mixed'].dtype}"
    assert cache.dtype in (torch.bfloat16, torch.float8_e4m3fn), f"cache {cache.dtype}"
    assert query.shape[0] == table.shape[0] * attrs["query"], f"{query.shape[0]} rows, page table {table.shape}"
    assert cache.shape[2] == query.shape[2], f"cache {cache.shape}, query {query.shape}"
    p = Static(
        sequences=table.shape[0], query=attrs["query"], heads=query.shape[1], latent=attrs["latent"],
        rest=query.shape[2] - attrs["latent"], page=cache.shape[1], pages=table.shape[1],
        entry_bytes=cache.element_size(), tile=config.tile,
        most_slots=config.slots, warps=config.warps, wide=config.partial == "fp32",
        blocks=multiprocessors(query.device), scale=attrs["scale"] * attrs["kv_scale"] * LOG2_E,
        kv_scale=attrs["kv_scale"], dependent=call.dependent_launch)
    blocks = p.jobs * p.splits
    assert blocks <= min(p.blocks, MOST_BLOCKS), f"{p.jobs} jobs in {p.splits} parts on {p.blocks} multiprocessors"
    assert p.latent % (STEP * p.warps) == 0, f"{p.latent} latent columns, {p.warps} warps"
    mixes, sums = call.scratch["mixes"], call.scratch["sums"]
    assert mixes.shape == (PARITIES, MOST_BLOCKS, 4 * p.fragments), f"workspace {mixes.shape}, {p.fragments} fragments"
    arguments = {**tensors, "mixes": mixes, "sums": sums, "epochs": call.scratch["epochs"]}
    return KernelLaunch(_mla_attend, (blocks, 1, 1), p.threads, arguments, p,
                        shared=p.place(p.slots, p.tiles)["end"], dependent=p.dependent)
