"""Compiles the kernels of bound steps side by side, so that the first eager run finds them all in the compiler's cache.

Most launches of a step are the same few kernels; what a compiler would see alike is compiled once. Decides nothing.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..compiler.launches import kernels_of
from .bind import Executable

WORKERS = 12  # threads: the compiler's own passes and the assembler run outside of the interpreter's lock; or processes


def compile_launches(executables: Iterable[Executable], workers: int = WORKERS) -> int:
    """Compiles every different kernel and returns how many there are. Raises what the compiler raises."""
    found: dict[Any, Any] = {}
    for executable in executables:
        for step in executable.steps:
            # a function of torch has nothing to compile
            for launch in kernels_of(step) if hasattr(step, "compile") else ():
                found.setdefault(launch.signature(), launch)
    alone: list[Any] = []
    of_kind: dict[Any, list[Any]] = defaultdict(list)
    for launch in found.values():
        (of_kind[type(launch)] if hasattr(launch, "compile_many") else alone).append(launch)
    with ThreadPoolExecutor(workers) as pool:
        waiting = [pool.submit(kind.compile_many, launches, workers) for kind, launches in of_kind.items()]
        for done in [*waiting, *[pool.submit(launch.compile) for launch in alone]]:
            done.result()
    return len(found)
