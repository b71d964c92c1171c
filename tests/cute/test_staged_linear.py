"""``cute.staged_linear`` warp by warp on a CPU (``warp_emulator.py``), and what the assembler leaves before its wait.
"""
from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import kernel_check
import pytest
import torch

pytest.importorskip("cutlass")

import warp_emulator

from k3plan.compiler.call import Call
from k3plan.compiler.covering.match import find_regions
from k3plan.compiler.fusions import row_groups
from k3plan.compiler.kernel import Menu
from k3plan.graphs import launch as launching
from k3plan.ops_cute.compile_check import LOAD, TARGETS, WAIT, operations
from k3plan.ops_cute.launching import compile_kernel
from k3plan.ops_cute.shared_memory import LIMIT
from k3plan.ops_cute.skinny_linear_menu import TILE, count_rows
from k3plan.ops_cute.staged_linear import AT_ONCE, bind, grains_of_blocks, place_units
from k3plan.ops_cute.staged_linear_menu import FEWEST_BLOCKS, KERNELS, MOST_TILES, candidates, columns_each

BULK_COPY, LANES_COPY = 0x3BA, 0xFAE  # operations UBLKCP and LDGSTS
SLOW = 6  # of so many cases of small models one is run each time
CASES = [pytest.param(case, id=case.name, marks=[pytest.mark.slow] if index % SLOW else [])
         for index, case in enumerate(kernel_check.cases(KERNELS))]


# outputs and inputs of a TP16 rank's projections; with all their configurations
REAL = [(3216, 7168), (7168, 768), (7168, 2112), (10240, 7168), (1152, 1536), (7168, 384), (448, 3584), (56, 7168)]
PROMPT = 3  # of them are run each time
EVERY_CONFIG = [pytest.param(width, columns, dict(config), id=f"{width}x{columns}-{index}",
                             marks=[pytest.mark.slow] if number >= PROMPT or index % 3 else [])
                for number, (width, columns) in enumerate(REAL)
                for index, config in enumerate(candidates(width, columns))]


@cache
def modules() -> dict[str, Any]:
    return warp_emulator.load(("moe_parts", "skinny_linear", "staged_linear"))


def emulated(blocks: int) -> Any:
    """The kernel's module on a GPU of so many multiprocessors."""
    warp_emulator.set_multiprocessors(modules(), blocks)
    return modules()["staged_linear"]


def call_of(rows: int, width: int, columns: int, config: dict[str, Any], *, device: str = "cpu", gap: int = 0,
            dtype: torch.dtype = torch.bfloat16, dependent: bool = False) -> Call:
    """Random rows, ``gap`` elements of NaN between them, random weights, a poisoned result."""
    wide = torch.full((rows, columns + gap), torch.nan, dtype=torch.bfloat16, device=device)
    x = wide[:, :columns]
    weight = torch.empty(width, columns, dtype=torch.bfloat16, device=device)
    if device != "meta":
        x.normal_()
        weight.normal_(std=columns**-0.5)
    f = torch.full((rows, width), torch.nan, dtype=dtype, device=device)
    return Call(tensors={"x": x, "weight": weight, "f": f}, config=config, dependent_launch=dependent)


