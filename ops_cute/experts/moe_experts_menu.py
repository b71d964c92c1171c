"""Where ``cute.moe_experts`` fits, its configurations and its workspace. No cutlass here."""
from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from ...compiler.call import Scratch
from ...compiler.fusions import MOE_EXPERTS
from ...compiler.kernel import KernelDef, Region
from ..shared_memory import LIMIT
from .gathered_plan import MOST_TOKENS, Gathered
from .plan import MANY, STEP, TILE, TOKENS, WARPS, Static

ENTRY = "k3plan.ops_cute.experts.moe_experts:bind"
GATHERED = "k3plan.ops_cute.experts.moe_experts_gathered:bind"
ARCH = ("sm_90", "sm_100", "sm_103")
LIST_BITS = 1024  # experts of a rank: a word of 32 for each lane
MOST_BLOCKS = 256  # epochs that are kept, one for each block
PARITIES = 2


def refuse_format(region: Region) -> str | None:
    """Experts that are not MXFP4, rows that are no matrix."""
    if region.attrs("experts_gate_up")["format"] != "mxfp4":
        return f"experts are {region.attrs('experts_gate_up')['format']}, the kernel reads MXFP4"
    return "rows must be a matrix" if len(region.value("x").shape) != 2 else None


def refuse_beside(region: Region) -> str | None:
    """A product beside the experts that is no down-projection of a shared expert."""
    a, w, s = (region.value(name) for name in ("a", "w", "s"))
    rows, columns = w.shape
    dtypes = (a.dtype, w.dtype, s.dtype)
    if dtypes != ("bf16", "bf16", "bf16"):
        return f"the product beside is {dtypes[0]} by {dtypes[1]} to {dtypes[2]}, the kernel multiplies bf16"
    if a.shape != (region.value("ids").shape[0], columns):
        return f"the product beside reads {a.shape}, not the rows of the experts"
    if rows <= columns:
        return f"the product beside makes {rows} columns of {columns}, a shared expert's down-projection makes more"
    return None


def needs(region: Region) -> str | None:
    """Formats and sizes that the kernel reads."""
    local, inter, packed = region.value("w1").shape
    width, out_width = packed * 2, region.value("w2").shape[1]
    if reason := refuse_format(region):
        return reason
    if width % 64 or width < 64:
        return f"x has {width} columns, not a multiple of 64"
    if inter % 32 or out_width % 16:
        return f"experts of {inter} x {out_width}: not multiples of 32 and 16"
    if local > LIST_BITS:
        return f"{local} experts of a rank, at most {LIST_BITS}"
    beside = "" if "w" not in region.binding else " and {} x {} beside them".format(*region.value("w").shape)
    return None if configs(region) else f"experts of {inter} x {out_width}{beside}: two slots do not fit shared memory"


def needs_side(region: Region) -> str | None:
    """As ``needs``, and which product may stand beside the experts: the down-projection of a shared expert."""
    rows, columns = region.value("w").shape
    if reason := refuse_beside(region):
        return reason
    if columns % STEP or rows % (2 * TILE):
        return f"the product beside has a weight of {rows} x {columns}: not multiples of {2 * TILE} and {STEP}"
    return needs(region)


def _fits(region: Region, slots: int, blocks: int = 132, run: int = 0, warps: int = WARPS) -> bool:
    """Whether a ring of ``slots`` fits a block's shared memory. More blocks have fewer columns each, so less."""
    return _plan(region, slots, blocks, run, warps).place()["end"] <= LIMIT


def _plan(region: Region, slots: int, blocks: int, run: int, warps: int = WARPS) -> Static:
    """Sizes, as far as the shapes say them. ``run``: of the gathered form, 0 for the other."""
    w1, ids = region.value("w1").shape, region.value("ids").shape
    attrs = region.attrs("experts_gate_up")
    side = region.value("w").shape if "w" in region.binding else (0, 0)
    return (Gathered if run else Static)(
        run=run or 1, tokens=ids[0], top_k=ids[1], width=2 * w1[2], inter=w1[1],
        out_width=region.value("w2").shape[1], local=w1[0], experts=attrs["experts"], blocks=blocks,
        slots=slots, bulk=True, stride_x=0, stride_out=0, beta=1.0, linear_beta=1.0, rounds=False, dependent=False,
        warps=warps, side_rows=side[0], side_width=side[1])


