"""The difference of two launch plans or of two captures, and whether CUDA could update one graph into the other.

Without a GPU the answer about the update is a prediction from CUDA's rule (same nodes of the same kinds, same edges of
the same kinds; functions, grids and pointers may change). ``update_result`` asks CUDA itself.
"""
from __future__ import annotations

import bisect
import json
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...compiler.difference import changed_fields
from ...compiler.errors import RecordError
from ...compiler.explain import ranges
from ...compiler.plan import Launch, LaunchPlan, load_plan
from .record import Record, is_capture, load_record

SUCCESS, TOPOLOGY = "cudaGraphExecUpdateSuccess", "cudaGraphExecUpdateErrorTopologyChanged"
NODE_KIND = "cudaGraphExecUpdateErrorNodeTypeChanged"


@dataclass(frozen=True)
class Change:
    """One thing that happened to some launches. ``what``: added, removed, replaced, re-tiled, moved or re-ordered."""

    what: str
    launch: str  # without its layer
    detail: str
    layers: tuple[int, ...] = ()
    count: int = 1

    def __str__(self) -> str:
        where = f" (layers {ranges(self.layers)})" if self.layers else ""
        return f"{self.what:<10} {self.launch}: {self.detail}{where}"


@dataclass(frozen=True)
class Update:
    """Whether an in-place update would do. ``word`` is CUDA's result, empty when it cannot be predicted."""

    word: str
    why: str
    predicted: bool = True

    def __str__(self) -> str:
        said = "predicted" if self.predicted else "CUDA says"
        return f"in-place graph update: {said} {self.word or 'nothing'}, {self.why}"


@dataclass(frozen=True)
class Difference:
    """What changed from ``old`` to ``new`` (keys of plans, or of the plans that were captured)."""

    old: str
    new: str
    settings: tuple[str, ...]
    changes: tuple[Change, ...]
    totals: str
    update: Update

    @property
    def equal(self) -> bool:
        return not self.settings and not self.changes

    def to_json(self) -> str:
        """All fields, changes one by one."""
        return json.dumps({**asdict(self), "equal": self.equal}, indent=1)

    def __str__(self) -> str:
        head = f"equal: {self.old}" if self.equal else f"{self.old} -> {self.new}"
        counted = Counter({c.what: 0 for c in self.changes})
        for change in self.changes:
            counted[change.what] += change.count
        lines = [head, *(f"  {line}" for line in self.settings)]
        if counted:
            lines.append("  launches " + ", ".join(f"{n} {what}" for what, n in counted.items()))
        return "\n".join([*lines, *(f"  {change}" for change in self.changes), f"  {self.totals}", f"  {self.update}"])


def diff_files(old: str | Path, new: str | Path) -> Difference:
    """``diff_plans`` or ``diff_records``, by what the files hold. Raises PlanError, or RecordError: one of each."""
    kinds = [is_capture(path) for path in (old, new)]
    if kinds[0] != kinds[1]:
        raise RecordError(f"{old} and {new}: one is a plan and the other a capture\n"
                          "  fix: pass two plans, or two captures")
    if kinds[0]:
        return diff_records(load_record(old), load_record(new))
    return diff_plans(load_plan(old), load_plan(new))


def diff_plans(old: LaunchPlan, new: LaunchPlan) -> Difference:
    """Launches added, removed, replaced by another kernel, re-tiled, moved to another stream or edge, re-ordered."""

    def facts(plan: LaunchPlan) -> dict[str, dict[str, Any]]:
        return {x.id: {"kernel": plan.choice(x).kernel, "tiles": dict(plan.choice(x).config), "edge": _edge(x)}
                for x in plan.launches}

    def update_facts(plan: LaunchPlan) -> list[Hashable]:
        # a torch op is as many nodes as torch likes, so only the same op is surely the same nodes
        entries = ((plan.choice(x).entry, x) for x in plan.launches)
        return [(e if e.startswith("op:") else "one kernel", x.stream, x.dependent) for e, x in entries]

    layers = {x.id: x.layer for plan in (old, new) for x in plan.launches}
    changes = _changes(facts(old), facts(new), layers)
    totals = (f"launches {len(old.launches)} -> {len(new.launches)}, "
              f"predicted {old.us / 1e3:.3f} -> {new.us / 1e3:.3f} ms")
    return Difference(old.key, new.key, tuple(changed_fields(old, new)), tuple(changes), totals,
                      _plan_update(update_facts(old), update_facts(new)))


def diff_records(old: Record, new: Record) -> Difference:
    """The same for two captures: the launches' own functions, grids and streams, and every edge of the graphs."""

    def facts(record: Record) -> dict[str, dict[str, Any]]:
        incoming = {e.target: e.kind for e in record.edges}
        found = {}
        for launch in record.launches:
            nodes = [record.nodes[i] for i in launch.nodes]
            found[launch.id] = {
                "kernel": ", ".join(n.function or n.kind for n in nodes),
                "tiles": {"grid": [n.grid for n in nodes], "block": [n.block for n in nodes],
                          "shared": [n.shared_bytes for n in nodes]},
                "edge": ", ".join(f"stream {n.stream} {incoming.get(n.index, 'root')}" for n in nodes)}
        return found

    settings = [f"{name}: {getattr(old, name)} -> {getattr(new, name)}" for name in ("bucket", "machine")
                if getattr(old, name) != getattr(new, name)]
    layers = {x.id: _layer(x.id) for record in (old, new) for x in record.launches}
    totals = (f"nodes {len(old.nodes)} -> {len(new.nodes)}, edges {len(old.edges)} -> {len(new.edges)}, "
              f"replay {_ms(old.replay_us)} -> {_ms(new.replay_us)}")
    changes = _changes(facts(old), facts(new), layers)
    return Difference(old.plan_key, new.plan_key, tuple(settings), tuple(changes), totals, predict_update(old, new))


