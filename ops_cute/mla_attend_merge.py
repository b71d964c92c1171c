"""How the blocks of ``cute.mla_attend`` meet: what a block leaves of its part of a context, and who adds parts up.

A block leaves its mix, already divided by its weights' sum, and log2 of that sum, in words that are their own flags:
zero is "not yet", a payload of zeros is written as minus zeros, and a reader looks until no word is zero. One hop
through L2, no fence, no counter. What travels is what a lane holds: a fragment is 16 bytes, its sums of one (fp32) or
two (bf16) tiles of 16 latent columns for two query rows, so that a warp stores 512 bytes end to end and nothing is
transposed. A sequence's fragments are dealt out to its blocks in pieces of whole sectors. In a piece, two neighbouring
lanes have the two fragments of a sector, and up to 16 such pairs the parts of the context; a lane with more parts looks
at all of them together. The sums over lanes leave each lane a part of the columns, so eight values take 8 exchanges of
lanes and not 32. No warp waits for another of its block. A row that a part does not reach has the weight 0 there, one
that no part reaches (padding) is exactly zero, and parts without a live entry are neither written nor read.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .mla_attend_plan import MOST_BLOCKS, ROW_LANES, STEP, TILE_ROWS, WARP_ROWS, Static
from .moe_parts import is_late, load_word, look, publish, store_word
from .primitives import (
    WARP,
    Words,
    exp2,
    flag,
    lane_xor,
    load_shared,
    own_thread,
    pack,
    ptx,
    reciprocal,
    select,
    store_half,
    unpack,
)
from .shared_memory import FRAGMENT

NONE = float("-inf")
MINUS_ZERO, MINUS_ZEROS = -0x80000000, -0x7FFF8000  # of one fp32; of two bf16

# instructions


def log2(x: Any) -> Any:
    return ptx("lg2.approx.ftz.f32 $0, $1;", [Float32], [x], pure=True)


def look_at_pair(at: Any, guard: Any) -> Words:
    """As ``look``, 2 words."""
    return list(ptx("{ .reg .pred g; setp.ne.b32 g, $3, 0; mov.b32 $0, 1; mov.b32 $1, 1; "
                    "@g ld.relaxed.gpu.global.v2.b32 {$0, $1}, [$2]; }", [Int32] * 2, [at, Int32(guard)]))


def publish_fragment(at: Any, words: Words, guard: Any) -> None:
    """Stores 4 words that another block looks for."""
    ptx("{ .reg .pred g; setp.ne.b32 g, $5, 0; @g st.relaxed.gpu.global.v4.b32 [$0], {$1, $2, $3, $4}; }", [],
        [at, *words, Int32(guard)])


def own_block() -> Any:
    """The block's number, as ``own_thread``."""
    return ptx("mov.u32 $0, %ctaid.x;", [Int32], [])


def keep(parity: Any, live: Any, shared: Any, where: Any) -> None:
    """Which part of the workspace this launch has, and how many parts of the context have live entries, for after the
    loop over tiles, which needs all registers. Each warp has its own two words, so nobody waits for anybody."""
    store_word(_kept(shared, where), parity)
    store_word(_kept(shared, where) + 4, live)


def _kept(shared: Any, where: Any) -> Any:
    return shared + where["kept"] + own_thread() // WARP * 8


def _own_place(shared: Any, where: Any) -> tuple[Any, Any]:
    """This block's number, and the row of the workspace that has what the first block left in this launch."""
    return own_block(), Int64(load_word(_kept(shared, where)) * MOST_BLOCKS)


def add(a: Any, b: Any) -> Any:
    return a + b


