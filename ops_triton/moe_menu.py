"""Where the router's top-k and the routed experts fit, their launch configurations and workspace. No triton here."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..compiler.call import Scratch
from ..compiler.kernel import KernelDef, Region

ROUTE = "k3plan.ops_triton.moe_route:bind"
BY_PAIR = "k3plan.ops_triton.moe_down_by_pair:bind"
DENSE = "k3plan.ops_triton.moe_dense:bind"
EXPERTS = "k3plan.ops_triton.moe_experts:bind"
ROWS = (1, 64)
MOST_PAIRS = 4096  # ids that a block scans to find the pairs of its expert

GATE_UP = "gate, up = experts_gate_up(x, ids, rank, w1, w3, s1, s3)"
GATE_UP_DENSE = "gate, up = experts_gate_up(x, ids, rank, w1, w3)"
DOWN_DENSE = "pairs = experts_down(act, ids, rank, w2)"
DOWN = "pairs = experts_down(act, ids, rank, w2, s2)"
COMBINE = "out = experts_combine(pairs, weights)"


def _pairs(region: Region) -> int:
    rows, top_k = region.value("ids").shape
    return rows * top_k


def _needs_packed(region: Region) -> str | None:
    for name in ("w1", "w2"):
        if name in region.binding and region.value(name).dtype != "u8":
            return f"{name} is {region.value(name).dtype}, the kernel reads MXFP4"
    if "x" in region.binding and len(region.value("x").shape) != 2:
        return "rows must be a matrix"
    return None if _pairs(region) <= MOST_PAIRS else f"{_pairs(region)} pairs, more than {MOST_PAIRS}"


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below ``number``."""
    return 1 << (number - 1).bit_length()


def span_and_depth(groups: int) -> tuple[int, int]:
    """Lanes along one expert's row of W2 and groups a lane: 2 x 3 for 192 numbers, and no lane is idle."""
    third = groups // 3
    if groups % 3 == 0 and power_of_two(third) == third:
        return third, 3
    return power_of_two(groups), 1


