"""``k3plan tune --in-step``: settles what a plan chooses by what its launches take inside the captured step.

A kernel alone is timed in a chain of its like, which leave it another part of the chip than its neighbours in a step:
one with a whole multiprocessor's registers a block cannot start early there, and a chain does not show it. So the
planner begins with the times of kernels alone, the step is captured and timed launch by launch, and what that says
replaces the times alone. The plan may then choose otherwise, which is timed in turn, until a plan has nothing in it
that was not timed in a step. What was never chosen keeps its time alone: it would have to be faster than it is there.

A launch also changes what its neighbours take, by the room that it leaves them. So of two plans the shorter is
believed: what only the longer one chose is charged for what all others took more beside it, and the table gives the
shortest step that was seen. What shares do not show either, exchanges do: in the shortest plan one configuration of a
kernel is replaced by another, whatever that takes alone, at all shapes that have it, or the kernel is left out, and the
whole step says whether that stays. At last two are exchanged together, of those that alone made the step a little
longer: room that one gives may be worth something to the other only.
"""
from __future__ import annotations

import gc
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, zip_longest
from pathlib import Path
from typing import Any

import torch

from ...compiler.compile import compile_spec, lower
from ...compiler.cost import model_us
from ...compiler.covering.match import find_regions
from ...compiler.device import load_device
from ...compiler.kernel import KernelDef, Menu, Region
from ...compiler.menu import op_kernels
from ...compiler.plan import LaunchPlan
from ...compiler.spec import Spec
from ...compiler.tuning import Tuned, Tuning, shape_key
from ..bench_step import live_inputs
from ..bind import Executable, bind
from ..debug.time import time_launches
from ..debug.walk import record_capture
from ..random_weights import RankRandom
from .alone import lines_text, merge_tables, source_text, tuned_lines

ROUNDS = 12  # the table has the shortest step whenever it ends
ALIKE = 1.003  # times of one step from capture to capture
WORTH = 0.01  # of the step, what an exchange is tried for
NEAR = 1.05  # of the step, with what exchange another is tried
# us of a step, and what then finds those of each launch in it
Clock = Callable[[LaunchPlan], tuple[float, Callable[[], Sequence[float]]]]
_At = tuple[str, str, str]  # kernel, shape and configuration


@dataclass(frozen=True)
class Round:
    """One plan that was timed: ``new`` of its choices had no time in a step before. ``lines`` are times in a step of
    this search: those of the shortest step, and the best of each kernel and shape that it does not have. ``tried``
    names the configuration of an exchange."""

    plan: LaunchPlan
    us: float
    new: int
    lines: tuple[Tuned, ...]
    tried: str = ""

    def line(self) -> str:
        """One line of a report."""
        return (f"{len(self.plan.launches)} launches, {self.us / 1e3:.3f} ms a step (planned "
                f"{self.plan.us / 1e3:.3f}), {self.tried or f'{self.new} choices timed in a step for the first time'}")


def settle(spec: Spec, kernels: Sequence[KernelDef], alone: Iterable[Tuned], clock: Clock, source: str,
           rounds: int = ROUNDS, exchanges: int = 0) -> Iterator[Round]:
    """Plans and times ``spec`` until nothing is new, then tries up to ``exchanges`` other configurations. ``alone`` are
    times of kernels alone, of several configurations of a shape where there are, the later ones of equal configuration
    first in rank."""
    search = _Search(spec, kernels, alone, clock, source)
    yield from search.settle(rounds)
    while exchanges and (other := search.next_exchange()):
        exchanges, before = exchanges - 1, search.us
        yield search.exchange(other)
        if search.us < before:
            yield from search.settle(rounds)


