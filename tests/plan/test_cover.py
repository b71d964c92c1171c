"""A cover takes the cheapest kernels that fit, says why each other kernel lost, and is made in time."""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from small_graphs import graph, kernel, one_node

from k3plan.compiler.covering.cover import Cover, cover
from k3plan.compiler.covering.match import find_regions
from k3plan.compiler.errors import CoverError
from k3plan.compiler.ir import Graph
from k3plan.compiler.kernel import Cost, KernelDef, Menu, Region


def prices(**by_kernel: float) -> Callable[[Region], Cost]:
    """Costs by kernel id, ``_`` for a dot; 1 us for the others."""
    table = {name.replace("_", ".", 1): us for name, us in by_kernel.items()}
    return lambda region: Cost(table.get(region.kernel.id, 1.0), 0, 0, False, "test")


def plan(text: str, outputs: str, kernels: list[KernelDef], costs: Callable[[Region], Cost] | None = None,
         **options: Any) -> Cover:
    """Match and cover; ``options`` for the target go to the matcher."""
    target = {name: options.pop(name) for name in ("arch", "rows") if name in options}
    built = graph(text, outputs.split())
    regions, misses = find_regions(built, Menu(kernels), **target)
    return cover(built, regions, costs or prices(), near_misses=misses, **options)


def kernels_of(found: Cover) -> list[str]:
    return [choice.kernel for choice in found.choices]


CHAIN = "p = add(x, d)\nh = rms_norm(p, w)\ny = linear(h, v)"
SINGLE = one_node("torch", "add", "rms_norm", "linear")
FUSED = kernel("triton.add_norm", "p = add(x, d)\nh = rms_norm(p, w)\n-> p, h")


def test_a_split_that_lost_is_added_up() -> None:
    costs = prices(torch_add=1.2, torch_rms_norm=1.3, triton_add_norm=1.7)
    found = plan(CHAIN, "y", [*SINGLE, FUSED], costs)
    assert kernels_of(found) == ["triton.add_norm", "torch.linear"]
    (loser,) = found.choices[0].losers
    assert (loser.kernel, loser.us) == ("torch.add", 1.2)
    assert loser.reason == "split: torch.add 1.2 + torch.rms_norm 1.3 us = 2.5 us, 0.8 us dearer"


def test_a_fused_kernel_that_lost_says_what_it_would_replace() -> None:
    found = plan(CHAIN, "y", [*SINGLE, FUSED], prices(triton_add_norm=2.25))
    assert kernels_of(found) == ["torch.add", "torch.rms_norm", "torch.linear"]
    (loser,) = found.choices[0].losers
    assert loser.reason == (
        "with it triton.add_norm 2.25 us in place of torch.add 1.0 + torch.rms_norm 1.0 us = 2.0 us,"
        " 0.25 us dearer")
    assert found.choices[1].losers == (loser,)


def test_a_rival_at_the_same_nodes_says_the_difference() -> None:
    both = [*one_node("triton", "f"), *one_node("torch", "f")]
    found = plan("a = f(x)", "a", both, prices(triton_f=1.4))
    assert [(loser.kernel, loser.reason) for loser in found.choices[0].losers] == [
        ("triton.f", "triton.f 1.4 us, 0.4 us dearer")]


def test_ties_go_to_fewer_launches_then_to_the_kernel_id() -> None:
    both = [*one_node("b", "f", "g"), *one_node("a", "f", "g"), kernel("z", "a = f(x)\nb = g(a)\n-> b")]
    found = plan("a = f(x)\nb = g(a)", "b", both, prices(z=2.0))
    assert kernels_of(found) == ["z"]
    assert "split: a.f 1.0 + a.g 1.0 us = 2.0 us, equal, 1 launch more" in [
        loser.reason for loser in found.choices[0].losers]
    found = plan("a = f(x)\nb = g(a)", "b", both, prices(z=2.5))
    assert kernels_of(found) == ["a.f", "a.g"]
    assert "b.f 1.0 us, equal, later in the order of kernel ids" in [
        loser.reason for loser in found.choices[0].losers]
    assert kernels_of(plan("a = f(x)\nb = g(a)", "b", both[::-1], prices(z=2.5))) == ["a.f", "a.g"]


def test_near_misses_are_losers_without_a_time() -> None:
    cute = kernel("cute.add_norm", FUSED.pattern, arch=("sm_100",))
    found = plan(CHAIN, "y", [*SINGLE, cute], arch="sm_90")
    for choice in found.choices[:2]:
        assert [(loser.kernel, loser.us, loser.reason) for loser in choice.losers] == [
            ("cute.add_norm", None, "needs sm_100, target is sm_90")]
    assert not found.choices[2].losers


def test_two_regions_that_wait_for_each_other_are_not_both_taken() -> None:
    # x1 -> y1 and y2 -> x2: {x1, x2} and {y1, y2} are convex, but each needs the other first
    text = "x1 = f(x)\ny2 = g(x)\ny1 = f(x1)\nx2 = g(y2)"
    built = graph(text, ["y1", "x2"])
    nodes = {node.name: node for node in built.nodes}

    def region(name: str, *members: str) -> Region:
        return Region(kernel(name, "a = f(x)\n-> a"), tuple(nodes[m] for m in members), {}, (), (), built)

    pairs = [region("px", "x1", "x2"), region("py", "y2", "y1")]
    with pytest.raises(CoverError, match="those that fit overlap or wait"):
        cover(built, pairs, prices())
    found = cover(built, [*pairs, *(region(f"one.{name}", name) for name in nodes)], prices())
    assert kernels_of(found) == ["one.x1", "py", "one.x2"]
    assert found.choices[0].losers[0].reason == (
        "with it px 1.0 + one.y2 1.0 + one.y1 1.0 us = 3.0 us in place of one.x1 1.0 + py 1.0 + one.x2 1.0 us"
        " = 3.0 us, equal, later in the order of kernel ids")


