"""Routed MXFP4 experts in one launch for 9 to 64 rows: an expert multiplies the rows that chose it, not all of them.

Contract: that of ``moe_experts.py`` (``x ids rank weights w1 w3 s1 s3 w2 s2 -> out``), for more rows than one matrix
instruction has columns. Ids of a row differ from each other. Any routing is exact, from all rows on the same experts to
every pair on its own.

Layout: one block on each multiprocessor, the warps of ``moe_experts.py`` and its ring of weights, which are read once.
What differs is where the operand of a matrix instruction comes from and where its sums go.
* Sorting. All threads set a bit for each pair of a token and an expert (64 bits an expert); a prefix sum over experts
  gives the list of distinct ones and where their pairs begin, a bit's rank among its expert's gives the pair's place.
  No order depends on which thread came first.
* Rows of x become fp16 once a launch, one row a block, each by a power of two of its own, in the order of decoded
  weights. They stay in L2 (459 KB).
* First half: a block takes runs of ``run`` units of one expert, run ``block``, then run ``block + blocks``, and so on,
  so that experts are complete in the order of the list. A warp holds its columns of 8 tokens of the expert. As soon as
  a product has used the last of them before another expert's turn, the next one's are loaded into the same registers:
  their way from L2 is hidden by the rest of the unit. An expert of more than 8 tokens multiplies its units once for
  each 8, with the weights that lie in shared memory.
* Second half: a warp takes every 16th expert. Its sums for this block's columns go to shared memory, one line for each
  pair of token and expert, as fp32 (115 KB at 64 rows); at the end every token adds up its 16 lines in the order of the
  router, times its weights. A block has its columns of all experts, so nothing is added up in memory and no order of
  addition depends on time: equal inputs give equal bits. The next expert's activations are loaded while one multiplies.

Waits: those of ``moe_experts.py`` for activations. A block that has stored a row of x adds one to a count that only
grows; one warp of each block waits for it, the others for that warp (with all of them looking at it, the first product
came 6 us after the start), while weights come. A block waits only for what blocks do before their first wait.
Numerics: as ``moe_experts.py``, but a row of x has one power of two: exact for what is not below 2^-30 of its largest.

Arithmetic for a TP16 rank of Kimi K3 at 64 rows on an H200: 613 of 896 experts are chosen on average, 1.7 tokens
each, 672 MB: floor 154 us (2.35 us + bytes / 4.44 TB/s). Each block has 112 units of the first half and 613 experts of
the second; by the rates in ``moe_experts.py`` they cost 138,000 and 81,000 cycles at least, 124 us at 1.76 GHz. x costs
44 MB of reads from L2 (runs of 4 units), activations 50 MB. Shared memory: 92 KB in 3 slots of weights, 115 KB of
products, in whose place the sums over warps lie before.
Measured on one H200, weights cold: 192 us at 64 rows as one of the launches of a step (runs of 8 units), 1.25 of the
floor; the two Triton launches take 434. A first form, with one unit a step and 6 us before the first product (all warps
looked at words of all rows), took 232 alone: 171 without products, 224 without copies, so the integer pipe is what is
left; 153 at 32 rows, 93 at 16, all rows on the same 16 experts 66. Those rows were not timed again, and with the
projection beside it was checked at 64 rows and not timed. Error against the fp32 reference there, of the first form:
0.52 of the bf16 chain's, with "mxfp8" 0.36; equal inputs gave equal bits in all launches.
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
    load_word,
    look,
    not_zero,
    publish,
    publish_barriers,
    situ,
    store_word,
)
from ..primitives import (
    lane_xor,
    load_shared,
    load_words,
    pack,
    ptx,
    select,
    store_half,
    store_shared,
    store_words,
)
from ..shared_memory import FRAGMENT
from .call import read_call, rounds
from .copy_weights import copy_by_rows, first_side
from .dot import add_warps, dot_chunk, dot_unit, free_slot, hand_over, look_at_chunk, reload
from .gathered_list import members_of, pair_at, sort
from .gathered_plan import MOST_TOKENS, Config, Gathered
from .mxfp4 import WEIGHT_EXPONENT, pack_f16
from .plan import PARTIALS, STEP, THREADS, TILE, TOKENS, WARPS
from .roles import MULTIPLIERS, multiply_side

COPIER, ZEROING, FINISHER = WARPS, WARPS + 1, WARPS + 2


def renewal(source: Any, guard: Any) -> Any:
    """Loads a group's operand anew from ``source`` where ``guard`` is true."""
    return lambda group, words: reload(source + 64 * group, words, guard)


