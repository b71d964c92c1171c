"""Runs warp-specialised CuTe DSL kernels on a CPU: every warp for itself, in an order drawn by chance.

The kernel's own source is executed with this file in place of the DSL. A value is an array of 32 lanes, an instruction
is one numpy operation, a branch on which the lanes agree is a branch and another becomes a mask. A warp runs until it
waits for a barrier or for a word that has not come, then another does; when all wait, the launch has hung and the test
fails. Accesses are checked: aligned, inside a tensor or the block's shared memory. Accesses of shared memory
that nothing orders are errors too (``races.py``). What this cannot see: races in global memory that no order of whole
warps shows, and what the assembler makes of the instructions.
"""
from __future__ import annotations

import ast
import inspect
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from lane_numbers import Number, number_types
from races import Races

LANES = np.arange(32)
GAP = 4096  # bytes between tensors that nobody may touch
TURNS = 200_000  # of all warps together, before a launch counts as hung


class Hung(AssertionError):
    """No warp can go on."""


@dataclass
class Barrier:
    """An mbarrier: arrivals and bytes that its phase still waits for."""

    arrivals: int
    left: int
    bytes: int = 0
    phase: int = 0

    def settle(self) -> None:
        if self.left == 0 and self.bytes == 0:
            self.phase, self.left = self.phase + 1, self.arrivals


@dataclass
class Block:
    """What the warps of a thread block share."""

    index: tuple[int, int, int]
    shared: np.ndarray
    races: Races
    barriers: dict[int, Barrier] = field(default_factory=dict)
    named: dict[int, list[int]] = field(default_factory=dict)  # threads that came, rounds that ended


@dataclass
class Warp:
    block: Block
    number: int
    active: np.ndarray = field(default_factory=lambda: np.ones(32, bool))
    pending: int = 0  # bytes that this warp's lanes have copied since they told a barrier
    looked: int = 0  # stores into global memory before this warp's last load from it


