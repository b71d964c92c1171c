"""The sharding pass on the full Kimi K3: bytes a rank, collectives, refusals; the verifier."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from k3plan.compiler.build import build_graph
from k3plan.compiler.compile import lower
from k3plan.compiler.errors import GraphError, ShardError
from k3plan.compiler.ir import PARTIAL, Graph, Node
from k3plan.compiler.ops import OPS
from k3plan.compiler.ops.comm import all_gather, all_reduce, reduce_scatter
from k3plan.compiler.ops.head import embed
from k3plan.compiler.passes.merge import merge_projections
from k3plan.compiler.passes.shard import shard_graph
from k3plan.compiler.passes.verify import verify
from k3plan.compiler.reading.source import load_spec
from k3plan.compiler.spec import Spec

PLAIN = {"moe_front": "replicated", "moe_tail": "all_reduce", "mla_front": "replicated"}
SPLIT = {"moe_front": "sharded", "moe_tail": "stripe", "mla_front": "sharded"}


@pytest.fixture(scope="module")
def k3(tmp_path_factory: pytest.TempPathFactory) -> Spec:
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    path.write_text("version: 1\nmodel: {preset: kimi-k3}\n")
    return load_spec(path)


def split(spec: Spec, tp: int, experts: str = "tp", model: Mapping[str, Any] | None = None) -> Spec:
    return replace(spec, parallel=replace(spec.parallel, tp=tp, experts=experts),
                   model=replace(spec.model, **(model or {})))


# bytes


def resident_bytes(tp: int, tail: str, front: str = "replicated", mla_front: str = "replicated") -> int:
    """Weight bytes of a rank, written down from the published sizes and from what is split where."""
    d, vocab, width, heads, latent, inner, shared = 7168, 163_840, 128, 96, 3584, 3072, 6144
    p = heads * width
    kda, mla, moe, layers = 69, 24, 92, 93
    up, down = (tp if tail == "stripe" else 1), (tp if front == "sharded" else 1)
    low = tp if mla_front == "sharded" else 1
    # bf16 elements
    kda_bf16 = (5 * p * d + p * width + heads * d) // tp + width * d  # q k v g o, f_b, b; f_a whole
    mla_bf16 = (heads * 192 * 1536 + heads * 256 * 512 + 2 * p * d) // tp
    mla_bf16 += (1536 + 576) * d // low + 1536 + 512
    # merged projections are padded to 16 rows
    kda_bf16 += -((4 * p + heads) // tp + width) % 16 * d
    mla_bf16 += -((1536 + 576) // low + p // tp) % 16 * d
    moe_bf16 = 896 * d // down + latent * d // down + latent * d // up + latent + 3 * shared * d // tp
    dense_bf16 = 3 * 33_792 * d // tp
    other = 2 * layers * d + d + 2 * vocab * d // tp  # norms, last norm, embedding and head
    bf16 = kda * kda_bf16 + mla * mla_bf16 + moe * moe_bf16 + dense_bf16 + other
    # fp32 elements: convolutions, dt_bias, A_log, o_norm; router bias; AttnRes scores of all sites but one
    fp32 = kda * ((3 * 4 * p + p + heads) // tp + width) + moe * 896 + (2 * layers + 1 - 1) * d
    # MXFP4: half a byte an element and a byte for each 32
    experts = moe * 896 * 3 * inner * latent * 17 // 32 // tp
    return 2 * bf16 + 4 * fp32 + experts


def weight_bytes(graph: Graph) -> int:
    return sum(value.nbytes for value in graph.values.values() if value.role == "weight")


@pytest.mark.parametrize("experts", ["tp", "ep"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32])
def test_bytes_of_a_rank(k3: Spec, tp: int, experts: str) -> None:
    """Experts split by columns or by number weigh the same."""
    graph, _ = lower(split(k3, tp, experts), PLAIN)
    assert weight_bytes(graph) == resident_bytes(tp, "all_reduce")


@pytest.mark.parametrize(("front", "tail", "mla_front"), [
    ("replicated", "stripe", "replicated"), ("sharded", "all_reduce", "replicated"),
    ("replicated", "all_reduce", "sharded"), ("sharded", "stripe", "sharded"),
])
def test_bytes_of_a_rank_by_algebra(k3: Spec, front: str, tail: str, mla_front: str) -> None:
    algebra = {"moe_front": front, "moe_tail": tail, "mla_front": mla_front}
    graph, _ = lower(split(k3, 16), algebra)
    assert weight_bytes(graph) == resident_bytes(16, tail, front, mla_front)


def test_bytes_are_the_published_ones() -> None:
    assert round(resident_bytes(16, "all_reduce") / 1e9, 2) == 108.29  # 108.28 without the padding
    assert round(resident_bytes(8, "all_reduce") / 1e9, 1) == 205.1
    # on one rank: every language-model tensor of the checkpoint, less the first site's norm and projection
    # and the zeros behind the last head; the bf16 pair of each other AttnRes site is one fp32 vector
    checkpoint = 1_559_965_606_912
    assert resident_bytes(1, "all_reduce") == checkpoint - 2 * 2 * 7168 - 69 * 4 * 32


@pytest.mark.parametrize("tp", [2, 16])
def test_every_split_weight_is_a_part_of_the_whole(k3: Spec, tp: int) -> None:
    spec = split(k3, tp)
    whole = build_graph(spec)
    graph, _ = shard_graph(whole, spec, SPLIT)
    for name, value in graph.values.items():
        if value.role not in ("weight", "state", "cache") or name in graph.producer:
            continue
        before = whole.values[name]
        factors = [a // b for a, b in zip(before.shape, value.shape, strict=True)]
        where = value.placement
        assert factors == [tp if where.kind == "shard" and i == where.dim else 1 for i in range(len(factors))]
        assert [a % b for a, b in zip(before.shape, value.shape, strict=True)] == [0] * len(factors)


# refusals

REFUSALS: dict[str, tuple[dict[str, Any], int, str, dict[str, str], str]] = {
    "kda_heads": ({"kda_heads": 24}, 32, "tp", PLAIN, "KDA heads: 24 do not divide over tp=32"),
    "heads": ({"heads": 24}, 32, "tp", PLAIN, "attention heads: 24 do not divide over tp=32"),
    "vocabulary": ({"vocab": 163_842}, 4, "tp", PLAIN, "vocabulary: 163842 do not divide over tp=4"),
    "dense": ({"dense_intermediate": 33_796}, 8, "tp", PLAIN,
              "dense intermediate: 33796 do not divide over tp=8"),
    "shared": ({"shared_experts": 1, "moe_intermediate": 3088}, 32, "ep", PLAIN,
               "shared expert intermediate: 3088 do not divide over tp=32"),
    "experts": ({"experts": 900}, 16, "ep", PLAIN, "experts: 900 do not divide over tp=16"),
    "expert_groups": ({"moe_intermediate": 3072 // 2}, 32, "tp", PLAIN,
                      "expert intermediate: 48 groups of 32 do not divide over tp=32"),
    "router_rows": ({"experts": 904}, 16, "tp", SPLIT, "router rows: 904 do not divide over tp=16"),
    "latent_rows": ({"latent": 3600}, 32, "ep", SPLIT, "latent down rows: 3600 do not divide over tp=32"),
    "hidden_rows": ({"hidden": 7176}, 16, "ep", SPLIT, "latent up rows: 7176 do not divide over tp=16"),
    "mla_rows": ({"kv_lora_rank": 520}, 16, "tp", SPLIT, "MLA front rows: 2120 do not divide over tp=16"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_dimension_that_does_not_divide_is_named(k3: Spec, name: str) -> None:
    model, tp, experts, algebra, text = REFUSALS[name]
    with pytest.raises(ShardError) as error:
        lower(split(k3, tp, experts, model), algebra)
    assert text in str(error.value)
    assert "fix: choose a tp that divides them" in str(error.value)


def test_dimensions_that_divide_are_not_refused(k3: Spec) -> None:
    """The same sizes pass where they stay whole or where another rule splits them."""
    small = replace(k3, layers=(0, 1, 3))
    for model, tp, experts, algebra in (
        ({"shared_experts": 2, "moe_intermediate": 3088}, 32, "ep", PLAIN),
        ({"experts": 904}, 16, "tp", PLAIN),
        ({"kv_lora_rank": 520}, 16, "tp", PLAIN), ({"latent": 3600}, 32, "ep", PLAIN),
        ({"hidden": 7176}, 16, "ep", PLAIN),
    ):
        lower(split(small, tp, experts, model), algebra)


def test_all_refusals_come_at_once(k3: Spec) -> None:
    sizes = {"kda_heads": 24, "heads": 24, "vocab": 100, "dense_intermediate": 100}
    with pytest.raises(ShardError) as error:
        lower(split(k3, 32, model=sizes), PLAIN)
    text = str(error.value)
    for name in ("KDA heads", "attention heads", "vocabulary", "dense intermediate"):
        assert text.count(f"{name}: ") == 1, text


# collectives


def collectives(graph: Graph) -> dict[tuple[int | None, str], Counter[str]]:
    """By layer and stage: how many of each collective."""
    found: dict[tuple[int | None, str], Counter[str]] = {}
    for node in graph.nodes:
        if OPS[node.op].kind == "comm":
            found.setdefault((node.layer, node.stage), Counter())[node.op] += 1
    return found


ALGEBRA = list(product(("replicated", "sharded"), ("all_reduce", "stripe"), ("replicated", "sharded")))


@pytest.mark.parametrize("experts", ["tp", "ep"])
@pytest.mark.parametrize(("front", "tail", "mla_front"), ALGEBRA, ids=map("-".join, ALGEBRA))
def test_collectives_of_each_layer_kind(k3: Spec, front: str, tail: str, mla_front: str, experts: str
                                        ) -> None:
    graph, _ = lower(split(k3, 16, experts), {"moe_front": front, "moe_tail": tail, "mla_front": mla_front})
    moe = Counter(all_reduce=1)  # routed experts, in latent space
    # shared experts with the up-projection: summed on every rank, or in stripes that are gathered
    moe += Counter(all_reduce=1) if tail == "all_reduce" else Counter(reduce_scatter=1, all_gather=1)
    if front == "sharded":
        moe += Counter(all_gather=2)  # router logits; latent rows
    want: dict[tuple[int | None, str], Counter[str]] = {(None, "embed"): Counter(all_reduce=1)}
    for layer in range(93):
        attention = Counter(all_reduce=1)
        if k3.model.attention[layer] == "mla" and mla_front == "sharded":
            attention += Counter(all_gather=1)
        want[layer, "attn"] = attention
        want[layer, "mlp"] = moe if layer else Counter(all_reduce=1)
    want[None, "head"] = Counter(all_reduce=1)  # the maximum of one key a row
    assert collectives(graph) == want


def test_logits_are_gathered_when_they_are_asked_for(k3: Spec) -> None:
    spec = replace(k3, layers=(0,), step=replace(k3.step, outputs=("logits", "tokens", "hidden")))
    graph, _ = lower(split(spec, 16), PLAIN)
    assert collectives(graph)[None, "head"] == Counter(all_reduce=1, all_gather=1)
    assert [graph.values[name].shape for name in graph.outputs] == [(1, 163_840), (1,), (1, 7168)]


@pytest.mark.parametrize("algebra", [PLAIN, SPLIT], ids=["plain", "split"])
def test_collectives_are_told_what_they_join(k3: Spec, algebra: dict[str, str]) -> None:
    graph, _ = lower(split(k3, 8), algebra)
    for node in graph.nodes:
        if OPS[node.op].kind != "comm":
            continue
        have, want = (graph.values[n].placement for n in (node.inputs[0], node.outputs[0]))
        assert node.attrs["ranks"] == 8
        sums = {"partial", "disjoint"}
        kinds = {"all_reduce": (sums, "replicated"), "all_gather": ({"shard"}, "replicated"),
                 "reduce_scatter": (sums, "shard")}
        assert have.kind in kinds[node.op][0]
        assert want.kind == kinds[node.op][1]
        if node.op == "all_reduce":
            assert node.attrs["reduce"] == ("max" if node.stage == "head" else "sum")


def test_router_logits_stay_fp32_and_apart(k3: Spec) -> None:
    graph, _ = lower(split(k3, 16), PLAIN)
    routers = [node for node in graph.nodes if node.op == "router_topk"]
    assert len(routers) == 92
    for node in routers:
        made = graph.producer[node.inputs[0]]
        assert made.op == "linear"
        assert made.outputs == (node.inputs[0],), "the router's product is not merged with another"
        assert graph.values[node.inputs[0]].dtype == "fp32"


def test_the_ranks_parts_make_the_whole() -> None:
    parts = list(torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0)))
    total = torch.stack(parts).sum(0)
    assert all(torch.equal(x, total) for x in all_reduce(parts, ranks=4))
    scattered = reduce_scatter(parts, ranks=4, dim=1)
    assert [tuple(x.shape) for x in scattered] == [(3, 2)] * 4
    assert all(torch.equal(x, total) for x in all_gather(scattered, ranks=4, dim=1))


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_embedding_over_shards_of_the_vocabulary(ranks: int) -> None:
    table = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([0, 63, 31, 32, 7, 8, -1], dtype=torch.int32)
    parts = [embed(tokens, part, torch.tensor([r], dtype=torch.int32), out_dtype="fp32")
             for r, part in enumerate(table.chunk(ranks))]
    got = all_reduce(parts, ranks=ranks)[0]
    assert torch.equal(got[:-1], table[tokens[:-1].long()])
    assert torch.count_nonzero(got[-1]) == 0
    rows = torch.stack(parts).abs().amax(2) > 0
    assert (rows.sum(0) == (tokens >= 0)).all(), "a row comes from one rank alone"


# the verifier


@pytest.fixture(scope="module")
def sound(k3: Spec) -> Graph:
    """Layers 0 (KDA, dense) and 3 (MLA, experts) on 16 ranks."""
    spec = replace(k3, layers=(0, 3))
    graph, _ = shard_graph(build_graph(spec), split(spec, 16), SPLIT)
    return verify(merge_projections(graph)[0], "merge")


def rewired(graph: Graph, node_name: str, change: Callable[[Node], Node]) -> Graph:
    nodes = tuple(change(node) if node.name == node_name else node for node in graph.nodes)
    assert nodes != graph.nodes
    return replace(graph, nodes=nodes)


def revalued(graph: Graph, name: str, **fields: Any) -> Graph:
    return replace(graph, values={**graph.values, name: replace(graph.values[name], **fields)})


def swapped(graph: Graph, first: str, second: str) -> Graph:
    names = [node.name for node in graph.nodes]
    a, b = names.index(first), names.index(second)
    nodes = list(graph.nodes)
    nodes[a], nodes[b] = nodes[b], nodes[a]
    return replace(graph, nodes=tuple(nodes))


def input_as(graph: Graph, node_name: str, old: str, new: str) -> Graph:
    assert old in next(node for node in graph.nodes if node.name == node_name).inputs
    return rewired(graph, node_name, lambda node: replace(
        node, inputs=tuple(new if name == old else name for name in node.inputs)))


BROKEN: dict[str, tuple[Callable[[Graph], Graph], str]] = {
    "read_before_made": (
        lambda g: swapped(g, "L0.attn.o_gated", "L0.attn.o"),
        "L0.attn.o_gated: reads L0.attn.o before it is made"),
    "read_of_what_nobody_makes": (
        lambda g: replace(g, nodes=tuple(n for n in g.nodes if n.name != "L3.mlp.act")),
        "reads L3.mlp.act before it is made"),
    "read_after_an_update_in_place": (
        lambda g: input_as(g, "L3.attn.latent_out", "L3.attn.cache_next", "L3.attn.cache"),
        "L3.attn.latent_out: reads L3.attn.cache, which L3.attn.cache_next has overwritten"),
    "wrong_shape": (
        lambda g: revalued(g, "L0.attn.log_decay", shape=(1, 7)),
        "L0.attn.log_decay is fp32(1, 7), the op makes fp32(1, 768)"),
    "shapes_that_do_not_fit": (
        lambda g: revalued(g, "L0.attn.log_decay", shape=(1, 7)), "L0.attn.o: delta rule: rows"),
    "value_unknown": (
        lambda g: input_as(g, "L0.attn.o_proj", "L0.attn.o_gated", "L0.attn.y"),
        "L0.attn.o_proj: an input or output is not a value of the graph"),
    "wrong_dtype": (
        lambda g: revalued(g, "L3.mlp.router", dtype="bf16"), "L3.mlp.router is bf16"),
    "partial_output": (
        lambda g: revalued(g, g.outputs[0], placement=PARTIAL), "is partial(sum), not whole on each rank"),
    "output_without_producer": (
        lambda g: replace(g, outputs=("tokens",)), "output tokens has no producer"),
    "unknown_op": (
        lambda g: rewired(g, "L0.attn.o_gated", lambda n: replace(n, op="gated_norm")),
        "L0.attn.o_gated: unknown op gated_norm"),
    "name_twice": (
        lambda g: rewired(g, "L0.attn.o_gated", lambda n: replace(n, name="L0.attn.o_proj")),
        "L0.attn.o_proj: name used twice"),
    "weight_of_another_shape": (
        lambda g: revalued(g, "L3.attn.w_uk", recipe=g.values["L0.attn.o_norm"].recipe),
        "weight L3.attn.w_uk: recipe does not make shape"),
    "weight_without_recipe": (
        lambda g: revalued(g, "L0.attn.o_norm", recipe=None), "weight L0.attn.o_norm: recipe does not make"),
    "unknown_role": (lambda g: revalued(g, "L0.attn.o", role="temporary"), "bad name, role temporary"),
    "empty_value": (lambda g: revalued(g, "positions", shape=(0,)), "value positions: shape (0,)"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_the_verifier_names_what_is_broken(sound: Graph, kind: str) -> None:
    change, text = BROKEN[kind]
    with pytest.raises(GraphError) as error:
        verify(change(sound), "a pass")
    assert text in str(error.value)
    assert str(error.value).startswith("after a pass:")
