"""The MoE kernels of the CuTe DSL: decode, sizes and layouts on the CPU; on a GPU against the ops' meaning.

The layouts are checked by doing with numpy what the hardware does: bulk copies into a slot, ``ldmatrix``, decode, the
matrix instruction's fragments. The sums must be those of the reference's decoder.
"""
from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import kernel_check
import numpy as np
import pytest
import real_shapes
import torch

from k3plan.compiler.build import build_graph
from k3plan.compiler.covering.match import find_regions
from k3plan.compiler.ir import Graph
from k3plan.compiler.kernel import KernelDef, Menu
from k3plan.compiler.ops.mxfp4 import E2M1, unpack_mxfp4
from k3plan.compiler.passes.merge import merge_projections
from k3plan.compiler.passes.shard import algebra_of, shard_graph
from k3plan.compiler.spec import Choices, Parallel
from k3plan.graphs.bench import random_inputs
from k3plan.graphs.launch import bind_region
from k3plan.ops_cute import moe_front_menu
from k3plan.ops_cute.experts import moe_experts_menu
from k3plan.ops_cute.experts.gathered_plan import Gathered
from k3plan.ops_cute.experts.plan import PARTIALS, TILE, TOKENS, WARPS, Static
from k3plan.ops_cute.moe_front_plan import Static as FrontStatic
from k3plan.ops_cute.shared_memory import FRAGMENT, LIMIT

EXPERTS = 64  # of 896: enough that rows share some and not all


def plan(tokens: int = 8, width: int = 3584, inter: int = 192, local: int = 896, blocks: int = 132,
         slots: int = 4) -> Static:
    return Static(tokens=tokens, top_k=16, width=width, inter=inter, out_width=width, local=local, experts=896,
                  blocks=blocks, slots=slots, bulk=True, stride_x=width, stride_out=width, beta=4.0, linear_beta=25.0,
                  rounds=False, dependent=False)


PLANS = [plan(width=width, inter=inter, local=local, blocks=blocks) for (width, inter, local), blocks in product(
    ((3584, 192, 896), (3584, 384, 896), (3584, 3072, 56), (128, 64, 8), (1088, 32, 5)), (132, 152, 148))]
GATHERED = [Gathered(**{**vars(p), "tokens": tokens, "run": run, "slots": 2})
            for p, (tokens, run) in product(PLANS, ((9, 2), (33, 4), (64, 4)))]

# the shared expert's down-projection of 16 and 8 ranks, and one with fewer instructions than warps
BESIDE = [replace(plan(blocks=blocks), side_rows=rows, side_width=width)
          for (rows, width), blocks in product(((7168, 384), (7168, 768), (336, 160)), (132, 148))]


def plan_name(p: Static) -> str:
    return f"{p.width}x{p.inter}x{p.local}-{p.blocks}"


# decode


def permute(a: np.ndarray, b: int, selector: int) -> np.ndarray:
    """``prmt`` on numpy words; a selected byte with bit 3 of its selector set would be its sign, and none has it."""
    found = np.zeros_like(a, dtype=np.uint32)
    for i in range(4):
        which = selector >> (4 * i) & 15
        source = a if which < 4 else np.full_like(a, b)
        found |= ((source.view(np.uint32) >> np.uint32(8 * (which & 3))) & np.uint32(255)) << np.uint32(8 * i)
    return found


def decoded(words: np.ndarray) -> np.ndarray:
    """The 8 weights of i32 words, in the order of the columns, by the kernel's own function."""
    from k3plan.ops_cute.experts.mxfp4 import PAIRS, decode

    found = np.zeros((*words.shape, 8))
    for pair, (first, second) in zip(decode(words, permute, 0), PAIRS, strict=True):
        halves = pair.astype(np.uint32).view(np.float16).reshape(*words.shape, 2)
        found[..., first], found[..., second] = halves[..., 0], halves[..., 1]
    return found * 2.0**14


