"""Routed MXFP4 experts on the block-scaled tensor cores of sm_100 and sm_103: W1 and W3, SiTU, W2 and the weighted sum
in one launch, 1 to 64 rows. IT HAS NEVER RUN ON A GPU: nobody here has one of these. It compiles for both; what is
proved on a CPU, and how, stands at the end and in ``docs/cute.md``.

Contract: that of ``moe_experts.py``, with up to 64 rows: ``x`` bf16 [T, D], ``ids`` i32 and ``weights`` fp32 [T, k],
weights and scales as the checkpoint has them, ``rank`` i32 [1], ``out`` bf16 [T, D']. D is a multiple of 128, I of 32,
nothing is padded: 192 stays 192. Ids of a row are distinct.
Beside them, when the pattern has it, the shared expert's down-projection: ``s`` bf16 [T, N] = ``a`` bf16 [T, K] times
``w`` bf16 [N, K] transposed, K a multiple of 32, this rank's part of a sum over ranks.

The instruction is ``tcgen05.mma`` of kind mxf8f6f4 with block scales, 128 x n x 32: fp32 sums += (weights times their
scales) times (rows times their scales). Weights are its 128 rows, tokens its n columns, since n can be as small as 8,
and an expert has 1.1 to 1.7 tokens at 16 to 64 rows. Weights go from the checkpoint's bytes through registers into
tensor memory (a nibble becomes a byte with a shift and masks, ``blackwell_layouts.weight_words``), where lane r simply
has row r. The other way, tensor copies that unpack into shared memory, needs rows of a multiple of 128 columns (192 is
none) and twice the shared memory, and of its 128 bytes a clock it takes 112 at 8 TB/s (28 written, 56 read with the
padding, 28 of rows). This way takes 84, and of 64 integer instructions a clock 35 (e4m3) or 20 (e2m1): 4.9 and 2.8 in
the binary for a word of 8 weights, left shifts go to the multiplier.

"mxfp8" activations: rows of x and activations are rounded as the op does, and are the narrow operand.
"bf16" activations stay bf16: each number is the sum of two e4m3 with scales 16 apart (``mxfp8.terms_of``), two columns
of one instruction: 16 columns take no longer than 8, since the 128 rows are what it waits for. The alternatives lose by
arithmetic. Kind f16 needs weights dequantised with their scales, 1.1 integer instructions and half a multiplication a
weight, for 56 weights a clock at 8 TB/s: 62 of 64, before any address. ``mma.sync`` decodes as much, and all 64 rows
with all experts would take 3.5 times the clocks that memory leaves.

Layout: one block on each multiprocessor, 19 warps.
* 2 copiers (``..._copy.py``) stream weights through a ring: 8 groups of 32 columns of 128 rows at a time, a step.
* 8 expanders (``..._weights.py``), two teams of four, take turns with the steps: each thread reads 16 bytes a group of
  its own row and stores 8 columns of tensor memory; scales too, in all four quarters, as the instruction wants them.
* 4 stagers (``..._rows.py``) bring the step's rows into shared memory: in the first half rows of x of the expert's
  tokens, rounded on the way; in the second activations of pairs, which other blocks publish. Their scales go on to
  tensor memory by ``tcgen05.cp``.
* 1 thread multiplies: it waits for a stage, issues a step, and commits the stage free and, at a unit's end, the sums.
* 4 finishers read sums back. In the first half lanes 0 to 63 are gates and 64 to 127 their ups; SiTU, rounding by
  groups of 32 lanes, publishing. In the second half the 128 rows are the block's columns (25 on 148 blocks) of up to 5
  experts, against the tokens of all of them: only the sums of an expert with its own tokens count, the waste is the
  tensor core's, which has the time. They are weighted and added in the order of experts and tokens by one thread for
  each column and token: no atomics, one order of addition.
A unit is 64 gate and 64 up rows of one expert, every ``blocks``-th of all is a block's own; 192 rows are 3 units. Every
distinct expert is read once; one with more than 32 pairs is expanded again for the next 32, from shared memory.

The projection beside is one more product of each block, its columns of N (49 on 148 blocks) against all rows, between
units and items: bf16 as it is, through the same ring, stages and tensor memory, by kind f16. It needs nothing of the
experts and fills the time in which the last activations travel.

Waits: as in ``moe_experts.py``: activations travel in words that are zero until they have come, in two parts by the
parity of ``epochs``, the other part is zeroed; a block publishes all of its own before it waits for others, and all
blocks run at once (one a multiprocessor, more than half of its shared memory each). Inside a block every wait is for a
barrier whose phases each waiting warp passes one by one. Tensor memory is handed over with fences on both sides.
Numerics: weights are exact, also times their scales (bytes 0 to 254); products are exact, sums fp32; SiTU, routing
weights and the weighted sum fp32; activations are rounded once, to MXFP8 or to two terms; out once.

Arithmetic for a GB300 at 8 TB/s and 148 multiprocessors (an expert is 1.1 MB on a TP16 rank, 2.2 MB at TP8):
  rows  distinct experts   TP16          TP8           useful      instructions of a multiprocessor, 32 clocks each
  16    224                246 MB 31 us  492 MB 61 us  1.1 GFLOP   760, 13 us
  32    393                431 MB 54 us  862 MB 108    2.1         1340, 22 us
  64    613                672 MB 84 us  1345 MB 168   4.2         2090, 35 us
Bytes decide, so the design keeps 100 KB of them in flight a block. A step is 17.4 KB: 620 clocks at 28 bytes a clock;
its expansion is about 500 clocks of each of four warps, and two teams take turns. These are predictions.
Proved on a CPU: the source of this file and of its parts runs in an emulator of warps beside a model of the tensor core
that is written from the PTX ISA, reads descriptors bit by bit and ends late and at random what is issued: results
against the op, 1 to 64 rows, both activations, tensor- and expert-parallel (``tests/cute/test_blackwell_*.py``).
Not proved: times; whether the ISA's pictures were read rightly where its text is silent (the container of 4-bit numbers
in tensor memory: "e4m3" weights are the default because they need none); what the assembler makes of it.
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
    init_barriers,
    load_word,
    publish,
    publish_barriers,
    situ,
    store_byte,
    store_word,
)
from ..primitives import (
    lane_xor,
    load_shared,
    load_words,
    pack,
    select,
    store_half,
    store_shared,
    store_words,
)
from ..shared_memory import round_up
from .blackwell_layouts import (
    FACTORS,
    LANES,
    QUARTER,
    ROW_BLOCK,
    SCALE_BLOCK,
    SCALES,
    instruction,
    instruction_bf16,
    leading_bytes,
    scale_column,
    shared_descriptor,
    weight_column,
)
from .block_scaled_copy import copy_weights
from .block_scaled_list import flag, list_experts, padded_rows, span
from .block_scaled_plan import (
    CHUNK,
    COPIERS,
    EXPANDERS,
    FINISHERS,
    PIECE,
    STAGERS,
    STAGES,
    THREADS,
    TILE,
    TOKENS,
    Config,
    Static,
)
from .block_scaled_rows import stage_activations, stage_rows, stage_side
from .block_scaled_weights import expand_down, expand_side, expand_up, stage_at
from .call import read_call, rounds
from .moe_experts_block_scaled_menu import LIST_BITS
from .mxfp4 import power_of_two
from .mxfp8 import LEAST, LOW_SHIFT, scale_byte, terms_of
from .tensor_memory import (
    allocate,
    commit,
    copy_scales,
    deallocate,
    fence_after,
    fence_before,
    load_columns,
    load_four,
    multiply,
    multiply_bf16,
)

FIRST_FINISHER = EXPANDERS
FIRST_STAGER = FIRST_FINISHER + FINISHERS
FIRST_COPIER = FIRST_STAGER + STAGERS
MULTIPLIER = FIRST_COPIER + COPIERS
FINISHING = 1  # named barrier of the finishers
MINUS_ZEROS = -0x7F7F7F80  # four e4m3 zeros that are not the word zero


# products


def _multiply_step(tensor: Any, sums: Any, stage: Any, n: Any, add: Any, groups: int, shared: Any, where: Any,
                   p: Static) -> None:
    """One thread: a step of ``groups`` groups against ``n`` rows."""
    weights = stage_at(tensor, stage, p)
    scales = weights + p.stage_scales
    row_scales = scales + 4 * p.scale_words
    block = shared + where["row_scales"] + stage * (p.scale_words * SCALE_BLOCK)
    for word in range(-(-groups // SCALES)):
        at = Int64((block + word * SCALE_BLOCK) >> 4) + shared_descriptor(0, ROW_BLOCK)
        copy_scales(row_scales + 4 * word, at)
    rows = shared + where["rows"] + stage * p.operand_bytes
    leading = leading_bytes(p.operand_rows)
    for group in range(groups):
        at = Int64((rows + 2 * group * leading) >> 4) + shared_descriptor(leading, ROW_BLOCK)
        multiply(sums, weights + weight_column(group), at, instruction(p.weights, n, group % SCALES),
                 scales + scale_column(group), row_scales + scale_column(group), add if group == 0 else Int32(1))


def _multiply_side_step(tensor: Any, sums: Any, stage: Any, add: Any, shared: Any, where: Any, p: Static) -> None:
    """One thread: a step of the projection beside against all rows."""
    weights = stage_at(tensor, stage, p)
    rows = shared + where["rows"] + stage * p.operand_bytes
    leading = leading_bytes(p.operand_rows)
    for i in range(p.side_deep // 16):
        at = Int64((rows + 2 * i * leading) >> 4) + shared_descriptor(leading, ROW_BLOCK)
        multiply_bf16(sums, weights + 8 * i, at, Int32(instruction_bf16(round_up(p.tokens, CHUNK))),
                      add if i == 0 else Int32(1))


@cute.jit
def _multiply(tensor: Any, count: Any, block: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """One thread: all steps of the units, then of the items; sums take turns between two places."""
    step, done = Int32(0), Int32(0)
    for unit in cutlass.range(block, count * p.tiles, p.blocks, unroll=1):
        begin, end = span(unit // p.tiles, 1, shared, where)
        n = p.terms * padded_rows(end - begin)
        await_phase(shared + where["sums_empty"] + (done & 1) * 8, ((done >> 1) & 1) ^ 1)
        for part in cutlass.range(p.slices, unroll=1):
            await_phase(shared + where["stage_full"] + (step & 1) * 8, (step >> 1) & 1)
            fence_after()
            _multiply_step(tensor, tensor + (done & 1) * p.sum_columns, step & 1, n, flag(part > 0), p.slice, shared,
                           where, p)
            commit(shared + where["stage_empty"] + (step & 1) * 8)
            step = step + 1
        commit(shared + where["sums_full"] + (done & 1) * 8)
        done = done + 1
    if cutlass.const_expr(p.side_width > 0):
        await_phase(shared + where["sums_empty"] + (done & 1) * 8, ((done >> 1) & 1) ^ 1)
        for part in cutlass.range(p.side_steps, unroll=1):
            await_phase(shared + where["stage_full"] + (step & 1) * 8, (step >> 1) & 1)
            fence_after()
            _multiply_side_step(tensor, tensor + (done & 1) * p.sum_columns, step & 1, flag(part > 0), shared, where, p)
            commit(shared + where["stage_empty"] + (step & 1) * 8)
            step = step + 1
        commit(shared + where["sums_full"] + (done & 1) * 8)
        done = done + 1
    if p.blocks - 1 - block < p.column_blocks:
        for item in cutlass.range(0, count, p.together, unroll=1):
            first, end = span(item, cutlass.min(Int32(p.together), count - item), shared, where)
            for begin in cutlass.range(first, end, p.pass_pairs, unroll=1):
                n = p.terms * padded_rows(cutlass.min(Int32(p.pass_pairs), end - begin))
                await_phase(shared + where["sums_empty"] + (done & 1) * 8, ((done >> 1) & 1) ^ 1)
                for part in cutlass.range(p.down_slices, unroll=1):
                    await_phase(shared + where["stage_full"] + (step & 1) * 8, (step >> 1) & 1)
                    fence_after()
                    _multiply_step(tensor, tensor + (done & 1) * p.sum_columns, step & 1, n, flag(part > 0),
                                   p.down_slice, shared, where, p)
                    commit(shared + where["stage_empty"] + (step & 1) * 8)
                    step = step + 1
                commit(shared + where["sums_full"] + (done & 1) * 8)
                done = done + 1
    # no arrival may come when the block has gone
    for stage in cutlass.range_constexpr(STAGES):
        await_phase(shared + where["stage_empty"] + stage * 8, (((step + 1 - stage) >> 1) & 1) ^ 1)


# sums


@cute.jit
def _finish_side(tensor: Any, out: Any, done: Any, block: Any, quarter: Any, lane: Any, shared: Any,
                 where: cutlass.Constexpr, p: cutlass.Constexpr):
    """The finishers: this block's columns of the projection beside as bf16."""
    first = block * p.side_columns
    row = quarter * QUARTER + lane
    rows = cutlass.min(Int32(p.side_columns), p.side_rows - first)
    await_phase(shared + where["sums_full"] + (done & 1) * 8, (done >> 1) & 1)
    fence_after()
    for start in cutlass.range(0, p.tokens, CHUNK, unroll=1):
        sums, = load_columns([tensor + (done & 1) * p.sum_columns + start + ((quarter * QUARTER) << 16)])
        for i in cutlass.range_constexpr(CHUNK):
            to = out + Int64((start + i) * p.stride_s + first + row) * 2
            store_half(to, pack([sums[i], sums[i]])[0], guard=flag((row < rows) & (start + i < p.tokens)))
    fence_before()
    arrive(shared + where["sums_empty"] + (done & 1) * 8)
    return done + 1


