"""Which launch must wait for which launch of another stream: read off the bytes that each reads and writes.

Decides nothing: the plan says which stream a launch is on, and what its tensors overlap is a fact. Launches of one
stream run in order and need no wait.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..compiler.plan import Launch, LaunchPlan

Waits = Mapping[int, tuple[int, ...]]  # launch -> launches of other streams that it waits for


def stream_waits(plan: LaunchPlan) -> Waits:
    """For each launch the latest launches of other streams that touch the same bytes, where one of the two writes.

    A wait that an earlier launch of the same stream already made, for that launch or a later one, is left out.
    """
    if not any(launch.stream for launch in plan.launches):
        return {}
    found: dict[int, tuple[int, ...]] = {}
    seen: dict[tuple[int, int], int] = {}  # (waiting stream, stream waited for) -> latest launch waited for
    past: list[list[tuple[str, int, int, bool]]] = []
    for index, launch in enumerate(plan.launches):
        own = list(spans(plan, launch))
        latest: dict[int, int] = {}
        for other in range(index - 1, -1, -1):
            stream = plan.launches[other].stream
            if stream == launch.stream or stream in latest or seen.get((launch.stream, stream), -1) >= other:
                continue
            if any(_conflict(a, b) for a in own for b in past[other]):
                latest[stream] = other
        for stream, other in latest.items():
            seen[launch.stream, stream] = other
        if latest:
            found[index] = tuple(sorted(latest.values()))
        past.append(own)
    return found


def last_launches(plan: LaunchPlan) -> tuple[int, ...]:
    """The last launch of each side stream: the end of the step waits for them."""
    last = {launch.stream: index for index, launch in enumerate(plan.launches) if launch.stream}
    return tuple(sorted(last.values()))


def spans(plan: LaunchPlan, launch: Launch) -> Iterator[tuple[str, int, int, bool]]:
    """(storage, first byte, end, written) of everything that a launch reads or writes; the arena is one storage."""
    written = {*launch.outputs, *launch.scratch.values()}
    for name in dict.fromkeys((*launch.inputs, *launch.outputs, *launch.scratch.values())):
        buffer_name = plan.tensors[name].buffer
        buffer = plan.buffers[buffer_name]
        if buffer.kind == "arena":
            yield "arena", buffer.offset, buffer.offset + buffer.bytes, name in written
        else:
            yield buffer_name, 0, buffer.bytes, name in written


def _conflict(a: tuple[str, int, int, bool], b: tuple[str, int, int, bool]) -> bool:
    return a[0] == b[0] and (a[3] or b[3]) and a[1] < b[2] and b[1] < a[2]
