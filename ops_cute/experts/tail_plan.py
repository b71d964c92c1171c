"""Sizes of ``cute.moe_experts_tail``: the experts' kernel, its message to the other ranks, and what the tail needs of
shared memory. Pure functions, no cutlass.

A slot of the mailbox holds, in fragments of 16 bytes and row by row: a rank's part of the latent, in the order of the
blocks that have its columns; its part of the shared columns of the rank that reads them; the summed latent, from a rank
to itself; its finished columns.
"""
from __future__ import annotations

from dataclasses import dataclass

from ..shared_memory import FRAGMENT, lay_out, round_up
from .plan import Config as ExpertsConfig
from .plan import Static, least_each

STEP = 16  # columns of bf16 of one matrix instruction
ROWS = 8  # outputs that a block has at most, and of one matrix instruction's 16
PACK = 8  # columns of a fragment
MIX_BLOCKS = 8  # finished blocks of layers
MIX_SUMS = 2 * MIX_BLOCKS  # over a row, at once


@dataclass(frozen=True)
class Config(ExpertsConfig):
    """As the experts' own; the weights of the up-projection lie beside the ring, so it has fewer slots. ``few``: as few
    blocks as can finish the tail; the others leave once their parts are sent, for those of the next launches."""

    slots: int = 5
    side_first: bool = True
    few: bool = False


@dataclass(frozen=True, kw_only=True)
class Tail(Static):
    """What the kernel is compiled for."""

    ranks: int
    stripe: int  # columns of a rank, rows of its part of the up-projection
    eps: float
    slot: int = 0  # bytes of the mailbox's
    table: tuple[str, ...] = ()  # columns of the address table
    stride_g: int = 0
    phase: int = 0
    limit: int = 0
    multicast: bool = False
    few: bool = False

    @property
    def columns(self) -> int:
        """Columns of the latent of one block: whole words of 8 bytes."""
        return round_up(-(-self.out_width // self.blocks), 4)

    @property
    def each(self) -> int:
        """Fragments of a block's columns of a row."""
        return -(-self.columns // PACK)

    @property
    def of_row(self) -> int:
        """Fragments of a row of the latent."""
        return self.column_blocks * self.each

    @property
    def outputs(self) -> int:
        """Columns of the result that a block finishes."""
        return 4 if self.stripe <= 4 * self.blocks and not self.few else ROWS

    @property
    def owners(self) -> int:
        """Blocks that finish columns."""
        return self.stripe // self.outputs

    @property
    def latents(self) -> int:
        return self.tokens * self.of_row

    @property
    def stripes(self) -> int:
        return self.tokens * (self.stripe // PACK)

    # where the four messages begin in a slot, and its fragments

    @property
    def at_shared(self) -> int:
        return self.latents

    @property
    def at_summed(self) -> int:
        return self.latents + self.stripes

    @property
    def at_finished(self) -> int:
        return self.at_summed + self.latents

    @property
    def message(self) -> int:
        return self.at_finished + self.tokens * self.owners

    @property
    def pitch(self) -> int:
        """Bytes between rows of the latent and of the up-projection: neighbours on other banks."""
        return 2 * self.out_width + FRAGMENT

    @property
    def up_steps(self) -> int:
        """Matrix instructions along a row of the up-projection."""
        return self.out_width // STEP

    @property
    def own_up_steps(self) -> int:
        """Of them those of one warp."""
        return least_each(self.up_steps, self.warps)

    def place(self) -> dict[str, int]:
        """As the experts' own. What comes behind them lies in the ring, which is free by then."""
        found = super().place()
        found |= lay_out({
            "up": self.outputs * self.pitch, "norm": 2 * self.out_width + FRAGMENT, "up_full": 8,
            "parts": 4 * self.tokens * PACK * self.each,
            "shared": 4 * self.tokens * ROWS, "finished": 4 * self.tokens * ROWS, "epoch": 4,
            "peers": 8 * self.ranks,
        }, start=found["end"])
        inside = lay_out({"rows": self.tokens * self.pitch, "squares": 4 * self.latents,
                          "products": 4 * self.warps * ROWS * 8, "square": 4 * self.tokens}, start=found["ring"])
        return {**inside, **found}

    @property
    def ring_holds(self) -> bool:
        """Whether what comes behind the experts fits in the ring."""
        return self.place()["square"] + 4 * self.tokens <= self.place()["ring"] + self.slots * self.slot_bytes


@dataclass(frozen=True, kw_only=True)
class Mixed(Tail):
    """With the attention residuals behind the tail, a block of threads a row."""

    finished: int  # blocks of layers
    mix_eps: float
    norm_eps: float
    has_p: bool = True
    stride_prefix: int = 0
    stride_block: int = 0
    stride_p: int = 0
    stride_h: int = 0

    @property
    def hidden(self) -> int:
        return self.ranks * self.stripe

    @property
    def turns(self) -> int:
        """Finished fragments of a row that a thread has at most."""
        return -(-self.hidden // (self.outputs * self.threads))

    def place(self) -> dict[str, int]:
        """The rows of the blocks lie in the ring as well, in thread blocks that multiply nothing any more."""
        found = super().place()
        sums = 4 * (self.threads // 32) * MIX_SUMS
        found |= lay_out({"first_sums": sums, "second_sums": sums, "sources_full": 8}, start=found["end"])
        return {**found, "sources": found["ring"]}

    @property
    def ring_holds(self) -> bool:
        return super().ring_holds and self.finished * 2 * self.hidden <= self.slots * self.slot_bytes
