"""Graphs for the tests of the planner, written like patterns: one node a line. Ops are only strings here."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from k3plan.compiler.ir import Graph, Node, Value
from k3plan.compiler.kernel import KernelDef


def graph(text: str, outputs: Sequence[str], roles: Mapping[str, str] | None = None,
          attrs: Mapping[str, Mapping[str, object]] | None = None) -> Graph:
    """``a, b = op(x, y)`` a line; a node is called after its first output. ``roles`` of values that are not
    activations; ``attrs`` by node name."""
    nodes, values = [], {}
    for line in filter(None, map(str.strip, text.splitlines())):
        left, right = line.split("=")
        op, inside = right.strip().removesuffix(")").split("(")
        outs = tuple(name.strip() for name in left.split(","))
        ins = tuple(name.strip() for name in inside.split(",")) if inside else ()
        nodes.append(Node(outs[0], op, ins, outs, (attrs or {}).get(outs[0], {})))
        for name in (*ins, *outs):
            values[name] = Value(name, (1, 8), "bf16", (roles or {}).get(name, "activation"))
    made = {out for node in nodes for out in node.outputs}
    return Graph(tuple(nodes), values, tuple(name for name in values if name not in made), tuple(outputs))


def kernel(kernel_id: str, pattern: str, **fields: Any) -> KernelDef:
    return KernelDef(kernel_id, pattern, f"k3plan.ops_triton.none:{kernel_id}", **fields)


def one_node(prefix: str, *ops: str) -> list[KernelDef]:
    """A kernel for each op alone, whatever its inputs. One output each."""
    return [kernel(f"{prefix}.{op}", f"out = {op}(...)\n-> out") for op in ops]
