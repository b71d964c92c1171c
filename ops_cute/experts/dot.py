"""What the experts' kernels of 1 to 8 rows and of more share inside: products of units and chunks, sums over warps.

A unit is 8 gate and 8 up rows of an expert in a slot of the ring, a chunk some groups of its rows of W2. Nothing here
knows which rows chose an expert.
"""
from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..moe_parts import arrive, await_phase, load_byte, load_matrices, look
from ..primitives import Words, lane_xor, load_shared, maximum, ptx, select, store_shared
from ..shared_memory import FRAGMENT
from .mxfp4 import PAIRS, dot_group, pack_f16, round_to_e4m3, scale_of, unpack_f16
from .plan import TILE, WARPS, Static


def pairs_of(values: Any) -> list[Any]:
    """8 fp32 as 4 words of fp16, in the order of decoded weights."""
    return [pack_f16(values[low], values[high]) for low, high in PAIRS]


def over_lanes(size: Any, lanes: int = 4) -> Any:
    """The largest of ``lanes`` neighbouring lanes."""
    step = 1
    while step < lanes:
        size, step = cute.arch.fmax(size, lane_xor(size, step)), 2 * step
    return size


def rounded(values: Any) -> Any:
    """A group of 4 neighbouring lanes as MXFP8 holds it."""
    return round_to_e4m3(values, over_lanes(largest_magnitude(values)))


def largest_magnitude(values: Any) -> Any:
    return maximum([select(v < 0.0, -v, v) for v in values])


def reload(at: Any, words: Words, guard: Any) -> Words:
    """4 words that another block writes or has written, where ``guard`` is true; else ``words``, in their registers."""
    return list(ptx("{ .reg .pred g; setp.ne.b32 g, $9, 0; @g ld.relaxed.gpu.global.v4.b32 {$0, $1, $2, $3}, [$8]; }",
                    [Int32] * 4, [*words, at, Int32(guard)], tied=4))


def _add_scaled(total: Any, upper: Any, lower: Any, products: Any, p: Static) -> list[Any]:
    """``total`` plus the products of a scale group; one token has no second column."""
    scales = (upper, upper, lower, lower)
    return [t if i & 1 and p.tokens == 1 else t + scale * product
            for i, (t, scale, product) in enumerate(zip(total, scales, products, strict=True))]


