"""Which launches start before the one before them has ended, and which run beside the others on a second stream.

Decides edges and streams, not the order of the launches; of memory only how long a launch may be at work.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .device import Device
from .ir import Graph
from .kernel import Cost, Region
from .ops import OPS

FIRST_ARCH = 90  # programmatic dependent launch came with sm_90


@dataclass(frozen=True)
class Slot:
    """Place of a launch: its stream, whether it starts early, between which launches it may be at work, and how much
    time of the step that saves, in us."""

    stream: int
    dependent: bool
    first: int
    last: int
    hidden_us: float = 0.0


def can_start_early(arch: str) -> bool:
    """Whether the device knows programmatic edges."""
    return arch.startswith("sm_") and int(arch.removeprefix("sm_")) >= FIRST_ARCH


def schedule(graph: Graph, regions: Sequence[Region], costs: Sequence[Cost], device: Device, *,
             beside: bool) -> list[Slot]:
    """A slot for each launch, in order. With ``beside``, launches go to stream 1 where that pays."""
    windows = side_launches(graph, regions, costs, device) if beside else {}
    joins = {last + 1 for _, last, _ in windows.values()}
    early = _can_be_early(regions, device.arch)
    found, previous = [], -1
    for index in range(len(regions)):
        if index in windows:
            found.append(Slot(1, False, *windows[index]))
            continue
        # a launch that waits for another stream waits for a full edge
        dependent = early[index] and previous >= 0 and early[previous] and index not in joins
        found.append(Slot(0, dependent, index, index))
        previous = index
    return found


def _can_be_early(regions: Sequence[Region], arch: str) -> list[bool]:
    """Whether a launch may have a programmatic edge before and behind it.

    A kernel of ours lets its successor start at once and waits for its predecessor before it touches anything but
    weights. Its wait covers everything earlier as well, as long as every launch that starts early waits: a torch op
    never does, so it starts at a full edge, and what follows it gains nothing from starting early.
    """
    return [can_start_early(arch) and not region.kernel.entry.startswith("op:") for region in regions]


def side_launches(graph: Graph, regions: Sequence[Region], costs: Sequence[Cost],
                  device: Device) -> dict[int, tuple[int, int, float]]:
    """Launches worth a second stream, with the first and last launch that may run while they do, and the us saved.

    Such a launch updates nothing in place and talks to no other rank. It lies between the last launch that it needs and
    the first that needs it, with others of its layer beside it. Of its time that of its bytes is not hidden, since both
    streams share one memory, and it costs a full edge at either end. The one that gains most is taken first; what it
    hides behind hides no other.
    """
    windows = {index: window for index, window in _windows(graph, regions).items() if _may_leave(regions[index])}
    toll = 2 * (device["boundary_us"] - device["dependent_boundary_us"])
    found: dict[int, tuple[int, int, float]] = {}
    taken: set[int] = set()

    def gain(index: int) -> float:
        others = _others(index, windows[index], taken, regions)
        hidden = costs[index].us - costs[index].bytes / device["bandwidth_gbs"] / 1e3
        return min(hidden, sum(costs[i].us for i in others)) - toll

    for layer in dict.fromkeys(regions[index].nodes[0].layer for index in windows):
        left = {index for index in windows if regions[index].nodes[0].layer == layer}
        while left:
            best = max(left, key=lambda index: (gain(index), -index))
            left.discard(best)
            if gain(best) <= 0:
                break
            behind, hidden = _others(best, windows[best], taken, regions), costs[best].us
            found[best] = (*windows[best], round(gain(best), 3))
            taken.add(best)
            for index in sorted(behind, key=lambda i: -costs[i].us):
                if hidden > 0:
                    taken.add(index)
                    left.discard(index)
                    hidden -= costs[index].us
    return found


def _windows(graph: Graph, regions: Sequence[Region]) -> dict[int, tuple[int, int]]:
    """For each launch whose result is read in its own layer: the launches between what it needs and what needs it."""
    made = {out: index for index, region in enumerate(regions) for node in region.nodes for out in node.outputs}
    needs = [{made[root] for name in region.inputs if (root := _root(graph, name)) in made} for region in regions]
    wanted_by: dict[int, int] = {}
    for index, sources in enumerate(needs):
        for source in sources:
            wanted_by[source] = min(wanted_by.get(source, index), index)
    windows = {index: (max(needs[index], default=-1) + 1, by - 1) for index, by in wanted_by.items()}
    return {index: (first, last) for index, (first, last) in windows.items()
            if first < last and all(regions[i].nodes[0].layer == regions[index].nodes[0].layer for i in (first, last))}


def _others(index: int, window: tuple[int, int], taken: set[int], regions: Sequence[Region]) -> list[int]:
    """Launches that ``index`` may hide behind; none when one of them would share its workspace."""
    beside = [i for i in range(window[0], window[1] + 1) if i != index]
    if any(regions[i].kernel.id == regions[index].kernel.id for i in beside):
        return []
    return [i for i in beside if i not in taken]


def _may_leave(region: Region) -> bool:
    return not any(OPS[node.op].kind == "comm" or (OPS[node.op].alias and OPS[node.op].kind != "view")
                   for node in region.nodes)


def _root(graph: Graph, name: str) -> str:
    """The value that ``name`` is a view of."""
    while name in graph.producer and OPS[graph.producer[name].op].kind == "view":
        name = graph.producer[name].inputs[0]
    return name
