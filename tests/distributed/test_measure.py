"""What ``k3plan launch links`` holds its collective kernels against, on a CPU."""
from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from k3plan.compiler.kernel import Menu
from k3plan.compiler.menu import op_kernels
from k3plan.compiler.ops import OPS
from k3plan.compiler.reading.source import load_spec
from k3plan.face import kernels
from k3plan.graphs.distributed.measure import Bound, every_ranks_inputs, meaning, unfused, worst_error
from k3plan.graphs.distributed.report import collective_regions

TINY = Path(__file__).resolve().parents[2] / "examples/tiny-k3.yaml"
FOUND = {region.kernel.id: (region, found) for region, found in collective_regions(
    load_spec(TINY, ["target.gpu=h200"]), Menu([*op_kernels(), *kernels()]))}
REGIONS = {kernel: region for kernel, (region, _) in FOUND.items()}


@pytest.mark.parametrize("kernel", REGIONS)
def test_a_collective_is_as_wrong_as_its_chain_of_ops(kernel: str) -> None:
    """And infinitely so with other integers than the chain has, or with a value that is not finite."""
    region = REGIONS[kernel]
    ranks = every_ranks_inputs(region, 2, torch.device("cpu"), seed=0)
    chain = meaning(region, ranks, rounded=True)[1]
    found = {name: chain[name].clone() for name in region.outputs}
    bound = Bound([], [], found, ranks)
    error, allowed = worst_error(region, bound, rank=1)
    assert error == allowed < 0.1
    for name in region.outputs:
        kept = found[name].clone()
        found[name].view(-1)[-1] = kept.view(-1)[-1] + 1 if not kept.dtype.is_floating_point else math.inf
        assert worst_error(region, bound, rank=1)[0] == math.inf
        found[name] = kept


def test_kernels_with_several_results_are_among_them() -> None:
    assert any(len(region.outputs) > 1 for region in REGIONS.values())


@pytest.mark.parametrize("kernel", REGIONS)
def test_the_unfused_form_computes_every_node_once(kernel: str) -> None:
    """With kernels of this project, none of which holds a collective and anything else. Views launch nothing."""
    region, found = FOUND[kernel]
    parts = list(unfused(region, [part for part in found if not part.kernel.entry.startswith("op:")]))
    solid = [[n for n in part.nodes if OPS[n.op].kind != "view"] for part in (region, *parts)]
    assert sorted(n.name for part in solid[1:] for n in part) == sorted(n.name for n in solid[0])
    assert all(len(part) == 1 or all(OPS[n.op].kind != "comm" for n in part) for part in solid[1:])
