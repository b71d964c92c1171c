"""A record survives its file, and a file that is no record is refused in words."""
from __future__ import annotations

import json
from pathlib import Path

import pytest

from k3plan.compiler.errors import RecordError
from k3plan.graphs.debug.record import (
    Bound,
    Bucket,
    Edge,
    LaunchRecord,
    Machine,
    Node,
    Pointer,
    Record,
    load_record,
)

RECORD = Record(
    plan_key="0123456789abcdef", machine=Machine("NVIDIA H200", 132, "13.0", "2.11", "3.6"), bucket=Bucket(1, 8),
    nodes=(Node(0, "memset", launch=0), Node(1, "kernel", "attn_res", (7, 1, 1), (128, 1, 1), 4096, 1),
           Node(2, "kernel", "stranger", (1, 1, 1), (32, 1, 1))),
    edges=(Edge(0, 1), Edge(1, 2, "programmatic")),
    launches=(LaunchRecord("zero", (0,)),
              LaunchRecord("L0.attn.h", (1,), 4.1, 3.9, 0.2, 2.4, 28672, (Bound("attn_res", (7, 1, 1), 128),))),
    pointers=(Pointer("x", 0x7F0000000000, 14336, "arena", (1,), (0,)),), replay_us=6.5, queued_us=6.25,
    captured_bytes=2 << 20, notes=("loopback",),
)


def test_round_trip(tmp_path: Path) -> None:
    RECORD.save(tmp_path / "r.json")
    assert load_record(tmp_path / "r.json") == RECORD
    assert RECORD.to_json() == load_record(tmp_path / "r.json").to_json()


def test_columns_of_a_later_writer_are_left_out() -> None:
    data = json.loads(RECORD.to_json())
    data["columns"]["nodes"].append("priority")
    data["nodes"] = [[*row, 5] for row in data["nodes"]]
    assert Record.from_json(json.dumps(data)) == RECORD


@pytest.mark.parametrize(("text", "message"), [
    ("{", "not JSON"), ("[1]", "not the record of a capture"), ('{"launches": []}', "not the record of a capture"),
    (RECORD.to_json().replace('"version": 1', '"version": 99'), "record version 99"),
])
def test_what_is_no_record_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(RecordError, match=message) as caught:
        load_record(tmp_path / "r.json")
    assert str(tmp_path / "r.json") in str(caught.value)
    assert "fix: " in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="No such file"):
        load_record(tmp_path / "none.json")


@pytest.mark.parametrize(("function", "title"), [
    ("_exchange", "_exchange"), ("", ""),
    ("_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_",
     "at::native::vectorized_elementwise_kernel (FillFunctor)"),
    ("_ZN2at6native18elementwise_kernelILi128ELi2EZNS0_22gpu_kernel_impl_nocastIZZZNS0_49_GLOBAL__N__d2ba64fb_16_"
     "TensorCompare_cu_71e06f4e17where_kernel_implERNS_14TensorIteratorEENKUlvE_clEv",
     "at::native::elementwise_kernel (where_kernel_impl)"),
    ("_ZN50_GLOBAL__N__fa15d16e_17_RangeFactories_cu_38772b0829elementwise_kernel_with_indexIiZZZN2at6native15"
     "arange_cuda_outERKN3c106ScalarES6_", "elementwise_kernel_with_index"),
    ("_Z16gemmSN_TN_kernelIfLi128ELi16ELi2ELb0E30cublasGemvTensorStridedBatchedIKfES2_", "gemmSN_TN_kernel"),
])
def test_names_of_functions(function: str, title: str) -> None:
    """Kernels of torch and cuBLAS in a capture of an H200."""
    assert Node(0, "kernel", function).title == title
