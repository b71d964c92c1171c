"""Small bound steps, and how to break one launch of them. Used by the tests of the debugger, on a CPU or on a GPU."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch

from k3plan.compiler.compile import compile_spec
from k3plan.compiler.plan import LaunchPlan
from k3plan.compiler.reading.source import load_spec
from k3plan.face import kernels, tuning
from k3plan.graphs.bind import Executable, bind
from k3plan.graphs.random_weights import RandomSource

EXAMPLE = "examples/tiny-k3.yaml"


@cache
def small_plan(layers: tuple[int, ...] = (0,), gpu: str = "cpu", more: tuple[str, ...] = (),
               menu: str = "triton.") -> LaunchPlan:
    """One rank of the small model; layer 0 is KDA with a dense MLP, 1 has experts, 3 has MLA and experts.

    Only kernels whose id begins with ``menu`` are taken: those of Triton keep what they compiled from process to
    process.
    """
    text = ",".join(map(str, layers))
    spec = load_spec(EXAMPLE, [f"target.gpu={gpu}", "parallel.tp=1", f"model.layers=[{text}]", *more])
    return compile_spec(spec, [k for k in kernels() if k.id.startswith(menu)], tuning(gpu))


def small_step(layers: tuple[int, ...] = (0,), device: str = "cpu", more: tuple[str, ...] = ()) -> Executable:
    """A bound step with random weights, live inputs and states of a few steps."""
    plan = small_plan(layers, "cpu" if device == "cpu" else "h200", more)
    source = RandomSource.of([w.recipe for w in plan.weights.values()], device=device)
    executable = bind(plan, source, device=device)
    write_live(executable, plan.spec.step.sequences)
    return executable


def write_live(executable: Executable, live: int, position: int = 5) -> None:
    """The first ``live`` sequences at ``position``, each with its own slot and pages; the others padding."""
    step = executable.plan.spec.step
    pages = -(-step.context // step.page_size)
    rows = torch.arange(step.rows)
    sequence = torch.arange(step.sequences)
    inputs = {
        "tokens": 7 + rows, "positions": position + rows % step.query, "slots": sequence,
        "page_table": torch.arange(step.sequences * pages).view(step.sequences, pages),
        "accepted": torch.ones(step.sequences),
    }
    for name, tensor in inputs.items():
        if name in executable.plan.inputs:
            given = tensor.to(torch.int32)
            dead = torch.arange(len(given)) >= live * (len(given) // step.sequences)
            if name != "accepted":
                given[dead] = -1
            executable.write(**{name: given})


def launch_index(executable: Executable, launch: str) -> int:
    return [x.id for x in executable.plan.launches].index(launch)


def with_step(executable: Executable, launch: str, make: Callable[[Callable[[], None]], Callable[[], object]]
              ) -> Executable:
    """``executable`` with the first step of a launch replaced by ``make(that step)``."""
    at = executable.first[launch_index(executable, launch)]
    steps = list(executable.steps)
    steps[at] = make(steps[at])
    return replace(executable, steps=tuple(steps))
