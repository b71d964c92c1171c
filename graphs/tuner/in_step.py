"""``k3plan tune --in-step``: settles what a plan chooses by what its launches take inside the captured step.

A kernel alone is timed in a chain of its like, which leave it another part of the chip than its neighbours in a step:
one with a whole multiprocessor's registers a block cannot start early there, and a chain does not show it. So the
planner begins with the times of kernels alone, the step is captured and timed launch by launch, and what that says
replaces the times alone. The plan may then choose otherwise, which is timed in turn, until a plan has nothing in it
that was not timed in a step. What was never chosen keeps its time alone: it would have to be faster than it is there.

A launch also changes what its neighbours take, by the room that it leaves them. So of two plans the shorter is
believed: what only the longer one chose is charged for what all others took more beside it, and the table gives the
shortest step that was seen.
"""
from __future__ import annotations

import gc
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...compiler.compile import compile_spec, lower
from ...compiler.cost import model_us
from ...compiler.covering.match import find_regions
from ...compiler.covering.order import FREE_OPS
from ...compiler.device import load_device
from ...compiler.kernel import KernelDef, Menu
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
Clock = Callable[[LaunchPlan], tuple[float, Sequence[float]]]  # us of a step, and of each launch in it
_At = tuple[str, str, str]  # kernel, shape and configuration


@dataclass(frozen=True)
class Round:
    """One plan that was timed: ``new`` of its choices had no time in a step before. ``lines`` are times in a step of
    this search: those of the shortest step, and the best of each kernel and shape that it does not have."""

    plan: LaunchPlan
    us: float
    new: int
    lines: tuple[Tuned, ...]

    def line(self) -> str:
        """One line of a report."""
        return (f"{len(self.plan.launches)} launches, {self.us / 1e3:.3f} ms a step (planned "
                f"{self.plan.us / 1e3:.3f}), {self.new} choices timed in a step for the first time")


def settle(spec: Spec, kernels: Sequence[KernelDef], alone: Iterable[Tuned], clock: Clock, source: str,
           rounds: int = ROUNDS) -> Iterator[Round]:
    """Plans and times ``spec`` until nothing is new. ``alone`` are times of kernels alone, of several configurations
    of a shape where there are, the later ones of equal configuration first in rank."""
    times = {_at(line): line for line in alone}
    seen: dict[_At, Tuned] = {}  # in this search
    extra, shortest = load_device(spec.gpu)["launch_in_step_us"], None
    for _ in range(rounds):
        plan = compile_spec(spec, kernels, Tuning(_best(times.values(), extra)))
        us, shares = clock(plan)
        timed = _Timed(us, _by_choice(plan, kernels, shares, source))
        new = sum(at not in times or not times[at].in_step for at in timed.choices)
        shorter, longer = (timed, shortest) if shortest is None or us <= shortest.us else (shortest, timed)
        seen |= {at: line for at, (line, _) in shorter.choices.items()} | (longer.charged(shorter) if longer else {})
        times |= seen
        shortest = shorter
        believed = [line for line, _ in shorter.choices.values()]
        found = {(line.kernel, line.key): line for line in (*_best(seen.values()), *believed)}
        yield Round(plan, us, new, tuple(found.values()))
        if not new and (us <= ALIKE * shortest.us or timed.choices.keys() == shortest.choices.keys()):
            return


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
class _Timed:
    """A step that was timed: its us, and of each choice in it the mean share with the number of its launches."""

    us: float
    choices: Mapping[_At, tuple[Tuned, int]]

    def charged(self, shorter: _Timed) -> dict[_At, Tuned]:
        """What this step chose and ``shorter`` did not, each launch with its part of what all others took more here;
        by these lines and those of ``shorter`` a plan has the price that it had. A launch is charged its own time at
        most."""
        own = {at: found for at, found in self.choices.items() if at not in shorter.choices}
        more = sum((line.us - shorter.choices[at][0].us) * count
                   for at, (line, count) in self.choices.items() if at in shorter.choices)
        each = more / max(1, sum(count for _, count in own.values()))
        return {at: replace(line, us=round(line.us + min(max(each, -line.us / 2), line.us), 3))
                for at, (line, _) in own.items()}


