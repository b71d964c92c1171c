"""Attention residuals in one launch: add the delta, mix up to 8 blocks and the prefix, norm; a cluster a row.

Contract: as ``ops_triton/attn_res.py``. ``prefix`` bf16 [T, D] and ``delta`` (optional) give ``p = bf16(prefix +
delta)``; with the blocks bf16 [T, D] (``rest``, oldest first) and ``score`` fp32 [D]: ``s_j = (v_j . score) rsqrt(mean
v_j^2 + eps)``, softmax over the sources, mix, and ``h = mix rsqrt(mean mix^2 + eps) weight`` (the mix itself without
``weight``). Rows may be strided; D is a multiple of 8. ``p`` and ``h`` may be the storage of ``prefix``.

Bytes (blocks + 3) D 2 a row and 6 D of weights: 8 blocks, D 7168, one row 0.2 MB; flops (blocks + 4)^2 D, nothing. The
floor is latency: a dependent kernel in a graph is 0.57 us (H200). Target 1.2 us at one row and 1.8 at 8.
Measured in a chain of its like (one H200): 1.95 us with one block and 2.13 with eight at one row (4 warps, 14 blocks a
row), 2.32 and 2.84 at 8 rows (8 warps, 7 blocks); the Triton twin takes 3.65, 3.88, 4.21 and 4.53 there. Where the
time goes, by cutting a near relation of 2.17 us short (one block, 8 warps, the mix handed over in shared memory): wait
0.55, loads 0.30, products 0.48, exchange 0.42, sums 0.11, softmax, mix and norm 0.31. So the gap to the target is most
likely instructions: the products' operands take as many moves as products, and two warps share a scheduler.

Layout: a row is shared by a cluster of D / (128 ``warps``) blocks of threads. A warp takes 128 columns, twice. As an
operand of the matrix units: rows 0..7 are the blocks, 8 the prefix, 13..15 the score as three bf16 rows that sum to it
exactly; the product of this tile with its own transpose is every number that the row needs (``v_i . v_j``, ``v_j .
score``), summed over the warp without a shuffle. As 4 columns a thread of every source, for the mix. The norm of the
mix follows from the products, ``sum p_i p_j (v_i . v_j)``, so that the blocks exchange once: the sums of each go to
all others by stores that count their own bytes at the receiver's barrier. Then each warp does the softmax for itself.

Another form, of ``settled`` configurations where a block is settled: a thread has 8 columns, and the settled blocks are
read, scored and folded into one source before the wait, with an exchange of their own (``row_mix.py``). Behind the wait
a thread loads two fragments, prefix and delta, and the row exchanges four sums, however many blocks there are: 271
instructions from the wait to the end with one block and 267 with eight, where the form above has 538 and 700 (sm_90a,
4 warps). With 28 warps, for up to 4 blocks, a row is one block of threads, which exchanges nothing. On an H200 in a
chain of its like: 1.1 us with 4 warps, 1.2 with 7, 1.8 to 2.0 with 28; the form above takes 1.7 to 2.1.

Waits: barriers, ``score``, ``weight`` and settled blocks before the wait for the producers; fresh blocks, prefix and
delta after it (any earlier kernel may still be running before it, so they may not be read sooner). The trigger is the
first instruction. A block of the cluster is sent to after all of it has begun, and leaves after it has received all:
the cluster's second barrier, entered after the exchange, holds what the exchange already implies.
Numerics: products of bf16 are exact, sums and the folded source fp32, ``p`` is rounded to bf16 before it is used, ``h``
once.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64

from ..compiler.call import Call
from .attn_res_menu import AHEAD_COLUMNS, BLOCKS, CLUSTER, MOST_WARPS, WARP_COLUMNS, count_parts
from .launching import KernelLaunch, await_producers, named, row_stride, start_dependents
from .mailbox import sum_over_lanes
from .primitives import (
    address,
    exp,
    lane_value,
    load_shared,
    load_words,
    maximum,
    mma,
    pack,
    peer_address,
    rsqrt,
    select,
    send,
    store_shared,
    store_words,
    sum_lanes,
    total,
    unpack,
)
from .row_mix import Row, await_sums, dot, fold, folded, mixed, open_row, share

# fp32 sums of one warp or block: the product's columns 0..7 as the matrix units leave them (4 a lane), then of its
# column 8, the prefix's, rows 8..15
SUMS = 136
PREFIX = 8  # row of the prefix
SCORE = 13  # first row of the score
FRAGMENTS = WARP_COLUMNS // 32  # 16-byte loads of a lane for one row


@dataclass(frozen=True)
class Parameters:
    """Sizes and strides in elements."""

    columns: int
    warps: int
    parts: int  # blocks of a cluster
    blocks: int
    eps: float
    norm_eps: float
    stride_prefix: int
    stride_delta: int
    stride_block: int
    stride_p: int
    stride_h: int
    has_delta: bool
    has_p: bool
    norm: bool
    dependent: bool

    @property
    def part(self) -> int:
        return self.warps * WARP_COLUMNS

    @property
    def even(self) -> bool:
        return self.parts * self.part == self.columns

    @property
    def inbox(self) -> int:
        """Byte offset of what the blocks of the cluster send, behind the barrier and the warps' sums."""
        return 16 + 4 * SUMS * self.warps

    @property
    def gram(self) -> int:
        return self.inbox + 4 * SUMS * self.parts

    @property
    def shared(self) -> int:
        return self.gram + 4 * SUMS