def dot_unit(slab: Any, own: Any, x: list[Any], lane: Any, p: Static, renew: Any = None) -> list[Any]:
    """A warp's part of a unit that lies in ``slab``: its groups of 8 gate and 8 up rows times ``x``, from group ``own``
    on. ``renew(group, words)`` is what takes the place of a group's operand as soon as it has been used."""
    matrix = slab + (((lane >> 3) & 1) * TILE + (lane & 7)) * p.row_bytes + ((lane >> 4) + own) * FRAGMENT
    scale = slab + 2 * TILE * p.row_bytes + (lane >> 2) * p.groups + own
    total: list[Any] = [Float32(0.0)] * 4
    for pair in range(-(-p.own_groups // 2)):
        here = min(2, p.own_groups - 2 * pair)
        words = load_matrices(matrix + 2 * FRAGMENT * pair, 2 * here)
        for i in range(here):
            group = 2 * pair + i
            gate = scale_of(load_byte(scale + group))
            up = scale_of(load_byte(scale + TILE * p.groups + group))
            total = _add_scaled(total, gate, up, dot_group(words[2 * i], words[2 * i + 1], x[group]), p)
            if renew is not None:
                x[group] = renew(group, x[group])
    return total


def look_at_chunk(source: Any, guard: Any, p: Static) -> list[Any]:
    """A lane's activations of a chunk; ones where ``guard`` is false."""
    return [word for i in range(p.chunk) for word in look(source + 4 * FRAGMENT * i, guard)]


def dot_chunk(rows: Any, inside: Any, group0: Any, x: list[Any], lane: Any, p: Static,
              source: Any = None, guard: Any = None) -> list[list[Any]]:
    """Sums of each 16 of this block's columns over a chunk of an expert's rows of W2, which begin at ``rows``, their
    scales ``inside`` bytes behind. ``source``: whence ``x`` is loaded anew as soon as it has been used."""
    last = p.columns - 1
    own = [x[4 * i : 4 * i + 4] for i in range(p.chunk)]
    if p.rounds:
        # a word holds two columns of the group: their order does not matter for rounding
        own = [_repacked(four, p) for four in own]
    found = []
    for tile in range(p.column_tiles):
        matrix_row = cutlass.min(tile * 16 + ((lane >> 3) & 1) * 8 + (lane & 7), Int32(last))
        matrix = rows + matrix_row * (p.inter // 2) + ((lane >> 4) + group0) * FRAGMENT
        scales = rows + p.columns * (p.inter // 2) + inside + group0
        upper = scales + cutlass.min(tile * 16 + (lane >> 2), Int32(last)) * p.inter_groups
        lower = scales + cutlass.min(tile * 16 + 8 + (lane >> 2), Int32(last)) * p.inter_groups
        sums: list[Any] = [Float32(0.0)] * 4
        for pair in range(-(-p.chunk // 2)):
            here = min(2, p.chunk - 2 * pair)
            words = load_matrices(matrix + 2 * FRAGMENT * pair, 2 * here)
            for i in range(here):
                group = 2 * pair + i
                a, b = scale_of(load_byte(upper + group)), scale_of(load_byte(lower + group))
                sums = _add_scaled(sums, a, b, dot_group(words[2 * i], words[2 * i + 1], own[group]), p)
                if source is not None and tile + 1 == p.column_tiles:
                    four = slice(4 * group, 4 * group + 4)
                    x[four] = reload(source + 4 * FRAGMENT * group, x[four], guard)
        found.append(sums)
    return found


def _repacked(four: Any, p: Static) -> list[Any]:
    """A group's activations rounded to MXFP8 as the op does, scaled as they came."""
    values = rounded([half * Float32(2.0**-p.act_exponent) for word in four for half in unpack_f16(word)])
    return [pack_f16(low * Float32(2.0**p.act_exponent), high * Float32(2.0**p.act_exponent))
            for low, high in zip(values[::2], values[1::2], strict=True)]


@cute.jit
def free_slot(slot: Any, lane: Any, shared: Any, where: cutlass.Constexpr):
    """This warp has read the slot."""
    cute.arch.sync_warp()
    if lane == 0:
        arrive(shared + where["empty"] + slot * 8)


@cute.jit
def hand_over(sums: Any, more: Any, step: Any, warp: Any, lane: Any, shared: Any, where: cutlass.Constexpr,
              p: cutlass.Constexpr):
    """Gives this warp's sums of the two units of a step to the finishers."""
    buffer = step & 1
    await_phase(shared + where["partials_empty"] + buffer * 8, ((step >> 1) & 1) ^ 1)
    at = shared + where["partials"] + buffer * (2 * p.partial_bytes) + (warp * 32 + lane) * FRAGMENT
    store_shared(at, sums)
    store_shared(at + p.partial_bytes, more)
    cute.arch.sync_warp()
    if lane == 0:
        arrive(shared + where["partials_full"] + buffer * 8)


@cute.jit
def add_warps(step: Any, lane: Any, shared: Any, half: cutlass.Constexpr, last: cutlass.Constexpr,
              where: cutlass.Constexpr, p: cutlass.Constexpr):
    """A finisher: a lane's 4 sums of unit ``half`` of a step over the warps; ``last``: it needs nothing more of it."""
    buffer = step & 1
    await_phase(shared + where["partials_full"] + buffer * 8, (step >> 1) & 1)
    at = shared + where["partials"] + buffer * (2 * p.partial_bytes) + half * p.partial_bytes + lane * FRAGMENT
    sums = load_shared(at, 4)
    if cutlass.const_expr(p.warps > WARPS):
        # few registers: no more than 9 at once
        for warp in cutlass.range(1, p.warps, 1, unroll=9):
            more = load_shared(at + warp * 32 * FRAGMENT, 4)
            sums = [a + b for a, b in zip(sums, more, strict=True)]
    else:
        for warp in cutlass.range_constexpr(1, p.warps):
            more = load_shared(at + warp * 32 * FRAGMENT, 4)
            sums = [a + b for a, b in zip(sums, more, strict=True)]
    if cutlass.const_expr(last):
        cute.arch.sync_warp()
        if lane == 0:
            arrive(shared + where["partials_empty"] + buffer * 8)
    return sums
