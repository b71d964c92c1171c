"""The mailbox protocol as numbers and pure functions: what kernels, their bindings and the model checker share.

Knows no GPU. ``mailbox.py`` is the device half, and takes every number from here; ``tests/cute/test_protocol.py``
explores the same numbers in all interleavings. The argument why it works is in ``docs/cute.md``.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FRAGMENT_BYTES = 16  # what one thread stores at once
FRAGMENT_WORDS = 4  # each of them carries its own flag, so that a fragment may arrive in pieces
HEALTH_WORDS = 8


@dataclass(frozen=True)
class Protocol:
    """A mailbox has ``parities`` parts. The launch of epoch e writes and reads part ``e mod parities``, and zeroes the
    part of epoch ``e - rearm_lag``. Epochs count modulo ``wrap``."""

    parities: int = 3
    rearm_lag: int = 1
    wrap: int = 3 << 29  # a multiple of ``parities`` that an i32 holds

    def part(self, epoch: int) -> int:
        """The part of a mailbox that the launch of ``epoch`` uses."""
        return epoch % self.parities

    def armed_part(self, epoch: int) -> int:
        """The part that the launch of ``epoch`` arms again."""
        return (epoch + self.parities - self.rearm_lag) % self.parities

    def following(self, epoch: int) -> int:
        """The epoch of the next launch."""
        return 0 if epoch + 1 == self.wrap else epoch + 1


PROTOCOL = Protocol()


def encode(word: int) -> int:
    """What travels for 4 bytes of payload: the complement, and never zero, which is a word that has not come. The one
    payload without a code of its own, all ones, is a NaN (two, as bf16) and is sent as another NaN."""
    return max(~word & 0xFFFFFFFF, 1)


def decode(word: int) -> int:
    """The payload of a travelling word; a word that has not come is a NaN."""
    return ~word & 0xFFFFFFFF


@dataclass(frozen=True)
class Health:
    """What the first wait that gave up on a rank left behind. Only launches with a wait limit write it."""

    rank: int
    launch: int  # number in the plan
    epoch: int
    block: int
    missing: int  # fragments of one thread
    senders: tuple[int, ...]  # ranks whose fragments are missing
    wait: int  # which wait of the kernel

    def describe(self, waits: Sequence[str] = ()) -> str:
        """One line for a person; ``waits`` are the kernel's names for its waits."""
        what = waits[self.wait] if self.wait < len(waits) else f"wait {self.wait}"
        of = ", ".join(map(str, self.senders))
        return (f"rank {self.rank}, launch {self.launch}, epoch {self.epoch}, block {self.block}: gave up waiting for "
                f"{what} of rank {of} ({self.missing} fragments of one thread)\n"
                "  fix: see why that rank did not reach this launch; then clear mailboxes, epochs and health of all "
                "ranks before the next step")


def read_health(words: Sequence[int]) -> Health | None:
    """The report in ``words`` (i32 [8]), or None when no wait gave up."""
    if not words[0]:
        return None
    senders = tuple(rank for rank in range(32) if words[5] >> rank & 1)
    return Health(words[0] - 1, words[1], words[2], words[3], words[4], senders, words[6])
