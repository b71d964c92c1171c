"""Sum over ranks, residual add, attention residuals and norm in one launch; a cluster for each row.

Contract: see ``all_reduce_attn_res_menu.py`` for the patterns. ``x`` bf16 [T, D] is this rank's part of a sum over
ranks; ``y = bf16(sum)``, ``p = bf16(prefix + y)`` (``p = y`` where a block of layers begins); with the finished blocks
bf16 [T, D] (``rest``, oldest first) and ``score`` fp32 [D]: ``s_j = (v_j . score) rsqrt(mean v_j^2 + eps)``, softmax
over blocks and p, mix, ``h = mix rsqrt(mean mix^2 + out_eps) weight``. ``p`` and ``h`` may be the storage of
``prefix``. All ranks add in the order of the ranks and so have the same bits.

Layout: a row is a cluster of ``cluster`` blocks; a thread has 8 columns, one fragment of 16 bytes. Products, softmax
and norm are those of ``row_mix.py``. Products of the blocks alone are made while the parts of the other ranks travel;
when they have come only the products with p are new. In a ``settled`` configuration blocks that are settled, and a
settled prefix, are read and folded before the wait for the producers, so that the four sums are all that the row
exchanges when the parts have come; its own part a rank then publishes behind the fold. On an H200 in loopback it takes
as long as the other, 2.6 to 2.7 us alone and 4.2 in the step. Where nothing is settled it is the other form to the
instruction. Sums go to every block of the cluster by stores whose bytes a barrier there counts (a cluster barrier would
have to wait for the stores to the other ranks as well).

Parts travel in one shot, each to every rank, or in two: each to the rank that owns its columns, and the sum from there
to every rank. Two shots cost a hop and send 2/ranks of the bytes.

Waits: (0) "parts of a row" of each rank, after this rank has published its own; (1) with two shots "sums of a row". A
block waits for no other block of its rank but those of its cluster, which the hardware starts together, and publishes
before it waits; so a launch with one shot ends once every rank has begun its own. With two a row waits for the same
row of the other ranks: blocks start in the order of the rows, so that the lowest unfinished row runs everywhere. The
launch for all ranks of one process needs all blocks resident at once (``bind`` checks it); where they do not fit,
publishing, summing and collecting are launches of their own.
Epochs: one for each block, as ``mailbox.py`` says. Weights, and what is settled, are loaded before the wait for the
producers.
The last act is a cluster barrier: no block leaves while another may still write to it.
Numerics: bf16 parts, fp32 sums in the order of the ranks, one rounding each of y, p and h; products and softmax fp32,
exp and rsqrt by the hardware's approximations (2 ulp).
Measured in loopback on one H200, TP8, with dependent launch: one row and 1 block 2.0 us, 8 blocks 2.9; 2 rows 2.1 and
3.0; the Triton twin 5.8 and 6.6 (one row). Compared there with one and two shots at TP 8 and 16, 1 to 64 rows, all
ranks of a group and in loopback.
"""
# ruff: noqa: SIM102 - what is known while the kernel is traced stands alone
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64

from ..compiler.call import Call, Launch, Link
from ..compiler.launches import LaunchSequence
from .all_reduce_attn_res_menu import message
from .launching import KernelLaunch, await_producers, row_stride, start_dependents
from .mailbox import (
    Addresses,
    Mailbox,
    addresses,
    columns_of,
    fits_at_once,
    hold_back,
    rounded,
    row_bytes,
    sum_over_lanes,
)
from .primitives import address, load_words, pack, select, store_words, unpack
from .protocol import FRAGMENT_WORDS, PROTOCOL
from .row_mix import LANES, Row, await_sums, dot, fold, folded, mixed, open_row, share

WAITS = ("parts of a row", "sums of a row")
MIXED = ("score", "weight", "h", "p", "prefix")  # tensors of ``mix_row`` beside the blocks
WHOLE, PUBLISH, COLLECT, REDUCE = 0, 1, 2, 3


@dataclass(frozen=True)
class Config:
    """Blocks of a row, threads of each, and hops of the sum. ``settled``: what is settled is read before the wait."""

    cluster: int
    threads: int
    shots: int = 1
    settled: bool = False


