"""The exact top-k of a row of router logits by one warp, as a function that a kernel calls while it is traced.

Keys are 64 bits and all different: the choice (sigmoid + bias) in an order that integers compare, then the inverted id,
so that a tie goes to the lower id and the result is the same whatever the values. Of the 32 largest keys of a lane the
k-th is a lower bound of the row's k-th; the few keys that reach it are ranked by counting. A row of equal scores leaves
k candidates, the worst row 16 lanes of them.
A NaN ranks behind every number and weighs 0. The exponential is a polynomial of one ulp and the division is exact, so
that scores, and with them ids, are those of the op up to the last bit or two of a score.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .moe_parts import load_word, store_word
from .primitives import lane_value, load_shared, ptx, select, store_shared, store_words, sum_lanes

LOWEST = -(2**31)  # behind the order of -inf
LAST_NUMBER = -3.4028234663852886e38
MINUS_INFINITY = float("-inf")
SIGN = 0x7FFFFFFF


def exact_exp(x: Any) -> Any:
    """e^x within an ulp: x = n ln 2 + r, |r| <= ln 2 / 2, a polynomial of r, and the scale in two halves."""
    x = cute.arch.fmin(cute.arch.fmax(x, Float32(-104.0)), Float32(90.0))
    # adding and taking away 1.5 * 2^23 rounds to an integer
    n = ptx("{ .reg .f32 t; fma.rn.f32 t, $1, 0f3FB8AA3B, 0f4B400000; sub.rn.f32 $0, t, 0f4B400000; }", [Float32], [x],
            pure=True)
    r = ptx("{ .reg .f32 t; fma.rn.f32 t, $1, 0fBF317200, $2; fma.rn.f32 $0, $1, 0fB5BFBE8E, t; }", [Float32], [n, x],
            pure=True)
    total = Float32(1.0 / 5040.0)
    for coefficient in (720.0, 120.0, 24.0, 6.0, 2.0):
        total = _fma(total, r, Float32(1.0 / coefficient))
    total = _fma(r * r, total, r) + 1.0
    whole = n.to(Int32)
    half = whole >> 1
    return total * _power(half) * _power(whole - half)


def _fma(a: Any, b: Any, c: Any) -> Any:
    return ptx("fma.rn.f32 $0, $1, $2, $3;", [Float32], [a, b, c], pure=True)


def _power(exponent: Any) -> Any:
    return ((exponent + 127) << 23).bitcast(Float32)


def divide(a: Any, b: Any) -> Any:
    """a / b, correctly rounded."""
    return ptx("div.rn.f32 $0, $1, $2;", [Float32], [a, b], pure=True)


def score_of(logit: Any) -> Any:
    """Sigmoid; 0 for NaN."""
    score = divide(Float32(1.0), exact_exp(-logit) + 1.0)
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


def highest_bit(word: Any) -> Any:
    """The number of the highest bit that is set."""
    return ptx("bfind.u32 $0, $1;", [Int32], [word], pure=True)


def _key_of_lane(key: Any, lane: Any) -> Any:
    return _whole(*(lane_value(half, lane) for half in _halves(key)))


def _flag(condition: Any) -> Any:
    return select(condition, Int32(1), Int32(0))


def _bound(orders: Sequence[Any], experts: Sequence[Any], top_k: int) -> Any:
    """The key that is the ``top_k``-th of the largest of each lane. A lane's ids rise: the first of equals is ahead."""
    best, expert = orders[0], experts[0]
    for order, other in zip(orders[1:], experts[1:], strict=True):
        ahead = order > best
        best, expert = select(ahead, order, best), select(ahead, other, expert)
    largest = key_of(best, expert)
    rank = Int32(0)
    for lane in range(32):
        rank = rank + _flag(_key_of_lane(largest, Int32(lane)) > largest)
    holder = cute.arch.vote_ballot_sync(rank == top_k - 1)
    return _key_of_lane(largest, highest_bit(holder))


@cute.jit
def choose(logits: Any, bias: Any, experts: Any, real: Any, lane: Any, shared: Any, where: cutlass.Constexpr,
           ids: Any, weights: Any, p: cutlass.Constexpr):
    """Stores ids (i32, in falling order) and weights (fp32) of one row at two addresses. A lane holds ``logits`` and
    ``bias`` of some ``experts`` (rising ids), those that are ``real`` (1, else 0); the lanes hold each expert once.
    Shared memory has room for every key and logit."""
    orders = []
    for i in cutlass.range_constexpr(len(logits)):
        choice = select(logits[i] == logits[i], score_of(logits[i]) + bias[i], Float32(LAST_NUMBER))
        choice = select(choice == choice, choice, Float32(MINUS_INFINITY))
        orders.append(select(real[i] == 1, order_of(choice), Int32(LOWEST)))
    bound = _bound(orders, experts, p.top_k)
    reach = [_flag(key_of(order, expert) >= bound) for order, expert in zip(orders, experts, strict=True)]
    count = Int32(0)
    for flag in reach:
        count = count + flag
    after = count
    for step in cutlass.range_constexpr(5):
        lower = cute.arch.shuffle_sync_up(after, 1 << step, mask_and_clamp=0)
        after = after + select(lane >= (1 << step), lower, Int32(0))
    found = lane_value(after, Int32(31))
    place = after - count
    for i in cutlass.range_constexpr(len(logits)):
        store_word(shared + where["keys"] + place * 8, SIGN - experts[i], reach[i])
        store_word(shared + where["keys"] + place * 8 + 4, orders[i], reach[i])
        store_shared(shared + where["logits"] + place * 4, [logits[i]], guard=reach[i])
        place = place + reach[i]
    cute.arch.sync_warp()
    for mine in cutlass.range(lane, found, 32, unroll=1):
        at = shared + where["keys"] + mine * 8
        key = _whole(load_word(at), load_word(at + 4))
        rank = Int32(0)
        for other in cutlass.range(found, unroll=8):
            one = shared + where["keys"] + other * 8
            rank = rank + _flag(_whole(load_word(one), load_word(one + 4)) > key)
        inside = _flag(rank < p.top_k)
        best = shared + where["best"] + rank * 8
        store_word(best, SIGN - load_word(at), inside)
        store_shared(best + 4, [load_shared(shared + where["logits"] + mine * 4)], guard=inside)
    cute.arch.sync_warp()
    real = _flag(lane < p.top_k)
    best = shared + where["best"] + lane * 8
    score = select(real == 1, score_of(load_shared(best + 4)), Float32(0.0))
    weight = score
    if cutlass.const_expr(p.renormalize):
        weight = divide(score, sum_lanes(score) + 1e-20)
    store_words(ids + Int64(lane) * 4, [load_word(best)], guard=real)
    store_words(weights + Int64(lane) * 4, [(weight * p.scaling).bitcast(Int32)], guard=real)
