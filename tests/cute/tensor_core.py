"""A fifth-generation tensor core for ``warp_emulator.py``: its memory and instructions, from the PTX ISA alone.

``tcgen05`` and what feeds it, for kind mxf8f6f4 with block scales, kind f16 with bf16, and one CTA. Descriptors are
taken apart bit by bit by the ISA's tables 40, 42 and 43; nothing here comes from ``blackwell_layouts.py``. What is
issued ends later, one by one in the order of issue, at moments drawn by chance; a store to tensor memory is there when
its warp has waited for it; shared memory is seen as it was at the last fence of the async proxy. Memory begins as
noise, so that what was never written shows. Not modelled: out-of-order ends of unrelated instructions, and
``tcgen05.fence``, which orders nothing that this model reorders.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import warp_emulator
import warp_instructions
from warp_emulator import Block, Float32, Int32

NOISE = 0x7FA55AFF  # as four e4m3 or E8M0 it has NaN among them, as fp32 it is NaN
EARLY = 0.3  # chance that an instruction ends before another warp's turn


def bits(word: int, low: int, count: int) -> int:
    return word >> low & ((1 << count) - 1)


def e4m3(codes: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.ascontiguousarray(codes)).view(torch.float8_e4m3fn).double().numpy()


def e2m1(codes: np.ndarray) -> np.ndarray:
    """4-bit numbers in the middle of 8-bit containers."""
    assert not (codes & 0xC3).any(), "a container with bits outside its middle"
    code = codes >> 2
    magnitude = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[code & 7]
    return np.where(code & 8, -magnitude, magnitude)


def e8m0(codes: np.ndarray) -> np.ndarray:
    return np.where(codes == 255, np.nan, np.exp2(codes.astype(np.float64) - 127))


ELEMENTS = {0: e4m3, 5: e2m1}


@dataclass(frozen=True)
class SharedMatrix:
    """A shared memory descriptor, taken apart: not swizzled, by rows."""

    start: int
    leading: int
    stride: int

    @classmethod
    def of(cls, word: int) -> SharedMatrix:
        assert bits(word, 14, 2) == bits(word, 30, 2) == 0, f"reserved bits of {word:#x}"
        assert bits(word, 46, 3) == 1, f"bits 46 to 48 of {word:#x} are not 001"
        assert bits(word, 49, 15) == 0, f"{word:#x} has an offset, an absolute stride or a swizzle"
        return cls(bits(word, 0, 14) << 4, bits(word, 16, 14) << 4, bits(word, 32, 14) << 4)

    def rows(self, memory: np.ndarray, rows: int, chunks: int) -> np.ndarray:
        """``rows`` rows of ``chunks`` times 16 bytes: blocks of 8 rows of 16 bytes."""
        row, chunk = np.arange(rows)[:, None, None], np.arange(chunks)[None, :, None]
        at = self.start + chunk * self.leading + row // 8 * self.stride + row % 8 * 16 + np.arange(16)
        assert (at < memory.size).all(), "a matrix that ends outside shared memory"
        return memory[at].reshape(rows, 16 * chunks)


@dataclass
class Core:
    """Tensor memory of a block, and what its tensor core has yet to do."""

    memory: np.ndarray = field(default_factory=lambda: np.full((128, 512), NOISE, np.uint32))
    first: int = 0
    columns: int = 0  # allocated
    shared: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))  # as the async proxy sees it
    queue: list[Callable[[], None]] = field(default_factory=list)
    done: list[str] = field(default_factory=list)

    def at(self, address: int, columns: int) -> tuple[int, int]:
        """Lane and column of an address; ``columns`` from there on must be allocated."""
        lane, column = address >> 16, address & 0xFFFF
        inside = self.first <= column <= self.first + self.columns - columns
        assert inside, f"columns {column} to {column + columns} of tensor memory, {self.columns} from {self.first}"
        return lane, column

    def bytes(self, address: int, columns: int) -> np.ndarray:
        """All lanes' bytes."""
        lane, column = self.at(address, columns)
        assert lane == 0, f"an operand at lane {lane}"
        return np.ascontiguousarray(self.memory[:, column : column + columns]).view(np.uint8).reshape(128, -1)

    def scales(self, address: int, rows: int, index: int) -> np.ndarray:
        """Row r's scale is byte ``index`` of column r / 32 of lane r % 32, and of the lanes 32, 64 and 96 further."""
        held = self.bytes(address, -(-rows // 32)).reshape(4, 32, -1, 4)[..., index]
        assert (held == held[0]).all(), "scales that differ between the quarters"
        return e8m0(held[0].T.reshape(-1)[:rows])

    def multiply(self, sums: int, weights: int, rows: int, instruction: int, weight_scales: int, row_scales: int,
                 add: bool) -> None:
        n, m = bits(instruction, 17, 6) << 3, bits(instruction, 27, 2) << 7
        assert m == 128, f"{m} x {n}"
        assert 8 <= n <= 256, f"{m} x {n}"
        zero = [bits(instruction, *span) for span in ((0, 4), (6, 1), (13, 4), (24, 3), (31, 1))]
        assert not any(zero), f"reserved, sparse, negated or transposed: {instruction:#x}"
        assert bits(instruction, 23, 1) == 1, "scales that are not E8M0"
        left = ELEMENTS[bits(instruction, 7, 3)](self.bytes(weights, 8))
        right = ELEMENTS[bits(instruction, 10, 3)](SharedMatrix.of(rows).rows(self.shared, n, 2))
        left = left * self.scales(weight_scales, 128, bits(instruction, 29, 2))[:, None]
        right = right * self.scales(row_scales, n, bits(instruction, 4, 2))[:, None]
        lane, column = self.at(sums, n)
        assert lane == 0
        with np.errstate(all="ignore"):
            old = self.memory[:, column : column + n].view(np.float32) if add else 0.0
            total = (left @ right.T + old).astype(np.float32)
        self.memory[:, column : column + n] = total.view(np.uint32)
        self.done.append("mma")

    def multiply_bf16(self, sums: int, weights: int, rows: int, instruction: int, add: bool) -> None:
        n, m = bits(instruction, 17, 6) << 3, bits(instruction, 24, 5) << 4
        assert m == 128, f"{m} x {n}"
        assert 8 <= n <= 256, f"{m} x {n}"
        zero = [bits(instruction, *span) for span in ((0, 4), (6, 1), (13, 4), (23, 1), (29, 3))]
        assert not any(zero), f"reserved, sparse, negated or transposed: {instruction:#x}"
        kinds = [bits(instruction, *span) for span in ((4, 2), (7, 3), (10, 3))]
        assert kinds == [1, 1, 1], f"not fp32 sums of bf16 and bf16: {kinds}"
        left, right = self.bytes(weights, 8), SharedMatrix.of(rows).rows(self.shared, n, 2)
        left, right = (torch.from_numpy(x.copy()).view(torch.bfloat16).double().numpy() for x in (left, right))
        lane, column = self.at(sums, n)
        assert lane == 0
        with np.errstate(all="ignore"):
            old = self.memory[:, column : column + n].view(np.float32) if add else 0.0
            total = (left @ right.T + old).astype(np.float32)
        self.memory[:, column : column + n] = total.view(np.uint32)
        self.done.append("mma bf16")

    def copy_scales(self, address: int, matrix: int) -> None:
        lane, column = self.at(address, 4)
        assert lane == 0
        words = SharedMatrix.of(matrix).rows(self.shared, 32, 1).view(np.uint32)
        for quarter in range(4):
            self.memory[32 * quarter : 32 * quarter + 32, column : column + 4] = words
        self.done.append("cp")


class Machine(warp_emulator.Machine):
    """Warps and tensor cores: what is issued ends by chance before a warp's turn, or when all warps wait."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.cores: list[Core] = []

    def next(self) -> None:
        while True:
            busy = [core for core in self.cores if core.queue]
            if not busy or self.failure is not None:
                super().next()
                return
            able = any(n not in self.ready or self.ready[n]() for n in self.alive)
            if able and self.chance.random() >= EARLY:
                super().next()
                return
            self.chance.choice(busy).queue.pop(0)()


def _core() -> Core:
    return warp_emulator._warp().block.core  # type: ignore[attr-defined]


def _one(value: Any) -> int:
    """What the only active lane has."""
    active = warp_emulator._warp().active
    assert active.sum() == 1, f"{active.sum()} lanes issue"
    return int(value.a[np.argmax(active)])


def _whole_warp() -> None:
    assert warp_emulator._warp().active.all(), "a part of a warp at an instruction of the whole"


def _lanes(address: Any) -> tuple[int, int]:
    """Address of a warp's own quarter, the same for all lanes."""
    _whole_warp()
    assert (address.a == address.a[0]).all(), "lanes with different addresses"
    lane = int(address.a[0]) >> 16
    assert lane == 32 * (warp_emulator._warp().number % 4), f"warp {warp_emulator._warp().number} at lane {lane}"
    return lane, int(address.a[0]) & 0xFFFF


@contextmanager
def elect_one() -> Iterator[None]:
    """``cute.arch.elect_one``: some lane of the warp."""
    with warp_emulator.masked(np.arange(32) == 5):
        yield


# the instructions of ``tensor_memory.py``


def allocate(at: Any, columns: int) -> None:
    _whole_warp()
    assert columns in (32, 64, 128, 256, 512), f"{columns} columns"
    block = warp_emulator._warp().block
    core = block.core = Core(first=512 - columns, columns=columns)  # type: ignore[attr-defined]
    core.shared = block.shared.copy()
    warp_emulator._machine[-1].cores.append(core)  # type: ignore[attr-defined]
    warp_instructions.store_word(at, Int32(core.first))


def deallocate(tensor: Any, columns: int) -> None:
    _whole_warp()
    core = _core()
    assert (int(tensor.a[0]), columns) == (core.first, core.columns)
    assert not core.queue, "tensor memory is given back while the tensor core works"
    core.columns = 0


def fence_before() -> None:
    assert not _pending(), "a fence before stores to tensor memory were waited for"


fence_after = fence_before


def fence_shared() -> None:
    _core().shared = warp_emulator._warp().block.shared.copy()


def _pending() -> list[Callable[[], None]]:
    return warp_emulator._warp().__dict__.setdefault("tensor_stores", [])


def store_columns(at: Any, words: Sequence[Any]) -> None:
    assert len(words) in (4, 8)
    core = _core()
    lane, column = _lanes(at)
    core.at(column, len(words))
    content = np.stack([np.array(word.a, np.int32) for word in words], 1).view(np.uint32)

    def end() -> None:
        core.memory[lane : lane + 32, column : column + len(words)] = content
    _pending().append(end)


def await_stores() -> None:
    _whole_warp()
    for end in _pending():
        end()
    _pending().clear()


def load_columns(places: Sequence[Any]) -> list[list[Any]]:
    core, found = _core(), []
    for place in places:
        lane, column = _lanes(place)
        core.at(column, 8)
        held = core.memory[lane : lane + 32, column : column + 8].view(np.float32)
        found.append([Float32(held[:, i]) for i in range(8)])
    return found


def copy_scales(at: Any, descriptor: Any) -> None:
    core, values = _core(), (_one(at), _one(descriptor))
    core.queue.append(lambda: core.copy_scales(*values))


def multiply(sums: Any, weights: Any, rows: Any, instruction: Any, weight_scales: Any, row_scales: Any,
             add: Any) -> None:
    core = _core()
    values = [_one(v) for v in (sums, weights, rows, instruction, weight_scales, row_scales)]
    whether = bool(_one(Int32(add)))
    core.queue.append(lambda: core.multiply(*values, add=whether))


def multiply_bf16(sums: Any, weights: Any, rows: Any, instruction: Any, add: Any) -> None:
    core, values = _core(), [_one(v) for v in (sums, weights, rows, instruction)]
    whether = bool(_one(Int32(add)))
    core.queue.append(lambda: core.multiply_bf16(*values, add=whether))


def commit(barrier: Any) -> None:
    core, place, races = _core(), _one(barrier), warp_emulator._warp().block.races
    one = warp_emulator._warp().block.barriers[place]
    done = races.leave(warp_instructions._threads(warp_emulator._warp().active))

    def end() -> None:
        races.vouch(place, done)
        one.left -= 1
        assert one.left >= 0, "more arrivals than a barrier waits for"
        warp_instructions._settle(one, place, races)
    core.queue.append(end)


def load_four(at: Any) -> list[Any]:
    found = warp_instructions._load(at, 16, np.int32)
    return [Int32(found[:, i]) for i in range(4)]


def store_many(at: Any, words: Sequence[Any], guard: Any) -> None:
    warp_instructions._store(at, np.stack([np.array(word.a, np.int32) for word in words], 1), guard)


def copy_small(to: Any, source: Any, size: int) -> None:
    wanted = warp_instructions._wanted(None)
    content = warp_emulator._machine[-1].memory[warp_instructions._places(source, size, wanted)]
    warp_emulator._warp().block.shared[warp_instructions._shared(to, size, wanted)] = content


# and of ``mxfp8.py``


def scale_byte(largest: Any, least: int = 1) -> Any:
    mantissa, exponent = np.frexp(largest.a)
    return Int32(np.clip(exponent - 9 + (mantissa > 0.875) + 127, least, 253))


def to_e4m3(first: Any, second: Any) -> Any:
    both = np.clip(np.stack([first.a, second.a], 1), -448, 448).astype(np.float32)
    codes = torch.from_numpy(both).to(torch.float8_e4m3fn).view(torch.uint8).numpy().astype(np.int32)
    return Int32(codes[:, 0] | codes[:, 1] << 8)


def from_e4m3(pair: Any) -> list[Any]:
    return [Float32(e4m3((pair.a >> shift & 255).astype(np.uint8)).astype(np.float32)) for shift in (0, 8)]


INSTRUCTIONS = {function.__name__: function for function in (
    allocate, deallocate, fence_before, fence_shared, store_columns, await_stores, load_columns, copy_scales, multiply,
    multiply_bf16, commit, load_four, store_many, copy_small, scale_byte, to_e4m3, from_e4m3)}
INSTRUCTIONS["fence_after"] = fence_after
MODULES = ("experts.mxfp4", "experts.mxfp8", "moe_parts", "experts.tensor_memory", "experts.call",
           "experts.block_scaled_list", "experts.block_scaled_weights", "experts.block_scaled_rows",
           "experts.block_scaled_copy", "experts.moe_experts_block_scaled")


def load() -> dict[str, Any]:
    """The modules of the kernel over the emulator's values."""
    warp_instructions.Arch.elect_one = staticmethod(elect_one)  # type: ignore[attr-defined]
    made = warp_emulator.load(MODULES)
    for module in made.values():
        for name in set(vars(module)) & set(INSTRUCTIONS):
            setattr(module, name, INSTRUCTIONS[name])
    return made


@contextmanager
def watched() -> Iterator[list[Machine]]:
    """Launches run beside tensor cores; each machine is kept in the list."""
    machines: list[Machine] = []

    def make(seed: int) -> Machine:
        machines.append(Machine(seed))
        return machines[-1]

    before = warp_emulator.Machine
    warp_emulator.Machine = make  # type: ignore[assignment, misc]
    try:
        yield machines
    finally:
        warp_emulator.Machine = before  # type: ignore[misc]


def run(launch: Any, tensors: Sequence[torch.Tensor], seed: int = 0) -> list[Core]:
    """Executes a bound launch. Returns the tensor cores of its blocks."""
    with watched() as machines:
        warp_emulator.run(launch, tensors, seed)
    return machines[0].cores


__all__ = ["Block", "Core", "SharedMatrix", "load", "run"]
