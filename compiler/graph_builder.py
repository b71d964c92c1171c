"""Collects the nodes and values of a graph while it is laid down: names by scope, shapes and dtypes by the ops' rules.

Decides nothing about the model: ``build.py`` and its two halves of a layer say what is computed.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .errors import GraphError
from .ir import Axis, Node, Value
from .ops import OPS
from .recipe import Leaf, Recipe, shape_of
from .spec import Spec


@dataclass
class GraphBuilder:
    """Collects nodes; value names are ``scope.name``, so equal layers differ in their scope only."""

    spec: Spec
    values: dict[str, Value] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    scope: str = ""
    layer: int | None = None
    stage: str = ""

    def enter(self, scope: str, layer: int | None, stage: str) -> None:
        self.scope, self.layer, self.stage = scope, layer, stage

    def add_value(self, value: Value) -> str:
        if value.name in self.values:
            raise GraphError(f"value {value.name} is made twice")
        self.values[value.name] = value
        return value.name

    def weight(self, name: str, recipe: Recipe, dtype: str, axis: Axis | None = None) -> str:
        """A parameter of this scope."""
        value = Value(f"{self.scope}.{name}", shape_of(recipe), dtype, "weight", axis=axis, recipe=recipe)
        return self.add_value(value)

    def storage(self, name: str, shape: tuple[int, ...], dtype: str, role: str, axis: Axis | None = None) -> str:
        """A cache or state of this scope, kept from step to step."""
        return self.add_value(Value(f"{self.scope}.{name}", shape, dtype, role, axis=axis))

    def apply(self, op: str, name: str | tuple[str, ...], *inputs: str, **attrs: Any) -> Any:
        """Adds a node; returns the output name, or a tuple of them for ops with several outputs."""
        names = (name,) if isinstance(name, str) else name
        values = [self.values[i] for i in inputs]
        definition = OPS[op]
        shapes = definition.infer(values, attrs)
        outputs = []
        for index, (short, (shape, dtype)) in enumerate(zip(names, shapes, strict=True)):
            source = definition.alias.get(index)
            role = values[source].role if source is not None and definition.kind != "view" else "activation"
            outputs.append(self.add_value(Value(f"{self.scope}.{short}", shape, dtype, role)))
        self.nodes.append(
            Node(f"{self.scope}.{names[0]}", op, inputs, tuple(outputs), attrs, self.layer, self.stage)
        )
        return outputs[0] if isinstance(name, str) else tuple(outputs)

    def linear(self, name: str, x: str, tensor: str, shape: tuple[int, int], axis: Axis | None = None,
               out_dtype: str | None = None) -> str:
        """A projection by the checkpoint tensor ``tensor`` of this layer."""
        weight = self.weight(f"{name}.weight", self.leaf(tensor, shape), self.spec.model.weight_dtype, axis)
        attrs = {"out_dtype": out_dtype} if out_dtype else {}
        return self.apply("linear", name, x, weight, **attrs)

    def rms_norm(self, name: str, x: str, tensor: str, eps: float) -> str:
        weight = self.weight(f"{name}.weight", self.leaf(tensor, self.values[x].shape[-1:]),
                             self.spec.model.weight_dtype)
        return self.apply("rms_norm", name, x, weight, eps=eps)

    def leaf(self, tensor: str, shape: tuple[int, ...], dtype: str | None = None, *others: str) -> Leaf:
        """A tensor of the current layer, or of the model where there is no layer."""
        prefix = self.spec.model.tensor_prefix
        if self.layer is not None:
            prefix += f"layers.{self.layer}."
        names = tuple(prefix + n for n in (tensor, *others))
        return Leaf(names, shape, dtype or self.spec.model.weight_dtype)
