"""The instructions of ``ops_cute`` as numpy operations on 32 lanes: what ``warp_emulator.py`` puts in their place."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import warp_emulator as machine
from races import Races
from warp_emulator import LANES, Barrier, Boolean, Float32, Int32, Int64, wait_until


def _wanted(guard: Any) -> np.ndarray:
    active = machine._warp().active
    return active if guard is None else active & (Int32(guard).a != 0)


def select(condition: Any, yes: Any, no: Any) -> Any:
    return type(yes)(np.where(Boolean(condition).a, yes.a, type(yes)(no).a))


# global memory


def _places(at: Any, size: int, wanted: np.ndarray, alignment: int = 0) -> np.ndarray:
    here, start = machine._machine[-1], at.a.astype(np.int64)[wanted]
    assert not (start % (alignment or size)).any(), f"an access of {size} bytes at {start}"
    assert ((start >= 0) & (start + size <= here.memory.size)).all(), "an address outside memory"
    places = start[:, None] + np.arange(size)
    assert here.inside[places].all(), f"an access of {size} bytes outside every tensor"
    return places


def load_words(at: Any, count: int = 4, *, guard: Any = None, stream: bool = False) -> list[Any]:
    wanted, found = _wanted(guard), np.zeros((32, count), np.int32)
    machine._warp().looked = machine._machine[-1].stores
    content = machine._machine[-1].memory[_places(at, 4 * count, wanted)]
    found[wanted] = np.ascontiguousarray(content).view(np.int32).reshape(-1, count)
    return [Int32(found[:, i]) for i in range(count)]


def store_words(at: Any, words: Sequence[Any], *, guard: Any = None) -> None:
    wanted = _wanted(guard)
    content = np.stack([word.a.astype(np.int32)[wanted] for word in words], 1)
    machine._machine[-1].memory[_places(at, 4 * len(words), wanted)] = np.ascontiguousarray(content).view(np.uint8)
    machine._machine[-1].stores += 1


def store_half(at: Any, word: Any, *, guard: Any = None) -> None:
    wanted = _wanted(guard)
    content = np.ascontiguousarray(word.a.astype(np.int32)[wanted]).view(np.uint8).reshape(-1, 4)[:, :2]
    machine._machine[-1].memory[_places(at, 2, wanted)] = content
    machine._machine[-1].stores += 1


def load_half(at: Any, *, guard: Any = None) -> Any:
    wanted, found = _wanted(guard), np.zeros(32, np.uint16)
    content = machine._machine[-1].memory[_places(at, 2, wanted)]
    found[wanted] = np.ascontiguousarray(content).view(np.uint16)[:, 0]
    return Int32(found)


def load_number(at: Any, kind: Any = Int32) -> Any:
    wanted, found = _wanted(None), np.zeros(32, kind.dtype)
    content = machine._machine[-1].memory[_places(at, found.itemsize, wanted)]
    found[wanted] = np.ascontiguousarray(content).view(kind.dtype)[:, 0]
    return kind(found)


def store_number(at: Any, value: Any, guard: Any) -> None:
    store_words(at, [value], guard=guard)


def publish(at: Any, word: Any, guard: Any) -> None:
    store_words(at, [word], guard=guard)


def look(at: Any, guard: Any, count: int = 4) -> list[Any]:
    wanted = _wanted(guard)
    return [Int32(np.where(wanted, word.a, 1)) for word in load_words(at, count, guard=guard)]


def publish_fragment(at: Any, words: Sequence[Any], guard: Any) -> None:
    store_words(at, words, guard=guard)


def look_at_pair(at: Any, guard: Any) -> list[Any]:
    return look(at, guard, 2)


def reload(at: Any, words: Sequence[Any], guard: Any) -> list[Any]:
    return [select(Int32(guard).a != 0, new, old)
            for new, old in zip(load_words(at, 4, guard=guard), words, strict=True)]


def publish_row(count: Any, at: Any, factor: Any) -> None:
    store_words(at, [factor])
    store_words(count, [load_words(count, 1)[0] + 1])


def acquire() -> None:
    pass


def is_late(words: Sequence[Any]) -> Any:
    late = np.zeros(32, bool)
    for word in words:
        late |= word.a == 0
    return Int32(late)


def send_words(at: Any, words: Sequence[Any], guard: Any, *, multicast: bool = False) -> None:
    store_words(at, words, guard=guard)


def look_at(at: Any, guard: Any = None) -> list[Any]:
    return load_words(at, 4) if guard is None else look(at, guard)


def wait_for(places: Sequence[Any], words: Sequence[Any]) -> list[Any]:
    words = list(words)
    while True:
        late = [is_late(words[4 * i : 4 * i + 4]) for i in range(len(places))]
        if not any(one.a[_wanted(None)].any() for one in late):
            return words
        machine.rest_until_a_store()
        for i, (at, one) in enumerate(zip(places, late, strict=True)):
            new = load_words(at, 4, guard=one)
            words[4 * i : 4 * i + 4] = [select(one == 1, n, w) for n, w in zip(new, words[4 * i :], strict=False)]


def encode(word: Any) -> Any:
    return Int32(np.where(~word.a == 0, 1, ~word.a))


# shared memory


def _shared(at: Any, size: int, wanted: np.ndarray) -> np.ndarray:
    memory, start = machine._warp().block.shared, at.a.astype(np.int64)[wanted]
    assert not (start % size).any(), f"a shared access of {size} bytes at {start}"
    assert ((start >= 0) & (start + size <= memory.size)).all(), f"an address outside shared memory: {start}"
    return start[:, None] + np.arange(size)


def _threads(wanted: np.ndarray) -> np.ndarray:
    return 32 * machine._warp().number + np.flatnonzero(wanted)


def _load(at: Any, size: int, kind: Any) -> np.ndarray:
    wanted, count = _wanted(None), size // np.dtype(kind).itemsize
    found = np.zeros((32, count), kind)
    places = _shared(at, size, wanted)
    machine._warp().block.races.load(places, _threads(wanted))
    content = machine._warp().block.shared[places]
    found[wanted] = np.ascontiguousarray(content).view(kind).reshape(-1, count)
    return found


def _store(at: Any, content: np.ndarray, guard: Any) -> None:
    wanted = _wanted(guard)
    content = np.ascontiguousarray(content[wanted])
    size = content.shape[1] * content.itemsize
    places = _shared(at, size, wanted)
    block, stored = machine._warp().block, content.view(np.uint8).reshape(-1, size)
    if size == 1:
        block.races.part(places, _threads(wanted))
    else:
        same = (block.shared[places] == stored).reshape(-1, size // 4, 4).all(2)
        block.races.store(places, _threads(wanted), same)
    block.shared[places] = stored


def load_shared(at: Any, count: int = 1) -> Any:
    found = _load(at, 4 * count, np.float32)
    return Float32(found[:, 0]) if count == 1 else [Float32(found[:, i]) for i in range(count)]


def store_shared(at: Any, values: Sequence[Any], *, guard: Any = None) -> None:
    _store(at, np.stack([v.a.astype(np.float32) for v in values], 1), guard)


def load_word(at: Any) -> Any:
    return Int32(_load(at, 4, np.int32)[:, 0])


def store_word(at: Any, value: Any, guard: Any = 1) -> None:
    _store(at, value.a.astype(np.int32)[:, None], guard)


def load_byte(at: Any) -> Any:
    return Int32(_load(at, 1, np.uint8)[:, 0])


def load_signed_byte(at: Any) -> Any:
    return Int32(_load(at, 1, np.int8)[:, 0])


def store_byte(at: Any, value: Any, guard: Any) -> None:
    _store(at, value.a.astype(np.uint8)[:, None], guard)


def _note_atomic(at: Any, guard: Any) -> None:
    machine._warp().block.races.part(at.a.astype(np.int64)[_wanted(guard)][:, None], _threads(_wanted(guard)))


def _note_rows(start: np.ndarray) -> None:
    """Every lane of a warp reads what the lanes point to."""
    places = (start[:, None] + np.arange(16)).reshape(1, -1)
    machine._warp().block.races.load(np.repeat(places, 32, 0), _threads(np.ones(32, bool)))


def set_bits(at: Any, bits: Any, guard: Any) -> None:
    _note_atomic(at, guard)
    words, added = machine._warp().block.shared.view(np.uint32), np.ascontiguousarray(bits.a).view(np.uint32)
    for lane in np.flatnonzero(_wanted(guard)):
        words[at.a[lane] // 4] |= added[lane]


def add_shared(at: Any, value: Any, guard: Any) -> Any:
    _note_atomic(at, guard)
    words, before = machine._warp().block.shared.view(np.int32), np.zeros(32, np.int32)
    for lane in np.flatnonzero(_wanted(guard)):
        before[lane] = words[at.a[lane] // 4]
        words[at.a[lane] // 4] += value.a[lane]
    return Int32(before)


def load_matrices(at: Any, count: int = 4) -> list[Any]:
    memory, start = machine._warp().block.shared, at.a[: 8 * count]
    assert not (start % 16).any(), f"rows of a matrix at {start}"
    assert (start + 16 <= memory.size).all(), f"rows of a matrix at {start}"
    _note_rows(start)
    rows = memory[start[:, None] + np.arange(16)].view(np.int32)
    return [Int32(rows[8 * m : 8 * m + 8].reshape(-1)) for m in range(count)]


def load_matrices_transposed(at: Any) -> list[Any]:
    memory, start = machine._warp().block.shared, at.a
    assert not (start % 16).any(), f"rows of a matrix at {start}"
    assert (start + 16 <= memory.size).all(), f"rows of a matrix at {start}"
    _note_rows(start)
    halves = memory[start[:, None] + np.arange(16)].view(np.int16).reshape(4, 8, 8)
    columns = np.ascontiguousarray(halves.transpose(0, 2, 1)).view(np.int32)
    return [Int32(columns[m].reshape(-1)) for m in range(4)]


# barriers


def _barrier(at: Any) -> Barrier:
    return machine._warp().block.barriers[int(at.a[np.argmax(_wanted(None))])]


def init_barrier(at: Any, arrivals: int) -> None:
    place = int(at.a[np.argmax(_wanted(None))])
    machine._warp().block.barriers[place] = Barrier(arrivals, arrivals)


def publish_barriers() -> None:
    pass


def arrive(at: Any, count: int = 1, guard: Any = 1) -> None:
    wanted, races = _wanted(guard), machine._warp().block.races
    for lane in np.flatnonzero(wanted):
        barrier = _barrier(at)
        races.release(int(at.a[lane]), np.array([32 * machine._warp().number + lane]))
        barrier.left -= count
        assert barrier.left >= 0, "more arrivals than a barrier waits for"
        _settle(barrier, int(at.a[lane]), races)


def _settle(barrier: Barrier, place: int, races: Races) -> None:
    before = barrier.phase
    barrier.settle()
    if barrier.phase != before:
        races.end_phase(place, before)


def expect_bytes(at: Any, count: Any) -> None:
    wanted = _wanted(None)
    barrier = _barrier(at)
    barrier.bytes += int(count.a[wanted].sum())
    arrive(at)


def await_phase(at: Any, parity: Any) -> None:
    barrier, wanted = _barrier(at), int(parity.a[np.argmax(_wanted(None))])
    # the phase of that parity has ended: the current one has the other
    wait_until(lambda: barrier.phase & 1 != wanted)
    machine._warp().block.races.acquire(int(at.a[np.argmax(_wanted(None))]), _threads(_wanted(None)))


def stream_policy() -> Any:
    return Int64(0)


def _copy(to: Any, source: Any, sizes: np.ndarray, wanted: np.ndarray, barriers: Any = None) -> None:
    """``barriers``: where the copy engine tells of it; lanes' own copies ``arrive_copied`` tells of."""
    here, warp = machine._machine[-1], machine._warp()
    shared = warp.block.shared
    for lane in np.flatnonzero(wanted):
        start, at, size = int(source.a[lane]), int(to.a[lane]), int(sizes[lane])
        assert start % 16 == at % 16 == size % 16 == 0, f"a copy of {size} bytes from {start} to {at}"
        assert here.inside[start : start + size].all(), f"a copy of {size} bytes from {start}, outside every tensor"
        assert at + size <= shared.size, "a copy to outside shared memory"
        place = None if barriers is None else int(barriers.a[lane])
        phase = 0 if place is None else warp.block.barriers[place].phase
        warp.block.races.copy(at, size, 32 * warp.number + int(lane), place, phase)
        shared[at : at + size] = here.memory[start : start + size]


