"""The report: everything of the plan, the record and the findings is in its data block, and nothing from elsewhere."""
from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from made_records import made_record, on_streams, small_plan
from report_pages import browse, browser, look, read_data, read_page

from k3plan.compiler.device import load_device
from k3plan.compiler.errors import RecordError
from k3plan.compiler.explain import floor_us
from k3plan.compiler.plan import LaunchPlan, load_plan
from k3plan.compiler.reading.source import load_spec
from k3plan.face import compile_plan
from k3plan.graphs.debug.findings import Finding, find, to_json
from k3plan.graphs.debug.record import Edge, Pointer, Record, load_record
from k3plan.graphs.debug.report import Sources, read_findings, render_report
from k3plan.graphs.debug.report_times import BASES, links, slices, spans, step_us

DATA = Path(__file__).parent / "data"
RECORDED = sorted(path for path in DATA.glob("*.json") if path.with_suffix(".plan.json").is_file())


@pytest.fixture(scope="module")
def plan() -> LaunchPlan:
    return small_plan()


def lost_edge(plan: LaunchPlan) -> int:
    """The launch whose programmatic edge the record of ``timed`` has lost: the third that has one."""
    return [i for i, launch in enumerate(plan.launches) if launch.dependent][2]


def timed(plan: LaunchPlan) -> Record:
    """A record of ``plan`` with times of its own, idle time, a lost edge and pointers, none of them the plan's."""
    made = made_record(plan)
    launches = tuple(replace(x, us=plan.choice(p).us + 0.5 + i / 100, busy_us=plan.choice(p).us + 1, gap_us=0.25)
                     for i, (x, p) in enumerate(zip(made.launches, plan.launches, strict=True)))
    edges = tuple(Edge(e.source, e.target, "full") if e.target == lost_edge(plan) else e for e in made.edges)
    pointers = tuple(Pointer(name, (1 << 46) + i * (1 << 30), buffer.bytes, buffer.kind, (i % 7,), ())
                     for i, (name, buffer) in enumerate(plan.buffers.items()) if buffer.kind in ("weight", "state"))
    return replace(made, launches=launches, edges=edges, pointers=pointers, host_us=9.5, queued_us=1234.0,
                   replay_us=sum(x.us or 0 for x in launches) + 3, notes=("loopback: no peers",))


def findings_of(plan: LaunchPlan) -> list[Finding]:
    hostile = 'waits for </script><script>alert(1)</script> & "<!--"'
    return [find("CG-018", hostile, plan=plan, launch=plan.launches[5]),
            find("CG-013", "its kernel is not in the graph", plan=plan, launch=plan.launches[7])]


def check_plan_in_data(plan: LaunchPlan, data: dict[str, Any]) -> None:
    """Each launch, tensor, buffer, choice and number of ``plan`` stands in ``data``."""
    device = load_device(plan.spec.gpu)
    assert len(data["launches"]) == len(plan.launches)
    for launch, row in zip(plan.launches, data["launches"], strict=True):
        for name in ("id", "choice", "layer", "stage", "stream"):
            assert row[name] == getattr(launch, name)
        for name in ("inputs", "outputs", "nodes"):
            assert row[name] == list(getattr(launch, name))
        assert row["scratch"] == list(launch.scratch.values())
        assert bool(row["dependent"]) == launch.dependent
        assert row["planned_us"] == pytest.approx(plan.choice(launch).us, abs=1e-4)
    for choice, row in zip(plan.choices, data["choices"], strict=True):
        assert json.loads(json.dumps({name: getattr(choice, name) for name in (
            "kernel", "entry", "ops", "attrs", "config", "config_source", "us", "measured", "source", "bytes", "flops",
            "losers", "more_losers")})).items() <= row.items()
        assert row["floor_us"] == pytest.approx(floor_us(choice, device), abs=1e-4)
    tensors = {row["name"]: row for row in data["tensors"]}
    assert {n: (t.buffer, t.dtype, list(t.shape)) for n, t in plan.tensors.items()} == {
        n: (row["buffer"], row["dtype"], row["shape"]) for n, row in tensors.items()}
    assert [(n, b.kind, b.bytes, b.offset, b.first, b.last) for n, b in plan.buffers.items()] == [
        tuple(row.values()) for row in data["buffers"]]
    assert [(a.choice, a.taken, a.why, dict(a.us)) for a in plan.alternatives] == [
        tuple(row.values()) for row in data["alternatives"]]
    assert data["notes"] == list(plan.notes)
    head = data["head"]
    assert (head["key"], head["launches"], head["arena_bytes"]) == (plan.key, len(plan.launches), plan.arena_bytes)
    assert head["planned_us"] == pytest.approx(plan.us, abs=1e-3)
    assert head["floor_us"] == pytest.approx(sum(floor_us(plan.choice(x), device) for x in plan.launches), abs=1e-3)
    assert head["bytes"] == sum(plan.choice(x).bytes for x in plan.launches)
    weights = sum(b.bytes for b in plan.buffers.values() if b.kind == "weight")
    assert head["held"]["weight"] == weights
    assert data["device"]["figures"] == {name: list(pair) for name, pair in device.figures.items()}


