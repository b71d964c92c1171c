"""The MoE kernels of the CuTe DSL warp by warp on a CPU (``warp_emulator.py``), against the ops' meaning.

Small sizes, few blocks, rings smaller than what streams through them, several orders of the warps.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import collective_check
import kernel_check
import numpy as np
import pytest
import real_shapes
import torch
import warp_emulator
import warp_instructions
from kernel_check import Case, Setting

from k3plan.compiler.call import emulated_links, loopback_link
from k3plan.compiler.covering.match import find_regions
from k3plan.compiler.kernel import Menu, Region
from k3plan.graphs.launch import allocate, arguments_of, make_call, scratch_of
from k3plan.graphs.load import TORCH_DTYPES
from k3plan.ops_cute import moe_front_menu, router_topk_menu
from k3plan.ops_cute.experts import moe_experts_menu

SMALL = replace(kernel_check.K3, hidden=128, latent=128, moe_intermediate=64, shared_experts=1, experts=12, top_k=3)
# 5 shared experts: 20 and 10 matrix instructions a row on 1 and 2 ranks, for 16 warps
BESIDE = replace(SMALL, hidden=336, shared_experts=5, experts=6)
ROUTED = replace(SMALL, experts=64, top_k=5, latent=64)


@cache
def modules() -> dict[str, Any]:
    return warp_emulator.load(("experts.mxfp4", "moe_parts", "mailbox", "moe_topk", "experts.call", "experts.dot",
                               "experts.work_list", "experts.copy_weights", "experts.roles", "experts.moe_experts",
                               "experts.gathered_list", "experts.moe_experts_gathered", "moe_front",
                               "moe_front_sharded", "router_topk"))


def region_of(kernels: Any, setting: Setting) -> Region:
    regions, _ = find_regions(setting.graph(), Menu(kernels), rows=setting.sequences * setting.query)
    return regions[0]


def tensors_of(region: Region, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    values = region.graph.values
    return {**inputs, **{name: torch.empty(values[name].shape, dtype=TORCH_DTYPES[values[name].dtype])
                         for name in region.outputs}}


def check(module: str, region: Region, setting: Setting, config: Mapping[str, Any], blocks: int,
          change: Any = lambda inputs: None) -> dict[str, torch.Tensor]:
    """Two launches with fresh inputs, changed by ``change``, through one binding. Returns the tensors of the second."""
    tensors = tensors_of(region, kernel_check.make_inputs(region, setting, 0, "cpu"))
    launch, scratch = bind(module, region, tensors, config, blocks)
    for seed in range(2):
        for name, fresh in kernel_check.make_inputs(region, setting, seed, "cpu").items():
            tensors[name].copy_(fresh)
        change({name: tensors[value] for name, value in region.binding.items() if value in region.inputs})
        for name in region.outputs:
            kernel_check._poison(tensors[name])
        before = {name: tensors[name].clone() for name in region.inputs}
        warp_emulator.run(launch, [*tensors.values(), *scratch.values()], seed)
        kernel_check._compare(Case(region.kernel.id, region, config, setting), before, tensors, seed)
    return tensors


def bind(module: str, region: Region, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any],
         blocks: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """The launch, and its workspace."""
    made = modules()
    warp_emulator.set_multiprocessors(made, blocks)
    scratch = {name: allocate(one, "cpu") for name, one in scratch_of(region, config).items()}
    launch = made[module].bind(make_call(arguments_of(region), tensors, scratch=scratch, config=config))
    assert launch.grid == (blocks, 1, 1)
    return launch, scratch


@pytest.mark.parametrize(("rows", "tp", "experts", "numerics", "bulk"), [
    (1, 1, "tp", kernel_check.PLAIN, True), (3, 2, "tp", kernel_check.FP8, False),
    (8, 2, "ep", kernel_check.PLAIN, True)], ids=["one-row", "mxfp8-lanes", "whole-experts"])
def test_experts(rows: int, tp: int, experts: str, numerics: Any, bulk: bool) -> None:
    setting = Setting("small", SMALL, tp, rows, 1, experts, numerics)
    region = region_of(moe_experts_menu.KERNELS[:1], setting)
    check("experts.moe_experts", region, setting, {"slots": 2, "bulk": bulk}, blocks=3)


@pytest.mark.parametrize(("rows", "sizes"), [(1, {"latent": 896}), (2, {"moe_intermediate": 160})],
                         ids=["each-a-group", "more-chunks-than-warps"])
def test_experts_on_28_warps(rows: int, sizes: Mapping[str, int]) -> None:
    setting = Setting("small", replace(SMALL, **sizes), 1, rows, 1, "tp", kernel_check.PLAIN)
    region = region_of(moe_experts_menu.KERNELS[:1], setting)
    check("experts.moe_experts", region, setting, {"slots": 2, "bulk": True, "warps": 28}, blocks=3)


@pytest.mark.parametrize(("rows", "tp", "experts", "numerics", "blocks", "slots", "run", "same"), [
    (9, 1, "tp", kernel_check.PLAIN, 3, 2, 4, False), (17, 2, "tp", kernel_check.FP8, 4, 3, 2, True),
    pytest.param(40, 2, "ep", kernel_check.PLAIN, 5, 2, 4, False, marks=pytest.mark.slow)],
    ids=["few", "mxfp8-one-choice", "whole-experts"])
def test_gathered_experts(rows: int, tp: int, experts: str, numerics: Any, blocks: int, slots: int, run: int,
                          same: bool) -> None:
    """Experts of one row and of more than 8; with ``same`` all rows choose the same ones."""
    def choose(inputs: Mapping[str, torch.Tensor]) -> None:
        if same:
            inputs["ids"][:] = inputs["ids"][:1].clone()

    setting = Setting("small", SMALL, tp, rows, 1, experts, numerics)
    region = region_of(moe_experts_menu.KERNELS[2:3], setting)
    check("experts.moe_experts_gathered", region, setting, {"slots": slots, "run": run}, blocks, change=choose)


@pytest.mark.parametrize(("rows", "tp", "experts", "bulk", "slots", "blocks", "extra"), [
    (1, 1, "tp", True, 2, 3, {}), (2, 2, "tp", False, 3, 4, {}), (8, 2, "ep", True, 2, 5, {"warps": 28}),
    (8, 1, "tp", False, 2, 3, {}), (1, 1, "tp", True, 2, 3, {"side_first": True}),
    (3, 2, "tp", True, 9, 4, {"side_first": True}), (8, 2, "ep", True, 3, 5, {"side_first": True, "warps": 28})])
def test_experts_and_the_shared_product_beside(rows: int, tp: int, experts: str, bulk: bool, slots: int, blocks: int,
                                               extra: Mapping[str, Any]) -> None:
    """Both are right, and the experts' part is to the bit what they make alone."""
    setting = Setting("small", BESIDE, tp, rows, 1, experts, kernel_check.PLAIN if bulk else kernel_check.FP8)
    compare_with_alone("experts.moe_experts", moe_experts_menu.KERNELS[:2], setting,
                       {"slots": slots, "bulk": bulk, **extra}, blocks)


