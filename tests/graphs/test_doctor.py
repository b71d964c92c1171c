"""The doctor tells the truth about this machine, and says what a missing thing costs and how to get it."""
from __future__ import annotations

import importlib
import json
import os
import platform
import sys
from importlib.metadata import version
from types import SimpleNamespace

import pytest

from k3plan.graphs import doctor
from k3plan.graphs.doctor import Answer, examine, render


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    driver_says(monkeypatch)


def driver_says(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(doctor, "_ask_driver", lambda: list(lines))


def torch_is(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    fake = SimpleNamespace(
        __version__="2.13.0", version=SimpleNamespace(cuda="13.0"),
        cuda=SimpleNamespace(is_available=lambda: gpus > 0, device_count=lambda: gpus),
    )
    monkeypatch.setitem(sys.modules, "torch", fake)


def by_name(findings: list[Answer]) -> dict[str, Answer]:
    found = {finding.name: finding for finding in findings}
    assert len(found) == len(findings), "two findings have one name"
    return found


def test_facts_are_those_of_this_process(no_gpu: None) -> None:
    found = by_name(examine())
    assert found["python"].value.startswith(platform.python_version())
    assert found["cores"].value == str(os.cpu_count())
    assert found["torch"].value.startswith(version("torch"))
    assert found["triton"].value == f"{version('triton')}, compiles for sm_90a, sm_100a, sm_103a"
    assert not found["gpu"].ok
    assert found["run and capture on this GPU"].value.startswith("lacks gpu")


def test_json_holds_the_same_findings(no_gpu: None) -> None:
    assert [Answer(**f) for f in json.loads(doctor.doctor(json=True))["findings"]] == examine()


def test_what_is_not_ok_says_what_that_means(no_gpu: None) -> None:
    silent = [f.name for f in examine() if not f.ok and f.group != "abilities" and not (f.meaning and f.fix)]
    assert not silent


def test_a_missing_library_costs_what_depends_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without(name: str) -> object:
        if name == "k3plan.ops_triton.probe":
            raise ModuleNotFoundError("No module named 'triton'")
        if name == "torch":
            raise OSError("libcudart.so.13: cannot open shared object file")
        return real(name)

    monkeypatch.setattr(doctor.importlib, "import_module", without)
    found = by_name(examine())
    assert (found["triton"].ok, found["triton"].value) == (False, "not installed")
    assert found["torch"].value == "OSError: libcudart.so.13: cannot open shared object file"
    assert found["check Triton kernels in the interpreter"].value == "lacks torch, triton"
    assert found["plan a step for any GPU"].ok


def test_a_target_that_does_not_compile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"version": "3.5.0", "sm_90a": "", "sm_103a": "PTXASError: unknown target"}
    fake = SimpleNamespace(probe=lambda: answers)
    monkeypatch.setitem(sys.modules, "k3plan.ops_triton.probe", fake)
    triton = by_name(examine())["triton"]
    assert not triton.ok
    assert triton.value == "3.5.0, compiles for sm_90a"
    assert triton.meaning == "does not compile for sm_103a (PTXASError: unknown target)"


def test_gpus_are_reported_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gb300, a100 = "NVIDIA GB300, 10.3, 284208 MiB, 580.95", "NVIDIA A100, 8.0, 81920 MiB, 580.95"
    driver_says(monkeypatch, gb300, a100)
    torch_is(monkeypatch, gpus=2)
    found = by_name(examine())
    assert found["gpu"].value == "NVIDIA GB300, compute capability 10.3, 284208 MiB, driver 580.95"
    assert found["gpu"].ok
    assert not found["gpu 1"].ok
    assert found["gpu 1"].meaning == "the kernels need compute capability 9.0 or newer"
    assert found["torch"].value == "2.13.0, for CUDA 13.0, sees 2 GPU(s)"


def test_a_torch_that_does_not_see_the_gpu_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    driver_says(monkeypatch, "NVIDIA H200, 9.0, 143771 MiB, 580.95")
    torch_is(monkeypatch, gpus=0)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: name)
    found = by_name(examine())
    if found["C compiler"].ok:
        assert found["run and capture on this GPU"].value == "torch does not see the GPU"


def test_a_flag_that_does_not_exist_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3PLAN_NO_SUCH_FLAG", "1")
    assert not by_name(examine())["K3PLAN_NO_SUCH_FLAG"].ok


def test_report_reads_well() -> None:
    findings = [
        Answer("machine", "python", True, "3.12.1, x86_64"),
        Answer("machine", "gpu", False, "none found", "no speed", "use a machine with a GPU"),
        Answer("libraries", "torch", True, "2.13.0+cpu, a CPU build"),
        Answer("abilities", "plan a step for any GPU", True, ""),
        Answer("abilities", "run and capture on this GPU", False, "lacks gpu"),
    ]
    assert render(findings) == """\
this machine
  ok       python  3.12.1, x86_64
  missing  gpu     none found
           no speed
           fix: use a machine with a GPU
libraries
  ok       torch  2.13.0+cpu, a CPU build
it can
  yes      plan a step for any GPU
  no       run and capture on this GPU  lacks gpu"""


@pytest.mark.gpu
def test_this_gpu_can_run_and_capture() -> None:
    assert by_name(examine())["run and capture on this GPU"].ok
