"""The debugger on captures that an H200 really made (``data/README.md``): what can be said of them without a GPU."""
from __future__ import annotations

import itertools
import lzma
from dataclasses import replace
from pathlib import Path

import pytest

from k3plan.compiler.plan import LaunchPlan, load_plan
from k3plan.graphs.debug.diff import SUCCESS, diff_records
from k3plan.graphs.debug.inspect import inspect
from k3plan.graphs.debug.record import Record, load_record
from k3plan.graphs.debug.time_table import by_kind, totals

DATA = Path(__file__).parent / "data"
RECORD, PLAN = load_record(DATA / "h200-4-layers.json"), load_plan(DATA / "h200-4-layers.plan.json")
Captured = tuple[LaunchPlan, Record]


@pytest.fixture(scope="module", params=["four-layers", "the-whole-step"])
def captured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Captured:
    """Triton kernels and cuBLAS; and all 93 layers with the kernels of both languages."""
    if request.param == "four-layers":
        return PLAN, RECORD
    where = tmp_path_factory.mktemp("capture")
    for name in ("h200-93-layers.json", "h200-93-layers.plan.json"):
        (where / name).write_bytes(lzma.decompress((DATA / f"{name}.xz").read_bytes()))
    return load_plan(where / "h200-93-layers.plan.json"), load_record(where / "h200-93-layers.json")


def test_the_whole_step_has_kernels_of_both_languages(captured: Captured) -> None:
    plan, record = captured
    kinds = {choice.kernel.partition(".")[0] for choice in plan.choices}
    assert kinds == ({"triton", "torch"} if len(plan.spec.layers) == 4 else {"triton", "cute"})
    assert {n.function.startswith("cute_") for n in record.nodes} == ({False} if "torch" in kinds else {False, True})


def test_the_graph_is_the_plan(captured: Captured) -> None:
    plan, record = captured
    found = inspect(plan, record)
    assert found.findings == ()
    assert found.checked > len(plan.launches) // 2
    assert found.edges["programmatic"] >= found.programmatic_planned > 0
    assert found.programmatic_unplanned >= 0
    assert len(str(found).splitlines()) <= 25
    assert found.path.source == "measured"


def test_every_node_is_of_one_launch_and_runs_after_the_one_before(captured: Captured) -> None:
    _, record = captured
    owned = [node for launch in record.launches for node in launch.nodes]
    assert owned == list(range(len(record.nodes)))
    assert {(e.source, e.target) for e in record.edges} == {(i, i + 1) for i in range(len(record.nodes) - 1)}


def test_times_add_up_to_the_replay(captured: Captured) -> None:
    plan, record = captured
    assert record.replay_us is not None
    assert 0.9 < totals(record)["us"] / record.replay_us < 1.1
    assert all(launch.us is not None and launch.us >= launch.gap_us for launch in record.launches)
    assert sum(kind.count for kind in by_kind(plan, record)) == len(plan.launches)


def test_pointers_do_not_overlap_and_have_users(captured: Captured) -> None:
    _, record = captured
    spans = sorted((p.address, p.address + p.bytes, p.name) for p in record.pointers if p.bytes)
    for (_, end, name), (start, _, other) in itertools.pairwise(spans):
        assert end <= start, f"{name} and {other}"
    assert all(p.readers or p.writers for p in record.pointers if p.kind in ("weight", "state", "cache"))
    kinds = {p.kind for p in record.pointers}
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
    assert sum(path.stat().st_size for path in DATA.glob("*.json*")) < 300_000
