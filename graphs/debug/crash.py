"""``k3plan graph crash``: runs a command so that a fault or a hang on the GPU can be named, and names it.

The driver is asked for a core dump, Python for its stacks, and k3plan for a log of its launches. The faulting kernel
comes from the dump, the launch from the log, the error from the command's own output. A command that does not end in
its time is asked for a dump of what runs, then for its stacks, and then ended.
"""
from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ...compiler.errors import DebugError, Origin
from ...compiler.knobs import LAUNCH_LOG
from ...compiler.ops import OPS
from ...compiler.plan import LaunchPlan
from ..bind import Executable
from .codes import CudaCode, find_errors
from .core_dump import SETTINGS, Fault, find_gdb, read_core
from .findings import Finding, find, render, to_json, yaml_line
from .record import Record

TAIL = 40  # lines of the command's output that are kept
OURS = ("core.*", "pipe.*", "gdb.*", "launches.jsonl", "output.txt")
GRACE = 20.0  # seconds for a dump, then for the stacks
LOOK = 0.2  # seconds between two looks at the output


@dataclass(frozen=True)
class Crash:
    """How a command ended. ``status`` is None when it was ended at its time limit."""

    command: tuple[str, ...]
    status: int | None
    seconds: float
    findings: tuple[Finding, ...]
    faults: tuple[Fault, ...]
    output: tuple[str, ...]
    folder: str

    def __str__(self) -> str:
        how = "did not end in its time" if self.status is None else f"ended with status {self.status}"
        kept = [f"  | {line}" for line in self.output[-8:]] if self.findings else []
        return "\n".join([f"{' '.join(self.command)}: {how} after {self.seconds:.1f} s", *kept,
                          render(self.findings, "no fault"), *([f"files: {self.folder}"] if self.findings else [])])

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"command": list(self.command), "status": self.status, "seconds": self.seconds,
                "findings": to_json(self.findings), "faults": [vars(f) for f in self.faults],
                "output": list(self.output), "folder": self.folder}


@dataclass(frozen=True)
class Log:
    """The launch log: the plans that were bound, and the launches (plan, number) that began and never ended, the last
    one last. Several processes may write one log."""

    plans: Mapping[str, Sequence[Sequence[Any]]]  # key -> (id, layer, kernel, ops, functions) of each launch
    open: tuple[tuple[str, int], ...]


