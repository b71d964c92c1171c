"""A step whose launches are watched while they are captured: the stream's capture status is asked after each one.

Notes which launch broke the capture and at which line, which ones left no node, collections and allocations. What it
all means is said by ``audit``.
"""
from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch

from ...compiler.errors import RecordError
from ..bind import Executable
from .trace import Event, Trace, is_caller

NOT_CAPTURING, CAPTURING, INVALID = 0, 1, 2


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
        steps = tuple(partial(self._watched, number, step) for number in range(len(self.executable.first))
                      for step in self.executable.steps_of(number))
        return replace(self.executable, steps=steps)

    def _watched(self, launch: int, step: Callable[[], None]) -> None:
        if self.probe.status() == NOT_CAPTURING:
            return step()
        self.trace.launch = launch
        try:
            self._run(launch, step)
        finally:
            self.trace.launch = -1
        return None

    def _run(self, launch: int, step: Callable[[], None]) -> None:
        before, made = self.probe.frontier(), _allocated()
        lines = _Lines(self.probe.status)
        try:
            with lines:
                step()
        except Exception as error:
            self._break(launch, _line_of(error), f"{type(error).__name__}: {first_line(error)}")
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


def launched_outside(trace: Trace) -> list[Event]:
    """Kernels and torch ops on a GPU that ran in a launch while their stream was not capturing."""
    return [e for e in trace.events if e.launch >= 0 and not e.thread and e.kind in ("kernel", "op")
            and e.stream is not None and not e.captured]


def _allocated() -> int:
    return torch.cuda.memory_stats()["allocation.all.allocated"] if torch.cuda.is_initialized() else 0


def _line_of(error: BaseException) -> str:
    """``file:line`` of the innermost frame outside of torch and Triton."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if is_caller(f.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
