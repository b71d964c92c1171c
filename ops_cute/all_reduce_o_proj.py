"""A projection split over ranks, its sum, residual add, attention residuals and norm in one launch.

Contract: ``a`` bf16 [T, K] and ``w`` bf16 [D, K] are this rank's share of the inputs of a projection (K3: the output
projection of attention, its heads split over ranks). ``o = bf16(a w^T)`` is this rank's part; what follows is
``all_reduce_attn_res.py`` with ``x = o``, which is never a tensor: it goes straight into the mailboxes.

Layout: two kinds of clusters. The first ``producers`` of a grid multiply: a warp has 16 outputs and at most 384 inputs,
whose weights it holds in registers before it waits for the producers of ``a``; so the whole weight of K3 at 16 ranks
(11 MB) is on its way or in registers when attention ends. Warps that share a tile add their sums through shared memory;
then all threads send fragments of 8 outputs to all ranks. The last T clusters are those of ``all_reduce_attn_res.py``,
a row each: they have read the finished blocks and multiplied them with each other by the time the sums come, settled
ones before the wait for the producers in a ``settled`` configuration (not timed yet).

Waits: (0) "parts of a row". Blocks that multiply wait for no other block, and they come before those that mix in the
order in which blocks start, so that a launch ends on any number of multiprocessors once every rank has begun its own.
Order of a block that multiplies: weights, wait for the producers, epoch and ``a``, products, publish, count the epoch.
The launch for all ranks of one process is two launches where the blocks of all ranks would not fit at once.
Epochs: one for each block. A mixing cluster arms what it reads, as in ``all_reduce_attn_res.py``.
Numerics: products of bf16 exact, fp32 sums, one rounding of each part, as the projection alone would have it.
Measured in loopback on one H200, TP16, weights cold, with dependent launch: one row 6.1 us with one block and no prefix
and 6.5 with eight and the prefix, 8 rows 7.6 and 8.7; floor 4.8 (2.35 us + bytes / 4.44 TB/s). In such a chain of its
like the next launch's weights find room only when blocks of this one have left. Compared there at TP 8 and 16, 1, 2, 5
and 8 rows, all ranks of a group and in loopback.
"""
# ruff: noqa: SIM102 - what is known while the kernel is traced stands alone
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..compiler.call import Call, Launch, Link
from ..compiler.launches import LaunchSequence
from .all_reduce_attn_res import (
    COLLECT,
    LANES,
    MIXED,
    PUBLISH,
    Config,
    Static,
    mix_row,
    open_row,
    static_of,
    tensors_of,
)
from .all_reduce_o_proj_menu import MOST_ROWS, TILE, UNIT, producers, splits
from .launching import KernelLaunch, await_producers, row_stride, start_dependents
from .mailbox import Addresses, Mailbox, addresses, columns_of, fits_at_once
from .primitives import address, load_shared, load_words, mma, pack, select, store_shared, total

WAITS = ("parts of a row",)


@dataclass(frozen=True)
class Parameters:
    """``mix`` is what the rows' clusters are compiled for; the rest is the projection's."""

    mix: Static
    rows: int
    inputs: int
    splits: int  # warps that share a tile's inputs
    producers: int  # clusters
    stride_a: int

    @property
    def units(self) -> int:
        return self.inputs // (UNIT * self.splits)

    @property
    def tiles(self) -> int:
        """Of a block."""
        return self.mix.warps // self.splits

    @property
    def copies(self) -> int:
        return 1 if self.mix.multicast else self.mix.ranks

    @property
    def shared(self) -> int:
        """Bytes: of each warp the sums of its tile, [rows of 8][16 outputs] with a pad between rows."""
        return self.mix.warps * MOST_ROWS * PITCH


PITCH = 4 * (TILE + 4)  # bytes between rows of a tile's sums