def fold(combine: Any, values: Sequence[Any]) -> Any:
    """All of some values combined, by a tree."""
    values = list(values)
    while len(values) > 1:
        pairs = [combine(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[2 * len(pairs) :]
    return values[0]


def over_lanes_each(combine: Any, values: Sequence[Any], first: int, end: int) -> list[Any]:
    """Each of ``values`` combined over the lanes whose numbers differ in bits ``first`` to below ``end``."""
    values = list(values)
    while first < end:
        others = [lane_xor(value, first) for value in values]
        values, first = [combine(a, b) for a, b in zip(values, others, strict=True)], 2 * first
    return values


def over_lanes(combine: Any, value: Any, first: int, end: int) -> Any:
    return over_lanes_each(combine, [value], first, end)[0]


def find_rows(job: Any, p: Static) -> tuple[Any, Any, Any]:
    """A job's sequence, its first query row there, and how many rows are some."""
    first = job % p.row_tiles * p.rows
    return job // p.row_tiles, first, cutlass.min(p.queries - first, Int32(p.rows))


# a block's part


def publish_sums(at: Any, best: list[Any], total: list[Any], shared: Any, where: Any, p: Static) -> None:
    """log2 of the sums of this block's weights, for those who add up the parts."""
    thread, (block, first) = own_thread(), _own_place(shared, where)
    warp, lane, place = thread // WARP, thread % WARP, first + Int64(block)
    for i in range(p.own_rows):
        row = warp * WARP_ROWS + lane // ROW_LANES + i * p.warps * WARP_ROWS
        word = (best[i] + log2(total[i])).bitcast(Int32)
        publish(at.sums.toint() + (place * p.rows + Int64(row)) * 4, select(word == 0, Int32(MINUS_ZERO), word),
                flag((lane % ROW_LANES == 0) & (row < p.rows)))


def publish_mix(at: Any, mix: list[Any], columns: range, shared: Any, where: Any, p: Static) -> None:
    """The tiles ``columns`` of this warp's latent columns of the mix, a fragment of each lane, over the weights'
    sums."""
    thread, (block, first) = own_thread(), _own_place(shared, where)
    warp, lane, place = thread // WARP, thread % WARP, first + Int64(block)
    real = find_rows(block // p.splits, p)[2]
    q, plate = lane & 3, columns.start // p.together
    for group in range(p.groups):
        inverse = load_shared(shared + where["inverse"] + (group * TILE_ROWS + 2 * q) * 4, 2)
        values = []
        for i in range(p.together):
            own = mix[4 * (i * p.groups + group) :][:4] if i < len(columns) else [Float32(0.0)] * 4
            values += [value * inverse[v % 2] for v, value in enumerate(own)]
        words = [value.bitcast(Int32) for value in values] if p.wide else pack(values)
        nothing = MINUS_ZERO if p.wide else MINUS_ZEROS
        fragment = Int64(((group * p.warps + warp) * p.plates + plate) * 32 + lane)
        publish_fragment(at.mixes.toint() + (place * p.fragments + fragment) * FRAGMENT,
                         [select(word == 0, Int32(nothing), word) for word in words],
                         flag(group * TILE_ROWS + 2 * q < real))


# all parts


def _sum_parts(values: list[Any], lane: Any, p: Static) -> tuple[list[Any], Any, int]:
    """Sums over the lanes of different parts. As long as a lane holds several, each step leaves it one half of them:
    what it holds, the number of the first, and the bits of lanes that hold the same."""
    held, first, same, step = list(values), Int32(0), 0, 2
    while step < 2 * p.lanes:
        if len(held) > 1:
            half, upper = len(held) // 2, (lane & step) != 0
            kept = [select(upper, held[half + i], held[i]) for i in range(half)]
            sent = [select(upper, held[i], held[half + i]) for i in range(half)]
            held = [mine + lane_xor(other, step) for mine, other in zip(kept, sent, strict=True)]
            first = first + select(upper, Int32(half), Int32(0))
        else:
            held, same = [held[0] + lane_xor(held[0], step)], same | step
        step *= 2
    return held, first, same


def _is_any_late(words: list[Words], sums: list[Words]) -> Any:
    return is_late([word for some in (*words, *sums) for word in some])


def _look_again(places: list[Any], words: list[Words], find: Any) -> list[Words]:
    """What is late is looked at once more, all of it at once."""
    late = [is_late(own) for own in words]
    new = [find(at, guard) for at, guard in zip(places, late, strict=True)]
    return [[select(guard != 0, n, o) for n, o in zip(fresh, own, strict=True)]
            for fresh, own, guard in zip(new, words, late, strict=True)]


def _weights_of_parts(sums: list[Words], guards: list[Any], p: Static) -> list[list[Any]]:
    """Of the two query rows of a fragment: each part's share of the whole, times the scale of the cache."""
    shares = []
    for row in range(2):
        logs = [select(guard != 0, two[row].bitcast(Float32), Float32(NONE))
                for two, guard in zip(sums, guards, strict=True)]
        largest = over_lanes(cute.arch.fmax, fold(cute.arch.fmax, logs), 2, 2 * p.lanes)
        base = select(largest > NONE, largest, Float32(0.0))
        weights = [exp2(one - base) for one in logs]
        total = over_lanes(add, fold(add, weights), 2, 2 * p.lanes)
        factor = select(total > 0.0, reciprocal(total) * p.kv_scale, Float32(0.0))
        shares.append([weight * factor for weight in weights])
    return shares


def _store(out: Any, values: list[Any], first: Any, same: int, fragment: Any, row: Any, real: Any, guard: Any,
           lane: Any, p: Static) -> None:
    """Values number ``first`` and following of a fragment, in bf16; ``row`` is the fragment's first query row."""
    place = fragment // 32 % (p.warps * p.plates)
    warp, plate = place // p.plates, place % p.plates
    for i, value in enumerate(values):
        number = first + i
        own = row + (number & 1)
        tile = plate * p.together + number // 4
        at = warp * p.own_columns + tile * STEP + ((number >> 1) & 1) * 8 + fragment % 32 // 4
        wanted = (guard != 0) & (own < real) & ((lane & same) == 0)
        if p.column_tiles % p.together:
            wanted = wanted & (tile < p.column_tiles)
        store_half(out + Int64(own * p.latent + at) * 2, pack([value, value])[0], guard=flag(wanted))


@cute.jit
def merge_parts(at: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """The warps that multiply: this block's piece of the fragments of all live parts. Nothing is shared between warps.
    """
    thread, (block, first) = own_thread(), _own_place(shared, where)
    warp, lane, live = thread // WARP, thread % WARP, load_word(_kept(shared, where) + 4)
    job, split = block // p.splits, block % p.splits
    sequence, first_row, real = find_rows(job, p)
    rows = first + Int64(job * p.splits)
    out = at.mixed.toint() + Int64(sequence * p.queries + first_row) * (2 * p.latent)
    part, group = (lane >> 1) & (p.lanes - 1), (lane >> 1) // p.lanes
    for turn in cutlass.range(p.rounds, unroll=1):
        unit = (turn * p.warps + warp) * p.units + group
        fragment = split * p.piece + 2 * unit + (lane & 1)
        row = fragment // (32 * p.warps * p.plates) * TILE_ROWS + 2 * (fragment % 4)
        wanted = (2 * unit < p.piece) & (fragment < p.fragments) & (row < real)
        guards = [flag(wanted & (part + i * p.lanes < live)) for i in range(p.each)]
        mix_at = at.mixes.toint() + ((rows + Int64(part)) * p.fragments + Int64(fragment)) * FRAGMENT
        sum_at = at.sums.toint() + ((rows + Int64(part)) * p.rows + Int64(row)) * 4
        mixes = [mix_at + i * (p.lanes * p.fragments * FRAGMENT) for i in range(p.each)]
        logs = [sum_at + i * (p.lanes * p.rows * 4) for i in range(p.each)]
        words = [look(place, guard) for place, guard in zip(mixes, guards, strict=True)]
        sums = [look_at_pair(place, guard) for place, guard in zip(logs, guards, strict=True)]
        late = _is_any_late(words, sums)
        while late != 0:
            words = _look_again(mixes, words, look)
            sums = _look_again(logs, sums, look_at_pair)
            late = _is_any_late(words, sums)
        cute.arch.sync_warp()
        shares = _weights_of_parts(sums, guards, p)
        mixed = [Float32(0.0)] * (4 * p.together)
        for i in cutlass.range_constexpr(p.each):
            own = [word.bitcast(Float32) for word in words[i]] if p.wide else unpack(words[i])
            mixed = [a + shares[v % 2][i] * value for v, (a, value) in enumerate(zip(mixed, own, strict=True))]
        held, number, same = _sum_parts(mixed, lane, p)
        _store(out, held, number, same, fragment, row, real, flag(wanted), lane, p)
