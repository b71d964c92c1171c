"""Where ``attn_res`` and the plain norms fit, their launch configurations and workspace. No triton here."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..compiler.call import Scratch
from ..compiler.fusions import ADD_MIX
from ..compiler.kernel import KernelDef, Region

BLOCKS = 8  # most blocks of the residual stream that the kernel takes
SOURCES = 16  # rows of the tile: blocks, prefix, and the score as three bf16 rows
ROWS = (1, 64)


def slices(config: Mapping[str, Any], columns: int) -> int:
    """Thread blocks that share a row."""
    return -(-columns // config["columns"])


def scratch(region: Region, config: Mapping[str, Any]) -> dict[str, Scratch]:
    """Mailboxes of the exchange between the blocks of a row, and each row's epoch."""
    rows, columns = region.value("prefix").shape
    count = slices(config, columns)
    if count == 1:
        return {}
    return {"mailbox": Scratch((rows, count, SOURCES, SOURCES), "i64", zeroed=True, kept=True),
            "epoch": Scratch((rows,), "i32", zeroed=True, kept=True)}


def configs(region: Region) -> list[dict[str, Any]]:
    """Seven blocks of 1024 columns a row for Kimi K3; fewer columns a block spread the loads, more exchange less."""
    columns = region.value("prefix").shape[1]
    found = [{"columns": c, "warps": w} for c, w in ((1024, 4), (1024, 8), (512, 4), (2048, 8), (256, 4))]
    return [c for c in found if c["columns"] < 2 * columns] or found[-1:]


def norm_configs(region: Region) -> list[dict[str, Any]]:
    columns = region.value("weight").shape[0]
    return [{"warps": w} for w in ((8, 16, 4) if columns > 4096 else (4, 8, 2) if columns > 1024 else (2, 4, 1))]


def _needs(region: Region) -> str | None:
    blocks = sum(node.op == "attn_res" and len(node.inputs) - 2 for node in region.nodes)
    if blocks > BLOCKS:
        return f"{blocks} blocks, the kernel takes {BLOCKS}"
    return _needs_bf16(region)


def _needs_bf16(region: Region) -> str | None:
    for name in ("prefix", "x", "delta"):
        if name in region.binding and region.value(name).dtype != "bf16":
            return f"{name} is {region.value(name).dtype}, the kernel reads bf16"
    return None


_ENTRY = "k3plan.ops_triton.attn_res:"

KERNELS: tuple[KernelDef, ...] = (
    KernelDef(
        id="triton.attn_res", entry=_ENTRY + "bind", rows=ROWS, needs=_needs, scratch=scratch, configs=configs,
        pattern=ADD_MIX,
        note="add, mix over the blocks, norm",
    ),
    KernelDef(
        id="triton.attn_res_mix", entry=_ENTRY + "bind", rows=ROWS, needs=_needs, scratch=scratch, configs=configs,
        pattern="h = attn_res(score, prefix, ...)\n-> h", note="the mix alone",
    ),
    KernelDef(
        id="triton.add_norm", entry=_ENTRY + "bind_norm", needs=_needs_bf16, configs=norm_configs,
        pattern="p = residual_add(prefix, delta)\nh = rms_norm(p, weight)\n-> p, h",
        note="residual stream without blocks",
    ),
    KernelDef(
        id="triton.rms_norm", entry=_ENTRY + "bind_norm", needs=_needs_bf16, configs=norm_configs,
        pattern="h = rms_norm(x, weight)\n-> h", note="rows may be a strided view",
    ),
)
