"""What every Triton kernel file shares: the dependent-launch switch and a launch that can be looked at.

A launch is data (kernel, grid, pointers, constants), so that the cross-compiler builds exactly what the runtime
would launch. Nothing here knows an op.
"""
from __future__ import annotations

import ctypes
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from ..compiler.knobs import carveout

PREFERRED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT


@triton.jit
def start_dependents(DEPENDENT_LAUNCH: tl.constexpr):
    """Lets the next kernel start while this one runs. Called first thing: a late trigger gains nothing."""
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def await_producers(DEPENDENT_LAUNCH: tl.constexpr):
    """Blocks until every earlier kernel has finished. Only weights may be read before it.

    Every kernel of a step triggers first thing, so kernels further back than the previous one may still be running
    here; blocks of the residual stream and caches are activations too.
    """
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()


# bf16 arithmetic and bf16 tl.dot are silently wrong in Triton's interpreter, so kernels widen their loads there
INTERPRET = not isinstance(start_dependents, JITFunction)

# PHASE of a kernel whose blocks exchange: the whole exchange, or one half of it (the interpreter runs block by block)
WHOLE, PUBLISH, COLLECT = 0, 1, 2


@dataclass(frozen=True)
class KernelLaunch:
    """One bound launch: call it to enqueue it on the current stream."""

    kernel: Any
    grid: tuple[int, ...]
    pointers: Mapping[str, torch.Tensor]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)  # launch options, such as launch_pdl

    def __call__(self) -> None:
        compiled = self.kernel[self.grid](**self.pointers, **self.constants, num_warps=self.num_warps,
                                          num_stages=self.num_stages, **self.options)
        if not INTERPRET and (percent := carveout()) is not None:
            prefer_shared(compiled.function, percent)

    def compile(self) -> None:
        """Fills the compiler's cache on disk for this launch, without launching it. Pointers may be on "meta"."""
        self.kernel.warmup(**self.pointers, **self.constants, grid=self.grid, num_warps=self.num_warps,
                           num_stages=self.num_stages, **self.options)

    def signature(self) -> Hashable:
        """Equal for launches that are one compiled kernel."""
        pointers = tuple((name, t.dtype, t.data_ptr() % 16 == 0) for name, t in self.pointers.items())
        return (self.kernel.__module__, self.kernel.__name__, pointers, repr(sorted(self.constants.items())),
                self.num_warps, self.num_stages, repr(self.options))

    def shared_bytes(self) -> int:
        """Shared memory of a block, as the compiler laid it out. Compiles where that has not been done."""
        compiled = self.kernel.warmup(**self.pointers, **self.constants, grid=self.grid, num_warps=self.num_warps,
                                      num_stages=self.num_stages, **self.options)
        return int(compiled.metadata.shared)


def prefer_shared(function: int, percent: int) -> None:
    """From its next launch on ``function``, the driver's handle, wants so much of a multiprocessor's memory shared."""
    status = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(function), PREFERRED_CARVEOUT, percent)
    assert status == 0, f"the driver refuses {percent} % of shared memory: error {status}"


def launch_options(dependent_launch: bool) -> dict[str, Any]:
    """Options of a launch with a programmatic edge; empty without one, so that other backends accept them."""
    return {"launch_pdl": True} if dependent_launch else {}


def row_stride(tensor: torch.Tensor) -> int:
    """Elements between rows of a matrix whose last dim is contiguous."""
    assert tensor.stride(-1) == 1 or tensor.shape[-1] == 1, f"strided last dim: {tensor.shape} {tensor.stride()}"
    return tensor.stride(0)
