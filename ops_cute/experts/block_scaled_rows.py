"""The stagers of ``cute.moe_experts_block_scaled``: the narrow operand of each step, in shared memory as the
instruction reads it, with its scales.

In the first half rows of x of an expert's tokens, rounded to MXFP8 or to two terms on the way; in the second the
activations of pairs, which other blocks have published in words that are zero until they have come.
"""
from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..moe_parts import arrive, await_phase, is_late, load_word, look, store_byte
from ..primitives import lane_xor, load_words, maximum, select, unpack
from .blackwell_layouts import SCALE_BLOCK, row_place, scale_place
from .block_scaled_list import flag, padded_rows, span
from .block_scaled_plan import PIECE, Static
from .mxfp4 import power_of_two
from .mxfp8 import LEAST, LOW_SHIFT, scale_byte, terms_of
from .tensor_memory import fence_shared, store_many

AHEAD = 4  # loads of 16 bytes that a lane has under way, of activations for each term


def _rounded(words: Any, p: Static) -> tuple[list[list[Any]], Any]:
    """8 bf16 of each lane, 4 lanes a group, as words of e4m3 for each term in the order of the weights; and the
    group's E8M0 byte."""
    values = unpack(words)
    largest = maximum([select(v < 0.0, -v, v) for v in values])
    largest = cute.arch.fmax(largest, lane_xor(largest, 1))
    largest = cute.arch.fmax(largest, lane_xor(largest, 2))
    byte = scale_byte(largest, LEAST if p.terms == 1 else LEAST + LOW_SHIFT)
    down = power_of_two(254 - byte)
    # columns 0 and 2, 4 and 6, 1 and 3, 5 and 7
    halves = [terms_of(values[i], values[i + 2], down, p.terms) for i in (0, 4, 1, 5)]
    return [[halves[i][term] | (halves[i + 1][term] << 16) for i in (0, 2)] for term in range(p.terms)], byte


def _store_scales(scales: Any, row: Any, padded: Any, group: Any, byte: Any, guard: Any, p: Static) -> None:
    """A group's scale for each term's row."""
    for term in range(p.terms):
        store_byte(scales + scale_place(row + term * padded, group), byte - LOW_SHIFT * term, guard)


