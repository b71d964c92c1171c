"""The list of a step's experts, made by all threads of a block of ``cute.moe_experts_block_scaled`` in shared memory.

Distinct experts in the order of their ids, and their pairs of expert and token in the order of tokens, whatever order
the router left them in: so every block has the same list, and sums have one order. An entry of ``pairs`` is the number
of the pair (token times k plus its place) with the expert's place in the list above bit 16. Ids of a row are distinct.
"""
from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..moe_parts import load_word, set_bits, store_word
from ..primitives import load_words, select
from .block_scaled_plan import CHUNK, THREADS, Static


def flag(condition: Any) -> Any:
    return select(condition, Int32(1), Int32(0))


def padded_rows(rows: Any) -> Any:
    """``rows`` as the instruction counts them: a multiple of 8."""
    return (rows + (CHUNK - 1)) & -CHUNK


def _own_ids(at: Any, thread: Any, p: Static) -> list[tuple[Any, Any, Any]]:
    """This thread's pairs: their number, the expert's place on this rank (0 where it has none), whether it has one."""
    first = load_words(at.rank.toint(), 1)[0] * p.local if p.local < p.experts else Int32(0)
    found = []
    for start in range(0, p.pairs, THREADS):
        pair = thread + start
        inside = pair < p.pairs
        expert = load_words(at.ids.toint() + Int64(pair) * 4, 1, guard=flag(inside))[0] - first
        here = inside & (expert >= 0) & (expert < p.local)
        found.append((pair, select(here, expert, Int32(0)), flag(here)))
    return found


def _rank_in(bits: Any, bit: Any) -> Any:
    """How many of a word's bits are below a bit."""
    return cute.arch.popc(bits & ((Int32(1) << bit) - 1))


def _sum_below(value: Any, lane: Any) -> tuple[Any, Any]:
    """Sums over the lanes below, and up to this one."""
    upto = value
    for step in range(5):
        lower = cute.arch.shuffle_sync_up(upto, 1 << step, mask_and_clamp=0)
        upto = upto + select(lane >= (1 << step), lower, Int32(0))
    return upto - value, upto


@cute.jit
def list_experts(at: Any, thread: Any, warp: Any, lane: Any, shared: Any, where: cutlass.Constexpr,
                  p: cutlass.Constexpr):
    """All threads: distinct experts in the order of their ids, and their pairs in the order of tokens."""
    own = _own_ids(at, thread, p)
    for i in cutlass.range_constexpr(len(own)):
        pair, expert, here = own[i]
        set_bits(shared + where["bits"] + (expert >> 5) * 4, Int32(1) << (expert & 31), here)
    cute.arch.sync_threads()
    if warp == 0:
        held = Int32(0)
        if lane < p.words:
            held = load_word(shared + where["bits"] + lane * 4)
        below, upto = _sum_below(cute.arch.popc(held), lane)
        store_word(shared + where["before"] + lane * 4, below, flag(lane < p.words))
        store_word(shared + where["count"], upto, flag(lane == 31))
    cute.arch.sync_threads()
    indexes = []
    for i in cutlass.range_constexpr(len(own)):
        pair, expert, here = own[i]
        word = (expert >> 5) * 4
        index = load_word(shared + where["before"] + word)
        index = index + _rank_in(load_word(shared + where["bits"] + word), expert & 31)
        token = pair // p.top_k
        set_bits(shared + where["tokens"] + index * 8 + (token >> 5) * 4, Int32(1) << (token & 31), here)
        store_word(shared + where["list"] + index * 4, expert, here)
        indexes.append(index)
    cute.arch.sync_threads()
    # where each expert's pairs begin: sums over 32 experts by a warp each, then over those sums
    for chunk in cutlass.range(warp, p.most // 32 + 1, THREADS // 32, unroll=1):
        index = chunk * 32 + lane
        pairs = Int32(0)
        if index <= p.most:
            pairs = cute.arch.popc(load_word(shared + where["tokens"] + index * 8))
            pairs = pairs + cute.arch.popc(load_word(shared + where["tokens"] + index * 8 + 4))
        below, upto = _sum_below(pairs, lane)
        store_word(shared + where["start"] + index * 4, below, flag(index <= p.most))
        store_word(shared + where["chunks"] + chunk * 4, upto, flag(lane == 31))
    cute.arch.sync_threads()
    if warp == 0:
        pairs = Int32(0)
        if lane <= p.most // 32:
            pairs = load_word(shared + where["chunks"] + lane * 4)
        below, upto = _sum_below(pairs, lane)
        store_word(shared + where["chunks"] + lane * 4, below)
    cute.arch.sync_threads()
    for index in cutlass.range(thread, p.most + 1, THREADS, unroll=1):
        begin = shared + where["start"] + index * 4
        store_word(begin, load_word(begin) + load_word(shared + where["chunks"] + (index >> 5) * 4))
    cute.arch.sync_threads()
    for i in cutlass.range_constexpr(len(own)):
        pair, expert, here = own[i]
        token = pair // p.top_k
        masks = shared + where["tokens"] + indexes[i] * 8
        low = load_word(masks)
        bits = select(token < 32, low, load_word(masks + 4))
        place = load_word(shared + where["start"] + indexes[i] * 4) + _rank_in(bits, token & 31)
        place = place + select(token < 32, Int32(0), cute.arch.popc(low))
        place = select(here == 1, place, Int32(0))
        weight = load_words(at.weights.toint() + Int64(pair) * 4, 1, guard=here)[0]
        store_word(shared + where["pairs"] + place * 4, pair | (indexes[i] << 16), here)
        store_word(shared + where["weights"] + place * 4, weight, here)
    cute.arch.sync_threads()


def span(index: Any, experts: Any, shared: Any, where: Any) -> tuple[Any, Any]:
    """Where the pairs of ``experts`` experts from ``index`` on begin and end."""
    begin = shared + where["start"] + index * 4
    return load_word(begin), load_word(begin + experts * 4)
