"""Sizes that every experts' kernel is compiled for. Pure functions, no cutlass."""
from __future__ import annotations

from dataclasses import dataclass

from ..shared_memory import FRAGMENT, round_up

GROUP = 32  # columns of one MXFP4 scale


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """In elements where they do not say bytes."""

    tokens: int
    top_k: int
    width: int  # columns of x and of W1 and W3
    inter: int
    out_width: int
    local: int  # experts here
    experts: int  # in all
    blocks: int
    slots: int  # of the ring of weights in shared memory
    stride_x: int
    stride_out: int = 0
    beta: float
    linear_beta: float
    dependent: bool
    # the projection beside the experts: columns and rows of its weight, 0 without it
    side_width: int = 0
    side_rows: int = 0
    stride_a: int = 0
    stride_s: int = 0

    @property
    def pairs(self) -> int:
        """Tokens times their experts."""
        return self.tokens * self.top_k

    @property
    def most(self) -> int:
        """Entries of the list of distinct experts."""
        return min(self.local, self.pairs)

    @property
    def words(self) -> int:
        """Words of the bit set of experts."""
        return -(-self.local // 32)

    @property
    def groups(self) -> int:
        """Scale groups of a row of x."""
        return self.width // GROUP

    @property
    def inter_groups(self) -> int:
        return self.inter // GROUP

    @property
    def columns(self) -> int:
        """Columns of the result, rows of W2, of one block."""
        return -(-self.out_width // self.blocks)

    @property
    def column_blocks(self) -> int:
        """Blocks that have columns: the last ones, since the first have most units of the first half."""
        return -(-self.out_width // self.columns)

    @property
    def down_scales(self) -> int:
        """Bytes that surely hold a block's scales of one expert: they begin anywhere, a copy on 16 bytes."""
        return round_up(self.columns * self.inter_groups, FRAGMENT) + FRAGMENT
