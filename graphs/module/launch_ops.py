"""A plan as operators of torch, one for each launch: what ``torch.export`` sees of a layer.

A launch of one op is that op's operator (``ops.py``). A launch of a fused kernel becomes an operator named after the
kernel and a hash of everything that it is (nodes, attributes, configuration, shapes), so that equal layers share one,
its arguments are tensors only, and an exported program says what it needs: a process that registers the same plan can
run it. On a GPU it is the kernel, on a CPU the reference of the nodes that it covers. Kernels of one rank only: a
fused collective needs its group's mailboxes, which belong to a bound plan.

``PLAIN`` ops are arithmetic that any runtime has; a program may spell them out instead (``plain=True``), which leaves
only what is ours as operators: states, caches, routing and experts. Decides nothing else; the plan did.
"""
from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...compiler.call import Call
from ...compiler.compile import lower
from ...compiler.errors import BindError
from ...compiler.ir import Graph, Node
from ...compiler.ops import OPS
from ...compiler.plan import Launch, LaunchPlan
from ..launch import entry_point
from ..load import TORCH_DTYPES
from .ops import NAMESPACE, arguments_of

PLAIN = frozenset({"linear", "add", "residual_add", "rms_norm", "gated_rms_norm", "sigmoid_mul", "silu_and_mul",
                   "situ_and_mul", "kda_gate", "mla_absorb_q", "mla_absorb_v", "experts_combine", "attn_res"})
TRITON = "k3plan.ops_triton."
DEFINE_TRITON = "k3plan.ops_triton.library:define"

Bound = tuple[Callable[[], None], tuple[Tensor, ...]]  # a launch, and the results that it will write