def check_record_in_data(record: Record, data: dict[str, Any]) -> None:
    seen = {launch.id: launch for launch in record.launches}
    for row in data["launches"]:
        launch = seen[row["id"]]
        assert row["graph_nodes"] == list(launch.nodes)
        if launch.us is not None:
            assert (row["us"], row["basis"]) == (pytest.approx(launch.us, abs=1e-4), "graph")
            assert (row["busy_us"], row["idle_us"]) == (launch.busy_us, launch.gap_us)
    assert [(n.kind, n.title, list(n.grid), list(n.block), n.shared_bytes) for n in record.nodes] == [
        tuple(row.values())[:5] for row in data["graph_nodes"]]
    assert [(p.name, p.address, p.bytes, p.kind, list(p.readers), list(p.writers)) for p in record.pointers] == [
        tuple(row.values()) for row in data["pointers"]]
    found = data["head"]["record"]
    assert [found[n] for n in ("replay_us", "host_us", "queued_us", "captured_bytes", "capture_s")] == [
        record.replay_us, record.host_us, record.queued_us, record.captured_bytes, record.capture_s]
    assert found["notes"] == list(record.notes)
    assert sum(found["node_kinds"].values()) == len(record.nodes)


def check_stands_alone(text: str) -> None:
    """No element loads or links anything but a place on the page itself."""
    page = read_page(text)
    for tag, attrs in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "video", "audio")
        for name in ("src", "href", "action", "data", "srcset", "background"):
            assert attrs.get(name, "#").startswith("#"), (tag, attrs)
    for tag, attrs, body in page.raw:
        if attrs.get("type") == "application/json":
            continue
        # the only address is the name of the SVG namespace
        assert set(re.findall(r"https?://[^\s'\"`)]+", body)) <= {"http://www.w3.org/2000/svg"}
        assert not re.search(r"@import|url\((?!#)|\bfetch\(|XMLHttpRequest|\bimport\(|sendBeacon|WebSocket", body), tag
    assert [attrs.get("type") for tag, attrs, _ in page.raw if tag == "script"] == ["application/json", None]


def test_the_plan_is_in_the_page(plan: LaunchPlan) -> None:
    text = render_report(plan)
    data = read_data(text)
    check_plan_in_data(plan, data)
    check_stands_alone(text)


def test_without_a_record_every_time_is_predicted(plan: LaunchPlan) -> None:
    data = read_data(render_report(plan))
    assert data["head"]["basis"] == "predicted"
    assert data["head"]["record"] is None
    assert all(BASES[row["basis"]].startswith("predicted") for row in data["launches"])
    assert data["head"]["step_us"] == pytest.approx(plan.us, abs=1e-3)
    assert not data["pointers"]
    assert not data["graph_nodes"]


