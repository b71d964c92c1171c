"""Every CuTe DSL kernel compiles for the GPUs that we name, without one: registers, spills and shared memory.

The golden table belongs to one version of the DSL, which it names; under another version only the limits hold. Two
to three minutes of processor time on all cores where nothing is cached, 10 s where nothing has changed.
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

pytest.importorskip("cutlass")

from k3plan.ops_cute.shared_memory import LIMIT

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/golden/cross/cute.json"

# bytes a thread: cute.moe_experts at one row keeps one address of its 96 registers there on sm_100a and sm_103a
SPILL_LIMIT = 8


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> dict[str, dict[str, Any]]:
    out = tmp_path_factory.mktemp("cross") / "table.json"
    cache = pytestconfig.cache.mkdir("cute_cubins") / "usage.json"  # type: ignore[union-attr]
    command = [sys.executable, str(ROOT / "tests/cross/compile_cute.py"), str(out), str(cache)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


def _each(table: dict[str, dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(f"{name} for {target}", usage) for name, targets in table.items() for target, usage in targets.items()]


def test_everything_compiles(table: dict[str, dict[str, Any]]) -> None:
    failed = [f"{where}: {usage}" for where, usage in _each(table) if isinstance(usage, str)]
    assert not failed, "\n".join(failed)


def test_almost_nothing_spills(table: dict[str, dict[str, Any]]) -> None:
    spilled = [f"{where}: {usage[2]} bytes" for where, usage in _each(table)
               if not isinstance(usage, str) and usage[2] > SPILL_LIMIT]
    assert not spilled, "\n".join(spilled)


def test_shared_memory_fits(table: dict[str, dict[str, Any]]) -> None:
    large = [f"{where}: {usage[1]} bytes" for where, usage in _each(table)
             if not isinstance(usage, str) and usage[1] > LIMIT]
    assert not large, "\n".join(large)


def test_usage_is_as_recorded(table: dict[str, dict[str, Any]]) -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(table[name])}" for name in sorted(table))
        GOLDEN.write_text(f'{{"nvidia-cutlass-dsl": "{version("nvidia-cutlass-dsl")}", "usage": {{\n{lines}\n}}}}\n')
    golden = json.loads(GOLDEN.read_text())
    recorded = golden["nvidia-cutlass-dsl"]
    if recorded != version("nvidia-cutlass-dsl"):
        pytest.skip(f"recorded with {recorded}, this is {version('nvidia-cutlass-dsl')}")
    changed = [f"{name}: recorded {usage}, now {table.get(name)}" for name, usage in golden["usage"].items()
               if table.get(name) != usage]
    changed += [f"{name}: not recorded" for name in table if name not in golden["usage"]]
    assert not changed, "\n".join([*changed, "UPDATE_GOLDEN=1 rewrites the table"])
