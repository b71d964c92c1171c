"""Settling a plan by times in the step: the clock is made up, the plans and kernels are the real ones."""
from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from k3plan.compiler.compile import compile_spec
from k3plan.compiler.kernel import KernelDef
from k3plan.compiler.plan import LaunchPlan, PlanChoice
from k3plan.compiler.reading.source import load_spec
from k3plan.compiler.tuning import Tuned, Tuning
from k3plan.face import kernels, tuned
from k3plan.graphs.tuner import in_step
from k3plan.graphs.tuner.in_step import Round, settle, settle_table

ROOT = Path(__file__).resolve().parents[2]
SPEC = load_spec(ROOT / "examples/k3-h200-tp16.yaml", ("model.layers=[1, 3]",))
IN_PROJ = "1x7168,3216x7168"
SLOW = {"blocks": 132, "warps": 16, "splits": 1, "depth": 4}
OTHER = {"blocks": 264, "warps": 8, "splits": 1, "depth": 8}
ROOMY = {"blocks": 132, "warps": 8, "splits": 1, "depth": 4}


class Clock:
    """Each launch takes what its plan first says, but for one configuration and one kernel that suffer in a step."""

    def __init__(self) -> None:
        self.shares: dict[str, float] = {}

    def __call__(self, plan: LaunchPlan) -> tuple[float, Callable[[], Sequence[float]]]:
        shares = self.shares_of(plan)
        return sum(shares), lambda: shares

    def shares_of(self, plan: LaunchPlan) -> list[float]:
        return [self.share(plan.choice(launch)) for launch in plan.launches]

    def share(self, choice: PlanChoice) -> float:
        suffers = dict(choice.config) == SLOW or choice.kernel == "cute.moe_experts_shared"
        name = f"{choice.kernel} {choice.ops} {choice.bytes} {choice.config}"
        return self.shares.setdefault(name, choice.us + (20.0 if suffers else 0.0))


def lines() -> list[Tuned]:
    """The shipped times as if of kernels alone, two configurations of the in-projection, and no other form of it; none
    of experts with their tail."""
    (line,) = [line for line in tuned("h200") if (line.kernel, line.key) == ("cute.skinny_linear", IN_PROJ)]
    alone = [replace(line, config=SLOW, us=12.0, in_step=False), replace(line, config=OTHER, us=12.4, in_step=False)]
    others = [x for x in tuned("h200") if (x.kernel, x.key) != (line.kernel, line.key)
              and "staged" not in x.kernel and "experts_tail" not in x.kernel]
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
    assert 2 <= len(rounds) < in_step.ROUNDS
    # its own prices are then what the clock says
    assert rounds[-1].plan.us == pytest.approx(rounds[-1].us)


class CrowdedClock(Clock):
    """One configuration, fast itself, takes the room of all others; another takes longer than it says."""

    def shares_of(self, plan: LaunchPlan) -> list[float]:
        choices = [plan.choice(launch) for launch in plan.launches]
        crowded = any(dict(c.config) == SLOW for c in choices)
        return [self.share(c) + (1.0 if crowded and dict(c.config) != SLOW else 0.0) for c in choices]

    def share(self, choice: PlanChoice) -> float:
        name = f"{choice.kernel} {choice.ops} {choice.bytes} {choice.config}"
        return self.shares.setdefault(name, choice.us + (1.0 if dict(choice.config) == OTHER else 0.0))


def test_what_makes_others_slower_is_charged_for_it() -> None:
    """It is tried second, since the other takes 0.5 us more than it would; 30 launches take 1 us more beside it."""
    quick = [replace(x, us=11.9) if dict(x.config) == OTHER and x.key == IN_PROJ else x for x in lines()]
    rounds = list(settle(SPEC, kernels(), quick, CrowdedClock(), "made up"))
    crowded = [SLOW in [dict(c.config) for c in found.plan.choices] for found in rounds]
    assert any(crowded)
    assert not crowded[0]
    assert not crowded[-1]
    assert rounds[-1].us == min(found.us for found in rounds)
    assert rounds[-1].plan.us == pytest.approx(rounds[-1].us)


