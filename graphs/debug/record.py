"""What was captured, as data: nodes, edges, launches and pointers of one CUDA graph, in JSON that any machine reads.

Holds facts and no judgement: ``walk`` makes a record on the GPU, ``inspect``, ``diff``, ``findings`` and ``report``
read it. Indexes are positions in the record's own lists; ``launch`` counts the launches of the plan.
"""
from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ...compiler.errors import RecordError
from ...compiler.plan import LaunchPlan, load_plan

VERSION = 1
NODE_KINDS = ("kernel", "memcpy", "memset", "event_record", "event_wait", "host", "empty", "child", "alloc", "free")
POINTER_KINDS = ("weight", "state", "cache", "arena", "input", "output", "table", "zeroed")


@dataclass(frozen=True)
class Machine:
    """Where a graph was captured. ``driver`` is the CUDA version of the driver, such as "13.0"."""

    name: str
    sms: int
    driver: str
    torch: str
    triton: str


@dataclass(frozen=True)
class Bucket:
    """Rows of the step: sequences, and rows of each."""

    sequences: int
    query: int

    def __str__(self) -> str:
        return f"{self.sequences}x{self.query}"


@dataclass(frozen=True)
class Node:
    """One graph node. ``grid``, ``block`` and ``shared_bytes`` (dynamic) are of kernels; ``launch`` is None for a node
    that no planned launch put there. ``id`` is the driver's number of the node in its graph, by which a profiler tells
    it; 0 where the driver is older than CUDA 13.1."""

    index: int
    kind: str  # of NODE_KINDS
    function: str = ""
    grid: tuple[int, int, int] = (0, 0, 0)
    block: tuple[int, int, int] = (0, 0, 0)
    shared_bytes: int = 0
    launch: int | None = None
    stream: int = 0
    id: int = 0

    @property
    def title(self) -> str:
        """What a person calls the function: a mangled C++ name as its outer name and the functor inside, if any."""
        return plain_name(self.function)


@cache
def plain_name(function: str) -> str:
    """``at::native::vectorized_elementwise_kernel (FillFunctor)`` of that kernel's mangled name; others as they are."""
    if not function.startswith("_Z"):
        return function
    # without literal template arguments, whose digits are no lengths of names
    text, nested = re.sub(r"L[a-z]n?\d+E", "", function), function[2] == "N"
    outer, inner, at, inside = [], "", 3 if nested else 2, False
    while at < len(text):
        digits = re.match(r"\d+", text[at:])
        start = at + len(digits[0]) if digits else at + 1
        name = text[start : start + int(digits[0])] if digits else ""
        if not name.isidentifier():
            # the outer name ends where its template arguments begin
            at, inside = start, True
            continue
        at = start + len(name)
        if not inside and "GLOBAL__N" not in name:
            outer.append(name)
        elif re.search(r"Functor|_cuda$|_impl$|_scalar$|_kernel$", name) and "gpu_kernel" not in name:
            inner = inner or name
        inside = inside or not nested
    return "::".join(outer) + (f" ({inner})" if inner else "") or function


@dataclass(frozen=True)
class Edge:
    """``target`` waits for ``source``: until it has ended (full), or until all its blocks said go (programmatic)."""

    source: int
    target: int
    kind: str = "full"


class Bound(NamedTuple):
    """A kernel that a bound launch says it starts; ``function`` is empty and ``shared_bytes`` None when unknown."""

    function: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int | None = None


@dataclass(frozen=True)
class LaunchRecord:
    """What a planned launch became. ``bound`` are the kernels that it should have started, empty where torch decides.

    ``us`` is its share of a replay: from the end of the launch before it to its own end, so the sum over all launches
    is the replay. ``busy_us`` is how long its kernels ran, ``gap_us`` how long nothing ran before it. None until timed.
    """

    id: str
    nodes: tuple[int, ...]
    us: float | None = None
    busy_us: float | None = None
    gap_us: float | None = None
    floor_us: float = 0.0
    bytes: int = 0
    bound: tuple[Bound, ...] = ()


