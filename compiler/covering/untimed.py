"""A kernel that nobody has timed on a GPU does not outbid kernels that somebody has. Decides only that.

A model's price is a guess from bytes and flops; it knows nothing of how well a kernel is written. Where the nodes of
such a kernel could be computed by kernels with times of this GPU, the guess is raised to just above their sum. Where
nothing is timed (a GPU that nobody has measured) all are guesses and compete as they are, but for the library's product
of more than a few rows, which counts as timed everywhere (``cost.py``).
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..kernel import Cost
from .search import Piece, bits, solve

MARGIN = 1.01  # at an equal price the kernel with a time is to win
_PICOSECONDS = 10**6


def hold_back(costs: Sequence[Cost], masks: Sequence[int]) -> tuple[Cost, ...]:
    """``costs`` of the regions with node sets ``masks``, those of untimed kernels raised where timed ones would do."""
    timed = [(mask, cost) for mask, cost in zip(masks, costs, strict=True) if cost.timed]
    if not timed:
        return tuple(costs)
    cheapest = {mask: _cheapest(mask, timed) for mask, cost in zip(masks, costs, strict=True) if not cost.timed}
    return tuple(_raised(cost, cheapest.get(mask, math.inf)) for mask, cost in zip(masks, costs, strict=True))


def _raised(cost: Cost, us: float) -> Cost:
    least = us * MARGIN
    if cost.timed or not cost.us < least < math.inf:
        return cost
    said = f"just above timed kernels for the same ops ({us:.2f} us), though the {cost.source} says {cost.us:.2f}"
    return replace(cost, us=least, guess=cost.us, source=f"never timed on this GPU: {said}")


def _cheapest(mask: int, timed: Sequence[tuple[int, Cost]]) -> float:
    """Least sum over an exact cover of ``mask`` by timed regions; infinite without one. Inside a region, which has no
    cycle with the rest, the order of its nodes does not matter."""
    place = {bit: index for index, bit in enumerate(bits(mask))}
    pieces = sorted((Piece(sum(1 << place[bit] for bit in bits(other)), round(cost.us * _PICOSECONDS))
                     for other, cost in timed if not other & ~mask), key=lambda piece: piece.low)
    covered = 0
    for piece in pieces:
        covered |= piece.mask
    if covered != (1 << len(place)) - 1:
        return math.inf
    solution = solve(len(place), [0] * len(place), pieces)
    return math.inf if solution is None else solution.price / _PICOSECONDS
