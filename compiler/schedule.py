"""Which launches start before the one before them has ended. Decides edges between launches, not their order."""
from __future__ import annotations

from collections.abc import Sequence

from .kernel import Region

FIRST_ARCH = 90  # programmatic dependent launch came with sm_90


def can_start_early(arch: str) -> bool:
    """Whether the device knows programmatic edges."""
    return arch.startswith("sm_") and int(arch.removeprefix("sm_")) >= FIRST_ARCH


def dependent_launches(regions: Sequence[Region], arch: str) -> list[bool]:
    """For launches in order: whether a launch has a programmatic edge to the one before it.

    A kernel of ours lets its successor start at once and waits for its predecessor before it touches anything but
    weights. Its wait covers everything earlier as well, as long as every launch that starts early waits: a torch op
    never does, so it starts at a full edge, and what follows it gains nothing from starting early.
    """
    if not can_start_early(arch):
        return [False] * len(regions)
    ours = [not region.kernel.entry.startswith("op:") for region in regions]
    return [index > 0 and ours[index] and ours[index - 1] for index in range(len(regions))]
