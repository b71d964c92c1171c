"""Provokes failures of a captured step on a GPU, each in a process of its own, and prints what the tools say of it.

``python tests/debug/provoke.py [NAME ...]`` prints one JSON line a case: its name, the findings, what was expected,
and whether the tool named the failure, its launch and its line. The parent imports and never touches the GPU, so that
its children are forks that start in a second.
"""
from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parent))
from broken import small_plan, small_step, with_step

from k3plan.graphs.debug.audit import audit_capture, check_pools
from k3plan.graphs.debug.findings import Finding
from k3plan.graphs.debug.lint import lint
from k3plan.graphs.debug.tripwire import DriverProbe
from k3plan.graphs.launch import entry_point

LAUNCH = "L0.attn.o_proj"
FILES = (str(Path(__file__).resolve()), str(Path(__file__).resolve().with_name("provoke_steps.py")))
Do = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """``kind`` is the number of the failure; ``code`` what the tool must say first, at ``launch``; ``line``: whether
    it must name a line of a file of these cases."""

    kind: int
    code: str
    run: Callable[[], list[Finding]]
    launch: str | None = LAUNCH
    line: bool = True
    seconds: float = 60.0


CASES: dict[str, Case] = {}


def case(kind: int, code: str, **more: Any) -> Callable[[Callable[[], list[Finding]]], Callable[[], list[Finding]]]:
    """Declares a case by the name of its function."""
    def declare(run: Callable[[], list[Finding]]) -> Callable[[], list[Finding]]:
        CASES[run.__name__] = Case(kind, code, run, **more)
        return run
    return declare


def capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def broken_by(act: Do, before: Do = lambda: None, **how: Any) -> list[Finding]:
    """Findings of a watched capture in which one launch does ``act`` as well."""
    executable = small_step(device="cuda")
    before()

    def make(step: Do) -> Do:
        def run() -> None:
            step()
            if capturing():
                act()
        return run

    audit = audit_capture(with_step(executable, LAUNCH, make), **how)
    return list(audit.findings)


@triton.jit
def _add(x, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x + at, tl.load(x + at) + 1.0)


@triton.jit
def _fresh(x, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x + at, tl.load(x + at) * 3.0)


@triton.autotune(configs=[triton.Config({}, num_warps=n) for n in (1, 2)], key=["size"])
@triton.jit
def _tuned(x, size, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x + at, tl.load(x + at) + size)


def on_gpu(n: int = 64) -> torch.Tensor:
    return torch.ones(n, device="cuda")


@case(0, "", launch=None, line=False)
def a_sound_capture() -> list[Finding]:
    executable = small_step(device="cuda")
    return list(audit_capture(executable).findings)


@case(0, "", launch=None, line=False)
def a_sound_lint() -> list[Finding]:
    return [f for f in lint(small_step(device="cuda")) if f.severity != "note"]


@case(12, "CG-001")
def sync_item() -> list[Finding]:
    held: list[torch.Tensor] = []
    return broken_by(lambda: held[0][0].item(), lambda: held.append(on_gpu()))


@case(12, "CG-001")
def sync_nonzero() -> list[Finding]:
    held: list[torch.Tensor] = []
    return broken_by(lambda: held[0].nonzero(), lambda: held.append(on_gpu()))


@case(12, "CG-001")
def sync_bool() -> list[Finding]:
    held: list[torch.Tensor] = []

    def act() -> None:
        if held[0][0] > 0:
            held[0].add_(1)

    return broken_by(act, lambda: held.append(on_gpu()))


@case(12, "CG-001")
def sync_pageable_copy() -> list[Finding]:
    held: list[torch.Tensor] = []
    return broken_by(lambda: held[0].copy_(torch.ones(64)), lambda: held.append(on_gpu()))


@case(12, "CG-001")
def sync_copy_to_the_host() -> list[Finding]:
    held: list[torch.Tensor] = []
    return broken_by(lambda: held[0].cpu(), lambda: held.append(on_gpu()))


@case(12, "CG-001")
def sync_print() -> list[Finding]:
    held: list[torch.Tensor] = []
    return broken_by(lambda: str(held[0]), lambda: held.append(on_gpu()))


@case(12, "CG-001")
def sync_device() -> list[Finding]:
    return broken_by(lambda: torch.cuda.synchronize())


@case(12, "CG-001")
def sync_in_an_eager_step() -> list[Finding]:
    x = on_gpu()

    def make(step: Do) -> Do:
        def run() -> None:
            step()
            x[0].item()
        return run

    return [f for f in lint(with_step(small_step(device="cuda"), LAUNCH, make)) if f.severity != "note"]


