"""Where the kernels of multi-head latent attention fit, their launch configurations and workspace. No triton here."""
from __future__ import annotations

from collections.abc import Mapping
from math import log2
from typing import Any

from ..compiler.call import Scratch
from ..compiler.kernel import KernelDef, Region

ATTEND = "k3plan.ops_triton.mla_decode:bind"
QUERY = "k3plan.ops_triton.mla_query:bind_{}"
ROWS = (1, 64)
ROW_TILE = 64  # most query rows (row of the step times head) that one block holds
WAVE = 132  # thread blocks that run at once, one a multiprocessor
FMA_ROWS = 4  # most step rows of the query that are multiplied without the matrix units
# registers of a thread for the weights that a block of the query keeps. 160: nothing spills on sm_90a but with 3 or 4
# step rows (288 bytes); twice as many, as a head of two parts has: 5.6 KB a thread (triton 3.6, 3.9)
HELD_WEIGHTS, HELD_WEIGHTS_4_ROWS = 160, 128
MERGE_LAST = 8  # most splits that one block adds up after the others


def padded(count: int, least: int = 1) -> int:
    """The next power of two, ``least`` or more."""
    return max(least, 1 << (count - 1).bit_length())


def power_of_two(count: int, low: int, high: int) -> bool:
    return low <= count <= high and not count & (count - 1)


# attention


def _attend_sizes(region: Region) -> tuple[int, int, int, int, int]:
    """Sequences, rows a sequence, heads, latent width, planned context."""
    sequences, pages = region.value("page_table").shape
    attrs = region.attrs("mla_attend")
    return (sequences, attrs["query"], region.value("query").shape[1], attrs["latent"],
            pages * region.value("cache").shape[1])


def _projects(region: Region) -> bool:
    return region.has("mla_absorb_v")


