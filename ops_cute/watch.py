"""Tells what CuTe DSL kernels do while a step runs: launches with their arguments, compiles.

For the debugger, which reaches ``watch`` by name, as it does that of ``ops_triton``. Changes nothing of what runs, and
nothing at all outside of the ``with`` block.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from . import launching

Say = Callable[[str, str, Mapping[str, Any]], None]


@contextmanager
def watch(say: Say) -> Iterator[None]:
    """Calls ``say(kind, kernel, arguments)`` for each "kernel" launch, before it, and each "compile".

    ``arguments`` of a launch are its tensors and integers by name, its grid and whether it has a programmatic edge.
    """
    call, compile_one = launching.KernelLaunch.__call__, launching._compile

    def call_and_say(self: launching.KernelLaunch) -> None:
        more = {"grid": str(self.grid), "dependent": self.dependent}
        say("kernel", launching.function_name(self.kernel), {**self.arguments, **more})
        call(self)

    def compile_and_say(launch: launching.KernelLaunch, target: str) -> launching.Compiled:
        say("compile", launching.function_name(launch.kernel), {})
        return compile_one(launch, target)

    # the class has no slots and is frozen in its objects only
    launching.KernelLaunch.__call__, launching._compile = call_and_say, compile_and_say  # type: ignore[method-assign]
    try:
        yield
    finally:
        launching.KernelLaunch.__call__, launching._compile = call, compile_one  # type: ignore[method-assign]
