"""The command line as its user meets it: in a process of its own."""
from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
K3 = "examples/k3-gb300-tp16.yaml"
H200 = "examples/k3-h200-tp16.yaml"


def k3plan(*args: str | Path, code: int = 0) -> str:
    """Runs the command in the project's root; returns what it printed on both streams."""
    env = {**os.environ, "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", "from k3plan.cli import main; main()", *map(str, args)],
                          cwd=ROOT, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def seconds(*args: str) -> float:
    """Processor time of the command, which a busy machine does not stretch."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    k3plan(*args)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint and its compiled plan."""
    folder = tmp_path_factory.mktemp("demo")
    k3plan("checkpoint", "make", folder / "tiny-k3")
    k3plan("compile", "examples/tiny-k3.yaml", "--set", f"model.config={folder / 'tiny-k3/config.json'}",
           "--out", folder / "plan.json", "-q")
    return folder


def test_help_names_every_command() -> None:
    text = k3plan("--help")
    for command in ("check", "show", "compile", "explain", "diff", "run", "doctor", "schema", "checkpoint"):
        assert command in text


@pytest.mark.parametrize("args", [("--help",), ("check", K3), ("show", K3, "--resolved")], ids=" ".join)
def test_light_commands_are_quick(args: tuple[str, ...]) -> None:
    # half a second of a quiet machine; torch alone takes longer
    assert seconds(*args) < 0.8


