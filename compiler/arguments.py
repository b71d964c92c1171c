"""What a launch is handed: the tensors of its region by the names of the kernel's pattern. Names only, no tensors."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .ir import Node
from .kernel import Region
from .pattern import ANY, PatternNode


@dataclass(frozen=True)
class Arguments:
    """What a plan records about the arguments of one launch: value names, never tensors."""

    names: Mapping[str, str]  # pattern name -> value name, inputs and those exports that are read outside
    rest: tuple[str, ...]  # values that the pattern takes by '...'
    attrs: Mapping[str, Mapping[str, Any]]  # first output name of each present line -> attributes


def arguments_of(region: Region) -> Arguments:
    """The arguments of a region's launch, in the order of the pattern."""
    names: dict[str, str] = {}
    rest: list[str] = []
    attrs: dict[str, Mapping[str, Any]] = {}
    stands_for: dict[str, str] = {}  # output of an absent line -> the name that is there instead
    leaving = set(region.inputs) | set(region.outputs)
    for line in region.kernel.parsed.variants[0].nodes:
        node = _node_of(region, line)
        if node is None:
            stands_for[line.outputs[0]] = stands_for.get(line.args[0], line.args[0])
            continue
        attrs[line.outputs[0]] = node.attrs
        rest += node.inputs[len(line.args):] if line.rest else ()
        for name in (stands_for.get(n, n) for n in (*line.args, *line.outputs)):
            if name != ANY and region.binding[name] in leaving:
                names[name] = region.binding[name]
    return Arguments(names, tuple(rest), attrs)


def _node_of(region: Region, line: PatternNode) -> Node | None:
    """The node that a pattern line matched; None for an optional line that is absent."""
    name = next(n for n in line.outputs if n != ANY)
    made = region.binding[name]
    if line.optional and made == region.binding[line.args[0]]:
        return None
    return region.maker(name)