def acquire() -> None:
    """What other blocks published before a word that this thread has read is seen by what follows."""
    ptx("fence.acq_rel.gpu;", [], [])


@cute.jit
def _start(thread: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """Barriers, and no bit of any expert."""
    if thread == 0:
        init_barriers(shared + where["full"], p.slots, 1)
        init_barriers(shared + where["empty"], p.slots, WARPS)
        init_barriers(shared + where["partials_full"], 2, WARPS)
        init_barriers(shared + where["partials_empty"], 2, 2)
        init_barrier(shared + where["rows"], 1)
        publish_barriers()
    for start in cutlass.range_constexpr(0, 2 * p.local, THREADS):
        store_word(shared + where["masks"] + (thread + start) * 4, Int32(0),
                   select(thread + start < 2 * p.local, Int32(1), Int32(0)))
    if thread < 32:
        store_word(shared + where["totals"] + thread * 4, Int32(0))


@cute.jit
def _await_rows(at: Any, epoch: Any, lane: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """One warp: waits until all rows of x of this launch are there, fetches their factors and tells the block."""
    target = (epoch + 1) * p.tokens
    found = look(at.ready.toint(), Int32(1), 1)[0]
    # the difference: the count goes round
    while found - target < 0:
        found = look(at.ready.toint(), Int32(1), 1)[0]
    acquire()
    for start in cutlass.range_constexpr(0, p.tokens, 32):
        inside = select(lane + start < p.tokens, Int32(1), Int32(0))
        factor = look(at.ready.toint() + Int64(FRAGMENT + 4 * (lane + start)), inside, 1)[0]
        store_word(shared + where["factors"] + (lane + start) * 4, factor, inside)
    cute.arch.sync_warp()
    if lane == 0:
        arrive(shared + where["rows"])


# the first half


@cute.jit
def _multiply_up(rows: Any, count: Any, block: Any, warp: Any, lane: Any, shared: Any,
                 where: cutlass.Constexpr, p: cutlass.Constexpr):
    """The warps that multiply: this warp's groups of 8 gate and 8 up rows a unit. Returns the slots used, and the sums
    handed over."""
    column, part = lane >> 2, lane & 3
    # a warp without groups multiplies those of another by zeros
    own = cutlass.min(warp * p.own_groups, Int32(p.groups - p.own_groups))
    real = warp * p.own_groups < p.groups
    rows = rows + Int64(own * 64 + part * FRAGMENT)
    items = count * p.items
    x = [[Int32(0)] * 4 for _ in range(p.own_groups)]
    begin, own_members = members_of(cutlass.min(block, cutlass.max(items - 1, Int32(0))) // p.items, shared, where)
    opening = real & (block < items) & (column < own_members)
    token = pair_at(begin + column, opening, shared, where) // p.top_k
    x = [reload(rows + Int64(token * (2 * p.width) + 64 * i), x[i], select(opening, Int32(1), Int32(0)))
         for i in range(p.own_groups)]
    fill, step = Int32(0), Int32(0)
    for item in cutlass.range(block, items, p.blocks, unroll=1):
        start, members = members_of(item // p.items, shared, where)
        further = item + p.blocks < items
        other, others = members_of(select(further, item + p.blocks, item) // p.items, shared, where)
        passes = (members + TOKENS - 1) // TOKENS
        for unit in cutlass.range(0, p.run, 2, unroll=1):
            slots = [(fill + i) % p.slots for i in range(2)]
            for eight in cutlass.range(passes, unroll=1):
                # whose columns are multiplied next: of the next 8 tokens, of the first 8 again, of the next expert
                ends = eight + 1 == passes
                leaves = ends & (unit + 2 == p.run)
                after = select(ends, Int32(0), (eight + 1) * TOKENS)
                first = select(leaves, other, start + after)
                left = select(leaves, others, members - after)
                wanted = real & ((passes > 1) | leaves) & (column < left) & (further | (first != other) | (passes > 1))
                token = pair_at(first + column, wanted, shared, where) // p.top_k
                source = rows + Int64(token) * (2 * p.width)
                guard = select(wanted, Int32(1), Int32(0))
                x = list(x)
                totals = []
                for i in cutlass.range_constexpr(2):
                    await_phase(shared + where["full"] + slots[i] * 8, ((fill + i) // p.slots) & 1)
                    slab = shared + where["ring"] + slots[i] * p.slot_bytes
                    totals.append(dot_unit(slab, own, x, lane, p, renewal(source, guard) if i else None))
                    cute.arch.sync_warp()
                    if lane == 0:
                        arrive(shared + where["empty"] + slots[i] * 8, guard=select(ends, Int32(1), Int32(0)))
                hand_over(totals[0], totals[1], step, warp, lane, shared, where, p)
                step = step + 1
            fill = fill + 2
    return fill, step


def _load_side(at: Any, warp: Any, lane: Any, p: Gathered) -> tuple[list[Any], Any]:
    """8 tokens' and a part of the columns of ``a`` as operands, and where in a row of ``w`` they begin, in bytes."""
    steps = p.side_steps // p.side_splits
    token, part = warp % p.eights * TOKENS + (lane >> 2), lane & 3
    own = warp // p.eights * (steps * 2 * STEP)
    real = select(token < p.tokens, Int32(1), Int32(0))
    source = at.a.toint() + Int64(token) * (2 * p.stride_a) + Int64(own + part * 4)
    return [load_words(source + 16 * i, 1, guard=real)[0] for i in range(2 * steps)], own


@cute.jit
def _finish_side(out: Any, step: Any, count: Any, block: Any, lane: Any, shared: Any, which: cutlass.Constexpr,
                 where: cutlass.Constexpr, p: cutlass.Constexpr):
    """Finisher ``which``: adds up what the warps of 8 tokens have of 16 columns of ``s`` and stores them as bf16."""
    row, part = lane >> 2, lane & 3
    for first in cutlass.range(first_side(block, count, p), p.side_units, 2 * p.blocks, unroll=1):
        unit = first + which * p.blocks
        buffer = step & 1
        await_phase(shared + where["partials_full"] + buffer * 8, (step >> 1) & 1)
        at = shared + where["partials"] + buffer * (2 * PARTIALS) + which * PARTIALS + lane * FRAGMENT
        words = []
        for eight in cutlass.range_constexpr(p.eights):
            sums = load_shared(at + eight * 32 * FRAGMENT, 4)
            for split in cutlass.range_constexpr(1, p.side_splits):
                more = load_shared(at + (split * p.eights + eight) * 32 * FRAGMENT, 4)
                sums = [a + b for a, b in zip(sums, more, strict=True)]
            words.append(pack(sums))
        cute.arch.sync_warp()
        if lane == 0:
            arrive(shared + where["partials_empty"] + buffer * 8)
        for i in cutlass.range_constexpr(4 * p.eights):
            token = i // 4 * TOKENS + 2 * part + i % 2
            place = out + Int64(token * p.stride_s + unit * 2 * TILE + row + i % 4 // 2 * TILE) * 2
            store_half(place, words[i // 4][i % 4 // 2] >> (16 * (i % 2)),
                       guard=select((token < p.tokens) & (unit < p.side_units), Int32(1), Int32(0)))
        step = step + 1


@cute.jit
def _finish_units(act: Any, count: Any, block: Any, lane: Any, shared: Any, which: cutlass.Constexpr,
                  where: cutlass.Constexpr, p: cutlass.Constexpr):
    """Finisher ``which``: adds up the warps' sums of one of the two units of each step, applies SiTU and publishes the
    activations of its 8 rows of 8 tokens. Returns the steps."""
    step = Int32(0)
    row, part = lane >> 2, lane & 3
    upper = (row & 2) != 0
    for item in cutlass.range(block, count * p.items, p.blocks, unroll=1):
        start, members = members_of(item // p.items, shared, where)
        for unit in cutlass.range(which, p.run, 2, unroll=1):
            tile = item % p.items * p.run + unit
            for first in cutlass.range(0, members, TOKENS, unroll=1):
                columns = [first + 2 * part + i for i in range(2)]
                pairs = [pair_at(start + c, c < members, shared, where) for c in columns]
                factors = [load_shared(shared + where["factors"] + pair // p.top_k * 4) for pair in pairs]
                sums = add_warps(step, lane, shared, which, True, where, p)
                found = [situ(sums[i] * factors[i], sums[2 + i] * factors[i], p.beta, p.linear_beta)
                         * 2.0**p.act_exponent for i in range(2)]
                # rows r and r + 2 make a word: lanes of r publish the first token's, those of r + 2 the second's
                other = lane_xor(select(upper, found[0], found[1]), 8)
                word = not_zero(pack_f16(select(upper, other, found[0]), select(upper, found[1], other)))
                fragment = select(upper, pairs[1], pairs[0]) * p.tiles + tile
                offset = fragment * FRAGMENT + ((row & 1) * 2 + (row >> 2)) * 4
                mine = select(upper, columns[1], columns[0])
                publish(act + Int64(offset), word, select(mine < members, Int32(1), Int32(0)))
                step = step + 1
    return step


@cute.jit
def _finish(at: Any, act: Any, count: Any, block: Any, lane: Any, shared: Any, which: cutlass.Constexpr,
            where: cutlass.Constexpr, p: cutlass.Constexpr):
    """All of a finisher."""
    await_phase(shared + where["rows"], Int32(0))
    step = _finish_units(act, count, block, lane, shared, which, where, p)
    if cutlass.const_expr(p.side_width > 0):
        _finish_side(at.s.toint(), step, count, block, lane, shared, which, where, p)


# the second half


def _source_of(act: Any, start: Any, left: Any, group: Any, lane: Any, shared: Any, where: Any,
               p: Any) -> tuple[Any, Any]:
    """Where this lane's activations of 8 pairs from ``start`` on lie, of which ``left`` are there, from a group on, and
    whether it has some."""
    wanted = (lane >> 2) < left
    pair = pair_at(start + (lane >> 2), wanted, shared, where)
    return (act + Int64((pair * p.tiles + 4 * group + (lane & 3)) * FRAGMENT), select(wanted, Int32(1), Int32(0)))


@cute.jit
def _keep_products(sums: Any, start: Any, left: Any, lane: Any, shared: Any, where: cutlass.Constexpr,
                   p: cutlass.Constexpr):
    """Stores the sums of 8 pairs for this block's columns in the lines of the pairs."""
    row, part = lane >> 2, lane & 3
    for i in cutlass.range_constexpr(2):
        column = 2 * part + i
        pair = pair_at(start + column, column < left, shared, where)
        line = shared + where["products"] + pair * (4 * p.product_stride)
        for tile in cutlass.range_constexpr(p.column_tiles):
            for half in cutlass.range_constexpr(2):
                at = 16 * tile + 8 * half + row
                store_shared(line + at * 4, [sums[4 * tile + 2 * half + i]],
                             guard=select((column < left) & (at < p.columns), Int32(1), Int32(0)))


@cute.jit
def _multiply_down(act: Any, fill: Any, step: Any, count: Any, block: Any, warp: Any, lane: Any, shared: Any,
                   where: cutlass.Constexpr, p: cutlass.Constexpr):
    """The warps that multiply: every 16th expert's rows for this block's columns. The next activations come while some
    are multiplied, into the same registers."""
    inside = ((p.blocks - 1 - block) * p.columns * p.inter_groups) & 15
    start, members = members_of(cutlass.min(warp, count), shared, where)
    members = select(warp < count, members, Int32(0))
    source, guard = _source_of(act, start, members, Int32(0), lane, shared, where, p)
    x = look_at_chunk(source, guard, p)
    # products take the place of the last sums of the first half: the finishers must have read them
    for buffer in cutlass.range_constexpr(2):
        await_phase(shared + where["partials_empty"] + buffer * 8, (((step + 1 - buffer) >> 1) & 1) ^ 1)
    for begin in cutlass.range(0, count, p.together, unroll=1):
        turn = fill + begin // p.together
        slot = turn % p.slots
        await_phase(shared + where["full"] + slot * 8, (turn // p.slots) & 1)
        end = cutlass.min(begin + p.together, count)
        for index in cutlass.range(begin + ((warp - begin) & (WARPS - 1)), end, WARPS, unroll=1):
            start, members = members_of(index, shared, where)
            further = index + WARPS < count
            other, others = members_of(select(further, index + WARPS, index), shared, where)
            others = select(further, others, Int32(0))
            rows = shared + where["ring"] + slot * p.slot_bytes + (index % p.together) * p.down_bytes
            for eight in cutlass.range(0, members, TOKENS, unroll=1):
                sums = [Float32(0.0)] * (4 * p.column_tiles)
                for chunk in cutlass.range(p.chunks, unroll=1):
                    late = is_late(x)
                    while late != 0:
                        x = look_at_chunk(source, guard, p)
                        late = is_late(x)
                    cute.arch.sync_warp()
                    ends = chunk + 1 == p.chunks
                    leaves = ends & (eight + TOKENS >= members)
                    after = select(ends, eight + TOKENS, eight)
                    source, guard = _source_of(
                        act, select(leaves, other, start + after), select(leaves, others, members - after),
                        select(ends, Int32(0), (chunk + 1) * p.chunk), lane, shared, where, p)
                    x = list(x)
                    tiles = dot_chunk(rows, inside, chunk * p.chunk, x, lane, p, source, guard)
                    sums = [s + v for s, v in zip(sums, [v for four in tiles for v in four], strict=True)]
                _keep_products(sums, start + eight, members - eight, lane, shared, where, p)
        free_slot(slot, lane, shared, where)


@cute.jit
def _combine(at: Any, block: Any, thread: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """Adds up the lines of each token times its routing weights and stores bf16."""
    cute.arch.barrier(barrier_id=MULTIPLIERS, number_of_threads=p.multiplying)
    first = (p.blocks - 1 - block) * p.columns
    fours = p.product_stride // 4
    expert0 = Int32(0)
    if cutlass.const_expr(p.local < p.experts):
        expert0 = load_words(at.rank.toint(), 1)[0] * p.local
    for index in cutlass.range(thread, p.tokens * fours, p.multiplying, unroll=1):
        token, row = index // fours, index % fours * 4
        total = [Float32(0.0)] * 4
        for i in cutlass.range_constexpr(p.top_k):
            pair = token * p.top_k + i
            weight = load_words(at.weights.toint() + Int64(pair) * 4, 1)[0].bitcast(Float32)
            line = load_shared(shared + where["products"] + (pair * p.product_stride + row) * 4, 4)
            if cutlass.const_expr(p.local < p.experts):
                expert = load_words(at.ids.toint() + Int64(pair) * 4, 1)[0] - expert0
                here = (expert >= 0) & (expert < p.local)
                # nobody has written the line of an expert of another rank
                line = [select(here, v, Float32(0.0)) for v in line]
                weight = select(here, weight, Float32(0.0))
            total = [t + weight * v for t, v in zip(total, line, strict=True)]
        words = pack([t * 2.0 ** (-WEIGHT_EXPONENT - p.act_exponent) for t in total])
        place = at.out.toint() + Int64(token * p.stride_out + first + row) * 2
        for i in cutlass.range_constexpr(4):
            real = (row + i < p.columns) & (first + row + i < p.out_width)
            store_half(place + 2 * i, words[i // 2] >> (16 * (i % 2)), guard=select(real, Int32(1), Int32(0)))


@cute.kernel
def _moe_experts_gathered(arguments: Any, names: cutlass.Constexpr, p: cutlass.Constexpr):
    start_dependents(p.dependent)
    at = named(names, arguments)
    where = p.place()
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
    shared = cute.arch.get_dyn_smem(cutlass.Uint8, 128).toint()
    _start(thread, shared, where, p)
    cute.arch.sync_threads()
    await_producers(p.dependent)
    epochs = at.epochs.toint() + Int64(block) * 4
    epoch = load_words(epochs, 1)[0]
    bytes_of_part = p.pairs * p.tiles * FRAGMENT
    act = at.act.toint() + Int64(epoch & 1) * bytes_of_part
    sort(at, block, warp, lane, thread, shared, where, p)
    count = load_word(shared + where["count"])
    if warp == COPIER:
        copy_by_rows(at, Int32(0), count, block, lane, shared, where, p)
    elif warp == ZEROING:
        # the other part was read by the launch before and has to be zero for the next
        before = at.act.toint() + Int64((epoch & 1) ^ 1) * bytes_of_part
        for index in cutlass.range(block * 32 + lane, bytes_of_part // FRAGMENT, p.blocks * 32, unroll=1):
            store_words(before + Int64(index) * FRAGMENT, [Int32(0)] * 4)
        if lane == 0:
            store_words(epochs, [epoch + 1])
        _finish(at, act, count, block, lane, shared, 1, where, p)
    elif warp == FINISHER:
        _await_rows(at, epoch, lane, shared, where, p)
        _finish(at, act, count, block, lane, shared, 0, where, p)
    else:
        await_phase(shared + where["rows"], Int32(0))
        fill, step = _multiply_up(at.rows.toint(), count, block, warp, lane, shared, where, p)
        if cutlass.const_expr(p.side_width > 0):
            a, own = _load_side(at, warp, lane, p)
            fill, step = multiply_side(a, own, fill, step, count, block, warp, lane, shared, where, p)
        if p.blocks - 1 - block < p.column_blocks:
            _multiply_down(act, fill, step, count, block, warp, lane, shared, where, p)
            _combine(at, block, thread, shared, where, p)


def bind(call: Call) -> Launch:
    """x, ids, rank, weights, w1, w3, s1, s3, w2, s2 -> out; with the projection beside, a, w -> s."""
    config = Config(**call.config)
    static, arguments = read_call(call, Gathered, MOST_TOKENS, slots=config.slots, bulk=True, rounds=rounds(call),
                                  run=config.run)
    arguments |= {name: call.scratch[name] for name in ("rows", "ready")}
    return KernelLaunch(_moe_experts_gathered, (static.blocks, 1, 1), THREADS, arguments, static,
                        shared=static.place()["end"], dependent=static.dependent)
