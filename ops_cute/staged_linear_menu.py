"""Where ``cute.staged_linear`` fits and its launch configurations. No cutlass here."""
from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from ..compiler.fusions import PROJECTION, refuse_dtypes
from ..compiler.kernel import KernelDef, Region

ENTRY = "k3plan.ops_cute.staged_linear:bind"
ARCH = ("sm_90", "sm_100", "sm_103")
ROWS = (1, 8)  # columns of one operand of the matrix units
TILE = 16  # rows of weights in the other
STEP = 32  # columns of K of one shared load of a warp, 16 bytes a lane
MOST_WARPS = 16
MOST_TILES = 8  # of a block: 4 sums each in every lane
FEWEST_BLOCKS = 132  # multiprocessors of the smallest GPU that the kernel is for
# columns whose x a lane holds twice, at 2 words of registers for 32 columns each: few warps have room for more
MOST_COLUMNS = {4: 448}
DEFAULT_COLUMNS = 256


def columns_each(columns: int, warps: int) -> int:
    """Columns of a warp's unit: the most that divide its share evenly and that its registers hold x for. Odd numbers of
    steps first, whose rows need no padding."""
    steps = columns // (STEP * warps)
    most = MOST_COLUMNS.get(warps, DEFAULT_COLUMNS) // STEP
    fitting = [n for n in range(1, most + 1) if steps % n == 0]
    return STEP * max(fitting, key=lambda n: n + n % 2)


def configs(region: Region) -> list[dict[str, Any]]:
    """Candidates, most promising first; a tuned table replaces the guess. ``warps`` share the columns, ``ring_kb`` of a
    block's shared memory hold weights in flight, ``bulk``: the copy engine fetches rows, else lanes 16 bytes each."""
    return [dict(config) for config in _candidates(region.value("weight").shape[1])]


@cache
def _candidates(columns: int) -> tuple[Mapping[str, Any], ...]:
    steps = columns // STEP
    able = [warps for warps in range(1, MOST_WARPS + 1) if steps % warps == 0]
    able.sort(key=lambda warps: abs(warps - 8))
    first, few = able[0], max((w for w in able if w <= able[0] // 2), default=able[0])
    found = [(first, kb, bulk) for bulk in (True, False) for kb in (200, 144, 96)]
    found += [(few, 200, True), (few, 144, False)] if few != first else [(first, 48, True)]
    return tuple({"warps": warps, "ring_kb": kb, "bulk": bulk} for warps, kb, bulk in found)


def _needs(region: Region) -> str | None:
    rows, columns = region.value("weight").shape
    if reason := refuse_dtypes(region):
        return reason
    if columns % STEP:
        return f"{columns} inputs are not a multiple of {STEP}"
    if rows > FEWEST_BLOCKS * TILE * MOST_TILES:
        return f"{rows} output rows are too many for one wave"
    return None


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(id="cute.staged_linear", pattern=PROJECTION, entry=ENTRY, arch=ARCH, rows=ROWS, needs=_needs,
              configs=configs, note="one projection, its weights staged in shared memory before the wait"),
)
