"""Where the time of a captured step goes, launch by launch, from inside a replay of the whole graph.

A launch's share is what the step would end later because of it: from the latest end of everything before it to its own
end. Shares add up to the step, whatever overlaps. The GPU's own time stamps of each kernel come through torch.profiler;
``segment_us`` measures the same with events inside the graph, which disturb less and tell less, as a second witness.
"""
from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ...compiler.errors import RecordError
from ..bind import Executable
from ..capture import CapturedStep, capture
from .record import Node, Record

REPLAYS = 5
PROFILED = "timed after the profiler had run in this process, which slows every launch of a graph down"
TIMED = ("kernel", "memcpy", "memset")


_profiled = False


class Event(NamedTuple):
    """What ran on the GPU: in ns since 1970, so that no float holds them to the ns. ``node`` is the driver's number of
    its graph node, 0 where the profiler does not tell it."""

    name: str
    start: int
    end: int
    node: int = 0


@dataclass(frozen=True)
class Span:
    """When a node ran, in us from the start of its replay."""

    start: float
    end: float


def time_capture(step: CapturedStep, record: Record, replays: int = REPLAYS) -> Record:
    """``record`` with times: of the replay undisturbed, of the host, and of each launch inside a profiled replay.

    Raises RecordError when the profiler saw other nodes than the graph has.
    """
    return time_launches(step, time_replay(step, record), replays)


def time_replay(step: CapturedStep, record: Record) -> Record:
    """``record`` with the times of a whole replay, undisturbed: alone, queued behind another, and the host's.

    The first profile of a process leaves CUPTI behind (H200, torch 2.11: 600 to 1,600 us a launch of the full step, 14
    before), so of several captures all are timed before one is profiled; the record notes it when that was too late.
    """
    notes = (*record.notes, PROFILED) if _profiled else record.notes
    host, least = step.host_us()
    return replace(record, replay_us=round(step.time_us(), 3), queued_us=round(step.queued_us(), 3),
                   host_us=round(host, 3), host_least_us=round(least, 3), notes=notes)


def time_launches(step: CapturedStep, record: Record, replays: int = REPLAYS) -> Record:
    """``record`` with the time of each launch inside profiled replays. Raises RecordError as ``time_capture``."""
    return with_times(record, profile(step.graph, record.nodes, replays))


def with_times(record: Record, replays: Sequence[Sequence[Span]]) -> Record:
    """``record`` with the median of each launch over ``replays``, each with a span for every timed node in order."""
    timed = [node for node in record.nodes if node.kind in TIMED]
    shares, busy, gaps = ([_median_of(column) for column in zip(*rows, strict=True)]
                          for rows in zip(*(_shares(spans) for spans in replays), strict=True))
    at = {node.index: i for i, node in enumerate(timed)}
    launches = []
    for launch in record.launches:
        own = [at[n] for n in launch.nodes if n in at]
        launches.append(replace(
            launch, us=round(sum(shares[i] for i in own), 3), busy_us=round(sum(busy[i] for i in own), 3),
            gap_us=round(sum(gaps[i] for i in own), 3)) if own else launch)
    return replace(record, launches=tuple(launches))


def _shares(spans: Sequence[Span]) -> tuple[list[float], list[float], list[float]]:
    """Share, duration and gap of each node; nodes in graph order, which is the order of their starts in a stream."""
    shares, busy, gaps, latest = [], [], [], 0.0
    order = sorted(range(len(spans)), key=lambda i: (spans[i].end, spans[i].start))
    share_of = [0.0] * len(spans)
    gap_of = [0.0] * len(spans)
    for i in order:
        span = spans[i]
        share_of[i] = span.end - latest
        gap_of[i] = max(0.0, span.start - latest)
        latest = span.end
    for i, span in enumerate(spans):
        shares.append(share_of[i])
        busy.append(span.end - span.start)
        gaps.append(gap_of[i])
    return shares, busy, gaps


def profile(graph: Any, nodes: Sequence[Node], replays: int = REPLAYS) -> list[list[Span]]:
    """For each of ``replays`` replays the span of every timed node, in the order of ``nodes``."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    global _profiled
    _profiled = True
    timed = [node for node in nodes if node.kind in TIMED]
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    with profiler(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        # the first replay under the profiler pays for its buffers
        for _ in range(replays + 1):
            graph.replay()
            torch.cuda.synchronize()
    events = sorted(device_events(seen), key=lambda e: e.start)
    if len(events) != len(timed) * (replays + 1):
        raise RecordError(f"the profiler saw {len(events)} kernels and copies in {replays + 1} replays of a graph with "
                          f"{len(timed)}\n  fix: end whatever else uses this GPU from this process, and time again")
    return [match(events[i * len(timed) : (i + 1) * len(timed)], timed) for i in range(1, replays + 1)]


def device_events(seen: Any) -> Iterable[Event]:
    """What ran on the GPU."""
    for event in seen.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.is_user_annotation():
            # torch 2.13: the high half is the executable graph's number
            told = re.search(r'"graph node id": *"?(\d+)', getattr(event, "metadata_json", str)())
            number = int(told[1]) & 0xFFFFFFFF if told else 0
            yield Event(event.name(), event.start_ns(), event.start_ns() + event.duration_ns(), number)


def match(events: Sequence[Event], nodes: Sequence[Node]) -> list[Span]:
    """Spans of ``nodes``: by the numbers of the nodes where both have them, else events in the order of their starts;
    with several streams, function by function."""
    start = events[0].start
    spans = [Span((e.start - start) / 1e3, (e.end - start) / 1e3) for e in events]
    by_number = {event.node: span for event, span in zip(events, spans, strict=True)}
    if len(by_number) == len(nodes) and all(node.id in by_number for node in nodes):
        return [by_number[node.id] for node in nodes]
    if len({node.stream for node in nodes}) == 1:
        return spans
    waiting: dict[str, list[Span]] = {}
    ours = {node.function for node in nodes}
    for event, span in zip(events, spans, strict=True):
        waiting.setdefault(event.name if event.name in ours else "", []).append(span)
    known = {name for name in waiting if name}
    queues = {name: iter(found) for name, found in waiting.items()}
    return [next(queues[node.function if node.function in known else ""]) for node in nodes]


def segment_us(executable: Executable, cuts: Sequence[int], replays: int = 10) -> list[float]:
    """Median us between the cuts of a capture that records an event after each launch of ``cuts`` (ascending).

    An event costs its own time and a full edge; both are in every segment alike.
    """
    events = {cut: torch.cuda.Event(enable_timing=True, external=True) for cut in cuts}

    def after(launch: int) -> None:
        if launch in events:
            events[launch].record()

    step = capture(executable, after=after, warm_runs=1)
    rows = []
    for _ in range(replays + 1):
        step.replay()
        torch.cuda.synchronize()
        marks = [events[cut] for cut in cuts]
        rows.append([a.elapsed_time(b) * 1e3 for a, b in pairwise(marks)])
    return [statistics.median(column) for column in zip(*rows[1:], strict=True)]


def _median_of(values: Iterable[float]) -> float:
    return statistics.median(values)
