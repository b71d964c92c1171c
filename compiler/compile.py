"""The pipeline: Spec to LaunchPlan, one line a pass."""
from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from .arguments import Arguments, arguments_of
from .build import build_graph
from .call import Scratch
from .cost import cost_model
from .covering.cover import Choice, Cover, cover
from .covering.match import find_regions
from .device import load_device
from .errors import GraphError
from .ir import Graph
from .kernel import KernelDef, Menu, Region
from .memory import lay_out
from .menu import op_kernels
from .passes.log import Note
from .passes.merge import merge_projections
from .passes.shard import OPTIONAL, algebra_of, shard_graph
from .passes.verify import verify
from .plan import Alternative, Launch, LaunchPlan, PlanChoice, Weight, seal
from .schedule import Slot, schedule
from .settled import Settled, settle
from .spec import Spec
from .tuning import Tuning, shape_key


def compile_spec(spec: Spec, kernels: Iterable[KernelDef] = (), tuning: Tuning | None = None) -> LaunchPlan:
    """The launch plan of ``spec``, choosing from ``kernels`` and the torch kernel of each op.

    Raises ShardError, CoverError, or GraphError (a defect of k3plan).
    """
    menu, tuning = Menu([*op_kernels(), *kernels]), tuning or Tuning()
    taken, alternatives = choose_algebra(spec, menu, tuning)
    graph, notes = lower(spec, taken)
    chosen = cover_graph(graph, spec, menu, tuning)
    scratch = [_scratch(region, tuning) for region in chosen.regions]
    slots = schedule(graph, chosen.regions, [choice.cost for choice in chosen.choices], load_device(spec.gpu),
                     beside=spec.choices.side_stream == "auto")
    tensors, buffers, arena_bytes = lay_out(graph, chosen.regions, scratch, [(s.first, s.last) for s in slots])
    late = [region.kernel.late(tuning.setting(region).config) for region in chosen.regions]
    choices, launches = _launches(chosen, tuning, scratch, slots, settle(graph, chosen.regions, slots, late))
    weights = {n: Weight(v.shape, v.dtype, v.recipe) for n, v in graph.values.items() if v.recipe is not None}
    plan = LaunchPlan(
        spec=replace(spec, choices=replace(spec.choices, **taken), origins={}),
        alternatives=alternatives, notes=tuple(map(str, _distinct(notes))), choices=choices, launches=launches,
        tensors=tensors, buffers=buffers, weights=weights, inputs=graph.inputs,
        outputs=dict(zip(spec.step.outputs, graph.outputs, strict=True)), arena_bytes=arena_bytes,
    )
    return seal(replace(plan, alternatives=_add_up(alternatives, plan.us)))


def lower(spec: Spec, choices: dict[str, str] | None = None) -> tuple[Graph, list[Note]]:
    """The graph of one rank, after all algebra; ``choices`` of None are those of ``spec``, none of them ``auto``."""
    choices = algebra_of(spec) if choices is None else choices
    graph = verify(build_graph(spec), "build")
    graph, sharding = shard_graph(graph, spec, choices)
    verify(graph, "shard")
    graph, merging = merge_projections(graph)
    return verify(graph, "merge"), [*sharding, *merging]


def cover_graph(graph: Graph, spec: Spec, menu: Menu, tuning: Tuning) -> Cover:
    """The cheapest cover of ``graph`` on the target of ``spec``."""
    device, rows = load_device(spec.gpu), spec.step.rows
    regions, misses = find_regions(graph, menu, arch=device.arch, rows=rows)
    price = cost_model(device, tuning, spec.parallel.tp)

    def cost_of(region: Region):
        return region.kernel.cost(region) if region.kernel.cost else price(region)

    return cover(graph, regions, cost_of, near_misses=misses, profile=spec.profile)


def choose_algebra(spec: Spec, menu: Menu, tuning: Tuning) -> tuple[dict[str, str], tuple[Alternative, ...]]:
    """Resolves each ``auto`` by covering all combinations on one layer of each kind, weighted by their number."""
    wanted = algebra_of(spec)
    if spec.parallel.tp == 1:
        taken = {name: whole for name, whole, *_ in OPTIONAL}
        return taken, tuple(Alternative(n, v, "parallel.tp is 1", {}) for n, v in taken.items())
    values = {
        name: (whole, split) if wanted[name] == "auto" else (wanted[name],) for name, whole, split, _ in OPTIONAL
    }
    names = list(values)
    priced: dict[tuple[str, ...], float] = {}
    for combination in itertools.product(*values.values()):
        priced[combination] = _sample_us(spec, dict(zip(names, combination, strict=True)), menu, tuning)
    best = min(priced, key=lambda c: (priced[c], c))
    found = []
    for index, name in enumerate(names):
        us = {v: priced[tuple([*best[:index], v, *best[index + 1:]])] for v in values[name]}
        why = "cheapest of the alternatives" if len(us) > 1 else "as the plan file says"
        found.append(Alternative(name, best[index], why, {v: round(u, 3) for v, u in us.items()}))
    return dict(zip(names, best, strict=True)), tuple(found)


