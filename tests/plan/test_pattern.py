"""Patterns are read as written or refused, and found wherever they fit and nowhere else."""
from __future__ import annotations

from typing import Any

import pytest
from small_graphs import graph, kernel

from k3plan.compiler.covering.match import NearMiss, find_regions
from k3plan.compiler.kernel import KernelDef, Menu, Region
from k3plan.compiler.pattern import Pattern

MIX = """
p = add(prefix, delta)
? b = block_write(blocks, p)   # only where a block ends
m = attn_res(p, b, score)
h = rms_norm(m, weight)
-> p, b, h
"""
LAYER = """
p = add(x, d)
b = block_write(blocks, p)
m = attn_res(p, b, score)
h = rms_norm(m, w)
y = linear(h, w2)
"""


def find(text: str, outputs: str, *kernels: KernelDef, **target: Any) -> tuple[list[Region], list[NearMiss]]:
    return find_regions(graph(text, outputs.split()), Menu(kernels), **target)


def names(region: Region) -> list[str]:
    return [node.name for node in region.nodes]


def test_a_pattern_is_read_as_written() -> None:
    full, short = Pattern.parse("k", MIX).variants
    assert [node.op for node in full.nodes] == ["add", "block_write", "attn_res", "rms_norm"]
    assert full.nodes[2].args == ("p", "b", "score")
    assert full.order == ("p", "b", "h")
    assert [node.op for node in short.nodes] == ["add", "attn_res", "rms_norm"]
    assert short.nodes[1].args == ("p", "blocks", "score")
    assert short.order == ("p", "h"), "blocks is not the kernel's to write when no block ends"
    assert short.aliases == (("b", "blocks"),)


def test_two_optional_nodes_make_four_variants_and_chain() -> None:
    variants = Pattern.parse("k", "? a = f(x)\n? b = g(a)\nc = h(b)\n-> c").variants
    assert ["".join(node.op for node in variant.nodes) for variant in variants] == ["fgh", "fh", "gh", "h"]
    assert variants[3].nodes[0].args == ("x",)
    assert variants[3].aliases == (("a", "x"), ("b", "x"))


def test_a_node_beside_shares_no_value_and_needs_picks_it() -> None:
    text = "e = experts(x, ids)\np = linear(y, w)\nq = linear(z, v)\nout = add(e, p)"
    pattern = "& s = linear(a, w)\no = experts(x, ids)\n-> s, o"
    regions, _ = find(text, "out q", kernel("k", pattern))
    assert [names(region) for region in regions] == [["e", "p"], ["e", "q"]]
    picky = kernel("k", pattern, needs=lambda region: None if region.binding["a"] == "y" else "not that one")
    regions, _ = find(text, "out q", picky)
    assert [(names(region), region.binding["s"], region.outputs) for region in regions] == [
        (["e", "p"], "p", ("p", "e"))]
    assert Pattern.parse("k", pattern).variants[0].nodes[0].beside


def test_a_node_beside_does_not_depend_on_the_others() -> None:
    after = "e = experts(x, ids)\nm = norm(e)\np = linear(m, w)"
    regions, misses = find(after, "p", kernel("k", "& s = linear(a, w)\no = experts(x, ids)\n-> s, o"))
    assert not regions
    assert misses[0].reason == "a path leaves the region and returns through m"


@pytest.mark.parametrize(("text", "message"), [
    ("", "k: the pattern has no node"),
    ("a = f(x)", "k: the last line must be '-> name, ...', what may be read outside"),
    ("a = f(x)\n-> b", "k: '-> b' names a value that no line defines"),
    ("a = f(x)\n-> a\nb = g(a)", "k, line 3: the line with '->' must be the last one"),
    ("a f(x)\n-> a", "k, line 1: expected 'name = op(input, ...)' or '-> name, ...', found 'a f(x)'"),
    ("\na = f(x y)\n-> a", "k, line 2: 'x y' is not a name"),
    ("a = f(..., x)\n-> a", "k, line 1: '...' must be the last argument"),
    ("a = f(x)\na = g(a)\n-> a", "k, line 2: 'a' is defined on line 1 already"),
    ("a = f(b)\nb = g(x)\n-> a, b", "k, line 2: 'b' is read on line 1, before it is defined"),
    ("a, b = f(x)\n-> a", "k, line 1: 'b' is neither read nor exported (write '_')"),
    ("a = f(x)\nb = g(y)\n-> a, b", "k, line 1: 'f' shares no value with the other nodes"),
    ("? a, b = f(x)\nc = g(a, b)\n-> c", "k, line 1: an optional node needs one named output"),
    ("? a = f(_)\nc = g(a)\n-> c", "k, line 1: an optional node needs one named output"),
])
def test_an_unclear_pattern_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^k") as caught:
        kernel("k", text)
    assert message in str(caught.value)


