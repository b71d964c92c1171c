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
MOST_PARTS = 16  # of a context, whose fragments a lane holds at once
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
    entry_bytes: int  # of a value of the cache: 2 is bf16, 1 is fp8_e4m3
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
    def stack(self) -> int:
        """Tiles of 16 entries that a warp multiplies with the same operands of the query: two where no warp has more
        to do then."""
        able = [n for n in (1, 2) if self.entry_tiles % n == 0]
        return min(able, key=lambda n: (n * self.steps // self._parts(n), -n))

    @property
    def stacks(self) -> int:
        return self.entry_tiles // self.stack

    @property
    def parts(self) -> int:
        """Warps that share the columns of a stack's scores."""
        return self._parts(self.stack)

    def _parts(self, stack: int) -> int:
        most = self.warps * stack // self.entry_tiles
        return max(n for n in range(1, most + 1) if self.steps % n == 0)

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
    def converts(self) -> bool:
        """Whether entries become bf16 on their way."""
        return self.entry_bytes == 1

    @property
    def row_bytes(self) -> int:
        """Of an entry in the cache."""
        return self.entry_bytes * self.width

    @property
    def slot_pitch(self) -> int:
        """Bytes between entries of a slot. Those that become bf16 are read from end to end."""
        return self.row_bytes if self.converts else self.pitch

    @property
    def slot_bytes(self) -> int:
        return self.tile * self.slot_pitch

    @property
    def tile_bytes(self) -> int:
        """Of a tile as the products read it."""
        return self.tile * self.pitch

    def place(self, slots: int, tiles: int) -> dict[str, int]:
        """Where things lie in shared memory with so many slots for so many tiles, and its bytes under "end"."""
        converted = min(2, tiles) * self.tile_bytes if self.converts else 0
        return lay_out({
            "ring": slots * self.slot_bytes, "converted": converted, "query": self.rows * self.pitch,
            "scores": 4 * self.parts * self.rows * self.score_pitch, "weights": self.rows * self.weight_pitch,
            "fade": 4 * self.rows, "inverse": 4 * self.rows, "kept": 8 * self.warps,
            "full": 8 * slots, "empty": 8 * slots,
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

    @property
    def lends(self) -> bool:
        return self.warps == 8 and self.sums > FEW_SUMS and self.tiles > 1

    @property
    def threads(self) -> int:
        """The copier is behind the warps that multiply, in a group of four where registers are lent."""
        return 32 * (self.warps + (4 if self.lends else 1))

    # the merge

    @property
    def piece(self) -> int:
        """Fragments that a block adds up over the parts: whole sectors of 32 bytes."""
        return 2 * per(per(self.fragments, self.splits), 2)

    @property
    def lanes(self) -> int:
        """Lanes that read fragments of different parts, a power of two: of the numbers that leave a warp the fewest
        rounds the largest. A lane has registers for so many parts."""
        most = min(SPLIT_LANES, 1 << (self.splits - 1).bit_length())
        held = MOST_PARTS if self.warps <= 8 and not self.wide else MOST_PARTS // 2
        able = [most, *(n for n in (8, 4, 2, 1) if n < most and per(self.splits, n) <= held)]
        return min(able, key=lambda n: (self._rounds(n), -n))

    def _rounds(self, lanes: int) -> int:
        return per(self.piece // 2, self.warps * (SPLIT_LANES // lanes))

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
        return self._rounds(self.lanes)
