"""What follows the tail in the same launch: residual, attention residuals and norm of a row, by one block of threads.

The finished blocks of layers are copied to the ring of weights, which is free by then, while the row's columns are on
their way. Their softmax among themselves makes them one source, the *base*: ``sum of share_j v_j`` in registers, with
its largest score and its sum of shares. When the row is there, four sums over it are left: of the base, of the new
prefix ``p = bf16(prefix + row)``, of both with each other and of p with ``score``; the norm of the mix follows from
them, and shares of the base are scaled as in an online softmax.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..mailbox import Addresses, sum_over_lanes
from ..moe_parts import await_phase, copy_bulk, expect_bytes, stream_policy
from ..primitives import (
    exp,
    lane_value,
    load_shared,
    load_words,
    maximum,
    pack,
    rsqrt,
    select,
    store_shared,
    store_words,
    total,
    unpack,
)
from .tail_plan import MIX_SUMS, Mixed
from .tensor_memory import fence_shared


def _sum(values: Sequence[Any], thread: Any, at: Any, p: Mixed) -> list[Any]:
    """Sums over all threads of a block, in all of them; ``at``: fp32 [warps, ``MIX_SUMS``] in shared memory, not used
    for anything else."""
    lane, warp, count = thread % 32, thread // 32, len(values)
    (mine,) = sum_over_lanes(values, lane)
    store_shared(at + 4 * (warp * MIX_SUMS + lane), [mine], guard=lane < count)
    cute.arch.sync_threads()
    own = at + 4 * cutlass.min(lane, Int32(count - 1))
    found = load_shared(own)
    for other in range(1, p.threads // 32):
        found = found + load_shared(own + 4 * MIX_SUMS * other)
    return [lane_value(found, i) for i in range(count)]


def _dot(a: Sequence[Any], b: Sequence[Any]) -> Any:
    found = a[0] * b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        found = found + x * y
    return found


def _flat(items: Sequence[Sequence[Any]]) -> list[Any]:
    return [value for item in items for value in item]


@cute.jit
def _copy_blocks(at: Any, token: Any, thread: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """The first warp: the rows of the finished blocks into the ring, behind all that was stored there."""
    fence_shared()
    cute.arch.sync_threads()
    if thread < 32:
        if thread == 0:
            expect_bytes(shared + where["sources_full"], Int32(p.finished * 2 * p.hidden))
        cute.arch.sync_warp()
        source = at["block0"]
        for i in cutlass.range_constexpr(1, p.finished):
            source = select(thread == i, at[f"block{i}"], source)
        copy_bulk(shared + where["sources"] + thread * (2 * p.hidden), source + Int64(token) * (2 * p.stride_block),
                  Int32(2 * p.hidden), shared + where["sources_full"], stream_policy(),
                  select(thread < p.finished, Int32(1), Int32(0)))


@dataclass(frozen=True)
class _Base:
    """The finished blocks as one source: a thread's columns of it, its largest score, its sum of shares."""

    values: list[list[Any]]
    largest: Any
    whole: Any