class RoomyClock(Clock):
    """An in-projection that takes longer itself, more so alone, and makes all other launches 0.5 us shorter."""

    def shares_of(self, plan: LaunchPlan) -> list[float]:
        choices = [plan.choice(launch) for launch in plan.launches]
        gain = 0.5 * any(map(is_roomy, choices))
        return [self.share(choice) + (2.0 if is_roomy(choice) else -gain) for choice in choices]

    def share(self, choice: PlanChoice) -> float:
        return self.shares.setdefault(f"{choice.kernel} {choice.ops} {choice.bytes} {choice.config}", choice.us)


def is_roomy(choice: PlanChoice) -> bool:
    return choice.kernel == "cute.skinny_linear" and dict(choice.config) == ROOMY and 4.5e7 < choice.bytes < 5e7


def test_an_exchange_finds_what_gives_others_room() -> None:
    """It has no time alone. Once it is found, the plan without it is charged for what the others take more."""
    alone = lines()
    spec, clock = load_spec(ROOT / "examples/k3-h200-tp16.yaml", ("model.layers=[1]",)), RoomyClock()
    without = list(settle(spec, kernels(), alone, clock, "made up"))
    assert not any(is_roomy(choice) for found in without for choice in found.plan.choices)
    rounds = list(settle(spec, kernels(), alone, clock, "made up", exchanges=30))
    tried = [found.tried for found in rounds if found.tried]
    assert any(name.startswith("shorter by") and str(ROOMY) in name for name in tried)
    assert any(name.startswith("not shorter") for name in tried)
    assert len(set(tried)) == len(tried)
    best = min(rounds, key=lambda found: found.us)
    assert best.us < min(found.us for found in without)
    table = {(x.kernel, x.key): x for x in (*alone, *rounds[-1].lines)}
    again = compile_spec(spec, kernels(), Tuning(table.values()))
    assert any(map(is_roomy, again.choices))
    assert clock(again)[0] == pytest.approx(best.us)


class TogetherClock(Clock):
    """An in-projection and a KDA that take 1 us more each, and all others 0.5 us less where both are there; any other
    configuration than the first plan's takes 20 us more."""

    first: frozenset[str] = frozenset()

    def shares_of(self, plan: LaunchPlan) -> list[float]:
        choices = [plan.choice(launch) for launch in plan.launches]
        self.first = self.first or frozenset(map(self.name, choices))
        gain = 0.5 * (any(map(is_roomy, choices)) and any(map(is_split, choices)))
        return [self.share(c) + (1.0 if is_roomy(c) or is_split(c) else 20.0 * (self.name(c) not in self.first) - gain)
                for c in choices]

    def share(self, choice: PlanChoice) -> float:
        return self.shares.setdefault(f"{choice.kernel} {choice.ops} {choice.bytes}", choice.us)

    @staticmethod
    def name(choice: PlanChoice) -> str:
        return f"{choice.kernel} {choice.ops} {choice.bytes} {choice.config}"


def is_split(choice: PlanChoice) -> bool:
    return choice.kernel == "cute.kda_decode" and dict(choice.config) == {"splits": 4, "warps": 4}


def few_configs(kernel: KernelDef) -> KernelDef:
    """With what its shipped lines have, and two others."""
    own, offered = [dict(line.config) for line in lines() if line.kernel == kernel.id], kernel.configs
    wanted = [*own, ROOMY, {"splits": 4, "warps": 4}]
    return replace(kernel, configs=offered and (lambda region: [c for c in offered(region) if c in wanted] or
                                                offered(region)[:1]))


def test_two_are_exchanged_together_that_gain_nothing_alone() -> None:
    spec, clock = load_spec(ROOT / "examples/k3-h200-tp16.yaml", ("model.layers=[1]",)), TogetherClock()
    rounds = list(settle(spec, [few_configs(kernel) for kernel in kernels()], lines(), clock, "made up", exchanges=99))
    tried = [found.tried for found in rounds if found.tried]
    assert len(tried) == len(set(tried)) < 99
    (shorter,) = [name for name in tried if name.startswith("shorter")]
    assert str(ROOMY) in shorter
    assert str({"splits": 4, "warps": 4}) in shorter
    best = min(rounds, key=lambda found: found.us).plan
    assert any(map(is_roomy, best.choices))
    assert any(map(is_split, best.choices))


