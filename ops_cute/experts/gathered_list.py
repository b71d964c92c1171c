"""What a launch of ``cute.moe_experts_gathered`` does before it multiplies: sorts its pairs, makes rows of x fp16.

All threads of a block sort, each block for itself; every row of x is some block's. No order depends on time.
"""
from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..moe_parts import load_word, set_bits, store_word
from ..primitives import lane_value, load_shared, load_words, maximum, ptx, select, store_shared, store_words, unpack
from ..shared_memory import FRAGMENT
from .copy_weights import LIST_MASK
from .dot import largest_magnitude, over_lanes, pairs_of, rounded
from .mxfp4 import WEIGHT_EXPONENT, biased_exponent, largest_of, power_of_two
from .plan import THREADS, TOP_EXPONENT, WARPS


def publish_row(count: Any, at: Any, factor: Any) -> None:
    """Stores a row's factor, then counts the row: who reads the count finds all that this block stored before."""
    ptx("st.relaxed.gpu.global.b32 [$1], $2; fence.acq_rel.gpu; red.relaxed.gpu.global.add.s32 [$0], 1;", [],
        [count, at, factor])


def _load_row(at: Any, token: Any, thread: Any, p: Any) -> tuple[list[list[Any]], Any]:
    """This thread's 8 columns a round of a row of x, as fp32, and the largest magnitude of its warp's."""
    row = at.x.toint() + Int64(token) * (2 * p.stride_x)
    words = []
    for i in range(p.rounds_of_row):
        piece = thread + THREADS * i
        real = (token < p.tokens) & (piece < p.width // 8)
        words.append(load_words(row + Int64(piece * FRAGMENT), guard=select(real, Int32(1), Int32(0))))
    values = [unpack(four) for four in words]
    if p.rounds:
        values = [rounded(eight) for eight in values]
        largest = largest_magnitude([v for eight in values for v in eight])
    else:
        largest = largest_of([word for four in words for word in four])
    return values, over_lanes(largest, 32)


def _store_row(at: Any, token: Any, values: list[list[Any]], largest: Any, thread: Any, p: Any) -> Any:
    """Stores a row of x in fp16 and returns what its products must be multiplied by."""
    # the largest becomes 2^14 or more, below 2^15
    exponent = biased_exponent(cute.arch.fmax(largest, Float32(2.0**-112)))
    down = power_of_two(254 + TOP_EXPONENT - 1 - exponent)
    for i, eight in enumerate(values):
        piece = thread + THREADS * i
        inside = (token < p.tokens) & (piece < p.width // 8)
        store_words(at.rows.toint() + Int64(token) * (2 * p.width) + Int64(piece * FRAGMENT),
                    pairs_of([v * down for v in eight]), guard=select(inside, Int32(1), Int32(0)))
    return power_of_two(exponent - (TOP_EXPONENT - 1) - WEIGHT_EXPONENT)


def _load_ids(at: Any, thread: Any, p: Any) -> tuple[list[Any], list[Any]]:
    """This thread's pairs: their experts here, and whether they are here."""
    first = load_words(at.rank.toint(), 1)[0] * p.local if p.local < p.experts else Int32(0)
    local, real = [], []
    for i in range(p.rounds_of_pairs):
        pair = thread + THREADS * i
        inside = pair < p.pairs
        expert = load_words(at.ids.toint() + Int64(pair) * 4, 1, guard=select(inside, Int32(1), Int32(0)))[0] - first
        here = inside & (expert >= 0) & (expert < p.local)
        local.append(select(here, expert, Int32(0)))
        real.append(select(here, Int32(1), Int32(0)))
    return local, real


def _bit_of(thread: Any, i: int, local: Any, p: Any) -> tuple[Any, Any]:
    """The token of this thread's pair number ``i``, and the offset of the expert's word of bits that it stands in."""
    token = (thread + THREADS * i) // p.top_k
    return token, (2 * local + (token >> 5)) * 4


def _count_before(thread: Any, lane: Any, i: int, shared: Any, where: Any, p: Any) -> tuple[Any, Any, Any]:
    """Of this thread's expert of round ``i``: its pairs, and (pairs << 16 | experts) of it alone and of the experts of
    its warp up to it."""
    expert = thread + THREADS * i
    at = shared + where["masks"] + select(expert < p.local, expert, Int32(0)) * 8
    pairs = cute.arch.popc(load_word(at)) + cute.arch.popc(load_word(at + 4))
    pairs = select(expert < p.local, pairs, Int32(0))
    own = (pairs << 16) | select(pairs > 0, Int32(1), Int32(0))
    before = own
    for step in range(5):
        lower = cute.arch.shuffle_sync_up(before, 1 << step, mask_and_clamp=0)
        before = before + select(lane >= (1 << step), lower, Int32(0))
    return pairs, own, before


@cute.jit
def sort(at: Any, block: Any, warp: Any, lane: Any, thread: Any, shared: Any,
          where: cutlass.Constexpr, p: cutlass.Constexpr):
    """All threads: the list of distinct experts with their pairs, and this block's row of x."""
    local, real = _load_ids(at, thread, p)
    rows = [_load_row(at, block + p.blocks * i, thread, p) for i in range(p.rounds_of_rows)]
    for i in cutlass.range_constexpr(len(local)):
        token, word = _bit_of(thread, i, local[i], p)
        set_bits(shared + where["masks"] + word, Int32(1) << (token & 31), real[i])
    if lane == 0:
        for i in cutlass.range_constexpr(len(rows)):
            store_shared(shared + where["sizes"] + (32 * i + warp) * 4, [rows[i][1]])
    cute.arch.sync_threads()
    factors = []
    for i in cutlass.range_constexpr(len(rows)):
        sizes = [load_shared(shared + where["sizes"] + (32 * i + other) * 4) for other in range(WARPS + 3)]
        factors.append(_store_row(at, block + p.blocks * i, rows[i][0], maximum(sizes), thread, p))
    counted = []
    for i in cutlass.range_constexpr(p.rounds_of_experts):
        counted.append(_count_before(thread, lane, i, shared, where, p))
        chunk = warp + (WARPS + 3) * i
        if (lane == 31) & (chunk < 32):
            store_word(shared + where["totals"] + chunk * 4, counted[i][2])
    cute.arch.sync_threads()
    for i in cutlass.range_constexpr(len(rows)):
        if (thread == 0) & (block + p.blocks * i < p.tokens):
            publish_row(at.ready.toint(), at.ready.toint() + Int64(FRAGMENT + 4 * (block + p.blocks * i)),
                        factors[i].bitcast(Int32))
    sums = load_word(shared + where["totals"] + lane * 4)
    own = sums
    for step in cutlass.range_constexpr(5):
        lower = cute.arch.shuffle_sync_up(sums, 1 << step, mask_and_clamp=0)
        sums = sums + select(lane >= (1 << step), lower, Int32(0))
    for i in cutlass.range_constexpr(p.rounds_of_experts):
        pairs, single, before = counted[i]
        chunk = cutlass.min(warp + (WARPS + 3) * i, Int32(31))
        before = before - single + lane_value(sums - own, chunk)
        expert = thread + THREADS * i
        store_word(shared + where["list"] + (before & LIST_MASK) * 4, expert | (before & ~LIST_MASK),
                   select(pairs > 0, Int32(1), Int32(0)))
        store_word(shared + where["starts"] + expert * 4, before >> 16,
                   select(expert < p.local, Int32(1), Int32(0)))
    if thread == 31:
        # the end of the list begins where all pairs have been
        store_word(shared + where["count"], sums & LIST_MASK)
        store_word(shared + where["list"] + (sums & LIST_MASK) * 4, sums & ~LIST_MASK)
    cute.arch.sync_threads()
    for i in cutlass.range_constexpr(len(local)):
        token, word = _bit_of(thread, i, local[i], p)
        masks = shared + where["masks"] + local[i] * 8
        lower = cute.arch.popc(load_word(shared + where["masks"] + word) & ((Int32(1) << (token & 31)) - 1))
        lower = lower + select(token >= 32, cute.arch.popc(load_word(masks)), Int32(0))
        place = load_word(shared + where["starts"] + local[i] * 4) + lower
        store_word(shared + where["pairs"] + place * 4, thread + THREADS * i, real[i])
    cute.arch.sync_threads()


def members_of(index: Any, shared: Any, where: Any) -> tuple[Any, Any]:
    """Where the pairs of an expert of the list begin, and how many there are."""
    at = shared + where["list"] + index * 4
    start = load_word(at) >> 16
    return start, (load_word(at + 4) >> 16) - start


def pair_at(place: Any, guard: Any, shared: Any, where: Any) -> Any:
    """A pair of the sorted list; pair 0 of it where ``guard`` is false."""
    return load_word(shared + where["pairs"] + select(guard, place, Int32(0)) * 4)
