"""Triton kernels as operators that torch.compile can see into: ``torch.library.triton_op`` around a bound launch.

Knows no kernel. ``graphs`` reaches this through its entry string, as it reaches every kernel.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .launching import KernelLaunch, LaunchSequence


def define(name: str, bind: Callable[..., tuple[Any, tuple[torch.Tensor, ...]]],
           returned: Callable[[tuple[torch.Tensor, ...]], Any], prototype: inspect.Signature,
           mutates_args: Sequence[str]) -> Any:
    """The operator ``name``. ``bind`` takes its arguments and gives a launch and the tensors that it writes.

    Where torch traces, the launch is recorded as a Triton kernel; it has no programmatic edges there.
    """

    def run(*arguments: Any) -> Any:
        launch, results = bind(*arguments)
        for part in launch.launches if isinstance(launch, LaunchSequence) else (launch,):
            enqueue(part)
        return returned(results)

    run.__signature__ = prototype  # type: ignore[attr-defined]
    return torch.library.triton_op(name, run, mutates_args=mutates_args)


def enqueue(launch: KernelLaunch) -> None:
    """``launch()``, in a form that torch can trace."""
    kernel = torch.library.wrap_triton(launch.kernel)
    kernel[launch.grid](**launch.pointers, **launch.constants, num_warps=launch.num_warps,
                        num_stages=launch.num_stages, **launch.options)
