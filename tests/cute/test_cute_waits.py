"""What the assembler leaves before the wait for the producers: the weights' loads, as the kernels' headers say.

It may move an ``ld.global.nc`` behind the wait, since nothing orders the two; that cost the overlap once.
"""
from __future__ import annotations

from functools import cache

import pytest

pytest.importorskip("cutlass")

import test_on_device

from k3plan.compiler.covering.match import find_regions
from k3plan.compiler.kernel import Menu, Region
from k3plan.compiler.launches import kernels_of
from k3plan.compiler.tuning import shape_key
from k3plan.graphs.bench import random_inputs
from k3plan.graphs.launch import bind_region
from k3plan.ops_cute.compile_check import LOAD, TARGETS, TRIGGER, WAIT, operations
from k3plan.ops_cute.kernels import KERNELS
from k3plan.ops_cute.launching import KernelLaunch, compile_kernel

# kernel, beginning of its shapes, fewest loads of weights and states before the wait in the first configuration that
# does not read settled blocks, or in the first that does
BEFORE = [
    ("cute.skinny_linear", "1x7168,3216x7168", 16),  # 4 steps of 2 tiles, two rows of each
    ("cute.skinny_linear", "1x768,7168x768", 16),  # 2 steps of 4 tiles
    ("cute.kda_decode", "1x128,768x128", 4 + 16),  # the state, and two tiles of the gate projection
    ("cute.attn_res", "1x7168,1x7168,7168:fp32", 9),  # the score twice a fragment, and the norm's weight
    ("cute.attn_res settled", "1x7168,1x7168,7168:fp32", 4),  # the score twice, the norm's weight and a block
]


@cache
def regions() -> list[Region]:
    setting = test_on_device.settings()[0]
    return find_regions(setting.graph(), Menu(KERNELS), arch="sm_90", rows=1)[0]


@pytest.mark.parametrize(("kernel", "shapes", "least"), BEFORE, ids=lambda value: str(value))
@pytest.mark.parametrize("target", TARGETS)
def test_weights_are_loaded_before_the_wait(kernel: str, shapes: str, least: int, target: str) -> None:
    name, _, settled = kernel.partition(" ")
    region = next(r for r in regions() if r.kernel.id == name and shape_key(r).startswith(shapes))
    config = next(c for c in region.kernel.configs(region) if bool(c.get("settled")) == bool(settled))
    launch = bind_region(region, random_inputs(region, "meta"), config, dependent_launch=True)
    assert isinstance(launch, KernelLaunch)
    found = operations(compile_kernel(launch, target).cubin)
    assert found.count(WAIT) == 1
    before = found[: found.index(WAIT)].count(LOAD)
    assert before >= least, f"{before} loads before the wait, {found.count(LOAD) - before} after it"


@pytest.mark.parametrize("target", TARGETS)
def test_late_kernels_trigger_behind_their_wait(target: str) -> None:
    """Those that their menu calls late in a configuration; every other kernel with its first instructions."""
    late = 0
    for region in {r.kernel.id: r for r in regions() if len(r.nodes) > 1 or "linear" in r.kernel.id}.values():
        configs = [c for c in region.kernel.configs(region) if region.kernel.late(c)] if region.kernel.configs else []
        default = region.kernel.configs(region)[0] if region.kernel.configs else {}
        for config in [default, *configs[:4]]:
            if target[:-1] not in region.kernel.arch or "experts" in region.kernel.id:
                continue
            launch = bind_region(region, random_inputs(region, "meta"), config, dependent_launch=True)
            for one in kernels_of(launch):
                assert isinstance(one, KernelLaunch)
                found = operations(compile_kernel(one, target).cubin)
                assert found.count(TRIGGER) == 1
                assert (found.index(TRIGGER) > found.index(WAIT)) == region.kernel.late(config), f"{region.kernel.id}"
                late += region.kernel.late(config)
    assert late >= 4
