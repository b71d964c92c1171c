"""Where the tail of a sparse layer fits with the next layer's attention residuals. No cutlass here."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..compiler.call import Scratch
from ..compiler.fusions import MOE_TAIL_ADD_MIX
from ..compiler.kernel import KernelDef, Region
from .all_reduce_attn_res_menu import ARCH, LANES, MOST_BLOCKS, MOST_THREADS, mailbox, with_settled
from .moe_tail_menu import fitting, message, refusal, sizes, tiles

ENTRY = "k3plan.ops_cute.moe_tail_attn_res:bind"
MOST_ROWS = 8
CLUSTERS = (7, 8, 4, 2, 1)  # the first two that fit


def mixing_threads(width: int, cluster: int) -> int:
    """Of each block of the cluster that mixes a row: one for 8 columns."""
    return LANES * -(-width // (8 * cluster * LANES))


def scratch(region: Region, config: Mapping[str, Any]) -> dict[str, Scratch]:
    rows, latent, stripe, ranks = sizes(region, "up_weight")
    return mailbox(ranks, message(rows, latent, stripe), (tiles(stripe, config) + rows) * config["cluster"])


def configs(region: Region) -> list[dict[str, Any]]:
    """As ``moe_tail_menu.configs``, of those the clusters whose blocks have threads enough to mix a row. Seven blocks
    of Kimi K3's 7168 columns have no idle thread."""
    width = region.value("h").shape[1]
    return with_settled([
        config for config in fitting(region, "up_weight", clusters=CLUSTERS, each=2)
        if mixing_threads(width, config["cluster"]) <= min(MOST_THREADS, 32 * config["tiles"] * config["parts"])])


def _needs(region: Region) -> str | None:
    blocks = sum(node.op == "attn_res" and len(node.inputs) - 2 for node in region.nodes)
    if not 1 <= blocks <= MOST_BLOCKS:
        return f"{blocks} blocks, the kernel takes 1 to {MOST_BLOCKS}"
    reason = refusal(region, "up_weight", CLUSTERS)
    if reason is None and not configs(region):
        width = region.value("h").shape[1]
        reason = f"rows of {width}: no cluster that takes the latent has threads for 8 columns each"
    return reason


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(id="cute.moe_tail_add_attn_res", pattern=MOE_TAIL_ADD_MIX, entry=ENTRY, arch=ARCH, rows=(1, MOST_ROWS),
              needs=_needs, scratch=scratch, configs=configs,
              note="the tail of a sparse layer, and from the mailbox the residual, the mix over the blocks and the "
                   "norm before the next layer; one launch"),
)
