"""Collectives through torch.distributed: NCCL between GPUs, gloo between processes of a CPU. No kernel of ours.

The parts of all ranks are gathered and the op's own function is applied to them, so that the result is the op's meaning
to the bit: the same on every rank, and the same as with emulated ranks, whatever order a library would add in.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...compiler.call import Link
from ...compiler.errors import BindError
from ...compiler.ops import OPS
from .group import Group


class Library:
    """One rank a process; a plan for it may have no collective inside a kernel."""

    name = "torch.distributed"

    def __init__(self, group: Group) -> None:
        self.group = group

    def local_ranks(self, ranks: int) -> Sequence[int]:
        if ranks != self.group.ranks:
            raise BindError(f"the plan is for {ranks} ranks, {self.group.ranks} were started\n"
                            f"  fix: start {ranks}, or compile with --set parallel.tp={self.group.ranks}")
        return (self.group.rank,)

    def allocate_mailboxes(self, sizes: Mapping[str, int], device: torch.device) -> list[dict[str, Tensor]]:
        if sizes:
            raise BindError(f"the plan has collectives inside kernels ({', '.join(sizes)}), which torch.distributed "
                            "cannot carry\n  fix: use the symmetric transport, or compile without those kernels")
        return [{}]

    def links(self, mailboxes: Sequence[Tensor]) -> list[Link]:
        raise BindError("torch.distributed has no links that a kernel could use")

    def collective(self, op: str, attrs: Mapping[str, Any], inputs: Sequence[Tensor],
                   outputs: Sequence[Tensor]) -> Callable[[], None]:
        x, out, fn, rank = inputs[0], outputs[0], OPS[op].fn, self.group.rank
        sent = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        parts = torch.empty((attrs["ranks"], *x.shape), dtype=x.dtype, device=x.device)
        # as bytes: gloo knows fewer dtypes than we have
        flat, gathered = sent.view(-1).view(torch.uint8), parts.view(-1).view(torch.uint8)
        each = list(parts.unbind(0))
        # torch 2.13 gave it another name
        gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

        def step() -> None:
            sent.copy_(x)
            gather(gathered, flat)
            out.copy_(fn(each, **attrs)[rank])

        return step
