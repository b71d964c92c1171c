"""``k3plan graph inspect``, ``time``, ``diff`` and ``record`` as their user meets them, in this process."""
from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from made_records import made_record, small_plan
from typer.testing import CliRunner, Result

from k3plan.cli import app
from k3plan.compiler.errors import K3PlanError, RecordError
from k3plan.graphs.debug.record import Record, load_record
from k3plan.graphs.debug.session import bucket_costs, bucket_table

PLAN = small_plan()
YAML = "examples/k3-gb300-tp16.yaml"  # which the one of the H200 extends
GOOD = replace(made_record(PLAN), replay_us=300.0, queued_us=290.0, host_us=9.0, launches=tuple(
    replace(x, us=5.0, busy_us=4.0, gap_us=1.0) for x in made_record(PLAN).launches))


def save(folder: Path, record: Record, name: str = "capture.json") -> Path:
    record.save(folder / name)
    PLAN.save((folder / name).with_suffix(".plan.json"))
    return folder / name


def graph(*args: object, code: int = 0) -> Result:
    done = CliRunner().invoke(app, ["graph", *map(str, args)])
    assert done.exit_code == code, done.output
    return done


def test_inspect_reads_the_plan_beside_the_capture(tmp_path: Path) -> None:
    text = graph("inspect", save(tmp_path, GOOD)).output
    assert f"{len(PLAN.launches)} planned, {len(PLAN.launches)} found" in text
    assert "replay 0.300 ms, 0.290 ms when queued behind another, 9.0 us of the host" in text


def test_inspect_fails_on_an_error_and_says_so_in_json(tmp_path: Path) -> None:
    broken = replace(GOOD, nodes=tuple(replace(n, grid=(9, 1, 1)) if n.index == 9 else n for n in GOOD.nodes))
    path = save(tmp_path, broken)
    assert "CG-017" in graph("inspect", path, code=1).output
    told = json.loads(graph("inspect", path, "--json", code=1).output)
    (found,) = told["captures"]
    assert found["findings"][0]["code"] == "CG-017"
    assert told["buckets"] == []


def test_findings_name_the_line_of_the_plan_file(tmp_path: Path) -> None:
    """Of a launch that the graph does not have, and of one that takes many times what was planned."""
    slow = replace(GOOD.launches[3], us=PLAN.us)
    path = save(tmp_path, replace(GOOD, launches=(*GOOD.launches[:3], slow, replace(GOOD.launches[4], nodes=()),
                                                  *GOOD.launches[5:])))
    said = graph("inspect", path, "--yaml", YAML, code=1).output
    assert f"CG-013 error: {PLAN.choice(PLAN.launches[4]).kernel} left no node" in said
    assert f"{YAML}:" in said
    said = graph("time", path, "--yaml", YAML, "--json").output
    assert any(f["code"] == "CG-055" and f"{YAML}:" in f["where"] for f in json.loads(said)["findings"])
    assert f"{YAML}:" not in graph("time", path, "--json").output


def test_capture_of_a_record_needs_no_gpu(tmp_path: Path) -> None:
    """What a capture that was made elsewhere tells of itself."""
    assert "no findings" in graph("capture", save(tmp_path, GOOD)).output
    lost = replace(GOOD, launches=(*GOOD.launches[:4], replace(GOOD.launches[4], nodes=()), *GOOD.launches[5:]))
    said = graph("capture", save(tmp_path, lost), "--yaml", YAML, "--json", code=1).output
    (found,) = (f for f in json.loads(said)["findings"] if f["code"] == "CG-013")
    assert found["launch"] == PLAN.launches[4].id
    assert f"{YAML}:" in found["where"]


def test_inspect_of_several_buckets(tmp_path: Path) -> None:
    paths = [save(tmp_path, GOOD, "a.json"), save(tmp_path, replace(GOOD, captured_bytes=2 << 20), "b.json")]
    text = graph("inspect", *paths).output
    assert text.count("capture of plan") == 2
    assert "CG-054" in text
    told = json.loads(graph("inspect", *paths, "--json").output)
    assert (len(told["captures"]), [f["code"] for f in told["buckets"]]) == (2, ["CG-054", "CG-054"])


def test_time_by_kind_and_by_launch(tmp_path: Path) -> None:
    path = save(tmp_path, GOOD)
    text = graph("time", path).output
    assert "over plan" in text
    assert f"launches sum to {5 * len(PLAN.launches) / 1e3:.3f} ms" in text
    assert PLAN.launches[-1].id in graph("time", path, "--by", "launch").output
    assert json.loads(graph("time", path, "--json").output)["replay_us"] == 300.0


