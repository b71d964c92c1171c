"""Where the one-op kernels of Kimi delta attention fit, their configurations and workspace. No triton here."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..compiler.call import Scratch
from ..compiler.kernel import KernelDef, Region
from .pointwise_menu import needs_floats, tile_configs

ENTRY = "k3plan.ops_triton.kda_parts:"
ROWS = (1, 512)
TAPS = 4  # of the short convolution
QUERY = 16  # most rows of one sequence: they are unrolled
SPLITS = (1, 2, 4, 8, 16, 32)
# most values of the state in the registers of a thread, for one row and for several: twice as many spill
THREAD_VALUES, ROWS_THREAD_VALUES = 64, 16
VALUES = 4  # fewest value channels of a thread block
WAVE = 132  # thread blocks that run at once, one a multiprocessor

ROWS_OF_STEP = "q, k, v, log_decay, beta, state"


def _conv_configs(region: Region) -> list[dict[str, Any]]:
    """``channels`` of one of q, k and v a block."""
    return [{"channels": c, "warps": w} for c, w in ((128, 4), (64, 2), (256, 4), (32, 1))]


def _gate_configs(region: Region) -> list[dict[str, Any]]:
    return tile_configs(region.value("raw").shape[1])


def _rule_configs(region: Region) -> list[dict[str, Any]]:
    """``splits`` blocks a head: the most of one wave first."""
    sequences = region.value("slots").shape[0]
    heads, values, keys = region.value("state").shape[-3:]
    splits = [s for s in SPLITS if values // s >= VALUES]
    fitting = [s for s in splits if sequences * heads * s <= WAVE] or splits[:1]
    order = sorted(splits, key=lambda s: (abs(s.bit_length() - fitting[-1].bit_length()), s))
    found = [{"splits": s, "warps": w} for s in order for w in (4, 8)]
    most = THREAD_VALUES if region.has("kda_delta_rule") else ROWS_THREAD_VALUES
    return [c for c in found if values * keys <= c["splits"] * c["warps"] * 32 * most] or found[-1:]


def _verify_scratch(region: Region, config: Mapping[str, Any]) -> dict[str, Scratch]:
    """An arrival counter a head."""
    heads = region.value("slots").shape[0] * region.value("state").shape[1]
    return {"arrivals": Scratch((heads,), "i32", zeroed=True)} if config["splits"] > 1 else {}


def _needs_conv(region: Region) -> str | None:
    taps, query = region.value("weight_q").shape[1], region.attrs("kda_conv")["query"]
    if taps != TAPS:
        return f"{taps} taps, the kernel has {TAPS}"
    if query > QUERY:
        return f"{query} rows a sequence, at most {QUERY} are unrolled"
    return needs_floats(region)


def _needs_rule(region: Region) -> str | None:
    for what, width in zip(("values", "keys"), region.value("state").shape[-2:], strict=True):
        if width & (width - 1) or not 16 <= width <= 256:
            return f"{width} {what} a head are not a power of two from 16 to 256"
    query = region.nodes[0].attrs.get("query", 1)
    if query > QUERY:
        return f"{query} rows a sequence, at most {QUERY} are unrolled"
    return needs_floats(region)


def _conv(name: str, after: str) -> KernelDef:
    return KernelDef(
        id=f"triton.{name}", entry=ENTRY + "bind_conv", rows=ROWS, needs=_needs_conv, configs=_conv_configs,
        pattern="q_act, k_act, v_act, window_next = "
                f"kda_conv(q, k, v, window, weight_q, weight_k, weight_v, slots, positions{after})\n"
                "-> q_act, k_act, v_act, window_next",
        note="short convolution and SiLU")


KERNELS: tuple[KernelDef, ...] = (
    _conv("kda_conv", ""),
    _conv("kda_conv_rows", ", accepted"),
    KernelDef(id="triton.kda_gate", pattern="decay = kda_gate(raw, a_log, dt_bias)\n-> decay", rows=ROWS,
              entry=ENTRY + "bind_gate", needs=needs_floats, configs=_gate_configs,
              note="log decay"),
    KernelDef(id="triton.kda_delta_rule", rows=ROWS, needs=_needs_rule, configs=_rule_configs,
              pattern=f"o, state_next = kda_delta_rule({ROWS_OF_STEP}, slots, positions)\n-> o, state_next",
              entry=ENTRY + "bind_rule", note="one row a sequence"),
    KernelDef(id="triton.kda_delta_rule_rows", rows=ROWS, needs=_needs_rule, configs=_rule_configs,
              pattern=f"o, state_next, record_next = kda_verify({ROWS_OF_STEP}, record, slots, positions, accepted)\n"
                      "-> o, state_next, record_next",
              entry=ENTRY + "bind_rule", scratch=_verify_scratch,
              note="the rows of a verify step, after the accepted ones of the step before"),
    KernelDef(id="triton.kda_delta_rule_slots", rows=ROWS, needs=_needs_rule, configs=_rule_configs,
              pattern=f"o, state_next = kda_verify_slots({ROWS_OF_STEP}, slots, positions, accepted)\n-> o, state_next",
              entry=ENTRY + "bind_rule", note="the same, from the accepted row's state, every row's state kept"),
)
