"""Mailboxes in torch's symmetric memory: every rank reaches every other's by a plain pointer over NVLink.

Peer pointers only. NVLink multicast is switched off before torch could make such an object, and a rank refuses to go on
when torch says that it has one. Unfused collectives go through torch.distributed.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...compiler.call import Link
from ...compiler.errors import BindError
from .library import Library

ALIGNMENT = 256  # bytes between mailboxes


class Symmetric(Library):
    """One rank a process and a GPU; kernels write into the mailboxes of their peers."""

    name = "symmetric"

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self._held: list[Any] = []  # a handle for each allocation, which lives as long as the transport

    def allocate_mailboxes(self, sizes: Mapping[str, int], device: torch.device) -> list[dict[str, Tensor]]:
        """All mailboxes in one symmetric allocation, zero on every rank before any rank goes on. A meeting."""
        import torch.distributed._symmetric_memory as symmetric_memory

        index = device.index or 0
        if symmetric_memory._SymmetricMemory.has_multicast_support(torch._C._autograd.DeviceType.CUDA, index):
            raise BindError("torch would make an NVLink multicast object here\n"
                            "  fix: set TORCH_SYMM_MEM_DISABLE_MULTICAST=1 before the process starts")
        starts, total = {}, 0
        for name, size in sizes.items():
            starts[name], total = total, total + -(-size // ALIGNMENT) * ALIGNMENT
        with self.group.together("mailboxes"):
            base = symmetric_memory.empty(max(total, ALIGNMENT), dtype=torch.uint8, device=device)
            base.zero_()
            torch.cuda.synchronize(device)
        world = dist.group.WORLD
        assert world is not None, "no process group"
        handle = symmetric_memory.rendezvous(base, world)
        self._held.append((base, handle))
        self.group.exchange("rendezvous", {})
        return [{name: base[start : start + sizes[name]] for name, start in starts.items()}]

    def links(self, mailboxes: Sequence[Tensor]) -> list[Link]:
        box, rank = mailboxes[0], self.group.rank
        for base, handle in self._held:
            at = box.data_ptr() - base.data_ptr()
            if 0 <= at < base.nbytes:
                own = base.data_ptr() - handle.buffer_ptrs[rank]
                return [Link(rank, tuple(pointer + own + at for pointer in handle.buffer_ptrs))]
        raise BindError("a mailbox does not lie in symmetric memory")

    def release(self) -> None:
        """Lets go of all mailboxes. Nothing that was bound through this transport may be launched again. A meeting."""
        torch.cuda.synchronize()
        self.group.exchange("release", {})
        self._held.clear()