@pytest.mark.parametrize(("rows", "tp", "experts", "blocks", "slots", "run"), [
    (20, 1, "tp", 5, 3, 4), pytest.param(33, 2, "ep", 3, 2, 2, marks=pytest.mark.slow)])
def test_gathered_experts_and_the_shared_product_beside(rows: int, tp: int, experts: str, blocks: int, slots: int,
                                                        run: int) -> None:
    setting = Setting("small", BESIDE, tp, rows, 1, experts)
    compare_with_alone("experts.moe_experts_gathered", moe_experts_menu.KERNELS[2:], setting,
                       {"slots": slots, "run": run}, blocks)


def compare_with_alone(module: str, kernels: Any, setting: Setting, config: Mapping[str, Any], blocks: int) -> None:
    alone, both = (region_of([kernel], setting) for kernel in kernels)
    tensors = check(module, both, setting, config, blocks)
    own = {name: tensors[name] for name in alone.inputs} | {
        name: torch.full_like(tensors[name], torch.nan) for name in alone.outputs}
    launch, scratch = bind(module, alone, own, {n: v for n, v in config.items() if n != "side_first"}, blocks)
    warp_emulator.run(launch, [*own.values(), *scratch.values()], 7)
    assert set(both.outputs) == {*alone.outputs, both.binding["s"]}
    assert all(torch.equal(own[name], tensors[name]) for name in alone.outputs)


@pytest.mark.parametrize("extra", [{"bulk": True}, {"bulk": False}, {"side_first": True}],
                         ids=["rows", "lanes", "first"])
def test_a_rank_without_experts_of_the_step_has_the_shared_product(extra: Mapping[str, Any]) -> None:
    setting = Setting("small", BESIDE, 2, 2, 1, "ep")
    region = region_of(moe_experts_menu.KERNELS[1:2], setting)
    tensors = check("experts.moe_experts", region, setting, {"slots": 2, **extra}, 3,
                    change=lambda inputs: inputs["ids"].fill_(0))
    assert not tensors[region.binding["out"]].any()
    assert tensors[region.binding["s"]].any()