def attend_scratch(region: Region, config: Mapping[str, Any]) -> dict[str, Scratch]:
    """Each split's mixes and log2 of their sums; parts of the projection a block of columns; arrival counters."""
    sequences, query, heads, latent, _ = _attend_sizes(region)
    rows, splits, projects = query * heads, config["splits"], _projects(region)
    if splits == 1 and not projects:
        return {}
    found = {"partial": Scratch((sequences, splits, rows, latent), config["partial"]),
             "log_sum": Scratch((sequences, splits, rows), "fp32")}
    if projects:
        values = region.value("w_uv").shape[1]
        found["parts"] = Scratch((latent // config["columns"], sequences * query, heads * values), "fp32")
        groups = -(-sequences * query // config["group"])
        found["arrivals"] = Scratch((groups * heads,), "i32", zeroed=True)
    elif config["merge"] == "last":
        tiles = -(-rows // min(config.get("tile", ROW_TILE), padded(rows, 16)))
        found["arrivals"] = Scratch((sequences * tiles,), "i32", zeroed=True)
    return found


def attend_configs(region: Region) -> list[dict[str, Any]]:
    """Candidates, the guess first: one wave of blocks, one tile each where that is enough for the context."""
    sequences, query, heads, _, context = _attend_sizes(region)
    rows = query * heads
    found: list[dict[str, Any]] = []
    for form in _attend_forms(region, rows):
        block, tiles = form["block"], sequences * -(-rows // form.get("tile", ROW_TILE))
        most = -(-context // block)
        for waves in (1.0, 0.5, 2.0):
            splits = max(1, min(most, int(WAVE * waves) // tiles))
            splits = most if splits >= most * 0.9 else 1 << int(log2(splits))
            if splits == most or block < 64:
                found.append({"splits": splits, **form, "stages": 3 if splits < most else 1})
    return [_with_merge(region, config) | extra for config in _unique(found)
            for extra in _merge_variants(region, config, sequences * query)]


def _attend_forms(region: Region, rows: int) -> list[dict[str, Any]]:
    """Entries and warps of a block, and its query rows where it holds fewer of ``rows`` than ``ROW_TILE``."""
    narrow, wide, bf16 = rows <= 16, rows > 32, region.value("cache").dtype == "bf16"
    if region.warp_size > 32 and not narrow:
        # a thread has 256 registers on 8 warps of 64 and 512 on 4. 64 query rows in a loop spill 1 to 4 KB on either,
        # 32 where the last block merges; on 8 warps a widened tile of FP8 spills 64 bytes (gfx950, triton 3.6)
        whole = [{"block": 64, "warps": 8 if bf16 else 4}] if wide else []
        return [*whole, {"block": 32, "warps": 8, "tile": 16}]
    # 4 warps have the registers for 16 query rows of bf16 entries, and are fastest there: 9.8 us at one row and context
    # 8192 on an H200, 8 warps 11.3. A loop over 64 entries has not the shared memory. With 64 entries and fewer than 64
    # query rows triton 3.6 is wrong on sm_90: on 8 warps it reads shared memory out of range (compute-sanitizer), on 4
    # the results differ (11 cases of the generic test, both on an H200)
    first = [{"block": 32, "warps": 4}] if narrow and bf16 else [{"block": 64, "warps": 8}] if wide else []
    return [*first, {"block": 32, "warps": 8}]


def _unique(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [config for index, config in enumerate(found) if config not in found[:index]]


def _with_merge(region: Region, config: dict[str, Any]) -> dict[str, Any]:
    few = config["splits"] <= MERGE_LAST and not _projects(region)
    return config | {"merge": "last" if few else "launch", "partial": "fp32"}


def _merge_variants(region: Region, config: dict[str, Any], rows: int) -> list[dict[str, Any]]:
    """Blocks of the second kernel: one row each where there are many splits, 16 where there are few."""
    latent = region.attrs("mla_attend")["latent"]
    # one row: as many blocks as there is room for, each with one batch of loads
    columns = [c for c in ((32, 64, 16) if rows == 1 else (64, 32, 128)) if c <= latent]
    group = 1 if config["splits"] > MERGE_LAST or rows == 1 else 16
    if not _projects(region) and config["splits"] <= MERGE_LAST:
        return [{"columns": columns[0], "group": group, "merge_warps": 4}]
    found: list[dict[str, Any]] = [{"columns": c, "group": group, "merge_warps": 4} for c in columns[:2]]
    if rows > 1:
        found += [{"columns": columns[0], "group": 16 if group == 1 else 1, "merge_warps": 4},
                  {"columns": columns[0], "group": group, "merge_warps": 8, "partial": "bf16"}]
    return found


def _needs_attend(region: Region) -> str | None:
    width, latent = region.value("query").shape[2], region.attrs("mla_attend")["latent"]
    if not power_of_two(latent, 16, 512):
        return f"latent width {latent} is not a power of two from 16 to 512"
    if not power_of_two(width - latent, 16, 512):
        return f"{width - latent} key values beside the latent are not a power of two from 16 up"
    if region.value("query").dtype != "bf16":
        return f"query is {region.value('query').dtype}, the kernel reads bf16"
    if region.value("cache").dtype not in ("bf16", "fp8_e4m3"):
        return f"the cache is {region.value('cache').dtype}, not bf16 or fp8_e4m3"
    page = region.value("cache").shape[1]
    if page & (page - 1):
        return f"{page} entries a page are not a power of two"
    return _needs_values(region) if _projects(region) else None


def _needs_values(region: Region) -> str | None:
    for name in ("w_uv", "gate"):
        if name in region.binding and region.value(name).dtype != "bf16":
            return f"{name} is {region.value(name).dtype}, the kernel reads bf16"
    return None


# the query and the cache entries


def query_scratch(region: Region, config: Mapping[str, Any]) -> dict[str, Scratch]:
    """Mailbox of the exchange between the blocks of a head, and each head's epoch."""
    if not region.has("mla_absorb_q"):
        return {}
    heads, nope, _ = region.value("w_uk").shape
    rows = region.value("front").shape[0]
    return {"words": Scratch((rows, heads, nope), "i64", zeroed=True, kept=True),
            "epochs": Scratch((heads,), "i32", zeroed=True, kept=True)}


def query_configs(region: Region) -> list[dict[str, Any]]:
    """About one wave of blocks; they must all be resident where they exchange. 16 rows at a time need 8 warps."""
    steps = region.value("front").shape[0]
    warps = (8, 4) if steps <= FMA_ROWS else (8,)
    if not region.has("mla_absorb_q"):
        sizes: tuple[int, ...] = (8, 4, 16)
        if region.warp_size > 32 and steps > FMA_ROWS:
            # on the matrix units 8 rows of the weight spill, and 4 do in a loop over the step rows (gfx950, triton 3.6)
            sizes = (4, 16) if steps <= 16 else (16,)
        return [{"rows": r, "warps": w} for r in sizes for w in warps]
    heads, nope, latent = region.value("w_uk").shape
    parts = [p for p in (32, 16, 8, 4, 2, 1) if (p + 1) * heads <= WAVE and latent // p >= 16 and p <= nope]
    return [{"parts": p, "warps": w} for p in parts[:3] for w in warps if _holds_weights(region, p, w)]


def _holds_weights(region: Region, parts: int, warps: int) -> bool:
    """Whether a part's rows of ``q_b`` and columns of ``w_uk`` fit in the registers beside everything else."""
    rows, (outputs, columns) = region.value("front").shape[0], region.value("q_b").shape
    heads, nope, latent = region.value("w_uk").shape
    values = padded(-(-outputs // heads // parts)) * padded(columns, 16 * warps) + nope * latent // parts
    few = 2 < rows <= FMA_ROWS
    return values // 2 <= 32 * warps * (HELD_WEIGHTS_4_ROWS if few else HELD_WEIGHTS)


def head_configs(region: Region) -> list[dict[str, Any]]:
    weight = next(region.value(n) for n in ("w_uk", "w_uv") if n in region.binding)
    widest = weight.shape[2] if "w_uk" in region.binding else padded(weight.shape[1], 16)
    return [{"columns": c, "warps": w} for c, w in ((32, 4), (64, 4), (16, 4), (32, 8)) if c <= widest]


def append_configs(region: Region) -> list[dict[str, Any]]:
    return [{"warps": w} for w in (4, 2, 1)]


def _needs_cache(region: Region) -> str | None:
    latent, key, cache = (region.value(n) for n in ("latent", "key_part", "cache"))
    if not power_of_two(latent.shape[1], 16, 2048) or not power_of_two(key.shape[1], 1, 2048):
        return f"entries of {latent.shape[1]} and {key.shape[1]} values are not powers of two"
    if cache.dtype not in ("bf16", "fp8_e4m3"):
        return f"the cache is {cache.dtype}, not bf16 or fp8_e4m3"
    if latent.dtype != "bf16" or key.dtype != "bf16":
        return f"rows are {latent.dtype}, the kernel reads bf16"
    return None


def _needs_heads(region: Region) -> str | None:
    """W_UK or W_UV and rows in bf16, head widths that a tile can hold."""
    name = "w_uk" if "w_uk" in region.binding else "w_uv"
    heads, inner, latent = region.value(name).shape
    rows = region.value("q" if name == "w_uk" else "x")
    if region.value(name).dtype != "bf16" or rows.dtype != "bf16":
        return f"{name} is {region.value(name).dtype}, rows {rows.dtype}: the kernel reads bf16"
    if not power_of_two(latent, 16, 2048):
        return f"latent width {latent} is not a power of two from 16 up"
    if name == "w_uk":
        rest = rows.shape[1] // heads - inner
        if not power_of_two(inner, 16, 256) or not power_of_two(rest, 1, 256):
            return f"heads of {inner} and {rest} values are not powers of two"
    return _needs_values(region) if name == "w_uv" else None


def _needs_query(region: Region) -> str | None:
    if region.value("q_b").dtype != "bf16":
        return f"q_b is {region.value('q_b').dtype}, the kernel reads bf16"
    columns = region.value("q_b").shape[1]
    if columns > 2048:
        return f"{columns} columns of the query projection, the kernel keeps 2048"
    if region.has("mla_absorb_q"):
        heads = region.value("w_uk").shape[0]
        if reason := _needs_heads(region) or _needs_cache(region):
            return reason
        if not query_configs(region):
            return (f"{heads} heads on one rank: blocks of a head exchange and must all run at once, and so few hold "
                    "more weights than their registers")
        return None
    return _needs_cache(region)


ATTEND_LINE = "mixed = mla_attend(query, cache, positions, page_table)"
VALUE_LINES = "o = mla_absorb_v(mixed, w_uv)\n? y = sigmoid_mul(o, gate)\n-> y"

QUERY_LINES = """
q_a = slice(front)
n = rms_norm(q_a, q_norm)
q = linear(n, q_b)
{absorb}kv = slice(front)
latent = rms_norm(kv, kv_norm)
key_part = slice(front)
cache_next = mla_append(latent, key_part, cache, positions, page_table)
-> {made}, cache_next
"""

KERNELS: tuple[KernelDef, ...] = (
    KernelDef(id="triton.mla_attend", pattern=f"{ATTEND_LINE}\n-> mixed", entry=ATTEND, rows=ROWS,
              needs=_needs_attend, scratch=attend_scratch, configs=attend_configs,
              note="attention over the paged latent cache, split along the planned context"),
    KernelDef(id="triton.mla_attend_out", pattern=f"{ATTEND_LINE}\n{VALUE_LINES}", entry=ATTEND, rows=ROWS,
              needs=_needs_attend, scratch=attend_scratch, configs=attend_configs,
              note="the same, with the projection out of latent space and the output gate; two launches"),
    KernelDef(id="triton.mla_query", pattern=QUERY_LINES.format(absorb="", made="q"), entry=QUERY.format("query"),
              rows=ROWS, needs=_needs_query, configs=query_configs,
              note="norms, query projection and cache entries"),
    KernelDef(id="triton.mla_query_absorb", entry=QUERY.format("query"), rows=ROWS, needs=_needs_query,
              pattern=QUERY_LINES.format(absorb="query = mla_absorb_q(q, w_uk)\n", made="query"),
              scratch=query_scratch, configs=query_configs,
              note="norms, query projection, query in latent space and cache entries"),
    KernelDef(id="triton.mla_absorb_q", pattern="query = mla_absorb_q(q, w_uk)\n-> query",
              entry=QUERY.format("absorb_q"), rows=ROWS, needs=_needs_heads, configs=head_configs,
              note="query in latent space"),
    KernelDef(id="triton.mla_absorb_v", pattern=VALUE_LINES.replace("mixed", "x"), entry=QUERY.format("absorb_v"),
              rows=ROWS, needs=_needs_heads, configs=head_configs,
              note="projection out of latent space and the output gate"),
    KernelDef(id="triton.mla_append", entry=QUERY.format("append"), rows=ROWS, needs=_needs_cache,
              pattern="? latent = rms_norm(kv, kv_norm)\n"
                      "cache_next = mla_append(latent, key_part, cache, positions, page_table)\n-> cache_next",
              configs=append_configs, note="cache entries, normed or not"),
)
