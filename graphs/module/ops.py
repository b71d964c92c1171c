"""The ops of a step as operators of torch: ``torch.ops.k3plan.<op>``, one for each op of ``compiler/ops``.

Two granularities would do: an operator for each op of the graph, or one for each launch of a plan. An engine wants
launches, because they are what runs; a reader of an exported graph, and a converter to another runtime, want ops with
a meaning. Here a launch of one op IS that op's operator, with its attributes in the schema, and only a launch of a
fused kernel gets an operator of its own (``launch_ops.py``). A layer thus exports to the launches of its plan, each
by the most general name that it has.

An operator's schema, shapes, dtypes, updated arguments and CPU meaning all come from the one declaration of the op;
nothing is written twice. The declared function computes in fp32; the operator rounds to the dtype that the graph gives
the result, as ``bind`` does. It serves every device with that function: kernels come in through plans. Collectives of
more than one rank use the default group of ``torch.distributed``; those of one rank copy.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...compiler.errors import BindError
from ...compiler.ir import Value
from ...compiler.ops import OPS, OpDef
from ..load import TORCH_DTYPES

NAMESPACE = "k3plan"
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
# annotation in compiler/ops -> type in a schema
_TYPES = {
    "torch.Tensor": "Tensor", "torch.Tensor | None": "Tensor?", "list[torch.Tensor]": "Tensor", "int": "int",
    "float": "float", "float | None": "float?", "str": "str", "str | None": "str?", "bool": "bool",
}


def value_of(name: str, tensor: Tensor) -> Value:
    """What the ops' rules need to know of a tensor, a fake one too."""
    return Value(name, tuple(tensor.shape), DTYPE_NAMES[tensor.dtype])


@cache
def signature(name: str) -> tuple[inspect.Parameter, ...]:
    """The parameters of an op's function."""
    return tuple(inspect.signature(OPS[name].fn).parameters.values())


def schema_of(definition: OpDef) -> str:
    """The operator's schema. ``Tensor(a!)`` marks what the op updates; updated arguments are not returned."""
    updated = set(definition.alias.values()) if definition.kind == "compute" else set()
    arguments, keyword_only = [], False
    for index, parameter in enumerate(signature(definition.name)):
        kind = "Tensor[]" if parameter.kind is parameter.VAR_POSITIONAL else _TYPES[parameter.annotation]
        if index in updated:
            kind = f"Tensor({chr(ord('a') + index)}!)"
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            arguments.append("*")
            keyword_only = True
        default = "" if parameter.default is parameter.empty else f"={_literal(parameter.default)}"
        arguments.append(f"{kind} {parameter.name}{default}")
    fresh = definition.outputs - len(definition.alias if definition.kind == "compute" else ())
    results = ["()", "Tensor"][fresh] if fresh < 2 else f"({', '.join(['Tensor'] * fresh)})"
    return f"({', '.join(arguments)}) -> {results}"


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def fresh_results(definition: OpDef, inputs: Sequence[Tensor], attrs: Mapping[str, Any]) -> list[tuple[int, Tensor]]:
    """Empty tensors for the results that are not updated arguments, with their index."""
    values = [value_of(str(i), tensor) for i, tensor in enumerate(inputs)]
    shaped = definition.infer(values, attrs)
    return [(i, inputs[0].new_empty(shape, dtype=TORCH_DTYPES[dtype]))
            for i, (shape, dtype) in enumerate(shaped) if i not in definition.alias]


def flatten(arguments: Sequence[Any]) -> list[Tensor]:
    """The tensors of an operator's positional arguments, lists opened, absent ones dropped."""
    found: list[Tensor] = []
    for argument in arguments:
        found += argument if isinstance(argument, (list, tuple)) else [] if argument is None else [argument]
    return found


def arguments_of(name: str, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments of the operator for an op's inputs and attributes, as a graph has them.

    An input is a tensor, or whatever stands for one.
    """
    positional: list[Any] = []
    left = list(inputs)
    for parameter in signature(name):
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional.append(left)
            left = []
        elif parameter.kind is not parameter.KEYWORD_ONLY and left:
            positional.append(left.pop(0))
    return positional, dict(attrs)


def _returned(results: list[tuple[int, Tensor]]) -> Any:
    tensors = tuple(tensor for _, tensor in results)
    return tensors[0] if len(tensors) == 1 else tensors or None


def _compute(definition: OpDef) -> Callable[..., Any]:
    def run(*arguments: Any, **attrs: Any) -> Any:
        inputs = flatten(arguments)
        results = fresh_results(definition, inputs, attrs)
        made = definition.fn(*inputs, **attrs)
        made = made if isinstance(made, tuple) else (made,)
        for index, out in results:
            out.copy_(made[index])
        return _returned(results)

    return run


def _describe(definition: OpDef) -> Callable[..., Any]:
    def shapes(*arguments: Any, **attrs: Any) -> Any:
        return _returned(fresh_results(definition, flatten(arguments), attrs))

    return shapes


def _collective(definition: OpDef) -> Callable[..., Any]:
    def run(x: Tensor, **attrs: Any) -> Tensor:
        (_, out), = fresh_results(definition, [x], attrs)
        parts = [x] if attrs["ranks"] == 1 else _parts_of_all(x, definition.name, attrs["ranks"])
        mine = 0 if attrs["ranks"] == 1 else torch.distributed.get_rank()
        return out.copy_(definition.fn(parts, **attrs)[mine])

    return run


def _parts_of_all(x: Tensor, name: str, ranks: int) -> list[Tensor]:
    """The tensors of all ranks, so that sums are in rank order on each of them."""
    group = torch.distributed
    if not (group.is_available() and group.is_initialized() and group.get_world_size() == ranks):
        raise BindError(f"k3plan::{name} over {ranks} ranks has no torch.distributed group of {ranks} processes\n"
                        "  fix: call torch.distributed.init_process_group in each of them")
    parts = [torch.empty_like(x) for _ in range(ranks)]
    group.all_gather(parts, x.contiguous())
    return parts


def register() -> None:
    """Defines the operators. The module does so itself when it is imported."""
    for name, definition in OPS.items():
        if definition.kind == "view" or hasattr(getattr(torch.ops, NAMESPACE), name):
            continue
        updated = [signature(name)[index].name for index in definition.alias.values()]
        run = _collective(definition) if definition.kind == "comm" else _compute(definition)
        operator = torch.library.custom_op(f"{NAMESPACE}::{name}", run, mutates_args=updated,
                                           schema=schema_of(definition))
        operator.register_fake(_describe(definition))


register()
