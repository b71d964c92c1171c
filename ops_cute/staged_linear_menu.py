"""Where ``cute.staged_linear`` and its epilogues fit and their launch configurations. No cutlass here."""
from __future__ import annotations

from typing import Any

from ..compiler.fusions import (
    PROJECTION,
    PROJECTION_ADD,
    PROJECTION_ROUTER,
    activated_projection,
    refuse_dtypes,
    refuse_pairs,
    refuse_router,
    row_groups,
)
from ..compiler.kernel import KernelDef, Region
from .skinny_linear_menu import ARCH, ROWS, STEP, TILE, count_rows

ENTRY = "k3plan.ops_cute.staged_linear:bind"
MOST_WARPS = 16
MOST_TILES = 8  # of a block: 4 sums each in every lane
FEWEST_BLOCKS = 132  # multiprocessors of the smallest GPU that the kernel is for
# columns whose x a lane holds twice, at 2 words of registers for 32 columns each: few warps have room for more
MOST_COLUMNS, FEW_WARPS, MOST_OF_FEW = 256, 4, 448
SMALL = 112 * 1024  # bytes of weights of a block that fit in 144 KB, whatever padding they have
BUSY_KB = 46  # on their way to a block: 6 MB for 132, a little more than 4.4 TB/s and 1 us hold
LATE = 56  # blocks that finish a TP16 rank's tail of Kimi K3, 8 of 448 columns each
SHARES = (60, 70)  # percent
SHORT = 160  # columns of a unit below which copies are too small


def columns_each(columns: int, warps: int, most: int = MOST_COLUMNS) -> int:
    """Columns of a warp's unit: of those that divide its share evenly the most, at most ``most``. Odd numbers of steps
    first, whose rows need no padding."""
    steps = columns // (STEP * warps)
    fitting = [n for n in range(1, most // STEP + 1) if steps % n == 0]
    return STEP * max(fitting, key=lambda n: n + n % 2)


def configs(region: Region) -> list[dict[str, Any]]:
    """Candidates, most promising first; a tuned table replaces the guess."""
    return candidates(count_rows(row_groups(region)), region.value("weight").shape[1])


def candidates(rows: int, columns: int) -> list[dict[str, Any]]:
    """``configs`` of ``rows`` x ``columns``. ``warps`` share the columns, ``columns`` at a time; weights in flight have
    ``ring_kb`` of a block's memory; ``bulk``: the copy engine fetches rows, else lanes do, 16 bytes each;
    ``pace_kb``: so much of it at once before the wait, which is no matter for ``tune`` but for ``--in-step``; ``held``:
    units of a warp that registers have; ``late``: so many blocks, the last, have ``late_share`` percent of the others'
    rows, since those that finish the tail of a sparse layer keep their room longest (``few`` of
    ``cute.moe_experts_tail``).

    4 warps of 256 columns at most and 216 KB leave room for the launches before the projections of a layer: 8 warps
    of 192 registers and 6 KB (``cute.moe_tail``), 9 KB (``cute.attn_res``)."""
    steps = columns // STEP
    able = [warps for warps in range(1, MOST_WARPS + 1) if steps % warps == 0]
    long = [warps for warps in able if columns_each(columns, warps) >= SHORT]
    first = min(able, key=lambda warps: (warps not in long and warps > FEW_WARPS, abs(warps - 8)))
    fewer = max((warps for warps in long if 2 <= warps <= first // 2), default=first)
    if 2 * rows * columns <= FEWEST_BLOCKS * SMALL:
        # all of it is in flight at once
        usual = max(warps for warps in able if warps <= 8)
        found = [(warps, MOST_COLUMNS, 144, bulk) for warps in (first, usual, fewer) for bulk in (True, False)]
    else:
        # many warps have no registers for the sums of many rows
        more = max((warps for warps in long if warps > first and rows <= FEWEST_BLOCKS * 3 * TILE), default=first)
        wide = MOST_OF_FEW if fewer <= FEW_WARPS else MOST_COLUMNS
        found = [(first, MOST_COLUMNS, 224, True), (fewer, MOST_COLUMNS, 216, False),
                 (fewer, MOST_COLUMNS, 216, True), (more, MOST_COLUMNS, 200, False), (first, MOST_COLUMNS, 200, True),
                 (fewer, wide, 224, True), (first, MOST_COLUMNS, 200, False), (first, MOST_COLUMNS, 144, True)]
        # beside blocks that keep their memory to their end, such as those of the experts
        found += [(warps, MOST_COLUMNS, kb, False) for kb in (144, 96) for warps in (first, more, fewer)]
    made = [{"warps": warps, "columns": columns_each(columns, warps, most), "ring_kb": kb, "bulk": bulk}
            for warps, most, kb, bulk in dict.fromkeys(found)]
    # where the ring has all of the weights, the launch behind fills its own beside it
    busy = BUSY_KB // 2 if 2 * rows * columns <= FEWEST_BLOCKS * SMALL else BUSY_KB
    paced = [{**config, "pace_kb": busy} for config in made]
    held = [{**config, "held": 1} for config in paced if config["warps"] == first and holds(rows, columns, config)]
    uneven = [{**config, "late": LATE, "late_share": share} for config in held[:1] for share in SHARES]
    return [*made, *paced, *held, *uneven]


def holds(rows: int, columns: int, config: dict[str, Any]) -> bool:
    """Whether registers can have a unit of a warp beside a ring of ``ring_kb`` that has not all of them."""
    each = -(-rows // FEWEST_BLOCKS)
    units = columns // (config["columns"] * config["warps"]) * -(-each // TILE)
    return config["bulk"] and config["columns"] <= MOST_COLUMNS and units > 1 and (
        2 * each * columns > 1024 * config["ring_kb"])


def _needs(region: Region) -> str | None:
    rows, columns = count_rows(row_groups(region)), region.value("weight").shape[-1]
    if reason := refuse_dtypes(region):
        return reason
    if columns % STEP:
        return f"{columns} inputs are not a multiple of {STEP}"
    if rows > FEWEST_BLOCKS * TILE * MOST_TILES:
        return f"{rows} output rows are too many for one wave"
    return None


def _needs_pairs(region: Region) -> str | None:
    return refuse_pairs(region) or _needs(region)


def _needs_router(region: Region) -> str | None:
    return refuse_router(region) or _needs(region)


def _define(name: str, pattern: str, needs: Any) -> KernelDef:
    return KernelDef(id=f"cute.staged_linear{name}", pattern=pattern, entry=ENTRY, arch=ARCH, rows=ROWS, needs=needs,
                     configs=configs, note="as cute.skinny_linear, weights in shared memory before the wait")


KERNELS: tuple[KernelDef, ...] = (
    _define("", PROJECTION, _needs),
    _define("_add", PROJECTION_ADD, _needs),
    _define("_router", PROJECTION_ROUTER, _needs_router),
    *(_define(f"_{short}", activated_projection(op, router=False), _needs_pairs)
      for short, op in (("situ", "situ_and_mul"), ("silu", "silu_and_mul"))),
    *(_define(f"_router_{short}", activated_projection(op, router=True), _needs_router)
      for short, op in (("situ", "situ_and_mul"), ("silu", "silu_and_mul"))),
)