def run_watched(command: Sequence[str], folder: str | Path, *, limit: float = 600.0,
                capture: tuple[Record, LaunchPlan] | None = None, origins: Mapping[str, Origin] | None = None,
                echo: Callable[[str], object] = lambda text: None) -> Crash:
    """Runs ``command`` and explains its end. ``folder`` takes the dump, the log and the output, in place of those of a
    run before; ``capture`` is a record of the graph that it replays, which tells kernels and launches apart where the
    log cannot; ``origins`` give the line of the plan file. ``echo`` gets the output while it is written.

    Raises DebugError: no command, or one that cannot be started.
    """
    if not command:
        raise DebugError("no command\n  fix: k3plan graph crash -- python serve.py")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for old in (path for name in OURS for path in folder.glob(name)):
        old.unlink()
    settings = {**SETTINGS, "CUDA_COREDUMP_FILE": str(folder / "core.%p"),
                "CUDA_COREDUMP_PIPE": str(folder / "pipe.%p"), "PYTHONFAULTHANDLER": "1",
                LAUNCH_LOG.name: str(folder / "launches.jsonl")}
    started = time.monotonic()
    with (folder / "output.txt").open("w") as out, (folder / "output.txt").open(errors="replace") as written:
        # env, so that this process need not look at its own environment
        process = subprocess.Popen(["env", *(f"{k}={v}" for k, v in settings.items()), *command], stdout=out,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        status: int | None = None
        while status is None and time.monotonic() - started < limit:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(min(LOOK, limit))
            echo(written.read())
        if status is None:
            _end(process, folder)
    if status == 127:
        raise DebugError(f"{command[0]}: no such command\n  fix: give the command as in a shell, after --")
    seconds = time.monotonic() - started
    output = tuple((folder / "output.txt").read_text(errors="replace").splitlines()[-TAIL:])
    cores = sorted(folder.glob("core.*"))
    gdb = find_gdb()
    faults = tuple(f for core in cores for f in read_core(core, gdb)) if gdb else ()
    log = read_log(folder / "launches.jsonl")
    found = explain_end(status, limit, output, faults, log, capture, dumped=bool(cores) and status is not None)
    if cores and not gdb:
        read = f"Install cuda-gdb: it reads {cores[0]}, which names the kernel."
        found = [replace(one, fix=f"{one.fix} {read}") for one in found]
    line = yaml_line(origins or {}, "model.layers")
    found = [replace(one, where=f"{one.where}, {line}") if line and one.launch else one for one in found]
    return Crash(tuple(command), status, seconds, tuple(found), faults, output, str(folder))


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Asks a command that hangs for a dump of the device, then for its Python stacks, then ends it."""
    for pipe in folder.glob("pipe.*"):
        try:
            handle = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            os.write(handle, b"1")
            os.close(handle)
        except OSError:
            continue
    deadline = time.monotonic() + GRACE
    while list(folder.glob("pipe.*")) and not list(folder.glob("core.*")) and time.monotonic() < deadline:
        time.sleep(0.2)
    for sent in (signal.SIGABRT, signal.SIGKILL):
        try:
            os.killpg(process.pid, sent)
            process.wait(GRACE)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def read_log(path: Path) -> Log:
    """The launch log of a process that may have died in the middle of a line."""
    plans: dict[str, Any] = {}
    running: dict[tuple[int, str, int], None] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if "launches" in entry:
            plans[entry["plan"]] = entry["launches"]
        elif "start" in entry:
            running[entry["pid"], entry["plan"], entry["start"]] = None
        else:
            running.pop((entry["pid"], entry["plan"], entry["end"]), None)
    return Log(plans, tuple((plan, number) for _, plan, number in running))


def explain_end(status: int | None, limit: float, output: Sequence[str], faults: Sequence[Fault], log: Log,
                capture: tuple[Record, LaunchPlan] | None = None, *, dumped: bool = False) -> list[Finding]:
    """What the end of a command means. ``dumped``: the driver wrote a core dump without being asked."""
    error = _cuda_error(output)
    faulted = next((f for f in faults if f.exception), None)
    if status == 0 and faulted is None and not dumped:
        return []
    place = _Place.of(log, faulted or (faults[0] if faults else None), capture)
    host = _last_line(output)
    if status is None:
        running = f"; on the device: {', '.join(map(str, faults[:3]))}" if faults else ""
        stack = _stack(output)
        code = "CG-072" if place.waits else "CG-073"
        what = "the launch never ended" if place.launch else "no launch of a plan was running"
        return [place.finding(code, f"no end in {limit:g} s: {what}{running}{stack}")]
    if error is not None or faulted is not None or dumped:
        kernel = str(faulted) if faulted else place.kernel
        words = f"{error.number} {error.runtime} ({error.text})" if error else "a fault on the device"
        return [place.finding("CG-071", f"{words}{f' in {kernel}' if kernel else ''}{place.which}")]
    return [find("CG-074", f"status {status}, without a word of CUDA: {host}")]


@dataclass(frozen=True)
class _Place:
    """The launch at which a command ended, as far as it is known."""

    launch: str | None = None
    layer: int | None = None
    kernel: str = ""
    ops: tuple[str, ...] = ()
    plan: str = ""
    which: str = ""  # words about how sure this is

    @classmethod
    def of(cls, log: Log, fault: Fault | None, capture: tuple[Record, LaunchPlan] | None) -> _Place:
        """From the launch that the log left open, else from the kernel's function and grid in a recorded capture."""
        if log.open:
            key, last = log.open[-1]
            number, which = _launch_of(log.plans[key], last, fault.function if fault else "")
            name, layer, kernel, ops, *_ = log.plans[key][number]
            return cls(name, layer, kernel, tuple(ops), key, which)
        if fault is None or not fault.function or capture is None:
            return cls(which=", in none of the logged launches" if log.plans else "")
        record, plan = capture
        same = [n for n in record.nodes if n.function == fault.function and n.launch is not None]
        numbers = list(dict.fromkeys(n.launch for n in ([n for n in same if n.grid == fault.grid] or same)))
        if not numbers:
            return cls(which=", which the recorded capture does not have")
        launch = plan.launches[numbers[0] or 0]
        more = [plan.launches[n or 0].id for n in numbers[1:6]]
        which = f", or the same kernel at {', '.join(more)}{', ...' if len(numbers) > 6 else ''}" if more else ""
        choice = plan.choice(launch)
        return cls(launch.id, launch.layer, choice.kernel, choice.ops, plan.key, which)

    @property
    def waits(self) -> bool:
        """Whether the launch waits for other ranks."""
        return any(OPS[op].kind == "comm" for op in self.ops if op in OPS)

    def finding(self, code: str, text: str) -> Finding:
        found = find(code, text)
        where = f"{' + '.join(self.ops)}, plan {self.plan}" if self.launch else None
        return Finding(found.code, found.severity, self.launch, self.layer, where, found.text, found.fix)


def _launch_of(launches: Sequence[Sequence[Any]], last: int, function: str) -> tuple[int, str]:
    """The launch of a fault, and how sure that is: ``last``, which never ended, or the nearest before it that has the
    ``function`` of the dump. A store to nowhere may fault after its kernel has ended."""
    if not function:
        return last, ", the launch that never ended, or one shortly before it"
    own = [set(launch[4]) if len(launch) > 4 else {""} for launch in launches]
    if function in own[last] or "" in own[last]:
        return last, ", the launch that never ended"
    earlier = next((n for n in range(last - 1, -1, -1) if function in own[n]), None)
    if earlier is not None:
        return earlier, ", which ended before its fault was known"
    return last, ", a kernel that no launch of the plan has: what else ran at this launch or shortly before it"


def _cuda_error(output: Sequence[str]) -> CudaCode | None:
    """The first CUDA error that the output names; what follows it is its echo."""
    for line in output:
        if re.search(r"cuda|CUDA|triton", line):
            errors = [e for e in find_errors(line) if e.number]
            if errors:
                return errors[0]
    return None


def _last_line(output: Sequence[str]) -> str:
    return next((line.strip() for line in reversed(output) if line.strip()), "no output")


def _stack(output: Sequence[str]) -> str:
    """The innermost Python frame that faulthandler printed for the main thread."""
    lines = [line for line in output if line.lstrip().startswith("File ")]
    return f"; the host was at {lines[0].strip()}" if lines else ""


def read_health(executable: Executable) -> list[Finding]:
    """Bounded waits of a bound step's collectives that gave up: which rank, launch, epoch, and whose words are missing.

    The words are written by kernels bound with a ``wait_limit``, see ``ops_triton/exchange.py``.
    """
    plan, found = executable.plan, []
    names = dict.fromkeys(tensor for launch in plan.launches for name, tensor in launch.scratch.items()
                          if name.endswith("health"))
    for rank in executable.ranks:
        for name in names:
            finding = health_finding(plan, rank.tensors[name])
            if finding is not None:
                found.append(finding)
    # the others waited for the one that gave up first in the order of the step
    order = {launch.id: number for number, launch in enumerate(plan.launches)}
    found.sort(key=lambda f: order[f.launch or plan.launches[0].id])
    return found


def health_finding(plan: LaunchPlan, words: Tensor) -> Finding | None:
    """Health words i32 [8] of one kernel on one rank; None while no wait has given up."""
    rank, number, epoch, block, missing, silent, *_ = words.tolist()
    if rank == 0:
        return None
    peers = [str(bit) for bit in range(32) if silent >> bit & 1]
    return find("CG-072", f"rank {rank - 1} gave up waiting at epoch {epoch}, block {block}: {missing} words from rank "
                f"{' and '.join(peers) or '?'} never came", plan=plan, launch=plan.launches[number])
