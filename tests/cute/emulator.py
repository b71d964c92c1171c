"""Runs the CuTe DSL kernels that keep to ``ops_cute/primitives.py`` on a CPU: all threads of a grid in step, by numpy.

The kernel's own source is executed with this file in place of the DSL: a value is an array with an element a thread,
an instruction is one operation on it, and a branch on a value becomes a mask. All blocks advance together, so barriers
have nothing to do; what is checked beside the results is that every access is aligned and inside a tensor, that as many
bytes were sent to a block as each of its barriers expects, and that no thread reads, before it waits for the launches
before, what one of them may still write. What this cannot see is a race.
"""
from __future__ import annotations

import ast
import inspect
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lane_numbers import Number, number_types

SHARED_BITS = 18  # of an address in the cluster's shared memory; the block's number is above
BARRIERS = 64  # at the beginning of a block's shared memory, 8 bytes each
GAP = 4096  # bytes between tensors that nobody may touch


class Grid:
    """The state of one launch: who is who, memory, and the active mask."""

    def __init__(self, grid: Sequence[int], cluster: Sequence[int], threads: int, shared: int) -> None:
        blocks = int(np.prod(grid))
        block, self.thread = np.divmod(np.arange(blocks * threads), threads)
        self.block = block
        self.x, rest = block % grid[0], block // grid[0]
        self.y, self.z = rest % grid[1], rest // grid[1]
        assert tuple(cluster[1:]) == (1, 1), f"cluster {cluster}"
        self.cluster_first = block - self.x % cluster[0]
        self.shared = np.full((blocks, (shared + 3) // 4), np.nan, np.float32)
        # bytes by block and barrier; barriers are numbered by their address in shared memory
        self.expected, self.received = np.zeros((blocks, BARRIERS), int), np.zeros((blocks, BARRIERS), int)
        self.waited = np.zeros(blocks * threads, bool)
        self.active = np.ones(blocks * threads, bool)
        self.memory = np.zeros(0, np.uint8)
        self.inside = np.zeros(0, bool)
        self.written = np.zeros(0, bool)

    def take(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Copies the storages of ``tensors``; their addresses here."""
        at, starts, pieces = GAP, {}, [np.zeros(GAP, np.uint8)]
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in starts:
                starts[storage.data_ptr()] = at
                content = torch.tensor([], dtype=torch.uint8).set_(storage).numpy()
                size = -(-(content.size + GAP) // 256) * 256
                pieces.append(np.concatenate([content, np.zeros(size - content.size, np.uint8)]))
                at += size
        self.memory = np.concatenate(pieces)
        self.inside = np.zeros(self.memory.size, bool)
        self.written = np.zeros(self.memory.size, bool)
        self.starts = starts
        for tensor in tensors:
            start = starts[tensor.untyped_storage().data_ptr()]
            self.inside[start : start + tensor.untyped_storage().nbytes()] = True
        return [starts[t.untyped_storage().data_ptr()] + t.storage_offset() * t.element_size() for t in tensors]

    def mark_written(self, tensors: Sequence[torch.Tensor]) -> None:
        """Storages of ``tensors`` may still be written by an earlier launch until a thread has waited."""
        for tensor in tensors:
            start = self.starts[tensor.untyped_storage().data_ptr()]
            self.written[start : start + tensor.untyped_storage().nbytes()] = True

    def give(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copies the storages back."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            start = self.starts[storage.data_ptr()]
            whole = torch.tensor([], dtype=torch.uint8).set_(storage)
            whole.copy_(torch.from_numpy(self.memory[start : start + storage.nbytes()].copy()))


_now: list[Grid] = []
_types = number_types(lambda: _now[-1].thread.shape)
Boolean, Int32, Uint32, Int64, Float32 = _types.ranks


class Pointer:
    """An address of a tensor, or of the block's shared memory."""

    def __init__(self, at: Number) -> None:
        self.at = at

    def toint(self) -> Number:
        return self.at

    def __add__(self, elements: int) -> Pointer:
        """Of barriers only, 8 bytes each."""
        return Pointer(self.at + 8 * elements)


@contextmanager
def mask(condition: Any) -> Iterator[None]:
    """The body of a branch."""
    grid = _now[-1]
    before = grid.active
    grid.active = before & Boolean(condition).a
    try:
        yield
    finally:
        grid.active = before


def _wanted(guard: Any) -> np.ndarray:
    active = _now[-1].active
    return active if guard is None else active & (Int32(guard).a != 0)


# what primitives.py says in assembly


def select(condition: Any, yes: Any, no: Any) -> Any:
    return type(yes)(np.where(Boolean(condition).a, yes.a, no.a))


def _places(at: Number, size: int, wanted: np.ndarray) -> np.ndarray:
    """Byte indices of an access by the wanted threads. Raises AssertionError where it is not allowed."""
    grid, start = _now[-1], at.a.astype(np.int64)[wanted]
    assert not (start % size).any(), f"an access of {size} bytes at {start[start % size != 0][0]}"
    assert ((start >= 0) & (start + size <= grid.memory.size)).all(), "an address outside memory"
    places = start[:, None] + np.arange(size)
    assert grid.inside[places].all(), f"an access of {size} bytes outside every tensor"
    early = grid.written[places] & ~grid.waited[wanted][:, None]
    assert not early.any(), "before the wait, an access to what an earlier launch may still write"
    return places


def load_words(at: Any, count: int = 4, *, guard: Any = None, stream: bool = False,
               settled: bool = False) -> list[Any]:
    wanted, grid = _wanted(guard), _now[-1]
    found = np.zeros((count, wanted.size), np.int32)
    content = np.ascontiguousarray(grid.memory[_places(at, 4 * count, wanted)])
    found[:, wanted] = content.view(np.int32).reshape(-1, count).T
    return [Int32(words) for words in found]


def load_half(at: Any, *, guard: Any = None) -> Any:
    wanted, grid = _wanted(guard), _now[-1]
    found = np.zeros(wanted.size, np.int32)
    found[wanted] = np.ascontiguousarray(grid.memory[_places(at, 2, wanted)]).view(np.uint16)[:, 0]
    return Int32(found)


def store_words(at: Any, words: Sequence[Any], *, guard: Any = None) -> None:
    wanted, grid = _wanted(guard), _now[-1]
    content = np.stack([word.a.astype(np.int32)[wanted] for word in words], 1)
    grid.memory[_places(at, 4 * len(words), wanted)] = np.ascontiguousarray(content).view(np.uint8)


def store_half(at: Any, word: Any, *, guard: Any = None) -> None:
    wanted, grid = _wanted(guard), _now[-1]
    content = (word.a[wanted] & 0xFFFF).astype(np.uint16)[:, None]
    grid.memory[_places(at, 2, wanted)] = np.ascontiguousarray(content).view(np.uint8)


def again(words: Sequence[Any]) -> list[Any]:
    return list(words)


def pack(values: Sequence[Any]) -> list[Any]:
    halves = [torch.from_numpy(np.array(v.a)).bfloat16().view(torch.int16).numpy().astype(np.int64) & 0xFFFF
              for v in values]
    words = [low | (high << 16) for low, high in zip(halves[::2], halves[1::2], strict=True)]
    return [Int32(np.where(word >= 1 << 31, word - (1 << 32), word)) for word in words]


def exp2(x: Any) -> Any:
    with np.errstate(all="ignore"):
        return Float32(np.exp2(x.a))


def log(x: Any) -> Any:
    with np.errstate(all="ignore"):
        return Float32(np.log(x.a))


def rsqrt(x: Any) -> Any:
    with np.errstate(all="ignore"):
        return Float32(1.0 / np.sqrt(x.a))


def reciprocal(x: Any) -> Any:
    with np.errstate(all="ignore"):
        return Float32(1.0 / x.a)


def _bf16_pairs(word: Number) -> np.ndarray:
    """[warps, 32, 2]"""
    bits = word.a.astype(np.int64) & 0xFFFFFFFF
    halves = np.stack([bits << 16 & 0xFFFFFFFF, bits & 0xFFFF0000], 1).astype(np.uint32)
    return halves.view(np.float32).reshape(-1, 32, 2)


def mma(a: Sequence[Any], b: Sequence[Any], c: Sequence[Any]) -> list[Any]:
    lane = np.arange(32)
    r, q = lane // 4, lane % 4
    warps = a[0].a.size // 32
    left, right = np.zeros((warps, 16, 16), np.float32), np.zeros((warps, 16, 8), np.float32)
    for word, (row, column) in zip(a, ((0, 0), (8, 0), (0, 8), (8, 8)), strict=True):
        for i in range(2):
            left[:, r + row, 2 * q + i + column] = _bf16_pairs(word)[..., i]
    for word, row in zip(b, (0, 8), strict=True):
        for i in range(2):
            right[:, 2 * q + i + row, r] = _bf16_pairs(word)[..., i]
    with np.errstate(invalid="ignore"):
        product = left @ right
    return [Float32(x.a + product[:, r + 8 * (n // 2), 2 * q + n % 2].reshape(-1)) for n, x in enumerate(c)]


def lane_xor(value: Any, lanes: int) -> Any:
    return type(value)(value.a.reshape(-1, 32)[:, np.arange(32) ^ lanes].reshape(-1))


def lane_value(value: Any, lane: int) -> Any:
    return type(value)(np.repeat(value.a.reshape(-1, 32)[:, lane], 32))


def peer_address(at: Any, rank: Any) -> Any:
    return Int32(at.a + ((_now[-1].cluster_first + rank.a + 1) << SHARED_BITS))


def _shared_places(at: Any, count: int, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    grid, start = _now[-1], at.a[wanted]
    assert not (start % (4 * count)).any(), f"shared access of {count} words at {start[start % (4 * count) != 0][0]}"
    assert ((start >= 0) & (start // 4 + count <= grid.shared.shape[1])).all(), "an address outside shared memory"
    return grid.block[wanted][:, None], start[:, None] // 4 + np.arange(count)


def load_shared(at: Any, count: int = 1) -> Any:
    wanted, grid = _wanted(None), _now[-1]
    found = np.zeros((wanted.size, count), np.float32)
    found[wanted] = grid.shared[_shared_places(at, count, wanted)]
    values = [Float32(found[:, i]) for i in range(count)]
    return values[0] if count == 1 else values


def store_shared(at: Any, values: Sequence[Any], *, guard: Any = None) -> None:
    wanted, grid = _wanted(guard), _now[-1]
    grid.shared[_shared_places(at, len(values), wanted)] = np.stack([v.a[wanted] for v in values], 1)


def send(at: Any, values: Sequence[Any], barrier: Any, *, guard: Any = None) -> None:
    wanted, grid = _wanted(guard), _now[-1]
    block, start = (at.a[wanted] >> SHARED_BITS) - 1, at.a[wanted] & ((1 << SHARED_BITS) - 1)
    assert ((barrier.a[wanted] >> SHARED_BITS) - 1 == block).all(), "a barrier of another block"
    number = _barrier(barrier)[wanted]
    assert not (start % (4 * len(values))).any(), "an unaligned send"
    grid.shared[block[:, None], start[:, None] // 4 + np.arange(len(values))] = np.stack(
        [v.a[wanted] for v in values], 1)
    np.add.at(grid.received, (block, number), 4 * len(values))


def _barrier(at: Any) -> np.ndarray:
    """Numbers of barriers at these shared addresses."""
    return (at.a & ((1 << SHARED_BITS) - 1)) // 8


def expect(barrier: Pointer, count: Any) -> None:
    """A barrier of the block waits for so many bytes."""
    grid = _now[-1]
    np.add.at(grid.expected, (grid.block[grid.active], _barrier(barrier.at)[grid.active]),
              Int32(count).a[grid.active])


def wait_for_producers(dependent: bool) -> None:
    """The launches before have ended, for the threads that are here."""
    grid = _now[-1]
    grid.waited = grid.waited | grid.active


# what the kernels take from the DSL


NOTHING = ("mbarrier_init", "mbarrier_init_fence", "cluster_arrive", "cluster_arrive_relaxed", "cluster_wait",
           "sync_threads")


class _Arch:
    """``cute.arch``. All blocks are in step, so what orders them does nothing."""

    def __init__(self) -> None:
        for name in NOTHING:
            setattr(self, name, lambda *_: None)

    def thread_idx(self) -> tuple[Any, ...]:
        return Int32(_now[-1].thread), Int32(0), Int32(0)

    def block_idx(self) -> tuple[Any, ...]:
        return Int32(_now[-1].x), Int32(_now[-1].y), Int32(_now[-1].z)

    def get_dyn_smem(self, kind: Any, alignment: int) -> Pointer:
        return Pointer(Int32(0))

    def fmax(self, a: Any, b: Any) -> Any:
        return Float32(np.fmax(a.a, b.a))

    def fmin(self, a: Any, b: Any) -> Any:
        return Float32(np.fmin(a.a, b.a))

    def mbarrier_arrive_and_expect_tx(self, barrier: Any, count: Any) -> None:
        expect(barrier, count)

    def mbarrier_wait(self, barrier: Any, phase: int) -> None:
        grid = _now[-1]
        at = grid.block[grid.active], _barrier(barrier.at)[grid.active]
        assert (grid.received[at] == grid.expected[at]).all(), (
            f"barriers expect {np.unique(grid.expected[at])} bytes, {np.unique(grid.received[at])} came")


OWN = ("select", "again", "load_words", "load_half", "store_words", "store_half", "pack", "exp2", "log", "rsqrt",
       "reciprocal", "mma", "lane_xor", "lane_value", "peer_address", "load_shared", "store_shared", "send")


class _Branches(ast.NodeTransformer):
    """``if`` on a value becomes ``with mask``; const_expr and loops over constants are plain Python already."""

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        if "const_expr" in ast.unparse(node.test):
            return node
        assert not node.orelse, f"line {node.lineno}: a branch with an else"
        call = ast.Call(ast.Name("mask", ast.Load()), [node.test], [])
        return ast.With([ast.withitem(call)], node.body)


def _stand_ins() -> dict[str, types.ModuleType]:
    cute = types.ModuleType("cutlass.cute")
    cute.arch, cute.kernel, cute.Pointer = _Arch(), lambda function: function, Pointer
    cutlass = types.ModuleType("cutlass")
    cutlass.cute, cutlass.Constexpr = cute, Any
    cutlass.const_expr, cutlass.range_constexpr = lambda value: value, range
    for kind in (Boolean, Int32, Uint32, Int64, Float32):
        setattr(cutlass, kind.__name__, kind)
    return {"cutlass": cutlass, "cutlass.cute": cute, "cutlass._mlir.dialects": types.SimpleNamespace(llvm=None)}


def load(module: types.ModuleType) -> types.ModuleType:
    """A kernel module whose kernels are functions over ``Number``."""
    from k3plan.ops_cute import mailbox, row_mix

    fakes = shared_modules()
    for each in (mailbox, row_mix):
        fakes[each.__name__] = _execute(each, fakes)
        fakes[each.__name__].fma = fma
    return _execute(module, fakes)


def shared_modules() -> dict[str, Any]:
    """What stands for the DSL and for the two modules that every kernel uses."""
    from k3plan.ops_cute import launching, primitives

    fakes: dict[str, Any] = _stand_ins()
    own = _execute(primitives, fakes)
    for name in OWN:
        setattr(own, name, globals()[name])
    named = types.SimpleNamespace(**{name: getattr(launching, name) for name in dir(launching)})
    named.start_dependents, named.await_producers = lambda dependent: None, wait_for_producers
    return {**fakes, launching.__name__: named, primitives.__name__: own}


def fma(a: Any, b: Any, c: Any) -> Any:
    return Float32((a.a.astype(np.float64) * b.a + c.a).astype(np.float32))


def _execute(module: types.ModuleType, fakes: dict[str, Any]) -> types.ModuleType:
    tree = ast.parse(inspect.getsource(module))
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and "cute.kernel" in map(ast.unparse, function.decorator_list):
            _Branches().visit(function)
    made = types.ModuleType(module.__name__)
    made.__dict__.update(mask=mask, __package__=module.__package__)
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


def run(launch: Any, written: Sequence[torch.Tensor] = ()) -> None:
    """Executes a bound launch of a loaded module on its (CPU) tensors; earlier launches may still write ``written``
    until a thread has waited for them."""
    grid = Grid(launch.grid, launch.cluster, launch.threads, launch.shared)
    tensors = {name: value for name, value in launch.arguments.items() if isinstance(value, torch.Tensor)}
    _now.append(grid)
    try:
        places = dict(zip(tensors, grid.take(list(tensors.values())), strict=True))
        grid.mark_written(written)
        arguments = tuple(Pointer(Int64(places[name])) if name in places else Int64(value)
                          for name, value in launch.arguments.items())
        launch.kernel(arguments, tuple(launch.arguments), launch.parameters)
        grid.give(list(tensors.values()))
    finally:
        _now.pop()
