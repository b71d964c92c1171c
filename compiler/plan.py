"""Boundary 4: the launch plan. Plain JSON that a person can read and diff; nothing after it decides anything.

Equal launches of equal layers share one entry of ``choices`` (kernel, price, why it won, who lost). A launch
adds what differs: its layer and its tensors. ``key`` is a hash of the content, so a plan that was edited by
hand is told apart from one that was compiled.
"""
from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .errors import PlanError
from .memory import Buffer, Tensor
from .model import ModelConfig
from .recipe import Recipe, from_json, to_json
from .spec import Choices, Numerics, Parallel, Spec, Step

VERSION = 1


@dataclass(frozen=True)
class PlanChoice:
    """Why a kernel computes some nodes. ``us`` is measured or predicted, ``source`` says which."""

    kernel: str
    entry: str
    ops: tuple[str, ...]
    attrs: Mapping[str, Any]  # first output name of a pattern line -> attributes of its node
    config: Mapping[str, Any]
    config_source: str
    us: float
    measured: bool
    source: str
    bytes: int
    flops: int
    losers: tuple[tuple[str, float | None, str], ...]  # kernel, us, reason
    more_losers: int


@dataclass(frozen=True)
class Launch:
    """One kernel launch. ``names``, ``rest`` and ``scratch`` are what ``compiler/call.py`` says of them, as names of
    tensors; ``results`` are all outputs of the node, for a launch of one torch op."""

    id: str
    choice: int
    layer: int | None
    stage: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[str, ...]
    results: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    rest: tuple[str, ...] = ()
    scratch: Mapping[str, str] = field(default_factory=dict)
    stream: int = 0
    dependent: bool = False  # programmatic edge: may start before the launch before it in its stream has ended
    hidden_us: float = 0.0  # of its time, what running beside others saves
    settled: tuple[str, ...] = ()  # of a dependent launch: activations it reads that are written before it can start
    settled_by: str = ""  # the launch that says so: all before it have ended (``settled.py``)


@dataclass(frozen=True)
class Weight:
    """A parameter as the launches read it: shape on one rank, dtype, and how to make it."""

    shape: tuple[int, ...]
    dtype: str
    recipe: Recipe


@dataclass(frozen=True)
class Alternative:
    """One algebra choice: the value taken, and the predicted us a step of each value."""

    choice: str
    taken: str
    why: str
    us: Mapping[str, float]


@dataclass(frozen=True, repr=False)
class LaunchPlan:
    """A compiled step of one rank, for one number of rows. Equal on all ranks."""

    spec: Spec
    alternatives: tuple[Alternative, ...]
    notes: tuple[str, ...]
    choices: tuple[PlanChoice, ...]
    launches: tuple[Launch, ...]
    tensors: Mapping[str, Tensor]
    buffers: Mapping[str, Buffer]
    weights: Mapping[str, Weight]
    inputs: tuple[str, ...]
    outputs: Mapping[str, str]  # "tokens" -> tensor
    arena_bytes: int
    key: str = ""

    def __repr__(self) -> str:
        spec = self.spec
        return (f"LaunchPlan({self.key}: {spec.model.family}, {len(spec.layers)} layers, {len(self.launches)} "
                f"launches, {spec.gpu} tp{spec.parallel.tp})")

    def choice(self, launch: Launch) -> PlanChoice:
        return self.choices[launch.choice]

    @property
    def us(self) -> float:
        """Predicted time of the step: the sum over its launches, less what is hidden beside others."""
        return sum(self.choices[launch.choice].us - launch.hidden_us for launch in self.launches)

    def to_json(self) -> str:
        """The plan as text: one choice, launch, tensor, buffer or weight a line. Deterministic."""
        data = _plain(self)
        body = []
        for name, value in data.items():
            if name in ("choices", "launches") and value:
                lines = ",\n".join("  " + _line(item) for item in value)
                body.append(f'"{name}": [\n{lines}\n]')
            elif name in ("tensors", "buffers", "weights") and value:
                lines = ",\n".join(f"  {json.dumps(key)}: {_line(item)}" for key, item in value.items())
                body.append(f'"{name}": {{\n{lines}\n}}')
            else:
                body.append(f'"{name}": {json.dumps(value, indent=1)}')
        return "{\n" + ",\n".join(body) + "\n}\n"

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json())


def seal(plan: LaunchPlan) -> LaunchPlan:
    """``plan`` with its key."""
    values = {f.name: getattr(plan, f.name) for f in fields(plan)}
    return LaunchPlan(**{**values, "key": _key(_plain(plan))})


