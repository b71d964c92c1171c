"""Routed MXFP4 experts in one launch: W1 and W3, SiTU, W2 and the weighted sum, 1 to 8 rows.

Contract: ``x`` bf16 [T, D], any row stride that keeps rows on 16 bytes; ``ids`` i32 and ``weights`` fp32 [T, k]; ``w1
w3`` u8 [E, I, D/2] with scales [E, I, D/32]; ``w2`` u8 [E, D', I/2] with scales [E, D', I/32], all as the checkpoint
has them; ``rank`` i32 [1] on the device says which ids of an expert-parallel step are here. ``out`` bf16 [T, D']. What
absent experts would add is exactly zero. I is a multiple of 32, nothing is padded: 192 stays 192.
Beside them, when the pattern has it, the shared expert's down-projection: ``s`` bf16 [T, N] = ``a`` bf16 [T, K] times
``w`` bf16 [N, K] transposed, N a multiple of 16 and K of 16, this rank's part of a sum over ranks.

Layout: one block on each multiprocessor, three kinds of warps. Every distinct expert is read once, whoever chose it:
one warp sorts the ids by a bit set (``work_list.py``). The first row's experts differ, so they begin the list as
they are and stream before the others are sorted.
* The copier (``copy_weights.py``) streams weights through a ring of slots in shared memory: first the units of 8
  gate and 8 up rows that are this block's (every ``blocks``-th of all experts' units), then units of 16 rows of ``w``
  (the count goes on, so blocks differ by one unit in all; with ``side_first`` these come before the experts), then of
  every expert the rows of W2 that make this block's columns. It never waits for anything but a free slot, so W2 is on
  its way while the first half computes. With ``bulk`` one warp hands rows to the copy engine, without it two warps copy
  16 bytes a lane (``cp.async``), slot by slot in turn;
* 16 warps multiply, or 28 with 64 registers a thread. In the first half each has its columns of x as operands in
  registers, for the whole launch: of a unit, gate rows are rows 0 to 7 of a matrix instruction, up rows are 8 to 15,
  tokens its 8 columns, so one lane has the gate and the up of the same row. All tokens are multiplied with all experts
  of the step: the columns are free. Two units are a step: one hand-over of sums for both, and the end of one overlaps
  with the begin of the other;
* a unit of ``w`` is a matrix instruction's 16 rows as well, its columns split over the same warps, in bf16. It needs
  nothing of the experts: it is done while the last activations of the first half travel from block to block, or, with
  ``side_first``, while the experts' first weights are on their way from memory;
* two finishers, one for each unit of a step, add up the warps' sums, apply SiTU and publish the 8 activations of
  each pair; of a unit of ``w`` they store 16 columns of ``s``. Without ``bulk`` one of them copies and the other
  finishes both;
* in the second half the warps share the experts out. A block has its columns of all experts, so the weighted sum
  stays in registers and one sum over the warps ends it: no partial results in memory, no atomics, one order of
  addition. The next expert's activations are loaded into the registers of one as soon as it has used them.

Waits: activations go from block to block in words that are their own flags: zero is "not yet", a payload of zeros is
written as minus zeros, and a reader looks until no word is zero. One hop through L2, no fence, no counter. Two parts
are used in turn (``epochs``, counted by each block for itself); a launch zeroes the part of the launch before, which
nobody reads any more. A block never waits before it has published all of its own units, so the launch ends if all
blocks run at once: there is one for each multiprocessor and it asks for most of its shared memory, so no block of a
later launch can hold a place. The experts' weights depend on ``ids``, so they are not loaded before the wait for the
producers; those of ``w`` are with ``side_first``: 5.5 MB that are there when the wait ends if it takes 1.3 us longer.
Numerics: weights are exact for scale bytes 1 to 254. x is brought to fp16 by a power of two for each token and warp,
which is exact for what is not below 2^-30 of the largest; activations are published as fp16 (SiTU is bounded, so the
power of two is a constant), 8 times finer than bf16; sums, scales, SiTU and routing weights are fp32, out is rounded
once. With activation "mxfp8" rows of x and activations are rounded to MXFP8 as the op does and then take the same
path.

Arithmetic for a TP16 rank of Kimi K3 (D 3584, I 192, k 16) on an H200: 17.5 MB at one row, 132 MB at 8 (120 experts):
floors 6.3 and 32 us (2.35 us + bytes / 4.44 TB/s); ``w`` of 7168 x 384 adds 5.5 MB, 1.2 us, 3 or 4 units a block. A
lane decodes 16 weights for one pair of matrix instructions: 16 permutes and masks and 2 shifts on the integer pipe, 4
left shifts on the multiplier, 4 instructions for the scales, 4 multiply-adds. Measured there, a quarter of a
multiprocessor needs 2.07 cycles for a mask, a permute or a conversion from e4m3 (the same pipe, so that e4m3 would save
nothing), 2.0 for a shift on the multiplier beside them, 6.1 for a matrix instruction; 18 of the first with two of the
last take 44. So 8 rows cost at least 1,230 cycles a unit (22 of them) and 2,100 for 16 experts (7.5 times): 43,000
cycles, 24 us at 1.76 GHz, beside 30 us of memory. At one row 384 units lie on 132 blocks (3 or 2) and 28 columns on
128 of them: 97 % of the bytes' mean, all of them in flight at once.
Measured on one H200, weights cold: 42.2 us at 8 rows as one of the launches of a step, 10.8 at one row with ``w``. A
form with one unit a step, alone and with dependent launches: 8.7 at one row, 13.9 at 2, 24.3 at 4, 43.1 at 8; without
products 8.0 at one row and 36.0 at 8, without copies 7.4 and 38.1. So neither memory nor the integer pipe alone is what
is left: the pipe was busy for 60 % of the time, with four warps to hide what one waits for. The targets, 8 us and 38,
are missed. 28 warps (configuration ``warps``: 4 scale groups of x each in place of 7, seven warps to a quarter of the
multiprocessor) are for that; they have not been timed, and neither has ``side_first``.
Error against the fp32 reference on the H200: 0.51 to 0.53 of the bf16 chain's; with "mxfp8", 0.29 to 0.43.
"""
from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...compiler.call import Call, Launch
from ..launching import KernelLaunch, await_producers, named, start_dependents
from ..moe_parts import (
    arrive,
    await_phase,
    init_barrier,
    init_barriers,
    is_late,
    load_matrices,
    load_signed_byte,
    load_word,
    not_zero,
    publish,
    publish_barriers,
    situ,
    store_word,
)
from ..primitives import (
    lane_value,
    lane_xor,
    load_shared,
    load_words,
    mma,
    pack,
    select,
    store_half,
    store_shared,
    store_words,
    unpack,
)
from ..shared_memory import FRAGMENT
from .call import read_call, rounds
from .copy_weights import copy_by_lanes, copy_by_rows, copy_side, copy_units, first_run, first_side, slots_before
from .dot import (
    add_warps,
    dot_chunk,
    dot_unit,
    free_slot,
    hand_over,
    largest_magnitude,
    look_at_chunk,
    over_lanes,
    pairs_of,
    rounded,
)
from .mxfp4 import (
    WEIGHT_EXPONENT,
    biased_exponent,
    largest_of,
    pack_f16,
    power_of_two,
)
from .plan import STEP, TILE, TOKENS, TOP_EXPONENT, Config, Static
from .work_list import list_experts, list_first_row, place_row

