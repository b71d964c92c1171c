"""Blocks of a head hand the query to each other in memory: every launch must get its own words, not the last one's.

At real sizes on a GPU: what goes wrong here is a matter of which thread looks when (``ops_triton/exchange.py``).
"""
from __future__ import annotations

from dataclasses import dataclass, replace

import kernel_check
import pytest
import real_shapes
import torch
from kernel_check import WHOLE

from k3plan.compiler.build import build_graph
from k3plan.compiler.covering.match import find_regions
from k3plan.compiler.ir import Graph
from k3plan.compiler.kernel import Menu, Region
from k3plan.compiler.passes.merge import merge_projections
from k3plan.compiler.passes.shard import algebra_of, shard_graph
from k3plan.compiler.spec import Parallel
from k3plan.graphs.launch import allocate, bind_region, scratch_of
from k3plan.ops_triton.mla_menu import KERNELS

KERNEL = next(kernel for kernel in KERNELS if kernel.id == "triton.mla_query_absorb")


@dataclass(frozen=True)
class RealSetting(kernel_check.Setting):
    """Layer 3 of Kimi K3, the first with latent attention."""

    def graph(self) -> Graph:
        spec = replace(real_shapes._spec(self.sequences, self.query, WHOLE), parallel=Parallel(self.tp, "tp"),
                       layers=(3,))
        return merge_projections(shard_graph(build_graph(spec), spec, algebra_of(spec))[0])[0]


def _setting(tp: int, rows: int) -> RealSetting:
    return RealSetting(f"k3-tp{tp}-L{rows}", real_shapes._spec(1, rows, WHOLE).model, tp, 1, rows)


def _region(setting: RealSetting, *, anywhere: bool = False) -> Region | None:
    """Where the kernel fits; ``anywhere``: also where its menu says that it should not be used."""
    kernel = replace(KERNEL, needs=lambda region: None) if anywhere else KERNEL
    return next(iter(find_regions(setting.graph(), Menu((kernel,)), rows=setting.query)[0]), None)


@pytest.mark.parametrize(("tp", "rows", "parts"), [
    (32, 1, [32, 16, 8]), (16, 1, [16, 8]), (16, 4, [16]), (16, 8, [16, 8]), (8, 1, [8]), (8, 4, []), (4, 1, []),
    (2, 1, []), (2, 8, [])])
def test_a_part_that_does_not_fit_the_registers_is_not_offered(tp: int, rows: int, parts: list[int]) -> None:
    """TP 2 to 4: a head in one, two or four parts, 2 to 16 KB spilled a thread. ``tests/cross`` compiles the others."""
    region = _region(_setting(tp, rows))
    offered = [] if region is None else [config["parts"] for config in KERNEL.configs(region)]
    assert list(dict.fromkeys(offered)) == parts


@pytest.mark.gpu
@pytest.mark.parametrize(("tp", "rows", "parts", "warps"), [
    (16, 1, 16, 8), (16, 1, 16, 4), (16, 2, 8, 8), (16, 8, 16, 8), (8, 1, 8, 8), (2, 1, 1, 8)], ids=str)
def test_equal_inputs_give_equal_bits(tp: int, rows: int, parts: int, warps: int, device: str) -> None:
    """60 launches over two inputs in turn, those of one input equal; the first of each against the ops' meaning."""
    setting = _setting(tp, rows)
    region = _region(setting, anywhere=True)
    assert region is not None
    config = {"parts": parts, "warps": warps}
    inputs = [kernel_check.make_inputs(region, setting, seed, device) for seed in range(2)]
    for other in inputs[1:]:
        # weights and cache are those of the first; the rows differ
        other.update({n: t for n, t in inputs[0].items() if region.graph.values[n].role != "activation"})
    tensors = {name: tensor.clone() for name, tensor in inputs[0].items()}
    tensors |= kernel_check._outputs(region, tensors, device)
    scratch = {name: allocate(one, device) for name, one in scratch_of(region, config).items()}
    launch = bind_region(region, tensors, config, scratch=scratch)
    query, first = region.binding["query"], {}
    for number in range(60):
        turn = number % 2
        for name, fresh in inputs[turn].items():
            tensors[name].copy_(fresh)
        tensors[query].fill_(torch.nan)
        launch()
        torch.cuda.synchronize()
        if turn not in first:
            case = kernel_check.Case(f"launch-{number}", region, config, setting)
            kernel_check._compare(case, inputs[turn], tensors, number)
            first[turn] = tensors[query].clone()
        assert torch.equal(tensors[query], first[turn]), f"launch {number} differs from launch {turn}"
