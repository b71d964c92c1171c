"""Traces every fused launch of some layers as torch.compile does for a GPU, and prints what each became.

Run by test_compile.py in a process without Triton's interpreter. Tensors are fake ones on "cuda": no GPU is needed.
"""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import triton
from made_steps import layer_plan
from torch._functorch.aot_autograd import aot_export_module
from torch._subclasses import FakeTensorMode
from triton.backends.compiler import GPUTarget

from k3plan.compiler.plan import LaunchPlan
from k3plan.graphs.load import TORCH_DTYPES
from k3plan.graphs.module.launch_ops import Application, register


class Target:
    """What Triton asks of a driver while torch looks for the arguments that a kernel writes."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


class Call(torch.nn.Module):
    """One application of an operator."""

    def __init__(self, application: Application) -> None:
        super().__init__()
        self.application = application

    def forward(self, *arguments: Any) -> tuple[Any, ...]:
        results = self.application.operator(*arguments)
        return results if isinstance(results, tuple) else (results,)


def trace(plan: LaunchPlan, application: Application) -> str:
    """The operator's name, how many kernels it became, and the arguments that the traced graph updates."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors = [torch.empty_strided(plan.tensors[n].shape, plan.tensors[n].stride, device="cuda",
                                       dtype=TORCH_DTYPES[plan.tensors[n].dtype]) for n in application.inputs]
        arguments = [tensors[at] if isinstance(at, int) else [tensors[i] for i in at] for at in application.layout]
        module, signature = aot_export_module(Call(application), arguments, trace_joint=False)
    called = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
    assert application.fused is not None
    updated = sorted(application.fused.arguments[signature.user_inputs.index(name)]
                     for name in signature.user_inputs_to_mutate.values())
    assert not any(name.startswith("k3plan") for name in called), called
    return f"{application.fused.name} {called.count('triton_kernel_wrapper_functional')} {','.join(updated)}"


def main(where: str, config: str) -> None:
    triton.runtime.driver.set_active(Target())
    seen = set()
    for layer, query in ((0, 1), (1, 1), (0, 2)):
        # the fewest launches: which kernels these are does not turn with the times of a table
        plan = layer_plan(Path(where), Path(config), layer, gpu="h200", only="triton.", query=query, profile="fused",
                          numerics={"activation": "bf16", "kv_cache": "bf16"})
        for application in register(plan).launches:
            # one launch of each kernel: another shape traces alike
            if application.fused is not None and application.fused.kernel not in seen:
                seen.add(application.fused.kernel)
                print(trace(plan, application))


if __name__ == "__main__":
    main(*sys.argv[1:])