def _bytes(row: Any, stride: int, column: Any) -> Any:
    """Byte offset of a bf16 element."""
    return (Int64(row) * stride + Int64(column)) * 2


def _score_words(score: Any, column: Any, r: Any, p: Parameters) -> list[Any]:
    """8 elements of the score as the lane's row of the tile has them: its leading, middle or last 8 bits."""
    wanted = (r >= SCORE - 8) & _inside(column, p)
    at = score + Int64(column) * 4
    words = load_words(at, guard=wanted, stream=True) + load_words(at + 16, guard=wanted, stream=True)
    exact = [word.bitcast(Float32) for word in words]
    leading = unpack(pack(exact))
    rest = [x - first for x, first in zip(exact, leading, strict=True)]
    middle = unpack(pack(rest))
    pieces = [select(r == SCORE - 8, first, select(r == SCORE - 7, second, x - second))
              for first, second, x in zip(leading, middle, rest, strict=True)]
    return pack(pieces)


def _inside(column: Any, p: Parameters) -> Any:
    return column < p.columns


def _products(tile: list[tuple[list[Any], list[Any]]]) -> tuple[list[Any], list[Any]]:
    """The tile (rows 0..7 and rows 8..15 of each fragment) times its transpose: columns 0..7 and 8..15."""
    sums = [[[Float32(0.0)] * 4 for _ in range(2)] for _ in range(2)]
    for first, second in tile:
        for step in range(2):
            a = [first[2 * step], second[2 * step], first[2 * step + 1], second[2 * step + 1]]
            sums[step][0] = mma(a, first[2 * step : 2 * step + 2], sums[step][0])
            sums[step][1] = mma(a, second[2 * step : 2 * step + 2], sums[step][1])
    return tuple([x + y for x, y in zip(sums[0][n], sums[1][n], strict=True)] for n in range(2))  # type: ignore


