"""``k3plan launch`` between two GPUs of this host: small models, every collective kernel over the real links."""
from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from k3plan.face import compile_plan
from k3plan.graphs.make_checkpoint import make_checkpoint

ROOT = Path(__file__).resolve().parents[2]
TINY = ("examples/tiny-k3.yaml", "--set", "target.gpu=h200")


def start(*command: str) -> subprocess.Popen[str]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.Popen([sys.executable, *command], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, env=environment)


def launch(*arguments: str) -> subprocess.Popen[str]:
    return start("-c", "from k3plan.cli import main; main()", "launch", *arguments)


def ended(running: subprocess.Popen[str], seconds: float = 100) -> tuple[str, str]:
    """What it said, once it is over. Raises AssertionError with that when it is not in time."""
    try:
        return running.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        running.kill()  # its ranks miss their launcher and end
        raise AssertionError("\n".join([f"not over after {seconds:.0f} s", *running.communicate()])) from None


def said(running: subprocess.Popen[str]) -> str:
    out, err = ended(running)
    assert running.returncode == 0, err
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [[], ["choices.moe_front=sharded", "choices.moe_tail=stripe"],
                                      ["step.query=4"], ["profile=stock"]], ids=str)
def test_ranks_agree_with_emulated_ones(settings: list[str]) -> None:
    """Captured steps of two processes, replayed with new inputs, equal to the bit to both ranks on one GPU."""
    more = [word for setting in settings for word in ("--set", setting)]
    text = said(launch("check", *TINY, *more, "--wait-limit", "3000000"))
    assert "over symmetric are equal to the bit" in text
    assert "emulated ranks on one device to the bit" in text


@pytest.mark.gpu
def test_nccl_carries_a_plan_without_collective_kernels() -> None:
    text = said(launch("check", *TINY, "--transport", "library"))
    assert "over torch.distributed are equal to the bit" in text
    assert "emulated ranks on one device to the bit" in text


@pytest.mark.gpu
def test_two_gpus_decode_what_the_reference_would(tmp_path: Path) -> None:
    """Tokens of both ranks equal, and those of the fp32 reference within what bf16 allows."""
    make_checkpoint(tmp_path / "k3", attention=("kda", "mla", "kda"), mlp=("dense", "moe", "moe"), attn_res_block=2)
    (tmp_path / "plan.yaml").write_text(
        f"version: 1\nmodel: {{config: {tmp_path / 'k3'}}}\nparallel: {{tp: 2}}\n"
        "step: {sequences: 2, context: 64, page_size: 16}\ntarget: {gpu: h200}\n")
    compile_plan(tmp_path / "plan.yaml").save(tmp_path / "plan.json")
    text = said(launch("decode", str(tmp_path / "plan.json"), "--checkpoint", str(tmp_path / "k3"), "--tokens", "16"))
    assert "check passed" in text
    assert "2 ranks over symmetric decoded the same tokens" in text


@pytest.mark.gpu
def test_a_killed_rank_ends_the_others_within_ten_seconds(tmp_path: Path) -> None:
    """Rank 0 sits in a wait on its GPU when rank 1 dies; it says who is gone and how far its own launches got."""
    running = launch("check", *TINY, "--steps", "1000000", "--no-emulate", "--log-folder", str(tmp_path))
    deadline, process = time.monotonic() + 120, None
    while process is None and time.monotonic() < deadline and running.poll() is None:
        for log in tmp_path.glob("*/attempt_0/1/stdout.log"):
            found = re.search(r"rank 1 of 2 is process (\d+), bound", log.read_text())
            process = int(found[1]) if found else None
        time.sleep(0.05)
    if process is None:
        running.kill()
    assert process is not None, running.communicate()[1]
    time.sleep(8)  # until steps are under way
    os.kill(process, signal.SIGKILL)
    killed = time.monotonic()
    _, err = ended(running)
    assert time.monotonic() - killed < 10, err
    assert running.returncode != 0
    assert "rank 0 stops: rank 1 has given no sign of life" in err, err
    steps = [int(n) for n in re.findall(r"(\d+) launches over", err)]
    assert steps, err
    assert max(steps) > 10, "it was killed before any step"


# programs between two ranks that are not commands


@pytest.fixture(scope="module")
def saw() -> dict[str, list[dict[str, Any]]]:
    """By case, what each rank saw. One run, since its processes take longer to start than to do it."""
    text = said(start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                      "tests/distributed/ranks_on_gpus.py", "late,aborted"))
    found: dict[str, list[dict[str, Any]]] = {}
    for line in re.findall(r"^saw (.*)$", text, re.MULTILINE):
        found |= json.loads(line)
    return found


@pytest.mark.gpu
def test_a_late_rank_changes_nothing(saw: dict[str, list[dict[str, Any]]]) -> None:
    """Now this rank, now the other begins a step late, so that its peer is a step ahead."""
    assert [(rank["equal"], rank["eager"], rank["steps"]) for rank in saw["late"]] == [(True, True, 12)] * 2


@pytest.mark.gpu
def test_an_aborted_step_is_told_and_forgotten(saw: dict[str, list[dict[str, Any]]]) -> None:
    zero, one = saw["aborted"]
    assert re.match(r"rank 0 gave up in launch \d+ \(.*\), epoch \d+, block \d+: \d+ words from rank 1 never came",
                    zero["said"]), zero["said"]
    assert zero["seconds"] < 10
    assert one["said"] == ""
    assert zero["equal"]
    assert one["equal"]


@pytest.mark.gpu
def test_a_rank_without_memory_stops_both() -> None:
    running = start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                    "tests/distributed/ranks_on_gpus.py", "refused")
    _, err = ended(running)
    assert running.returncode != 0
    assert "rank 1 refused" in err, err
    assert "out of memory" in err, err
