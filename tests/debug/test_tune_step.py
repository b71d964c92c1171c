"""Settling a plan by times in the step: the clock is made up, the plans and kernels are the real ones."""
from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from k3plan.compiler.plan import LaunchPlan, PlanChoice
from k3plan.compiler.reading.source import load_spec
from k3plan.compiler.tuning import Tuned
from k3plan.face import kernels, tuned
from k3plan.graphs.debug import tune_step
from k3plan.graphs.debug.tune_step import Round, settle, settle_table

ROOT = Path(__file__).resolve().parents[2]
SPEC = load_spec(ROOT / "examples/k3-h200-tp16.yaml", ("model.layers=[1, 3]",))
IN_PROJ = "1x7168,3216x7168"
SLOW = {"blocks": 132, "warps": 16, "splits": 1, "depth": 4}
OTHER = {"blocks": 264, "warps": 8, "splits": 1, "depth": 8}


class Clock:
    """Each launch takes what its plan first says, but for one configuration and one kernel that suffer in a step."""

    def __init__(self) -> None:
        self.shares: dict[str, float] = {}

    def __call__(self, plan: LaunchPlan) -> tuple[float, Sequence[float]]:
        shares = [self.share(plan.choice(launch)) for launch in plan.launches]
        return sum(shares), shares

    def share(self, choice: PlanChoice) -> float:
        suffers = dict(choice.config) == SLOW or choice.kernel == "cute.moe_experts_shared"
        name = f"{choice.kernel} {choice.ops} {choice.bytes} {choice.config}"
        return self.shares.setdefault(name, choice.us + (20.0 if suffers else 0.0))


def lines() -> list[Tuned]:
    """The shipped times as if of kernels alone, two configurations of the in-projection, and no other form of it."""
    (line,) = [line for line in tuned("h200") if (line.kernel, line.key) == ("cute.skinny_linear", IN_PROJ)]
    alone = [replace(line, config=SLOW, us=12.0, in_step=False), replace(line, config=OTHER, us=12.4, in_step=False)]
    others = [x for x in tuned("h200") if (x.kernel, x.key) != (line.kernel, line.key) and "staged" not in x.kernel]
    return [*(replace(x, in_step=False) for x in others), *alone]


@pytest.fixture(scope="module")
def rounds() -> list[Round]:
    return list(settle(SPEC, kernels(), lines(), Clock(), "made up"))


def test_it_starts_with_the_times_alone_and_leaves_what_suffers(rounds: list[Round]) -> None:
    first, last = rounds[0].plan, rounds[-1].plan
    assert SLOW in [dict(c.config) for c in first.choices]
    assert SLOW not in [dict(c.config) for c in last.choices]
    assert OTHER in [dict(c.config) for c in last.choices]
    assert "cute.moe_experts_shared" in {c.kernel for c in first.choices}
    assert "cute.moe_experts_shared" not in {c.kernel for c in last.choices}
    assert rounds[-1].us < rounds[0].us


def test_it_ends_when_all_of_a_plan_was_timed_in_a_step(rounds: list[Round]) -> None:
    assert all(found.new for found in rounds[:-1])
    assert rounds[-1].new == 0
    assert 2 <= len(rounds) < tune_step.ROUNDS
    # its own prices are then what the clock says
    assert rounds[-1].plan.us == pytest.approx(rounds[-1].us)


def test_a_line_in_a_step_has_nothing_added(rounds: list[Round]) -> None:
    choice = next(c for c in rounds[-1].plan.choices if dict(c.config) == OTHER)
    assert choice.source.endswith("in a step")
    (line,) = [x for x in rounds[-1].lines if (x.kernel, x.key) == ("cute.skinny_linear", IN_PROJ)]
    assert (choice.us, dict(line.config)) == (line.us, OTHER)


def test_the_table_has_the_cheapest_line_of_each_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "table.json"
    table.write_text('{"source": "", "lines": []}')
    monkeypatch.setattr(tune_step, "StepClock", Clock)
    monkeypatch.setattr(tune_step, "source_text", lambda: "made up")
    said: list[str] = []
    settle_table(SPEC, (1, 1), kernels(), lines(), table, said.append)
    assert said[0].startswith("1x1: ")
    assert said[-1].endswith(", 0 choices timed in a step for the first time")
    found = {(x["kernel"], x["key"]): x for x in json.loads(table.read_text())["lines"]}
    kept = found["cute.skinny_linear", IN_PROJ]
    assert kept["config"] == OTHER
    assert kept["in_step"] is True
