"""``cute.moe_experts_tail`` on a CPU: all ranks of a group, warp by warp, one launch for each wait."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import kernel_check
import pytest
import real_shapes
import torch
import warp_emulator
from kernel_check import Setting
from test_moe_emulated import SMALL, compare_ranks, ranks_of, renew, replay_late

from k3plan.compiler.call import emulated_links, loopback_link
from k3plan.compiler.covering.match import find_regions
from k3plan.compiler.kernel import KernelDef, Menu, Region
from k3plan.ops_cute.experts import moe_experts_tail_menu as menu

MODEL = replace(SMALL, hidden=64, experts=6)
# three finished blocks before the last layer
DEEP = {"attention": ("kda",) * 4, "mlp": ("dense", "moe", "moe", "moe"), "attn_res_block": 1}


@cache
def modules() -> dict[str, Any]:
    return warp_emulator.load((
        "experts.mxfp4", "moe_parts", "mailbox", "experts.call", "experts.dot", "experts.work_list",
        "experts.copy_weights", "experts.roles", "experts.tensor_memory", "experts.tail", "experts.tail_mix",
        "experts.moe_experts_tail"))


OF_A_RANK = ("w1", "w3", "s1", "s3", "w2", "s2", "a", "w", "up_weight")


def last_region(kernel: KernelDef, setting: Setting) -> Region:
    """With the most finished blocks."""
    return find_regions(setting.graph(), Menu([kernel]), rows=setting.sequences * setting.query)[0][-1]


def fresh(region: Region, setting: Setting, seed: int) -> list[dict[str, torch.Tensor]]:
    """Inputs of all ranks; what is no part of a split tensor is equal on all."""
    found = [kernel_check.make_inputs(region, setting, 100 * seed + rank, "cpu") for rank in range(setting.tp)]
    parts = {region.binding[name] for name in OF_A_RANK}
    same = {name: tensor for name, tensor in found[0].items() if name not in parts}
    return [own | same | {region.binding["rank"]: torch.tensor([rank], dtype=torch.int32)}
            for rank, own in enumerate(found)]


@pytest.mark.parametrize(("kernel", "rows", "tp", "experts", "numerics", "blocks", "launches", "sizes", "config"), [
    (0, 1, 2, "tp", kernel_check.PLAIN, 5, 4, {}, {"side_first": True}),
    (0, 2, 2, "tp", kernel_check.PLAIN, 9, 2, {}, {"side_first": False, "few": True}),
    pytest.param(1, 3, 2, "tp", kernel_check.FP8, 9, 2, {}, {"side_first": False}, marks=pytest.mark.slow),
    pytest.param(0, 8, 4, "tp", kernel_check.PLAIN, 4, 1, {"experts": 8, "moe_intermediate": 128}, {"warps": 28},
                 marks=pytest.mark.slow),
    pytest.param(0, 2, 2, "ep", kernel_check.PLAIN, 5, 2, {}, {"side_first": True}, marks=pytest.mark.slow),
    (2, 1, 2, "tp", kernel_check.PLAIN, 5, 2, {}, {"side_first": True}),
    (2, 2, 2, "tp", kernel_check.PLAIN, 11, 2, {}, {"side_first": True, "few": True}),
    (3, 4, 2, "tp", kernel_check.FP8, 9, 1, DEEP, {"warps": 28}),
], ids=["one-row", "few-finish", "four-columns", "four-ranks", "whole-experts", "mixed", "mixed-few", "mixed-rows"])
def test_all_ranks(kernel: int, rows: int, tp: int, experts: str, numerics: Any, blocks: int, launches: int,
                   sizes: Mapping[str, int], config: Mapping[str, Any]) -> None:
    """In four launches the mailbox goes round and each part of the activations comes twice."""
    setting = Setting("small", replace(MODEL, **sizes), tp, rows, 1, experts, numerics, choices=kernel_check.SHARDED)
    region = last_region(menu.KERNELS[kernel], setting)
    warp_emulator.set_multiprocessors(modules(), blocks)
    calls, ranks = ranks_of(region, setting, {"slots": 8, **config}, "cpu")
    launch = modules()["experts.moe_experts_tail"].bind(
        calls, emulated_links([call.scratch["mailbox"] for call in calls]))
    everything = [t for own in ranks for t in own.values()] + [t for c in calls for t in c.scratch.values()]
    for seed in range(launches):
        renew(region, ranks, fresh(region, setting, seed))
        for one in launch.launches:
            warp_emulator.run(one, [*everything, one.arguments["table"]], seed)
        compare_ranks(region, setting, ranks, seed)
        assert all(torch.equal(own[name], ranks[0][name]) for own in ranks for name in region.outputs)


def loopback(region: Region, setting: Setting, config: Mapping[str, Any], bind: Any, run: Any, launches: int,
             device: str = "cpu") -> None:
    """One launch of a rank that hears itself; rows of ``w`` repeat, so that every rank's columns are the same."""
    (call,), (own,) = ranks_of(region, setting, config, device, count=1)
    launch = bind([call], [loopback_link(call.scratch["mailbox"])])
    for seed in range(launches):
        new = kernel_check.make_inputs(region, setting, seed, "cpu")
        w = new[region.binding["w"]]
        w.copy_(w[: w.shape[0] // setting.tp].repeat(setting.tp, 1))
        renew(region, [own], [new])
        run(launch, [*own.values(), *call.scratch.values()], seed)
        compare_ranks(region, setting, [{name: t.cpu() for name, t in own.items()}], seed)


@pytest.mark.parametrize(("kernel", "rows", "tp", "blocks", "few"), [
    (0, 1, 2, 5, False), (0, 2, 4, 4, False), (0, 1, 2, 9, True), (0, 3, 4, 4, True), (2, 1, 2, 5, False),
    (2, 2, 2, 11, True)])
def test_one_launch_of_a_rank_alone(kernel: int, rows: int, tp: int, blocks: int, few: bool) -> None:
    """All blocks wait for each other inside the launch, warp by warp."""
    sizes = {"experts": 8, "moe_intermediate": 128} if tp == 4 else {}
    setting = Setting("small", replace(MODEL, **sizes), tp, rows, 1, choices=kernel_check.SHARDED)
    warp_emulator.set_multiprocessors(modules(), blocks)

    def run(launch: Any, everything: list[torch.Tensor], seed: int) -> None:
        warp_emulator.run(launch, [*everything, launch.arguments["table"]], seed)

    loopback(last_region(menu.KERNELS[kernel], setting), setting, {"slots": 6, "side_first": True, "few": few},
             modules()["experts.moe_experts_tail"].bind, run, launches=3)


@pytest.mark.gpu
@pytest.mark.parametrize(("tp", "rows"), [(16, 1), (16, 2), (16, 5), (16, 8), (8, 1), (8, 8)])
@pytest.mark.parametrize("kernel", menu.KERNELS, ids=lambda kernel: kernel.id)
def test_one_launch_of_a_rank_alone_on_a_gpu(kernel: KernelDef, rows: int, tp: int, device: str) -> None:
    """Kimi K3's sizes: 30 launches of the first configuration, and all ways of the warps with the smallest ring."""
    from k3plan.ops_cute.experts.moe_experts_tail import bind

    def run(launch: Any, everything: list[torch.Tensor], seed: int) -> None:
        launch()
        torch.cuda.synchronize()

    setting = real_setting(kernel, rows, tp, experts=32)
    region = last_region(kernel, setting)
    first, *rest = menu.configs(region)
    loopback(region, setting, first, bind, run, 30, device)
    for config in {(config["warps"], config["side_first"], "few" in config): config for config in rest}.values():
        loopback(region, setting, config, bind, run, 3, device)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("kernel", menu.KERNELS, ids=lambda kernel: kernel.id)
def test_all_ranks_on_a_gpu(kernel: KernelDef, rows: int, device: str) -> None:
    """8 ranks of Kimi K3's sizes with few experts, one launch for each wait."""
    from k3plan.ops_cute.experts.moe_experts_tail import bind

    setting = real_setting(kernel, rows, 8, experts=32)
    region = last_region(kernel, setting)
    calls, ranks = ranks_of(region, setting, menu.configs(region)[0], device)
    launch = bind(calls, emulated_links([call.scratch["mailbox"] for call in calls]))
    for seed in range(2):
        renew(region, ranks, fresh(region, setting, seed))
        launch()
        torch.cuda.synchronize()
        compare_ranks(region, setting, [{name: t.cpu() for name, t in own.items()} for own in ranks], seed)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", menu.KERNELS[::2], ids=lambda kernel: kernel.id)
def test_late_ranks_on_a_gpu(kernel: KernelDef, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 replays of a graph a rank, on a stream each, inputs changing, some ranks late; two ranks fit the GPU when
    each has few blocks. All results of an input have the same bits, and the first are right."""
    from k3plan.ops_cute.experts import call as reader
    from k3plan.ops_cute.experts.moe_experts_tail import bind

    monkeypatch.setattr(reader, "multiprocessors", lambda device: 60)
    setting = real_setting(kernel, 2, 2, hidden=896, latent=512, moe_intermediate=384, experts=32)
    region = last_region(kernel, setting)
    calls, ranks = ranks_of(region, setting, {"slots": 8, "warps": 16}, device)
    links = emulated_links([call.scratch["mailbox"] for call in calls])
    launches = [bind([call], [link]) for call, link in zip(calls, links, strict=True)]
    replay_late(region, setting, launches, ranks, [fresh(region, setting, seed) for seed in range(3)], device)


def real_setting(kernel: KernelDef, rows: int, tp: int, **sizes: int) -> Setting:
    """Kimi K3 with four layers, whose last has three finished blocks and one more."""
    model = replace(real_shapes._spec(1, 1, kernel_check.SHARDED).model, **{"dense_intermediate": 512, **DEEP, **sizes})
    numerics = kernel_check.FP8 if "mxfp8" in kernel.id else kernel_check.PLAIN
    return Setting("k3", model, tp, rows, 1, "tp", numerics, choices=kernel_check.SHARDED)


def test_the_emulator_sees_columns_that_nobody_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules()["experts.moe_experts_tail"], "send_finished", lambda *arguments: None)
    with pytest.raises(warp_emulator.Hung, match="wait for each other"):
        test_one_launch_of_a_rank_alone(0, 1, 2, 5, few=False)