def _add_up(alternatives: tuple[Alternative, ...], step_us: float) -> tuple[Alternative, ...]:
    """Prices of whole steps: what was taken costs the plan, what was not costs as much more as in the sample.

    The sample has no layer with many blocks of the residual stream and none that begins a later block, so its own
    sum is not a step's. What such layers cost more is the same under every algebra and cancels, but for kernels that
    were tuned for each number of blocks apart.
    """
    return tuple(replace(a, us={v: round(step_us + us - a.us[a.taken], 3) for v, us in a.us.items()})
                 for a in alternatives)


def _sample_us(spec: Spec, choices: dict[str, str], menu: Menu, tuning: Tuning) -> float:
    """Predicted us of the whole step, from one layer of each kind."""
    kinds: dict[tuple[str, str], list[int]] = {}
    for layer in spec.layers:
        kinds.setdefault((spec.model.attention[layer], spec.model.mlp[layer]), []).append(layer)
    sample = {layers[0]: len(layers) for layers in kinds.values()}
    graph, _ = lower(replace(spec, layers=tuple(sorted(sample))), choices)
    chosen = cover_graph(graph, spec, menu, tuning)
    return sum(c.cost.us * sample.get(_layer(c), 1) for c in chosen.choices)


def _layer(choice: Choice) -> int:
    layer = choice.region.nodes[0].layer
    return -1 if layer is None else layer


def _launch_id(region: Region) -> str:
    """The node's name; of several nodes the last one's, and how many more."""
    last, more = region.solid[-1].name, len(region.solid) - 1
    return f"{last}+{more}" if more else last


def _scratch(region: Region, tuning: Tuning) -> dict[str, tuple[str, Scratch]]:
    """Workspace of a launch: its tensor's name and what is wanted, by the kernel's name for it.

    Zeroed workspace is shared by all launches of a kernel at one shape: they run one after the other.
    """
    if region.kernel.scratch is None:
        return {}
    found = {}
    config = tuning.setting(region).config
    alike = hashlib.sha256(f"{shape_key(region)} {config}".encode()).hexdigest()[:8]
    for name, want in region.kernel.scratch(region, config).items():
        shared = f"{region.kernel.id}.{alike}.{name}"
        found[name] = (shared if want.zeroed else f"{_launch_id(region)}.{name}", want)
    return found


def _launches(
    chosen: Cover, tuning: Tuning, scratch: Sequence[Mapping[str, tuple[str, Scratch]]], slots: Sequence[Slot],
    settled: Sequence[Settled],
) -> tuple[tuple[PlanChoice, ...], tuple[Launch, ...]]:
    """Launches in order; equal choices are stored once."""
    choices: dict[str, int] = {}
    stored: list[PlanChoice] = []
    launches = []
    for choice, workspace, slot, early in zip(chosen.choices, scratch, slots, settled, strict=True):
        region = choice.region
        last, own = region.nodes[-1], region.kernel.entry.startswith("op:")
        arguments = Arguments({}, (), {"o0": last.attrs}) if own else arguments_of(region)
        record = _plan_choice(choice, tuning, arguments)
        index = choices.setdefault(repr(record), len(stored))
        if index == len(stored):
            stored.append(record)
        if slot.dependent and not {region.binding[name] for name in region.kernel.early} <= set(early.inputs):
            raise GraphError(f"{_launch_id(region)}: {choice.kernel} may read {region.kernel.early} too early")
        launches.append(Launch(
            id=_launch_id(region), choice=index, layer=last.layer, stage=last.stage, inputs=region.inputs,
            outputs=region.outputs, nodes=tuple(n.name for n in region.solid),
            results=last.outputs if own else (), names=arguments.names,
            rest=arguments.rest, scratch={n: t for n, (t, _) in workspace.items()},
            stream=slot.stream, dependent=slot.dependent, hidden_us=slot.hidden_us,
            settled=tuple(n for n in early.inputs if slot.dependent and region.graph.values[n].role == "activation"),
            settled_by=_launch_id(chosen.regions[early.by]) if slot.dependent and early.by is not None else "",
        ))
    return tuple(stored), tuple(launches)


def _plan_choice(choice: Choice, tuning: Tuning, arguments: Arguments) -> PlanChoice:
    region = choice.region
    setting = tuning.setting(region)
    return PlanChoice(
        kernel=choice.kernel, entry=region.kernel.entry,
        ops=tuple(n.op for n in region.solid),
        attrs={name: dict(a) for name, a in arguments.attrs.items()}, config=dict(setting.config),
        config_source=setting.source, us=round(choice.cost.us, 3), measured=choice.cost.measured,
        source=choice.cost.source, bytes=choice.cost.bytes, flops=choice.cost.flops,
        losers=tuple((x.kernel, x.us, _short(x.reason)) for x in choice.losers), more_losers=choice.more_losers,
    )


def _short(text: str) -> str:
    """``text`` without the numbers of layers, so that equal layers say the same."""
    return re.sub(r"\bL\d+\.", "", text)


def _distinct(notes: Sequence[Note]) -> list[Note]:
    """Notes of equal layers said once, with their count."""
    counted: dict[tuple[str, str, str], int] = {}
    for note in notes:
        key = (note.stage, _short(note.what), _short(note.why))
        counted[key] = counted.get(key, 0) + 1
    return [Note(s, what if n == 1 else f"{n} x {what}", why) for (s, what, why), n in counted.items()]
