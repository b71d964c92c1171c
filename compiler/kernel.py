"""What a kernel declares, and what it is matched to. Decides nothing: the planner reads these records."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .call import Scratch
from .ir import Graph, Node, Value
from .ops import OPS
from .pattern import Pattern, Variant

ANY_ROWS = (1, 1 << 30)


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted or measured price of one launch. ``source`` says where ``us`` comes from."""

    us: float
    bytes: int
    flops: int
    measured: bool
    source: str
    timed: bool = True  # whether its kernel was timed on this GPU, at this or a comparable shape
    guess: float | None = None  # what the model said, where ``us`` was raised above kernels that were timed


@dataclass(frozen=True, eq=False)
class KernelDef:
    """One line of a menu: which subgraph a kernel computes, and when it can.

    ``needs``, ``cost`` and ``configs`` must be pure functions of the target and of the ops, attrs, shapes, dtypes,
    roles and placements of the region, and never of names: equal layers are planned once.
    """

    id: str  # "triton.attn_res"
    pattern: str  # see ``compiler/pattern.py``
    entry: str  # "k3plan.ops_triton.attn_res:launch"
    arch: tuple[str, ...] = ()  # "sm_90", "sm_100", "sm_103", "cpu"; () is any
    rows: tuple[int, int] = ANY_ROWS  # lowest and highest number of step rows, both included
    needs: Callable[[Region], str | None] | None = None  # a reason in words, or None when it can
    cost: Callable[[Region], Cost] | None = None  # None: the planner's default cost
    scratch: Callable[[Region, Mapping[str, Any]], Mapping[str, Scratch]] | None = None  # for a configuration
    configs: Callable[[Region], Sequence[Mapping[str, Any]]] | None = None  # worth timing, the default first
    # whether, in a configuration, every block lets the next launch start only after its own wait (``settled.py``)
    late: Callable[[Mapping[str, Any]], bool] = field(default=lambda config: False)
    early: tuple[str, ...] = ()  # pattern names of activations that it reads before its wait in every plan
    note: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.rows[0] <= self.rows[1]:
            raise ValueError(f"{self.id}: rows {self.rows} is not a range from 1 up")
        _ = self.parsed  # an unclear pattern is refused where it is declared

    @cached_property
    def parsed(self) -> Pattern:
        return Pattern.parse(self.id, self.pattern)

    def refusal(self, arch: str | None, rows: int | None) -> str | None:
        """Why this kernel cannot serve the target at all; None when it can."""
        if arch == "cpu" and "cpu" not in self.arch and not self.entry.startswith("op:"):
            return "needs a GPU, target is cpu"
        if arch is not None and self.arch and arch not in self.arch:
            return f"needs {' or '.join(self.arch)}, target is {arch}"
        if rows is not None and rows < self.rows[0]:
            return f"rows {rows} below {self.rows[0]}"
        if rows is not None and rows > self.rows[1]:
            return f"rows {rows} above {self.rows[1]}"
        return None


@dataclass(frozen=True, eq=False)
class Region:
    """A kernel laid over the nodes that it would compute. ``nodes`` stand in graph order, with the views that
    the pattern names. Compared by identity."""

    kernel: KernelDef
    nodes: tuple[Node, ...]
    binding: Mapping[str, str]  # pattern name -> value name; an absent optional node is its first argument
    inputs: tuple[str, ...]  # every value read and not made inside, in the order of the pattern
    outputs: tuple[str, ...]  # exports that are read outside or leave the graph, in the order of the pattern
    graph: Graph = field(repr=False)
    arch: str | None = None  # of the target: "sm_90", "gfx950"; None is any

    @cached_property
    def solid(self) -> tuple[Node, ...]:
        """The nodes that launch something: all but views."""
        return tuple(node for node in self.nodes if OPS[node.op].kind != "view")

    @property
    def warp_size(self) -> int:
        """Threads of a warp on the target: 64 on AMD's gfx9, 32 on every other."""
        return 64 if self.arch is not None and self.arch.startswith("gfx9") else 32

    def value(self, name: str) -> Value:
        """The value that a pattern name is bound to. ``KeyError`` when the pattern has no such name."""
        return self.graph.values[self.binding[name]]

    def maker(self, name: str) -> Node | None:
        """The node of this region that makes a pattern name; None for an external input."""
        made = self.binding[name]
        return next((node for node in self.nodes if made in node.outputs), None)

    def has(self, op: str) -> bool:
        """Whether a node of that op is inside (a pattern may have optional nodes)."""
        return any(node.op == op for node in self.nodes)

    def attrs(self, op: str) -> Mapping[str, Any]:
        """Attributes of the first node of that op. ``KeyError`` when there is none."""
        for node in self.nodes:
            if node.op == op:
                return node.attrs
        raise KeyError(f"{self.kernel.id} has no '{op}' here")


class Menu:
    """Kernels by the op of the last node of their patterns. Raises ``ValueError`` on a repeated id."""

    def __init__(self, kernels: Iterable[KernelDef]) -> None:
        self.kernels: tuple[KernelDef, ...] = tuple(kernels)
        self._by_id: dict[str, KernelDef] = {}
        self.by_anchor: dict[str, list[tuple[KernelDef, Variant]]] = {}
        for kernel in self.kernels:
            if kernel.id in self._by_id:
                raise ValueError(f"two kernels have the id '{kernel.id}'")
            self._by_id[kernel.id] = kernel
            for variant in kernel.parsed.variants:
                self.by_anchor.setdefault(variant.anchor.op, []).append((kernel, variant))

    def __getitem__(self, kernel_id: str) -> KernelDef:
        return self._by_id[kernel_id]

    def __iter__(self) -> Iterator[KernelDef]:
        return iter(self.kernels)
