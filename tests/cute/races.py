"""Races in a block's shared memory, found on the warp emulator: accesses that no order of events keeps apart.

Every thread has a vector clock; what orders events moves clocks: ``bar.warp.sync``, named barriers, arrivals at an
``mbarrier`` and waits for its phases, each lane for itself, so that a lane that arrives for its warp vouches for what
the others did before they met, and for nothing else. The copy engine is a thread of its own at each barrier: what it
brings is written when the phase ends. Two accesses of a word, one of which stores, must be ordered by the clocks,
whatever the order in which this run had them. Words are 4 bytes. Not held against each other: two stores of the same
bits, two of single bytes. Global memory is not looked at.
"""
from __future__ import annotations

from typing import Any

import numpy as np

WORD = 4
ENGINES = 512  # barriers whose copies are told apart
NEVER = 2**31 - 1  # a clock that nobody reaches: copies of lanes that no barrier tells of yet


class Races:
    """What is known of one block of ``threads``. A race is an AssertionError."""

    def __init__(self, threads: int, size: int) -> None:
        words, columns = -(-size // WORD), threads + ENGINES
        self.clock = np.zeros((threads, columns), np.int32)
        np.fill_diagonal(self.clock, 1)
        self.writer, self.written = np.full(words, -1, np.int32), np.zeros(words, np.int32)
        self.reads = np.zeros((words, threads), np.int32)
        self.parts = np.zeros((words, threads), np.int32)  # atomics, and stores of single bytes
        self.touched = np.zeros((2, words), bool)  # by reads, by parts
        self.pending: dict[Any, np.ndarray] = {}  # of a barrier: what this phase's arrivals vouch for
        self.done: dict[Any, np.ndarray] = {}
        self.engines: dict[int, int] = {}
        self.untold: dict[int, list[np.ndarray]] = {}  # words that a warp's lanes copy

    # accesses: byte places [lanes, bytes] and the lanes' threads

    def load(self, places: np.ndarray, threads: np.ndarray) -> None:
        words = places[:, ::WORD] // WORD
        self._after_writes(words, threads, "loads")
        self._after(self.parts, self.touched[1], words, threads, "loads")
        self.reads[words, threads[:, None]] = self.clock[threads, threads][:, None]
        self.touched[0][words] = True

    def store(self, places: np.ndarray, threads: np.ndarray, same: np.ndarray) -> None:
        """``same`` [lanes, words]: what lies there already, which several may store."""
        words = places[:, ::WORD] // WORD
        self._may_store(words, threads, same)
        self._own(words, threads[:, None], self.clock[threads, threads][:, None])

    def part(self, places: np.ndarray, threads: np.ndarray) -> None:
        """An atomic, or a single byte."""
        words = places[:, :1] // WORD
        self._may_store(words, threads, whole=False)
        self.parts[words, threads[:, None]] = self.clock[threads, threads][:, None]
        self.touched[1][words] = True

    def copy(self, start: int, size: int, thread: int, barrier: int | None, phase: int = 0) -> None:
        """The copy engine's, told at a barrier's phase; of a lane, told by ``tell`` later."""
        words = np.arange(start // WORD, (start + size) // WORD)[None]
        threads = np.array([thread])
        self._may_store(words, threads)
        if barrier is None:
            self._own(words, self.clock.shape[1] - 1, NEVER)
            self.untold.setdefault(thread // 32, []).append(words)
        else:
            self._own(words, self._engine(barrier), phase + 1)

    def tell(self, warp: int, barrier: int, phase: int) -> None:
        """A warp's lanes arrive when what they copied so far has come."""
        for words in self.untold.pop(warp, []):
            self._own(words, self._engine(barrier), phase + 1)

    def _own(self, words: np.ndarray, writer: Any, clock: Any) -> None:
        self.writer[words], self.written[words] = writer, clock
        for seen, touched in zip((self.reads, self.parts), self.touched, strict=True):
            if touched[words].any():
                seen[words], touched[words] = 0, False

    def _may_store(self, words: np.ndarray, threads: np.ndarray, same: Any = False, *, whole: bool = True) -> None:
        self._after_writes(words, threads, "stores", same)
        self._after(self.reads, self.touched[0], words, threads, "stores")
        if whole:
            self._after(self.parts, self.touched[1], words, threads, "stores")

    def _after_writes(self, words: np.ndarray, threads: np.ndarray, what: str, same: Any = False) -> None:
        writer = self.writer[words]
        known = (writer < 0) | (writer == threads[:, None]) | same
        known |= self.clock[threads[:, None], np.maximum(writer, 0)] >= self.written[words]
        if not known.all():
            lane, i = np.argwhere(~known)[0]
            self._tell_race(threads[lane], what, words[lane, i], "was written", writer[lane, i])

    def _after(self, seen: np.ndarray, touched: np.ndarray, words: np.ndarray, threads: np.ndarray, what: str) -> None:
        if not touched[words].any():
            return
        before = seen[words]
        known = before <= self.clock[threads][:, None, : before.shape[2]]
        if not known.all():
            lane, i, other = np.argwhere(~known)[0]
            how = "is read" if seen is self.reads else "is changed"
            self._tell_race(threads[lane], what, words[lane, i], how, other)

    def _tell_race(self, thread: int, what: str, word: int, how: str, other: int) -> None:
        by = f"thread {other}" if other < len(self.clock) else "a copy"
        raise AssertionError(f"race: thread {thread} {what} byte {WORD * word} of shared memory, which {how} by {by}")

    # order

    def meet(self, threads: np.ndarray) -> None:
        self.clock[threads] = self.clock[threads].max(0)
        self.clock[threads, threads] += 1

    def release(self, barrier: Any, threads: np.ndarray) -> None:
        self.vouch(barrier, self.leave(threads))

    def leave(self, threads: np.ndarray) -> np.ndarray:
        """What they did so far, which someone may vouch for later: the tensor core when it has come so far."""
        done = self.clock[threads].max(0)
        self.clock[threads, threads] += 1
        return done

    def vouch(self, barrier: Any, done: np.ndarray) -> None:
        self.pending[barrier] = np.maximum(self.pending.get(barrier, 0), done)

    def end_phase(self, barrier: Any, phase: int = 0) -> None:
        """Number ``phase`` of the barrier, counted from 0, is over."""
        before = self.done.get(barrier, np.zeros(self.clock.shape[1], np.int32))
        ended = np.maximum(self.pending.pop(barrier, 0), before)
        if barrier in self.engines:
            ended[self.engines[barrier]] = phase + 1
        self.done[barrier] = ended

    def acquire(self, barrier: Any, threads: np.ndarray) -> None:
        if barrier in self.done:
            self.clock[threads] = np.maximum(self.clock[threads], self.done[barrier])

    def _engine(self, barrier: int) -> int:
        number = self.engines.setdefault(barrier, len(self.clock) + len(self.engines))
        assert number < self.clock.shape[1] - 1, f"more than {ENGINES - 1} barriers"
        return number
