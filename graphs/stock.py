"""How torch runs an op of a bound plan on a GPU where one library call does it: projections by cuBLAS.

The functions of ``compiler/ops`` widen their weights to fp32 first, which is their meaning and no way to run a step.
Decides which call fits the tensors; a caller runs the op's own function where none does.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_PLAIN = (torch.bfloat16, torch.float32)


def bind_op(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor],
            attrs: Mapping[str, Any]) -> Callable[[], None] | None:
    """A call that fills ``outputs`` from ``inputs`` in one launch, allocates nothing and may be captured.

    None where no library call computes op ``name`` on tensors like these to the precision of ``attrs``.
    """
    if name != "linear":
        return None
    (x, weight), (out,) = inputs, outputs
    if attrs.get("out_dtype") == "fp32" and out.dtype != torch.float32:
        return None
    return _product(_rows(x), weight, _rows(out))


def _rows(tensor: Tensor) -> Tensor | None:
    """``tensor`` as a matrix of its last dim's rows; None where that would copy or the last dim is strided."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        return None
    try:
        return tensor.view(-1, tensor.shape[-1])
    except RuntimeError:
        return None


def _product(x: Tensor | None, weight: Tensor, out: Tensor | None) -> Callable[[], None] | None:
    """``out = x @ weight.T`` by a library, with the result's own dtype."""
    if x is None or out is None or not (weight.is_contiguous() and out.is_contiguous()) or x.dtype != weight.dtype:
        return None
    columns = weight.t()
    if x.dtype == out.dtype and x.dtype in _PLAIN:

        def product() -> None:
            torch.mm(x, columns, out=out)

        return product
    if x.dtype == torch.bfloat16 and out.dtype == torch.float32 and hasattr(torch.ops.aten.mm, "dtype_out"):

        def wide_product() -> None:
            # the fp32 sums themselves: a bf16 result, widened, changes which experts the router takes
            torch.ops.aten.mm.dtype_out(x, columns, torch.float32, out=out)

        return wide_product
    return None
