"""Choose the kernels: the exact cheapest cover of a graph, with the reason why each other kernel lost.

Every node but the views is computed by exactly one region, no two regions wait for each other, and the total
predicted time is least; among equals fewer launches win, then the order of kernel ids. What fits is decided
by ``match``, what it costs by ``cost_of``, and the search itself is ``search``.

The nodes are cut wherever no region reaches over the cut. Edges go forward in graph order, so a path that
leaves such a component never comes back to it: a cycle of regions lies inside one component, and components
can be solved one by one and launched one after the other. Equal ones are solved once.
"""
from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..errors import CoverError
from ..ir import Graph, Node
from ..kernel import Cost, Region
from ..menu import LIBRARY_PRODUCT
from .match import NearMiss
from .order import FREE_OPS, successors, through_views
from .reasons import MAX_LOSERS, Loser, explain_losers, explain_uncovered, missed
from .search import Piece, Solution, bits, solve
from .signature import Signatures
from .untimed import hold_back

# prices are compared in whole picoseconds: sums are exact and do not depend on their order
_PICOSECONDS = 1_000_000
# what profile "fused" charges a launch: a second, more than any step takes
_TOLL = 1_000_000 * _PICOSECONDS


@dataclass(frozen=True, slots=True)
class Choice:
    """One launch of the cover: its region, its price, and what else could have been at its nodes."""

    region: Region
    cost: Cost
    losers: tuple[Loser, ...]
    more_losers: int = 0  # left out of ``losers``

    @property
    def kernel(self) -> str:
        return self.region.kernel.id


@dataclass(frozen=True, slots=True)
class Cover:
    """The choices in launch order. ``solved`` of ``components`` were searched, the rest equal one of them."""

    choices: tuple[Choice, ...]
    us: float
    components: int
    solved: int

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple(choice.region for choice in self.choices)


@dataclass(frozen=True, slots=True)
class _Component:
    """Solid nodes ``start`` to ``stop`` and the regions there, by lowest node, kernel id and nodes."""

    start: int
    stop: int
    regions: tuple[Region, ...]
    masks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Answer:
    """What equal components share: indices into the regions of a component."""

    order: tuple[int, ...]  # launch order
    costs: tuple[Cost, ...]
    losers: dict[int, tuple[Loser, ...]]


def cover(
    graph: Graph,
    regions: Iterable[Region],
    cost_of: Callable[[Region], Cost],
    *,
    near_misses: Sequence[NearMiss] = (),
    profile: str = "auto",
    share: bool = True,
) -> Cover:
    """The cheapest cover of ``graph`` by ``regions``.

    ``cost_of`` must not depend on names (see ``KernelDef``): with ``share`` it is called for one of several
    equal components only. ``profile`` "auto" takes the cheapest cover, "fused" the cheapest of those with the fewest
    launches, "stock" one-node regions only, products by the library; the others are told as losers.
    Raises ``CoverError`` when a node has no region, or when the regions do not fit together.
    """
    solid = [node for node in graph.nodes if node.op not in FREE_OPS]
    rank = {node.name: index for index, node in enumerate(solid)}
    misses = list(near_misses)
    usable, regions = [], list(regions)
    products = {region.nodes[0].name for region in regions if region.kernel.entry == LIBRARY_PRODUCT}
    for region in regions:
        reason = _not_stock(region, rank, products) if profile == "stock" else None
        if reason is not None:
            names = tuple(node.name for node in region.nodes[::-1])
            misses.append(NearMiss(region.kernel.id, names[0], reason, names))
        else:
            usable.append(region)
    components = list(_components(usable, rank))
    uncovered = _uncovered(solid, components)
    if uncovered:
        raise CoverError(explain_uncovered(uncovered, misses))
    edges = _solid_edges(graph, rank)
    signatures = Signatures(graph)
    answers: dict[object, _Answer] = {}
    by_node = _misses_by_node(misses)
    choices: list[Choice] = []
    for number, component in enumerate(components):
        key = signatures.of(component, solid, edges) if share else number
        answer = answers.get(key)
        if answer is None:
            answer = answers[key] = _answer(component, solid, edges, cost_of, _TOLL if profile == "fused" else 0)
        choices += _choices(component, answer, by_node)
    total = math.fsum(choice.cost.us for choice in choices)
    return Cover(tuple(choices), total, len(components), len(answers))


def _not_stock(region: Region, solid: Collection[str], products: Collection[str]) -> str | None:
    """Why profile stock, what one gets without a fusion or a product of one's own, leaves ``region`` out."""
    nodes = [node.name for node in region.nodes if node.name in solid]
    if len(nodes) != 1:
        return "profile stock takes one-node kernels only"
    if nodes[0] in products and region.kernel.entry != LIBRARY_PRODUCT:
        return "profile stock leaves products to the library"
    return None


