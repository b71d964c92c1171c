"""A plan in words: the summary that ``compile`` prints, and the reasons of one launch."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from .device import Device, load_device
from .errors import PlanError
from .ir import DTYPE_BYTES
from .plan import Launch, LaunchPlan, PlanChoice

Row = Sequence[str]


def table(head: Row, rows: Iterable[Row], left: int = 2) -> str:
    """Aligned columns; the first ``left`` to the left, the others to the right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]

    def show(line: Row) -> str:
        cells = (c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        return "  " + "  ".join(cells).rstrip()

    return "\n".join(map(show, lines))


def size(count: float) -> str:
    """Bytes in powers of 1000, as bandwidths are."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def plural(count: int, word: str) -> str:
    """``1 launch``, ``2 launches``."""
    return f"{count} {word}{'' if count == 1 else 'es' if word.endswith('ch') else 's'}"


def settings(config: Mapping[str, Any]) -> str:
    """A configuration in words: ``rows 4, block 1024, warps 8``; a switch is its name, or ``not`` and its name."""
    words = [f"{name} {value}" if not isinstance(value, bool) else name if value else f"not {name}"
             for name, value in config.items()]
    return ", ".join(words)


def floor_us(choice: PlanChoice, device: Device) -> float:
    """Time of the launch's bytes at the device's bandwidth, or of its flops; nothing else."""
    return max(choice.bytes / device["bandwidth_gbs"] / 1e3, choice.flops / device["matrix_tflops"] / 1e6)


def summarise(plan: LaunchPlan) -> str:
    """What the plan is, what it costs, and the launches of one layer of each kind."""
    spec, device = plan.spec, load_device(plan.spec.gpu)
    weights = sum(b.bytes for b in plan.buffers.values() if b.kind == "weight")
    kept = sum(b.bytes for b in plan.buffers.values() if b.kind in ("state", "cache"))
    moved = sum(plan.choice(launch).bytes for launch in plan.launches)
    floor = sum(floor_us(plan.choice(launch), device) for launch in plan.launches)
    measured = sum(plan.choice(launch).us - launch.hidden_us for launch in plan.launches
                   if plan.choice(launch).measured)
    beside = sum(launch.stream != 0 for launch in plan.launches)
    lines = [
        f"plan {plan.key}: {spec.model.family}, {plural(len(spec.layers), 'layer')}, {spec.step.sequences} x "
        f"{spec.step.query} rows, context {spec.step.context}, {spec.gpu} tp{spec.parallel.tp}, "
        f"experts {spec.parallel.experts}, profile {spec.profile}",
        f"a rank holds {size(weights)} of weights, {size(kept)} of caches and states, "
        f"an arena of {size(plan.arena_bytes)}",
        f"a step is {len(plan.launches)} launches{f', {beside} of them beside others,' if beside else ''} and moves "
        f"{size(moved)}: floor {floor / 1e3:.3f} ms, "
        f"predicted {plan.us / 1e3:.3f} ms (measured launches: {100 * measured / plan.us:.0f} % of it)",
    ]
    lines += _rollback(plan)
    if plan.alternatives:
        lines += ["", "algebra (predicted ms a step)", _alternatives(plan)]
    for title, launches in kinds(plan):
        if not launches:
            continue
        us = sum(plan.choice(launch).us for launch in launches)
        lines += ["", f"{title}: {plural(len(launches), 'launch')}, {us:.1f} us", launch_table(plan, launches)]
    lines += ["", "fused", *(_fused(plan) or ["  nothing"])]
    return "\n".join(lines)


def _rollback(plan: LaunchPlan) -> list[str]:
    """What a sequence's KDA states take on a rank in a verify step, in both designs."""
    spec, model = plan.spec, plan.spec.model
    layers, query = sum(model.attention[layer] == "kda" for layer in spec.layers), spec.step.query
    if query == 1 or not layers:
        return []
    vectors = layers * model.kda_heads // spec.parallel.tp * model.kda_head_dim
    state = vectors * model.kda_head_dim * DTYPE_BYTES[spec.numerics.kda_state]
    held = {"record": state + 3 * query * vectors * DTYPE_BYTES["fp32"], "slots": query * state}
    taken = spec.choices.kda_rollback
    others = ", ".join(f"{name} {size(count)}" for name, count in held.items() if name != taken)
    return [f"KDA rollback by {taken}: {size(held[taken])} of states a sequence ({others})"]


def _alternatives(plan: LaunchPlan) -> str:
    rows = []
    for a in plan.alternatives:
        others = ", ".join(f"{v} {us / 1e3:.3f}" for v, us in a.us.items()) or "-"
        rows.append((a.choice, a.taken, others, a.why))
    return table(("choice", "taken", "cost of each", "why"), rows, left=4)


def kinds(plan: LaunchPlan) -> list[tuple[str, list[Launch]]]:
    """Embedding, one layer of each kind (the commonest form of it), head: title and launches."""
    model = plan.spec.model
    by_layer: dict[int | None, list[Launch]] = {}
    for launch in plan.launches:
        by_layer.setdefault(launch.layer, []).append(launch)
    outside = by_layer.pop(None, [])
    found = [("embedding", [x for x in outside if x.stage == "embed"])]
    groups: dict[str, list[int]] = {}
    for layer in by_layer:
        assert layer is not None
        kind = f"{model.attention[layer].upper()} + {'MoE' if model.mlp[layer] == 'moe' else 'dense MLP'}"
        groups.setdefault(kind, []).append(layer)
    for kind, layers in groups.items():
        forms: dict[tuple[int, ...], list[int]] = {}
        for layer in layers:
            forms.setdefault(tuple(launch.choice for launch in by_layer[layer]), []).append(layer)
        commonest = max(forms.values(), key=len)
        title = f"{kind}, {plural(len(layers), 'layer')} ({ranges(layers)})"
        if len(forms) > 1:
            title += f", {len(forms)} forms, shown as in layer {commonest[0]}"
        found.append((title, by_layer[commonest[0]]))
    return [*found, ("head", [x for x in outside if x.stage == "head"])]


def launch_table(plan: LaunchPlan, launches: Sequence[Launch]) -> str:
    """One launch a line: name, kernel, bytes, floor, time; ``m`` marks a measured time."""
    device = load_device(plan.spec.gpu)
    rows = []
    for launch in launches:
        choice = plan.choice(launch)
        rows.append((launch.id, choice.kernel, size(choice.bytes), f"{floor_us(choice, device):.2f}",
                     f"{choice.us:.2f}{'m' if choice.measured else 'p'}"))
    return table(("launch", "kernel", "bytes", "floor us", "us"), rows)


def ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 as ``0-2, 5``."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _fused(plan: LaunchPlan) -> list[str]:
    found = [f"  {note.removeprefix('merge: ')}" for note in plan.notes if note.startswith("merge: ")]
    counted: dict[str, int] = {}
    for launch in plan.launches:
        choice = plan.choice(launch)
        if len(choice.ops) > 1:
            text = f"{choice.kernel} = {' + '.join(choice.ops)}"
            counted[text] = counted.get(text, 0) + 1
    return found + [f"  {count} x {text}" for text, count in counted.items()]


def explain(plan: LaunchPlan, what: str) -> str:
    """Why the launches that match ``what`` are as they are: the name of a launch, node, tensor, layer (``L5``) or
    kernel, or a part of one. Equal reasons are told once. Of a kernel that no launch took: to which it lost, and why.

    Raises PlanError when nothing matches.
    """
    named: tuple[Callable[[Launch], bool], ...] = (
        lambda x: what in (x.id, *x.nodes, *x.outputs), lambda x: what in x.inputs,
        lambda x: x.id.startswith(f"{what}."), lambda x: what == plan.choice(x).kernel)
    matching = next((found for test in named if (found := [x for x in plan.launches if test(x)])), None)
    lost = [] if matching else _lost(plan, what)
    if lost:
        return "\n".join([f"no launch is {what}", *lost])
    matching = matching or [x for x in plan.launches if what in x.id or what in plan.choice(x).kernel]
    if not matching:
        names = [name for x in plan.launches for name in (x.id, *x.nodes, plan.choice(x).kernel)]
        near = get_close_matches(what, dict.fromkeys(names), 1, 0.6) or [plan.launches[0].id]
        raise PlanError(f"no launch, node, tensor or kernel is named {what!r}\n"
                        f"  fix: take a name from the launch table, such as {near[0]}")
    by_choice: dict[int, list[Launch]] = {}
    for launch in matching:
        by_choice.setdefault(launch.choice, []).append(launch)
    return "\n\n".join(_reasons(plan, launches) for launches in by_choice.values())


def _lost(plan: LaunchPlan, kernel: str) -> list[str]:
    """Each way in which ``kernel`` was not taken, and where first."""
    told: dict[str, list[Launch]] = {}
    for launch in plan.launches:
        for reason in (why for name, _, why in plan.choice(launch).losers if name == kernel):
            told.setdefault(f"which {plan.choice(launch).kernel} computes: {reason}", []).append(launch)
    return [f"  not {x[0].id}{f' and {len(x) - 1} more' if len(x) > 1 else ''}, {text}" for text, x in told.items()]


def _reasons(plan: LaunchPlan, launches: list[Launch]) -> str:
    launch, choice = launches[0], plan.choice(launches[0])
    more = f" and {len(launches) - 1} more" if len(launches) > 1 else ""
    device = load_device(plan.spec.gpu)
    how = "measured" if choice.measured else "predicted"
    lines = [
        f"{launch.id}{more}: {choice.kernel}", f"  computes {' + '.join(choice.ops)}",
        f"  {how} {choice.us:.2f} us, floor {floor_us(choice, device):.2f} us "
        f"({size(choice.bytes)}, {choice.flops / 1e6:.1f} Mflop); {choice.source}",
        f"  on stream {launch.stream}, starts {'with' if launch.dependent else 'after'} the launch before it"
        f"{f', beside others, which saves {launch.hidden_us:.2f} us' if launch.stream else ''}",
        *_settled(plan, launch),
        *([f"  configuration: {settings(choice.config)}; {choice.config_source}"] if choice.config else []),
        *(f"  reads  {_tensor(plan, n)}" for n in launch.inputs),
        *(f"  writes {_tensor(plan, n)}" for n in launch.outputs),
    ]
    lines += [f"  not {kernel}: {reason}" for kernel, _, reason in choice.losers]
    if choice.more_losers:
        lines.append(f"  and {choice.more_losers} more")
    if not choice.losers:
        lines.append("  no other kernel of the menu computes this here")
    return "\n".join(lines)


def _settled(plan: LaunchPlan, launch: Launch) -> list[str]:
    """What is written before the launch can start, and which launch says so."""
    if not launch.settled:
        return []
    at = next((x for x in plan.launches if x.id == launch.settled_by), None)
    how = "starts at a full edge" if at is None or not at.dependent else "triggers after its wait"
    why = f"all before {at.id} have ended, which {how}" if at else "no launch writes them"
    return [f"  settled before it starts: {', '.join(launch.settled)} ({why})"]


def _tensor(plan: LaunchPlan, name: str) -> str:
    tensor = plan.tensors[name]
    buffer = plan.buffers[tensor.buffer]
    where = f"{buffer.kind} {tensor.buffer}" if tensor.buffer != name else buffer.kind
    return f"{name} {tensor.dtype}{list(tensor.shape)} in {where}"
