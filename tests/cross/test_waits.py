"""Nothing that another launch of the step writes is touched before the wait, in the binary's own instructions."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from ptx_waits import find_early

ROOT = Path(__file__).resolve().parents[2]
# one of each way of waiting: a store behind it, branches, a table of addresses, ids read early, a state, page tables, a
# late trigger
FEW = r"triton\.(embed|moe_tail|experts_down_combine|experts_gate_up_situ|kda_delta_rule|mla_append|mla_attend)-T1"

KERNEL = """
.visible .entry k(
	.param .u64 .ptr .global .align 1 k_param_0,
	.param .u64 .ptr .global .align 1 k_param_1
)
.reqntid 128
{
	.reg .b64 	%rd<9>;
	ld.param.b64 	%rd1, [k_param_0];
	griddepcontrol.launch_dependents ;
	ld.param.b64 	%rd2, [k_param_1];
	add.s64 	%rd3, %rd1, 16;
	BEFORE
	griddepcontrol.wait ;
$L__BB0_1:
	st.global.b32 [ %rd2 + 0 ], { %r1 };
	ret;
}
"""


def _early(text: str, table: int | None = None) -> tuple[list[tuple[str, list[Any]]], int]:
    found = find_early(KERNEL.replace("BEFORE", text), table)
    assert (found.waits, found.triggers) == (1, 1)
    return [(a.kind, sorted(a.pointers, key=str)) for a in found.accesses], found.exits


@pytest.mark.parametrize(("text", "accesses", "exits"), [
    ("mov.b32 %r1, 0;", [], 0),
    ("ld.global.b32 { %r1 }, [ %rd3 + 0 ];", [("ld", [(0, None)])], 0),
    ("@%p1 st.global.b32 [ %rd2 + 0 ], { %r1 };", [("st", [(1, None)])], 0),
    ("atom.global.gpu.acq_rel.add.u32 %r1, [ %rd2 + 0 ], 1;", [("atom", [(1, None)])], 0),
    ("cp.async.cg.shared.global [ %r9 + 0 ], [ %rd3 + 0 ], 0x10;", [("ld", [(0, None)])], 0),
    ("selp.b64 %rd5, %rd3, %rd2, %p1;\n\tld.global.b32 { %r1 }, [ %rd5 + 0 ];", [("ld", [(0, None), (1, None)])], 0),
    ("st.shared.b64 [%r1], %rd3;\n\tld.shared.b64 %rd5, [%r1];\n\tld.global.b32 { %r1 }, [ %rd5 + 0 ];",
     [("ld", [(0, None)])], 0),
    # a branch around the wait: what follows is reached without it
    ("@%p1 bra $L__BB0_1;", [("st", [(1, None)])], 1),
    ("@%p1 ret;", [], 1),
    # what a branch leads to behind the wait alone is not early
    ("@%p1 bra $L__BB0_7;\n\tld.global.b32 { %r1 }, [ %rd3 + 0 ];\n$L__BB0_7:", [("ld", [(0, None)])], 0),
])
def test_what_comes_before_the_wait(text: str, accesses: list[Any], exits: int) -> None:
    assert _early(text) == (accesses, exits)


@pytest.mark.parametrize(("text", "early"), [
    ("mov.b32 %r1, 0;", 0),
    ("griddepcontrol.launch_dependents ;", 1),
    ("@%p1 bra $L__BB0_1;\n\tgriddepcontrol.launch_dependents ;", 1),
])
def test_a_trigger_before_the_wait_is_seen(text: str, early: int) -> None:
    kernel = KERNEL.replace("griddepcontrol.launch_dependents ;\n", "", 1).replace("BEFORE", text)
    late = kernel.replace("griddepcontrol.wait ;", "griddepcontrol.wait ;\n\tgriddepcontrol.launch_dependents ;")
    assert find_early(late).early == early
    # behind a branch around the wait it is early too
    around = late.replace("$L__BB0_1:", "$L__BB0_1:\n\tgriddepcontrol.launch_dependents ;")
    assert find_early(around).early == early + ("bra" in text)


def test_a_pointer_from_a_table_is_its_column() -> None:
    text = "ld.global.b64 { %rd4 }, [ %rd3 + 8 ];\n\tadd.s64 %rd5, %rd4, 64;\n\tld.global.b32 { %r1 }, [ %rd5 + 0 ];"
    assert _early(text, table=0)[0] == [("ld", [(0, None)]), ("ld", [(0, 3)])]
    assert _early(text)[0] == [("ld", [(0, None)]), ("ld", [])]


def _findings(folder: Path, wanted: str) -> dict[str, list[str]]:
    out = folder / "waits.json"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "tests/cross/waits.py"), str(out), wanted]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


def test_a_few_kernels_wait(tmp_path: Path) -> None:
    found = _findings(tmp_path, FEW)
    assert len(found["looked"]) >= 6
    assert not found["findings"], "\n".join(found["findings"])


# 22 s on two cores when Triton's cache is full, as it is behind the cross-compile test, 3 minutes when it is not
@pytest.mark.slow
def test_every_kernel_waits(tmp_path: Path) -> None:
    found = _findings(tmp_path, "")
    assert len(found["looked"]) > 200
    assert not found["findings"], "\n".join(found["findings"])