@pytest.mark.parametrize("bulk", [True, False], ids=["rows", "lanes"])
@pytest.mark.parametrize(("rows", "width", "columns", "warps", "ring_kb", "blocks", "gap", "dtype"), [
    (1, 74, 896, 2, 30, 3, 0, torch.bfloat16),  # 25 rows a block in two units, as 3216 on 132; refilled slots
    (8, 74, 896, 2, 1, 3, 0, torch.float32),  # one slot
    (5, 11, 192, 2, 8, 4, 2, torch.bfloat16),  # low units, rows of x on 4 bytes
    (2, 220, 384, 4, 12, 4, 3, torch.bfloat16),  # four units high, rows of x on 2 bytes
    (3, 5, 1792, 4, 64, 8, 8, torch.float32),  # fewer rows than blocks; long pieces, padded
    (4, 40, 96, 3, 200, 2, 0, torch.bfloat16),
    (2, 112, 704, 2, 6, 2, 0, torch.float32),  # 8 rows side by side in units 14 high, as 7168 x 2112 once had them
], ids=str)
def test_products(rows: int, width: int, columns: int, warps: int, ring_kb: int, blocks: int, gap: int,
                  dtype: torch.dtype, bulk: bool) -> None:
    module = emulated(blocks)
    torch.manual_seed(rows)
    config = {"warps": warps, "columns": columns_each(columns, warps, 448), "ring_kb": ring_kb, "bulk": bulk}
    call = call_of(rows, width, columns, config, gap=gap, dtype=dtype)
    launch = module.bind(call)
    warp_emulator.run(launch, list(call.tensors.values()), seed=rows)
    wanted = call.tensors["x"].float() @ call.tensors["weight"].float().T
    torch.testing.assert_close(call.tensors["f"].float(), wanted, atol=2e-5 if dtype == torch.float32 else 2e-2,
                               rtol=1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("held", [0, 1, 3])
@pytest.mark.parametrize(("rows", "width", "columns", "warps", "ring_kb", "blocks", "pace_kb", "bulk"), [
    (1, 74, 1792, 4, 20, 3, 17, True),  # 25 rows a block, as 3216 on 132; refilled slots
    (8, 74, 1792, 4, 60, 3, 0, True),
    (5, 21, 1792, 2, 8, 4, 2, False),  # low units, which have no rows 8 to 15 in registers
    (2, 220, 1792, 4, 30, 4, 40, True),  # four units high
], ids=str)
def test_units_that_registers_have(rows: int, width: int, columns: int, warps: int, ring_kb: int, blocks: int,
                                   pace_kb: int, bulk: bool, held: int) -> None:
    config = {"warps": warps, "columns": columns_each(columns, warps, 224), "ring_kb": ring_kb, "bulk": bulk,
              "pace_kb": pace_kb, "held": held}
    torch.manual_seed(rows)
    call = call_of(rows, width, columns, config)
    warp_emulator.run(emulated(blocks).bind(call), list(call.tensors.values()), seed=held)
    wanted = call.tensors["x"].float() @ call.tensors["weight"].float().T
    torch.testing.assert_close(call.tensors["f"].float(), wanted, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize(("width", "blocks", "late", "share"), [(100, 5, 2, 50), (61, 4, 3, 60), (90, 3, 5, 1)])
def test_blocks_that_find_room_late_have_fewer_rows(width: int, blocks: int, late: int, share: int) -> None:
    config = {"warps": 2, "columns": 224, "ring_kb": 30, "bulk": True, "pace_kb": 8, "late": late, "late_share": share}
    call = call_of(2, width, 896, config)
    launch = emulated(blocks).bind(call)
    rows = grains_of_blocks(launch.parameters.spread)
    late = launch.parameters.late
    assert sum(rows) == width
    assert sum(rows[-late:]) / late == pytest.approx(sum(rows[:-late]) / (blocks - late) * share / 100, abs=1)
    warp_emulator.run(launch, list(call.tensors.values()))
    wanted = call.tensors["x"].float() @ call.tensors["weight"].float().T
    torch.testing.assert_close(call.tensors["f"].float(), wanted, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("pace", [0, 1, 2, 3, 5])
def test_a_paced_ring_has_so_many_units_on_their_way(pace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two warps of one block, two units of 7 KB each that all have a place: a barrier a unit. Each warp's awaits and
    copies, all of them before its wait for the producers; a copy is after what it waited for."""
    module, copied = emulated(3), list[int]()
    seen: dict[int, list[tuple[str, int]]] = {0: [], 1: []}
    copy, wait = module._copy, module.await_phase

    def own() -> list[tuple[str, int]]:
        return seen[warp_emulator._warp().number]

    def copy_unit(*arguments: Any) -> None:
        number = 2 * arguments[-2] + warp_emulator._warp().number
        own().append(("copy", number))
        copied.append(number)
        copy(*arguments)

    def await_unit(at: Any, parity: Any) -> None:
        wait(at, parity)
        warp, unit = divmod(int(at.a.flat[0]) // 8, 2)
        assert 2 * unit + warp in copied
        own().append(("came", 2 * unit + warp))

    monkeypatch.setattr(module, "_copy", copy_unit)
    monkeypatch.setattr(module, "await_phase", await_unit)
    monkeypatch.setattr(module, "await_producers", lambda dependent: own().append(("wait", 0)))
    call = call_of(1, 48, 896, {"warps": 2, "columns": 224, "ring_kb": 60, "bulk": True, "pace_kb": 7 * pace})
    warp_emulator.run(replace(module.bind(call), grid=(1, 1, 1)), list(call.tensors.values()), seed=pace)
    for warp, events in seen.items():
        wanted = []
        for number in (warp, 2 + warp):
            wanted += [("came", number - pace)] * (0 < pace <= number) + [("copy", number)]
        assert events[: events.index(("wait", 0))] == wanted


@pytest.mark.parametrize("case", CASES)
def test_small_models(case: kernel_check.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    module = emulated(blocks=max(3, -(-count_rows(row_groups(case.region)) // (MOST_TILES * TILE - 2))))

    def entry_point(entry: str) -> Any:
        def bound(call: Call) -> Any:
            launch = module.bind(call)
            return lambda: warp_emulator.run(launch, list(call.tensors.values()))
        return bound

    monkeypatch.setattr(launching, "entry_point", entry_point)
    kernel_check.check(case)


@pytest.mark.parametrize(("width", "columns", "config"), EVERY_CONFIG)
def test_real_shapes(width: int, columns: int, config: dict[str, Any]) -> None:
    """The first two blocks of a GPU's, with all that they touch."""
    module = emulated(blocks=132)
    call = call_of(2, width, columns, config)
    launch = module.bind(call)
    end = sum(grains_of_blocks(launch.parameters.spread)[:2])
    warp_emulator.run(replace(launch, grid=(2, 1, 1)), list(call.tensors.values()))
    wanted = call.tensors["x"].float() @ call.tensors["weight"][:end].float().T
    torch.testing.assert_close(call.tensors["f"][:, :end].float(), wanted, atol=2e-2, rtol=1e-2)
    assert call.tensors["f"][:, end:].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "columns", "config"), EVERY_CONFIG)
def test_real_shapes_on_a_gpu(width: int, columns: int, config: dict[str, Any], device: str) -> None:
    call = call_of(1 + width % 8, width, columns, config, device=device, dependent=True)
    launch = bind(call)
    x, weight, f = (call.tensors[name] for name in ("x", "weight", "f"))
    for _ in range(3):
        x.normal_()
        f.fill_(torch.nan)
        launch()
        wanted = x.float() @ weight.float().T
        torch.testing.assert_close(f.float(), wanted, atol=2e-2, rtol=1e-2)


def test_what_does_not_fit_is_refused_with_its_reason() -> None:
    tall = replace(kernel_check.K3, vocab=FEWEST_BLOCKS * MOST_TILES * TILE + 1)
    missed = find_regions(kernel_check.Setting("tall", tall, 1, 1, 1).graph(), Menu(KERNELS), rows=1)[1]
    reasons = {miss.reason for miss in missed if miss.kernel == "cute.staged_linear"}
    assert {"48 inputs are not a multiple of 32", "16897 output rows are too many for one wave"} <= reasons


@pytest.mark.parametrize("rows", [13, 24, 25, 40, 64, 200])
@pytest.mark.parametrize("heights", [(13, 12) * 4, (13,), (7, 6, 6, 6) * 3, (16, 16, 16, 16, 14) * 4], ids=str)
def test_no_unit_lies_on_another_that_is_still_to_be_read(heights: tuple[int, ...], rows: int) -> None:
    if rows < max(heights):
        pytest.skip("no unit fits")
    placed = place_units(heights, rows)
    assert [after for _, after in placed] == sorted(after for _, after in placed)
    for unit, (first, after) in enumerate(placed):
        assert AT_ONCE <= after < unit
        assert first + heights[unit] <= rows
        for other in range(after + 1, unit):
            begin = placed[other][0]
            assert first + heights[unit] <= begin or begin + heights[other] <= first, f"{unit} on {other}"
    at_once = [height for height, (_, after) in zip(heights, placed, strict=True) if after == AT_ONCE]
    assert sum(at_once) == sum(heights) or sum(at_once) + max(heights) > rows


@pytest.mark.parametrize("config", candidates(3216, 7168), ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_the_ring_is_on_its_way_before_the_wait(config: dict[str, Any], target: str) -> None:
    launch = bind(call_of(1, 3216, 7168, dict(config), device="meta", dependent=True))
    assert launch.shared <= LIMIT
    p = launch.parameters
    found = operations(compile_kernel(launch, target).cubin)
    assert found.count(WAIT) == 1
    copies = BULK_COPY if p.bulk else LANES_COPY
    a_unit = 1 if p.bulk else found.count(copies) // len(p.places)
    before = found[: found.index(WAIT)]
    assert before.count(copies) >= len(p.ahead) * a_unit, f"{before.count(copies)} of {found.count(copies)} copies"
    assert before.count(LOAD) == 2 * p.steps * p.held, f"{before.count(LOAD)} loads into registers"
