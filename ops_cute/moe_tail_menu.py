"""Where the tail of a sparse layer fits, its configurations and workspace. No cutlass here."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..compiler.call import Scratch
from ..compiler.fusions import MOE_TAIL
from ..compiler.kernel import KernelDef, Region
from .all_reduce_attn_res_menu import ARCH, MOST_RANKS, mailbox

ENTRY = "k3plan.ops_cute.moe_tail:bind"
MOST_ROWS = 16
FEW_ROWS = 4  # up to here weights in registers before the wait gain less than they cost
COLUMNS = 8  # rows of a step that one product of the matrix units takes
UNIT = 32  # inputs of the up-projection that a warp takes at once
MOST_UNITS = 8  # of them whose weights a thread's registers hold
TILE = 16  # outputs of one product
CLUSTERS = (8, 4, 2, 1)  # the first that fits
MOST_BLOCKS = 256  # of 128 threads, that wait for each other: two on each multiprocessor of an H200


def message(rows: int, latent: int, stripe: int) -> int:
    """Fragments that a rank sends to another: its part of the latent, of the other's shared columns, its result."""
    return rows * (latent + 2 * stripe) // 8


def tiles(stripe: int, config: Mapping[str, Any]) -> int:
    """Clusters, each with ``tiles`` times 16 outputs."""
    return -(-stripe // (TILE * config["tiles"]))


def sizes(region: Region, weight: str) -> tuple[int, int, int, int]:
    """Rows, latent width, columns of a rank, ranks; ``weight`` is the name of the up-projection's in the pattern."""
    rows, latent = region.value("x").shape
    return rows, latent, region.value(weight).shape[0], int(region.attrs("all_reduce")["ranks"])


def scratch(region: Region, config: Mapping[str, Any]) -> dict[str, Scratch]:
    rows, latent, stripe, ranks = sizes(region, "weight")
    return mailbox(ranks, message(rows, latent, stripe), tiles(stripe, config) * config["cluster"])


def fitting(region: Region, weight: str, *, clusters: Sequence[int], each: int) -> list[dict[str, Any]]:
    """``cluster`` blocks split the latent, ``tiles`` times 16 outputs a cluster, ``parts`` warps a tile split the
    latent of a block. ``early``: weights into registers before the wait for the producers, not only into the L2 cache.
    Of ``clusters`` the first ``each`` that fit.

    The first is the fastest in a chain (H200, TP16: early takes 5.2, 5.9, 6.6 and 7.8 us at 1, 2, 4 and 8 rows, late
    4.9, 5.2, 5.9 and 8.2; two tiles took 6.5 and 16.4 at 1 and 8 when four took 5.9 and 8.4)."""
    rows, latent, stripe, _ = sizes(region, weight)
    first = rows > FEW_ROWS
    found = []
    for count, parts, early in ((4, 2, first), (4, 2, not first), (2, 2, True), (2, 2, False), (2, 1, True),
                                (4, 1, True)):
        taken = 0
        for cluster in clusters:
            config = {"cluster": cluster, "tiles": count, "parts": parts, "early": early}
            units, left = divmod(latent, UNIT * cluster * parts)
            threads = tiles(stripe, config) * cluster * count * parts * 32
            if taken < each and not left and units <= MOST_UNITS and threads <= MOST_BLOCKS * 128:
                found.append(config)
                taken += 1
    return found


def configs(region: Region) -> list[dict[str, Any]]:
    return fitting(region, "weight", clusters=CLUSTERS, each=1)


def refusal(region: Region, weight: str, clusters: Sequence[int]) -> str | None:
    """Why a tail cannot be taken by any of ``clusters``; None when it can."""
    _, latent, stripe, ranks = sizes(region, weight)
    for name in ("x", "other", weight, "norm"):
        if region.value(name).dtype != "bf16":
            return f"{name} is {region.value(name).dtype}, the kernel reads bf16"
    if ranks > MOST_RANKS:
        return f"{ranks} ranks, the kernel takes {MOST_RANKS}"
    if stripe % 8:
        return f"{stripe} columns of a rank, not whole fragments of 8"
    if any(node.attrs.get("dim", 1) != 1 for node in region.nodes):
        return "the kernel splits and joins columns"
    if not fitting(region, weight, clusters=clusters, each=1):
        return f"a latent of {latent} and {stripe} columns of a rank: no cluster takes them with {MOST_BLOCKS} blocks"
    return None


def _needs(region: Region) -> str | None:
    return refusal(region, "weight", CLUSTERS)


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(id="cute.moe_tail", pattern=MOE_TAIL, entry=ENTRY, arch=ARCH, rows=(1, MOST_ROWS), needs=_needs,
              scratch=scratch, configs=configs,
              note="sum of the latent, its norm, a rank's columns of the up-projection, plus its columns of the shared "
                   "experts' sum, to all ranks; one launch"),
)
