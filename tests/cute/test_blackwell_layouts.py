"""Layouts, descriptors and sizes of ``cute.moe_experts_block_scaled``, without the kernel.

Operands are laid out by ``blackwell_layouts.py`` from the checkpoint's packing, multiplied by a model of the
instruction that knows the PTX ISA only (``tensor_core.py``), and compared with the ops' own decoders.
"""
from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import real_shapes
import tensor_core
import torch
from pack_mxfp4 import pack_mxfp4
from tensor_core import Core

from k3plan.compiler.build import build_graph
from k3plan.compiler.compile import compile_spec
from k3plan.compiler.covering.match import find_regions
from k3plan.compiler.kernel import Menu, Region
from k3plan.compiler.ops.mxfp4 import E2M1, unpack_mxfp4
from k3plan.compiler.ops.mxfp8 import round_to_mxfp8
from k3plan.compiler.passes.merge import merge_projections
from k3plan.compiler.passes.shard import algebra_of, shard_graph
from k3plan.compiler.reading.source import load_spec
from k3plan.compiler.spec import Choices, Parallel
from k3plan.face import kernels, tuning
from k3plan.graphs.bench import random_inputs
from k3plan.graphs.launch import bind_region
from k3plan.ops_cute.experts import blackwell_layouts as layouts
from k3plan.ops_cute.experts import moe_experts_block_scaled_menu as menu
from k3plan.ops_cute.experts.block_scaled_plan import TILE, Static
from k3plan.ops_cute.shared_memory import LIMIT

FORMATS = ("e4m3", "e2m1")
EXAMPLES = Path(__file__).parents[2] / "examples"

# weights


@pytest.mark.parametrize("weights", FORMATS)
def test_every_nibble_in_every_place_is_exact(weights: str) -> None:
    values = np.array((*E2M1, *(-v for v in E2M1)))
    for rest, place, code in product((0, 0x12345678, 0xFFFFFFFF, 0x89ABCDEF), range(8), range(16)):
        word = rest & ~(15 << (4 * place)) & 0xFFFFFFFF | code << (4 * place)
        signed = np.array([word], np.uint32).view(np.int32)
        both = np.concatenate([np.asarray(half, np.int32) for half in layouts.weight_words(signed, weights)])
        found = tensor_core.ELEMENTS[layouts.FORMATS[weights]](both.view(np.uint8)) * layouts.FACTORS[weights]
        wanted = [values[word >> (4 * column) & 15] for column in layouts.ORDER]
        assert np.array_equal(found, wanted)
        assert np.array_equal(np.signbit(found), np.signbit(wanted))


# the instruction


