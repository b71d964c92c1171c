"""Attention residuals: a softmax over depth in place of the residual sum (Kimi K3).

A block is not copied anywhere: it is the value of the prefix at the start of a block of layers, kept alive.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

from ..ir import Value
from ._registry import Attrs, Shaped, Traffic, expect, op, replicated
from ._torch import torch


def _infer(inputs: Sequence[Value], attrs: Attrs) -> list[Shaped]:
    score, prefix, *blocks = inputs
    expect(score.shape == prefix.shape[-1:], f"attn_res: score {score.shape} for rows {prefix.shape}")
    expect(all(b.shape == prefix.shape for b in blocks), "attn_res: a block has another shape")
    return [(prefix.shape, prefix.dtype)]


def _count(inputs: Sequence[Value], outputs: Sequence[Value], attrs: Attrs) -> Traffic:
    moved = sum(v.nbytes for v in (*inputs, *outputs))
    return Traffic(moved, 6 * math.prod(outputs[0].shape) * (len(inputs) - 1))


@op(infer=_infer, place=replicated(), count=_count, aten=19)
def attn_res(
    score: torch.Tensor, prefix: torch.Tensor, *blocks: torch.Tensor, eps: float
) -> torch.Tensor:
    """Mix of the finished blocks and the running prefix; prefix and each block [T, D], score fp32 [D].

    ``s_j = (v_j . score) / rms(v_j)``, ``p = softmax(s)``, result ``sum_j p_j v_j`` over the raw sources.
    ``score`` is the product of the site's norm weight and projection.
    """
    sources = torch.stack([v.float() for v in (*blocks, prefix)], dim=1)  # [T, n, D]
    rms = torch.rsqrt(sources.square().mean(-1) + eps)
    weights = torch.softmax((sources @ score.float()) * rms, dim=1)
    return torch.einsum("tn,tnd->td", weights, sources)