@dataclass(frozen=True)
class Pointer:
    """One storage that the graph has baked in, and the launches that read and write it."""

    name: str
    address: int
    bytes: int
    kind: str  # of POINTER_KINDS
    readers: tuple[int, ...] = ()
    writers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Record:
    """One captured step. ``replay_us`` is from the start of a lone replay to its end, ``queued_us`` of a replay queued
    behind another one, ``host_us`` what the host needs to start one, ``host_least_us`` at the least. ``captured_bytes``
    is device memory that the capture took through torch, ``graph_bytes`` what the driver took for the graph.
    ``capture_s`` is warming up and capturing, ``compile_s`` compiling before that: of several buckets all together, at
    the first."""

    plan_key: str
    machine: Machine
    bucket: Bucket
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    launches: tuple[LaunchRecord, ...]
    pointers: tuple[Pointer, ...] = ()
    replay_us: float | None = None
    host_us: float | None = None
    queued_us: float | None = None
    captured_bytes: int = 0
    capture_s: float = 0.0
    graph_bytes: int = 0
    compile_s: float = 0.0
    host_least_us: float | None = None
    notes: tuple[str, ...] = ()
    version: int = VERSION

    def to_json(self) -> str:
        """The record as text: a node, edge, launch or pointer a line, as a list in the order of ``columns``."""
        tables: dict[str, Sequence[Any]] = {name: getattr(self, name) for name in _TABLES}
        plain = {"version": self.version, "plan_key": self.plan_key, "machine": vars(self.machine),
                 "bucket": vars(self.bucket), "replay_us": self.replay_us, "host_us": self.host_us,
                 "queued_us": self.queued_us, "captured_bytes": self.captured_bytes, "capture_s": self.capture_s,
                 "graph_bytes": self.graph_bytes, "compile_s": self.compile_s, "notes": self.notes,
                 "host_least_us": self.host_least_us,
                 "columns": {name: _columns(kind) for name, kind in _TABLES.items()}}
        body = [f'"{name}": {json.dumps(value)}' for name, value in plain.items()]
        for name, rows in tables.items():
            lines = ",\n".join(" " + json.dumps(astuple(row), separators=(",", ":")) for row in rows)
            body.append(f'"{name}": [\n{lines}\n]' if rows else f'"{name}": []')
        return "{\n" + ",\n".join(body) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> Record:
        """Raises RecordError: not JSON, not a record, or of another version."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise RecordError(f"not JSON ({error})\n  fix: record the capture again") from None
        if not isinstance(data, dict) or "nodes" not in data or "plan_key" not in data:
            raise RecordError("not the record of a capture\n  fix: pass the file that k3plan graph record --out wrote")
        if data.get("version") != VERSION:
            raise RecordError(f"record version {data.get('version')}, this k3plan reads {VERSION}\n"
                              "  fix: record the capture again")
        rows: dict[str, Any] = {name: tuple(_row(kind, data["columns"][name], row) for row in data[name])
                                for name, kind in _TABLES.items()}
        return cls(plan_key=data["plan_key"], machine=Machine(**data["machine"]), bucket=Bucket(**data["bucket"]),
                   **rows, replay_us=data["replay_us"], host_us=data["host_us"], queued_us=data.get("queued_us"),
                   captured_bytes=data["captured_bytes"], capture_s=data["capture_s"],
                   graph_bytes=data.get("graph_bytes", 0), compile_s=data.get("compile_s", 0.0),
                   host_least_us=data.get("host_least_us"), notes=tuple(data["notes"]))

    def save(self, path: str | Path) -> None:
        """Writes ``to_json`` to a file."""
        Path(path).write_text(self.to_json())


def load_record(path: str | Path) -> Record:
    """Reads a record. Raises RecordError, naming the file."""
    try:
        return Record.from_json(Path(path).read_text(errors="replace"))
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}\n  fix: k3plan graph record PLAN.yaml --out {path}") from None
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{path}: a damaged record ({error!r})\n  fix: record the capture again") from None


def plan_path(record: Path) -> Path:
    """Where ``graph record`` writes the plan of a capture."""
    return record.with_suffix(".plan.json")


def load_capture(path: Path, plan: Path | None = None) -> tuple[Record, LaunchPlan]:
    """A record and the plan that was captured: ``plan``, or the file beside it. Raises RecordError when they do not
    belong together, PlanError."""
    record, where = load_record(path), plan or plan_path(path)
    if plan is None and not where.exists():
        raise RecordError(f"{path}: its plan, {where.name}, is not beside it\n"
                          f"  fix: copy it there, or name plan {record.plan_key} with --plan")
    loaded = load_plan(where)
    if loaded.key != record.plan_key:
        raise RecordError(f"{path}: a capture of plan {record.plan_key}, {where} is plan {loaded.key}\n"
                          "  fix: pass the plan that was captured with --plan")
    return record, loaded


def is_capture(path: str | Path) -> bool:
    """Whether a file is a record, by its first words, so that a large plan is not read twice."""
    try:
        with Path(path).open(encoding="utf-8", errors="replace") as file:
            return '"plan_key"' in file.read(4096)
    except OSError:
        return False


_TABLES: Mapping[str, Any] = {"nodes": Node, "edges": Edge, "launches": LaunchRecord, "pointers": Pointer}


def _columns(kind: Any) -> list[str]:
    return [f.name for f in fields(kind)]


def _row(kind: Any, columns: Sequence[str], row: Sequence[Any]) -> Any:
    known = set(_columns(kind))
    cells = {name: _tuples(cell) for name, cell in zip(columns, row, strict=True)}
    if cells.get("bound"):
        cells["bound"] = tuple(Bound(*kernel) for kernel in cells["bound"])
    return kind(**{name: cell for name, cell in cells.items() if name in known})


def _tuples(cell: Any) -> Any:
    return tuple(map(_tuples, cell)) if isinstance(cell, list) else cell
