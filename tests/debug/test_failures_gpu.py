"""Failures provoked on a GPU, each in a process of its own: the tool must name the failure, its launch and its line.

``provoke.py`` and ``provoke_steps.py`` hold the cases; one process runs them all, as forks that never touch its GPU.
"""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import provoke
import provoke_steps  # noqa: F401 - declares more cases
import pytest

SCRIPT = Path(__file__).with_name("provoke.py")
KINDS = {*range(1, 23), *range(47, 51)}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, Any]]:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=1800)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-2000:]
    return {line["name"]: line for line in lines}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", provoke.CASES)
def test_the_failure_is_named(name: str, outcomes: dict[str, dict[str, Any]]) -> None:
    outcome = outcomes[name]
    said = "\n".join(f"{f['code']} at {f['launch']}, {f['where']}: {f['text']}" for f in outcome.get("findings", []))
    assert outcome["named"], f"expected {outcome['expected'] or 'nothing'}\n{said}\n{outcome.get('log', '')}"


def test_every_kind_has_a_case() -> None:
    covered = {case.kind for case in provoke.CASES.values()}
    assert covered >= KINDS, f"no case for {sorted(KINDS - covered)}"