def predict_update(old: Record, new: Record) -> Update:
    """CUDA's rule for ``cudaGraphExecUpdate`` applied to two records."""
    if len(old.nodes) != len(new.nodes):
        return Update(TOPOLOGY, f"{len(old.nodes)} nodes became {len(new.nodes)}: capture and instantiate again")
    for a, b in zip(old.nodes, new.nodes, strict=True):
        if a.kind != b.kind:
            return Update(NODE_KIND, f"node {a.index} was a {a.kind} and is a {b.kind}: capture and instantiate again")
    edges = [{(e.source, e.target, e.kind) for e in record.edges} for record in (old, new)]
    if edges[0] != edges[1]:
        source, target, kind = min(edges[0] ^ edges[1])
        side = "gone" if (source, target, kind) in edges[0] else "new"
        return Update(TOPOLOGY, f"the {kind} edge {source} -> {target} is {side}: capture and instantiate again")
    return Update(SUCCESS, "same nodes, same kinds, same edges")


def update_result(executable_graph: Any, graph: Any) -> Update:
    """Asks CUDA, which on success has made ``executable_graph`` (cudaGraphExec_t) do what ``graph`` says."""
    from cuda.bindings import runtime

    code, info = runtime.cudaGraphExecUpdate(runtime.cudaGraphExec_t(int(executable_graph)),
                                             runtime.cudaGraph_t(int(graph)))
    # a refusal comes as an error code too; leave no trace of it for the next call
    runtime.cudaGetLastError()
    return Update(info.result.name, f"{code.name}", predicted=False)


def _plan_update(old: list[Hashable], new: list[Hashable]) -> Update:
    if len(old) != len(new):
        return Update(TOPOLOGY, f"{len(old)} launches became {len(new)}: capture and instantiate again")
    unlike = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    if not unlike:
        return Update(SUCCESS, "each launch is as many nodes as before, on the same stream with the same edge")
    return Update("", f"{len(unlike)} launches differ in their edges or are torch ops of other names, the first at "
                      f"{unlike[0]}: compare two captures")


def _changes(old: Mapping[str, Mapping[str, Any]], new: Mapping[str, Mapping[str, Any]],
             layers: Mapping[str, int | None]) -> list[Change]:
    found: list[tuple[str, str, str]] = []  # what, launch, detail
    for name in [*old, *(n for n in new if n not in old)]:
        a, b = old.get(name), new.get(name)
        if a is None or b is None:
            found.append(("added" if a is None else "removed", name, (b or a or {})["kernel"]))
        elif a["kernel"] != b["kernel"]:
            found.append(("replaced", name, f"{a['kernel']} -> {b['kernel']}"))
        elif a["tiles"] != b["tiles"]:
            found.append(("re-tiled", name, f"{a['kernel']} {_unlike(a['tiles'], b['tiles'])}"))
        elif a["edge"] != b["edge"]:
            found.append(("moved", name, f"{a['edge']} -> {b['edge']}"))
    found += [("re-ordered", name, "runs at another place among the same launches") for name in _reordered(old, new)]
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for what, name, detail in found:
        short = name.split(".", 1)[1] if layers[name] is not None else name
        grouped.setdefault((what, short, detail), []).append(name)
    return [Change(what, short, detail, tuple(sorted(x for n in names if (x := layers[n]) is not None)), len(names))
            for (what, short, detail), names in grouped.items()]


def _reordered(old: Iterable[str], new: Iterable[str]) -> list[str]:
    """Launches of both that are outside the longest run of launches in the same order."""
    place = {name: i for i, name in enumerate(new)}
    common = [name for name in old if name in place]
    tails: list[int] = []
    ends: list[int] = []  # index into common of the last launch of the best run of each length
    before: list[int | None] = []
    for i, name in enumerate(common):
        at = bisect.bisect_left(tails, place[name])
        before.append(ends[at - 1] if at else None)
        tails[at:at + 1], ends[at:at + 1] = [place[name]], [i]
    kept, at_end = set(), ends[-1] if ends else None
    while at_end is not None:
        kept.add(common[at_end])
        at_end = before[at_end]
    return [name for name in common if name not in kept]


def _unlike(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    names = [n for n in {**a, **b} if a.get(n) != b.get(n)]
    return ", ".join(f"{n} {_short(a.get(n))} -> {_short(b.get(n))}" for n in names)


def _short(value: Any) -> str:
    return str(value[0] if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 1 else value)


def _edge(launch: Launch) -> str:
    return f"stream {launch.stream} {'programmatic' if launch.dependent else 'full'}"


def _layer(launch: str) -> int | None:
    head = launch.split(".", 1)[0]
    return int(head[1:]) if head[:1] == "L" and head[1:].isdigit() else None


def _ms(us: float | None) -> str:
    return "not timed" if us is None else f"{us / 1e3:.3f} ms"
