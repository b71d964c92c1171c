"""Boundary 6: a bound step as one CUDA graph. Everything is compiled and allocated before the capture begins."""
from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..compiler.errors import BindError
from .bind import Executable

WARM_RUNS = 2


@dataclass(frozen=True)
class CapturedStep:
    """One CUDA graph over the storage of ``executable``: write its inputs, replay, read its outputs."""

    executable: Executable
    graph: Any
    captured_bytes: int  # device memory that the capture itself took

    def replay(self) -> None:
        """Runs the step once on the current stream; copies nothing and allocates nothing."""
        self.graph.replay()

    def time_us(self, replays: int = 10) -> float:
        """Median us of a replay, by events."""
        return replay_us(self.graph, replays)


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


def capture(executable: Executable, pool: Any = None) -> CapturedStep:
    """Captures one step. Runs it eagerly first, which compiles every kernel. Raises BindError off a GPU."""
    device = executable.ranks[0].arena.device
    if device.type != "cuda":
        raise BindError(f"a CUDA graph is captured on a GPU, the plan is bound to {device}\n"
                        "  fix: bind it with device='cuda'")
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_RUNS):
            executable.run()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_reserved(device)
    graph = torch.cuda.CUDAGraph()
    with no_garbage_collection(), torch.cuda.graph(graph, pool=pool, stream=stream,
                                                   capture_error_mode="thread_local"):
        executable.run()
    executable.poison()
    return CapturedStep(executable, graph, torch.cuda.memory_reserved(device) - before)
