"""An exported layer as parts: what any runtime can compile, and what is an operator of ours.

``split`` cuts the program's graph into submodules ``plain_0``, ``k3plan_1``, ... in the order of execution. An
operator of ours can be a plugin of a runtime such as TensorRT where it only makes new tensors from single tensors;
``why_no_plugin`` says why another cannot, and a runtime then calls it through torch between its engines.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.split_module import split_module

from .ops import NAMESPACE


def is_ours(node: Node) -> bool:
    """Whether a node calls an operator of k3plan."""
    return node.op == "call_function" and getattr(node.target, "namespace", "") == NAMESPACE


def operators(program: torch.export.ExportedProgram) -> Iterator[Any]:
    """The operators of ours that a program calls, each once, in order."""
    yield from dict.fromkeys(node.target for node in program.graph.nodes if is_ours(node))


def why_no_plugin(operator: Any) -> str | None:
    """Why an operator cannot be a plugin of a runtime; None when it can."""
    schema = operator._schema
    updated = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if updated:
        return f"it updates {', '.join(updated)} in place"
    lists = [a.name for a in schema.arguments if str(a.type) == "List[Tensor]"]
    if lists:
        return f"{', '.join(lists)} is a list of tensors"
    return None


def split(program: torch.export.ExportedProgram) -> GraphModule:
    """The program as a module of parts, which computes the same from its tensors in a row, as a tuple of results.

    A part ends where the kind of the nodes changes.
    """
    module = program.module()
    assert isinstance(module, GraphModule), type(module)
    part_of: dict[Node, int] = {}
    kinds: list[str] = []
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        kind = NAMESPACE if is_ours(node) or _only_unpacks(node) else "plain"
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
        part_of[node] = len(kinds) - 1
    parts = split_module(module, module, lambda node: part_of[node], keep_original_order=True)
    for index, kind in enumerate(kinds):
        child = getattr(parts, f"submod_{index}")
        delattr(parts, f"submod_{index}")
        parts.add_module(f"{kind}_{index}", child)
        for node in parts.graph.nodes:
            if node.target == f"submod_{index}":
                node.target = f"{kind}_{index}"
    parts.recompile()
    return parts


def _only_unpacks(node: Node) -> bool:
    """A result of an operator of ours that is taken out of its tuple."""
    source = node.args[0] if node.args else None
    return getattr(node.target, "__name__", "") == "getitem" and isinstance(source, Node) and is_ours(source)
