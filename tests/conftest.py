"""How every test runs: which device, how many threads, which Hypothesis profile, what is left out."""
from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

HIDDEN = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
GPU_HERE = not HIDDEN and any(Path("/dev").glob("nvidia[0-9]*"))

# Triton reads TRITON_INTERPRET when a kernel is decorated, so a process runs every kernel either in the
# interpreter or on the device. The device is for `pytest -m gpu` on a machine with a GPU (pytest_configure).
os.environ["TRITON_INTERPRET"] = "1"
# fused multiply-add as in production, whatever the caller's environment says
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
# ranks that wait for each other run on streams of their own: no two may share a queue of the GPU, of which there are 8
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
# workers share the cores: one thread a core in each of them would be slower
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def runs_on_device(config: pytest.Config) -> bool:
    """True for ``-m gpu``, or an expression that includes it, on a machine with a GPU."""
    wanted = config.option.markexpr
    return GPU_HERE and "gpu" in wanted and "not gpu" not in wanted


def pytest_configure(config: pytest.Config) -> None:
    if runs_on_device(config):
        assert "triton" not in sys.modules, "triton was imported before the device was chosen"
        del os.environ["TRITON_INTERPRET"]


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """Where this run executes kernels: "cuda", or "cpu" for the interpreter."""
    return "cuda" if runs_on_device(pytestconfig) else "cpu"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if runs_on_device(config):
        return
    skip = pytest.mark.skip(reason="runs on the device: pytest -m gpu" if GPU_HERE else "needs an NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    left_out = sum("gpu" in getattr(report, "keywords", ()) for report in terminalreporter.stats.get("skipped", []))
    if left_out and not runs_on_device(config):
        how = "; run them with `pytest -m gpu`" if GPU_HERE else ""
        many = f"{left_out} tests need an NVIDIA GPU and were"
        tests = "1 test needs an NVIDIA GPU and was" if left_out == 1 else many
        terminalreporter.write_line(f"{tests} not run{how}")
