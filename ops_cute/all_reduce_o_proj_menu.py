"""Where a projection split over ranks fuses with its sum and the attention residuals. No cutlass here."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..compiler.call import Scratch
from ..compiler.fusions import MIX
from ..compiler.kernel import KernelDef, Region
from .all_reduce_attn_res_menu import ARCH, LANES, clusters, mailbox, with_settled
from .all_reduce_attn_res_menu import refusal as refusal_of_mix

ENTRY = "k3plan.ops_cute.all_reduce_o_proj:bind"
MOST_ROWS = 8  # columns of one product of the matrix units
UNIT = 32  # inputs that a warp takes at once
TILE = 16  # outputs of one product
MOST_UNITS = 12  # of a warp: their weights fill 96 registers of a thread


def splits(inputs: int, warps: int) -> int:
    """Warps that share the inputs of a tile; 0 when no number of them fits."""
    for count in (1, 2, 4, 8):
        if count <= warps and inputs % (UNIT * count) == 0 and inputs // (UNIT * count) <= MOST_UNITS:
            return count
    return 0


def producers(width: int, inputs: int, config: Mapping[str, Any]) -> int:
    """Clusters that multiply; each block of them has whole tiles."""
    warps = config["threads"] // LANES
    tiles = warps // splits(inputs, warps)
    return -(-width // (TILE * tiles * config["cluster"]))


def scratch(region: Region, config: Mapping[str, Any]) -> dict[str, Scratch]:
    rows, inputs = region.value("a").shape
    width = region.value("w").shape[0]
    blocks = (rows + producers(width, inputs, config)) * config["cluster"]
    return mailbox(int(region.attrs("all_reduce")["ranks"]), rows * width // 8, blocks)


def configs(region: Region) -> list[dict[str, Any]]:
    inputs = region.value("a").shape[1]
    return with_settled([c for c in clusters(region) if splits(inputs, c["threads"] // LANES)
                         and (c["threads"] // LANES) % splits(inputs, c["threads"] // LANES) == 0])


def _needs(region: Region) -> str | None:
    for name in ("a", "w"):
        if region.value(name).dtype != "bf16":
            return f"{name} is {region.value(name).dtype}, the kernel reads bf16"
    width, inputs = region.value("w").shape
    if width % TILE or inputs % UNIT:
        return f"a weight of {width} x {inputs}, not whole tiles of {TILE} x {UNIT}"
    reason = refusal_of_mix(region, region.value("w").shape[0])
    if reason is None and not configs(region):
        reason = f"{inputs} inputs: a warp holds at most {UNIT * MOST_UNITS}"
    return reason


def _define(name: str, middle: str, note: str) -> KernelDef:
    return KernelDef(id=f"cute.{name}", pattern=f"o = linear(a, w)\n{middle}\n{MIX}", entry=ENTRY, arch=ARCH,
                     rows=(1, MOST_ROWS), needs=_needs, scratch=scratch, configs=configs, note=note)


KERNELS: tuple[KernelDef, ...] = (
    _define("linear_all_reduce_add_attn_res", "y = all_reduce(o)\np = residual_add(prefix, y)",
            "projection, sum over ranks, residual, mix over the blocks, norm"),
    _define("linear_all_reduce_attn_res", "p = all_reduce(o)", "the same where a block begins"),
)
