"""The regions that the kernels would get in one TP16 rank of Kimi K3: for compiling and timing at real shapes."""
from __future__ import annotations

from dataclasses import replace
from functools import cache

from k3plan.compiler.build import build_graph
from k3plan.compiler.covering.match import find_regions
from k3plan.compiler.kernel import KernelDef, Menu, Region
from k3plan.compiler.ops import OPS
from k3plan.compiler.passes.merge import merge_projections
from k3plan.compiler.passes.shard import algebra_of, shard_graph
from k3plan.compiler.spec import Choices, Numerics, Parallel, Spec, Step

# every kind of layer, and every number of finished blocks
LAYERS = (0, 1, 3, 12, 24, 36, 48, 60, 72, 84, 85)
# sequences x rows of each
ROWS = ((1, 1), (1, 8), (8, 1), (64, 1))


def _spec(sequences: int, query: int, choices: Choices) -> Spec:
    import json
    from importlib.resources import files

    from k3plan.compiler.model import model_from_config

    text = files("k3plan.compiler").joinpath("presets/kimi-k3.json").read_text()
    return Spec(
        model=model_from_config(json.loads(text)), layers=LAYERS, parallel=Parallel(16, "tp"),
        step=Step(sequences, query, 8192, 64, ("tokens",)), gpu="h200",
        numerics=Numerics("bf16", "bf16", 1.0, "fp32", "bf16"), profile="auto", choices=choices,
        buckets=(sequences,),
    )


@cache
def real_regions(rows: tuple[tuple[int, int], ...] = ROWS) -> list[tuple[str, Region]]:
    """Names and regions, each kernel and shape once."""
    from k3plan.ops_triton.kernels import KERNELS

    found: dict[object, tuple[str, Region]] = {}
    for sequences, query in rows:
        for choices in (Choices("sharded", "stripe", "replicated"), Choices("replicated", "all_reduce", "replicated")):
            for region in regions_of(_spec(sequences, query, choices), KERNELS):
                name = name_of(region, sequences, query)
                found.setdefault(name, (name, region))
    return list(found.values())


def regions_of(spec: Spec, kernels: tuple[KernelDef, ...]) -> list[Region]:
    """Where ``kernels`` fit in the step of ``spec``, collectives left out."""
    picked = algebra_of(spec)
    graph = merge_projections(shard_graph(build_graph(replace(spec, layers=spec.layers)), spec, picked)[0])[0]
    regions, _ = find_regions(graph, Menu(kernels), arch="sm_90", rows=spec.step.rows)
    return [region for region in regions if all(OPS[node.op].kind != "comm" for node in region.nodes)]


def name_of(region: Region, sequences: int, query: int) -> str:
    """Kernel, rows, and the shapes of the weights and of what the pattern takes by '...'."""
    rows = f"T{sequences}" if query == 1 else f"L{query}" if sequences == 1 else f"S{sequences}xL{query}"
    values = [region.graph.values[n] for n in region.inputs]
    shapes = ["x".join(map(str, v.shape)) for v in values if v.role == "weight"]
    ops = [node.op for node in region.nodes if node.op in ("residual_add", "attn_res")]
    blocks = [f"nb{len(node.inputs) - 2}" for node in region.nodes if node.op == "attn_res"]
    marks = (["add"] if "residual_add" in ops else []) + blocks
    outputs = len(region.outputs)
    return "-".join([region.kernel.id, rows, *shapes[:2], *marks, f"o{outputs}"])
