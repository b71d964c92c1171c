"""The public face of k3plan. No logic here; every name is imported at its first use."""
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .compiler.errors import AddressError, K3PlanError
    from .compiler.plan import LaunchPlan, load_plan
    from .compiler.reading.source import load_spec
    from .face import compile_buckets, compile_plan, patch
    from .graphs.bind import Executable, bind
    from .graphs.checkpoint import Checkpoint
    from .graphs.module.layer import DecodeLayer
    from .graphs.module.step import DecodeStep

_HOME = {
    "AddressError": ".compiler.errors", "K3PlanError": ".compiler.errors",
    "LaunchPlan": ".compiler.plan", "load_plan": ".compiler.plan", "load_spec": ".compiler.reading.source",
    "compile_plan": ".face", "compile_buckets": ".face", "patch": ".face", "Executable": ".graphs.bind",
    "bind": ".graphs.bind",
    "Checkpoint": ".graphs.checkpoint", "DecodeLayer": ".graphs.module.layer",
    "DecodeStep": ".graphs.module.step",
}
__all__ = [
    "AddressError", "Checkpoint", "DecodeLayer", "DecodeStep", "Executable", "K3PlanError", "LaunchPlan", "bind",
    "compile_buckets", "compile_plan", "load_plan", "load_spec", "patch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module k3plan has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
