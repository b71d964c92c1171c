"""With K3PLAN_LAUNCH_LOG set, a bound step writes down each launch before it starts and after the device has done it.

So that a file names the launch during which a process died or hung. Steps then run one launch at a time; inside of a
capture nothing is written. Decides nothing about what runs.
"""
from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..compiler.knobs import LAUNCH_LOG

if TYPE_CHECKING:
    from .bind import Executable

LONG, ERROR_COMES = 0.01, 0.25  # seconds


def logged(executable: Executable) -> Executable:
    """``executable`` itself, or one whose launches are logged when the flag is set."""
    if not (path := LAUNCH_LOG.read()):
        return executable
    # kept open as long as the process lives; every line is written at once
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    plan = executable.plan
    launches = [[x.id, x.layer, plan.choice(x).kernel, list(plan.choice(x).ops), functions(executable.steps_of(number))]
                for number, x in enumerate(plan.launches)]
    os.write(file, (json.dumps({"plan": plan.key, "pid": os.getpid(), "launches": launches}) + "\n").encode())
    steps = [partial(_logged, file, plan.key, number, step) for number in range(len(plan.launches))
             for step in executable.steps_of(number)]
    return replace(executable, steps=tuple(steps))


def functions(steps: Iterable[Any]) -> list[str]:
    """Names of the kernels of one launch on the device; "" for one whose name only its binary tells."""
    single = [one for step in steps for one in getattr(step, "launches", (step,))]
    return [one.kernel.__name__ if hasattr(one, "num_warps") else "" for one in single]


def _logged(file: int, plan: str, number: int, step: Callable[[], None]) -> None:
    on_gpu = torch.cuda.is_initialized()
    if on_gpu and torch.cuda.is_current_stream_capturing():
        return step()
    who = f'"plan": "{plan}", "pid": {os.getpid()}'
    os.write(file, f'{{{who}, "start": {number}}}\n'.encode())
    step()
    if on_gpu:
        _await_device()
    os.write(file, f'{{{who}, "end": {number}}}\n'.encode())
    return None


def _await_device() -> None:
    """Waits for all before it. While the driver (580) writes the dump of a fault, 0.12 to 0.2 s, a wait lasts and then
    returns well, and so does what is launched and copied behind it: the error comes 20 to 40 ms later."""
    started = time.monotonic()
    torch.cuda.synchronize()
    if time.monotonic() - started > LONG:
        time.sleep(ERROR_COMES)
        torch.cuda.synchronize()
