"""Settled blocks of the residual stream are read before the wait, and nothing else is: results by the emulators with
every kind of settled set, accesses before the wait there and in the binaries."""
from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

import kernel_check
import pytest
import torch

pytest.importorskip("cutlass")

import collective_check as cc
import emulated_ranks
import emulator
import test_on_device

from k3plan.compiler.call import Link
from k3plan.compiler.kernel import Region
from k3plan.graphs.bench import random_inputs
from k3plan.graphs.launch import allocate, arguments_of, bind_region, make_call, scratch_of
from k3plan.ops_cute import attn_res as attn_res_file
from k3plan.ops_cute.compile_check import LOAD, WAIT, compile_launch, operations
from k3plan.ops_cute.kernels import KERNELS
from k3plan.ops_cute.launching import compile_kernel

ALONE = ("cute.attn_res", "cute.attn_res_mix")
TOGETHER = ("cute.all_reduce_add_attn_res", "cute.all_reduce_attn_res", "cute.linear_all_reduce_add_attn_res",
            "cute.linear_all_reduce_attn_res", "cute.moe_tail_add_attn_res")
# settled blocks, of as many as there are: none, all, all but the newest, the oldest, the newest, every other
SETS = {"none": slice(0, 0), "all": slice(None), "older": slice(0, -1), "oldest": slice(0, 1),
        "newest": slice(-1, None), "others": slice(0, None, 2)}


def settled_of(region: Region, which: str, *, prefix: bool = False) -> tuple[str, ...]:
    """Values of a settled set."""
    found = arguments_of(region).rest[SETS[which]]
    return (*found, region.binding["prefix"]) if prefix else found


def settled_configs(region: Region) -> list[Mapping[str, Any]]:
    assert region.kernel.configs
    return [config for config in region.kernel.configs(region) if config.get("settled")]


# one rank


@cache
def small_cases() -> list[kernel_check.Case]:
    """Of each kernel the case of most blocks of every small model that has one of its own."""
    kernels = [kernel for kernel in KERNELS if kernel.id in ALONE]
    return [case for case in kernel_check.cases(kernels) if case.config.get("settled")]


@cache
def attn_res() -> Any:
    return emulator.load(attn_res_file)


def run_alone(case: kernel_check.Case, config: Mapping[str, Any], settled: Collection[str], *,
              written: Collection[str] | None = None) -> None:
    """One launch by the emulator against the ops' meaning; ``written``: values that may still be written, of None all
    activations that are not settled."""
    region = case.region
    inputs = kernel_check.make_inputs(region, case.setting, 3, "cpu")
    tensors = {**inputs, **kernel_check._outputs(region, inputs, "cpu")}
    for name in region.outputs:
        kernel_check._poison(tensors[name])
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    launch = attn_res().bind(make_call(arguments_of(region), tensors, config=config, settled=settled))
    roles = region.graph.values
    if written is None:
        written = [n for n in tensors if roles[n].role == "activation" and n not in settled]
    emulator.run(launch, [tensors[name] for name in written])
    kernel_check._compare(case, before, tensors, 3)


@pytest.mark.parametrize("which", SETS)
@pytest.mark.parametrize("case", small_cases(), ids=lambda case: case.name)
def test_small_models(case: kernel_check.Case, which: str) -> None:
    for config in settled_configs(case.region):
        run_alone(case, config, settled_of(case.region, which))


@cache
def real_cases() -> list[kernel_check.Case]:
    """One, three and eight blocks of Kimi K3 at one row, with the add, and the mix alone."""
    every = test_on_device.every_shape(test_on_device.settings()[0])
    found = [case for case in every if case.region.kernel.id in ALONE]
    some = [x for x in found if "delta" in x.region.binding and len(arguments_of(x.region).rest) in (1, 3, 8)]
    return [*some, *[case for case in found if case.region.kernel.id == "cute.attn_res_mix"][-1:]]


@pytest.mark.parametrize("which", ["all", "older", "others"])
@pytest.mark.parametrize("case", real_cases(), ids=lambda case: case.name)
def test_real_shapes(case: kernel_check.Case, which: str) -> None:
    for config in settled_configs(case.region):
        run_alone(case, config, settled_of(case.region, which))


def test_a_block_that_is_called_settled_is_read_before_the_wait() -> None:
    """The emulator's check fails when a block that may still be written is called settled."""
    case = real_cases()[0]
    blocks = settled_of(case.region, "all")
    with pytest.raises(AssertionError, match="before the wait"):
        run_alone(case, settled_configs(case.region)[0], blocks, written=blocks)


def test_where_nothing_is_settled_a_settled_configuration_is_the_other_form() -> None:
    case = real_cases()[-1]
    config = settled_configs(case.region)[0]
    tensors = random_inputs(case.region, "meta")
    plain = {name: value for name, value in config.items() if name != "settled"}
    one: Any = bind_region(case.region, tensors, config, settled=())
    other: Any = bind_region(case.region, tensors, plain)
    assert (one.kernel, one.parameters, one.grid) == (other.kernel, other.parameters, other.grid)


# several ranks


def _together(kernel: str) -> Iterator[tuple[Region, kernel_check.Setting, Mapping[str, Any]]]:
    """The small region of most blocks, with each settled configuration, and one with idle threads."""
    region, setting = cc.small_regions([k for k in KERNELS if k.id == kernel], 4, 3)[-1]
    configs = settled_configs(region)
    idle = [{**configs[0], "cluster": 2, "threads": 32}] if "threads" in configs[0] else []
    for config in [*configs, *idle]:
        yield region, setting, config


