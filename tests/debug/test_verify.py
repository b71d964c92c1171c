"""``verify`` on a CPU, with an emulated graph: a replay runs the launches, and broken ones misbehave only there."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from broken import launch_index, small_step, with_step, write_live

from k3plan.compiler.plan import LaunchPlan
from k3plan.graphs.bind import Executable, bind
from k3plan.graphs.debug.compare import alive, first_unlike, producer
from k3plan.graphs.debug.findings import render
from k3plan.graphs.debug.storage import contents
from k3plan.graphs.debug.verify import BOUND_AGAIN, verify
from k3plan.graphs.random_weights import RandomSource

LAUNCH = "L0.attn.o_proj"
BEFORE = "L0.attn.h"
REPLAYING = [False]
Step = Callable[[], None]


@contextmanager
def replaying() -> Iterator[None]:
    REPLAYING[0] = True
    try:
        yield
    finally:
        REPLAYING[0] = False


def emulated(executable: Executable) -> Step:
    def replay() -> None:
        with replaying():
            executable.run()
    return replay


@pytest.fixture
def step() -> Executable:
    return small_step()


def marked(executable: Executable, **what: object) -> Executable:
    """The launch under test planned with a programmatic edge or on another stream."""
    at = launch_index(executable, LAUNCH)
    launches = list(executable.plan.launches)
    launches[at] = replace(launches[at], **what)  # type: ignore[arg-type]
    return replace(executable, plan=replace(executable.plan, launches=tuple(launches)))


def wrong_when(executable: Executable, bad: Callable[[Executable], bool]) -> Executable:
    """The output of the launch under test comes out 1 too large in a replay, if ``bad`` says so."""
    def make(step: Step) -> Step:
        def run() -> None:
            step()
            if REPLAYING[0] and bad(executable):
                executable.ranks[0].tensors[LAUNCH].add_(1)
        return run
    return with_step(executable, LAUNCH, make)


def rebinding(executable: Executable, bad: Callable[[Executable], bool]) -> Callable[[LaunchPlan], Executable]:
    def again(plan: LaunchPlan) -> Executable:
        return wrong_when(bind(plan, RandomSource({}), shared=executable), bad)
    return again


def launch_of(executable: Executable) -> object:
    return executable.plan.launches[launch_index(executable, LAUNCH)]


def test_a_sound_step_is_verified_and_left_alone(step: Executable) -> None:
    before = contents(step, ("state", "cache", "index"))
    found = verify(step, capture_step=emulated)
    assert found.findings == (), render(found.findings)
    assert "3 replays equal the eager step bit for bit, over 20 launches" in found.verdict
    after = contents(step, ("state", "cache", "index"))
    assert all(torch.equal(before.of[key], after.of[key]) for key in before.of)


@pytest.mark.parametrize(("what", "code", "verdict"), [
    ({"dependent": True}, "CG-063",
     "only with programmatic launch: L0.attn.o_proj reads before L0.attn.o_gated wrote"),
    ({"stream": 1}, "CG-064", "only with several streams: L0.attn.o_proj does not wait for L0.attn.o_gated"),
])
def test_the_variant_that_is_right_gives_the_verdict(step: Executable, what: dict[str, object], code: str,
                                                     verdict: str) -> None:
    def bad(executable: Executable) -> bool:
        launch = executable.plan.launches[launch_index(executable, LAUNCH)]
        return all(getattr(launch, name) == value for name, value in what.items())

    plain = marked(step, **what)
    found = verify(wrong_when(plain, bad), capture_step=emulated, rebind=rebinding(plain, bad))
    assert found.verdict == verdict
    assert [(f.code, f.launch, f.layer) for f in found.findings] == [(code, LAUNCH, 0)]
    assert list(found.variants.values())[-1] is True


def test_only_with_padding(step: Executable) -> None:
    write_live(step, 1)

    def bad(executable: Executable) -> bool:
        return bool((executable.ranks[0].tensors["positions"] < 0).any())

    found = verify(wrong_when(step, bad), capture_step=emulated, rebind=rebinding(step, bad))
    assert found.verdict == "only with padded rows: L0.attn.o_proj reads what they hold"
    assert [(f.code, f.launch) for f in found.findings] == [("CG-065", LAUNCH)]


def test_wrong_in_every_variant(step: Executable) -> None:
    plain = marked(step, dependent=True)
    found = verify(wrong_when(plain, lambda e: True), capture_step=emulated, rebind=rebinding(plain, lambda e: True))
    assert [(f.code, f.launch) for f in found.findings] == [("CG-061", LAUNCH)]
    assert found.variants == {"dependent launch off": False}
    assert "elements differ, by up to 1" in found.findings[0].text


def test_20_a_launch_that_a_replay_leaves_out(step: Executable) -> None:
    def make(own: Step) -> Step:
        def run() -> None:
            if not REPLAYING[0]:
                own()
        return run

    # with a programmatic edge in the plan, which a plan bound again has as well and which is not to blame
    broken = with_step(marked(step, dependent=True), LAUNCH, make)
    found = verify(broken, capture_step=emulated, reference=False)
    assert [(f.code, f.launch) for f in found.findings] == [("CG-020", LAUNCH)]
    assert found.variants == {BOUND_AGAIN: True}


def test_20_over_what_another_launch_leaves_there(step: Executable) -> None:
    """Its output lies where an earlier launch had something else in each run: that is not the launch's doing."""
    output, runs = step.ranks[0].tensors[LAUNCH], [0]

    def leave(own: Step) -> Step:
        def run() -> None:
            own()
            runs[0] += 1
            output.fill_(float(runs[0]))
        return run

    broken = with_step(with_step(step, BEFORE, leave), LAUNCH, lambda own: lambda: None if REPLAYING[0] else own())
    found = verify(broken, capture_step=emulated, reference=False)
    assert [(f.code, f.launch) for f in found.findings] == [("CG-020", LAUNCH)]


