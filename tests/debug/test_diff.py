"""Differences of plans and of captures, and what CUDA would say of an update in place."""
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from made_records import made_record, on_streams, small_plan

from k3plan.compiler.errors import RecordError
from k3plan.compiler.plan import LaunchPlan, seal
from k3plan.graphs.debug.diff import (
    NODE_KIND,
    SUCCESS,
    TOPOLOGY,
    Difference,
    diff_files,
    diff_plans,
    diff_records,
    predict_update,
)
from k3plan.graphs.debug.record import Edge, Node

PLAN = small_plan()
RECORD = made_record(PLAN)
OURS = [i for i, x in enumerate(PLAN.launches) if not PLAN.choice(x).entry.startswith("op:")]


def whats(found: Difference) -> set[tuple[str, str]]:
    return {(change.what, change.launch) for change in found.changes}


def short(index: int) -> str:
    launch = PLAN.launches[index]
    return launch.id.split(".", 1)[1] if launch.layer is not None else launch.id


def with_launches(*launches: int, **choice: object) -> LaunchPlan:
    """``PLAN`` in which ``launches`` have a choice of their own."""
    choices, changed = list(PLAN.choices), list(PLAN.launches)
    for i in launches:
        choices.append(replace(PLAN.choice(PLAN.launches[i]), **choice))
        changed[i] = replace(PLAN.launches[i], choice=len(choices) - 1)
    return seal(replace(PLAN, choices=tuple(choices), launches=tuple(changed)))


def test_equal_plans() -> None:
    found = diff_plans(PLAN, small_plan())
    assert found.equal
    assert found.update.word == SUCCESS
    assert f"equal: {PLAN.key}" in str(found)


def test_retiled_and_replaced() -> None:
    at = OURS[5]
    found = diff_plans(PLAN, with_launches(at, config={"rows": 99}))
    assert whats(found) == {("re-tiled", short(at))}
    assert "-> 99" in found.changes[0].detail
    assert found.update.word == SUCCESS  # a grid may change in place
    assert whats(diff_plans(PLAN, with_launches(at, kernel="cute.other"))) == {("replaced", short(at))}


def test_added_and_removed() -> None:
    fewer = seal(replace(PLAN, launches=PLAN.launches[:-1]))
    found = diff_plans(PLAN, fewer)
    assert whats(found) == {("removed", short(len(PLAN.launches) - 1))}
    assert found.update.word == TOPOLOGY
    assert whats(diff_plans(fewer, PLAN)) == {("added", short(len(PLAN.launches) - 1))}


def test_moved_to_another_stream_and_reordered() -> None:
    found = diff_plans(PLAN, on_streams(PLAN, OURS[7]))
    assert whats(found) == {("moved", short(OURS[7]))}
    assert found.update.word != SUCCESS
    order = list(PLAN.launches)
    order.insert(20, order.pop(5))
    assert whats(diff_plans(PLAN, seal(replace(PLAN, launches=tuple(order))))) == {("re-ordered", short(5))}


def test_equal_changes_of_layers_are_told_once() -> None:
    alike: dict[str, list[int]] = {}
    for i in OURS:
        alike.setdefault(short(i), []).append(i)
    three = next(x for x in alike.values() if [PLAN.launches[i].layer for i in x] == [1, 2, 3])
    found = diff_plans(PLAN, with_launches(*three, kernel="cute.router"))
    (change,) = found.changes
    assert (change.count, change.layers) == (3, (1, 2, 3))
    assert "(layers 1-3)" in str(change)


def test_settings_of_the_plan_file() -> None:
    found = diff_plans(PLAN, small_plan("step.query=8"))
    assert "step.query: 1 -> 8" in found.settings
    assert json.loads(found.to_json())["equal"] is False


def test_equal_captures() -> None:
    found = diff_records(RECORD, made_record(PLAN))
    assert found.equal
    assert found.update.word == SUCCESS


@pytest.mark.parametrize(("change", "what"), [
    ({"grid": (9, 1, 1)}, "re-tiled"), ({"shared_bytes": 2048}, "re-tiled"), ({"function": "other"}, "replaced"),
    ({"stream": 1}, "moved"),
])
def test_changed_nodes(change: dict, what: str) -> None:
    nodes = tuple(replace(n, **change) if n.index == 9 else n for n in RECORD.nodes)
    found = diff_records(RECORD, replace(RECORD, nodes=nodes))
    assert whats(found) == {(what, short(9))}
    assert found.update.word == SUCCESS


def test_a_lost_programmatic_edge() -> None:
    at = next(e.target for e in RECORD.edges if e.kind == "programmatic")
    edges = tuple(replace(e, kind="full") if e.target == at else e for e in RECORD.edges)
    found = diff_records(RECORD, replace(RECORD, edges=edges))
    assert whats(found) == {("moved", short(at))}
    assert found.update.word == TOPOLOGY
    assert f"edge {at - 1} -> {at}" in found.update.why


def test_rule_of_an_update() -> None:
    more = replace(RECORD, nodes=(*RECORD.nodes, Node(len(RECORD.nodes), "memset")))
    assert predict_update(RECORD, more).word == TOPOLOGY
    other = replace(RECORD, nodes=tuple(replace(n, kind="memcpy") if n.index == 3 else n for n in RECORD.nodes))
    assert predict_update(RECORD, other).word == NODE_KIND
    turned = replace(RECORD, edges=(*RECORD.edges[:-1], Edge(0, RECORD.edges[-1].target)))
    assert predict_update(RECORD, turned).word == TOPOLOGY


def test_files_of_different_sorts(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    RECORD.save(tmp_path / "capture.json")
    assert diff_files(tmp_path / "plan.json", tmp_path / "plan.json").equal
    assert diff_files(tmp_path / "capture.json", tmp_path / "capture.json").equal
    with pytest.raises(RecordError, match="fix: pass two plans, or two captures"):
        diff_files(tmp_path / "plan.json", tmp_path / "capture.json")