def test_a_kernel_states_a_range_of_rows() -> None:
    with pytest.raises(ValueError, match=r"k: rows \(8, 1\) is not a range"):
        kernel("k", "a = f(x)\n-> a", rows=(8, 1))


def test_a_menu_has_each_id_once() -> None:
    with pytest.raises(ValueError, match="two kernels have the id 'k'"):
        Menu([kernel("k", "a = f(x)\n-> a"), kernel("k", "a = g(x)\n-> a")])


def test_a_region_knows_its_values_and_what_is_read_outside() -> None:
    (region,), misses = find(LAYER, "y", kernel("k", MIX))
    assert names(region) == ["p", "b", "m", "h"]
    assert region.inputs == ("x", "d", "blocks", "score", "w")
    assert region.outputs == ("h",), "p and b may be read outside but nobody does"
    assert region.value("weight").name == "w"
    maker = region.maker("m")
    assert maker is not None
    assert maker.op == "attn_res"
    assert region.maker("score") is None
    assert region.has("block_write")
    assert not misses
    with pytest.raises(KeyError, match="k has no 'linear' here"):
        region.attrs("linear")


def test_an_absent_optional_node_stands_for_its_first_argument() -> None:
    text = "p = add(x, d)\nm = attn_res(p, old, score)\nh = rms_norm(m, w)"
    (region,), _ = find(text, "h p", kernel("k", MIX))
    assert names(region) == ["p", "m", "h"]
    assert region.value("b").name == region.value("blocks").name == "old"
    assert region.outputs == ("p", "h")


def test_only_commutative_ops_match_in_either_order() -> None:
    text = "{op}\n-> c"
    swapped = "a = f(x)\nc = {op}(y, a)"
    assert find(swapped.format(op="add"), "c", kernel("k", text.format(op="a = f(x)\nc = add(a, y)")))[0]
    assert not find(swapped.format(op="sub"), "c", kernel("k", text.format(op="a = f(x)\nc = sub(a, y)")))[0]


def test_a_repeated_name_is_one_value() -> None:
    same = kernel("k", "a = f(x, w)\nb = g(a, w)\n-> b")
    assert find("a = f(x, w)\nb = g(a, w)", "b", same)[0]
    assert not find("a = f(x, w)\nb = g(a, v)", "b", same)[0]


def test_rest_and_any_bind_without_a_name() -> None:
    (region,), _ = find("a = f(x, y, z)", "a", kernel("k", "a = f(_, ...)\n-> a"))
    assert region.inputs == ("x", "y", "z")
    assert "_" not in region.binding
    _, (miss,) = find("a = f(x, y, z)", "a", kernel("k", "a = f(_, y)\n-> a"))
    assert miss.reason == "f has 3 inputs, the pattern has 2"
    _, (miss,) = find("a, b = f(x)", "a b", kernel("k", "a = f(x)\n-> a"))
    assert miss.reason == "f has 2 outputs, the pattern has 1"


def test_an_unnamed_output_must_not_be_read() -> None:
    first = kernel("k", "a, _ = f(x)\n-> a")
    assert find("a, b = f(x)", "a", first)[0]
    _, (miss,) = find("a, b = f(x)\nc = g(b)", "a c", first)
    assert miss.reason == "value b is read outside by c"


def test_siblings_need_share_rows_only_and_stand_in_graph_order() -> None:
    front = kernel("k", "r = linear(h, wr)\nf = linear(h, wf)\n-> r, f")
    (region,), _ = find("r = linear(h, w1)\nf = linear(h, w2)", "r f", front)
    assert (region.value("wr").name, region.value("wf").name) == ("w1", "w2")
    big_second = kernel("k", front.pattern, needs=lambda r: None if r.value("wr").name == "w2" else "no")
    (region,), _ = find("r = linear(h, w1)\nf = linear(h, w2)", "r f", big_second)
    assert region.value("wr").name == "w2"


def test_a_shared_index_or_weight_does_not_make_siblings() -> None:
    text = "a = f(x, slots)\nb = f(y, slots)"
    pair = kernel("k", "a = f(x, slots)\nb = f(y, slots)\n-> a, b")
    assert find_regions(graph(text, "ab"), Menu([pair]))[0]
    assert not find_regions(graph(text, "ab", {"slots": "index"}), Menu([pair]))[0]


