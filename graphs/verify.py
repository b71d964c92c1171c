"""Holds launches against the meaning of the ops that they compute: those of a bound step, or one kernel alone.

In a step each launch is checked on the inputs that the launches before it really left, so the first wrong kernel is
named and not what follows from it. A kernel alone gets random inputs: ``tune`` checks what it times. Collectives are
left out: over ``loopback`` they do not mean what the op says.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..compiler.compile import lower
from ..compiler.kernel import Region
from ..compiler.ops import OPS
from ..compiler.plan import Launch
from .bench import random_inputs
from .bind import Executable
from .launch import bind_region, in_place
from .load import TORCH_DTYPES


@dataclass(frozen=True)
class Comparison:
    """One launch: root-mean-square error of its worst output, of the plain chain of ops, in units of the reference."""

    launch: Launch
    kernel: str
    output: str
    error: float
    chain_error: float
    finite: bool

    @property
    def wrong(self) -> bool:
        return _is_wrong(self.error, self.chain_error, self.finite)


def verify_launches(executable: Executable) -> list[Comparison]:
    """Runs one step of rank 0 and returns a finding for each launch, in order."""
    plan = executable.plan
    graph, _ = lower(plan.spec)
    nodes = {node.name: node for node in graph.nodes}
    views = {node.outputs[0]: node for node in graph.nodes if OPS[node.op].kind == "view"}
    rank, findings = executable.ranks[0], []
    for index, launch in enumerate(plan.launches):
        before = {name: rank.tensors[name].clone() for name in launch.inputs}
        for step in executable.steps_of(index):
            step()
        own = [nodes[name] for name in launch.nodes]
        if any(OPS[node.op].kind == "comm" for node in own):
            continue
        wanted, chain = (_evaluate(graph, own, views, before, rounded) for rounded in (False, True))
        findings.append(Comparison(launch, plan.choice(launch).kernel,
                                   *_compare(launch.outputs, rank.tensors, wanted, chain)))
    return findings


class RegionCheck:
    """The kernel of ``region`` on random inputs, in any configuration, against its ops; the reference is made once."""

    def __init__(self, region: Region, device: str) -> None:
        self.region = region
        self.inputs = random_inputs(region, device)
        before = {name: self.inputs[name] for name in region.inputs}
        views = {node.outputs[0]: node for node in region.nodes if OPS[node.op].kind == "view"}
        self.wanted, self.chain = (
            _evaluate(region.graph, region.solid, views, before, rounded) for rounded in (False, True))

    def wrong(self, config: Mapping[str, Any]) -> str | None:
        """What one launch computes wrongly into poisoned outputs, in words. Raises what binding or launching raises."""
        region, shared = self.region, in_place(self.region)
        tensors = {name: tensor.clone() if name in shared.values() else tensor for name, tensor in self.inputs.items()}
        tensors |= {name: torch.full_like(self.inputs[name], _poison(self.inputs[name].dtype))
                    for name in region.outputs if name not in shared}
        tensors |= {name: tensors[source] for name, source in shared.items()}
        bind_region(region, tensors, config)()
        written = (*region.outputs, *(name for name in shared if name not in region.outputs))
        output, error, plain, finite = _compare(written, tensors, self.wanted, self.chain)
        if not _is_wrong(error, plain, finite):
            return None
        return f"computes {output} wrongly: error {error:.2g} of its rms, its ops one by one {plain:.2g}"


def check_of(region: Region, device: str = "cuda") -> Callable[[Mapping[str, Any]], str | None]:
    """``RegionCheck.wrong`` of a region. Of one with a collective one rank alone cannot tell what its ops mean: there
    nothing is found wrong."""
    if any(OPS[node.op].kind == "comm" for node in region.nodes):
        return lambda config: None
    return RegionCheck(region, device).wrong


def _poison(dtype: torch.dtype) -> float:
    return math.nan if dtype.is_floating_point else 0x7F


def _is_wrong(error: float, chain_error: float, finite: bool) -> bool:
    """An error that rounding does not explain, or a value that is not finite where the reference is."""
    return not finite or not error <= 2 * chain_error + 2.0**-8


def _evaluate(graph, nodes, views, before: dict[str, Tensor], rounded: bool) -> dict[str, Tensor]:
    """Values of the nodes in fp32, or each rounded to its declared dtype."""
    values = {name: tensor.clone() for name, tensor in before.items()}

    def get(name: str) -> Tensor:
        if name not in values:
            node = views[name]
            values[name] = OPS[node.op].fn(get(node.inputs[0]), **node.attrs)
        return values[name]

    for node in nodes:
        results = OPS[node.op].fn(*(get(name) for name in node.inputs), **node.attrs)
        for name, result in zip(node.outputs, results if isinstance(results, tuple) else (results,), strict=True):
            values[name] = result.to(TORCH_DTYPES[graph.values[name].dtype]) if rounded else result
    return values


def _compare(outputs: Sequence[str], found: Mapping[str, Tensor], wanted: Mapping[str, Tensor],
             chain: Mapping[str, Tensor]) -> tuple[str, float, float, bool]:
    """The worst output: its name, its error, that of the plain chain, and whether it is finite."""
    worst = "", 0.0, 0.0, True
    for name in outputs:
        reference = wanted[name].float()
        scale = float(reference.square().mean().sqrt()) + 1e-30
        error, plain = (float((x[name].float() - reference).square().mean().sqrt()) / scale for x in (found, chain))
        finite = bool(torch.isfinite(found[name].float()).all()) or not bool(torch.isfinite(reference).all())
        if not finite or error >= worst[1]:
            worst = name, error, plain, finite
    return worst
