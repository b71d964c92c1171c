"""Every Triton kernel compiles for the GPUs that we name, without one: registers, spills and shared memory.

A few small launches in every run, all of them in the slow ones. The golden table belongs to one version of Triton,
which it names; under another version only the limits hold. UPDATE_GOLDEN=1 in a run with the slow test rewrites it.
"""
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from launches import FP8, K3, SHARDED, Setting

from k3plan.compiler import compile as planner
from k3plan.compiler.device import load_device
from k3plan.compiler.spec import Parallel, Spec, Step
from k3plan.graphs.launch import default_config
from k3plan.ops_triton.compile_check import SHARED_LIMIT, TARGETS
from k3plan.ops_triton.kernels import KERNELS

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/golden/cross/triton.json"
# kernels that cannot be compiled for a target: (name, target) -> why. None so far: what only NVIDIA has is behind
# a switch (dependent launch, byte permutes)
IMPOSSIBLE: dict[tuple[str, str], str] = {}
# registers that spill in the configuration of an untuned shape: (name, target) -> why. None
SPILLS: dict[tuple[str, str], str] = {}
# a second or less each
SMALL = (r"^triton\.(rms_norm-T1-512|skinny_linear-T1-768|attn_res_mix-T1-7168-nb1|kda_gate-T1|mla_append-T1-o1|"
         r"embed-T1|logits_argmax-T1|residual_add-T1|experts_combine-T1|all_gather-T1-o1-56|all_reduce_token-T1|"
         r"skinny_linear_gate-T1)|^link")


def compile_launches(folder: Path, wanted: str = "") -> dict[str, dict[str, Any]]:
    """The table of the launches whose name ``wanted`` finds."""
    out = folder / "table.json"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, str(ROOT / "tests/cross/compile_all.py"), str(out), wanted]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


def reason(listed: dict[tuple[str, str], str], name: str, target: str) -> str | None:
    return next((why for (pattern, of), why in listed.items() if of == target and re.search(pattern, name)), None)


def check_limits(table: dict[str, dict[str, Any]]) -> None:
    """Everything compiles, nothing spills, shared memory fits, and every exception is still one."""
    wrong = []
    for name, targets in table.items():
        assert tuple(targets) == tuple(TARGETS), f"{name}: {list(targets)}"
        for target, usage in targets.items():
            failed, impossible = isinstance(usage, str), reason(IMPOSSIBLE, name, target)
            if failed != (impossible is not None):
                wrong.append(f"{name} for {target}: {usage}, listed as impossible: {impossible}")
            if failed:
                continue
            _, shared, spilled, *_ = usage
            if bool(spilled) != (reason(SPILLS, name, target) is not None):
                wrong.append(f"{name} for {target}: spills {spilled} bytes, listed: {reason(SPILLS, name, target)}")
            if shared > SHARED_LIMIT[target]:
                wrong.append(f"{name} for {target}: {shared} bytes of shared memory, {SHARED_LIMIT[target]} at most")
    assert not wrong, "\n".join(wrong)


def check_recorded(table: dict[str, dict[str, Any]], names: set[str] | None = None) -> None:
    """Numbers as in the golden table; of ``names``, or all."""
    golden = json.loads(GOLDEN.read_text())
    if golden["triton"] != version("triton"):
        pytest.skip(f"recorded with triton {golden['triton']}, this is {version('triton')}")
    usage = golden["usage"]
    compared = sorted(names or {*usage, *table})
    changed = [f"{name}: recorded {usage.get(name)}, now {table.get(name)}" for name in compared
               if table.get(name) != usage.get(name)]
    assert not changed, "\n".join([*changed, "UPDATE_GOLDEN=1 rewrites the table"])


def test_the_table_has_every_kernel_of_the_menu() -> None:
    names = {name.split("-")[0] for name in json.loads(GOLDEN.read_text())["usage"]}
    missing = {kernel.id for kernel in KERNELS} - names
    assert not missing, f"not cross-compiled: {missing}; add a setting to launches.py"


def test_small_launches(tmp_path: Path) -> None:
    table = compile_launches(tmp_path, SMALL)
    assert len(table) > 10
    check_limits(table)
    check_recorded(table, set(table))


@pytest.mark.parametrize("target", TARGETS)
def test_a_plan_for_the_target_has_what_is_compiled(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 verify rows, of which some kernels compute fewer at once on AMD; no device table of ours is an AMD one."""
    arch = target.removesuffix("a")
    monkeypatch.setattr(planner, "load_device", lambda name: replace(load_device(name), arch=arch))
    spec = Spec(model=K3, layers=(3,), parallel=Parallel(16, "tp"), step=Step(1, 8, 8192, 64, ("tokens",)), gpu="h200",
                numerics=FP8, profile="fused", choices=SHARDED, buckets=(1,))
    planned = {choice.kernel: choice.config for choice in planner.compile_spec(spec, KERNELS).choices}
    regions = Setting(numerics=FP8, layers=(3,), kernels=r"\.(moe_tail|mla_attend_out)$").regions(1, 8, SHARDED)
    compiled = {region.kernel.id: default_config(replace(region, arch=arch)) for region in regions}
    assert len(compiled) == 2
    assert compiled.items() <= planned.items()
    assert ("block" in compiled["triton.moe_tail"]) == (target == "gfx950")


@pytest.mark.slow
def test_all_launches(tmp_path: Path) -> None:
    table = compile_launches(tmp_path)
    if os.environ.get("UPDATE_GOLDEN"):
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(table[name])}" for name in sorted(table))
        GOLDEN.write_text(f'{{"triton": "{version("triton")}", "usage": {{\n{lines}\n}}}}\n')
    check_limits(table)
    check_recorded(table)