MULTIPLIERS, COUNTED = 1, 2  # named barriers: of the warps that multiply; of all, that know the number of the launch


def _load_x(at: Any, warp: Any, lane: Any, p: Static) -> tuple[list[Any], list[Any]]:
    """This warp's groups of x as operands, and the fp32 factors of the two tokens of a lane's results."""
    token, part = lane >> 2, lane & 3
    row = at + Int64(token) * (2 * p.stride_x)
    words = []
    for i in range(p.own_groups):
        group = warp * p.own_groups + i
        real = (token < p.tokens) & (group < p.groups)
        words.append(load_words(row + Int64(group * 64 + part * 16), guard=select(real, Int32(1), Int32(0))))
    values = [unpack(four) for four in words]
    if p.rounds:
        values = [rounded(v) for v in values]
        largest = largest_magnitude([v for eight in values for v in eight])
    else:
        largest = largest_of([word for four in words for word in four])
    # the largest becomes 2^14 or more, below 2^15
    exponent = biased_exponent(cute.arch.fmax(over_lanes(largest), Float32(2.0**-112)))
    down = power_of_two(254 + TOP_EXPONENT - 1 - exponent)
    up = power_of_two(exponent - (TOP_EXPONENT - 1) - WEIGHT_EXPONENT)
    factors = [lane_value(up, (lane & 3) * 8 + 4 * i) for i in range(2)]
    return [pairs_of([v * down for v in eight]) for eight in values], factors


