"""``k3plan graph capture``: captures a bound step under the tripwire and says what it saw, in findings.

Captures with ``capture`` itself, over an executable whose steps are wrapped. A failed capture can leave the process
unusable, so commands and tests run this in a process of its own, and the findings say what still works.
"""
from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from ...compiler.errors import Origin
from ...compiler.plan import Launch
from ..bind import Executable
from ..capture import CapturedStep, capture
from .codes import find_errors
from .findings import Finding, find
from .storage import KEPT, changed_places, contents, fill_with_padding, restore
from .trace import Event, tracing
from .tripwire import Break, DriverProbe, Tripwire, first_line, launched_outside

# CUDA error of the call that broke a capture -> code; what the trace saw comes first
CODE_OF_ERROR = {2: "CG-009", 902: "CG-005", 903: "CG-003", 904: "CG-004", 905: "CG-005", 906: "CG-002",
                 907: "CG-001", 908: "CG-012"}
CODE_OF_EVENT = {"tune": "CG-007", "compile": "CG-006", "load": "CG-008"}


@dataclass(frozen=True)
class Audit:
    """A watched capture. ``captured`` is None when it failed; ``state`` says then what still works."""

    captured: CapturedStep | None
    findings: tuple[Finding, ...]
    state: tuple[str, ...] = ()


def audit_capture(executable: Executable, *, pad: bool = True, mode: str = "thread_local", pool: Any = None,
                  origins: Mapping[str, Origin] | None = None) -> Audit:
    """Captures a bound step under watch. ``pad`` marks every row as padding first, as a capture should, and gives the
    inputs back afterwards; without it the warm runs use the inputs as they stand. ``mode`` is CUDA's error mode.

    Raises BindError off a GPU, RecordError without cuda-bindings.
    """
    tripwire = Tripwire(executable, DriverProbe())
    try:
        kept = contents(executable, (*KEPT, "index"))
        if pad:
            fill_with_padding(executable)
    except RuntimeError as refused:
        state = process_state(executable)
        text = (f"nothing can be captured here ({first_line(refused)}): an earlier capture failed or is still open; "
                + "; ".join(state))
        return Audit(None, (find("CG-015", text, plan=executable.plan, origins=origins),), state)
    before = contents(executable)
    captured, error = _watch(tripwire, pool, mode)
    if captured is None:
        state = process_state(executable)
        with suppress(RuntimeError):  # what broke may be the device itself
            restore(executable, kept)
        return Audit(None, tuple(explain_break(tripwire, error, mode, state, origins)), state)
    touched = changed_places(executable, before)
    restore(executable, kept)
    return Audit(captured, (*observations(tripwire, origins), *written_slots(executable, touched, origins)))


def _watch(tripwire: Tripwire, pool: Any, mode: str) -> tuple[CapturedStep | None, Exception | None]:
    """The capture, or what it raised."""
    with _collections(tripwire), tracing(tripwire.trace):
        try:
            captured = capture(tripwire.wrapped, pool, error_mode=mode)
        except Exception as error:
            return None, error
    return replace(captured, executable=tripwire.executable), None


@contextmanager
def _collections(tripwire: Tripwire) -> Iterator[None]:
    gc.callbacks.append(tripwire.collection)
    try:
        yield
    finally:
        gc.callbacks.remove(tripwire.collection)


def explain_break(tripwire: Tripwire, error: BaseException | None, mode: str, state: Sequence[str],
                  origins: Mapping[str, Origin] | None) -> Iterator[Finding]:
    """The finding of what broke a capture, and the one that says in which state the process is."""
    plan = tripwire.executable.plan
    broken = tripwire.broken or Break(None, "", first_line(error) if error else "")
    own = [e for e in tripwire.trace.events if e.launch == broken.launch and broken.launch is not None]
    code, where, text, number = _classify(tripwire, broken, own, error, mode)
    launch = plan.launches[number] if number is not None else None
    yield find(code, text, plan=plan, launch=launch, origins=origins, call=where)
    yield from observations(tripwire, origins)
    if state:
        mild = all("works" in trial or "bytes" in trial for trial in state)
        yield find("CG-015", f"the capture failed; in this process now: {'; '.join(state)}", plan=plan,
                   origins=origins, severity="warning" if mild else "")