class _Search:
    """What is known of the launches of a step while it is settled."""

    def __init__(self, spec: Spec, kernels: Sequence[KernelDef], alone: Iterable[Tuned], clock: Clock, source: str,
                 ) -> None:
        self._spec, self._kernels, self._clock, self._source = spec, kernels, clock, source
        self._times = {_at(line): line for line in alone}
        self._seen: dict[_At, Tuned] = {}  # in this search
        self._shortest: _Timed | None = None
        self._tried: set[str] = set()
        self._near: list[_Exchange] = []

    @property
    def us(self) -> float:
        """Of the shortest step."""
        return self._shortest.us if self._shortest else math.inf

    def settle(self, rounds: int) -> Iterator[Round]:
        for _ in range(rounds):
            plan = compile_spec(self._spec, self._kernels, Tuning(self._lines()))
            us, shares = self._clock(plan)
            found, timed = self._take(plan, us, shares())
            yield found
            if not found.new and (us <= ALIKE * self.us or timed.choices.keys() == self._chosen().keys()):
                return

    def next_exchange(self) -> _Exchange | None:
        """The first that was not tried: each kernel and configuration of the shortest plan left out, those first that
        take the longest, then the first other configuration of each, then the second. A kernel's own are in the order
        of what they have in common with what it has. Then pairs, those that replace most of the step first."""
        groups: dict[tuple[str, str], list[_Choice]] = defaultdict(list)
        for (kernel, _, config), choice in self._chosen().items():
            groups[kernel, config].append(choice)
        costs = {at: sum(choice.line.us * choice.count for choice in group) for at, group in groups.items()}
        own = []
        for at in sorted((at for at in groups if costs[at] > WORTH * self.us), key=lambda at: -costs[at]):
            now, (has, *more) = groups[at][0].line.config, [choice.configs for choice in groups[at]]
            others = [config for config in has if config != now and all(config in some for some in more)]
            others.sort(key=lambda config: -len(config.items() & now.items()))
            lines = [choice.line for choice in groups[at]]
            own.append([_Exchange(((lines, config),)) for config in (None, *others)])
        untried = (other for turn in zip_longest(*own) for other in turn if other and other.name not in self._tried)
        return next(untried, None) or self._next_pair()

    def _next_pair(self) -> _Exchange | None:
        chosen = self._chosen()
        near = [other for other in self._near if all(map(chosen.__contains__, other.replaced))]
        pairs = (_Exchange(a.changes + b.changes) for a, b in combinations(near, 2) if a.replaced != b.replaced)
        return max((pair for pair in pairs if pair.name not in self._tried), default=None,
                   key=lambda pair: sum(chosen[at].line.us * chosen[at].count for at in pair.replaced))

    def exchange(self, other: _Exchange) -> Round:
        """The shortest plan with ``other``, which is taken when the step is shorter."""
        self._tried.add(other.name)
        left_out = [lines[0].kernel for lines, config in other.changes if config is None]
        kernels = [kernel for kernel in self._kernels if kernel.id not in left_out]
        plan, before = compile_spec(self._spec, kernels, Tuning(other.of(self._lines()))), self.us
        us, shares = self._clock(plan)
        if ALIKE * us < before:
            taken, _ = self._take(plan, us, shares())
            return replace(taken, tried=f"shorter by {before - us:.0f} us with {other.name}")
        if len(other.changes) == 1 and us < NEAR * before:
            self._near.append(other)
        return Round(plan, us, 0, self._found(), f"not shorter with {other.name}")

    def _take(self, plan: LaunchPlan, us: float, shares: Sequence[float]) -> tuple[Round, _Timed]:
        timed = _Timed(us, _by_choice(plan, self._kernels, shares, self._source))
        new = sum(at not in self._times or not self._times[at].in_step for at in timed.choices)
        shorter, longer = (timed, self._shortest) if us <= self.us else (self._shortest, timed)
        assert shorter is not None
        self._seen |= {at: choice.line for at, choice in shorter.choices.items()}
        self._seen |= longer.charged(shorter) if longer else {}
        self._times |= self._seen
        self._shortest = shorter
        return Round(plan, us, new, self._found()), timed

    def _lines(self) -> list[Tuned]:
        return _best(self._times.values(), load_device(self._spec.gpu)["launch_in_step_us"])

    def _found(self) -> tuple[Tuned, ...]:
        believed = [choice.line for choice in self._chosen().values()]
        return tuple({(line.kernel, line.key): line for line in (*_best(self._seen.values()), *believed)}.values())

    def _chosen(self) -> Mapping[_At, _Choice]:
        return self._shortest.choices if self._shortest else {}


def _best(lines: Iterable[Tuned], extra: float = 0.0) -> list[Tuned]:
    """The shortest line of each kernel and shape; times alone take ``extra`` us more in a step."""
    found: dict[tuple[str, str], tuple[float, Tuned]] = {}
    for line in lines:
        us, at = line.us + (0.0 if line.in_step else extra), (line.kernel, line.key)
        if at not in found or us < found[at][0]:
            found[at] = us, line
    return [line for _, line in found.values()]


def _at(line: Tuned) -> _At:
    return line.kernel, line.key, repr(sorted(line.config.items()))


