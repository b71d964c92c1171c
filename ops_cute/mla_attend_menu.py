"""Where ``cute.mla_attend`` fits, its configurations and its workspace. No cutlass here."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..compiler.call import Scratch
from ..compiler.kernel import KernelDef, Region
from .mla_attend_plan import MOST_BLOCKS, PARITIES, STEP, Config, Shape, per
from .shared_memory import LIMIT

ENTRY = "k3plan.ops_cute.mla_attend:bind"
ARCH = ("sm_90", "sm_100", "sm_103")
FEWEST_BLOCKS = 132  # multiprocessors of the smallest GPU that the kernel is for
MOST_SUMS = 96  # of a lane, that its registers hold beside everything else
MOST_OF_16 = 24  # the same with 16 warps


def shape_of(region: Region, config: Mapping[str, Any]) -> Shape:
    """Sizes, as far as the region says them."""
    one, attrs = Config(**config), region.attrs("mla_attend")
    (_, heads, width), (sequences, pages) = region.value("query").shape, region.value("page_table").shape
    return Shape(
        sequences=sequences, query=attrs["query"], heads=heads, latent=attrs["latent"], rest=width - attrs["latent"],
        page=region.value("cache").shape[1], pages=pages,
        entry_bytes=1 if region.value("cache").dtype == "fp8_e4m3" else 2, tile=one.tile, most_slots=one.slots,
        warps=one.warps, wide=one.partial == "fp32")


def scratch(region: Region, config: Mapping[str, Any]) -> dict[str, Scratch]:
    """Mixes of all blocks and log2 of their weights' sums, for this launch and the one before (zero is "not yet"), and
    a count of launches for each block."""
    shape = shape_of(region, config)
    return {"mixes": Scratch((PARITIES, MOST_BLOCKS, 4 * shape.fragments), "i32", zeroed=True, kept=True),
            "sums": Scratch((PARITIES, MOST_BLOCKS, shape.rows), "i32", zeroed=True, kept=True),
            "epochs": Scratch((MOST_BLOCKS,), "i32", zeroed=True, kept=True)}


def _fits(region: Region, config: dict[str, Any], chunk: int) -> bool:
    """Whether the warps share columns and entries evenly, the sums fit registers, and shared memory the slots of a part
    of ``chunk`` entries."""
    shape = shape_of(region, config)
    if shape.latent % (STEP * shape.warps) or shape.entry_tiles > shape.warps:
        return False
    held = shape.sums <= (MOST_OF_16 if shape.warps == 16 else MOST_SUMS)
    return held and shape.place(shape.most_slots, per(chunk, shape.tile))["end"] <= LIMIT


def _tilings(chunk: int) -> Iterator[tuple[int, int]]:
    """Entries of a tile, and slots, of a part of ``chunk`` entries: all of it at once where it fits, else a ring."""
    for tile in (64, 32):
        if chunk <= 2 * tile:
            yield tile, per(chunk, tile)
    for tile, slots in ((32, 6), (32, 5), (64, 2), (32, 4), (32, 3), (32, 2)):
        if slots * tile < chunk:
            yield tile, slots
    for slots in (per(chunk, 16), 4, 2):
        yield 16, slots


def configs(region: Region) -> list[dict[str, Any]]:
    """Candidates, the guess first. 8 warps have the registers for long chains, 16 hide more latency; mixes travel as
    bf16, half the bytes, or as fp32."""
    shape = shape_of(region, vars(Config()))
    chunk = 8 * per(per(shape.context, max(1, FEWEST_BLOCKS // shape.jobs)), 8)
    found = []
    for warps in (8, 16, 4, 2, 1):
        fitting = [{"tile": tile, "slots": slots, "warps": warps, "partial": "bf16"} for tile, slots in _tilings(chunk)]
        found += [config for config in fitting if _fits(region, config, chunk)][:2]
    found = found[:4]
    return found + [config | {"partial": "fp32"} for config in found[:1]]


def needs(region: Region) -> str | None:
    """Formats and sizes that the kernel reads."""
    query, cache = region.value("query"), region.value("cache")
    latent = region.attrs("mla_attend")["latent"]
    rest = query.shape[2] - latent
    if query.dtype != "bf16":
        return f"query is {query.dtype}, the kernel reads bf16"
    if cache.dtype not in ("bf16", "fp8_e4m3"):
        return f"the cache is {cache.dtype}, not bf16 or fp8_e4m3"
    if latent % STEP or rest % STEP or rest < STEP:
        return f"entries of {latent} and {rest} values are not multiples of {STEP}"
    shape = shape_of(region, vars(Config()))
    if shape.jobs > FEWEST_BLOCKS:
        return f"{shape.sequences} sequences of {shape.queries} query rows are more than one wave of blocks"
    return None if configs(region) else f"{shape.queries} query rows of {latent + rest} values do not fit one block"


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(
        id="cute.mla_attend", entry=ENTRY, arch=ARCH, rows=(1, 64), needs=needs, scratch=scratch, configs=configs,
        pattern="mixed = mla_attend(query, cache, positions, page_table)\n-> mixed",
        note="attention over the paged latent cache in one launch, parts of the context meet inside it",
    ),
)
