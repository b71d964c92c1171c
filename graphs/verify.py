"""Runs a bound step launch by launch and holds each against the meaning of the ops that it computes.

Each launch is checked on the inputs that the launches before it really left, so the first wrong kernel is named
and not what follows from it. Collectives are left out: over ``loopback`` they do not mean what the op says.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..compiler.compile import lower
from ..compiler.ops import OPS
from ..compiler.plan import Launch
from .bind import Executable
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
        """An error that rounding does not explain, or a value that is not finite where the reference is."""
        return not self.finite or self.error > 2 * self.chain_error + 2.0**-8


def verify_launches(executable: Executable) -> list[Comparison]:
    """Runs one step of rank 0 and returns a finding for each launch, in order."""
    plan = executable.plan
    graph, _ = lower(plan.spec)
    nodes = {node.name: node for node in graph.nodes}
    views = {node.outputs[0]: node for node in graph.nodes if OPS[node.op].kind == "view"}
    rank, findings = executable.ranks[0], []
    ends = [*executable.first[1:], len(executable.steps)]
    for index, launch in enumerate(plan.launches):
        before = {name: rank.tensors[name].clone() for name in launch.inputs}
        for step in executable.steps[executable.first[index] : ends[index]]:
            step()
        own = [nodes[name] for name in launch.nodes]
        if any(OPS[node.op].kind == "comm" for node in own):
            continue
        wanted, chain = (_evaluate(graph, own, views, before, rounded) for rounded in (False, True))
        findings.append(_compare(plan.choice(launch).kernel, launch, rank.tensors, wanted, chain))
    return findings


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


def _compare(kernel: str, launch: Launch, found: Mapping[str, Tensor], wanted: dict[str, Tensor],
             chain: dict[str, Tensor]) -> Comparison:
    worst = Comparison(launch, kernel, "", 0.0, 0.0, True)
    for name in launch.outputs:
        reference = wanted[name].float()
        scale = float(reference.square().mean().sqrt()) + 1e-30
        error, plain = (float((x[name].float() - reference).square().mean().sqrt()) / scale for x in (found, chain))
        finite = bool(torch.isfinite(found[name].float()).all()) or not bool(torch.isfinite(reference).all())
        if not finite or error >= worst.error:
            worst = Comparison(launch, kernel, name, error, plain, finite)
    return worst
