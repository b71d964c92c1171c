"""What this machine can plan, compile and run, and what to do where it cannot. Decides nothing."""
from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path

from ..compiler import knobs

GPU_FIELDS = "name,compute_cap,memory.total,driver_version"
OLDEST_CAPABILITY = 9.0  # the kernels need what came with Hopper: clusters, dependent launch, fp8
GB = 1e9


@dataclass(frozen=True)
class Answer:
    """One line of the report. ``meaning`` and ``fix`` are for one that is not ok."""

    group: str  # "machine", "libraries" or "abilities"
    name: str
    ok: bool
    value: str
    meaning: str = ""
    fix: str = ""


def examine() -> list[Answer]:
    """Everything worth knowing about this machine; takes seconds, because it imports and compiles."""
    found = [*_machine(), *_gpus(), *_libraries()]
    return [*found, *_abilities({finding.name: finding for finding in found})]


def _machine() -> Iterator[Answer]:
    version = platform.python_version()
    yield Answer("machine", "python", sys.version_info >= (3, 10), f"{version}, {platform.machine()}",
                  "k3plan needs Python 3.10 or newer", "make clean; make PYTHON=python3.12 venv")
    yield Answer("machine", "cores", True, str(os.cpu_count()))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GB
    yield Answer("machine", "memory", memory >= 4, f"{memory:.0f} GB",
                  "importing torch and running the tiny model take about 2 GB", "use a larger machine")
    disk = shutil.disk_usage(".").free / GB
    yield Answer("machine", "disk", disk >= 1, f"{disk:.0f} GB free here",
                  "the tiny checkpoint and its plan may not fit", "free some space, or run in another folder")
    compiler = next((name for name in ("clang", "gcc") if shutil.which(name)), "")
    headers = Path(sysconfig.get_paths()["include"], "Python.h").is_file()
    value = " and ".join([compiler or "no C compiler", "Python.h" if headers else "no Python.h"])
    yield Answer("machine", "C compiler", bool(compiler) and headers, value,
                  "Triton builds its launcher with them before the first kernel runs on a GPU",
                  "on Debian and Ubuntu: apt install gcc python3-dev")
    for name in knobs.unknown():
        yield Answer("machine", name, False, "is set", "is no flag of this version and has no effect",
                      "unset it, or look up its name in compiler/knobs.py")


def _ask_driver() -> list[str]:
    """One line of ``GPU_FIELDS`` a GPU; none without a GPU or its driver."""
    query = ["nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def _gpus() -> Iterator[Answer]:
    lines = _ask_driver()
    if not lines:
        yield Answer("machine", "gpu", False, "none found",
                      "kernels run in Triton's interpreter, on the CPU: right results, no speed",
                      "use a machine with an NVIDIA GPU of compute capability 9.0 or newer, and its driver")
    for number, line in enumerate(lines):
        name, capability, memory, driver = (part.strip() for part in line.split(","))
        yield Answer("machine", "gpu" if number == 0 else f"gpu {number}",
                      float(capability) >= OLDEST_CAPABILITY,
                      f"{name}, compute capability {capability}, {memory}, driver {driver}",
                      f"the kernels need compute capability {OLDEST_CAPABILITY} or newer")


def _libraries() -> Iterator[Answer]:
    yield _torch()
    yield _probed("triton", "k3plan.ops_triton.probe",
                  "cannot compile a Triton kernel or run one in the interpreter", "pip install triton")
    yield _probed("cute dsl", "k3plan.ops_cute.probe",
                  "cannot compile or run the CuTe DSL kernels", 'pip install -e ".[cute]"')
    for name, meaning, fix in [
        ("pydantic", "cannot read a plan file (YAML)", "pip install pydantic"),
        ("ruamel.yaml", "cannot read a plan file (YAML)", "pip install ruamel.yaml"),
        ("safetensors", "cannot read or write a checkpoint", "pip install safetensors"),
        ("transformers", "cannot compare with the Hugging Face model", 'pip install -e ".[dev]"'),
        ("cuda-bindings", "cannot audit a captured graph against its plan", 'pip install -e ".[cuda]"'),
    ]:
        try:
            yield Answer("libraries", name, True, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Answer("libraries", name, False, "not installed", meaning, fix)


def _torch() -> Answer:
    try:
        torch = importlib.import_module("torch")
    except Exception as error:
        return Answer("libraries", "torch", False, _first_line(error),
                       "can plan, and cannot run anything", "make clean; make venv")
    build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    if torch.cuda.is_available():
        build += f", sees {torch.cuda.device_count()} GPU(s)"
    return Answer("libraries", "torch", True, f"{torch.__version__}, {build}")


def _probed(name: str, module: str, meaning: str, fix: str) -> Answer:
    """A kernel language, by the probe in its folder: version, and a trial compilation for each target."""
    try:
        found = dict(importlib.import_module(module).probe())
    except Exception as error:
        value = "not installed" if isinstance(error, ModuleNotFoundError) else _first_line(error)
        return Answer("libraries", name, False, value, meaning, fix)
    version = found.pop("version")
    refused = [f"{target} ({reason})" for target, reason in found.items() if reason]
    works = ", ".join(target for target, reason in found.items() if not reason)
    return Answer("libraries", name, not refused, f"{version}, compiles for {works or 'no target'}",
                   "does not compile for " + "; ".join(refused) if refused else "",
                   "reinstall it: its assembler is missing or too old" if refused else "")


def _abilities(found: dict[str, Answer]) -> Iterator[Answer]:
    def ability(name: str, *needs: str) -> Answer:
        lacking = [need for need in needs if not found[need].ok]
        return Answer("abilities", name, not lacking, f"lacks {', '.join(lacking)}" if lacking else "")

    yield ability("plan a step for any GPU", "python", "pydantic", "ruamel.yaml")
    yield ability("run a plan on the CPU", "torch", "safetensors")
    yield ability("check Triton kernels in the interpreter", "torch", "triton")
    yield ability("compile Triton kernels for sm_90a, sm_100a and sm_103a", "triton")
    yield ability("compile CuTe DSL kernels for sm_90a, sm_100a and sm_103a", "cute dsl")
    needs = ("gpu", "torch", "triton", "safetensors", "C compiler")
    on_device = ability("run and capture on this GPU", *needs)
    if on_device.ok and "sees" not in found["torch"].value:
        yield Answer("abilities", on_device.name, False, "torch does not see the GPU",
                      "torch is a CPU build, or older or newer than the driver allows", "make clean; make venv")
    else:
        yield on_device
    yield ability("audit a captured graph", "gpu", "torch", "cuda-bindings")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def render(findings: list[Answer]) -> str:
    """The report for a person. What is not ok is followed by what that means and what to do about it."""
    lines = []
    for group, title in (("machine", "this machine"), ("libraries", "libraries"), ("abilities", "it can")):
        members = [finding for finding in findings if finding.group == group]
        width = max((len(finding.name) for finding in members), default=0)
        yes, no = ("yes", "no") if group == "abilities" else ("ok", "missing")
        lines.append(title)
        for finding in members:
            line = f"  {yes if finding.ok else no:<8} {finding.name:<{width}}  {finding.value}"
            lines.append(line.rstrip())
            notes = [finding.meaning, f"fix: {finding.fix}" if finding.fix else ""]
            lines += [f"           {note}" for note in notes if note and not finding.ok]
    return "\n".join(lines)


def doctor(json: bool = False) -> str:
    """The report of ``k3plan doctor``: text, or JSON as ``{"findings": [...]}``."""
    findings = examine()
    return dumps({"findings": [asdict(f) for f in findings]}, indent=2) if json else render(findings)
