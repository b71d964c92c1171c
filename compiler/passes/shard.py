"""Boundary 3: from the global graph to the graph of one rank, with its collectives.

Which named dimensions are split follows from ``parallel`` and the algebra choices. Placement then flows
through the ops' own rules; where a rule needs another placement, a collective is put in. The same program
runs on every rank: only the ``rank`` input differs.
"""
from __future__ import annotations

from dataclasses import replace

from ..errors import ShardError
from ..ir import REPLICATED, Graph, Node, Placement, Value, shard
from ..ops import OPS, Need
from ..recipe import Shard
from ..spec import Spec
from .log import Note

ALWAYS = ("vocabulary", "KDA heads", "attention heads", "dense intermediate", "shared expert intermediate")
EXPERTS = {"tp": ("expert intermediate",), "ep": ("experts",)}
# algebra choice, its whole and its splitting alternative, the dimensions that the latter splits
OPTIONAL = (
    ("moe_front", "replicated", "sharded", ("router rows", "latent down rows")),
    ("moe_tail", "all_reduce", "stripe", ("latent up rows",)),
    ("mla_front", "replicated", "sharded", ("MLA front rows",)),
)


def algebra_of(spec: Spec) -> dict[str, str]:
    """The algebra choices of ``spec`` by name."""
    return {name: getattr(spec.choices, name) for name, *_ in OPTIONAL}


def split_axes(spec: Spec, choices: dict[str, str]) -> frozenset[str]:
    """Names of the dimensions that are split over the ranks."""
    if spec.parallel.tp == 1:
        return frozenset()
    names = {*ALWAYS, *EXPERTS[spec.parallel.experts]}
    for choice, _, alternative, axes in OPTIONAL:
        if choices[choice] == alternative:
            names.update(axes)
    return frozenset(names)


def shard_graph(graph: Graph, spec: Spec, choices: dict[str, str]) -> tuple[Graph, list[Note]]:
    """The graph of one rank of ``spec.parallel.tp``. Raises ShardError naming every dimension that does not divide."""
    ranks = spec.parallel.tp
    if ranks == 1:
        return graph, [Note("shard", "nothing split", "parallel.tp is 1")]
    values = _split_values(graph, split_axes(spec, choices), ranks)
    builder = _Sharder({n: v for n, v in values.items() if v.role != "activation" or n in graph.inputs}, ranks)
    for node in graph.nodes:
        builder.place(node)
    outputs = tuple(builder.bring(name, REPLICATED, graph.producer[name]) for name in graph.outputs)
    notes = [Note("shard", f"{name} split over {ranks} ranks", reason) for name, reason in _why(spec, choices)]
    counts: dict[str, int] = {}
    for node in builder.nodes:
        if OPS[node.op].kind == "comm":
            counts[node.op] = counts.get(node.op, 0) + 1
    notes += [Note("shard", f"{count} x {name} placed", "placement rules of the ops") for name, count in counts.items()]
    return Graph(tuple(builder.nodes), builder.values, graph.inputs, outputs), notes


def _why(spec: Spec, choices: dict[str, str]) -> list[tuple[str, str]]:
    found = [(name, "always split") for name in ALWAYS]
    found += [(name, f"parallel.experts: {spec.parallel.experts}") for name in EXPERTS[spec.parallel.experts]]
    for choice, _, alternative, axes in OPTIONAL:
        if choices[choice] == alternative:
            found += [(axis, f"choices.{choice}: {alternative}") for axis in axes]
    return found


def _split_values(graph: Graph, axes: frozenset[str], ranks: int) -> dict[str, Value]:
    values: dict[str, Value] = {}
    refused: dict[str, str] = {}
    for name, value in graph.values.items():
        axis = value.axis
        if value.role in ("activation", "index") or axis is None or axis.name not in axes:
            values[name] = value
            continue
        count = value.shape[axis.dim] // axis.unit
        if value.shape[axis.dim] % axis.unit or count % ranks:
            groups = f" groups of {axis.unit}" if axis.unit > 1 and "intermediate" in axis.name else ""
            refused.setdefault(axis.name, f"{axis.name}: {count}{groups} do not divide over tp={ranks} ({name})")
            continue
        shape = tuple(n // ranks if i == axis.dim else n for i, n in enumerate(value.shape))
        recipe = Shard(axis.dim, ranks, value.recipe) if value.recipe is not None else None
        values[name] = replace(value, shape=shape, placement=shard(axis.dim), recipe=recipe)
    if refused:
        fix = "choose a tp that divides them, or parallel.experts: ep for the experts"
        raise ShardError("\n".join([*refused.values(), f"  fix: {fix}"]))
    return values


class _Sharder:
    """Walks the nodes once, keeping the local form of every value and the collectives already made."""

    def __init__(self, values: dict[str, Value], ranks: int) -> None:
        self.values = values
        self.ranks = ranks
        self.nodes: list[Node] = []
        self.brought: dict[tuple[str, Placement], str] = {}
        self.makers: dict[str, Node] = {}

    def place(self, node: Node) -> None:
        definition, inputs = OPS[node.op], list(node.inputs)
        while True:
            local = [self.values[name] for name in inputs]
            try:
                placements = definition.place(local, node.attrs)
                break
            except Need as need:
                inputs[need.index] = self.bring(inputs[need.index], need.placement, node)
            except ShardError as error:
                raise ShardError(f"{node.name}: {error}") from None
        for index, (name, (shape, dtype), placement) in enumerate(
            zip(node.outputs, definition.infer(local, node.attrs), placements, strict=True)
        ):
            source = definition.alias.get(index)
            role = local[source].role if source is not None and definition.kind != "view" else "activation"
            self.values[name] = Value(name, shape, dtype, role, placement)
        self.nodes.append(replace(node, inputs=tuple(inputs)))
        self.makers.update(dict.fromkeys(node.outputs, node))

    def bring(self, name: str, wanted: Placement, node: Node) -> str:
        """``name`` at placement ``wanted``, through a collective if need be."""
        value = self.values[name]
        if value.placement == wanted:
            return name
        if (name, wanted) in self.brought:
            return self.brought[name, wanted]
        have = value.placement
        attrs: dict[str, object] = {"ranks": self.ranks}
        if have.kind in ("partial", "disjoint") and wanted == REPLICATED:
            op = "all_reduce"
            attrs["reduce"] = have.reduce
        elif have.kind in ("partial", "disjoint") and wanted.kind == "shard":
            op = "reduce_scatter"
            attrs["dim"] = wanted.dim
        elif have.kind == "shard" and wanted == REPLICATED:
            op = "all_gather"
            attrs["dim"] = have.dim
        else:
            raise ShardError(f"{node.name}: {name} is {have} and no collective makes it {wanted}")
        result = f"{name}.{op}"
        (shape, dtype), = OPS[op].infer([value], attrs)
        self.values[result] = Value(result, shape, dtype, "activation", wanted)
        maker = self.makers.get(name, node)  # a collective belongs to what it completes
        self.nodes.append(Node(result, op, (name,), (result,), attrs, maker.layer, maker.stage))
        self.brought[name, wanted] = result
        return result
