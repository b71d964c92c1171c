"""Tells what Triton does while a step runs: launches with their arguments, compiles, module loads, autotuning.

For the debugger, which reaches ``watch`` by name. Changes nothing of what runs, and nothing at all outside of the
``with`` block. Works in the interpreter as well, where nothing is compiled or loaded.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.runtime.autotuner import Autotuner

from .launching import start_dependents

Say = Callable[[str, str, Mapping[str, Any]], None]


@contextmanager
def watch(say: Say) -> Iterator[None]:
    """Calls ``say(kind, kernel, arguments)`` for each "kernel" launch, before it, and each "compile", "load", "tune".

    ``arguments`` of a launch are those of the call by name: tensors, numbers, ``grid`` and launch options.
    """
    function = type(start_dependents)  # the compiled or the interpreted one, as this process has it
    run, bench = function.run, Autotuner._bench
    hooks = triton.knobs.runtime
    kept = hooks.jit_post_compile_hook

    def run_and_say(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if not warmup:
            say("kernel", self.__name__, {**dict(zip(self.arg_names, args, strict=False)), **kwargs, "grid": grid})
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    def bench_and_say(self: Any, *args: Any, config: Any, **meta: Any) -> Any:
        say("tune", self.base_fn.__name__, {"config": str(config)})
        return bench(self, *args, config=config, **meta)

    def compiled(**facts: Any) -> None:
        if not facts["is_manual_warmup"]:
            say("compile", facts["fn"].name, {})

    def loaded(module: Any, handle: Any, name: str, *rest: Any) -> None:
        say("load", name, {})

    function.run, Autotuner._bench = run_and_say, bench_and_say
    hooks.jit_post_compile_hook = compiled
    hooks.kernel_load_start_hook.add(loaded)
    try:
        yield
    finally:
        function.run, Autotuner._bench = run, bench
        hooks.jit_post_compile_hook = kept
        hooks.kernel_load_start_hook.remove(loaded)


def stream_of_launches() -> int:
    """Handle of the stream that Triton would launch on now: torch's current one, unless someone has set another."""
    device = torch.cuda.current_device()
    return int(triton.runtime.driver.active.get_current_stream(device))