def test_a_hidden_value_must_not_be_read_outside() -> None:
    pair = kernel("k", "a = f(x)\nb = g(a)\n-> b")
    assert find("a = f(x)\nb = g(a)\nc = h(b)", "c", pair)[0]
    regions, (miss,) = find("a = f(x)\nb = g(a)\nc = h(a)", "b c", pair)
    assert not regions
    assert (miss.kernel, miss.node, miss.reason) == ("k", "a", "value a is read outside by c")
    _, (miss,) = find("a = f(x)\nb = g(a)", "a b", pair)
    assert miss.reason == "value a is an output of the graph"


def test_a_path_that_leaves_must_not_come_back() -> None:
    pair = kernel("k", "a = f(x)\nb = g(a, y)\n-> a, b")
    assert find("a = f(x)\nc = h(x)\nb = g(a, c)", "b", pair)[0]
    regions, (miss,) = find("a = f(x)\nc = h(a)\nb = g(a, c)", "b", pair)
    assert not regions
    assert (miss.node, miss.reason) == ("c", "a path leaves the region and returns through c")


def test_an_update_in_place_waits_for_earlier_readers() -> None:
    text = "a = f(x)\nr = read(state, a)\ns = write(state, x)"
    both = kernel("k", "a = f(x)\ns = write(_, x)\n-> a, s")
    assert find_regions(graph(text, "rs"), Menu([both]))[0]
    regions, (miss,) = find_regions(graph(text, "rs", {"state": "state", "s": "state"}), Menu([both]))
    assert not regions
    assert miss.reason == "a path leaves the region and returns through r"


def test_an_input_from_inside_is_refused() -> None:
    pair = kernel("k", "a = f(x)\nb = g(a, y)\n-> a, b")
    regions, (miss,) = find("a = f(x)\nb = g(a, a)", "b", pair)
    assert not regions
    assert (miss.node, miss.reason) == ("b", "g reads a value as an input that is made inside")


def test_views_are_named_to_be_looked_through_and_cover_nothing() -> None:
    text = "p = linear(h, w)\nq = slice(p)\no = conv(q, wc)"
    assert not find(text, "o", kernel("k", "p = linear(h, w)\no = conv(p, wc)\n-> o"))[0]
    (region,), _ = find(text, "o", kernel("k", "p = linear(h, w)\nq = slice(p)\no = conv(q, wc)\n-> o"))
    assert names(region) == ["p", "q", "o"]
    assert not find(text, "o", kernel("k", "q = slice(p)\n-> q"))[0], "a view alone needs no kernel"


def test_a_view_of_an_export_may_be_read_outside() -> None:
    text = "p = linear(h, w)\nq = slice(p)\no = conv(q, wc)\nz = gate(q)"
    hidden = kernel("k", "p = linear(h, w)\nq = slice(p)\no = conv(q, wc)\n-> o")
    regions, (miss,) = find(text, "o z", hidden)
    assert not regions
    assert miss.reason == "value q is read outside by z"
    (region,), _ = find(text, "o z", kernel("k", hidden.pattern.replace("-> o", "-> o, p")))
    assert region.outputs == ("o", "p"), "p is read outside through its view"


def test_target_rows_and_needs_are_told_in_words() -> None:
    def reason(**fields: Any) -> str:
        only = kernel("k", "a = f(x)\n-> a", **fields)
        regions, (miss,) = find("a = f(x)", "a", only, arch="sm_90", rows=16)
        assert not regions
        return miss.reason

    assert reason(arch=("sm_100", "sm_103")) == "needs sm_100 or sm_103, target is sm_90"
    assert reason(rows=(1, 8)) == "rows 16 above 8"
    assert reason(rows=(32, 64)) == "rows 16 below 32"
    assert reason(needs=lambda region: f"needs 16 columns, {region.value('x').shape[1]} found") == (
        "needs 16 columns, 8 found")
    assert find("a = f(x)", "a", kernel("k", "a = f(x)\n-> a", arch=("sm_90",), rows=(16, 16)),
                arch="sm_90", rows=16)[0]


def test_a_kernel_that_stops_half_way_says_where() -> None:
    chain = kernel("k", "a = f(x)\nb = g(a)\nc = h(b)\n-> c")
    _, (miss,) = find("a = e(x)\nb = g(a)\nc = h(b)", "c", chain)
    assert (miss.node, miss.reason) == ("b", "value a is made by e, not by f")
    assert miss.nodes == ("c", "b")
    assert not find("b = e(x)\nc = h(b)", "c", chain)[1], "one node of three is not nearly a match"
