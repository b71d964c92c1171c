"""Whether padded rows have a side effect, and whether they are what padding is: zero rows, token -1, ids in range.

Runs eager steps on the inputs that were written last, over arenas filled with different garbage. What a live row
computes must not depend on the garbage, and nothing that no live sequence owns may change. Restores everything.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...compiler.errors import Origin
from ...compiler.plan import LaunchPlan
from ..bind import Executable
from .compare import bytes_of, wait_for
from .findings import Finding, find
from .storage import KEPT, Contents, changed_places, contents, restore

Outputs = list[dict[str, Tensor]]  # of each launch: its outputs of the first rank right after it ran
INFINITY = 0x7F80  # of bf16; two of them are an fp32 NaN
FLOATS = {"NaN": float("nan"), "Inf": float("inf"), "zeros": 0.0}
INTEGERS = {"NaN": -1, "Inf": 2**31 - 1, "zeros": 0}


def check_padding(executable: Executable, origins: Mapping[str, Origin] | None = None) -> list[Finding]:
    """Findings about the padded rows of a bound step, "CG-041" to "CG-044"; no launch is named twice for one code."""
    start = contents(executable, (*KEPT, "index"))
    tell = partial(find, plan=executable.plan, origins=origins)
    try:
        runs = []
        for garbage in FLOATS:
            restore(executable, start)
            _fill(executable, garbage)
            runs.append(_outputs(executable, garbage))
        live = live_rows(executable)
        found = [*_side_effects(executable, start, live, tell), *_garbage(executable.plan, runs, live, tell),
                 *_dead_rows(executable.plan, runs[0], live, tell), *_ranges(executable.plan, runs, live, tell)]
        return list({(f.code, f.launch): f for f in reversed(found)}.values())[::-1]
    finally:
        wait_for(executable)
        restore(executable, start)


def live_rows(executable: Executable) -> Tensor:
    """bool [T] on the host: rows that are not padding."""
    return executable.ranks[0].tensors["positions"].cpu() >= 0


def _fill(executable: Executable, garbage: str) -> None:
    """Fills arena and outputs; -1 in integers for NaN, a large number for Inf."""
    executable.poison()
    for rank in executable.ranks:
        halves = rank.arena[: len(rank.arena) // 2 * 2].view(torch.int16)
        halves.fill_({"NaN": -1, "Inf": INFINITY, "zeros": 0}[garbage])


def _outputs(executable: Executable, garbage: str) -> Outputs:
    """One eager step, the outputs of each launch filled before it runs; what it wrote by rows, on the host."""
    plan, found = executable.plan, []
    for number, launch in enumerate(plan.launches):
        read = {plan.tensors[name].buffer for name in launch.inputs}
        own = [n for n in launch.outputs if plan.buffers[plan.tensors[n].buffer].kind in ("arena", "output")
               and plan.tensors[n].buffer not in read]
        for rank in executable.ranks:
            for name in own:
                tensor = rank.tensors[name]
                values = FLOATS if tensor.is_floating_point() else INTEGERS
                tensor.fill_(values[garbage])
        for step in executable.steps_of(number):
            step()
        rows = [n for n in own if plan.tensors[n].shape[0] == plan.spec.step.rows]
        found.append({n: executable.ranks[0].tensors[n].to("cpu", copy=True) for n in rows})
    return found


def _side_effects(executable: Executable, start: Contents, live: Tensor, tell: Any) -> Iterator[Finding]:
    """States and caches of sequences that do not live, after a step."""
    plan, tensors = executable.plan, executable.ranks[0].tensors
    step = plan.spec.step
    sequences = live.view(step.sequences, step.query).any(1)
    slots = set(tensors["slots"].cpu()[sequences].tolist())
    pages = set(tensors["page_table"].cpu()[sequences].flatten().tolist()) if "page_table" in tensors else set()
    kept = Contents({key: t for key, t in start.of.items() if plan.buffers[key[1]].kind in KEPT})
    for (rank, name), places in changed_places(executable, kept).items():
        state = plan.buffers[name].kind == "state"
        wrong = [place for place in places if place not in (slots if state else pages)]
        if wrong:
            yield tell("CG-041", f"{'slots' if state else 'pages'} {wrong[:8]} of {name} of rank {rank} changed, no "
                       f"live sequence has them", launch=_writer(plan, name))


def _writer(plan: LaunchPlan, buffer: str) -> str:
    touching = [x for x in plan.launches if any(plan.tensors[t].buffer == buffer for t in (*x.outputs, *x.inputs))]
    return touching[0].id


def _garbage(plan: LaunchPlan, runs: list[Outputs], live: Tensor, tell: Any) -> Iterator[Finding]:
    """The first launch whose live rows depend on what the arena held before the step."""
    for number, launch in enumerate(plan.launches):
        for name, first in runs[0][number].items():
            for other, what in zip(runs[1:], ("Inf", "zeros"), strict=True):
                if not torch.equal(bytes_of(first[live]), bytes_of(other[number][name][live])):
                    yield tell("CG-043", f"{name}: live rows differ between an arena of NaN and one of {what}",
                               launch=launch)
                    return


def _dead_rows(plan: LaunchPlan, run: Outputs, live: Tensor, tell: Any) -> Iterator[Finding]:
    """Padded rows that are left as they were, and padded rows of step outputs that are not zero (tokens: -1)."""
    for launch, outputs in zip(plan.launches, run, strict=True):
        for name, tensor in outputs.items():
            dead = tensor[~live].flatten(1) if tensor.dim() > 1 else tensor[~live][:, None]
            if not len(dead):
                continue
            rows = torch.nonzero(~live).flatten()
            if dead.is_floating_point() and not bool(torch.isfinite(dead.float()).all()):
                wrong = rows[~torch.isfinite(dead.float()).all(1)].tolist()
                yield tell("CG-042", f"{name}: padded rows {wrong[:8]} hold what the arena held", launch=launch)
            elif name in plan.outputs.values():
                empty = -1 if tensor.dtype == torch.int32 else 0
                wrong = rows[dead.ne(empty).any(1)].tolist()
                if wrong:
                    yield tell("CG-042", f"{name}: padded rows {wrong[:8]} are not {empty}", launch=launch)


def _ranges(plan: LaunchPlan, runs: list[Outputs], live: Tensor, tell: Any) -> Iterator[Finding]:
    """Expert and token ids out of range, in any of the runs."""
    limits = _limits(plan)
    for number, launch in enumerate(plan.launches):
        for name, tensor in ((n, run[number][n]) for run in runs for n in run[number] if n in limits):
            lowest = torch.where(live, 0, -1).view(-1, *[1] * (tensor.dim() - 1))
            wrong = (tensor < lowest) | (tensor >= limits[name])
            if bool(wrong.any()):
                row = int(torch.nonzero(wrong)[0, 0])
                kind = "live" if live[row] else "padded"
                yield tell("CG-044", f"{name}: row {row} ({kind}) has {tensor[row].tolist()}, ids end at "
                           f"{limits[name] - 1}", launch=launch)


def _limits(plan: LaunchPlan) -> dict[str, int]:
    """Tensors of ids and how many there are: tokens of the vocabulary, experts."""
    found = {name: plan.spec.model.vocab for kind, name in plan.outputs.items() if kind == "tokens"}
    for launch in plan.launches:
        experts = [int(a["experts"]) for a in plan.choice(launch).attrs.values() if "experts" in a]
        if experts:
            found |= {n: experts[0] for n in launch.inputs if plan.tensors[n].dtype == "i32" and n not in plan.inputs}
    return found