@case(13, "CG-002")
def default_stream_triton() -> list[Finding]:
    held: list[torch.Tensor] = []

    def before() -> None:
        held.append(on_gpu())
        _add[(1,)](held[0], N=64)

    def act() -> None:
        with torch.cuda.stream(torch.cuda.default_stream()):
            _add[(1,)](held[0], N=64)

    return broken_by(act, before)


@case(13, "CG-002")
def default_stream_in_an_eager_step() -> list[Finding]:
    x = on_gpu()

    def make(step: Do) -> Do:
        def run() -> None:
            step()
            with torch.cuda.stream(torch.cuda.default_stream()):
                _add[(1,)](x, N=64)
        return run

    return [f for f in lint(with_step(small_step(device="cuda"), LAUNCH, make)) if f.severity != "note"]


@case(14, "CG-003")
def side_stream_not_forked() -> list[Finding]:
    held: list[Any] = []

    def act() -> None:
        with torch.cuda.stream(held[1]):
            held[0].add_(1)

    return broken_by(act, lambda: held.extend([on_gpu(), torch.cuda.Stream()]))


@case(14, "CG-003")
def side_stream_not_forked_and_waited_for() -> list[Finding]:
    held: list[Any] = []

    def act() -> None:
        with torch.cuda.stream(held[1]):
            held[0].add_(1)
        torch.cuda.current_stream().wait_stream(held[1])

    return broken_by(act, lambda: held.extend([on_gpu(), torch.cuda.Stream()]))


@case(14, "CG-004")
def side_stream_not_joined() -> list[Finding]:
    held: list[Any] = []

    def act() -> None:
        held[1].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(held[1]):
            held[0].add_(1)

    return broken_by(act, lambda: held.extend([on_gpu(), torch.cuda.Stream()]))


@case(15, "CG-005")
def event_from_outside() -> list[Finding]:
    held: list[Any] = []

    def before() -> None:
        held.append(torch.cuda.Event())
        held[0].record(torch.cuda.Stream())

    return broken_by(lambda: torch.cuda.current_stream().wait_event(held[0]), before)


@case(16, "CG-006")
def first_use_compile() -> list[Finding]:
    held: list[torch.Tensor] = []
    return broken_by(lambda: _fresh[(1,)](held[0], N=64), lambda: held.append(on_gpu()))


@case(16, "CG-007")
def autotune_in_the_capture() -> list[Finding]:
    held: list[torch.Tensor] = []
    return broken_by(lambda: _tuned[(1,)](held[0], 64, N=64), lambda: held.append(on_gpu()))


@case(16, "CG-007")
def autotune_in_the_second_step() -> list[Finding]:
    x, calls = on_gpu(), [0]

    def make(step: Do) -> Do:
        def run() -> None:
            step()
            calls[0] += 1
            _tuned[(1,)](x, calls[0], N=64)
        return run

    found = lint(with_step(small_step(device="cuda"), LAUNCH, make))
    return [f for f in found if f.code == "CG-007"]


@case(16, "CG-006")
def compile_in_the_second_step() -> list[Finding]:
    x, calls = on_gpu(512), [0]

    def make(step: Do) -> Do:
        def run() -> None:
            step()
            calls[0] += 1
            _fresh[(1,)](x, N=2 ** (4 + calls[0]))
        return run

    found = lint(with_step(small_step(device="cuda"), LAUNCH, make))
    return [f for f in found if f.code == "CG-006"]


@case(17, "CG-009", line=False)
def allocation_in_the_capture() -> list[Finding]:
    held: list[torch.Tensor] = []

    def act() -> None:
        held.append(torch.zeros(1 << 20, device="cuda"))

    return broken_by(act)


@case(17, "CG-010", launch=None, line=False)
def pools_that_grow() -> list[Finding]:
    audits = [audit_capture(small_step(device="cuda", more=(f"step.sequences={n}",))) for n in (2, 4)]
    return check_pools([a.captured for a in audits if a.captured is not None])


@case(18, "CG-011", line=False)
def collection_in_the_capture() -> list[Finding]:
    def act() -> None:
        graph: Any = [torch.cuda.CUDAGraph()]
        graph.append(graph)
        del graph
        gc.collect()

    return broken_by(act)


@case(19, "CG-012")
def another_thread_synchronises() -> list[Finding]:
    def act() -> None:
        def work() -> None:
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize()

        thread = threading.Thread(target=work, name="logger")
        thread.start()
        thread.join()

    return broken_by(act, mode="global")


