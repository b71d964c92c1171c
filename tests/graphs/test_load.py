"""Weight recipes: one rank's part equals the whole one cut, and reading it touches no more than it needs."""
from __future__ import annotations

import time
import warnings
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from k3plan.compiler.errors import BindError, CheckpointError, ConversionWarning, GraphError
from k3plan.compiler.recipe import Cat, Leaf, Mul, Recipe, Reshape, Shard, Slice, StackLeaf, Zeros, shape_of
from k3plan.graphs.boxes import Box, cover, reshaped, sizes, span
from k3plan.graphs.load import TORCH_DTYPES, StateDictSource, Weight, load_weights
from k3plan.graphs.random_weights import RandomSource, RankRandom

RANKS = 4


class CountingSource(StateDictSource):
    """Counts the elements that are read."""

    elements = 0

    def read(self, name: str, box: Box) -> Tensor:
        self.elements += prod(sizes(box))
        return super().read(name, box)


def whole(recipe: Recipe, tensors: dict[str, Tensor], rank: int) -> Tensor:
    """The recipe by its definition, on whole tensors, in fp32 where it multiplies."""
    match recipe:
        case Leaf(names):
            return tensors[names[0]]
        case StackLeaf(names, count):
            return torch.stack([tensors[names[0].replace("{e}", str(e))] for e in range(count)])
        case Zeros(shape):
            return torch.zeros(shape)
        case Cat(dim, parts):
            return torch.cat([whole(p, tensors, rank) for p in parts], dim)
        case Slice(dim, start, stop, part):
            return whole(part, tensors, rank).narrow(dim, start, stop - start)
        case Reshape(shape, part):
            return whole(part, tensors, rank).reshape(shape)
        case Mul(left, right):
            return whole(left, tensors, rank).float() * whole(right, tensors, rank).float()
        case Shard(dim, parts, part):
            return whole(part, tensors, rank).chunk(parts, dim)[rank]
    raise AssertionError(recipe)


