"""Every CuTe DSL kernel without a collective at the shapes of Kimi K3, on a GPU, against the ops' meaning.

The same check as for the small models (``tests/kernel_check.py``): poisoned outputs, fresh inputs in each launch.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

import kernel_check
import pytest
import real_shapes

from k3plan.compiler.build import build_graph
from k3plan.compiler.ir import Graph
from k3plan.compiler.passes.merge import merge_projections
from k3plan.compiler.passes.shard import algebra_of, shard_graph
from k3plan.compiler.spec import Parallel
from k3plan.ops_cute.kernels import KERNELS as MENU

# a gigabyte of weights: ``test_moe.py`` has them with fewer experts
KERNELS = tuple(kernel for kernel in MENU if kernel.id != "cute.moe_experts")


@dataclass(frozen=True)
class RealSetting(kernel_check.Setting):
    """A step of Kimi K3: one layer of each kind and of each number of finished blocks."""

    def graph(self) -> Graph:
        spec = replace(real_shapes._spec(self.sequences, self.query, self.choices), parallel=Parallel(self.tp, "tp"))
        return merge_projections(shard_graph(build_graph(spec), spec, algebra_of(spec))[0])[0]


def settings() -> list[RealSetting]:
    """TP 8 and 16; rows as sequences x query."""
    model = real_shapes._spec(1, 1, kernel_check.WHOLE).model
    found = []
    for tp in (16, 8):
        for sequences, query in ((1, 1), (2, 1), (5, 1), (8, 1), (1, 2), (1, 5), (1, 8), (64, 1)):
            choices = kernel_check.SHARDED if query % 2 else kernel_check.WHOLE
            rows = f"S{sequences}xL{query}"
            found.append(RealSetting(f"k3-tp{tp}-{rows}", model, tp, sequences, query, choices=choices))
    return found


CASES = kernel_check.cases(KERNELS, settings())


def test_every_kernel_has_a_real_case() -> None:
    from k3plan.compiler.ops import OPS

    alone = [k.id for k in KERNELS if all(OPS[n.op].kind != "comm" for n in k.parsed.variants[0].nodes)]
    linear_only = {kernel for kernel in alone if kernel.endswith("silu")}
    missing = set(alone) - {case.region.kernel.id for case in CASES} - linear_only
    assert not missing, f"no step of Kimi K3 has a region for {missing}"


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_at_real_shapes(case: kernel_check.Case, device: str) -> None:
    kernel_check.check(case, device)
