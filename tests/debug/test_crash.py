"""``crash``: the end of a command, explained. On a CPU the errors are printed and not real."""
from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from broken import launch_index, small_step

from k3plan.compiler.errors import DebugError
from k3plan.compiler.reading.source import load_spec
from k3plan.graphs import launch_log
from k3plan.graphs.debug.core_dump import Fault, parse
from k3plan.graphs.debug.crash import Log, explain_end, health_finding, read_health, read_log, run_watched
from k3plan.graphs.debug.record import Bucket, Machine, Node, Record

FAULTY = str(Path(__file__).with_name("faulty.py"))
LAUNCH = "L0.attn.o_proj"

# what cuda-gdb 13.0 said of two dumps of an H200 (driver 580)
RECORDED = """Opening GPU coredump: /tmp/tmpecn5ei1z/core.4966
[Current focus set to CUDA kernel 1, grid 100, block (4,1,1), thread (96,0,0), device 0, sm 0, warp 12, lane 0]

CUDA Exception: Warp Illegal Address
The exception was triggered at PC 0x7f681b7b4af0  _decode  (kda_decode.py:141)
#0  0x00007f681b7b4f10 in _decode<<<(8,16,2),(128,1,1)>>> () at /tmp/pkg/k3plan/ops_triton/kda_decode.py:92
92	    return tl.where(slot >= 0, loaded, 0.0)
  Kernel Parent Dev Grid Status                             SMs Mask   GridDim  BlockDim Invocation       
*      1      -   0  100 Active 0x0fffffffffffffffffffffffffffffffff  (8,16,2) (128,1,1) _decode()        
       0      -   0  101 Active 0x0ffffff55555555555555fffffffffffff (128,1,1)  (32,1,1) _skinny_linear() 
"""
# its other ways to show a frame, after public reports of its users; not a recording
WITH_GRID = """Opening GPU coredump: core.123
[Current focus set to CUDA kernel 0, grid 9, block (2,0,0), thread (0,0,0), device 0, sm 4, warp 0, lane 0]
CUDA Exception: Warp Illegal Address
#0  0x00007f00d1 in _read_far_away<<<(3,1,1),(128,1,1)>>> ()
  Kernel Parent Dev Grid Status   SMs Mask GridDim  BlockDim Invocation
*      0      -   0    9 Active 0x00000010 (3,1,1) (128,1,1) _read_far_away()
       1      -   0   10 Active 0x00000010 (64,1,1) (32,1,1) _attend()
"""
WITH_LINE = """CUDA Exception: Warp Invalid Address Space
The exception was triggered at PC 0x5ff3bb8 (attend.py:14)
#0  0x0000000005ff3d30 in _attend () at attend.py:14
"""


def run(how: str, tmp_path: Path, limit: float = 60.0):
    return run_watched([sys.executable, FAULTY, "cpu", how], tmp_path, limit=limit)


def test_its_output_is_heard_while_it_runs(tmp_path: Path) -> None:
    """What it says first comes before it ends, and all of it once."""
    heard: list[tuple[float, str]] = []
    command = "import sys, time; print('one', flush=True); time.sleep(1.5); print('two', file=sys.stderr)"
    crash = run_watched([sys.executable, "-c", command], tmp_path, limit=60.0,
                        echo=lambda text: heard.append((time.monotonic(), text)))
    said = [(at, text) for at, text in heard if text]
    assert "".join(text for _, text in said) == "one\ntwo\n"
    assert crash.output == ("one", "two")
    assert said[-1][0] - said[0][0] > 0.5


def test_a_command_that_ends_well(tmp_path: Path) -> None:
    crash = run("well", tmp_path)
    assert crash.status == 0, crash.output
    assert crash.findings == ()
    log = read_log(tmp_path / "launches.jsonl")
    assert log.open == ()
    assert len(next(iter(log.plans.values()))) == len(small_step().plan.launches)


