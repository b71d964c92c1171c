"""What a trace and CUDA's words mean: each break of a capture told by its kind, from events written down by hand."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from broken import launch_index, small_step

from k3plan.graphs.bind import Executable
from k3plan.graphs.debug.audit import check_pools, explain_break, observations
from k3plan.graphs.debug.findings import Finding, render
from k3plan.graphs.debug.trace import Event
from k3plan.graphs.debug.tripwire import Break, DriverProbe, Tripwire

LAUNCH = "L0.attn.o_proj"
CAPTURE_STREAM, SIDE_STREAM = 11, 12


@pytest.fixture(scope="module")
def step() -> Executable:
    return small_step()


def seen(step: Executable, *events: tuple[str, dict[str, Any]], **state: Any) -> Tripwire:
    """A tripwire after a capture in which the launch under test did ``events``."""
    at = launch_index(step, LAUNCH)
    tripwire = Tripwire(step, probe=object.__new__(DriverProbe))
    for kind, more in events:
        facts = {"stream": CAPTURE_STREAM, "captured": True, **more}
        tripwire.trace.events.append(Event(at, kind, more.pop("name", kind), "engine.py:7", **{
            k: v for k, v in facts.items() if k != "name"}))
    for name, value in state.items():
        setattr(tripwire, name, value)
    return tripwire


def first(step: Executable, tripwire: Tripwire, words: str, at_end: bool = False) -> Finding:
    tripwire.broken = None if at_end else Break(launch_index(step, LAUNCH), "engine.py:9", words)
    return next(iter(explain_break(tripwire, RuntimeError(words), "thread_local", (), None)))


@pytest.mark.parametrize(("kind", "events", "words", "code"), [
    (12, [("wait", {})], "operation not permitted when stream is capturing", "CG-001"),
    (16, [("compile", {}), ("load", {})], "operation not permitted when stream is capturing", "CG-006"),
    (16, [("load", {})], "operation not permitted when stream is capturing", "CG-008"),
    (16, [("tune", {}), ("wait", {})], "operation not permitted when stream is capturing", "CG-007"),
    (14, [("op", {"stream": SIDE_STREAM, "captured": False})],
     "dependency created on uncaptured work in another stream", "CG-003"),
    (15, [("op", {})], "dependency created on uncaptured work in another stream", "CG-005"),
    (13, [("kernel", {})], "operation would make the legacy stream depend on a capturing blocking stream", "CG-002"),
    (17, [("op", {})], "cudaErrorMemoryAllocation", "CG-009"),
    (19, [("wait", {"thread": "logger"})], "operation failed due to a previous error during capture", "CG-012"),
    (0, [("op", {})], "operation failed due to a previous error during capture", "CG-019"),
])
def test_a_break_is_told_by_its_kind(step: Executable, kind: int, events: list[Any], words: str, code: str) -> None:
    found = first(step, seen(step, *events), words)
    assert (found.code, found.launch, found.layer) == (code, LAUNCH, 0), str(found)
    assert "engine.py:" in (found.where or "")


def test_14_unjoined_work_is_of_the_launch_that_used_the_side_stream(step: Executable) -> None:
    at = launch_index(step, LAUNCH)
    tripwire = seen(step, ("op", {"stream": SIDE_STREAM}), side=[at])
    found = first(step, tripwire, "capturing stream has unjoined work", at_end=True)
    assert (found.code, found.launch) == ("CG-004", LAUNCH)
    assert "engine.py:7" in (found.where or "")


@pytest.mark.parametrize(("kind", "event", "state", "code", "severity"), [
    (13, ("kernel", {"stream": 0, "captured": False}), {}, "CG-002", "error"),
    (14, ("op", {"stream": SIDE_STREAM, "captured": False}), {}, "CG-003", "error"),
    (16, ("compile", {}), {}, "CG-006", "error"),
    (17, ("op", {}), {"allocated": {"at": 2}}, "CG-009", "warning"),  # a torch op: from the graph's own pool
    (18, ("op", {}), {"collected": ["at", "at"]}, "CG-011", "error"),
    (20, ("op", {}), {"lost": ["at"]}, "CG-013", "error"),
])
def test_what_does_not_break_the_capture(step: Executable, kind: int, event: Any, state: dict[str, Any], code: str,
                                         severity: str) -> None:
    at = launch_index(step, LAUNCH)
    state = {k: {at: v["at"]} if isinstance(v, dict) else [at] * len(v) for k, v in state.items()}
    found = list(observations(seen(step, event, **state), None))
    assert [(f.code, f.launch, f.severity) for f in found] == [(code, LAUNCH, severity)], render(found)


def test_what_the_warm_runs_do_is_no_finding(step: Executable) -> None:
    tripwire = seen(step)
    tripwire.trace.events.append(Event(-1, "compile", "_linear", "engine.py:7"))
    assert list(observations(tripwire, None)) == []


def captured(step: Executable, rows: int, pool: int, taken: int) -> Any:
    plan = SimpleNamespace(spec=SimpleNamespace(step=SimpleNamespace(rows=rows)), key="p")
    graph = SimpleNamespace(pool=lambda: (0, pool))
    return SimpleNamespace(executable=SimpleNamespace(plan=plan), graph=graph, captured_bytes=taken)


def test_17_pools_that_grow(step: Executable) -> None:
    assert check_pools([captured(step, 8, 1, 4096), captured(step, 4, 1, 0)]) == []
    assert [f.code for f in check_pools([captured(step, 8, 1, 0), captured(step, 4, 2, 4096)])] == ["CG-010"]
    small_first = check_pools([captured(step, 4, 1, 0), captured(step, 8, 1, 4096)])
    assert [f.code for f in small_first] == ["CG-010"]
    assert "8 rows were captured after 4" in small_first[0].text
