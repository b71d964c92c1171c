"""Tensors that a captured step would read where they no longer are: the module's table of addresses, as findings.

The table is ``graphs/module/addresses.py``'s; a bound step that no module holds gets one here. Repairs nothing.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from ...compiler.plan import LaunchPlan
from ..bind import Executable
from ..module.addresses import Entry, Table, users
from .findings import Finding, find


def table_of(executable: Executable, held: Mapping[str, Callable[[], Tensor | None]]) -> Table:
    """Addresses of the first rank's storages as they are bound now; ``held`` looks up, by the name of a storage, the
    tensor that the engine has at any later time."""
    launches, rank = users(executable.plan), executable.ranks[0]
    return Table(tuple(Entry(name, rank.buffers[name].data_ptr(), rank.buffers[name].nbytes, look, launches[name])
                       for name, look in held.items()))


def find_moved(plan: LaunchPlan, table: Table) -> list[Finding]:
    """One finding for each tensor that moved, was replaced, or lost its memory, and for each stale packed weight."""
    found = []
    for entry in table.entries:
        text = entry.finding()
        if text is not None:
            launch = entry.launches[0] if entry.launches else None
            found.append(find(_code(entry.held()), text, plan=plan, launch=launch))
    return [*found, *_stale(plan, table)]


def _code(tensor: Tensor | None) -> str:
    if tensor is None:
        return "CG-052"
    if tensor.data_ptr() == 0 or tensor.untyped_storage().nbytes() == 0:
        return "CG-053"
    return "CG-052" if isinstance(tensor, torch.nn.Parameter) else "CG-051"


def _stale(plan: LaunchPlan, table: Table) -> Iterator[Finding]:
    for name in table.stale():
        yield find("CG-051", f"{name} was written since the packed weights were made from it", plan=plan,
                   fix="Call prepare(), which packs again into the same storage.")