def test_front() -> None:
    setting = Setting("small", ROUTED, 1, 5, 1)
    region = region_of(moe_front_menu.KERNELS[:1], setting)
    check("moe_front", region, setting, {"slots": 2}, blocks=6)


def test_front_gives_ties_to_the_lower_id() -> None:
    """All experts equal; then 10 of 64 that share the highest place, for 5 that are wanted."""
    def equal(inputs: Mapping[str, torch.Tensor]) -> None:
        inputs["router"][:] = inputs["router"][:1].clone()
        inputs["bias"].zero_()
        if inputs["x"][0, 0] > 0:
            inputs["bias"][20:50:3] = 2.0

    setting = Setting("small", ROUTED, 1, 1, 1)
    region = region_of(moe_front_menu.KERNELS[:1], setting)
    check("moe_front", region, setting, {"slots": 4}, blocks=3, change=equal)


@pytest.mark.parametrize("ties", ["none", "all", "at the edge"])
@pytest.mark.parametrize(("experts", "top_k"), [(16, 3), (64, 5), (160, 16), (896, 16)])
def test_top_k_alone(experts: int, top_k: int, ties: str) -> None:
    """One warp chooses, some with idle lanes, and seven; the first ids of equal scores, and NaN behind all."""
    def tie(inputs: Mapping[str, torch.Tensor]) -> None:
        if ties == "all":
            inputs["logits"].fill_(0.5)
            inputs["bias"].zero_()
        elif ties == "at the edge":
            inputs["bias"].zero_()
            for row in inputs["logits"]:
                order = row.argsort(descending=True)
                row[order[top_k - 2 : top_k + 9]] = row[order[top_k]].clone()
                row[order[0]] = float("nan")

    setting = Setting("small", replace(ROUTED, experts=experts, top_k=top_k), 1, 2, 1, "tp", kernel_check.PLAIN)
    region = region_of(router_topk_menu.KERNELS, setting)
    check("router_topk", region, setting, {}, blocks=2, change=tie)


@pytest.mark.parametrize(("experts", "top_k", "rows", "lean"), [
    (64, 5, 3, False), (64, 5, 2, True), pytest.param(208, 20, 1, False, marks=pytest.mark.slow)])
def test_sharded_front_of_all_ranks(experts: int, top_k: int, rows: int, lean: bool) -> None:
    """One warp chooses, and two with idle lanes; few and many experts are wanted."""
    model = replace(ROUTED, experts=experts, top_k=top_k)
    setting = Setting("small", model, 2, rows, 1, choices=kernel_check.SHARDED)
    made = modules()["moe_front_sharded"]
    warp_emulator.set_multiprocessors(modules(), 4)

    def run(launch: Any, everything: list[torch.Tensor], seed: int) -> None:
        for one in launch.launches:
            warp_emulator.run(one, [*everything, one.arguments["table"]], seed)

    check_ranks(region_of(moe_front_menu.KERNELS[2:], setting), setting, made.bind, run, {"slots": 2, "lean": lean})


def test_the_emulator_sees_a_slot_that_nobody_frees(monkeypatch: pytest.MonkeyPatch) -> None:
    made = modules()["moe_front"]
    arrive, freed = made.arrive, []

    def forget(at: Any, count: int = 1, guard: Any = 1) -> None:
        freed.append(at)
        if len(freed) != 20:
            arrive(at, count, guard)

    monkeypatch.setattr(made, "arrive", forget)
    setting = Setting("small", ROUTED, 1, 1, 1)
    region = region_of(moe_front_menu.KERNELS[:1], setting)
    with pytest.raises(warp_emulator.Hung, match="wait for each other"):
        check("moe_front", region, setting, {"slots": 2}, blocks=2)


