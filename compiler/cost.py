"""What a launch costs: bytes and flops of its region, priced by the device table; a measurement beats both.

A launch pays either a boundary (its inputs are warm in L2) or a cold ramp (it streams weights, states or
caches from memory), then its bytes. An op that torch runs by itself is several launches. Nothing here knows a
kernel by name.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .device import Device
from .kernel import Cost, Region
from .menu import LIBRARY_PRODUCT
from .ops import OPS
from .schedule import can_start_early
from .tuning import Tuning, shape_key

# a kernel that reads less cold memory than this hides it in its boundary (H200: 1.2 us is 2 MB less the ramp)
COLD_BYTES = 256 * 1024
FEW_ROWS = 8  # up to here a product is its weights' bytes, and the library wastes half of its smallest tile


@dataclass(frozen=True)
class Traffic:
    """Bytes of a region by temperature, and its flops. Interior values cost nothing."""

    cold: int
    warm: int
    flops: int


def traffic(region: Region) -> Traffic:
    """Counts a region: the sum over its nodes, less the values that never leave it."""
    values = region.graph.values
    total = flops = 0
    made = {name for node in region.nodes for name in node.outputs}
    exported = set(region.outputs)
    for node in region.solid:
        counted = OPS[node.op].count([values[n] for n in node.inputs], [values[n] for n in node.outputs], node.attrs)
        total += counted.bytes
        flops += counted.flops
        total -= sum(values[n].nbytes for n in node.inputs if n in made and values[n].role == "activation")
        total -= sum(values[n].nbytes for n in node.outputs if n not in exported and values[n].role == "activation")
    outside = [n for n in region.inputs if values[n].role in ("activation", "index")]
    warm = sum(values[n].nbytes for n in (*outside, *region.outputs) if values[n].role in ("activation", "index"))
    warm = max(0, min(warm, total))
    return Traffic(max(0, total - warm), warm, flops)


def torch_launches(region: Region) -> int:
    """Kernels of a launch: 1, or as many as torch needs for an op (on a GPU, where each is a boundary)."""
    return OPS[region.nodes[0].op].aten if region.kernel.entry.startswith("op:") else 1


def _rows(region: Region) -> int:
    return region.graph.values[region.nodes[0].inputs[0]].shape[0]


def cost_model(device: Device, tuning: Tuning, ranks: int) -> Callable[[Region], Cost]:
    """The planner's price of a region on ``device`` in a step on ``ranks`` ranks."""

    def price(region: Region) -> Cost:
        counted, setting = traffic(region), tuning.setting(region)
        moved = counted.cold + counted.warm
        line = setting.measured or setting.near
        extra, why = (0.0, ", in a step") if line is not None and line.in_step else in_step_us(device, region)
        if setting.measured is not None:
            return Cost(setting.measured.us + extra, moved, counted.flops, True, setting.measured.source + why)
        measured = device.measured.get((region.kernel.id, shape_key(region)))
        if measured is not None:
            return Cost(measured[0] + extra, moved, counted.flops, True, measured[1] + why)
        us, source = model_us(device, region, ranks), f"model of {device.name}: {_terms(device, region)}"
        if setting.near is not None and setting.near.model_us:
            factor = max(1.0, setting.near.us / setting.near.model_us)
            us, source = us * factor, f"{source}, x {factor:.2f} as at the nearest measured shape"
        elif tuning.calibration is not None and not region.kernel.entry.startswith("op:"):
            us, words = tuning.calibration.scale(region.kernel.id, shape_key(region), us, extra)
            return Cost(us, moved, counted.flops, False, f"{source}, {words}", setting.comparable)
        # what the library's products reach of the bandwidth stands in the table of a GPU that was measured; with more
        # rows nobody writes a better one. Of torch's other ops nobody timed any
        product = region.kernel.entry == LIBRARY_PRODUCT
        timed = setting.comparable or (product and (tuning.measured or _rows(region) > FEW_ROWS))
        return Cost(us + extra, moved, counted.flops, False, source + why, timed)

    return price


def in_step_us(device: Device, region: Region) -> tuple[float, str]:
    """What a launch costs in a step beyond its time in a chain of its like, and the words for it.

    Between other kernels its code is cold and its blocks do not fill the gaps that its like would leave. Behind a torch
    op the next launch cannot start early either (``schedule.py``).
    """
    if not can_start_early(device.arch):
        return 0.0, ""
    us = device["launch_in_step_us"]
    if region.kernel.entry.startswith("op:"):
        edge = device["boundary_us"] - device["dependent_boundary_us"]
        return us + edge, f", {us:.2f} us in a step, {edge:.2f} us for the full edge behind a torch op"
    return us, f", {us:.2f} us in a step"


def model_us(device: Device, region: Region, ranks: int) -> float:
    """Time of a region by the device table alone, in us."""
    counted = traffic(region)
    us = device["ramp_us"] if counted.cold > COLD_BYTES else device["boundary_us"]
    us += counted.cold / device["bandwidth_gbs"] / 1e3 + counted.warm / device["warm_bandwidth_gbs"] / 1e3
    us = max(us, device["boundary_us"] + counted.flops / device["matrix_tflops"] / 1e6)
    if region.kernel.entry == LIBRARY_PRODUCT:
        us /= device["library_product_share"]
    return us + (_launches(device, region) - 1) * device["boundary_us"] + _links_us(device, region, ranks)


def _launches(device: Device, region: Region) -> int:
    return torch_launches(region) if device.arch != "cpu" else 1


def _terms(device: Device, region: Region) -> str:
    launches = _launches(device, region)
    several = f"{launches} kernels of torch, " if launches > 1 else ""
    return f"{several}ramp or boundary, then bytes"


def _links_us(device: Device, region: Region, ranks: int) -> float:
    """What the collectives of a region add: the fixed time of a library call, or one hop where a kernel sends by
    itself, and what a rank receives over the link."""
    values, total = region.graph.values, 0.0
    fixed = device["reduce_us"] if region.kernel.entry.startswith("op:") else device["hop_us"]
    for node in region.nodes:
        if OPS[node.op].kind == "comm":
            whole = max(values[node.inputs[0]].nbytes, values[node.outputs[0]].nbytes)
            received = whole * (ranks - 1) / ranks * (2 if node.op == "all_reduce" else 1)
            total += fixed + received / device["link_gbs"] / 1e3
    return total