def test_a_record_and_its_findings_are_in_the_page(plan: LaunchPlan) -> None:
    record, findings = timed(plan), findings_of(plan)
    text = render_report(plan, record, findings)
    data = read_data(text)
    check_plan_in_data(plan, data)
    check_record_in_data(record, data)
    check_stands_alone(text)
    assert data["findings"] == to_json(findings)
    assert (data["head"]["basis"], data["head"]["step_us"]) == ("measured", pytest.approx(record.replay_us, abs=1e-3))
    lost = [(row["source"], row["target"]) for row in data["links"] if row["kind"] == "lost"]
    assert lost == [(lost_edge(plan) - 1, lost_edge(plan))]


@pytest.mark.skipif(not RECORDED, reason="no recorded capture in tests/debug/data")
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_capture_is_in_the_page(path: Path) -> None:
    sources = Sources.read(path)
    assert sources.record == load_record(path)
    text = render_report(sources.plan, sources.record, sources.findings)
    data = read_data(text)
    check_plan_in_data(load_plan(path.with_suffix(".plan.json")), data)
    check_record_in_data(sources.record, data)
    assert data["findings"] == to_json(sources.findings)
    assert len(text) < 3_000_000


def test_where_values_came_from(plan: LaunchPlan) -> None:
    origins = load_spec("examples/k3-h200-tp16.yaml", ["model.layers=[0, 1, 2, 3]"]).origins
    rows = {name: (value, origin) for name, value, origin in read_data(render_report(plan, origins=origins))["spec"]}
    assert rows["step.context"] == ("8192", str(origins["step.context"]))
    assert rows["target.gpu"][1].startswith("examples/k3-h200-tp16.yaml:")
    assert rows["model.layers"] == ("0-3", "--set #1")
    assert all(origin is None for _, _, origin in read_data(render_report(plan))["spec"])


@pytest.mark.parametrize("example", ["examples/k3-h200-tp16.yaml", "examples/k3-gb300-tp16.yaml"])
def test_the_full_model_is_small_and_quick(example: str) -> None:
    plan = compile_plan(example)
    record = timed(plan)
    started = time.process_time()
    text = render_report(plan, record, findings_of(plan))
    assert time.process_time() - started < 3.0
    assert len(text.encode()) < 3_000_000
    data = read_data(text)
    check_plan_in_data(plan, data)
    check_record_in_data(record, data)


def test_times_follow_streams_and_measured_shares(plan: LaunchPlan) -> None:
    producers = next(i for i, launch in enumerate(plan.launches) if launch.id.endswith("attn.in_proj"))
    apart = on_streams(plan, producers)
    placed = slices(apart)
    reader = next(i for i, x in enumerate(apart.launches) if i > producers and any(
        plan.tensors[n].buffer == plan.tensors[apart.launches[producers].outputs[0]].buffer for n in x.inputs))
    assert placed[producers].start_us >= placed[producers - 1].end_us
    assert placed[reader].start_us >= placed[producers].end_us
    assert {(x.source, x.target) for x in links(apart)} >= {(producers, reader), (producers - 1, producers + 1)}
    record = timed(plan)
    seen = slices(plan, record)
    assert all(b.start_us == pytest.approx(a.end_us) for a, b in pairwise(seen))
    assert {(x.basis, x.idle_us) for x in seen} == {("graph", 0.25)}
    assert step_us(seen, record) == record.replay_us
    assert step_us(seen) == pytest.approx(record.replay_us - 3)


def test_spans_are_the_step_in_order(plan: LaunchPlan) -> None:
    found = spans(plan)
    assert [s.title for s in found] == ["embedding", "L0", "L1", "L2", "L3", "head"]
    assert found[0].first == 0
    assert all(b.first == a.last + 1 for a, b in pairwise(found))
    assert found[-1].last == len(plan.launches) - 1


