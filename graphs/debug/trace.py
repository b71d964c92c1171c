"""Runs an eager step and writes down what each launch did: kernels and torch ops with their numbers and addresses,
waits of the host, compiles, tuning, allocations. Judges nothing: ``lint`` and ``tripwire`` do.

Torch is watched by a dispatch mode, kernels by ``watch.py`` of their folder, calls that wait by standing in for them
while the trace runs. What other libraries launch is seen as the effect it has (allocations, the capture's frontier).
"""
from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..bind import Executable
from ..launch import entry_point

# what watches the kernels of a folder, and the module that a step has imported where it has such kernels: importing
# the CuTe DSL takes seconds
WATCHES = {"k3plan.ops_triton.watch:watch": "", "k3plan.ops_cute.watch:watch": "k3plan.ops_cute.launching"}
# ops whose result or its shape is needed on the host
READS_BACK = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique", "_unique", "_unique2",
              "equal", "bincount", "allclose")
NO_KERNEL = ("empty", "new_empty", "detach", "alias", "lift_fresh", "set_", "resize_", "_local_scalar_dense")
# object, its function, and what to call it; printing hides its ops from dispatch modes
WAITING_CALLS: tuple[tuple[Any, str, str], ...] = (
    (torch.cuda, "synchronize", "torch.cuda.synchronize()"), (torch.cuda.Stream, "synchronize", "stream.synchronize()"),
    (torch.cuda.Event, "synchronize", "event.synchronize()"), (torch._tensor_str, "_str", "printing a tensor"))
TORCH, HERE, STANDARD = (str(Path(p).parent) for p in (torch.__file__, __file__, threading.__file__))


@dataclass(frozen=True)
class Operand:
    """A tensor that a launch was given. ``inside``: made by the step itself."""

    name: str
    address: int
    storage: int
    shape: tuple[int, ...]
    inside: bool


@dataclass(frozen=True)
class Event:
    """One thing that launch number ``launch`` did. ``where`` is the line of the call, outside of torch and Triton;
    ``thread`` the thread's name, where it is not the step's own."""

    launch: int
    kind: str  # kernel, op, view, compile, load, tune, wait, allocate
    name: str
    where: str
    numbers: tuple[tuple[str, int | float | str], ...] = ()
    operands: tuple[Operand, ...] = ()
    stream: int | None = None  # handle of the current stream; None without a GPU
    captured: bool = False  # whether that stream was capturing
    thread: str = ""


@dataclass
class Trace:
    """Events in order. ``launch`` is the number of the running launch, set by who runs the step."""

    launch: int = -1
    events: list[Event] = field(default_factory=list)
    made: set[int] = field(default_factory=set)  # storages that the step made
    thread: int = field(default_factory=threading.get_ident)

    def add(self, kind: str, name: str, **more: Any) -> None:
        own = threading.get_ident() == self.thread
        gpu = torch.cuda.is_initialized()
        self.events.append(Event(
            self.launch, kind, name, caller(), stream=torch.cuda.current_stream().cuda_stream if gpu else None,
            captured=gpu and torch.cuda.is_current_stream_capturing(),
            thread="" if own else threading.current_thread().name, **more))

    def operand(self, name: str, tensor: Tensor) -> Operand:
        storage = tensor.untyped_storage().data_ptr()
        return Operand(name, tensor.data_ptr(), storage, tuple(tensor.shape), storage in self.made)


def is_caller(file: str) -> bool:
    """Whether a line of ``file`` is worth naming: not torch's, Triton's, the standard library's or this folder's."""
    standard = file.startswith(STANDARD) and "-packages" not in file
    ours = file.startswith(HERE) or file.endswith(("ops_triton/watch.py", "ops_cute/watch.py"))
    return not (standard or ours or file.startswith((TORCH, "<")) or "/triton/" in file)


def caller() -> str:
    """``file:line`` of the innermost frame outside of torch, Triton, the standard library and this folder."""
    frame, nearest = sys._getframe(1), ""
    while frame is not None:
        name = frame.f_code.co_filename
        nearest = nearest or f"{name}:{frame.f_lineno}"
        if is_caller(name):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return nearest


@contextmanager
def tracing(trace: Trace) -> Iterator[Trace]:
    """Everything below is written into ``trace``."""
    with ExitStack() as stack:
        for home, name, label in WAITING_CALLS:
            stack.enter_context(_standing_in(home, name, label, trace))
        for watch in _watches():
            stack.enter_context(watch(_kernel_events(trace)))
        stack.enter_context(_Ops(trace))
        yield trace


