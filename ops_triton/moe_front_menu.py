"""Where ``moe_front`` fits, its launch configurations and its workspace. No triton here."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..compiler.call import Scratch
from ..compiler.fusions import MOE_FRONT_SHARDED, row_groups
from ..compiler.kernel import KernelDef, Region
from .collectives_menu import mailbox, ranks_of
from .skinny_linear_menu import configs as projection_configs
from .skinny_linear_menu import count_tiles, needs_router

MOST_KEYS = 4096  # of one row's top-k
UNITS = 128  # words of the latent that one block collects from each rank

def words(region: Region) -> tuple[int, int]:
    """Words of 4 bytes that a rank sends of one row: fp32 logits, pairs of bf16."""
    router, plain, _ = row_groups(region)
    return router, plain // 2


def collectors(words_of_latent: int) -> int:
    """Blocks of one row that wait for the other ranks: one routes, the others gather."""
    return 1 + -(-words_of_latent // UNITS)


def scratch(region: Region, config: Mapping[str, Any]) -> dict[str, Scratch]:
    """The mailbox, and the logits of all ranks for the block that routes a row."""
    rows, experts = region.value("every").shape
    logits, latent = words(region)
    blocks = sum(count_tiles(config, *row_groups(region))) + rows * collectors(latent)
    return mailbox(ranks_of(region), rows * (logits + latent), blocks) | {
        "gathered": Scratch((rows, experts), "fp32")}


def configs(region: Region) -> list[dict[str, Any]]:
    """Those of the projection that do not split K: the last block of a split would have to send."""
    return [c for c in projection_configs(region) if c["split"] == 1 and c["rows"] % 2 == 0]


def _needs(region: Region) -> str | None:
    ranks, (router, plain, _) = ranks_of(region), row_groups(region)
    part, route = region.maker("part"), region.attrs("router_topk")
    assert part is not None
    if ranks > 32:
        return f"{ranks} ranks, a block waits for 32 at most"
    if (part.attrs["start"], part.attrs["stop"]) != (0, plain) or plain % 2:
        return "the gathered rows are not the first of the projection, an even number of them"
    if any(node.attrs["dim"] != 1 for node in region.nodes if node.op == "all_gather"):
        return "the kernel joins columns"
    if route["groups"] != 1:
        return f"experts in {route['groups']} groups, the kernel has one"
    keys = (1 << (ranks - 1).bit_length()) * (1 << (router - 1).bit_length())
    if keys > MOST_KEYS:
        return f"{keys} keys a row, {MOST_KEYS} at most"
    return needs_router(region)


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(id="triton.moe_front", pattern=MOE_FRONT_SHARDED, entry="k3plan.ops_triton.moe_front:bind", rows=(1, 64),
              needs=_needs, scratch=scratch, configs=configs,
              note="sharded router, latent and shared projections, both gathers and the top-k in one launch"),
)
