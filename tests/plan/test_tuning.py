"""Frozen measurements: exact shapes, nearest shapes, and lines that the kernels have outgrown."""
from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import tune_fakes

from k3plan import cli
from k3plan.compiler.compile import cover_graph, lower
from k3plan.compiler.covering.match import find_regions
from k3plan.compiler.device import load_device
from k3plan.compiler.errors import BindError
from k3plan.compiler.kernel import KernelDef, Menu
from k3plan.compiler.menu import op_kernels
from k3plan.compiler.ops import OPS
from k3plan.compiler.reading.source import load_spec
from k3plan.compiler.tuning import Calibration, Tuned, Tuning, distance
from k3plan.face import kernels, tuning
from k3plan.graphs.tuner import pool as tune_pool
from k3plan.graphs.tuner.alone import (
    FORMS,
    ROWS,
    all_times,
    describe,
    jobs,
    lines_text,
    merge_tables,
    spread,
    table,
    time_job,
    tuned_lines,
)
from k3plan.graphs.tuner.pool import Workload, tune
from k3plan.graphs.verify import check_of

K3 = Path(__file__).resolve().parents[2] / "examples/k3-h200-tp16.yaml"
IN_STEP = load_device("h200")["launch_in_step_us"]
NORM = KernelDef("test.norm", "h = rms_norm(x, w)\n-> h", "test:bind", configs=lambda r: [{"warps": 4}, {"warps": 8}])


@pytest.mark.parametrize(("left", "right", "octaves"), [
    ("1x7168,7168", "1x7168,7168", 0.0), ("1x7168,7168", "2x7168,7168", 1.0), ("8x64", "1x128", 4.0),
    ("1x64", "1x64:fp32", math.inf), ("1x64", "64", math.inf), ("1x64,2", "1x64", math.inf),
    ("1x64,1x64", "1x64", 0.1), ("4x64,1,1,1,1", "2x64,1", 1.2),
])
def test_distance(left: str, right: str, octaves: float) -> None:
    assert distance(left, right) == octaves == distance(right, left)


ELSEWHERE = Calibration("that GPU", [
    Tuned("fast", "1x64,32x64", {}, 6.0, "", 4.0), Tuned("fast", "8x64,32x64", {}, 4.0, "", 4.0),
    Tuned("here", "1x64,32x64", {}, 2.25, "", 4.0, in_step=True), Tuned("slow", "1x64", {}, 9.0, "", 3.0),
], in_step_us=0.5)


@pytest.mark.parametrize(("kernel", "key", "us", "words"), [
    ("fast", "1x64,32x64", 15.1, "x 1.50, as on that GPU at the nearest measured shape, 0.10 us in a step"),
    ("fast", "4x64,32x64", 10.1, "x 1.00, as on that GPU at the nearest measured shape, 0.10 us in a step"),
    ("fast", "1x64:fp8_e4m3,32x64", 15.1, "x 1.50, as on that GPU at the nearest measured shape, 0.10 us in a step"),
    # a time in a step holds what a launch pays there
    ("here", "1x64,32x64", 5.05, "x 0.50 in a step, as on that GPU at the nearest measured shape"),
    ("twin of fast", "8x64,32x64", 10.1, "x 1.00, as others with such inputs on that GPU, 0.10 us in a step"),
    ("twin of both", "1x64,32x64", 5.05, "x 0.50 in a step, as others with such inputs on that GPU"),
    ("another", "1x64,32x64,1x64", 12.6, "x 1.25, the median of that GPU, 0.10 us in a step"),
])
def test_a_price_scaled_by_another_gpu(kernel: str, key: str, us: float, words: str) -> None:
    """Of a launch of 10 us by the model, and 0.1 in a step."""
    found, said = ELSEWHERE.scale(kernel, key, 10.0, 0.1)
    assert found == pytest.approx(us)
    assert said == words


def test_a_gpu_that_was_timed_is_its_own_calibration() -> None:
    assert tuning("h200").calibration is None
    assert tuning("cpu").calibration is None
    for gpu in ("gb300", "b200"):
        found = tuning(gpu).calibration
        assert found is not None
        assert found.gpu == "h200"
        assert len(found.lines) > 100


def chosen(lines: list[Tuned]):
    """The launch of layer 0's first norm, 1x7168, under ``lines``."""
    spec = load_spec(K3, ("model.layers=[0]",))
    graph, _ = lower(spec, FORMS[0])
    cover = cover_graph(graph, spec, Menu([*op_kernels(), NORM]), Tuning(lines))
    choice = next(c for c in cover.choices if c.region.nodes[-1].name == "L0.attn.h")
    return choice, Tuning(lines).setting(choice.region)


def test_the_very_shape_is_measured() -> None:
    choice, setting = chosen([Tuned("test.norm", "1x7168,7168", {"warps": 8}, 0.9, "a GPU")])
    assert (choice.kernel, choice.cost.measured) == ("test.norm", True)
    # between other kernels a launch costs more than in a chain of its like
    assert choice.cost.us == pytest.approx(0.9 + IN_STEP)
    assert setting.config == {"warps": 8}
    assert setting.source == "tuned at this shape; a GPU"


