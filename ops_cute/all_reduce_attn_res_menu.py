"""Where the sum over ranks with attention residuals fits, its configurations and workspace. No cutlass here."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..compiler.call import Scratch
from ..compiler.fusions import MIX
from ..compiler.kernel import KernelDef, Region
from .protocol import FRAGMENT_WORDS, HEALTH_WORDS, PROTOCOL

ENTRY = "k3plan.ops_cute.all_reduce_attn_res:bind"
ARCH = ("sm_90", "sm_100", "sm_103")
LANES = 32
MOST_BLOCKS = 8  # finished blocks of layers that fit a thread's registers
MOST_CLUSTER = 8  # every GPU grants a cluster of 8
MOST_THREADS = 256
MOST_RANKS = 32  # a report has a bit for each
ONE_SHOT_ROWS = 8  # above it every rank would send too much to every other
MOST_ROWS = 64


def mailbox(ranks: int, fragments: int, blocks: int) -> dict[str, Scratch]:
    """What an exchange of ``fragments`` a rank needs when ``blocks`` blocks of threads count an epoch each."""
    return {"mailbox": Scratch((PROTOCOL.parities, ranks, fragments * FRAGMENT_WORDS), "i32", zeroed=True, kept=True),
            "epochs": Scratch((blocks,), "i32", zeroed=True, kept=True),
            "health": Scratch((HEALTH_WORDS,), "i32", zeroed=True, kept=True)}


def scratch(region: Region, config: Mapping[str, Any]) -> dict[str, Scratch]:
    rows, width = region.value("x").shape
    ranks = int(region.attrs("all_reduce")["ranks"])
    return mailbox(ranks, message(rows, width // 8, ranks, config["shots"]), rows * config["cluster"])


def message(rows: int, fragments: int, ranks: int, shots: int) -> int:
    """Fragments of a slot: a rank's whole part, or what it sends to the owner of some columns and what it owns."""
    return rows * fragments if shots == 1 else 2 * rows * (fragments // ranks)


def clusters(region: Region) -> list[dict[str, Any]]:
    """Clusters whose threads have a fragment of 8 columns each: the fewest idle threads, then the largest cluster.

    Fewer blocks lose (H200, TP16, one row, one finished block: 7 blocks 2.0 us, 4 blocks 2.5)."""
    fragments = region.value("h").shape[1] // 8
    found = []
    for cluster in range(min(MOST_CLUSTER, -(-fragments // LANES)), 0, -1):
        threads = LANES * -(-fragments // (cluster * LANES))
        if threads <= MOST_THREADS:
            found.append({"cluster": cluster, "threads": threads})
    found.sort(key=lambda c: (c["cluster"] * c["threads"] - fragments, -c["cluster"]))
    largest = [c for c in found[1:] if c["cluster"] > found[0]["cluster"]]
    return found[:1] + largest[-1:]


def configs(region: Region) -> list[dict[str, Any]]:
    """``clusters``, and how parts travel: ``shots`` 1, each part to every rank; 2, each to the rank that owns its
    columns, which sends the sum to all. A second hop costs 1.6 us between two H200; what it saves at 16 ranks is
    13/15 of rows x 0.2 MB, which takes as long at 4 rows: to be measured between 16 ranks.

    ``settled`` configurations read what is settled before the wait; where nothing is, they are the others' code."""
    rows, width = region.value("h").shape
    whole = width // 8 % int(region.attrs("all_reduce")["ranks"]) == 0
    shots = [1, 2] if rows <= ONE_SHOT_ROWS else [2]
    return with_settled([{**c, "shots": n} for n in shots for c in clusters(region) if n == 1 or whole])


def with_settled(found: list[dict[str, Any]], most: int = 4) -> list[dict[str, Any]]:
    """The first ``most`` of some configurations as ``settled`` ones, then all. A GPU that nobody has timed takes the
    first, which has the least to do behind the wait; an H200 takes what its table says."""
    return [{**config, "settled": True} for config in found[:most]] + found


def refusal(region: Region, width: int) -> str | None:
    """Why rows of ``width`` cannot be summed and mixed; None when they can."""
    blocks = sum(node.op == "attn_res" and len(node.inputs) - 2 for node in region.nodes)
    if not 1 <= blocks <= MOST_BLOCKS:
        return f"{blocks} blocks, the kernel takes 1 to {MOST_BLOCKS}"
    ranks = int(region.attrs("all_reduce")["ranks"])
    if ranks > MOST_RANKS:
        return f"{ranks} ranks, the kernel takes {MOST_RANKS}"
    if width % 8:
        return f"rows of {width}, not whole fragments of 8"
    if not clusters(region):
        return f"rows of {width}, at most {8 * MOST_CLUSTER * MOST_THREADS}"
    return None


def _needs(region: Region) -> str | None:
    value = region.value("x")
    if value.dtype != "bf16":
        return f"x is {value.dtype}, the kernel adds bf16"
    reason = refusal(region, value.shape[1])
    if reason is None and not configs(region):
        reason = f"{value.shape[1] // 8} fragments of {value.shape[0]} rows do not divide over the ranks"
    return reason


def _define(name: str, pattern: str, note: str) -> KernelDef:
    return KernelDef(id=f"cute.{name}", pattern=f"{pattern}\n{MIX}", entry=ENTRY, arch=ARCH, rows=(1, MOST_ROWS),
                     needs=_needs, scratch=scratch, configs=configs, note=note)


KERNELS: tuple[KernelDef, ...] = (
    _define("all_reduce_add_attn_res", "y = all_reduce(x)\np = residual_add(prefix, y)",
            "sum over ranks, residual, mix over the blocks, norm; a cluster for each row"),
    _define("all_reduce_attn_res", "p = all_reduce(x)", "the same where a block begins"),
)
