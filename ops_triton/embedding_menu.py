"""Where the look-up of the embedding and the greedy choice as single ops fit, and their workspace. No triton here."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..compiler.call import Scratch
from ..compiler.kernel import KernelDef, Region
from .pointwise_menu import needs_floats, power_of_two

ENTRY = "k3plan.ops_triton.embedding:"
ROWS = (1, 512)
WAVE = 132  # thread blocks that run at once, one a multiprocessor
MOST_SPLITS = 64  # of a row: the last block reads that many keys


def _embed_configs(region: Region) -> list[dict[str, Any]]:
    columns = power_of_two(region.value("table").shape[1])
    return [{"columns": min(columns, n), "warps": warps} for n, warps in ((1024, 4), (2048, 4), (512, 2))]


def _key_configs(region: Region) -> list[dict[str, Any]]:
    """``splits`` blocks a row, each over as much of the vocabulary: enough for the whole GPU first."""
    rows, columns = region.value("logits").shape
    counts = (1, 2, 4, 8, 16, 32, MOST_SPLITS)
    fitting = [s for s in counts if s == 1 or (rows * s <= WAVE and columns >= s * 512)]
    order = sorted(counts, key=lambda s: (abs(s.bit_length() - fitting[-1].bit_length()), s))
    return [{"splits": s, "block": min(1024, power_of_two(-(-columns // s))), "warps": 4} for s in order]


def _key_scratch(region: Region, config: Mapping[str, Any]) -> dict[str, Scratch]:
    """Each block's best key, and a counter of the blocks of a row that have arrived."""
    rows = region.value("logits").shape[0]
    if config["splits"] == 1:
        return {}
    return {"best": Scratch((rows, config["splits"]), "i64"), "arrivals": Scratch((rows,), "i32", zeroed=True)}


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(id="triton.embed", pattern="y = embed(tokens, table, rank)\n-> y", entry=ENTRY + "bind_embed", rows=ROWS,
              needs=needs_floats, configs=_embed_configs, evidence="not measured yet", note="rows of the table"),
    KernelDef(id="triton.argmax_key", pattern="key = argmax_key(logits, rank)\n-> key", entry=ENTRY + "bind_key",
              rows=ROWS, configs=_key_configs, scratch=_key_scratch, evidence="not measured yet",
              note="greedy choice of a vocabulary shard"),
    KernelDef(id="triton.token_of_key", pattern="token = token_of_key(key, positions)\n-> token",
              entry=ENTRY + "bind_token", rows=ROWS, evidence="not measured yet", note="the id inside each key"),
)
