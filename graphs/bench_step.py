"""``k3plan bench``: one rank of a whole step on this GPU, captured as a CUDA graph, with random weights."""
from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from ..compiler.device import load_device
from ..compiler.explain import floor_us
from ..compiler.ops import OPS
from ..compiler.plan import LaunchPlan
from .bind import Executable, bind
from .capture import CapturedStep, capture
from .random_weights import RankRandom


@dataclass(frozen=True)
class StepTiming:
    """Measured on one rank over ``loopback``: the links' latency is not in ``us``; ``hops_us`` is its model."""

    launches: int
    us: float
    floor_us: float
    predicted_us: float
    hops: int
    hops_us: float
    bind_seconds: float
    capture_seconds: float
    arena_bytes: int
    weight_bytes: int

    def line(self) -> str:
        """One line of a report."""
        return (f"{self.launches} launches, {self.us / 1e3:.3f} ms a step, {self.us / self.floor_us:.2f} x its byte "
                f"floor of {self.floor_us / 1e3:.3f} ms (plan predicted {self.predicted_us / 1e3:.3f} ms); "
                f"with {self.hops} modelled hops {(self.us + self.hops_us) / 1e3:.3f} ms; bound "
                f"{self.weight_bytes / 1e9:.1f} GB in {self.bind_seconds:.1f} s, captured in "
                f"{self.capture_seconds:.1f} s, arena {self.arena_bytes / 1e6:.1f} MB")


def time_step(plan: LaunchPlan, *, seed: int = 0, replays: int = 10) -> StepTiming:
    """Binds ``plan`` over ``loopback`` on the current GPU, captures it and times the replay."""
    return time_bound(*bind_random(plan, seed), replays=replays)


def bind_random(plan: LaunchPlan, seed: int = 0) -> tuple[Executable, float]:
    """``plan`` with random weights and live inputs near the end of its context, and the seconds it took."""
    started = time.perf_counter()
    executable = bind(plan, RankRandom(seed), device="cuda", transport="loopback")
    executable.write(**live_inputs(plan, seed))
    torch.cuda.synchronize()
    return executable, time.perf_counter() - started


def time_bound(executable: Executable, bind_seconds: float, *, replays: int = 10) -> StepTiming:
    """Captures and times a bound step."""
    plan, device = executable.plan, load_device(executable.plan.spec.gpu)
    started = time.perf_counter()
    step: CapturedStep = capture(executable)
    seconds = time.perf_counter() - started
    hops = sum(OPS[op].kind == "comm" for launch in plan.launches for op in plan.choice(launch).ops)
    floor = sum(floor_us(plan.choice(launch), device) for launch in plan.launches)
    weights = sum(b.bytes for b in plan.buffers.values() if b.kind == "weight")
    return StepTiming(len(plan.launches), step.time_us(replays), floor, plan.us, hops, hops * device["hop_us"],
                      bind_seconds, seconds, plan.arena_bytes, weights)


def live_inputs(plan: LaunchPlan, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tokens at the end of the planned context, each sequence with its own slot and pages."""
    step = plan.spec.step
    generator = torch.Generator().manual_seed(seed)
    pages = -(-step.context // step.page_size)
    positions = torch.arange(step.context - step.query, step.context).repeat(step.sequences)
    made = {
        # tokens of rank 0's share of the vocabulary: over loopback the others embed to zero
        "tokens": torch.randint(0, plan.spec.model.vocab // plan.spec.parallel.tp, (step.rows,), generator=generator),
        "positions": positions, "slots": torch.arange(step.sequences),
        "page_table": torch.arange(step.sequences * pages).view(step.sequences, pages),
        "accepted": torch.ones(step.sequences),
    }
    return {name: tensor.to(torch.int32) for name, tensor in made.items() if name in plan.inputs}