def _sums_of(tensor: Any, done: Any, start: Any, padded: Any, quarter: Any, p: Static) -> list[Any]:
    """This lane's row of 8 tokens' sums from ``start`` on, over the terms."""
    at = tensor + (done & 1) * p.sum_columns + start + ((quarter * QUARTER) << 16)
    terms = load_columns([at + term * padded for term in range(p.terms)])
    factor = FACTORS[p.weights]
    return [sum(parts[1:], parts[0]) * factor for parts in zip(*terms, strict=True)]


def _pack_activation(value: Any, out: Any, half: Any, lane: Any, p: Static) -> None:
    """A group's activations, one a lane, as bytes of each term in a record of ``fragments``, and their scale."""
    largest = select(value < 0.0, -value, value)
    for step in (1, 2, 4, 8, 16):
        largest = cute.arch.fmax(largest, lane_xor(largest, step))
    byte = scale_byte(largest, LEAST if p.terms == 1 else LEAST + LOW_SHIFT)
    place = (lane & -8) | ((lane & 1) << 2) | ((lane & 7) >> 1)
    for term, bits in enumerate(terms_of(value, Float32(0.0), power_of_two(254 - byte), p.terms)):
        store_byte(out + term * TILE + half * QUARTER + place, bits, Int32(1))
    store_byte(out + p.terms * TILE + half, byte, flag(lane == 0))
    # a word with this byte is never zero
    store_byte(out + p.terms * TILE + 2, Int32(1), flag(lane == 0))


