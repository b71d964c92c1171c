"""What the ranks of ``k3plan launch`` do: decode a checkpoint, hold a step against emulated ranks, time a step.

Each function runs on every rank alike and returns the text of a report, which rank 0 prints.
"""
from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...compiler.errors import BindError, K3PlanError, RankError
from ...compiler.ops import OPS
from ...compiler.plan import LaunchPlan
from ..bench_step import live_inputs
from ..bind import Executable, bind
from ..capture import CapturedStep, capture
from ..checkpoint import Checkpoint
from ..decode import Batch
from ..random_weights import RandomSource, RankRandom
from ..session import run_plan
from .group import Group
from .measure import time_graph
from .rank import Progress, bind_rank, make_transport
from .watch import let_watch_decide

Record = dict[tuple[int, int, str], Tensor]  # (step, launch, output) -> what the launch wrote


@contextmanager
def session(device: str) -> Iterator[Group]:
    """A joined group. A failure inside tells the other ranks, unless it is one of them that is gone."""
    group = Group.join(device)
    try:
        yield group
    except K3PlanError as error:
        group.refuse(str(error))
        raise
    except Exception as error:
        # a broken connection is how a dead peer shows first, and the watch will know which
        if isinstance(error, RuntimeError):
            let_watch_decide()
        group.refuse(f"{type(error).__name__}: {error}")
        raise
    group.leave()


def decode(plan: LaunchPlan, folder: Path, count: int, group: Group, *, transport: str, version: str,
           verify: bool = True) -> str:
    """Greedy decoding as ``k3plan run`` does it, a rank a process. Raises RankError: the ranks decoded other tokens."""
    carrier = make_transport(group, transport)

    def bind_plan(wanted: LaunchPlan, checkpoint: Checkpoint) -> Executable:
        return bind_rank(wanted, checkpoint, group, carrier, k3plan_version=version)

    report = run_plan(plan, folder, count, verify=verify and group.rank == 0, bind_plan=bind_plan)
    _all_equal(group, "tokens", _digest([torch.tensor(report.tokens)]))
    if not report.passed:
        raise RankError(report.text)
    return f"{report.text}\n{group.ranks} ranks over {carrier.name} decoded the same tokens"


def check(plan: LaunchPlan, group: Group, *, steps: int, transport: str, version: str, seed: int = 0,
          wait_limit: int = 0, emulate: bool = True) -> str:
    """Hidden states of ``steps`` steps with random weights of one model: equal on all ranks, and equal to those of
    emulated ranks on rank 0's device, which must hold the weights of all. Raises RankError when they are not."""
    if "hidden" not in plan.outputs:
        raise BindError("the plan does not return hidden states\n"
                        "  fix: compile with --set step.outputs=[tokens,hidden]")
    recipes = [weight.recipe for weight in plan.weights.values()]
    source = RandomSource.of(recipes, seed, group.device)
    carrier = make_transport(group, transport)
    executable = bind_rank(plan, source, group, carrier, k3plan_version=version, wait_limit=wait_limit)
    graph = capture(executable) if group.device.type == "cuda" else None
    made = run_steps(executable, graph, steps, seed)
    if wait_limit:
        Progress(executable).check()
    _all_equal(group, "hidden states", _digest(made))
    lines = [f"{len(plan.launches)} launches a step, {steps} steps{' replayed from one CUDA graph' if graph else ''}: "
             f"hidden states of {group.ranks} ranks over {carrier.name} are equal to the bit ({_digest(made)})"]
    if emulate:
        kept: Record = {}
        if not _same(run_steps(executable, None, steps, seed, kept), made):
            raise RankError("steps launched one launch at a time give other hidden states than the graph")
        del executable, graph
        with group.together("emulating"):
            if group.rank == 0:
                lines.append(_against_emulated(plan, source, made, kept, group.device, seed))
    return "\n".join(lines)


def _same(these: Sequence[Tensor], those: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(these, those, strict=True))


def _against_emulated(plan: LaunchPlan, source: RandomSource, made: Sequence[Tensor], kept: Record,
                      device: torch.device, seed: int) -> str:
    if device.type == "cuda":
        torch.cuda.empty_cache()
    emulated, found = bind(plan, source, device=device), Record()
    wanted = run_steps(emulated, None, len(made), seed)
    worst = max(float((a.float() - b.float()).abs().max()) for a, b in zip(made, wanted, strict=True))
    scale = float(torch.stack([t.float() for t in wanted]).square().mean().sqrt())
    if not all(torch.isfinite(t).all() for t in wanted):
        raise RankError("hidden states of the emulated ranks are not finite")
    equal = sum(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))
    if equal < len(made):
        apart = run_steps(emulated, None, len(made), seed, found)
        alone = "" if _same(apart, wanted) else "; emulated ranks give others when launches wait for each other"
        raise RankError(f"hidden states of {len(made) - equal} of {len(made)} steps are not those of emulated ranks: "
                        f"they differ by up to {worst:.3g}, their root mean square is {scale:.3g}{alone}\n"
                        f"{first_difference(plan, kept, found)}")
    return f"they are those of {plan.spec.parallel.tp} emulated ranks on one device to the bit (rms {scale:.3g})"


