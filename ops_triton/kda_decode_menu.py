"""Where ``kda_decode`` fits, its launch configurations and its workspace. No triton here."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..compiler.call import Scratch
from ..compiler.fusions import KDA_DECODE, KDA_VERIFY, KDA_VERIFY_SLOTS
from ..compiler.kernel import KernelDef, Region

ENTRY = "k3plan.ops_triton.kda_decode:bind"
ROWS = (1, 64)
TAPS = 4  # of the short convolution
QUERY = 8  # most rows of one sequence: they are unrolled, and a verify step has 8 at most
SPLITS = (1, 2, 4, 8, 16)
VALUES = 4  # fewest value channels of a thread block
WAVE = 132  # thread blocks that run at once, one a multiprocessor


def _sizes(region: Region) -> tuple[int, int, int, int]:
    """Sequences, query rows, heads and head width."""
    heads, width, _ = region.value("state").shape[-3:]
    return region.value("slots").shape[0], region.attrs("kda_conv")["query"], heads, width


def private_rows(query: int, width: int, splits: int) -> int:
    """fp32 values that one thread block of a verify step keeps to itself: q, k, decay and its part of v."""
    return query * (3 * width + width // splits)


def scratch(region: Region, config: Mapping[str, Any]) -> dict[str, Scratch]:
    """Outputs before the norm and an arrival counter for each head; for verify steps the rows' vectors as well."""
    sequences, query, heads, width = _sizes(region)
    splits = config["splits"]
    found = {}
    if query > 1:
        found["private"] = Scratch((sequences * heads * splits * private_rows(query, width, splits),), "fp32")
        found["mixed"] = Scratch((sequences * query, heads, width, 4), "fp32")
    elif splits > 1:
        found["mixed"] = Scratch((sequences, heads, width), "fp32")
    if splits > 1:
        found["arrivals"] = Scratch((sequences * heads,), "i32", zeroed=True)
    return found


def configs(region: Region) -> list[dict[str, Any]]:
    """Candidates; first the largest split that still runs in one wave.

    A thread keeps 32 values of the state at most, more would spill. A verify step has more threads than D, because
    Triton moves a vector through shared memory that has an element for every thread.
    """
    sequences, query, heads, width = _sizes(region)
    found = []
    for splits in SPLITS:
        for warps in (8, 4):
            crowded = width * width // splits > 32 * 32 * warps or (query > 1 and 32 * warps <= width)
            if not crowded and width // splits >= VALUES:
                found.append({"splits": splits, "warps": warps})
    fitting = [c["splits"] for c in found if sequences * heads * c["splits"] <= WAVE]
    best = min(max(fitting, default=found[0]["splits"]), 8)
    return sorted(found, key=lambda c: (abs(c["splits"].bit_length() - best.bit_length()), c["splits"]))


def needs(region: Region) -> str | None:
    """Shapes and dtypes that the kernel reads."""
    _, query, _, width = _sizes(region)
    low = region.value("f_b").shape[1]
    if width & (width - 1) or not 16 <= width <= 256:
        return f"head width {width} is not a power of two from 16 to 256"
    if region.value("state").shape[-1] != width:
        return f"key width {region.value('state').shape[-1]}, value width {width}"
    if low & (low - 1) or not 16 <= low <= 256:
        return f"{low} inputs of the gate projection are not a power of two from 16 to 256"
    if region.value("weight_q").shape[1] != TAPS:
        return f"{region.value('weight_q').shape[1]} taps, the kernel has {TAPS}"
    if region.value("norm").shape != (width,):
        return f"the output norm is over {region.value('norm').shape[0]} values, a head has {width}"
    if query > QUERY:
        return f"{query} rows a sequence, at most {QUERY} are unrolled"
    if region.has("kda_delta_rule") != (query == 1):
        return "a verify step of one row"
    for name in ("q", "k", "v", "gate", "beta", "f_a", "f_b", "window"):
        if region.value(name).dtype != "bf16":
            return f"{name} is {region.value(name).dtype}, the kernel reads bf16"
    for name in ("weight_q", "weight_k", "weight_v", "a_log", "dt_bias", "norm"):
        if region.value(name).dtype != "fp32":
            return f"{name} is {region.value(name).dtype}, the kernel reads fp32"
    return None


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(id="triton.kda_decode", pattern=KDA_DECODE, entry=ENTRY, rows=ROWS, needs=needs, scratch=scratch,
              configs=configs,
              note="gate projection, convolution, delta rule and gated norm of one row a sequence"),
    KernelDef(id="triton.kda_verify", pattern=KDA_VERIFY, entry=ENTRY, rows=ROWS, needs=needs, scratch=scratch,
              configs=configs,
              note="the same for 2 to 8 rows a sequence, with the accepted rows of the previous step folded in"),
    KernelDef(id="triton.kda_verify_slots", pattern=KDA_VERIFY_SLOTS, entry=ENTRY, rows=ROWS, needs=needs,
              scratch=scratch, configs=configs, note="the same from the accepted row's state, every row's state kept"),
)
