"""Steps of several sizes over one set of weights, states and caches: bound, captured, chosen by the live sequences.

The plans say which sizes there are. This file binds the largest first, captures each on padding alone, and pads a
smaller batch with -1 up to the smallest size that holds it; padding has no side effect (``docs/architecture.md``).
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
    """Bound plans of one model, and their graphs where they were captured; most sequences first in both.

    ``notes`` say which weights are kept twice because two plans read them in different forms.
    """

    executables: tuple[Executable, ...]
    steps: tuple[CapturedStep, ...]
    notes: tuple[str, ...]

    def choose(self, sequences: int) -> int:
        """Index of the smallest bucket for so many live sequences. Raises BindError: more than the largest has."""
        fitting = [i for i, e in enumerate(self.executables) if e.plan.spec.step.sequences >= sequences]
        if not fitting:
            largest = self.executables[0].plan.spec.step.sequences
            raise BindError(f"{sequences} sequences, the largest bucket has {largest}\n"
                            "  fix: split the batch, or compile a plan for so many with capture.buckets")
        return fitting[-1]

    def step(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Runs one step; ``slots`` i32 [B] says how many sequences live, the other inputs are as long as they make it.

        Returns the outputs of the live rows, as views that the next step of this bucket writes over.
        """
        if "slots" not in inputs:
            raise BindError("a step needs slots\n  fix: pass slots, i32 with one entry for each live sequence")
        live = inputs["slots"].shape[0]
        index = self.choose(live)
        executable = self.executables[index]
        executable.write(**{name: pad_rows(executable, name, tensor) for name, tensor in inputs.items()})
        if self.steps:
            self.steps[index].replay()
        else:
            executable.run()
        rows = live * executable.plan.spec.step.query
        return {name: output[:rows] for name, output in executable.outputs.items()}


def bind_buckets(plans: Sequence[LaunchPlan], source: TensorSource | RankRandom, *, device: str | torch.device = "cpu",
                 transport: Transport | str = "emulated") -> Buckets:
    """Binds one plan for each bucket, weights once. Raises BindError (no plan, or plans that do not share states)."""
    if not plans:
        raise BindError("no plan to bind\n  fix: pass the plans of k3plan.face.compile_buckets")
    bound: list[Executable] = []
    for plan in sorted(plans, key=lambda p: -p.spec.step.sequences):
        bound.append(bind(plan, source, device=device, transport=transport, shared=bound[0] if bound else None))
    return Buckets(tuple(bound), (), tuple(kept_twice(plans)))


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
    return Buckets(buckets.executables, tuple(steps), buckets.notes)


def clear_inputs(executable: Executable) -> None:
    """Makes every row of the step inputs padding."""
    for rank in executable.ranks:
        for name in executable.plan.inputs:
            if name != "rank":
                tensor = rank.tensors[name]
                tensor.fill_(1 if name == "accepted" else -1 if tensor.dtype == torch.int32 else 0)


def pad_rows(executable: Executable, name: str, tensor: Tensor) -> Tensor:
    """``tensor`` with rows of padding up to what the plan has; itself where it is that long."""
    bound = executable.ranks[0].tensors.get(name)
    if bound is None or tensor.dim() != bound.dim() or tensor.shape[0] >= bound.shape[0]:
        return tensor
    rest = (bound.shape[0] - tensor.shape[0], *tensor.shape[1:])
    return torch.cat([tensor, tensor.new_full(rest, 1 if name == "accepted" else -1)])
