"""The times of a captured step as tables: by kind of launch or launch by launch, against plan and floor."""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...compiler.errors import Origin, RecordError
from ...compiler.explain import size, table
from ...compiler.plan import LaunchPlan
from .findings import Finding, find, render, to_json
from .record import Record

SLOW, SLOW_US, SLOW_SHARE = 2.0, 1.0, 0.002
Origins = Mapping[str, Origin]


@dataclass(frozen=True)
class Kind:
    """Launches of one kernel at one shape and configuration: sums over ``count`` launches, in us."""

    kernel: str
    shape: str
    config: str
    source: str
    count: int
    us: float
    busy_us: float
    gap_us: float
    floor_us: float
    planned_us: float
    measured: bool
    slowest: str  # the launch that took longest

    def row(self) -> tuple[str, ...]:
        n = self.count
        return (self.kernel, self.shape, self.config, self.source, str(n), f"{self.us / n:.2f}",
                f"{self.busy_us / n:.2f}", f"{self.gap_us / n:.2f}", f"{self.floor_us / n:.2f}",
                f"{self.planned_us / n:.2f}{'m' if self.measured else 'p'}", f"{self.us / 1e3:.3f}",
                f"{(self.us - self.planned_us) / 1e3:+.3f}")


HEAD = ("kernel", "weights", "config", "config from", "count", "us", "busy", "gap", "floor", "planned", "total ms",
        "over plan")


def by_kind(plan: LaunchPlan, record: Record) -> list[Kind]:
    """Launches grouped by kernel, shapes of weights and states, and configuration; the longest total first."""
    groups: dict[tuple[str, str, str, str], list[int]] = {}
    for index, launch in enumerate(plan.launches):
        choice = plan.choice(launch)
        config = " ".join(f"{k}={v}" for k, v in choice.config.items())
        source = choice.config_source.split(";")[0].replace("tuned at the nearest shape", "near").replace(
            "tuned at this shape", "tuned")
        groups.setdefault((choice.kernel, _shape(plan, index), config, source), []).append(index)
    kinds = []
    for (kernel, shape, config, source), members in groups.items():
        timed = [record.launches[i] for i in members]
        choices = [plan.choice(plan.launches[i]) for i in members]
        kinds.append(Kind(kernel, shape, config, source, len(members), sum(x.us or 0.0 for x in timed),
                          sum(x.busy_us or 0.0 for x in timed), sum(x.gap_us or 0.0 for x in timed),
                          sum(x.floor_us for x in timed), sum(c.us for c in choices), choices[0].measured,
                          max(timed, key=lambda x: x.us or 0.0).id))
    return sorted(kinds, key=lambda k: -k.us)


def slow_kinds(plan: LaunchPlan, record: Record, origins: Origins | None = None) -> list[Finding]:
    """Kinds of launches that take more than ``SLOW`` times what the plan expected, the dearest first.

    A launch must be at least ``SLOW_US`` over, since what comes before a small one sways its share by as much, and its
    kind ``SLOW_SHARE`` of the step.
    """
    found, step, whole = [], plan.spec.step, totals(record)["us"]
    for kind in sorted(by_kind(plan, record), key=lambda k: k.planned_us - k.us):
        one, planned = kind.us / kind.count, kind.planned_us / kind.count
        # of a capture that was not timed every share is 0
        over = kind.us - kind.planned_us
        if one <= SLOW * planned or one - planned < SLOW_US or over < SLOW_SHARE * whole:
            continue
        price = "measured on the kernel alone" if kind.measured else "predicted"
        many = f"{kind.count} launches" if kind.count > 1 else "one launch"
        text = (f"{kind.kernel} at {kind.shape}: {one:.1f} us a launch, {one / planned:.1f} x its planned "
                f"{planned:.1f} us ({price}); {many}, {over / 1e3:.3f} ms more than planned")
        rows, tune = f"--rows {step.sequences}x{step.query} --out TABLE", "k3plan tune PLAN.yaml"
        if kind.kernel.startswith("torch.") and kind.kernel != "torch.linear":
            # tune times the kernels of the menus and the library's product
            fix = (f"Run k3plan explain PLAN {kind.slowest}, time what else it lists with {tune} --only KERNEL {rows}, "
                   "and compile again.")
        elif kind.measured:
            fix = f"Run {tune} {rows} --times TIMES --in-step on this GPU: it prices launches inside the step."
        else:
            fix = f"Run {tune} --only {kind.kernel} {rows} on this GPU, and compile again."
        found.append(find("CG-055", text, plan=plan, launch=kind.slowest, origins=origins,
                          field="step.sequences", fix=fix))
    return found