def settle_table(spec: Spec, size: tuple[int, int], kernels: Sequence[KernelDef], alone: Sequence[Tuned],
                 table: Path, say: Callable[[str], None]) -> None:
    """Settles ``spec`` at ``size`` (sequences, verify rows) on this GPU and writes what was seen into ``table``, round
    by round. Starts from the times of kernels ``alone``, and those of ``table``.

    A launch that triggers late takes longer itself and makes those behind it shorter, which no share shows. So where
    late configurations were timed, the step is settled once more with them alone, and the shorter step has the table.
    """
    source, clock, best = source_text(), StepClock(), None
    spec = replace(spec, step=replace(spec.step, sequences=size[0], query=size[1]))
    known = [*alone, *tuned_lines(table.read_text())]
    menus = [(kernels, known)]
    if any(line.config.get("late") for line in known):
        menus.append(([_late_only(kernel) for kernel in kernels], _unsettled_forgotten(known)))
    for menu, lines in menus:
        last = None
        for last in settle(spec, menu, lines, clock, source):
            say(f"{size[0]}x{size[1]}{', late' if best else ''}: {last.line()}")
            if best is None:
                table.write_text(merge_tables(table, lines_text(last.lines, source)))
        if best is not None and last is not None and last.us < best.us:
            table.write_text(merge_tables(table, lines_text(last.lines, source)))
        best = last


def _late_only(kernel: KernelDef) -> KernelDef:
    """``kernel`` in its late configurations, if it has any."""
    configs = kernel.configs
    return kernel if configs is None else replace(
        kernel, configs=lambda region: [c for c in configs(region) if kernel.late(c)] or configs(region))


def _unsettled_forgotten(lines: Sequence[Tuned]) -> list[Tuned]:
    """``lines`` without times in a step of kernels that read settled blocks, where there are times alone: in that step
    nothing was settled."""
    reads = {(line.kernel, line.key) for line in lines if line.config.get("settled") and not line.in_step}
    return [line for line in lines if not line.in_step or (line.kernel, line.key) not in reads]


def _by_choice(plan: LaunchPlan, kernels: Sequence[KernelDef], shares: Sequence[float], source: str,
               ) -> dict[_At, tuple[Tuned, int]]:
    """Kernel, shape and configuration -> its line, with the mean share of its launches, and how many there are."""
    device, graph = load_device(plan.spec.gpu), lower(plan.spec)[0]
    regions, _ = find_regions(graph, Menu([*op_kernels(), *kernels]), arch=device.arch, rows=plan.spec.step.rows)
    found = {(r.kernel.id, frozenset(n.name for n in r.nodes if n.op not in FREE_OPS)): r for r in regions}
    of: dict[_At, list[float]] = defaultdict(list)
    lines: dict[_At, Tuned] = {}
    for launch, share in zip(plan.launches, shares, strict=True):
        choice = plan.choice(launch)
        region = found[choice.kernel, frozenset(launch.nodes)]
        line = Tuned(choice.kernel, shape_key(region), dict(choice.config), 0.0, source,
                     round(model_us(device, region, 1), 3), in_step=True)
        lines[_at(line)] = line
        of[_at(line)].append(share)
    return {at: (replace(lines[at], us=round(statistics.fmean(all_), 3)), len(all_)) for at, all_ in of.items()}


class StepClock:
    """Times plans of one model on this GPU over ``loopback``, with random weights that they share."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._first: Executable | None = None

    def __call__(self, plan: LaunchPlan) -> tuple[float, Sequence[float]]:
        """Us of a replay of ``plan`` and of each of its launches. Raises what binding and capturing raise."""
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
        us = step.queued_us()
        return us, [launch.us or 0.0 for launch in time_launches(step, record).launches]

    def _bind(self, plan: LaunchPlan) -> Executable:
        return bind(plan, RankRandom(self.seed), device="cuda", transport="loopback", shared=self._first)