def _components(regions: list[Region], rank: dict[str, int]) -> Iterator[_Component]:
    """Cut the solid nodes wherever no region reaches over the cut, and sort the regions into the parts."""
    placed = []
    for region in regions:
        ranks = [rank[node.name] for node in region.nodes if node.name in rank]
        placed.append((min(ranks), region.kernel.id, ranks, region))
    placed.sort(key=lambda item: item[:3])
    part: list[tuple[int, str, list[int], Region]] = []
    stop = 0
    for item in placed:
        if part and item[0] >= stop:
            yield _component(part, stop)
            part = []
        part.append(item)
        stop = max(stop, item[2][-1] + 1)
    if part:
        yield _component(part, stop)


def _component(part: list[tuple[int, str, list[int], Region]], stop: int) -> _Component:
    start = part[0][0]
    masks = tuple(sum(1 << (at - start) for at in ranks) for _, _, ranks, _ in part)
    return _Component(start, stop, tuple(region for *_, region in part), masks)


def _uncovered(solid: list[Node], components: list[_Component]) -> list[Node]:
    found: list[Node] = []
    reached = 0
    for component in components:
        found += solid[reached:component.start]
        reached = component.stop
        union = 0
        for mask in component.masks:
            union |= mask
        if union != (1 << (component.stop - component.start)) - 1:
            inside = solid[component.start:component.stop]
            found += [node for at, node in enumerate(inside) if not union >> at & 1]
    return found + solid[reached:]


def _solid_edges(graph: Graph, rank: dict[str, int]) -> list[list[int]]:
    """By solid node the ranks of the nodes that must come later, with views transparent."""
    ranks = [rank.get(node.name, -1) for node in graph.nodes]
    edges = through_views(graph, successors(graph))
    return [[ranks[later] for later in edges[at]] for at, own in enumerate(ranks) if own >= 0]


def _answer(component: _Component, solid: list[Node], edges: list[list[int]],
            cost_of: Callable[[Region], Cost], toll: int) -> _Answer:
    start, stop = component.start, component.stop
    costs = hold_back([cost_of(region) for region in component.regions], component.masks)
    for region, cost in zip(component.regions, costs, strict=True):
        assert 0 <= cost.us < math.inf, f"{region.kernel.id} costs {cost.us} us"
    pieces = [Piece(mask, round(cost.us * _PICOSECONDS) + toll)
              for mask, cost in zip(component.masks, costs, strict=True)]
    after = [sum(1 << (later - start) for later in edges[at] if later < stop) for at in range(start, stop)]
    solution = solve(stop - start, after, pieces)
    if solution is None:
        names = ", ".join(node.name for node in solid[start:min(stop, start + 4)])
        raise CoverError(
            f"no set of kernels computes {names}{' and more' if stop - start > 4 else ''} exactly once: "
            "those that fit overlap or wait for each other; add a kernel for each op alone")
    return _Answer(_launch_order(solution, pieces, start, edges), costs,
                   explain_losers(component.regions, component.masks, costs, solution, toll))


def _launch_order(solution: Solution, pieces: list[Piece], start: int,
                  edges: list[list[int]]) -> tuple[int, ...]:
    """Topological over the chosen regions; of those that are ready, the one with the earliest node."""
    owner: dict[int, int] = {}
    for index in solution.chosen:
        for at in bits(pieces[index].mask):
            owner[start + at] = index
    later = {index: set[int]() for index in solution.chosen}
    for at, index in owner.items():
        later[index].update(owner[to] for to in edges[at] if to in owner and owner[to] != index)
    waits = dict.fromkeys(solution.chosen, 0)
    for index in solution.chosen:
        for to in later[index]:
            waits[to] += 1
    # pieces are sorted by lowest node, so the index itself is the priority
    ready = [index for index, count in waits.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for to in later[index]:
            waits[to] -= 1
            if not waits[to]:
                heapq.heappush(ready, to)
    assert len(order) == len(solution.chosen), "the chosen regions wait for each other"
    return tuple(order)


def _misses_by_node(misses: Iterable[NearMiss]) -> dict[str, list[NearMiss]]:
    """Near misses by each node that they had reached, and by the node where they failed."""
    found: dict[str, list[NearMiss]] = {}
    for miss in misses:
        for name in dict.fromkeys((*miss.nodes, miss.node)):
            found.setdefault(name, []).append(miss)
    return found


def _choices(component: _Component, answer: _Answer, misses: dict[str, list[NearMiss]]) -> Iterator[Choice]:
    """The choices of one component in launch order; near misses name nodes, so they are not shared."""
    for index in answer.order:
        region = component.regions[index]
        near = {miss.kernel: miss for node in region.nodes for miss in misses.get(node.name, ())}
        losers = (*answer.losers.get(index, ()), *missed(region, near.values(), answer.losers.get(index, ())))
        yield Choice(region, answer.costs[index], losers[:MAX_LOSERS], max(0, len(losers) - MAX_LOSERS))
