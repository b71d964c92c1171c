"""A capture that is watched: the stream's capture status is asked after every launch, and the first launch that broke
the capture is named, with the line of the call. Says what state the process is in after a capture that failed.

Captures with ``capture`` itself, over an executable whose steps are wrapped. Needs cuda-bindings; a failed capture
can leave the process unusable, so commands and tests run it in a process of its own.
"""
from __future__ import annotations

import gc
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch

from ...compiler.errors import Origin, RecordError
from ...compiler.plan import Launch
from ..bind import Executable
from ..capture import CapturedStep, capture
from .codes import find_errors
from .findings import Finding, find
from .storage import changed_places, contents, kept_contents
from .trace import Event, Trace, is_caller, tracing

NOT_CAPTURING, CAPTURING, INVALID = 0, 1, 2
# CUDA error of the call that broke a capture -> code; what the trace saw comes first
CODE_OF_ERROR = {2: "CG-009", 902: "CG-005", 903: "CG-003", 904: "CG-004", 905: "CG-005", 906: "CG-002",
                 907: "CG-001", 908: "CG-012"}
CODE_OF_EVENT = {"tune": "CG-007", "compile": "CG-006", "load": "CG-008"}


class Probe(Protocol):
    """What is asked of the current stream."""

    def status(self) -> int:
        """NOT_CAPTURING, CAPTURING or INVALID."""

    def frontier(self) -> tuple[int, ...]:
        """Nodes that the next launch of the stream would wait for."""


