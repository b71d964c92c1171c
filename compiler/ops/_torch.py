"""``torch``, imported at first use: planning needs the ops' shapes and never their arithmetic."""
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
else:

    class _LazyTorch:
        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module("torch"), name)

    torch = _LazyTorch()

__all__ = ["torch"]
