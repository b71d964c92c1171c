"""Sizes of ``cute.moe_experts_gathered``: what differs from ``plan.py``. Pure functions, no cutlass."""
from __future__ import annotations

from dataclasses import dataclass

from ..shared_memory import FRAGMENT, lay_out
from .plan import PARTIALS, THREADS, TOKENS, WARPS, Static

MOST_TOKENS = 64  # two words of bits


@dataclass(frozen=True)
class Config:
    """Slots of the ring of weights, and units of one expert that a block does one after the other: two a step."""

    slots: int = 3
    run: int = 4


@dataclass(frozen=True, kw_only=True)
class Gathered(Static):
    """What the kernel is compiled for. ``tokens`` are up to ``MOST_TOKENS``; an expert takes its own by eights."""

    @property
    def items(self) -> int:
        """Runs of units of one expert in the first half."""
        return self.tiles // self.run

    @property
    def eights(self) -> int:
        """Groups of 8 tokens, as a power of two, of the projection beside the experts: each has warps of its own."""
        return 1 << (-(-self.tokens // TOKENS) - 1).bit_length()

    @property
    def side_splits(self) -> int:
        """Warps that share the columns of that projection's rows."""
        return WARPS // self.eights

    @property
    def rounds_of_experts(self) -> int:
        """Turns in which all threads look at one expert each."""
        return -(-self.local // THREADS)

    @property
    def rounds_of_pairs(self) -> int:
        return -(-self.pairs // THREADS)

    @property
    def rounds_of_rows(self) -> int:
        """Rows of x that a block converts."""
        return -(-self.tokens // self.blocks)

    @property
    def rounds_of_row(self) -> int:
        """Turns in which all threads convert 8 columns of a row each."""
        return -(-self.width // 8 // THREADS)

    @property
    def product_stride(self) -> int:
        """fp32 of one pair's products in shared memory: whole words of 16 bytes."""
        return -(-self.columns // 4) * 4

    @property
    def chunk_words(self) -> int:
        """Words of activations that a lane holds for a chunk of W2."""
        return 4 * self.chunk

    def place(self) -> dict[str, int]:
        """Where things lie in shared memory, and its bytes under "end". Products begin when experts are long sorted and
        the first half's sums have been read: these lie in their place, the sums behind what only the sorting needs."""
        sorting = {"masks": 8 * self.local, "starts": 4 * self.local, "sizes": 4 * 32 * self.rounds_of_rows}
        products = 4 * self.product_stride * self.pairs
        before = sum(sorting.values()) + 3 * FRAGMENT + 4 * PARTIALS
        found = lay_out({
            "ring": self.slots * self.slot_bytes, "products": max(products, before),
            "full": 8 * self.slots, "empty": 8 * self.slots, "partials_full": 16,
            "partials_empty": 16, "rows": 8, "count": 4, "totals": 4 * 32, "list": 4 * (self.most + 1),
            "pairs": 4 * self.pairs, "factors": 4 * self.tokens,
        })
        inside = lay_out(sorting, start=found["products"])
        return {**inside, **found, "partials": inside["end"]}


assert MOST_TOKENS % TOKENS == 0