def test_every_nibble_in_every_place_is_decoded_exactly() -> None:
    values = np.array((*E2M1, *(-v for v in E2M1)))
    places = np.arange(8, dtype=np.uint32)
    codes = np.arange(16, dtype=np.uint32)
    for rest in (0, 0x12345678, 0xFFFFFFFF, 0x89ABCDEF):
        mask = ~(np.uint32(15) << (4 * places))
        words = (np.uint32(rest) & mask)[None, :] | (codes[:, None] << (4 * places))
        found = decoded(words.astype(np.uint32).view(np.int32))
        rest_codes = (np.uint32(rest) >> (4 * places)) & 15
        for place in range(8):
            wanted = np.broadcast_to(values[rest_codes], (16, 8)).copy()
            wanted[:, place] = values
            assert np.array_equal(found[:, place], wanted)


# sizes


@pytest.mark.parametrize("p", PLANS, ids=plan_name)
def test_everything_is_done_by_one_block(p: Static) -> None:
    columns = [c for turn in range(p.column_blocks)
               for c in range(turn * p.columns, min(p.out_width, (turn + 1) * p.columns))]
    assert columns == list(range(p.out_width))
    assert p.column_blocks <= p.blocks
    groups = [w * p.own_groups + i for w in range(WARPS) for i in range(p.own_groups) if w * p.own_groups < p.groups]
    assert sorted(groups) == list(range(p.groups))
    assert p.chunk * p.chunks * 32 == p.inter == p.tiles * TILE


