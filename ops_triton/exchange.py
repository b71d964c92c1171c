"""Words that carry data and flag between ranks: what the collective kernels share. Knows no op.

**Flagged words** (small messages). A mailbox is i64 [2, ranks, slot] on each rank. A word is 4 bytes of data below an
epoch of 4 bytes, so that both arrive together by one store of 8 bytes: nothing is zeroed or armed again, no payload can
look like a flag, and no fence is needed. A block of threads talks only to the blocks of the same number on the other
ranks. Each keeps its own epoch, counted up once a launch on the device; its lowest bit picks the half of the mailbox.
Two halves are enough: a rank writes epoch e + 2 only after its launch e + 1 has ended, which has read what its peer
sent after the peer's launch e had ended. Epochs wrap after 2^32 launches, harmless since only the two newest are ever
in a mailbox.

**Armed words** (large messages of floats, half the bytes). A mailbox is i32 [3, ranks, slot]; a word is the complement
of 4 bytes of data, and zero is a word that has not come. The one payload whose complement is zero, a NaN, is sent as
another NaN. Epoch e uses part e mod 3, and in launch e a rank zeroes its own part of epoch e - 1. That part is written
next in epoch e + 2, which a peer begins only after it has had this rank's words of e + 1, sent after launch e had
ended. To zero the *next* part instead would hang: a peer may be a step ahead and have written there. Epochs count
modulo 3 * 2^29.

``table`` i64 has one row for each rank of this process: addresses of its tensors, which a kernel names by column, then
its mailbox, epochs and health, its rank, the number of the launch, then the address of every rank's mailbox as this
rank reaches it. Ranks are the fastest axis of a grid: the blocks that wait for each other start together, so that a
launch for all ranks of one device cannot block itself as long as one such group fits on the device.

Each word is read by one thread. Where a tile has fewer words than the block has threads, Triton gives a word to several
threads; each of them loads it, the loop's condition comes from one, and another may leave the loop with what it loaded
before the word came: the last launch's value. So ``polled`` gives a tile its size, the rest masked off, and
``tests/cross`` reads from Triton's layouts that no polled load is replicated. Epochs are read by all threads: a barrier
stands between that and whatever lets the epoch be counted up (``store_epoch``).

``health`` i32 [8] is written when a bounded wait gives up: 1 + rank, launch, epoch, block, missing words, the ranks
that they did not come from (a bit each). The first to give up writes; with it set no later wait of the kernel waits.
"""
# ruff: noqa: SIM102 - the device evaluates both sides of an `and`
from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch
import triton
import triton.language as tl

from ..compiler.call import Call, Link
from .launching import COLLECT, INTERPRET, PUBLISH, WHOLE

# columns after those of the tensors
BOX, EPOCHS, HEALTH, RANK, NUMBER, PEERS = (tl.constexpr(column) for column in range(6))
ARMED_EPOCHS = tl.constexpr(3 << 29)


