"""``k3plan graph lint | capture | verify | crash | explain`` and ``k3plan explain CODE`` as a user types them."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from k3plan.cli import app

EXAMPLE = "examples/tiny-k3.yaml"


def k3plan(*args: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(a) for a in args], catch_exceptions=True)
    text = result.output + (str(result.exception) if result.exception and result.exit_code != code else "")
    assert result.exit_code == code, text
    return result.output


def test_lint_runs_a_plan_of_this_machine() -> None:
    text = k3plan("graph", "lint", EXAMPLE, "--set", "model.layers=[0]", "--set", "parallel.tp=1")
    assert "two eager steps on a CPU" in text
    assert "CG-032 note" in text
    assert "(L0.attn.h)" in text


def test_lint_of_a_plan_for_a_gpu_says_that_nothing_ran() -> None:
    text = k3plan("graph", "lint", "examples/k3-gb300-tp16.yaml", "--plan-only")
    assert "the plan alone (as asked)" in text
    data = json.loads(k3plan("graph", "lint", "examples/k3-gb300-tp16.yaml", "--plan-only", "--json"))
    assert all(f["code"] == "CG-032" for f in data["findings"])
    assert any("k3-gb300-tp16.yaml:" in f["where"] for f in data["findings"])


@pytest.mark.parametrize("command", ["capture", "verify"])
def test_without_a_gpu_the_command_says_where_to_run(command: str) -> None:
    code = "from k3plan.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "graph", command, EXAMPLE], capture_output=True, text=True)
    assert done.returncode == 2
    assert f"k3plan graph {command} needs an NVIDIA GPU" in done.stderr
    assert "fix: " in done.stderr


def test_crash_of_a_command(tmp_path: Path) -> None:
    text = k3plan("graph", "crash", "--folder", tmp_path, "--", sys.executable, "-c",
                  "raise SystemExit('CUDA error: misaligned address')", code=1)
    assert "CG-071 error: 716 cudaErrorMisalignedAddress" in text
    assert "ended with status 1" in text
    data = json.loads(k3plan("graph", "crash", "--json", "--folder", tmp_path, "--", sys.executable, "-c", "pass"))
    assert data["status"] == 0
    assert data["findings"] == []


@pytest.mark.parametrize("start", [("explain",), ("graph", "explain")])
def test_explain_without_a_plan(start: tuple[str, ...]) -> None:
    assert "a side stream was not forked" in k3plan(*start, "CG-003")
    assert "illegal memory access" in k3plan(*start, "700")
    assert "904 cudaErrorStreamCaptureUnjoined" in k3plan(*start, "capturing stream has unjoined work")


def test_explain_all_codes_as_json() -> None:
    codes = json.loads(k3plan("graph", "explain", "all", "--json"))
    assert {"CG-001", "CG-063"} <= {c["code"] for c in codes}
    assert k3plan("graph", "explain", "all").count("\n") == len(codes)