@case(0, "", launch=None, line=False)
def another_thread_in_thread_local_mode() -> list[Finding]:
    held: list[torch.Tensor] = []

    def act() -> None:
        def work() -> None:
            held[0].cpu()

        thread = threading.Thread(target=work, name="logger")
        thread.start()
        thread.join()

    return broken_by(act, lambda: held.append(on_gpu()))


@case(20, "CG-003", line=False)
def launch_on_the_wrong_stream() -> list[Finding]:
    executable, other = small_step(device="cuda"), torch.cuda.Stream()

    def make(step: Do) -> Do:
        def run() -> None:
            with torch.cuda.stream(other):
                step()
        return run

    found = audit_capture(with_step(executable, LAUNCH, make)).findings
    return [f for f in found if f.launch == LAUNCH]


@case(21, "CG-015", launch=None, line=False)
def state_after_a_failed_capture() -> list[Finding]:
    held: list[torch.Tensor] = []
    found = broken_by(lambda: held[0][0].item(), lambda: held.append(on_gpu()))
    return [f for f in found if f.code == "CG-015"]


@case(21, "CG-015", launch=None, line=False)
def state_while_a_capture_is_left_open() -> list[Finding]:
    executable, stream = small_step(device="cuda"), torch.cuda.Stream()
    executable.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # an engine that caught the error and never ended the capture
    with torch.cuda.stream(stream), contextlib.suppress(RuntimeError):
        graph.capture_begin(capture_error_mode="global")
        executable.run()
        executable.outputs["tokens"].sum().item()
    found = [f for f in audit_capture(executable).findings if f.code == "CG-015"]
    assert any("fails" in f.text for f in found), found
    return found


@case(5, "CG-045", launch="", line=False)
def warm_up_through_real_slots() -> list[Finding]:
    return list(audit_capture(small_step(device="cuda"), pad=False).findings)


def import_kernels() -> None:
    """The modules of the kernels that the cases launch, so that no fork imports them."""
    entries = {choice.entry for layers in ((0,), (0, 1, 3)) for choice in small_plan(layers, "h200").choices}
    for entry in entries:
        if not entry.startswith("op:"):
            entry_point(entry)


def main(names: list[str]) -> int:
    """Runs the cases by name, all by default; the exit status is the number of those that were not named right."""
    import provoke_steps  # noqa: F401 - declares more cases

    if names == ["--list"]:
        print("\n".join(CASES))
        return 0
    wrong = 0
    DriverProbe()  # imports cuda-bindings, which takes seconds
    import_kernels()
    for name in names or list(CASES):
        started = time.perf_counter()
        result = _in_a_fork(CASES[name])
        result = {"name": name, "kind": CASES[name].kind, "expected": CASES[name].code,
                  "named": _is_named(CASES[name], result), "seconds": round(time.perf_counter() - started, 2)} | result
        wrong += not result["named"]
        print(json.dumps(result), flush=True)
    return wrong


def _is_named(wanted: Case, result: dict[str, Any]) -> bool:
    found = result.get("findings")
    if found is None:
        return False
    if not wanted.code:
        return not found
    first = found[0] if found else {"code": ""}
    launch = wanted.launch == "" or first.get("launch") == wanted.launch
    line = any(f"{file}:" in (first["where"] or "") for file in FILES)
    return first["code"] == wanted.code and launch and (line or not wanted.line)


def _in_a_fork(wanted: Case) -> dict[str, Any]:
    """Findings of a case, or the error, signal or time limit that ended its process."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "findings", Path(folder) / "log"
        child = os.fork()
        if child == 0:
            _child(wanted, out, log)
        deadline, status = time.monotonic() + wanted.seconds, 0
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return {"error": f"no end in {wanted.seconds} s", "log": _tail(log)}
            time.sleep(0.02)
        if not out.exists():
            return {"error": f"the process ended without findings, status {status}", "log": _tail(log)}
        return {"findings": json.loads(out.read_text()), "log": _tail(log)}


def _child(wanted: Case, out: Path, log: Path) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        found = wanted.run()
        out.write_text(json.dumps([asdict(f) for f in found]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # no destructors: they may hang or fail on a device in error
        os._exit(0)


def _tail(log: Path) -> str:
    return log.read_text()[-3000:] if log.exists() else ""


if __name__ == "__main__":
    # the cases of the other file must find this module under its name
    sys.modules["provoke"] = sys.modules["__main__"]
    sys.exit(main(sys.argv[1:]))
