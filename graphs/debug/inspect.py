"""Holds a recorded capture against its plan: is every launch there, once, with its shape, edges and stream.

Needs no GPU. ``inspect`` returns numbers and findings; ``compare_buckets`` looks at several captures of one model.
"""
from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from ...compiler.errors import Origin, RecordError
from ...compiler.explain import size, table
from ...compiler.plan import LaunchPlan
from .findings import Finding, find, render
from .record import Node, Record

FUNCTIONS_SHOWN = 8


@dataclass(frozen=True)
class Path:
    """The longest chain of nodes that wait for each other. ``us`` by ``source``: measured, or predicted by the plan."""

    nodes: int
    us: float
    source: str
    beside: tuple[str, ...]  # launches that are not on it


@dataclass(frozen=True)
class Inspection:
    """What a captured graph is, against its plan. Launches are told by id, nodes by number."""

    title: str
    kinds: Mapping[str, int]
    planned: int
    missing: tuple[str, ...]
    extra: tuple[int, ...]
    checked: int  # launches whose kernels were held against the bound ones
    unlike: tuple[str, ...]
    edges: Mapping[str, int]
    programmatic_planned: int
    programmatic_lost: tuple[tuple[str, str], ...]  # launch, what stands before it
    programmatic_unplanned: int
    streams: Mapping[int, int]
    forks: int
    joins: tuple[int, ...]
    path: Path
    functions: tuple[tuple[str, int, str, str, str], ...]  # name, nodes, grids, threads, shared bytes
    costs: str
    findings: tuple[Finding, ...]

    def to_json(self) -> str:
        """Every field."""
        return json.dumps(asdict(self), indent=1)

    def __str__(self) -> str:
        found = self.planned - len(self.missing)
        kept = self.programmatic_planned - len(self.programmatic_lost)
        beside = Counter(text for _, text in self.programmatic_lost)
        lost = [f"            {count} lost to {text}" for text, count in beside.most_common(3)]
        joins = f", {len(self.joins)} joins (the first at node {self.joins[0]})" if self.joins else ", no join"
        streams = ", ".join(f"stream {s}: {n} nodes" for s, n in self.streams.items())
        off = f", {len(self.path.beside)} launches beside it" if self.path.beside else ""
        lines = [
            self.title,
            f"nodes       {sum(self.kinds.values())}: " + ", ".join(f"{n} {kind}" for kind, n in self.kinds.items()),
            f"launches    {self.planned} planned, {found} found, {len(self.missing)} missing; "
            f"{len(self.extra)} nodes are of no launch",
            f"geometry    grid, threads and shared memory of {self.checked} launches as bound: "
            f"{len(self.unlike) or 'none'} differ" + (f" ({', '.join(self.unlike[:3])})" if self.unlike else ""),
            f"edges       {sum(self.edges.values())}: " + ", ".join(f"{n} {kind}" for kind, n in self.edges.items()),
            f"dependent   {self.programmatic_planned} programmatic edges planned, {kept} kept, "
            f"{len(self.programmatic_lost)} lost; {self.programmatic_unplanned} inside launches or not planned", *lost,
            f"streams     {streams}; {self.forks} forks{joins}",
            f"path        {self.path.nodes} nodes, {self.path.us / 1e3:.3f} ms {self.path.source}{off}",
            f"costs       {self.costs}",
            "functions", table(("function", "nodes", "grids", "threads", "shared"), [
                (name[:48], str(n), grids, threads, shared)
                for name, n, grids, threads, shared in self.functions[:FUNCTIONS_SHOWN]], left=1),
        ]
        if len(self.functions) > FUNCTIONS_SHOWN:
            lines.append(f"  and {len(self.functions) - FUNCTIONS_SHOWN} more")
        return "\n".join([*lines, "findings", render(self.findings, "  none: the graph is the plan")])


