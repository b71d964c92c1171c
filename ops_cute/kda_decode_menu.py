"""Where ``cute.kda_decode`` and ``cute.kda_verify`` fit and their launch configurations. No cutlass here."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..compiler.fusions import KDA_DECODE, KDA_VERIFY
from ..compiler.kernel import KernelDef, Region

ENTRY = "k3plan.ops_cute.kda_decode:bind"
ARCH = ("sm_90", "sm_100", "sm_103")
ROWS = (1, 64)
TAPS = 4  # of the short convolution
QUERY = 8  # most rows of one sequence: columns of one operand of the matrix units
WAVE = 132  # thread blocks that surely run at once, one a multiprocessor


def lanes_of(width: int, splits: int, warps: int) -> int:
    """Threads that share a row of the state, in a block of ``warps`` with ``width / splits`` rows."""
    return 32 * warps * splits // width


def configs(region: Region) -> list[dict[str, Any]]:
    """Candidates; first the largest split of a head that still runs in one wave, with the fewest warps.

    ``late`` ones let the next launch start only behind their own wait, which settles the residual's blocks for what
    runs behind. The next launch cannot come much sooner where the in-projection's blocks have a multiprocessor's shared
    memory each; but what it streams begins a wait later, and nobody has timed that, so they come last."""
    sequences, _, heads, width = _sizes(region)
    found: list[dict[str, Any]] = [{"splits": s, "warps": w} for s in (1, 2, 4, 8, 16) for w in (4, 8)
             if 32 * w >= width and 2 <= lanes_of(width, s, w) <= 32 and 4 <= width // lanes_of(width, s, w) <= 64]
    fitting = [c["splits"] for c in found if sequences * heads * c["splits"] <= WAVE]
    best = min(max(fitting, default=found[0]["splits"]), 8)
    found.sort(key=lambda c: (abs(c["splits"].bit_length() - best.bit_length()), c["splits"], c["warps"]))
    return found + [{**config, "late": True} for config in found]


def is_late(config: Mapping[str, Any]) -> bool:
    return bool(config.get("late"))


def _sizes(region: Region) -> tuple[int, int, int, int]:
    """Sequences, query rows, heads and head width."""
    _, heads, width, _ = region.value("state").shape
    return region.value("slots").shape[0], region.attrs("kda_conv")["query"], heads, width


def needs(region: Region) -> str | None:
    """Shapes and dtypes that the kernel reads."""
    _, query, _, width = _sizes(region)
    inner = region.value("f_b").shape[1]
    if width not in (64, 128, 256):
        return f"head width {width} is not 64, 128 or 256"
    if region.value("state").shape[3] != width:
        return f"key width {region.value('state').shape[3]}, value width {width}"
    if inner % 32 or inner > 256:
        return f"{inner} inputs of the gate projection are not a multiple of 32 up to 256"
    if region.value("weight_q").shape[1] != TAPS:
        return f"{region.value('weight_q').shape[1]} taps, the kernel has {TAPS}"
    if region.value("norm").shape != (width,):
        return f"the output norm is over {region.value('norm').shape[0]} values, a head has {width}"
    if query > QUERY:
        return f"{query} rows a sequence, at most {QUERY} are unrolled"
    if (region.has("kda_verify")) != (query > 1):
        return "a verify step of one row"
    for name in ("q", "k", "v", "gate", "beta", "f_a", "f_b", "window"):
        if region.value(name).dtype != "bf16":
            return f"{name} is {region.value(name).dtype}, the kernel reads bf16"
    for name in ("weight_q", "weight_k", "weight_v", "a_log", "dt_bias", "norm"):
        if region.value(name).dtype != "fp32":
            return f"{name} is {region.value(name).dtype}, the kernel reads fp32"
    return None


def _define(name: str, pattern: str, note: str) -> KernelDef:
    return KernelDef(id=f"cute.{name}", pattern=pattern, entry=ENTRY, arch=ARCH, rows=ROWS, needs=needs,
                     configs=configs, late=is_late, note=note)


KERNELS: tuple[KernelDef, ...] = (
    _define("kda_decode", KDA_DECODE,
            "gate projection, convolution, delta rule and gated norm of one row a sequence; a cluster a head"),
    _define("kda_verify", KDA_VERIFY,
            "the same for 2 to 8 rows a sequence, with the accepted rows of the previous step folded in"),
)