def first_difference(plan: LaunchPlan, these: Record, those: Record) -> str:
    """The first output of a launch that is not the same to the bit in both records, in words."""
    for (step, number, name), ours in these.items():
        theirs = those[step, number, name]
        if not torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)):
            launch, apart = plan.launches[number], (ours.float() - theirs.float()).abs()
            return (f"launch by launch, the first that differs is {launch.id} ({plan.choice(launch).kernel}) in step "
                    f"{step}: {int((apart > 0).sum())} of {ours.numel()} values of {name}, by up to {apart.max():.3g}")
    return "launch by launch they are the same"


def _run_recorded(executable: Executable, step: int, record: Record) -> None:
    """One launch after the other has ended; keeps what each writes on the first rank bound here."""
    for number, launch in enumerate(executable.plan.launches):
        for run in executable.steps_of(number):
            run()
        for name in launch.outputs:
            record[step, number, name] = executable.ranks[0].tensors[name].to("cpu", copy=True).contiguous()


def run_steps(executable: Executable, graph: CapturedStep | None, steps: int, seed: int,
              record: Record | None = None) -> list[Tensor]:
    """Hidden states [T, D] of each step, on the CPU; random tokens, the same for every rank, arena poisoned before.
    Sequences begin anew where the context is full.

    With ``record`` caches are emptied, every launch is waited for, and what it wrote is kept there.
    """
    shape, vocab = executable.plan.spec.step, executable.plan.spec.model.vocab
    generator, made = torch.Generator().manual_seed(seed), list[Tensor]()
    fitting = shape.context // shape.query
    if record is not None:
        # entries that an earlier run left behind are no difference
        for rank in executable.ranks:
            for name in (n for n, buffer in executable.plan.buffers.items() if buffer.kind == "cache"):
                rank.tensors[name].zero_()
    for step in range(steps):
        if step % fitting == 0:
            batch = Batch(shape)
            for slot in range(shape.sequences):
                executable.reset(slot)
        rows = torch.randint(0, vocab, (shape.sequences, shape.query), generator=generator).tolist()
        inputs = batch.inputs(rows)
        executable.write(**{n: t for n, t in inputs.items() if n in executable.plan.inputs})
        executable.poison()
        if record is not None:
            _run_recorded(executable, step, record)
        else:
            graph.replay() if graph is not None else executable.run()
        if executable.outputs["hidden"].is_cuda:
            # a copy to the host that waits for a step that hangs could keep the watch from the driver
            torch.cuda.current_stream().synchronize()
        made.append(executable.outputs["hidden"].to("cpu", copy=True))
        batch.accept([shape.query] * shape.sequences)
    return made


def bench(plan: LaunchPlan, group: Group, *, transport: str, version: str, replays: int = 20, seed: int = 0) -> str:
    """The captured step over the links, and the same rank in ``loopback``: what the links cost."""
    carrier = make_transport(group, transport)
    executable = bind_rank(plan, RankRandom(seed), group, carrier, k3plan_version=version)
    inputs = live_inputs(plan, seed)
    executable.write(**inputs)
    linked = time_graph(capture(executable).graph, group, replays)
    with group.together("loopback"):
        alone = bind(plan, RankRandom(seed), device=group.device, transport="loopback", shared=executable)
        alone.write(**inputs)
        step = capture(alone)
    loopback = time_graph(step.graph, group, replays)
    hops = sum(OPS[op].kind == "comm" for launch in plan.launches for op in plan.choice(launch).ops)
    return (f"{len(plan.launches)} launches, {hops} collectives: {linked:.1f} us a step over {carrier.name}, "
            f"{loopback:.1f} us in loopback, so {(linked - loopback) / max(hops, 1):.2f} us a collective; "
            f"the plan predicted {plan.us:.1f} us")


def _digest(tensors: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(bytes(tensor.contiguous().view(torch.uint8).flatten().tolist()))
    return digest.hexdigest()[:16]


def _all_equal(group: Group, what: str, digest: str) -> None:
    said: list[Any] = [fact["digest"] for fact in group.exchange(what, {"digest": digest})]
    if len(set(said)) > 1:
        raise RankError(f"the ranks' {what} differ: {', '.join(f'rank {r} has {d}' for r, d in enumerate(said))}")
