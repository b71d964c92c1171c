"""Boundary 6: a bound step as one CUDA graph. Everything is compiled and allocated before the capture begins.

A capture calls each launch once, on the plan's stream for it, with the waits of ``streams.py`` between streams.
"""
from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..compiler.errors import BindError
from .bind import Executable
from .precompile import compile_launches
from .streams import Waits, last_launches, stream_waits

WARM_RUNS = 2
Hook = Callable[[int], None]


@dataclass(frozen=True)
class CapturedStep:
    """One CUDA graph over the storage of ``executable``: write its inputs, replay, read its outputs.

    ``captured_bytes`` is device memory that the capture took through torch, ``graph_bytes`` what the driver took for
    the graph before its first replay. ``seconds`` is the time of warming up, capturing and instantiating,
    ``compile_seconds`` that of compiling before; what was compiled already takes none.
    """

    executable: Executable
    graph: Any
    captured_bytes: int
    seconds: float
    compile_seconds: float = 0.0
    graph_bytes: int = 0

    def replay(self) -> None:
        """Runs the step once on the current stream; copies nothing and allocates nothing."""
        self.graph.replay()

    def time_us(self, replays: int = 10) -> float:
        """Median us of a replay, by events."""
        return replay_us(self.graph, replays)

    def queued_us(self, replays: int = 10) -> float:
        """Us of a replay that the host has queued while the one before it ran: the launch itself is hidden."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.graph.replay()
        start.record()
        for _ in range(replays):
            self.graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3 / replays

    def host_us(self, replays: int = 50) -> tuple[float, float]:
        """Median and least us that the host needs to start a replay; the GPU is idle before each, as in a decode loop.
        A median far above the least is a host that had other work, or slept (docs/debugger.md)."""
        times = []
        for _ in range(replays):
            torch.cuda.synchronize()
            started = time.perf_counter()
            self.graph.replay()
            times.append((time.perf_counter() - started) * 1e6)
        torch.cuda.synchronize()
        return statistics.median(times), min(times)


def replay_us(graph: Any, replays: int) -> float:
    """Median us of a replay of a CUDA graph, by events, after one to warm up."""
    times = []
    graph.replay()
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A collection inside a capture may finalise a graph or a kernel of another one."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def capture(executable: Executable, pool: Any = None, *, after: Hook | None = None, warm_runs: int = WARM_RUNS,
            keep_graph: bool = False, error_mode: str = "thread_local") -> CapturedStep:
    """Captures one step, after compiling its kernels and running it eagerly. Raises BindError off a GPU.

    ``pool`` is the memory pool of another capture to share. ``after`` is called with the number of each launch while
    the stream of that launch is current. ``keep_graph`` keeps the graph that was instantiated, for the debugger.
    ``error_mode`` is CUDA's: whose unsafe calls break the capture ("global", "thread_local" or "relaxed").
    """
    device = executable.ranks[0].arena.device
    if device.type != "cuda":
        raise BindError(f"a CUDA graph is captured on a GPU, the plan is bound to {device}\n"
                        "  fix: bind it with device='cuda'")
    began = time.perf_counter()
    compile_launches([executable])
    started = time.perf_counter()
    stream = torch.cuda.Stream(device)
    warm_up(executable, stream, warm_runs)
    waits = stream_waits(executable.plan)
    side = {i: torch.cuda.Stream(device) for i in sorted({launch.stream for launch in executable.plan.launches}) if i}
    free, before = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device)
    graph = torch.cuda.CUDAGraph(keep_graph=keep_graph)
    with no_garbage_collection(), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=error_mode):
        enqueue(executable, {0: stream, **side}, waits, after)
    if keep_graph:
        graph.instantiate()
    seconds, taken = time.perf_counter() - started, torch.cuda.memory_reserved(device) - before
    drivers = free - torch.cuda.mem_get_info(device)[0] - taken
    executable.poison()
    torch.cuda.synchronize(device)
    return CapturedStep(executable, graph, taken, seconds, started - began, drivers)


def warm_up(executable: Executable, stream: Any, runs: int) -> None:
    """Eager steps on ``stream``: loads modules, fills the allocator's pools, compiles what was left."""
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        for _ in range(runs):
            executable.run()
    torch.cuda.current_stream(stream.device).wait_stream(stream)
    torch.cuda.synchronize(stream.device)


def enqueue(executable: Executable, streams: Mapping[int, Any], waits: Waits, after: Hook | None = None) -> None:
    """Every launch once, on its stream; a launch that needs another stream's result waits for it there.

    All side streams are forked from stream 0 and joined to it at the end, as a capture demands.
    """
    launches = executable.plan.launches
    events: dict[int, Any] = {}
    wanted = {source for sources in waits.values() for source in sources} | set(last_launches(executable.plan))
    forked = {0}
    for index, launch in enumerate(launches):
        stream = streams[launch.stream]
        if launch.stream not in forked:
            stream.wait_stream(streams[0])
            forked.add(launch.stream)
        for source in waits.get(index, ()):
            stream.wait_event(events[source])
        with torch.cuda.stream(stream):
            for step in executable.steps_of(index):
                step()
            if after is not None:
                after(index)
        if index in wanted:
            events[index] = stream.record_event()
    for source in last_launches(executable.plan):
        streams[0].wait_event(events[source])
