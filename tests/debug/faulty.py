"""A program that goes wrong in one launch of a bound step: ``python faulty.py HOW``. Run by the tests of ``crash``."""
from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from broken import small_plan, small_step, with_step, write_live

from k3plan.graphs import bind
from k3plan.graphs.capture import capture
from k3plan.graphs.launch_log import logged
from k3plan.graphs.random_weights import RandomSource

# logged below, once the launch is broken: a fault outside of the log would have no launch
bind.logged = lambda executable: executable
LAUNCH = "L0.attn.o_proj"


def on_cpu(how: str) -> None:
    def act() -> None:
        if how == "hang":
            time.sleep(1000)
        elif how == "error":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        elif how == "host":
            raise ValueError("nothing to do with the device")

    logged(with_step(small_step(), LAUNCH, lambda step: lambda: (step(), act()))).run()


def on_gpu(how: str) -> None:
    import triton
    import triton.language as tl

    globals()["tl"] = tl

    @triton.jit
    def _read_far_away(address, y):
        # a load: the kernel cannot end before its fault is known
        tl.store(y, tl.load(address.to(tl.pointer_type(tl.float32))))

    @triton.jit
    def _spin(flag):
        while tl.load(flag, volatile=True) == 0:
            pass

    flag, found = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.zeros(1, device="cuda")

    def act() -> None:
        if how.endswith("fault"):
            _read_far_away[(3,)](0x7E0000000000, found)
        else:
            _spin[(2,)](flag)

    if how == "graph slots":
        return replay_with_a_slot_far_away()
    if how == "collective":
        return wait_for_a_rank_that_is_ahead()
    step = logged(with_step(small_step(device="cuda"), LAUNCH, lambda own: lambda: (own(), act())))
    if how.startswith("graph"):
        # the capture runs no kernel, so that the fault happens in the replay
        graph = torch.cuda.CUDAGraph()
        small_step(device="cuda").run()
        torch.cuda.synchronize()
        flag.fill_(1)
        if how == "graph hang":
            act()
        torch.cuda.synchronize()
        flag.zero_()
        with torch.cuda.graph(graph):
            step.run()
        graph.replay()
    else:
        step.run()
    torch.cuda.synchronize()
    print("done")


def wait_for_a_rank_that_is_ahead() -> None:
    """Two emulated ranks, of which one has counted a step more than the other."""
    plan = small_plan((0,), "h200", ("parallel.tp=2",))
    source = RandomSource.of([w.recipe for w in plan.weights.values()], device="cuda")
    step = bind.bind(plan, source, device="cuda")
    write_live(step, plan.spec.step.sequences)
    step.run()
    torch.cuda.synchronize()
    ahead = next(t for x in plan.launches for n, t in x.scratch.items() if n.endswith("epochs") and "row" not in n)
    step.ranks[1].tensors[ahead].add_(1)
    logged(step).run()
    print("done")


def replay_with_a_slot_far_away() -> None:
    """A captured step of the plan's own launches, in which the first that reads the slots faults."""
    step = small_step(device="cuda")
    graph = capture(step)
    write_live(step, 2)
    graph.replay()
    torch.cuda.synchronize()
    # past the check of the values: an engine that writes the static buffer itself
    step.ranks[0].tensors["slots"].fill_(1 << 30)
    graph.replay()
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    if sys.argv[1] == "cpu":
        on_cpu(sys.argv[2])
    else:
        on_gpu(sys.argv[2])
