"""Sizes of ``cute.moe_experts``: who has what, and what lies where in shared memory. Pure functions, no cutlass."""
from __future__ import annotations

from dataclasses import dataclass

from ..shared_memory import FRAGMENT, lay_out, round_up
from .sizes import Sizes

TOKENS = 8  # columns of a matrix instruction's second operand
WARPS = 16  # that multiply, where nothing says otherwise; two more copy, one finishes activations
MANY = 28  # the most whose threads keep 64 registers beside those three
HELPERS = 3
THREADS = 32 * (WARPS + HELPERS)
TILE = 8  # rows of W1 and as many of W3: the two halves of a matrix instruction's 16
STEP = 16  # columns of bf16 of one matrix instruction
CHUNK = 6  # most groups of a row of W2 whose activations a warp holds; half as many where warps are many
PARTIALS = WARPS * 32 * FRAGMENT  # bytes of one sum over warps
TOP_EXPONENT = 15  # fp16 activations stay below 2^15


def least_each(parts: int, warps: int) -> int:
    """As few for each as divide ``parts`` evenly over some of the warps."""
    return min(n for n in range(1, parts + 1) if parts % n == 0 and parts // n <= warps)


@dataclass(frozen=True)
class Config:
    """Slots of the ring of weights (fewer leave room for a neighbour on the multiprocessor), who copies: one warp by
    ``bulk`` copies of rows, or two warps 16 bytes a lane, how many warps multiply, and whether the projection beside
    the experts comes first, its weights before the wait for the producers."""

    slots: int = 6
    bulk: bool = True
    warps: int = WARPS
    side_first: bool = False


@dataclass(frozen=True, kw_only=True)
class Static(Sizes):
    """What the kernel is compiled for. Sizes in bytes where they say so, else in elements."""

    bulk: bool
    rounds: bool  # activations to MXFP8
    run: int = 1  # units of one expert that a block does one after the other
    warps: int = WARPS  # that multiply
    side_first: bool = False  # the projection beside the experts comes before them

    @property
    def multiplying(self) -> int:
        """Threads of the warps that multiply."""
        return 32 * self.warps

    @property
    def threads(self) -> int:
        return self.multiplying + 32 * HELPERS

    @property
    def partial_bytes(self) -> int:
        """Of one sum over warps."""
        return self.multiplying * FRAGMENT

    @property
    def own_groups(self) -> int:
        """Scale groups of a row of x of one warp."""
        return least_each(self.groups, self.warps)

    @property
    def early(self) -> bool:
        """Whether the first row's experts begin the list: they are all here, so they stream before it is sorted."""
        return self.bulk and self.local == self.experts

    @property
    def finishers(self) -> int:
        """Warps that finish the two units of a step: one that does not copy helps."""
        return 2 if self.bulk else 1

    @property
    def tiles(self) -> int:
        """Units of one expert in the first half."""
        return self.inter // TILE

    @property
    def row_bytes(self) -> int:
        """Of W1 in shared memory: an odd number of 16 bytes, so that 8 rows lie on different banks."""
        return FRAGMENT * (self.groups | 1)

    @property
    def side_units(self) -> int:
        """Units of 16 rows of the projection beside the experts."""
        return self.side_rows // (2 * TILE)

    @property
    def side_steps(self) -> int:
        """Matrix instructions along one of its rows."""
        return self.side_width // STEP

    @property
    def own_steps(self) -> int:
        """Of them those of one warp."""
        return least_each(self.side_steps, self.warps)

    @property
    def side_row_bytes(self) -> int:
        """Of one of its rows in shared memory: an odd number of 16 bytes, as ``row_bytes``."""
        return FRAGMENT * (self.side_width // 8 | 1)

    @property
    def chunk(self) -> int:
        """Groups of a row of W2 that a warp multiplies at a time."""
        most = CHUNK if self.warps <= WARPS else CHUNK // 2
        return max(n for n in range(1, most + 1) if self.inter_groups % n == 0)

    @property
    def chunks(self) -> int:
        return self.inter_groups // self.chunk

    @property
    def column_tiles(self) -> int:
        return -(-self.columns // 16)

    @property
    def down_bytes(self) -> int:
        """Of one expert in a slot of the second half."""
        return self.columns * self.inter // 2 + self.down_scales

    @property
    def up_bytes(self) -> int:
        """Of a slot of the first half."""
        return 2 * TILE * (self.row_bytes + self.groups)

    @property
    def together(self) -> int:
        """Experts in a slot of the second half."""
        fitting = max(1, self.up_bytes // self.down_bytes)
        return min(self.warps, 1 << (fitting.bit_length() - 1))

    @property
    def slot_bytes(self) -> int:
        side_bytes = 2 * TILE * self.side_row_bytes if self.side_width else 0
        return round_up(max(self.up_bytes, side_bytes, self.together * self.down_bytes), 128)

    @property
    def act_exponent(self) -> int:
        """SiTU is bounded: a power of two that keeps it below 2^15."""
        bound, exponent = self.beta * self.linear_beta, TOP_EXPONENT
        while bound > 1.0:
            bound, exponent = bound / 2, exponent - 1
        return exponent

    def place(self) -> dict[str, int]:
        """Where things lie in shared memory, and its bytes under "end"."""
        return lay_out({
            "ring": self.slots * self.slot_bytes, "partials": max(4, self.column_tiles) * self.partial_bytes,
            "full": 8 * self.slots, "empty": 8 * self.slots, "partials_full": 16, "partials_empty": 16,
            "listed": 8, "known": 4 * self.words, "inverse": self.local,
            "bits": 4 * self.words, "before": 4 * self.words, "count": 4, "list": 4 * self.most,
            "weights": 4 * self.pairs, "places": self.most * TOKENS,
        })