@dataclass(frozen=True)
class _Columns:
    """What a thread has of a row: the columns of a finished fragment at a time, ``turns`` times. A turn too many has
    the last columns, and counts nothing."""

    each: int
    first: list[Any]
    real: list[Any]  # Int32
    one: list[Any]  # fp32, 0 in a turn too many

    @staticmethod
    def of(thread: Any, p: Mixed) -> _Columns:
        each, last = p.outputs, p.hidden // p.outputs - 1
        items = [thread + p.threads * turn for turn in range(p.turns)]
        real = [select(item <= last, Int32(1), Int32(0)) for item in items]
        first = [select(item <= last, item, Int32(last)) * each for item in items]
        return _Columns(each, first, real, [select(own == 1, Float32(1.0), Float32(0.0)) for own in real])

    def counted(self, rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
        return [[value * own for value in row] for row, own in zip(rows, self.one, strict=True)]

    def bf16(self, at: Any) -> list[list[Any]]:
        """Words of a row in memory."""
        return [load_words(at + Int64(column) * 2, self.each // 2) for column in self.first]

    def fp32(self, at: Any) -> list[list[Any]]:
        return [[word.bitcast(Float32) for half in range(0, self.each, 4)
                 for word in load_words(at + Int64(column + half) * 4)] for column in self.first]

    def shared(self, at: Any) -> list[list[Any]]:
        """Values of a row of bf16 in shared memory."""
        return [unpack([word.bitcast(Int32) for half in range(0, self.each // 2, 2)
                        for word in load_shared(at + 2 * column + 4 * half, 2)]) for column in self.first]


def _base(own: _Columns, score: Sequence[Any], thread: Any, shared: Any, where: Any, p: Mixed) -> _Base:
    """``score``: a thread's values of it."""
    rows = [shared + where["sources"] + j * (2 * p.hidden) for j in range(p.finished)]
    sums: list[Any] = []
    for row in rows:
        values = _flat(own.counted(own.shared(row)))
        sums += [_dot(values, values), _dot(values, score)]
    sums = _sum(sums, thread, shared + where["first_sums"], p)
    scores = [_score(square, dot, p) for square, dot in zip(sums[::2], sums[1::2], strict=True)]
    largest = maximum(scores)
    shares = [exp(s - largest) for s in scores]
    base = [[Float32(0.0)] * own.each for _ in range(p.turns)]
    for row, share in zip(rows, shares, strict=True):
        base = [[b + share * v for b, v in zip(had, values, strict=True)]
                for had, values in zip(base, own.counted(own.shared(row)), strict=True)]
    return _Base(base, largest, total(shares))


def _score(square: Any, dot: Any, p: Mixed) -> Any:
    return dot * rsqrt(square * Float32(1 / p.hidden) + Float32(p.mix_eps))


def mix_row(at: Addresses, look: Any, wait: Any, report: Any, token: Any, thread: Any, shared: Any, where: Any,
            p: Mixed) -> None:
    """All threads of a block: ``p`` and ``h`` of row ``token``."""
    _copy_blocks(at, token, thread, shared, where, p)
    own = _Columns.of(thread, p)
    prefix = own.bf16(at["prefix"] + Int64(token) * (2 * p.stride_prefix))
    weight = own.bf16(at["weight"])
    score = _flat(own.fp32(at["score"]))
    await_phase(shared + where["sources_full"], Int32(0))
    base = _base(own, score, thread, shared, where, p)

    senders = [column // p.stripe for column in own.first]
    came = wait([look(sender, p.at_finished + token * p.owners + column % p.stripe // own.each)
                 for sender, column in zip(senders, own.first, strict=True)])
    report(list(zip(senders, came, strict=True)), 3)
    new = [pack([a + b for a, b in zip(unpack(old), unpack(words[: own.each // 2]), strict=True)])
           for old, words in zip(prefix, came, strict=True)]
    values = own.counted([unpack(words) for words in new])
    mine, of_base = _flat(values), _flat(base.values)
    square, dot, both, base_square = _sum(
        [_dot(mine, mine), _dot(mine, score), _dot(mine, of_base), _dot(of_base, of_base)], thread,
        shared + where["second_sums"], p)
    new_score = _score(square, dot, p)
    top = maximum([base.largest, new_score])
    a, b = exp(base.largest - top), exp(new_score - top)
    whole = a * base.whole + b
    mixed = cute.arch.fmax(a * a * base_square + Float32(2.0) * a * b * both + b * b * square, Float32(0.0))
    # the shares' sum is divided out inside the root
    scale = rsqrt(mixed * Float32(1 / p.hidden) + Float32(p.norm_eps) * whole * whole)
    for turn, column in enumerate(own.first):
        row = [(a * x + b * y) * scale * w
               for x, y, w in zip(base.values[turn], values[turn], unpack(weight[turn]), strict=True)]
        for name, words in (("h", pack(row)), ("p", new[turn])):
            if name == "h" or p.has_p:
                stride = p.stride_h if name == "h" else p.stride_p
                store_words(at[name] + (Int64(token) * stride + Int64(column)) * 2, words, guard=own.real[turn])
