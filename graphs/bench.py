"""How long a planned kernel takes on this GPU: calls in one CUDA graph, weights cold, replay timed by events.

Weights, states and caches rotate through copies that together exceed the L2 cache several times; activations and
workspace are shared by all calls, because in a step they are warm. Of experts a call reads only those that its rows
chose, so there the choice rotates over one set of weights. ``tune`` and ``bench`` use the same clock.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..compiler.cost import Traffic, traffic
from ..compiler.errors import BindError
from ..compiler.ir import Value
from ..compiler.kernel import Region
from .capture import no_garbage_collection, replay_us
from .launch import allocate, bind_region, default_config, in_place, scratch_of
from .load import TORCH_DTYPES

ROTATED_BYTES = 300_000_000  # six times the L2 of an H200 and more than twice that of a GB300
CALLS = 24
MOST_SETS = 96
REPLAYS = 10
COLD_ROLES = ("weight", "state", "cache")


@dataclass(frozen=True)
class Timing:
    """Median us of one call, and what it had to move."""

    us: float
    traffic: Traffic
    config: Mapping[str, Any]
    sets: int

    def floor_us(self, ramp_us: float = 2.35, gbs: float = 4440.0) -> float:
        """The time of a plain read of the same bytes; the defaults are an H200's."""
        return ramp_us + (self.traffic.cold + self.traffic.warm) / gbs / 1e3


def time_region(region: Region, config: Mapping[str, Any] | None = None, *, dependent_launch: bool = True,
                rotated_bytes: int = ROTATED_BYTES, device: str = "cuda") -> Timing:
    """Times the kernel of ``region`` with random contents. Raises what binding or launching it raises.

    With ``dependent_launch``, as in a plan, calls overlap at their ends: a call's time is what it adds to a chain.
    """
    config = default_config(region) if config is None else dict(config)
    shared = random_inputs(region, device)
    moved = traffic(region)
    chosen = [name for name in region.inputs if _is_choice(region.graph.values[name])]
    cold = {name: t for name, t in shared.items() if region.graph.values[name].role in COLD_ROLES and not chosen}
    touched = moved.cold if chosen else sum(t.nbytes for t in cold.values())
    sets = min(MOST_SETS, max(1, math.ceil(rotated_bytes / max(1, touched))))
    scratch = {name: allocate(wanted, device) for name, wanted in scratch_of(region, config).items()}
    launches, kept = [], []  # a kernel may know its tensors by address only
    for index in range(sets):
        own = {name: tensor if index == 0 else tensor.clone() for name, tensor in cold.items()}
        own |= {name: _random(region, region.graph.values[name], device) for name in chosen}
        tensors = {**shared, **own}
        tensors |= {out: tensors[source] for out, source in in_place(region).items() if out in tensors}
        kept.append(tensors)
        launches.append(bind_region(region, tensors, config, scratch=scratch, dependent_launch=dependent_launch))
    launches[0]()  # compiles
    torch.cuda.synchronize()
    calls = sets * math.ceil(CALLS / sets)
    return Timing(_replay_us(launches, calls), moved, config, sets)


def require_gpu(command: str) -> None:
    """Raises BindError on a machine without a GPU; ``command`` is what asked."""
    if not torch.cuda.is_available():
        raise BindError(f"{command} times on a GPU and this machine has none that torch can use\n"
                        f"  fix: run {command} where the GPU is")


def _is_choice(value: Value) -> bool:
    """Whether a value holds the experts of each row."""
    return value.dtype == "i32" and value.role == "activation"


def _replay_us(launches: list[Any], calls: int) -> float:
    graph = torch.cuda.CUDAGraph()
    with no_garbage_collection(), torch.cuda.graph(graph):
        for index in range(calls):
            launches[index % len(launches)]()
    return replay_us(graph, REPLAYS) / calls


def random_inputs(region: Region, device: str) -> dict[str, Tensor]:
    """Tensors for every input and output of a region, by value name; ``device`` "meta" makes no storage.

    Every row is live at the end of the planned context, slots and pages are all different, experts uniform.
    """
    values = region.graph.values
    tensors = {name: _random(region, values[name], device) for name in region.inputs}
    shared = in_place(region)
    for name in region.outputs:
        if name in shared:
            tensors[name] = tensors[shared[name]]
        else:
            tensors[name] = torch.empty(values[name].shape, dtype=TORCH_DTYPES[values[name].dtype], device=device)
    return tensors


def _random(region: Region, value: Value, device: str) -> Tensor:
    dtype, maker = TORCH_DTYPES[value.dtype], region.graph.producer.get(value.name)
    if maker is not None and maker.op == "slice":
        wide = region.graph.values[maker.inputs[0]]
        tensor = torch.empty(wide.shape, dtype=dtype, device=device).narrow(
            maker.attrs["dim"], maker.attrs["start"], maker.attrs["stop"] - maker.attrs["start"])
    else:
        tensor = torch.empty(value.shape, dtype=dtype, device=device)
    if device == "meta":
        return tensor
    if value.role == "index":
        return tensor.copy_(_index(region, value).view(value.shape))
    if value.dtype == "u8":
        return tensor.random_(120, 126) if value.name.endswith("_scale") else tensor.random_(0, 256)
    if value.dtype == "i32":  # expert ids
        experts = _experts(region)
        return tensor.copy_(torch.rand(value.shape[0], experts, device=device).argsort(1)[:, : value.shape[1]])
    if value.dtype == "i64":
        return tensor.random_(0, 2**40)
    scale = value.shape[-1] ** -0.5 if value.role == "weight" else 1.0
    if dtype == torch.float8_e4m3fn:
        return tensor.copy_(torch.randn(value.shape, device=device))
    return tensor.normal_(0.0, scale)


def _experts(region: Region) -> int:
    return next(int(node.attrs["experts"]) for node in region.nodes if "experts" in node.attrs)


def _index(region: Region, value: Value) -> Tensor:
    """``positions`` end where the page table does; the rest counts up."""
    count = math.prod(value.shape)
    if value.name == "positions":
        table = next((region.graph.values[n] for n in region.inputs if n == "page_table"), None)
        cache = next((region.graph.values[n] for n in region.inputs if region.graph.values[n].role == "cache"), None)
        context = table.shape[1] * cache.shape[1] if table is not None and cache is not None else count
        sequences = table.shape[0] if table is not None else count
        query = max(1, count // sequences)
        return (torch.arange(query) + context - query).repeat(sequences)[:count]
    return torch.zeros(count) if value.name == "rank" else (
        torch.ones(count) if value.name == "accepted" else torch.arange(count))
