"""The text that names the subgraph of a kernel. Decides what a pattern is and refuses unclear ones.

One line a node, in SSA form; the last line lists what may be read outside::

    p = add(prefix, delta)
    ? b = block_write(blocks, p)     # may be absent: then b is blocks
    m = attn_res(p, b, score)
    h = rms_norm(m, weight)
    & g = linear(a, w)               # beside: shares no value with the others, stands in the same half of a layer
    -> p, b, h, g

A name that no line defines is an external input, and means the same value wherever it stands. ``_`` is any
value, and ``...`` at the end of an argument list any further inputs. This file does not look at graphs.
"""
from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from functools import cached_property

ANY = "_"
REST = "..."
# ops whose two inputs may change places
COMMUTATIVE = frozenset({"add"})

_NODE = re.compile(r"(?P<mark>[?&]\s*)?(?P<left>[^=()]+)=\s*(?P<op>[A-Za-z_][\w.]*)\s*\((?P<args>[^()]*)\)")
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class PatternNode:
    """One line: ``outputs = op(args)``. ``rest`` is true when the line ends its arguments with ``...``. A ``beside``
    node may share no value with the others: it is any of its op in the same half of a layer, and ``needs`` picks."""

    outputs: tuple[str, ...]
    op: str
    args: tuple[str, ...]
    rest: bool = False
    optional: bool = False
    beside: bool = False
    line: int = 0

    @cached_property
    def forms(self) -> tuple[tuple[str, ...], ...]:
        """Arguments, then outputs; a second time with the arguments swapped where the op allows it."""
        swaps = self.op in COMMUTATIVE and len(self.args) == 2 and not self.rest
        orders = (self.args, self.args[::-1]) if swaps else (self.args,)
        return tuple((*args, *self.outputs) for args in orders)


@dataclass(frozen=True)
class Step:
    """One move of a match. ``output`` >= 0: the node is the producer of the bound name
    ``outputs[output]``. Otherwise it is some consumer of the values that ``shared`` are bound to, or with nothing
    shared some node beside the anchor.
    ``made`` is how many inputs come from inside the pattern."""

    node: PatternNode
    output: int
    shared: tuple[str, ...]
    made: int


@dataclass(frozen=True)
class Variant:
    """A pattern with each optional node either present or absent. ``steps[0]`` is the anchor."""

    nodes: tuple[PatternNode, ...]
    exports: frozenset[str]
    order: tuple[str, ...]  # the exports, in the order of the text
    aliases: tuple[tuple[str, str], ...]  # (name of an absent node, the name that it stands for)
    steps: tuple[Step, ...]

    @property
    def anchor(self) -> PatternNode:
        return self.nodes[-1]


@dataclass(frozen=True)
class Pattern:
    """All variants of one text, the fullest first."""

    text: str
    variants: tuple[Variant, ...]

    @classmethod
    def parse(cls, kernel: str, text: str) -> Pattern:
        """Read ``text``. Raises ``ValueError`` with the kernel and the line."""
        nodes: list[PatternNode] = []
        exports: tuple[str, ...] | None = None
        for number, raw in enumerate(text.splitlines(), start=1):
            line = raw.split("#")[0].strip()
            if not line:
                continue
            where = f"{kernel}, line {number}"
            if exports is not None:
                raise ValueError(f"{where}: the line with '->' must be the last one")
            if line.startswith("->"):
                exports = _names(where, line[2:])
            else:
                nodes.append(_parse_node(where, number, line))
        if not nodes:
            raise ValueError(f"{kernel}: the pattern has no node")
        if not exports:
            raise ValueError(f"{kernel}: the last line must be '-> name, ...', what may be read outside")
        _check_names(kernel, nodes, exports)
        return cls(text, _expand(kernel, nodes, exports))


def _names(where: str, text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",")) if text.strip() else ()
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{where}: '{name}' is not a name")
    return names