def filled(recipe: Recipe, tensors: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Distinct numbers for every tensor of the recipe."""
    tensors = {} if tensors is None else tensors
    for name, (_, shape) in RandomSource.of([recipe]).tensors.items():
        tensors[name] = torch.arange(prod(shape), dtype=torch.float32).reshape(shape) + 1000 * len(tensors)
    return tensors


@st.composite
def factorings(draw: st.DrawFn, total: int) -> tuple[int, ...]:
    """A shape of ``total`` elements."""
    shape: list[int] = []
    while total > 1 and len(shape) < 4:
        n = draw(st.sampled_from([d for d in range(1, total + 1) if total % d == 0]))
        shape.append(n)
        total //= n
    return (*shape, total)


@st.composite
def recipes(draw: st.DrawFn, shape: tuple[int, ...] | None = None, depth: int = 4) -> Recipe:
    """A recipe of ``shape`` (any if None), made top down; rank-independent ones included."""
    if shape is None:
        shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3).map(tuple))
    name = f"t{draw(st.integers(0, 3))}-{shape}"  # few numbers, so that a tensor may be read twice
    kinds = ["leaf", "stack", "zeros"] + ["cat", "slice", "reshape", "shard", "mul"] * (depth > 0)
    kind, dim = draw(st.sampled_from(kinds)), draw(st.integers(0, len(shape) - 1))

    def resized(n: int) -> tuple[int, ...]:
        return (*shape[:dim], n, *shape[dim + 1 :])

    match kind:
        case "stack" if len(shape) > 1:
            return StackLeaf((name + ".{e}",), shape[0], shape[1:], "fp32")
        case "zeros":
            return Zeros(shape)
        case "cat" if shape[dim] > 1:
            at = draw(st.integers(1, shape[dim] - 1))
            return Cat(dim, tuple(draw(recipes(resized(n), depth - 1)) for n in (at, shape[dim] - at)))
        case "slice":
            before, after = draw(st.integers(0, 3)), draw(st.integers(0, 3))
            part = draw(recipes(resized(before + shape[dim] + after), depth - 1))
            return Slice(dim, before, before + shape[dim], part)
        case "reshape":
            return Reshape(shape, draw(recipes(draw(factorings(prod(shape))), depth - 1)))
        case "shard":
            return Shard(dim, RANKS, draw(recipes(resized(shape[dim] * RANKS), depth - 1)))
        case "mul":
            return Mul(draw(recipes(shape, depth - 1)), draw(recipes(shape, depth - 1)))
    return Leaf((name,), shape, "fp32")


@given(recipes(), st.integers(0, RANKS - 1))
def test_any_recipe_equals_its_definition(recipe: Recipe, rank: int) -> None:
    tensors = filled(recipe)
    got = load_weights(StateDictSource(tensors), {"w": Weight(recipe, "fp32")}, rank)["w"]
    assert tuple(got.shape) == shape_of(recipe)
    assert got.is_contiguous()
    assert torch.equal(got, whole(recipe, tensors, rank))


@given(st.integers(1, 96).flatmap(lambda n: st.tuples(factorings(n), factorings(n))), st.data())
def test_a_reshaped_box_covers_what_is_wanted(
    shapes: tuple[tuple[int, ...], ...], data: st.DataObject
) -> None:
    new, old = shapes
    starts = [data.draw(st.integers(0, n - 1)) for n in new]
    box = tuple((a, data.draw(st.integers(a + 1, n))) for a, n in zip(starts, new, strict=True))
    numbers = torch.arange(prod(new))
    moved = reshaped(box, new, old)
    flat = numbers.view(old)[tuple(slice(*r) for r in moved.inner)].reshape(moved.run_sizes)
    for dim, (start, length) in enumerate(moved.keeps):
        flat = flat.narrow(dim, start, length)
    got = flat.reshape(moved.kept_sizes)[tuple(slice(*r) for r in moved.wanted)]
    want = numbers.view(new)[tuple(slice(*r) for r in box)]
    assert torch.equal(got, want)
    assert moved.exact == (flat.numel() == want.numel() == prod(sizes(moved.inner)))


def test_cover_is_the_smallest_contiguous_box() -> None:
    assert cover(7, 8, (4, 3)) == ((2, 3), (1, 2))
    assert cover(3, 9, (4, 3)) == ((1, 3), (0, 3))
    assert cover(4, 7, (4, 3)) == ((1, 3), (0, 3))
    assert span(((1, 3), (1, 2)), (4, 3)) == (4, 8)


HEADS, WIDTH, EXPERTS = 8, 6, 12
UP = StackLeaf(("e{e}.w1",), EXPERTS, (16, 4), "u8")
GATE = StackLeaf(("e{e}.w3",), EXPERTS, (16, 4), "u8")
LEAF = Leaf(("w",), (HEADS * WIDTH, 5), "fp32")
EXACT: dict[str, Recipe] = {
    "rows": Shard(0, RANKS, LEAF),
    "columns": Shard(1, RANKS, Leaf(("w",), (6, 8), "fp32")),
    "merged": Cat(0, (Shard(0, RANKS, LEAF), Slice(0, 3, 9, Leaf(("v",), (10, 5), "fp32")))),
    "padded heads": Shard(0, RANKS, Slice(0, 0, HEADS, Leaf(("a",), (128,), "fp32"))),
    "conv": Reshape((12, 4), Shard(0, RANKS, Leaf(("c",), (48, 1, 4), "fp32"))),
    "split heads": Shard(0, RANKS, Reshape((HEADS, WIDTH, 5), LEAF)),
    "merged stack": Shard(0, RANKS, Reshape((EXPERTS * 16, 4), UP)),
    "experts by rows": Cat(1, (Shard(1, RANKS, UP), Shard(1, RANKS, GATE))),
    "experts by columns": Shard(2, RANKS, UP),
    "whole experts": Shard(0, RANKS, Cat(1, (UP, GATE))),
}


@pytest.mark.parametrize("name", EXACT)
def test_each_rank_reads_its_bytes_and_no_more(name: str) -> None:
    recipe = EXACT[name]
    tensors = filled(recipe)
    dtype = "fp32"
    if any(info[0] == "u8" for info in RandomSource.of([recipe]).tensors.values()):
        tensors = {n: (t % 251).to(torch.uint8) for n, t in tensors.items()}
        dtype = "u8"
    for rank in range(RANKS):
        source = CountingSource(tensors)
        got = load_weights(source, {"w": Weight(recipe, dtype)}, rank)["w"]
        assert torch.equal(got, whole(recipe, tensors, rank))
        assert source.elements == got.numel()


def test_a_strided_cut_reads_its_cover_only() -> None:
    # rows 0..1 of each head (the K half of kv_b) of two heads: at most the two heads are read
    recipe = Shard(0, RANKS, Slice(1, 0, 2, Reshape((HEADS, WIDTH, 5), LEAF)))
    tensors = filled(recipe)
    source = CountingSource(tensors)
    got = load_weights(source, {"w": Weight(recipe, "fp32")}, 3)["w"]
    assert torch.equal(got, tensors["w"].view(HEADS, WIDTH, 5)[6:, :2])
    assert source.elements <= 2 * WIDTH * 5


def test_rank_pieces_make_the_whole() -> None:
    for dim in (0, 1):
        recipe = Cat(1 - dim, (Leaf(("a",), (8, 8), "fp32"), Leaf(("b",), (8, 8), "fp32")))
        tensors = filled(recipe)
        weights = {"w": Weight(Shard(dim, RANKS, recipe), "fp32")}
        pieces = [load_weights(StateDictSource(tensors), weights, rank)["w"] for rank in range(RANKS)]
        assert torch.equal(torch.cat(pieces, dim), whole(recipe, tensors, 0))


def test_products_of_bf16_are_made_in_fp32() -> None:
    tensors = {n: torch.full(s, 1.0078125, dtype=torch.bfloat16) for n, s in (("a", (4,)), ("b", (1, 4)))}
    recipe = Mul(Leaf(("a",), (4,), "bf16"), Reshape((4,), Leaf(("b",), (1, 4), "bf16")))
    got = load_weights(StateDictSource(tensors), {"w": Weight(recipe, "fp32"), "h": Weight(recipe, "bf16")})
    assert got["w"].tolist() == [1.0078125**2] * 4
    assert torch.equal(got["h"], got["w"].bfloat16())
    assert list(got) == ["w", "h"]


def test_the_first_name_that_exists_is_read() -> None:
    leaf = Leaf(("new", "old", "older"), (2,), "fp32")
    tensors = {"older": torch.zeros(2), "old": torch.ones(2)}
    got = load_weights(StateDictSource(tensors), {"w": Weight(leaf, "fp32")})
    assert got["w"].tolist() == [1, 1]


C4 = Leaf(("c",), (4,), "fp32")
REFUSALS: dict[str, tuple[Recipe, str, int, type[Exception], str]] = {
    "missing": (Leaf(("a", "b"), (2,), "fp32"), "fp32", 0, CheckpointError, "has no tensor a or b"),
    "shape": (Leaf(("c",), (3,), "fp32"), "fp32", 0, CheckpointError,
              r"tensor c: the plan reads fp32 \[3\], found fp32 \[4\]"),
    "dtype": (Leaf(("c",), (4,), "u8"), "u8", 0, CheckpointError, r"reads u8 \[4\], found fp32 \[4\]"),
    "bytes": (C4, "u8", 0, GraphError, "tensor c: fp32 bytes cannot become torch.uint8"),
    "rank": (Shard(0, 4, C4), "fp32", 4, BindError, "rank 4 has no part of a weight that is split into 4"),
    "product": (Mul(C4, Leaf(("c",), (1, 4), "fp32")), "fp32", 0, GraphError, r"shapes \(4,\) and \(1, 4\)"),
}  # fmt: skip


HALVES = torch.tensor([1.0, -0.5, 3.0])
THIRDS = torch.tensor([1 / 3, 1.0, 2.0])


@pytest.mark.parametrize(("stored", "wanted", "read"), [
    ("bf16", "fp32", "fp32"), ("fp32", "bf16", "fp32"), ("fp16", "bf16", "fp32"), ("fp32", "fp32", "bf16"),
    ("fp64", "fp32", "fp32"),
])
def test_an_exact_conversion_is_silent(stored: str, wanted: str, read: str) -> None:
    tensor = HALVES.to({"fp16": torch.float16, "fp64": torch.float64}.get(stored) or TORCH_DTYPES[stored])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = load_weights(StateDictSource({"c": tensor}), {"w": Weight(Leaf(("c",), (3,), wanted), read)})["w"]
    assert got.dtype == TORCH_DTYPES[read]
    assert got.tolist() == HALVES.tolist()


def test_a_conversion_goes_straight_to_the_dtype_that_is_read() -> None:
    got = load_weights(StateDictSource({"c": THIRDS}), {"w": Weight(Leaf(("c",), (3,), "bf16"), "fp32")})["w"]
    assert torch.equal(got, THIRDS), "rounded to the recipe's bf16 on the way"


def test_lost_digits_are_told_with_names_and_count() -> None:
    weights = {f"w{i}": Weight(Leaf((f"c{i}",), (3,), "bf16"), "bf16") for i in range(6)}
    tensors = {f"c{i}": THIRDS for i in range(6)} | {"c3": HALVES}
    with pytest.warns(ConversionWarning) as told:
        got = load_weights(StateDictSource(tensors), weights)
    assert [str(one.message) for one in told] == [
        "5 tensors stored as fp32 lost digits when read as bf16: c0, c1, c2, c4 and 1 more"]
    assert torch.equal(got["w0"], THIRDS.bfloat16())


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    recipe, dtype, rank, error, text = REFUSALS[name]
    with pytest.raises(error, match=text):
        load_weights(StateDictSource({"c": torch.zeros(4)}), {"w": Weight(recipe, dtype)}, rank)


def test_random_tensors_depend_on_seed_and_name_and_agree_over_ranks() -> None:
    shape = (96, 64)
    tensors = {"a.weight": ("bf16", shape), "b.weight": ("bf16", shape)}
    one, two, again = (RandomSource(tensors, seed) for seed in (1, 2, 1))
    assert torch.equal(one.whole("a.weight"), again.whole("a.weight"))
    assert not torch.equal(one.whole("a.weight"), two.whole("a.weight"))
    assert not torch.equal(one.whole("a.weight"), one.whole("b.weight"))
    recipe = Shard(0, RANKS, Leaf(("a.weight",), shape, "bf16"))
    pieces = [load_weights(RandomSource.of([recipe], 1), {"w": Weight(recipe, "bf16")}, r)["w"] for r in range(RANKS)]
    assert torch.equal(torch.cat(pieces), one.whole("a.weight"))


@pytest.mark.gpu
def test_weights_are_made_on_the_device(device: str) -> None:
    tensors = {"a.weight": ("bf16", (64, 32)), "e0_scale": ("u8", (8, 4)), "e1_scale": ("u8", (8, 4))}
    rows, stack = Leaf(("a.weight",), (64, 32), "bf16"), StackLeaf(("e{e}_scale",), 2, (8, 4), "u8")
    weights = {"a": Weight(Shard(1, RANKS, rows), "fp32"), "e": Weight(Shard(1, RANKS, stack), "u8")}
    for made_on in (device, "cpu"):
        source = RandomSource(tensors, device=made_on)
        got = load_weights(source, weights, 1, device=device)
        held = {name: source.whole(name).cpu() for name in tensors}
        for name, weight in weights.items():
            assert got[name].device.type == device
            assert torch.equal(got[name].cpu(), whole(weight.recipe, held, 1).to(got[name].dtype))


def test_random_mxfp4_has_the_scale_of_a_matrix() -> None:
    from k3plan.compiler.ops.mxfp4 import unpack_mxfp4

    for columns in (128, 3584):
        sizes_by_name = {"w1.weight_packed": columns // 2, "w1.weight_scale": columns // 32}
        source = RandomSource({name: ("u8", (256, n)) for name, n in sizes_by_name.items()})
        weight = unpack_mxfp4(*(source.whole(name) for name in sizes_by_name))
        assert 0.7 < weight.std().item() * columns**0.5 < 1.6
        assert abs(weight.mean().item()) * columns**0.5 < 0.05


def test_a_layer_of_896_experts_is_planned_in_little_time() -> None:
    stack = StackLeaf(("e{e}.w1",), 896, (8, 4), "u8")
    tensors = {f"e{e}.w1": torch.full((8, 4), e % 256, dtype=torch.uint8) for e in range(896)}
    weights = {f"w{i}": Weight(Shard(1, 4, stack), "u8") for i in range(6)}
    start = time.perf_counter()
    got = load_weights(StateDictSource(tensors), weights, 1)
    assert time.perf_counter() - start < 5, "5,376 reads take about 0.1 s"
    assert torch.equal(got["w5"][:, 0, 0], torch.arange(896).to(torch.uint8))


def test_random_ranks_share_what_every_rank_holds() -> None:
    """A norm is the same on all ranks, so that they choose the same experts; a part of a tensor is each rank's own."""
    norm, table = Leaf(("norm.weight",), (16,), "bf16"), Leaf(("router.weight",), (8, 16), "bf16")
    recipes = {"norm": norm, "part": Shard(0, 2, table), "cat": Cat(0, (Shard(0, 2, table), table))}
    weights = {name: Weight(recipe, "bf16") for name, recipe in recipes.items()}
    zero, one = (RankRandom(3).load(weights, rank) for rank in range(2))
    assert torch.equal(zero["norm"], one["norm"])
    assert not torch.equal(zero["part"], one["part"])
    assert not torch.equal(zero["cat"], one["cat"])
