"""When each launch of a step starts, how long it takes and what it waits for: the numbers that every drawing shares.

Times are those of a record where it has them, else the plan's. ``basis`` says of each number which it is; nothing
here estimates anything that neither the plan nor the record holds.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ...compiler.device import load_device
from ...compiler.explain import floor_us
from ...compiler.ir import DTYPE_BYTES
from ...compiler.memory import Tensor
from ...compiler.ops import OPS
from ...compiler.plan import LaunchPlan, PlanChoice
from .record import Record

# what a launch's time is: see BASES
MODEL, ALONE, GRAPH = "model", "alone", "graph"
BASES = {
    MODEL: "predicted from the device table",
    ALONE: "predicted: the kernel's time measured alone",
    GRAPH: "measured inside the graph",
}
# colours and legends go by the family of a launch: the first of these that one of its ops belongs to
FAMILIES = ("moe", "mla", "kda", "comm", "attn_res", "head", "linear", "norm")


@dataclass(frozen=True)
class Slice:
    """One launch on its stream, in us from the start of the step. ``planned_us`` is what the plan said.

    Measured, ``us`` is the launch's share of the step: from the end of what ran before it to its own end. Its kernels
    ran ``busy_us`` of it, or more where they began before that end; in the first ``idle_us`` nothing ran.
    """

    index: int
    stream: int
    start_us: float
    us: float
    floor_us: float
    planned_us: float
    basis: str  # of BASES
    busy_us: float | None = None
    idle_us: float | None = None

    @property
    def end_us(self) -> float:
        return self.start_us + self.us


@dataclass(frozen=True)
class Link:
    """Launch ``target`` waits for launch ``source``. ``kind`` is "programmatic", "full", or "lost": planned as
    programmatic and captured as a full edge."""

    source: int
    target: int
    kind: str


def slices(plan: LaunchPlan, record: Record | None = None) -> list[Slice]:
    """The launches in plan order. Measured shares follow one another, as they add up to the step; planned launches
    start when their stream is free and what they read from other streams is written."""
    device = load_device(plan.spec.gpu)
    seen = {launch.id: launch for launch in record.launches if launch.us is not None} if record else {}
    producers = list(reads_from(plan))
    free: dict[int, float] = {}
    found: list[Slice] = []
    for index, launch in enumerate(plan.launches):
        choice, measured = plan.choice(launch), seen.get(launch.id)
        floor = floor_us(choice, device)
        if seen:
            start = found[-1].end_us if found else 0.0
        else:
            others = [found[i].end_us for i in producers[index] if plan.launches[i].stream != launch.stream]
            start = max([free.get(launch.stream, 0.0), *others])
        if measured is not None and measured.us is not None:
            found.append(Slice(index, launch.stream, start, measured.us, floor, choice.us, GRAPH, measured.busy_us,
                               measured.gap_us))
        else:
            found.append(Slice(index, launch.stream, start, choice.us, floor, choice.us,
                               ALONE if choice.measured else MODEL))
        free[launch.stream] = found[-1].end_us
    return found


def step_us(placed: list[Slice], record: Record | None = None) -> float:
    """The step: the replay where it was measured, else the end of the last launch."""
    if record is not None and record.replay_us is not None:
        return record.replay_us
    return max((s.end_us for s in placed), default=0.0)


def reads_from(plan: LaunchPlan) -> Iterator[dict[int, list[str]]]:
    """For each launch, the launches whose output it reads, and those tensors under the reader's names.

    A tensor may be a view: what counts is who wrote its buffer last.
    """
    written: dict[str, int] = {}
    for index, launch in enumerate(plan.launches):
        found: dict[int, list[str]] = {}
        for name in launch.inputs:
            writer = written.get(plan.tensors[name].buffer)
            if writer is not None:
                found.setdefault(writer, []).append(name)
        yield found
        written.update((plan.tensors[name].buffer, index) for name in launch.outputs)


def links(plan: LaunchPlan, record: Record | None = None) -> list[Link]:
    """What waits for what: the edges of the captured graph between planned launches, or the ones the plan asks for."""
    return _planned_links(plan) if record is None else _recorded_links(plan, record)


def _planned_links(plan: LaunchPlan) -> list[Link]:
    found = []
    before: dict[int, int] = {}
    for index, (launch, producers) in enumerate(zip(plan.launches, reads_from(plan), strict=True)):
        last = before.get(launch.stream)
        if last is not None:
            found.append(Link(last, index, "programmatic" if launch.dependent else "full"))
        found += [Link(i, index, "full") for i in producers if plan.launches[i].stream != launch.stream]
        before[launch.stream] = index
    return found


def _recorded_links(plan: LaunchPlan, record: Record) -> list[Link]:
    number = {launch.id: index for index, launch in enumerate(plan.launches)}
    owner = {node: number.get(launch.id) for launch in record.launches for node in launch.nodes}
    kinds: dict[tuple[int, int], str] = {}
    for edge in record.edges:
        source, target = owner.get(edge.source), owner.get(edge.target)
        if source is None or target is None or source == target:
            continue
        planned = plan.launches[target].dependent and source == target - 1
        kind = "programmatic" if edge.kind == "programmatic" else "lost" if planned else "full"
        if kinds.get((source, target)) != "programmatic":
            kinds[source, target] = kind
    return [Link(source, target, kind) for (source, target), kind in sorted(kinds.items())]


def family(choice: PlanChoice) -> str:
    """Of FAMILIES: what a kernel is about, by the ops that it computes."""
    homes = {OPS[op].fn.__module__.rpartition(".")[2] for op in choice.ops if op in OPS}
    return next((name for name in FAMILIES if name in homes), FAMILIES[-1])


def layer_kind(plan: LaunchPlan, layer: int) -> str:
    """``KDA + MoE`` and so on, as ``compile`` titles it."""
    model = plan.spec.model
    return f"{model.attention[layer].upper()} + {'MoE' if model.mlp[layer] == 'moe' else 'dense MLP'}"


@dataclass(frozen=True)
class Span:
    """Launches ``first`` to ``last`` that stand together: a layer, the embedding or the head. Spans with the same
    ``form`` have the same kernels in the same order."""

    title: str
    layer: int | None
    kind: str
    first: int
    last: int
    form: int


def spans(plan: LaunchPlan) -> list[Span]:
    """The step in order: embedding, layers, head."""
    groups: list[tuple[int | None, str, list[int]]] = []
    for index, launch in enumerate(plan.launches):
        stage = "" if launch.layer is not None else launch.stage
        if groups and groups[-1][:2] == (launch.layer, stage):
            groups[-1][2].append(index)
        else:
            groups.append((launch.layer, stage, [index]))
    forms: dict[tuple[int, ...], int] = {}
    found = []
    for layer, stage, indices in groups:
        form = forms.setdefault(tuple(plan.launches[i].choice for i in indices), len(forms))
        outside = {"embed": "embedding"}.get(stage, stage)
        kind = layer_kind(plan, layer) if layer is not None else outside
        found.append(Span(f"L{layer}" if layer is not None else outside, layer, kind, indices[0], indices[-1], form))
    return found


def bytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor, a view counted as the part that it shows."""
    return math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
