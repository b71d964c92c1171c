"""Where ``cute.moe_front`` and its sharded form fit, their configurations and workspace. No cutlass here."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..compiler.call import Scratch
from ..compiler.fusions import MOE_FRONT_SHARDED, refuse_pairs, row_groups
from ..compiler.kernel import KernelDef, Region
from .all_reduce_attn_res_menu import mailbox
from .moe_front_plan import TILE, TOKENS, Static
from .shared_memory import LIMIT

ARCH = ("sm_90", "sm_100", "sm_103")
MOST_RANKS = 32  # a report has a bit for each
MOST_KEYS = 1024  # experts: 32 keys in the registers of a lane
MOST_BLOCKS = 256  # epochs that are kept, one for each thread block
PARITIES = 2
KEY_BYTES = 16  # of shared memory that the top-k has for an expert, at most
MOST_SLOTS = 12
PACES = (2, 3)
FEWEST_BLOCKS = 132  # multiprocessors of the smallest GPU that the kernel is for


def _needs(region: Region) -> str | None:
    router, plain, pairs = row_groups(region)
    route, columns = region.attrs("router_topk"), region.value("x").shape[-1]
    for name, dtype in (("x", "bf16"), ("router", "bf16"), ("weight", "bf16"), ("logits", "fp32"), ("f", "bf16")):
        if region.value(name).dtype != dtype:
            return f"{name} is {region.value(name).dtype}, the kernel has {dtype}"
    if len(region.value("x").shape) != 2:
        return "rows must be a matrix"
    if columns % 32 or router % TILE or plain % TILE or 2 * pairs % TILE:
        return f"{columns} columns, {router} + {plain} + 2 x {pairs} rows: not multiples of 32 and {TILE}"
    if route["groups"] != 1:
        return f"experts in {route['groups']} groups, the kernel has one"
    experts = region.value("bias").shape[0]
    if not route["top_k"] <= 32 <= experts <= MOST_KEYS:
        return f"top {route['top_k']} of {experts} experts, the kernel has at most 32 of 32 to {MOST_KEYS}"
    return refuse_pairs(region) or (None if configs(region) else "two slots do not fit shared memory")


def _needs_shards(region: Region) -> str | None:
    """Both gathers join columns, and the latent's part is the first of the projection."""
    plain = row_groups(region)[1]
    part, ranks = region.maker("part"), _ranks(region)
    assert part is not None
    if ranks > MOST_RANKS:
        return f"{ranks} ranks, the kernel takes {MOST_RANKS}"
    if (part.attrs["start"], part.attrs["stop"]) != (0, plain):
        return "the gathered rows are not the first of the projection"
    if any(node.attrs["dim"] != 1 for node in region.nodes if node.op == "all_gather"):
        return "the kernel joins columns"
    return _needs(region)


def _ranks(region: Region) -> int:
    return int(region.attrs("all_gather")["ranks"])


def _sharded_scratch(region: Region, config: Mapping[str, Any]) -> dict[str, Scratch]:
    """The mailbox of fragments of 4 logits and of 8 numbers of the latent."""
    router, plain, _ = row_groups(region)
    rows = region.value("x").shape[0]
    return mailbox(_ranks(region), rows * (router // 4 + plain // 8), MOST_BLOCKS)


def _plan(region: Region, slots: int) -> Static:
    """Sizes, as far as the shapes say them, on the fewest multiprocessors."""
    router, plain, pairs = row_groups(region)
    tokens, columns = region.value("x").shape
    return Static(
        tokens=tokens, columns=columns, router=router, plain=plain, pairs=pairs, top_k=1, blocks=FEWEST_BLOCKS,
        slots=slots, stride_x=0, stride_f=0, stride_a=0, beta=1.0, linear_beta=1.0, renormalize=True, scaling=1.0,
        dependent=False, lean=False, pace=0)


def _fits(region: Region, slots: int) -> bool:
    return _plan(region, slots).place()["end"] <= LIMIT


def configs(region: Region) -> list[dict[str, Any]]:
    """As much in flight as fits first; fewer slots leave room for a neighbour's blocks."""
    return [{"slots": slots} for slots in (MOST_SLOTS, 8, 6, 4, 2) if _fits(region, slots)]


def sharded_configs(region: Region) -> list[dict[str, Any]]:
    """As ``configs``; last, as many slots as a block has weights for, and the top-k's memory over them: beside it there
    is room for the blocks of a projection that ends before it."""
    plan = _plan(region, 1)
    whole = plan.chunks * -(-plan.units // plan.blocks)
    over = whole * plan.slot_bytes >= KEY_BYTES * MOST_KEYS
    lean = [{"slots": whole, "lean": True}] if over and 2 <= whole <= MOST_SLOTS and _fits(region, whole) else []
    made: list[dict[str, Any]] = [*configs(region), *lean]
    return [*made, *({**config, "pace": pace} for config in made for pace in PACES if pace < config["slots"])]


def scratch(region: Region, config: Mapping[str, Any]) -> dict[str, Scratch]:
    """Logits on their way to the warp that routes, for this launch and the one before (zero is "not yet"), and a count
    of launches for each thread block."""
    rows, experts = region.value("x").shape[0], region.value("router").shape[0]
    return {"logits": Scratch((PARITIES, rows, experts), "i32", zeroed=True, kept=True),
            "epochs": Scratch((MOST_BLOCKS,), "i32", zeroed=True, kept=True)}


def _define(name: str, shared: bool, note: str) -> KernelDef:
    lines = ["logits = linear(x, router)", "f = linear(x, weight)"]
    lines += ["gate = slice(f)", "up = slice(f)", "a = situ_and_mul(gate, up)"] if shared else []
    lines += ["ids, weights = router_topk(logits, bias)", "-> f, a, ids, weights" if shared else "-> f, ids, weights"]
    return KernelDef(id=f"cute.{name}", pattern="\n".join(lines), entry="k3plan.ops_cute.moe_front:bind", arch=ARCH,
                     rows=(1, TOKENS), needs=_needs, configs=configs, scratch=scratch, note=note)


KERNELS: tuple[KernelDef, ...] = (
    _define("moe_front", True, "router, latent and shared projections, SiTU and the top-k in one launch"),
    _define("moe_front_plain", False, "router and latent projections and the top-k in one launch"),
    KernelDef(id="cute.moe_front_sharded", pattern=MOE_FRONT_SHARDED, arch=ARCH, rows=(1, TOKENS),
              entry="k3plan.ops_cute.moe_front_sharded:bind", needs=_needs_shards, configs=sharded_configs,
              scratch=_sharded_scratch,
              note="sharded router, latent and shared projections, both gathers and the top-k in one launch"),
)
