"""The other forms of the report: the Perfetto trace, the dot graph, the SVG, and the command that writes them all."""
from __future__ import annotations

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest
from made_records import on_streams, small_plan
from report_pages import read_data
from test_report import lost_edge, timed
from typer.testing import CliRunner

from k3plan.cli import app
from k3plan.compiler.errors import PlanError
from k3plan.compiler.explain import kinds
from k3plan.compiler.plan import LaunchPlan
from k3plan.graphs.debug.drawing import HUES, dot, timeline_svg
from k3plan.graphs.debug.perfetto import LAYERS, perfetto_json
from k3plan.graphs.debug.report_times import FAMILIES, links, reads_from, slices, spans

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def plan() -> LaunchPlan:
    return small_plan()


@pytest.mark.parametrize("with_record", [False, True], ids=["plan", "record"])
def test_trace_has_each_launch_once_on_its_stream(plan: LaunchPlan, with_record: bool) -> None:
    plan = on_streams(plan, 4)
    record = timed(plan) if with_record else None
    trace = json.loads(perfetto_json(plan, record))
    bars = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["tid"] != LAYERS]
    assert [e["args"]["launch"] for e in bars] == [launch.id for launch in plan.launches]
    for event, launch, at in zip(bars, plan.launches, slices(plan, record), strict=True):
        choice = plan.choice(launch)
        assert (event["tid"], event["name"]) == (launch.stream + 1, choice.kernel)
        assert (event["ts"], event["dur"]) == (pytest.approx(at.start_us, abs=1e-3), pytest.approx(at.us, abs=1e-3))
        assert event["args"]["bytes"] == choice.bytes
        assert event["args"]["floor_us"] == pytest.approx(at.floor_us, abs=1e-3)
        assert not choice.losers or event["args"]["why_not"] == {k: why for k, _, why in choice.losers}
    layers = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["tid"] == LAYERS]
    assert len(layers) == len(spans(plan))
    named = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert named == {"layers", "stream 0", "stream 1"}
    phases = Counter(e["ph"] for e in trace["traceEvents"])
    assert phases["s"] == phases["f"] > 0


def test_slices_of_a_stream_do_not_overlap(plan: LaunchPlan) -> None:
    tracks: dict[int, float] = {}
    for event in json.loads(perfetto_json(on_streams(plan, 4, 9), timed(plan)))["traceEvents"]:
        if event["ph"] == "X":
            assert event["ts"] >= tracks.get(event["tid"], 0.0) - 1e-3
            tracks[event["tid"]] = event["ts"] + event["dur"]


def arrows(text: str) -> set[tuple[str, str]]:
    return set(re.findall(r"(\w+) -> (\w+) \[", text))


def test_dot_of_the_whole_step_has_every_launch_and_every_hand_over(plan: LaunchPlan) -> None:
    text = dot(plan, whole=True)
    boxes = re.findall(r"^ +(n\d+) \[label=\"(.*?)\", color", text, re.M)
    assert [name for name, _ in boxes] == [f"n{i}" for i in range(len(plan.launches))]
    for (_, label), launch in zip(boxes, plan.launches, strict=True):
        assert plan.choice(launch).kernel in label
        assert " + ".join(plan.choice(launch).ops) in label
    assert arrows(text) == {(f"n{i}", f"n{j}") for j, found in enumerate(reads_from(plan)) for i in found}
    assert text.count("subgraph cluster_") == len(spans(plan))


def test_dot_of_one_layer_names_what_comes_from_outside(plan: LaunchPlan) -> None:
    span = next(s for s in spans(plan) if s.layer == 2)
    text = dot(plan, 2)
    assert len(re.findall(r"^ +n\d+ \[", text, re.M)) == span.last - span.first + 1
    outside = {j for _, j in arrows(text) if _.startswith("from")}
    assert outside
    assert all(f"from {plan.launches[int(i)].id}" in text for i in re.findall(r"from(\d+)_", text))
    with pytest.raises(PlanError, match="no layer 7\n  fix: take one of 0-3"):
        dot(plan, 7)


