"""``cute.mla_attend`` warp by warp on a CPU (``warp_emulator.py``): parts, rings, pages, verify rows, epochs."""
from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import kernel_check
import pytest
import real_shapes
import torch
from torch import Tensor

pytest.importorskip("cutlass")

import warp_emulator

from k3plan.compiler.build import build_graph
from k3plan.compiler.call import Call
from k3plan.compiler.covering.match import find_regions
from k3plan.compiler.kernel import Menu, Region
from k3plan.compiler.ops import OPS
from k3plan.compiler.passes.merge import merge_projections
from k3plan.compiler.passes.shard import algebra_of, shard_graph
from k3plan.compiler.spec import Parallel
from k3plan.graphs import launch as launching
from k3plan.graphs.load import TORCH_DTYPES
from k3plan.ops_cute.compile_check import TARGETS, WAIT, compile_launch, operations
from k3plan.ops_cute.launching import compile_kernel
from k3plan.ops_cute.mla_attend import bind
from k3plan.ops_cute.mla_attend_menu import FEWEST_BLOCKS, KERNELS, configs, needs, shape_of
from k3plan.ops_cute.mla_attend_plan import BORROWED, LENT, MOST_BLOCKS, Config, Shape
from k3plan.ops_cute.shared_memory import LIMIT

HEADS, LATENT, REST, SCALE = 3, 64, 16, 48**-0.5
ERROR = 0.006  # root mean square of the error, of the result's
BULK_COPY = 0x3BA  # operation UBLKCP
# heads of a TP16 and of a TP8 rank; sequences x rows
REAL_HEADS = (6, 12)
REAL_ROWS = ((1, 1), (2, 1), (5, 1), (8, 1), (1, 2), (1, 5), (1, 8), (2, 8), (8, 8), (64, 1))
SLOW = 4  # of so many cases of small models one is run each time


@cache
def modules() -> dict[str, Any]:
    return warp_emulator.load(("moe_parts", "mla_attend_merge", "mla_attend"))


def call_of(positions: list[int], *, query: int = 1, page: int = 16, context: int = 128, heads: int = HEADS,
            latent: int = LATENT, rest: int = REST, dtype: torch.dtype = torch.bfloat16, kv_scale: float = 1.0,
            device: str = "cpu", dependent: bool = False, **config: Any) -> Call:
    """Random entries and pages in random order; NaN wherever no row may look."""
    rows, sequences, pages = len(positions), len(positions) // query, context // page
    one, width = Config(**config), latent + rest
    shape = Shape(sequences=sequences, query=query, heads=heads, latent=latent, rest=rest, page=page, pages=pages,
                  entry_bytes=dtype.itemsize, tile=one.tile, most_slots=one.slots, warps=one.warps,
                  wide=one.partial == "fp32")
    scratch = {"mixes": torch.zeros(2, MOST_BLOCKS, 4 * shape.fragments, dtype=torch.int32, device=device),
               "sums": torch.zeros(2, MOST_BLOCKS, shape.rows, dtype=torch.int32, device=device),
               "epochs": torch.zeros(MOST_BLOCKS, dtype=torch.int32, device=device)}
    tensors = {"query": torch.empty(rows, heads, width, dtype=torch.bfloat16, device=device),
               "cache": torch.empty(sequences * pages + 1, page, width, dtype=dtype, device=device),
               "positions": torch.empty(rows, dtype=torch.int32, device=device),
               "page_table": torch.empty(sequences, pages, dtype=torch.int32, device=device),
               "mixed": torch.empty(rows, heads, latent, dtype=torch.bfloat16, device=device)}
    if device != "meta":
        fill(tensors, positions, query, 3)
    attrs = {"query": query, "latent": latent, "scale": SCALE, "kv_scale": kv_scale}
    return Call(tensors, attrs={"mixed": attrs}, scratch=scratch, config=vars(one), dependent_launch=dependent)