def copy_bulk(to: Any, source: Any, size: Any, barrier: Any, policy: Any, guard: Any) -> None:
    wanted = _wanted(guard)
    _copy(to, source, size.a, wanted, barrier)
    for lane in np.flatnonzero(wanted):
        one = machine._warp().block.barriers[int(barrier.a[lane])]
        one.bytes -= int(size.a[lane])
        _settle(one, int(barrier.a[lane]), machine._warp().block.races)


def fence_shared() -> None:
    """Here the copy engine writes in the order of the barriers."""


def copy_async(to: Any, source: Any, policy: Any, guard: Any) -> None:
    _copy(to, source, np.full(32, 16), _wanted(guard))


def arrive_copied(at: Any) -> None:
    machine._warp().block.races.tell(machine._warp().number, int(at.a[np.argmax(_wanted(None))]), _barrier(at).phase)
    arrive(at)


# numbers


def pack(values: Sequence[Any]) -> list[Any]:
    halves = [torch.from_numpy(np.array(v.a)).bfloat16().view(torch.int16).numpy().astype(np.int64) & 0xFFFF
              for v in values]
    return [Int32((low | (high << 16)).astype(np.uint32).view(np.int32))
            for low, high in zip(halves[::2], halves[1::2], strict=True)]


def widen(word: Any) -> list[Any]:
    values = torch.from_numpy(np.ascontiguousarray(word.a).view(np.uint8).copy()).view(torch.float8_e4m3fn)
    halves = np.ascontiguousarray(values.bfloat16().view(torch.int16).numpy()).view(np.int32).reshape(32, 2)
    return [Int32(halves[:, 0]), Int32(halves[:, 1])]


