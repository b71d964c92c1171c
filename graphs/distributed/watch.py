"""A thread of each rank that says "alive" in the store and listens to the others; it ends a rank whose peer is gone.

The main thread may sit in a wait on the device that nobody will ever answer, so that only another thread can tell what
happened: it prints which rank is gone and how far this one got, and ends the process. The launcher's SIGTERM comes here
too, and is answered with the same words.
"""
from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

EVERY = 0.5  # seconds between two signs of life
SILENCE = 5.0  # seconds without one after which a rank is taken for dead
TOLD_SILENCE = 2.0  # the same once the launcher has asked this rank to end, as it does when another has died
ANSWER = 3.0  # seconds that a rank is given to say how far its launches got
EXIT_CODE = 3  # of a rank that was ended because of another


def hold_termination() -> None:
    """Leaves SIGTERM to the watch. To be called in the main thread, before any other is made."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def let_watch_decide() -> None:
    """Gives the watch the time to find a peer that is gone, and to end this process."""
    time.sleep(SILENCE + 3 * EVERY)


class Watch:
    """Signs of life of rank ``rank`` and of its peers. ``report`` gives lines about this rank, for the last words."""

    def __init__(self, rank: int, ranks: int, store: Any, *, silence: float = SILENCE,
                 end: Callable[[int], None] = os._exit) -> None:
        self.rank, self.store, self.silence, self.end = rank, store, silence, end
        self.report: Callable[[], list[str]] = list
        self._peers = [peer for peer in range(ranks) if peer != rank]
        self._heard = {peer: ("", time.monotonic()) for peer in self._peers}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="k3plan-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """A rank that leaves in order says so and is not missed."""
        with suppress(RuntimeError):
            self.store.set(f"beat/{self.rank}", "left")
        self._stopped.set()
        self._thread.join(2 * EVERY)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def _run(self) -> None:
        beats, told = 0, 0.0
        while not self._stopped.is_set():
            if signal.sigtimedwait({signal.SIGTERM}, EVERY) is not None:
                told = told or time.monotonic()
            beats += 1
            try:
                self.store.set(f"beat/{self.rank}", str(beats))
                reason = self.missing(min(self.silence, TOLD_SILENCE) if told else self.silence)
            except RuntimeError as error:  # the launcher and its store are gone
                reason = f"the launcher is gone ({error})"
            if not reason and told and time.monotonic() - told > self.silence + 2 * EVERY:
                reason = "the launcher ended all ranks"
            if reason and not self._stopped.is_set():
                self._say(reason)
                self.end(EXIT_CODE)
                return

    def missing(self, silence: float | None = None) -> str:
        """Which peer is gone and why this is believed; empty when all are well. ``silence`` in seconds."""
        silence = self.silence if silence is None else silence
        now = time.monotonic()
        for peer in self._peers:
            if self.store.check([f"refused/{peer}"]):
                return f"rank {peer} refused: {self.store.get(f'refused/{peer}').decode()}"
            beat = self.store.get(f"beat/{peer}").decode() if self.store.check([f"beat/{peer}"]) else ""
            if beat != self._heard[peer][0]:
                self._heard[peer] = beat, now
            elif beat != "left" and now - self._heard[peer][1] > silence:
                return f"rank {peer} has given no sign of life for {silence:.0f} s and is taken for dead"
        return ""

    def _say(self, reason: str) -> None:
        """Who is gone first: what this rank's device tells may be long in coming, or never come."""
        print(f"k3plan: rank {self.rank} stops: {reason}", file=sys.stderr, flush=True)
        lines: list[str] = []

        def ask() -> None:
            try:
                lines.extend(self.report())
            except Exception as error:
                lines.append(f"nothing is known of this rank's device: {type(error).__name__}: {error}")

        asking = threading.Thread(target=ask, name="k3plan-last-words", daemon=True)
        asking.start()
        asking.join(ANSWER)
        found = lines or [f"nothing is known of this rank's device: no answer within {ANSWER:.0f} s"]
        print("\n".join(f"  {line}" for line in found), file=sys.stderr, flush=True)
