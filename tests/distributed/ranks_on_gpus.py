"""What two ranks do to each other in ``test_on_gpus.py``: a program that torchrun starts on two GPUs.

Its argument says which case. Rank 0 prints what it saw as a line of JSON behind "saw ".
"""
from __future__ import annotations

import json
import random
import sys
import time

import torch
from torch import Tensor

from k3plan.compiler.errors import RankError
from k3plan.compiler.plan import LaunchPlan
from k3plan.face import compile_plan
from k3plan.graphs.bind import Executable
from k3plan.graphs.capture import CapturedStep, capture
from k3plan.graphs.distributed.group import Group
from k3plan.graphs.distributed.rank import Progress, bind_rank, clear_exchange, make_transport
from k3plan.graphs.distributed.work import run_steps, session
from k3plan.graphs.random_weights import RandomSource

STEPS = 12


class Late:
    """A captured step that this rank begins up to 30 ms late: now the other rank is ahead, now this one."""

    def __init__(self, graph: CapturedStep, rank: int) -> None:
        self.graph, self.delays, self.rank, self.step = graph, random.Random(5), rank, 0

    def replay(self) -> None:
        seconds, who, self.step = 0.03 * self.delays.random(), self.step % 3, self.step + 1
        if who == self.rank:
            time.sleep(seconds)
        self.graph.replay()


class Missing:
    """A captured step that this rank never begins."""

    def replay(self) -> None:
        pass


def _bound(plan: LaunchPlan, group: Group, wait_limit: int) -> Executable:
    source = RandomSource.of([weight.recipe for weight in plan.weights.values()], 0, group.device)
    return bind_rank(plan, source, group, make_transport(group), wait_limit=wait_limit)


def _equal(these: list[Tensor], those: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(these, those, strict=True))


def late(plan: LaunchPlan, group: Group) -> dict[str, object]:
    """The same steps without delays, with one rank late, and with none captured."""
    executable = _bound(plan, group, 0)
    graph = capture(executable)
    prompt = run_steps(executable, graph, STEPS, 0)
    delayed = Late(graph, group.rank)
    return {"equal": _equal(prompt, run_steps(executable, delayed, STEPS, 0)), "steps": delayed.step,
            "eager": _equal(prompt, run_steps(executable, None, STEPS, 0))}


def aborted(plan: LaunchPlan, group: Group) -> dict[str, object]:
    """Rank 1 leaves out a step: rank 0 gives up and says for whom it waited where. Cleared, both go on as before."""
    executable = _bound(plan, group, 100_000)
    graph = capture(executable)
    wanted = run_steps(executable, graph, STEPS, 0)
    Progress(executable).check()
    begun, said = time.monotonic(), ""
    run_steps(executable, graph if group.rank == 0 else Missing(), 1, 0)
    try:
        Progress(executable).check()
    except RankError as error:
        said = str(error)
    took = time.monotonic() - begun
    clear_exchange(executable, group)
    again = run_steps(executable, graph, STEPS, 0)
    Progress(executable).check()
    return {"said": said, "seconds": took, "equal": _equal(wanted, again)}


def refused(plan: LaunchPlan, group: Group) -> dict[str, object]:
    """Rank 1 may not have the memory that its weights need."""
    if group.rank == 1:
        torch.cuda.set_per_process_memory_fraction(1e-6)
    _bound(plan, group, 0)
    return {"bound": True}


CASES = {"late": late, "aborted": aborted, "refused": refused}


def main() -> None:
    plan = compile_plan("examples/tiny-k3.yaml", ["target.gpu=h200", "step.outputs=[tokens,hidden]"])
    with session("cuda") as group:
        for name in sys.argv[1].split(","):
            saw = CASES[name](plan, group)
            every = group.exchange("saw", saw)
            if group.rank == 0:
                print("saw", json.dumps({name: every}), flush=True)


if __name__ == "__main__":
    main()
