"""From plans to the records of their captures on this GPU, in one call. Decides nothing: binds, captures, times."""
from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...compiler.errors import BindError
from ...compiler.explain import size, table
from ...compiler.plan import LaunchPlan
from ..bench_step import bind_random, live_inputs
from ..buckets import bind_buckets, clear_inputs
from ..precompile import compile_launches
from ..random_weights import RankRandom
from .inspect import costs_text
from .record import Record
from .time import time_capture, time_launches, time_replay
from .walk import record_capture


def record_random(plan: LaunchPlan, *, seed: int = 0, timed: bool = True) -> Record:
    """Captures ``plan`` with random weights over ``loopback`` and live rows; with ``timed`` times every launch.

    Raises BindError without a GPU, RecordError without cuda-bindings.
    """
    _need_gpu()
    executable, _ = bind_random(plan, seed)
    step, record = record_capture(executable)
    return time_capture(step, record) if timed else record


def record_buckets(plans: Sequence[LaunchPlan], *, seed: int = 0, timed: bool = True,
                   say: Callable[[str], None] = lambda line: None) -> Iterator[Record]:
    """The same for the plans of several buckets over one set of weights and one pool, most sequences first. ``say``
    hears when all are bound and compiled, and of each capture at once: all are timed launch by launch at the end."""
    _need_gpu()
    pool, captured, started = None, [], time.perf_counter()
    executables = bind_buckets(plans, RankRandom(seed), device="cuda", transport="loopback").executables
    say(f"{len(executables)} buckets bound in {time.perf_counter() - started:.1f} s")
    started = time.perf_counter()
    kernels = compile_launches(executables)
    compile_s = time.perf_counter() - started
    say(f"{kernels} kernels compiled in {compile_s:.1f} s")
    for executable in executables:
        clear_inputs(executable)
        step, record = record_capture(executable, pool)
        if pool is None:
            pool, record = step.graph.pool(), replace(record, compile_s=round(compile_s, 3))
        executable.write(**live_inputs(executable.plan, seed))
        captured.append((step, time_replay(step, record) if timed else record))
        say(f"bucket {record.bucket}: {costs_text(captured[-1][1])}")
    for step, record in captured:
        yield time_launches(step, record) if timed else record


def bucket_costs(records: Sequence[Record]) -> list[dict[str, Any]]:
    """What each bucket cost and costs, as plain data."""
    return [{"bucket": str(r.bucket), "plan": r.plan_key, "launches": len(r.launches), "nodes": len(r.nodes),
             "compile_s": r.compile_s, "capture_s": r.capture_s, "captured_bytes": r.captured_bytes,
             "graph_bytes": r.graph_bytes, "replay_us": r.replay_us, "queued_us": r.queued_us, "host_us": r.host_us,
             "host_least_us": r.host_least_us}
            for r in records]


def bucket_table(records: Sequence[Record]) -> str:
    """The same as a table."""
    rows = [(c["bucket"], str(c["launches"]), str(c["nodes"]), f"{c['compile_s']:.1f}", f"{c['capture_s']:.2f}",
             size(c["captured_bytes"]), size(c["graph_bytes"]),
             *("-" if c[n] is None else f"{c[n] / 1e3:.3f}" for n in ("replay_us", "queued_us")),
             *("-" if c[n] is None else f"{c[n]:.1f}" for n in ("host_us", "host_least_us")))
            for c in bucket_costs(records)]
    head = ("bucket", "launches", "nodes", "compile s", "capture s", "taken", "graph", "replay ms", "queued ms",
            "host us", "least")
    return table(head, rows, left=1)


def _need_gpu() -> None:
    if not torch.cuda.is_available():
        raise BindError("a graph is recorded on an NVIDIA GPU and this machine has none that torch can use\n"
                        "  fix: run k3plan graph record where the GPU is, and bring the two files that it writes here")
