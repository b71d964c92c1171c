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
from k3plan.compiler.tuning import shape_key
from k3plan.graphs.bench import random_inputs
from k3plan.graphs.launch import bind_region
from k3plan.ops_cute.compile_check import LOAD, TARGETS, WAIT, operations
from k3plan.ops_cute.kernels import KERNELS
from k3plan.ops_cute.launching import KernelLaunch, compile_kernel

# kernel, beginning of its shapes, fewest loads of weights and states before the wait in the default configuration
BEFORE = [
    ("cute.skinny_linear", "1x7168,3216x7168", 16),  # 4 steps of 2 tiles, two rows of each
    ("cute.skinny_linear", "1x768,7168x768", 16),  # 2 steps of 4 tiles
    ("cute.kda_decode", "1x128,768x128", 4 + 16),  # the state, and two tiles of the gate projection
    ("cute.attn_res", "1x7168,1x7168,7168:fp32", 9),  # the score twice a fragment, and the norm's weight
]


@cache
def regions() -> list[Region]:
    setting = test_on_device.settings()[0]
    return find_regions(setting.graph(), Menu(KERNELS), arch="sm_90", rows=1)[0]


@pytest.mark.parametrize(("kernel", "shapes", "least"), BEFORE, ids=lambda value: str(value))
@pytest.mark.parametrize("target", TARGETS)
def test_weights_are_loaded_before_the_wait(kernel: str, shapes: str, least: int, target: str) -> None:
    region = next(r for r in regions() if r.kernel.id == kernel and shape_key(r).startswith(shapes))
    launch = bind_region(region, random_inputs(region, "meta"), dependent_launch=True)
    assert isinstance(launch, KernelLaunch)
    found = operations(compile_kernel(launch, target).cubin)
    assert found.count(WAIT) == 1
    before = found[: found.index(WAIT)].count(LOAD)
    assert before >= least, f"{before} loads before the wait, {found.count(LOAD) - before} after it"
