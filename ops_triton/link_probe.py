"""What a link between two GPUs can do: the time of one hop, and the rate of plain stores. For the device table.

``bounce``: one thread of each of two ranks waits for a number in its own memory and writes it into the other's.
``push``: every block stores its share of a buffer into the peer's memory, 16 bytes a thread. No plan uses them.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launching import KernelLaunch


@triton.jit
def _bounce(own, counter, peer, RANK: tl.constexpr, ROUNDS: tl.constexpr):
    box = tl.load(peer).to(tl.pointer_type(tl.int64))
    base = tl.load(counter)
    for i in range(ROUNDS):
        if RANK == 0:
            tl.store(box, base + i + 1)
        seen = tl.load(own, volatile=True)
        while seen < base + i + 1:
            seen = tl.load(own, volatile=True)
        if RANK == 1:
            tl.store(box, base + i + 1)
    tl.store(counter, base + ROUNDS)


@triton.jit
def _push(source, peer, WORDS: tl.constexpr, BLOCKS: tl.constexpr, UNITS: tl.constexpr):
    box = tl.load(peer).to(tl.pointer_type(tl.int32))
    box = tl.multiple_of(box, 16)
    for start in range(tl.program_id(0) * UNITS, WORDS, BLOCKS * UNITS):
        at = start + tl.arange(0, UNITS)
        tl.store(box + at, tl.load(source + at, mask=at < WORDS), mask=at < WORDS)


def bind_bounce(box: torch.Tensor, peer: int, rank: int, rounds: int) -> KernelLaunch:
    """``rounds`` there and back between ranks 0 and 1; ``box`` i64 [1] zeroed, ``peer`` the other's address."""
    pointers = {"own": box, "counter": torch.zeros_like(box), "peer": torch.tensor([peer], device=box.device)}
    return KernelLaunch(_bounce, (1,), pointers, {"RANK": rank, "ROUNDS": rounds}, num_warps=1)


def bind_push(source: torch.Tensor, peer: int, blocks: int = 264) -> KernelLaunch:
    """Stores i32 ``source`` at the address ``peer``."""
    pointers = {"source": source, "peer": torch.tensor([peer], device=source.device)}
    return KernelLaunch(_push, (blocks,), pointers, {"WORDS": source.numel(), "BLOCKS": blocks, "UNITS": 2048}, 8)