def fill(tensors: dict[str, Tensor], positions: list[int], query: int, seed: int) -> None:
    torch.manual_seed(seed)
    table, entries = tensors["page_table"], tensors["cache"]
    (sequences, pages), page = table.shape, entries.shape[1]
    table.copy_(torch.randperm(sequences * pages).view(sequences, pages))
    entries.copy_(torch.randn(entries.shape, device=entries.device))
    last = torch.tensor(positions).view(sequences, query).amax(1)
    unseen = torch.arange(pages * page) > last[:, None]
    # indices work on bytes alone where values are fp8
    bits = entries.view(torch.uint8 if entries.itemsize == 1 else torch.int16)
    poisoned = bits[table.long()].flatten(1, 2)
    poisoned[unseen.to(entries.device)] = 0x7F if entries.itemsize == 1 else 0x7FC0
    bits[table.long()] = poisoned.unflatten(1, (pages, page))
    bits[-1] = 0x7F if entries.itemsize == 1 else 0x7FC0
    tensors["query"].normal_()
    tensors["positions"].copy_(torch.tensor(positions))
    tensors["mixed"].fill_(torch.nan)


def compare(call: Call) -> None:
    names = ("query", "cache", "positions", "page_table")
    wanted = OPS["mla_attend"].fn(*(call.tensors[n] for n in names), **call.attrs["mixed"])
    got = call.tensors["mixed"].float()
    torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.02)
    # long contexts have small means
    assert (got - wanted).square().mean().sqrt() <= ERROR * wanted.square().mean().sqrt()
    assert not got[call.tensors["positions"] < 0].any(), "a padding row is not zero"


def check(call: Call, blocks: int, launches: int = 2) -> None:
    """Launches with other queries, in another order of the warps each, through one binding."""
    made = modules()
    warp_emulator.set_multiprocessors(made, blocks)
    launch = made["mla_attend"].bind(call)
    for seed in range(launches):
        call.tensors["query"].normal_()
        call.tensors["mixed"].fill_(torch.nan)
        warp_emulator.run(launch, [*call.tensors.values(), *call.scratch.values()], seed)
        compare(call)


FP8: dict[str, Any] = {"dtype": torch.float8_e4m3fn, "kv_scale": 0.25}
CASES: dict[str, tuple[list[int], int, dict[str, Any]]] = {
    # positions, multiprocessors, the rest
    "all-at-once": ([100], 3, {"tile": 32, "slots": 2, "warps": 2}),
    "ring-of-two": ([127], 1, {"tile": 16, "slots": 2, "warps": 2}),
    "ring-of-three-late-entries": ([94, 95, 96, 97], 2, {"query": 4, "tile": 16, "slots": 3, "warps": 4, "heads": 2}),
    "one-entry": ([0], 4, {"tile": 16, "slots": 2, "warps": 1}),
    "shorter-than-its-step": ([0, 1, -1, -1], 3, {"query": 4, "tile": 32, "slots": 2, "warps": 4}),
    "parts-without-entries": ([20, 70, 5], 12, {"tile": 16, "slots": 2, "warps": 2, "partial": "fp32"}),
    "padding": ([-1, 33, -1, 127], 4, {"tile": 32, "slots": 1, "warps": 2}),
    "padded-verify-rows": ([30, 31, 32, -1, -1, -1, -1, -1], 4, {"query": 4, "tile": 32, "slots": 2, "warps": 2}),
    "all-padding": ([-1, -1], 4, {"tile": 16, "slots": 2, "warps": 2}),
    "many-parts": ([255], 23, {"context": 256, "tile": 16, "slots": 1, "warps": 2}),
    "two-row-tiles": ([*range(60, 68)], 5, {"query": 8, "heads": 9, "tile": 32, "slots": 2, "warps": 2}),
    "small-pages": ([61, 127], 5, {"page": 4, "tile": 32, "slots": 2, "warps": 4}),
    "large-page": ([61, 127], 4, {"page": 64, "tile": 16, "slots": 3, "warps": 2, "partial": "fp32"}),
    "odd-column-tiles": ([77], 3, {"latent": 48, "tile": 16, "slots": 3, "warps": 1}),
    "scaled": ([100, 45], 4, {"kv_scale": 0.25, "tile": 32, "slots": 2, "warps": 2}),
    "eight-warps": ([127], 2, {"latent": 128, "tile": 64, "slots": 1, "warps": 8, "heads": 8}),
    "fp8": ([127, 50], 4, {**FP8, "tile": 64, "slots": 1, "warps": 4}),
    "fp8-late-entries": ([60, 61, 62], 2, {**FP8, "query": 3, "tile": 64, "slots": 1, "warps": 4}),
    "fp8-ring": ([127], 1, {**FP8, "tile": 16, "slots": 2, "warps": 2}),
    "fp8-two-tiles-of-more": ([100, 101], 1, {**FP8, "query": 2, "tile": 32, "slots": 4, "warps": 2}),
    # a TP16 rank of Kimi K3 at one row and at 8 verify rows: columns, heads and warps, few and short parts
    "k3-one-row": ([100], 3, {"latent": 512, "rest": 64, "heads": 6}),
    "k3-fp8": ([100], 3, {**FP8, "latent": 512, "rest": 64, "heads": 6}),
    "k3-verify": ([*range(92, 100)], 3, {"latent": 512, "rest": 64, "heads": 6, "query": 8}),
}