@cute.jit
def _take_unit(x: Any, factors: Any, fill: Any, warp: Any, lane: Any, shared: Any, where: cutlass.Constexpr,
               p: cutlass.Constexpr):
    """This warp's sums of the unit in slot ``fill``, which is free then."""
    slot = fill % p.slots
    await_phase(shared + where["full"] + slot * 8, (fill // p.slots) & 1)
    # a warp without groups multiplies those of another by zeros
    own = cutlass.min(warp * p.own_groups, Int32(p.groups - p.own_groups))
    total = dot_unit(shared + where["ring"] + slot * p.slot_bytes, own, x, lane, p)
    free_slot(slot, lane, shared, where)
    return [total[0] * factors[0], total[1] * factors[1], total[2] * factors[0], total[3] * factors[1]]


@cute.jit
def _multiply_up(x: Any, factors: Any, fill: Any, step: Any, count: Any, block: Any, warp: Any, lane: Any, shared: Any,
                 where: cutlass.Constexpr, p: cutlass.Constexpr):
    """The warps that multiply: this warp's groups of the block's units, two units a step. Returns the slots used and
    the steps."""
    for unit in cutlass.range(first_run(block, p), count * p.tiles, 2 * p.blocks, unroll=1):
        sums = _take_unit(x, factors, fill, warp, lane, shared, where, p)
        fill = fill + 1
        more = [Float32(0.0)] * 4
        if unit + p.blocks < count * p.tiles:
            more = _take_unit(x, factors, fill, warp, lane, shared, where, p)
            fill = fill + 1
        hand_over(sums, more, step, warp, lane, shared, where, p)
        step = step + 1
    return fill, step


@cute.jit
def _take_side(a: Any, fill: Any, warp: Any, lane: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """As ``_take_unit``, of 16 rows of ``w``."""
    slot = fill % p.slots
    await_phase(shared + where["full"] + slot * 8, (fill // p.slots) & 1)
    own = cutlass.min(warp * p.own_steps, Int32(p.side_steps - p.own_steps))
    rows = shared + where["ring"] + slot * p.slot_bytes
    matrix = rows + (lane & 15) * p.side_row_bytes + (lane >> 4) * FRAGMENT + own * 2 * STEP
    total = [Float32(0.0)] * 4
    for i in cutlass.range_constexpr(p.own_steps):
        total = mma(load_matrices(matrix + 2 * STEP * i), a[2 * i : 2 * i + 2], total)
    free_slot(slot, lane, shared, where)
    return total


def _load_side(at: Any, warp: Any, lane: Any, p: Static) -> list[Any]:
    """This warp's columns of ``a`` as operands."""
    token, part = lane >> 2, lane & 3
    # a warp without columns multiplies those of another by zeros
    own = cutlass.min(warp * p.own_steps, Int32(p.side_steps - p.own_steps))
    real = (token < p.tokens) & (warp * p.own_steps < p.side_steps)
    source = at.a.toint() + Int64(token) * (2 * p.stride_a) + Int64(own * 2 * STEP + part * 4)
    return [load_words(source + 16 * i, 1, guard=select(real, Int32(1), Int32(0)))[0] for i in range(2 * p.own_steps)]


@cute.jit
def _multiply_side(a: Any, fill: Any, step: Any, count: Any, block: Any, warp: Any, lane: Any, shared: Any,
                   where: cutlass.Constexpr, p: cutlass.Constexpr):
    """The warps that multiply: this warp's columns of 16 rows of ``w`` a unit. Returns the slots used and the steps."""
    for unit in cutlass.range(first_side(block, count, p), p.side_units, 2 * p.blocks, unroll=1):
        sums = _take_side(a, fill, warp, lane, shared, where, p)
        fill = fill + 1
        more = [Float32(0.0)] * 4
        if unit + p.blocks < p.side_units:
            more = _take_side(a, fill, warp, lane, shared, where, p)
            fill = fill + 1
        hand_over(sums, more, step, warp, lane, shared, where, p)
        step = step + 1
    return fill, step


@cute.jit
def _finish_units(act: Any, step: Any, count: Any, block: Any, lane: Any, shared: Any, which: cutlass.Constexpr,
                  where: cutlass.Constexpr, p: cutlass.Constexpr):
    """Finisher ``which``: adds up the warps' sums of its units of each step, applies SiTU and publishes the activations
    of their 8 rows. Returns the steps."""
    row, part = lane >> 2, lane & 3
    for first in cutlass.range(first_run(block, p), count * p.tiles, 2 * p.blocks, unroll=1):
        for half in cutlass.range_constexpr(which, 2, p.finishers):
            sums = add_warps(step, lane, shared, half, half + p.finishers >= 2, where, p)
            found = [situ(sums[i], sums[2 + i], p.beta, p.linear_beta) * 2.0**p.act_exponent for i in range(2)]
            # rows r and r + 2 make a word: lanes of r publish the first token's, those of r + 2 the second's
            upper = (row & 2) != 0
            other = lane_xor(select(upper, found[0], found[1]), 8)
            word = not_zero(pack_f16(select(upper, other, found[0]), select(upper, found[1], other)))
            token = 2 * part + ((row >> 1) & 1)
            real = first + half * p.blocks < count * p.tiles
            unit = select(real, first + half * p.blocks, first)
            place = load_signed_byte(shared + where["places"] + (unit // p.tiles) * TOKENS + token)
            fragment = (token * p.top_k + place) * p.tiles + unit % p.tiles
            offset = fragment * FRAGMENT + ((row & 1) * 2 + (row >> 2)) * 4
            publish(act + Int64(offset), word, select(real & (place >= 0), Int32(1), Int32(0)))
        step = step + 1
    return step


@cute.jit
def _finish_side(out: Any, step: Any, count: Any, block: Any, lane: Any, shared: Any, which: cutlass.Constexpr,
                 where: cutlass.Constexpr, p: cutlass.Constexpr):
    """Finisher ``which``: adds up the warps' sums of 16 columns of ``s`` and stores them as bf16. Returns the steps."""
    row, part = lane >> 2, lane & 3
    for first in cutlass.range(first_side(block, count, p), p.side_units, 2 * p.blocks, unroll=1):
        for half in cutlass.range_constexpr(which, 2, p.finishers):
            words = pack(add_warps(step, lane, shared, half, half + p.finishers >= 2, where, p))
            unit = first + half * p.blocks
            for i in cutlass.range_constexpr(4):
                token = 2 * part + i % 2
                place = out + Int64(token * p.stride_s + unit * 2 * TILE + row + i // 2 * TILE) * 2
                store_half(place, words[i // 2] >> (16 * (i % 2)),
                           guard=select((token < p.tokens) & (unit < p.side_units), Int32(1), Int32(0)))
        step = step + 1
    return step


@cute.jit
def _finish(at: Any, act: Any, block: Any, lane: Any, shared: Any, which: cutlass.Constexpr,
            where: cutlass.Constexpr, p: cutlass.Constexpr):
    """All of a finisher."""
    step = Int32(0)
    if cutlass.const_expr(p.side_first):
        step = _finish_side(at.s.toint(), step, step, block, lane, shared, which, where, p)
    count = _await_list(shared, where)
    step = _finish_units(act, step, count, block, lane, shared, which, where, p)
    if cutlass.const_expr(p.side_width > 0 and not p.side_first):
        _finish_side(at.s.toint(), step, count, block, lane, shared, which, where, p)


def _source_of(act: Any, item: Any, last: Any, lane: Any, shared: Any, where: Any, p: Any) -> tuple[Any, Any]:
    """Where this lane's activations of an item lie, a chunk of an expert of the list, and whether it has some."""
    index = select(item < last, item, Int32(0)) // p.chunks
    place = load_signed_byte(shared + where["places"] + index * TOKENS + (lane >> 2))
    guard = select((place >= 0) & (item < last), Int32(1), Int32(0))
    fragment = ((lane >> 2) * p.top_k + place) * p.tiles + 4 * (item % p.chunks * p.chunk) + (lane & 3)
    return act + Int64(fragment * FRAGMENT), guard


@cute.jit
def _add_item(total: Any, x: Any, source: Any, guard: Any, item: Any, slot: Any, block: Any, lane: Any, shared: Any,
              where: cutlass.Constexpr, p: cutlass.Constexpr):
    """``total`` plus a chunk of an expert's rows of this block's columns, times activations and routing weights; and
    the next activations."""
    total, x = list(total), list(x)
    part = lane & 3
    inside = ((p.blocks - 1 - block) * p.columns * p.inter_groups) & 15
    index, group0 = item // p.chunks, item % p.chunks * p.chunk
    weights = []
    for i in cutlass.range_constexpr(2):
        reader = 2 * part + i
        held = load_signed_byte(shared + where["places"] + index * TOKENS + reader)
        at = shared + where["weights"] + select(held >= 0, reader * p.top_k + held, Int32(0)) * 4
        weights.append(select(held >= 0, load_word(at).bitcast(Float32), Float32(0.0)))
    rows = shared + where["ring"] + slot * p.slot_bytes + (index % p.together) * p.down_bytes
    more = p.most * p.chunks > p.warps
    tiles = dot_chunk(rows, inside, group0, x, lane, p, source if more else None, guard)
    for i in cutlass.range_constexpr(4 * p.column_tiles):
        total[i] = total[i] + weights[i & 1] * tiles[i // 4][i % 4]
    return total, x


def _first_item(begin: Any, warp: Any, p: Static) -> Any:
    """The first item of a warp from ``begin`` on: it has every ``warps``-th."""
    if p.warps & (p.warps - 1) == 0:
        return begin + ((warp - begin) & (p.warps - 1))
    return begin + (warp - begin % p.warps + p.warps) % p.warps


@cute.jit
def _multiply_down(act: Any, fill: Any, count: Any, block: Any, warp: Any, lane: Any, shared: Any,
                   where: cutlass.Constexpr, p: cutlass.Constexpr):
    """The warps that multiply: each its share of the chunks of experts' rows for this block's columns; the sums stay in
    registers. The activations of the next one come while one is multiplied, into the same registers."""
    total = [Float32(0.0)] * (4 * p.column_tiles)
    last = count * p.chunks
    source, guard = _source_of(act, warp, last, lane, shared, where, p)
    x = look_at_chunk(source, guard, p)
    for start in cutlass.range(0, count, p.together, unroll=1):
        turn = fill + start // p.together
        slot = turn % p.slots
        # every warp passes every slot: a parity tells the next phase from the last one, not from the one before
        await_phase(shared + where["full"] + slot * 8, (turn // p.slots) & 1)
        begin = start * p.chunks
        end = cutlass.min(start + p.together, count) * p.chunks
        for item in cutlass.range(_first_item(begin, warp, p), end, p.warps, unroll=1):
            late = is_late(x)
            while late != 0:
                x = look_at_chunk(source, guard, p)
                late = is_late(x)
            cute.arch.sync_warp()
            # a token that did not choose the expert has ones, and its weight is 0
            source, guard = _source_of(act, item + p.warps, last, lane, shared, where, p)
            total, x = _add_item(total, x, source, guard, item, slot, block, lane, shared, where, p)
        free_slot(slot, lane, shared, where)
    return total


@cute.jit
def _store_columns(out: Any, total: Any, step: Any, block: Any, thread: Any, shared: Any,
                   where: cutlass.Constexpr, p: cutlass.Constexpr):
    """The sums of the warps, added and stored as bf16."""
    partials = shared + where["partials"]
    # the last sums of the first half may not have been read yet
    for buffer in cutlass.range_constexpr(2):
        uses = (step + 1 - buffer) >> 1
        await_phase(shared + where["partials_empty"] + buffer * 8, (uses & 1) ^ 1)
    for tile in cutlass.range_constexpr(p.column_tiles):
        store_shared(partials + (tile * p.multiplying + thread) * FRAGMENT, total[4 * tile : 4 * tile + 4])
    cute.arch.barrier(barrier_id=MULTIPLIERS, number_of_threads=p.multiplying)
    first = (p.blocks - 1 - block) * p.columns
    for start in cutlass.range_constexpr(0, p.tokens * p.columns, p.multiplying):
        index = thread + start
        token, row = index // p.columns, index % p.columns
        if (token < p.tokens) & (first + row < p.out_width):
            # row r and column t of a tile: lane 4 (r % 8) + t / 2, number 2 (r / 8) + t % 2
            inside = row & 15
            at = partials + ((row >> 4) * p.multiplying + 4 * (inside & 7) + (token >> 1)) * FRAGMENT
            at = at + (2 * (inside >> 3) + (token & 1)) * 4
            sum_of = [load_shared(at + warp * 32 * FRAGMENT) for warp in range(p.warps)]
            value = sum_of[0]
            for more in sum_of[1:]:
                value = value + more
            value = value * 2.0 ** (-WEIGHT_EXPONENT - p.act_exponent)
            place = cute.make_ptr(cutlass.BFloat16, out + Int64(token * p.stride_out + first + row) * 2,
                                  cute.AddressSpace.gmem)
            cute.make_tensor(place, cute.make_layout(1))[0] = value.to(cutlass.BFloat16)


@cute.jit
def _start(thread: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """Barriers, an empty set of experts, no place of a token anywhere."""
    if thread == 0:
        init_barriers(shared + where["full"], p.slots, 1 if p.bulk else 32)
        init_barriers(shared + where["empty"], p.slots, p.warps)
        init_barriers(shared + where["partials_full"], 2, p.warps)
        init_barriers(shared + where["partials_empty"], 2, p.finishers)
        init_barrier(shared + where["listed"], 1)
        publish_barriers()
    if thread < p.words:
        store_word(shared + where["bits"] + thread * 4, Int32(0))
        store_word(shared + where["known"] + thread * 4, Int32(0))
    for start in cutlass.range_constexpr(0, p.most * TOKENS // 4, p.threads):
        store_word(shared + where["places"] + (thread + start) * 4, Int32(-1),
                   select(thread + start < p.most * TOKENS // 4, Int32(1), Int32(0)))


def _await_list(shared: Any, where: Any) -> Any:
    """The number of distinct experts, once they are listed."""
    await_phase(shared + where["listed"], Int32(0))
    return load_word(shared + where["count"])


@cute.jit
def _copy(at: Any, block: Any, lane: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """The copier. The first row's experts are streamed before the others are sorted."""
    fill = slots_before(block, p)
    if cutlass.const_expr(p.early):
        list_first_row(at, lane, shared, where, p)
        fill = copy_units(at, fill, Int32(p.top_k), block, lane, shared, where, p)
        count = Int32(p.top_k)
        if cutlass.const_expr(p.tokens > 1):
            count = _await_list(shared, where)
        copy_by_rows(at, fill, count, block, lane, shared, where, p)
    else:
        count = _await_list(shared, where)
        if cutlass.const_expr(p.bulk):
            copy_by_rows(at, fill, count, block, lane, shared, where, p)
        else:
            copy_by_lanes(at, count, Int32(0), block, lane, shared, where, p)


@cute.kernel
def _moe_experts(arguments: Any, names: cutlass.Constexpr, p: cutlass.Constexpr):
    start_dependents(p.dependent)
    at = named(names, arguments)
    where = p.place()
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
    shared = cute.arch.get_dyn_smem(cutlass.Uint8, 128).toint()
    _start(thread, shared, where, p)
    cute.arch.sync_threads()
    copier, second, finisher = p.warps, p.warps + 1, p.warps + 2
    if cutlass.const_expr(p.side_first):  # noqa: SIM102 - known while the kernel is traced
        if warp == copier:
            copy_side(at, Int32(0), Int32(0), block, lane, shared, where, p)
    await_producers(p.dependent)
    epochs = at.epochs.toint() + Int64(block) * 4
    epoch = load_words(epochs, 1)[0]
    part = p.tokens * p.top_k * p.tiles * FRAGMENT
    act = at.act.toint() + Int64(epoch & 1) * part
    if warp != finisher:
        cute.arch.barrier_arrive(barrier_id=COUNTED, number_of_threads=p.threads, aligned=False)
    if warp == copier:
        _copy(at, block, lane, shared, where, p)
    elif warp == second:
        if cutlass.const_expr(p.tokens > 1 or not p.early):
            list_experts(at, lane, shared, where, p)
        else:
            place_row(at, lane, shared, where, p)
        cute.arch.sync_warp()
        if lane == 0:
            arrive(shared + where["listed"])
        if cutlass.const_expr(p.bulk):
            _finish(at, act, block, lane, shared, 1, where, p)
        else:
            count = load_word(shared + where["count"])
            copy_by_lanes(at, count, Int32(1), block, lane, shared, where, p)
    elif warp == finisher:
        # the other part was read by the launch before and has to be zero for the next
        before = at.act.toint() + Int64((epoch & 1) ^ 1) * part
        for index in cutlass.range(block * 32 + lane, part // FRAGMENT, p.blocks * 32, unroll=1):
            store_words(before + Int64(index) * FRAGMENT, [Int32(0)] * 4)
        cute.arch.barrier(barrier_id=COUNTED, number_of_threads=p.threads)
        if lane == 0:
            store_words(epochs, [epoch + 1])
        _finish(at, act, block, lane, shared, 0, where, p)
    else:
        fill, step = Int32(0), Int32(0)
        a = _load_side(at, warp, lane, p) if p.side_first else []
        x, factors = _load_x(at.x.toint(), warp, lane, p)
        if cutlass.const_expr(p.side_first):
            fill, step = _multiply_side(a, fill, step, Int32(0), block, warp, lane, shared, where, p)
        count = _await_list(shared, where)
        fill, step = _multiply_up(x, factors, fill, step, count, block, warp, lane, shared, where, p)
        if cutlass.const_expr(p.side_width > 0 and not p.side_first):
            a = _load_side(at, warp, lane, p)
            fill, step = _multiply_side(a, fill, step, count, block, warp, lane, shared, where, p)
        if p.blocks - 1 - block < p.column_blocks:
            total = _multiply_down(act, fill, count, block, warp, lane, shared, where, p)
            _store_columns(at.out.toint(), total, step, block, thread, shared, where, p)


def bind(call: Call) -> Launch:
    """x, ids, rank, weights, w1, w3, s1, s3, w2, s2 -> out; with the projection beside, a, w -> s."""
    config = Config(**call.config)
    static, arguments = read_call(call, Static, TOKENS, slots=config.slots, bulk=config.bulk, warps=config.warps,
                                  side_first=config.side_first, rounds=rounds(call))
    assert not static.side_first or (static.bulk and static.side_width), f"{config}: nothing to copy first"
    return KernelLaunch(_moe_experts, (static.blocks, 1, 1), static.threads, arguments, static,
                        shared=static.place()["end"], dependent=static.dependent)
