"""``k3plan launch links``: the link, and every collective kernel of a plan file, alone and against its unfused forms.

Each figure is taken on all ranks at once: calls in one CUDA graph, replays that begin together, the median over replays
of the slowest rank. Weights rotate as in ``graphs/bench.py``. Results are held against the ops' meaning first.
"""
from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...compiler.arguments import arguments_of
from ...compiler.call import Call
from ...compiler.ir import REPLICATED
from ...compiler.kernel import Region
from ...compiler.ops import OPS
from ..bench import COLD_ROLES, ROTATED_BYTES, random_inputs
from ..capture import no_garbage_collection
from ..launch import allocate, entry_point, make_call, scratch_of
from ..load import TORCH_DTYPES
from .group import Group
from .library import Library
from .symmetric import Symmetric

CALLS = 48  # the replays of two ranks start a few us apart
REPLAYS = 10
MOST_SETS = 24


def time_together(launches: Sequence[Callable[[], None]], group: Group, calls: int = CALLS) -> float:
    """us of one call on the slowest rank: ``calls`` in one graph, launches in turn."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with no_garbage_collection(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for index in range(calls):
            launches[index % len(launches)]()
    return time_graph(graph, group, REPLAYS) / calls


def time_graph(graph: Any, group: Group, replays: int) -> float:
    """us of a replay that all ranks begin together, on the slowest of them; the median after one to warm up."""
    times = []
    for _ in range(replays + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        dist.barrier()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    said = group.exchange("times", {"us": statistics.median(times[1:])})
    return max(fact["us"] for fact in said)


@dataclass(frozen=True)
class Link:
    """One hop (store to the peer, seen there) and the rate at which one GPU stores into another's memory."""

    hop_us: float
    gbs: float
    ramp_us: float  # of a kernel that stores, from the smallest push


