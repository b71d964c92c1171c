"""The exact top-k of a row of router logits by some warps of a block, as a function that a kernel calls while traced.

Keys are 64 bits and all different: the choice (sigmoid + bias) in an order that integers compare, then the inverted id,
so that a tie goes to the lower id and the result is the same whatever the values. The lanes of all warps make k groups
or more, and the least of the groups' largest keys is reached by k keys at least: it leaves 43 of 896 at k = 16, which
are ranked by counting. A row of equal scores leaves k, the worst row all but those of k - 1 groups.
A NaN ranks behind every number and weighs 0. The exponential is a polynomial of one ulp and the division is exact, so
that scores, and with them ids, are those of the op up to the last bit or two of a score.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .moe_parts import add_shared, load_word, store_word
from .primitives import WARP, lane_xor, load_shared, ptx, select, store_shared, store_words, total

LOWEST = -(2**31)  # behind the order of -inf
LAST_NUMBER = -3.4028234663852886e38
MINUS_INFINITY = float("-inf")
SIGN = 0x7FFFFFFF
CHOOSING = 2  # named barrier of the warps that choose
ROUNDING = 12582912.0  # 1.5 * 2^23
SHARED_RANK = 4  # lanes that share the ranking of a candidate, where several warps choose
AT_ONCE = 8  # candidates that each of them compares it with before it looks whether there are more


def exact_exp(x: Any) -> Any:
    """e^x within an ulp: x = n ln 2 + r, |r| <= ln 2 / 2, a polynomial of r, and the scale in two halves."""
    x = cute.arch.fmin(cute.arch.fmax(x, Float32(-104.0)), Float32(90.0))
    # adding 1.5 * 2^23 rounds to an integer, which then is the lower bits
    shifted = _fma(x, Float32(1.4426950408889634), Float32(ROUNDING))
    n, whole = shifted - ROUNDING, shifted.bitcast(Int32) - Float32(ROUNDING).bitcast(Int32)
    r = ptx("{ .reg .f32 t; fma.rn.f32 t, $1, 0fBF317200, $2; fma.rn.f32 $0, $1, 0fB5BFBE8E, t; }", [Float32], [n, x],
            pure=True)
    series = Float32(1.0 / 5040.0)
    for coefficient in (720.0, 120.0, 24.0, 6.0, 2.0):
        series = _fma(series, r, Float32(1.0 / coefficient))
    series = _fma(r * r, series, r) + 1.0
    half = whole >> 1
    return series * _power(half) * _power(whole - half)


def _fma(a: Any, b: Any, c: Any) -> Any:
    return ptx("fma.rn.f32 $0, $1, $2, $3;", [Float32], [a, b, c], pure=True)


def _power(exponent: Any) -> Any:
    return ((exponent + 127) << 23).bitcast(Float32)


def divide(a: Any, b: Any) -> Any:
    """a / b, correctly rounded."""
    return ptx("div.rn.f32 $0, $1, $2;", [Float32], [a, b], pure=True)


def inverse(x: Any) -> Any:
    """1 / x of x >= 1 within an ulp, and without the branches of a division: one step from the approximation, which
    must do where its residue would be lost."""
    return ptx("""{ .reg .f32 y, e; .reg .pred p; rcp.approx.f32 y, $1; neg.f32 e, $1; fma.rn.f32 e, e, y, 0f3F800000;
        setp.lt.f32 p, $1, 0f7E000000; mov.f32 $0, y; @p fma.rn.f32 $0, y, e, y; }""", [Float32], [x], pure=True)


def score_of(logit: Any) -> Any:
    """Sigmoid; 0 for NaN."""
    score = inverse(exact_exp(-logit) + 1.0)
    return select(logit == logit, score, Float32(0.0))


def order_of(choice: Any) -> Any:
    """Int32 in the order of an fp32."""
    bits = choice.bitcast(Int32)
    return bits ^ ((bits >> 31) & SIGN)


def key_of(order: Any, expert: Any) -> Any:
    """Int64 in the order of (choice, lower id)."""
    return _whole(SIGN - expert, order)


def _halves(key: Any) -> tuple[Any, Any]:
    return ptx("mov.b64 {$0, $1}, $2;", [Int32, Int32], [key], pure=True)


def _whole(low: Any, high: Any) -> Any:
    return ptx("mov.b64 $0, {$1, $2};", [Int64], [low, high], pure=True)


def least_of_lanes(word: Any) -> Any:
    """The least Int32 of a warp, in every lane."""
    return ptx("redux.sync.min.s32 $0, $1, 0xffffffff;", [Int32], [word])


def highest_bit(word: Any) -> Any:
    """The number of the highest bit that is set."""
    return ptx("bfind.u32 $0, $1;", [Int32], [word], pure=True)


def _flag(condition: Any) -> Any:
    return select(condition, Int32(1), Int32(0))


def _keys_at(at: Any) -> list[Any]:
    """Two keys of shared memory."""
    words = [value.bitcast(Int32) for value in load_shared(at, 4)]
    return [_whole(*words[:2]), _whole(*words[2:])]


def _largest(orders: Sequence[Any], experts: Sequence[Any]) -> Any:
    """A lane's largest key. Its ids rise: the first of equals is ahead."""
    best, expert = orders[0], experts[0]
    for order, other in zip(orders[1:], experts[1:], strict=True):
        ahead = order > best
        best, expert = select(ahead, order, best), select(ahead, other, expert)
    return key_of(best, expert)