def configs(region: Region) -> list[dict[str, Any]]:
    """As much in flight as fits first; fewer slots leave room for a neighbour's blocks. More warps have fewer columns
    each and hide more of what one waits for. With the projection beside the experts first, its weights are on their way
    while the producers end. The first of each form, then the second of each."""
    few: list[dict[str, Any]] = [{"slots": n, "bulk": True} for n in (6, 4, 3, 2) if _fits(region, n)]
    many: list[dict[str, Any]] = []
    if _plan(region, 2, 132, 0, MANY).own_groups < _plan(region, 2, 132, 0).own_groups:
        many = [{"slots": n, "bulk": True, "warps": MANY} for n in (5, 4, 3) if _fits(region, n, warps=MANY)]
    first = [[config | {"side_first": True} for config in of] for of in (few, many) if "w" in region.binding]
    return in_turn(few, many, *first, [config | {"bulk": False} for config in few])


def in_turn(*forms: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first of each form, then the second of each: a search that is cut off has seen all of them."""
    return [config for turn in zip_longest(*forms) for config in turn if config is not None]


def gathered_configs(region: Region) -> list[dict[str, Any]]:
    """Longer runs read rows of x less often, shorter ones share the units out more evenly."""
    fitting = [slots for slots in (5, 4, 3, 2) if _fits(region, slots, run=4)]
    tiles = region.value("w1").shape[1] // TILE
    return [{"slots": slots, "run": run} for slots in fitting[:2] for run in (4, 8, 2) if tiles % run == 0]


def needs_gathered(region: Region) -> str | None:
    """As ``needs``, with room for the products of every pair."""
    reason = needs(region)
    if reason is None and not gathered_configs(region):
        pairs, width = region.value("ids").shape, region.value("w2").shape[1]
        return f"products of {pairs[0]} x {pairs[1]} pairs by {width} columns do not fit shared memory beside two slots"
    return reason


def needs_gathered_side(region: Region) -> str | None:
    """As ``needs_gathered`` and ``needs_side``; the warps of 8 tokens share the columns of the product evenly."""
    reason = needs_side(region) or needs_gathered(region)
    if reason is None:
        rows, columns = region.value("a").shape
        plan = _plan(region, 2, 132, 4)
        assert isinstance(plan, Gathered)
        if columns // STEP % plan.side_splits:
            return f"the product beside has {columns} columns for {plan.side_splits} warps of each 8 of {rows} rows"
    return reason


def gathered_scratch(region: Region, config: Mapping[str, Any]) -> dict[str, Scratch]:
    """As ``scratch``, and the rows of x in fp16; a count of those that are there (in 16 bytes) and their factors."""
    rows, width = region.value("x").shape
    return {**scratch(region, config), "rows": Scratch((rows, width // 2), "i32"),
            "ready": Scratch((4 + rows,), "i32", zeroed=True, kept=True)}


def scratch(region: Region, config: Mapping[str, Any]) -> dict[str, Scratch]:
    """Activations between the halves, for this launch and the one before (zero is "not yet"), and a count of launches
    for each block."""
    rows, top_k = region.value("ids").shape
    inter = region.value("w1").shape[1]
    return {"act": Scratch((PARITIES, rows, top_k, inter // 2), "i32", zeroed=True, kept=True),
            "epochs": Scratch((MOST_BLOCKS,), "i32", zeroed=True, kept=True)}


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(
        id="cute.moe_experts", entry=ENTRY, arch=ARCH, rows=(1, TOKENS), needs=needs, configs=configs, scratch=scratch,
        pattern=f"{MOE_EXPERTS}\n-> out",
        note="W1, W3, SiTU, W2 and the weighted sum; each expert's weights are read once",
    ),
    KernelDef(
        id="cute.moe_experts_shared", entry=ENTRY, arch=ARCH, rows=(1, TOKENS), needs=needs_side, configs=configs,
        scratch=scratch, pattern=f"& s = linear(a, w)\n{MOE_EXPERTS}\n-> out, s",
        note="the same, and the shared expert's down-projection while activations are on their way",
    ),
    KernelDef(
        id="cute.moe_experts_gathered", entry=GATHERED, arch=ARCH, rows=(TOKENS + 1, MOST_TOKENS),
        needs=needs_gathered, configs=gathered_configs, scratch=gathered_scratch, pattern=f"{MOE_EXPERTS}\n-> out",
        note="the same for more rows: each expert multiplies the rows that chose it, its weights are read once",
    ),
    KernelDef(
        id="cute.moe_experts_gathered_shared", entry=GATHERED, arch=ARCH, rows=(TOKENS + 1, MOST_TOKENS),
        needs=needs_gathered_side, configs=gathered_configs, scratch=gathered_scratch,
        pattern=f"& s = linear(a, w)\n{MOE_EXPERTS}\n-> out, s",
        note="the same, and the shared expert's down-projection while activations are on their way",
    ),
)
