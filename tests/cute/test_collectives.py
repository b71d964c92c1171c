"""The collective CuTe DSL kernels: on a CPU all ranks in step by the emulator, on a GPU as they are.

Each kernel runs whole, and in the stages that stand for it where the blocks of all ranks do not fit at once.
"""
from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import kernel_check
import pytest
import torch

pytest.importorskip("cutlass")

import collective_check as cc
import emulated_ranks
import emulator

from k3plan.compiler.call import Link, emulated_links
from k3plan.compiler.kernel import KernelDef, Region
from k3plan.graphs.bench import random_inputs
from k3plan.graphs.launch import allocate, arguments_of, default_config, make_call, scratch_of
from k3plan.ops_cute.kernels import KERNELS as MENU
from k3plan.ops_cute.protocol import FRAGMENT_WORDS, PROTOCOL, read_health

MODULES = ("all_reduce_attn_res", "all_reduce_o_proj", "moe_tail", "moe_tail_attn_res")
KERNELS = tuple(k for k in MENU if k.entry.partition(":")[0].rpartition(".")[2] in MODULES)
SMALL = [(tp, rows) for tp, rows in ((2, 1), (4, 3), (2, 8), (4, 12), (4, 20))]
# one rank that hears itself: 112 and more blocks each
REAL = [(16, 1), (16, 2), (16, 5), (16, 8), (8, 1), (8, 2), (8, 5), (8, 8), (16, 16), (16, 64), (8, 64)]


def _configs(region: Region) -> list[Mapping[str, Any]]:
    """All, and a cluster with idle threads where rows are split by fragments."""
    found: list[Mapping[str, Any]] = list(region.kernel.configs(region) if region.kernel.configs else [{}])
    return [*found, {**found[-1], "cluster": 2, "threads": 32}] if "threads" in found[0] else found


def _small() -> list[Any]:
    found = []
    for kernel in KERNELS:
        for tp, rows in SMALL:
            for region, setting in cc.small_regions((kernel,), tp, rows)[-1:]:
                for number, config in enumerate(_configs(region)):
                    name = f"{cc.name_of(region)}-tp{tp}-T{rows}-c{number}"
                    found.append(pytest.param(region, setting, config, id=name))
    return found


def _real(prompt: int = 0) -> list[Any]:
    """The region with the most blocks, each number of ranks and rows; the first ``prompt`` of a kernel are not slow."""
    found = []
    for kernel in KERNELS:
        for number, (tp, rows) in enumerate(REAL):
            for region in cc.real_regions((kernel,), tp, rows)[-1:]:
                marks = [] if number < prompt else [pytest.mark.slow]
                found.append(pytest.param(region, tp, id=f"{cc.name_of(region)}-tp{tp}-T{rows}", marks=marks))
    return found


@pytest.fixture
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cc, "entry_point", emulated_ranks.entry_point())


@pytest.fixture
def _staged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cc, "entry_point", emulated_ranks.entry_point(staged=True))


def test_every_kernel_has_a_small_and_a_real_case() -> None:
    for cases in (_small(), _real()):
        missing = {kernel.id for kernel in KERNELS} - {case.values[0].kernel.id for case in cases}
        assert not missing, f"no region for {missing}"


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize(("region", "setting", "config"), _small())
def test_all_ranks(region: Region, setting: kernel_check.Setting, config: Mapping[str, Any]) -> None:
    """Four launches, so that each part of the mailbox is used and armed again."""
    cc.check(region, setting, cc.bind_together, device="cpu", seeds=4, config=config)


@pytest.mark.usefixtures("_staged")
@pytest.mark.parametrize(("region", "setting", "config"), _small()[::2])
def test_all_ranks_in_stages(region: Region, setting: kernel_check.Setting, config: Mapping[str, Any]) -> None:
    cc.check(region, setting, cc.bind_together, device="cpu", seeds=4, config=config)


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize(("region", "tp"), _real(prompt=1))
def test_real_shapes_in_loopback(region: Region, tp: int) -> None:
    cc.check(region, cc.setting_of(region, tp), cc.bind_together, device="cpu", seeds=2, ranks=1)


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("shots", [1, 2])
def test_one_or_two_shots_in_loopback(shots: int) -> None:
    """What a rank that hears itself should have is not the same: the reference of the cases on a GPU."""
    region, setting = cc.small_regions([k for k in KERNELS if k.id == "cute.all_reduce_add_attn_res"], 4, 3)[-1]
    config = next(c for c in region.kernel.configs(region) if c["shots"] == shots)
    cc.check(region, setting, cc.bind_together, device="cpu", seeds=2, ranks=1, config=config)


