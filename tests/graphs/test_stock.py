"""Which library call runs an op on a GPU. The calls themselves are run on the CPU, or traced where it has none."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from k3plan.compiler.ops.linear import linear
from k3plan.graphs.stock import bind_op

BF16, FP32 = torch.bfloat16, torch.float32


class Calls(TorchDispatchMode):
    """The ATen operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def names_of(x: Tensor, weight: Tensor, out: Tensor, **attrs: str) -> list[str] | None:
    call = bind_op("linear", [x, weight], [out], attrs)
    if call is None:
        return None
    with Calls() as calls:
        call()
    return calls.names


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_a_projection_is_one_library_call() -> None:
    assert names_of(meta(8, 64), meta(96, 64), meta(8, 96)) == ["aten.mm.out"]


def test_fp32_results_of_bf16_rows_keep_their_sums() -> None:
    assert names_of(meta(8, 64), meta(96, 64), meta(8, 96, dtype=FP32), out_dtype="fp32") == ["aten.mm.dtype_out"]


def test_a_router_never_passes_through_bf16() -> None:
    assert names_of(meta(8, 64), meta(96, 64), meta(8, 96), out_dtype="fp32") is None


def test_a_view_of_wider_rows_is_not_copied() -> None:
    wide = meta(8, 200)
    assert names_of(wide.narrow(1, 8, 64), meta(96, 64), meta(8, 96)) == ["aten.mm.out"]


def test_leading_dims_that_lie_as_one() -> None:
    assert names_of(meta(2, 4, 64), meta(96, 64), meta(2, 4, 96)) == ["aten.mm.out"]


@pytest.mark.parametrize(("x", "weight", "out"), [
    (meta(64, 8).t(), meta(96, 64), meta(8, 96)),  # strided last dim
    (meta(2, 4, 128)[..., :64].transpose(0, 1), meta(96, 64), meta(4, 2, 96)),  # leading dims apart
    (meta(8, 64), meta(64, 96).t(), meta(8, 96)),  # weight columns
    (meta(8, 64), meta(96, 64), meta(96, 8).t()),  # result columns
    (meta(8, 64, dtype=FP32), meta(96, 64), meta(8, 96)),  # mixed operands
    (meta(8, 64, dtype=FP32), meta(96, 64, dtype=FP32), meta(8, 96)),  # a result narrower than its operands
    (meta(8, 64, dtype=torch.float8_e4m3fn), meta(96, 64, dtype=torch.float8_e4m3fn), meta(8, 96)),
])
def test_other_tensors_are_left_to_the_op(x: Tensor, weight: Tensor, out: Tensor) -> None:
    assert bind_op("linear", [x, weight], [out], {}) is None


@pytest.mark.parametrize("op", ["add", "rms_norm", "experts_down"])
def test_other_ops_are_left_to_themselves(op: str) -> None:
    assert bind_op(op, [meta(8, 64), meta(8, 64)], [meta(8, 64)], {}) is None


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_results_are_those_of_the_op(dtype: torch.dtype) -> None:
    x = torch.randn(5, 80).to(dtype)[:, 7:71]
    weight, out = torch.randn(48, 64).to(dtype), torch.full((5, 48), torch.nan, dtype=dtype)
    call = bind_op("linear", [x, weight], [out], {})
    assert call is not None
    call()
    torch.testing.assert_close(out.float(), linear(x, weight), rtol=2.0**-7 if dtype == BF16 else 1e-5, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_results_on_a_gpu_in_a_graph(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 80).to("cuda", BF16)[:, 8:72], torch.randn(48, 64).to("cuda", BF16)
    out = torch.full((5, 48), torch.nan, dtype=dtype, device="cuda")
    call = bind_op("linear", [x, weight], [out], {})
    assert call is not None
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    out.fill_(torch.nan)
    graph.replay()
    expected = x.double() @ weight.double().T
    error = 2.0**-7 if dtype == BF16 else 1e-5
    torch.testing.assert_close(out.double(), expected, rtol=error, atol=8 * error)
