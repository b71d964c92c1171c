"""The watched capture, on a CPU with an emulated capture status. ``test_failures_gpu.py`` provokes the real ones."""
from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from broken import launch_index, small_step, with_step
from torch.utils._python_dispatch import TorchDispatchMode

from k3plan.graphs.bind import Executable
from k3plan.graphs.capture import no_garbage_collection
from k3plan.graphs.debug import audit as auditing
from k3plan.graphs.debug.audit import audit_capture, explain_break, observations, written_slots
from k3plan.graphs.debug.findings import Finding, render
from k3plan.graphs.debug.storage import changed_places, contents, fill_with_padding
from k3plan.graphs.debug.trace import tracing
from k3plan.graphs.debug.tripwire import CAPTURING, INVALID, NOT_CAPTURING, Tripwire

LAUNCH = "L0.attn.o_proj"
UNSUPPORTED = "CUDA error: operation not permitted when stream is capturing"


class Capture:
    """A capture status that tests set; every status question while capturing adds no node, every step one."""

    def __init__(self) -> None:
        self.now, self.nodes = NOT_CAPTURING, 0

    def status(self) -> int:
        return self.now

    def frontier(self) -> tuple[int, ...]:
        return (self.nodes,)


@pytest.fixture(scope="module")
def sound() -> Executable:
    return small_step()


def audit(executable: Executable, capture: Capture, mode: str = "thread_local") -> list[Finding]:
    """What ``audit_capture`` does, with an emulated stream."""
    tripwire = Tripwire(executable, capture)
    wrapped, failed = tripwire.wrapped, None
    gc.callbacks.append(tripwire.collection)
    try:
        with tracing(tripwire.trace), no_garbage_collection():
            wrapped.run()
            capture.now = CAPTURING
            try:
                for step in wrapped.steps:
                    step()
                    capture.nodes += 1
            except RuntimeError as error:
                failed = error
            capture.now = NOT_CAPTURING
    finally:
        gc.callbacks.remove(tripwire.collection)
    if failed or tripwire.broken:
        return list(explain_break(tripwire, failed, mode, ("a new capture fails",), None))
    return list(observations(tripwire, None))


def after(then: Callable[[], None], capture: Capture) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """A step that behaves while warming up, and does something more while capturing."""
    def make(step: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            if capture.now == CAPTURING:
                then()
            else:
                step()
        return run
    return make


def raising(text: str) -> Callable[[], None]:
    def fail() -> None:
        raise RuntimeError(text)
    return fail


class Counting(Capture):
    """Each frontier differs from the one before, as if every launch left a node."""

    def frontier(self) -> tuple[int, ...]:
        self.nodes += 1
        return (self.nodes,)


def test_a_sound_capture_has_no_findings(sound: Executable) -> None:
    assert audit(sound, Counting()) == []


@pytest.mark.parametrize(("text", "code"), [
    ("CUDA error: dependency created on uncaptured work in another stream", "CG-005"),
    ("CUDA error: operation would make the legacy stream depend on a capturing blocking stream", "CG-002"),
    (UNSUPPORTED, "CG-019"), ("CUDA error: operation failed due to a previous error during capture", "CG-019"),
    ("CUDA error: attempt to terminate a thread-local capture sequence from another thread", "CG-012"),
    ("CUDA out of memory. cudaErrorMemoryAllocation", "CG-009"), ("something else", "CG-019"),
])
def test_the_launch_that_raised_is_named(sound: Executable, text: str, code: str) -> None:
    capture = Counting()
    found = audit(with_step(sound, LAUNCH, after(raising(text), capture)), capture)
    assert [(f.code, f.launch, f.layer) for f in found] == [(code, LAUNCH, 0), ("CG-015", None, None)], render(found)
    assert text in found[0].text
    assert f"{Path(__file__).name}:" in (found[0].where or "")
    assert "a new capture fails" in found[1].text


def test_12_a_wait_is_told_as_a_wait(sound: Executable) -> None:
    capture = Counting()

    def wait() -> None:
        torch.ones(1).item()
        raise RuntimeError(UNSUPPORTED)

    found = audit(with_step(sound, LAUNCH, after(wait, capture)), capture)
    assert [(f.code, f.launch) for f in found][:1] == [("CG-001", LAUNCH)]
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if ".item()" in text)
    assert f"{Path(__file__).name}:{line}" in (found[0].where or "")


