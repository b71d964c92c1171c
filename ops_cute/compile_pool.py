"""Compiles many kernels side by side, in processes: the DSL traces in one thread at a time.

A worker is this file run as a module: a list of ``Wanted`` comes in on its standard input and what became of each goes
out. It is no ``multiprocessing`` process, which would run the program of the user's engine once more. It needs no GPU.
Decides how many workers; what is compiled and what is kept, ``launching.py`` does.
"""
from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..compiler.knobs import worker_environment

EACH = 8  # kernels of a worker, whose start takes as long as they do


@dataclass(frozen=True)
class Wanted:
    """A kernel to compile, as data: ``kernel`` is a name in ``module``."""

    key: str
    module: str
    kernel: str
    launch: dict[str, Any]  # the rest of its ``KernelLaunch``, without arguments
    pointers: dict[str, tuple[torch.dtype, int] | None]  # dtype and alignment of each argument, None of a number
    target: str


def workers_for(kernels: int, most: int) -> int:
    """Processes for so many kernels: as many as there are cores to spare, and none for a handful."""
    return min(most, len(os.sched_getaffinity(0)), kernels // EACH)


def compile_apart(wanted: Sequence[Wanted], workers: int) -> list[tuple[str, str, bytes]]:
    """Compiles ``wanted`` in ``workers`` processes: key, name of the function and cubin of each. Kernels of a worker
    that fails are missing in the result; it said why on standard error."""
    running: list[subprocess.Popen[bytes]] = []
    for index in range(workers):
        with tempfile.TemporaryFile() as work:
            pickle.dump(list(wanted[index::workers]), work)
            work.seek(0)
            running.append(subprocess.Popen([sys.executable, "-m", __name__], stdin=work, stdout=subprocess.PIPE,
                                            env=worker_environment()))
    made: list[tuple[str, str, bytes]] = []
    for worker in running:
        found, _ = worker.communicate()
        made += pickle.loads(found) if worker.returncode == 0 else []
    return made


def main() -> None:
    """A worker."""
    answer = os.dup(1)
    os.dup2(2, 1)  # what a compiler prints is no answer
    from .launching import KernelLaunch, _compile, content_key

    made = []
    for one in pickle.load(sys.stdin.buffer):
        arguments = {name: _pointer(*kind) if kind else 0 for name, kind in one.pointers.items()}
        launch = KernelLaunch(getattr(importlib.import_module(one.module), one.kernel), arguments=arguments,
                              **one.launch)
        assert content_key(launch, one.target) == one.key, f"{one.kernel} is another kernel in this process"
        done = _compile(launch, one.target)
        made.append((one.key, done.name, done.cubin))
    with os.fdopen(answer, "wb") as pipe:
        pickle.dump(made, pipe)


def _pointer(dtype: torch.dtype, alignment: int) -> torch.Tensor:
    """A tensor without storage (whose offset would be lost on the way), aligned to that and no more."""
    return torch.empty(2 * alignment, dtype=dtype, device="meta")[alignment // dtype.itemsize:]


if __name__ == "__main__":
    main()
