"""Every CuTe DSL kernel without a collective at the shapes of Kimi K3, on a GPU, against the ops' meaning.

The same check as for the small models (``tests/kernel_check.py``): poisoned outputs, fresh inputs in each launch.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

import kernel_check
import pytest
import real_shapes

from k3plan.compiler.build import build_graph
from k3plan.compiler.covering.match import find_regions
from k3plan.compiler.ir import Graph
from k3plan.compiler.kernel import Menu
from k3plan.compiler.ops import OPS
from k3plan.compiler.passes.merge import merge_projections
from k3plan.compiler.passes.shard import algebra_of, shard_graph
from k3plan.compiler.spec import Parallel
from k3plan.graphs.launch import default_config
from k3plan.ops_cute.kernels import KERNELS as MENU

# a gigabyte of weights: ``test_moe.py`` has them with fewer experts
KERNELS = tuple(kernel for kernel in MENU
                if "sm_90" in kernel.arch and kernel.id not in ("cute.moe_experts", "cute.moe_experts_shared"))


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


def every_shape(setting: RealSetting) -> list[kernel_check.Case]:
    """Each kernel at every shape that it has in a step, in its default configuration. No collectives."""
    regions, _ = find_regions(setting.graph(), Menu(KERNELS), rows=setting.sequences * setting.query)
    found: dict[object, kernel_check.Case] = {}
    for region in regions:
        if all(OPS[node.op].kind != "comm" for node in region.nodes):
            name = f"{region.kernel.id}-{setting.name}-{kernel_check._dims(region)}-{len(found)}"
            case = kernel_check.Case(name, region, default_config(region), setting)
            found.setdefault(kernel_check._shape(region), case)
    return list(found.values())


CASES = kernel_check.cases(KERNELS, settings())
WHOLE_STEPS = [case for setting in settings() if setting.name in ("k3-tp16-S1xL1", "k3-tp16-S1xL8")
               for case in every_shape(setting)]


def test_every_kernel_has_a_real_case() -> None:
    alone = [k.id for k in KERNELS if all(OPS[n.op].kind != "comm" for n in k.parsed.variants[0].nodes)]
    linear_only = {kernel for kernel in alone if kernel.endswith("silu")}
    missing = set(alone) - {case.region.kernel.id for case in CASES} - linear_only
    assert not missing, f"no step of Kimi K3 has a region for {missing}"


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, *WHOLE_STEPS], ids=lambda case: case.name)
def test_kernel_at_real_shapes(case: kernel_check.Case, device: str) -> None:
    kernel_check.check(case, device)