def _multiply(at: Addresses, thread: Any, part: Any, cluster: Any, p: Parameters) -> None:
    """The products of a block, sent to all ranks."""
    mix = p.mix
    lane, warp = thread % LANES, thread // LANES
    g, q = lane // 4, lane % 4
    block = cluster * mix.cluster + part
    tile, split = block * p.tiles + warp // p.splits, warp % p.splits
    base = address(cute.arch.get_dyn_smem(Float32, 16))
    first = split * p.units * UNIT + q * 8
    weight = []
    for lower in (0, 8):
        output = tile * TILE + g + lower
        output = select(output < mix.width, output, Int32(mix.width - 1))
        source = at["w"] + (Int64(output) * p.inputs + Int64(first)) * 2
        weight.append([load_words(source + unit * 2 * UNIT) for unit in range(p.units)])
    await_producers(mix.dependent)

    box = Mailbox(at, ranks=mix.ranks, slot=mix.slot, block=block, limit=mix.limit, multicast=mix.multicast)
    row = select(g < p.rows, g, Int32(p.rows - 1))
    source = at["a"] + Int64(row) * (2 * p.stride_a) + Int64(first) * 2
    values = [load_words(source + unit * 2 * UNIT) for unit in range(p.units)]
    # four chains of products, so that one does not wait for itself
    sums = [[Float32(0.0)] * 4 for _ in range(4)]
    for unit, (upper, lower, x) in enumerate(zip(*weight, values, strict=True)):
        for step in (0, 2):
            chain = unit % 2 * 2 + step // 2
            sums[chain] = mma([upper[step], lower[step], upper[step + 1], lower[step + 1]], x[step : step + 2],
                              sums[chain])
    own = base + warp * (MOST_ROWS * PITCH)
    for i in range(4):
        place = own + (2 * q + i % 2) * PITCH + (g + 8 * (i // 2)) * 4
        store_shared(place, [total([chain[i] for chain in sums])])
    cute.arch.sync_threads()
    _send(at, box, thread, block, base, p)
    box.count(Int32(thread == 0))


def _send(at: Addresses, box: Mailbox, thread: Any, block: Any, base: Any, p: Parameters) -> None:
    """A thread's share of a block's fragments: neighbours send neighbouring outputs of one row to one rank."""
    each = 2 * p.tiles  # fragments of a row
    total = p.copies * p.rows * each
    for start in range(0, total, p.mix.threads):
        item = thread + start
        real = item < total
        item = select(real, item, Int32(0))
        fragment, rest = item % each, item // each
        row, peer = rest % p.rows, rest // p.rows
        at_sums = base + row * PITCH + (fragment // 2) * (p.splits * MOST_ROWS * PITCH) + (fragment % 2) * 32
        values = [Float32(0.0)] * 8
        for split in range(p.splits):
            held = at_sums + split * (MOST_ROWS * PITCH)
            values = [v + w for v, w in zip(values, load_shared(held, 4) + load_shared(held + 16, 4), strict=True)]
        column = block * each + fragment
        whole = p.mix.width // 8
        target = None if p.mix.multicast else at.peer(peer)
        box.send(row * whole + column, pack(values), target, guard=Int32(real & (column < whole)))


@cute.kernel
def _linear_all_reduce_attn_res(arguments: Any, names: cutlass.Constexpr, p: cutlass.Constexpr):
    start_dependents(p.mix.dependent)
    thread, _, _ = cute.arch.thread_idx()
    part, index, number = cute.arch.block_idx()
    at = Addresses(arguments, names, p.mix.columns, index)
    if cutlass.const_expr(p.mix.phase != COLLECT):
        if number < p.producers:
            _multiply(at, thread, part, number, p)
    if cutlass.const_expr(p.mix.phase != PUBLISH):
        if number >= p.producers:
            if cutlass.const_expr(p.mix.cluster > 1):
                if thread == 0:
                    open_row(p.mix)
            mix_row(at, thread, part, number - p.producers, number * p.mix.cluster + part, p.mix, publish=False)


def bind(calls: Sequence[Call], links: Sequence[Link], *, multicast: int = 0) -> Launch:
    """The launch for the ranks of this process; ``links`` and ``multicast`` as in ``all_reduce_attn_res.bind``."""
    a, w, config = calls[0].tensors["a"], calls[0].tensors["w"], Config(**calls[0].config)
    rows, inputs = a.shape
    assert rows <= MOST_ROWS, f"{rows} rows"
    assert w.is_contiguous(), f"weight {w.stride()}"
    assert w.shape[1] == inputs, f"weight {w.shape} for {inputs} inputs"
    tensors = tensors_of(calls, ("a", "w", *MIXED))
    static = static_of(calls, links, config, rows * w.shape[0] // 8, multicast=bool(multicast))
    static = replace(static, columns=columns_of(tuple(tensors[0]), static.ranks))
    p = Parameters(static, rows, inputs, splits(inputs, static.warps), producers(w.shape[0], inputs, calls[0].config),
                   row_stride(a))
    clusters = p.producers + rows
    launch = KernelLaunch(
        _linear_all_reduce_attn_res, (config.cluster, len(calls), clusters), config.threads,
        addresses(calls, links, tensors, multicast), p, cluster=(config.cluster, 1, 1),
        shared=max(static.shared, p.shared), dependent=static.dependent)
    if len(calls) == 1 or fits_at_once(len(calls) * config.cluster * clusters, a.device):
        return launch
    return LaunchSequence(tuple(replace(launch, parameters=replace(p, mix=replace(static, phase=phase)))
                                for phase in (PUBLISH, COLLECT)))
