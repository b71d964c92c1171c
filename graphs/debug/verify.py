"""``k3plan graph verify``: holds the replay of a captured step against the eager step and against the reference.

Both ways start from the same states, caches and inputs and from a poisoned arena, and are compared byte for byte (or
by tolerance) on everything that some launch wrote and none has written over since. Where they differ, ever shorter
beginnings of the step are captured until the first diverging launch is left, and the step is tried again without
programmatic launch, on one stream and without padding: the variant that is right says what is wrong.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...compiler.errors import Origin
from ...compiler.plan import LaunchPlan
from ..bind import Executable, bind
from ..capture import capture
from ..random_weights import RandomSource
from ..verify import verify_launches
from .compare import (
    Results,
    Unlike,
    beginning,
    bytes_of,
    compare,
    first_unlike,
    only,
    producer,
    results,
    wait_for,
)
from .findings import Finding, count_line, find, render, to_json
from .storage import KEPT, contents, restore

Replay = Callable[[], None]
Capture = Callable[[Executable], Replay]
REPLAYS = 3


@dataclass(frozen=True)
class Verification:
    """What ``verify`` found. ``variants``: each variant that was tried and whether it was right."""

    plan_key: str
    launches: int
    replays: int
    verdict: str
    variants: Mapping[str, bool] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    def __str__(self) -> str:
        tried = [f"  {name}: {'right' if right else 'wrong as well'}" for name, right in self.variants.items()]
        told = [render(self.findings)] if self.findings else []
        return "\n".join([f"plan {self.plan_key}: {self.verdict}", *tried, *told])

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"plan": self.plan_key, "launches": self.launches, "replays": self.replays, "verdict": self.verdict,
                "variants": dict(self.variants), "findings": to_json(self.findings),
                "summary": count_line(self.findings)}


@dataclass(frozen=True)
class _Case:
    """A bound step to verify and where it starts from."""

    executable: Executable
    start: Any
    capture: Capture
    tolerance: float
    replays: int

    def eager(self, count: int) -> Results:
        self._begin()
        executable = beginning(self.executable, count)
        # launch by launch, so that nothing overlaps: what programmatic edges allow would be allowed here too
        for step in executable.steps:
            step()
            wait_for(executable)
        return results(executable)

    def replayed(self, replay: Replay, count: int) -> Results:
        self._begin()
        replay()
        return results(beginning(self.executable, count))

    def unlike(self, count: int) -> Unlike | None:
        """The first difference of several replays of the first ``count`` launches from the eager step."""
        truth = self.eager(count)
        replay = self.capture(beginning(self.executable, count))
        for _ in range(self.replays):
            found = compare(self.executable.plan, count, truth, self.replayed(replay, count), self.tolerance)
            if found is not None:
                return found
        return None

    def unstable(self, count: int) -> Unlike | None:
        """The first difference between two eager steps."""
        return compare(self.executable.plan, count, self.eager(count), self.eager(count), self.tolerance)

    def _begin(self) -> None:
        wait_for(self.executable)
        restore(self.executable, self.start)
        self.executable.poison()


def verify(executable: Executable, *, replays: int = REPLAYS, tolerance: float = 0.0, reference: bool = True,
           origins: Mapping[str, Origin] | None = None, capture_step: Capture | None = None,
           rebind: Callable[[LaunchPlan], Executable] | None = None) -> Verification:
    """Verifies the replay of a bound step on the inputs that were written last.

    ``tolerance`` is a root-mean-square error relative to the eager values; 0 asks for equal bytes. ``reference`` also
    holds every launch against the meaning of its ops. ``capture_step`` makes a step's replay (a CUDA graph by
    default), ``rebind`` binds a variant of the plan to the same weights, states and caches. States, caches and inputs
    are afterwards what they were before. Raises BindError off a GPU, unless ``capture_step`` is given.
    """
    start = contents(executable, (*KEPT, "index"))
    case = _Case(executable, start, capture_step or _graph, tolerance, replays)
    plan, count = executable.plan, len(executable.plan.launches)
    try:
        found = _reference(executable, case, origins) if reference else []
        unstable = case.unstable(count)
        if unstable is not None:
            at = plan.launches[first_unlike(count, lambda n: case.unstable(n) is not None) - 1]
            text = f"two eager steps differ first at {at.id}: {unstable.text}"
            return _told(case, text, [find("CG-066", text, plan=plan, launch=at, origins=origins), *found])
        if case.unlike(count) is None:
            how = "bit for bit" if tolerance == 0 else f"within {tolerance:g}"
            return _told(case, f"{replays} replays equal the eager step {how}, over {count} launches", found)
        return _diagnosis(case, rebind or _rebind(executable), found, origins)
    finally:
        wait_for(executable)
        restore(executable, start)


def _diagnosis(case: _Case, rebind: Callable[[LaunchPlan], Executable], found: list[Finding],
               origins: Mapping[str, Origin] | None) -> Verification:
    """The first diverging launch, what each variant says, and the verdict."""
    plan = case.executable.plan
    number = first_unlike(len(plan.launches), lambda n: case.unlike(n) is not None) - 1
    at, unlike = plan.launches[number], case.unlike(number + 1)
    how = unlike.text if unlike else "not in every replay"
    tried: dict[str, bool] = {}
    again = _changed(case, rebind, {})
    if all(again.unlike(n) is None for n in (number + 1, len(plan.launches))):
        # what was bound is not what the plan says: no variant of the plan can tell why
        tried[BOUND_AGAIN] = True
    for name, code, words in () if tried else _VARIANTS:
        variant = _variant(case, name, rebind)
        if variant is None:
            continue
        tried[name] = all(variant.unlike(n) is None for n in (number + 1, len(plan.launches)))
        if tried[name]:
            text = words.format(launch=at.id, producer=producer(plan, number))
            return _told(case, text, [find(code, f"{text}; {how}", plan=plan, launch=at, origins=origins), *found],
                         tried)
    text = f"a replay differs from the eager step first at {at.id}"
    code = "CG-020" if unlike and _unwritten(case, number, unlike) else "CG-061"
    return _told(case, text, [find(code, f"{text}: {how}", plan=plan, launch=at, origins=origins), *found], tried)


BOUND_AGAIN = "the same plan, bound again"
_VARIANTS = (
    ("dependent launch off", "CG-063", "only with programmatic launch: {launch} reads before {producer} wrote"),
    ("one stream", "CG-064", "only with several streams: {launch} does not wait for {producer}"),
    ("no padding", "CG-065", "only with padded rows: {launch} reads what they hold"),
)


def _variant(case: _Case, name: str, rebind: Callable[[LaunchPlan], Executable]) -> _Case | None:
    """The case without one thing; None where the step does not have it."""
    executable, plan = case.executable, case.executable.plan
    if name == "no padding":
        full = _without_padding(executable, case)
        return replace(case, start=full) if full is not None else None
    drop: dict[str, Any] = {"dependent": False} if name == "dependent launch off" else {"stream": 0}
    if all(getattr(launch, key) == value for launch in plan.launches for key, value in drop.items()):
        return None
    return _changed(case, rebind, drop)


def _changed(case: _Case, rebind: Callable[[LaunchPlan], Executable], drop: Mapping[str, Any]) -> _Case:
    """The case with the plan bound again, its launches changed."""
    executable, plan = case.executable, case.executable.plan
    other = rebind(replace(plan, launches=tuple(replace(launch, **drop) for launch in plan.launches)))
    restore(executable, case.start)
    for mine, theirs in zip(executable.ranks, other.ranks, strict=True):
        for tensor in plan.inputs:
            theirs.tensors[tensor].copy_(mine.tensors[tensor])
    return replace(case, executable=other, start=contents(other, (*KEPT, "index")))


def _unwritten(case: _Case, number: int, unlike: Unlike) -> bool:
    """Whether a replay of a launch alone, behind the eager ones before it, leaves its output as it was."""
    executable = case.executable
    case._begin()
    for step in beginning(executable, number).steps:
        step()
    replay = case.capture(only(executable, number))
    wait_for(executable)
    tensor = next(r for r in executable.ranks if r.index == unlike.rank).tensors[unlike.tensor]
    # what nobody would write; what the launches before it left there may be another thing each time
    tensor.copy_(torch.randint(0, 256, bytes_of(tensor).shape, dtype=torch.uint8, device=tensor.device).view(
        tensor.dtype).view(tensor.shape))
    before = bytes_of(tensor).clone()
    replay()
    wait_for(executable)
    return torch.equal(bytes_of(tensor), before)


def _without_padding(executable: Executable, case: _Case) -> Any:
    """The start of the case with every padded sequence turned into a live one in a slot of its own; None: no padding.

    A padded sequence becomes a copy of token 0 at the first positions, in a slot and pages that no live one has.
    """
    restore(executable, case.start)
    step, tensors = executable.plan.spec.step, executable.ranks[0].tensors
    rows = tensors["positions"].view(step.sequences, step.query)
    dead = (rows < 0).any(1)
    if not bool(dead.any()):
        return None
    rows = torch.where(dead[:, None], torch.arange(step.query, device=rows.device, dtype=rows.dtype)[None], rows)
    given = {"positions": rows.view(-1), "tokens": tensors["tokens"].clamp(min=0),
             "slots": _filled(tensors["slots"], dead)}
    if "page_table" in tensors:
        table = tensors["page_table"]
        whole = torch.arange(table.numel(), device=table.device, dtype=table.dtype).view(table.shape)
        # live sequences keep their pages; the test inputs of a plan give sequence i the i-th pages
        given["page_table"] = torch.where(dead[:, None], whole, table)
    for rank in executable.ranks:
        for name, tensor in given.items():
            rank.tensors[name].copy_(tensor)
    return contents(executable, (*KEPT, "index"))


def _filled(slots: Tensor, dead: Tensor) -> Tensor:
    """``slots`` with the free ones given to the dead sequences."""
    live = set(slots[~dead].tolist())
    free = [slot for slot in range(len(slots)) if slot not in live]
    filled = slots.clone()
    filled[dead] = torch.tensor(free[: int(dead.sum())], device=slots.device, dtype=slots.dtype)
    return filled


def _graph(executable: Executable) -> Replay:
    return capture(executable, warm_runs=1).replay


def _rebind(executable: Executable) -> Callable[[LaunchPlan], Executable]:
    whole = len(executable.ranks) == executable.plan.spec.parallel.tp

    def again(plan: LaunchPlan) -> Executable:
        # every weight is shared: nothing is read from the source
        return bind(plan, RandomSource({}), device=executable.ranks[0].arena.device, shared=executable,
                    transport="emulated" if whole else "loopback")

    return again


def _reference(executable: Executable, case: _Case, origins: Mapping[str, Origin] | None) -> list[Finding]:
    """Launches whose error against the meaning of their ops rounding does not explain."""
    case._begin()
    found = []
    for one in verify_launches(executable):
        if one.wrong:
            what = f"rms error {one.error:.3g}, the plain chain has {one.chain_error:.3g}" if one.finite \
                else "values that are not finite"
            found.append(find("CG-062", f"{one.kernel}: {one.output}: {what}", plan=executable.plan,
                              launch=one.launch, origins=origins))
    return found


def _told(case: _Case, verdict: str, findings: Sequence[Finding], variants: Mapping[str, bool] | None = None
          ) -> Verification:
    plan = case.executable.plan
    return Verification(plan.key, len(plan.launches), case.replays, verdict, variants or {}, tuple(findings))
