"""ruff and mypy are part of the suite: a change that they refuse is red."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


# layout is set by hand (tables, kernels, line budgets), so there is no `ruff format`
COMMANDS = {"ruff": ["ruff", "check", "--output-format=concise", "."], "mypy": ["sh", ".ci/mypy"]}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_clean(command: list[str]) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
