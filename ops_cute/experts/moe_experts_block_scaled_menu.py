"""Where ``cute.moe_experts_block_scaled`` fits, its configurations and its workspace. No cutlass here.

By its name it comes before the kernels for ``mma.sync`` in the menu, whose order decides where prices are equal: where
nobody has timed either, the tensor core's idle time and the integer instructions that it saves decide.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...compiler.call import Scratch
from ...compiler.fusions import MOE_EXPERTS
from ...compiler.kernel import KernelDef, Region
from ..shared_memory import LIMIT
from .blackwell_layouts import FORMATS, LANES
from .block_scaled_plan import TOKENS, Static
from .moe_experts_menu import MOST_BLOCKS, PARITIES, refuse_beside, refuse_format

ENTRY = "k3plan.ops_cute.experts.moe_experts_block_scaled:bind"
ARCH = ("sm_100", "sm_103")
LIST_BITS = 992  # experts of a rank: 31 warps' worth, whose sums one warp adds up
LEAST_BLOCKS = 132  # multiprocessors of any GPU of ``ARCH``, at least


def _plan(region: Region, slots: int) -> Static:
    """Sizes on the fewest multiprocessors; more have fewer columns each, so less in shared memory."""
    w1, ids = region.value("w1").shape, region.value("ids").shape
    attrs = region.attrs("experts_gate_up")
    return Static(
        tokens=ids[0], top_k=ids[1], width=2 * w1[2], inter=w1[1], out_width=region.value("w2").shape[1], local=w1[0],
        experts=attrs["experts"], blocks=LEAST_BLOCKS, slots=slots, weights="e4m3",
        terms=1 if attrs["activation"] == "mxfp8" else 2, stride_x=0, stride_out=0, beta=1.0, linear_beta=1.0,
        dependent=False, **_side(region))


def _side(region: Region) -> dict[str, int]:
    """Sizes of the projection beside the experts; none without it."""
    if "w" not in region.binding:
        return {}
    rows, columns = region.value("w").shape
    return {"side_rows": rows, "side_width": columns}


def needs(region: Region) -> str | None:
    """Formats and sizes that the kernel reads."""
    local, inter, packed = region.value("w1").shape
    width, out_width = packed * 2, region.value("w2").shape[1]
    if reason := refuse_format(region):
        return reason
    if width % LANES or inter % 32 or out_width % 16:
        return f"experts of {width} x {inter} x {out_width}: not multiples of {LANES}, 32 and 16"
    if local > LIST_BITS:
        return f"{local} experts of a rank, at most {LIST_BITS}"
    reason = needs_beside(region) if "w" in region.binding else None
    if reason is not None:
        return reason
    plan = _plan(region, 2)
    if max(plan.columns, plan.side_columns) > LANES:
        return f"{max(out_width, plan.side_rows)} columns on {LEAST_BLOCKS} blocks: more than {LANES} each"
    return None if configs(region) else f"experts of {inter} x {out_width}: two slots do not fit shared memory"


def needs_beside(region: Region) -> str | None:
    """Which product may stand beside the experts: the down-projection of a shared expert."""
    columns = region.value("w").shape[1]
    if reason := refuse_beside(region):
        return reason
    return f"the product beside has {columns} columns, not a multiple of 32" if columns % 32 else None


def needs_mxfp8(region: Region) -> str | None:
    """As ``needs``, for activations that are rounded."""
    activation = region.attrs("experts_gate_up")["activation"]
    return needs(region) if activation == "mxfp8" else f"activations are {activation}, not mxfp8"


def needs_bf16(region: Region) -> str | None:
    """As ``needs``, for activations that are not."""
    activation = region.attrs("experts_gate_up")["activation"]
    return needs(region) if activation == "bf16" else f"activations are {activation}, not bf16"


def configs(region: Region) -> list[dict[str, Any]]:
    """As much in flight as fits first; of the formats the one that needs nothing of the tensor core but what every
    8-bit operand does."""
    fitting = [slots for slots in (8, 7, 6, 5, 4, 3, 2) if _plan(region, slots).place()["end"] <= LIMIT]
    return [{"slots": slots, "weights": weights} for weights in FORMATS for slots in fitting[:2]]


def scratch(region: Region, config: Mapping[str, Any]) -> dict[str, Scratch]:
    """Activations between the halves, for this launch and the one before (zero is "not yet"), and a count of launches
    for each block."""
    plan = _plan(region, config["slots"])
    return {"act": Scratch((PARITIES, plan.pairs, plan.tiles, plan.fragments, 4), "i32", zeroed=True, kept=True),
            "epochs": Scratch((MOST_BLOCKS,), "i32", zeroed=True, kept=True)}


_ALONE, _SHARED = f"{MOE_EXPERTS}\n-> out", f"& s = linear(a, w)\n{MOE_EXPERTS}\n-> out, s"


def _kernel(name: str, least: int, reason: Callable[[Region], str | None], pattern: str, note: str) -> KernelDef:
    return KernelDef(id=f"cute.moe_experts_block_scaled{name}", entry=ENTRY, arch=ARCH, rows=(least, TOKENS),
                     needs=reason, configs=configs, scratch=scratch, pattern=pattern, note=note)


# up to 8 rows of bf16 are the kernel's for ``mma.sync``, which has run
KERNELS: tuple[KernelDef, ...] = (
    _kernel("", 1, needs_mxfp8, _ALONE, "W1, W3, SiTU, W2 and the weighted sum on block-scaled tensor cores; rows and "
                                        "activations are MXFP8"),
    _kernel("_shared", 1, needs_mxfp8, _SHARED, "the same, and the shared expert's down-projection in the same grid"),
    _kernel("_bf16", 9, needs_bf16, _ALONE, "the same for more than 8 rows of bf16, each number as two of the tensor "
                                            "core's"),
    _kernel("_bf16_shared", 9, needs_bf16, _SHARED, "both"),
)
