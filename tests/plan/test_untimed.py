"""A kernel that nobody has timed on a GPU does not displace kernels that somebody has."""
from __future__ import annotations

import pytest
import small_graphs

from k3plan.compiler.covering.cover import Cover, cover
from k3plan.compiler.covering.match import find_regions
from k3plan.compiler.kernel import Cost, Menu, Region

GRAPH = small_graphs.graph("a = first(x)\nb = second(a)\nc = third(b)", ["c"])
PARTS = small_graphs.one_node("timed", "first", "second", "third")
TWIN = small_graphs.kernel("other.second", "out = second(...)\n-> out")
FUSED = small_graphs.kernel("other.fused", "m = first(x)\nout = second(m)\n-> out")
TIMED = {"timed.first": 4.0, "timed.second": 3.0, "timed.third": 2.0}
GUESSED = {"other.second": 1.0, "other.fused": 1.5}


def covered(*others, timed=TIMED, guessed=GUESSED) -> Cover:
    def cost_of(region: Region) -> Cost:
        kernel = region.kernel.id
        if kernel in timed:
            return Cost(timed[kernel], 0, 0, True, "a GPU")
        return Cost(guessed.get(kernel, 9.0), 0, 0, False, "model", timed=False)

    regions, misses = find_regions(GRAPH, Menu([*PARTS, *others]))
    return cover(GRAPH, regions, cost_of, near_misses=misses)


def chosen(found: Cover) -> list[str]:
    return [choice.kernel for choice in found.choices]


@pytest.mark.parametrize("other", [TWIN, FUSED], ids=lambda kernel: kernel.id)
def test_a_guess_does_not_win_against_times(other) -> None:
    found = covered(other)
    assert chosen(found) == ["timed.first", "timed.second", "timed.third"]
    (loser,) = [x for choice in found.choices for x in choice.losers if x.kernel == other.id][:1]
    assert loser.us == pytest.approx(3.03 if other is TWIN else 7.07)
    guess = "1.0" if other is TWIN else "1.5"
    assert loser.reason.endswith(f"dearer; never timed on this GPU, the model alone says {guess} us")


def test_a_guess_wins_against_guesses() -> None:
    found = covered(FUSED, timed={})
    assert chosen(found) == ["other.fused", "timed.third"]
    assert found.choices[0].cost.source == "model"


def test_a_guess_wins_where_a_part_of_it_has_no_time() -> None:
    assert chosen(covered(FUSED, timed={"timed.first": 4.0})) == ["other.fused", "timed.third"]


def test_a_time_wins_on_its_merits() -> None:
    assert chosen(covered(TWIN, timed=TIMED | {"other.second": 2.9}))[1] == "other.second"


def test_a_dear_guess_stays_what_it_is() -> None:
    found = covered(TWIN, guessed={"other.second": 5.0})
    losers = [x for choice in found.choices for x in choice.losers if x.kernel == "other.second"]
    assert losers[0].us == 5.0
    assert "never timed" not in losers[0].reason