def load_plan(path: str | Path) -> LaunchPlan:
    """Reads a plan. Raises PlanError: no such file, not a plan, another version, or changed since it was compiled."""
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}\n  fix: k3plan compile PLAN.yaml --out {path}") from None
    except ValueError as error:
        source = Path(path).suffix in (".yaml", ".yml")
        fix = f"k3plan compile {path} --out plan.json, and pass plan.json" if source else "compile the plan again"
        raise PlanError(f"{path}: {'a plan file, not a launch plan' if source else f'not JSON ({error})'}\n  fix: {fix}"
                        ) from None
    if not isinstance(data, dict) or "launches" not in data:
        raise PlanError(f"{path}: not a launch plan\n  fix: pass the file that k3plan compile --out wrote")
    if data.get("version") != VERSION:
        raise PlanError(f"{path}: plan version {data.get('version')}, this k3plan reads {VERSION}\n"
                        "  fix: compile the plan again")
    if _key(data) != data.get("key"):
        raise PlanError(f"{path}: content does not match its key {data.get('key')}\n"
                        "  fix: change the plan file and compile again; a launch plan is not edited by hand")
    return _parse(data)


def _line(item: Any) -> str:
    return json.dumps(item, separators=(", ", ": "))


def _key(data: Mapping[str, Any]) -> str:
    content = {k: v for k, v in data.items() if k != "key"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _plain(plan: LaunchPlan) -> dict[str, Any]:
    spec = {f.name: getattr(plan.spec, f.name) for f in fields(Spec) if f.name != "origins"}
    spec = {k: asdict(v) if hasattr(v, "__dataclass_fields__") else v for k, v in spec.items()}
    data = {
        "version": VERSION, "key": plan.key, "spec": spec,
        "totals": {"launches": len(plan.launches), "us": round(plan.us, 3), "arena_bytes": plan.arena_bytes},
        "alternatives": [asdict(a) for a in plan.alternatives],
        "notes": list(plan.notes), "inputs": list(plan.inputs), "outputs": dict(plan.outputs),
        "arena_bytes": plan.arena_bytes,
        "choices": [asdict(c) for c in plan.choices],
        "launches": [asdict(launch) for launch in plan.launches],
        "tensors": {n: [t.buffer, t.offset, t.shape, t.stride, t.dtype] for n, t in plan.tensors.items()},
        "buffers": {n: [b.kind, b.bytes, b.offset, b.first, b.last] for n, b in plan.buffers.items()},
        "weights": {n: [w.shape, w.dtype, to_json(w.recipe)] for n, w in plan.weights.items()},
    }
    return _as_lists(data)


def _as_lists(item: Any) -> Any:
    """Tuples to lists, so that a plan in memory and one from a file hash alike."""
    if isinstance(item, dict):
        return {key: _as_lists(value) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return [_as_lists(value) for value in item]
    return item


def _parse(data: dict[str, Any]) -> LaunchPlan:
    def tuples(item: Any) -> Any:
        return tuple(tuples(i) for i in item) if isinstance(item, list) else item

    def build(kind: Any, item: dict[str, Any]) -> Any:
        return kind(**{key: tuples(value) for key, value in item.items()})

    raw = data["spec"]
    spec = Spec(
        model=build(ModelConfig, raw["model"]), layers=tuple(raw["layers"]),
        parallel=build(Parallel, raw["parallel"]), step=build(Step, raw["step"]), gpu=raw["gpu"],
        numerics=build(Numerics, raw["numerics"]), profile=raw["profile"],
        choices=build(Choices, raw["choices"]), buckets=tuple(raw["buckets"]),
    )
    return LaunchPlan(
        spec=spec, alternatives=tuple(build(Alternative, a) for a in data["alternatives"]),
        notes=tuple(data["notes"]), choices=tuple(build(PlanChoice, c) for c in data["choices"]),
        launches=tuple(build(Launch, launch) for launch in data["launches"]),
        tensors={n: Tensor(*map(tuples, t)) for n, t in data["tensors"].items()},
        buffers={n: Buffer(*b) for n, b in data["buffers"].items()},
        weights={n: Weight(tuple(s), d, from_json(r)) for n, (s, d, r) in data["weights"].items()},
        inputs=tuple(data["inputs"]), outputs=data["outputs"], arena_bytes=data["arena_bytes"], key=data["key"],
    )
