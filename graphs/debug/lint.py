"""What would go wrong in a capture, found without capturing: two eager steps, the second held against the first.

A graph repeats the very launches of one step. So two steps with other inputs must make the same calls with the same
numbers, addresses and shapes, compile nothing the second time, wait for nothing and allocate nothing. ``lint_plan``
asks the same of a plan alone. Fixes nothing.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from ...compiler.device import load_device
from ...compiler.errors import Origin
from ...compiler.plan import Launch, LaunchPlan
from ..bind import Executable
from .findings import Finding, find
from .storage import kept_contents
from .trace import Event, Trace, trace_step

Origins = Mapping[str, Origin]
VIEWS = ("slice", "narrow", "select", "view", "as_strided", "expand", "reshape", "_unsafe_view", "split")
CODE_OF = {"wait": "CG-001", "compile": "CG-006", "tune": "CG-007", "load": "CG-008", "allocate": "CG-009"}


def lint(executable: Executable, *, change: Callable[[], None] | None = None,
         origins: Origins | None = None) -> list[Finding]:
    """Findings of two eager steps of a bound plan and of the plan itself.

    ``change`` is called between the two steps and stands for what the engine does there: writing the next inputs.
    States and caches are as before when it returns. On a CPU, waits are told that would be waits on a GPU.
    """
    plan, device = executable.plan, executable.ranks[0].arena.device
    with kept_contents(executable):
        first, second = _two_steps(executable, change, device)
    found = [*_effects(executable, second, origins), *_differences(plan, first, second, origins)]
    return [*found, *lint_plan(plan, origins=origins)]


def _two_steps(executable: Executable, change: Callable[[], None] | None, device: torch.device) -> tuple[Trace, Trace]:
    if device.type != "cuda":
        first = trace_step(executable)
        if change is not None:
            change()
        return first, trace_step(executable)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        executable.run()  # compiles, loads, and fills the allocator
        first = trace_step(executable)
        if change is not None:
            change()
        second = trace_step(executable)
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    return first, second


def _effects(executable: Executable, trace: Trace, origins: Origins | None) -> Iterator[Finding]:
    """What the second step did that a captured one must not."""
    plan, on_gpu = executable.plan, executable.ranks[0].arena.device.type == "cuda"
    own = next((e.stream for e in trace.events if e.kind in ("kernel", "op") and e.stream), None)
    seen: set[tuple[int, str, str]] = set()
    for event in trace.events:
        launch = plan.launches[event.launch]
        code = CODE_OF.get(event.kind, "")
        if event.kind in ("kernel", "op") and event.stream == 0 and own:
            code = "CG-002"
        if not code or (event.launch, code, event.where) in seen:
            continue
        seen.add((event.launch, code, event.where))
        torch_op = plan.choice(launch).entry.startswith("op:")
        mild = (event.kind == "wait" and not on_gpu) or (event.kind == "allocate" and torch_op)
        yield find(code, _say(event, on_gpu), plan=plan, launch=launch, origins=origins,
                   call=event.where,
                   severity="warning" if mild else "")


def _say(event: Event, on_gpu: bool) -> str:
    thread = f" (thread {event.thread})" if event.thread else ""
    return {
        "wait": f"{event.name}{'' if on_gpu else ': on a GPU the host waits here'}{thread}",
        "compile": f"{event.name} is compiled in the second step",
        "tune": f"{event.name} is tuned in the second step: {dict(event.numbers).get('config', '')}",
        "load": f"{event.name} is loaded in the second step",
        "allocate": f"{event.name} on the device in the second step",
    }.get(event.kind, f"{event.name} is launched on the default stream")


def _differences(plan: LaunchPlan, first: Trace, second: Trace, origins: Origins | None) -> Iterator[Finding]:
    """Calls of the two steps side by side, launch by launch; what a launch that waits does with the value it waited
    for follows from that, and is told by the wait."""
    waiting = {e.launch for e in second.events if e.kind == "wait"}
    for number, launch in enumerate(plan.launches):
        if number in waiting:
            continue
        before, after = ([e for e in t.events if e.launch == number and e.kind in ("kernel", "op", "view")]
                         for t in (first, second))
        tell = partial(find, plan=plan, launch=launch, origins=origins)
        if [e.name for e in before] != [e.name for e in after]:
            yield tell("CG-037", f"{len(before)} calls in one step and {len(after)} or others in the next")
            continue
        told: set[str] = set()
        for a, b in zip(before, after, strict=True):
            for code, text in _unlike(a, b):
                if code not in told:
                    told.add(code)
                    yield tell(code, text, call=b.where)


def _unlike(a: Event, b: Event) -> Iterator[tuple[str, str]]:
    """How one call differs from step to step: code and text."""
    shapes = [(x, y) for x, y in zip(a.operands, b.operands, strict=False) if x.shape != y.shape]
    sizes = [(x[1], y[1]) for x, y in zip(a.numbers, b.numbers, strict=False) if x != y]
    if shapes or (sizes and a.name in VIEWS):
        was, now = ((shapes[0][0].shape, shapes[0][1].shape) if shapes else sizes[0])
        yield "CG-036", f"{a.name} takes {was} in one step and {now} in the next: a size of the moment is frozen"
        return
    for (name, was), (_, now) in zip(a.numbers, b.numbers, strict=False):
        if was != now:
            kind = "CG-035" if isinstance(now, float) else "CG-033"
            yield kind, f"{b.name}: argument {name} is {was} in one step and {now} in the next"
    for x, y in zip(a.operands, b.operands, strict=False):
        if x.address != y.address and not x.inside and not y.inside:
            yield "CG-034", f"{b.name}: argument {y.name} is at {x.address:#x} in one step and at {y.address:#x} next"


def lint_plan(plan: LaunchPlan, *, origins: Origins | None = None) -> list[Finding]:
    """What a plan alone tells: splits that do not fit its context, rows that fill no bucket, numbers baked in."""
    return [*_splits(plan, origins), *check_rows(plan, [plan.spec.step.query] * plan.spec.step.sequences, origins),
            *_baked(plan, origins)]


def _splits(plan: LaunchPlan, origins: Origins | None) -> Iterator[Finding]:
    """Attention over pages whose blocks walk several tiles one after the other while the GPU is half idle."""
    step, (sms, _) = plan.spec.step, load_device(plan.spec.gpu).figures.get("sms", (0, ""))
    for launch in plan.launches:
        config = plan.choice(launch).config
        if not {"splits", "block"} <= set(config) or "page_table" not in launch.inputs:
            continue
        splits, tiles = int(config["splits"]), -(-step.context // int(config["block"]))
        walk = -(-tiles // splits)
        best = -(-tiles // max(1, min(tiles, int(sms) // step.sequences)))
        if walk >= 2 * best:
            yield find("CG-031", f"{splits} splits of {step.context} tokens: a block walks {walk} tiles where {best} "
                       f"would do on {int(sms)} SMs", plan=plan, launch=launch, origins=origins, field="step.context")


def _baked(plan: LaunchPlan, origins: Origins | None) -> Iterator[Finding]:
    """One note for each kernel and its numbers."""
    seen: set[str] = set()
    for launch in plan.launches:
        choice = plan.choice(launch)
        attrs = {f"{line}.{k}": v for line, own in choice.attrs.items() for k, v in own.items()}
        numbers = {k: v for k, v in {**attrs, **choice.config}.items()
                   if isinstance(v, (int, float)) and not isinstance(v, bool)}
        text = f"{choice.kernel}: {', '.join(f'{k}={v}' for k, v in numbers.items())} are fixed for every replay"
        if numbers and text not in seen:
            seen.add(text)
            yield find("CG-032", text, plan=plan, launch=launch, origins=origins, field="numerics")


def check_rows(plan: LaunchPlan, rows: Sequence[int], origins: Origins | None = None) -> list[Finding]:
    """Whether a step of ``rows`` (rows of each sequence) fits the plan and its buckets without padding, or with it."""
    step, buckets = plan.spec.step, plan.spec.buckets
    tell = partial(find, plan=plan, origins=origins, field="step.sequences")
    if len(rows) > step.sequences or max(rows, default=0) > step.query:
        return [tell("CG-046", f"{len(rows)} sequences of up to {max(rows, default=0)} rows, the plan has "
                     f"{step.sequences} of {step.query}")]
    if len(set(rows)) > 1:
        return [tell("CG-046", f"ragged rows {_runs(rows)} in a step of {step.query} each: "
                     f"{len(rows) * step.query - sum(rows)} rows must be padded", severity="warning")]
    if buckets and len(rows) > max(buckets):
        return [tell("CG-046", f"{len(rows)} sequences, the largest bucket has {max(buckets)}")]
    return []


def _runs(rows: Sequence[int]) -> str:
    kinds = dict.fromkeys(rows)
    return " + ".join(f"{rows.count(n)} x {n}" for n in kinds)


def check_inputs(plan: LaunchPlan, inputs: Mapping[str, Tensor], origins: Origins | None = None) -> list[Finding]:
    """Step inputs that no step can have: verify rows before the start of a sequence, rows that are half padding."""
    step, positions = plan.spec.step, inputs["positions"].view(plan.spec.step.sequences, plan.spec.step.query)
    found = []
    for sequence, row in enumerate(positions.tolist()):
        live = [p for p in row if p >= 0]
        if live and row[0] < 0:
            found.append(find("CG-047", f"sequence {sequence} ends at position {live[-1]}, shorter than its "
                              f"{step.query} verify rows", plan=plan, origins=origins, field="step.query"))
        elif live and live != [*range(live[0], live[0] + len(live))]:
            found.append(find("CG-047", f"sequence {sequence} has positions {row}, which do not follow each other",
                              plan=plan, origins=origins, field="step.query"))
    return found


def check_shared_workspace(executables: Iterable[Executable]) -> list[Finding]:
    """Workspace that kernels keep between launches (mailboxes, epochs) and that two bound plans both use."""
    owner: dict[int, tuple[Executable, Launch, str]] = {}
    found = []
    for executable in executables:
        plan = executable.plan
        for launch in plan.launches:
            for name, tensor in launch.scratch.items():
                if plan.buffers[plan.tensors[tensor].buffer].kind != "zeroed":
                    continue
                address = executable.ranks[0].tensors[tensor].data_ptr()
                other, theirs, what = owner.setdefault(address, (executable, launch, name))
                shapes = [e.ranks[0].tensors[x.scratch[n]].shape for e, x, n in
                          ((other, theirs, what), (executable, launch, name))]
                if other is not executable and (shapes[0] != shapes[1] or name != what):
                    found.append(find("CG-016", f"{name} {tuple(shapes[1])} of this plan is {what} {tuple(shapes[0])} "
                                      f"of {theirs.id} in plan {other.plan.key}", plan=plan, launch=launch))
    return found
