"""What the tests of the runtime share: one torch thread, and one small Kimi K3 checkpoint a session."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch

from k3plan.graphs.checkpoint import Checkpoint
from k3plan.graphs.make_checkpoint import make_checkpoint

# tensors here are small: a second thread only waits, and on a busy machine it waits long
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def k3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Kimi K3 checkpoint of every layer kind: dense first, two MLA layers last, three AttnRes blocks.

    All dimensions divide over 16 ranks.
    """
    folder = tmp_path_factory.mktemp("k3")
    attention = ("kda", "kda", "mla", "kda", "mla", "mla")
    make_checkpoint(folder, attention=attention, mlp=("dense", *("moe",) * 5), attn_res_block=2)
    return folder


@pytest.fixture(scope="session")
def k3_checkpoint(k3_folder: Path) -> Checkpoint:
    return Checkpoint(k3_folder)