def test_a_line_in_a_step_has_nothing_added(rounds: list[Round]) -> None:
    choice = next(c for c in rounds[-1].plan.choices if dict(c.config) == OTHER)
    assert choice.source.endswith("in a step")
    (line,) = [x for x in rounds[-1].lines if (x.kernel, x.key) == ("cute.skinny_linear", IN_PROJ)]
    assert (choice.us, dict(line.config)) == (line.us, OTHER)


def test_the_table_has_the_cheapest_line_of_each_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "table.json"
    table.write_text('{"source": "", "lines": []}')
    monkeypatch.setattr(in_step, "StepClock", Clock)
    monkeypatch.setattr(in_step, "source_text", lambda: "made up")
    said: list[str] = []
    settle_table(SPEC, (1, 1), kernels(), lines(), table, said.append)
    assert said[0].startswith("1x1: ")
    assert said[-1].endswith(", 0 choices timed in a step for the first time")
    found = {(x["kernel"], x["key"]): x for x in json.loads(table.read_text())["lines"]}
    kept = found["cute.skinny_linear", IN_PROJ]
    assert kept["config"] == OTHER
    assert kept["in_step"] is True


def test_other_sizes_of_step_keep_their_lines() -> None:
    """Times in a step of 8 rows stay, though a time alone of another configuration is shorter."""
    line = next(x for x in tuned("h200") if (x.kernel, x.key) == ("cute.skinny_linear", "8x7168,3216x7168"))
    more = [replace(line, us=20.0, in_step=True), replace(line, config=OTHER, us=5.0, in_step=False)]
    found = next(iter(settle(SPEC, kernels(), [*lines(), *more], Clock(), "made up"))).lines
    assert found
    assert all(x.in_step for x in found)
    assert not [x for x in found if x.key == line.key]


class LateClock(Clock):
    """KDA takes 0.5 us more where it is late, a mix of residuals ``gain`` less where its blocks are settled."""

    gain = 0.0

    def shares_of(self, plan: LaunchPlan) -> list[float]:
        mixes = [bool(plan.choice(x).config.get("settled") and set(x.rest) <= set(x.settled)) for x in plan.launches]
        return [share - self.gain * settled for share, settled in zip(super().shares_of(plan), mixes, strict=True)]

    def share(self, choice: PlanChoice) -> float:
        return 4.0 + 0.5 * bool(choice.config.get("late")) if "kda" in choice.kernel else super().share(choice)


@pytest.mark.parametrize(("gain", "late"), [(0.1, False), (1.0, True)])
def test_late_triggers_are_kept_where_the_whole_step_gains(gain: float, late: bool, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """Three layers of KDA, 0.5 us more each, and the mixes behind them."""
    spec = load_spec(ROOT / "examples/k3-h200-tp16.yaml", ("model.layers=[0, 1, 2]",))
    shipped = [replace(x, in_step=False) for x in tuned("h200")]
    kda = [x for x in shipped if x.kernel == "cute.kda_decode"]
    mixes = [x for x in shipped if x.kernel.startswith("cute") and "attn_res" in x.kernel]
    more = [replace(x, config={**x.config, "late": True}, us=x.us + 1.0) for x in kda]
    more += [replace(x, config={**x.config, "settled": True}, us=x.us - 0.5) for x in mixes]
    table = tmp_path / "table.json"
    table.write_text('{"source": "", "lines": []}')
    monkeypatch.setattr(in_step, "StepClock", LateClock)
    monkeypatch.setattr(LateClock, "gain", gain)
    monkeypatch.setattr(in_step, "source_text", lambda: "made up")
    said: list[str] = []
    settle_table(spec, (1, 1), kernels(), [*shipped, *more], table, said.append, exchanges=24)
    assert any("'late': True" in line for line in said)
    kept = [x for x in json.loads(table.read_text())["lines"] if x["kernel"] == "cute.kda_decode"]
    assert [bool(x["config"].get("late")) for x in kept] == [late]
