"""The document's example and the example scripts do what they say."""
from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

import k3plan
from k3plan.graphs.make_checkpoint import make_checkpoint

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs/module.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``k3plan checkpoint make demo/tiny-k3`` writes."""
    folder = tmp_path_factory.mktemp("demo")
    make_checkpoint(folder)
    return folder


def test_the_document_runs(demo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {}
    blocks = re.findall(r"^```python\n(.*?)^```", DOCUMENT, re.M | re.S)
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block.replace("demo/tiny-k3", str(demo)), "docs/module.md", "exec"), names)
    said = capsys.readouterr().out
    assert "arena: bound at 0x" in said
    texts = ast.literal_eval(said.splitlines()[0])
    assert [text[:n] for text, n in zip(texts, (3, 2, 1), strict=True)] == [[3, 5, 1], [10, 16], [17]]
    assert [len(text) for text in texts] == [9, 9, 9]
    assert "k3plan.router_topk" in str(names["program"])


def test_the_engine(demo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Six requests through four slots; the third one's text is what it is when it is alone."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("drop_in")
    example.main(str(demo))
    *lines, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d+ steps of 1 to 4 sequences, \d+ tokens/s on cpu", last)
    texts = [[int(token) for token in line.split()] for line in lines]
    assert [len(text) for text in texts] == [7, 10, 13, 16, 19, 22]
    plan = k3plan.compile_plan(ROOT / "examples/tiny-k3.yaml", ["parallel.tp=1", "step.sequences=1"])
    engine = example.Engine(k3plan.DecodeStep.from_plan(plan, k3plan.Checkpoint(demo)))
    engine.slots = [0]
    request = engine.submit([17, 27, 3], 10)
    while engine.waiting or engine.running:
        engine.run_step()
    assert request.text == texts[2]


def test_the_tensorrt_script_says_that_it_was_not_run() -> None:
    text = (ROOT / "examples/tensorrt_export.py").read_text(encoding="utf-8")
    assert "THIS SCRIPT HAS NOT BEEN RUN" in (ast.get_docstring(ast.parse(text)) or "")
    assert "**That script has not been run**" in DOCUMENT
