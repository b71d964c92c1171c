"""Contents of a bound step's states and caches: kept while a tool runs steps, summed up, held against each other.

Spare slots and pages, which padding writes to, are left out where two contents are compared.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..bind import Executable

KEPT = ("state", "cache")


@dataclass(frozen=True)
class Contents:
    """Bytes of every state, cache, input and output of every rank, by (rank, buffer)."""

    of: Mapping[tuple[int, str], Tensor]


def contents(executable: Executable, kinds: tuple[str, ...] = KEPT) -> Contents:
    """A copy of the buffers of these kinds."""
    return Contents({(rank.index, name): rank.buffers[name].clone() for rank in executable.ranks
                     for name, buffer in executable.plan.buffers.items() if buffer.kind in kinds})


def restore(executable: Executable, kept: Contents) -> None:
    """Writes a copy back into the same storage."""
    ranks = {rank.index: rank for rank in executable.ranks}
    for (index, name), tensor in kept.of.items():
        ranks[index].buffers[name].copy_(tensor)


@contextmanager
def kept_contents(executable: Executable) -> Iterator[None]:
    """States, caches and inputs are afterwards what they were before."""
    kept = contents(executable, (*KEPT, "index"))
    try:
        yield
    finally:
        restore(executable, kept)


def changed_places(executable: Executable, kept: Contents) -> dict[tuple[int, str], list[int]]:
    """Slots of states and pages of caches whose bytes changed, the spare last one left out, by (rank, buffer)."""
    found = {}
    for (index, name), old in kept.of.items():
        rank = next(r for r in executable.ranks if r.index == index)
        # a plan that shares the storage of a larger one has more places than its own shape says
        one = rank.tensors[name][0].nbytes
        differs = rank.buffers[name].view(-1, one).ne(old.view(-1, one)).any(1)[:-1]
        if bool(differs.any()):
            found[index, name] = torch.nonzero(differs).flatten().tolist()
    return found


def fill_with_padding(executable: Executable) -> None:
    """Marks every row of a bound step as padding: it then writes to spare slots and pages only."""
    for rank in executable.ranks:
        for name in executable.plan.inputs:
            if name in ("tokens", "positions", "slots", "page_table"):
                rank.tensors[name].fill_(-1)
