"""Where ``cute.router_topk`` fits. No cutlass here."""
from __future__ import annotations

from ..compiler.kernel import KernelDef, Region
from .moe_front_menu import ARCH, MOST_KEYS
from .router_topk_plan import EACH, WARP

MOST_ROWS = 1024  # a thread block each


def _needs(region: Region) -> str | None:
    route, experts = region.attrs("router_topk"), region.value("logits").shape[1]
    if route["groups"] != 1:
        return f"experts in {route['groups']} groups, the kernel has one"
    if route["top_k"] > WARP or experts > MOST_KEYS or experts % EACH:
        return (f"top {route['top_k']} of {experts} experts, the kernel has at most {WARP} of at most {MOST_KEYS}, a "
                f"multiple of {EACH}")
    return None


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(id="cute.router_topk", pattern="ids, weights = router_topk(logits, bias)\n-> ids, weights",
              entry="k3plan.ops_cute.router_topk:bind", arch=ARCH, rows=(1, MOST_ROWS), needs=_needs,
              note="exact top-k of a row"),
)