def pack_f16(low: Any, high: Any) -> Any:
    with np.errstate(all="ignore"):
        halves = np.stack([low.a.astype(np.float16), high.a.astype(np.float16)], 1)
    return Int32(np.ascontiguousarray(halves).view(np.int32)[:, 0])


def unpack_f16(word: Any) -> list[Any]:
    halves = np.ascontiguousarray(word.a).view(np.float16).reshape(32, 2)
    return [Float32(halves[:, 0]), Float32(halves[:, 1])]


def larger_halves(a: Any, b: Any) -> Any:
    halves = [np.ascontiguousarray(word.a).view(np.uint16) for word in (a, b)]
    return Int32(np.maximum(*halves).view(np.int32))


def permute_bytes(a: Any, b: Any, selector: int) -> Any:
    both = np.stack([a.a, b.a], 1).copy().view(np.uint8).reshape(32, 8)
    picked = [both[:, selector >> (4 * i) & 7] for i in range(4)]
    assert not selector & 0x8888, "sign replication"
    return Int32(np.ascontiguousarray(np.stack(picked, 1)).view(np.int32)[:, 0])


def _function(name: str) -> Any:
    def apply(*values: Any) -> Any:
        with np.errstate(all="ignore"):
            return Float32(getattr(np, name)(*(v.a for v in values)))
    return apply


