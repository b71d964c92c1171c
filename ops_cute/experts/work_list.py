"""Which experts a launch of ``cute.moe_experts`` reads, in which order, and where each token has each of them.

One warp sorts: a bit for each expert, a prefix sum over their words. Where all experts are here, those of the first row
begin the list as the router has them, so that their weights stream while the others are sorted.
"""
from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..moe_parts import load_byte, load_word, set_bits, store_byte, store_word
from ..primitives import load_words, select
from .plan import TOKENS


@cute.jit
def list_first_row(at: Any, lane: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """One warp: the experts of the first row, which differ, begin the list as the router has them."""
    for start in cutlass.range_constexpr(0, p.top_k, 32):
        pair = lane + start
        inside = select(pair < p.top_k, Int32(1), Int32(0))
        expert = load_words(at.ids.toint() + Int64(pair) * 4, 1, guard=inside)[0]
        store_word(shared + where["list"] + pair * 4, expert, inside)
    cute.arch.sync_warp()


@cute.jit
def place_row(at: Any, lane: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """One warp, one row, all experts here: the list is the row. Where the token has each of them, and its weights."""
    for start in cutlass.range_constexpr(0, p.top_k, 32):
        pair = lane + start
        inside = select(pair < p.top_k, Int32(1), Int32(0))
        weight = load_words(at.weights.toint() + Int64(pair) * 4, 1, guard=inside)[0]
        store_word(shared + where["weights"] + pair * 4, weight, inside)
        store_byte(shared + where["places"] + pair * TOKENS, pair, inside)
    if lane == 0:
        store_word(shared + where["count"], Int32(p.top_k))


@cute.jit
def list_experts(at: Any, lane: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """One warp: distinct experts in rising order of their ids, behind those of the first row where they begin the list,
    and where each token has each of them."""
    pairs = p.tokens * p.top_k
    local, real, weights = [], [], []
    first = Int32(0)
    if cutlass.const_expr(p.local < p.experts):
        first = load_words(at.rank.toint(), 1)[0] * p.local
    for i in cutlass.range_constexpr(-(-pairs // 32)):
        pair = lane + 32 * i
        inside = pair < pairs
        guard = select(inside, Int32(1), Int32(0))
        expert = load_words(at.ids.toint() + Int64(pair) * 4, 1, guard=guard)[0] - first
        here = inside & (expert >= 0) & (expert < p.local)
        local.append(select(here, expert, Int32(0)))
        real.append(select(here, Int32(1), Int32(0)))
        weights.append(load_words(at.weights.toint() + Int64(pair) * 4, 1, guard=guard)[0])
    word_of = [(expert >> 5) * 4 for expert in local]
    bit_of = [Int32(1) << (expert & 31) for expert in local]
    known = [Int32(0)] * len(local)
    if cutlass.const_expr(p.early):
        for i in cutlass.range_constexpr(-(-p.top_k // 32)):
            own = select(lane + 32 * i < p.top_k, Int32(1), Int32(0))
            set_bits(shared + where["known"] + word_of[i], bit_of[i], own)
            store_byte(shared + where["inverse"] + local[i], lane + 32 * i, own)
        cute.arch.sync_warp()
        known = [select((load_word(shared + where["known"] + word) & bit) != 0, Int32(1), Int32(0))
                 for word, bit in zip(word_of, bit_of, strict=True)]
    for i in cutlass.range_constexpr(len(local)):
        set_bits(shared + where["bits"] + word_of[i], bit_of[i], real[i] & (known[i] ^ 1))
        store_word(shared + where["weights"] + (lane + 32 * i) * 4, weights[i],
                   select(lane + 32 * i < pairs, Int32(1), Int32(0)))
    cute.arch.sync_warp()
    held = Int32(0)
    if lane < p.words:
        held = load_word(shared + where["bits"] + lane * 4)
    count = cute.arch.popc(held)
    before = count
    for step in cutlass.range_constexpr(5):
        lower = cute.arch.shuffle_sync_up(before, 1 << step, mask_and_clamp=0)
        before = before + select(lane >= (1 << step), lower, Int32(0))
    begin = p.top_k if p.early else 0
    if lane == 31:
        store_word(shared + where["count"], before + begin)
    if lane < p.words:
        store_word(shared + where["before"] + lane * 4, before - count + begin)
    cute.arch.sync_warp()
    for i in cutlass.range_constexpr(len(local)):
        lower = load_word(shared + where["bits"] + word_of[i]) & (bit_of[i] - 1)
        index = load_word(shared + where["before"] + word_of[i]) + cute.arch.popc(lower)
        if cutlass.const_expr(p.early):
            index = select(known[i] == 1, load_byte(shared + where["inverse"] + local[i]), index)
        pair = lane + 32 * i
        store_word(shared + where["list"] + index * 4, local[i], real[i] & (known[i] ^ 1))
        store_byte(shared + where["places"] + index * TOKENS + pair // p.top_k, pair % p.top_k, real[i])