@dataclass(frozen=True)
class Static(Row):
    """What the kernel is compiled for."""

    columns: tuple[str, ...]  # of the address table
    rows: int
    ranks: int
    slot: int  # bytes
    shots: int
    add: bool  # there is a prefix
    keep: bool  # p is read outside
    stride_x: int  # elements between rows
    stride_prefix: int
    stride_block: int
    stride_p: int
    stride_h: int
    phase: int
    limit: int
    dependent: bool
    settled_prefix: bool
    multicast: bool = False
    # where a row comes finished and not in parts: fragments of it from each rank, and the first of them in a slot
    stripe: int = 0
    base: int = 0

    @property
    def owned(self) -> int:
        """Fragments of a row that one rank sums, with two shots."""
        return self.width // 8 // self.ranks


def mix_row(at: Addresses, thread: Any, part: Any, row: Any, block: Any, p: Static, *, publish: bool) -> None:
    """A block's part of a row: sum, residual, mix and norm. ``publish``: the rank's own part is the tensor ``x`` and is
    sent from here; otherwise other blocks of the rank send it, with ``p.stripe`` as finished columns that other blocks
    arm as well. ``block``: whose epoch counts."""
    last = p.phase in (WHOLE, COLLECT)
    if last:
        cute.arch.cluster_arrive_relaxed()
    fragments = p.width // 8
    fragment = part * p.threads + thread
    real = fragment < fragments if p.cluster * p.threads != fragments else None
    if real is not None:
        fragment = select(real, fragment, Int32(fragments - 1))
    column, guard = Int64(fragment) * 16, None if real is None else Int32(real)
    owner = fragment // p.owned if p.shots == 2 else fragment // p.stripe if p.stripe else None
    peer = at.peer(owner) if p.shots == 2 else None
    weight = load_words(at["weight"] + column)
    score = [word.bitcast(Float32) for half in (0, 16) for word in load_words(at["score"] + 2 * column + half)]

    def source(name: str, stride: int, *, settled: bool) -> list[Any]:
        return load_words(at[name] + Int64(row) * (2 * stride) + column, settled=settled)

    prefix = source("prefix", p.stride_prefix, settled=True) if last and p.add and p.settled_prefix else []
    if last and p.folded:
        _fold(source, score, real, thread, part, p)
    await_producers(p.dependent)

    # everything but the parts of the other ranks is on its way before anything is needed
    x = source("x", p.stride_x, settled=False) if publish else []
    box = Mailbox(at, ranks=p.ranks, slot=p.slot, block=block, limit=p.limit, multicast=p.multicast)
    held = []
    if last:
        held = [source(f"block{i}", p.stride_block, settled=False) for i in p.fresh]
        prefix = source("prefix", p.stride_prefix, settled=False) if p.add and not p.settled_prefix else prefix
    each = p.owned if p.shots == 2 else p.stripe
    where = row * fragments + fragment if owner is None else p.base + row * each + fragment - owner * each
    if publish and p.phase in (WHOLE, PUBLISH):
        box.send(where, x, peer, guard=guard)
    if p.phase == REDUCE:
        _reduce(box, where, owner, real, p)
    if not last:
        return
    if publish:
        flat = hold_back([word for words in held for word in words], box.epoch, box.epochs)
        held = [flat[i : i + 4] for i in range(0, len(flat), 4)]
    if real is not None:
        score = [select(real, s, Float32(0.0)) for s in score]
        held = [[select(real, word, Int32(0)) for word in words] for words in held]
    kept, h = _mix(box, thread, part, (where, owner), score, [unpack(w) for w in held], unpack(prefix), real, p)
    if p.keep:
        store_words(at["p"] + Int64(row) * (2 * p.stride_p) + column, kept, guard=real)
    h = pack([m * w for m, w in zip(h, unpack(weight), strict=True)])
    store_words(at["h"] + Int64(row) * (2 * p.stride_h) + column, h, guard=real)
    box.count(Int32(thread == 0))
    cute.arch.cluster_wait()


