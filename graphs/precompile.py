"""Compiles the kernels of bound steps side by side, so that the first eager run finds them all in the compiler's cache.

Most launches of a step are the same few kernels; what a compiler would see alike is compiled once. Decides nothing.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .bind import Executable

WORKERS = 12  # threads: the compiler's own passes and the assembler run outside of the interpreter's lock


def compile_launches(executables: Iterable[Executable], workers: int = WORKERS) -> int:
    """Compiles every different kernel and returns how many there are. Raises what the compiler raises."""
    found: dict[Any, Any] = {}
    for executable in executables:
        for step in executable.steps:
            for launch in _kernels(step):
                found.setdefault(launch.signature(), launch)
    with ThreadPoolExecutor(workers) as pool:
        for done in [pool.submit(launch.compile) for launch in found.values()]:
            done.result()
    return len(found)


def _kernels(step: Any) -> Iterator[Any]:
    """The launches of a bound step that can be compiled ahead; none where it is a function of torch."""
    for one in getattr(step, "launches", (step,)):
        if hasattr(one, "signature"):
            yield one
