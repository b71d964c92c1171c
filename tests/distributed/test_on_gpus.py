"""``k3plan launch`` between two GPUs of this host: small models, every collective kernel over the real links."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def launch(*arguments: str) -> str:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    command = [sys.executable, "-c", "from k3plan.cli import main; main()", "launch", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [[], ["choices.moe_front=sharded", "choices.moe_tail=stripe"],
                                      ["step.query=4"], ["profile=stock"]], ids=str)
def test_ranks_agree_with_emulated_ones(settings: list[str]) -> None:
    """Captured steps of two processes, replayed with new inputs, equal to the bit to both ranks on one GPU."""
    more = [word for setting in settings for word in ("--set", setting)]
    said = launch("check", "examples/tiny-k3.yaml", "--set", "target.gpu=h200", *more, "--wait-limit", "3000000")
    assert "over symmetric are equal to the bit" in said
    assert "emulated ranks on one device to the bit" in said


@pytest.mark.gpu
def test_nccl_carries_a_plan_without_collective_kernels() -> None:
    said = launch("check", "examples/tiny-k3.yaml", "--set", "target.gpu=h200", "--transport", "library")
    assert "over torch.distributed are equal to the bit" in said
    assert "emulated ranks on one device to the bit" in said
