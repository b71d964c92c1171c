"""Sizes of ``cute.mla_attend``: who has which entries, rows and columns, and what lies where in shared memory.

Pure functions, no cutlass.
"""
from __future__ import annotations

from dataclasses import dataclass

from .shared_memory import FRAGMENT, lay_out

STEP = 16  # entries, latent columns or key columns of one matrix instruction
TILE_ROWS = 8  # query rows of one: its columns
ROW_LANES = 8  # lanes that do the softmax of one query row
WARP_ROWS = 32 // ROW_LANES
MOST_ROWS = 48  # query rows (row of the step times head) of one block
MOST_BLOCKS = 160  # multiprocessors of the largest GPU that the workspace is for
PARITIES = 2
SPLIT_LANES = 16  # most parts of a context that the lanes of a warp read side by side


def per(count: int, size: int) -> int:
    """How many of ``size`` hold ``count``."""
    return -(-count // size)


# 9 warps have 168 registers each. More sums of a lane than FEW_SUMS of 8 warps take the registers of three warps that
# do nothing: a group of four has LENT left, those that multiply have BORROWED
FEW_SUMS, LENT, BORROWED = 64, 56, 224


@dataclass(frozen=True)
class Config:
    """Entries of a tile, tiles in shared memory, warps that multiply, what a part's mix travels as."""

    tile: int = 64
    slots: int = 1
    warps: int = 8
    partial: str = "bf16"  # or "fp32"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What of the sizes a region says. ``query``: rows of a sequence."""

    sequences: int
    query: int
    heads: int
    latent: int
    rest: int  # key columns beside the latent
    page: int
    pages: int
    tile: int
    most_slots: int
    warps: int
    wide: bool  # parts' mixes travel as fp32

    @property
    def width(self) -> int:
        """Columns of an entry."""
        return self.latent + self.rest

    @property
    def steps(self) -> int:
        """Matrix instructions along an entry."""
        return self.width // STEP

    @property
    def queries(self) -> int:
        """Query rows of a sequence."""
        return self.query * self.heads

    @property
    def row_tiles(self) -> int:
        return per(self.queries, MOST_ROWS)

    @property
    def groups(self) -> int:
        """Of 8 query rows, in a row tile."""
        return per(per(self.queries, self.row_tiles), TILE_ROWS)

    @property
    def rows(self) -> int:
        """Query rows of a row tile, those that are none included."""
        return TILE_ROWS * self.groups

    @property
    def jobs(self) -> int:
        """Sequences times row tiles."""
        return self.sequences * self.row_tiles

    @property
    def context(self) -> int:
        return self.page * self.pages

    # products

    @property
    def entry_tiles(self) -> int:
        return self.tile // STEP

    @property
    def parts(self) -> int:
        """Warps that share the columns of 16 entries' scores."""
        return max(n for n in range(1, self.warps // self.entry_tiles + 1) if self.steps % n == 0)

    @property
    def own_steps(self) -> int:
        return self.steps // self.parts

    @property
    def own_columns(self) -> int:
        """Latent columns of a warp's mix."""
        return self.latent // self.warps

    @property
    def column_tiles(self) -> int:
        return self.own_columns // STEP

    @property
    def sums(self) -> int:
        """Of a lane's mix."""
        return 4 * self.groups * self.column_tiles

    @property
    def lends(self) -> bool:
        return self.warps == 8 and self.sums > FEW_SUMS

    @property
    def threads(self) -> int:
        """The copier is behind the warps that multiply, in a group of four where registers are lent."""
        return 32 * (self.warps + (4 if self.lends else 1))

    @property
    def own_rows(self) -> int:
        """Query rows whose softmax a group of lanes does."""
        return per(self.rows, self.warps * WARP_ROWS)

    @property
    def vector(self) -> int:
        """Neighbouring entries that a lane of such a group has; 32 entries further on it has more."""
        return min(4, self.tile // ROW_LANES)

    # what travels: a fragment is 16 bytes of a lane, its sums of 1 or 2 tiles of columns for two query rows

    @property
    def together(self) -> int:
        """Tiles of columns in a fragment."""
        return 1 if self.wide else 2

    @property
    def plates(self) -> int:
        """Fragments of a lane for a group of query rows."""
        return per(self.column_tiles, self.together)

    @property
    def fragments(self) -> int:
        """Of one block's mix."""
        return self.groups * self.warps * self.plates * 32

    # shared memory

    @property
    def pitch(self) -> int:
        """Bytes between entries, and between query rows: an odd number of 16, so that 8 rows lie on different banks."""
        return FRAGMENT * (self.width // 8 | 1)

    @property
    def weight_pitch(self) -> int:
        """The same of the weights of a query row."""
        return FRAGMENT * (self.tile // 8 | 1)

    @property
    def score_pitch(self) -> int:
        """Scores between query rows: lanes of a product write to 32 banks."""
        return self.tile + 4

    @property
    def slot_bytes(self) -> int:
        return self.tile * self.pitch

    def place(self, slots: int) -> dict[str, int]:
        """Where things lie in shared memory with so many slots, and its bytes under "end"."""
        return lay_out({
            "ring": slots * self.slot_bytes, "query": self.rows * self.pitch,
            "scores": 4 * self.parts * self.rows * self.score_pitch, "weights": self.rows * self.weight_pitch,
            "fade": 4 * self.rows, "inverse": 4 * self.rows, "full": 8 * slots, "empty": 8 * slots,
        }, {"ring": 128})


@dataclass(frozen=True, kw_only=True)
class Static(Shape):
    """What the kernel is compiled for."""

    blocks: int  # multiprocessors
    scale: float  # of scores, for a softmax in base 2
    kv_scale: float
    dependent: bool

    @property
    def chunk(self) -> int:
        """Entries of a block's part of a context."""
        return 8 * per(per(self.context, self.blocks // self.jobs), 8)

    @property
    def splits(self) -> int:
        """Parts of a context, blocks of a job."""
        return per(self.context, self.chunk)

    @property
    def tiles(self) -> int:
        return per(self.chunk, self.tile)

    @property
    def slots(self) -> int:
        return min(self.most_slots, self.tiles)

    # the merge

    @property
    def piece(self) -> int:
        """Fragments that a block adds up over the parts: whole sectors of 32 bytes."""
        return 2 * per(per(self.fragments, self.splits), 2)

    @property
    def lanes(self) -> int:
        """Lanes that read fragments of different parts, a power of two."""
        return min(SPLIT_LANES, 1 << (self.splits - 1).bit_length())

    @property
    def each(self) -> int:
        """Parts that a lane reads."""
        return per(self.splits, self.lanes)

    @property
    def units(self) -> int:
        """Pairs of fragments that a warp adds up at once."""
        return SPLIT_LANES // self.lanes

    @property
    def rounds(self) -> int:
        return per(self.piece // 2, self.warps * self.units)
