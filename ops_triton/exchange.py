"""Words that carry data and flag between ranks: what the collective kernels share. Knows no op.

A mailbox is i64 [2, ranks, slot] on each rank. A word is 4 bytes of data below an epoch of 4 bytes, so that both
arrive together by one store of 8 bytes: nothing is zeroed or armed again, no payload can look like a flag, and no
fence is needed. A block of threads talks only to the blocks of the same number on the other ranks. Each keeps its own
epoch, counted up once a launch on the device; its lowest bit picks the half of the mailbox. Two halves are enough: a
rank writes epoch e + 2 only after its launch e + 1 has ended, which has read what its peer sent after the peer's
launch e had ended. Epochs wrap after 2^32 launches, harmless since only the two newest are ever in a mailbox.

``table`` i64 has one row for each rank of this process: addresses of its tensors, which a kernel names by column, then
OWN_BOX, EPOCHS, HEALTH and RANK below, then the address of every rank's mailbox as this rank reaches it. Ranks are the
fastest axis of a grid: the blocks that wait for each other start together, so that a launch for all ranks of one
device cannot block itself as long as one such group fits on the device.
"""
from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch
import triton
import triton.language as tl

from ..compiler.call import Call, Link
from .launching import COLLECT, INTERPRET, PUBLISH, WHOLE


def make_table(calls: Sequence[Call], links: Sequence[Link], columns: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """The address table of a launch; ``columns`` are the tensors of each rank in the order of the kernel."""
    rows = []
    for call, link, tensors in zip(calls, links, columns, strict=True):
        own = (call.scratch["mailbox"], call.scratch["epochs"], call.scratch["health"])
        rows.append([*(t.data_ptr() for t in (*tensors, *own)), link.rank, *link.peers])
    return torch.tensor(rows, dtype=torch.int64, device=columns[0][0].device)


def alignment(columns: Sequence[Sequence[torch.Tensor]]) -> int:
    """Bytes, 16 at most, that divide the address of every tensor."""
    return min(16, gcd(*(tensor.data_ptr() for tensors in columns for tensor in tensors)) or 16)


@triton.jit
def address(table, COLUMN: tl.constexpr, TYPE: tl.constexpr, ALIGN: tl.constexpr):
    """The pointer in a column, a multiple of ALIGN bytes."""
    return tl.multiple_of(tl.load(table + COLUMN).to(tl.pointer_type(TYPE)), ALIGN)


@triton.jit
def make_word(data, epoch):
    """i64 words of i32 data."""
    return (data.to(tl.int64) & 0xFFFFFFFF) | (epoch.to(tl.int64) << 32)


@triton.jit
def send(table, PEERS: tl.constexpr, peer: tl.constexpr, word, at, mask, epoch, rank, RANKS: tl.constexpr,
         SLOT: tl.constexpr):
    """Stores words in this rank's slot of a peer's mailbox."""
    box = tl.load(table + PEERS + peer).to(tl.pointer_type(tl.int64))
    tl.store(box + ((epoch & 1) * RANKS + rank) * SLOT + at, word, mask=mask)


@triton.jit
def receive(box, at, mask, epoch, health, rank, RANKS: tl.constexpr, PADDED: tl.constexpr, SLOT: tl.constexpr,
            LIMIT: tl.constexpr):
    """i32 [PADDED, n] that all ranks have sent, zeros above RANKS; waits for them.

    LIMIT > 0 gives up after so many rounds and leaves (1 + rank, epoch, block, words missing) in ``health``.
    """
    sender = tl.arange(0, PADDED)[:, None]
    wanted = (sender < RANKS) & mask[None, :]
    source = box + ((epoch & 1) * RANKS + sender) * SLOT + at[None, :]
    words = tl.load(source, mask=wanted, other=0, volatile=True)
    if LIMIT == 0:
        # the condition reads what the loop carries and nothing else: triton 3.6 fails on fewer results
        while tl.max(tl.max(tl.where(wanted & ((words >> 32).to(tl.int32) != epoch), 1, 0), axis=0), axis=0) > 0:
            words = tl.load(source, mask=wanted, other=0, volatile=True)
    else:
        for _ in range(LIMIT):
            if tl.max(tl.max(tl.where(wanted & ((words >> 32).to(tl.int32) != epoch), 1, 0), axis=0), axis=0) > 0:
                words = tl.load(source, mask=wanted, other=0, volatile=True)
        late = tl.sum(tl.sum(tl.where(wanted & ((words >> 32).to(tl.int32) != epoch), 1, 0), axis=0), axis=0)
        if late > 0:
            tl.store(health, 1 + rank)
            tl.store(health + 1, epoch)
            tl.store(health + 2, tl.program_id(1))
            tl.store(health + 3, late)
    return tl.where(wanted, (words & 0xFFFFFFFF).to(tl.int32), 0)


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


def phases() -> tuple[int, ...]:
    """The interpreter runs blocks one after the other: it publishes for all ranks, then collects."""
    return (PUBLISH, COLLECT) if INTERPRET else (WHOLE,)