@pytest.mark.skipif(shutil.which("dot") is None, reason="no Graphviz on the path")
@pytest.mark.parametrize("whole", [False, True], ids=["kinds", "whole"])
def test_graphviz_reads_it(plan: LaunchPlan, whole: bool) -> None:
    done = subprocess.run(["dot", "-Tcanon"], input=dot(plan, whole=whole), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_svg_draws_bars_to_scale_with_their_floors(plan: LaunchPlan) -> None:
    record = timed(plan)
    root = ElementTree.fromstring(timeline_svg(plan, record))
    shown = [launch for _, found in kinds(plan) for launch in found]
    bars = [group for group in root.iter(f"{SVG}g") if group.find(f"{SVG}title") is not None]
    assert len(bars) == len(shown)
    placed = {plan.launches[s.index].id: s for s in slices(plan, record)}
    scales = []
    for bar, launch in zip(bars, shown, strict=True):
        title = bar.find(f"{SVG}title")
        assert title is not None
        assert title.text is not None
        assert title.text.startswith(f"{launch.id}: {plan.choice(launch).kernel}, {placed[launch.id].us:.2f} us")
        whole, floor = (float(rect.attrib["width"]) for rect in bar.findall(f"{SVG}rect"))
        scales.append((whole + 1) / placed[launch.id].us)
        assert floor == pytest.approx(min(whole, placed[launch.id].floor_us * scales[0]), rel=0.05, abs=0.2)
    assert scales == pytest.approx([scales[0]] * len(scales), rel=0.02)
    edges = [path.find(f"{SVG}title") for path in root.iter(f"{SVG}path")]
    inside = {x.id for x in shown}
    wanted = [f"{x.kind} edge" for x in links(plan, record)
              if {plan.launches[x.source].id, plan.launches[x.target].id} <= inside
              and plan.launches[x.source].layer == plan.launches[x.target].layer]
    assert Counter(e.text for e in edges if e is not None) == Counter(wanted)
    assert {"programmatic edge", "lost edge"} <= set(wanted)
    assert any("measured on NVIDIA H200" in (text.text or "") for text in root.iter(f"{SVG}text"))


def test_every_family_has_a_colour() -> None:
    assert set(HUES) == set(FAMILIES)


def test_the_command_writes_what_it_is_asked_for(plan: LaunchPlan, tmp_path: Path) -> None:
    record = timed(plan)
    record.save(tmp_path / "cap.json")
    plan.save(tmp_path / "cap.plan.json")
    paths = {kind: tmp_path / f"deep/x.{kind}" for kind in ("html", "perfetto", "dot", "svg")}
    asked = ["--out", paths["html"], "--perfetto", paths["perfetto"], "--dot", paths["dot"], "--layer", 3, "--svg",
             paths["svg"], "--yaml", "examples/k3-h200-tp16.yaml"]
    done = CliRunner().invoke(app, ["graph", "report", str(tmp_path / "cap.json"), *map(str, asked)])
    assert done.exit_code == 0, done.output
    assert done.output.count("times measured on NVIDIA H200") == 4
    data = read_data(paths["html"].read_text(encoding="utf-8"))
    assert data["head"]["basis"] == "measured"
    assert [f["code"] for f in data["findings"]] == ["CG-018"]
    assert {name: origin for name, _, origin in data["spec"]}["target.gpu"].startswith("examples/k3-h200-tp16.yaml:")
    assert data["findings"][0]["launch"] == plan.launches[lost_edge(plan)].id
    assert paths["dot"].read_text().count("subgraph") == 1


def test_the_command_makes_a_page_of_a_plan_file(tmp_path: Path) -> None:
    asked = ["examples/k3-gb300-tp16.yaml", "--set", "model.layers=[0, 3]", "--out", str(tmp_path / "x.html")]
    done = CliRunner().invoke(app, ["graph", "report", *asked])
    assert done.exit_code == 0, done.output
    assert "times predicted" in done.output
    data = read_data((tmp_path / "x.html").read_text(encoding="utf-8"))
    assert data["head"]["gpu"] == "gb300"
    origins = {name: origin for name, _, origin in data["spec"]}
    assert origins["step.context"].startswith("examples/")
    assert origins["model.layers"] == "--set #1"


def test_the_command_prints_its_data(plan: LaunchPlan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    done = CliRunner().invoke(app, ["graph", "report", str(tmp_path / "plan.json"), "--json"])
    assert json.loads(done.stdout)["head"]["key"] == plan.key
