"""How the ranks of a plan reach each other: which of them this process binds, where their mailboxes lie, who answers.

A transport is handed to ``bind``. ``Emulated`` and ``Loopback`` need one process and one device; transports between
processes live in ``graphs/distributed``, which nothing here imports. A transport decides nothing about the plan.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..compiler.call import Link, emulated_links, loopback_link
from ..compiler.errors import BindError
from ..compiler.ops import OPS


class Transport(Protocol):
    """What ``bind`` asks of a transport, in this order."""

    name: str

    def local_ranks(self, ranks: int) -> Sequence[int]:
        """The ranks, of ``ranks`` in all, that this process binds."""

    def allocate_mailboxes(self, sizes: Mapping[str, int], device: torch.device) -> Sequence[Mapping[str, Tensor]]:
        """For each local rank its mailboxes: zeroed u8 tensors of ``sizes`` bytes, by name."""

    def links(self, mailboxes: Sequence[Tensor]) -> list[Link]:
        """The link of each local rank through one mailbox; ``mailboxes`` are the local ranks' views of it."""

    def collective(self, op: str, attrs: Mapping[str, Any], inputs: Sequence[Tensor],
                   outputs: Sequence[Tensor]) -> Callable[[], None]:
        """An unfused collective over one tensor of each local rank, as the function that runs it."""


def zeroed_mailboxes(sizes: Mapping[str, int], device: torch.device) -> dict[str, Tensor]:
    """Mailboxes in memory of this device."""
    return {name: torch.zeros(size, dtype=torch.uint8, device=device) for name, size in sizes.items()}


class Emulated:
    """All ranks in this process on one device: true numbers, no links."""

    name = "emulated"

    def __init__(self) -> None:
        self._ranks = 1

    def local_ranks(self, ranks: int) -> Sequence[int]:
        self._ranks = ranks
        return range(ranks)

    def allocate_mailboxes(self, sizes: Mapping[str, int], device: torch.device) -> list[dict[str, Tensor]]:
        return [zeroed_mailboxes(sizes, device) for _ in range(self._ranks)]

    def links(self, mailboxes: Sequence[Tensor]) -> list[Link]:
        return emulated_links(mailboxes)

    def collective(self, op: str, attrs: Mapping[str, Any], inputs: Sequence[Tensor],
                   outputs: Sequence[Tensor]) -> Callable[[], None]:
        fn, parts = OPS[op].fn, list(inputs)

        def step() -> None:
            for out, result in zip(outputs, fn(parts, **attrs), strict=True):
                out.copy_(result)

        return step


class Loopback:
    """Rank 0 alone; its peers say what it says. Its numbers are not the model's, its time lacks the links."""

    name = "loopback"

    def local_ranks(self, ranks: int) -> Sequence[int]:
        return (0,)

    def allocate_mailboxes(self, sizes: Mapping[str, int], device: torch.device) -> list[dict[str, Tensor]]:
        return [zeroed_mailboxes(sizes, device)]

    def links(self, mailboxes: Sequence[Tensor]) -> list[Link]:
        return [loopback_link(mailboxes[0])]

    def collective(self, op: str, attrs: Mapping[str, Any], inputs: Sequence[Tensor],
                   outputs: Sequence[Tensor]) -> Callable[[], None]:
        """One copy of the result's bytes."""
        x, into = inputs[0], outputs[0]
        if op == "all_gather":
            into, x = into.unflatten(attrs["dim"], (attrs["ranks"], -1)), x.unsqueeze(attrs["dim"])
        elif op == "reduce_scatter":
            x = x.narrow(attrs["dim"], 0, into.shape[attrs["dim"]])

        def step() -> None:
            into.copy_(x)

        return step


def transport_of(wanted: Transport | str) -> Transport:
    """``wanted`` itself, or the transport of one process that a name stands for. Raises BindError: no such name."""
    if not isinstance(wanted, str):
        return wanted
    if wanted not in ("emulated", "loopback"):
        raise BindError(f"no transport {wanted!r} in one process\n"
                        "  fix: use emulated or loopback; several processes are started by k3plan launch")
    return Emulated() if wanted == "emulated" else Loopback()
