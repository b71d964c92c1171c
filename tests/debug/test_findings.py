"""The catalogue and how findings read."""
from __future__ import annotations

import json

import pytest

from k3plan import compile_plan
from k3plan.compiler.errors import PlanError
from k3plan.compiler.reading.source import load_spec
from k3plan.graphs.debug.codes import CODES, cuda_errors, explain_code, find_errors
from k3plan.graphs.debug.findings import SEVERITIES, failed, find, from_json, render, to_json

EXAMPLE = "examples/tiny-k3.yaml"
KINDS = [*range(1, 23), 47, 48, 49, 50]  # host values, capture, padding, after capture


def test_every_kind_of_failure_has_a_code() -> None:
    covered = {kind for code in CODES.values() for kind in code.kinds}
    assert set(KINDS) <= covered, f"no code for {sorted(set(KINDS) - covered)}"


def test_every_code_is_whole() -> None:
    for name, code in CODES.items():
        assert name == code.code
        assert code.severity in SEVERITIES, name
        assert code.tools, name
        # an imperative sentence
        assert code.fix[0].isupper() and code.fix.endswith("."), f"{name}: {code.fix}"  # noqa: PT018


def test_every_cuda_error_leads_to_codes_that_exist() -> None:
    numbers = [error.number for error in cuda_errors()]
    assert numbers == sorted(set(numbers))
    assert all(code in CODES for error in cuda_errors() for code in error.codes)
    assert all(error.causes and error.fix.endswith(".") for error in cuda_errors())


def test_the_catalogue_knows_what_the_cuda_bindings_know() -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime")
    ours = {error.number: error.runtime for error in cuda_errors()}
    missing = [e.name for e in runtime.cudaError_t if ours.get(int(e)) != e.name]
    assert not missing


@pytest.mark.parametrize(("text", "wanted"), [
    ("CG-003", "not forked"), ("cg-3", "not forked"), ("700", "illegal memory access"),
    ("cudaErrorStreamCaptureUnjoined", "904"), ("CUDA_ERROR_LAUNCH_FAILED", "719"),
    ("RuntimeError: CUDA error: operation not permitted when stream is capturing", "900 cuda"),
    ("AcceleratorError: CUDA error: misaligned address\nCUDA kernel errors might be reported later", "716 cuda"),
    ("Triton Error [CUDA]: an illegal memory access was encountered", "700 cuda"),
])
def test_explain_finds(text: str, wanted: str) -> None:
    assert wanted in explain_code(text)


@pytest.mark.parametrize("text", ["CG-999", "no such thing", "4711", ""])
def test_explain_refuses_what_it_does_not_know(text: str) -> None:
    with pytest.raises(PlanError, match="fix: "):
        explain_code(text)


def test_the_longest_message_wins() -> None:
    assert find_errors("CUDA error: unspecified launch failure in prior launch")[0].number == 53


def test_a_finding_names_op_layer_and_line() -> None:
    plan, origins = compile_plan(EXAMPLE), load_spec(EXAMPLE).origins
    launch = next(x for x in plan.launches if x.layer == 1)
    finding = find("CG-031", "8 splits fit 512 tokens", plan=plan, launch=launch.id, origins=origins,
                   field="step.context")
    text = str(finding)
    assert finding.layer == 1
    assert launch.id in text
    assert f"{EXAMPLE}:" in text
    assert plan.choice(launch).ops[-1] in text
    assert text.splitlines()[-1].startswith("  fix: ")


def test_findings_survive_json() -> None:
    found = [find("CG-003", "stream 2"), find("CG-054", "12 MB", call="engine.py:3")]
    assert from_json(json.loads(json.dumps(to_json(found)))) == found
    assert failed(found)
    assert not failed(found[1:])


def test_equal_findings_are_told_once_and_the_worst_first() -> None:
    plan = compile_plan(EXAMPLE)
    notes = [find("CG-032", "a scalar", plan=plan, launch=x.id) for x in plan.launches[:4]]
    text = render([*notes, find("CG-003", "stream 2")])
    assert text.index("CG-003") < text.index("CG-032")
    assert text.count("CG-032 note") == 1
    assert "and at 3 more" in text
    assert "1 error, 4 notes" in text
    assert render([]) == "no findings"
