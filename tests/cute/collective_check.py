"""Collective kernels on small models and at the real shapes of Kimi K3: tensors, reference, launches.

``together``: one launch for all ranks of the process. ``apart``: each rank bound for itself and launched on a stream of
its own, so that ranks run and wait as they would on their own GPUs. ``loopback``: one rank that hears itself.
"""
from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import kernel_check
import torch
from torch import Tensor

from k3plan.compiler.build import build_graph
from k3plan.compiler.call import Call, emulated_links, loopback_link
from k3plan.compiler.covering.match import find_regions
from k3plan.compiler.ir import REPLICATED, Graph
from k3plan.compiler.kernel import KernelDef, Menu, Region
from k3plan.compiler.model import ModelConfig, model_from_config
from k3plan.compiler.ops import OPS
from k3plan.compiler.passes.merge import merge_projections
from k3plan.compiler.passes.shard import algebra_of, shard_graph
from k3plan.compiler.spec import Choices, Parallel, Spec, Step
from k3plan.graphs.launch import allocate, arguments_of, default_config, entry_point, make_call, scratch_of
from k3plan.graphs.load import TORCH_DTYPES

STRIPE = Choices("sharded", "stripe", "replicated")
# a block begins (12, 84), and each number of finished blocks once
# three kinds of layer, small enough that the blocks of all ranks run at once
SMALL = replace(kernel_check.K3, hidden=256, vocab=96, latent=64, attention=("kda", "mla", "kda", "mla"),
                mlp=("dense", "moe", "moe", "moe"), moe_intermediate=128)
LAYERS = (0, 1, 3, 12, 24, 36, 48, 60, 72, 84, 85)


@cache
def kimi_k3() -> ModelConfig:
    return model_from_config(json.loads(files("k3plan.compiler").joinpath("presets/kimi-k3.json").read_text()))


@cache
def graph_of(tp: int, rows: int, choices: Choices = STRIPE) -> Graph:
    """The step of one rank with every kind of layer, collectives in place."""
    spec = Spec(model=kimi_k3(), layers=LAYERS, parallel=Parallel(tp, "tp"), step=Step(rows, 1, 8192, 64, ("tokens",)),
                gpu="h200", numerics=kernel_check.PLAIN, profile="fused", choices=choices, buckets=(rows,))
    return merge_projections(shard_graph(build_graph(spec), spec, algebra_of(spec))[0])[0]


def real_regions(kernels: Sequence[KernelDef], tp: int, rows: int) -> list[Region]:
    """Where ``kernels`` fit, each kernel and shape once, in the order of the layers."""
    regions, _ = find_regions(graph_of(tp, rows), Menu(kernels), arch="sm_90", rows=rows)
    found: dict[object, Region] = {}
    for region in regions:
        shapes = tuple(region.graph.values[n].shape for n in region.inputs)
        found.setdefault((region.kernel.id, shapes, len(region.outputs)), region)
    return list(found.values())


def name_of(region: Region) -> str:
    blocks = [f"-nb{len(node.inputs) - 2}" for node in region.nodes if node.op == "attn_res"]
    return f"{region.kernel.id}{''.join(blocks)}-o{len(region.outputs)}"


def small_regions(kernels: Sequence[KernelDef], tp: int, rows: int) -> list[tuple[Region, kernel_check.Setting]]:
    """Where ``kernels`` fit in a model of which all ranks fit on a GPU at once."""
    setting = kernel_check.Setting(f"tp{tp}-T{rows}", SMALL, tp, rows, 1, choices=kernel_check.SHARDED)
    regions, _ = find_regions(setting.graph(), Menu(kernels), rows=rows)
    found: dict[object, Region] = {}
    for region in regions:
        shapes = tuple(region.graph.values[n].shape for n in region.inputs)
        found.setdefault((region.kernel.id, shapes, len(region.outputs)), region)
    return [(region, setting) for region in found.values()]


@dataclass(frozen=True)
class Group:
    """The ranks of one group in this process: inputs and outputs of each by value name, and their bound calls."""

    region: Region
    setting: kernel_check.Setting
    device: str
    tensors: Sequence[dict[str, Tensor]]
    calls: Sequence[Call]

    @property
    def tp(self) -> int:
        return self.setting.tp

    def poison(self) -> None:
        for own, name in itertools.product(self.tensors, self.region.outputs):
            kernel_check._poison(own[name])

    def write(self, fresh: Sequence[Mapping[str, Tensor]]) -> None:
        for own, new in zip(self.tensors, fresh, strict=False):
            for name, tensor in new.items():
                own[name].copy_(tensor)

    def outputs(self) -> list[dict[str, Tensor]]:
        return [{name: own[name].clone() for name in self.region.outputs} for own in self.tensors]


def setting_of(region: Region, tp: int) -> kernel_check.Setting:
    rows = region.graph.values[region.outputs[0]].shape[0]
    return kernel_check.Setting("k3", kimi_k3(), tp, rows, 1, choices=STRIPE)