@pytest.mark.parametrize("module", ["torch", "triton", "cutlass"])
def test_planning_imports_no_heavy_module(module: str) -> None:
    code = (f"import sys; from k3plan.face import compile_plan; compile_plan({K3!r}); "
            f"sys.exit({module!r} in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_full_model_compiles_in_three_seconds() -> None:
    assert seconds("compile", K3) < 3.0


def test_compile_prints_tables_and_writes_the_plan(tmp_path: Path) -> None:
    text = k3plan("compile", K3, "--set", "model.layers=[0, 1, 3]", "--out", tmp_path / "deep/plan.json")
    for part in ("KDA + dense MLP", "KDA + MoE", "MLA + MoE", "predicted", "floor", "moe_tail", "fused"):
        assert part in text
    assert json.loads((tmp_path / "deep/plan.json").read_text())["version"] == 1


def test_errors_are_printed_with_their_place(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("version: 1\nmodel: {preset: kimi-k3}\nstep: {qeury: 4}\nprofile: fast\n")
    text = k3plan("check", tmp_path / "bad.yaml", code=2)
    assert "bad.yaml:3:8" in text
    assert "did you mean" in text
    assert "bad.yaml:4:10" in text
    assert "Traceback" not in text


def test_a_tp_that_does_not_divide(tmp_path: Path) -> None:
    text = k3plan("compile", "examples/kimi-linear-48b.yaml", "--set", "parallel={tp: 32, experts: ep}",
                  "--set", "model.layers=[3]")
    assert "tp32" in text  # 32 heads, 256 experts: divides
    (tmp_path / "odd.yaml").write_text("version: 1\nmodel: {preset: kimi-linear-48b}\nparallel: {tp: 32}\n")
    config = json.loads((ROOT / "compiler/presets/kimi-linear-48b.json").read_text())
    config["moe_intermediate_size"] = 1000
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = k3plan("compile", tmp_path / "odd.yaml", "--set", f"model.config={tmp_path}/config.json", code=2)
    assert "expert intermediate: 1000 do not divide over tp=32" in text


def test_explain_and_diff(demo: Path, tmp_path: Path) -> None:
    assert "torch.linear" in k3plan("explain", demo / "plan.json", "L0.attn.in_proj")
    assert "no launch, node, tensor or kernel" in k3plan("explain", demo / "plan.json", "nonsense", code=2)
    assert "equal" in k3plan("diff", demo / "plan.json", demo / "plan.json")
    k3plan("compile", "examples/tiny-k3.yaml", "--set", f"model.config={demo / 'tiny-k3/config.json'}",
           "--set", "parallel.tp=4", "--out", tmp_path / "tp4.json", "-q")
    assert "parallel.tp: 2 -> 4" in k3plan("diff", demo / "plan.json", tmp_path / "tp4.json", code=1)


def test_run_decodes_and_checks(demo: Path) -> None:
    text = k3plan("run", demo / "plan.json", "--checkpoint", demo / "tiny-k3", "--tokens", "6",
                  "--prompt", "1,2,3", "--prompt", "4")
    assert "sequence 0: 1 2 3 | " in text
    assert "tokens/s" in text
    assert "check passed" in text


def test_run_finds_a_wrong_text(demo: Path, tmp_path: Path) -> None:
    """The check can fail: decode with one checkpoint, and hold it against another through a patched reference."""
    k3plan("checkpoint", "make", tmp_path / "other", "--seed", "1")
    code = f"""
import k3plan.graphs.session as session
from k3plan.graphs.checkpoint import Checkpoint
real = session.Reference
session.Reference = lambda spec, source: real(spec, Checkpoint({str(tmp_path / 'other')!r}))
from k3plan.compiler.plan import load_plan
report = session.run_plan(load_plan({str(demo / 'plan.json')!r}), {str(demo / 'tiny-k3')!r}, 4)
print(report.text)
assert not report.passed
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "check FAILED" in done.stdout


@pytest.mark.parametrize(("args", "message"), [
    (("--prompt", "1,x"), "not token ids"),
    (("--prompt", "1"), "1 prompts for 2 sequences"),
    (("--prompt", "1", "--prompt", "600"), "the model has no token 600\n  fix: write numbers from 0 to 511"),
    (("--prompt", "-1", "--prompt", "6"), "the model has no token -1"),
    (("--tokens", "60"), "6 tokens and 60 more do not fit the plan's context of 64\n  fix: ask for 59 tokens"),
])
def test_prompts_that_are_refused(demo: Path, args: tuple[str, ...], message: str) -> None:
    assert message in k3plan("run", demo / "plan.json", "--checkpoint", demo / "tiny-k3", *args, code=2)


def test_a_plan_for_a_gpu_does_not_run_here(demo: Path, tmp_path: Path) -> None:
    k3plan("compile", "examples/tiny-k3.yaml", "--set", f"model.config={demo / 'tiny-k3/config.json'}",
           "--set", "target.gpu=gb300", "--out", tmp_path / "gpu.json", "-q")
    text = k3plan("run", tmp_path / "gpu.json", "--checkpoint", demo / "tiny-k3", code=2)
    assert "fix: compile with --set target.gpu=cpu" in text


def test_checkpoint_check(demo: Path) -> None:
    assert ": ok," in k3plan("checkpoint", "check", demo / "tiny-k3", "--plan", demo / "plan.json")
    victim = sorted((demo / "tiny-k3").glob("*.safetensors"))[0]
    kept = victim.read_bytes()
    try:
        victim.write_bytes(kept[: len(kept) // 2])
        text = k3plan("checkpoint", "check", demo / "tiny-k3", "--plan", demo / "plan.json", code=2)
        assert victim.name in text
        assert "truncated" in text
    finally:
        victim.write_bytes(kept)


def test_schema_is_json() -> None:
    assert json.loads(k3plan("schema"))["title"]


def test_doctor_speaks() -> None:
    assert "torch" in k3plan("doctor")
    assert json.loads(k3plan("doctor", "--json"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("command", [("bench",), ("tune", "--out", "table.json")], ids=lambda words: words[0])
def test_timing_without_a_gpu_says_so(command: tuple[str, ...], tmp_path: Path) -> None:
    name, *options = command
    text = k3plan(name, H200, *options, code=2)
    assert f"k3plan {name} times on a GPU and this machine has none" in text
    assert f"fix: run k3plan {name} where the GPU is" in text


@pytest.mark.parametrize("command", [("bench", H200), ("graph", "lint", K3)], ids=" ".join)
def test_rows_are_sequences_and_verify_rows(command: tuple[str, ...]) -> None:
    text = k3plan(*command, "--rows", "8", code=2)
    assert "Invalid value for --rows: '8' is not SEQUENCES x ROWS, such as 8x1" in text


def test_profiles_are_those_of_a_plan_file() -> None:
    assert "'auto,stok' is not some of auto,fused,stock" in k3plan("bench", H200, "--profiles", "auto,stok", code=2)


def test_rows_of_one_step_are_one_size() -> None:
    assert "one size, such as 8x1" in k3plan("graph", "lint", K3, "--rows", "8x1,1x8", code=2)


def test_rows_of_links_are_read_before_ranks_start() -> None:
    text = k3plan("launch", "links", "examples/k3-h200-tp2.yaml", "--rows", "1,x", code=2)
    assert "'1,x' is not numbers of rows, such as 1,8,64" in text


@pytest.mark.parametrize("command", [
    ("compile", K3, "-q", "--out", "{}"), ("checkpoint", "make", "{}/file"), ("graph", "report", K3, "--out", "{}"),
], ids=" ".join)
def test_what_cannot_be_written_is_named(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    text = k3plan(*(word.format(tmp_path) for word in command), code=2)
    assert str(tmp_path) in text
    assert "fix: correct the path, or the permissions there" in text
    assert "Traceback" not in text
