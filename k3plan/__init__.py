"""The public face of k3plan. No logic here; every name is imported at its first use."""
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .compiler.plan import LaunchPlan, load_plan
    from .compiler.reading.source import load_spec
    from .face import compile_plan
    from .graphs.bind import Executable, bind
    from .graphs.checkpoint import Checkpoint

_HOME = {
    "LaunchPlan": ".compiler.plan", "load_plan": ".compiler.plan", "load_spec": ".compiler.reading.source",
    "compile_plan": ".face", "Executable": ".graphs.bind", "bind": ".graphs.bind",
    "Checkpoint": ".graphs.checkpoint",
}
__all__ = ["Checkpoint", "Executable", "LaunchPlan", "bind", "compile_plan", "load_plan", "load_spec"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module k3plan has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name], __name__), name)
