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
from cutlass import Int32, Int64

from ...compiler.call import Call, Launch
from ..launching import KernelLaunch, await_producers, named, start_dependents
from ..primitives import load_words, select, store_half
from .call import read_call, rounds
from .plan import TILE, TOKENS, Config, Static
from .roles import copy_ahead, run_experts, set_up


class Stored:
    """Results in memory, as bf16."""

    def __init__(self, at: Any, block: Any, p: Static) -> None:
        self.at, self.first, self.p = at, (p.blocks - 1 - block) * p.columns, p

    def side(self, words: Any, unit: Any, lane: Any) -> None:
        row, part, p = lane >> 2, lane & 3, self.p
        for i in range(4):
            token = 2 * part + i % 2
            place = self.at.s.toint() + Int64(token * p.stride_s + unit * 2 * TILE + row + i // 2 * TILE) * 2
            store_half(place, words[i // 2] >> (16 * (i % 2)),
                       guard=select((token < p.tokens) & (unit < p.side_units), Int32(1), Int32(0)))

    def column(self, token: Any, row: Any, value: Any) -> None:
        place = self.at.out.toint() + Int64(token * self.p.stride_out + self.first + row) * 2
        pointer = cute.make_ptr(cutlass.BFloat16, place, cute.AddressSpace.gmem)
        cute.make_tensor(pointer, cute.make_layout(1))[0] = value.to(cutlass.BFloat16)


@cute.kernel
def _moe_experts(arguments: Any, names: cutlass.Constexpr, p: cutlass.Constexpr):
    start_dependents(p.dependent)
    at = named(names, arguments)
    where = p.place()
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    shared = cute.arch.get_dyn_smem(cutlass.Uint8, 128).toint()
    set_up(thread, shared, where, p)
    cute.arch.sync_threads()
    copy_ahead(at, block, thread, shared, where, p)
    await_producers(p.dependent)
    epochs = at.epochs.toint() + Int64(block) * 4
    epoch = load_words(epochs, 1)[0]
    stored = Stored(at, block, p)
    run_experts(at, at.act.toint(), epochs, epoch, stored.side, stored.column, thread, block, shared, where, p)


def bind(call: Call) -> Launch:
    """x, ids, rank, weights, w1, w3, s1, s3, w2, s2 -> out; with the projection beside, a, w -> s."""
    config = Config(**call.config)
    static, arguments = read_call(call, Static, TOKENS, slots=config.slots, bulk=config.bulk, warps=config.warps,
                                  side_first=config.side_first, rounds=rounds(call))
    assert not static.side_first or (static.bulk and static.side_width), f"{config}: nothing to copy first"
    return KernelLaunch(_moe_experts, (static.blocks, 1, 1), static.threads, arguments, static,
                        shared=static.place()["end"], dependent=static.dependent)
