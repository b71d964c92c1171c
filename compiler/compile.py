"""The pipeline: Spec to LaunchPlan, one line a pass."""
from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from .build import build_graph
from .cost import cost_model
from .cover import Choice, Cover, cover
from .device import load_device
from .ir import Graph
from .kernel import KernelDef, Menu, Region
from .match import find_regions
from .memory import lay_out
from .menu import op_kernels
from .passes.log import Note
from .passes.merge import merge_projections
from .passes.shard import OPTIONAL, shard_graph
from .passes.verify import verify
from .plan import Alternative, Launch, LaunchPlan, PlanChoice, Weight, seal
from .spec import Spec


def compile_spec(spec: Spec, kernels: Iterable[KernelDef] = ()) -> LaunchPlan:
    """The launch plan of ``spec``, choosing from ``kernels`` and the torch kernel of each op.

    Raises ShardError, CoverError, or GraphError (a defect of k3plan).
    """
    menu = Menu([*op_kernels(), *kernels])
    taken, alternatives = choose_algebra(spec, menu)
    graph, notes = lower(spec, taken)
    chosen = cover_graph(graph, spec, menu)
    regions = chosen.regions
    tensors, buffers, arena_bytes = lay_out(graph, regions)
    choices, launches = _launches(chosen)
    weights = {n: Weight(v.shape, v.dtype, v.recipe) for n, v in graph.values.items() if v.recipe is not None}
    return seal(LaunchPlan(
        spec=replace(spec, choices=replace(spec.choices, **taken), origins={}),
        alternatives=alternatives, notes=tuple(map(str, _distinct(notes))), choices=choices, launches=launches,
        tensors=tensors, buffers=buffers, weights=weights, inputs=graph.inputs,
        outputs=dict(zip(spec.step.outputs, graph.outputs, strict=True)), arena_bytes=arena_bytes,
    ))


def lower(spec: Spec, choices: dict[str, str]) -> tuple[Graph, list[Note]]:
    """The graph of one rank, after all algebra."""
    graph = verify(build_graph(spec), "build")
    graph, sharding = shard_graph(graph, spec, choices)
    verify(graph, "shard")
    graph, merging = merge_projections(graph)
    return verify(graph, "merge"), [*sharding, *merging]


def cover_graph(graph: Graph, spec: Spec, menu: Menu) -> Cover:
    """The cheapest cover of ``graph`` on the target of ``spec``."""
    device, rows = load_device(spec.gpu), spec.step.rows
    regions, misses = find_regions(graph, menu, arch=device.arch, rows=rows)
    price = cost_model(device, rows, spec.parallel.tp)

    def cost_of(region: Region):
        return region.kernel.cost(region) if region.kernel.cost else price(region)

    return cover(graph, regions, cost_of, near_misses=misses, profile=spec.profile)


def choose_algebra(spec: Spec, menu: Menu) -> tuple[dict[str, str], tuple[Alternative, ...]]:
    """Resolves each ``auto`` by covering all combinations on one layer of each kind, weighted by their number."""
    wanted = {name: getattr(spec.choices, name) for name, *_ in OPTIONAL}
    other = {"moe_front": "replicated", "moe_tail": "all_reduce", "mla_front": "replicated"}
    if spec.parallel.tp == 1:
        taken = {name: other[name] for name in wanted}
        return taken, tuple(Alternative(n, v, "parallel.tp is 1", {}) for n, v in taken.items())
    values = {
        name: (other[name], split) if wanted[name] == "auto" else (wanted[name],) for name, split, _ in OPTIONAL
    }
    names = list(values)
    priced: dict[tuple[str, ...], float] = {}
    for combination in itertools.product(*values.values()):
        priced[combination] = _sample_us(spec, dict(zip(names, combination, strict=True)), menu)
    best = min(priced, key=lambda c: (priced[c], c))
    found = []
    for index, name in enumerate(names):
        us = {v: priced[tuple([*best[:index], v, *best[index + 1:]])] for v in values[name]}
        why = "cheapest of the alternatives" if len(us) > 1 else "as the plan file says"
        found.append(Alternative(name, best[index], why, {v: round(u, 3) for v, u in us.items()}))
    return dict(zip(names, best, strict=True)), tuple(found)


def _sample_us(spec: Spec, choices: dict[str, str], menu: Menu) -> float:
    """Predicted us of the whole step, from one layer of each kind."""
    kinds: dict[tuple[str, str], list[int]] = {}
    for layer in spec.layers:
        kinds.setdefault((spec.model.attention[layer], spec.model.mlp[layer]), []).append(layer)
    sample = {layers[0]: len(layers) for layers in kinds.values()}
    graph, _ = lower(replace(spec, layers=tuple(sorted(sample))), choices)
    chosen = cover_graph(graph, spec, menu)
    return sum(c.cost.us * sample.get(_layer(c), 1) for c in chosen.choices)


def _layer(choice: Choice) -> int:
    layer = choice.region.nodes[0].layer
    return -1 if layer is None else layer


def _launches(chosen: Cover) -> tuple[tuple[PlanChoice, ...], tuple[Launch, ...]]:
    """Launches in order; equal choices are stored once."""
    choices: dict[str, int] = {}
    stored: list[PlanChoice] = []
    launches = []
    for choice in chosen.choices:
        record = _plan_choice(choice)
        index = choices.setdefault(repr(record), len(stored))
        if index == len(stored):
            stored.append(record)
        region = choice.region
        last = region.nodes[-1]
        launches.append(Launch(
            id=region.nodes[0].name if len(region.nodes) == 1 else f"{last.name}+{len(region.nodes) - 1}",
            choice=index, layer=last.layer, stage=last.stage, inputs=region.inputs, outputs=region.outputs,
            nodes=tuple(n.name for n in region.nodes),
            results=last.outputs if len(region.nodes) == 1 else (), names=_names(region),
        ))
    return tuple(stored), tuple(launches)


def _names(region: Region) -> dict[str, str]:
    if region.kernel.entry.startswith("op:"):
        return {}
    crossing = {*region.inputs, *region.outputs}
    return {name: value for name, value in region.binding.items() if value in crossing}


def _plan_choice(choice: Choice) -> PlanChoice:
    region = choice.region
    if region.kernel.entry.startswith("op:"):
        attrs = {"o0": dict(region.nodes[0].attrs)}
    else:
        made = {value: name for name, value in region.binding.items()}
        attrs = {made[n.outputs[0]]: dict(n.attrs) for n in region.nodes if n.outputs[0] in made}
    return PlanChoice(
        kernel=choice.kernel, entry=region.kernel.entry, ops=tuple(n.op for n in region.nodes), attrs=attrs,
        config={}, us=round(choice.cost.us, 3), measured=choice.cost.measured, source=choice.cost.source,
        bytes=choice.cost.bytes, flops=choice.cost.flops,
        losers=tuple((x.kernel, x.us, x.reason) for x in choice.losers), more_losers=choice.more_losers,
    )


def _distinct(notes: Sequence[Note]) -> list[Note]:
    """Notes of equal layers said once, with their count."""
    counted: dict[tuple[str, str, str], int] = {}
    for note in notes:
        def short(text: str) -> str:
            return " ".join(w.split(".", 1)[-1] if w[:1] == "L" and w[1:2].isdigit() else w for w in text.split(" "))

        key = (note.stage, short(note.what), short(note.why))
        counted[key] = counted.get(key, 0) + 1
    return [Note(s, what if n == 1 else f"{n} x {what}", why) for (s, what, why), n in counted.items()]
