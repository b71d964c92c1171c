"""One rank of a module on GPUs, as torchrun starts it: decodes the text of ``gpu_checks`` and saves its logits.

``torchrun --nproc-per-node 2 module_ranks.py FOLDER ONLY``: FOLDER has the checkpoints, ONLY begins the ids of the
kernels ("triton.", or "" for all).
"""
from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from gpu_checks import models, plans, text

from k3plan.graphs.distributed.group import Group
from k3plan.graphs.distributed.rank import make_transport
from k3plan.graphs.module.step import DecodeStep


def main(where: Path, only: str) -> None:
    group = Group.join("cuda")
    step = DecodeStep.from_plan(plans(where, only, tp=2), models(where)[0], transport=make_transport(group))
    assert [rank.index for executable in step.executables for rank in executable.ranks] == [group.rank] * 3
    assert len(step.graphs) == 3
    torch.save(text(step).cpu(), where / f"logits-{group.rank}.pt")
    group.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
