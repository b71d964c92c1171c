"""Many processes for ``k3plan tune``: all cores compile first, then one process a GPU times.

A kernel that faults takes its CUDA context with it, so a process that times is watched: when it dies, the job that it
was at is told as failed and a new process goes on with the next. Jobs are rebuilt in each process from the spec, since
regions hold functions; ``load_kernels`` is passed by its name.
"""
from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from ...compiler.kernel import KernelDef
from ...compiler.spec import Spec
from ..bench import random_inputs, time_region
from ..launch import allocate, bind_region, scratch_of
from ..verify import check_of
from .alone import Job, Outcome, jobs, spread, time_job

PATIENCE_SECONDS = 60.0  # for one job; a kernel that hangs is a failure like another


@dataclass(frozen=True)
class Workload:
    """What to time: picklable, and the same jobs in the same order in every process."""

    spec: Spec
    rows: tuple[tuple[int, int], ...]
    only: str
    load_kernels: Callable[[], Sequence[KernelDef]]
    most_configs: int = 1000
    time_one: Callable[..., Any] = time_region
    check_of: Callable[..., Any] = check_of
    most_shapes: int = 1000

    def jobs(self) -> list[Job]:
        """Jobs of the kernels whose id contains one of ``only`` (parts between commas), with ``most_configs`` each, and
        ``most_shapes`` of those that ``spread`` takes for neighbours, at most."""
        wanted = [job for job in jobs(self.spec, self.load_kernels(), self.rows) if self._wants(job.region.kernel.id)]
        return [replace(job, configs=job.configs[: self.most_configs]) for job in spread(wanted, self.most_shapes)]

    def _wants(self, kernel: str) -> bool:
        return any(part in kernel for part in self.only.split(","))


def tune(work: Workload, *, seconds: float = float("inf"), say: Callable[[str], None] = print) -> Iterator[Outcome]:
    """Outcomes of all jobs, as they come. Stops starting jobs when ``seconds`` are spent, and says so."""
    started = time.perf_counter()
    todo = work.jobs()
    if not todo:
        say(f"no kernel's id contains any of {work.only}: nothing to time")
        return
    compile_all(work, [(i, k) for i, job in enumerate(todo) for k in range(len(job.configs))])
    say(f"{len(todo)} shapes, {sum(len(j.configs) for j in todo)} configurations, compiled in "
        f"{time.perf_counter() - started:.0f} s")
    pending = list(range(len(todo)))[::-1]
    workers = [_Worker(work, gpu) for gpu in range(min(max(1, torch.cuda.device_count()), len(todo)))]
    while True:
        for worker in workers:
            if worker.job is None and pending and time.perf_counter() - started < seconds:
                worker.start(pending.pop())
        busy = [worker for worker in workers if worker.job is not None]
        if not busy:
            break
        wait([worker.pipe for worker in busy], timeout=1.0)
        for worker in busy:
            at, outcome = worker.job, worker.poll()
            if outcome is not None and at is not None:
                yield Outcome(todo[at], *outcome)
    for worker in workers:
        worker.stop()
    if pending:
        say(f"time is up: {len(pending)} of {len(todo)} shapes were not timed")


class _Worker:
    """A process that times jobs on one GPU, started again when it dies."""

    def __init__(self, work: Workload, gpu: int) -> None:
        self.work, self.gpu = work, gpu
        self.job: int | None = None
        self.since = 0.0
        self._spawn()

    def _spawn(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_time_jobs, args=(self.work, self.gpu, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, job: int) -> None:
        self.job, self.since = job, time.perf_counter()
        with contextlib.suppress(OSError):  # it died while idle: poll sees it
            self.pipe.send(job)

    def poll(self) -> tuple[tuple[float | None, ...], tuple[str, ...]] | None:
        """What the process sent for its job; a failure when it died or hangs; None when it is at work."""
        why = ""
        if self.pipe.poll():
            try:
                found = self.pipe.recv()
                self.job = None
                return found
            except (EOFError, ConnectionError):  # closed, or reset by a process that was killed with an answer due
                self.process.join()
                why = f"the process ended with {self.process.exitcode}: most likely a fault in the kernel"
        elif time.perf_counter() - self.since > PATIENCE_SECONDS:
            why = f"no answer in {PATIENCE_SECONDS:.0f} s: the kernel hangs"
        if not why:
            return None
        self.process.kill()
        self.job = None
        self._spawn()
        return (), (why,)

    def stop(self) -> None:
        self.process.kill()


def _time_jobs(work: Workload, gpu: int, pipe: Connection) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(gpu)
    todo = work.jobs()
    with contextlib.suppress(EOFError):
        while True:
            outcome = time_job(todo[pipe.recv()], work.time_one, work.check_of)
            pipe.send((outcome.us, outcome.failures))
            if any("CUDA error" in failure for failure in outcome.failures):
                return  # the context is lost, and with it every later launch


def compile_all(work: Workload, wanted: Sequence[tuple[int, int]]) -> None:
    """Fills the compilers' caches on disk with every configuration, given as job and configuration, on all cores. What
    fails here fails again, and is told, when it is timed."""
    cores = max(1, len(os.sched_getaffinity(0)) - 1)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(cores, len(wanted)), context, initializer=_prepare, initargs=(work,)) as pool:
        list(pool.map(_compile_one, *zip(*wanted, strict=True)))


_todo: list[Job] = []  # of a process that compiles


def _prepare(work: Workload) -> None:
    _todo[:] = work.jobs()


def _compile_one(index: int, config: int) -> None:
    job = _todo[index]
    with contextlib.suppress(Exception):
        _compile(job, random_inputs(job.region, "meta"), job.configs[config])


def _compile(job: Job, tensors: dict[str, Any], config: dict[str, Any]) -> None:
    scratch = {name: allocate(wanted, "meta") for name, wanted in scratch_of(job.region, config).items()}
    launch: Any = bind_region(job.region, tensors, config, scratch=scratch, dependent_launch=True)
    if hasattr(launch, "compile"):
        launch.compile()
