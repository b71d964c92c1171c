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
WARP_COLUMNS = 128  # 4 columns a thread, so that a row of the mix is one 8-byte load


def count_parts(config: dict[str, Any], columns: int) -> int:
    """Thread blocks of a row's cluster."""
    return -(-columns // (config["warps"] * WARP_COLUMNS))


def configs(region: Region) -> list[dict[str, Any]]:
    """Seven blocks of 1024 columns for Kimi K3's 7168; more blocks have less to add up each, and more to exchange."""
    columns = region.value("prefix").shape[1]
    fitting = [{"warps": w} for w in (8, 4, 16, 7)
               if count_parts({"warps": w}, columns) <= CLUSTER and (w - 1) * WARP_COLUMNS < columns]
    return fitting or [{"warps": min(w for w in (1, 2, 4, 8, 16) if count_parts({"warps": w}, columns) <= CLUSTER)}]


def needs(region: Region) -> str | None:
    """Sources and dtypes that the kernel reads."""
    blocks = sum(node.op == "attn_res" and len(node.inputs) - 2 for node in region.nodes)
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