class Machine:
    """Memory, and whose turn it is."""

    def __init__(self, seed: int) -> None:
        self.memory = np.zeros(0, np.uint8)
        self.inside = np.zeros(0, bool)
        self.starts: dict[int, int] = {}  # of a storage: where it lies here
        self.sizes: dict[int, int] = {}
        self.alive: list[int] = []
        self.ready: dict[int, Callable[[], bool]] = {}  # what a warp waits for
        self.gates: list[threading.Semaphore] = []  # one opens: it is that warp's turn
        self.turns = 0
        self.stores = 0  # into global memory
        self.failure: BaseException | None = None
        self.chance = random.Random(seed)
        self.own = threading.local()

    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copies the storages of ``tensors``."""
        at, pieces = GAP, [np.zeros(GAP, np.uint8)]
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.starts:
                self.starts[storage.data_ptr()], self.sizes[storage.data_ptr()] = at, storage.nbytes()
                content = torch.tensor([], dtype=torch.uint8).set_(storage).numpy()
                size = -(-(content.size + GAP) // 256) * 256
                pieces.append(np.concatenate([content, np.zeros(size - content.size, np.uint8)]))
                at += size
        self.memory = np.concatenate(pieces)
        self.inside = np.zeros(self.memory.size, bool)
        for tensor in tensors:
            start = self.starts[tensor.untyped_storage().data_ptr()]
            self.inside[start : start + tensor.untyped_storage().nbytes()] = True

    def place(self, address: int) -> int:
        """Where an address of the host's memory lies here; other numbers stay."""
        for start, at in self.starts.items():
            if start <= address < start + self.sizes[start]:
                return at + address - start
        return address

    def give(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            start = self.starts[storage.data_ptr()]
            whole = torch.tensor([], dtype=torch.uint8).set_(storage)
            whole.copy_(torch.from_numpy(self.memory[start : start + storage.nbytes()].copy()))

    # turns

    def next(self) -> None:
        """Hands the turn to some warp that can go on."""
        self.turns += 1
        if self.turns > TURNS:
            self.fail(Hung(f"{len(self.alive)} warps after {TURNS} turns"))
        for number in self.chance.sample(self.alive, len(self.alive)):
            if number not in self.ready or self.ready[number]():
                self.ready.pop(number, None)
                self.gates[number].release()
                return
        if self.alive:
            self.fail(Hung(f"{len(self.alive)} warps wait for each other"))

    def fail(self, error: BaseException) -> None:
        """Ends the launch: every warp's turn comes, and none goes on."""
        if self.failure is None:
            self.failure = error
            for gate in self.gates:
                gate.release()

    def rest(self, ready: Callable[[], bool] | None = None) -> None:
        """Lets other warps run until this one is ``ready`` and its turn comes again."""
        me = self.own.number
        if ready is not None:
            self.ready[me] = ready
        self.next()
        self.gates[me].acquire()
        if self.failure is not None:
            raise Hung("another warp failed")

    def run(self, bodies: Sequence[tuple[Warp, Callable[[], None]]]) -> None:
        self.alive = list(range(len(bodies)))
        self.gates = [threading.Semaphore(0) for _ in bodies]
        threads = [threading.Thread(target=self._one, args=(i, *body), daemon=True) for i, body in enumerate(bodies)]
        for thread in threads:
            thread.start()
        self.next()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure

    def _one(self, number: int, warp: Warp, body: Callable[[], None]) -> None:
        self.own.number, self.own.warp = number, warp
        self.gates[number].acquire()
        if self.failure is None:
            try:
                body()
                self.alive.remove(number)
                self.next()
            except BaseException as error:
                self.fail(error)


_machine: list[Machine] = []


def _warp() -> Warp:
    return _machine[-1].own.warp


def wait_until(ready: Callable[[], bool]) -> None:
    if not ready():
        _machine[-1].rest(ready)


# values

_types = number_types(lambda: LANES.shape)
RANKS = _types.ranks
Boolean, Int32, Uint32, Int64, Float32 = RANKS


class Pointer:
    def __init__(self, at: Any) -> None:
        self.at = at

    def toint(self) -> Any:
        return self.at


# control flow, as the transformed source calls it


@contextmanager
def masked(condition: Any) -> Iterator[None]:
    warp = _warp()
    before = warp.active
    warp.active = before & condition
    try:
        yield
    finally:
        warp.active = before


def lanes_of(condition: Any) -> Any:
    """A mask of the active lanes where it holds; True or False where they agree."""
    if not isinstance(condition, Number):
        return bool(condition)
    active, held = _warp().active, Boolean(condition).a
    if held[active].all():
        return True
    return False if not held[active].any() else held


def merge(lanes: Any, new: Any, old: Any) -> Any:
    """What a variable holds after a branch that some lanes took."""
    if isinstance(lanes, bool) or old is None or not isinstance(new, Number):
        return new
    return type(new)(np.where(lanes, new.a, type(new)(old).a))


def loop(start: Any, stop: Any = None, step: Any = 1, *, unroll: int = 0) -> Iterator[Any]:
    """``cutlass.range``: each lane as often as its own bounds say."""
    first, last = (Int32(0), Int32(start)) if stop is None else (Int32(start), Int32(stop))
    index, warp = first, _warp()
    before = warp.active
    try:
        while True:
            inside = before & (index.a < last.a)
            if not inside.any():
                return
            warp.active = inside
            yield index
            index = index + step
    finally:
        warp.active = before


def rest_until_a_store() -> None:
    """What is looked at again and again looks the same until somebody stores something: since the last look, which
    may lie long before the wait."""
    machine, seen = _machine[-1], _warp().looked
    machine.rest(lambda: machine.stores != seen)


def again(condition: Any) -> bool:
    """Whether a ``while`` goes on for some lane; others get a turn before it looks again."""
    held = Boolean(condition).a[_warp().active].any()
    if held:
        rest_until_a_store()
    return bool(held)


class _Flow(ast.NodeTransformer):
    """Branches, loops and while on values."""

    @staticmethod
    def _stored(statements: Sequence[ast.stmt]) -> list[str]:
        """Names that some statements assign, but for those of this file."""
        return sorted({n.id for statement in statements for n in ast.walk(statement)
                       if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and not n.id.startswith("_lanes")})

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        if "const_expr" in ast.unparse(node.test):
            return node
        names = self._stored([*node.body, *node.orelse])
        mark = f"_lanes{node.lineno}_{node.col_offset}"
        lines = [f"{mark} = _flow.lanes_of({ast.unparse(node.test)})"]
        lines += [f"{mark}_{n} = locals().get({n!r})" for n in names]
        made = ast.parse("\n".join(lines)).body
        for part, holds in ((node.body, mark), (node.orelse, f"_flow.other({mark})")):
            if not part:
                continue
            with_ = ast.parse(f"with _flow.masked({holds}):\n    pass").body[0]
            assert isinstance(with_, ast.With)
            with_.body = part
            merged = [f"{n} = _flow.merge({holds}, locals().get({n!r}), {mark}_{n})" for n in self._stored(part)]
            merges = ast.parse("\n".join(merged) or "pass").body
            test = ast.parse(f"if {holds} is not False:\n    pass").body[0]
            assert isinstance(test, ast.If)
            test.body = [with_, *merges]
            made.append(test)
        return made

    def visit_While(self, node: ast.While) -> Any:
        self.generic_visit(node)
        node.test = ast.parse(f"_flow.again({ast.unparse(node.test)})", mode="eval").body
        return node


def other(lanes: Any) -> Any:
    return (not lanes) if isinstance(lanes, bool) else ~lanes


# modules

KEYS = ("_halves", "_whole")  # private functions of assembly


def _stand_ins() -> dict[str, Any]:
    import warp_instructions as instructions

    cute = types.ModuleType("cutlass.cute")
    cutlass = types.ModuleType("cutlass")
    kept = {"arch": instructions.Arch, "kernel": lambda function: function, "jit": lambda function: function,
            "Pointer": Pointer, "AddressSpace": types.SimpleNamespace(gmem=None),
            "make_ptr": lambda kind, at, space: Pointer(at), "make_layout": lambda size: None,
            "make_tensor": lambda pointer, layout: _Bf16(pointer)}
    cute.__dict__.update(kept)
    cutlass.__dict__.update({
        "cute": cute, "Constexpr": Any, "const_expr": lambda value: value, "range_constexpr": range, "range": loop,
        "min": lambda a, b: Int32(np.minimum(Int32(a).a, Int32(b).a)),
        "max": lambda a, b: Int32(np.maximum(Int32(a).a, Int32(b).a)), "BFloat16": Float32, "Uint8": None,
        **{kind.__name__: kind for kind in RANKS}})
    return {"cutlass": cutlass, "cutlass.cute": cute, "cutlass._mlir.dialects": types.SimpleNamespace(llvm=None)}


class _Bf16:
    """One bf16 of each lane in global memory."""

    def __init__(self, pointer: Pointer) -> None:
        self.at = pointer.at

    def __setitem__(self, index: int, value: Any) -> None:
        import warp_instructions as instructions

        wanted = _warp().active
        halves = torch.from_numpy(np.array(value.a)).bfloat16().view(torch.int16).numpy()[wanted]
        places = instructions._places(self.at, 2, wanted)
        _machine[-1].memory[places] = np.ascontiguousarray(halves[:, None]).view(np.uint8)


def load(names: Sequence[str]) -> dict[str, types.ModuleType]:
    """Modules of ``ops_cute`` over ``Number``, in the order in which they need each other."""
    import importlib

    import warp_instructions as instructions

    from k3plan.ops_cute import launching

    home = "k3plan.ops_cute"
    plain = types.SimpleNamespace(**{name: getattr(launching, name) for name in dir(launching)})
    plain.start_dependents = plain.await_producers = lambda dependent: None
    fakes: dict[str, Any] = {**_stand_ins(), launching.__name__: plain}
    made: dict[str, types.ModuleType] = {}
    for name in ("primitives", *names):
        module = importlib.import_module(f"{home}.{name}")
        own = made[name] = fakes[module.__name__] = _execute(module, fakes)
        for key in vars(module):
            stands_in = getattr(instructions, key, None)
            if isinstance(stands_in, types.FunctionType) and (key[0] != "_" or key in KEYS):
                setattr(own, key, stands_in)
    return made


def set_multiprocessors(made: Mapping[str, types.ModuleType], count: int) -> None:
    """Kernels of ``load`` that have a block on each multiprocessor have ``count`` blocks."""
    made["moe_parts"].ABSENT_MULTIPROCESSORS = count  # type: ignore[attr-defined]


def _execute(module: types.ModuleType, fakes: Mapping[str, Any]) -> types.ModuleType:
    tree = ast.parse(inspect.getsource(module))
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and {"cute.kernel", "cute.jit"} & set(
                map(ast.unparse, function.decorator_list)):
            _Flow().visit(function)
    made = types.ModuleType(module.__name__)
    made.__dict__.update(_flow=sys.modules[__name__], __package__=module.__package__)
    before = {name: sys.modules.get(name) for name in fakes}
    # dataclasses look their module up
    sys.modules.update(fakes)
    sys.modules[module.__name__] = made
    try:
        exec(compile(ast.fix_missing_locations(tree), inspect.getfile(module), "exec"), made.__dict__)
    finally:
        sys.modules[module.__name__] = module
        for name, old in before.items():
            if old is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = old
    return made


def run(launch: Any, tensors: Sequence[torch.Tensor], seed: int = 0) -> None:
    """Executes a bound launch of a loaded module. ``tensors``: all that it may touch, also by addresses."""
    machine = Machine(seed)
    machine.threads = launch.threads  # type: ignore[attr-defined]
    machine.take(tensors)
    table = launch.arguments.get("table")
    if table is not None:
        # of addresses: they are others here
        at = machine.starts[table.untyped_storage().data_ptr()]
        words = machine.memory[at : at + table.nbytes].view(np.int64)
        words[:] = [machine.place(int(word)) for word in words]
    _machine.append(machine)
    try:
        arguments = []
        for value in launch.arguments.values():
            if isinstance(value, torch.Tensor):
                arguments.append((Pointer, machine.place(value.data_ptr())))
            else:
                arguments.append((None, machine.place(value)))
        bodies = []
        for index in np.ndindex(launch.grid[::-1]):
            block = Block(tuple(map(int, index[::-1])), np.full(launch.shared, 0xA5, np.uint8),  # type: ignore[arg-type]
                          Races(launch.threads, launch.shared))
            for number in range(launch.threads // 32):
                def body() -> None:
                    values = [kind(Int64(at)) if kind else Int64(at) for kind, at in arguments]
                    launch.kernel(values, tuple(launch.arguments), launch.parameters)
                bodies.append((Warp(block, number), body))
        machine.run(bodies)
        machine.give([tensor for tensor in tensors if tensor is not table])
    finally:
        _machine.pop()
