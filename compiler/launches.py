"""What the launches of both kernel languages have in common: several as one, the single ones in it, what one takes.

A bound launch is a ``KernelLaunch`` of its language (``ops_triton/launching.py``, ``ops_cute/launching.py``) or a
``LaunchSequence`` of them. Knows neither language.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LaunchSequence:
    """Launches that one planned launch needs where a single kernel cannot do it."""

    launches: tuple[Any, ...]

    def __call__(self) -> None:
        for launch in self.launches:
            launch()

    def compile(self) -> None:
        """Compiles every one ahead of its first call."""
        for launch in self.launches:
            launch.compile()


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel takes: registers a thread, bytes of shared memory, bytes spilled a thread."""

    registers: int
    shared: int
    spilled: int


def kernels_of(launch: Any) -> Iterator[Any]:
    """The single launches inside a bound one, each a ``KernelLaunch`` of its language."""
    if isinstance(launch, LaunchSequence):
        for one in launch.launches:
            yield from kernels_of(one)
    else:
        assert hasattr(launch, "signature"), f"a bound launch is {type(launch).__name__}, not launches as data"
        yield launch
