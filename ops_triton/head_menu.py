"""Where the kernels of the head and the embedding fit, their launch configurations and workspace. No triton here."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..compiler.call import Scratch
from ..compiler.kernel import KernelDef, Region

HEAD = "k3plan.ops_triton.head:{}"
ROWS = (1, 64)
FMA_ROWS = 8  # most rows that are multiplied without the matrix units
NORM_ROWS = (1, 8)  # every block norms all rows again: with more of them a launch that norms them once is cheap


def scratch(region: Region, config: Mapping[str, Any]) -> dict[str, Scratch]:
    """The best key of each row so far, and how many blocks have added theirs."""
    rows = region.value("x").shape[0]
    return {"best": Scratch((rows,), "i64", zeroed=True), "arrivals": Scratch((1,), "i32", zeroed=True)}


def configs(region: Region) -> list[dict[str, Any]]:
    """Candidates, the guess first: many blocks, each with much in flight."""
    rows, columns = region.value("x").shape
    fma = [{"form": "fma", "rows": r, "block": b, "warps": w, "stages": 1}
           for r, b, w in ((4, 1024, 4), (8, 512, 4), (2, 1024, 4), (4, 2048, 8)) if b < 2 * columns]
    dot = [{"form": "dot", "rows": r, "block": b, "warps": 4, "stages": s}
           for r, b, s in ((32, 128, 4), (64, 128, 4), (32, 256, 3), (64, 64, 5), (16, 64, 4)) if b < 2 * columns]
    return [*fma, *dot] if rows <= FMA_ROWS // 2 else [*dot, *fma] if rows <= FMA_ROWS else dot


def _needs_logits(region: Region) -> str | None:
    for name in ("x", "weight", "h"):
        if name in region.binding and region.value(name).dtype != "bf16":
            return f"{name} is {region.value(name).dtype}, the kernel takes bf16"
    if region.value("logits").dtype != "fp32":
        return f"logits are {region.value('logits').dtype}, the kernel writes fp32"
    return None


def _needs_logit_rows(region: Region) -> str | None:
    logits = region.value("logits").dtype
    return None if logits == "fp32" else f"logits are {logits}, the kernel reads fp32"


def _needs_table(region: Region) -> str | None:
    if region.value("table").dtype != "bf16" or region.value("rows").dtype != "bf16":
        return f"the table is {region.value('table').dtype}, rows {region.value('rows').dtype}: the kernel copies bf16"
    return None


def key_configs(region: Region) -> list[dict[str, Any]]:
    return [{"warps": w} for w in (8, 16, 4)]


def embed_configs(region: Region) -> list[dict[str, Any]]:
    return [{"columns": c, "warps": 4} for c in (2048, 1024, 8192)]


_CHOICE = "key = argmax_key(logits, rank)\n? token = token_of_key(key, positions)\n-> logits, token"

KERNELS: tuple[KernelDef, ...] = (
    KernelDef(id="triton.logits_argmax", entry=HEAD.format("bind"), rows=ROWS, needs=_needs_logits, configs=configs,
              pattern=f"logits = linear(x, weight)\n{_CHOICE}", scratch=scratch,
              note="logits and the greedy choice among them"),
    KernelDef(id="triton.norm_logits_argmax", entry=HEAD.format("bind"), rows=NORM_ROWS, needs=_needs_logits,
              configs=configs, scratch=scratch,
              pattern=f"h = rms_norm(x, norm)\nlogits = linear(h, weight)\n{_CHOICE}",
              note="norm of the rows, their logits and the greedy choice among them; nobody else reads the norm"),
    KernelDef(id="triton.argmax_key", entry=HEAD.format("bind_key"), needs=_needs_logit_rows, configs=key_configs,
              pattern="key = argmax_key(logits, rank)\n? token = token_of_key(key, positions)\n-> token",
              note="greedy choice among given logits, one block a row"),
    KernelDef(id="triton.token_of_key", entry=HEAD.format("bind_token"),
              pattern="token = token_of_key(key, positions)\n-> token",
              note="token ids of keys"),
    KernelDef(id="triton.embed", entry=HEAD.format("bind_embed"), needs=_needs_table, configs=embed_configs,
              pattern="rows = embed(tokens, table, rank)\n-> rows",
              note="rows of the embedding table, zeros where they are on another rank"),
)