@pytest.mark.parametrize("missing", ["warp barriers", "waits for sums"])
def test_the_emulator_sees_a_race(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lane 0 arrives for a warp that has not met; sums are read behind a wait that orders nothing. Both give the right
    numbers here."""
    dot = modules()["experts.dot"]
    wait = dot.await_phase

    def wait_for_nothing(at: Any, parity: Any) -> None:
        races, own = warp_emulator._warp().block.races, warp_instructions._threads(np.ones(32, bool))
        before = races.clock[own].copy()
        wait(at, parity)
        races.clock[own] = before

    if missing == "warp barriers":
        monkeypatch.setattr(warp_instructions.Arch, "sync_warp", staticmethod(lambda: None))
    else:
        monkeypatch.setattr(dot, "await_phase", wait_for_nothing)
    setting = Setting("small", SMALL, 1, 1, 1)
    region = region_of(moe_experts_menu.KERNELS[:1], setting)
    with pytest.raises(AssertionError, match="race: thread"):
        check("experts.moe_experts", region, setting, {"slots": 2}, blocks=3)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8])
def test_sharded_front_of_all_ranks_on_a_gpu(rows: int, device: str) -> None:
    from k3plan.ops_cute.moe_front_sharded import bind

    def run(launch: Any, everything: list[torch.Tensor], seed: int) -> None:
        launch()
        torch.cuda.synchronize()

    setting = real_setting(rows)
    check_ranks(region_of(moe_front_menu.KERNELS[2:], setting), setting, bind, run, {"slots": 12}, device)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize("config", [{"slots": 12}, {"slots": 7, "lean": True}], ids=str)
def test_sharded_front_in_loopback_on_a_gpu(rows: int, config: Mapping[str, Any], device: str) -> None:
    from k3plan.ops_cute.moe_front_sharded import bind

    def run(launch: Any, everything: list[torch.Tensor], seed: int) -> None:
        launch()
        torch.cuda.synchronize()

    check_loopback(real_setting(rows), bind, run, config, device)


@pytest.mark.parametrize(("rows", "config"), [(3, {"slots": 3}), (2, {"slots": 2, "lean": True}),
                                              (2, {"slots": 3, "lean": True, "pace": 2}), (1, {"slots": 2, "pace": 1})],
                         ids=str)
def test_sharded_front_in_loopback(rows: int, config: Mapping[str, Any]) -> None:
    """A block's last unit lies in the first of two slots, where the lean form's keys go: it fails where a warp does not
    wait for the others before it clears them."""
    made = modules()["moe_front_sharded"]
    warp_emulator.set_multiprocessors(modules(), 5)

    def run(launch: Any, everything: list[torch.Tensor], seed: int) -> None:
        warp_emulator.run(launch, [*everything, launch.arguments["table"]], seed)

    setting = Setting("small", replace(ROUTED, experts=64, top_k=5), 2, rows, 1, choices=kernel_check.SHARDED)
    check_loopback(setting, made.bind, run, config, "cpu")


def check_loopback(setting: Setting, bind: Any, run: Any, config: Mapping[str, Any], device: str) -> None:
    """The one launch that a rank has: it hears itself for all ranks, and where all biases are equal, choices are ties.
    """
    region = region_of(moe_front_menu.KERNELS[2:], setting)
    own = {n: t.to(device) for n, t in tensors_of(region, kernel_check.make_inputs(region, setting, 0, "cpu")).items()}
    scratch = {name: allocate(one, device) for name, one in scratch_of(region, config).items()}
    call = make_call(arguments_of(region), own, scratch=scratch, config=config)
    launch = bind([call], [loopback_link(scratch["mailbox"])])
    for seed in range(6):
        for name, fresh in kernel_check.make_inputs(region, setting, seed, "cpu").items():
            own[name].copy_(fresh)
        if seed % 2:
            own[region.binding["bias"]].zero_()
        for name in region.outputs:
            kernel_check._poison(own[name])
        run(launch, [*own.values(), *scratch.values()], seed)
        compare_ranks(region, setting, [{name: t.cpu() for name, t in own.items()}] * setting.tp, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5])
def test_sharded_front_of_late_ranks_on_a_gpu(rows: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 replays of a graph a rank, on a stream each, inputs changing, some ranks late; two ranks fit the GPU when
    each has few blocks. All results of an input have the same bits, and the first are right."""
    from k3plan.ops_cute import moe_front_sharded

    monkeypatch.setattr(moe_front_sharded, "multiprocessors", lambda device: 60)
    setting = real_setting(rows, tp=2)
    region = region_of(moe_front_menu.KERNELS[2:], setting)
    calls, ranks = ranks_of(region, setting, {"slots": 12}, device)
    links = emulated_links([call.scratch["mailbox"] for call in calls])
    launches = [moe_front_sharded.bind([call], [link]) for call, link in zip(calls, links, strict=True)]
    fresh = [fresh_ranks(region, setting, seed) for seed in range(3)]
    replay_late(region, setting, launches, ranks, fresh, device)


def replay_late(region: Region, setting: Setting, launches: list[Any], ranks: list[dict[str, torch.Tensor]],
                fresh: list[list[dict[str, torch.Tensor]]], device: str) -> None:
    """100 replays of a graph a rank, on a stream each, with ``fresh`` inputs in turn, some ranks late. All results of
    an input have the same bits, and the first are right."""
    fresh = [[{n: t.to(device) for n, t in one.items()} for one in inputs] for inputs in fresh]
    collective_check.launch_apart(launches, {})  # compiles
    graphs = [torch.cuda.CUDAGraph() for _ in launches]
    for graph, launch in zip(graphs, launches, strict=True):
        with torch.cuda.graph(graph):
            launch()
    known: dict[int, list[dict[str, torch.Tensor]]] = {}
    delays = torch.Generator().manual_seed(0)
    for replay in range(100):
        renew(region, ranks, fresh[replay % 3])
        late = {replay % 4: int(torch.randint(1, 200_000, (), generator=delays))} if replay % 4 < 2 else {}
        collective_check.launch_apart([graph.replay for graph in graphs], late)
        torch.cuda.synchronize()
        found = [{name: t.cpu() for name, t in own.items()} for own in ranks]
        if replay < 3:
            compare_ranks(region, setting, found, replay)
            known[replay] = found
        for rank, (own, first) in enumerate(zip(found, known[replay % 3], strict=True)):
            wrong = [name for name in region.outputs if not torch.equal(own[name], first[name])]
            assert not wrong, f"replay {replay}, late {late}: rank {rank} differs in {wrong}"


def renew(region: Region, ranks: list[dict[str, torch.Tensor]], inputs: list[dict[str, torch.Tensor]]) -> None:
    """Fresh inputs of all ranks, and outputs that nobody has written."""
    for own, new in zip(ranks, inputs, strict=True):
        for name, tensor in new.items():
            own[name].copy_(tensor)
        for name in region.outputs:
            kernel_check._poison(own[name])


def real_setting(rows: int, tp: int = 16) -> Setting:
    """The front of Kimi K3 on ``tp`` ranks, and small experts behind it."""
    model = replace(real_shapes._spec(1, 1, kernel_check.SHARDED).model, attention=("kda",) * 2, mlp=("dense", "moe"),
                    dense_intermediate=512, moe_intermediate=512)
    return Setting("k3", model, tp, rows, 1, choices=kernel_check.SHARDED)


def ranks_of(region: Region, setting: Setting, config: Mapping[str, Any], device: str,
             count: int | None = None) -> tuple[list[Any], list[dict[str, torch.Tensor]]]:
    """The bound calls of all ranks, or of the first ``count``, and their tensors."""
    calls, ranks = [], []
    for rank in range(count or setting.tp):
        own = tensors_of(region, kernel_check.make_inputs(region, setting, rank, "cpu"))
        own = {name: tensor.to(device) for name, tensor in own.items()}
        scratch = {name: allocate(one, device) for name, one in scratch_of(region, config).items()}
        calls.append(make_call(arguments_of(region), own, scratch=scratch, config=config))
        ranks.append(own)
    return calls, ranks


def fresh_ranks(region: Region, setting: Setting, seed: int) -> list[dict[str, torch.Tensor]]:
    """Inputs of all ranks; rows and bias are equal on all."""
    found = [kernel_check.make_inputs(region, setting, 100 * seed + rank, "cpu") for rank in range(setting.tp)]
    same = {region.binding[name]: found[0][region.binding[name]] for name in ("x", "bias")}
    return [own | same for own in found]


def check_ranks(region: Region, setting: Setting, bind: Any, run: Any, config: Mapping[str, Any],
                device: str = "cpu") -> None:
    """Four launches, so that the mailbox goes round; every rank must choose the same experts."""
    calls, ranks = ranks_of(region, setting, config, device)
    launch = bind(calls, emulated_links([call.scratch["mailbox"] for call in calls]))
    everything = [t for own in ranks for t in own.values()] + [t for c in calls for t in c.scratch.values()]
    for seed in range(4):
        renew(region, ranks, fresh_ranks(region, setting, seed))
        run(launch, everything, seed)
        compare_ranks(region, setting, [{name: t.cpu() for name, t in own.items()} for own in ranks], seed)


def compare_ranks(region: Region, setting: Setting, ranks: list[dict[str, torch.Tensor]], seed: int) -> None:
    """One rank stands for all of its group, which have what it has."""
    alike = setting.tp if len(ranks) == 1 else 1
    exact, chain = (collective_check.evaluate(region, ranks, rounded=rounded, alike=alike) for rounded in (False, True))
    case = Case(region.kernel.id, region, {}, setting)
    for rank, own in enumerate(ranks):
        for name in region.outputs:
            where = f"launch {seed}, rank {rank}, {name}"
            if own[name].dtype == torch.int32:
                assert torch.equal(own[name], chain[rank][name]), where
            else:
                kernel_check._check_close(case, name, where, own[name].float(), chain[rank][name].float(),
                                          exact[rank][name].float())