@dataclass(frozen=True)
class _Exchange:
    """For each of some kernels another configuration for all of its lines; None leaves the kernel out."""

    changes: tuple[tuple[Sequence[Tuned], Mapping[str, Any] | None], ...]

    @property
    def replaced(self) -> list[_At]:
        return [_at(line) for lines, _ in self.changes for line in lines]

    @property
    def name(self) -> str:
        return " and ".join(
            f"nothing for {lines[0].kernel}" if config is None else
            f"{dict(config)} for {lines[0].kernel} {dict(lines[0].config)}" for lines, config in self.changes)

    def of(self, lines: Iterable[Tuned]) -> list[Tuned]:
        """``lines`` with it."""
        new = {(line.kernel, line.key): replace(line, config=config)
               for own, config in self.changes if config is not None for line in own}
        return [new.get((line.kernel, line.key), line) for line in lines]


@dataclass(frozen=True)
class _Choice:
    """A kernel at a shape in a configuration: its mean share, of how many launches, and all configurations it has."""

    line: Tuned
    count: int
    configs: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class _Timed:
    """A step that was timed: its us, and what it chose."""

    us: float
    choices: Mapping[_At, _Choice]

    def charged(self, shorter: _Timed) -> dict[_At, Tuned]:
        """What this step chose and ``shorter`` did not, each launch with its part of what all others took more here;
        by these lines and those of ``shorter`` a plan has the price that it had. A launch is charged its own time at
        most."""
        own = {at: choice for at, choice in self.choices.items() if at not in shorter.choices}
        more = sum((choice.line.us - shorter.choices[at].line.us) * choice.count
                   for at, choice in self.choices.items() if at in shorter.choices)
        each = more / max(1, sum(choice.count for choice in own.values()))
        return {at: replace(choice.line, us=round(choice.line.us + min(max(each, -choice.line.us / 2), choice.line.us),
                                                  3)) for at, choice in own.items()}


def settle_table(spec: Spec, size: tuple[int, int], kernels: Sequence[KernelDef], alone: Sequence[Tuned],
                 table: Path, say: Callable[[str], None], exchanges: int = 0) -> None:
    """Settles ``spec`` at ``size`` (sequences, verify rows) on this GPU and writes what was seen into ``table``, round
    by round. Starts from the times of kernels ``alone``, and those of ``table``."""
    source = source_text()
    spec = replace(spec, step=replace(spec.step, sequences=size[0], query=size[1]))
    known = [*alone, *tuned_lines(table.read_text())]
    for found in settle(spec, kernels, known, StepClock(), source, exchanges=exchanges):
        say(f"{size[0]}x{size[1]}: {found.line()}")
        table.write_text(merge_tables(table, lines_text(found.lines, source)))


def _by_choice(plan: LaunchPlan, kernels: Sequence[KernelDef], shares: Sequence[float], source: str,
               ) -> dict[_At, _Choice]:
    """What ``plan`` chose, of which each launch had one of ``shares``."""
    device, graph = load_device(plan.spec.gpu), lower(plan.spec)[0]
    regions, _ = find_regions(graph, Menu([*op_kernels(), *kernels]), arch=device.arch, rows=plan.spec.step.rows)
    found = {(r.kernel.id, frozenset(n.name for n in r.solid)): r for r in regions}
    taken: dict[_At, tuple[Tuned, Region]] = {}
    of: dict[_At, list[float]] = defaultdict(list)
    for launch, share in zip(plan.launches, shares, strict=True):
        choice = plan.choice(launch)
        region = found[choice.kernel, frozenset(launch.nodes)]
        line = Tuned(choice.kernel, shape_key(region), dict(choice.config), 0.0, source,
                     round(model_us(device, region, 1), 3), in_step=True)
        taken[_at(line)] = line, region
        of[_at(line)].append(share)
    return {at: _Choice(replace(line, us=round(statistics.fmean(of[at]), 3)), len(of[at]),
                        region.kernel.configs(region) if region.kernel.configs else ())
            for at, (line, region) in taken.items()}


class StepClock:
    """Times plans of one model on this GPU over ``loopback``, with random weights that they share."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._first: Executable | None = None

    def __call__(self, plan: LaunchPlan) -> tuple[float, Callable[[], Sequence[float]]]:
        """Us of a replay of ``plan``, and what then finds those of each of its launches. Raises what binding and
        capturing raise."""
        try:
            executable = self._bind(plan)
        except torch.cuda.OutOfMemoryError:  # packed otherwise, weights are there twice
            self._first = None
            gc.collect()
            torch.cuda.empty_cache()
            executable = self._bind(plan)
        self._first = self._first or executable
        executable.write(**live_inputs(plan, self.seed))
        step, record = record_capture(executable)
        return step.queued_us(), lambda: [launch.us or 0.0 for launch in time_launches(step, record).launches]

    def _bind(self, plan: LaunchPlan) -> Executable:
        return bind(plan, RankRandom(self.seed), device="cuda", transport="loopback", shared=self._first)
