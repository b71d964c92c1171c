"""Steps of several sizes over one set of weights, states and caches: bound, captured, chosen by the live sequences.

The plans say which sizes there are. This file binds the largest first, captures each on padding alone, and says which
size a batch takes: the smallest that holds it. Its spare rows are padding, which has no side effect
(``docs/architecture.md``); ``module/inputs.py`` writes it.
"""
from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..compiler.errors import BindError
from ..compiler.plan import LaunchPlan
from .bind import Executable, bind
from .capture import CapturedStep, capture
from .load import TensorSource
from .precompile import compile_launches
from .random_weights import RankRandom
from .transport import Transport


@dataclass(frozen=True)
class Buckets:
    """Bound plans of one model, and their graphs where they were captured; most sequences first in both."""

    executables: tuple[Executable, ...]
    steps: tuple[CapturedStep, ...] = ()

    def choose(self, sequences: int) -> int:
        """Index of the smallest bucket for so many live sequences. Raises BindError: more than the largest has."""
        fitting = [i for i, e in enumerate(self.executables) if e.plan.spec.step.sequences >= sequences]
        if not fitting:
            largest = self.executables[0].plan.spec.step.sequences
            raise BindError(f"{sequences} sequences, the largest bucket has {largest}\n"
                            "  fix: split the batch, or compile a plan for so many with capture.buckets")
        return fitting[-1]

    def run(self, index: int) -> None:
        """One step of a bucket over the inputs that were written last: a replay where it was captured."""
        if self.steps:
            self.steps[index].replay()
        else:
            self.executables[index].run()


def bind_buckets(plans: Sequence[LaunchPlan], source: TensorSource | RankRandom, *, device: str | torch.device = "cpu",
                 transport: Transport | str = "emulated") -> Buckets:
    """Binds one plan for each bucket, weights once; warns of those that two plans read in different forms.

    Raises BindError (no plan, or plans that do not share states).
    """
    if not plans:
        raise BindError("no plan to bind\n  fix: pass the plans of k3plan.face.compile_buckets")
    bound: list[Executable] = []
    for plan in sorted(plans, key=lambda p: -p.spec.step.sequences):
        bound.append(bind(plan, source, device=device, transport=transport, shared=bound[0] if bound else None))
    for note in kept_twice(plans):
        warnings.warn(note, stacklevel=2)
    return Buckets(tuple(bound))


def kept_twice(plans: Sequence[LaunchPlan]) -> list[str]:
    """For each smaller plan the weights that it reads in another form than the largest, in words; mostly none."""
    first, *others = sorted(plans, key=lambda p: -p.spec.step.sequences)
    notes = []
    for plan in others:
        own = [name for name, weight in plan.weights.items() if first.weights.get(name) != weight]
        if own:
            size = sum(plan.buffers[name].bytes for name in own if name in plan.buffers)
            taken, theirs = (vars(p.spec.choices) for p in (plan, first))
            why = ", ".join(f"{n} {v} against {theirs[n]}" for n, v in taken.items() if v != theirs[n])
            notes.append(f"bucket {plan.spec.step.sequences}: {len(own)} weights are kept a second time, "
                         f"{size / 1e6:.1f} MB, such as {own[0]}: {why or 'the plan packs them in another way'}")
    return notes


def capture_buckets(buckets: Buckets, **how: Any) -> Buckets:
    """One CUDA graph for each bucket over one pool, most sequences first, so that the pool never grows.

    ``how`` is handed to ``capture``. Inputs are padding while warming up and capturing: states and caches keep every
    byte that a caller can name.
    """
    compile_launches(buckets.executables)
    steps: list[CapturedStep] = []
    for executable in buckets.executables:
        clear_inputs(executable)
        steps.append(capture(executable, steps[0].graph.pool() if steps else None, **how))
    return Buckets(buckets.executables, tuple(steps))


def clear_inputs(executable: Executable) -> None:
    """Makes every row of the step inputs padding."""
    for rank in executable.ranks:
        for name in executable.plan.inputs:
            if name != "rank":
                tensor = rank.tensors[name]
                tensor.fill_(1 if name == "accepted" else -1 if tensor.dtype == torch.int32 else 0)
