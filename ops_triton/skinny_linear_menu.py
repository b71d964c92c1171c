"""Where ``skinny_linear`` fits, its launch configurations and its workspace. No triton here."""
from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from ..compiler.call import Scratch
from ..compiler.fusions import (
    PROJECTION,
    PROJECTION_ADD,
    PROJECTION_GATE,
    PROJECTION_ROUTER,
    activated_projection,
    refuse_dtypes,
    refuse_pairs,
    refuse_router,
    row_groups,
)
from ..compiler.kernel import KernelDef, Region

ENTRY = "k3plan.ops_triton.skinny_linear:bind"
ROWS = (1, 64)
FMA_ROWS = 8  # most rows for which multiply-add in registers is a candidate
LANE_ELEMENTS = 8  # bf16 elements in one 16-byte load
WARP_ELEMENTS = 32 * LANE_ELEMENTS  # elements of K that one warp covers with one load a lane

MULTIPROCESSORS = 132
FEW_BLOCKS = 32
# a block of "fma" has rows x 16 bytes a thread in flight, one of "dot" its stages: what keeps memory busy
WANTED_BLOCKS = {"fma": 800, "dot": 400}
# (rows, elements of K, stages); the second list is for 64 padded rows, whose x tile is the larger part
DOT_TILES = ((32, 128, 4), (16, 256, 4), (16, 128, 6), (32, 256, 3), (64, 128, 3), (16, 64, 4))
DOT_TILES_64 = ((64, 64, 4), (32, 64, 5), (32, 128, 3), (64, 128, 3), (128, 64, 4))


def padded_rows(form: str, rows: int) -> int:
    """Rows of the accumulator: a power of two, and 16 at least for the matrix units."""
    wanted = 1 << (rows - 1).bit_length()
    return wanted if form == "fma" else max(wanted, 16)


def count_tiles(config: Mapping[str, Any], router: int, plain: int, activated: int) -> tuple[int, int, int]:
    """Thread blocks for the router's rows, for plain rows, and for pairs of gate and up rows."""
    tile = config["rows"]
    return -(-router // tile), -(-plain // tile), -(-activated // (tile // 2))


def _rows(region: Region) -> int:
    return region.value("x").shape[0]


def scratch(region: Region, config: Mapping[str, Any]) -> dict[str, Scratch]:
    """Partial sums of the splits, and one arrival counter a tile."""
    if config["split"] == 1:
        return {}
    tiles = sum(count_tiles(config, *row_groups(region)))
    each = config["rows"] * padded_rows(config["form"], _rows(region))
    return {"partial": Scratch((config["split"], tiles * each), "fp32"),
            "arrivals": Scratch((tiles,), "i32", zeroed=True)}


def configs(region: Region) -> list[dict[str, Any]]:
    """Candidates, most promising first by arithmetic on the shape; a tuned table replaces the guess."""
    rows, columns = _rows(region), region.value("weight").shape[1]
    router, plain, pairs = row_groups(region)
    outputs = router + plain + 2 * pairs
    found = [*(_fma(columns) if rows <= FMA_ROWS else ()), *_dot(rows, columns)]
    # at more than 4 rows the matrix units do what would be half of the multiply-add rate
    guesses = [c for c in found if (c["form"] == "fma") == (rows <= 4)]
    first = min(guesses, key=lambda c: _distance(c, outputs, columns))
    others = [c for c in found if c is not first and (_blocks(c, outputs) >= FEW_BLOCKS or c["split"] > 1)]
    return [first, *sorted(others, key=lambda c: _distance(c, outputs, columns))]


def _blocks(config: Mapping[str, Any], outputs: int) -> int:
    return -(-outputs // config["rows"]) * config["split"]


def _distance(config: Mapping[str, Any], outputs: int, columns: int) -> float:
    """Octaves from a full device, below one block a multiprocessor counted twice; a split costs one and a bit."""
    blocks = _blocks(config, outputs)
    ragged = columns % (config["block"] * config["split"]) != 0
    single = config["block"] * config["split"] >= columns  # one step a block: nothing to overlap
    return (abs(math.log2(blocks / WANTED_BLOCKS[config["form"]])) + max(0.0, math.log2(MULTIPROCESSORS / blocks))
            + 1.1 * math.log2(config["split"]) + 0.5 * ragged + 0.1 * single)


def _fma(columns: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for warps, tile, split in itertools.product((4, 8, 2, 1), (4, 2, 8), (1, 2, 4, 8)):
        block = warps * WARP_ELEMENTS
        if split == 1 or columns >= 2 * split * block:
            found.append({"form": "fma", "rows": tile, "block": block, "split": split, "warps": warps, "stages": 1})
    return [c for c in found if c["block"] < 2 * columns] or [c for c in found if c["warps"] == 1]


def _dot(rows: int, columns: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for (tile, block, stages), split in itertools.product(DOT_TILES if rows <= 32 else DOT_TILES_64, (1, 2, 4, 8)):
        if split == 1 or columns >= 4 * split * block:
            found.append({"form": "dot", "rows": tile, "block": block, "split": split, "warps": 4, "stages": stages})
    return [c for c in found if c["block"] <= columns] or [{**found[-1], "block": 32, "split": 1}]


def _needs_pairs(region: Region) -> str | None:
    return refuse_pairs(region) or refuse_dtypes(region)


def needs_router(region: Region) -> str | None:
    return refuse_router(region) or refuse_dtypes(region)


def _define(name: str, pattern: str, needs: Any, note: str) -> KernelDef:
    return KernelDef(id=f"triton.{name}", pattern=pattern, entry=ENTRY, rows=ROWS, needs=needs, scratch=scratch,
                     configs=configs, note=note)


KERNELS: tuple[KernelDef, ...] = (
    _define("skinny_linear", PROJECTION, refuse_dtypes, "one projection"),
    _define("skinny_linear_add", PROJECTION_ADD, refuse_dtypes,
            "projection plus another value"),
    _define("skinny_linear_gate", PROJECTION_GATE, refuse_dtypes,
            "another value times the sigmoid of the projection"),
    _define("skinny_linear_router", PROJECTION_ROUTER,
            needs_router, "fp32 router rows and bf16 rows in one launch"),
    *(_define(f"skinny_linear_{short}", activated_projection(op, router=False), _needs_pairs,
              "projection with gate and up activated")
      for short, op in (("situ", "situ_and_mul"), ("silu", "silu_and_mul"))),
    *(_define(f"skinny_linear_router_{short}", activated_projection(op, router=True), needs_router,
              "router, projection, gate and up activated in one launch")
      for short, op in (("situ", "situ_and_mul"), ("silu", "silu_and_mul"))),
)