def _weights(gram: Any, lane: Any, p: Parameters) -> tuple[list[Any], Any, Any]:
    """exp(s_j - max s) of each source, their sum, and the square sum of the mix with these weights, in every lane.

    Lane j works for source j of 0..8; the upper half of the warp repeats the lower.
    """
    sources = [*range(p.blocks), PREFIX]
    j = lane % 16
    j = select(j > PREFIX, Int32(PREFIX), j)
    last = j == PREFIX
    pair = (j // 2) * 4 + j % 2
    row = gram + 4 * select(last, Int32(2), 16 * j)
    own = [load_shared(row + 4 * ((i // 2) * 4 + i % 2)) for i in range(p.blocks)]
    own.append(load_shared(gram + 4 * select(last, Int32(128), pair + 2)))
    square = load_shared(gram + 4 * select(last, Int32(128), 16 * j + pair))
    first = gram + 4 * select(last, Int32(128 + SCORE - 8), 16 * (SCORE - 8) + pair + 2)
    step = 4 * select(last, Int32(1), Int32(16))
    score = load_shared(first) + load_shared(first + step) + load_shared(first + 2 * step)
    score = score * rsqrt(square * (1.0 / p.columns) + p.eps)
    largest = maximum([lane_value(score, i) for i in sources])
    mine = exp(score - largest)
    weights = [lane_value(mine, i) for i in sources]
    real = (lane % 16 < p.blocks) | (lane % 16 == PREFIX)
    part = mine * total([weight * product for weight, product in zip(weights, own, strict=True)])
    return weights, total(weights), sum_lanes(select(real, part, Float32(0.0)), 16)


@cute.kernel
def _attn_res(arguments: Any, names: cutlass.Constexpr, p: cutlass.Constexpr):
    at = named(names, arguments)
    start_dependents(p.dependent)
    thread, _, _ = cute.arch.thread_idx()
    part, row, _ = cute.arch.block_idx()
    lane = thread % 32
    warp = thread // 32
    r = lane // 4
    first = part * p.part + warp * WARP_COLUMNS + (lane % 4) * 8
    own = part * p.part + thread * 4
    barrier = cute.arch.get_dyn_smem(Int64, 16)
    base = address(barrier)
    inbox = base + p.inbox
    gram = base + p.gram

    if cutlass.const_expr(p.parts > 1):
        if thread == 0:
            cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, 4 * SUMS * p.parts)
        cute.arch.cluster_arrive()
    scores = [_score_words(address(at.score), first + 32 * g, r, p) for g in range(FRAGMENTS)]
    weight = [Int32(0), Int32(0)]
    if cutlass.const_expr(p.norm):
        weight = load_words(address(at.weight) + Int64(own) * 2, 2, guard=_inside(own, p), stream=True)
    if cutlass.const_expr(p.parts > 1):
        cute.arch.cluster_wait()
    await_producers(p.dependent)

    # the tile first: its products are what everything else waits for
    sources = [address(getattr(at, f"b{i}")) for i in range(p.blocks)]
    block = sources[0]
    for i in cutlass.range_constexpr(1, p.blocks):
        block = select(r == i, sources[i], block)
    block = block + _bytes(row, p.stride_block, first)
    prefix = address(at.prefix) + _bytes(row, p.stride_prefix, first)
    delta = address(at.delta) + _bytes(row, p.stride_delta, first)
    lower = []
    upper = []
    added = []
    for g in cutlass.range_constexpr(FRAGMENTS):
        inside = _inside(first + 32 * g, p)
        lower.append(load_words(block + 64 * g, guard=None if p.even else inside))
        upper.append(load_words(prefix + 64 * g, guard=(r == 0) & inside))
        if cutlass.const_expr(p.has_delta):
            added.append(load_words(delta + 64 * g, guard=(r == 0) & inside))
    here = None if p.even else _inside(own, p)
    mixed = [load_words(source + _bytes(row, p.stride_block, own), 2, guard=here) for source in sources]
    newest = load_words(address(at.prefix) + _bytes(row, p.stride_prefix, own), 2, guard=here)
    if cutlass.const_expr(p.has_delta):
        more = load_words(address(at.delta) + _bytes(row, p.stride_delta, own), 2, guard=here)
        newest = pack([x + y for x, y in zip(unpack(newest), unpack(more), strict=True)])
        upper = [pack([x + y for x, y in zip(unpack(x), unpack(y), strict=True)])
                 for x, y in zip(upper, added, strict=True)]
    tile = [(lower[g], [select(r == 0, x, y) for x, y in zip(upper[g], scores[g], strict=True)])
            for g in range(FRAGMENTS)]
    left, right = _products(tile)

    mine = base + 16 + 4 * SUMS * warp
    store_shared(mine + 16 * lane, left)
    store_shared(mine + 512 + 4 * r, right[2:3], guard=lane % 4 == 0)
    cute.arch.sync_threads()
    # every thread of the block has read prefix and delta
    if cutlass.const_expr(p.has_p):
        store_words(address(at.p) + _bytes(row, p.stride_p, own), newest, guard=here)
    for start in cutlass.range_constexpr(0, SUMS // 4, p.warps * 32):
        quad = thread + start
        if quad < SUMS // 4:
            warps = [load_shared(base + 16 + 4 * SUMS * w + 16 * quad, 4) for w in range(p.warps)]
            sums = [total(list(values)) for values in zip(*warps, strict=True)]
            # a block alone is no cluster: it has no use for the cluster's instructions, and no right to them
            if cutlass.const_expr(p.parts == 1):
                store_shared(inbox + 16 * quad, sums)
            for peer in range(p.parts if p.parts > 1 else 0):
                place = peer_address(inbox + 4 * SUMS * part + 16 * quad, Int32(peer))
                send(place, sums, peer_address(base, Int32(peer)))
    if cutlass.const_expr(p.parts > 1):
        cute.arch.mbarrier_wait(barrier, 0)
        cute.arch.cluster_arrive_relaxed()
    else:
        cute.arch.sync_threads()
    for start in cutlass.range_constexpr(0, SUMS, p.warps * 32):
        index = thread + start
        if index < SUMS:
            store_shared(gram + 4 * index,
                         [total([load_shared(inbox + 4 * (SUMS * i + index)) for i in range(p.parts)])])
    cute.arch.sync_threads()

    weights, whole, square = _weights(gram, lane, p)
    mix = [Float32(0.0)] * 4
    for weight_j, words in zip(weights, [*mixed, newest], strict=True):
        mix = [x + weight_j * value for x, value in zip(mix, unpack(words), strict=True)]
    if cutlass.const_expr(p.norm):
        # the weights' sum is divided out inside the root
        mean = cute.arch.fmax(square, Float32(0.0)) * (1.0 / p.columns)
        scale = rsqrt(mean + p.norm_eps * whole * whole)
        mix = [x * scale * factor for x, factor in zip(mix, unpack(weight), strict=True)]
    else:
        mix = [x / whole for x in mix]
    store_words(address(at.h) + _bytes(row, p.stride_h, own), pack(mix), guard=here)
    if cutlass.const_expr(p.parts > 1):
        cute.arch.cluster_wait()


@dataclass(frozen=True)
class Ahead(Row):
    """What the form for settled blocks is compiled for; strides in elements."""

    stride_prefix: int
    stride_delta: int
    stride_block: int
    stride_p: int
    stride_h: int
    has_delta: bool
    has_p: bool
    dependent: bool


@cute.kernel
def _attn_res_ahead(arguments: Any, names: cutlass.Constexpr, p: cutlass.Constexpr):
    start_dependents(p.dependent)
    thread, _, _ = cute.arch.thread_idx()
    part, row, _ = cute.arch.block_idx()
    if cutlass.const_expr(p.cluster > 1):
        if thread == 0:
            open_row(p)
        cute.arch.cluster_arrive_relaxed()
    _mix_ahead(named(names, arguments), thread, part, row, p)
    if cutlass.const_expr(p.cluster > 1):
        cute.arch.cluster_wait()


def _mix_ahead(at: Any, thread: Any, part: Any, row: Any, p: Ahead) -> None:
    """The columns of a thread: settled blocks before the wait, what is fresh behind it."""
    lane, warp = thread % 32, part * p.warps + thread // 32
    column = (part * p.threads + thread) * 8
    real = None if p.cluster * p.threads * 8 == p.width else column < p.width
    column = column if real is None else select(real, column, Int32(p.width - 8))

    def load(pointer: Any, stride: int, *, settled: bool = False) -> list[Any]:
        return load_words(address(pointer) + _bytes(row, stride, column), settled=settled)

    def own(words: list[Any]) -> list[Any]:
        """A thread beyond the row counts for nothing."""
        return words if real is None else [select(real, word, Int32(0)) for word in words]

    weight = load_words(address(at.weight) + Int64(column) * 2) if p.out_eps is not None else []
    score = [word.bitcast(Float32) for half in (0, 16)
             for word in load_words(address(at.score) + Int64(column) * 4 + half)]
    if real is not None:
        score = [select(real, s, Float32(0.0)) for s in score]
    ready = [load(getattr(at, f"b{i}"), p.stride_block, settled=True) for i in p.folded]
    if p.cluster > 1:
        cute.arch.cluster_wait()
    fold([own(words) for words in ready], score, thread, warp, p)
    await_producers(p.dependent)

    newest = load(at.prefix, p.stride_prefix)
    more = load(at.delta, p.stride_delta) if p.has_delta else []
    fresh = [load(getattr(at, f"b{i}"), p.stride_block) for i in p.fresh]
    base = folded(thread, p)
    if p.has_delta:
        newest = pack([x + y for x, y in zip(unpack(newest), unpack(more), strict=True)])
    guard = None if real is None else Int32(real)
    if p.has_p:
        store_words(address(at.p) + _bytes(row, p.stride_p, column), newest, guard=guard)
    columns = {**{i: unpack(own(words)) for i, words in zip(p.fresh, fresh, strict=True)},
               **dict(zip(p.names, (unpack(own(newest)), score, base.columns), strict=True))}
    area, sums = p.area(True), address(cute.arch.get_dyn_smem(Int64, 16))
    late = sum_over_lanes([dot(columns[i], columns[j]) for i, j in area.pairs], lane)
    share(late, len(area.pairs), sums, warp, 0, lane, area, p)
    await_sums(area, p)
    if p.cluster > 1:
        cute.arch.cluster_arrive_relaxed()
    mix = mixed([columns[i] for i in p.fresh], columns[p.names[0]], base, thread, p)
    if p.out_eps is not None:
        mix = [x * factor for x, factor in zip(mix, unpack(weight), strict=True)]
    store_words(address(at.h) + _bytes(row, p.stride_h, column), pack(mix), guard=guard)


def bind(call: Call) -> KernelLaunch:
    """The launch for ``call``: attention residuals with or without the add and the norm."""
    prefix, score, h = call.tensors["prefix"], call.tensors["score"], call.tensors["h"]
    rows, columns = prefix.shape
    settled = tuple(call.config.get("settled", False) and f"...{i}" in call.settled for i in range(len(call.rest)))
    assert 1 <= len(call.rest) <= BLOCKS, f"{len(call.rest)} blocks"
    strides = {row_stride(block) for block in call.rest}
    assert len(strides) == 1, f"blocks with strides {strides}"
    norm, p, delta = "m" in call.attrs, call.get("p"), call.get("delta")
    tensors = {
        "prefix": prefix, "delta": prefix if delta is None else delta, "score": score,
        "weight": call.tensors["weight"] if norm else score, "p": h if p is None else p, "h": h,
        **{f"b{i}": block for i, block in enumerate(call.rest)},
    }
    for name, tensor in tensors.items():
        wanted = torch.float32 if name == "score" or (name == "weight" and not norm) else torch.bfloat16
        assert tensor.dtype == wanted, f"{name} is {tensor.dtype}"
        assert row_stride(tensor) % 8 == 0 if tensor.dim() > 1 else tensor.is_contiguous(), f"{name} {tensor.stride()}"
        assert tensor.is_meta or tensor.data_ptr() % 16 == 0, f"{name} begins at {tensor.data_ptr():#x}"
    eps, norm_eps, warps = call.attrs["m" if norm else "h"]["eps"], call.attrs["h"]["eps"], call.config["warps"]
    common: dict[str, Any] = dict(
        stride_prefix=row_stride(prefix), stride_delta=row_stride(tensors["delta"]), stride_block=strides.pop(),
        stride_p=row_stride(tensors["p"]), stride_h=row_stride(h), has_delta=delta is not None, has_p=p is not None,
        dependent=call.dependent_launch,
    )
    if any(settled):
        cluster = -(-columns // (warps * AHEAD_COLUMNS))
        ahead = Ahead(width=columns, blocks=len(call.rest), cluster=cluster, threads=32 * warps, eps=eps,
                      out_eps=norm_eps if norm else None, settled=settled, **common)
        return KernelLaunch(_attn_res_ahead, (cluster, rows, 1), ahead.threads, tensors, ahead, cluster=(cluster, 1, 1),
                            shared=ahead.shared, dependent=call.dependent_launch)
    # a row by one block of threads is for settled blocks only
    warps = min(warps, MOST_WARPS)
    parts = count_parts(warps, columns)
    assert parts <= CLUSTER, f"{parts} blocks share a row, a cluster has {CLUSTER}"
    parameters = Parameters(columns=columns, warps=warps, parts=parts, blocks=len(call.rest), eps=eps,
                            norm_eps=norm_eps, norm=norm, **common)
    return KernelLaunch(_attn_res, (parts, rows, 1), 32 * parameters.warps, tensors, parameters,
                        cluster=(parts, 1, 1), shared=parameters.shared, dependent=call.dependent_launch)