def make_table(calls: Sequence[Call], links: Sequence[Link], columns: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """The address table of a launch; ``columns`` are the tensors of each rank in the order of the kernel."""
    rows = []
    for call, link, tensors in zip(calls, links, columns, strict=True):
        own = (call.scratch["mailbox"], call.scratch["epochs"], call.scratch["health"])
        rows.append([*(t.data_ptr() for t in (*tensors, *own)), link.rank, call.number, *link.peers])
    return torch.tensor(rows, dtype=torch.int64, device=columns[0][0].device)


def alignment(columns: Sequence[Sequence[torch.Tensor]], links: Sequence[Link]) -> int:
    """Bytes, 16 at most, that divide the address of every tensor and every mailbox."""
    addresses = [tensor.data_ptr() for tensors in columns for tensor in tensors]
    return min(16, gcd(*addresses, *(peer for link in links for peer in link.peers)) or 16)


@triton.jit
def address(table, COLUMN: tl.constexpr, TYPE: tl.constexpr, ALIGN: tl.constexpr):
    """The pointer in a column, a multiple of ALIGN bytes."""
    return tl.multiple_of(tl.load(table + COLUMN).to(tl.pointer_type(TYPE)), ALIGN)


@triton.jit
def next_epoch(epochs, ARMED: tl.constexpr):
    """The epoch of this launch; the kernel stores it at its end."""
    epoch = tl.load(epochs, volatile=True) + 1
    if ARMED:
        epoch = tl.where(epoch >= ARMED_EPOCHS, 0, epoch)
    return epoch


@triton.jit
def store_epoch(epochs, epoch):
    """Counts the epoch up, after every thread of the block has read it."""
    tl.debug_barrier()
    tl.store(epochs, epoch)


@triton.jit
def make_word(data, epoch, ARMED: tl.constexpr):
    """Words of i32 data: i64 with the epoch above, or i32 that are never zero."""
    if ARMED:
        return tl.where(data == -1, 1, ~data)
    else:
        return (data.to(tl.int64) & 0xFFFFFFFF) | (epoch.to(tl.int64) << 32)


@triton.jit
def part_of(epoch, ARMED: tl.constexpr):
    """Which part of a mailbox an epoch uses."""
    if ARMED:
        return epoch % 3
    else:
        return epoch & 1


@triton.jit
def send(table, OWN: tl.constexpr, peer: tl.constexpr, word, at, mask, epoch, rank, RANKS: tl.constexpr,
         SLOT: tl.constexpr, ALIGN: tl.constexpr, ARMED: tl.constexpr, TO_SELF: tl.constexpr = False):
    """Stores words in this rank's slot of a peer's mailbox; to itself only when other blocks collect."""
    box = address(table, OWN + PEERS + peer, tl.int32 if ARMED else tl.int64, ALIGN)
    # a number with the mask's shape: the interpreter joins no other
    wanted = mask if TO_SELF else mask & ((at * 0 + rank) != peer)
    tl.store(box + (part_of(epoch, ARMED) * RANKS + rank) * SLOT + at, word, mask=wanted)


@triton.jit
def _late(words, wanted, epoch, ARMED: tl.constexpr):
    """1 where a wanted word has not come."""
    if ARMED:
        return tl.where(wanted & (words == 0), 1, 0)
    else:
        return tl.where(wanted & ((words >> 32).to(tl.int32) != epoch), 1, 0)


@triton.jit
def receive(table, OWN: tl.constexpr, own, at, mask, epoch, rank, RANKS: tl.constexpr, PADDED: tl.constexpr,
            SLOT: tl.constexpr, LIMIT: tl.constexpr, ALIGN: tl.constexpr, ARMED: tl.constexpr,
            FROM_SELF: tl.constexpr = False):
    """i32 [PADDED, n] of all ranks, ``own`` i32 [n] among them, zeros above RANKS; waits for the others.

    With FROM_SELF other blocks of this rank have sent its part too, and ``own`` is not read.

    LIMIT > 0 gives up after so many looks at the mailbox and reports in ``health``.
    """
    PAIR: tl.constexpr = RANKS == 2 and not FROM_SELF
    box = address(table, OWN + BOX, tl.int32 if ARMED else tl.int64, ALIGN)
    if PAIR:
        # one sender: no second dimension, whose sum would go through shared memory
        sender = 1 - rank
        place = at
        wanted = mask
    else:
        sender = tl.arange(0, PADDED)[:, None]
        place = at[None, :]
        wanted = (sender < RANKS) & mask[None, :]
        if not FROM_SELF:
            wanted &= sender != rank
    source = box + (part_of(epoch, ARMED) * RANKS + sender) * SLOT + place
    words = tl.load(source, mask=wanted, other=0, volatile=True)
    if LIMIT == 0:
        # the condition reads what the loop carries and nothing else: triton 3.6 fails on fewer results
        while tl.max(_late(words, wanted, epoch, ARMED)) > 0:
            words = tl.load(source, mask=wanted, other=0, volatile=True)
    else:
        health = address(table, OWN + HEALTH, tl.int32, 4)
        # the same answer for all threads: one that went on alone would leave the others at a barrier
        given_up = tl.max(tl.load(health + tl.where(wanted, 0, 0), volatile=True))
        looks = tl.where(given_up == 0, 0, LIMIT)
        while (tl.max(_late(words, wanted, epoch, ARMED)) > 0) & (looks < LIMIT):
            words = tl.load(source, mask=wanted, other=0, volatile=True)
            looks += 1
        late = _late(words, wanted, epoch, ARMED)
        missing = tl.sum(late)
        if missing > 0:
            if tl.atomic_cas(health, 0, 1 + rank) == 0:
                tl.store(health + 1, tl.load(table + OWN + NUMBER).to(tl.int32))
                tl.store(health + 2, epoch)
                tl.store(health + 3, tl.program_id(1))
                tl.store(health + 4, missing)
                if PAIR:
                    tl.store(health + 5, 1 << sender)
                else:
                    tl.store(health + 5, tl.sum(tl.max(late, axis=1) << tl.arange(0, PADDED), axis=0))
    if ARMED:
        # this rank's own slot of the epoch before is free again
        before = (epoch + 2) % 3
        tl.store(box + (before * RANKS + sender) * SLOT + place, words * 0, mask=wanted)
        data = ~words
    else:
        data = (words & 0xFFFFFFFF).to(tl.int32)
    if PAIR:
        mine = tl.where(mask, own, 0)
        data = tl.where(mask, data, 0)
        # in rank order
        return tl.permute(tl.join(tl.where(rank == 0, mine, data), tl.where(rank == 0, data, mine)), (1, 0))
    elif FROM_SELF:
        return tl.where(wanted, data, 0)
    else:
        return tl.where(wanted, data, tl.where((sender == rank) & mask[None, :], own[None, :], 0))


@triton.jit
def low_half(pair):
    """The first bf16 of each pair, exactly, as fp32."""
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def high_half(pair):
    return (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def bf16_bits(x):
    """fp32 rounded to bf16, as the upper half of an i32. Integer arithmetic: right in the interpreter as well."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return tl.where(x != x, 0x7FC00000, rounded) & -65536


@triton.jit
def make_pair(low, high):
    """Two fp32 rounded to bf16 in one i32."""
    return ((bf16_bits(low) >> 16) & 0xFFFF) | bf16_bits(high)


def polled(words: int, warps: int, ranks: int = 2) -> int:
    """Words of a tile that ``receive`` waits for, a power of two: ``words``, and one for each thread at least.

    For warps of 32 threads. With 64, as gfx950 has, tiles would have to be twice as large; nothing of this ran there.
    """
    senders = 1 if ranks == 2 else triton.next_power_of_2(ranks)
    return max(triton.next_power_of_2(words), 32 * warps // senders)


def phases() -> tuple[int, ...]:
    """The interpreter runs blocks one after the other: it publishes for all ranks, then collects."""
    return (PUBLISH, COLLECT) if INTERPRET else (WHOLE,)
