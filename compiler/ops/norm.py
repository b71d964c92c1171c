"""RMS norms."""
from __future__ import annotations

from collections.abc import Sequence

from ..ir import Value
from ._registry import Attrs, Shaped, expect, like, op, replicated, split_along
from ._torch import torch


@op(infer=like(0), place=replicated(), aten=9)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim; x [T, D], weight [D]."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _infer_gated(inputs: Sequence[Value], attrs: Attrs) -> list[Shaped]:
    x, gate, weight = inputs
    expect(x.shape == gate.shape and x.shape[-1] % weight.shape[0] == 0, "gated_rms_norm: shapes")
    return [(x.shape, gate.dtype)]


@op(infer=_infer_gated, place=split_along((1, 1, None), (1,)), aten=11)
def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """RMS norm of each head, times ``sigmoid(gate)``: x and gate [T, H*D], weight [D] shared by all heads."""
    heads = x.float().unflatten(-1, (-1, weight.shape[0]))
    normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps) * weight.float()
    return normed.flatten(-2) * torch.sigmoid(gate.float())
