"""When two parts of a graph are the same to the planner. Decides what a cost may depend on."""
from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

from ..ir import Graph, Node
from ..kernel import Region


class Part(Protocol):
    """Solid nodes ``start`` to ``stop`` with their regions and, for each region, the mask of its nodes."""

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...

    @property
    def regions(self) -> tuple[Region, ...]: ...

    @property
    def masks(self) -> tuple[int, ...]: ...


class Signatures:
    """Numbers for equal values, nodes and regions of one graph: names, layers and recipes do not count."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._numbers: dict[Hashable, int] = {}
        self._values: dict[str, int] = {}
        self._nodes: dict[str, int] = {}

    def of(self, part: Part, solid: Sequence[Node], edges: Sequence[Sequence[int]]) -> Hashable:
        """Equal for two parts with the same ops, attrs, shapes, dtypes, roles, placements, order edges,
        and the same regions at the same places."""
        start, stop = part.start, part.stop
        nodes = tuple(self._node(solid[at]) for at in range(start, stop))
        order = tuple(tuple([later - start for later in edges[at] if later < stop])
                      for at in range(start, stop))
        regions = tuple(map(self._region, part.regions))
        return nodes, order, regions, part.masks

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _value(self, name: str) -> int:
        number = self._values.get(name)
        if number is None:
            value = self.graph.values[name]
            key = value.shape, value.dtype, value.role, value.placement
            number = self._values[name] = self._number(key)
        return number

    def _node(self, node: Node) -> int:
        number = self._nodes.get(node.name)
        if number is None:
            # repr tells 1 from True and takes lists
            attrs = repr(sorted(node.attrs.items())) if node.attrs else ""
            key = node.op, attrs, tuple(map(self._value, node.inputs)), tuple(map(self._value, node.outputs))
            number = self._nodes[node.name] = self._number(key)
        return number

    def _region(self, region: Region) -> int:
        return self._number((
            region.kernel.id,
            tuple(map(self._node, region.nodes)),
            tuple(map(self._value, region.inputs)),
            tuple(map(self._value, region.outputs)),
        ))