def e4m3_codes(values: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Groups of 32 of MXFP8 values as bytes, and their E8M0 bytes, by this test's own means."""
    groups = values.unflatten(-1, (-1, 32))
    mantissa, exponent = torch.frexp(groups.abs().amax(-1))
    exponent = exponent - 9 + (mantissa > 0.875)
    codes = torch.ldexp(groups, -exponent[..., None]).to(torch.float8_e4m3fn)
    assert torch.equal(torch.ldexp(codes.float(), exponent[..., None]), groups)
    return codes.view(torch.uint8).flatten(-2).numpy(), (exponent + 127).numpy().astype(np.uint8)


def store_weights(core: Core, packed: np.ndarray, scales: np.ndarray, weights: str) -> tuple[int, int]:
    """128 rows of the checkpoint's bytes in tensor memory, and their scales. Returns their addresses."""
    groups = scales.shape[1]
    at, scales_at = core.first + 128, core.first + 128 + 8 * groups
    for group in range(groups):
        words = packed[:, 16 * group : 16 * group + 16].copy().view(np.int32)
        for i in range(4):
            for half, held in enumerate(layouts.weight_words(words[:, i], weights)):
                core.memory[:, at + layouts.weight_column(group) + 2 * i + half] = held.view(np.uint32)
    for row, group, quarter in product(range(128), range(groups), range(4)):
        lane, column = 32 * quarter + row % 32, scales_at + layouts.scale_column(group) + row // 32
        core.memory[lane : lane + 1, column : column + 1].view(np.uint8)[0, group % 4] = scales[row, group]
    return at, scales_at


def store_rows(core: Core, codes: np.ndarray, scales: np.ndarray, room: int) -> tuple[int, int]:
    """Rows of e4m3 in shared memory in the weights' order of columns, and their scales. Returns their places."""
    at, scales_at = 256, 256 + room * codes.shape[1]
    for row, chunk in product(range(codes.shape[0]), range(codes.shape[1] // 16)):
        sixteen = codes[row, 16 * chunk : 16 * chunk + 16].reshape(2, 8)[:, layouts.ORDER].reshape(-1)
        place = at + layouts.row_place(row, chunk, room)
        core.shared[place : place + 16] = sixteen
    for row, group in product(range(codes.shape[0]), range(scales.shape[1])):
        core.shared[scales_at + layouts.scale_place(row, group)] = scales[row, group]
    return at, scales_at


def multiply(weights: str, n: int, groups: int, change: Any = lambda name, value: value) -> tuple[np.ndarray, Any]:
    """Sums of 128 weights' rows with ``n`` rows, as the kernel issues it, and what they should be."""
    generator = torch.Generator().manual_seed(n)
    packed, scales = pack_mxfp4(torch.randn(128, 32 * groups, generator=generator))
    rows = round_to_mxfp8(torch.randn(n, 32 * groups, generator=generator))
    core, room = Core(first=32, columns=480), n + 16
    core.shared = np.full(1 << 17, 0xFF, np.uint8)
    at, scales_at = store_weights(core, packed.numpy(), scales.numpy(), weights)
    rows_at, row_scales_at = store_rows(core, *e4m3_codes(rows), room)
    row_scales = scales_at + 4 * -(-groups // 4)
    for word in range(-(-groups // 4)):
        matrix = layouts.shared_descriptor(0, layouts.ROW_BLOCK) + (
            row_scales_at + word * layouts.SCALE_BLOCK >> 4)
        core.copy_scales(row_scales + 4 * word, change("scales", matrix))
    leading = layouts.leading_bytes(room)
    for group in range(groups):
        matrix = layouts.shared_descriptor(leading, layouts.ROW_BLOCK) + (rows_at + 2 * group * leading >> 4)
        core.multiply(core.first, at + layouts.weight_column(group), change("rows", matrix),
                      change("instruction", layouts.instruction(weights, n, group % 4)),
                      scales_at + layouts.scale_column(group), row_scales + layouts.scale_column(group), group > 0)
    found = core.memory[:, core.first : core.first + n].view(np.float32) * layouts.FACTORS[weights]
    return found, unpack_mxfp4(packed, scales).double().numpy() @ rows.double().numpy().T


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize(("n", "groups"), [(8, 8), (16, 6), (40, 4), (64, 5), (128, 8)])
def test_what_is_laid_out_multiplies_like_the_reference(weights: str, n: int, groups: int) -> None:
    found, wanted = multiply(weights, n, groups)
    assert np.allclose(found, wanted, rtol=2e-6, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize(("name", "change"), [
    ("rows", lambda word: word ^ 1 << 16),  # the distance of 16 columns
    ("rows", lambda word: word ^ 1 << 32),  # of 8 rows
    ("rows", lambda word: word + 1),  # where they begin
    ("scales", lambda word: word ^ 1 << 32),
    ("instruction", lambda word: word ^ 1 << 4),  # byte of the rows' scales
    ("instruction", lambda word: word ^ 1 << 29),  # of the weights'
    ("instruction", lambda word: word ^ 1 << 10),  # rows as e5m2: a format that the model has not
])
def test_a_wrong_bit_shows(name: str, change: Any) -> None:
    try:
        found, wanted = multiply("e4m3", 16, 8, lambda kind, value: change(value) if kind == name else value)
    except (AssertionError, KeyError):
        return
    assert not np.allclose(found, wanted, rtol=1e-3)


def test_descriptors_are_those_of_the_tables() -> None:
    """PTX ISA, tables 40 and 43, field by field."""
    word = layouts.instruction("e2m1", 40, 2)
    fields = {(0, 4): 0, (4, 2): 2, (6, 1): 0, (7, 3): 5, (10, 3): 0, (13, 4): 0, (17, 6): 5, (23, 1): 1, (24, 3): 0,
              (27, 2): 1, (29, 2): 2, (31, 1): 0}
    assert {span: tensor_core.bits(word, *span) for span in fields} == fields
    matrix = layouts.shared_descriptor(2048, 128) + (0x2F400 >> 4)
    fields = {(0, 14): 0x2F40, (14, 2): 0, (16, 14): 128, (30, 2): 0, (32, 14): 8, (46, 3): 1, (49, 3): 0, (52, 1): 0,
              (53, 8): 0, (61, 3): 0}
    assert {span: tensor_core.bits(matrix, *span) for span in fields} == fields


def test_scales_of_128_rows_are_a_block_of_the_copy() -> None:
    places = [layouts.scale_place(row, group) for row in range(128) for group in range(4)]
    assert sorted(places) == list(range(layouts.SCALE_BLOCK))
    assert [layouts.scale_place(0, group) for group in (4, 7, 8)] == [512, 515, 1024]


# numbers


def test_bf16_is_the_sum_of_two_terms() -> None:
    """Exactly above 2^-13 of a group's largest, and to 2^-21 of it below."""
    from k3plan.ops_cute.experts.mxfp8 import LEAST, LOW_SHIFT

    made = tensor_core.load()["experts.mxfp8"]
    generator = torch.Generator().manual_seed(0)
    for exponent in range(-30, 4):
        x = (torch.randn(32, generator=generator) * 2.0**exponent).bfloat16().float()
        x[0], x[1] = 1.9921875, 2.0**-20
        lanes = made.Float32(x.numpy())
        byte = made.scale_byte(made.Float32(np.full(32, x.abs().max())), LEAST + LOW_SHIFT)
        down = made.Float32(np.exp2(127.0 - byte.a))
        high, low = made.terms_of(lanes, made.Float32(0.0), down, 2)
        total = np.zeros(32)
        for term, pair in enumerate((high, low)):
            codes = (pair.a & 255).astype(np.uint8)
            total += tensor_core.e4m3(codes) * np.exp2(byte.a - 127.0 - LOW_SHIFT * term)
        off, largest = np.abs(total - x.double().numpy()), float(x.abs().max())
        assert (off <= largest * 2.0**-21).all()
        assert not off[np.abs(x.numpy()) >= largest * 2.0**-13].any()


def test_one_term_is_the_op() -> None:
    made = tensor_core.load()["experts.mxfp8"]
    generator = torch.Generator().manual_seed(1)
    for exponent in range(-20, 20):
        x = torch.randn(32, generator=generator) * 2.0**exponent
        byte = made.scale_byte(made.Float32(np.full(32, x.abs().max())))
        pair, = made.terms_of(made.Float32(x.numpy()), made.Float32(0.0), made.Float32(np.exp2(127.0 - byte.a)), 1)
        found = tensor_core.e4m3((pair.a & 255).astype(np.uint8)) * np.exp2(byte.a - 127.0)
        assert np.array_equal(found, round_to_mxfp8(x).double().numpy())


# sizes


def plan(tokens: int, inter: int, local: int, terms: int, blocks: int = 148, width: int = 3584) -> Static:
    return Static(tokens=tokens, top_k=16, width=width, inter=inter, out_width=width, local=local, experts=896,
                  blocks=blocks, slots=2, weights="e4m3", terms=terms, stride_x=width, stride_out=width, beta=4.0,
                  linear_beta=25.0, dependent=False)


PLANS = [plan(tokens, inter, local, terms, blocks) for tokens, (inter, local), terms, blocks in product(
    (1, 8, 17, 64), ((192, 896), (384, 896), (3072, 56), (3072, 112), (96, 896)), (1, 2), (132, 148, 152))]


@pytest.mark.parametrize("p", PLANS, ids=lambda p: f"{p.tokens}-{p.inter}x{p.local}-{p.terms}-{p.blocks}")
def test_sizes_fit_and_lie_right(p: Static) -> None:
    where = p.place()
    assert where["end"] <= LIMIT
    assert p.tensor_columns <= layouts.COLUMNS
    assert where["ring"] % 128 == where["rows"] % 128 == where["row_scales"] % 128 == p.slot_bytes % 16 == 0
    assert p.operand_bytes % 128 == p.down_bytes % 16 == p.down_scales % 16 == 0
    # the instruction takes 8 to 256 rows, a multiple of 8; scales of 128 rows are a block
    assert p.operand_rows % 8 == 0
    assert 8 <= p.operand_rows <= 128
    # all columns of a block's experts are rows of the instruction
    assert p.together * p.columns <= layouts.LANES
    assert p.together * p.down_bytes <= p.slot_bytes
    assert p.up_bytes <= p.slot_bytes
    assert p.column_blocks <= p.blocks
    columns = [c for turn in range(p.column_blocks)
               for c in range(turn * p.columns, min(p.out_width, (turn + 1) * p.columns))]
    assert columns == list(range(p.out_width))
    # steps cover the columns, units the rows
    assert p.slice * p.slices * 32 == p.width
    assert p.down_slice * p.down_slices * 32 == p.inter
    assert (p.tiles - 1) * TILE < p.inter <= p.tiles * TILE
    # 8 lanes that read 16 bytes of 8 rows
    for pitch in (p.up_pitch, p.down_pitch):
        assert len({row * pitch // 16 % 8 for row in range(8)}) == 8
    # scales of a block's columns, from the 16 bytes that hold the first to those that hold the last
    for turn in range(p.column_blocks):
        first, rows = turn * p.columns, min(p.columns, p.out_width - turn * p.columns)
        begin, end = first * p.inter_groups // 16 * 16, -(-(first + rows) * p.inter_groups // 16) * 16
        assert end - begin <= p.down_scales
        assert end <= p.out_width * p.inter_groups


@pytest.mark.parametrize(("rows", "width"), [(7168, 384), (7168, 768), (7168, 192), (336, 160)])
@pytest.mark.parametrize("blocks", [132, 148])
def test_the_product_beside_fits_a_stage_and_a_slot(rows: int, width: int, blocks: int) -> None:
    p = replace(plan(64, 192, 896, 2, blocks), side_rows=rows, side_width=width)
    alone = replace(p, side_rows=0, side_width=0)
    assert p.side_columns * p.side_pitch <= p.slot_bytes == alone.slot_bytes
    assert p.place() == alone.place()
    assert p.side_deep * p.side_steps == width
    assert 2 * p.side_deep <= 32 * p.deep  # bytes of a row: operands in shared memory, columns of tensor memory
    assert p.tokens <= p.operand_rows
    assert p.side_columns <= layouts.LANES
    assert len({row * p.side_pitch // 16 % 8 for row in range(8)}) == 8
    done = [c for block in range(blocks)
            for c in range(block * p.side_columns, min(rows, (block + 1) * p.side_columns))]
    assert done == list(range(rows))


def test_kimi_k3_keeps_100_kilobytes_in_flight() -> None:
    for rows, activation in product((16, 64), ("bf16", "mxfp8")):
        region = real_region(rows, activation)
        assert region.kernel.configs(region)[0]["slots"] * plan(rows, 192, 896, 1).up_bytes >= 100_000


# the menu


def real_region(rows: int, activation: str, tp: int = 16, experts: str = "tp",
                shared: bool = False) -> Region:
    spec = real_shapes._spec(rows, 1, Choices("replicated", "all_reduce", "replicated"))
    spec = replace(spec, layers=(1,), parallel=Parallel(tp, experts),
                   numerics=replace(spec.numerics, expert_activation=activation))
    graph = merge_projections(shard_graph(build_graph(spec), spec, algebra_of(spec))[0])[0]
    chosen = [kernel for kernel in menu.KERNELS if ("_shared" in kernel.id) == shared]
    (region,), _ = find_regions(graph, Menu(chosen), arch="sm_103", rows=rows)
    return region


@pytest.mark.parametrize(("rows", "activation", "kernel"), [
    (1, "mxfp8", "cute.moe_experts_block_scaled"), (64, "mxfp8", "cute.moe_experts_block_scaled"),
    (9, "bf16", "cute.moe_experts_block_scaled_bf16"), (64, "bf16", "cute.moe_experts_block_scaled_bf16")])
def test_each_activation_has_its_kernel(rows: int, activation: str, kernel: str) -> None:
    assert real_region(rows, activation).kernel.id == kernel
    beside = real_region(rows, activation, shared=True)
    assert (beside.kernel.id, beside.binding["s"]) == (f"{kernel}_shared", "L1.mlp.shared_down")


@pytest.mark.parametrize(("sizes", "reason"), [
    ({"latent": 96}, "experts of 96 x 64 x 96: not multiples of 128, 32 and 16"),
    ({"latent": 128, "experts": 1024, "top_k": 4}, "1024 experts of a rank, at most 992"),
    ({"latent": 3584, "moe_intermediate": 12288, "experts": 4, "top_k": 2}, "two slots do not fit shared memory"),
])
def test_what_it_cannot_do_is_told(sizes: dict[str, int], reason: str) -> None:
    from kernel_check import K3, Setting

    setting = Setting("small", replace(K3, **sizes), 1, 16, 1)
    regions, misses = find_regions(setting.graph(), Menu(menu.KERNELS), arch="sm_103", rows=16)
    assert not regions
    assert any(re.search(reason, miss.reason) for miss in misses), [miss.reason for miss in misses]


@pytest.mark.parametrize(("rows", "activation", "kernel"), [
    (1, "mxfp8", "cute.moe_experts_block_scaled_shared"), (8, "mxfp8", "cute.moe_experts_block_scaled_shared"),
    (64, "mxfp8", "cute.moe_experts_block_scaled_shared"), (9, "bf16", "cute.moe_experts_block_scaled_bf16_shared"),
    (64, "bf16", "cute.moe_experts_block_scaled_bf16_shared")])
def test_the_plan_of_a_gb300_takes_it(rows: int, activation: str, kernel: str) -> None:
    """And that of an H200 has never heard of it."""
    overrides = ("model.layers=[1, 3]", f"step.sequences={rows}", f"numerics.expert_activation={activation}")
    for name, wanted in (("k3-gb300-tp16.yaml", {kernel}), ("k3-h200-tp16.yaml", set())):
        spec = load_spec(EXAMPLES / name, overrides)
        plan = compile_spec(spec, kernels(), tuning(spec.gpu))
        assert {c.kernel for c in plan.choices if "block_scaled" in c.kernel} == wanted


# the binary

# operations by number, as nvdisasm names them: products of 8 and of 16 bits, the copy of scales, tensor memory's store
# and load
UTCQMMA, UTCHMMA, UTCCP, STTM, LDTM = 0xFEA, 0x9EA, 0x9E7, 0x9ED, 0x9EE


@pytest.mark.parametrize("target", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize(("rows", "activation", "shared"), [(1, "mxfp8", True), (64, "bf16", False),
                                                            (64, "bf16", True)])
def test_it_compiles_and_spills_nothing(target: str, rows: int, activation: str, shared: bool) -> None:
    from k3plan.ops_cute.compile_check import compile_launch, operations
    from k3plan.ops_cute.launching import compile_kernel

    region = real_region(rows, activation, shared=shared)
    for config in region.kernel.configs(region)[::2]:
        launch = bind_region(region, random_inputs(region, "meta"), config, dependent_launch=True)
        usage = compile_launch(launch, target)
        assert usage.registers <= 96, usage
        assert usage.spilled == 0, usage
        assert usage.shared <= LIMIT
        p, found = launch.parameters, operations(compile_kernel(launch, target).cubin)
        # a product for each group of a step, issued once and not in a loop over the warp's lanes
        assert found.count(UTCQMMA) == p.slice + p.down_slice
        assert found.count(UTCCP) == -(-p.slice // 4) + -(-p.down_slice // 4)
        assert found.count(UTCHMMA) == (p.side_deep // 16 if shared else 0)
        assert found.count(STTM) == found.count(UTCQMMA) + found.count(UTCCP) + found.count(UTCHMMA)
        assert found.count(LDTM) == 2 * p.terms + shared


def test_the_ptx_multiplies_with_block_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its text, as the DSL hands it to the assembler: what is issued, and that nothing is by a pair of CTAs."""
    import cutlass.cute as cute

    from k3plan.ops_cute import launching

    region, texts, compile_ = real_region(64, "bf16", shared=True), [], cute.compile

    class Keeping:
        def __getitem__(self, options: tuple[Any, ...]) -> Any:
            def compile_and_keep(*arguments: Any) -> Any:
                done = compile_[(*options, cute.KeepPTX)](*arguments)
                texts.append(done.__ptx__)
                return done
            return compile_and_keep

    monkeypatch.setattr(cute, "compile", Keeping())
    launch = bind_region(region, random_inputs(region, "meta"), dependent_launch=True)
    launching._compile(launch, "sm_103a")
    p, found = launch.parameters, Counter(re.findall(r"tcgen05\.[\w:.]+", texts[0]))
    assert found["tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale"] == p.slice + p.down_slice
    assert found["tcgen05.mma.cta_group::1.kind::f16"] == p.side_deep // 16
    assert found["tcgen05.cp.cta_group::1.32x128b.warpx4"] == -(-p.slice // 4) + -(-p.down_slice // 4)
    assert found["tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32"] == 1
    assert found["tcgen05.dealloc.cta_group::1.sync.aligned.b32"] == 1
    assert not [name for name in found if "cta_group::2" in name]