def _shape(plan: LaunchPlan, index: int) -> str:
    """Shapes of the weights, states and caches that a launch reads, without vectors; else of its first output."""
    launch = plan.launches[index]
    held = [plan.tensors[n] for n in launch.inputs]
    kept = [t.shape for t in held if plan.buffers[t.buffer].kind in ("weight", "state", "cache") and len(t.shape) > 1]
    kept = kept or [plan.tensors[n].shape for n in launch.outputs[:1]]
    return ",".join("x".join(map(str, shape)) for shape in kept)


def show_times(plan: LaunchPlan, record: Record, by: str = "kind", origins: Origins | None = None) -> str:
    """What ``graph time`` prints. ``by`` is "kind" or "launch". Raises RecordError: not timed, no such table."""
    _check(record, by)
    sums, replay = totals(record), record.replay_us
    against = f", {sums['us'] / replay:.2f} of the replay without the profiler, {replay / 1e3:.3f} ms" if replay else ""
    if record.queued_us:
        against += f", {record.queued_us / 1e3:.3f} ms when queued"
    lines = [
        f"launches sum to {sums['us'] / 1e3:.3f} ms inside a profiled replay{against}",
        f"kernels ran {sums['busy_us'] / 1e3:.3f} ms in all, nothing ran for {sums['gap_us'] / 1e3:.3f} ms; byte floor "
        f"{sums['floor_us'] / 1e3:.3f} ms, planned {plan.us / 1e3:.3f} ms",
        "a launch's us is its share of the step: from the end of all before it to its own end",
    ]
    lines.append(show_kinds(by_kind(plan, record)) if by == "kind" else show_launches(plan, record))
    slow = slow_kinds(plan, record, origins)
    return "\n".join([*lines, *(["findings", render(slow)] if slow else [])])


def times_json(plan: LaunchPlan, record: Record, by: str = "kind", origins: Origins | None = None) -> str:
    """The same as JSON."""
    _check(record, by)
    rows: list[dict[str, Any]] = [asdict(kind) for kind in by_kind(plan, record)] if by == "kind" else [
        {"launch": own.id, "layer": launch.layer, "kernel": plan.choice(launch).kernel, "us": own.us,
         "busy_us": own.busy_us, "gap_us": own.gap_us, "floor_us": own.floor_us, "bytes": own.bytes,
         "planned_us": plan.choice(launch).us, "planned_is_measured": plan.choice(launch).measured}
        for launch, own in zip(plan.launches, record.launches, strict=True)]
    return json.dumps({"replay_us": record.replay_us, "host_us": record.host_us, "totals": totals(record),
                       "planned_us": plan.us, "kinds" if by == "kind" else "launches": rows,
                       "findings": to_json(slow_kinds(plan, record, origins))}, indent=1)


def show_launches(plan: LaunchPlan, record: Record) -> str:
    """One launch a line, in order, with the time at which it ended."""
    rows, now = [], 0.0
    for launch, own in zip(plan.launches, record.launches, strict=True):
        now += own.us or 0.0
        choice = plan.choice(launch)
        rows.append((launch.id, choice.kernel, size(own.bytes), *(_us(x) for x in (own.us, own.busy_us, own.gap_us)),
                     f"{own.floor_us:.2f}", f"{choice.us:.2f}{'m' if choice.measured else 'p'}", f"{now:.1f}"))
    return table(("launch", "kernel", "bytes", "us", "busy", "gap", "floor", "planned", "ends at"), rows)


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _check(record: Record, by: str) -> None:
    if by not in ("kind", "launch"):
        raise RecordError(f"no table by {by!r}\n  fix: use --by kind or --by launch")
    if all(launch.us is None for launch in record.launches):
        raise RecordError("this capture was not timed\n  fix: record it with k3plan graph record, without --no-time")


def show_kinds(kinds: Sequence[Kind]) -> str:
    """One kind a line, the dearest first. Figures are of one launch, but for the totals."""
    return table(HEAD, [kind.row() for kind in kinds], left=4)


def totals(record: Record) -> Mapping[str, float]:
    """Sums in us over the launches: shares, busy, gaps, floors."""
    timed = record.launches
    return {"us": sum(x.us or 0.0 for x in timed), "busy_us": sum(x.busy_us or 0.0 for x in timed),
            "gap_us": sum(x.gap_us or 0.0 for x in timed), "floor_us": sum(x.floor_us for x in timed)}
