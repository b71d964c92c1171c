"""Projections of 1 to 8 rows whose weights are in shared memory before the producers have finished.

Contract: as ``skinny_linear.py``, router, gate and up, and a value added included, for K a multiple of 32. It is for
another neighbourhood: where the launches before it leave memory idle.

Why: with programmatic launch a block may be resident as soon as all blocks of the launch before have started, if
threads, registers and shared memory are free. ``cute.skinny_linear`` keeps what is in flight in registers, at most
13 MB over an H200, and its blocks want a whole register file. Here a block has 8 warps of less than 128 registers,
half of the file, or 4, and the ring of weights is shared memory, which small kernels leave alone: 63 rows of 8 warps x
448 bytes on 132 multiprocessors are 30 MB, which are there when the wait ends if it was 7 us long. Of the 46 MB of
3216 x 7168 16 are left then, 3.7 us at 4.44 TB/s instead of 10.4; of 7168 x 768 (11 MB, 86 KB a block) nothing is.

Layout: block b of one on each multiprocessor has rows b N / blocks to (b + 1) N / blocks, 24 or 25 of 3216. Their
columns are dealt out to the warps in turn, so that all warps together read rows from end to end. A warp's unit is up
to 16 rows (units of 13 and of 12 for 25 rows) of some columns; its units go through a ring of its own, which it fills
itself: no warp waits for another before the sums. Rows of the ring begin half a line of banks after one another
(an odd number of 32 columns does so by itself, an even one is padded), so a lane's 16 bytes, row r and columns 8 q to
8 q + 7 of 32, are read without conflict. They are its elements of two products, since K may be summed in any order as
long as x is read alike: weights are the left operand, 16 rows a tile, x is the right one, its 8 columns the rows of
the step. A row that is missing is whatever lies there; it ends in sums that nobody stores.
Arithmetic for 3216 x 7168 a block: 350 KB through shared memory at 128 bytes a clock 2,700 clocks, 900 products 1,800,
beside 18,000 clocks of memory. Pieces of 448 bytes are 780 bulk copies, one in 23 clocks; 16 bytes a lane are 780
instructions of 28 lanes; neither is slower than the other.

Waits: as many units as the ring holds are on their way before the wait for the producers, with ``pace_kb`` a few of
the block's at a time, warp after warp: what the launches ahead still want stands in line behind all that is on its
way, 20 MB of a whole ring, where 6 keep memory busy. Only weights are read before the wait, and nothing is written. x
is touched after it, two pieces ahead of the products. The trigger is the first instruction. A place in the ring is
filled again by the warp that has just read it.
``held``: a warp's first units are in registers, which the loop has only later, so that one unit costs 4 of them; their
loads stand between the copies of the ring in equal shares, which paces them too. ``late``, ``late_share``: the last
blocks have fewer rows. Blocks begin in the order of their numbers; where the launch before frees some multiprocessors
late (``few`` of ``cute.moe_experts_tail``), those blocks have nothing ahead and would end last. It is emulated and
compiled, not timed.
Numerics: exact products, fp32 sums in a fixed order, one rounding at the store.
In the step of a TP16 rank of Kimi K3 on an H200, one row (30 November 2026): 3216 x 7168 6.6 us, 7168 x 768 3.3
behind KDA and 2.0 behind MLA; what ``pace_kb`` and ``held`` give stands in ``docs/performance.md``.
Without them there (29 November 2026; us, cold weights, one row, each by its best configuration; ``cute.skinny_linear``
in brackets), in the captured step of a TP16 rank: 3216 x 7168 9.0 (17.2), 2880 x 7168 8.1 (15.1), 7168 x 768 2.0. In a
chain of its like, and what it adds to a chain of launches that wait 2 and 5 us with 8 blocks: 3216 x 7168 11.4, 10.4,
8.4 (11.7, 11.5, 11.5); 2880 x 7168 10.0, 9.3, 7.4 (11.0, 10.2, 10.2); 10240 x 7168 34.7, 33.4, 33.0 (36.5, 36.7, 36.7);
7168 x 768 2.9, 2.5, 2.2 (3.3, 2.3, 2.1): there registers hold it all as well. 3216 x 7168 at 8 rows 11.7, 11.2, 9.5
(12.3, 11.7, 11.7). A ring of 144 KB is worth half, one of 96 KB less than registers. In these chains slots had equal
sizes: 186 KB where 224 are allowed now. Then 117 comparisons there were right and none was wrong: Kimi K3's shapes at
1, 2, 5 and 8 rows, and every configuration of eight of them; with a pace and ``held`` 170.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..compiler.call import Call
from .launching import KernelLaunch, await_producers, named, start_dependents
from .moe_parts import (
    arrive_copied,
    await_phase,
    copy_async,
    copy_bulk,
    expect_bytes,
    init_barrier,
    multiprocessors,
    publish_barriers,
    stream_policy,
)
from .primitives import load_bytes, load_shared, load_words, mma, select, store_shared, total
from .skinny_linear import COLUMNS, Projection, finish, read_call, weight_row
from .skinny_linear_menu import STEP, TILE, count_rows
from .staged_linear_menu import MOST_TILES

FRAGMENT = 16  # bytes of one lane
BANKS = 128  # bytes
AT_ONCE = -1  # no unit is read before


def place_units(heights: tuple[int, ...], rows: int) -> tuple[tuple[int, int], ...]:
    """Of each unit its first row in a ring of ``rows``, and the last unit that has to be read before it may be copied
    there. Units follow each other and none goes over the end."""
    placed: list[tuple[int, int]] = []
    begin = 0
    for height in heights:
        begin = begin if begin + height <= rows else 0
        under = [unit for unit, (first, _) in enumerate(placed)
                 if first < begin + height and begin < first + heights[unit]]
        placed.append((begin, max([*under[-1:], placed[-1][1] if placed else AT_ONCE])))
        begin += height
    return tuple(placed)


Spread = tuple[int, int, int, int]  # grains of the line of weights, blocks, late blocks, their share in percent


def first_grain(block: Any, spread: Spread, most: Any = max) -> Any:
    """Where ``block`` begins in the line of weights, of which late blocks, the last, have their share of what others
    have each. ``most`` is the greater of two numbers, in a kernel the device's."""
    line, blocks, late, share = spread
    if not late:
        return block * line // blocks
    less = 100 - share
    return (100 * block - less * most(block - (blocks - late), 0)) * line // (100 * blocks - less * late)