@pytest.mark.parametrize("name", CASES)
def test_attention(name: str) -> None:
    positions, blocks, settings = CASES[name]
    check(call_of(positions, **settings), blocks)


@pytest.mark.parametrize("fault", ["_clear", "_copy_late"])
def test_faults_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words of an earlier launch that nobody zeroes; entries of this step that nobody copies."""
    monkeypatch.setattr(modules()["mla_attend"], fault, lambda *arguments: None)
    with pytest.raises(AssertionError):
        check(call_of([100, 101], query=2, tile=32, slots=2, warps=2), 3, launches=3)


def test_entries_of_the_step_are_read_after_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another launch appends them as late as it may: when the wait returns."""
    call = call_of([99, 100, 101], query=3, tile=16, slots=4, warps=2)
    made = modules()["mla_attend"]
    warp_emulator.set_multiprocessors(modules(), 2)
    flat, table = call.tensors["cache"].flatten(0, 1), call.tensors["page_table"]
    where = torch.tensor([int(table[0, position // 16]) * 16 + position % 16 for position in (99, 100, 101)])
    entries = flat[where].clone()
    launch = made.bind(call)

    def append(dependent: bool) -> None:
        machine = warp_emulator._machine[-1]
        start = machine.starts[flat.untyped_storage().data_ptr()]
        for place, entry in zip(where, entries, strict=True):
            size = entry.nbytes
            content = entry.view(torch.uint8).numpy()
            machine.memory[start + int(place) * size : start + int(place + 1) * size] = content

    monkeypatch.setattr(made, "await_producers", append)
    flat[where] = torch.nan
    warp_emulator.run(launch, [*call.tensors.values(), *call.scratch.values()])
    compare(call)


def _params() -> list[Any]:
    found = kernel_check.cases(KERNELS)
    return [pytest.param(case, id=case.name, marks=[pytest.mark.slow] if index % SLOW else [])
            for index, case in enumerate(found)]


@pytest.mark.parametrize("case", _params())
def test_small_models(case: kernel_check.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    made = modules()
    warp_emulator.set_multiprocessors(made, max(5, shape_of(case.region, case.config).jobs))

    def entry_point(entry: str) -> Any:
        def bound(call: Call) -> Any:
            launch = made["mla_attend"].bind(call)
            tensors = [*call.tensors.values(), *call.scratch.values()]
            return lambda: warp_emulator.run(launch, tensors)
        return bound

    monkeypatch.setattr(launching, "entry_point", entry_point)
    kernel_check.check(case)


# at the shapes of Kimi K3


@cache
def real_region(heads: int, sequences: int, query: int, dtype: str) -> Region:
    """Of a rank with so many heads of 96; ``dtype`` of the cache."""
    spec = real_shapes._spec(sequences, query, kernel_check.WHOLE)
    spec = replace(spec, layers=(3,), parallel=Parallel(96 // heads, "tp"),
                   numerics=replace(spec.numerics, kv_cache=dtype))
    graph = merge_projections(shard_graph(build_graph(spec), spec, algebra_of(spec))[0])[0]
    return find_regions(graph, Menu(KERNELS), rows=sequences * query)[0][0]


def real_call(heads: int, sequences: int, query: int, dtype: str, config: dict[str, Any], device: str) -> Call:
    """The first sequence fills its context, the others less and less of it; the last one of several is padding."""
    ends = [8191 - 8000 * i // sequences for i in range(sequences)]
    positions = [end - query + 1 + row for end in ends for row in range(query)]
    if sequences > 1:
        positions[-query:] = [-1] * query
    return call_of(positions, query=query, page=64, context=8192, heads=heads, latent=512, rest=64, device=device,
                   dependent=True, dtype=TORCH_DTYPES[dtype], **config)


REAL = [(heads, *rows, dtype) for dtype in ("bf16", "fp8_e4m3") for heads in REAL_HEADS for rows in REAL_ROWS]


def every_config(reals: list[tuple[int, int, int, str]]) -> list[Any]:
    return [pytest.param(*real, config, id="-".join(map(str, (*real, *config.values()))))
            for real in reals for config in configs(real_region(*real))]


@pytest.mark.parametrize("real", REAL, ids=str)
def test_what_is_offered_fits(real: tuple[int, int, int, str]) -> None:
    region = real_region(*real)
    assert needs(region) is None
    for config in configs(region):
        launch = bind(real_call(*real, config, "meta"))
        assert launch.shared <= LIMIT
        assert FEWEST_BLOCKS * 0.95 < launch.grid[0] <= FEWEST_BLOCKS


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "sequences", "query", "dtype", "config"), every_config(
    [real for real in REAL if real[:3] in ((6, 1, 1), (6, 1, 8), (6, 8, 8), (12, 8, 1))]))
@pytest.mark.parametrize("target", TARGETS)
def test_nothing_spills(heads: int, sequences: int, query: int, dtype: str, config: dict[str, Any],
                        target: str) -> None:
    launch = bind(real_call(heads, sequences, query, dtype, config, "meta"))
    usage = compile_launch(launch, target)
    assert usage.spilled == 0
    p = launch.parameters
    if p.lends:
        # what is lent was there
        assert p.warps * BORROWED + 4 * LENT <= usage.registers * launch.threads // 32


@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("target", TARGETS)
def test_entries_are_on_their_way_before_the_wait(target: str, dtype: str) -> None:
    region = real_region(6, 1, 1, dtype)
    launch = bind(real_call(6, 1, 1, dtype, configs(region)[0], "meta"))
    found = operations(compile_kernel(launch, target).cubin)
    assert found.count(WAIT) == 1
    assert BULK_COPY in found[: found.index(WAIT)]


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "sequences", "query", "dtype", "config"), every_config(REAL))
def test_real_shapes_on_a_gpu(heads: int, sequences: int, query: int, dtype: str, config: dict[str, Any],
                              device: str) -> None:
    call = real_call(heads, sequences, query, dtype, config, device)
    launch = bind(call)
    for _ in range(4):
        call.tensors["query"].normal_()
        call.tensors["mixed"].fill_(torch.nan)
        launch()
        compare(call)


def test_what_does_not_fit_is_refused_with_its_reason() -> None:
    wide = replace(kernel_check.K3, kv_lora_rank=72)
    setting = kernel_check.Setting("wide", wide, 1, 1, 1)
    reasons = {missed.reason for missed in find_regions(setting.graph(), Menu(KERNELS), rows=1)[1]}
    assert reasons == {"entries of 72 and 16 values are not multiples of 16"}
