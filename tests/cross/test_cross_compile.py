"""Every Triton kernel compiles for the GPUs that we name, without one: registers, spills and shared memory.

The golden table belongs to one version of Triton, which it names; under another version only the limits hold.
UPDATE_GOLDEN=1 rewrites it.
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/golden/cross/triton.json"
SHARED_LIMIT = {"sm_90a": 232448, "sm_100a": 232448, "sm_103a": 232448, "gfx950": 163840}

# about 4 minutes on two cores when Triton's cache is empty, 40 s when it is full
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    out = tmp_path_factory.mktemp("cross") / "table.json"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, str(ROOT / "tests/cross/compile_all.py"), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


def test_everything_compiles(table: dict[str, dict[str, Any]]) -> None:
    failed = [f"{name} for {target}: {usage}" for name, targets in table.items()
              for target, usage in targets.items() if isinstance(usage, str)]
    assert not failed, "\n".join(failed)


def test_nothing_spills(table: dict[str, dict[str, Any]]) -> None:
    spilled = [f"{name} for {target}: {usage[2]} bytes" for name, targets in table.items()
               for target, usage in targets.items() if not isinstance(usage, str) and usage[2]]
    assert not spilled, "\n".join(spilled)


def test_shared_memory_fits(table: dict[str, dict[str, Any]]) -> None:
    large = [f"{name} for {target}: {usage[1]} bytes" for name, targets in table.items()
             for target, usage in targets.items() if not isinstance(usage, str) and usage[1] > SHARED_LIMIT[target]]
    assert not large, "\n".join(large)


def test_usage_is_as_recorded(table: dict[str, dict[str, Any]]) -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(table[name])}" for name in sorted(table))
        GOLDEN.write_text(f'{{"triton": "{version("triton")}", "usage": {{\n{lines}\n}}}}\n')
    golden = json.loads(GOLDEN.read_text())
    if golden["triton"] != version("triton"):
        pytest.skip(f"recorded with triton {golden['triton']}, this is {version('triton')}")
    changed = [f"{name}: recorded {recorded}, now {table.get(name)}" for name, recorded in golden["usage"].items()
               if table.get(name) != recorded]
    assert not changed, "\n".join([*changed, "UPDATE_GOLDEN=1 rewrites the table"])