def test_a_step_that_is_not_deterministic(step: Executable) -> None:
    calls = [0]

    def make(own: Step) -> Step:
        def run() -> None:
            own()
            calls[0] += 1
            step.ranks[0].tensors[LAUNCH].add_(calls[0])
        return run

    found = verify(with_step(step, LAUNCH, make), capture_step=emulated, reference=False)
    assert [(f.code, f.launch) for f in found.findings] == [("CG-066", LAUNCH)]


def test_a_kernel_that_is_wrong_in_itself(step: Executable) -> None:
    def make(own: Step) -> Step:
        def run() -> None:
            own()
            step.ranks[0].tensors[LAUNCH].mul_(1.5)
        return run

    found = verify(with_step(step, LAUNCH, make), capture_step=emulated)
    assert [(f.code, f.launch) for f in found.findings] == [("CG-062", LAUNCH)]


def test_a_tolerance_allows_rounding(step: Executable) -> None:
    def make(own: Step) -> Step:
        def run() -> None:
            own()
            if REPLAYING[0]:
                step.ranks[0].tensors[LAUNCH].mul_(1 + 2**-7)
        return run

    broken = with_step(step, LAUNCH, make)
    assert verify(broken, capture_step=emulated, reference=False).findings[0].code == "CG-061"
    assert verify(broken, capture_step=emulated, reference=False, tolerance=0.2).findings == ()


@pytest.mark.parametrize("wrong", [1, 2, 7, 20])
def test_halving_finds_the_first(wrong: int) -> None:
    asked: list[int] = []

    def unlike(count: int) -> bool:
        asked.append(count)
        return count >= wrong

    assert first_unlike(20, unlike) == wrong
    assert len(asked) <= 5


def test_what_is_still_alive(step: Executable) -> None:
    plan = step.plan
    left = alive(plan, len(plan.launches))
    assert "head.tokens" in left
    arena = [plan.buffers[plan.tensors[name].buffer] for name in left
             if plan.buffers[plan.tensors[name].buffer].kind == "arena"]
    spans = sorted((b.offset, b.offset + b.bytes) for b in arena)
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    assert producer(plan, launch_index(step, LAUNCH)) == "L0.attn.o_gated"
