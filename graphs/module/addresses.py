"""The addresses that bound launches and captured graphs use, and whether the tensors are still there.

A graph holds addresses, not tensors. The table is taken when plans are bound; ``check`` compares it with the tensors
as a module holds them now, and with the versions of the parameters that packed weights were made from. It decides
nothing and repairs nothing: what it finds is an ``AddressError`` that names tensors and the launches that read them.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from ...compiler.errors import AddressError
from ...compiler.plan import LaunchPlan

SHOWN = 8  # findings in an error; the rest is counted
Held = Callable[[], "Tensor | None"]  # looks up the tensor that a module holds now


@dataclass(frozen=True)
class Entry:
    """One tensor: its address and bytes when it was bound, where to find it now, and the launches that use it."""

    name: str
    pointer: int
    nbytes: int
    held: Held
    launches: tuple[str, ...]

    def finding(self) -> str | None:
        """What is wrong with the tensor now, in words; None when nothing is."""
        tensor = self.held()
        first, count = ", ".join(self.launches[:3]), len(self.launches)
        readers = (f"used by {first}" + (f" and {count - 3} more" if count > 3 else "")) if first else "used by none"
        if tensor is None:
            return f"{self.name}: the module no longer has it; {readers}"
        if tensor.data_ptr() == self.pointer and tensor.nbytes == self.nbytes:
            return None
        now = f"{tensor.data_ptr():#x} on {tensor.device}" if tensor.data_ptr() else "nowhere, its memory was released"
        return f"{self.name}: bound at {self.pointer:#x}, now at {now}; {readers}"


@dataclass(frozen=True)
class Table:
    """Every tensor that bound steps use, and the version of each tensor that packed weights were made from."""

    entries: tuple[Entry, ...]
    sources: tuple[tuple[str, Held, tuple[int, int]], ...] = ()

    def with_sources(self, sources: Mapping[str, Held]) -> Table:
        """The table for packed weights that were made from ``sources`` just now."""
        return Table(self.entries, tuple((name, held, _state(held())) for name, held in sources.items()))

    def check(self) -> None:
        """Raises AddressError when a tensor has moved or a packed weight is older than its parameter."""
        moved = [finding for entry in self.entries if (finding := entry.finding())]
        if moved:
            raise AddressError(_listed("not where the launches use them", moved)
                               + "\n  fix: call rebind(), or build the module on the device where it runs")
        stale = [f"{name}: written since the packed weights were made from it" for name in self.stale()]
        if stale:
            raise AddressError(_listed("newer than the packed weights", stale) + "\n  fix: call prepare()")

    def stale(self) -> list[str]:
        """Tensors that were written, or replaced, since packed weights were made from them."""
        return [name for name, held, state in self.sources if _state(held()) != state]


def _state(tensor: Tensor | None) -> tuple[int, int]:
    """Where a tensor is and how often it was written, which tensors of inference mode do not count."""
    return (0, 0) if tensor is None else (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)


def _listed(what: str, findings: list[str]) -> str:
    count = f"{len(findings)} tensor{'s are' if len(findings) > 1 else ' is'} {what}:"
    more = [f"  ... and {len(findings) - SHOWN} more"] if len(findings) > SHOWN else []
    return "\n".join([count, *(f"  {finding}" for finding in findings[:SHOWN]), *more])


def users(plan: LaunchPlan) -> dict[str, tuple[str, ...]]:
    """The launches that touch each buffer, by buffer."""
    found: dict[str, list[str]] = {name: [] for name in plan.buffers}
    for launch in plan.launches:
        names = {*launch.inputs, *launch.outputs, *launch.scratch.values()}
        for buffer in {plan.tensors[name].buffer for name in names}:
            found[buffer].append(launch.id)
    return {name: tuple(launches) for name, launches in found.items()}