@dataclass(frozen=True)
class FusedOp:
    """A planned launch of a kernel. Names are those of the kernel's pattern."""

    kernel: str
    entry: str
    config: Mapping[str, Any]
    attrs: Mapping[str, Mapping[str, Any]]
    arguments: tuple[str, ...]
    values: Mapping[str, str]  # name -> value of the graph, arguments and exports
    rest: tuple[str, ...]  # values
    mutated: tuple[str, ...]  # arguments that the kernel updates in place
    updated: Mapping[str, str]  # export -> the argument whose storage it is
    results: Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # export -> what is made anew
    scratch: Mapping[str, tuple[tuple[int, ...], torch.dtype, bool]]
    nodes: tuple[Node, ...] = field(repr=False)  # with the views that they read

    @cached_property
    def name(self) -> str:
        """``triton_kda_decode_1a2b3c4d``."""
        local = {value: f"v{i}" for i, value in enumerate(dict.fromkeys(
            v for node in self.nodes for v in (*node.inputs, *node.outputs)))}
        nodes = [(n.op, [local[v] for v in n.inputs], [local[v] for v in n.outputs], sorted(n.attrs.items()))
                 for n in self.nodes]
        names = sorted((name, local.get(value)) for name, value in self.values.items())
        text = repr((self.entry, sorted(self.config.items()), nodes, names, [local[v] for v in self.rest],
                     sorted(self.updated.items()), sorted(self.results.items()), sorted(self.scratch.items())))
        return f"{self.kernel.replace('.', '_')}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def empty_results(self, like: Tensor) -> dict[str, Tensor]:
        """Tensors for what is made anew, on the device of ``like``."""
        return {name: like.new_empty(shape, dtype=dtype) for name, (shape, dtype) in self.results.items()}

    def launch(self, inputs: Sequence[Tensor], rest: Sequence[Tensor] = ()) -> Bound:
        """The bound kernel over ``inputs``, and the results that it will write."""
        results = self.empty_results(inputs[0])
        tensors = dict(zip(self.arguments, inputs, strict=True)) | results
        tensors |= {export: tensors[argument] for export, argument in self.updated.items()}
        scratch = {name: (torch.zeros if zeroed else torch.empty)(shape, dtype=dtype, device=inputs[0].device)
                   for name, (shape, dtype, zeroed) in self.scratch.items()}
        call = Call(tensors, tuple(rest), self.attrs, scratch, self.config)
        return entry_point(self.entry)(call), tuple(results.values())

    def reference(self, inputs: Sequence[Tensor], rest: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """The nodes in fp32, rounded where they leave."""
        named = dict(zip(self.arguments, inputs, strict=True))
        values = {self.values[name]: tensor for name, tensor in named.items()} | dict(zip(self.rest, rest, strict=True))
        for node in self.nodes:
            if node.outputs[0] not in values:
                made = OPS[node.op].fn(*(values[n] for n in node.inputs), **node.attrs)
                values.update(zip(node.outputs, made if isinstance(made, tuple) else (made,), strict=True))
        results = self.empty_results(inputs[0])
        return tuple(out.copy_(values[self.values[name]]) for name, out in results.items())

    @property
    def prototype(self) -> inspect.Signature:
        """The operator's arguments and results, as annotations that torch reads."""
        kinds: dict[str, Any] = dict.fromkeys(self.arguments, Tensor)
        if self.rest:
            kinds["rest"] = Sequence[Tensor]
        count = len(self.results)
        returns: Any = (None, Tensor)[count] if count < 2 else tuple[(Tensor,) * count]  # type: ignore[misc]
        keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return inspect.Signature([inspect.Parameter(n, keyword, annotation=k) for n, k in kinds.items()],
                                 return_annotation=returns)


def fused_op(plan: LaunchPlan, launch: Launch, graph: Graph) -> FusedOp:
    """A kernel launch of ``plan`` as an operator's description. Raises BindError for a collective."""
    choice = plan.choice(launch)
    if any(OPS[op].kind == "comm" for op in choice.ops):
        raise BindError(f"{launch.id}: kernel {choice.kernel} talks to other ranks, which an operator cannot\n"
                        "  fix: export a plan with parallel.tp: 1, or run the bound step")
    arguments = {name: value for name, value in launch.names.items() if value in launch.inputs}
    exports = {name: value for name, value in launch.names.items() if value in launch.outputs}
    storage = {plan.tensors[value].buffer: name for name, value in arguments.items()}
    updated = {name: storage[plan.tensors[value].buffer] for name, value in exports.items()
               if plan.tensors[value].buffer in storage}
    results = {name: (plan.tensors[value].shape, TORCH_DTYPES[plan.tensors[value].dtype])
               for name, value in exports.items() if name not in updated}
    scratch = {name: (plan.tensors[t].shape, TORCH_DTYPES[plan.tensors[t].dtype], plan.buffers[t].kind == "zeroed")
               for name, t in launch.scratch.items()}
    nodes = _with_views(launch, graph)
    # an updated state is an export only where somebody reads it, which nobody does in the step
    in_place = {node.inputs[source] for node in nodes if OPS[node.op].kind != "view"
                for source in OPS[node.op].alias.values()}
    mutated = tuple(name for name, value in arguments.items() if value in in_place)
    return FusedOp(choice.kernel, choice.entry, choice.config, choice.attrs, tuple(arguments), {**arguments, **exports},
                   launch.rest, mutated, updated, results, scratch, nodes)


def _with_views(launch: Launch, graph: Graph) -> tuple[Node, ...]:
    """The nodes of a launch and the views between them, in graph order."""
    wanted = set(launch.nodes)
    for node in reversed(graph.nodes):
        reads = any(node.outputs[0] in reader.inputs for reader in graph.nodes if reader.name in wanted)
        if OPS[node.op].kind == "view" and reads and node.outputs[0] not in launch.inputs:
            wanted.add(node.name)
    return tuple(node for node in graph.nodes if node.name in wanted)


def define(fused: FusedOp) -> Any:
    """The operator of ``fused``, defined at its first use: a ``triton_op`` where the kernel is Triton's."""
    if hasattr(getattr(torch.ops, NAMESPACE), fused.name):
        return getattr(getattr(torch.ops, NAMESPACE), fused.name)
    name, count = f"{NAMESPACE}::{fused.name}", len(fused.arguments)

    def split(arguments: Sequence[Any]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        return arguments[:count], arguments[count] if fused.rest else ()

    def returned(results: tuple[Tensor, ...]) -> Any:
        return results[0] if len(results) == 1 else results or None

    def shapes(*arguments: Any) -> Any:
        return returned(tuple(fused.empty_results(arguments[0]).values()))

    def reference(*arguments: Any) -> Any:
        return returned(fused.reference(*split(arguments)))

    def run(*arguments: Any) -> Any:
        launch, results = fused.launch(*split(arguments))
        launch()
        return returned(results)

    operator: Any
    if fused.entry.startswith(TRITON):
        define_triton: Any = entry_point(DEFINE_TRITON)
        operator = define_triton(name, lambda *a: fused.launch(*split(a)), returned, fused.prototype, fused.mutated)
    else:
        run.__signature__ = fused.prototype  # type: ignore[attr-defined]
        operator = torch.library.custom_op(name, run, mutates_args=fused.mutated)
    operator.register_fake(shapes)
    operator.register_kernel("cpu")(reference)
    return getattr(getattr(torch.ops, NAMESPACE), fused.name)


@dataclass(frozen=True)
class Application:
    """One launch in a program. ``layout`` has for each argument of the operator the index of its input, or of several.

    ``meaning`` is the op's own function where it may be spelled out, and ``dtype`` what its result is rounded to.
    """

    operator: Any
    inputs: tuple[str, ...]
    layout: tuple[int | tuple[int, ...], ...]
    attrs: Mapping[str, Any]
    outputs: tuple[tuple[str, str | None], ...]  # value, and the input value that it updates or None when it is new
    op: str | None = None  # name of the op where it is only one
    meaning: Callable[..., Tensor] | None = None
    dtype: torch.dtype | None = None
    fused: FusedOp | None = None

    def run(self, inputs: list[Tensor], plain: bool) -> list[Tensor]:
        """What is made anew, in the order of ``outputs``."""
        if plain and self.meaning is not None:
            return [self.meaning(*inputs, **self.attrs).to(self.dtype)]
        arguments = [inputs[at] if isinstance(at, int) else [inputs[i] for i in at] for at in self.layout]
        results = self.operator(*arguments, **self.attrs)
        return list(results) if isinstance(results, (tuple, list)) else [] if results is None else [results]


@dataclass(frozen=True)
class Program:
    """A plan as applications of operators. All of it is names and numbers, so that torch.compile can read it."""

    launches: tuple[Application, ...]
    views: Mapping[str, tuple[str, Mapping[str, int]]]  # value -> the value that it is a slice of, and which
    outputs: tuple[tuple[str, str], ...]

    def run(self, tensors: Mapping[str, Tensor], *, plain: bool = False) -> dict[str, Tensor]:
        """Applies the launches to weights, states, caches and step inputs by value name; returns the plan's outputs."""
        values = dict(tensors)
        for launch in self.launches:
            made = launch.run([self._value(values, name) for name in launch.inputs], plain)
            for name, source in launch.outputs:
                values[name] = made.pop(0) if source is None else self._value(values, source)
        return {name: values[value] for name, value in self.outputs}

    def _value(self, values: dict[str, Tensor], name: str) -> Tensor:
        if name not in values:
            source, part = self.views[name]
            values[name] = self._value(values, source).narrow(part["dim"], part["start"], part["stop"] - part["start"])
        return values[name]


def register(plan: LaunchPlan) -> Program:
    """Defines the operators of ``plan`` and returns its launches as applications of them.

    Raises BindError when the plan is one of several ranks.
    """
    if plan.spec.parallel.tp > 1:
        raise BindError(f"a plan of {plan.spec.parallel.tp} ranks has no operators: its launches meet in one process\n"
                        "  fix: export a plan with parallel.tp: 1, or run the bound step")
    graph, _ = lower(plan.spec)
    views = {node.outputs[0]: (node.inputs[0], node.attrs) for node in graph.nodes if OPS[node.op].kind == "view"}
    launches = tuple(_application(plan, launch, graph) for launch in plan.launches)
    return Program(launches, views, tuple(plan.outputs.items()))


def _application(plan: LaunchPlan, launch: Launch, graph: Graph) -> Application:
    kind, _, op = plan.choice(launch).entry.partition(":")
    if kind == "op":
        alias, attrs = OPS[op].alias, dict(plan.choice(launch).attrs["o0"])
        outputs = tuple((name, launch.inputs[alias[index]] if index in alias else None)
                        for index, name in enumerate(launch.results))
        positional, _ = arguments_of(op, range(len(launch.inputs)), attrs)
        layout = tuple(tuple(at) if isinstance(at, list) else at for at in positional)
        dtype = TORCH_DTYPES[plan.tensors[launch.outputs[0]].dtype] if launch.outputs else None
        return Application(getattr(getattr(torch.ops, NAMESPACE), op), launch.inputs, layout, attrs, outputs, op,
                           OPS[op].fn if op in PLAIN else None, dtype)
    fused = fused_op(plan, launch, graph)
    made: dict[str, str | None] = {fused.values[export]: fused.values[a] for export, a in fused.updated.items()}
    made |= dict.fromkeys(fused.values[name] for name in fused.results)
    inputs, count = (*(fused.values[a] for a in fused.arguments), *fused.rest), len(fused.arguments)
    layout = (*range(count), *([tuple(range(count, len(inputs)))] if fused.rest else []))
    return Application(define(fused), inputs, layout, {}, tuple(made.items()), fused=fused)