def test_a_shape_near_by_was_timed_even_where_its_configuration_does_not_fit() -> None:
    for rows, comparable in ((2, True), (8, False)):
        _, setting = chosen([Tuned("test.norm", f"{rows}x7168,7168", {"warps": 32}, 0.9, "a GPU")])
        assert (setting.config, setting.comparable) == ({"warps": 4}, comparable)


def test_the_nearest_shape_gives_its_configuration_and_not_its_time() -> None:
    lines = [Tuned("test.norm", "8x7168,7168", {"warps": 8}, 0.9, "a GPU"),
             Tuned("test.norm", "64x7168,7168", {"warps": 4}, 0.1, "a GPU")]
    choice, setting = chosen(lines)
    assert setting.config == {"warps": 8}
    assert setting.source == "tuned at the nearest shape 8x7168,7168"
    assert not choice.cost.measured


def test_rows_that_an_op_rounds_are_another_shape() -> None:
    keys = {}
    for activation in ("bf16", "mxfp8"):
        spec = load_spec(K3, ("model.layers=[1]", f"numerics.expert_activation={activation}"))
        keys[activation] = {job.region.kernel.id: job.key for job in jobs(spec, kernels(), ((1, 1),))}
    assert keys["bf16"]["triton.experts_down"].startswith("1x16x192,1x16:i32,")
    assert keys["mxfp8"]["triton.experts_down"].startswith("1x16x192:mxfp8,1x16:i32,")
    assert distance(*(keys[name]["cute.moe_experts"] for name in keys)) == math.inf


def test_a_prediction_is_scaled_by_how_far_the_model_was_off_nearby() -> None:
    plain, _ = chosen([Tuned("test.norm", "8x7168,7168", {"warps": 8}, 3.0, "a GPU")])
    scaled, _ = chosen([Tuned("test.norm", "8x7168,7168", {"warps": 8}, 3.0, "a GPU", 1.2)])
    assert scaled.cost.us - IN_STEP == pytest.approx(2.5 * (plain.cost.us - IN_STEP))
    assert "x 2.50 as at the nearest measured shape" in scaled.cost.source


def test_a_line_of_a_configuration_that_is_gone_is_not_used() -> None:
    choice, setting = chosen([Tuned("test.norm", "1x7168,7168", {"warps": 32}, 0.1, "a GPU")])
    assert setting.config == {"warps": 4}
    assert setting.source == "first candidate, not tuned"
    assert not choice.cost.measured


def test_the_shipped_table_fits_the_shipped_kernels() -> None:
    """Every line is of a shape that the H200 example has, with a configuration that its kernel offers."""
    found = {(job.region.kernel.id, job.key): job for job in jobs(load_spec(K3), kernels(), ROWS)}
    for (kernel, key), line in tuning("h200")._exact.items():
        assert line.config in found[kernel, key].configs, (kernel, key)
        assert line.us > 0


def test_tables_are_made_of_outcomes_and_merged(tmp_path: Path) -> None:
    spec = load_spec(K3, ("model.layers=[0]",))
    job = next(job for job in jobs(spec, [tune_fakes.NORM], ((1, 1),)) if job.region.kernel is tune_fakes.NORM)
    outcome = time_job(job, tune_fakes.refuse_four_warps, tune_fakes.all_right)
    assert "1 of 3 failed" in describe(outcome)
    text = table([outcome], "a GPU")
    (line,) = tuned_lines(text)
    assert line == Tuned("test.norm", "1x7168,7168", {"warps": 8}, 1.5, "a GPU", line.model_us)
    assert line.model_us == pytest.approx(job.model_us, abs=1e-3)
    path = tmp_path / "table.json"
    path.write_text(table([outcome], "older").replace("1x7168", "2x7168"))
    for _ in range(2):
        merged = merge_tables(path, text)
        assert [(line.key, line.source) for line in tuned_lines(merged)] == [("1x7168,7168", "a GPU"),
                                                                             ("2x7168,7168", "older")]
        path.write_text(merged)
    for other in ("no JSON", "[1]", "{}"):
        path.write_text(other)
        with pytest.raises(BindError, match=r"table.json: not a table that k3plan tune wrote"):
            merge_tables(path, text)
    every = lines_text(all_times(outcome, "a GPU"), "a GPU")
    path.write_text(every)
    kept = tuned_lines(merge_tables(path, every, by=("kernel", "key", "config")))
    assert [(line.config["warps"], line.us) for line in kept] == [(16, 9.5), (8, 1.5)]


def test_a_configuration_that_computes_wrongly_gets_no_line() -> None:
    spec = load_spec(K3, ("model.layers=[0]",))
    job = next(job for job in jobs(spec, [tune_fakes.NORM], ((1, 1),)) if job.region.kernel is tune_fakes.NORM)

    def clock(region, config) -> SimpleNamespace:
        return SimpleNamespace(us=float(config["warps"]))

    outcome = time_job(job, clock, tune_fakes.eight_warps_wrong)
    assert outcome.us == (4.0, None, 16.0)
    assert outcome.failures == ("{'warps': 8}: computes h wrongly (8.00 us)",)


