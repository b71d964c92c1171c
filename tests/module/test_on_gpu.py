"""The checks of ``gpu_checks.py``, one a test."""
from __future__ import annotations

from pathlib import Path

import pytest
from gpu_checks import CHECKS


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("module-gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
def test_module(where: Path, check: str) -> None:
    assert CHECKS[check](where)
