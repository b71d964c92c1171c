"""Sizes of ``cute.router_topk``, and what any top-k has in shared memory. Pure functions, no cutlass."""
from __future__ import annotations

from dataclasses import dataclass

from .shared_memory import lay_out

WARP = 32
EACH = 4  # experts of a thread


def memory_of(keys: int, routers: int) -> dict[str, int]:
    """Bytes of each thing of ``moe_topk.py``: ``keys`` experts a lane of one warp, ``routers`` warps that choose."""
    lanes = WARP * keys
    return {"keys": 8 * lanes, "scores": 4 * lanes, "best": 4 * WARP, "best_scores": 4 * WARP,
            "tops": 8 * WARP * routers, "found": 4}


@dataclass(frozen=True)
class Static:
    """What the kernel is compiled for."""

    experts: int
    top_k: int
    stride: int  # elements between rows of logits
    renormalize: bool
    scaling: float
    dependent: bool

    @property
    def holders(self) -> int:
        """Threads that hold experts."""
        return self.experts // EACH

    @property
    def routers(self) -> int:
        """Warps of a row."""
        return -(-self.holders // WARP)

    @property
    def keys(self) -> int:
        """Experts of a row, in parts of a warp's lanes."""
        return -(-self.experts // WARP)

    def place(self) -> dict[str, int]:
        """Where things lie in shared memory, and its bytes under "end"."""
        return lay_out(memory_of(self.keys, self.routers))
