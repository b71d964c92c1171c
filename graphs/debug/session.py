"""From a plan to the record of its capture on this GPU, in one call. Decides nothing: binds, captures, times."""
from __future__ import annotations

from ...compiler.plan import LaunchPlan
from ..bench_step import bind_random
from .record import Record
from .time import time_capture
from .walk import record_capture


def record_random(plan: LaunchPlan, *, seed: int = 0, timed: bool = True) -> Record:
    """Captures ``plan`` with random weights over ``loopback`` and live rows; with ``timed`` times every launch.

    Raises BindError without a GPU, RecordError without cuda-bindings.
    """
    executable, _ = bind_random(plan, seed)
    step, record = record_capture(executable)
    return time_capture(step, record) if timed else record
