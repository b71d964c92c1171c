"""The hooks of the kernel languages: what they say of a launch, and that they leave nothing behind."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from broken import small_step, with_step

from k3plan.graphs.debug.lint import lint
from k3plan.graphs.debug.trace import Trace, tracing

launching = pytest.importorskip("k3plan.ops_cute.launching")


def _scale_rows(arguments: Any, names: Any, p: Any) -> None:
    raise AssertionError("compiled on a machine without a GPU")


def cute_launch(**arguments: Any) -> Any:
    """A bound CuTe launch that is ready, so that it neither compiles nor launches."""
    launch = launching.KernelLaunch(_scale_rows, (4, 1, 1), 128, arguments, None)
    launch._ready.append(SimpleNamespace(launch=lambda: None))
    return launch


def test_a_cute_launch_is_an_event() -> None:
    trace, x = Trace(), torch.ones(4)
    with tracing(trace):
        cute_launch(x=x, epoch=3)()
    (event,) = [e for e in trace.events if e.kind == "kernel"]
    assert event.name == "cute_scale_rows"
    assert dict(event.numbers)["epoch"] == 3
    assert [(o.name, o.address) for o in event.operands] == [("x", x.data_ptr())]


def test_a_cute_compile_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_compile", lambda launch, target: launching.Compiled("k", b""))
    trace, launch = Trace(), cute_launch(x=torch.ones(4))
    with tracing(trace):
        launching._compile(launch, "sm_90a")
    assert [(e.kind, e.name) for e in trace.events] == [("compile", "cute_scale_rows")]


def test_the_hooks_are_gone_afterwards() -> None:
    before = launching.KernelLaunch.__call__, launching._compile
    trace = Trace()
    with tracing(trace):
        pass
    cute_launch(x=torch.ones(4))()
    assert (launching.KernelLaunch.__call__, launching._compile) == before
    assert trace.events == []


def test_9_an_epoch_in_a_cute_launch_is_named() -> None:
    epoch, x = [0], torch.ones(4)

    def make(step: Any) -> Any:
        def run() -> None:
            step()
            epoch[0] += 1
            cute_launch(x=x, epoch=epoch[0])()
        return run

    found = [f for f in lint(with_step(small_step(), "L0.attn.o_proj", make)) if f.severity != "note"]
    assert [(f.code, f.launch) for f in found] == [("CG-033", "L0.attn.o_proj")]
    assert "cute_scale_rows: argument epoch is 1 in one step and 2 in the next" in found[0].text