@pytest.mark.parametrize("staged", [False, True], ids=["whole", "staged"])
@pytest.mark.parametrize("which", SETS)
@pytest.mark.parametrize("kernel", TOGETHER)
def test_all_ranks(kernel: str, which: str, staged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cc, "entry_point", emulated_ranks.entry_point(staged=staged))
    for region, setting, config in _together(kernel):
        for prefix in {False, "prefix" in region.binding}:
            cc.check(region, setting, cc.bind_together, device="cpu", seeds=2, config=config,
                     settled=settled_of(region, which, prefix=prefix))


@pytest.mark.parametrize("which", ["all", "older"])
@pytest.mark.parametrize("kernel", TOGETHER)
def test_real_shapes_in_loopback(kernel: str, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cc, "entry_point", emulated_ranks.entry_point())
    region = cc.real_regions([k for k in KERNELS if k.id == kernel], 16, 2)[-1]
    cc.check(region, cc.setting_of(region, 16), cc.bind_together, device="cpu", seeds=2, ranks=1,
             config=settled_configs(region)[0], settled=settled_of(region, which))


def test_ranks_that_call_a_block_settled_read_it_before_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cc, "entry_point", emulated_ranks.entry_point())
    monkeypatch.setattr(emulated_ranks, "unsettled", lambda call: [*call.rest])
    region, setting, config = next(_together("cute.all_reduce_add_attn_res"))
    with pytest.raises(AssertionError, match="before the wait"):
        cc.check(region, setting, cc.bind_together, device="cpu", seeds=1, config=config,
                 settled=settled_of(region, "all"))


# binaries


@cache
def _binary(kernel: str, settled: tuple[str, ...] | None, target: str) -> tuple[list[int], int]:
    """Operations and spilled bytes of a kernel with eight blocks, in its first settled configuration."""
    region = (real_cases()[-2].region if kernel == "cute.attn_res" else
              cc.real_regions([k for k in KERNELS if k.id == kernel], 16, 1)[-1])
    names, tensors = arguments_of(region), random_inputs(region, "meta")
    values = tuple(f"...{i}" for i in range(8))
    config = settled_configs(region)[0]
    scratch = {name: allocate(wanted, "meta") for name, wanted in scratch_of(region, config).items()}
    call = make_call(names, tensors, scratch=scratch, config=config, dependent_launch=True,
                     settled=[names.rest[values.index(n)] if n in values else names.names[n] for n in settled or ()])
    module, _, function = region.kernel.entry.partition(":")
    bind = getattr(importlib.import_module(module), function)
    launch = bind(call) if kernel == "cute.attn_res" else bind([call], [Link(0, (0,) * 16)])
    return operations(compile_kernel(launch, target).cubin), compile_launch(launch, target).spilled


def _loads(found: list[int]) -> tuple[int, int]:
    """Loads before and behind the last wait in the text, which is that of the blocks that mix."""
    at = len(found) - found[::-1].index(WAIT)
    return found[:at].count(LOAD), found[at:].count(LOAD)


@pytest.mark.parametrize("target", ["sm_90a", "sm_103a"])
@pytest.mark.parametrize("kernel", ["cute.attn_res", "cute.all_reduce_add_attn_res",
                                    "cute.linear_all_reduce_add_attn_res", "cute.moe_tail_add_attn_res"])
def test_loads_of_settled_blocks_alone_come_before_the_wait(kernel: str, target: str) -> None:
    """A load more before the wait for each settled source and one less behind it, whatever the rest does: a block that
    is not settled, or the row that is new, would change the count."""
    nothing, spilled = _binary(kernel, ("...0",), target)
    assert not spilled
    before, behind = _loads(nothing)
    sets: list[tuple[str, ...]] = [tuple(f"...{i}" for i in range(n)) for n in (4, 7, 8)]
    if kernel != "cute.attn_res":
        sets.append(("...0", "prefix"))
    for settled in sets:
        found, spilled = _binary(kernel, settled, target)
        assert not spilled
        moved = len(settled) - 1
        # with no fresh block left, a load that holds their use back goes as well
        assert _loads(found) in [(before + moved, behind - moved - gone) for gone in (0, 1)], settled


def test_no_settled_configuration_spills() -> None:
    """Each at as many blocks as it is offered for, all of them settled, and all but one."""
    for case in real_cases():
        for config in settled_configs(case.region):
            for which in ("all", "older"):
                settled = settled_of(case.region, which)
                tensors = random_inputs(case.region, "meta")
                launch: Any = bind_region(case.region, tensors, config, dependent_launch=True, settled=settled)
                assert not compile_launch(launch, "sm_90a").spilled, f"{case.name}, {config}, {which}"


@pytest.mark.gpu
@pytest.mark.parametrize("which", SETS)
@pytest.mark.parametrize("kernel", TOGETHER)
def test_all_ranks_on_the_device(kernel: str, which: str, device: str) -> None:
    for region, setting, config in _together(kernel):
        cc.check(region, setting, cc.bind_together, config=config, settled=settled_of(region, which))


@pytest.mark.gpu
@pytest.mark.parametrize("case", real_cases(), ids=lambda case: case.name)
def test_settled_sets_on_the_device(case: kernel_check.Case, device: str) -> None:
    region = case.region
    for config in settled_configs(region):
        for which in SETS:
            inputs = kernel_check.make_inputs(region, case.setting, 3, device)
            tensors = {**inputs, **kernel_check._outputs(region, inputs, device)}
            before = {name: tensor.clone() for name, tensor in inputs.items()}
            bind_region(region, tensors, config, dependent_launch=True, settled=settled_of(region, which))()
            torch.cuda.synchronize()
            kernel_check._compare(case, before, tensors, 3)
