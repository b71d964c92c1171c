"""The copiers of ``cute.moe_experts_block_scaled``: which of the checkpoint's bytes come into which slot of a ring.

First this block's units, every ``blocks``-th of all, in slots of a few groups of 64 gate and 64 up rows; then its rows
of the weight beside the experts; then, expert by expert, the rows of W2 that make this block's columns. A copier waits
for free slots and for nothing else. Rows lie an odd number of 16 bytes apart, so that 8 lanes that read 16 bytes of 8
rows use all banks.
"""
from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..moe_parts import arrive_copied, await_phase, copy_async, load_word, stream_policy
from ..primitives import select
from .blackwell_layouts import LANES
from .block_scaled_plan import PIECE, TILE, Static
from .tensor_memory import copy_small


def _row(unit: Any, line: Any, p: Static) -> Any:
    """Row of an expert's W1 or W3 that is ``line`` of a unit; behind the last row, the last."""
    row = unit % p.tiles * TILE + line
    return row if p.inter % TILE == 0 else cutlass.min(row, Int32(p.inter - 1))


@cute.jit
def _copy_slice(packed: Any, scales: Any, begin: Any, unit: Any, part: Any, ring: Any, ring_scales: Any, policy: Any,
                lane: Any, p: cutlass.Constexpr):
    """One slice of 64 rows of an expert's W1 or W3, which begins at row ``begin`` of all: 16 bytes and a scale of each
    group."""
    lines = 32 // p.slice  # that a warp copies at once
    inside = (part * p.slice + lane % p.slice) * PIECE
    for start in cutlass.range(0, TILE, lines, unroll=4):
        line = start + lane // p.slice
        source = packed + (begin + Int64(_row(unit, line, p))) * (p.width // 2) + Int64(inside)
        copy_async(ring + line * p.up_pitch + lane % p.slice * PIECE, source, policy, Int32(1))
    for start in cutlass.range_constexpr(0, TILE, 32):
        line = start + lane
        source = scales + (begin + Int64(_row(unit, line, p))) * p.groups + Int64(part * p.slice)
        copy_small(ring_scales + line * p.slice, source, p.slice)


@cute.jit
def copy_weights(at: Any, count: Any, half: Any, block: Any, lane: Any, shared: Any, where: cutlass.Constexpr,
                 p: cutlass.Constexpr):
    """One of two warps: every other slot."""
    policy = stream_policy()
    fill = Int32(0)
    for unit in cutlass.range(block, count * p.tiles, p.blocks, unroll=1):
        expert = load_word(shared + where["list"] + unit // p.tiles * 4)
        for part in cutlass.range(p.slices, unroll=1):
            if (fill & 1) == half:
                slot = fill % p.slots
                await_phase(shared + where["empty"] + slot * 8, ((fill // p.slots) & 1) ^ 1)
                ring = shared + where["ring"] + slot * p.slot_bytes
                scales = ring + LANES * p.up_pitch
                begin = Int64(expert) * p.inter
                _copy_slice(at.w1.toint(), at.s1.toint(), begin, unit, part, ring, scales, policy, lane, p)
                _copy_slice(at.w3.toint(), at.s3.toint(), begin, unit, part, ring + TILE * p.up_pitch,
                            scales + TILE * p.slice, policy, lane, p)
                arrive_copied(shared + where["full"] + slot * 8)
            fill = fill + 1
    if cutlass.const_expr(p.side_width > 0):
        side_first = block * p.side_columns
        side_pieces = p.side_deep // 8
        side_rows = cutlass.min(Int32(p.side_columns), p.side_rows - side_first)
        for part in cutlass.range(p.side_steps, unroll=1):
            if (fill & 1) == half:
                slot = fill % p.slots
                await_phase(shared + where["empty"] + slot * 8, ((fill // p.slots) & 1) ^ 1)
                ring = shared + where["ring"] + slot * p.slot_bytes
                for piece in cutlass.range(lane, side_rows * side_pieces, 32, unroll=2):
                    row, inside = piece // side_pieces, piece % side_pieces * PIECE
                    source = at.w.toint() + Int64(side_first + row) * (2 * p.side_width)
                    source = source + Int64(part * (2 * p.side_deep) + inside)
                    copy_async(ring + row * p.side_pitch + inside, source, policy, Int32(1))
                arrive_copied(shared + where["full"] + slot * 8)
            fill = fill + 1
    turn = p.blocks - 1 - block
    if turn < p.column_blocks:
        first = turn * p.columns
        rows = cutlass.min(Int32(p.columns), p.out_width - first)
        # scales from the 16 bytes that hold the first to those that hold the last
        begin = (first * p.inter_groups) & -PIECE
        scale_pieces = ((((first + rows) * p.inter_groups + PIECE - 1) & -PIECE) - begin) // PIECE
        for item in cutlass.range(0, count, p.together, unroll=1):
            if (fill & 1) == half:
                slot = fill % p.slots
                await_phase(shared + where["empty"] + slot * 8, ((fill // p.slots) & 1) ^ 1)
                ring = shared + where["ring"] + slot * p.slot_bytes
                for own in cutlass.range(cutlass.min(Int32(p.together), count - item), unroll=1):
                    row = Int64(load_word(shared + where["list"] + (item + own) * 4)) * p.out_width
                    packed = at.w2.toint() + (row + Int64(first)) * (p.inter // 2)
                    scales = at.s2.toint() + row * p.inter_groups + Int64(begin)
                    entry = ring + own * p.down_bytes
                    for piece in cutlass.range(lane, rows * p.inter_groups, 32, unroll=2):
                        to = piece // p.inter_groups * p.down_pitch + piece % p.inter_groups * PIECE
                        copy_async(entry + to, packed + Int64(piece * PIECE), policy, Int32(1))
                    for start in cutlass.range_constexpr(0, p.down_scales // PIECE, 32):
                        piece = start + lane
                        copy_async(entry + p.columns * p.down_pitch + piece * PIECE, scales + Int64(piece * PIECE),
                                   policy, select(piece < scale_pieces, Int32(1), Int32(0)))
                arrive_copied(shared + where["full"] + slot * 8)
            fill = fill + 1
