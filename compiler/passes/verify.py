"""Invariants of a graph, checked between any two passes."""
from __future__ import annotations

from ..errors import GraphError
from ..ir import DTYPE_BYTES, ROLES, Graph
from ..ops import OPS
from ..recipe import shape_of


def verify(graph: Graph, after: str) -> Graph:
    """Returns ``graph``, or raises GraphError with every broken invariant and the pass that broke it."""
    problems = [*_check_values(graph), *_check_nodes(graph)]
    for name in graph.outputs:
        if name not in graph.producer:
            problems.append(f"output {name} has no producer")
        elif graph.values[name].placement.kind not in ("replicated",):
            problems.append(f"output {name} is {graph.values[name].placement}, not whole on each rank")
    if problems:
        raise GraphError(f"after {after}:\n" + "\n".join(f"  {p}" for p in problems[:20]))
    return graph


def _check_values(graph: Graph) -> list[str]:
    problems = []
    for name, value in graph.values.items():
        if value.name != name or value.role not in ROLES or value.dtype not in DTYPE_BYTES:
            problems.append(f"value {name}: bad name, role {value.role} or dtype {value.dtype}")
        if any(n <= 0 for n in value.shape):
            problems.append(f"value {name}: shape {value.shape}")
        if value.role == "weight" and (value.recipe is None or shape_of(value.recipe) != value.shape):
            problems.append(f"weight {name}: recipe does not make shape {value.shape}")
    return problems


def _check_nodes(graph: Graph) -> list[str]:
    problems: list[str] = []
    ready = {n for n, v in graph.values.items() if n not in graph.producer and v.role != "activation"}
    ready.update(graph.inputs)
    updated: dict[str, str] = {}  # storage name that a later node has overwritten -> that node
    names: set[str] = set()
    for node in graph.nodes:
        definition = OPS.get(node.op)
        if definition is None:
            problems.append(f"{node.name}: unknown op {node.op}")
            continue
        if node.name in names:
            problems.append(f"{node.name}: name used twice")
        names.add(node.name)
        for name in node.inputs:
            if name not in ready:
                problems.append(f"{node.name}: reads {name} before it is made")
            elif name in updated:
                problems.append(f"{node.name}: reads {name}, which {updated[name]} has overwritten")
        ready.update(node.outputs)
        if definition.kind != "view":
            updated.update({node.inputs[source]: node.name for index, source in definition.alias.items()
                            if index < len(node.outputs)})
        if not all(name in graph.values for name in (*node.inputs, *node.outputs)):
            problems.append(f"{node.name}: an input or output is not a value of the graph")
            continue
        try:
            inferred = definition.infer([graph.values[n] for n in node.inputs], node.attrs)
        except GraphError as error:
            problems.append(f"{node.name}: {error}")
            continue
        for name, (shape, dtype) in zip(node.outputs, inferred, strict=True):
            value = graph.values[name]
            if (value.shape, value.dtype) != (shape, dtype):
                problems.append(f"{node.name}: {name} is {value.dtype}{value.shape}, the op makes {dtype}{shape}")
    return problems
