"""The device table: what a GPU can do, each figure with where it was measured, or that it was not."""
from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from .errors import PlanError


@dataclass(frozen=True)
class Device:
    """One file of ``compiler/devices``. Times in us, rates in GB/s (1e9) and TFLOP/s (1e12)."""

    name: str
    arch: str  # "sm_90"
    compile_target: str  # "sm_90a"
    figures: Mapping[str, tuple[float, str]]  # figure -> value, source
    measured: Mapping[tuple[str, str], tuple[float, str]]  # kernel, shape key -> us, source
    calibrated_on: str | None = None  # the GPU whose kernels say how far the model is off, where this one's do not

    def __getitem__(self, figure: str) -> float:
        return self.figures[figure][0]

    def source(self, figure: str) -> str:
        return self.figures[figure][1]


def device_names() -> list[str]:
    """Names that ``target.gpu`` accepts."""
    folder = files("k3plan.compiler") / "devices"
    return sorted(p.name.removesuffix(".json") for p in folder.iterdir() if p.name.endswith(".json"))


@lru_cache
def load_device(name: str) -> Device:
    """The table of ``name``. Raises PlanError when there is none."""
    if name not in device_names():
        raise PlanError(f"no device table {name!r}\n  fix: use one of {', '.join(device_names())}")
    data: dict[str, Any] = json.loads((files("k3plan.compiler") / "devices" / f"{name}.json").read_text())
    figures = {k: (v["value"], v["source"]) for k, v in data.items() if isinstance(v, dict)}
    measured = {(m["kernel"], m["key"]): (m["us"], m["source"]) for m in data["measured"]}
    return Device(data["name"], data["arch"], data["compile_target"], figures, measured,
                  data.get("calibrated_on"))
