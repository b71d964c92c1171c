"""The data block of the report: a plan, and a record and findings where there are any, as compact plain JSON.

Every name stands once in ``strings``; tables are lists in the order of ``columns``, with names, shapes and times as
numbers into the shared lists. Decides nothing about how the page looks.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...compiler.device import load_device
from ...compiler.errors import Origin
from ...compiler.explain import floor_us, kinds, ranges
from ...compiler.plan import LaunchPlan
from .findings import Finding
from .record import Record
from .report_times import BASES, bytes_of, family, links, slices, spans, step_us

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "launches": ("id", "choice", "layer", "stage", "stream", "dependent", "start_us", "us", "planned_us", "busy_us",
                 "idle_us", "basis", "nodes", "inputs", "outputs", "scratch", "graph_nodes"),
    "tensors": ("name", "buffer", "dtype", "shape", "bytes"),
    "buffers": ("name", "kind", "bytes", "offset", "first", "last"),
    "links": ("source", "target", "kind"),
    "spans": ("title", "layer", "kind", "first", "last", "form"),
    "graph_nodes": ("kind", "function", "grid", "block", "shared_bytes", "stream"),
    "pointers": ("name", "address", "bytes", "kind", "readers", "writers"),
}
# the fields of a plan file that decide a launch: of all launches, of the attention and the MLP by kind, of the head
DECIDING = {
    "all": ("model.layers", "parallel.tp", "step.sequences", "step.query", "target.gpu", "profile",
            "numerics.activation"),
    "kda": ("model.attention", "numerics.kda_state"),
    "mla": ("model.attention", "step.context", "step.page_size", "numerics.kv_cache", "numerics.kv_scale",
            "choices.mla_front", "choices.side_stream"),
    "moe": ("model.mlp", "parallel.experts", "numerics.expert_activation", "choices.moe_front", "choices.moe_tail"),
    "dense": ("model.mlp", "model.dense_intermediate"),
    "embed": ("model.vocab",),
    "head": ("model.vocab", "step.outputs"),
}


@dataclass
class Strings:
    """Texts and shapes, each stored once; called with one, says its number."""

    items: list[Any] = field(default_factory=list)
    numbers: dict[Any, int] = field(default_factory=dict)

    def __call__(self, item: Any) -> int:
        number = self.numbers.setdefault(item, len(self.items))
        if number == len(self.items):
            self.items.append(item)
        return number

    def all(self, items: Iterable[Any]) -> list[int]:
        return [self(item) for item in items]


def report_data(plan: LaunchPlan, record: Record | None = None, findings: Sequence[Finding] = (),
                origins: Mapping[str, Origin] | None = None) -> dict[str, Any]:
    """Everything that the page shows. ``origins`` are those of the plan file, where it is at hand."""
    strings, shapes = Strings(), Strings()
    placed = slices(plan, record)
    device = load_device(plan.spec.gpu)
    tables = {
        "launches": _launches(plan, record, placed, strings),
        "tensors": [[strings(n), strings(t.buffer), strings(t.dtype), shapes(t.shape), bytes_of(t)]
                    for n, t in plan.tensors.items()],
        "buffers": [[strings(n), strings(b.kind), b.bytes, b.offset, b.first, b.last]
                    for n, b in plan.buffers.items()],
        "links": [[x.source, x.target, strings(x.kind)] for x in links(plan, record)],
        "spans": [[s.title, s.layer, strings(s.kind), s.first, s.last, s.form] for s in spans(plan)],
        "graph_nodes": [[strings(n.kind), strings(n.title), shapes(n.grid), shapes(n.block), n.shared_bytes,
                         n.stream] for n in (record.nodes if record else ())],
        "pointers": [[strings(p.name), p.address, p.bytes, strings(p.kind), list(p.readers), list(p.writers)]
                     for p in (record.pointers if record else ())],
    }
    return {
        "version": 1,
        "head": _head(plan, record, step_us(placed, record), sum(s.floor_us for s in placed)),
        "spec": _spec(plan, origins),
        "deciding": DECIDING,
        "device": {"name": device.name, "arch": device.arch, "figures": dict(device.figures)},
        "alternatives": [asdict(a) for a in plan.alternatives],
        "notes": list(plan.notes),
        "findings": [asdict(f) for f in findings],
        "bases": BASES,
        "choices": [{**asdict(c), "family": family(c), "floor_us": _round(floor_us(c, device))} for c in plan.choices],
        "kinds": [{"title": title, "first": plan.launches.index(found[0]), "count": len(found)}
                  for title, found in kinds(plan) if found],
        "columns": COLUMNS, **tables, "strings": strings.items, "shapes": shapes.items,
    }


def _launches(plan: LaunchPlan, record: Record | None, placed: list[Any], strings: Strings) -> list[list[Any]]:
    seen = {launch.id: launch for launch in record.launches} if record else {}
    rows = []
    for launch, at in zip(plan.launches, placed, strict=True):
        nodes = list(seen[launch.id].nodes) if launch.id in seen else []
        rows.append([
            strings(launch.id), launch.choice, launch.layer, strings(launch.stage), launch.stream,
            int(launch.dependent), _round(at.start_us), _round(at.us), _round(at.planned_us), at.busy_us, at.idle_us,
            strings(at.basis), strings.all(launch.nodes), strings.all(launch.inputs), strings.all(launch.outputs),
            strings.all(launch.scratch.values()), nodes])
    return rows


def _head(plan: LaunchPlan, record: Record | None, step: float, floor: float) -> dict[str, Any]:
    """Totals. ``basis`` says whether ``step_us`` is the replay that was measured or the plan's prediction."""
    spec = plan.spec
    measured = record is not None and record.replay_us is not None
    alone = sum(plan.choice(x).us for x in plan.launches if plan.choice(x).measured)
    held: dict[str, int] = {}
    for buffer in plan.buffers.values():
        if buffer.kind != "arena":
            held[buffer.kind] = held.get(buffer.kind, 0) + buffer.bytes
    return {
        "key": plan.key, "model": spec.model.family, "layers": len(spec.layers), "layer_numbers": ranges(spec.layers),
        "gpu": spec.gpu, "tp": spec.parallel.tp, "experts": spec.parallel.experts, "profile": spec.profile,
        "sequences": spec.step.sequences, "query": spec.step.query, "context": spec.step.context,
        "launches": len(plan.launches), "step_us": _round(step), "planned_us": _round(plan.us),
        "floor_us": _round(floor), "basis": "measured" if measured else "predicted",
        "measured_alone_us": _round(alone), "bytes": sum(plan.choice(x).bytes for x in plan.launches),
        "flops": sum(plan.choice(x).flops for x in plan.launches),
        "held": held, "arena_bytes": plan.arena_bytes, "record": _record(record),
    }


