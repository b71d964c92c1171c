"""Why a kernel was not taken, in words and numbers. Decides only what is worth saying."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..ir import Node
from ..kernel import Cost, Region
from .match import NearMiss
from .search import Alternative, Solution, bits

MAX_LOSERS = 16  # for one choice; a longer list is not read
_MAX_PARTS = 4  # kernels named in one sum
_MAX_REFUSED = 8  # nodes listed in one error


@dataclass(frozen=True, slots=True)
class Loser:
    """A kernel that could have been at a node of a choice. ``us`` is its own time; None: it does not fit."""

    kernel: str
    us: float | None
    reason: str


def explain_losers(regions: Sequence[Region], masks: Sequence[int], costs: Sequence[Cost],
                   solution: Solution, toll: int = 0) -> dict[int, tuple[Loser, ...]]:
    """For each chosen region the regions that overlap it, the nearest first. ``toll`` was charged for each launch.

    A kernel is listed once, and so is a split: its sum names all parts.
    """
    owner = {bit: index for index in solution.chosen for bit in bits(masks[index])}
    rivals: dict[int, list[tuple[float, int]]] = {index: [] for index in solution.chosen}
    for index, alternative in solution.lost.items():
        dearer = float("inf") if alternative is None else alternative.dearer
        for chosen in {owner[bit] for bit in bits(masks[index])}:
            rivals[chosen].append((dearer, index))
    texts = {index: _text(index, alternative, regions, masks, costs, toll) + _raised(costs[index])
             for index, alternative in solution.lost.items()}
    found = {}
    for chosen, indices in rivals.items():
        losers: dict[str, Loser] = {}
        said = set()
        for _, index in sorted(indices):
            kernel = regions[index].kernel.id
            if kernel in losers or texts[index] in said:
                continue
            said.add(texts[index])
            losers[kernel] = Loser(kernel, costs[index].us, texts[index])
        found[chosen] = tuple(losers.values())
    return found


def missed(region: Region, misses: Iterable[NearMiss], losers: Sequence[Loser]) -> list[Loser]:
    """Near misses at the nodes of a choice, without the kernels that are known there."""
    known = {region.kernel.id, *(loser.kernel for loser in losers)}
    return [Loser(miss.kernel, None, miss.reason) for miss in misses if miss.kernel not in known]


def explain_uncovered(nodes: Sequence[Node], misses: Sequence[NearMiss]) -> str:
    """Error text: each node that no kernel computes, with the kernels that almost do. Equal ones once."""
    by_node: dict[str, list[NearMiss]] = {}
    for miss in misses:
        for name in dict.fromkeys(miss.nodes):
            by_node.setdefault(name, []).append(miss)
    told: dict[tuple[str, tuple[tuple[str, str], ...]], list[Node]] = {}
    for node in nodes:
        refusals = dict.fromkeys((miss.kernel, miss.reason) for miss in by_node.get(node.name, ()))
        told.setdefault((node.op, tuple(refusals)), []).append(node)
    lines = []
    for (op, refused), alike in list(told.items())[:_MAX_REFUSED]:
        more = f" and {len(alike) - 1} more nodes" if len(alike) > 1 else ""
        lines.append(f"no kernel computes {alike[0].name} ({op}){more}")
        lines += [f"  {kernel}: {reason}" for kernel, reason in refused]
        if not refused:
            lines.append(f"  the menu has no kernel with {op} that comes near")
    if len(told) > _MAX_REFUSED:
        lines.append(f"and {len(told) - _MAX_REFUSED} more groups of nodes")
    return "\n".join(lines)


def _text(index: int, alternative: Alternative | None, regions: Sequence[Region], masks: Sequence[int],
          costs: Sequence[Cost], toll: int) -> str:
    own = f"{regions[index].kernel.id} {_us(costs[index].us)} us"
    if alternative is None:
        return f"{own}, but no set of kernels for the other nodes goes with it"
    margin = _margin(alternative, toll)
    added, replaced = alternative.added, alternative.replaced
    if not added:
        return f"{own}, and the rest around it changes, {margin}"
    if len(added) == 1 and len(replaced) == 1:
        return f"{own}, {margin}"
    total = _sum(added, regions, costs)
    if len(replaced) == 1:
        return f"split: {total}, {margin}"
    return f"with it {total} in place of {_sum(replaced, regions, costs)}, {margin}"


def _raised(cost: Cost) -> str:
    return "" if cost.guess is None else f"; never timed on this GPU, the model alone says {_us(cost.guess)} us"


def _margin(alternative: Alternative, toll: int) -> str:
    more = round(alternative.dearer / toll) if toll else 0
    if more:
        rest = (alternative.dearer - more * toll) / 1e6
        launches = f"{more} launch{'es' if more > 1 else ''} more"
        return f"{launches}, {_us(abs(rest))} us {'dearer' if rest > 0 else 'cheaper'}"
    if alternative.dearer:
        return f"{_us(alternative.dearer / 1e6)} us dearer"
    if alternative.launches:
        return f"equal, {alternative.launches} launch{'es' if alternative.launches > 1 else ''} more"
    return "equal, later in the order of kernel ids"


def _sum(indices: Sequence[int], regions: Sequence[Region], costs: Sequence[Cost]) -> str:
    """``a 1.2 + b 1.3 us = 2.5 us``."""
    parts = [f"{regions[index].kernel.id} {_us(costs[index].us)}" for index in indices]
    if len(parts) > _MAX_PARTS:
        parts[_MAX_PARTS - 1:] = [f"{len(parts) - _MAX_PARTS + 1} more"]
    total = sum(costs[index].us for index in indices)
    return f"{' + '.join(parts)} us" + (f" = {_us(total)} us" if len(indices) > 1 else "")


def _us(us: float) -> str:
    """Two decimals, without a second zero; small ones keep two digits."""
    if 0 < us < 0.005:
        return f"{us:.2g}"
    text = f"{us:.2f}"
    return text[:-1] if text.endswith("0") else text
