"""The expanders of ``cute.moe_experts_block_scaled``: weights from a slot of the ring into a stage of tensor memory.

Two teams of four warps take turns with the steps. A thread has one of the instruction's 128 rows, reads its bytes from
shared memory and stores them, a byte a weight, in its own lane; scales go to all four quarters. A warp passes every
slot, whoever expands it, so that the parity of a barrier tells the next phase from the last one.
"""
from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..moe_parts import arrive, await_phase, load_byte, load_word
from ..primitives import select
from .blackwell_layouts import LANES, QUARTER, SCALES, weight_column, weight_words
from .block_scaled_list import span
from .block_scaled_plan import PIECE, Static
from .tensor_memory import await_stores, fence_after, fence_before, load_four, store_columns


def stage_at(tensor: Any, stage: Any, p: Static) -> Any:
    """Where a stage begins in tensor memory: weights, then their scales, then those of rows."""
    return tensor + 2 * p.sum_columns + stage * p.stage_columns


def _store_weights(row: Any, at: Any, groups: int, p: Static) -> None:
    """``groups`` times 16 bytes at ``row`` of shared memory, as one lane's columns from ``at``."""
    for group in range(groups):
        words = load_four(row + PIECE * group)
        store_columns(at + weight_column(group), [half for word in words for half in weight_words(word, p.weights)])


def _hand_over_stage(stage: Any, shared: Any, where: Any) -> None:
    await_stores()
    fence_before()
    arrive(shared + where["stage_full"] + stage * 8)


@cute.jit
def expand_up(tensor: Any, count: Any, block: Any, team: Any, quarter: Any, lane: Any, shared: Any,
               where: cutlass.Constexpr, p: cutlass.Constexpr):
    """The expanders: every other step. Returns the steps, which are the slots too."""
    step = Int32(0)
    corner = quarter * QUARTER
    for _unit in cutlass.range(block, count * p.tiles, p.blocks, unroll=1):
        for _part in cutlass.range(p.slices, unroll=1):
            slot = step % p.slots
            # every warp passes every slot: a parity tells the next phase from the last one, not from the one before
            await_phase(shared + where["full"] + slot * 8, (step // p.slots) & 1)
            if (step & 1) == team:
                await_phase(shared + where["stage_empty"] + team * 8, ((step >> 1) & 1) ^ 1)
                fence_after()
                ring = shared + where["ring"] + slot * p.slot_bytes
                stage = stage_at(tensor, team, p) + (corner << 16)
                _store_weights(ring + (corner + lane) * p.up_pitch, stage, p.slice, p)
                scales = ring + LANES * p.up_pitch + lane * p.slice
                for word in cutlass.range_constexpr(p.slice // SCALES):
                    held = [load_word(scales + QUARTER * part * p.slice + 4 * word) for part in range(4)]
                    store_columns(stage + p.stage_scales + 4 * word, held)
                _hand_over_stage(team, shared, where)
            cute.arch.sync_warp()
            if lane == 0:
                arrive(shared + where["empty"] + slot * 8)
            step = step + 1
    return step


@cute.jit
def expand_side(tensor: Any, step: Any, block: Any, team: Any, quarter: Any, lane: Any, shared: Any,
                 where: cutlass.Constexpr, p: cutlass.Constexpr):
    """The expanders: every other step of the projection beside, as it is. Returns the steps."""
    corner = quarter * QUARTER
    rows = cutlass.min(Int32(p.side_columns), p.side_rows - block * p.side_columns)
    row = select(corner + lane < rows, corner + lane, Int32(0))
    for _part in cutlass.range(p.side_steps, unroll=1):
        slot = step % p.slots
        await_phase(shared + where["full"] + slot * 8, (step // p.slots) & 1)
        if (step & 1) == team:
            await_phase(shared + where["stage_empty"] + team * 8, ((step >> 1) & 1) ^ 1)
            fence_after()
            source = shared + where["ring"] + slot * p.slot_bytes + row * p.side_pitch
            stage = stage_at(tensor, team, p) + (corner << 16)
            for piece in cutlass.range_constexpr(0, 2 * p.side_deep, 2 * PIECE):
                words = [*load_four(source + piece), *load_four(source + piece + PIECE)]
                store_columns(stage + piece // 4, words)
            _hand_over_stage(team, shared, where)
        cute.arch.sync_warp()
        if lane == 0:
            arrive(shared + where["empty"] + slot * 8)
        step = step + 1
    return step


def _down_row(row: Any, inside: Any, rows: Any, p: Static) -> tuple[Any, Any]:
    """Bytes into a slot of an item at which row ``row`` of the instruction and its scales begin. Rows without an expert
    or column are others again: nobody reads their sums."""
    expert, column = row // p.columns, row % p.columns
    real = (expert < inside) & (column < rows)
    entry = select(real, expert, Int32(0)) * p.down_bytes
    column = select(real, column, Int32(0))
    return entry + column * p.down_pitch, entry + p.columns * p.down_pitch + column * p.inter_groups


def _word_of(at: Any, count: int) -> Any:
    """Up to 4 bytes from anywhere as a word."""
    word = load_byte(at)
    for i in range(1, count):
        word = word | (load_byte(at + i) << (8 * i))
    return word


@cute.jit
def expand_down(tensor: Any, step: Any, count: Any, block: Any, team: Any, quarter: Any, lane: Any, shared: Any,
                 where: cutlass.Constexpr, p: cutlass.Constexpr):
    """The expanders: every other step, over the items; an item with many pairs is expanded once for each pass."""
    fill = step
    corner = quarter * QUARTER
    first = (p.blocks - 1 - block) * p.columns
    rows = cutlass.min(Int32(p.columns), p.out_width - first)
    skipped = (first * p.inter_groups) & (PIECE - 1)
    for item in cutlass.range(0, count, p.together, unroll=1):
        slot = fill % p.slots
        await_phase(shared + where["full"] + slot * 8, (fill // p.slots) & 1)
        ring = shared + where["ring"] + slot * p.slot_bytes
        inside = cutlass.min(Int32(p.together), count - item)
        own, _ = _down_row(corner + lane, inside, rows, p)
        scales = [ring + skipped + _down_row(QUARTER * part + lane, inside, rows, p)[1] for part in range(4)]
        begin, end = span(item, inside, shared, where)
        for _pass in cutlass.range(begin, end, p.pass_pairs, unroll=1):
            for part in cutlass.range(p.down_slices, unroll=1):
                if (step & 1) == team:
                    await_phase(shared + where["stage_empty"] + team * 8, ((step >> 1) & 1) ^ 1)
                    fence_after()
                    stage = stage_at(tensor, team, p) + (corner << 16)
                    _store_weights(ring + own + part * (p.down_slice * PIECE), stage, p.down_slice, p)
                    for start in cutlass.range_constexpr(0, p.down_slice, SCALES):
                        held = [_word_of(at + part * p.down_slice + start, min(SCALES, p.down_slice - start))
                                for at in scales]
                        store_columns(stage + p.stage_scales + start, held)
                    _hand_over_stage(team, shared, where)
                step = step + 1
        cute.arch.sync_warp()
        if lane == 0:
            arrive(shared + where["empty"] + slot * 8)
        fill = fill + 1
