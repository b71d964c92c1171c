"""Boxes of tensor elements, and what becomes of one under a reshape. Integers only."""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

Range = tuple[int, int]  # half-open
Box = tuple[Range, ...]  # one range per dim


def whole(shape: Iterable[int]) -> Box:
    """All of a tensor."""
    return tuple((0, n) for n in shape)


def sizes(box: Iterable[Range]) -> list[int]:
    """Elements per dim."""
    return [stop - start for start, stop in box]


def shifted(box: Box, dim: int, by: int) -> Box:
    """``box`` moved ``by`` elements along ``dim``."""
    return tuple((a + by, b + by) if i == dim else (a, b) for i, (a, b) in enumerate(box))


def aligned(new: tuple[int, ...], old: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """Split two shapes of one element count into the shortest runs of dims with equal products."""
    i = j = 0
    while i < len(new) or j < len(old):
        first, second = i, j
        i, j = min(i + 1, len(new)), min(j + 1, len(old))
        while (a := prod(new[first:i])) != (b := prod(old[second:j])):
            i, j = (i + 1, j) if a < b else (i, j + 1)
        if i == len(new) or j == len(old):  # trailing ones join the last run
            i, j = len(new), len(old)
        yield slice(first, i), slice(second, j)


def span(box: Iterable[Range], shape: tuple[int, ...]) -> Range:
    """First and one past the last row-major index of ``box`` in a tensor of ``shape``."""
    low = high = 0
    for (start, stop), size in zip(box, shape, strict=True):
        low, high = low * size + start, high * size + stop - 1
    return low, high + 1


def cover(low: int, high: int, shape: tuple[int, ...]) -> Box:
    """The smallest box of contiguous elements (single indices, one range, whole dims) around a span."""
    if not shape:
        return ()
    inner = prod(shape[1:])
    start, stop = low // inner, -(-high // inner)
    if stop - start == 1:
        return ((start, stop), *cover(low - start * inner, high - start * inner, shape[1:]))
    return ((start, stop), *whole(shape[1:]))


@dataclass(frozen=True, slots=True)
class ReshapedBox:
    """What to read of ``old`` shape to get a box of ``new`` shape, and how to cut the box out of it.

    Read ``inner``; view it as one dim per run of aligned dims; of each keep ``(start, length)`` as in
    ``keeps``; view the rest as ``kept_sizes``; take ``wanted`` of it.
    """

    inner: Box
    run_sizes: list[int]
    keeps: list[Range]
    kept_sizes: list[int]
    wanted: Box

    @property
    def exact(self) -> bool:
        """Whether nothing is cut away."""
        return self.wanted == whole(self.kept_sizes) and self.run_sizes == [n for _, n in self.keeps]


def reshaped(box: Box, new: tuple[int, ...], old: tuple[int, ...]) -> ReshapedBox:
    """Per run of dims that hold the same elements, the smallest covering box."""
    inner: list[Range] = []
    kept: list[Range] = []
    run_sizes: list[int] = []
    keeps: list[Range] = []
    for new_dims, old_dims in aligned(new, old):
        around = cover(*span(box[new_dims], new[new_dims]), new[new_dims])
        start, stop = span(around, new[new_dims])
        source = cover(start, stop, old[old_dims])
        low, high = span(source, old[old_dims])
        inner += source
        kept += around
        run_sizes.append(high - low)
        keeps.append((start - low, stop - start))
    wanted = tuple((a - low, b - low) for (a, b), (low, _) in zip(box, kept, strict=True))
    return ReshapedBox(tuple(inner), run_sizes, keeps, sizes(kept), wanted)
