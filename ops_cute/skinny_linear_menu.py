"""Where ``cute.skinny_linear`` and its epilogues fit and their launch configurations. No cutlass here."""
from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import cache
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

ENTRY = "k3plan.ops_cute.skinny_linear:bind"
ARCH = ("sm_90", "sm_100", "sm_103")
ROWS = (1, 8)  # columns of one operand of the matrix units
TILE = 16  # rows of weights in the other
STEP = 32  # elements of K that a warp takes at a time: 16 bytes a lane of a row
BLOCKS = (132, 152, 264)  # one a multiprocessor of an H200 and of a GB300, and two of an H200
# registers that hold weights in flight, and bytes in flight a multiprocessor that keep memory busy
FLIGHT_REGISTERS = 96
WANTED_BYTES = 48 * 1024


def count_rows(groups: tuple[int, int, int]) -> int:
    """Rows as the blocks count them, gate and up side by side; an odd number before the pairs is filled up."""
    router, plain, pairs = groups
    return router + plain + (2 * pairs + (router + plain) % 2 if pairs else 0)


def row_blocks(config: Mapping[str, Any], rows: int) -> int:
    """Blocks of threads along the rows."""
    return max(1, min(config["blocks"] // config["splits"], -(-rows // 2)))


def rows_each(config: Mapping[str, Any], rows: int) -> int:
    """Most rows of a block: pairs of rows are spread evenly."""
    pairs = -(-rows // 2)
    return 2 * -(-pairs // row_blocks(config, rows))


def steps_each(config: Mapping[str, Any], columns: int) -> int:
    return -(-columns // (STEP * config["warps"] * config["splits"]))


def configs(region: Region) -> list[dict[str, Any]]:
    """Candidates, most promising first by arithmetic on the shape; a tuned table replaces the guess."""
    return [dict(config) for config in _candidates(count_rows(row_groups(region)), region.value("weight").shape[1])]


@cache
def _candidates(rows: int, columns: int) -> tuple[dict[str, int], ...]:
    found = []
    for blocks, warps, splits in itertools.product(BLOCKS, (8, 4, 16), (1, 2, 4, 8)):
        config = {"blocks": blocks, "warps": warps, "splits": splits}
        tiles = -(-rows_each(config, rows) // TILE)
        steps = steps_each(config, columns)
        # a warp without work, or sums that fill the registers
        if STEP * warps * splits > max(columns, STEP * 4) or tiles > 8 or (warps == 16 and tiles > 4):
            continue
        deep = max(1, min(steps, FLIGHT_REGISTERS // (8 * tiles + 4)))
        for depth in dict.fromkeys((deep, max(1, deep // 2))):
            found.append({**config, "depth": depth})
    return tuple(sorted(found, key=lambda config: _distance(config, rows, columns)))


def _distance(config: Mapping[str, Any], rows: int, columns: int) -> float:
    """Octaves of what is wasted: empty rows of a tile, an uneven last step, too little in flight; a split costs half
    of one."""
    each = rows_each(config, rows)
    tiles, steps = -(-each // TILE), steps_each(config, columns)
    lanes = each / (tiles * TILE)
    used = columns / (steps * STEP * config["warps"] * config["splits"])
    even = rows / (each * row_blocks(config, rows))
    whole = each * columns * 2 // config["splits"]
    flight = min(whole, config["warps"] * config["depth"] * STEP * 2 * each) * config["blocks"] / 132
    short = max(0.0, math.log2(min(WANTED_BYTES, whole) / flight)) if flight else 9.0
    return (0.3 * -math.log2(lanes) - math.log2(used) - math.log2(even) + short + 0.5 * (config["splits"] > 1)
            + 0.1 * math.log2(config["splits"]) + 0.2 * (config["blocks"] != 132) + 0.05 * (config["warps"] != 8))


def _needs(region: Region) -> str | None:
    rows, columns = count_rows(row_groups(region)), region.value("weight").shape[-1]
    if reason := refuse_dtypes(region):
        return reason
    if columns % 8:
        return f"{columns} inputs are not a multiple of 8"
    if not _candidates(rows, columns):
        return f"{rows} output rows are too many for one wave"
    return None


def _needs_pairs(region: Region) -> str | None:
    return refuse_pairs(region) or _needs(region)


def _needs_router(region: Region) -> str | None:
    return refuse_router(region) or _needs(region)


def _define(name: str, pattern: str, needs: Any, note: str) -> KernelDef:
    return KernelDef(id=f"cute.{name}", pattern=pattern, entry=ENTRY, arch=ARCH, rows=ROWS, needs=needs,
                     configs=configs, note=note)


KERNELS: tuple[KernelDef, ...] = (
    _define("skinny_linear", PROJECTION, _needs, "one projection, its rows spread evenly"),
    _define("skinny_linear_add", PROJECTION_ADD, _needs,
            "projection plus another value"),
    _define("skinny_linear_router", PROJECTION_ROUTER,
            _needs_router, "fp32 router rows and bf16 rows in one launch"),
    *(_define(f"skinny_linear_{short}", activated_projection(op, router=False), _needs_pairs,
              "projection with gate and up activated")
      for short, op in (("situ", "situ_and_mul"), ("silu", "silu_and_mul"))),
    *(_define(f"skinny_linear_router_{short}", activated_projection(op, router=True), _needs_router,
              "router, projection, gate and up activated in one launch")
      for short, op in (("situ", "situ_and_mul"), ("silu", "silu_and_mul"))),
)