def test_diff(tmp_path: Path) -> None:
    one, two = save(tmp_path, GOOD, "a.json"), save(tmp_path, replace(GOOD, nodes=GOOD.nodes[:-1], launches=(
        *GOOD.launches[:-1], replace(GOOD.launches[-1], nodes=())), edges=GOOD.edges[:-1]), "b.json")
    assert "equal: " in graph("diff", one, one).output
    assert "TopologyChanged" in graph("diff", one, two, code=1).output
    assert json.loads(graph("diff", one, two, "--json", code=1).output)["update"]["predicted"]


def test_a_plan_that_was_not_captured_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, GOOD)
    small_plan("step.query=2").save(tmp_path / "other.json")
    done = CliRunner().invoke(app, ["graph", "inspect", str(path), "--plan", str(tmp_path / "other.json")])
    assert isinstance(done.exception, K3PlanError)
    assert "pass the plan that was captured" in str(done.exception)


@pytest.mark.parametrize("command", ["inspect", "time", "report", "capture"])
def test_a_record_without_its_plan_says_which_plan_is_wanted(tmp_path: Path, command: str) -> None:
    GOOD.save(tmp_path / "lone.json")
    done = CliRunner().invoke(app, ["graph", command, str(tmp_path / "lone.json")])
    assert isinstance(done.exception, K3PlanError)
    assert str(done.exception) == (f"{tmp_path / 'lone.json'}: its plan, lone.plan.json, is not beside it\n"
                                   f"  fix: copy it there, or name plan {PLAN.key} with --plan")


@pytest.mark.parametrize("damage", [
    lambda text: text.replace('"replay_us"', '"replayed"'), lambda text: text.replace('"columns"', '"rows"'),
    lambda text: '{"plan_key": "x", "nodes": 3, "version": 1}',
])
def test_a_damaged_record_is_named(tmp_path: Path, damage: Callable[[str], str]) -> None:
    path = save(tmp_path, GOOD)
    path.write_text(damage(path.read_text()))
    with pytest.raises(RecordError, match=re.escape(f"{path}: a damaged record")):
        load_record(path)


def test_bytes_that_are_no_text_are_no_record(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00\x80")
    for command in ("inspect", "report", "lint"):
        done = CliRunner().invoke(app, ["graph", command, str(tmp_path / "bytes")])
        assert isinstance(done.exception, K3PlanError), command
        assert "not JSON" in str(done.exception)


@pytest.mark.parametrize("command", ["lint", "capture", "report"])
@pytest.mark.parametrize("what", ["capture.json", "capture.plan.json"])
def test_what_was_compiled_takes_no_settings(tmp_path: Path, command: str, what: str) -> None:
    save(tmp_path, GOOD)
    for more in (["--set", "step.query=4"], [] if command == "report" else ["--rows", "8x1"]):
        if more:
            said = " ".join(graph(command, tmp_path / what, *more, code=2).output.replace("│", " ").split())
            assert "is no plan file: what it was compiled with stays" in said


def test_a_layer_is_of_the_data_flow_alone(tmp_path: Path) -> None:
    output = graph("report", save(tmp_path, GOOD), "--out", tmp_path / "r.html", "--layer", 3, code=2).output
    assert "--layer and --whole are of --dot FILE" in output


def test_recording_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for more in ([], ["--buckets"]):
        done = CliRunner().invoke(app, ["graph", "record", "examples/tiny-k3.yaml", "--out", str(tmp_path / "c.json"),
                                        *more])
        assert isinstance(done.exception, K3PlanError)
        assert "fix: run k3plan graph record where the GPU is" in str(done.exception)
    assert not (tmp_path / "c.json").exists()


def test_table_of_buckets() -> None:
    text = bucket_table([GOOD, replace(GOOD, replay_us=None, queued_us=None, host_us=None)])
    assert "0.300" in text
    assert text.splitlines()[-1].split()[-2:] == ["-", "-"]
    assert [c["replay_us"] for c in bucket_costs([GOOD])] == [300.0]


@pytest.mark.gpu
def test_record_on_a_gpu(tmp_path: Path) -> None:
    graph("record", "examples/k3-h200-tp16.yaml", "--set", "model.layers=[0, 1, 2, 3]", "--out", tmp_path / "c.json")
    assert load_record(tmp_path / "c.json").replay_us
    assert "0 missing" in graph("inspect", tmp_path / "c.json").output