@pytest.mark.parametrize("p", PLANS, ids=plan_name)
def test_copies_lie_on_16_bytes_and_inside_their_slot(p: Static) -> None:
    where = p.place()
    assert all(at % 16 == 0 for at in where.values())
    assert p.width // 2 % 16 == TILE * p.groups % 16 == p.inter // 2 % 16 == 0
    assert p.down_bytes % 16 == p.slot_bytes % 128 == 0
    for turn in range(p.column_blocks):
        first = turn * p.columns
        rows = min(p.columns, p.out_width - first)
        begin = first * p.inter_groups // 16 * 16
        end = -(-(first + rows) * p.inter_groups // 16) * 16
        assert end - begin <= p.down_scales
        assert end <= p.out_width * p.inter_groups
    assert p.together * p.down_bytes <= p.slot_bytes
    assert p.up_bytes <= p.slot_bytes


@pytest.mark.parametrize("p", PLANS, ids=plan_name)
def test_eight_rows_of_16_bytes_lie_on_different_banks(p: Static) -> None:
    assert len({r * p.row_bytes // 16 % 8 for r in range(8)}) == 8


@pytest.mark.parametrize("p", GATHERED, ids=lambda p: f"{plan_name(p)}-{p.tokens}-{p.run}")
def test_gathered_experts_have_their_places(p: Gathered) -> None:
    """Nothing lies in the place of another but what the sorting and the first half need, inside the products."""
    where = p.place()
    ends = sorted(at for name, at in where.items() if name not in ("masks", "starts", "sizes", "partials"))
    assert where["products"] + 4 * p.product_stride * p.pairs <= min(at for at in ends if at > where["products"])
    sorting = [where["masks"], where["masks"] + 8 * p.local, where["starts"], where["starts"] + 4 * p.local,
               where["sizes"], where["sizes"] + 128 * p.rounds_of_rows, where["partials"],
               where["partials"] + 4 * PARTIALS]
    assert sorting == sorted(sorting)
    assert sorting[-1] <= min(at for at in ends if at > where["products"])
    assert p.columns <= p.product_stride < p.columns + 4
    assert p.items * p.run == p.tiles
    assert p.rounds_of_rows * p.blocks >= p.tokens
    if p.inter == 192:
        assert where["end"] <= LIMIT


def test_front_covers_its_rows_and_reads_without_conflicts() -> None:
    for columns, router, plain, pairs in ((7168, 896, 3584, 384), (7168, 56, 224, 384), (7168, 112, 448, 768)):
        p = FrontStatic(tokens=8, columns=columns, router=router, plain=plain, pairs=pairs, top_k=16, blocks=132,
                        slots=12, stride_x=columns, stride_f=plain, stride_a=pairs, beta=4.0, linear_beta=25.0,
                        renormalize=True, scaling=1.0, dependent=False, lean=False, pace=0)
        assert p.units * 8 == router + plain + 2 * pairs
        assert p.chunk * p.chunks * 32 == columns
        assert p.place()["end"] <= LIMIT
        # a quarter of a warp reads 16 bytes of 2 rows
        assert len({(r * p.row_bytes // 16 + q) % 8 for r in range(2) for q in range(4)}) == 8


@pytest.mark.parametrize("p", BESIDE, ids=lambda p: f"{p.side_rows}x{p.side_width}-{p.blocks}")
def test_units_beside_the_experts_are_done_once_and_fit_a_slot(p: Static) -> None:
    for count in (0, 1, 16, 120):
        done = []
        for block in range(p.blocks):
            used = len(range(block, count * p.tiles, p.blocks))
            done += range(block + used * p.blocks - count * p.tiles, p.side_units, p.blocks)
        assert sorted(done) == list(range(p.side_rows // 16))
    steps = [w * p.own_steps + i for w in range(WARPS) for i in range(p.own_steps) if w * p.own_steps < p.side_steps]
    assert sorted(steps) == list(range(p.side_width // 16))
    assert 16 * p.side_row_bytes <= p.slot_bytes
    assert len({r * p.side_row_bytes // 16 % 8 for r in range(8)}) == 8


# other products of the half, in its forms: their place refuses them, or ``needs``
REFUSALS = {
    "router": "a path leaves the region and returns through L1.mlp.ids",
    "front": "a path leaves the region and returns through L1.mlp.latent_down",
    "latent_down": "returns through L1.mlp.latent_down.all_gather|reads a value as an input that is made inside",
    "latent_up": "a path leaves the region and returns through L1.mlp.latent_normed",
    "shared_gate": "makes (384|768) columns of 7168, a shared expert's down-projection makes more",
    "shared_up": "makes (384|768) columns of 7168, a shared expert's down-projection makes more",
}


@pytest.mark.parametrize("tail", ["all_reduce", "stripe"])
@pytest.mark.parametrize("front", ["replicated", "sharded"])
@pytest.mark.parametrize("tp", [8, 16])
def test_only_the_shared_down_projection_stands_beside_the_experts(front: str, tail: str, tp: int) -> None:
    kernel = moe_experts_menu.KERNELS[1]
    spec = replace(real_shapes._spec(1, 1, Choices(front, tail, "replicated")), layers=(1,),
                   parallel=Parallel(tp, "tp"))
    apart = shard_graph(build_graph(spec), spec, algebra_of(spec))[0]
    for graph in (apart, merge_projections(apart)[0]):
        (region,), misses = find_regions(graph, Menu([kernel]), arch="sm_103", rows=1)
        assert (region.binding["s"], misses) == ("L1.mlp.shared_down", [])
        for node in graph.nodes:
            if node.op == "linear" and node.stage == "mlp" and node.name != "L1.mlp.shared_down":
                reason = why_not(graph, kernel, node.outputs[0])
                assert re.search(REFUSALS[node.name.removeprefix("L1.mlp.")], reason), f"{node.name}: {reason}"


def why_not(graph: Graph, kernel: KernelDef, output: str) -> str:
    """The words with which ``kernel`` refuses the product that makes ``output``, the only one in its half of a layer:
    what the others make comes from outside."""
    others = [node for node in graph.nodes
              if node.op == "linear" and node.stage == "mlp" and node.outputs[0] != output]
    left = replace(graph, nodes=tuple(node for node in graph.nodes if node not in others),
                   inputs=(*graph.inputs, *(out for node in others for out in node.outputs)))
    regions, (miss,) = find_regions(left, Menu([kernel]), arch="sm_103", rows=1)
    assert not regions
    return miss.reason


def test_a_wide_product_beside_does_not_fit_and_says_so() -> None:
    spec = replace(real_shapes._spec(1, 1, Choices("replicated", "all_reduce", "replicated")), layers=(1,),
                   parallel=Parallel(1, "tp"))
    graph = shard_graph(build_graph(spec), spec, algebra_of(spec))[0]
    assert why_not(graph, moe_experts_menu.KERNELS[1], "L1.mlp.shared_down") == (
        "experts of 3072 x 3584 and 7168 x 6144 beside them: two slots do not fit shared memory")


# layouts


def load_matrix(memory: np.ndarray, rows: list[int]) -> np.ndarray:
    """One matrix of ``ldmatrix``: word q of the 16 bytes at ``rows[r]`` to lane 4 r + q."""
    return np.concatenate([memory[at : at + 16].view(np.int32) for at in rows])


def matrix_product(a: list[np.ndarray], b: list[np.ndarray]) -> np.ndarray:
    """m16n8k16 from fragments of 32 lanes x 2 numbers, as the instruction takes them: [16, 8]."""
    left, right = np.zeros((16, 16)), np.zeros((16, 8))
    for lane, half in product(range(32), range(2)):
        r, q = lane // 4, 2 * (lane % 4) + half
        left[r, q], left[r + 8, q] = a[0][lane, half], a[1][lane, half]
        left[r, q + 8], left[r + 8, q + 8] = a[2][lane, half], a[3][lane, half]
        right[q, r], right[q + 8, r] = b[0][lane, half], b[1][lane, half]
    return left @ right


def group_product(first: np.ndarray, second: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Rows ``first`` and ``second`` (words of 32 lanes) against 8 tokens' 32 columns ``x`` [8, 32]: [16, 8]."""
    from k3plan.ops_cute.experts.mxfp4 import PAIRS

    lanes = np.arange(32)
    weights = [decoded(words)[:, pair] for pair in (list(p) for p in PAIRS) for words in (first, second)]
    columns = [x[lanes[:, None] // 4, 8 * (lanes[:, None] % 4) + np.array(pair)] for pair in PAIRS]
    return matrix_product(weights[:4], columns[:2]) + matrix_product(weights[4:], columns[2:])


def test_a_unit_of_gate_and_up_rows_multiplies_like_the_reference() -> None:
    p, generator = plan(width=256, inter=64, local=1), torch.Generator().manual_seed(0)
    packed = [torch.randint(0, 256, (8, 128), generator=generator, dtype=torch.uint8) for _ in range(2)]
    scales = [torch.randint(118, 126, (8, p.groups), generator=generator, dtype=torch.uint8) for _ in range(2)]
    x = torch.randn(TOKENS, 256, generator=generator).bfloat16().double().numpy()
    slot = np.full(p.slot_bytes, 0xA5, dtype=np.uint8)
    for matrix, r in product(range(2), range(8)):
        at = (8 * matrix + r) * p.row_bytes
        slot[at : at + 128] = packed[matrix][r].numpy()
        at = 16 * p.row_bytes + (8 * matrix + r) * p.groups
        slot[at : at + p.groups] = scales[matrix][r].numpy()
    sums = np.zeros((16, TOKENS))
    for group in range(p.groups):
        words = [load_matrix(slot, [(8 * m + r) * p.row_bytes + group * FRAGMENT for r in range(8)]) for m in range(2)]
        products = group_product(words[0], words[1], x[:, 32 * group : 32 * group + 32])
        bytes_ = slot[16 * p.row_bytes :].reshape(-1)[: 16 * p.groups].reshape(16, p.groups)[:, group]
        sums += products * 2.0 ** (bytes_.astype(float) - 127)[:, None]
    weights = torch.cat([unpack_mxfp4(w, s) for w, s in zip(packed, scales, strict=True)]).double().numpy()
    assert np.allclose(sums, weights @ x.T, rtol=1e-12)


def test_published_activations_are_the_operand_of_the_second_half() -> None:
    """Where the finishing warp's lanes put rows 0 to 7 of a unit, and which column each number then stands for."""
    from k3plan.ops_cute.experts.mxfp4 import PAIRS

    fragment = [[-1, -1] for _ in range(4)]
    for row in range(8):
        if row & 2 == 0:
            fragment[(row & 1) * 2 + (row >> 2)] = [row, row + 2]
    assert [tuple(word) for word in fragment] == list(PAIRS)


# the binary


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_103a"])
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_kernels_compile_for_every_target_and_spill_next_to_nothing(target: str, rows: int) -> None:
    from k3plan.compiler.launches import kernels_of
    from k3plan.ops_cute.compile_check import compile_launch

    for kernel in (*moe_experts_menu.KERNELS, moe_front_menu.KERNELS[0]):
        if not kernel.rows[0] <= rows <= kernel.rows[1]:
            continue
        region = real_regions(rows, (kernel,))[0]
        for launch in kernels_of(bind_region(region, random_inputs(region, "meta"), dependent_launch=True)):
            usage = compile_launch(launch, target)
            assert usage.registers <= 96, usage
            assert usage.spilled <= 16, usage
            assert usage.shared <= LIMIT


def real_regions(rows: int, kernels: tuple) -> list:
    spec = real_shapes._spec(rows, 1, Choices("replicated", "all_reduce", "replicated"))
    return real_shapes.regions_of(replace(spec, layers=(1,), parallel=Parallel(16, "tp")), kernels)


def test_the_example_of_the_page_binds_and_compiles() -> None:
    from k3plan.ops_cute.compile_check import compile_launch

    page = (Path(__file__).parents[2] / "docs/cute.md").read_text().partition("## The MoE")[2]
    code = page.partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {"device": "meta"}
    exec(code, names)
    assert compile_launch(names["launch"], "sm_103a").registers <= 96


# on a GPU


@dataclass(frozen=True)
class RealSetting(kernel_check.Setting):
    """One sparse layer of Kimi K3, with fewer experts."""

    def graph(self) -> Graph:
        spec = replace(real_shapes._spec(self.sequences, self.query, self.choices), layers=(1,), model=self.model,
                       parallel=Parallel(self.tp, self.experts), numerics=self.numerics)
        return merge_projections(shard_graph(build_graph(spec), spec, algebra_of(spec))[0])[0]


def gpu_cases() -> list[kernel_check.Case]:
    model = replace(real_shapes._spec(1, 1, kernel_check.WHOLE).model, experts=EXPERTS)
    found = [RealSetting(f"k3-tp{tp}-{experts}-S{rows}-{numerics.expert_activation}", model, tp, rows, 1, experts,
                         numerics)
             for tp, experts, numerics, more in ((16, "tp", kernel_check.PLAIN, 64), (8, "tp", kernel_check.FP8, 33),
                                                 (16, "ep", kernel_check.PLAIN, 16))
             for rows in (1, 2, 5, 8, more)]
    small = replace(kernel_check.K3, hidden=256, latent=128)
    found += [kernel_check.Setting(f"small-tp{tp}-S{rows}", small, tp, rows, 1) for tp in (1, 2) for rows in (1, 8)]
    return kernel_check.cases(moe_experts_menu.KERNELS, found)


@pytest.mark.gpu
@pytest.mark.parametrize("case", gpu_cases(), ids=lambda case: case.name)
def test_experts_at_real_shapes(case: kernel_check.Case, device: str) -> None:
    kernel_check.check(case, device)


def routing_of(name: str, shape: torch.Size, experts: int) -> torch.Tensor:
    """Expert ids that a router could choose and chance would not."""
    pairs = torch.arange(shape.numel(), dtype=torch.int32).view(shape)
    if name == "one choice of all rows":
        return pairs[:1].flip(1).expand(shape)
    if name == "every pair on its own":
        return pairs.flip(0) % experts
    # the first expert of all rows is one and the same, the others of neighbouring rows overlap
    ids = (pairs // shape[1] + pairs % shape[1]) % (experts - 1) + 1
    ids[:, 3] = 0
    return ids


@pytest.mark.gpu
@pytest.mark.parametrize(("routing", "rows", "experts"), [
    ("one choice of all rows", 64, 64), ("every pair on its own", 10, 160), ("one expert of all rows", 64, 160)])
def test_gathered_experts_of_any_routing(routing: str, rows: int, experts: int, device: str,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """And equal inputs give equal bits."""
    model = replace(real_shapes._spec(1, 1, kernel_check.WHOLE).model, experts=experts)
    case = kernel_check.cases(moe_experts_menu.KERNELS[2:3], [RealSetting(routing, model, 16, rows, 1)])[0]
    make_inputs, ids = kernel_check.make_inputs, case.region.binding["ids"]

    def chosen(*arguments: Any) -> dict[str, torch.Tensor]:
        made = make_inputs(*arguments)
        made[ids].copy_(routing_of(routing, made[ids].shape, experts))
        return made

    monkeypatch.setattr(kernel_check, "make_inputs", chosen)
    kernel_check.check(case, device)
    tensors = random_inputs(case.region, device)
    tensors[ids].copy_(routing_of(routing, tensors[ids].shape, experts))
    launch, found = bind_region(case.region, tensors, case.config), []
    for _ in range(20):
        launch()
        found.append(tensors[case.region.outputs[0]].clone())
    assert all(torch.equal(found[0], other) for other in found[1:])
