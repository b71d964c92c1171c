"""What must run before what. Shared by the matcher and the cover; decides no order itself."""
from __future__ import annotations

from ..ir import Graph, Node

# views: they launch nothing, so no kernel has to compute them
FREE_OPS = frozenset({"slice"})
_IN_PLACE_ROLES = frozenset({"state", "cache"})


def successors(graph: Graph) -> list[list[int]]:
    """For each node position the positions that must come later: readers, and updates in place.

    A node that makes a state or cache from one of the same shape overwrites it, so every earlier reader of
    the old name, also one that reads a view of it, must have run. All edges go forward in graph order.
    """
    position = {node.name: index for index, node in enumerate(graph.nodes)}
    consumers = graph.consumers
    edges = [
        list(dict.fromkeys(position[reader.name] for out in node.outputs for reader in consumers[out]))
        for node in graph.nodes
    ]
    for index, node in enumerate(graph.nodes):
        for name in _overwritten(graph, node):
            for reader in _readers(graph, name):
                if position[reader] < index and index not in edges[position[reader]]:
                    edges[position[reader]].append(index)
    return edges


def _overwritten(graph: Graph, node: Node) -> list[str]:
    """Inputs that ``node`` updates in place."""
    values = graph.values
    made = [values[name] for name in node.outputs]
    kinds = {(v.role, v.shape, v.dtype) for v in made if v.role in _IN_PLACE_ROLES}
    if not kinds:
        return []
    return [n for n in node.inputs if (values[n].role, values[n].shape, values[n].dtype) in kinds]


def _readers(graph: Graph, name: str) -> list[str]:
    """Nodes that read ``name``, directly or through views."""
    found = []
    for node in graph.consumers[name]:
        found.append(node.name)
        if node.op in FREE_OPS:
            found += [reader for out in node.outputs for reader in _readers(graph, out)]
    return found


def through_views(graph: Graph, edges: list[list[int]]) -> list[list[int]]:
    """``edges`` with views made transparent: a path over views alone becomes one edge."""
    free = [node.op in FREE_OPS for node in graph.nodes]
    if not any(free):
        return edges
    passed: list[list[int]] = [[] for _ in edges]
    for index in range(len(edges) - 1, -1, -1):
        found: dict[int, None] = {}
        for later in edges[index]:
            found.update(dict.fromkeys(passed[later]) if free[later] else {later: None})
        passed[index] = list(found)
    return passed
