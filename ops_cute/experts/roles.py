"""What the warps of ``cute.moe_experts`` do: the copier, the warps that multiply, the finishers. What becomes of their
results is the caller's: ``keep`` functions. How they work together is in the header of ``moe_experts.py``.
"""
# ruff: noqa: SIM102 - what is known while the kernel is traced stands alone
from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

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
    store_shared,
    store_words,
    unpack,
)
from ..shared_memory import FRAGMENT
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
from .mxfp4 import WEIGHT_EXPONENT, biased_exponent, largest_of, pack_f16, power_of_two
from .plan import STEP, TOKENS, TOP_EXPONENT, Static
from .work_list import list_experts, list_first_row, place_row

MULTIPLIERS, COUNTED = 1, 2  # named barriers: of the warps that multiply; of all, that know the number of the launch


def load_x(at: Any, warp: Any, lane: Any, p: Static) -> tuple[list[Any], list[Any]]:
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
def take_unit(x: Any, factors: Any, fill: Any, warp: Any, lane: Any, shared: Any, where: cutlass.Constexpr,
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
def multiply_up(x: Any, factors: Any, fill: Any, step: Any, count: Any, block: Any, warp: Any, lane: Any, shared: Any,
                 where: cutlass.Constexpr, p: cutlass.Constexpr):
    """The warps that multiply: this warp's groups of the block's units, two units a step. Returns the slots used and
    the steps."""
    for unit in cutlass.range(first_run(block, p), count * p.tiles, 2 * p.blocks, unroll=1):
        sums = take_unit(x, factors, fill, warp, lane, shared, where, p)
        fill = fill + 1
        more = [Float32(0.0)] * 4
        if unit + p.blocks < count * p.tiles:
            more = take_unit(x, factors, fill, warp, lane, shared, where, p)
            fill = fill + 1
        hand_over(sums, more, step, warp, lane, shared, where, p)
        step = step + 1
    return fill, step


@cute.jit
def take_side(a: Any, own: Any, fill: Any, lane: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """As ``take_unit``, of 16 rows of ``w``: a warp's columns begin ``own`` bytes behind the row's, ``a`` has them."""
    slot = fill % p.slots
    await_phase(shared + where["full"] + slot * 8, (fill // p.slots) & 1)
    matrix = shared + where["ring"] + slot * p.slot_bytes + own
    matrix = matrix + (lane & 15) * p.side_row_bytes + (lane >> 4) * FRAGMENT
    total = [Float32(0.0)] * 4
    for i in cutlass.range_constexpr(len(a) // 2):
        total = mma(load_matrices(matrix + 2 * STEP * i), a[2 * i : 2 * i + 2], total)
    free_slot(slot, lane, shared, where)
    return total


def load_side(at: Any, warp: Any, lane: Any, p: Static) -> tuple[list[Any], Any]:
    """This warp's columns of ``a`` as operands, and where in a row of ``w`` they begin, in bytes."""
    token, part = lane >> 2, lane & 3
    # a warp without columns multiplies those of another by zeros
    own = cutlass.min(warp * p.own_steps, Int32(p.side_steps - p.own_steps)) * (2 * STEP)
    real = select((token < p.tokens) & (warp * p.own_steps < p.side_steps), Int32(1), Int32(0))
    source = at.a.toint() + Int64(token) * (2 * p.stride_a) + Int64(own + part * 4)
    return [load_words(source + 16 * i, 1, guard=real)[0] for i in range(2 * p.own_steps)], own


@cute.jit
def multiply_side(a: Any, own: Any, fill: Any, step: Any, count: Any, block: Any, warp: Any, lane: Any, shared: Any,
                  where: cutlass.Constexpr, p: cutlass.Constexpr):
    """The warps that multiply: this warp's columns of 16 rows of ``w`` a unit. Returns the slots used and the steps."""
    for unit in cutlass.range(first_side(block, count, p), p.side_units, 2 * p.blocks, unroll=1):
        sums = take_side(a, own, fill, lane, shared, where, p)
        fill = fill + 1
        more = [Float32(0.0)] * 4
        if unit + p.blocks < p.side_units:
            more = take_side(a, own, fill, lane, shared, where, p)
            fill = fill + 1
        hand_over(sums, more, step, warp, lane, shared, where, p)
        step = step + 1
    return fill, step


@cute.jit
def finish_units(act: Any, step: Any, count: Any, block: Any, lane: Any, shared: Any, which: cutlass.Constexpr,
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
def finish_side(keep: Any, step: Any, count: Any, block: Any, lane: Any, shared: Any, which: cutlass.Constexpr,
                where: cutlass.Constexpr, p: cutlass.Constexpr):
    """Finisher ``which``: adds up the warps' sums of 16 columns of ``s`` and keeps them as bf16. Returns the steps."""
    for first in cutlass.range(first_side(block, count, p), p.side_units, 2 * p.blocks, unroll=1):
        for half in cutlass.range_constexpr(which, 2, p.finishers):
            words = pack(add_warps(step, lane, shared, half, half + p.finishers >= 2, where, p))
            keep(words, first + half * p.blocks, lane)
        step = step + 1
    return step


@cute.jit
def finish(keep: Any, act: Any, block: Any, lane: Any, shared: Any, which: cutlass.Constexpr,
            where: cutlass.Constexpr, p: cutlass.Constexpr):
    """All of a finisher."""
    step = Int32(0)
    if cutlass.const_expr(p.side_first):
        step = finish_side(keep, step, step, block, lane, shared, which, where, p)
    count = await_list(shared, where)
    step = finish_units(act, step, count, block, lane, shared, which, where, p)
    if cutlass.const_expr(p.side_width > 0 and not p.side_first):
        finish_side(keep, step, count, block, lane, shared, which, where, p)


def source_of(act: Any, item: Any, last: Any, lane: Any, shared: Any, where: Any, p: Any) -> tuple[Any, Any]:
    """Where this lane's activations of an item lie, a chunk of an expert of the list, and whether it has some."""
    index = select(item < last, item, Int32(0)) // p.chunks
    place = load_signed_byte(shared + where["places"] + index * TOKENS + (lane >> 2))
    guard = select((place >= 0) & (item < last), Int32(1), Int32(0))
    fragment = ((lane >> 2) * p.top_k + place) * p.tiles + 4 * (item % p.chunks * p.chunk) + (lane & 3)
    return act + Int64(fragment * FRAGMENT), guard


@cute.jit
def add_item(total: Any, x: Any, source: Any, guard: Any, item: Any, slot: Any, block: Any, lane: Any, shared: Any,
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


def first_item(begin: Any, warp: Any, p: Static) -> Any:
    """The first item of a warp from ``begin`` on: it has every ``warps``-th."""
    if p.warps & (p.warps - 1) == 0:
        return begin + ((warp - begin) & (p.warps - 1))
    return begin + (warp - begin % p.warps + p.warps) % p.warps


@cute.jit
def multiply_down(act: Any, fill: Any, count: Any, block: Any, warp: Any, lane: Any, shared: Any,
                   where: cutlass.Constexpr, p: cutlass.Constexpr):
    """The warps that multiply: each its share of the chunks of experts' rows for this block's columns; the sums stay in
    registers. The activations of the next one come while one is multiplied, into the same registers."""
    total = [Float32(0.0)] * (4 * p.column_tiles)
    last = count * p.chunks
    source, guard = source_of(act, warp, last, lane, shared, where, p)
    x = look_at_chunk(source, guard, p)
    for start in cutlass.range(0, count, p.together, unroll=1):
        turn = fill + start // p.together
        slot = turn % p.slots
        # every warp passes every slot: a parity tells the next phase from the last one, not from the one before
        await_phase(shared + where["full"] + slot * 8, (turn // p.slots) & 1)
        begin = start * p.chunks
        end = cutlass.min(start + p.together, count) * p.chunks
        for item in cutlass.range(first_item(begin, warp, p), end, p.warps, unroll=1):
            late = is_late(x)
            while late != 0:
                x = look_at_chunk(source, guard, p)
                late = is_late(x)
            cute.arch.sync_warp()
            # a token that did not choose the expert has ones, and its weight is 0
            source, guard = source_of(act, item + p.warps, last, lane, shared, where, p)
            total, x = add_item(total, x, source, guard, item, slot, block, lane, shared, where, p)
        free_slot(slot, lane, shared, where)
    return total


@cute.jit
def sum_columns(keep: Any, total: Any, step: Any, block: Any, thread: Any, shared: Any, where: cutlass.Constexpr,
                p: cutlass.Constexpr):
    """The sums of the warps, added; each result is kept in fp32."""
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
            keep(token, row, value * 2.0 ** (-WEIGHT_EXPONENT - p.act_exponent))


@cute.jit
def set_up(thread: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
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


def await_list(shared: Any, where: Any) -> Any:
    """The number of distinct experts, once they are listed."""
    await_phase(shared + where["listed"], Int32(0))
    return load_word(shared + where["count"])


@cute.jit
def copy_all(at: Any, block: Any, lane: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """The copier. The first row's experts are streamed before the others are sorted."""
    fill = slots_before(block, p)
    if cutlass.const_expr(p.early):
        list_first_row(at, lane, shared, where, p)
        fill = copy_units(at, fill, Int32(p.top_k), block, lane, shared, where, p)
        count = Int32(p.top_k)
        if cutlass.const_expr(p.tokens > 1):
            count = await_list(shared, where)
        copy_by_rows(at, fill, count, block, lane, shared, where, p)
    else:
        count = await_list(shared, where)
        if cutlass.const_expr(p.bulk):
            copy_by_rows(at, fill, count, block, lane, shared, where, p)
        else:
            copy_by_lanes(at, count, Int32(0), block, lane, shared, where, p)


@cute.jit
def run_experts(at: Any, act: Any, epochs: Any, epoch: Any, keep_side: Any, keep_column: Any,
                thread: Any, block: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """All warps of a block, behind the wait for the producers. ``act`` are both parts of the activations; with
    ``epochs`` the block's count of launches goes up, without it that is the caller's. ``keep_side(words, unit, lane)``
    gets a lane's four bf16 of a unit of ``s``: row r of two tokens, then row r + 8; ``keep_column(token, row, value)``
    a result."""
    warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
    copier, second, finisher = p.warps, p.warps + 1, p.warps + 2
    part = p.tokens * p.top_k * p.tiles * FRAGMENT
    own = act + Int64(epoch & 1) * part
    if cutlass.const_expr(epochs is not None):
        if warp != finisher:
            cute.arch.barrier_arrive(barrier_id=COUNTED, number_of_threads=p.threads, aligned=False)
    if warp == copier:
        copy_all(at, block, lane, shared, where, p)
    elif warp == second:
        if cutlass.const_expr(p.tokens > 1 or not p.early):
            list_experts(at, lane, shared, where, p)
        else:
            place_row(at, lane, shared, where, p)
        cute.arch.sync_warp()
        if lane == 0:
            arrive(shared + where["listed"])
        if cutlass.const_expr(p.bulk):
            finish(keep_side, own, block, lane, shared, 1, where, p)
        else:
            count = load_word(shared + where["count"])
            copy_by_lanes(at, count, Int32(1), block, lane, shared, where, p)
    elif warp == finisher:
        # the other part was read by the launch before and has to be zero for the next
        before = act + Int64((epoch & 1) ^ 1) * part
        for index in cutlass.range(block * 32 + lane, part // FRAGMENT, p.blocks * 32, unroll=1):
            store_words(before + Int64(index) * FRAGMENT, [Int32(0)] * 4)
        if cutlass.const_expr(epochs is not None):
            cute.arch.barrier(barrier_id=COUNTED, number_of_threads=p.threads)
            if lane == 0:
                store_words(epochs, [epoch + 1])
        finish(keep_side, own, block, lane, shared, 0, where, p)
    else:
        fill, step = Int32(0), Int32(0)
        a, own_columns = load_side(at, warp, lane, p) if p.side_first else ([], None)
        x, factors = load_x(at.x.toint(), warp, lane, p)
        if cutlass.const_expr(p.side_first):
            fill, step = multiply_side(a, own_columns, fill, step, Int32(0), block, warp, lane, shared, where, p)
        count = await_list(shared, where)
        fill, step = multiply_up(x, factors, fill, step, count, block, warp, lane, shared, where, p)
        if cutlass.const_expr(p.side_width > 0 and not p.side_first):
            a, own_columns = load_side(at, warp, lane, p)
            fill, step = multiply_side(a, own_columns, fill, step, count, block, warp, lane, shared, where, p)
        if p.blocks - 1 - block < p.column_blocks:
            total = multiply_down(own, fill, count, block, warp, lane, shared, where, p)
            sum_columns(keep_column, total, step, block, thread, shared, where, p)


@cute.jit
def copy_ahead(at: Any, block: Any, thread: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """What the copier does before the wait for the producers: weights of the projection beside the experts."""
    warp = cute.arch.make_warp_uniform(thread // 32)
    if cutlass.const_expr(p.side_first):
        if warp == p.warps:
            copy_side(at, Int32(0), Int32(0), block, thread % 32, shared, where, p)