def together(top_k: int, span: int, warps: int, *, whole: bool) -> int:
    """Experts of a token that a block of down computes side by side. A rank with ``whole`` experts has few of a
    token's: it takes them one by one and skips the others."""
    return 1 if whole else min(power_of_two(top_k), max(1, warps * 32 // span))


def _rows(deep: int, lanes: int, warps: int, most: int) -> int:
    """Weight rows of a block in which a thread holds groups of ``deep`` rows."""
    return min(max(1, deep * warps * 32 // lanes), power_of_two(most))


def _gate_up_rows(region: Region, deep: int, warps: int) -> int:
    w1 = region.value("w1").shape
    return _rows(deep, power_of_two(w1[2] // 16), warps, w1[1])


def _down_columns(region: Region, deep: int, warps: int) -> int:
    experts, width, packed = region.value("w2").shape
    span, depth = span_and_depth(packed // 16)
    whole = experts < region.attrs("experts_down")["experts"]
    lanes = together(region.value("ids").shape[1], span, warps, whole=whole) * span
    return _rows(max(1, power_of_two(deep // depth + 1) // 2), lanes, warps, width)


def _gate_up_configs(region: Region) -> list[dict[str, Any]]:
    """The guess first: all loads at once for one row; for few, several steps with one look at x; for many, one decode
    for two rows of an expert."""
    tokens = region.value("ids").shape[0]

    def config(deep: int, warps: int, steps: int, dedupe: bool = False) -> dict[str, Any]:
        rows = _gate_up_rows(region, deep, warps)
        most = -(-region.value("w1").shape[1] // rows)
        return {"rows": rows, "steps": min(steps, most), "warps": warps, "dedupe": dedupe}

    once = [config(*shape, 1) for shape in ((8, 4), (4, 4), (8, 8), (2, 4), (4, 2))]
    if tokens == 1:
        return [*once, config(4, 4, 2), config(4, 4, 3)]
    steps = [config(*shape) for shape in ((8, 4, 2), (4, 4, 3), (4, 4, 6), (8, 8, 3), (8, 8, 2))]
    if region.attrs("experts_gate_up")["activation"] == "mxfp8":
        # with rows rounded to MXFP8, the first spills 8 bytes of registers on sm_100
        steps = [*steps[1:], steps[0]]
    shared = [config(*shape, True) for shape in ((4, 4, 1), (8, 8, 1), (4, 4, 3), (4, 8, 2))]
    return [*steps, *once, *shared] if tokens <= 16 else [*shared, *steps]


def _down_configs(region: Region) -> list[dict[str, Any]]:
    """Several steps only where there are more blocks than fit at once."""
    tokens = region.value("ids").shape[0]
    shapes: tuple[tuple[int, int, int], ...] = ((16, 4, 1), (8, 4, 1), (16, 8, 1), (4, 4, 1), (8, 8, 1), (8, 2, 1))
    if tokens > 1:
        shapes = ((16, 4, 2), (8, 4, 2), (8, 4, 4), (16, 4, 4), *shapes[:4])
    return [{"columns": _down_columns(region, deep, warps), "steps": steps, "warps": warps}
            for deep, warps, steps in shapes]


def _chain_configs(region: Region) -> list[dict[str, Any]]:
    tokens = region.value("ids").shape[0]
    shapes = ((8, 16, 4, 1), (4, 16, 4, 1), (4, 8, 4, 1), (8, 8, 4, 1), (4, 8, 8, 1))
    if tokens > 1:
        shapes = ((4, 8, 4, 3), (8, 16, 4, 2), (4, 16, 4, 2), *shapes[:2])
    return [{"rows": _gate_up_rows(region, deep, warps), "columns": _down_columns(region, columns, warps),
             "steps": steps, "warps": warps} for deep, columns, warps, steps in shapes]


def _chain_scratch(region: Region, config: Mapping[str, Any]) -> dict[str, Scratch]:
    """Activations between the halves; per token, finished blocks of the first and passed blocks of the second."""
    rows, top_k = region.value("ids").shape
    return {"act": Scratch((rows, top_k, region.value("w1").shape[1]), "bf16"),
            "ready": Scratch((2, rows), "i32", zeroed=True)}


def _by_pair_configs(region: Region) -> list[dict[str, Any]]:
    width, packed = region.value("w2").shape[1:]
    return [{"columns": _rows(deep, power_of_two(packed // 16), warps, width), "warps": warps}
            for deep, warps in ((8, 4), (4, 4), (8, 8), (16, 4), (4, 8))]


def _by_pair_scratch(region: Region, config: Mapping[str, Any]) -> dict[str, Scratch]:
    """One fp32 row a pair, and per token and block of columns the pairs that are done."""
    rows, top_k = region.value("ids").shape
    width = region.value("w2").shape[1]
    return {"partial": Scratch((rows * top_k, width), "fp32"),
            "arrivals": Scratch((rows, -(-width // config["columns"])), "i32", zeroed=True)}


def _dense_configs(region: Region) -> list[dict[str, Any]]:
    weights = region.value("w1" if "w1" in region.binding else "w2").shape
    inter, columns = power_of_two(weights[1]), power_of_two(weights[2])
    found = []
    for rows, block, warps in ((4, 1024, 4), (8, 512, 4), (2, 1024, 4), (4, 2048, 8), (16, 256, 4)):
        # narrow matrices: as many elements a block, along the rows
        wide = max(1, block // columns)
        found.append({"rows": min(rows * wide, inter), "block": min(block, columns), "warps": warps})
    return found


def _route_configs(region: Region) -> list[dict[str, Any]]:
    return [{"warps": warps} for warps in (8, 4, 16, 2)]


def _needs_plain(region: Region) -> str | None:
    name = "w1" if "w1" in region.binding else "w2"
    if region.value(name).dtype not in ("bf16", "fp32"):
        return f"{name} is {region.value(name).dtype}, the kernel reads bf16 or fp32"
    attrs = region.attrs("experts_gate_up" if name == "w1" else "experts_down")
    return "rounds no activations to MXFP8" if attrs["activation"] == "mxfp8" else None


def _needs_room(region: Region) -> str | None:
    """A row's keys in registers: 32 a thread at most; an id must leave most of a 32-bit key to the score."""
    experts = region.value("logits").shape[1]
    groups, top_k = region.attrs("router_topk")["groups"], region.attrs("router_topk")["top_k"]
    padded = power_of_two(groups) * power_of_two(experts // groups)
    if padded > 4096 or padded < power_of_two(top_k):
        return f"{experts} experts in {groups} groups, top {top_k}: the padded row has {padded} keys, 4096 at most"
    return None


def _define(name: str, entry: str, lines: tuple[str, ...], exports: str, note: str, **more: Any) -> KernelDef:
    return KernelDef(id=f"triton.{name}", pattern="\n".join((*lines, f"-> {exports}")), entry=entry, rows=ROWS,
                     note=note, **more)


def _experts() -> Iterator[KernelDef]:
    packed: dict[str, Any] = {"needs": _needs_packed}
    late: dict[str, Any] = {"late": lambda config: True}  # they wait and then let the next launch start
    down: dict[str, Any] = {**packed, "early": ("ids",)}  # settled by those
    plain: dict[str, Any] = {"needs": _needs_plain, "configs": _dense_configs}
    yield _define("experts_gate_up", EXPERTS, (GATE_UP,), "gate, up", "W1 and W3", configs=_gate_up_configs, **packed,
                  **late)
    yield _define("experts_gate_up_dense", DENSE, (GATE_UP_DENSE,), "gate, up", "W1 and W3", **plain, **late)
    for short, op in (("situ", "situ_and_mul"), ("silu", "silu_and_mul")):
        activation = f"act = {op}(gate, up)"
        yield _define(f"experts_gate_up_{short}", EXPERTS, (GATE_UP, activation), "act", "W1, W3 and their activation",
                      configs=_gate_up_configs, **packed, **late)
        yield _define(f"experts_gate_up_{short}_dense", DENSE, (GATE_UP_DENSE, activation), "act",
                      "W1, W3 and their activation", **plain, **late)
        yield _define(f"experts_{short}", EXPERTS, (GATE_UP, activation, DOWN, COMBINE), "out",
                      "W1, W3, activation, W2 and the weighted sum", configs=_chain_configs, scratch=_chain_scratch,
                      **packed, **late)
    yield _define("experts_down", BY_PAIR, (DOWN,), "pairs", "W2", configs=_by_pair_configs, **down)
    yield _define("experts_down_dense", DENSE, (DOWN_DENSE,), "pairs", "W2", **plain)
    yield _define("experts_down_combine", EXPERTS, (DOWN, COMBINE), "out", "W2 and the weighted sum, a token a block",
                  configs=_down_configs, **down)
    yield _define("experts_down_by_pair", BY_PAIR, (DOWN, COMBINE), "out", "W2 and the weighted sum, a pair a block",
                  configs=_by_pair_configs, scratch=_by_pair_scratch, **down)
    yield _define("experts_down_combine_dense", DENSE, (DOWN_DENSE, COMBINE), "out", "W2 and the weighted sum", **plain)
    yield _define("experts_combine", f"{BY_PAIR}_combine", (COMBINE,), "out", "the weighted sum",
                  configs=lambda region: [{"columns": 256, "warps": 4}, {"columns": 128, "warps": 1}])


KERNELS: tuple[KernelDef, ...] = (
    _define("router_topk", ROUTE, ("ids, weights = router_topk(logits, bias)",), "ids, weights", "exact top-k of a row",
            needs=_needs_room, configs=_route_configs),
    *_experts(),
)