def make_inputs(region: Region, setting: kernel_check.Setting, seed: int, device: str) -> list[dict[str, Tensor]]:
    """Inputs of every rank; a replicated value is one tensor. Zeros of both signs are among the parts that travel."""
    first = kernel_check.make_inputs(region, setting, seed * 100, device)
    ranks = [first]
    for rank in range(1, setting.tp):
        generator = torch.Generator().manual_seed(seed * 100 + rank)
        own = dict(first)
        for name in region.inputs:
            value = region.graph.values[name]
            if value.placement != REPLICATED:
                content = kernel_check._content(region, name, setting, generator)
                own[name] = content.to(TORCH_DTYPES[value.dtype]).to(device)
        ranks.append(own)
    for own in ranks if "x" in region.binding else []:
        own[region.binding["x"]].view(-1)[:8] = torch.tensor([0.0, -0.0] * 4, dtype=torch.bfloat16)
    return ranks


def make_group(region: Region, setting: kernel_check.Setting, device: str, *, ranks: int | None = None, limit: int = 0,
               config: Mapping[str, Any] | None = None, dependent: bool = False,
               settled: Collection[str] | None = None) -> Group:
    """Storage and calls for ``ranks`` (of all; 1 for loopback), inputs of seed 0. ``settled`` are values; of None those
    that the pattern takes by ``...``."""
    config = default_config(region) if config is None else config
    arguments = arguments_of(region)
    tensors = make_inputs(region, setting, 0, device)[: ranks or setting.tp]
    values = region.graph.values
    for own in tensors:
        own |= {n: torch.empty(values[n].shape, dtype=TORCH_DTYPES[values[n].dtype], device=device)
                for n in region.outputs}
    calls = []
    for own in tensors:
        scratch = {n: allocate(w, device) for n, w in scratch_of(region, config).items()}
        call = make_call(arguments, own, scratch=scratch, config=config, dependent_launch=dependent,
                         settled=arguments.rest if settled is None else settled)
        calls.append(replace(call, wait_limit=limit, number=7))
    return Group(region, setting, device, tensors, calls)


def links_of(group: Group) -> list[Any]:
    names = [name for name in group.calls[0].scratch if name.endswith("mailbox")]
    boxes = [[call.scratch[name] for call in group.calls] for name in names]
    links: list[Any] = [[loopback_link(b[0])] if len(b) < group.tp else emulated_links(b) for b in boxes]
    return links[0] if len(links) == 1 else links


def bind_together(group: Group) -> Callable[[], None]:
    """One launch for all ranks of the group; with one rank it is loopback."""
    return entry_point(group.region.kernel.entry)(list(group.calls), links_of(group))


def bind_apart(group: Group) -> list[Callable[[], None]]:
    """A launch for each rank."""
    bind: Any = entry_point(group.region.kernel.entry)
    return [bind([call], [link]) for call, link in zip(group.calls, links_of(group), strict=True)]


def launch_apart(launches: Sequence[Callable[[], None]], late: Mapping[int, int]) -> None:
    """Launches each rank on its stream; ``late`` are cycles that a rank sleeps before."""
    here, streams = torch.cuda.current_stream(), _streams(len(launches))
    for rank, (stream, launch) in enumerate(zip(streams, launches, strict=True)):
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            if rank in late:
                torch.cuda._sleep(late[rank])
            launch()
    for stream in streams:
        here.wait_stream(stream)


@cache
def _streams(count: int) -> list[torch.cuda.Stream]:
    # loaded now: loading a kernel waits for those that run, and a rank that waits for others would wait for ever
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    return [torch.cuda.Stream() for _ in range(count)]


def evaluate(region: Region, ranks: Sequence[Mapping[str, Tensor]], *, rounded: bool, loopback: bool = False,
             shots: int = 1, alike: int = 1) -> list[dict[str, Tensor]]:
    """Every value of every rank by the ops' meaning, in fp32 throughout or rounded to declared dtypes. In loopback two
    shots make another sum than one: what this rank sums as an owner comes back as that of each owner. One rank may
    stand for ``alike`` that have what it has."""
    values = [{n: t.clone() if rounded or not t.dtype.is_floating_point else t.float() for n, t in own.items()}
              for own in ranks]
    for node in region.nodes:
        definition = OPS[node.op]
        if loopback and node.op == "reduce_scatter":
            # what goes to another rank comes back: the parts of this rank are added
            results = [_fold(own[node.inputs[0]], len(values)) for own in values]
        elif loopback and node.op == "all_reduce" and shots == 2:
            results = [_fold(own[node.inputs[0]], len(values)).repeat(1, len(values)) for own in values]
        elif definition.kind == "comm":
            results = definition.fn([own[node.inputs[0]] for own in values] * alike, **node.attrs)[: len(values)]
        else:
            results = [definition.fn(*(own[n] for n in node.inputs), **node.attrs) for own in values]
        for own, found in zip(values, results, strict=True):
            for name, result in zip(node.outputs, found if isinstance(found, tuple) else (found,), strict=True):
                own[name] = result.to(TORCH_DTYPES[region.graph.values[name].dtype]) if rounded else result
    return values