@cute.jit
def _finish_units(tensor: Any, act: Any, count: Any, block: Any, quarter: Any, lane: Any, shared: Any,
                  where: cutlass.Constexpr, p: cutlass.Constexpr):
    """The finishers: SiTU of a unit's 64 rows, and the activations of its pairs to where all blocks find them."""
    done = Int32(0)
    thread = quarter * 32 + lane
    sums, outbox = shared + where["sums"], shared + where["outbox"]
    for unit in cutlass.range(block, count * p.tiles, p.blocks, unroll=1):
        begin, end = span(unit // p.tiles, 1, shared, where)
        n = end - begin
        padded = padded_rows(n)
        await_phase(shared + where["sums_full"] + (done & 1) * 8, (done >> 1) & 1)
        fence_after()
        for start in cutlass.range(0, padded, CHUNK, unroll=1):
            own = _sums_of(tensor, done, start, padded, quarter, p)
            if quarter >= 2:
                for i in cutlass.range_constexpr(CHUNK):
                    store_shared(sums + (i * TILE + thread - TILE) * 4, [own[i]])
            cute.arch.barrier(barrier_id=FINISHING, number_of_threads=32 * FINISHERS)
            if quarter < 2:
                for i in cutlass.range_constexpr(CHUNK):
                    if start + i < n:
                        up = load_shared(sums + (i * TILE + thread) * 4)
                        _pack_activation(situ(own[i], up, p.beta, p.linear_beta),
                                         outbox + i * (p.fragments * PIECE), quarter, lane, p)
            cute.arch.barrier(barrier_id=FINISHING, number_of_threads=32 * FINISHERS)
            row, fragment = thread // p.fragments, thread % p.fragments
            if (row < CHUNK) & (start + row < n):
                words = load_four(outbox + thread * PIECE)
                pair = load_word(shared + where["pairs"] + (begin + start + row) * 4) & 0xFFFF
                to = act + Int64((pair * p.tiles + unit % p.tiles) * p.fragments + fragment) * PIECE
                for i in cutlass.range_constexpr(4):
                    word = select(words[i] == 0, Int32(MINUS_ZEROS), words[i])
                    publish(to + 4 * i, word, flag(fragment < 4 * p.terms) if i else Int32(1))
        fence_before()
        arrive(shared + where["sums_empty"] + (done & 1) * 8)
        done = done + 1
    return done


@cute.jit
def _finish_items(tensor: Any, done: Any, count: Any, quarter: Any, lane: Any, shared: Any, where: cutlass.Constexpr,
                  p: cutlass.Constexpr):
    """The finishers: weighted sums of the items, a warp for every fourth token, a lane for every 32nd column."""
    sums = shared + where["sums"]
    for item in cutlass.range(0, count, p.together, unroll=1):
        first, end = span(item, cutlass.min(Int32(p.together), count - item), shared, where)
        for begin in cutlass.range(first, end, p.pass_pairs, unroll=1):
            n = cutlass.min(Int32(p.pass_pairs), end - begin)
            padded = padded_rows(n)
            await_phase(shared + where["sums_full"] + (done & 1) * 8, (done >> 1) & 1)
            fence_after()
            for start in cutlass.range(0, padded, CHUNK, unroll=1):
                own = _sums_of(tensor, done, start, padded, quarter, p)
                for i in cutlass.range_constexpr(CHUNK):
                    store_shared(sums + ((start + i) * LANES + quarter * 32 + lane) * 4, [own[i]])
            fence_before()
            arrive(shared + where["sums_empty"] + (done & 1) * 8)
            cute.arch.barrier(barrier_id=FINISHING, number_of_threads=32 * FINISHERS)
            for index in cutlass.range(n, unroll=1):
                word = load_word(shared + where["pairs"] + (begin + index) * 4)
                token = (word & 0xFFFF) // p.top_k
                if (token & 3) == quarter:
                    weight = load_shared(shared + where["weights"] + (begin + index) * 4)
                    row = ((word >> 16) - item) * p.columns
                    for column in cutlass.range(lane, p.columns, 32, unroll=1):
                        at = shared + where["result"] + (token * p.columns + column) * 4
                        value = load_shared(sums + (index * LANES + row + column) * 4)
                        store_shared(at, [load_shared(at) + weight * value])
            cute.arch.barrier(barrier_id=FINISHING, number_of_threads=32 * FINISHERS)
            done = done + 1


@cute.jit
def _store_result(out: Any, block: Any, thread: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """The finishers: this block's columns as bf16."""
    first = (p.blocks - 1 - block) * p.columns
    for index in cutlass.range(thread, p.tokens * p.columns, 32 * FINISHERS, unroll=1):
        token, column = index // p.columns, index % p.columns
        value = load_shared(shared + where["result"] + index * 4)
        store_half(out + Int64(token * p.stride_out + first + column) * 2, pack([value, value])[0],
                   guard=flag(first + column < p.out_width))


@cute.jit
def _start(thread: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """Barriers; no expert, no token of any, no result yet."""
    if thread == 0:
        init_barriers(shared + where["full"], p.slots, 32)
        init_barriers(shared + where["empty"], p.slots, EXPANDERS)
        # all threads of a team, and of the stagers
        init_barriers(shared + where["stage_full"], STAGES, LANES + 32 * STAGERS)
        init_barriers(shared + where["stage_empty"], STAGES, 1)
        init_barriers(shared + where["sums_full"], STAGES, 1)
        init_barriers(shared + where["sums_empty"], STAGES, 32 * FINISHERS)
        publish_barriers()
    for index in cutlass.range(thread, p.words, THREADS, unroll=1):
        store_word(shared + where["bits"] + index * 4, Int32(0))
    for index in cutlass.range(thread, 2 * (p.most + 1), THREADS, unroll=1):
        store_word(shared + where["tokens"] + index * 4, Int32(0))
    for index in cutlass.range(thread, p.tokens * p.columns, THREADS, unroll=1):
        store_word(shared + where["result"] + index * 4, Int32(0))


@cute.kernel
def _moe_experts_block_scaled(arguments: Any, names: cutlass.Constexpr, p: cutlass.Constexpr):
    start_dependents(p.dependent)
    at = named(names, arguments)
    where = p.place()
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
    shared = cute.arch.get_dyn_smem(cutlass.Uint8, 128).toint()
    if warp == MULTIPLIER:
        allocate(shared + where["tensor"], p.tensor_columns)
        fence_before()
    _start(thread, shared, where, p)
    cute.arch.sync_threads()
    fence_after()
    tensor = load_word(shared + where["tensor"])
    await_producers(p.dependent)
    epochs = at.epochs.toint() + Int64(block) * 4
    epoch = load_words(epochs, 1)[0]
    fragments = p.pairs * p.tiles * p.fragments
    act = at.act.toint() + Int64(epoch & 1) * (fragments * PIECE)
    list_experts(at, thread, warp, lane, shared, where, p)
    if thread == 0:
        store_words(epochs, [epoch + 1])
    count = load_word(shared + where["count"])
    has_columns = p.blocks - 1 - block < p.column_blocks
    quarter = warp & 3
    if warp < FIRST_FINISHER:
        # the other part was read by the launch before and has to be zero for the next
        before = at.act.toint() + Int64((epoch & 1) ^ 1) * (fragments * PIECE)
        for index in cutlass.range(block * (32 * EXPANDERS) + thread, fragments, p.blocks * (32 * EXPANDERS), unroll=1):
            store_words(before + Int64(index) * PIECE, [Int32(0)] * 4)
        steps = expand_up(tensor, count, block, warp >> 2, quarter, lane, shared, where, p)
        if cutlass.const_expr(p.side_width > 0):
            steps = expand_side(tensor, steps, block, warp >> 2, quarter, lane, shared, where, p)
        if has_columns:
            expand_down(tensor, steps, count, block, warp >> 2, quarter, lane, shared, where, p)
    elif warp < FIRST_STAGER:
        done = _finish_units(tensor, act, count, block, quarter, lane, shared, where, p)
        if cutlass.const_expr(p.side_width > 0):
            done = _finish_side(tensor, at.s.toint(), done, block, quarter, lane, shared, where, p)
        if has_columns:
            _finish_items(tensor, done, count, quarter, lane, shared, where, p)
            _store_result(at.out.toint(), block, quarter * 32 + lane, shared, where, p)
    elif warp < FIRST_COPIER:
        steps = stage_rows(at, count, block, quarter, lane, shared, where, p)
        if cutlass.const_expr(p.side_width > 0):
            steps = stage_side(at.a.toint(), steps, quarter, lane, shared, where, p)
        if has_columns:
            stage_activations(act, steps, count, quarter, lane, shared, where, p)
    elif warp < MULTIPLIER:
        copy_weights(at, count, warp - FIRST_COPIER, block, lane, shared, where, p)
    else:
        # the assembler knows of an elected thread that it is one, and issues without a loop over the warp
        with cute.arch.elect_one():
            _multiply(tensor, count, block, shared, where, p)
    cute.arch.sync_warp()
    cute.arch.sync_threads()
    if warp == MULTIPLIER:
        deallocate(tensor, p.tensor_columns)


def bind(call: Call) -> Launch:
    """x, ids, rank, weights, w1, w3, s1, s3, w2, s2 -> out; with the projection beside, a, w -> s."""
    config = Config(**call.config)
    static, arguments = read_call(call, Static, TOKENS, most_experts=LIST_BITS, beside=PIECE, slots=config.slots,
                                  weights=config.weights, terms=1 if rounds(call) else 2)
    assert max(static.columns, static.side_columns) <= LANES, f"{static.columns}, {static.side_columns} columns a block"
    return KernelLaunch(_moe_experts_block_scaled, (static.blocks, 1, 1), THREADS, arguments, static,
                        shared=static.place()["end"], dependent=static.dependent)