@pytest.mark.parametrize(("of", "output"), [("rms_norm", 0), ("kda_delta_rule", 0), ("kda_delta_rule", 1)])
def test_a_kernel_is_checked_against_its_ops(of: str, output: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op's own function is right; one that gets 64 numbers of what it writes wrong, or of a state, is not."""
    graph, _ = lower(load_spec(K3, ("model.layers=[0]", "parallel.tp=16")), FORMS[0])
    kernel = next(kernel for kernel in op_kernels() if kernel.id == f"torch.{of}")
    region = next(r for r in find_regions(graph, Menu([kernel]), arch="sm_90", rows=1)[0])
    factor = 1.0

    def bind(region, tensors, config):
        (node,) = region.nodes

        def launch() -> None:
            made = OPS[of].fn(*(tensors[name] for name in node.inputs), **node.attrs)
            for name, tensor in zip(node.outputs, made if isinstance(made, tuple) else (made,), strict=True):
                tensors[name].copy_(tensor)
            tensors[node.outputs[output]].view(-1)[:64] *= factor

        return launch

    monkeypatch.setattr("k3plan.graphs.verify.bind_region", bind)
    torch.manual_seed(0)
    wrong_with = check_of(region, "cpu")
    assert wrong_with({}) is None
    factor = 4.0
    assert f"computes {region.nodes[0].outputs[output]} wrongly: error " in wrong_with({})


def test_a_kernel_that_faults_loses_its_shape_and_no_other() -> None:
    spec = load_spec(K3, ("model.layers=[0]",))
    work = Workload(spec, ((1, 1), (1, 2), (1, 3)), "test.", tune_fakes.load_kernels, 3, tune_fakes.fault_at_two_rows,
                    tune_fakes.all_right)
    said: list[str] = []
    outcomes = {outcome.job.key: outcome for outcome in tune(work, say=said.append)}
    assert {key: outcome.best is not None for key, outcome in outcomes.items()} == {
        "1x7168,7168": True, "2x7168,7168": False, "3x7168,7168": True}
    assert "the process ended with 9" in outcomes["2x7168,7168"].failures[0]
    assert "3 shapes, 9 configurations" in said[0]


def test_few_of_the_shapes_that_differ_in_no_weight_are_timed() -> None:
    """One to eight residual blocks at one row and at two; weights of projections are all timed."""
    spec = load_spec(K3, ("model.layers=[0,12,24,36,48,60,72,84]",))
    found = jobs(spec, [k for k in kernels() if k.id in ("cute.attn_res_mix", "cute.staged_linear")], ((1, 1), (2, 1)))
    blocks, others = [], []
    for job in found:
        (blocks if job.region.kernel.id == "cute.attn_res_mix" else others).append(job)
    counts = sorted(job.key.count("x") for job in blocks)
    assert counts == sorted(2 * [*range(2, 10)])
    assert sorted(job.key.count("x") for job in spread(blocks, 3)) == [2, 2, 5, 5, 9, 9]
    assert spread(found, 1000) == found
    every, few = ({(job.region.kernel.id, job.key.rpartition(",")[2]) for job in some}
                  for some in (others, spread(others, 1)))
    assert every == few
    assert {kernel for kernel, _ in few} == {"cute.staged_linear", "torch.linear"}


def test_what_was_timed_is_kept_when_the_command_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = load_spec(K3, ("model.layers=[0]",))
    job = next(job for job in jobs(spec, [tune_fakes.NORM], ((1, 1),)) if job.region.kernel is tune_fakes.NORM)

    def stopped(work: Workload, **options):
        yield time_job(job, tune_fakes.refuse_four_warps, tune_fakes.all_right)
        raise KeyboardInterrupt

    monkeypatch.setattr("k3plan.graphs.bench.require_gpu", lambda command: None)
    monkeypatch.setattr("k3plan.graphs.tuner.alone.source_text", lambda: "a GPU")
    monkeypatch.setattr("k3plan.graphs.tuner.pool.tune", stopped)
    out, times = tmp_path / "table.json", tmp_path / "times.json"
    with pytest.raises(KeyboardInterrupt):
        cli.tune(str(K3), out, times=times)
    assert [line.us for line in tuned_lines(out.read_text())] == [1.5]
    assert [line.us for line in tuned_lines(times.read_text())] == [9.5, 1.5]


@pytest.mark.parametrize("error", [EOFError, ConnectionResetError])
def test_a_process_that_died_is_a_failed_job(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is killed with an answer due resets the pipe in place of closing it (seen on an H200)."""
    def fail() -> None:
        raise error

    spawned = []
    monkeypatch.setattr(tune_pool._Worker, "_spawn", lambda worker: spawned.append(worker))
    worker = tune_pool._Worker(None, 0)
    worker.pipe = SimpleNamespace(poll=lambda: True, recv=fail)
    worker.process = SimpleNamespace(join=lambda: None, kill=lambda: None, exitcode=-6)
    worker.job = 3
    assert worker.poll() == ((), ("the process ended with -6: most likely a fault in the kernel",))
    assert (worker.job, len(spawned)) == (None, 2)
