"""The cheapest exact cover of one component, and for each region that lost the cheapest cover with it.

Works on numbers only: nodes are 0..size-1 in graph order, a region is a bit mask and a price. ``cover`` makes
these and reads the answer.

Why this is exact. Nodes are covered lowest first, so a region is always taken at its own lowest node, and
after each choice all nodes below some ``low`` are covered, plus a few above it: the window. Two partial
covers with the same ``low`` and window differ in what they allow later only through cycles, which is what
``opens`` tells apart. All edges go from lower to higher nodes. Regard a cycle of regions at the moment the
last of them, Q, is taken at its lowest node ``low``, and the region N that follows Q on the cycle. The edge
Q -> N ends in a node above ``low``; N was taken before, so N also has a node below ``low``, but not ``low``
itself: N is *open*, that is, it reaches over a hole. So it is enough to keep for each open region which
nodes it leads to through regions taken so far (``reach``), and to refuse Q when Q leads to an open region
that leads to Q. ``reach`` stays closed: what Q leads to is added to each open region that leads to Q, and Q
starts with all that the open regions it leads to have. A region that is not open any more has all its
incoming edges taken already, hence can only be on a cycle that closes in another, open one. Without holes
there is nothing to remember, so the number of states does not grow with the length of the component.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MAX_DETOUR = 64

# window: covered nodes above ``low``, shifted by ``low``; opens: (nodes ahead, nodes led to), shifted alike
State = tuple[int, tuple[tuple[int, int], ...]]


@dataclass(frozen=True, slots=True)
class Piece:
    """A region as the search sees it. ``price`` is an integer, so that sums and ties are exact."""

    mask: int
    price: int

    @property
    def low(self) -> int:
        return (self.mask & -self.mask).bit_length() - 1


@dataclass(frozen=True, slots=True)
class Alternative:
    """The cheapest cover with a piece that lost: ``added`` instead of ``replaced``. Both are empty when the
    two covers differ over more than ``MAX_DETOUR`` pieces."""

    dearer: int
    launches: int  # how many more
    added: tuple[int, ...]
    replaced: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Solution:
    """Indices of the chosen pieces by lowest node; ``lost[i]`` is None when no acyclic cover has piece i."""

    chosen: tuple[int, ...]
    price: int
    lost: dict[int, Alternative | None]


def solve(size: int, edges: Sequence[int], pieces: Sequence[Piece]) -> Solution | None:
    """Least total price, then fewest pieces, then the least sequence of indices; None without any cover.

    ``edges[i]`` is the mask of the nodes that must come after node i. ``pieces`` are convex and sorted by
    their lowest node; their order decides ties.
    """
    lattice = _Lattice(size, edges, pieces)
    lattice.explore()
    return lattice.solution()


class _Lattice:
    """All states that partial covers can reach, level by level, and the moves between them."""

    def __init__(self, size: int, edges: Sequence[int], pieces: Sequence[Piece]) -> None:
        self.size = size
        self.pieces = pieces
        # by lowest node: (index, mask, nodes led to), shifted by the lowest node
        self.at: list[list[tuple[int, int, int]]] = [[] for _ in range(size)]
        for index, piece in enumerate(pieces):
            low = piece.low
            self.at[low].append((index, piece.mask >> low, _led_to(piece.mask, edges) >> low))
        self.levels: list[dict[State, int]] = [{} for _ in range(size + 1)]
        self.levels[0][0, ()] = 0
        self.moves: list[list[tuple[int, int]]] = [[]]  # state -> (piece, next state)
        # cheapest way to a state: price, launches, previous state, piece
        self.best: list[tuple[int, int, int, int]] = [(0, 0, -1, -1)]

    def explore(self) -> None:
        for low, level in enumerate(self.levels[:-1]):
            for (window, opens), state in level.items():
                price, launches, _, _ = self.best[state]
                for index, mask, led in self.at[low]:
                    if window & mask:
                        continue
                    after = _take(mask, led, opens)
                    if after is None:
                        continue
                    target = self._enter(low, window | mask, after)
                    self.moves[state].append((index, target))
                    reached = (price + self.pieces[index].price, launches + 1, state, index)
                    if not self.best[target] or reached[:2] < self.best[target][:2]:
                        self.best[target] = reached

    def _enter(self, low: int, window: int, opens: list[tuple[int, int]]) -> int:
        """The state after all leading covered nodes are passed."""
        passed = (~window & (window + 1)).bit_length() - 1
        window >>= passed
        kept = tuple(sorted((ahead >> passed, reach >> passed) for ahead, reach in opens if ahead >> passed))
        level = self.levels[low + passed]
        state = level.get((window, kept))
        if state is None:
            state = level[window, kept] = len(self.moves)
            self.moves.append([])
            self.best.append(())  # type: ignore[arg-type]
        return state

    def solution(self) -> Solution | None:
        rest = self._rest()
        if rest[0] is None:
            return None
        states, chosen = [0], []
        while (step := rest[states[-1]]) is not None and step[2] >= 0:
            chosen.append(step[2])
            states.append(step[3])
        return Solution(tuple(chosen), rest[0][0], self._lost(rest, states, chosen))

    def _rest(self) -> list[tuple[int, int, int, int] | None]:
        """Cheapest completion of each state: price, launches, first piece, next state."""
        rest: list[tuple[int, int, int, int] | None] = [None] * len(self.moves)
        for state in self.levels[-1].values():
            rest[state] = (0, 0, -1, -1)
        for level in reversed(self.levels[:-1]):
            for state in level.values():
                rest[state] = min(
                    ((after[0] + self.pieces[index].price, after[1] + 1, index, target)
                     for index, target in self.moves[state] if (after := rest[target]) is not None),
                    default=None)
        return rest

    def _lost(self, rest: list[tuple[int, int, int, int] | None], states: list[int],
              chosen: list[int]) -> dict[int, Alternative | None]:
        """For each piece that is not chosen the cheapest complete cover that has it."""
        through: dict[int, tuple[int, int, int, int]] = {}
        for state, moves in enumerate(self.moves):
            for index, target in moves:
                after = rest[target]
                if after is not None:
                    price, launches, _, _ = self.best[state]
                    price += self.pieces[index].price + after[0]
                    total = price, launches + 1 + after[1], state, target
                    if index not in through or total < through[index]:
                        through[index] = total
        place = {state: at for at, state in enumerate(states)}
        least = rest[0]
        assert least is not None, "a solved component has a cheapest cover"
        taken = set(chosen)
        lost: dict[int, Alternative | None] = {}
        for index in range(len(self.pieces)):
            if index not in taken:
                found = through.get(index)
                lost[index] = found and self._alternative(index, found, least, rest, place, chosen)
        return lost

    def _alternative(self, index: int, total: tuple[int, int, int, int], least: tuple[int, int, int, int],
                     rest: list[tuple[int, int, int, int] | None], place: dict[int, int],
                     chosen: list[int]) -> Alternative:
        """Follow the cheapest cover with ``index`` both ways until it joins the chosen one."""
        price, launches, before, after = total
        earlier: list[int] = []
        later = [index]
        while before not in place and len(earlier) < MAX_DETOUR:
            _, _, before, piece = self.best[before]
            earlier.append(piece)
        while after not in place and len(later) < MAX_DETOUR:
            step = rest[after]
            assert step is not None, "a state on a complete cover can be completed"
            later.append(step[2])
            after = step[3]
        dearer, more = price - least[0], launches - least[1]
        if before not in place or after not in place:
            return Alternative(dearer, more, (), ())
        added = dict.fromkeys((*reversed(earlier), *later))
        replaced = dict.fromkeys(chosen[place[before]:place[after]])
        return Alternative(dearer, more, tuple(i for i in added if i not in replaced),
                           tuple(i for i in replaced if i not in added))


def bits(mask: int) -> Iterator[int]:
    """Positions of the set bits, ascending."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _led_to(mask: int, edges: Sequence[int]) -> int:
    """Nodes outside ``mask`` that an edge from inside enters."""
    led = 0
    for node in bits(mask):
        led |= edges[node]
    return led & ~mask


def _take(mask: int, led: int, opens: tuple[tuple[int, int], ...]) -> list[tuple[int, int]] | None:
    """``opens`` with one more region, or None when it would close a cycle."""
    for ahead, reach in opens:
        if led & ahead:
            led |= reach
    if led & mask:
        return None
    after = [(ahead, reach | led if reach & mask else reach) for ahead, reach in opens]
    after.append((mask, led))
    return after
