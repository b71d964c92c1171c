"""Who lies where in the shared memory of a thread block. Pure functions, no cutlass."""
from __future__ import annotations

from collections.abc import Mapping

LIMIT = 232448  # bytes of a thread block on sm_90, sm_100 and sm_103
FRAGMENT = 16  # bytes that a lane moves at once


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def lay_out(sizes: Mapping[str, int], alignment: Mapping[str, int] | None = None, start: int = 0) -> dict[str, int]:
    """Byte offsets of things of so many bytes one behind the other, on 16 bytes or on their ``alignment``, and where
    they end under "end"."""
    found, at = {}, start
    for name, size in sizes.items():
        found[name] = at
        at += round_up(size, (alignment or {}).get(name, FRAGMENT))
    return found | {"end": at}
