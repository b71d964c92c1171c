"""A faultless capture has no findings; each fault put into a record is found, named and placed."""
from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from made_records import made_record, on_streams, small_plan

from k3plan.compiler.errors import RecordError
from k3plan.compiler.plan import LaunchPlan
from k3plan.face import compile_plan
from k3plan.graphs.debug.inspect import Inspection, compare_buckets, critical_path, inspect
from k3plan.graphs.debug.record import Edge, Node, Pointer, Record

PLAN = small_plan()
GOOD = made_record(PLAN)
AT = next(i for i, launch in enumerate(PLAN.launches) if launch.dependent and launch.layer == 2)


def codes(found: Inspection) -> list[str]:
    return [finding.code for finding in found.findings]


def test_a_faultless_capture() -> None:
    found = inspect(PLAN, GOOD)
    assert found.findings == ()
    assert found.programmatic_planned == sum(x.dependent for x in PLAN.launches) > 0
    assert (found.missing, found.extra, found.unlike, found.programmatic_lost) == ((), (), (), ())
    assert found.path.nodes == len(PLAN.launches)
    assert found.path.us == pytest.approx(PLAN.us, abs=0.01)
    text = str(found)
    assert len(text.splitlines()) <= 25
    assert f"{len(PLAN.launches)} planned, {len(PLAN.launches)} found, 0 missing" in text
    assert "none: the graph is the plan" in text


def without_node(record: Record, at: int) -> Record:
    """The capture as it is when launch ``at`` went to a stream that does not capture."""
    shift = [i - (i > at) for i in range(len(record.nodes))]
    nodes = [replace(n, index=shift[n.index]) for n in record.nodes if n.index != at]
    edges = [Edge(shift[e.source], shift[e.target], e.kind) for e in record.edges if at not in (e.source, e.target)]
    edges.append(Edge(shift[at - 1], shift[at + 1], "programmatic"))
    launches = [replace(x, nodes=tuple(shift[n] for n in x.nodes if n != at)) for x in record.launches]
    return replace(record, nodes=tuple(nodes), edges=tuple(sorted(edges, key=lambda e: e.target)),
                   launches=tuple(launches))


def with_node(record: Record, at: int, kind: str) -> Record:
    """The capture with a node of no launch between ``at`` - 1 and ``at``."""
    def moved(i: int) -> int:
        return i + (i >= at)

    nodes = [replace(n, index=moved(n.index)) for n in record.nodes]
    nodes.insert(at, Node(at, kind))
    edges = [Edge(moved(e.source), moved(e.target), e.kind) for e in record.edges if e.target != at]
    edges += [Edge(at - 1, at), Edge(at, at + 1)]
    launches = [replace(x, nodes=tuple(map(moved, x.nodes))) for x in record.launches]
    return replace(record, nodes=tuple(nodes), edges=tuple(sorted(edges, key=lambda e: e.target)),
                   launches=tuple(launches))


def test_a_launch_on_the_wrong_stream_is_missing() -> None:
    found = inspect(PLAN, without_node(GOOD, AT))
    assert found.missing == (PLAN.launches[AT].id,)
    assert "CG-013" in codes(found)
    finding = found.findings[0]
    assert (finding.launch, finding.layer) == (PLAN.launches[AT].id, 2)
    assert PLAN.choice(PLAN.launches[AT]).kernel in finding.text
    assert finding.fix


@pytest.mark.parametrize("kind", ["memset", "memcpy"])
def test_a_node_between_two_launches_takes_the_programmatic_edge(kind: str) -> None:
    found = inspect(PLAN, with_node(GOOD, AT, kind))
    assert found.extra == (AT,)
    assert codes(found) == ["CG-014", "CG-018"]
    (launch, between), = found.programmatic_lost
    assert launch == PLAN.launches[AT].id
    assert f"a {kind} of no launch" in between
    assert f"{found.programmatic_planned - 1} kept, 1 lost" in str(found)


def test_an_edge_that_became_full() -> None:
    edges = tuple(replace(e, kind="full") if e.target == AT else e for e in GOOD.edges)
    found = inspect(PLAN, replace(GOOD, edges=edges))
    assert codes(found) == ["CG-018"]
    assert PLAN.choice(PLAN.launches[AT - 1]).kernel in found.findings[0].text


