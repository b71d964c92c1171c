"""What the tests of the drop-in module share: one small Kimi K3 and the plans of its buckets."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from made_steps import spec_of

from k3plan.compiler.compile import compile_spec
from k3plan.compiler.plan import LaunchPlan
from k3plan.graphs.checkpoint import Checkpoint
from k3plan.graphs.make_checkpoint import make_checkpoint

torch.set_num_threads(1)

BUCKETS = (4, 2, 1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every layer kind: dense first, an MLA layer in the middle and one last, two AttnRes blocks."""
    path = tmp_path_factory.mktemp("k3-module")
    attention = ("kda", "mla", "kda", "mla")
    make_checkpoint(path, attention=attention, mlp=("dense", "moe", "moe", "moe"), attn_res_block=2)
    return path


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    path = tmp_path_factory.mktemp("k3-module-other")
    attention = ("kda", "mla", "kda", "mla")
    make_checkpoint(path, seed=1, attention=attention, mlp=("dense", "moe", "moe", "moe"), attn_res_block=2)
    return path


@pytest.fixture(scope="session")
def checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint(folder)


@pytest.fixture(scope="session")
def other(other_folder: Path) -> Checkpoint:
    return Checkpoint(other_folder)


@pytest.fixture(scope="session")
def plans(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LaunchPlan]:
    """One plan for each of ``BUCKETS``."""
    where = tmp_path_factory.mktemp("plans")
    return [compile_spec(spec_of(where, folder, sequences=count)) for count in BUCKETS]