def test_findings_of_other_commands_are_read(plan: LaunchPlan, tmp_path: Path) -> None:
    findings = findings_of(plan)
    (tmp_path / "flat.json").write_text(json.dumps(to_json(findings)))
    (tmp_path / "deep.json").write_text(json.dumps([{"title": "x", "findings": to_json(findings)}]))
    assert read_findings(tmp_path / "flat.json") == findings == read_findings(tmp_path / "deep.json")
    for text in ("{", "{}", '{"nodes": []}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(RecordError, match="fix: pass what a k3plan graph command"):
            read_findings(tmp_path / "bad.json")


needs_browser = pytest.mark.skipif(browser() is None, reason="no Chromium or Chrome on the path")


def words(text: str) -> str:
    return " ".join(text.split())


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_draws_it(plan: LaunchPlan, tmp_path: Path, dark: bool) -> None:
    record, findings = timed(plan), findings_of(plan)
    (tmp_path / "page.html").write_text(render_report(plan, record, findings), encoding="utf-8")
    launch = plan.launches[5]
    png, page, console = browse(tmp_path / "page.html", tmp_path, launch=launch.id, dark=dark)
    assert not console
    width, height, first, rows = look(png)
    assert (width, height) == (1280, 1600)
    assert rows > 800
    # the head of the page is white, or nearly black
    assert max(first) < 48 if dark else min(first) > 240
    root = next(attrs for tag, attrs in page.elements if tag == "html")
    assert root["data-ready"] == "yes"
    check_drawn(plan, record, findings, launch.id, {name: words(text) for name, text in page.ids.items()})


def check_drawn(plan: LaunchPlan, record: Record, findings: Sequence[Finding], chosen: str,
                ids: dict[str, str]) -> None:
    """What a reader sees: the measured step, the chosen launch with its reasons, each kernel, each finding."""
    assert f"{(record.replay_us or 0) / 1e3:.3f}ms" in ids["figures"].replace(" ms", "ms")
    assert f"measured on {record.machine.name}" in ids["figures"]
    assert "1.234msqueued behind another measured" in ids["figures"]
    launch = next(x for x in plan.launches if x.id == chosen)
    choice = plan.choice(launch)
    for part in (launch.id, choice.kernel, choice.entry, *choice.ops, *launch.inputs, *launch.outputs,
                 *(kernel for kernel, _, _ in choice.losers), findings[0].code):
        assert part in ids["launch"]
    for finding in findings:
        assert words(finding.text) in ids["findings"]
        assert finding.fix in ids["findings"]
    for kernel in {x.kernel for x in plan.choices}:
        assert kernel in ids["time"]
    for alternative in plan.alternatives:
        assert alternative.choice in ids["algebra"]


@needs_browser
def test_a_reader_of_several_parts_is_named_once(plan: LaunchPlan, tmp_path: Path) -> None:
    """The merged projection of a KDA layer, of which the next kernels read six slices."""
    (tmp_path / "page.html").write_text(render_report(plan), encoding="utf-8")
    written = next(x for x in plan.launches if x.id.endswith("attn.in_proj")).id
    readers = [x for x in plan.launches if sum(plan.tensors[n].buffer == written for n in x.inputs) > 1]
    _, page, _ = browse(tmp_path / "page.html", tmp_path, launch=written)
    names = [name for name in page.ids["launch"].replace(",", " ").split() if name == readers[0].id]
    assert len(names) <= 2, "as the next launch, and as a reader"


@needs_browser
def test_a_plan_alone_says_predicted(plan: LaunchPlan, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(render_report(plan), encoding="utf-8")
    _, page, console = browse(tmp_path / "page.html", tmp_path, width=1920)
    assert not console
    assert "predicted" in page.ids["figures"]
    assert "predicted" in page.ids["launch"]
    assert "Predicted times" in page.ids["timeline"]
    assert "measured on" not in page.ids["figures"] + page.ids["timeline"] + page.ids["launch"]