def _classify(tripwire: Tripwire, broken: Break, own: Sequence[Event], error: BaseException | None, mode: str
              ) -> tuple[str, str, str, int | None]:
    """Code, place, words and launch number of a break."""
    others = [e for e in tripwire.trace.events if e.thread and e.kind == "wait"]
    tuned = [e for e in own if e.kind == "tune"]  # tuning waits as well
    for event in tuned[:1] or reversed([e for e in own if not e.thread]):
        if event.kind == "wait":
            return "CG-001", event.where, f"{event.name}: {broken.text}", broken.launch
        if event.kind in CODE_OF_EVENT:
            # what is compiled is loaded next: the first use is what went wrong
            code = "CG-006" if any(e.kind == "compile" for e in own) and not tuned else CODE_OF_EVENT[event.kind]
            return code, event.where, f"{event.name}, {event.kind} inside the capture: {broken.text}", broken.launch
    numbers = [e.number for e in find_errors(broken.text) + (find_errors(str(error)) if error else [])]
    number = next((n for n in numbers if n in CODE_OF_ERROR), numbers[0] if numbers else 0)
    outside = launched_outside(tripwire.trace)
    if number == 905 and outside:
        event = outside[-1]
        return "CG-003", event.where, f"{event.name} runs on a stream that is not captured", event.launch
    if number == 904:
        at = tripwire.side[-1] if tripwire.side else broken.launch
        return "CG-004", _place(tripwire, at), broken.text, at
    if (number in (0, 900, 901)) and others:
        event = others[-1]
        return "CG-012", event.where, f"thread {event.thread} calls {event.name} during the capture", broken.launch
    if number == 901 and mode == "global" and threading.active_count() > 1:
        names = ", ".join(t.name for t in threading.enumerate() if t is not threading.current_thread())
        return "CG-012", broken.where, f"the capture is lost at a sound call, other threads run: {names}", broken.launch
    return CODE_OF_ERROR.get(number, "CG-019"), broken.where, broken.text, broken.launch


def observations(tripwire: Tripwire, origins: Mapping[str, Origin] | None) -> Iterator[Finding]:
    """What went wrong without breaking the capture: launches outside of the graph, collections, allocations."""
    plan = tripwire.executable.plan
    tell = partial(find, plan=plan, origins=origins)
    outside: dict[int, Event] = {}
    for event in launched_outside(tripwire.trace):
        outside.setdefault(event.launch, event)
    for number, event in outside.items():
        code = "CG-002" if event.stream == 0 else "CG-003"
        yield tell(code, f"{event.name} runs once, now, and is not in the graph", launch=plan.launches[number],
                   call=event.where)
    for number in tripwire.lost:
        if number not in outside:
            yield tell("CG-013", "the launch left no node in the graph", launch=plan.launches[number])
    for number in dict.fromkeys(tripwire.collected):
        yield tell("CG-011", "the garbage collector ran during this launch", launch=plan.launches[number])
    made = [e for e in reversed(tripwire.trace.events) if e.kind in CODE_OF_EVENT and e.launch >= 0]
    for event in {e.launch: e for e in made}.values():  # the first of each launch
        if tripwire.broken is None:
            yield tell(CODE_OF_EVENT[event.kind], f"{event.name}: {event.kind} inside the capture", call=event.where,
                       launch=plan.launches[event.launch])
    for number, count in tripwire.allocated.items():
        launch: Launch = plan.launches[number]
        mild = "warning" if plan.choice(launch).entry.startswith("op:") else ""
        yield tell("CG-009", f"{count} allocations inside the capture", launch=launch, severity=mild)


def written_slots(executable: Executable, touched: Mapping[tuple[int, str], Sequence[int]],
                  origins: Mapping[str, Origin] | None) -> list[Finding]:
    """States and caches that changed while a capture warmed up."""
    if not touched:
        return []
    plan = executable.plan
    (rank, name), places = next(iter(touched.items()))
    launch = next(x for x in plan.launches if any(plan.tensors[t].buffer == name for t in (*x.outputs, *x.inputs)))
    what = "slots" if plan.buffers[name].kind == "state" else "pages"
    return [find("CG-045", f"{len(touched)} states and caches changed, the first is {name} of rank {rank}: {what} "
                 f"{list(places)[:8]}", plan=plan, launch=launch, origins=origins)]


def check_pools(steps: Sequence[CapturedStep]) -> list[Finding]:
    """Captures, in the order in which they were made, that do not share one pool or grew it."""
    found = []
    for earlier, later in pairwise(steps):
        rows = [s.executable.plan.spec.step.rows for s in (earlier, later)]
        if earlier.graph.pool() != later.graph.pool():
            found.append(find("CG-010", f"the capture of {rows[1]} rows has a pool of its own and took "
                              f"{later.captured_bytes} bytes", plan=later.executable.plan))
        elif rows[1] > rows[0] and later.captured_bytes:
            found.append(find("CG-010", f"{rows[1]} rows were captured after {rows[0]}: the pool grew by "
                              f"{later.captured_bytes} bytes", plan=later.executable.plan))
    return found


def process_state(executable: Executable) -> tuple[str, ...]:
    """What still works in this process after a capture that failed, by trying it. May itself leave traces."""
    device = executable.ranks[0].arena.device

    def again() -> None:
        graph, x = torch.cuda.CUDAGraph(), torch.zeros(1, device=device)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            x.add_(1)
        graph.replay()

    trials: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("waiting for the device", lambda: torch.cuda.synchronize(device)),
        ("a new allocation", lambda: torch.zeros(1 << 22, device=device)),
        ("an eager step", executable.run), ("a new capture", again))
    said = []
    for name, trial in trials:
        try:
            trial()
            said.append(f"{name} works")
        except Exception as error:
            said.append(f"{name} fails ({first_line(error)})")
    held = sum(s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0))
    return (*said, f"{held} bytes stay in pools of graphs") if held else tuple(said)


def _place(tripwire: Tripwire, launch: int | None) -> str:
    return next((e.where for e in reversed(tripwire.trace.events) if e.launch == launch), "")
