"""``k3plan launch`` as a person runs it: two processes over gloo on this machine."""
from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from k3plan.compiler.plan import load_plan
from k3plan.face import compile_plan
from k3plan.graphs.bind import bind
from k3plan.graphs.checkpoint import Checkpoint
from k3plan.graphs.decode import Bound, generate
from k3plan.graphs.distributed.work import run_steps
from k3plan.graphs.make_checkpoint import make_checkpoint

ROOT = Path(__file__).resolve().parents[2]
TEXT = re.compile(r"sequence \d+: [\d ]+\| ([\d ]+)")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint in ``k3`` and a TP 2 plan over it in ``plan.json``."""
    folder = tmp_path_factory.mktemp("launch")
    make_checkpoint(folder / "k3", attention=("kda", "mla", "kda"), mlp=("dense", "moe", "moe"), attn_res_block=2)
    (folder / "plan.yaml").write_text(
        f"version: 1\nmodel: {{config: {folder / 'k3'}}}\nparallel: {{tp: 2}}\n"
        "step: {sequences: 2, context: 64, page_size: 16}\ntarget: {gpu: cpu}\n"
        "numerics: {activation: fp32, kv_cache: fp32}\n"
        "choices: {moe_front: sharded, moe_tail: stripe, mla_front: sharded}\n")
    compile_plan(folder / "plan.yaml").save(folder / "plan.json")
    return folder


def test_steps_beyond_the_context_begin_sequences_anew(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = compile_plan(files / "plan.yaml", ["parallel.tp=1", "step.context=16", "step.outputs=[tokens,hidden]"])
    monkeypatch.setattr(torch, "randint", lambda low, high, shape, generator: torch.full(shape, 3))
    made = run_steps(bind(plan, Checkpoint(files / "k3")), None, 18, seed=0)
    assert not torch.equal(made[0], made[1])
    assert torch.equal(made[16], made[0])
    assert torch.equal(made[17], made[1])


def start(files: Path, *arguments: str, logs: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from k3plan.cli import main; main()", "launch", *arguments,
               "--log-folder", str(files / logs)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"})


def test_two_processes_decode_what_one_rank_decodes(files: Path) -> None:
    """Every collective of the step through gloo; tokens equal to TP 1 in this process, and to the fp32 oracle's."""
    running = start(files, "decode", str(files / "plan.json"), "--checkpoint", str(files / "k3"), "--tokens", "8",
                    logs="decode")
    alone = compile_plan(files / "plan.yaml", ["parallel.tp=1"])
    torch.set_num_threads(1)
    prompts = [[(7 * i + 11 * j + 3) % alone.spec.model.vocab for j in range(5 + i)] for i in range(2)]
    wanted = generate(Bound(bind(alone, Checkpoint(files / "k3"))), alone.spec.step, prompts, 8).tokens
    out, err = running.communicate(timeout=100)
    assert running.returncode == 0, err
    assert [[int(t) for t in text.split()] for text in TEXT.findall(out)] == wanted
    assert "check passed: 16 of 16 tokens" in out
    assert "2 ranks over torch.distributed decoded the same tokens" in out
    ops = {op for choice in load_plan(files / "plan.json").choices for op in choice.ops}
    assert {"all_reduce", "reduce_scatter", "all_gather"} <= ops


def test_a_killed_rank_ends_the_others_within_ten_seconds(files: Path) -> None:
    running = start(files, "decode", str(files / "plan.json"), "--checkpoint", str(files / "k3"), "--tokens", "50",
                    logs="killed")
    deadline, process = time.monotonic() + 60, None
    while process is None and time.monotonic() < deadline:
        for log in (files / "killed").glob("*/attempt_0/1/stdout.log"):
            found = re.search(r"rank 1 of 2 is process (\d+), bound", log.read_text())
            process = int(found[1]) if found else None
        time.sleep(0.02)
    assert process is not None, "rank 1 did not say which process it is"
    os.kill(process, signal.SIGKILL)
    killed = time.monotonic()
    _, err = running.communicate(timeout=60)
    assert time.monotonic() - killed < 10
    assert running.returncode != 0
    assert "rank 0 stops: rank 1 has given no sign of life" in err, err
