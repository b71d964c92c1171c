"""The menu of the CuTe DSL kernels: what the planner may choose from. Imports no cutlass.

Each family has two files: ``<name>_menu.py``, its declarations (pattern, needs, configurations, workspace), and
``<name>.py``, its kernels and ``bind``. The menu is every ``*_menu.py`` of this folder, by name.
"""
from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from ..compiler.kernel import KernelDef


def _menus() -> list[str]:
    package = import_module(__package__ or "")
    return sorted(found.name for found in iter_modules(package.__path__) if found.name.endswith("_menu"))


KERNELS: tuple[KernelDef, ...] = tuple(
    kernel for name in _menus() for kernel in import_module(f".{name}", __package__).KERNELS)