def trace_step(executable: Executable) -> Trace:
    """One eager step, traced. On a GPU torch also warns of waits that no op shows."""
    trace, on_gpu = Trace(), executable.ranks[0].arena.device.type == "cuda"
    with tracing(trace), warnings.catch_warnings(record=True) as warned, _warning_of_waits(on_gpu):
        for number in range(len(executable.first)):
            trace.launch = number
            before = _allocations(executable)
            for step in executable.steps_of(number):
                step()
            made = _allocations(executable) - before
            if made:
                trace.events.append(Event(number, "allocate", f"{made} allocations", ""))
            hidden = [w for w in warned if "synchronizing CUDA operation" in str(w.message)]
            if hidden and not any(e.kind == "wait" and e.launch == number for e in trace.events):
                where = f"{hidden[-1].filename}:{hidden[-1].lineno}"
                trace.events.append(Event(number, "wait", "torch waits for the device", where))
            warned.clear()
    return trace


@contextmanager
def _warning_of_waits(on_gpu: bool) -> Iterator[None]:
    if not on_gpu:
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    warnings.simplefilter("always")
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _watches() -> Iterator[Callable[[Any], AbstractContextManager[None]]]:
    """The watches of the kernel languages that are installed and in use."""
    for entry, needed in WATCHES.items():
        if needed and needed not in sys.modules:
            continue
        with suppress(ImportError):
            found = entry_point(entry)
            yield found  # type: ignore[misc]


def _kernel_events(trace: Trace) -> Callable[[str, str, Mapping[str, Any]], None]:
    def say(kind: str, name: str, arguments: Mapping[str, Any]) -> None:
        tensors = {n: v for n, v in arguments.items() if isinstance(v, Tensor)}
        numbers = tuple((n, _number(v)) for n, v in arguments.items() if n not in tensors)
        operands = tuple(trace.operand(n, t) for n, t in tensors.items())
        trace.add(kind, name, numbers=numbers, operands=operands)

    return say


def _number(value: Any) -> int | float | str:
    return value if isinstance(value, (int, float, str)) else repr(value)


@contextmanager
def _standing_in(home: Any, name: str, label: str, trace: Trace) -> Iterator[None]:
    """Notes calls of ``home.name``, which still do what they do."""
    real = getattr(home, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        trace.add("wait", label)
        return real(*args, **kwargs)

    setattr(home, name, call)
    try:
        yield
    finally:
        setattr(home, name, real)


def _allocations(executable: Executable) -> int:
    device = executable.ranks[0].arena.device
    return torch.cuda.memory_stats(device)["allocation.all.allocated"] if device.type == "cuda" else 0


class _Ops(TorchDispatchMode):
    """Writes every torch op into a trace."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        tensors = [(f"{i}", t) for i, t in enumerate(tree_leaves((args, kwargs))) if isinstance(t, Tensor)]
        known = [(n, t) for n, t in tensors if t.device.type in ("cpu", "cuda")]
        numbers = tuple((f"{i}", v) for i, v in enumerate(tree_leaves((args, kwargs)))
                        if isinstance(v, (int, float)) and not isinstance(v, bool))
        if name == "lift_fresh":  # torch.tensor() inside the step
            self.trace.made.update(t.untyped_storage().data_ptr() for _, t in known)
        operands = tuple(self.trace.operand(n, t) for n, t in known)
        launches = not (getattr(func, "is_view", False) or name.startswith(NO_KERNEL))
        self.trace.add("op" if launches else "view", name, numbers=numbers, operands=operands)
        waits = _why_it_waits(name, args, kwargs, [t for _, t in known])
        if waits:
            self.trace.add("wait", waits)
        before = {t.untyped_storage().data_ptr() for _, t in known}
        result = func(*args, **kwargs)
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.device.type in ("cpu", "cuda"):
                storage = t.untyped_storage().data_ptr()
                if storage not in before:
                    self.trace.made.add(storage)
        return result


def _why_it_waits(name: str, args: Any, kwargs: Mapping[str, Any], tensors: list[Tensor]) -> str:
    """Why the host waits for the device in a torch op, "" when it does not. On a CPU only what would wait on a GPU."""
    if name in READS_BACK:
        return f"{name} reads a value back"
    if name in ("index", "index_put", "index_put_"):
        masks = [t for t in tree_leaves(args[1]) if isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8)]
        return f"{name} by a mask reads back how many it takes" if masks else ""
    if name in ("copy_", "_to_copy"):
        there = args[0].device if name == "copy_" else torch.device(kwargs.get("device") or args[0].device)
        here = args[1].device if name == "copy_" else args[0].device
        source = args[1] if name == "copy_" else args[0]
        if there.type == "cpu" and here.type == "cuda" and not kwargs.get("non_blocking"):
            return "a copy to the host"
        if there.type == "cuda" and here.type == "cpu" and not source.is_pinned():
            return "a copy from pageable host memory"
    return ""
