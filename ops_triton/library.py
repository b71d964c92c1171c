"""Triton kernels as operators that torch.compile can see into: ``torch.library.triton_op`` around a bound launch.

Knows no kernel. ``graphs`` reaches this through its entry string, as it reaches every kernel.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.utils import _pytree as pytree

from ..compiler.launches import LaunchSequence
from .launching import KernelLaunch


def define(name: str, bind: Callable[..., tuple[Any, tuple[torch.Tensor, ...]]],
           returned: Callable[[tuple[torch.Tensor, ...]], Any], prototype: inspect.Signature,
           mutates_args: Sequence[str]) -> Any:
    """The operator ``name``. ``bind`` takes its arguments and gives a launch and the tensors that it writes.

    Where torch.compile traces for a GPU, the operator becomes its Triton kernels, without programmatic edges. It
    stays an operator on a CPU, where no kernel runs, in an export, and where shapes are symbols: a launch has numbers.
    """

    def run(*arguments: Any) -> Any:
        launch, results = bind(*arguments)
        enqueue(launch)
        return returned(results)

    run.__signature__ = prototype  # type: ignore[attr-defined]
    operator: Any = torch.library.triton_op(name, run, mutates_args=mutates_args)
    open_up = operator._torch_dispatch_fns[FunctionalTensorMode]

    def trace(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        tensors = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
        symbols = any(isinstance(n, torch.SymInt) for x in tensors for n in (*x.shape, *x.stride()))
        if symbols or all(x.device.type == "cpu" for x in tensors):
            return mode.__torch_dispatch__(op, types, args, kwargs)
        return open_up(mode, op, types, args, kwargs)

    operator.register_torch_dispatch(FunctionalTensorMode, trace)
    return operator


def enqueue(launch: KernelLaunch | LaunchSequence) -> None:
    """``launch()``, in a form that torch can trace."""
    if isinstance(launch, LaunchSequence):
        for part in launch.launches:
            enqueue(part)
        return
    kernel: Any = torch.library.wrap_triton(launch.kernel)
    kernel[launch.grid](**launch.pointers, **launch.constants, num_warps=launch.num_warps,
                        num_stages=launch.num_stages, **launch.options)
