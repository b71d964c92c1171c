"""Attention residuals of one row by a cluster of threads that have 8 columns each, and what of it can be done ahead.

The sources of a row are the finished blocks and the new prefix p, v_j with scores ``s_j = (v_j . score) rsqrt(mean
v_j^2 + eps)``; shares are their softmax, the mix is the sum of share times source, and the norm of the mix follows from
products: ``|mix|^2 = sum over i, j of share_i share_j (v_i . v_j)``. So what a row needs are products of sources with
each other and with ``score``, summed over the row: over the lanes of a warp, then each warp stores its sums in every
block of the cluster, where a barrier counts the bytes.

Blocks that are *settled* (``compiler/settled.py``) are folded into one source before the wait for the producers: with
their softmax among themselves, which takes two sums each, the *base* is ``sum of share_j v_j``, with its largest score
and its sum of shares. After the wait nothing is needed of them but products of the base, so that p costs four sums
(``p . p``, ``p . score``, ``p . base``, ``base . base``) however many blocks there are, and the mix adds two terms. The
base's shares are scaled by ``exp(its largest score - the largest of all)``, as in an online softmax. Sums of the
settled blocks have a barrier of their own. The base waits in shared memory: what is only needed after the wait the
assembler would also make after it. A settled source is loaded past the first-level cache, which may hold what was there
before. Fresh blocks, which are not settled, are read after the wait and are sources of their own beside the base.

A row of one block of threads keeps its sums at home, because a block that is launched without a cluster has no address
in one.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .mailbox import fma, sum_over_lanes
from .primitives import (
    address,
    again,
    exp,
    load_shared,
    maximum,
    peer_address,
    reciprocal,
    rsqrt,
    select,
    send,
    store_shared,
    total,
    unpack,
)

LANES = 32
HEAD = 16  # bytes of the two barriers before the sums
AHEAD = 8  # sums of the settled blocks that are made at once: more take registers, and nothing waits for them
BASE_QUADS = 3  # fp32 of a thread's base in fours
Pair = tuple[int, int]


@dataclass(frozen=True)
class Row:
    """What the mix of a row is compiled for."""

    width: int  # of a row
    blocks: int  # finished blocks of layers
    cluster: int
    threads: int
    eps: float
    out_eps: float | None  # None: the mix itself, without a norm
    settled: tuple[bool, ...]  # of each block

    @property
    def warps(self) -> int:
        return self.threads // LANES

    @property
    def names(self) -> tuple[int, int, int]:
        """Numbers that stand for p, the score and the base beside those of the blocks."""
        return self.blocks, self.blocks + 1, self.blocks + 2

    @property
    def folded(self) -> list[int]:
        return [i for i in range(self.blocks) if self.settled[i]]

    @property
    def fresh(self) -> list[int]:
        return [i for i in range(self.blocks) if not self.settled[i]]

    @property
    def ahead(self) -> list[Pair]:
        """Products of the settled blocks with themselves and the score, known before the wait."""
        return [(i, j) for i in self.folded for j in (i, self.names[1])]

    @property
    def middle(self) -> list[Pair]:
        """Products of the fresh blocks, known before p."""
        fresh, (_, score, base) = self.fresh, self.names
        pairs = [(i, j) for i in fresh for j in fresh if i <= j] + [(i, score) for i in fresh]
        return pairs + ([(i, base) for i in fresh] if self.folded else [])

    @property
    def last(self) -> list[Pair]:
        """Products of p with the fresh blocks, itself, the score and the base, and of the base with itself."""
        p, score, base = self.names
        return [(i, p) for i in (*self.fresh, p)] + [(p, score)] + ([(p, base), (base, base)] if self.folded else [])

    @property
    def shared(self) -> int:
        """Bytes of shared memory: barriers, of both groups of sums those of every warp and their totals, the base."""
        return self.area(True).end + (16 * BASE_QUADS * self.threads if self.folded else 0)

    def area(self, late: bool) -> Area:
        """Where the sums of the settled blocks lie, or the others."""
        start = self.area(False).end if late else HEAD
        pairs = self.middle + self.last if late else self.ahead
        totals = start + 16 * -(-len(pairs) * self.cluster * self.warps // 4)
        return Area(0 if late or not pairs else 8, start, totals, totals + 16 * -(-len(pairs) // 4), pairs)


@dataclass(frozen=True)
class Area:
    """A group of sums in shared memory, by byte offsets: its barrier, the warps' rows, the totals, the end."""

    barrier: int
    rows: int
    totals: int
    end: int
    pairs: list[Pair]