def test_a_fault_names_the_launch(tmp_path: Path) -> None:
    """And the line of the plan file; what an earlier run left in the folder is not of this one."""
    (tmp_path / "core.17").write_text("another run's")
    (tmp_path / "launches.jsonl").write_text('{"plan": "p", "pid": 1, "launches": [["x", 0, "k", ["add"], [""]]]}\n'
                                             '{"plan": "p", "pid": 1, "start": 0}\n')
    (tmp_path / "notes.txt").write_text("mine")
    crash = run_watched([sys.executable, FAULTY, "cpu", "error"], tmp_path, limit=60.0,
                        origins=load_spec("examples/tiny-k3.yaml").origins)
    assert (tmp_path / "notes.txt").exists()
    assert not list(tmp_path.glob("core.*"))
    assert "examples/tiny-k3.yaml:" in (crash.findings[0].where or "")
    assert [(f.code, f.launch, f.layer) for f in crash.findings] == [("CG-071", LAUNCH, 0)]
    assert "700 cudaErrorIllegalAddress" in crash.findings[0].text
    assert "linear" in (crash.findings[0].where or "")
    assert "fix: " in str(crash)


def test_a_hang_names_the_launch_and_the_line(tmp_path: Path) -> None:
    crash = run("hang", tmp_path, limit=12.0)
    assert crash.status is None
    assert [(f.code, f.launch) for f in crash.findings] == [("CG-073", LAUNCH)]
    assert "faulty.py" in crash.findings[0].text


def test_two_ranks_write_one_log(tmp_path: Path) -> None:
    lines = ['{"plan": "p", "pid": 1, "launches": [["a", 0, "k", ["add"]]]}', '{"plan": "p", "pid": 1, "start": 0}',
             '{"plan": "p", "pid": 2, "start": 0}', '{"plan": "p", "pid": 1, "end": 0}', '{"plan": "p", "pi']
    (tmp_path / "log").write_text("\n".join(lines))
    assert read_log(tmp_path / "log").open == (("p", 0),)


def test_an_error_of_the_host_is_none_of_cuda(tmp_path: Path) -> None:
    crash = run("host", tmp_path)
    assert [(f.code, f.launch) for f in crash.findings] == [("CG-074", None)]
    assert "ValueError: nothing to do with the device" in crash.findings[0].text


def test_no_command(tmp_path: Path) -> None:
    with pytest.raises(DebugError, match="fix: "):
        run_watched([], tmp_path)
    with pytest.raises(DebugError, match="no such command"):
        run_watched(["no-such-command-of-anyone"], tmp_path)


def test_what_cuda_gdb_says() -> None:
    assert parse(WITH_GRID) == [
        Fault("_read_far_away", (3, 1, 1), (128, 1, 1), "Warp Illegal Address"),
        Fault("_attend", (64, 1, 1), (32, 1, 1)),
    ]
    assert parse(RECORDED) == [
        Fault("_decode", (8, 16, 2), (128, 1, 1), "Warp Illegal Address"),
        Fault("_skinny_linear", (128, 1, 1), (32, 1, 1)),
    ]
    assert parse(WITH_LINE) == [Fault("_attend", (0, 0, 0), (0, 0, 0), "Warp Invalid Address Space")]
    assert parse("CUDA Exception: Device Illegal Address\n") == [
        Fault("", (0, 0, 0), (0, 0, 0), "Device Illegal Address")]
    assert parse("nothing") == []


def test_a_dump_alone_is_a_fault() -> None:
    log = Log({"p": [["L0.sum", 0, "triton.add", ["residual_add"]]]}, (("p", 0),))
    found = explain_end(-6, 30.0, ["Fatal Python error: Aborted"], [], log, dumped=True)
    assert [(f.code, f.launch) for f in found] == [("CG-071", "L0.sum")]
    assert "or one shortly before it" in found[0].text


def test_a_replay_is_told_by_kernel_and_grid() -> None:
    plan = small_step().plan
    at = launch_index(small_step(), LAUNCH)
    machine = Machine("none", 1, "13.0", "2.11", "3.6")
    nodes = (Node(0, "kernel", "_linear", (8, 1, 1), launch=at - 1), Node(1, "kernel", "_linear", (4, 1, 1), launch=at))
    record = Record(plan.key, machine, Bucket(2, 1), nodes, (), ())
    fault = Fault("_linear", (4, 1, 1), (128, 1, 1), "Warp Illegal Address")
    found = explain_end(1, 30.0, [], [fault], Log({}, ()), (record, plan))
    assert [(f.code, f.launch, f.layer) for f in found] == [("CG-071", LAUNCH, 0)]


