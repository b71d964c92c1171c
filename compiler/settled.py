"""Which tensors are certainly written before a launch can start, so that its kernel may read them before it waits.

A launch that starts early may start before the one before it has done anything. What it finds written follows from the
launches between, in two ways, each of which says that all launches of stream 0 before some launch X have ended:

* X starts at a full edge (it is no dependent launch). Then this is so when X starts, and for all that start after it.
* X triggers late: no block of it lets the next launch start before its own wait has returned, and by then the launch
  before X has ended and with it all before that one. Then this is so for all launches behind X, not for X itself.

A tensor is *settled* for a launch when every launch that wrote it before is among those that have ended so, or when
there is none. What a launch of another stream wrote is settled from the full edge at which stream 0 waits for it. Ranks
of one process launch in turn, all of launch X before any of the next: each of them waits for what is before it in the
stream, so that X has the same meaning for every rank. A launch in two parts is late when one part is, since the first
waits for the launch before and the second for the first. An eager step is one stream in the order of the plan, which
only adds waits. Decides nothing about which launches trigger late.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .ir import Graph
from .kernel import Region
from .ops import OPS
from .schedule import Slot


@dataclass(frozen=True)
class Settled:
    """Inputs of a launch that are settled, in its order, and the launch X that says so, if any launch must."""

    inputs: tuple[str, ...]
    by: int | None = None


def settle(graph: Graph, regions: Sequence[Region], slots: Sequence[Slot], late: Sequence[bool]) -> list[Settled]:
    """For each launch what is settled before it starts; ``late`` says which launches trigger after their wait."""
    storage = _storages(graph)
    writers: dict[str, list[int]] = {}
    found: list[Settled] = []
    ended = 0  # X: all launches of stream 0 before it have ended

    def is_over(writer: int, reader: int) -> bool:
        if not slots[writer].stream:
            return writer < ended
        # the launch behind the last one beside it is the one that waits for it
        join = slots[writer].last + 1
        return join <= reader and not slots[join].stream and not slots[join].dependent

    for index, (region, slot) in enumerate(zip(regions, slots, strict=True)):
        if slot.stream:
            # it starts at full edges behind all that it reads
            found.append(Settled(region.inputs, index))
        else:
            ended = ended if slot.dependent else index
            made = {name: writers.get(storage[name], []) for name in region.inputs}
            inputs = tuple(name for name, by in made.items() if all(is_over(writer, index) for writer in by))
            found.append(Settled(inputs, ended if any(made[name] for name in inputs) else None))
            ended = index if late[index] else ended
        for name in _written(region):
            writers.setdefault(storage[name], []).append(index)
    return found


def _storages(graph: Graph) -> Mapping[str, str]:
    """For each value the one whose storage it is: a view its source's, an update in place that of what it updates."""
    found = {name: name for name in graph.values}
    for node in graph.nodes:
        definition = OPS[node.op]
        for index, name in enumerate(node.outputs):
            source = 0 if definition.kind == "view" else definition.alias.get(index)
            if source is not None:
                found[name] = found[node.inputs[source]]
    return found


def _written(region: Region) -> set[str]:
    """Values that a launch writes: its results, and what it updates in place whether or not anything reads it."""
    updated = {node.inputs[source] for node in region.solid
               for source in OPS[node.op].alias.values()}
    return {*region.outputs, *updated}