def test_stock_takes_one_node_kernels_only() -> None:
    found = plan(CHAIN, "y", [*SINGLE, FUSED], prices(triton_add_norm=0.1), profile="stock")
    assert kernels_of(found) == ["torch.add", "torch.rms_norm", "torch.linear"]
    assert found.choices[0].losers[0].reason == "profile stock takes one-node kernels only"


def test_fused_takes_the_fewest_launches_whatever_they_cost() -> None:
    dear = prices(triton_add_norm=9.0)
    cheapest = plan(CHAIN, "y", [*SINGLE, FUSED], dear)
    assert kernels_of(cheapest) == ["torch.add", "torch.rms_norm", "torch.linear"]
    fewest = plan(CHAIN, "y", [*SINGLE, FUSED], dear, profile="fused")
    assert kernels_of(fewest) == ["triton.add_norm", "torch.linear"]
    assert fewest.us == pytest.approx(9.0 + cheapest.choices[2].cost.us)
    (loser,) = [x for x in fewest.choices[0].losers if x.kernel == "torch.add"]
    assert loser.reason.endswith("1 launch more, 7.0 us cheaper")


def test_a_view_in_a_one_node_kernel_is_stock() -> None:
    viewed = kernel("k", "p = linear(h, w)\n_ = slice(p)\n-> p")
    found = plan("p = linear(h, w)\nq = slice(p)", "p", [viewed], profile="stock")
    assert kernels_of(found) == ["k"]


def test_a_node_without_a_kernel_lists_each_refusal() -> None:
    refusing = [kernel("cute.norm", "h = rms_norm(p, w)\n-> h", arch=("sm_100",)),
                kernel("triton.norm", "h = rms_norm(p, w)\n-> h", rows=(1, 8))]
    menu = [*one_node("torch", "add", "linear"), *refusing]
    with pytest.raises(CoverError) as caught:
        plan(CHAIN + "\nz = sort(y)", "z", menu, arch="sm_90", rows=16)
    assert str(caught.value).splitlines() == [
        "no kernel computes h (rms_norm)",
        "  cute.norm: needs sm_100, target is sm_90",
        "  triton.norm: rows 16 above 8",
        "no kernel computes z (sort)",
        "  the menu has no kernel with sort that comes near",
    ]


def test_a_cost_is_a_finite_time() -> None:
    with pytest.raises(AssertionError, match=r"torch\.f costs nan us"):
        plan("a = f(x)", "a", one_node("torch", "f"), prices(torch_f=float("nan")))


# speed


def layered(layers: int) -> tuple[Graph, list[KernelDef]]:
    """About 45 nodes a layer with branches and views, and 60 kernels of which a third are fused."""
    lines, previous = [], "x"
    for layer in range(layers):
        lines += [f"a{layer} = op0({previous}, w)"]
        lines += [f"s{layer}_{i} = slice(a{layer})" for i in range(4)]
        for branch in range(4):
            last = f"s{layer}_{branch}"
            for depth in range(9):
                lines.append(f"b{layer}_{branch}_{depth} = op{1 + (branch * 9 + depth) % 20}({last}, w)")
                last = f"b{layer}_{branch}_{depth}"
        ends = ", ".join(f"b{layer}_{branch}_8" for branch in range(4))
        lines += [f"c{layer} = join({ends})", f"d{layer} = add({previous}, c{layer})"]
        lines.append(f"e{layer} = norm(d{layer}, w)")
        previous = f"e{layer}"
    ops = [f"op{i}" for i in range(21)] + ["join", "add", "norm"]
    kernels = [*one_node("torch", *ops), *one_node("triton", *ops[:12])]
    kernels += [kernel(f"fused.{i}", f"a = op{i}(x, ...)\nb = op{i + 1}(a, ...)\n-> b") for i in range(1, 20)]
    kernels += [kernel(f"long.{i}", f"a = op{i}(x, ...)\nb = op{i + 1}(a, ...)\nc = op{i + 2}(b, ...)\n-> c")
                for i in range(1, 4)]
    kernels += [kernel("fused.tail", "c = join(p, q, r, s)\nd = add(x, c)\ne = norm(d, w)\n-> d, e"),
                kernel("fused.in", "e = norm(d, w)\na = op0(e, v)\n-> e, a")]
    return graph("\n".join(lines), [previous], {"w": "weight"}), kernels


def test_a_full_model_is_matched_and_covered_in_time() -> None:
    built, kernels = layered(93)
    assert len(built.nodes) > 4000
    assert len(kernels) == 60
    menu = Menu(kernels)
    matching, covering = [], []
    for _ in range(3):
        start = time.process_time()
        regions, misses = find_regions(built, menu)
        middle = time.process_time()
        found = cover(built, regions, prices(fused_in=1.5, fused_tail=1.5), near_misses=misses)
        matching.append(middle - start)
        covering.append(time.process_time() - middle)
    # processor time; the figures to hold are 0.25 and 0.5 s, a shared machine gets twice that
    assert min(matching) < 0.5, matching
    assert min(matching) + min(covering) < 1.0, covering
    assert found.solved < 10


def test_one_long_component_is_no_harder() -> None:
    """Regions over every cut: nothing to share, and still linear in the length."""
    lines = ["a0 = f(x)"] + [f"a{i} = f(a{i - 1})" for i in range(1, 3000)]
    pair = kernel("pair", "a = f(x)\nb = f(a)\n-> b")
    found = plan("\n".join(lines), "a2999", [*one_node("torch", "f"), pair], prices(pair=1.5))
    assert (found.components, len(found.choices), found.us) == (1, 1500, 2250.0)
