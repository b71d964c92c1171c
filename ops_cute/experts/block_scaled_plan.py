"""Sizes of ``cute.moe_experts_block_scaled``: tiles, steps, and what lies where in shared and in tensor memory. Pure
functions, no cutlass.

Words: a *unit* is a tile of 64 gate and 64 up rows of one expert, an *item* the rows of W2 of a few experts that make
this block's columns. A *slot* of the ring in shared memory holds what is copied at once, a *step* is what is multiplied
at once, up to 8 groups of 32 columns; it has one of two *stages* in tensor memory (weights, their scales, scales of
rows) and in shared memory (rows).
"""
from __future__ import annotations

from dataclasses import dataclass

from ..shared_memory import FRAGMENT, lay_out, round_up
from .blackwell_layouts import COLUMNS, DEPTH, LANES, QUARTER, SCALE_BLOCK, SCALES
from .sizes import Sizes

TILE = 64  # gate rows of a unit, and as many up rows: the instruction's 128
TOKENS = 64  # most rows of a step
SLICE = 8  # most groups of a step
PASS = 32  # most pairs of token and expert that an item multiplies at once
CHUNK = 8  # rows that the finishers take at a time, the least of the instruction
STAGES = 2
PIECE = FRAGMENT  # bytes of one asynchronous copy
EXPANDERS, FINISHERS, STAGERS, COPIERS = 8, 4, 4, 2  # warps; one more multiplies
THREADS = 32 * (EXPANDERS + FINISHERS + STAGERS + COPIERS + 1)
ITEM_BYTES = 20480  # of an item where experts are small


@dataclass(frozen=True)
class Config:
    """Slots of the ring of weights, and as what the tensor core gets them (``blackwell_layouts.weight_words``): "e4m3"
    takes 2 integer instructions more for 8 weights, "e2m1" the container of 4-bit numbers in tensor memory."""

    slots: int = 6
    weights: str = "e4m3"


@dataclass(frozen=True, kw_only=True)
class Static(Sizes):
    """What the kernel is compiled for. Sizes in bytes where they say so, else in elements."""

    weights: str
    terms: int  # e4m3 numbers for one of x and of the activations: 1 for MXFP8, 2 for bf16

    # work

    @property
    def slice(self) -> int:
        """Groups of a step of the first half."""
        return SLICE if self.groups % SLICE == 0 else SCALES

    @property
    def slices(self) -> int:
        """Steps of a unit."""
        return self.groups // self.slice

    @property
    def tiles(self) -> int:
        """Units of an expert; the last may have 32 rows of each kind only."""
        return -(-self.inter // TILE)

    @property
    def down_slice(self) -> int:
        """Groups of a step of the second half."""
        return max(n for n in range(1, SLICE + 1) if self.inter_groups % n == 0)

    @property
    def down_slices(self) -> int:
        return self.inter_groups // self.down_slice

    @property
    def together(self) -> int:
        """Experts of an item: their rows of W2 share the instruction's 128."""
        return max(1, min(LANES // self.columns, max(self.up_bytes, ITEM_BYTES) // self.down_bytes))

    @property
    def pass_pairs(self) -> int:
        """Most pairs of a pass over an item, as the instruction counts them."""
        return min(PASS, round_up(min(self.pairs, self.together * self.tokens), CHUNK))

    # weights in a slot

    @property
    def up_pitch(self) -> int:
        """Between rows of W1 and W3: an odd number of 16 bytes, so that 8 rows lie on different banks."""
        return PIECE * (self.slice | 1)

    @property
    def up_bytes(self) -> int:
        return LANES * (self.up_pitch + self.slice)

    @property
    def down_pitch(self) -> int:
        return PIECE * (self.inter_groups | 1)

    @property
    def down_bytes(self) -> int:
        """Of one expert of an item."""
        return self.columns * self.down_pitch + self.down_scales

    @property
    def slot_bytes(self) -> int:
        side_bytes = self.side_columns * self.side_pitch if self.side_width else 0
        return round_up(max(self.up_bytes, self.together * self.down_bytes, side_bytes), 128)

    # the projection beside the experts, in bf16

    @property
    def side_columns(self) -> int:
        """Columns of its result, rows of its weight, of one block."""
        return -(-self.side_rows // self.blocks)

    @property
    def side_deep(self) -> int:
        """Columns of a step: twice the bytes of as many weights, so as many as a stage holds."""
        return max(n for n in (32, 64, 128) if self.side_width % n == 0 and 2 * n <= DEPTH * self.deep)

    @property
    def side_steps(self) -> int:
        return self.side_width // self.side_deep

    @property
    def side_pitch(self) -> int:
        """Between rows in a slot: an odd number of 16 bytes."""
        return 2 * self.side_deep + PIECE

    # rows and sums

    @property
    def operand_rows(self) -> int:
        """Rows that a step multiplies at most."""
        return self.terms * max(round_up(self.tokens, CHUNK), self.pass_pairs)

    @property
    def deep(self) -> int:
        """Groups of the deepest step."""
        return max(self.slice, self.down_slice)

    @property
    def scale_words(self) -> int:
        return -(-self.deep // SCALES)

    @property
    def operand_bytes(self) -> int:
        """Of a stage's rows in shared memory."""
        return self.operand_rows * DEPTH * self.deep

    @property
    def fragments(self) -> int:
        """Fragments of 16 bytes in which the activations of a pair and a tile travel: 64 of each term, and scales."""
        return 4 * self.terms + 1

    @property
    def sum_columns(self) -> int:
        """Columns of tensor memory of one of two sums."""
        return round_up(self.operand_rows, QUARTER)

    @property
    def stage_columns(self) -> int:
        """Columns of tensor memory of one stage: weights, their scales, scales of rows."""
        return DEPTH // 4 * self.deep + 2 * 4 * self.scale_words

    @property
    def stage_scales(self) -> int:
        """Where in a stage the scales of weights begin; those of rows come behind them."""
        return DEPTH // 4 * self.deep

    @property
    def tensor_columns(self) -> int:
        """Of tensor memory in all: sums, then stages, as a power of two."""
        used = 2 * self.sum_columns + STAGES * self.stage_columns
        assert used <= COLUMNS, f"{used} columns of tensor memory"
        return max(32, 1 << (used - 1).bit_length())

    def place(self) -> dict[str, int]:
        """Where things lie in shared memory, and its bytes under "end"."""
        return lay_out({
            "ring": self.slots * self.slot_bytes, "rows": STAGES * self.operand_bytes,
            "row_scales": STAGES * self.scale_words * SCALE_BLOCK,
            # up sums of 8 rows of a unit on their way to their gates; all sums of a pass of an item
            "sums": 4 * max(CHUNK * TILE, self.pass_pairs * LANES),
            "outbox": CHUNK * self.fragments * PIECE, "result": 4 * self.tokens * self.columns,
            "full": 8 * self.slots, "empty": 8 * self.slots, "stage_full": 8 * STAGES, "stage_empty": 8 * STAGES,
            "sums_full": 16, "sums_empty": 16, "tensor": 4, "bits": 4 * self.words, "before": 4 * self.words,
            "count": 4, "chunks": 4 * 32, "list": 4 * self.most, "tokens": 8 * (self.most + 1),
            "start": 4 * (self.most + 1), "pairs": 4 * self.pairs, "weights": 4 * self.pairs,
        }, {"ring": 128, "rows": 128, "row_scales": 128})