def _parse_node(where: str, number: int, line: str) -> PatternNode:
    found = _NODE.fullmatch(line)
    if not found:
        raise ValueError(f"{where}: expected 'name = op(input, ...)' or '-> name, ...', found '{line}'")
    parts = [part.strip() for part in found["args"].split(",")] if found["args"].strip() else []
    rest = bool(parts) and parts[-1] == REST
    if REST in parts[:-1]:
        raise ValueError(f"{where}: '...' must be the last argument")
    args = _names(where, ", ".join(parts[:-1] if rest else parts))
    outputs = _names(where, found["left"].strip())
    mark = (found["mark"] or "").strip()
    optional = mark == "?"
    if optional and (len(outputs) != 1 or not args or ANY in (args[0], outputs[0])):
        raise ValueError(f"{where}: an optional node needs one named output and a named first argument")
    return PatternNode(outputs, found["op"], args, rest, optional, mark == "&", number)


def _check_names(kernel: str, nodes: list[PatternNode], exports: tuple[str, ...]) -> None:
    """SSA: defined once, defined before use, and each value is read inside or exported."""
    defined: dict[str, int] = {}
    read: dict[str, int] = {}
    for node in nodes:
        for name in node.args:
            read.setdefault(name, node.line)
        for name in node.outputs:
            if name == ANY:
                continue
            if name in defined:
                raise ValueError(f"{kernel}, line {node.line}: '{name}' is defined on line {defined[name]} "
                                 "already")
            if name in read:
                raise ValueError(f"{kernel}, line {node.line}: '{name}' is read on line {read[name]}, "
                                 "before it is defined")
            defined[name] = node.line
    for name in exports:
        if name not in defined:
            raise ValueError(f"{kernel}: '-> {name}' names a value that no line defines")
    for name, line in defined.items():
        if name not in read and name not in exports:
            raise ValueError(f"{kernel}, line {line}: '{name}' is neither read nor exported (write '_')")


def _expand(kernel: str, nodes: list[PatternNode], exports: tuple[str, ...]) -> tuple[Variant, ...]:
    """One variant for each subset of the optional nodes."""
    optional = [node for node in nodes if node.optional]
    variants = []
    for keep in itertools.product((True, False), repeat=len(optional)):
        absent = [node for node, kept in zip(optional, keep, strict=True) if not kept]
        alias: dict[str, str] = {}
        for node in absent:
            alias[node.outputs[0]] = alias.get(node.args[0], node.args[0])
        present = tuple(
            PatternNode(node.outputs, node.op, tuple(alias.get(a, a) for a in node.args), node.rest,
                        node.optional, node.beside, node.line)
            for node in nodes if node not in absent)
        if not present:
            continue
        made = {name for node in present for name in node.outputs}
        # the absent node's name may stand for an external input, which is not the kernel's to write
        named = dict.fromkeys(alias.get(name, name) for name in exports)
        order = tuple(name for name in named if name in made)
        steps = _steps(kernel, present, made)
        variants.append(Variant(present, frozenset(order), order, tuple(alias.items()), steps))
    return tuple(variants)


def _steps(kernel: str, nodes: tuple[PatternNode, ...], made: set[str]) -> tuple[Step, ...]:
    """Match order from the last node: producers first, then siblings that share a bound value.

    Which names are bound after each step does not depend on the graph, so the order is fixed here once.
    """
    steps = [Step(nodes[-1], -1, (), _count_made(nodes[-1], made))]
    left = list(reversed(nodes[:-1]))
    bound = _bound(nodes[-1])
    while left:
        step = _next_step(left, bound, made)
        if step is None:
            lost = left[-1]
            raise ValueError(f"{kernel}, line {lost.line}: '{lost.op}' shares no value with the other nodes")
        steps.append(step)
        left.remove(step.node)
        bound |= _bound(step.node)
    return tuple(steps)


def _next_step(left: list[PatternNode], bound: set[str], made: set[str]) -> Step | None:
    for node in left:
        for index, name in enumerate(node.outputs):
            if name in bound:
                return Step(node, index, (), _count_made(node, made))
    for node in left:
        shared = tuple(name for name in node.args if name in bound)
        if shared:
            return Step(node, -1, shared, _count_made(node, made))
    return next((Step(node, -1, (), _count_made(node, made)) for node in left if node.beside), None)


def _count_made(node: PatternNode, made: set[str]) -> int:
    return sum(name in made for name in node.args)


def _bound(node: PatternNode) -> set[str]:
    return {name for name in (*node.args, *node.outputs) if name != ANY}
