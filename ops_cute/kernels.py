"""The menu of the CuTe DSL kernels: what the planner may choose from. Imports no cutlass.

Each family has two files: ``<name>_menu.py``, its declarations (pattern, needs, configurations, workspace), and
``<name>.py``, its kernels and ``bind``. The menu is every ``*_menu.py`` of this folder and of ``experts``, by name.
"""
from __future__ import annotations

from importlib import import_module
from pkgutil import walk_packages

from ..compiler.kernel import KernelDef


def _menus() -> list[str]:
    package = import_module(__package__ or "")
    names = (found.name for found in walk_packages(package.__path__, f"{package.__name__}."))
    return sorted((name for name in names if name.endswith("_menu")), key=lambda name: name.rpartition(".")[2])


KERNELS: tuple[KernelDef, ...] = tuple(
    kernel for name in _menus() for kernel in import_module(name).KERNELS)