def _some_region(kernel: str) -> tuple[Region, kernel_check.Setting]:
    return cc.small_regions([k for k in KERNELS if k.id == kernel], 4, 3)[-1]


@pytest.mark.usefixtures("_emulated")
def test_poisoned_parts_neither_hang_nor_spread() -> None:
    """All ones, as fresh memory of a plan has them, is the payload that would read as nothing."""
    region, setting = _some_region("cute.all_reduce_add_attn_res")
    group = cc.make_group(region, setting, "cpu")
    launch = cc.bind_together(group)
    launch()
    clean = group.outputs()
    for own in group.tensors:
        own[region.binding["x"]][1].view(torch.uint8).fill_(0xFF)
    launch()
    for own, before in zip(group.outputs(), clean, strict=True):
        for name in region.outputs:
            assert own[name][1].isnan().all()
            assert torch.equal(own[name][[0, 2]], before[name][[0, 2]])


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("kernel", [kernel.id for kernel in KERNELS])
def test_a_wait_that_gives_up_says_so(kernel: str) -> None:
    """Rank 1 alone: it reports, computes NaN, and sends nothing more until all ranks have been cleared."""
    region, setting = _some_region(kernel)
    group = cc.make_group(region, setting, "cpu", limit=5)
    launches = cc.bind_apart(group)
    health = group.calls[1].scratch["health"]
    launches[1]()
    report = read_health(health.tolist())
    assert report is not None
    assert (report.rank, report.launch, report.epoch) == (1, 7, 0)
    assert 1 not in report.senders
    assert set(report.senders) <= {0, 2, 3}
    module = importlib.import_module(region.kernel.entry.partition(":")[0])
    assert f"gave up waiting for {module.WAITS[report.wait]}" in report.describe(module.WAITS)
    outputs = group.outputs()[1]
    assert all(outputs[name].isnan().any() for name in region.outputs)
    arrived = [call.scratch["mailbox"].clone() for call in group.calls]
    assert arrived[0].any(), "what a rank sends before it gives up arrives"
    launches[1]()
    assert all(torch.equal(group.calls[i].scratch["mailbox"], arrived[i]) for i in (0, 2, 3))
    assert read_health(health.tolist()) == report, "the first report stays"

    for call in group.calls:
        for name in ("mailbox", "epochs", "health"):
            call.scratch[name].zero_()
    fresh = cc.make_inputs(region, setting, 5, "cpu")
    group.write(fresh)
    cc.bind_together(group)()
    cc.compare(group, fresh, "after clearing")
    assert not any(call.scratch["health"].any() for call in group.calls)


@pytest.mark.usefixtures("_emulated")
def test_a_rank_that_nobody_answers_is_seen_by_the_emulator() -> None:
    region, setting = _some_region("cute.moe_tail")
    group = cc.make_group(region, setting, "cpu")
    bind: Any = cc.entry_point(region.kernel.entry)
    links = emulated_links([call.scratch["mailbox"] for call in group.calls])
    # rank 0 writes to rank 2 what is for rank 3
    lost = [Link(0, (*links[0].peers[:3], links[0].peers[2])), *links[1:]]
    with pytest.raises(AssertionError, match="nobody is left to send them"):
        bind(list(group.calls), lost)()


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.id)
def test_mailboxes_have_the_protocols_parts(kernel: KernelDef) -> None:
    region = cc.real_regions((kernel,), 16, 8)[-1]
    parts, ranks, slot = scratch_of(region, default_config(region))["mailbox"].shape
    assert (parts, ranks, slot % FRAGMENT_WORDS) == (PROTOCOL.parities, 16, 0)


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_103a"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.id)
def test_the_multicast_variant_compiles(kernel: KernelDef, target: str) -> None:
    """It never runs here: only its instructions can be checked."""
    from k3plan.ops_cute.compile_check import compile_launch
    from k3plan.ops_cute.launching import compile_kernel

    region = cc.real_regions((kernel,), 16, 1)[-1]
    config = default_config(region)
    scratch = {name: allocate(wanted, "meta") for name, wanted in scratch_of(region, config).items()}
    call = make_call(arguments_of(region), random_inputs(region, "meta"), scratch=scratch, config=config,
                     dependent_launch=True)
    module, _, name = kernel.entry.partition(":")
    bind = getattr(importlib.import_module(module), name)
    plain, multicast = (bind([call], [Link(0, (0,) * 16)], multicast=address) for address in (0, 16))
    usage = compile_launch(multicast, target)
    assert not usage.spilled
    assert compile_kernel(multicast, target).cubin != compile_kernel(plain, target).cubin


