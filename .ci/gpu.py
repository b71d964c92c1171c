"""Runs what needs GPUs (gpu_jobs.py) within a time that is short, as rented machines are.

    python .ci/gpu.py --seconds 480 --out results                # everything, in order
    python .ci/gpu.py --seconds 480 --out results tune buckets   # some of it

Jobs for several GPUs run first and alone; then each GPU has a lane. What a job prints is in OUT/NAME.txt while it runs,
its files are in OUT/NAME. A job gets what is left where that is less than its limit; none starts in the last 20
seconds. The table of what ran is printed last. The exit status is 1 when a job failed or was ended, 2 when one did not
start.
"""
from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_jobs import JOBS, Job

ROOT = Path(__file__).resolve().parents[1]
LEAST = 20  # seconds that a job is started with


@dataclass
class Run:
    job: Job
    gpus: tuple[int, ...]
    process: subprocess.Popen[bytes]
    started: float
    limit: float
    end: str = ""
    seconds: float = 0.0

    def poll(self, now: float) -> bool:
        """True when it has ended; ends it when its time is over."""
        status = self.process.poll()
        if status is None and now - self.started < self.limit:
            return False
        if status is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self.end = "out of time" if status is None else "ok" if status == 0 else f"exit {status}"
        self.seconds = now - self.started
        return True


def environment(tree: Path) -> dict[str, str]:
    """Fills ``tree``, where jobs run: this source tree with ``k3plan`` as users import it, so that nothing has to be
    installed. Its variables; ``k3plan`` and ``pytest`` are this Python's."""
    (tree / "k3plan").mkdir()
    packages = ("compiler", "ops_triton", "ops_cute", "graphs")
    for part in (*ROOT.glob("k3plan/*.py"), *(ROOT / name for name in packages)):
        (tree / "k3plan" / part.name).symlink_to(part)
    for name in ("tests", "examples", "pyproject.toml", *packages):
        (tree / name).symlink_to(ROOT / name)
    (tree / "bin").mkdir()
    for name, module in (("k3plan", "k3plan.cli"), ("pytest", "pytest")):
        script = tree / "bin" / name
        script.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -c 'import {module} as m; "
                          "raise SystemExit(m.main())' \"$@\"\n")
        script.chmod(0o755)
    python_path = f"{tree}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
    return {**os.environ, "PYTHONPATH": python_path, "PATH": f"{tree / 'bin'}{os.pathsep}{os.environ['PATH']}",
            # no k3plan of the folder that a job starts in; output as it comes
            "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "TREE": str(tree)}


def start(job: Job, gpus: Sequence[int], seconds: float, out: Path, env: Mapping[str, str]) -> Run:
    folder, limit = out / job.name, min(job.limit, seconds)
    folder.mkdir(parents=True, exist_ok=True)
    log = open(out / f"{job.name}.txt", "wb")  # noqa: SIM115
    log.write(f"$ {job.command}\n".encode())
    log.flush()
    env = {**env, "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "OUT": str(folder.resolve()),
           "SECONDS_LEFT": str(int(limit))}
    process = subprocess.Popen(["bash", "-c", job.command], cwd=env["TREE"], env=env, stdout=log,
                               stderr=subprocess.STDOUT, start_new_session=True)
    return Run(job, tuple(gpus), process, time.monotonic(), limit)


def run_all(jobs: Sequence[Job], gpus: int, seconds: float, out: Path, env: Mapping[str, str]) -> list[Run]:
    """Runs ``jobs`` on ``gpus`` GPUs; those that need more, or for which no time was left, are not in the list."""
    end, done, running = time.monotonic() + seconds, [], list[Run]()
    waiting = [job for job in sorted(jobs, key=lambda job: job.gpus == 1) if job.gpus <= gpus]
    free = [1.0] * gpus
    while waiting or running:
        now = time.monotonic()
        for run in [run for run in running if run.poll(now)]:
            running.remove(run)
            done.append(run)
            print(f"{run.job.name}: {run.end} after {run.seconds:.0f} s", flush=True)
            for gpu in run.gpus:
                free[gpu] += run.job.share
        for job in list(waiting):
            fitting = [gpu for gpu in range(gpus) if free[gpu] >= job.share - 1e-6][:job.gpus]
            if end - now < LEAST:
                waiting.clear()
            elif len(fitting) == job.gpus:
                waiting.remove(job)
                running.append(start(job, fitting, end - now, out, env))
                for gpu in fitting:
                    free[gpu] -= job.share
            elif job.gpus > 1:
                break  # the lanes begin behind it
        time.sleep(0.1)
    return done


def count_gpus() -> int:
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="jobs to run; all of them without")
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--list", action="store_true", help="print the jobs and end")
    given = parser.parse_args()
    by_name = {job.name: job for job in JOBS}
    if unknown := [name for name in given.names if name not in by_name]:
        parser.error(f"no job is called {', '.join(unknown)}; there are {', '.join(by_name)}")
    jobs = [by_name[name] for name in given.names] or [job for job in JOBS if not job.asked]
    if given.list:
        print("\n".join(f"{job.name:14} {job.gpus} GPU, {job.limit} s: {job.command}" for job in jobs))
        return 0
    gpus = count_gpus()
    if not gpus:
        parser.error("there is no NVIDIA GPU here")
    with tempfile.TemporaryDirectory() as tree:
        done = run_all(jobs, gpus, given.seconds, given.out, environment(Path(tree)))
    return report(jobs, done, given.out)


def report(jobs: Sequence[Job], done: Sequence[Run], out: Path) -> int:
    """Prints the table; returns the exit status."""
    by_job = {run.job: run for run in done}
    for job in jobs:
        if run := by_job.get(job):
            last = (out / f"{job.name}.txt").read_text(errors="replace").splitlines()[-1]
            print(f"{job.name:14} {run.end:12} {run.seconds:5.0f} s  {last}")
        else:
            print(f"{job.name:14} not run")
    return 2 if len(done) < len(jobs) else int(any(run.end != "ok" for run in done))


if __name__ == "__main__":
    raise SystemExit(main())
