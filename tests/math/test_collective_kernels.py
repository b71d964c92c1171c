"""Collective kernels on all ranks of a small group in one process, against the ops over all ranks' tensors."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import kernel_check
import pytest
import torch
from torch import Tensor

from k3plan.compiler.covering.match import find_regions
from k3plan.compiler.ir import REPLICATED
from k3plan.compiler.kernel import Menu, Region
from k3plan.compiler.ops import OPS
from k3plan.graphs.launch import allocate, arguments_of, entry_point, make_call, scratch_of
from k3plan.graphs.load import TORCH_DTYPES
from k3plan.ops_triton import collectives_menu, moe_front_menu

KERNELS = (*collectives_menu.KERNELS, *moe_front_menu.KERNELS)
MODEL = replace(kernel_check.K3, hidden=256, vocab=96, latent=64, attention=("kda", "mla", "kda", "mla"),
                mlp=("dense", "moe", "moe", "moe"), moe_intermediate=128)
SETTINGS = (
    kernel_check.Setting("tp2-T1", MODEL, 2, 1, 1, choices=kernel_check.SHARDED),
    kernel_check.Setting("tp4-S3", MODEL, 4, 3, 1, choices=kernel_check.SHARDED),
    kernel_check.Setting("tp4-L5", MODEL, 4, 1, 5),
)


# many blocks, of which the interpreter runs a hundred a second
HEAVY = ("triton.moe_tail", "triton.stripe_gather", "triton.moe_front")
MIX = ("triton.all_reduce_attn_res", "triton.all_reduce_add_attn_res")


def _marks(kernel: str, setting: str) -> list[Any]:
    """Every kernel runs by default; of the large ones most settings are slow."""
    slow = (kernel in HEAVY and setting != "tp2-T1") or (kernel in MIX and setting == "tp4-L5")
    return [pytest.mark.slow] if slow else []


def _config(region: Region) -> dict[str, Any]:
    """The configuration with the fewest blocks: the default, or the one of most rows a block."""
    configs = region.kernel.configs(region) if region.kernel.configs else [{}]
    return dict(max(configs, key=lambda config: config.get("rows", 0)))


def _cases() -> list[Any]:
    found: dict[tuple[str, str, object], Any] = {}
    for setting in SETTINGS:
        regions, _ = find_regions(setting.graph(), Menu(KERNELS), rows=setting.sequences * setting.query)
        for region in regions:
            shapes = tuple(region.graph.values[n].shape for n in region.inputs)
            label = f"{region.kernel.id}-{setting.name}"
            found.setdefault((region.kernel.id, setting.name, shapes), pytest.param(
                region, setting, id=label, marks=_marks(region.kernel.id, setting.name)))
    return list(found.values())


CASES = _cases()


def _inputs(region: Region, setting: kernel_check.Setting, seed: int, device: str) -> list[dict[str, Tensor]]:
    """Inputs of every rank: equal where the value is replicated."""
    ranks = [kernel_check.make_inputs(region, setting, seed * 100 + rank, device) for rank in range(setting.tp)]
    for name in region.inputs:
        if region.graph.values[name].placement == REPLICATED:
            for own in ranks:
                own[name].copy_(ranks[0][name])
    return ranks


def _evaluate(region: Region, ranks: Sequence[Mapping[str, Tensor]], *, rounded: bool,
              loopback: bool) -> list[dict[str, Tensor]]:
    values = [{n: kernel_check._own(t, rounded) for n, t in own.items()} for own in ranks]
    for node in region.nodes:
        definition = OPS[node.op]
        if loopback and node.op == "reduce_scatter":
            # what goes to another rank comes back: the parts of this rank are added
            results = [own[node.inputs[0]].float().unflatten(1, (len(values), -1)).sum(1) for own in values]
        elif definition.kind == "comm":
            results = definition.fn([own[node.inputs[0]] for own in values], **node.attrs)
        else:
            results = [definition.fn(*(own[n] for n in node.inputs), **node.attrs) for own in values]
        for own, result in zip(values, results, strict=True):
            made = result if isinstance(result, tuple) else (result,)
            for out, tensor in zip(node.outputs, made, strict=True):
                own[out] = tensor.to(TORCH_DTYPES[region.graph.values[out].dtype]) if rounded else tensor
    return values


def _run(region: Region, setting: kernel_check.Setting, config: Mapping[str, Any], device: str, *,
         loopback: bool) -> None:
    """Three launches through one binding, inputs fresh each time, then a comparison on every rank."""
    from k3plan.compiler.call import emulated_links, loopback_link

    own = _inputs(region, setting, 0, device)
    own = own[:1] if loopback else own
    outputs = [{n: torch.empty(region.graph.values[n].shape, dtype=TORCH_DTYPES[region.graph.values[n].dtype],
                               device=device) for n in region.outputs} for _ in own]
    tensors = [inputs | made for inputs, made in zip(own, outputs, strict=True)]
    scratch = [{n: allocate(w, device) for n, w in scratch_of(region, config).items()} for _ in own]
    calls = [make_call(arguments_of(region), t, scratch=s, config=config)
             for t, s in zip(tensors, scratch, strict=True)]

    def links(name: str) -> Any:
        boxes = [s[name] for s in scratch]
        return [loopback_link(boxes[0])] if loopback else emulated_links(boxes)

    bind: Any = entry_point(region.kernel.entry)
    tail = region.kernel.entry.endswith("bind_tail")
    launch = bind(calls, [links("mailbox"), links("stripe_mailbox")] if tail else links("mailbox"))
    for seed in range(3):
        fresh = _inputs(region, setting, seed, device)
        for mine, new in zip(tensors, fresh, strict=False):
            for name, tensor in new.items():
                mine[name].copy_(tensor)
            for name in region.outputs:
                kernel_check._poison(mine[name])
        launch()
        if loopback:  # every rank has sent what this one has
            fresh = [fresh[0]] * setting.tp
        exact, chain = (_evaluate(region, fresh, rounded=r, loopback=loopback) for r in (False, True))
        for rank, mine in enumerate(tensors):
            _compare(region, setting, f"rank {rank}, launch {seed}", mine, exact[rank], chain[rank])


def _compare(region: Region, setting: kernel_check.Setting, where: str, got: Mapping[str, Tensor],
             exact: Mapping[str, Tensor], chain: Mapping[str, Tensor]) -> None:
    case = kernel_check.Case(region.kernel.id, region, {}, setting)
    for name in region.outputs:
        mine = got[name].cpu()
        if not mine.dtype.is_floating_point:
            assert torch.equal(mine, chain[name]), f"{where}: {name}"
            continue
        kernel_check._check_close(case, name, where, mine.float(), chain[name].float(), exact[name].float())


@pytest.mark.parametrize(("region", "setting"), CASES)
def test_emulated_ranks(region: Region, setting: kernel_check.Setting, device: str) -> None:
    _run(region, setting, _config(region), device, loopback=False)


@pytest.mark.parametrize(("region", "setting"), [c for c in CASES if c.values[1].name == "tp4-S3"])
def test_loopback(region: Region, setting: kernel_check.Setting, device: str) -> None:
    _run(region, setting, _config(region), device, loopback=True)


def test_every_kernel_has_a_case() -> None:
    tested = {case.values[0].kernel.id for case in CASES}
    # its messages are larger than a small model's: tests/distributed/test_exchange.py has it
    tested.add("triton.all_reduce_two_shot")
    missing = [kernel.id for kernel in KERNELS if kernel.id not in tested]
    assert not missing, f"no small model has a region for {missing}"


def test_a_wait_that_gives_up_says_so(device: str) -> None:
    """With a limit, a rank whose peers never send says in which launch, epoch and block it missed what, and of whom."""
    from k3plan.compiler.call import Call, emulated_links
    from k3plan.compiler.launches import LaunchSequence
    from k3plan.ops_triton.collectives import bind_exchange

    if device != "cpu":
        pytest.skip("a launch of one rank only needs the interpreter's halves")
    scratch = [{"mailbox": torch.zeros(2, 2, 32, dtype=torch.int64), "epochs": torch.zeros(1, dtype=torch.int32),
                "health": torch.zeros(8, dtype=torch.int32)} for _ in range(2)]
    calls = [Call({"x": torch.randn(1, 64).bfloat16(), "y": torch.zeros(1, 64, dtype=torch.bfloat16)},
                  attrs={"y": {"ranks": 2, "reduce": "sum"}}, scratch=s, config={"units": 32, "warps": 4}, number=7,
                  wait_limit=3)
             for s in scratch]
    links = emulated_links([s["mailbox"] for s in scratch])
    launch: Any = bind_exchange(calls[1:], links[1:])
    assert isinstance(launch, LaunchSequence)
    launch()
    assert scratch[1]["health"].tolist() == [2, 7, 1, 0, 32, 1, 0, 0]