@pytest.mark.parametrize(("function", "launch", "words"), [
    ("_attn_res", "L0.mlp.h+1", "the launch that never ended"),
    ("_skinny_linear", "L0.attn.o_proj", "which ended before its fault was known"),
    ("_other", "L0.mlp.h+1", "a kernel that no launch of the plan has"),
    ("", "L0.mlp.h+1", "or one shortly before it"),
])
def test_a_fault_that_is_known_late(function: str, launch: str, words: str) -> None:
    """On an H200 a wait returned while the driver still wrote the dump, and the next launch had the error."""
    launches = [["L0.attn.in_proj", 0, "k", ["linear"], ["_skinny_linear"]],
                ["L0.attn.o_proj", 0, "k", ["linear"], ["_skinny_linear"]],
                ["L0.mlp.h+1", 0, "k", ["attn_res"], ["_attn_res"]]]
    fault = Fault(function, (3, 1, 1), (128, 1, 1), "Warp Illegal Address")
    (found,) = explain_end(1, 30.0, [], [fault], Log({"p": launches}, (("p", 2),)))
    assert (found.code, found.launch) == ("CG-071", launch)
    assert words in found.text


def test_a_hang_in_a_collective() -> None:
    launches = [["embed", None, "triton.embed", ["embed"]], ["L0.sum", 0, "triton.all_reduce", ["all_reduce"]]]
    log = Log({"p": launches}, (("p", 1),))
    found = explain_end(None, 30.0, [], [Fault("_exchange", (2, 8, 1), (128, 1, 1))], log)
    assert [(f.code, f.launch, f.layer) for f in found] == [("CG-072", "L0.sum", 0)]
    assert "_exchange on a grid of (2, 8, 1)" in found[0].text


def test_the_first_error_counts() -> None:
    output = ["RuntimeError: Triton Error [CUDA]: misaligned address",
              "CUDA error: an illegal memory access was encountered"]
    found = explain_end(1, 30.0, output, [], Log({}, ()))
    assert found[0].code == "CG-071"
    assert "716" in found[0].text


def test_32_health_words_name_rank_launch_and_epoch() -> None:
    step = small_step()
    at = launch_index(step, LAUNCH)
    launches = list(step.plan.launches)
    launches[at] = replace(launches[at], scratch={"stripe_health": "words"})
    words = torch.zeros(8, dtype=torch.int32)
    rank = replace(step.ranks[0], tensors={**step.ranks[0].tensors, "words": words})
    step = replace(step, plan=replace(step.plan, launches=tuple(launches)), ranks=(rank,))
    assert read_health(step) == []
    words[:6] = torch.tensor([1 + 3, at, 41, 7, 12, 0b10100])
    found = read_health(step)
    assert [(f.code, f.launch) for f in found] == [("CG-072", LAUNCH)]
    assert "rank 3 gave up waiting at epoch 41, block 7: 12 words from rank 2 and 4 never came" in found[0].text
    assert health_finding(step.plan, torch.zeros(8, dtype=torch.int32)) is None


@pytest.mark.parametrize(("lasts", "fails", "waits"), [(0.0, False, 1), (0.05, False, 2), (0.05, True, 2)], ids=str)
def test_a_launch_is_over_when_its_error_would_be_known(
        lasts: float, fails: bool, waits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for a launch that faults lasts and returns well; the error of the next one is this launch's."""
    done: list[float] = []

    def synchronize() -> None:
        done.append(time.monotonic())
        if len(done) == 2 and fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        time.sleep(lasts)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    log = tmp_path / "launches.jsonl"
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    with pytest.raises(RuntimeError, match="illegal memory access") if fails else nullcontext():
        launch_log._logged(file, "plan", 4, lambda: None)
    assert len(done) == waits
    assert done[-1] - done[0] >= (waits - 1) * 0.1  # the error is 40 ms late at most
    assert read_log(log).open == ((("plan", 4),) if fails else ())