def measure_link(group: Group, transport: Symmetric, rounds: int = 200) -> Link:
    """Between ranks 0 and 1; the others only keep the meetings."""
    sizes = (1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
    boxes = transport.allocate_mailboxes({"bounce": 8, "push": max(sizes)}, group.device)[0]
    peer = 1 - group.rank if group.rank < 2 else 0
    box = boxes["bounce"].view(torch.int64)
    address = {name: transport.links([b])[0].peers[peer] for name, b in boxes.items()}
    bounce = entry_point("k3plan.ops_triton.link_probe:bind_bounce")
    push = entry_point("k3plan.ops_triton.link_probe:bind_push")
    own = [bounce(box, address["bounce"], group.rank, rounds)] if group.rank < 2 else [lambda: None]
    hop = time_together(own, group, 4) / (2 * rounds)
    times = []
    for size in sizes:
        source = torch.ones(size // 4, dtype=torch.int32, device=group.device)
        times.append(time_together([push(source, address["push"])], group, 8))
    gbs = (sizes[-1] - sizes[1]) / (times[-1] - times[1]) / 1e3
    return Link(hop, gbs, times[1] - sizes[1] / gbs / 1e3)


@dataclass(frozen=True)
class Bound:
    """A region on this rank, ready to launch with rotating weights, and the tensors of its first launch.

    ``calls`` are kept because the kernels know their tensors by address only.
    """

    launches: list[Callable[[], None]]
    calls: list[Call]
    tensors: dict[str, Tensor]
    ranks: list[dict[str, Tensor]]  # inputs of every rank, for the reference


def every_ranks_inputs(region: Region, ranks: int, device: torch.device, seed: int) -> list[dict[str, Tensor]]:
    """The same on every rank: what each rank would be given, equal where the value is replicated."""
    made = []
    for rank in range(ranks):
        torch.manual_seed(1000 * seed + rank)
        made.append({n: t for n, t in random_inputs(region, str(device)).items() if n in region.inputs})
    for name in region.inputs:
        if region.graph.values[name].placement == REPLICATED:
            for own in made[1:]:
                own[name].copy_(made[0][name])
    return made


def bind_ranks(region: Region, config: Mapping[str, Any], group: Group, transport: Symmetric, *,
               sets: int | None = None, dependent_launch: bool = False, seed: int = 0) -> Bound:
    """Binds a collective kernel between the ranks of ``group``."""
    inputs = every_ranks_inputs(region, group.ranks, group.device, seed)
    own, values = inputs[group.rank], region.graph.values
    outputs = {n: torch.full(values[n].shape, -1, dtype=TORCH_DTYPES[values[n].dtype], device=group.device)
               for n in region.outputs}
    wanted = scratch_of(region, config)
    boxes = transport.allocate_mailboxes(
        {n: math.prod(w.shape) * TORCH_DTYPES[w.dtype].itemsize for n, w in wanted.items() if n.endswith("mailbox")},
        group.device)[0]
    scratch = {n: boxes[n].view(TORCH_DTYPES[w.dtype]).view(w.shape) if n in boxes else allocate(w, group.device)
               for n, w in wanted.items()}
    cold = {n: t for n, t in own.items() if values[n].role in COLD_ROLES}
    nbytes = sum(t.nbytes for t in cold.values())
    sets = sets or (min(MOST_SETS, math.ceil(ROTATED_BYTES / nbytes)) if nbytes > 1 << 20 else 1)
    launches, calls, arguments = [], [], arguments_of(region)
    for index in range(sets):
        tensors = own | outputs | ({n: t.clone() for n, t in cold.items()} if index else {})
        call = make_call(arguments, tensors, scratch=scratch, config=config, ranks=group.ranks,
                         dependent_launch=dependent_launch, settled=arguments.rest)
        names = [n for n in scratch if n.endswith("mailbox")]
        links = [transport.links([scratch[n]]) for n in names]
        calls.append(call)
        launches.append(entry_point(region.kernel.entry)([call], links[0] if len(links) == 1 else links))
    return Bound(launches, calls, own | outputs, inputs)


def worst_error(region: Region, bound: Bound, rank: int) -> tuple[float, float]:
    """Root-mean-square error of the worst output in units of the reference, and that of the chain of ops. Integers,
    such as the numbers of experts, are those of the chain or infinitely wrong."""
    exact, chain = (meaning(region, bound.ranks, rounded)[rank] for rounded in (False, True))
    worst = (0.0, 0.0)
    for name in region.outputs:
        if not exact[name].dtype.is_floating_point:
            worst = max(worst, (0.0 if torch.equal(bound.tensors[name], chain[name]) else math.inf, 0.0))
            continue
        reference = exact[name].double()
        scale = float(reference.square().mean().sqrt()) + 1e-30
        found = [float((x.double() - reference).square().mean().sqrt()) / scale
                 for x in (bound.tensors[name], chain[name])]
        error = found[0] if math.isfinite(found[0]) else math.inf
        worst = max(worst, (error, found[1]))
    return worst


def meaning(region: Region, ranks: Sequence[Mapping[str, Tensor]], rounded: bool) -> list[dict[str, Tensor]]:
    """Values of a region's nodes on every rank, in fp32 or each rounded to its dtype."""
    values = [{n: t.float() if t.dtype.is_floating_point and not rounded else t for n, t in own.items()}
              for own in ranks]
    for node in region.nodes:
        definition = OPS[node.op]
        if definition.kind == "comm":
            results = definition.fn([own[node.inputs[0]] for own in values], **node.attrs)
        else:
            results = [definition.fn(*(own[n] for n in node.inputs), **node.attrs) for own in values]
        for own, found in zip(values, results, strict=True):
            for name, result in zip(node.outputs, found if isinstance(found, tuple) else (found,), strict=True):
                own[name] = result.to(TORCH_DTYPES[region.graph.values[name].dtype]) if rounded else result
    return values


def library_launch(region: Region, group: Group) -> Callable[[], None]:
    """The region's one collective as NCCL does it natively, for comparison; sums in bf16."""
    node = region.nodes[0]
    values = region.graph.values
    x, y = (torch.zeros(values[n].shape, dtype=TORCH_DTYPES[values[n].dtype], device=group.device)
            for n in (node.inputs[0], node.outputs[0]))
    if node.op == "all_reduce":
        return lambda: dist.all_reduce(x)
    return Library(group).collective(node.op, node.attrs, [x], [y])


def unfused(region: Region, found: Sequence[Region]) -> Iterator[Region]:
    """The same nodes with nothing fused into a collective: again and again the largest kernel that fits the rest."""
    apart = [r for r in found if len(r.solid) == 1 or not any(OPS[n.op].kind == "comm" for n in r.nodes)]
    left = {node.name for node in region.solid}
    while left:
        best = max((r for r in apart if {n.name for n in r.solid} <= left), key=lambda r: (len(r.solid), r.kernel.id))
        yield best
        left -= {node.name for node in best.solid}
