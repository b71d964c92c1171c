"""Collectives. Their functions take the tensors of all ranks and return those of all ranks."""
from __future__ import annotations

from collections.abc import Sequence

from ..ir import REPLICATED, Value, shard
from ._registry import Attrs, Placement, Shaped, expect, like, op
from ._torch import torch


def _infer_scatter(inputs: Sequence[Value], attrs: Attrs) -> list[Shaped]:
    x, dim, ranks = inputs[0], attrs["dim"], attrs["ranks"]
    expect(x.shape[dim] % ranks == 0, f"reduce_scatter: {x.shape} along {dim} over {ranks} ranks")
    return [(tuple(n // ranks if i == dim else n for i, n in enumerate(x.shape)), x.dtype)]


def _infer_gather(inputs: Sequence[Value], attrs: Attrs) -> list[Shaped]:
    x, dim, ranks = inputs[0], attrs["dim"], attrs["ranks"]
    return [(tuple(n * ranks if i == dim else n for i, n in enumerate(x.shape)), x.dtype)]


def _place_whole(inputs: Sequence[Value], attrs: Attrs) -> list[Placement]:
    return [REPLICATED]


def _place_scatter(inputs: Sequence[Value], attrs: Attrs) -> list[Placement]:
    return [shard(attrs["dim"])]


@op(infer=like(0), place=_place_whole, kind="comm")
def all_reduce(parts: list[torch.Tensor], *, ranks: int, reduce: str = "sum") -> list[torch.Tensor]:
    """Every rank gets the fp32 sum (in rank order) or the maximum of all ranks' tensors."""
    if reduce == "max":
        return [torch.stack(parts).amax(0)] * len(parts)
    return [torch.stack([p.float() for p in parts]).sum(0)] * len(parts)


@op(infer=_infer_scatter, place=_place_scatter, kind="comm")
def reduce_scatter(parts: list[torch.Tensor], *, ranks: int, dim: int) -> list[torch.Tensor]:
    """Rank r gets part r, along ``dim``, of the fp32 sum of all ranks' tensors."""
    total = torch.stack([p.float() for p in parts]).sum(0)
    return list(total.chunk(len(parts), dim))


@op(infer=_infer_gather, place=_place_whole, kind="comm")
def all_gather(parts: list[torch.Tensor], *, ranks: int, dim: int) -> list[torch.Tensor]:
    """Every rank gets all ranks' tensors joined along ``dim`` in rank order."""
    return [torch.cat(parts, dim)] * len(parts)