class DriverProbe:
    """The current CUDA stream, by cuda-bindings."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError:
            raise RecordError("cuda-bindings is not installed\n  fix: pip install k3plan[cuda]") from None
        self.driver = driver

    def _stream(self) -> Any:
        return self.driver.CUstream(torch.cuda.current_stream().cuda_stream)

    def status(self) -> int:
        error, status = self.driver.cuStreamIsCapturing(self._stream())
        return int(status) if int(error) == 0 else INVALID

    def frontier(self) -> tuple[int, ...]:
        error, _, _, _, nodes, *_ = self.driver.cuStreamGetCaptureInfo(self._stream())
        return tuple(map(int, nodes)) if int(error) == 0 else ()


@dataclass(frozen=True)
class Break:
    """The first call that broke the capture: launch number (None after the last), place, CUDA's or Python's words."""

    launch: int | None
    where: str
    text: str


@dataclass
class Tripwire:
    """Wraps the steps of ``executable``; ``wrapped`` is what to capture, ``broken`` and ``lost`` what came of it."""

    executable: Executable
    probe: Probe
    trace: Trace = field(default_factory=Trace)
    broken: Break | None = None
    lost: list[int] = field(default_factory=list)  # launches that left no node in the graph
    collected: list[int] = field(default_factory=list)  # launches during which the garbage collector ran
    side: list[int] = field(default_factory=list)  # launches with work on another captured stream
    allocated: dict[int, int] = field(default_factory=dict)

    @property
    def wrapped(self) -> Executable:
        steps = list(self.executable.steps)
        ends = [*self.executable.first[1:], len(steps)]
        for number, (start, end) in enumerate(zip(self.executable.first, ends, strict=True)):
            steps[start:end] = [partial(self._watched, number, step) for step in steps[start:end]]
        return replace(self.executable, steps=tuple(steps))

    def _watched(self, launch: int, step: Callable[[], None]) -> None:
        if self.probe.status() == NOT_CAPTURING:
            self.trace.launch = -1
            return step()
        self.trace.launch = launch
        before, made = self.probe.frontier(), _allocated()
        lines = _Lines(self.probe.status)
        try:
            with lines:
                step()
        except Exception as error:
            self._break(launch, _line_of(error), f"{type(error).__name__}: {_first_line(error)}")
            raise
        if self.probe.status() != CAPTURING:
            self._break(launch, lines.broken, "the stream is no longer capturing after this line, without an error")
        elif self.probe.frontier() == before:
            self.lost.append(launch)
        if _allocated() > made:
            self.allocated[launch] = _allocated() - made
        own = torch.cuda.current_stream().cuda_stream if torch.cuda.is_initialized() else None
        if any(e.launch == launch and e.captured and e.stream != own for e in self.trace.events):
            self.side.append(launch)
        return None

    def _break(self, launch: int, where: str, text: str) -> None:
        self.broken = self.broken or Break(launch, where, text)

    def collection(self, phase: str, info: Mapping[str, Any]) -> None:
        """A callback for ``gc.callbacks``."""
        if phase == "start" and self.trace.launch >= 0 and self.probe.status() != NOT_CAPTURING:
            self.collected.append(self.trace.launch)


class _Lines:
    """Notes the line of a step after which the capture was no longer sound. Looks only outside of torch and Triton."""

    def __init__(self, status: Callable[[], int]) -> None:
        self.status, self.broken, self.last = status, "", ""

    def __enter__(self) -> None:
        self.before = sys.gettrace()
        sys.settrace(self._call)

    def __exit__(self, *error: Any) -> None:
        sys.settrace(self.before)
        self.broken = self.broken or self.last

    def _call(self, frame: Any, event: str, arg: Any) -> Any:
        return self._line if is_caller(frame.f_code.co_filename) else None

    def _line(self, frame: Any, event: str, arg: Any) -> Any:
        if not self.broken and self.last and self.status() != CAPTURING:
            self.broken = self.last
        self.last = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        return self._line


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
    captured, error = None, None
    with kept_contents(executable):
        if pad:
            fill_with_padding(executable)
        before = contents(executable)
        with _collections(tripwire), tracing(tripwire.trace):
            try:
                captured = capture(tripwire.wrapped, pool, error_mode=mode)
            except Exception as raised:
                error = raised
        if captured is None:
            # what broke may be the device itself: nothing can be put back then
            state = process_state(executable)
            return Audit(None, tuple(explain_break(tripwire, error, mode, state, origins)), state)
        touched = changed_places(executable, before)
    return Audit(replace(captured, executable=executable), (*observations(tripwire, origins),
                                                            *written_slots(executable, touched, origins)))


@contextmanager
def _collections(tripwire: Tripwire) -> Iterator[None]:
    gc.callbacks.append(tripwire.collection)
    try:
        yield
    finally:
        gc.callbacks.remove(tripwire.collection)


def fill_with_padding(executable: Executable) -> None:
    """Marks every row of a bound step as padding: it then writes to spare slots and pages only."""
    for rank in executable.ranks:
        for name in executable.plan.inputs:
            if name in ("tokens", "positions", "slots", "page_table"):
                rank.tensors[name].fill_(-1)


def explain_break(tripwire: Tripwire, error: BaseException | None, mode: str, state: Sequence[str],
                  origins: Mapping[str, Origin] | None) -> Iterator[Finding]:
    """The finding of what broke a capture, and the one that says in which state the process is."""
    plan = tripwire.executable.plan
    broken = tripwire.broken or Break(None, "", _first_line(error) if error else "")
    own = [e for e in tripwire.trace.events if e.launch == broken.launch and broken.launch is not None]
    code, where, text, number = _classify(tripwire, broken, own, error, mode)
    launch = plan.launches[number] if number is not None else None
    ops = f", {' + '.join(plan.choice(launch).ops)}" if launch is not None else ""
    yield find(code, text, plan=plan, launch=launch, origins=origins, where=f"{where}{ops}" if where else None)
    yield from observations(tripwire, origins)
    if state:
        yield find("CG-015", f"the capture failed; in this process now: {'; '.join(state)}", plan=plan,
                   origins=origins)


def _classify(tripwire: Tripwire, broken: Break, own: Sequence[Event], error: BaseException | None, mode: str
              ) -> tuple[str, str, str, int | None]:
    """Code, place, words and launch number of a break."""
    others = [e for e in tripwire.trace.events if e.thread and e.kind == "wait"]
    for event in reversed([e for e in own if not e.thread]):
        if event.kind == "wait":
            return "CG-001", event.where, f"{event.name}: {broken.text}", broken.launch
        if event.kind in CODE_OF_EVENT:
            code = CODE_OF_EVENT[event.kind]
            return code, event.where, f"{event.name}, {event.kind} inside the capture: {broken.text}", broken.launch
    numbers = [e.number for e in find_errors(broken.text) + (find_errors(str(error)) if error else [])]
    number = next((n for n in numbers if n in CODE_OF_ERROR), numbers[0] if numbers else 0)
    outside = _outside(tripwire.trace)
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
    for event in _outside(tripwire.trace):
        outside.setdefault(event.launch, event)
    for number, event in outside.items():
        code = "CG-002" if event.stream == 0 else "CG-003"
        where = f"{event.where}, {' + '.join(plan.choice(plan.launches[number]).ops)}"
        yield tell(code, f"{event.name} runs once, now, and is not in the graph", launch=plan.launches[number],
                   where=where)
    for number in tripwire.lost:
        if number not in outside:
            yield tell("CG-013", "the launch left no node in the graph", launch=plan.launches[number])
    for number in dict.fromkeys(tripwire.collected):
        yield tell("CG-011", "the garbage collector ran during this launch", launch=plan.launches[number])
    for event in {e.launch: e for e in tripwire.trace.events if e.kind in CODE_OF_EVENT and e.launch >= 0}.values():
        if tripwire.broken is None:
            yield tell(CODE_OF_EVENT[event.kind], f"{event.name}: {event.kind} inside the capture", where=event.where,
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
            said.append(f"{name} fails ({_first_line(error)})")
    return tuple(said)


def _outside(trace: Trace) -> list[Event]:
    """Kernels and torch ops on a GPU that ran in a launch while their stream was not capturing."""
    return [e for e in trace.events if e.launch >= 0 and not e.thread and e.kind in ("kernel", "op")
            and e.stream is not None and not e.captured]


def _allocated() -> int:
    return torch.cuda.memory_stats()["allocation.all.allocated"] if torch.cuda.is_initialized() else 0


def _place(tripwire: Tripwire, launch: int | None) -> str:
    return next((e.where for e in reversed(tripwire.trace.events) if e.launch == launch), "")


def _line_of(error: BaseException) -> str:
    """``file:line`` of the innermost frame outside of torch and Triton."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if is_caller(f.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