@cute.jit
def stage_rows(at: Any, count: Any, block: Any, own: Any, lane: Any, shared: Any, where: cutlass.Constexpr,
                p: cutlass.Constexpr):
    """The stagers: every fourth step, the groups of x of the expert's tokens. Returns the steps."""
    step = Int32(0)
    pieces = p.slice * 4  # of 8 columns, one of a lane
    for unit in cutlass.range(block, count * p.tiles, p.blocks, unroll=1):
        begin, end = span(unit // p.tiles, 1, shared, where)
        n = end - begin
        padded = padded_rows(n)
        for part in cutlass.range(p.slices, unroll=1):
            stage = step & 1
            rows = shared + where["rows"] + stage * p.operand_bytes
            scales = shared + where["row_scales"] + stage * (p.scale_words * SCALE_BLOCK)
            if (step & 3) == own:
                for start in cutlass.range(0, n * pieces, 32 * AHEAD, unroll=1):
                    held = []
                    for i in cutlass.range_constexpr(AHEAD):
                        row = (start + 32 * i + lane) // pieces
                        real = row < n
                        pair = load_word(shared + where["pairs"] + select(real, begin + row, begin) * 4) & 0xFFFF
                        source = at.x.toint() + Int64(pair // p.top_k) * (2 * p.stride_x)
                        source = source + Int64(part * (p.slice * 64) + lane % pieces * 16)
                        held.append((load_words(source, guard=flag(real)), row, flag(real)))
                    await_phase(shared + where["stage_empty"] + stage * 8, ((step >> 1) & 1) ^ 1)
                    for i in cutlass.range_constexpr(AHEAD):
                        words, row, real = held[i]
                        terms, byte = _rounded(words, p)
                        piece = lane % pieces
                        for term in cutlass.range_constexpr(p.terms):
                            to = row_place(row + term * padded, piece >> 1, p.operand_rows) + (piece & 1) * 8
                            store_many(rows + to, terms[term], real)
                        _store_scales(scales, row, padded, piece >> 2, byte,
                                      real & flag((piece & 3) == 0), p)
                fence_shared()
            else:
                await_phase(shared + where["stage_empty"] + stage * 8, ((step >> 1) & 1) ^ 1)
            # every warp passes every step, and none is full before: a warp that lags by two would take the parity of
            # the phase after the next for that of the last
            arrive(shared + where["stage_full"] + stage * 8)
            step = step + 1
    return step


@cute.jit
def stage_side(a: Any, step: Any, own: Any, lane: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """The stagers: every fourth step, columns of all rows of ``a`` as they are. Returns the steps."""
    pieces = p.side_deep // 8
    for part in cutlass.range(p.side_steps, unroll=1):
        stage = step & 1
        rows = shared + where["rows"] + stage * p.operand_bytes
        if (step & 3) == own:
            for start in cutlass.range(0, p.tokens * pieces, 32 * AHEAD, unroll=1):
                held = []
                for i in cutlass.range_constexpr(AHEAD):
                    index = start + 32 * i + lane
                    real = flag(index < p.tokens * pieces)
                    source = a + Int64(index // pieces) * (2 * p.stride_a)
                    source = source + Int64(part * (2 * p.side_deep) + index % pieces * PIECE)
                    held.append((load_words(source, guard=real), index, real))
                await_phase(shared + where["stage_empty"] + stage * 8, ((step >> 1) & 1) ^ 1)
                for i in cutlass.range_constexpr(AHEAD):
                    words, index, real = held[i]
                    store_many(rows + row_place(index // pieces, index % pieces, p.operand_rows), words, real)
            fence_shared()
        else:
            await_phase(shared + where["stage_empty"] + stage * 8, ((step >> 1) & 1) ^ 1)
        arrive(shared + where["stage_full"] + stage * 8)
        step = step + 1
    return step


def _fragment(index: Any, begin: Any, n: Any, padded: Any, part: Any, shared: Any, where: Any,
              p: Static) -> tuple[Any, Any, Any]:
    """16 activations of a pass: where they come from in ``act``, where they go in a stage's rows, whether they are."""
    each = 2 * p.down_slice  # fragments of a pair and a term in a step
    row, fragment = index // (each * p.terms), index % (each * p.terms)
    real = row < n
    term, chunk = fragment // each, fragment % each
    pair = load_word(shared + where["pairs"] + (begin + select(real, row, Int32(0))) * 4) & 0xFFFF
    column = part * each + chunk
    place = (pair * p.tiles + (column >> 2)) * p.fragments + term * 4 + (column & 3)
    return Int64(place) * PIECE, row_place(row + term * padded, chunk, p.operand_rows), flag(real)


def _scale(index: Any, begin: Any, n: Any, part: Any, shared: Any, where: Any,
           p: Static) -> tuple[Any, Any, Any, Any, Any]:
    """A group's scale of a pass: where its word is in ``act``, which byte of it, its row and group, whether it is."""
    row, group = index // p.down_slice, index % p.down_slice
    real = row < n
    pair = load_word(shared + where["pairs"] + (begin + select(real, row, Int32(0))) * 4) & 0xFFFF
    column = part * p.down_slice + group
    place = (pair * p.tiles + (column >> 1)) * p.fragments + 4 * p.terms
    return Int64(place) * PIECE, (column & 1) * 8, row, group, flag(real)


@cute.jit
def stage_activations(act: Any, step: Any, count: Any, own: Any, lane: Any, shared: Any, where: cutlass.Constexpr,
                      p: cutlass.Constexpr):
    """The stagers: every fourth step, groups of the activations of a pass's pairs as soon as they have come. The first
    of a step's are on their way before its stage is free."""
    ahead = AHEAD * p.terms
    for item in cutlass.range(0, count, p.together, unroll=1):
        first, end = span(item, cutlass.min(Int32(p.together), count - item), shared, where)
        for begin in cutlass.range(first, end, p.pass_pairs, unroll=1):
            n = cutlass.min(Int32(p.pass_pairs), end - begin)
            padded = padded_rows(n)
            for part in cutlass.range(p.down_slices, unroll=1):
                stage = step & 1
                rows = shared + where["rows"] + stage * p.operand_bytes
                scales = shared + where["row_scales"] + stage * (p.scale_words * SCALE_BLOCK)
                if (step & 3) == own:
                    # as many at once as most passes have: scales of 64 groups, and 128 fragments of a term
                    groups = [_scale(lane + 32 * i, begin, n, part, shared, where, p) for i in range(2)]
                    held = [_fragment(lane + 32 * i, begin, n, padded, part, shared, where, p) for i in range(ahead)]
                    words = [look(act + one[0], one[4], 1)[0] for one in groups]
                    found = [look(act + one[0], one[2]) for one in held]
                    late = is_late([*words, *(word for four in found for word in four)])
                    while late != 0:
                        words = [look(act + one[0], one[4], 1)[0] for one in groups]
                        found = [look(act + one[0], one[2]) for one in held]
                        late = is_late([*words, *(word for four in found for word in four)])
                    cute.arch.sync_warp()
                    await_phase(shared + where["stage_empty"] + stage * 8, ((step >> 1) & 1) ^ 1)
                    for i in cutlass.range_constexpr(ahead):
                        store_many(rows + held[i][1], found[i], held[i][2])
                    for i in cutlass.range_constexpr(2):
                        _, shift, row, group, real = groups[i]
                        _store_scales(scales, row, padded, group, (words[i] >> shift) & 255, real, p)
                    for index in cutlass.range(lane + 32 * ahead, n * (2 * p.down_slice * p.terms), 32, unroll=1):
                        source, to, real = _fragment(index, begin, n, padded, part, shared, where, p)
                        four = look(act + source, real)
                        late = is_late(four)
                        while late != 0:
                            four = look(act + source, real)
                            late = is_late(four)
                        store_many(rows + to, four, real)
                    for index in cutlass.range(lane + 64, n * p.down_slice, 32, unroll=1):
                        source, shift, row, group, real = _scale(index, begin, n, part, shared, where, p)
                        word = look(act + source, real, 1)[0]
                        late = is_late([word])
                        while late != 0:
                            word = look(act + source, real, 1)[0]
                            late = is_late([word])
                        _store_scales(scales, row, padded, group, (word >> shift) & 255, real, p)
                    cute.arch.sync_warp()
                    fence_shared()
                else:
                    await_phase(shared + where["stage_empty"] + stage * 8, ((step >> 1) & 1) ^ 1)
                arrive(shared + where["stage_full"] + stage * 8)
                step = step + 1
