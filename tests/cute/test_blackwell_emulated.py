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
import torch
import warp_emulator
from kernel_check import Case, Setting
from test_moe_emulated import BESIDE, SMALL, region_of, tensors_of

from k3plan.compiler.kernel import Region
from k3plan.graphs.launch import allocate, arguments_of, make_call, scratch_of
from k3plan.ops_cute.experts import moe_experts_block_scaled_menu as menu

BF16, MXFP8 = kernel_check.PLAIN, kernel_check.FP8


@cache
def modules() -> dict[str, Any]:
    return tensor_core.load()


def check(region: Region, setting: Setting, config: Mapping[str, Any], blocks: int, launches: int = 2,
          change: Any = lambda inputs: None, keep: list[Any] | None = None) -> list[tensor_core.Core]:
    """Launches with fresh inputs, changed by ``change``, through one binding. Returns the tensor cores of the last, and
    leaves its tensors in ``keep``."""
    made = modules()
    warp_emulator.set_multiprocessors(made, blocks)
    tensors = tensors_of(region, kernel_check.make_inputs(region, setting, 0, "cpu"))
    scratch = {name: allocate(one, "cpu") for name, one in scratch_of(region, config).items()}
    launch = made["experts.moe_experts_block_scaled"].bind(
        make_call(arguments_of(region), tensors, scratch=scratch, config=config))
    assert launch.grid == (blocks, 1, 1)
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
    if keep is not None:
        keep.append(tensors)
    return cores


def setting(rows: int, numerics: Any, tp: int, experts: str, sizes: Mapping[str, Any]) -> Setting:
    return Setting("small", replace(SMALL, **sizes), tp, rows, 1, experts, numerics)


CASES = {
    "one-row": (1, MXFP8, 1, "tp", {}, "e4m3"),
    "half-a-tile": (3, MXFP8, 2, "tp", {"latent": 256}, "e2m1"),
    "two-terms": (9, BF16, 1, "tp", {"moe_intermediate": 192, "experts": 6}, "e4m3"),
    "whole-experts": (11, BF16, 2, "ep", {"latent": 512, "moe_intermediate": 96, "experts": 8}, "e2m1"),
    "many-pairs": (24, MXFP8, 2, "tp", {"moe_intermediate": 128, "experts": 5}, "e4m3"),
    "two-steps-of-w2": (2, BF16, 1, "tp", {"moe_intermediate": 384, "experts": 5}, "e4m3"),
}


@pytest.mark.parametrize("name", CASES)
def test_experts(name: str) -> None:
    rows, numerics, tp, experts, sizes, weights = CASES[name]
    case = setting(rows, numerics, tp, experts, sizes)
    # a kernel for more than 8 rows of bf16 can do fewer, where the planner does not ask it
    kernels = [replace(kernel, rows=(1, 64)) for kernel in menu.KERNELS]
    # the third launch uses the first one's part of the activations again
    check(region_of(kernels, case), case, {"slots": 2, "weights": weights}, 4, launches=3 if rows < 8 else 1)


@pytest.mark.parametrize("numerics", [BF16, MXFP8], ids=["bf16", "mxfp8"])
def test_all_rows_choose_the_same_experts(numerics: Any) -> None:
    """64 rows of one expert: all columns of the instruction, both words of the rows' bits, four passes over an item."""
    def same(inputs: Mapping[str, torch.Tensor]) -> None:
        inputs["ids"][:] = inputs["ids"][:1].clone()

    case = setting(64, numerics, 1, "tp", {})
    cores = check(region_of(menu.KERNELS, case), case, {"slots": 3, "weights": "e4m3"}, 2, launches=1, change=same)
    assert all(core.done for core in cores)


def test_a_rank_without_experts_of_the_step_has_zeros() -> None:
    case = setting(10, MXFP8, 2, "ep", {})
    region = region_of(menu.KERNELS, case)
    cores = check(region, case, {"slots": 2, "weights": "e4m3"}, 3, change=lambda inputs: inputs["ids"].copy_(
        torch.arange(3).expand(10, 3)))
    assert not any(core.done for core in cores)


@pytest.mark.parametrize(("rows", "numerics", "tp", "experts"), [(3, MXFP8, 2, "tp"), (12, BF16, 1, "tp"),
                                                                 (10, MXFP8, 2, "ep")])
def test_experts_and_the_shared_product_beside(rows: int, numerics: Any, tp: int, experts: str) -> None:
    """Both are right, and the experts' part is to the bit what they make alone."""
    case = Setting("small", BESIDE, tp, rows, 1, experts, numerics)
    config = {"slots": 2, "weights": "e4m3"}
    both = region_of([kernel for kernel in menu.KERNELS if "shared" in kernel.id], case)
    alone = region_of([kernel for kernel in menu.KERNELS if "shared" not in kernel.id], case)
    found: list[dict[str, torch.Tensor]] = []

    def same(inputs: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in inputs.items():
            tensor.copy_(found[0][alone.binding[name]])

    cores = check(both, case, config, 4, launches=1, keep=found)
    assert all("mma bf16" in core.done for core in cores)
    cores = check(alone, case, config, 4, launches=1, keep=found, change=same)
    assert not any("mma bf16" in core.done for core in cores)
    assert set(both.outputs) == {*alone.outputs, both.binding["s"]}
    assert all(torch.equal(found[0][name], found[1][name]) for name in alone.outputs)


def _too_early(barrier: Any) -> None:
    """A commit that does not wait for what was issued."""
    one = warp_emulator._warp().block.barriers[tensor_core._one(barrier)]
    one.left -= 1
    one.settle()


FAULTS = {
    "a stage is free before its products have ended": ("experts.moe_experts_block_scaled", "commit", _too_early),
    "weights are handed over before they are stored": (
        "experts.block_scaled_weights", "await_stores", lambda: None),
    "rows are not fenced for the tensor core": ("experts.block_scaled_rows", "fence_shared", lambda: None),
    "scales of rows are in another lane": (
        "experts.block_scaled_rows", "scale_place", lambda row, group: (row ^ 1) * 16 + (group & 3)),
    "columns of weights are not in the order of rows": (
        "experts.block_scaled_weights", "weight_words", lambda word, weights: (word & 0x1C1C1C1C,) * 2),
    "two sums share a place": ("experts.moe_experts_block_scaled", "_sums_of", None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_sees_that(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, broken = FAULTS[fault]
    made = modules()[module]
    if broken is None:
        right = getattr(made, name)

        def broken(tensor: Any, done: Any, *rest: Any) -> Any:
            return right(tensor, done * 0, *rest)
    monkeypatch.setattr(made, name, broken)
    case = setting(9, MXFP8, 1, "tp", {"latent": 256, "experts": 8})
    with pytest.raises(AssertionError):
        check(region_of(menu.KERNELS, case), case, {"slots": 2, "weights": "e4m3"}, 3, launches=1)


def test_the_emulator_sees_a_slot_that_nobody_frees(monkeypatch: pytest.MonkeyPatch) -> None:
    made = modules()["experts.moe_experts_block_scaled"]
    arrive, freed = made.arrive, []

    def forget(at: Any, count: int = 1, guard: Any = 1) -> None:
        freed.append(at)
        if len(freed) != 20:
            arrive(at, count, guard)

    monkeypatch.setattr(made, "arrive", forget)
    case = setting(1, MXFP8, 1, "tp", {"latent": 256})
    with pytest.raises(warp_emulator.Hung, match="wait for each other"):
        check(region_of(menu.KERNELS, case), case, {"slots": 2, "weights": "e4m3"}, 3)
