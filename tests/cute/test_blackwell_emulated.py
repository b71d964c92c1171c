"""``cute.moe_experts_block_scaled`` on a CPU, its own source warp by warp beside a tensor core (``tensor_core.py``),
against the op's meaning."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import kernel_check
import pytest
import tensor_core
from kernel_check import Case, Setting
from test_moe_emulated import SMALL, region_of, tensors_of

from k3plan.compiler.kernel import Region
from k3plan.graphs.launch import allocate, arguments_of, make_call, scratch_of
from k3plan.ops_cute import moe_experts_block_scaled_menu as menu

BF16, MXFP8 = kernel_check.PLAIN, kernel_check.FP8


@cache
def modules() -> dict[str, Any]:
    return tensor_core.load()


def check(region: Region, setting: Setting, config: Mapping[str, Any], blocks: int, launches: int = 2,
          change: Any = lambda inputs: None) -> list[tensor_core.Core]:
    """Launches with fresh inputs, changed by ``change``, through one binding. Returns the tensor cores of the last."""
    made = modules()["moe_experts_block_scaled"]
    made.multiprocessors = lambda device: blocks
    tensors = tensors_of(region, kernel_check.make_inputs(region, setting, 0, "cpu"))
    scratch = {name: allocate(one, "cpu") for name, one in scratch_of(region, config).items()}
    launch = made.bind(make_call(arguments_of(region), tensors, scratch=scratch, config=config))
    cores = []
    for seed in range(launches):
        for name, fresh in kernel_check.make_inputs(region, setting, seed, "cpu").items():
            tensors[name].copy_(fresh)
        change({name: tensors[value] for name, value in region.binding.items() if value in region.inputs})
        for name in region.outputs:
            kernel_check._poison(tensors[name])
        before = {name: tensors[name].clone() for name in region.inputs}
        cores = tensor_core.run(launch, [*tensors.values(), *scratch.values()], seed)
        kernel_check._compare(Case(region.kernel.id, region, config, setting), before, tensors, seed)
    return cores


def setting(rows: int, numerics: Any, tp: int, experts: str, sizes: Mapping[str, Any]) -> Setting:
    return Setting("small", replace(SMALL, **sizes), tp, rows, 1, experts, numerics)


@pytest.mark.parametrize(("rows", "numerics", "tp", "experts", "sizes", "weights"), [
    (1, MXFP8, 1, "tp", {}, "e4m3"),
    (3, MXFP8, 2, "tp", {"latent": 256}, "e2m1"),
    (9, BF16, 1, "tp", {"moe_intermediate": 192}, "e4m3"),
    (20, BF16, 2, "ep", {"latent": 512, "moe_intermediate": 96}, "e2m1"),
    (40, MXFP8, 2, "tp", {"moe_intermediate": 128, "experts": 5}, "e4m3"),
], ids=["one-row", "half-a-tile", "two-terms", "whole-experts", "many-pairs"])
def test_experts(rows: int, numerics: Any, tp: int, experts: str, sizes: dict[str, Any], weights: str) -> None:
    case = setting(rows, numerics, tp, experts, sizes)
    check(region_of(menu.KERNELS, case), case, {"slots": 2, "weights": weights}, blocks=5)
