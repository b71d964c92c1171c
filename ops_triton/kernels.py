"""The menu of the Triton kernels: what the planner may choose from. Imports no triton.

Each family has two files: ``<name>_menu.py``, its declarations (pattern, needs, configurations, workspace), and
``<name>.py``, its kernels and ``bind``.
"""
from __future__ import annotations

from ..compiler.kernel import KernelDef
from . import attn_res_menu, skinny_linear_menu

KERNELS: tuple[KernelDef, ...] = (
    *skinny_linear_menu.KERNELS,
    *attn_res_menu.KERNELS,
)
