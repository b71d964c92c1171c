"""The copiers of ``cute.moe_experts``: which weights stream through a block's ring of slots, in which order.

Units of 8 gate and 8 up rows of the step's experts, then units of 16 rows of the projection beside them, both every
``blocks``-th of one count that goes through all of them, then of each expert the rows of W2 that make this block's
columns. With ``side_first`` the projection's units come before the experts'. A copier waits for free slots and for
nothing else. The readers count slots in the same order.
"""
from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..moe_parts import (
    arrive_copied,
    await_phase,
    copy_async,
    copy_bulk,
    expect_bytes,
    load_word,
    stream_policy,
)
from ..primitives import select
from ..shared_memory import FRAGMENT
from .plan import TILE

LIST_MASK = 0xFFFF  # of a word of the list of experts: its number


def first_side(block: Any, count: Any, p: Any) -> Any:
    """The first unit of the projection beside the experts that is this block's: the count of runs goes on."""
    if p.side_first:
        return block
    return (block + p.blocks - count * (p.tiles // p.run) % p.blocks) % p.blocks


def first_run(block: Any, p: Any) -> Any:
    """The first run of experts' units that is this block's."""
    return (block + p.blocks - p.side_units % p.blocks) % p.blocks if p.side_first else block


def slots_before(block: Any, p: Any) -> Any:
    """Slots that this block has used when the experts' units begin."""
    return (p.side_units + p.blocks - 1 - block) // p.blocks if p.side_first else Int32(0)


@cute.jit
def copy_units(at: Any, fill: Any, count: Any, block: Any, lane: Any, shared: Any, where: cutlass.Constexpr,
               p: cutlass.Constexpr):
    """One warp: has the copy engine stream this block's units of the list's first ``count`` experts, but for those
    that are in the ``fill`` slots used; a row or 8 scales a copy. Returns the slots used."""
    policy = stream_policy()
    half = p.width // 2
    streamed = fill - slots_before(block, p) if p.side_first else fill
    first = first_run(block, p) + streamed // p.run * p.blocks
    for item in cutlass.range(first, count * (p.tiles // p.run), p.blocks, unroll=1):
        for unit in cutlass.range(item * p.run, item * p.run + p.run, 1, unroll=1):
            slot = fill % p.slots
            await_phase(shared + where["empty"] + slot * 8, ((fill // p.slots) & 1) ^ 1)
            full = shared + where["full"] + slot * 8
            expert = load_word(shared + where["list"] + (unit // p.tiles) * 4) & LIST_MASK
            if lane == 0:
                expect_bytes(full, Int32(2 * TILE * (half + p.groups)))
            cute.arch.sync_warp()
            # lanes 0 to 7 copy rows of W1, 8 to 15 rows of W3, 16 and 17 their scales
            row = Int64(expert) * p.inter + Int64((unit % p.tiles) * TILE)
            scales = lane >= 2 * TILE
            second = select(scales, lane & 1, (lane >> 3) & 1)
            packed = select(second == 1, at.w3.toint(), at.w1.toint()) + (row + Int64(lane & 7)) * half
            scale = select(second == 1, at.s3.toint(), at.s1.toint()) + row * p.groups
            to = select(scales, 2 * TILE * p.row_bytes + second * (TILE * p.groups), lane * p.row_bytes)
            copy_bulk(shared + where["ring"] + slot * p.slot_bytes + to, select(scales, scale, packed),
                      select(scales, Int32(TILE * p.groups), Int32(half)), full, policy,
                      select(lane < 2 * TILE + 2, Int32(1), Int32(0)))
            fill = fill + 1
    return fill


@cute.jit
def copy_side(at: Any, fill: Any, count: Any, block: Any, lane: Any, shared: Any, where: cutlass.Constexpr,
              p: cutlass.Constexpr):
    """One warp: has the copy engine stream this block's units of the projection beside the experts. Returns the slots
    used."""
    policy = stream_policy()
    for unit in cutlass.range(first_side(block, count, p), p.side_units, p.blocks, unroll=1):
        slot = fill % p.slots
        await_phase(shared + where["empty"] + slot * 8, ((fill // p.slots) & 1) ^ 1)
        full = shared + where["full"] + slot * 8
        if lane == 0:
            expect_bytes(full, Int32(2 * TILE * 2 * p.side_width))
        cute.arch.sync_warp()
        source = at.w.toint() + Int64(unit * 2 * TILE + lane) * (2 * p.side_width)
        copy_bulk(shared + where["ring"] + slot * p.slot_bytes + lane * p.side_row_bytes, source,
                  Int32(2 * p.side_width), full, policy, select(lane < 2 * TILE, Int32(1), Int32(0)))
        fill = fill + 1
    return fill


@cute.jit
def copy_by_rows(at: Any, fill: Any, count: Any, block: Any, lane: Any, shared: Any, where: cutlass.Constexpr,
                 p: cutlass.Constexpr):
    """One warp: has the copy engine stream this block's weights, all but those in the ``fill`` slots used."""
    fill = copy_units(at, fill, count, block, lane, shared, where, p)
    if cutlass.const_expr(p.side_width > 0 and not p.side_first):
        fill = copy_side(at, fill, count, block, lane, shared, where, p)
    policy = stream_policy()
    turn = p.blocks - 1 - block
    if turn < p.column_blocks:
        first = turn * p.columns
        rows = cutlass.min(Int32(p.columns), p.out_width - first)
        # scales from the 16 bytes that hold the first to those that hold the last
        begin = (first * p.inter_groups) & -16
        scale_bytes = (((first + rows) * p.inter_groups + 15) & -16) - begin
        for start in cutlass.range(0, count, p.together, unroll=1):
            slot = fill % p.slots
            await_phase(shared + where["empty"] + slot * 8, ((fill // p.slots) & 1) ^ 1)
            full = shared + where["full"] + slot * 8
            inside = cutlass.min(Int32(p.together), count - start)
            if lane == 0:
                expect_bytes(full, inside * (rows * (p.inter // 2) + scale_bytes))
            cute.arch.sync_warp()
            own = lane >> 1
            guard = select(own < inside, Int32(1), Int32(0))
            expert = load_word(shared + where["list"] + select(own < inside, start + own, Int32(0)) * 4) & LIST_MASK
            row = Int64(expert) * p.out_width
            packed = at.w2.toint() + (row + Int64(first)) * (p.inter // 2)
            scale = at.s2.toint() + row * p.inter_groups + Int64(begin)
            scales = (lane & 1) == 1
            to = own * p.down_bytes + select(scales, Int32(p.columns * (p.inter // 2)), Int32(0))
            copy_bulk(shared + where["ring"] + slot * p.slot_bytes + to, select(scales, scale, packed),
                      select(scales, scale_bytes, rows * (p.inter // 2)), full, policy, guard)
            fill = fill + 1


@cute.jit
def copy_by_lanes(at: Any, count: Any, which: Any, block: Any, lane: Any, shared: Any, where: cutlass.Constexpr,
                  p: cutlass.Constexpr):
    """Copier ``which`` of two: streams every other slot of this block's weights, 16 bytes a lane at a time."""
    policy = stream_policy()
    fill = which
    half = p.width // 2
    # 16 bytes number i of 8 rows, which lie end to end in memory and ``row_bytes`` apart in a slot
    pieces = TILE * p.groups
    to = []
    for i in cutlass.range_constexpr(-(-pieces // 32)):
        piece = lane + 32 * i
        to.append(piece * FRAGMENT + piece // p.groups * (p.row_bytes - half))
    for unit in cutlass.range(block + which * p.blocks, count * p.tiles, 2 * p.blocks, unroll=1):
        slot = fill % p.slots
        await_phase(shared + where["empty"] + slot * 8, ((fill // p.slots) & 1) ^ 1)
        expert = load_word(shared + where["list"] + (unit // p.tiles) * 4)
        row = Int64(expert) * p.inter + Int64((unit % p.tiles) * TILE)
        ring = shared + where["ring"] + slot * p.slot_bytes
        for matrix, packed in enumerate((at.w1, at.w3)):
            source = packed.toint() + row * half + Int64(lane * FRAGMENT)
            for i in cutlass.range_constexpr(len(to)):
                real = 1 if 32 * (i + 1) <= pieces else select(lane + 32 * i < pieces, Int32(1), Int32(0))
                copy_async(ring + matrix * TILE * p.row_bytes + to[i], source + 512 * i, policy, real)
        for matrix, scales in enumerate((at.s1, at.s3)):
            source = scales.toint() + row * p.groups + Int64(lane * FRAGMENT)
            for i in cutlass.range_constexpr(-(-TILE * p.groups // 512)):
                real = select((lane + 32 * i) * FRAGMENT < TILE * p.groups, Int32(1), Int32(0))
                copy_async(ring + 2 * TILE * p.row_bytes + matrix * TILE * p.groups + lane * FRAGMENT + 512 * i,
                           source + 512 * i, policy, real)
        arrive_copied(shared + where["full"] + slot * 8)
        fill = fill + 2
    if cutlass.const_expr(p.side_width > 0):
        for unit in cutlass.range(block + fill * p.blocks - count * p.tiles, p.side_units, 2 * p.blocks, unroll=1):
            slot = fill % p.slots
            await_phase(shared + where["empty"] + slot * 8, ((fill // p.slots) & 1) ^ 1)
            ring = shared + where["ring"] + slot * p.slot_bytes + lane * FRAGMENT
            source = at.w.toint() + Int64(unit * 2 * TILE) * (2 * p.side_width) + Int64(lane * FRAGMENT)
            for line in cutlass.range(2 * TILE, unroll=1):
                for i in cutlass.range_constexpr(-(-p.side_width // 256)):
                    copy_async(ring + line * p.side_row_bytes + 512 * i,
                               source + Int64(line * (2 * p.side_width) + 512 * i), policy,
                               select(lane + 32 * i < p.side_width // 8, Int32(1), Int32(0)))
            arrive_copied(shared + where["full"] + slot * 8)
            fill = fill + 2
    turn = p.blocks - 1 - block
    if turn < p.column_blocks:
        first = turn * p.columns
        rows = cutlass.min(Int32(p.columns), p.out_width - first)
        # scales from the 16 bytes that hold the first to those that hold the last
        begin = (first * p.inter_groups) & -16
        scale_pieces = (((first + rows) * p.inter_groups + 15) & -16) - begin
        scale_pieces = scale_pieces // FRAGMENT
        pieces_of_rows = rows * p.inter_groups
        units = (count * p.tiles + p.side_units - block + p.blocks - 1) // p.blocks
        units = cutlass.max(units, Int32(0))
        for start in cutlass.range((fill - units) * p.together, count, 2 * p.together, unroll=1):
            slot = fill % p.slots
            await_phase(shared + where["empty"] + slot * 8, ((fill // p.slots) & 1) ^ 1)
            ring = shared + where["ring"] + slot * p.slot_bytes
            for own in cutlass.range(cutlass.min(Int32(p.together), count - start), unroll=1):
                expert = load_word(shared + where["list"] + (start + own) * 4)
                row = Int64(expert) * p.out_width
                packed = at.w2.toint() + (row + Int64(first)) * (p.inter // 2) + Int64(lane * FRAGMENT)
                scale = at.s2.toint() + row * p.inter_groups + Int64(begin + lane * FRAGMENT)
                entry = ring + own * p.down_bytes + lane * FRAGMENT
                for i in cutlass.range_constexpr(-(-p.columns * p.inter_groups // 32)):
                    copy_async(entry + 512 * i, packed + 512 * i, policy,
                               select(lane + 32 * i < pieces_of_rows, Int32(1), Int32(0)))
                for i in cutlass.range_constexpr(-(-p.down_scales // 512)):
                    copy_async(entry + p.columns * (p.inter // 2) + 512 * i, scale + 512 * i, policy,
                               select(lane + 32 * i < scale_pieces, Int32(1), Int32(0)))
            arrive_copied(shared + where["full"] + slot * 8)
            fill = fill + 2