def _record(record: Record | None) -> dict[str, Any] | None:
    if record is None:
        return None
    kinds: dict[str, int] = {}
    for node in record.nodes:
        kinds[node.kind] = kinds.get(node.kind, 0) + 1
    return {
        "machine": asdict(record.machine), "bucket": str(record.bucket), "replay_us": record.replay_us,
        "host_us": record.host_us, "queued_us": record.queued_us,
        "captured_bytes": record.captured_bytes, "capture_s": record.capture_s,
        "notes": list(record.notes), "node_kinds": kinds, "nodes": len(record.nodes), "edges": len(record.edges),
        "timed": sum(launch.us is not None for launch in record.launches),
        "sum_us": _round(sum(launch.us or 0.0 for launch in record.launches)),
        "busy_us": _round(sum(launch.busy_us or 0.0 for launch in record.launches)),
        "idle_us": _round(sum(launch.gap_us or 0.0 for launch in record.launches)),
    }


def _spec(plan: LaunchPlan, origins: Mapping[str, Origin] | None) -> list[list[Any]]:
    """Field, value and where it came from; None where the plan file is not at hand."""
    spec = plan.spec
    values: dict[str, Any] = {"model.family": spec.model.family, "model.layers": ranges(spec.layers)}
    values |= {f"parallel.{k}": v for k, v in asdict(spec.parallel).items()}
    values |= {f"step.{k}": v for k, v in asdict(spec.step).items()}
    values |= {"target.gpu": spec.gpu, "profile": spec.profile, "capture.buckets": spec.buckets}
    values |= {f"numerics.{k}": v for k, v in asdict(spec.numerics).items()}
    values |= {f"choices.{k}": v for k, v in asdict(spec.choices).items()}
    shown = {name for names in DECIDING.values() for name in names if name.startswith("model.")}
    for name in sorted(shown - values.keys()):
        value = getattr(spec.model, name.removeprefix("model."))
        values[name] = "one a layer" if isinstance(value, tuple) else value
    return [[name, _text(value), _origin(origins, name)] for name, value in values.items()]


def _origin(origins: Mapping[str, Origin] | None, name: str) -> str | None:
    if not origins:
        return None
    # a preset or a config names the whole model
    found = origins.get(name) or (origins.get("model.preset") if name == "model.family" else None)
    return str(found) if found is not None else ""


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def _round(us: float) -> float:
    return round(us, 4)
