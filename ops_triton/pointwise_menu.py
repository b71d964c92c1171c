"""Where the one-op elementwise kernels, the gated norm and the experts' sum fit. No triton here."""
from __future__ import annotations

from typing import Any

from ..compiler.kernel import KernelDef, Region

ENTRY = "k3plan.ops_triton.pointwise:"
ROWS = (1, 512)
FLOATS = ("bf16", "fp32")
MOST_PAIRS = 32  # of a row in experts_combine: their loads are unrolled
MOST_COLUMNS = 4096  # of a head in gated_rms_norm: one tile holds it


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below ``number``."""
    return 1 << (number - 1).bit_length()


def tile_configs(columns: int) -> list[dict[str, Any]]:
    """Tiles of about 1024 elements: 8 a thread with 4 warps, so that a small op still spreads over the GPU."""
    found = []
    for elements, warps in ((1024, 4), (512, 2), (2048, 4), (256, 1), (4096, 8)):
        wide = min(power_of_two(columns), elements)
        found.append({"rows": max(1, min(elements // wide, 8)), "columns": wide, "warps": warps})
    return list({tuple(c.items()): c for c in found}.values())


def _configs(region: Region) -> list[dict[str, Any]]:
    return tile_configs(region.graph.values[region.inputs[0]].shape[-1])


def _norm_configs(region: Region) -> list[dict[str, Any]]:
    """``rows`` heads a block."""
    width = power_of_two(region.value("weight").shape[0])
    found = [{"rows": max(1, elements // width), "warps": warps}
             for elements, warps in ((128, 1), (256, 1), (512, 2), (1024, 4))]
    return list({tuple(c.items()): c for c in found}.values())


def _combine_configs(region: Region) -> list[dict[str, Any]]:
    columns = power_of_two(region.value("y").shape[2])
    found = [{"columns": min(columns, n), "warps": warps} for n, warps in ((256, 4), (128, 2), (512, 4), (1024, 4))]
    return list({tuple(c.items()): c for c in found}.values())


def needs_floats(region: Region) -> str | None:
    """bf16 or fp32 in every input and output but the index tensors."""
    for name in (*region.inputs, *region.outputs):
        value = region.graph.values[name]
        if value.role != "index" and value.dtype not in FLOATS:
            return f"an operand is {value.dtype}, the kernel takes bf16 and fp32"
    return None


def _needs_flat(region: Region) -> str | None:
    """Operands of one shape."""
    shapes = {region.graph.values[name].shape for name in region.inputs}
    if len(shapes) > 1:
        return f"operands of shapes {sorted(shapes)}"
    return needs_floats(region)


def _needs_norm(region: Region) -> str | None:
    width = region.value("weight").shape[0]
    return needs_floats(region) if width <= MOST_COLUMNS else f"a head of {width} is more than {MOST_COLUMNS}"


def _needs_combine(region: Region) -> str | None:
    pairs = region.value("y").shape[1]
    return needs_floats(region) if pairs <= MOST_PAIRS else f"{pairs} experts a row, more than {MOST_PAIRS}"


def _two(op: str, left: str, right: str, note: str) -> KernelDef:
    return KernelDef(id=f"triton.{op}", pattern=f"y = {op}({left}, {right})\n-> y", entry=ENTRY + "bind", rows=ROWS,
                     needs=_needs_flat, configs=_configs, note=note)


KERNELS: tuple[KernelDef, ...] = (
    _two("situ_and_mul", "gate", "up", "activation of the experts and the MLP"),
    _two("silu_and_mul", "gate", "up", "activation of the experts and the MLP"),
    _two("sigmoid_mul", "x", "gate", "output gate of MLA"),
    _two("residual_add", "prefix", "delta", "one step of the residual stream"),
    _two("add", "left", "right", "elementwise sum"),
    KernelDef(id="triton.gated_rms_norm", pattern="y = gated_rms_norm(x, gate, weight)\n-> y",
              entry=ENTRY + "bind_norm", rows=ROWS, needs=_needs_norm, configs=_norm_configs,
              note="norm of each head and its gate"),
    KernelDef(id="triton.combine_pairs", pattern="out = experts_combine(y, weights)\n-> out",
              entry=ENTRY + "bind_combine", rows=ROWS, needs=_needs_combine, configs=_combine_configs,
              note="weighted sum of the experts of a row"),
)
