"""Where ``cute.moe_experts_tail`` fits, its configurations and workspace. No cutlass here."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ...compiler.call import Scratch
from ...compiler.fusions import MOE_EXPERTS_TAIL, MOE_EXPERTS_TAIL_ADD_MIX
from ...compiler.kernel import KernelDef, Region
from ..all_reduce_attn_res_menu import mailbox
from ..shared_memory import LIMIT
from .moe_experts_menu import ARCH, MOST_BLOCKS, in_turn, needs_side
from .moe_experts_menu import scratch as experts_scratch
from .plan import MANY, TOKENS, WARPS
from .tail_plan import MIX_BLOCKS, PACK, ROWS, STEP, Mixed, Tail

ENTRY = "k3plan.ops_cute.experts.moe_experts_tail:bind"
MOST_RANKS = 32  # that send to one warp
SLOTS = (6, 5, 4, 3, 2)
FEWEST_BLOCKS = 132  # multiprocessors of the smallest GPU that the kernel is for


def _plan(region: Region, slots: int, warps: int, few: bool = False) -> Tail:
    """Sizes, as far as the shapes say them, on the fewest multiprocessors; more have fewer columns each."""
    w1, ids, w = region.value("w1").shape, region.value("ids").shape, region.value("w").shape
    sizes = dict(
        tokens=ids[0], top_k=ids[1], width=2 * w1[2], inter=w1[1], out_width=region.value("w2").shape[1], local=w1[0],
        experts=region.attrs("experts_gate_up")["experts"], blocks=FEWEST_BLOCKS, slots=slots, bulk=True, warps=warps,
        side_first=True, stride_x=0, beta=1.0, linear_beta=1.0, rounds=False, dependent=False, side_rows=w[0],
        side_width=w[1], ranks=int(region.attrs("all_reduce")["ranks"]), stripe=region.value("up_weight").shape[0],
        eps=1.0, few=few)
    return Mixed(**sizes, finished=_blocks(region), mix_eps=1.0, norm_eps=1.0) if _blocks(region) else Tail(**sizes)


def _blocks(region: Region) -> int:
    """Finished blocks of layers in the mix; 0 without it."""
    return sum(len(node.inputs) - 2 for node in region.nodes if node.op == "attn_res")


def _fits(region: Region, slots: int, warps: int, few: bool = False) -> bool:
    plan = _plan(region, slots, warps, few)
    return plan.ring_holds and plan.place()["end"] <= LIMIT


def configs(region: Region) -> list[dict[str, Any]]:
    """As much in flight as fits first, with the shared expert's product before the experts. More warps mix a row in
    fewer turns. Last those in which blocks leave early, which is for what comes behind, not for the launch itself."""
    usual = in_turn(*([{"slots": slots, "warps": warps, "side_first": first}
                       for slots in SLOTS if _fits(region, slots, warps)]
                      for warps in ((MANY, WARPS) if _blocks(region) else (WARPS, MANY)) for first in (True, False)))
    plan = _plan(region, 2, WARPS, few=True)
    if plan.owners == _plan(region, 2, WARPS).owners or 2 * plan.latents > plan.owners * plan.threads:
        return usual
    few = [slots for slots in SLOTS if _fits(region, slots, WARPS, few=True)]
    return usual + [{"slots": slots, "warps": WARPS, "side_first": first, "few": True}
                    for slots in few[:1] for first in (True, False)]


def needs(region: Region) -> str | None:
    """As the experts' and the tail's, and room for both."""
    if reason := needs_side(region):
        return reason
    plan = _plan(region, 2, WARPS)
    if any(node.attrs.get("dim", 1) != 1 for node in region.nodes):
        return "the kernel splits and joins columns"
    for name in ("norm", "up_weight"):
        if region.value(name).dtype != "bf16":
            return f"{name} is {region.value(name).dtype}, the kernel reads bf16"
    if plan.ranks & (plan.ranks - 1) or plan.ranks > MOST_RANKS:
        return f"{plan.ranks} ranks are not a power of two up to {MOST_RANKS}"
    if plan.stripe % (2 * PACK) or plan.stripe > ROWS * FEWEST_BLOCKS:
        return f"{plan.stripe} columns of a rank: not a multiple of {2 * PACK} up to {ROWS * FEWEST_BLOCKS}"
    if plan.out_width % STEP:
        return f"a latent of {plan.out_width}, not a multiple of {STEP}"
    if plan.ranks * plan.stripe != region.value("s").shape[1]:
        return f"{plan.ranks} ranks of {plan.stripe} columns, the shared expert has {region.value('s').shape[1]}"
    if _blocks(region) > MIX_BLOCKS:
        return f"{_blocks(region)} blocks, the kernel takes {MIX_BLOCKS}"
    if not configs(region):
        return "the up-projection's rows do not fit beside the experts' ring"
    return None


def scratch(region: Region, config: Mapping[str, Any]) -> dict[str, Scratch]:
    """The experts' activations, and a mailbox for any number of blocks: each has 4 columns of the latent at least."""
    plan = _plan(region, 2, WARPS)
    latent = plan.tokens * (plan.out_width // 4)
    fragments = 2 * latent + plan.stripes + plan.tokens * (plan.stripe // 4)
    return {"act": experts_scratch(region, config)["act"], **mailbox(plan.ranks, fragments, MOST_BLOCKS)}


def _needs_activation(rounded: bool) -> Callable[[Region], str | None]:
    def check(region: Region) -> str | None:
        if (region.attrs("experts_gate_up")["activation"] == "mxfp8") == rounded:
            return needs(region)
        return "rows are rounded to MXFP8" if not rounded else "rows are not rounded to MXFP8"
    return check


def _define(name: str, pattern: str, note: str) -> tuple[KernelDef, KernelDef]:
    """With MXFP8 rows for sm_90 alone: later GPUs multiply them as they are (``moe_experts_block_scaled``)."""
    bf16 = KernelDef(id=f"cute.{name}", entry=ENTRY, arch=ARCH, rows=(1, TOKENS), needs=_needs_activation(False),
                     configs=configs, scratch=scratch, pattern=pattern, note=note)
    return bf16, replace(bf16, id=f"cute.{name}_mxfp8", arch=ARCH[:1], needs=_needs_activation(True))


KERNELS: tuple[KernelDef, ...] = (
    *_define("moe_experts_tail", MOE_EXPERTS_TAIL,
             "experts, the shared expert's down-projection, both sums over ranks, norm, stripe of the up-projection "
             "and gather; one launch"),
    *_define("moe_experts_tail_add_attn_res", MOE_EXPERTS_TAIL_ADD_MIX,
             "the same, and from the mailbox the residual, the mix over the blocks and the norm before the next layer"),
)
