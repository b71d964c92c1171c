"""Find every place of a graph where a kernel fits. Decides what fits; ``cover`` decides what is taken."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..ir import Graph, Node
from ..kernel import KernelDef, Menu, Region
from ..pattern import ANY, PatternNode, Step, Variant
from .order import FREE_OPS, successors

Binding = dict[str, str]
# where it failed, and the text with its arguments, put together only for a failure that is kept
Failure = tuple[str, str, tuple[object, ...]]


@dataclass(frozen=True, slots=True)
class NearMiss:
    """A kernel that almost fits. ``node`` is where it failed, ``nodes`` what it had reached, anchor first."""

    kernel: str
    node: str
    reason: str
    nodes: tuple[str, ...]


def find_regions(
    graph: Graph,
    menu: Menu,
    *,
    arch: str | None = None,
    rows: int | None = None,
) -> tuple[list[Region], list[NearMiss]]:
    """All regions of ``menu`` on ``graph`` for a target, and the kernels that failed late, in graph order.

    ``arch`` and ``rows`` of None accept any. Two matches of one kernel with the same nodes count once: of
    those that ``needs`` accepts, the one whose nodes stand most like the lines of the pattern. A kernel has
    one near miss at most for each node that its pattern may end in, and none where it fits; finding less
    than half of the pattern is no miss.
    """
    matcher = _Matcher(graph, menu, arch, rows)
    for node in graph.nodes:
        for kernel, variant in menu.by_anchor.get(node.op, ()):
            matcher.match(kernel, variant, node)
    return list(matcher.regions.values()), matcher.near_misses()


class _Matcher:
    def __init__(self, graph: Graph, menu: Menu, arch: str | None, rows: int | None) -> None:
        self.graph, self.arch = graph, arch
        self.position = {node.name: index for index, node in enumerate(graph.nodes)}
        self.producer = graph.producer
        self.consumers = graph.consumers
        self.edges = successors(graph)
        self.leaving = frozenset(graph.outputs)
        self.halves: dict[tuple[int | None, str, str], list[Node]] = {}
        for node in graph.nodes:
            self.halves.setdefault((node.layer, node.stage, node.op), []).append(node)
        self.refusals = {kernel.id: kernel.refusal(arch, rows) for kernel in menu}
        self.regions: dict[tuple[str, tuple[int, ...]], Region] = {}
        self.ranks: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
        self.fitting: set[tuple[str, str]] = set()
        # (kernel, anchor) -> (whether all of the pattern was there, the miss)
        self.misses: dict[tuple[str, str], tuple[bool, NearMiss]] = {}
        self.furthest: tuple[tuple[Node, ...], Failure] | None = None

    def match(self, kernel: KernelDef, variant: Variant, anchor: Node) -> None:
        """Record each region, or else the best near miss, of one variant that ends in ``anchor``."""
        self.furthest = None
        complete = False
        for binding in self._bind(variant.anchor, anchor, {}, ()):
            for found, nodes in self._extend(variant.steps, 1, binding, (anchor,)):
                complete = True
                self._accept(kernel, variant, found, nodes)
        if not complete and self.furthest is not None:
            nodes, failure = self.furthest
            if len(variant.nodes) == 1 or (len(nodes) > 1 and 2 * len(nodes) >= len(variant.nodes)):
                self._miss(kernel, nodes, failure, complete=False)

    def near_misses(self) -> list[NearMiss]:
        return [miss for key, (_, miss) in self.misses.items() if key not in self.fitting]

    def _extend(self, steps: tuple[Step, ...], index: int, binding: Binding,
                nodes: tuple[Node, ...]) -> Iterator[tuple[Binding, tuple[Node, ...]]]:
        """Every way to match ``steps[index:]``, depth first."""
        if index == len(steps):
            yield binding, nodes
            return
        step = steps[index]
        for node in self._candidates(step, binding, nodes):
            if any(node is other for other in nodes):
                continue
            for bound in self._bind(step.node, node, binding, nodes):
                yield from self._extend(steps, index + 1, bound, (*nodes, node))

    def _candidates(self, step: Step, binding: Binding, nodes: tuple[Node, ...]) -> list[Node]:
        op = step.node.op
        if step.output >= 0:
            name = binding[step.node.outputs[step.output]]
            node = self.producer.get(name)
            if node is not None and node.op == op:
                return [node]
            self._fail(nodes, (nodes[-1].name, "value {} is made by {}, not by {}",
                               (name, node.op if node else "nothing", op)))
            return []
        if step.node.beside and not step.shared:
            return self.halves.get((nodes[0].layer, nodes[0].stage, op), [])
        # a sibling: look among the readers of the shared rows. Weights, states and indices tie nothing
        # together (a slot index is read by every layer).
        values = self.graph.values
        shared = [binding[name] for name in step.shared if values[binding[name]].role == "activation"]
        name = min(shared, key=lambda n: len(self.consumers[n]), default="")
        found = [node for node in self.consumers[name] if node.op == op] if name else []
        if not found:
            self._fail(nodes, (nodes[-1].name, "no {} reads {}", (op, name or "the same rows")))
        return found

    def _bind(self, pattern: PatternNode, node: Node, binding: Binding,
              nodes: tuple[Node, ...]) -> list[Binding]:
        """``binding`` with the names of one line added: none, one, or two (an add in either order)."""
        count = len(pattern.args)
        inputs = node.inputs
        if len(node.outputs) != len(pattern.outputs):
            self._fail((*nodes, node), (node.name, "{} has {} outputs, the pattern has {}",
                                        (node.op, len(node.outputs), len(pattern.outputs))))
            return []
        if len(inputs) != count and not (pattern.rest and len(inputs) > count):
            self._fail((*nodes, node), (node.name, "{} has {} inputs, the pattern has {}{}",
                                        (node.op, len(inputs), count, " or more" if pattern.rest else "")))
            return []
        found = []
        values = (*inputs[:count], *node.outputs)
        for names in pattern.forms:
            bound = dict(binding)
            for name, value in zip(names, values, strict=True):
                if name != ANY and bound.setdefault(name, value) != value:
                    break
            else:
                found.append(bound)
        if not found:
            self._fail((*nodes, node), (node.name, "{} does not read the values that the pattern shares",
                                        (node.op,)))
        return found

    def _accept(self, kernel: KernelDef, variant: Variant, binding: Binding, nodes: tuple[Node, ...]) -> None:
        """A complete match: check the target, the boundary and the kernel's own needs."""
        in_text = self._in_text_order(variant, nodes)
        rank = tuple([self.position[node.name] for node in in_text])
        places = tuple(sorted(rank)) if len(rank) > 1 else rank
        key = kernel.id, places
        if (key in self.regions and self.ranks[key] <= rank) or all(n.op in FREE_OPS for n in nodes):
            return
        refusal = self.refusals[kernel.id]
        exported = {binding[name] for name in variant.exports}
        failure: Failure | None = (nodes[0].name, refusal, ()) if refusal else None
        if failure is None and not (len(nodes) == 1 and exported.issuperset(nodes[0].outputs)):
            failure = self._escape(variant, nodes, exported) or self._detour(places)
        if failure is None:
            for name, first in variant.aliases:
                binding[name] = binding[first]
            region = self._region(kernel, variant, binding, in_text, places, exported)
            reason = kernel.needs(region) if kernel.needs else None
            if reason is None:
                self.regions[key] = region
                self.ranks[key] = rank
                self.fitting.add((kernel.id, nodes[0].name))
                return
            failure = (nodes[0].name, "{}", (reason,))
        self._miss(kernel, nodes, failure, complete=True)

    def _escape(self, variant: Variant, nodes: tuple[Node, ...], exported: set[str]) -> Failure | None:
        """Why the nodes cannot be computed apart from the rest: a hidden value is read outside, or a value
        that the kernel expects from outside is made inside."""
        names = {node.name for node in nodes}
        made = {out for node in nodes for out in node.outputs}
        for step, node in zip(variant.steps, nodes, strict=True):
            if sum([name in made for name in node.inputs]) != step.made:
                return node.name, "{} reads a value as an input that is made inside", (node.op,)
            for out in node.outputs:
                if out in exported or self._readable(node, exported, names):
                    continue
                reader = next((r.name for r in self.consumers[out] if r.name not in names), None)
                if reader is not None:
                    return node.name, "value {} is read outside by {}", (out, reader)
                if out in self.leaving:
                    return node.name, "value {} is an output of the graph", (out,)
        return None

    def _readable(self, node: Node, exported: set[str], names: set[str]) -> bool:
        """Whether a view's output can be had outside without the kernel: it views an export or an input."""
        while node.op in FREE_OPS:
            source = node.inputs[0]
            maker = self.producer.get(source)
            if source in exported or maker is None or maker.name not in names:
                return True
            node = maker
        return False

    def _leaves(self, value: str, names: set[str], exported: set[str]) -> bool:
        """Whether ``value`` is read outside, directly or through a view inside that is not an export."""
        if value in self.leaving:
            return True
        readers = self.consumers[value]
        for reader in readers:
            if reader.name not in names:
                return True
        return any(out not in exported and self._leaves(out, names, exported)
                   for reader in readers if reader.op in FREE_OPS for out in reader.outputs)

    def _detour(self, places: tuple[int, ...]) -> Failure | None:
        """Why the region is not convex: a node outside reads from it and leads back. Paths go forward."""
        first, last = places[0], places[-1]
        if last - first < len(places):
            return None
        inside = frozenset(places)
        stack = [p for place in places for p in self.edges[place] if p < last and p not in inside]
        seen = set(stack)
        while stack:
            place = stack.pop()
            for later in self.edges[place]:
                if later in inside:
                    name = self.graph.nodes[place].name
                    return name, "a path leaves the region and returns through {}", (name,)
                if later < last and later not in seen:
                    seen.add(later)
                    stack.append(later)
        return None

    @staticmethod
    def _in_text_order(variant: Variant, nodes: tuple[Node, ...]) -> list[Node]:
        if len(nodes) == 1:
            return [*nodes]
        matched = {step.node.line: node for step, node in zip(variant.steps, nodes, strict=True)}
        return [matched[pattern.line] for pattern in variant.nodes]

    def _region(self, kernel: KernelDef, variant: Variant, binding: Binding, nodes: list[Node],
                places: tuple[int, ...], exported: set[str]) -> Region:
        made = {out for node in nodes for out in node.outputs}
        names = {node.name for node in nodes}
        inputs = tuple(dict.fromkeys(name for node in nodes for name in node.inputs if name not in made))
        outputs = tuple(out for out in (binding[name] for name in variant.order)
                        if self._leaves(out, names, exported))
        in_graph = tuple([self.graph.nodes[place] for place in places])
        return Region(kernel, in_graph, binding, inputs, outputs, self.graph, self.arch)

    def _fail(self, nodes: tuple[Node, ...], failure: Failure) -> None:
        if self.furthest is None or len(nodes) > len(self.furthest[0]):
            self.furthest = nodes, failure

    def _miss(self, kernel: KernelDef, nodes: tuple[Node, ...], failure: Failure, *, complete: bool) -> None:
        key = kernel.id, nodes[0].name
        known = self.misses.get(key)
        if known is not None and (known[0], len(known[1].nodes)) >= (complete, len(nodes)):
            return
        where, text, arguments = failure
        miss = NearMiss(kernel.id, where, text.format(*arguments), tuple(node.name for node in nodes))
        self.misses[key] = complete, miss
