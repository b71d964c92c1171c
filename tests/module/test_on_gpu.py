"""The checks of ``gpu_checks.py``, one a test, and a module of two ranks on two GPUs."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_checks import CHECKS, EXACT, models, plans, text
from torch.testing import assert_close

from k3plan.graphs.module.step import DecodeStep


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("module-gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
def test_module(where: Path, check: str) -> None:
    assert CHECKS[check](where)


@pytest.mark.gpu
@pytest.mark.parametrize("only", ["triton.", ""], ids=["triton", "all"])
def test_two_ranks(where: Path, only: str) -> None:
    """Captured buckets of two processes, a GPU each: both give what both ranks on one GPU give, to the bit."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    models(where)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(Path(__file__).with_name("module_ranks.py")), str(where), only],
        text=True, capture_output=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[:6000]
    wanted = text(DecodeStep.from_plan(plans(where, only, tp=2), models(where)[0], device="cuda")).cpu()
    for rank in range(2):
        assert_close(torch.load(where / f"logits-{rank}.pt"), wanted, **EXACT)