def inspect(plan: LaunchPlan, record: Record, origins: Mapping[str, Origin] | None = None) -> Inspection:
    """Compares a capture with the plan that was captured. Raises RecordError when it is of another plan."""
    if record.plan_key != plan.key or len(record.launches) != len(plan.launches):
        raise RecordError(f"a capture of plan {record.plan_key} with {len(record.launches)} launches, this is plan "
                          f"{plan.key} with {len(plan.launches)}\n  fix: inspect it with the plan that was captured")
    missing = [i for i, launch in enumerate(record.launches) if not launch.nodes]
    extra = [node for node in record.nodes if node.launch is None]
    unlike = _unlike(record)
    lost, unplanned = _programmatic(plan, record)
    sources, targets = Counter(e.source for e in record.edges), Counter(e.target for e in record.edges)
    findings = [find("CG-013", _missing_text(plan, i), plan=plan, launch=plan.launches[i], origins=origins)
                for i in missing]
    findings += [find("CG-014", f"a {node.kind} node{_named(node)} that no planned launch put there", plan=plan,
                      launch=_before(plan, record, node), origins=origins) for node in extra]
    findings += [find("CG-017", text, plan=plan, launch=plan.launches[i], origins=origins) for i, text in unlike]
    findings += [find("CG-018", f"waits for the end of {text}", plan=plan, launch=plan.launches[i], origins=origins)
                 for i, text in lost]
    findings += _ends(plan, record, sources, targets, origins)
    return Inspection(
        title=_title(record), kinds=dict(Counter(node.kind for node in record.nodes)), planned=len(plan.launches),
        missing=tuple(plan.launches[i].id for i in missing), extra=tuple(node.index for node in extra),
        checked=sum(bool(launch.bound) for launch in record.launches),
        unlike=tuple(plan.launches[i].id for i, _ in unlike),
        edges=dict(Counter(edge.kind for edge in record.edges)),
        programmatic_planned=sum(launch.dependent for launch in plan.launches),
        programmatic_lost=tuple((plan.launches[i].id, text) for i, text in lost), programmatic_unplanned=unplanned,
        streams=dict(sorted(Counter(node.stream for node in record.nodes).items())),
        forks=sum(n > 1 for n in sources.values()), joins=tuple(sorted(t for t, n in targets.items() if n > 1)),
        path=critical_path(plan, record), functions=_functions(record.nodes), costs=costs_text(record),
        findings=tuple(findings))


def critical_path(plan: LaunchPlan, record: Record) -> Path:
    """The longest chain by each launch's measured share of the step, or by the plan's times where it was not timed."""
    timed = any(launch.busy_us is not None for launch in record.launches)
    weight = dict.fromkeys(range(len(record.nodes)), 0.0)
    for launch, own in zip(plan.launches, record.launches, strict=True):
        us = (own.us or 0.0) if timed else plan.choice(launch).us
        for number in own.nodes:
            weight[number] = us / len(own.nodes)
    before: dict[int, list[int]] = {}
    for edge in record.edges:
        before.setdefault(edge.target, []).append(edge.source)
    length: list[float] = []
    via: list[int | None] = []
    for node in record.nodes:
        longest = max(before.get(node.index, ()), key=lambda n: length[n], default=None)
        via.append(longest)
        length.append(weight[node.index] + (length[longest] if longest is not None else 0.0))
    at: int | None = max(range(len(length)), key=length.__getitem__, default=None)
    total, on = length[at] if at is not None else 0.0, set()
    while at is not None:
        on.add(at)
        at = via[at]
    beside = tuple(x.id for x in record.launches if x.nodes and not on.intersection(x.nodes))
    return Path(len(on), round(total, 3), "measured" if timed else "predicted", beside)


def compare_buckets(records: Sequence[Record]) -> list[Finding]:
    """What captures of one model must not share, and what each bucket costs."""
    findings = []
    owner: dict[int, tuple[str, Record]] = {}
    for record in records:
        for pointer in record.pointers:
            if pointer.kind == "zeroed" and pointer.bytes:
                name, other = owner.setdefault(pointer.address, (pointer.name, record))
                if other is not record:
                    findings.append(find("CG-016", f"{name} is at one address in the graphs of buckets {other.bucket} "
                                                   f"and {record.bucket}"))
    for record in sorted(records, key=lambda r: -r.captured_bytes):
        findings.append(find("CG-054", f"bucket {record.bucket}: {costs_text(record)}"))
    return findings


def _unlike(record: Record) -> list[tuple[int, str]]:
    """Launches whose nodes are not the kernels that the bound launch says it starts, and how."""
    found = []
    for index, launch in enumerate(record.launches):
        nodes = [record.nodes[n] for n in launch.nodes if record.nodes[n].kind == "kernel"]
        if not launch.bound or not launch.nodes:
            continue
        if len(nodes) != len(launch.bound):
            found.append((index, f"{len(nodes)} kernels in the graph, the bound launch starts {len(launch.bound)}"))
            continue
        for node, bound in zip(nodes, launch.bound, strict=True):
            threads = node.block[0] * node.block[1] * node.block[2]
            pairs = [("function", node.function, bound.function), ("grid", node.grid, bound.grid),
                     ("threads", threads, bound.threads), ("shared bytes", node.shared_bytes, bound.shared_bytes)]
            wrong = [f"{what} {seen}, bound {wanted}" for what, seen, wanted in pairs
                     if wanted not in (None, "") and seen != wanted]
            if wrong:
                found.append((index, f"{node.function}: " + "; ".join(wrong)))
                break
    return found


