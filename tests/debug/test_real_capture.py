"""The debugger on a capture that an H200 really made (``data/README.md``): what can be said of it without a GPU."""
from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from k3plan.compiler.plan import load_plan
from k3plan.graphs.debug.diff import SUCCESS, diff_records
from k3plan.graphs.debug.inspect import inspect
from k3plan.graphs.debug.record import load_record
from k3plan.graphs.debug.time_table import by_kind, totals

DATA = Path(__file__).parent / "data"
RECORD, PLAN = load_record(DATA / "h200-4-layers.json"), load_plan(DATA / "h200-4-layers.plan.json")


def test_the_graph_is_the_plan() -> None:
    found = inspect(PLAN, RECORD)
    assert found.findings == ()
    assert found.checked > len(PLAN.launches) // 2
    assert found.edges["programmatic"] >= found.programmatic_planned > 0
    assert found.programmatic_unplanned >= 0
    assert len(str(found).splitlines()) <= 25
    assert found.path.source == "measured"


def test_every_node_is_of_one_launch_and_runs_after_the_one_before() -> None:
    owned = [node for launch in RECORD.launches for node in launch.nodes]
    assert owned == list(range(len(RECORD.nodes)))
    assert {(e.source, e.target) for e in RECORD.edges} == {(i, i + 1) for i in range(len(RECORD.nodes) - 1)}


def test_times_add_up_to_the_replay() -> None:
    assert RECORD.replay_us is not None
    assert 0.9 < totals(RECORD)["us"] / RECORD.replay_us < 1.1
    assert all(launch.us is not None and launch.us >= launch.gap_us for launch in RECORD.launches)
    assert sum(kind.count for kind in by_kind(PLAN, RECORD)) == len(PLAN.launches)


def test_pointers_do_not_overlap_and_have_users() -> None:
    spans = sorted((p.address, p.address + p.bytes, p.name) for p in RECORD.pointers if p.bytes)
    for (_, end, name), (start, _, other) in itertools.pairwise(spans):
        assert end <= start, f"{name} and {other}"
    assert all(p.readers or p.writers for p in RECORD.pointers if p.kind in ("weight", "state", "cache"))
    kinds = {p.kind for p in RECORD.pointers}
    assert {"weight", "state", "cache", "arena", "input", "output", "table", "zeroed"} == kinds


@pytest.mark.parametrize(("at", "change", "what"), [
    (5, {"grid": (3, 1, 1)}, "re-tiled"), (9, {"function": "_other"}, "replaced"),
])
def test_a_change_of_one_node_is_found(at: int, change: dict, what: str) -> None:
    other = replace(RECORD, nodes=tuple(replace(n, **change) if n.index == at else n for n in RECORD.nodes))
    found = diff_records(RECORD, other)
    assert [c.what for c in found.changes] == [what]
    assert found.update.word == SUCCESS


def test_the_files_are_small() -> None:
    assert sum(path.stat().st_size for path in DATA.glob("*.json")) < 300_000
