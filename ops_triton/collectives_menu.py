"""Where the collective kernels fit, their launch configurations and workspace. No triton here."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..compiler.call import Scratch
from ..compiler.fusions import MIX, MOE_TAIL, STRIPE
from ..compiler.ir import DTYPE_BYTES
from ..compiler.kernel import KernelDef, Region

ENTRY = "k3plan.ops_triton.collectives:bind_{}"
ONE_SHOT_BYTES = 15 * 8 * 14336  # most that a rank sends in all: 8 rows to 15 peers, 64 rows to one
ARMED_BYTES = 32 * 1024  # messages above it go by armed words as a rule: half the bytes, one more store
HEALTH = 8
STRIPE_ROWS = 16  # most step rows of the up-projection's stripe
# a block that has its rows in registers fills an SM above 4 step rows: with more columns than a wave of blocks of 8 the
# launch is slower than its parts (3584 columns, 8 rows, two H200: MoE tail 60 us, in five launches 22)
HELD_COLUMNS = 1024


def ranks_of(region: Region) -> int:
    return next(int(node.attrs["ranks"]) for node in region.nodes if "ranks" in node.attrs)


def units(shape: tuple[int, ...], dtype: str) -> tuple[int, int]:
    """Rows, and words of 4 bytes in each."""
    rows, columns = (shape[0], 1) if len(shape) == 1 else shape
    return rows, columns * DTYPE_BYTES[dtype] // 4


def mailbox(ranks: int, slot: int, blocks: int, *, armed: bool = False) -> dict[str, Scratch]:
    """What an exchange of ``slot`` words a rank between ``blocks`` blocks of threads a rank keeps (``exchange.py``)."""
    return {"mailbox": Scratch((3 if armed else 2, ranks, slot), "i32" if armed else "i64", zeroed=True, kept=True),
            "epochs": Scratch((blocks,), "i32", zeroed=True, kept=True),
            "health": Scratch((HEALTH,), "i32", zeroed=True, kept=True)}


def _message(region: Region, name: str) -> tuple[int, int]:
    """Rows and words that a rank sends to each peer."""
    rows, width = units(region.value(name).shape, region.value(name).dtype)
    node = next(n for n in region.nodes if region.binding[name] in n.inputs and "ranks" in n.attrs)
    return rows, width // ranks_of(region) if node.op == "reduce_scatter" else width


def scratch(region: Region, config: Mapping[str, Any]) -> dict[str, Scratch]:
    messages = [_message(region, name) for name in ("x", "other") if name in region.binding]
    blocks = sum(rows * -(-width // config["units"]) for rows, width in messages)
    return mailbox(ranks_of(region), sum(rows * width for rows, width in messages), blocks,
                   armed=config.get("armed", False))


def configs(region: Region) -> list[dict[str, Any]]:
    """``units`` words a block; 16 ranks times 256 words fill the registers of 4 warps. ``armed`` where floats allow."""
    flagged = [{"units": u, "warps": w} for u, w in ((256, 4), (128, 4), (512, 8), (128, 2), (64, 2))]
    if region.value("x").dtype == "i64":
        return flagged
    if region.has("all_gather") and region.value("x").shape[0] > 1:
        # a gather of 128 words of several rows by 4 warps spills 16 bytes of registers on sm_90 to sm_103
        flagged = [flagged[2], *flagged[:2], *flagged[3:]]
    armed = [{"units": u, "warps": w, "armed": True} for u, w in ((512, 4), (1024, 8), (256, 4), (1024, 4), (128, 4))]
    rows, width = _message(region, "x")
    return armed + flagged if rows * width * 4 > ARMED_BYTES else flagged + armed


def _needs(region: Region) -> str | None:
    ranks = ranks_of(region)
    if ranks > 32:
        return f"{ranks} ranks, a block waits for 32 at most"
    for name in ("x", "other"):
        if name not in region.binding:
            continue
        value = region.value(name)
        columns = value.shape[-1]
        if value.dtype not in ("bf16", "fp32", "i64"):
            return f"{name} is {value.dtype}, the kernel adds bf16 and fp32"
        if value.dtype == "bf16" and columns % (2 * ranks):
            return f"{columns} columns of bf16 over {ranks} ranks: words of 4 bytes would be shared"
        rows, width = _message(region, name)
        sent = rows * width * 4 * (ranks - 1)
        if sent > ONE_SHOT_BYTES and any(n.op == "all_reduce" for n in region.nodes):
            return f"{sent} bytes from every rank, at most {ONE_SHOT_BYTES} pay"
    dims = [node.attrs["dim"] for node in region.nodes if "dim" in node.attrs]
    if any(dim != 1 for dim in dims):
        return "the kernel splits and joins columns"
    if "k" in region.binding and region.attrs("all_reduce")["reduce"] != "max":
        return "the sum of keys is no key"
    return None


def two_shot_scratch(region: Region, config: Mapping[str, Any]) -> dict[str, Scratch]:
    """Parts of ``x`` to add up, then the sums, in one slot."""
    ranks = ranks_of(region)
    rows, width = units(region.value("x").shape, region.value("x").dtype)
    return mailbox(ranks, 2 * rows * width // ranks, rows * width // config["units"], armed=config["armed"])


def two_shot_configs(region: Region) -> list[dict[str, Any]]:
    """``units`` words a block, a part of them for each rank."""
    width, ranks = units(region.value("x").shape, region.value("x").dtype)[1], ranks_of(region)
    found = [{"units": u, "warps": w, "armed": True} for u, w in ((512, 4), (512, 2), (256, 2), (256, 1), (128, 1))]
    return [c for c in found if width % c["units"] == 0 and c["units"] >= 4 * ranks]


def _needs_two_shot(region: Region) -> str | None:
    ranks, value = ranks_of(region), region.value("x")
    if value.dtype not in ("bf16", "fp32") or region.attrs("all_reduce")["reduce"] != "sum":
        return "the kernel adds bf16 and fp32"
    rows, width = units(value.shape, value.dtype)
    if ranks == 2 or rows * width * 4 * (ranks - 1) <= ONE_SHOT_BYTES:
        return "one hop with the whole message is as cheap"
    if ranks > 32:
        return f"{ranks} ranks, a block waits for 32 at most"
    return None if two_shot_configs(region) else f"{width} words in a row do not divide into blocks for {ranks} ranks"


def mix_scratch(region: Region, config: Mapping[str, Any]) -> dict[str, Scratch]:
    """The exchange between ranks, and the one between the blocks of a row on each rank."""
    rows, width = units(region.value("x").shape, "bf16")
    parts = -(-2 * width // config["columns"])
    return mailbox(ranks_of(region), rows * width, rows * parts) | {
        "grams": Scratch((rows, parts, 16, 16), "i64", zeroed=True, kept=True),
        "row_epochs": Scratch((rows,), "i32", zeroed=True, kept=True)}


def mix_configs(region: Region) -> list[dict[str, Any]]:
    columns = region.value("x").shape[1]
    found = [{"columns": c, "warps": w} for c, w in ((512, 4), (1024, 8), (1024, 4), (512, 8))]
    return [c for c in found if c["columns"] < 2 * columns] or [{"columns": 256, "warps": 4}]


def _needs_mix(region: Region) -> str | None:
    blocks = sum(node.op == "attn_res" and len(node.inputs) - 2 for node in region.nodes)
    if not 1 <= blocks <= 8:
        return f"{blocks} blocks, the kernel takes 1 to 8"
    return _needs(region)


def stripe_scratch(region: Region, config: Mapping[str, Any]) -> dict[str, Scratch]:
    rows = region.value("out").shape[0]
    stripe = region.value("weight").shape[0]
    return mailbox(ranks_of(region), rows * stripe // 2, -(-stripe // config["rows"]))


def stripe_configs(region: Region) -> list[dict[str, Any]]:
    """A block holds ``rows`` rows of the weight, or walks along them with ``block`` elements of each at a time."""
    held = [{"rows": r, "warps": w} for r, w in ((4, 8), (4, 4), (8, 8), (2, 4))]
    walked = [{"rows": r, "warps": 4, "block": b, "stages": s} for r, b, s in ((32, 128, 4), (16, 256, 3), (32, 64, 6))]
    wide, few = region.value("weight").shape[0] > HELD_COLUMNS, region.value("out").shape[0] <= 4
    # held rows times 16 step rows: every size spills, 256 to 1636 bytes a thread (gfx950, triton 3.6)
    spilled = region.warp_size > 32
    return held if few and not wide else walked if (wide or spilled) and not few else held + walked


def _needs_stripe(region: Region) -> str | None:
    stripe, columns = region.value("weight").shape
    if stripe % 2:
        return f"{stripe} columns of a rank: words of 4 bytes would be shared"
    if columns > 4096:
        return f"{columns} inputs, the kernel keeps 4096"
    if region.value("weight").dtype != "bf16":
        return f"weight is {region.value('weight').dtype}, the kernel reads bf16"
    if region.value("latent").dtype != "bf16":
        return f"the latent is {region.value('latent').dtype}, the kernel reads bf16"
    return None


def tail_scratch(region: Region, config: Mapping[str, Any]) -> dict[str, Scratch]:
    """The sums and the mailbox of the first launch, and those of the second under ``stripe_`` names."""
    second = {f"stripe_{name}": want for name, want in stripe_scratch(region, config).items()}
    sums = {name: Scratch(region.value(name).shape, "bf16") for name in ("latent", "shared")}
    return scratch(region, config) | second | sums


def tail_configs(region: Region) -> list[dict[str, Any]]:
    return [{"units": u} | stripe for u in (256, 128) for stripe in stripe_configs(region)]


def _needs_tail(region: Region) -> str | None:
    return _needs(region) or _needs_stripe(region)


def _define(name: str, pattern: str, entry: str, note: str, **more: Any) -> KernelDef:
    base: dict[str, Any] = {"needs": _needs, "scratch": scratch, "configs": configs, "rows": (1, 64)}
    return KernelDef(id=f"triton.{name}", pattern=pattern, entry=ENTRY.format(entry), note=note,
                     **(base | more))


KERNELS: tuple[KernelDef, ...] = (
    _define("all_reduce", "y = all_reduce(x)\n-> y", "exchange", "every rank sends its whole part to every other"),
    _define("all_reduce_two_shot", "y = all_reduce(x)\n-> y", "two_shot", "each rank adds up a part and sends it to "
            "all: two hops, 2 / ranks of the bytes", needs=_needs_two_shot, scratch=two_shot_scratch,
            configs=two_shot_configs),
    _define("reduce_scatter", "y = reduce_scatter(x)\n-> y", "exchange", "columns, one part for each rank"),
    _define("all_gather", "y = all_gather(x)\n-> y", "exchange", "columns of all ranks side by side"),
    _define("all_reduce_token", "k = all_reduce(x)\ntoken = token_of_key(k, positions)\n-> token", "exchange",
            "the winner of all ranks' keys and its token"),
    _define("all_reduce_add_attn_res", f"y = all_reduce(x)\np = residual_add(prefix, y)\n{MIX}", "mix",
            "sum over ranks, residual, mix over the blocks, norm", needs=_needs_mix, scratch=mix_scratch,
            configs=mix_configs),
    _define("all_reduce_attn_res", f"p = all_reduce(x)\n{MIX}", "mix", "the same where a block begins",
            needs=_needs_mix, scratch=mix_scratch, configs=mix_configs),
    _define("stripe_gather", f"{STRIPE}\n-> g", "stripe", "a rank's stripe of the up-projection, plus its shard of "
            "the shared experts, to all ranks", needs=_needs_stripe, scratch=stripe_scratch, configs=stripe_configs,
            rows=(1, STRIPE_ROWS)),
    _define("moe_tail", MOE_TAIL, "tail",
            "both sums of a sparse layer over ranks, then the stripe; two launches", needs=_needs_tail,
            scratch=tail_scratch, configs=tail_configs, rows=(1, STRIPE_ROWS)),
)