# kernel, rows at 16 ranks, loads of weights before the first wait for the producers; a few rows of the tail only ask
# for them in the L2 cache
BEFORE = [("cute.all_reduce_add_attn_res", 1, 3), ("cute.linear_all_reduce_add_attn_res", 1, 24),
          ("cute.moe_tail", 8, 21), ("cute.moe_tail_add_attn_res", 8, 24)]


@pytest.mark.parametrize(("kernel", "rows", "least"), BEFORE)
@pytest.mark.parametrize("target", ["sm_90a", "sm_103a"])
def test_weights_are_loaded_before_the_wait(kernel: str, rows: int, least: int, target: str) -> None:
    from k3plan.graphs.launch import bind_region
    from k3plan.ops_cute.compile_check import LOAD, WAIT, operations
    from k3plan.ops_cute.launching import compile_kernel

    region = cc.real_regions([k for k in KERNELS if k.id == kernel], 16, rows)[-1]
    launch: Any = bind_region(region, random_inputs(region, "meta"), dependent_launch=True)
    found = operations(compile_kernel(launch, target).cubin)
    assert found[: found.index(WAIT)].count(LOAD) >= least


def test_the_emulators_words_are_the_protocols() -> None:
    from k3plan.ops_cute import protocol

    words = [0, 1, 0xFFFFFFFF, 0xFFFFFFFE, 0x80008000, 0x7FC07FC0]
    emulator._now.append(emulator.Grid((1, 1, 1), (1, 1, 1), 32, 0))
    try:
        for word in words:
            signed = word - (1 << 32) if word >> 31 else word
            code = int(emulated_ranks.encode(emulator.Int32(signed)).a[0]) & 0xFFFFFFFF
            assert code == protocol.encode(word), f"{word:08x}"
    finally:
        emulator._now.pop()


# on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(("region", "tp"), _real())
@pytest.mark.parametrize("ranks", [None, 1], ids=["emulated", "loopback"])
def test_on_the_device(region: Region, tp: int, ranks: int | None, device: str) -> None:
    for config in region.kernel.configs(region) if region.kernel.configs else [{}]:
        cc.check(region, cc.setting_of(region, tp), cc.bind_together, ranks=ranks, config=config)


@pytest.mark.gpu
@pytest.mark.parametrize(("region", "setting", "config"), _small())
def test_small_models_on_the_device(region: Region, setting: kernel_check.Setting, config: Mapping[str, Any],
                                    device: str) -> None:
    cc.check(region, setting, cc.bind_together, config=config)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [kernel.id for kernel in KERNELS])
def test_replays_with_late_ranks(kernel: str, device: str) -> None:
    """100 replays of a graph a rank, on a stream each, inputs changing; all results of an input have the same bits."""
    region, setting = _some_region(kernel)
    cc.check_replays(region, setting)


# kernel, ranks, rows, hops; as many ranks as fit the GPU at once with their rows
LATE = [("all_reduce_add_attn_res", 4, 1, 1), ("all_reduce_add_attn_res", 8, 1, 1),
        ("all_reduce_add_attn_res", 4, 2, 2),
        ("linear_all_reduce_add_attn_res", 8, 1, 1), ("linear_all_reduce_add_attn_res", 8, 2, 1)]


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "tp", "rows", "shots"), LATE)
def test_replays_at_real_shapes(kernel: str, tp: int, rows: int, shots: int, device: str) -> None:
    region = cc.real_regions([k for k in KERNELS if k.id == f"cute.{kernel}"], tp, rows)[-1]
    config = next(c for c in region.kernel.configs(region) if c.get("shots", 1) == shots)
    cc.check_replays(region, cc.setting_of(region, tp), config=config)


@pytest.mark.gpu
@pytest.mark.parametrize(("region", "tp"), [case for case in _real() if case.values[1] == 16])
def test_chains_of_dependent_launches(region: Region, tp: int, device: str) -> None:
    for config in region.kernel.configs(region)[:2] if region.kernel.configs else [{}]:
        cc.check_chain(region, cc.setting_of(region, tp), config=config)
