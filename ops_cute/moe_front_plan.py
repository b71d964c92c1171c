"""Sizes of ``cute.moe_front``: who has what, and what lies where in shared memory. Pure functions, no cutlass."""
from __future__ import annotations

from dataclasses import dataclass

from .router_topk_plan import memory_of
from .shared_memory import lay_out

TOKENS = 8  # rows of x: half of a matrix instruction's 16
TILE = 8  # weight rows of a unit: columns of a matrix instruction
BLOCK = 32  # columns that 4 lanes take of a row with 16 bytes each
WARPS = 16  # that multiply; three more copy, finish and route
THREADS = 32 * (WARPS + 3)
CHUNK = 32  # most blocks of a row in one slot of the ring
PAD = 64  # bytes between rows of a slot, so that two rows of 64 bytes lie on different banks
PARTIALS = WARPS * 32 * 8  # bytes of one sum over warps: 2 fp32 a lane


@dataclass(frozen=True)
class Config:
    """Slots of the ring of weights. Fewer leave room for a neighbour on the multiprocessor, and so does ``lean``: what
    the top-k has in shared memory lies over the ring (sharded form). ``pace``: slots on their way at once, 0 is all."""

    slots: int = 12
    lean: bool = False
    pace: int = 0


@dataclass(frozen=True)
class Static:
    """What the kernel is compiled for. ``columns`` of x; rows of the two weights, the second's last ``2 pairs`` are
    gate and up of the shared experts."""

    tokens: int
    columns: int
    router: int
    plain: int
    pairs: int
    top_k: int
    blocks: int
    slots: int
    stride_x: int
    stride_f: int
    stride_a: int
    beta: float
    linear_beta: float
    renormalize: bool
    scaling: float
    dependent: bool
    lean: bool
    pace: int

    @property
    def groups(self) -> int:
        """Blocks of 32 columns of a row."""
        return self.columns // BLOCK

    @property
    def chunk(self) -> int:
        """Of them those in a slot."""
        return max(n for n in range(1, CHUNK + 1) if self.groups % n == 0)

    @property
    def chunks(self) -> int:
        return self.groups // self.chunk

    @property
    def own(self) -> int:
        """Of a slot's those of one warp: as few as divide evenly over some of the warps."""
        return min(n for n in range(1, self.chunk + 1) if self.chunk % n == 0 and self.chunk // n <= WARPS)

    @property
    def chains(self) -> int:
        """Sums of a warp that do not wait for each other."""
        return 2 if self.lean else 4

    @property
    def row_bytes(self) -> int:
        """Of a row in a slot."""
        return 64 * self.chunk + PAD * (1 - self.chunk % 2)

    @property
    def slot_bytes(self) -> int:
        return TILE * self.row_bytes

    @property
    def router_units(self) -> int:
        return self.router // TILE

    @property
    def plain_units(self) -> int:
        return self.plain // TILE

    @property
    def units(self) -> int:
        """Of 8 weight rows: first the router's, so that the top-k runs while the others are streamed; then the plain
        ones, then 4 gate rows with their 4 up rows."""
        return self.router_units + self.plain_units + 2 * self.pairs // TILE

    @property
    def routers(self) -> int:
        """Warps that choose the experts of a row."""
        return 1

    @property
    def keys(self) -> int:
        """Experts of a row, in parts of a warp's lanes."""
        return -(-self.router // 32)

    def place(self) -> dict[str, int]:
        """Where things lie in shared memory, and its bytes under "end"."""
        streamed = {
            "ring": self.slots * self.slot_bytes, "partials": 2 * PARTIALS, "full": 8 * self.slots,
            "empty": 8 * self.slots, "partials_full": 16, "partials_empty": 16,
        }
        chosen = memory_of(self.keys, self.routers)
        if not self.lean:
            return lay_out(streamed | chosen)
        over = lay_out(chosen)
        assert over["end"] <= streamed["ring"], f"{over['end']} bytes of the top-k over {streamed['ring']} of the ring"
        return over | lay_out(streamed)
