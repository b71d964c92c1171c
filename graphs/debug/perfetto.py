"""A step as a trace for Perfetto and chrome://tracing: one track a stream, one slice a launch.

Writes the Chrome trace event format, whose times are in us. Decides nothing: the slices are ``report_times``'.
"""
from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ...compiler.explain import size
from ...compiler.plan import LaunchPlan
from .record import Record
from .report_times import BASES, Slice, family, links, slices, spans, step_us

LAYERS = 0  # thread of the layers; stream n is thread n + 1


def perfetto_trace(plan: LaunchPlan, record: Record | None = None) -> dict[str, Any]:
    """The trace as plain data: metadata, a slice for each layer and each launch, an arrow for each edge that is not
    simply the next launch of a stream."""
    placed = slices(plan, record)
    where = record.machine.name if record else f"{plan.spec.gpu}, no capture"
    events = [*_names(plan, where), *_layers(plan, placed), *(_launch(plan, s) for s in placed)]
    events += _arrows(plan, record, placed)
    about = {"plan": plan.key, "device": where, "step_us": round(step_us(placed, record), 3),
             "times": sorted({BASES[s.basis] for s in placed})}
    return {"displayTimeUnit": "ns", "otherData": about, "traceEvents": events}


def perfetto_json(plan: LaunchPlan, record: Record | None = None) -> str:
    """``perfetto_trace`` as text, an event a line."""
    trace = perfetto_trace(plan, record)
    events = ",\n".join(json.dumps(event, separators=(",", ":")) for event in trace["traceEvents"])
    head = json.dumps({key: value for key, value in trace.items() if key != "traceEvents"})
    return f'{head[:-1]}, "traceEvents": [\n{events}\n]}}\n'


def _names(plan: LaunchPlan, where: str) -> Iterator[dict[str, Any]]:
    def named(what: str, thread: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "pid": 0, "tid": thread, "name": what, "args": args}

    yield named("process_name", 0, name=f"plan {plan.key} on {where}")
    yield named("thread_name", LAYERS, name="layers")
    for stream in sorted({launch.stream for launch in plan.launches}):
        yield named("thread_name", stream + 1, name=f"stream {stream}")
        yield named("thread_sort_index", stream + 1, sort_index=stream + 1)


def _layers(plan: LaunchPlan, placed: list[Slice]) -> Iterator[dict[str, Any]]:
    for span in spans(plan):
        inside = placed[span.first: span.last + 1]
        start, end = min(s.start_us for s in inside), max(s.end_us for s in inside)
        yield {"ph": "X", "pid": 0, "tid": LAYERS, "ts": round(start, 4), "dur": round(end - start, 4), "cat": "layer",
               "name": f"{span.title} {span.kind}" if span.layer is not None else span.kind,
               "args": {"launches": len(inside), "floor_us": round(sum(s.floor_us for s in inside), 4)}}


def _launch(plan: LaunchPlan, at: Slice) -> dict[str, Any]:
    launch = plan.launches[at.index]
    choice = plan.choice(launch)
    why_not = {kernel: reason for kernel, _, reason in choice.losers}
    args: dict[str, Any] = {
        "launch": launch.id, "ops": " + ".join(choice.ops), "bytes": choice.bytes, "moves": size(choice.bytes),
        "flops": choice.flops, "floor_us": round(at.floor_us, 4), "planned_us": at.planned_us,
        **({"busy_us": at.busy_us, "idle_us": at.idle_us} if at.busy_us is not None else {}),
        "time": BASES[at.basis], "source": choice.source, "config": dict(choice.config),
        "starts": "with the launch before it" if launch.dependent else "after the launch before it",
        "why_not": why_not or "no other kernel of the menu computes this here"}
    return {"ph": "X", "pid": 0, "tid": launch.stream + 1, "ts": round(at.start_us, 4), "dur": round(at.us, 4),
            "cat": family(choice), "name": choice.kernel, "args": args}


def _arrows(plan: LaunchPlan, record: Record | None, placed: list[Slice]) -> Iterator[dict[str, Any]]:
    shown = (link for link in links(plan, record)
             if link.kind == "lost" or plan.launches[link.source].stream != plan.launches[link.target].stream)
    for number, link in enumerate(shown):
        source, target = placed[link.source], placed[link.target]
        same: dict[str, Any] = {"pid": 0, "cat": "edge", "name": f"{link.kind} edge", "id": number}
        yield {"ph": "s", "tid": source.stream + 1, "ts": round(source.start_us + source.us / 2, 4), **same}
        yield {"ph": "f", "bp": "e", "tid": target.stream + 1, "ts": round(target.start_us, 4), **same}