@dataclass(frozen=True)
class Base:
    """The settled blocks as one source: 8 columns a thread, largest score and sum of shares."""

    columns: list[Any]
    top: Any
    whole: Any


def dot(a: Sequence[Any], b: Sequence[Any]) -> Any:
    """The product of two lists of fp32."""
    found = a[0] * b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        found = fma(x, y, found)
    return found


def open_row(p: Row) -> None:
    """First thing in a block of a cluster that mixes, by one thread: the barriers that count what it is sent."""
    barrier = cute.arch.get_dyn_smem(Int64, 16)
    areas = [area for area in (p.area(True), p.area(False)) if area.pairs]
    for area in areas:
        cute.arch.mbarrier_init(_barrier(barrier, area), 1)
    cute.arch.mbarrier_init_fence()
    for area in areas:
        cute.arch.mbarrier_arrive_and_expect_tx(_barrier(barrier, area), 4 * len(area.pairs) * p.cluster * p.warps)


def _barrier(first: Any, area: Area) -> Any:
    return first + area.barrier // 8 if area.barrier else first


def share(totals: Sequence[Any], count: int, sums: Any, warp: Any, first: int, lane: Any, area: Area, p: Row) -> None:
    """Stores a warp's sums, as ``sum_over_lanes`` leaves them, in every block of the cluster from column ``first``."""
    row = sums + area.rows + (warp * len(area.pairs) + first) * 4
    for group, value in enumerate(totals):
        left = min(LANES, count - group * LANES)
        wide = 1 << (left - 1).bit_length()
        copies = LANES // wide  # groups of lanes that hold the same sums, each for other blocks
        own = lane % wide
        for turn in range(-(-p.cluster // copies)):
            target = turn * copies + lane // wide
            guard = (own < left) & (target < p.cluster)
            place = row + (group * LANES + own) * 4
            if p.cluster == 1:
                store_shared(place, [value], guard=guard)
            else:
                send(peer_address(place, target), [value], peer_address(sums + area.barrier, target), guard=guard)


def await_sums(area: Area, p: Row) -> None:
    """Until every block of the cluster has sent its sums."""
    if p.cluster == 1:
        cute.arch.sync_threads()
    else:
        cute.arch.mbarrier_wait(_barrier(cute.arch.get_dyn_smem(Int64, 16), area), 0)


def add_up(sums: Any, thread: Any, area: Area, p: Row) -> dict[Pair, Any]:
    """Every sum over all warps of the cluster, in every thread."""
    count, warps = len(area.pairs), p.cluster * p.warps
    whole = sums + area.totals
    for start in range(0, count, p.threads):
        own = thread + start
        at = sums + area.rows + select(own < count, own, Int32(0)) * 4
        parts = [load_shared(at + warp * count * 4) for warp in range(warps)]
        store_shared(whole + own * 4, [total(parts)], guard=own < count)
    cute.arch.sync_threads()
    values = [value for i in range(0, count, 4) for value in load_shared(whole + i * 4, 4)]
    return dict(zip(area.pairs, values, strict=False))


def fold(sources: Sequence[list[Any]], score: list[Any], thread: Any, warp: Any, p: Row) -> None:
    """The settled blocks as one source, kept in shared memory. ``sources``: 4 words of bf16 of each of them; ``warp``
    is numbered in the cluster. Every block of the cluster must have begun."""
    area, lane, sums = p.area(False), thread % LANES, address(cute.arch.get_dyn_smem(Int64, 16))
    columns = {**{i: unpack(words) for i, words in zip(p.folded, sources, strict=True)}, p.names[1]: score}
    for first in range(0, len(area.pairs), AHEAD):
        some = area.pairs[first : first + AHEAD]
        share(sum_over_lanes([dot(columns[i], columns[j]) for i, j in some], lane), len(some), sums, warp, first, lane,
              area, p)
    await_sums(area, p)
    totals = add_up(sums, thread, area, p)
    scores = _scores(p.folded, totals, p)
    top = maximum(scores)
    shares = [exp(s - top) for s in scores]
    mixed = [Float32(0.0)] * 8
    for words, own in zip(sources, shares, strict=True):
        mixed = [fma(own, v, m) for m, v in zip(mixed, unpack(again(words)), strict=True)]
    kept = [*mixed, top, total(shares), Float32(0.0), Float32(0.0)]
    for quad in range(BASE_QUADS):
        store_shared(_base_at(sums, quad, thread, p), kept[4 * quad : 4 * quad + 4])


def folded(thread: Any, p: Row) -> Base:
    """The base that this thread has kept."""
    sums = address(cute.arch.get_dyn_smem(Int64, 16))
    kept = [x for quad in range(BASE_QUADS) for x in load_shared(_base_at(sums, quad, thread, p), 4)]
    return Base(kept[:8], *kept[8:10])


def _base_at(sums: Any, quad: int, thread: Any, p: Row) -> Any:
    return sums + p.area(True).end + 16 * (quad * p.threads + thread)


def _scores(sources: Sequence[int], totals: dict[Pair, Any], p: Row) -> list[Any]:
    return [totals[j, p.names[1]] * rsqrt(fma(totals[j, j], Float32(1 / p.width), Float32(p.eps))) for j in sources]


def _square(sources: Sequence[int], shares: Sequence[Any], totals: dict[Pair, Any]) -> Any:
    """The square sum of the mix of some sources."""
    square = Float32(0.0)
    for at, i in enumerate(sources):
        product = totals[i, i] * shares[at]
        for beyond, j in enumerate(sources[at + 1 :], at + 1):
            product = fma(2 * shares[beyond], totals[i, j], product)
        square = fma(product, shares[at], square)
    return square


def factors(totals: dict[Pair, Any], base: Base | None, p: Row) -> list[Any]:
    """What each source is multiplied by, its share of the softmax times the norm of the mix: the fresh blocks, p, and
    the base where there is one."""
    sources = [*p.fresh, p.names[0]]
    scores = _scores(sources, totals, p)
    top = maximum(scores + ([base.top] if base else []))
    shares = [exp(score - top) for score in scores]
    square, whole = _square(sources, shares, totals), total(shares)
    if base:
        ahead = exp(base.top - top)
        across = total([own * totals[source, p.names[2]] for own, source in zip(shares, sources, strict=True)])
        square = fma(ahead, fma(ahead, totals[p.names[2], p.names[2]], 2 * across), square)
        whole = fma(ahead, base.whole, whole)
        shares = [*shares, ahead]
    # the shares are still too large by their sum; so is the root of ``square``
    inverse = reciprocal(whole)
    if p.out_eps is None:
        return [own * inverse for own in shares]
    mean = cute.arch.fmax(square, Float32(0.0)) * Float32(1 / p.width) * inverse * inverse
    scale = rsqrt(mean + Float32(p.out_eps)) * inverse
    return [own * scale for own in shares]


def mixed(sources: Sequence[list[Any]], last: list[Any], base: Base | None, thread: Any, p: Row) -> list[Any]:
    """The mix times the norm's factor, 8 columns a thread, when all sums have come. ``sources``: those of the fresh
    blocks, ``last``: of p."""
    area, sums = p.area(True), address(cute.arch.get_dyn_smem(Int64, 16))
    every = [*sources, last, *([base.columns] if base else [])]
    mix = [Float32(0.0)] * 8
    for source, factor in zip(every, factors(add_up(sums, thread, area, p), base, p), strict=True):
        mix = [fma(factor, s, m) for m, s in zip(mix, source, strict=True)]
    return mix