exp2, log2, exact_exp, divide = _function("exp2"), _function("log2"), _function("exp"), _function("divide")


def reciprocal(x: Any) -> Any:
    return divide(Float32(1.0), x)


inverse = reciprocal


def rsqrt(x: Any) -> Any:
    with np.errstate(all="ignore"):
        return Float32((1 / np.sqrt(x.a)).astype(np.float32))


def round_to_e4m3(values: Sequence[Any], largest: Any) -> list[Any]:
    mantissa, exponent = np.frexp(largest.a)
    exponent = np.where(largest.a > 0, exponent - 9 + (mantissa > 0.875), 0).astype(np.float32)
    found = []
    for value in values:
        scaled = torch.from_numpy((value.a * np.exp2(-exponent)).astype(np.float32))
        found.append(Float32(scaled.to(torch.float8_e4m3fn).float().numpy() * np.exp2(exponent)))
    return found


def _product(a: Sequence[Any], b: Sequence[Any], c: Sequence[Any], halves: Any) -> list[Any]:
    r, q = LANES // 4, LANES % 4
    left, right = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32)
    for word, (row, column) in zip(a, ((0, 0), (8, 0), (0, 8), (8, 8)), strict=True):
        for i in range(2):
            left[r + row, 2 * q + i + column] = halves(word)[i].a
    for word, row in zip(b, (0, 8), strict=True):
        for i in range(2):
            right[2 * q + i + row, r] = halves(word)[i].a
    with np.errstate(all="ignore"):
        product = left @ right
        return [Float32(x.a + product[r + 8 * (n // 2), 2 * q + n % 2]) for n, x in enumerate(c)]


def mma(a: Sequence[Any], b: Sequence[Any], c: Sequence[Any]) -> list[Any]:
    return _product(a, b, c, lambda w: [(w << 16).bitcast(Float32), (w & Int32(-65536)).bitcast(Float32)])


def mma_f16(a: Sequence[Any], b: Sequence[Any], c: Sequence[Any] | None = None) -> list[Any]:
    return _product(a, b, [Float32(0.0)] * 4 if c is None else c, unpack_f16)


def _halves(key: Any) -> tuple[Any, Any]:
    words = np.ascontiguousarray(key.a).view(np.int32).reshape(32, 2)
    return Int32(words[:, 0]), Int32(words[:, 1])


def _whole(low: Any, high: Any) -> Any:
    words = np.stack([low.a.astype(np.int32), high.a.astype(np.int32)], 1)
    return Int64(np.ascontiguousarray(words).view(np.int64)[:, 0])


def least_of_lanes(word: Any) -> Any:
    return Int32(word.a.min())


# warps


def own_thread() -> Any:
    return Arch.thread_idx()[0]


def own_block() -> Any:
    return Arch.block_idx()[0]


def lane_xor(value: Any, lanes: int) -> Any:
    return type(value)(value.a[LANES ^ lanes])


def lane_value(value: Any, lane: Any) -> Any:
    return type(value)(value.a[Int32(lane).a & 31])


class Arch:
    """``cute.arch``."""

    @staticmethod
    def thread_idx() -> tuple[Any, ...]:
        return Int32(32 * machine._warp().number + LANES), Int32(0), Int32(0)

    @staticmethod
    def block_idx() -> tuple[Any, ...]:
        return tuple(map(Int32, machine._warp().block.index))

    @staticmethod
    def get_dyn_smem(kind: Any, alignment: int) -> Any:
        return machine.Pointer(Int32(0))

    @staticmethod
    def make_warp_uniform(value: Any) -> Any:
        return Int32(value.a[0])

    @staticmethod
    def sync_warp() -> None:
        machine._warp().block.races.meet(_threads(_wanted(None)))

    @staticmethod
    def setmaxregister_increase(count: int) -> None:
        assert count % 8 == 0, f"{count} registers"

    setmaxregister_decrease = setmaxregister_increase

    @classmethod
    def sync_threads(cls) -> None:
        cls.barrier(barrier_id=0, number_of_threads=machine._machine[-1].threads)  # type: ignore[attr-defined]

    @staticmethod
    def barrier_arrive(*, barrier_id: int, number_of_threads: int, aligned: bool = True) -> None:
        came, races = machine._warp().block.named.setdefault(barrier_id, [0, 0]), machine._warp().block.races
        came[0] += 32
        races.release(("named", barrier_id), _threads(np.ones(32, bool)))
        assert came[0] <= number_of_threads, f"more than {number_of_threads} threads at barrier {barrier_id}"
        if came[0] == number_of_threads:
            came[:] = [0, came[1] + 1]
            races.end_phase(("named", barrier_id))

    @classmethod
    def barrier(cls, *, barrier_id: int, number_of_threads: int) -> None:
        came = machine._warp().block.named.setdefault(barrier_id, [0, 0])
        ended = came[1]
        cls.barrier_arrive(barrier_id=barrier_id, number_of_threads=number_of_threads)
        wait_until(lambda: came[1] > ended)
        machine._warp().block.races.acquire(("named", barrier_id), _threads(np.ones(32, bool)))

    @staticmethod
    def popc(word: Any) -> Any:
        return Int32([int(w & 0xFFFFFFFF).bit_count() for w in word.a.tolist()])

    @staticmethod
    def shuffle_sync_up(value: Any, lanes: int, mask_and_clamp: int = 0) -> Any:
        return type(value)(value.a[np.where(lanes <= LANES, LANES - lanes, LANES)])

    @staticmethod
    def vote_ballot_sync(condition: Any) -> Any:
        held = Boolean(condition).a
        return Int32(np.uint32(sum(1 << lane for lane in range(32) if held[lane])).view(np.int32))

    @staticmethod
    def fmax(a: Any, b: Any) -> Any:
        return Float32(np.fmax(Float32(a).a, Float32(b).a))

    @staticmethod
    def fmin(a: Any, b: Any) -> Any:
        return Float32(np.fmin(Float32(a).a, Float32(b).a))
