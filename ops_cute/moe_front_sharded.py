"""The sharded front of a sparse layer in one launch: projections, SiTU, both gathers and the exact top-k; 1 to 8 rows.

Contract: ``x`` bf16 [T, K] on every rank; a rank's rows of ``router`` bf16 [E / ranks, K] and of ``weight`` bf16 [P +
2 A, K]: P rows of the latent, then gate and up of the shared experts; ``bias`` fp32 [E]. Results: ``a`` bf16 [T, A] of
this rank, ``latent`` bf16 [T, P ranks], ``ids`` i32 and ``weights`` fp32 [T, k] of all experts, equal on all ranks.

Layout: the blocks of ``moe_front.py``; what is to be gathered goes from the finishing warp's registers into the
mailboxes of all ranks (``mailbox.py``), this one's too: of a token, a unit of the router is two fragments (4 logits
each) and a unit of the latent is one (8 numbers). Of block ``blocks - 1 - t`` the warps that have multiplied wait for
the logits of row t, a fragment a lane, and choose; one warp of the first blocks copies 32 fragments of the latent each.

Waits: (0) "logits of a row", (1) "latent of a row". No block waits for another block of its launch but through what
all ranks send, and the warps that send never wait; so a launch ends once every rank has begun its own and all blocks
of a rank run at once: there is one for each multiprocessor. For several ranks of one process, which do not fit,
sending and collecting are two launches. The weights are on their way before the wait for the producers.
Epochs: one for each block, as ``mailbox.py`` says, counted by the warp that collects after all that use it have read
it.
Numerics: logits travel as fp32, the latent as bf16, rounded once; every rank chooses from the same bits.
Bytes of a TP16 rank of Kimi K3 at one row: 15.0 MB, floor 5.7 us on an H200 (2.35 us + bytes / 4.44 TB/s); 131 units
on 132 blocks, so that all the weights of the chip are in shared memory (115 KB a block) before x is there.
Measured in loopback on one H200, TP16, weights cold, with dependent launch: 5.8 us at one row, 6.0 at 2, 6.5 at 4, 7.9
at 8; with one warp that waited for seven fragments a lane in turn and chose alone, 10.3 and 16.8 (1 and 8 rows). One
row's logits are there 2.9 us after the wait for the producers, which is when the weights are; choosing took 1.4 us
before its divisions had no branches and four lanes shared a candidate. Compared there: TP16, 1 to 8 rows, in loopback
(ties of 16 experts among them) and all ranks in two launches, ids exact; 100 replays of 2 ranks with 60 blocks each,
one of them late.
``lean``: as many slots as a block has weights for, the top-k's memory over the ring once all warps have multiplied, and
half the chains of sums: 124 KB and 88 registers in place of 153 and 96, so that a block fits beside one of an o_proj of
96 KB and its weights arrive while KDA runs: the step is 0.5 % shorter at one row, 1 % at 8 verify rows (4.445 and
8.48 ms).
``pace``: so many slots on their way at once, as what the all-reduce before still wants stands in line behind all of a
ring: with 2 of 7 the all-reduce takes 3.6 us in a step in place of 4.2; with 1 the front itself takes 7.0 in place of
5.0.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64

from ..compiler.call import Call, Launch, Link
from ..compiler.launches import LaunchSequence
from .launching import KernelLaunch, await_producers, row_stride, start_dependents
from .mailbox import Addresses, Mailbox, addresses, columns_of
from .moe_front import (
    COPIER,
    EPOCH_READ,
    FINISHER,
    copy_units,
    multiply_units,
    start_ring,
    sum_unit,
)
from .moe_front_plan import THREADS, TILE, TOKENS, WARPS, Config
from .moe_front_plan import Static as Plan
from .moe_parts import multiprocessors, situ
from .moe_topk import choose, clear_keys
from .primitives import lane_value, lane_xor, load_words, pack, select, store_words
from .protocol import PROTOCOL

WAITS = ("logits of a row", "latent of a row")
WHOLE, PUBLISH, COLLECT = 0, 1, 2
MULTIPLIED = 3  # named barrier of the warps that multiply


@dataclass(frozen=True)
class Static(Plan):
    """The front's sizes (``router``, ``plain`` and ``pairs`` are one rank's), and how its results travel."""

    ranks: int
    table: tuple[str, ...]  # columns of the address table
    slot: int  # bytes
    stride_latent: int
    phase: int
    limit: int
    multicast: bool = False

    @property
    def of_logits(self) -> int:
        """Fragments of a row's logits from one rank."""
        return self.router // 4

    @property
    def of_latent(self) -> int:
        return self.plain // 8

    @property
    def fragments(self) -> int:
        """Of a row from one rank."""
        return self.of_logits + self.of_latent

    @property
    def readers(self) -> int:
        """Threads that read the epoch, in a block that does not route."""
        return 64 if self.phase == WHOLE else 32

    @property
    def routers(self) -> int:
        return -(-self.ranks * self.of_logits // 32)

    @property
    def keys(self) -> int:
        return 4 * self.routers


@cute.jit
def _send_units(at: Any, box: Any, block: Any, lane: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """One warp: adds up the warps' sums of a unit and sends them to every rank, or keeps the activations."""
    done = Int32(0)
    # a branch may not hold the mailbox itself, which is no value of the device
    send = box.send
    token, part = lane >> 2, lane & 3
    real = token < p.tokens
    for unit in cutlass.range(block, p.units, p.blocks, unroll=1):
        sums = sum_unit(done, lane, shared, where)
        others = [lane_xor(value, 1) for value in sums]
        word = pack(sums)[0]
        words = [lane_value(word, (lane & -4) + i) for i in range(4)]
        if unit < p.router_units:
            guard = select(real & ((part & 1) == 0), Int32(1), Int32(0))
            four = [value.bitcast(Int32) for value in (*sums, *others)]
            send(token * p.fragments + 2 * unit + (part >> 1), four, guard=guard)
        elif unit < p.router_units + p.plain_units:
            guard = select(real & (part == 0), Int32(1), Int32(0))
            send(token * p.fragments + p.of_logits + unit - p.router_units, words, guard=guard)
        else:
            pair = (unit - p.router_units - p.plain_units) * (TILE // 2) + 2 * (part & 1)
            ups = [lane_xor(value, 2) for value in sums]
            both = [situ(g, u, p.beta, p.linear_beta) for g, u in zip(sums, ups, strict=True)]
            store_words(at["a"] + Int64(token * p.stride_a + pair) * 2, pack(both),
                        guard=select(real & (part < 2), Int32(1), Int32(0)))
        done = done + 1


@cute.jit
def _epoch_is_read(block: Any, p: cutlass.Constexpr):
    """By a warp that uses the epoch, once it has: it may be counted up."""
    if block >= p.blocks - p.tokens:
        cute.arch.barrier_arrive(barrier_id=EPOCH_READ, number_of_threads=p.readers + 32 * p.routers, aligned=False)
    else:
        cute.arch.barrier_arrive(barrier_id=EPOCH_READ, number_of_threads=p.readers, aligned=False)


@cute.jit
def _await_readers(block: Any, p: cutlass.Constexpr):
    if block >= p.blocks - p.tokens:
        cute.arch.barrier(barrier_id=EPOCH_READ, number_of_threads=p.readers + 32 * p.routers)
    else:
        cute.arch.barrier(barrier_id=EPOCH_READ, number_of_threads=p.readers)


@cute.jit
def _clear_ring(block: Any, thread: Any, routes: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """By the warps that have multiplied, in a block that routes: once none of them reads the ring any more, and nothing
    is on its way there, the top-k's memory over it is made ready."""
    if block >= p.blocks - p.tokens:
        cute.arch.barrier(barrier_id=MULTIPLIED, number_of_threads=32 * WARPS)
        clear_keys(thread, routes, shared, where, p)


def _place_of_logits(thread: Any, p: Static) -> tuple[Any, Any]:
    """The sender of a thread's fragment of logits and its number among the sender's; the last for threads too many."""
    index = cutlass.min(thread, Int32(p.ranks * p.of_logits - 1))
    return index // p.of_logits, index % p.of_logits


@cute.jit
def _route(at: Any, bias: Any, block: Any, thread: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """Some warps of one block for each row: wait for the row's logits of all ranks and choose."""
    token = p.blocks - 1 - block
    box = Mailbox(at, ranks=p.ranks, slot=p.slot, block=block, limit=p.limit)
    sender, inside = _place_of_logits(thread, p)
    place = sender, token * p.fragments + inside
    (words,) = box.wait([box.look(*place)])
    box.report([(sender, words)], 0)
    cute.arch.sync_warp()
    real = select(thread < p.ranks * p.of_logits, Int32(1), Int32(0))
    first = 4 * (sender * p.of_logits + inside)
    choose([word.bitcast(Float32) for word in words], bias, [first + i for i in range(4)], [real] * 4, thread, shared,
           where, at["ids"] + Int64(token * p.top_k) * 4, at["weights"] + Int64(token * p.top_k) * 4, p)
    box.arm(*place, real)


@cute.jit
def _gather(at: Any, box: Any, block: Any, lane: Any, p: cutlass.Constexpr):
    """One warp of the first blocks: fragments of the latent from all ranks to their place."""
    look, wait, arm, report = box.look, box.wait, box.arm, box.report
    each = p.ranks * p.of_latent
    for index in cutlass.range(block * 32 + lane, p.tokens * each, p.blocks * 32, unroll=1):
        token, inside = index // each, index % each
        sender, fragment = inside // p.of_latent, inside % p.of_latent
        place = sender, token * p.fragments + p.of_logits + fragment
        (words,) = wait([look(*place)])
        report([(sender, words)], 1)
        arm(*place)
        column = sender * p.plain + fragment * 8
        store_words(at["latent"] + Int64(token * p.stride_latent + column) * 2, words)


@cute.kernel
def _moe_front_sharded(arguments: Any, names: cutlass.Constexpr, p: cutlass.Constexpr):
    start_dependents(p.dependent)
    thread, _, _ = cute.arch.thread_idx()
    block, index, _ = cute.arch.block_idx()
    at = Addresses(arguments, names, p.table, index)
    where = p.place()
    warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
    shared = cute.arch.get_dyn_smem(cutlass.Uint8, 128).toint()
    start_ring(thread, shared, where, p)
    if warp == COPIER:
        if cutlass.const_expr(p.phase != COLLECT):
            copy_units(at["router"], at["weight"], block, lane, shared, where, p)
    elif warp >= FINISHER:
        await_producers(p.dependent)
        box = Mailbox(at, ranks=p.ranks, slot=p.slot, block=block, limit=p.limit, multicast=p.multicast)
        count = box.count
        if warp == FINISHER:
            if cutlass.const_expr(p.phase != COLLECT):
                _send_units(at, box, block, lane, shared, where, p)
            if cutlass.const_expr(p.phase == WHOLE):
                _epoch_is_read(block, p)
        elif cutlass.const_expr(p.phase != PUBLISH):
            _gather(at, box, block, lane, p)
            cute.arch.sync_warp()
            _await_readers(block, p)
            count(select(lane == 0, Int32(1), Int32(0)))
    else:
        routes = select((block >= p.blocks - p.tokens) & (thread < 32 * p.routers), Int32(1), Int32(0))
        if cutlass.const_expr(p.phase != PUBLISH):
            sender, inside = _place_of_logits(thread, p)
            first = 4 * (sender * p.of_logits + inside)
            bias = [word.bitcast(Float32) for word in load_words(at["bias"] + Int64(first) * 4, guard=routes)]
            if cutlass.const_expr(not p.lean):
                clear_keys(thread, routes, shared, where, p)
        await_producers(p.dependent)
        if cutlass.const_expr(p.phase != COLLECT):
            multiply_units(at["x"], block, warp, lane, shared, where, p)
        if cutlass.const_expr(p.phase != PUBLISH):
            if cutlass.const_expr(p.lean):
                _clear_ring(block, thread, routes, shared, where, p)
            if routes != 0:
                _route(at, bias, block, thread, shared, where, p)
                _epoch_is_read(block, p)


def _static(call: Call, tensors: dict[str, torch.Tensor], ranks: int) -> Static:
    x, a, latent = tensors["x"], tensors["a"], tensors["latent"]
    router, columns = tensors["router"].shape
    attrs, activation, config = call.attrs["ids"], call.attrs["a"], Config(**call.config)
    pairs = a.shape[1]
    assert config.pace < config.slots, f"{config}"
    return Static(
        tokens=x.shape[0], columns=columns, router=router, plain=tensors["weight"].shape[0] - 2 * pairs, pairs=pairs,
        top_k=attrs["top_k"], blocks=multiprocessors(x.device), slots=config.slots, lean=config.lean, pace=config.pace,
        stride_x=row_stride(x), stride_f=0, stride_a=row_stride(a), beta=activation["beta"],
        linear_beta=activation["linear_beta"], renormalize=attrs["renormalize"], scaling=attrs["scaling"],
        dependent=call.dependent_launch, ranks=ranks, table=columns_of(tuple(tensors), ranks),
        slot=4 * call.scratch["mailbox"].shape[2], stride_latent=row_stride(latent), phase=WHOLE,
        limit=call.wait_limit)


def bind(calls: Sequence[Call], links: Sequence[Link]) -> Launch:
    """The launch for the ranks of this process; ``links`` are those of their mailboxes."""
    first = calls[0]
    parities, ranks, _ = first.scratch["mailbox"].shape
    assert parities == PROTOCOL.parities, f"mailbox of {parities} parts"
    assert all(len(link.peers) == ranks for link in links), f"links to {[len(k.peers) for k in links]} of {ranks} ranks"
    names = ("x", "router", "weight", "bias", "a", "latent", "ids", "weights")
    tensors = [{name: call.tensors[name] for name in names} for call in calls]
    for named in tensors:
        for name in ("router", "weight", "bias", "ids", "weights"):
            assert named[name].is_contiguous(), f"{name} {named[name].shape} {named[name].stride()}"
        misaligned = [name for name in ("x", "latent") if named[name].data_ptr() % 16 or row_stride(named[name]) % 8]
        assert not misaligned, f"{misaligned} do not lie on 16 bytes"
    static = _static(first, tensors[0], ranks)
    assert TOKENS >= static.tokens <= static.blocks, f"{static.tokens} rows, {static.blocks} multiprocessors"
    assert static.slot >= static.tokens * static.fragments * 16, f"slot of {static.slot} bytes"
    launch = KernelLaunch(
        _moe_front_sharded, (static.blocks, len(calls), 1), THREADS, addresses(calls, links, tensors), static,
        shared=static.place()["end"], dependent=static.dependent)
    if len(calls) == 1:
        return launch
    return LaunchSequence(tuple(replace(launch, parameters=replace(static, phase=phase))
                                for phase in (PUBLISH, COLLECT)))
