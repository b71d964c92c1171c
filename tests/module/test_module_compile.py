"""torch.compile of a layer: the whole graph is read, and Triton operators open up to their kernels."""
from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from made_steps import layer_plan
from test_layer import Steps, rows_of
from torch.testing import assert_close

from k3plan import ops_triton
from k3plan.graphs.checkpoint import Checkpoint
from k3plan.graphs.module.layer import DecodeLayer


@pytest.mark.parametrize("index", [0, 1], ids=["kda-dense", "mla-moe"])
def test_a_compiled_layer_computes_the_same(folder: Path, checkpoint: Checkpoint, tmp_path: Path, index: int) -> None:
    """In one graph, over three steps."""
    layer, again = (DecodeLayer.from_plan(layer_plan(tmp_path, folder, index), checkpoint, parameters=False)
                    for _ in range(2))
    again.register_operators()
    compiled = torch.compile(Steps(again), fullgraph=True, backend="aot_eager")
    for given in rows_of(layer):
        wanted = layer(given[0], position_ids=given[1], slots=given[2], page_table=given[3], blocks=given[4])
        assert_close(compiled(*given), wanted, rtol=0, atol=0)


def test_triton_operators_open_up(folder: Path, tmp_path: Path) -> None:
    """Traced with fake tensors of a GPU that is not here: every launch becomes its kernels, and nothing else of ours.

    torch finds by itself what each kernel writes: the states that the schema says, and the results.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(Path(__file__).parent / "trace_fused.py"), str(tmp_path), str(folder)],
                          text=True, capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ") for line in done.stdout.splitlines()]
    kernels = {name.rpartition("_")[0]: (int(count), updated) for name, count, updated in lines}
    assert {"triton_kda_decode", "triton_kda_verify", "triton_mla_query_absorb", "triton_mla_attend_out",
            "triton_router_topk", "triton_attn_res"} <= kernels.keys()
    assert all(count >= 1 for count, _ in kernels.values())
    assert kernels["triton_kda_decode"][1] == "state,window"
    assert kernels["triton_kda_verify"][1] == "record,state,window"
    assert kernels["triton_mla_query_absorb"][1] == "cache"
    assert kernels["triton_router_topk"][1] == ""


def test_kernels_can_be_written_into_a_source() -> None:
    """torch.compile copies a kernel and the constants that it names into a Python file, between three quotes: torch
    2.11 does that without escaping, so a newline or a backslash in a string there ends the kernel (seen on an H200)."""
    seen = 0
    for path in sorted(Path(ops_triton.__path__[0]).glob("[a-z]*.py")):
        module = importlib.import_module(f"k3plan.ops_triton.{path.stem}")
        for name, value in vars(module).items():
            if isinstance(value, triton.language.constexpr) and isinstance(value.value, str):
                assert not set(value.value) & set("\n\\"), f"{path.stem}.{name}"
                seen += 1
            elif hasattr(value, "fn") and getattr(value.fn, "__module__", "") == module.__name__:
                assert "\\" not in inspect.getsource(value.fn), f"{path.stem}.{name}"
                seen += 1
    assert seen > 50