@pytest.mark.parametrize(("change", "words"), [
    ({"grid": (9, 1, 1)}, "grid (9, 1, 1), bound (8, 1, 1)"), ({"block": (64, 1, 1)}, "threads 64, bound 128"),
    ({"shared_bytes": 99}, "shared bytes 99, bound 1024"), ({"function": "other"}, "function other, bound"),
])
def test_geometry_that_is_not_the_bound_one(change: dict, words: str) -> None:
    nodes = tuple(replace(n, **change) if n.index == AT else n for n in GOOD.nodes)
    found = inspect(PLAN, replace(GOOD, nodes=nodes))
    assert codes(found) == ["CG-017"]
    assert words in found.findings[0].text
    assert found.unlike == (PLAN.launches[AT].id,)


def test_a_launch_of_more_kernels_than_bound() -> None:
    launches = list(GOOD.launches)
    launches[AT] = replace(launches[AT], nodes=(AT, AT + 1))
    launches[AT + 1] = replace(launches[AT + 1], nodes=())
    nodes = tuple(replace(n, launch=AT) if n.index == AT + 1 else n for n in GOOD.nodes)
    found = inspect(PLAN, replace(GOOD, launches=tuple(launches), nodes=nodes))
    assert "CG-017" in codes(found)
    assert "2 kernels in the graph, the bound launch starts 1" in "".join(f.text for f in found.findings)


@pytest.mark.parametrize(("drop", "code"), [(lambda e: e.target == 10, "CG-003"), (lambda e: e.source == 10, "CG-004")])
def test_streams_that_hang_loose(drop: Callable[[Edge], bool], code: str) -> None:
    edges = tuple(e for e in GOOD.edges if not drop(e))
    edges = (*edges, Edge(9, 11)) if code == "CG-004" else (*edges, Edge(10, 12))
    assert code in codes(inspect(PLAN, replace(GOOD, edges=edges)))


def side_branch() -> tuple[LaunchPlan, Record]:
    """Launch 8 on stream 1, forked after 7 and joined before 10."""
    plan = on_streams(PLAN, 8)
    record = made_record(plan)
    return plan, replace(record, edges=(*record.edges, Edge(7, 8), Edge(8, 10)))


def test_streams_forks_joins_and_what_is_beside_the_path() -> None:
    plan, record = side_branch()
    found = inspect(plan, record)
    assert found.streams == {0: len(plan.launches) - 1, 1: 1}
    assert (found.forks, found.joins) == (1, (10,))
    assert "CG-003" not in codes(found)
    longer = max((8, 9), key=lambda i: plan.choice(plan.launches[i]).us)
    assert found.path.beside == (plan.launches[17 - longer].id,)


def test_the_path_takes_measured_times_when_there_are_any() -> None:
    plan, record = side_branch()
    launches = [replace(x, us=1.0, busy_us=1.0) for x in record.launches]
    launches[8] = replace(launches[8], us=50.0, busy_us=50.0)
    path = critical_path(plan, replace(record, launches=tuple(launches)))
    assert (path.source, path.beside) == ("measured", (plan.launches[9].id,))
    assert path.us == pytest.approx(50.0 + len(plan.launches) - 2)


def test_a_capture_of_another_plan_is_refused() -> None:
    with pytest.raises(RecordError, match="fix: inspect it with the plan that was captured"):
        inspect(small_plan("step.query=2"), GOOD)


def test_buckets_that_share_a_mailbox() -> None:
    def bucket(address: int, cost: int) -> Record:
        return replace(GOOD, pointers=(Pointer("all_reduce.mailbox", address, 64, "zeroed"),), captured_bytes=cost)

    shared = compare_buckets([bucket(4096, 10), bucket(4096, 30)])
    assert [f.code for f in shared] == ["CG-016", "CG-054", "CG-054"]
    assert "all_reduce.mailbox" in shared[0].text
    assert "30 B" in shared[1].text  # the dearest first
    assert [f.code for f in compare_buckets([bucket(4096, 10), bucket(8192, 30)])] == ["CG-054", "CG-054"]


def test_json_holds_everything() -> None:
    data = json.loads(inspect(PLAN, without_node(GOOD, AT)).to_json())
    assert data["missing"] == [PLAN.launches[AT].id]
    assert data["findings"][0]["code"] == "CG-013"


def test_the_full_model_is_inspected_in_a_moment() -> None:
    plan = compile_plan("examples/k3-h200-tp16.yaml")
    record = made_record(plan)
    started = time.process_time()
    found = inspect(plan, record)
    assert time.process_time() - started < 5.0
    assert found.findings == ()
    assert found.planned == len(plan.launches) > 500
