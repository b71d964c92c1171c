"""Where ``cute.attn_res`` fits and its launch configurations. No cutlass here."""
from __future__ import annotations

from typing import Any

from ..compiler.fusions import ADD_MIX
from ..compiler.kernel import KernelDef, Region

ENTRY = "k3plan.ops_cute.attn_res:bind"
ARCH = ("sm_90", "sm_100", "sm_103")
BLOCKS = 8  # most blocks of the residual stream: rows of one operand of the matrix units
ROWS = (1, 64)
CLUSTER = 16  # most thread blocks that share a row
MOST_WARPS = 16  # of a block
WARP_COLUMNS = 128  # 4 columns a thread, so that a row of the mix is one 8-byte load
AHEAD_COLUMNS = 256  # of a warp where settled blocks are read before the wait: 8 columns a thread


def count_parts(warps: int, columns: int) -> int:
    """Thread blocks of a row's cluster."""
    return -(-columns // (warps * WARP_COLUMNS))


def configs(region: Region) -> list[dict[str, Any]]:
    """Seven blocks of 1024 columns for Kimi K3's 7168; more blocks have less to add up each, and more to exchange.

    ``settled``: blocks that are settled are read and folded before the wait, by threads of 8 columns; where none is,
    such a configuration is the same as without. It is first because a GPU that nobody has timed then has the form
    whose work behind the wait is least; on an H200 the table says what was timed."""
    columns = region.value("prefix").shape[1]
    fitting: list[dict[str, Any]] = [{"warps": w} for w in (8, 4, 16, 7) if _fits(w, columns)]
    fitting = fitting or [{"warps": min(w for w in (1, 2, 4, 8, 16) if count_parts(w, columns) <= CLUSTER)}]
    # one block of threads for a row has no exchange, and 72 registers a thread
    most = 28 if count_blocks(region) <= 4 else 14
    ahead: list[dict[str, Any]] = [{"warps": w, "settled": True} for w in (4, 7, 14, 28)
                                   if w <= most and _fits(w, columns) and (w - 1) * AHEAD_COLUMNS < columns]
    return (ahead or [{"warps": 1, "settled": True}]) + fitting


def _fits(warps: int, columns: int) -> bool:
    return count_parts(warps, columns) <= CLUSTER and (warps - 1) * WARP_COLUMNS < columns


def count_blocks(region: Region) -> int:
    """Finished blocks of layers among the sources."""
    return sum(node.op == "attn_res" and len(node.inputs) - 2 for node in region.nodes)


def needs(region: Region) -> str | None:
    """Sources and dtypes that the kernel reads."""
    blocks = count_blocks(region)
    columns = region.value("prefix").shape[1]
    if not 1 <= blocks <= BLOCKS:
        return f"{blocks} blocks, the kernel takes 1 to {BLOCKS}"
    if columns % 8:
        return f"{columns} columns are not a multiple of 8"
    if columns > CLUSTER * 16 * WARP_COLUMNS:
        return f"{columns} columns, a cluster takes {CLUSTER * 16 * WARP_COLUMNS}"
    for name in ("prefix", "delta", "weight"):
        if name in region.binding and region.value(name).dtype != "bf16":
            return f"{name} is {region.value(name).dtype}, the kernel reads bf16"
    return None


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(
        id="cute.attn_res", entry=ENTRY, arch=ARCH, rows=ROWS, needs=needs, configs=configs,
        pattern=ADD_MIX,
        note="add, mix over the blocks, norm; a cluster of thread blocks a row",
    ),
    KernelDef(
        id="cute.attn_res_mix", entry=ENTRY, arch=ARCH, rows=ROWS, needs=needs, configs=configs,
        pattern="h = attn_res(score, prefix, ...)\n-> h", note="the mix alone",
    ),
)