@cache
def grains_of_blocks(spread: Spread) -> tuple[int, ...]:
    """The number of grains of each block."""
    begins = [first_grain(block, spread) for block in range(spread[1] + 1)]
    return tuple(end - begin for begin, end in pairwise(begins))


@dataclass(frozen=True)
class Static(Projection):
    """A projection and how it is spread; sizes in elements, unless they say bytes."""

    blocks: int
    warps: int
    unit_columns: int
    ring_bytes: int  # wanted, of a block
    bulk: bool
    pace_kb: int = 0  # about what is on its way at once before the wait; 0: all that has a place
    held: int = 0  # units of a warp that registers have, the first of them
    late: int = 0  # blocks that find room later than the others, the last ones
    late_share: int = 100  # percent that they have of the others' rows

    @property
    def grain(self) -> int:
        """Rows of the line of weights that stay together."""
        return 2 if self.groups[2] else 1

    @property
    def line(self) -> int:
        """Rows of all weights, in grains."""
        return count_rows(self.groups) // self.grain

    @property
    def spread(self) -> Spread:
        """How rows are dealt out."""
        return self.line, self.blocks, self.late, self.late_share

    @property
    def each(self) -> int:
        """Most rows of a block."""
        return self.grain * max(grains_of_blocks(self.spread))

    @property
    def sure(self) -> int:
        """Fewest rows of a block."""
        return self.grain * min(grains_of_blocks(self.spread))

    @property
    def tiles(self) -> int:
        return -(-self.each // TILE)

    @property
    def height(self) -> int:
        """Most rows of a unit: as many units as tiles, of equal heights."""
        return -(-self.each // self.tiles)

    @property
    def pieces(self) -> int:
        """Units of one tile along a warp's columns."""
        return self.columns // (self.unit_columns * self.warps)

    @property
    def units(self) -> int:
        """Of one warp."""
        return self.pieces * self.tiles

    @property
    def piece_bytes(self) -> int:
        return 2 * self.unit_columns

    @property
    def pitch(self) -> int:
        """Bytes between rows of a slot: half a line of banks and whole ones."""
        return self.piece_bytes + (BANKS // 2 if self.piece_bytes % BANKS == 0 else 0)

    @property
    def pace(self) -> int:
        """Units of a block on their way at once before the wait; 0: all that have a place."""
        return self.pace_kb and max(1, round(1024 * self.pace_kb / (self.height * self.piece_bytes)))

    @property
    def heights(self) -> tuple[int, ...]:
        """Most rows of each unit of a warp."""
        return tuple(min(self.height, self.each - tile * self.height) for tile in range(self.tiles)) * self.pieces

    @property
    def places(self) -> dict[int, tuple[int, int]]:
        """Of each unit that goes through the ring what ``place_units`` says."""
        found = place_units(self.heights[self.held :], max(self.height, self.ring_bytes // (self.warps * self.pitch)))
        return {self.held + unit: (first, after if after == AT_ONCE else self.held + after)
                for unit, (first, after) in enumerate(found)}

    @property
    def ahead(self) -> list[int]:
        """Units of the ring that are on their way before the wait."""
        return [unit for unit, (_, after) in self.places.items() if after == AT_ONCE]

    @property
    def steps(self) -> int:
        """Products of a unit along its columns, two each."""
        return self.unit_columns // STEP

    @property
    def warp_bytes(self) -> int:
        """Of one warp's ring, which holds its sums at the end."""
        rows = max((first + self.heights[unit] for unit, (first, _) in self.places.items()), default=0)
        return max(rows * self.pitch, 4 * self.tiles * TILE * COLUMNS)

    @property
    def ring(self) -> int:
        """Byte offset of the rings, behind the barriers."""
        return -(-8 * self.units * self.warps // BANKS) * BANKS

    @property
    def shared(self) -> int:
        return self.ring + self.warps * self.warp_bytes


@cute.jit
def _copy(at: Any, begin: Any, end: Any, warp: Any, lane: Any, shared: Any, policy: Any, unit: cutlass.Constexpr,
          p: cutlass.Constexpr):
    """One warp: its unit number ``unit`` is on its way into its place, counted at the unit's barrier."""
    tile = cutlass.const_expr(unit % p.tiles)
    full = shared + (warp * p.units + unit) * 8
    to = shared + p.ring + warp * p.warp_bytes + p.places[unit][0] * p.pitch
    first = begin + tile * p.height
    count = cutlass.max(cutlass.min(end - first, Int32(p.heights[unit])), Int32(0))
    column = (warp + unit // p.tiles * p.warps) * p.unit_columns
    if cutlass.const_expr(p.bulk):
        if lane == 0:
            expect_bytes(full, count * p.piece_bytes)
        cute.arch.sync_warp()
        # the empty row before the pairs has an address as well, of a row that is there
        source, _ = weight_row(first + lane, at, p)
        copy_bulk(to + lane * p.pitch, source + Int64(column) * 2, Int32(p.piece_bytes), full, policy,
                  select(lane < count, Int32(1), Int32(0)))
    else:
        # lanes stand along a row, or along some short ones; all blocks have all rows but the last, and those after
        # a unit's height belong to the next one
        across = cutlass.const_expr(min(32, p.piece_bytes // FRAGMENT))
        down = cutlass.const_expr(32 // across)
        row, fragment = lane // across, lane % across
        to = to + row * p.pitch + fragment * FRAGMENT
        for i in cutlass.range_constexpr(0, p.heights[unit], down):
            # rows of one matrix follow each other: one address for all of them
            line, beyond = cutlass.const_expr((0, i) if p.grain == 1 and not p.groups[0] else (i, 0))
            source, _ = weight_row(first + row + line, at, p)
            source = source + (Int64(column) * 2 + Int64(fragment * FRAGMENT)) + beyond * 2 * p.columns
            for j in cutlass.range_constexpr(0, p.piece_bytes // FRAGMENT, across):
                real = row < down
                if cutlass.const_expr(i + down > min(p.heights[unit], p.sure - tile * p.height)):
                    real = real & (row + i < count)
                if cutlass.const_expr(j + across > p.piece_bytes // FRAGMENT):
                    real = real & (fragment + j < p.piece_bytes // FRAGMENT)
                copy_async(to + (i * p.pitch + j * FRAGMENT), source + j * FRAGMENT, policy,
                           select(real, Int32(1), Int32(0)))
        arrive_copied(full)


def _load_x(at: Any, piece: int, warp: Any, lane: Any, p: Static) -> list[Any]:
    """This warp's piece of the step's rows, as right operands: 4 words for 32 columns."""
    r, q = lane // 4, lane % 4
    first = (warp + piece * p.warps) * p.unit_columns + 8 * q
    start = at.x.toint() + (Int64(r) * p.stride_x + Int64(first)) * 2
    return [load_bytes(start + 2 * column, FRAGMENT, p.alignment_x, guard=r < p.rows)
            for column in range(0, p.unit_columns, STEP)]


def _hold(at: Any, begin: Any, end: Any, warp: Any, lane: Any, unit: int, steps: range, p: Static) -> list[Any]:
    """For each of ``steps`` of unit number ``unit`` the left operand of a lane: 16 bytes of row r and of row r + 8."""
    r, q = lane // 4, lane % 4
    first = begin + unit % p.tiles * p.height
    column = (warp + unit // p.tiles * p.warps) * p.unit_columns + 8 * q
    halves = []
    for row in (r, r + 8) if p.heights[unit] > 8 else (r,):
        source, _ = weight_row(first + row, at, p)
        real = select((row < p.heights[unit]) & (first + row < end), Int32(1), Int32(0))
        halves.append([load_words(source + (Int64(column) + STEP * step) * 2, guard=real, stream=True)
                       for step in steps])
    return list(zip(halves[0], halves[-1], strict=True))


def _unit_of(rows: Any, lane: Any, height: int, p: Static) -> list[Any]:
    """As ``_hold``, of a unit of ``height`` rows in the ring, all its steps."""
    r, q = lane // 4, lane % 4
    last = Int32(height - 1)
    upper = rows + cutlass.min(r, last) * p.pitch + q * FRAGMENT
    lower = rows + cutlass.min(r + 8, last) * p.pitch + q * FRAGMENT
    found = []
    for step in range(p.steps):
        u = [word.bitcast(Int32) for word in load_shared(upper + 2 * STEP * step, 4)]
        # rows 8 to 15 are none of ours in a low unit: any number does
        v = [word.bitcast(Int32) for word in load_shared(lower + 2 * STEP * step, 4)] if height > 8 else u
        found.append((u, v))
    return found


def _multiply(unit: list[Any], x: list[Any], sums: list[Any]) -> list[Any]:
    """``sums`` plus a unit: two chains of products, for the even and the odd."""
    sums = list(sums)
    for (u, v), b in zip(unit, x, strict=True):
        for half in range(2):
            i = 2 * half
            sums[half] = mma([u[i], v[i], u[i + 1], v[i + 1]], b[i : i + 2], sums[half])
    return sums


@cute.kernel
def _staged_linear(arguments: Any, names: cutlass.Constexpr, p: cutlass.Constexpr):
    start_dependents(p.dependent)
    at = named(names, arguments)
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
    shared = cute.arch.get_dyn_smem(cutlass.Uint8, BANKS).toint()
    begin, end = (p.grain * first_grain(block + i, p.spread, lambda a, b: cutlass.max(a, Int32(b))) for i in range(2))
    if lane == 0:
        for unit in cutlass.range_constexpr(p.units):
            init_barrier(shared + (warp * p.units + unit) * 8, 1 if p.bulk else 32)
        publish_barriers()
    if cutlass.const_expr(p.pace > 0):
        cute.arch.sync_threads()
    else:
        cute.arch.sync_warp()
    policy = stream_policy()
    ahead = cutlass.const_expr(p.ahead)
    held = []
    for turn in cutlass.range_constexpr(len(ahead)):
        if cutlass.const_expr(0 < p.pace < (turn + 1) * p.warps):
            # units follow each other from warp to warp, and each the one that is ``pace`` before
            before = turn * p.warps + warp - p.pace
            if before >= 0:
                await_phase(shared + (before % p.warps * p.units + ahead[0] + before // p.warps) * 8, Int32(0))
        _copy(at, begin, end, warp, lane, shared, policy, ahead[turn], p)
        # what registers have comes in equal shares between
        for unit in cutlass.range_constexpr(p.held):
            share = range(turn * p.steps // len(ahead), (turn + 1) * p.steps // len(ahead))
            held.append((unit, _hold(at, begin, end, warp, lane, unit, share, p)))
    await_producers(p.dependent)

    x = [_load_x(at, piece, warp, lane, p) for piece in range(min(2, p.pieces))]
    sums = [[[Float32(0.0)] * 4] * 2] * p.tiles
    for unit in cutlass.range_constexpr(p.units):
        piece, tile = divmod(unit, p.tiles)
        if cutlass.const_expr(unit < p.held):
            operands = [step for of, steps in held if of == unit for step in steps]
        else:
            await_phase(shared + (warp * p.units + unit) * 8, Int32(0))
            place = shared + p.ring + warp * p.warp_bytes + p.places[unit][0] * p.pitch
            operands = _unit_of(place, lane, p.heights[unit], p)
        sums[tile] = _multiply(operands, x[piece], sums[tile])
        freed = cutlass.const_expr([n for n, (_, after) in p.places.items() if after == unit])
        if cutlass.const_expr(len(freed) > 0):
            cute.arch.sync_warp()
        for following in cutlass.range_constexpr(len(freed)):
            _copy(at, begin, end, warp, lane, shared, policy, freed[following], p)
        if cutlass.const_expr(tile == p.tiles - 1 and len(x) < p.pieces):
            x.append(_load_x(at, len(x), warp, lane, p))

    cute.arch.sync_warp()
    own = shared + p.ring + warp * p.warp_bytes + (lane // 4) * (4 * COLUMNS) + (lane % 4) * 8
    for tile in cutlass.range_constexpr(p.tiles):
        four = [even + odd for even, odd in zip(sums[tile][0], sums[tile][1], strict=True)]
        for half in cutlass.range_constexpr(2):
            store_shared(own + (tile * TILE + 8 * half) * (4 * COLUMNS), four[2 * half : 2 * half + 2])
    cute.arch.sync_threads()
    grains = cutlass.const_expr(p.each // p.grain)
    for start in cutlass.range_constexpr(0, grains * p.rows, 32 * p.warps):
        m, row = (thread + start) // grains, (thread + start) % grains * p.grain
        if (m < p.rows) & (begin + row < end):
            values = []
            for i in cutlass.range_constexpr(p.grain):
                inside = (row + i) // p.height * TILE + (row + i) % p.height
                place = shared + p.ring + inside * (4 * COLUMNS) + m * 4
                values.append(total([load_shared(place + w * p.warp_bytes) for w in range(p.warps)]))
            finish(values, begin + row, m, m < p.rows, at, p)


def bind(call: Call) -> KernelLaunch:
    """The launch for ``call``; pattern names as in ``staged_linear_menu.py``."""
    tensors, projection = read_call(call)
    config, columns, count = call.config, projection.columns, count_rows(projection.groups)
    blocks = min(multiprocessors(tensors["x"].device), count // (2 if projection.groups[2] else 1))
    static = Static(**vars(projection), blocks=blocks, warps=config["warps"],
                    unit_columns=config["columns"], ring_bytes=1024 * config["ring_kb"], bulk=config["bulk"],
                    pace_kb=config.get("pace_kb", 0), held=config.get("held", 0),
                        late=min(config.get("late", 0), blocks - 1), late_share=config.get("late_share", 100))
    assert static.unit_columns % STEP == 0, f"{config}"
    assert columns % (static.unit_columns * static.warps) == 0, f"{columns} columns by {config}"
    assert static.held < static.units, f"{config}: {static.units} units of a warp"
    assert static.tiles <= MOST_TILES, f"{count} rows on {static.blocks} blocks"
    return KernelLaunch(_staged_linear, (blocks, 1, 1), 32 * static.warps, tensors, static, shared=static.shared,
                        dependent=static.dependent)