def test_the_line_of_a_silent_break(sound: Executable) -> None:
    capture = Counting()

    def silent() -> None:
        value = 1
        capture.now = INVALID  # this line
        value += 1

    found = audit(with_step(sound, LAUNCH, after(silent, capture)), capture)
    assert [(f.code, f.launch) for f in found][:1] == [("CG-019", LAUNCH)]
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "# this line" in text)
    assert f"{Path(__file__).name}:{line}" in (found[0].where or "")


def test_19_another_thread(sound: Executable, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = Counting()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)

    def work() -> None:
        torch.cuda.synchronize()

    def other() -> None:
        thread = threading.Thread(target=work, name="logger")
        thread.start()
        thread.join()
        capture.now = INVALID

    found = audit(with_step(sound, LAUNCH, after(other, capture)), capture, "global")
    assert found[0].code == "CG-012"
    assert "thread logger calls torch.cuda.synchronize()" in found[0].text
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1)
                if text.strip() == "torch.cuda.synchronize()")
    assert f"{Path(__file__).name}:{line}" in (found[0].where or "")


def test_20_a_launch_without_a_node(sound: Executable) -> None:
    class Lossy(Capture):
        """As many nodes as launches, but for the one under test."""

        def frontier(self) -> tuple[int, ...]:
            if not self.lost:
                self.nodes += 1
            return (self.nodes,)

        lost = False

    capture = Lossy()

    def lose(step: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            step()
            capture.lost = capture.now == CAPTURING
        return run

    index = launch_index(sound, LAUNCH)
    found = audit(with_step(sound, LAUNCH, lose), capture)
    assert [f.code for f in found][:1] == ["CG-013"]
    assert found[0].launch == sound.plan.launches[index].id


def test_18_a_collection_during_the_capture(sound: Executable) -> None:
    capture = Counting()

    def collect() -> None:
        gc.collect()

    found = audit(with_step(sound, LAUNCH, after(collect, capture)), capture)
    assert ("CG-011", LAUNCH) in [(f.code, f.launch) for f in found]


def test_5_a_warm_up_through_real_slots() -> None:
    live = small_step()
    before = contents(live)
    live.run()
    found = written_slots(live, changed_places(live, before), None)
    assert [(f.code, f.layer) for f in found] == [("CG-045", 0)]
    assert "slots [0, 1]" in found[0].text


def test_5_a_warm_up_of_padding_leaves_no_trace() -> None:
    live = small_step((0, 3))
    fill_with_padding(live)
    before = contents(live)
    live.run()
    assert written_slots(live, changed_places(live, before), None) == []


class Refusing(TorchDispatchMode):
    """A process whose stream is still capturing: CUDA refuses every call that cannot be captured."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(UNSUPPORTED)


def test_21_a_capture_that_was_left_open(sound: Executable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool cannot even read what it would have to put back: it says so, with what still works, and captures
    nothing."""
    monkeypatch.setattr(auditing, "DriverProbe", Capture)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"total_size": 4096, "segment_pool_id": (0, 1)}])
    monkeypatch.setattr(auditing, "capture", lambda *args, **how: pytest.fail("captured over an open capture"))
    with Refusing():
        audit = audit_capture(sound)
    assert audit.captured is None
    (found,) = audit.findings
    assert (found.code, found.severity, found.launch) == ("CG-015", "error", None)
    assert f"nothing can be captured here ({UNSUPPORTED}): an earlier capture failed or is still open" in found.text
    assert f"an eager step fails ({UNSUPPORTED})" in found.text
    assert f"a new allocation fails ({UNSUPPORTED})" in audit.state
    assert audit.state[-1] == "4096 bytes stay in pools of graphs"


def test_21_a_process_in_which_nothing_failed_works(sound: Executable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_snapshot", list)
    state = auditing.process_state(sound)
    assert {"a new allocation works", "an eager step works"} <= set(state)
