"""Projections that read the same rows become one: one launch, one stream of weights.

Runs after sharding, so a merged weight is the join of local parts. The merged outputs are views. A projection
with another output dtype stays apart: the router's fp32 logits must not pass through bf16.

Where the rows of a merged weight are no multiple of 16 and nothing is activated pairwise, zero rows are added: rows of
the output then begin at multiples of 32 bytes, which cuBLAS wants (3206 x 7168 at 8 rows takes it 28.9 us inside a step
on an H200, 3216 x 7168 alone 18.3), and so do the loads of what reads a part of them.
"""
from __future__ import annotations

from dataclasses import replace

from ..ir import REPLICATED, Graph, Node, Value
from ..recipe import Cat, Zeros
from .log import Note

ROWS = 16  # a merged projection of attention has a multiple of so many


def merge_projections(graph: Graph) -> tuple[Graph, list[Note]]:
    """Merges all ``linear`` nodes of one layer half with equal input and equal output dtype."""
    groups: dict[tuple[object, ...], list[Node]] = {}
    for node in graph.nodes:
        if _can_merge(graph, node):
            x, out = node.inputs[0], graph.values[node.outputs[0]]
            groups.setdefault((node.layer, node.stage, x, out.dtype, _reduces(graph, node)), []).append(node)
    merged = {group[0].name: group for group in groups.values() if len(group) > 1}
    dropped = {node.name for group in merged.values() for node in group}
    values, nodes, notes = dict(graph.values), [], []
    for node in graph.nodes:
        if node.name in merged:
            group = merged[node.name]
            nodes += _merge(values, group)
            notes.append(Note("merge", " + ".join(n.name for n in group), f"read the same rows {node.inputs[0]}"))
        elif node.name not in dropped:
            nodes.append(node)
    return Graph(tuple(nodes), values, graph.inputs, graph.outputs), notes


def _can_merge(graph: Graph, node: Node) -> bool:
    if node.op != "linear":
        return False
    weight = graph.values[node.inputs[1]]
    return weight.recipe is not None and len(weight.shape) == 2 and len(graph.consumers[weight.name]) == 1


def _reduces(graph: Graph, node: Node) -> bool:
    """Outputs that are sums over ranks are not merged with outputs that are not."""
    return graph.values[node.outputs[0]].placement.kind == "partial"


def _merge(values: dict[str, Value], group: list[Node]) -> list[Node]:
    first = group[0]
    prefix = f"{first.name.rsplit('.', 1)[0]}.in_proj" if first.stage == "attn" else (
        f"{first.name.rsplit('.', 1)[0]}.front")
    weights = [values.pop(node.inputs[1]) for node in group]
    outs = [values[node.outputs[0]] for node in group]
    rows = sum(w.shape[0] for w in weights)
    # gate and up must stay the last rows: their kernels take pairs from the end
    padding = -rows % ROWS if first.stage == "attn" else 0
    parts = [*(w.recipe for w in weights if w.recipe is not None),
             *([Zeros((padding, weights[0].shape[1]))] if padding else [])]
    recipe, rows = Cat(0, tuple(parts)), rows + padding
    weight = Value(f"{prefix}.weight", (rows, weights[0].shape[1]), weights[0].dtype, "weight", recipe=recipe)
    out = Value(prefix, (*outs[0].shape[:-1], rows), outs[0].dtype, "activation", REPLICATED)
    values[weight.name], values[out.name] = weight, out
    nodes = [replace(first, name=prefix, inputs=(first.inputs[0], weight.name), outputs=(prefix,))]
    start = 0
    for node, part in zip(group, outs, strict=True):
        stop = start + part.shape[-1]
        attrs = {"dim": len(out.shape) - 1, "start": start, "stop": stop}
        nodes.append(Node(node.name, "slice", (prefix,), node.outputs, attrs, node.layer, node.stage))
        start = stop
    return nodes