def _fold(source: Callable[..., list[Any]], score: list[Any], real: Any, thread: Any, part: Any, p: Static) -> None:
    """The settled blocks, read and folded before the wait for the producers."""
    words = [source(f"block{i}", p.stride_block, settled=True) for i in p.folded]
    if real is not None:
        score = [select(real, s, Float32(0.0)) for s in score]
        words = [[select(real, word, Int32(0)) for word in some] for some in words]
    cute.arch.cluster_wait()
    fold(words, score, thread, part * p.warps + thread // LANES, p)


def _reduce(box: Mailbox, where: Any, owner: Any, real: Any, p: Static) -> None:
    """With two shots: the sum of the fragments that are this rank's, to all ranks, by the threads that have one."""
    mine = owner == Int32(box.rank)
    guard = Int32(mine if real is None else mine & real)
    looked = [box.look(sender, where, guard) for sender in range(p.ranks)]
    for sender in range(p.ranks):
        box.arm(sender, where, guard)
    box.send(where + p.rows * p.owned, pack(_sum(box, looked, 0)), guard=guard)


def _sum(box: Mailbox, looked: Sequence[Any], wait: int) -> list[Any]:
    """The 8 columns of a fragment, summed over the looks in their order."""
    received = box.wait(looked)
    box.report(list(enumerate(received)), wait)
    y = unpack(received[0])
    for words in received[1:]:
        y = [a + b for a, b in zip(y, unpack(words), strict=True)]
    return y


def _await_sum(box: Mailbox, where: Any, owner: Any, real: Any, p: Static) -> list[Any]:
    """The 8 columns of a thread, summed over the ranks."""
    guard = None if real is None else Int32(real)
    if p.stripe:
        (words,) = box.wait([box.look(owner, where)])
        box.report([(owner, words)], 2)
        return unpack(words)
    if p.shots == 1:
        looked = [box.look(sender, where) for sender in range(p.ranks)]
        for sender in range(p.ranks):
            box.arm(sender, where, guard)
        return _sum(box, looked, 0)
    if p.phase == WHOLE:
        _reduce(box, where, owner, real, p)
    look = box.look(owner, where + p.rows * p.owned)
    box.arm(owner, where + p.rows * p.owned, guard)
    (words,) = box.wait([look])
    box.report([(owner, words)], 1)
    return unpack(words)


def _mix(box: Mailbox, thread: Any, part: Any, place: tuple[Any, Any], score: list[Any], sources: list[list[Any]],
         prefix: list[Any], real: Any, p: Static) -> tuple[list[Any], list[Any]]:
    """The new prefix of a thread's columns, 4 words, and their mix times the norm's factor, 8 fp32. ``sources`` are the
    fresh blocks."""
    lane, warp = thread % LANES, part * p.warps + thread // LANES
    sums, area = address(cute.arch.get_dyn_smem(Int64, 16)), p.area(True)
    columns = {**dict(zip(p.fresh, sources, strict=True)), p.names[1]: score}
    base = folded(thread, p) if p.folded else None
    if base:
        columns[p.names[2]] = base.columns
    early = sum_over_lanes([dot(columns[i], columns[j]) for i, j in p.middle], lane)
    if not base:
        cute.arch.cluster_wait()
    share(early, len(p.middle), sums, warp, 0, lane, area, p)

    y = _await_sum(box, *place, real, p)
    if p.add:
        y = [a + b for a, b in zip(rounded(y), prefix, strict=True)]
    kept = pack(y)
    last = columns[p.names[0]] = unpack(kept if real is None else [select(real, word, Int32(0)) for word in kept])
    late = [dot(columns[i], columns[j]) for i, j in p.last]
    share(sum_over_lanes(late, lane), len(late), sums, warp, len(p.middle), lane, area, p)
    await_sums(area, p)
    cute.arch.cluster_arrive_relaxed()
    return kept, mixed(sources, last, base, thread, p)


@cute.kernel
def _all_reduce_attn_res(arguments: Any, names: cutlass.Constexpr, p: cutlass.Constexpr):
    start_dependents(p.dependent)
    thread, _, _ = cute.arch.thread_idx()
    part, index, row = cute.arch.block_idx()
    if cutlass.const_expr(p.phase in (WHOLE, COLLECT) and p.cluster > 1):
        if thread == 0:
            open_row(p)
    at = Addresses(arguments, names, p.columns, index)
    mix_row(at, thread, part, row, row * p.cluster + part, p, publish=True)


def static_of(calls: Sequence[Call], links: Sequence[Link], config: Config, fragments: int, *,
              multicast: bool) -> Static:
    """What a kernel that ends in ``mix_row`` is compiled for, with ``fragments`` in a slot. Checks that the plan's
    shapes and addresses allow it."""
    first = calls[0]
    h, p, prefix = first.tensors["h"], first.get("p"), first.get("prefix")
    rows, width = h.shape
    parities, ranks, slot = first.scratch["mailbox"].shape
    assert parities == PROTOCOL.parities, f"mailbox of {parities} parts"
    assert width % 8 == 0, f"rows of {width}"
    assert slot >= FRAGMENT_WORDS * fragments, f"{fragments} fragments, slot of {slot} words"
    assert config.shots == 1 or width // 8 % ranks == 0, f"{width // 8} fragments over {ranks} ranks"
    assert all(len(link.peers) == ranks for link in links), f"links to {[len(k.peers) for k in links]} of {ranks} ranks"
    assert config.cluster * config.threads >= width // 8, f"{config} for {width // 8} fragments"
    assert not multicast or len(calls) == 1, "a process with several ranks has no multicast address"
    strides = {row_stride(block) for block in first.rest}
    assert len(strides) == 1, f"blocks with strides {strides}"
    return Static(
        columns=(), rows=rows, width=width, blocks=len(first.rest), ranks=ranks, slot=4 * slot, cluster=config.cluster,
        threads=config.threads, shots=config.shots, add=prefix is not None, keep=p is not None,
        eps=first.attrs["m"]["eps"], out_eps=first.attrs["h"]["eps"], stride_x=0,
        settled=tuple(config.settled and f"...{i}" in first.settled for i in range(len(first.rest))),
        settled_prefix=config.settled and "prefix" in first.settled,
        stride_prefix=0 if prefix is None else row_stride(prefix),
        stride_block=strides.pop(), stride_p=0 if p is None else row_stride(p), stride_h=row_stride(h), phase=WHOLE,
        limit=first.wait_limit, dependent=first.dependent_launch, multicast=multicast)


def tensors_of(calls: Sequence[Call], names: Sequence[str]) -> list[dict[str, torch.Tensor]]:
    """Of each rank the tensors of ``names`` that it has, and its blocks; all on 16 bytes."""
    found = []
    for call in calls:
        own = {name: call.tensors[name] for name in names if call.get(name) is not None}
        own |= {f"block{i}": block for i, block in enumerate(call.rest)}
        misaligned = [name for name, tensor in own.items() if tensor.data_ptr() % 16 or row_bytes(tensor) % 16]
        assert not misaligned, f"{misaligned} do not lie on 16 bytes"
        found.append(own)
    return found


def bind(calls: Sequence[Call], links: Sequence[Link], *, multicast: int = 0) -> Launch:
    """The launch for the ranks of this process; ``links`` are those of their mailboxes. ``multicast``: the address at
    which one store reaches the mailboxes of all ranks, where the device has one."""
    x, config = calls[0].tensors["x"], Config(**calls[0].config)
    tensors = tensors_of(calls, ("x", *MIXED))
    wanted = message(x.shape[0], x.shape[1] // 8, len(links[0].peers), config.shots)
    static = static_of(calls, links, config, wanted, multicast=bool(multicast))
    static = replace(static, stride_x=row_stride(x), columns=columns_of(tuple(tensors[0]), static.ranks))
    grid, cluster = (config.cluster, len(calls), x.shape[0]), (config.cluster, 1, 1)
    launch = KernelLaunch(_all_reduce_attn_res, grid, config.threads, addresses(calls, links, tensors, multicast),
                          static, cluster=cluster, shared=static.shared, dependent=static.dependent)
    if len(calls) == 1 or fits_at_once(len(calls) * config.cluster * x.shape[0], x.device):
        return launch
    phases = (PUBLISH, COLLECT) if static.shots == 1 else (PUBLISH, REDUCE, COLLECT)
    return LaunchSequence(tuple(replace(launch, parameters=replace(static, phase=phase)) for phase in phases))
