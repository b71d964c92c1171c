"""No cover is cheaper: the search against the enumeration of all covers, on random graphs and regions."""
from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_graphs import kernel

from k3plan.compiler.covering.cover import Cover, cover
from k3plan.compiler.errors import CoverError
from k3plan.compiler.ir import Graph, Node, Value
from k3plan.compiler.kernel import Cost, Region


def depends(built: Graph) -> dict[str, set[str]]:
    """By solid node the solid nodes that read from it, directly or through views."""
    def readers(name: str) -> Iterator[str]:
        for node in built.consumers[name]:
            if node.op == "slice":
                yield from readers(node.outputs[0])
            else:
                yield node.name
    return {node.name: set(readers(node.outputs[0])) for node in built.nodes if node.op != "slice"}


def waits_for_itself(parts: list[frozenset[str]], later: dict[str, set[str]]) -> bool:
    """Whether the quotient graph has a cycle: take parts that nothing left leads to, until none can go."""
    left = list(parts)
    while left:
        ready = [part for part in left
                 if not any(later[name] & part for other in left if other is not part for name in other)]
        if not ready:
            return True
        left = [part for part in left if part not in ready]
    return False


def all_covers(solid: list[str], options: list[tuple[frozenset[str], int]]) -> Iterator[list[int]]:
    """Every exact cover as indices into ``options``, by lowest node."""
    if not solid:
        yield []
        return
    for index, (names, _) in enumerate(options):
        if solid[0] in names and names <= set(solid):
            for rest in all_covers([name for name in solid if name not in names], options):
                yield [index, *rest]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Graph, list[Region], dict[str, int]]:
    """A small graph with views, and convex regions that may overlap, interleave and wait for each other."""
    count = draw(st.integers(1, 9))
    nodes: list[Node] = []
    values = {"x": Value("x", (1,), "bf16")}
    for index in range(count):
        before = st.integers(max(0, index - 5), index - 1)
        inputs = draw(st.lists(before, max_size=3, unique=True)) if index else []
        view = bool(inputs) and draw(st.integers(0, 4)) == 0
        read = tuple(f"v{i}" for i in (inputs[:1] if view else inputs)) or ("x",)
        nodes.append(Node(f"n{index}", "slice" if view else "f", read, (f"v{index}",)))
        values[f"v{index}"] = Value(f"v{index}", (1,), "bf16")
    built = Graph(tuple(nodes), values, ("x",), ())
    solid = [node for node in nodes if node.op != "slice"]
    some = st.lists(st.sampled_from(solid), unique_by=lambda node: node.name)
    singles = draw(some) if draw(st.booleans()) else solid
    group = st.lists(st.sampled_from(solid), min_size=2, max_size=4, unique_by=lambda node: node.name)
    several = draw(st.lists(group, max_size=10)) if len(solid) > 1 else []
    later = depends(built)
    regions: list[Region] = []
    costs: dict[str, int] = {}
    for chosen in [*([node] for node in singles), *several]:
        names = frozenset(node.name for node in chosen)
        others = [frozenset({node.name}) for node in solid if node.name not in names]
        if waits_for_itself([names, *others], later):
            continue  # not convex: the matcher never makes these
        name = f"k{draw(st.integers(0, 99)):02}.{len(regions)}"
        costs[name] = draw(st.integers(0, 5))
        members = tuple(node for node in nodes if node.name in names)
        regions.append(Region(kernel(name, "a = f(x)\n-> a"), members, {}, (), (), built))
    return built, regions, costs


@settings(max_examples=600)
@given(problems())
def test_no_cover_is_cheaper(problem: tuple[Graph, list[Region], dict[str, int]]) -> None:
    built, regions, costs = problem
    later = depends(built)
    solid = [node.name for node in built.nodes if node.op != "slice"]
    options = [(frozenset(node.name for node in region.nodes), costs[region.kernel.id]) for region in regions]
    found = [indices for indices in all_covers(solid, options)
             if not waits_for_itself([options[index][0] for index in indices], later)]
    if not found:
        with pytest.raises(CoverError):
            cover(built, regions, lambda region: Cost(costs[region.kernel.id], 0, 0, False, ""))
        return
    best = min(found, key=lambda indices: (
        sum(options[index][1] for index in indices), len(indices),
        [regions[index].kernel.id for index in indices]))
    result = cover(built, regions, lambda region: Cost(costs[region.kernel.id], 0, 0, False, ""))
    assert set(result.regions) == {regions[index] for index in best}
    assert result.us == sum(options[index][1] for index in best)
    check_launchable(result, later)
    check_margins(result, found, options, regions)


def check_launchable(result: Cover, later: dict[str, set[str]]) -> None:
    launched: set[str] = set()
    for region in result.regions:
        names = {node.name for node in region.nodes}
        assert not launched & names, "computed twice"
        launched |= names
        assert not any(later[name] & (launched - names) for name in names), "launched after a reader"


def check_margins(result: Cover, found: list[list[int]], options: list[tuple[frozenset[str], int]],
                  regions: list[Region]) -> None:
    """Each loser's margin is that of the best cover with it."""
    for choice in result.choices:
        for loser in choice.losers:
            index = next(i for i, region in enumerate(regions) if region.kernel.id == loser.kernel)
            totals = [sum(options[i][1] for i in indices) for indices in found if index in indices]
            if not totals:
                assert "goes with it" in loser.reason
            elif min(totals) > result.us:
                assert loser.reason.endswith(f", {min(totals) - result.us:.1f} us dearer")
            else:
                assert ", equal, " in loser.reason


@settings(max_examples=100)
@given(problems(), st.integers(2, 4))
def test_equal_parts_are_solved_once_with_the_same_result(
    problem: tuple[Graph, list[Region], dict[str, int]], copies: int
) -> None:
    built, regions, costs = problem
    nodes: list[Node] = []
    values = {"x": Value("x", (1,), "bf16")}
    for copy in range(copies):
        for node in built.nodes:
            inputs = tuple("x" if name == "x" else f"{copy}.{name}" for name in node.inputs)
            nodes.append(Node(f"{copy}.{node.name}", node.op, inputs, (f"{copy}.{node.outputs[0]}",)))
            values[nodes[-1].outputs[0]] = Value(nodes[-1].outputs[0], (1,), "bf16")
    long = Graph(tuple(nodes), values, ("x",), ())
    by_name = {node.name: node for node in nodes}
    repeated = []
    for copy in range(copies):
        for region in regions:
            members = tuple(by_name[f"{copy}.{node.name}"] for node in region.nodes)
            repeated.append(Region(region.kernel, members, {}, (), (), long))

    def cost_of(region: Region) -> Cost:
        return Cost(costs[region.kernel.id], 0, 0, False, "")

    try:
        shared = cover(long, repeated, cost_of)
    except CoverError:
        with pytest.raises(CoverError):
            cover(long, repeated, cost_of, share=False)
        return
    alone = cover(long, repeated, cost_of, share=False)
    assert shared.regions == alone.regions
    assert [choice.losers for choice in shared.choices] == [choice.losers for choice in alone.choices]
    assert alone.solved == alone.components == shared.components
    assert shared.solved <= shared.components / copies