def _fold(x: Tensor, ranks: int) -> Tensor:
    """The columns of every rank, added: what a rank that hears only itself sums of its own columns."""
    return x.float().unflatten(1, (ranks, -1)).sum(1)


def compare(group: Group, fresh: Sequence[Mapping[str, Tensor]], where: str) -> None:
    """The group's outputs against the reference of inputs ``fresh``. Raises AssertionError."""
    region, loopback = group.region, len(group.calls) < group.tp
    fresh = [fresh[0]] * group.tp if loopback else fresh
    shots = group.calls[0].config.get("shots", 1)
    exact, chain = (evaluate(region, fresh, rounded=r, loopback=loopback, shots=shots) for r in (False, True))
    case = kernel_check.Case(region.kernel.id, region, {}, group.setting)
    for rank, own in enumerate(group.tensors):
        for name in region.outputs:
            kernel_check._check_close(case, name, f"{where}, rank {rank}", own[name].float(),
                                      chain[rank][name].float(), exact[rank][name].float())


def check(region: Region, setting: kernel_check.Setting, bind: Callable[[Group], Callable[[], None]], *,
          ranks: int | None = None, seeds: int = 3, device: str = "cuda", config: Mapping[str, Any] | None = None,
          dependent: bool = False, settled: Collection[str] | None = None) -> None:
    """Launches with fresh inputs and poisoned outputs, each compared."""
    group = make_group(region, setting, device, ranks=ranks, config=config, dependent=dependent, settled=settled)
    launch = bind(group)
    for seed in range(seeds):
        fresh = make_inputs(region, setting, seed, device)
        group.write(fresh)
        group.poison()
        launch()
        if device == "cuda":
            torch.cuda.synchronize()
        compare(group, fresh, f"{name_of(region)}, tp {setting.tp}, launch {seed}")


def check_replays(region: Region, setting: kernel_check.Setting, *, replays: int = 100, seeds: int = 4,
                  config: Mapping[str, Any] | None = None) -> None:
    """One CUDA graph a rank, each replayed on a stream of its own, inputs changing and some ranks late each time.

    The first results of each inputs are compared with the reference, all later ones must have their bits.
    """
    group = make_group(region, setting, "cuda", config=config)
    launches = bind_apart(group)
    inputs = [make_inputs(region, setting, seed, "cuda") for seed in range(seeds)]
    group.write(inputs[0])
    launch_apart(launches, {})  # compiles
    torch.cuda.synchronize()
    graphs = [torch.cuda.CUDAGraph() for _ in launches]
    for graph, launch in zip(graphs, launches, strict=True):
        with torch.cuda.graph(graph):
            launch()
    known: dict[int, list[dict[str, Tensor]]] = {}
    delays = torch.Generator().manual_seed(0)
    for replay in range(replays):
        seed = replay % seeds
        group.write(inputs[seed])
        group.poison()
        late = {rank: int(torch.randint(1, 200_000, (), generator=delays)) for rank in range(setting.tp)
                if torch.rand((), generator=delays) < 0.3}
        launch_apart([graph.replay for graph in graphs], late)
        torch.cuda.synchronize()
        if seed not in known:
            compare(group, inputs[seed], f"{name_of(region)}, replay {replay}")
            known[seed] = group.outputs()
        for rank, (own, first) in enumerate(zip(group.outputs(), known[seed], strict=True)):
            wrong = [name for name in own if not torch.equal(own[name], first[name])]
            assert not wrong, f"{name_of(region)}, replay {replay}, late {late}: rank {rank} differs in {wrong}"


def make_chain(region: Region, setting: kernel_check.Setting, device: str,
               config: Mapping[str, Any] | None = None) -> tuple[list[Group], list[Callable[[], None]]]:
    """Two groups of one rank with inputs of their own and one workspace, and their launches with dependent edges."""
    groups = [make_group(region, setting, device, ranks=1, config=config, dependent=True) for _ in range(2)]
    shared = [replace(call, scratch=groups[0].calls[0].scratch) for call in groups[1].calls]
    groups[1] = replace(groups[1], calls=shared)
    return groups, [bind_together(group) for group in groups]


def check_chain(region: Region, setting: kernel_check.Setting, *, config: Mapping[str, Any] | None = None) -> None:
    """A graph of launches that begin before the one before has ended, in turn on two inputs: a launch that took the
    epoch or the fragments of its neighbour would have its result."""
    groups, launches = make_chain(region, setting, "cuda", config)
    inputs = [make_inputs(region, setting, seed, "cuda") for seed in (1, 2)]
    for group, fresh in zip(groups, inputs, strict=True):
        group.write(fresh)
    launches[0]()  # compiles
    torch.cuda.synchronize()
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        for index in range(24):
            launches[index % 2]()
    for _ in range(5):
        for group in groups:
            group.poison()
        graph.replay()
        torch.cuda.synchronize()
        for group, fresh in zip(groups, inputs, strict=True):
            compare(group, fresh, f"{name_of(region)}, a chain")
    epochs = groups[0].calls[0].scratch["epochs"]
    assert epochs.eq(1 + 5 * 24).all(), f"epochs {epochs.unique().tolist()} after {1 + 5 * 24} launches"