def _bound(largest: Any, top_k: int) -> Any:
    """A key that ``top_k`` keys reach, from the largest of each lane: the least of those of groups of lanes."""
    step, groups = 1, 1 << (top_k - 1).bit_length()
    while step < WARP // groups:
        other = _whole(*(lane_xor(half, step) for half in _halves(largest)))
        largest = select(other > largest, other, largest)
        step *= 2
    low, high = _halves(largest)
    least = least_of_lanes(high)
    return _whole(least_of_lanes(select(high == least, low, Int32(SIGN))), least)


def clear_keys(thread: Any, guard: Any, shared: Any, where: Any, p: Any) -> None:
    """Before ``choose``, by its threads (``guard`` 1): keys behind every other where no candidate will be, and zeros
    where no score will."""
    none = [Int32(0).bitcast(Float32), Int32(LOWEST).bitcast(Float32)]
    for start in range(0, 16 * p.keys, WARP * p.routers):
        inside = thread + start
        store_shared(shared + where["keys"] + inside * 16, none * 2, guard=_flag(inside < 16 * p.keys) & guard)
    store_word(shared + where["best_scores"] + thread * 4, Int32(0), _flag(thread < WARP) & guard)
    store_word(shared + where["found"], Int32(0), _flag(thread == 0) & guard)


def _meet(p: Any) -> None:
    """The threads that choose."""
    cute.arch.sync_warp()
    if p.routers > 1:
        cute.arch.barrier(barrier_id=CHOOSING, number_of_threads=WARP * p.routers)


@cute.jit
def choose(logits: Any, bias: Any, experts: Any, real: Any, thread: Any, shared: Any, where: cutlass.Constexpr,
           ids: Any, weights: Any, p: cutlass.Constexpr):
    """Stores ids (i32, in falling order) and weights (fp32) of one row at two addresses. ``p.routers`` warps call it,
    ``thread`` counts through them. A lane holds ``logits`` and ``bias`` of some ``experts`` (rising ids), those that
    are ``real`` (1, else 0); the lanes hold each expert once. ``clear_keys`` comes before."""
    scores, orders = [], []
    for i in cutlass.range_constexpr(len(logits)):
        scores.append(score_of(logits[i]))
        choice = select(logits[i] == logits[i], scores[i] + bias[i], Float32(LAST_NUMBER))
        choice = select(choice == choice, choice, Float32(MINUS_INFINITY))
        orders.append(select(real[i] == 1, order_of(choice), Int32(LOWEST)))
    largest = _largest(orders, experts)
    if cutlass.const_expr(p.routers > 1):
        tops = shared + where["tops"]
        store_shared(tops + thread * 8, [half.bitcast(Float32) for half in _halves(largest)])
        _meet(p)
        for warp in cutlass.range_constexpr(p.routers):
            top = load_shared(tops + (thread % WARP + WARP * warp) * 8, 2)
            top = _whole(*(half.bitcast(Int32) for half in top))
            largest = select(top > largest, top, largest)
    else:
        _meet(p)
    bound = _bound(largest, p.top_k)
    reach = [_flag(key_of(order, expert) >= bound) & is_real
             for order, expert, is_real in zip(orders, experts, real, strict=True)]
    count = Int32(0)
    for flag in reach:
        count = count + flag
    place = add_shared(shared + where["found"], count, _flag(count > 0))
    for i in cutlass.range_constexpr(len(logits)):
        halves = [half.bitcast(Float32) for half in (SIGN - experts[i], orders[i])]
        store_shared(shared + where["keys"] + place * 8, halves, guard=reach[i])
        # one warp has many keys a lane, and no registers for their scores as well
        kept = logits[i] if p.routers == 1 else scores[i]
        store_shared(shared + where["scores"] + place * 4, [kept], guard=reach[i])
        place = place + reach[i]
    _meet(p)
    _rank(load_word(shared + where["found"]), thread, shared, where, p)
    _meet(p)
    if thread < WARP:
        chosen = _flag(thread < p.top_k)
        weight = load_shared(shared + where["best_scores"] + thread * 4)
        if cutlass.const_expr(p.renormalize):
            every = [load_shared(shared + where["best_scores"] + 4 * i, 4) for i in range(0, p.top_k, 4)]
            weight = divide(weight, total([score for four in every for score in four]) + 1e-20)
        store_words(ids + Int64(thread) * 4, [load_word(shared + where["best"] + thread * 4)], guard=chosen)
        store_words(weights + Int64(thread) * 4, [(weight * p.scaling).bitcast(Int32)], guard=chosen)


@cute.jit
def _rank(found: Any, thread: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """Stores the ids and scores of the best candidates at their ranks. ``found`` is the same in all threads."""
    lanes = 1 if p.routers == 1 else SHARED_RANK
    for start in cutlass.range(0, found, WARP * p.routers // lanes, unroll=1):
        mine = start + thread // lanes
        real = _flag(mine < found)
        mine = cutlass.min(mine, found - 1)
        low, high = (half.bitcast(Int32) for half in load_shared(shared + where["keys"] + mine * 8, 2))
        key = _whole(low, high)
        rank = Int32(0)
        for first in cutlass.range(0, found, AT_ONCE * lanes, unroll=1):
            at = shared + where["keys"] + (first + thread % lanes * AT_ONCE) * 8
            for pair in cutlass.range_constexpr(AT_ONCE // 2):
                for other in _keys_at(at + pair * 16):
                    rank = rank + _flag(other > key)
        if cutlass.const_expr(lanes > 1):
            rank = rank + lane_xor(rank, 1)
            rank = rank + lane_xor(rank, 2)
        score = load_shared(shared + where["scores"] + mine * 4)
        if cutlass.const_expr(p.routers == 1):
            score = score_of(score)
        best = real & _flag(rank < p.top_k) & _flag(thread % lanes == 0)
        store_word(shared + where["best"] + rank * 4, SIGN - low, best)
        store_shared(shared + where["best_scores"] + rank * 4, [score], guard=best)
