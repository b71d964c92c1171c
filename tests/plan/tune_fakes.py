"""A kernel and clocks for the tests of tuning; its processes import them by name."""
from __future__ import annotations

import os
from types import SimpleNamespace

from k3plan.compiler.kernel import KernelDef

NORM = KernelDef("test.norm", "h = rms_norm(x, w)\n-> h", "test:bind",
                 configs=lambda r: [{"warps": 4}, {"warps": 8}, {"warps": 16}])


def load_kernels() -> list[KernelDef]:
    return [NORM]


def refuse_four_warps(region, config) -> SimpleNamespace:
    if config["warps"] == 4:
        raise RuntimeError("out of registers")
    return SimpleNamespace(us=config["warps"] - 6.5)


def fault_at_two_rows(region, config) -> SimpleNamespace:
    if region.value("x").shape[0] == 2:
        os._exit(9)
    return SimpleNamespace(us=1.0)


def all_right(region):
    return lambda config: None


def eight_warps_wrong(region):
    return lambda config: "computes h wrongly" if config["warps"] == 8 else None