def _programmatic(plan: LaunchPlan, record: Record) -> tuple[list[tuple[int, str]], int]:
    """Planned programmatic edges that are not there, each with what the launch waits for; and edges nobody planned."""
    incoming: dict[int, list] = {}
    for edge in record.edges:
        incoming.setdefault(edge.target, []).append(edge)
    last: dict[int, int] = {}
    lost, kept = [], 0
    for index, launch in enumerate(plan.launches):
        own = set(record.launches[index].nodes)
        if launch.dependent and own:
            entering = [e for node in sorted(own) for e in incoming.get(node, ()) if e.source not in own]
            before = last.get(launch.stream)
            good = [e for e in entering if e.kind == "programmatic" and record.nodes[e.source].launch == before]
            if good:
                kept += 1
            else:
                lost.append((index, _obstacle(plan, record, before, entering)))
        last[launch.stream] = index
    return lost, sum(edge.kind == "programmatic" for edge in record.edges) - kept


def _obstacle(plan: LaunchPlan, record: Record, before: int | None, entering: Sequence) -> str:
    if not entering:
        return "nothing: it is the first node of the graph"
    node = record.nodes[entering[0].source]
    if node.launch is None or node.launch != before:
        owner = "no launch" if node.launch is None else _short(plan, node.launch)
        return f"a {node.kind}{_named(node)} of {owner} that stands between it and the launch before it"
    return f"{_short(plan, node.launch)}, whose last node is a {node.kind}{_named(node)}"


def _ends(plan: LaunchPlan, record: Record, sources: Mapping[int, int], targets: Mapping[int, int],
          origins: Mapping[str, Origin] | None) -> list[Finding]:
    """Graphs begin with the first launch and end with one node; a stream that hangs loose shows here."""
    findings = []
    roots = [node for node in record.nodes if not targets.get(node.index)]
    leaves = [node for node in record.nodes if not sources.get(node.index)]
    for node in roots[1:]:
        findings.append(find("CG-003", f"stream {node.stream} begins at a {node.kind}{_named(node)} that waits for "
                                       "nothing", plan=plan, launch=_before(plan, record, node), origins=origins))
    for node in leaves[:-1]:
        findings.append(find("CG-004", f"stream {node.stream} ends at a {node.kind}{_named(node)} that nothing waits "
                                       "for", plan=plan, launch=_before(plan, record, node), origins=origins))
    return findings


def _before(plan: LaunchPlan, record: Record, node: Node) -> str | None:
    """The launch of a node; for a node of none the launch that was captured last before it."""
    for index in range(node.index, -1, -1):
        launch = record.nodes[index].launch
        if launch is not None:
            return plan.launches[launch].id
    return None


def _missing_text(plan: LaunchPlan, index: int) -> str:
    return f"{plan.choice(plan.launches[index]).kernel} left no node: it ran once, at capture, and never again"


def _short(plan: LaunchPlan, index: int) -> str:
    launch = plan.launches[index]
    return plan.choice(launch).kernel


def _named(node: Node) -> str:
    return f" {node.title}" if node.function else ""


def _functions(nodes: Sequence[Node]) -> tuple[tuple[str, int, str, str, str], ...]:
    grouped: dict[str, list[Node]] = {}
    for node in nodes:
        if node.kind == "kernel":
            grouped.setdefault(node.title, []).append(node)
    rows = []
    for name, own in sorted(grouped.items(), key=lambda item: -len(item[1])):
        blocks = [n.grid[0] * n.grid[1] * n.grid[2] for n in own]
        threads = [n.block[0] * n.block[1] * n.block[2] for n in own]
        rows.append((name, len(own), _between(blocks), _between(threads), _between([n.shared_bytes for n in own])))
    return tuple(rows)


def _between(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}..{high}"


def _title(record: Record) -> str:
    m = record.machine
    return (f"capture of plan {record.plan_key}, bucket {record.bucket}, on {m.name} ({m.sms} SMs, CUDA {m.driver}, "
            f"torch {m.torch}, triton {m.triton})")


def costs_text(record: Record) -> str:
    replay = "replay not timed" if record.replay_us is None else f"replay {record.replay_us / 1e3:.3f} ms"
    host = "" if record.host_us is None else f", {record.host_us:.1f} us of the host"
    host += "" if record.host_least_us is None else f" ({record.host_least_us:.1f} at least)"
    queued = "" if record.queued_us is None else f", {record.queued_us / 1e3:.3f} ms when queued behind another"
    host += "".join(f" ({note})" for note in record.notes)
    taken = size(record.captured_bytes + record.graph_bytes)
    took = f"captured in {record.capture_s:.2f} s, {taken} taken by the capture"
    return f"{replay}{queued}{host}; {took}"
