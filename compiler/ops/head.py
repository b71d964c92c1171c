"""Embedding look-up and greedy sampling over a vocabulary that may be split over ranks."""
from __future__ import annotations

from collections.abc import Sequence

from ..ir import DISJOINT, PARTIAL_MAX, REPLICATED, Placement, Value, shard
from ._registry import Attrs, Need, Shaped, Traffic, need_replicated, op, replicated
from ._torch import torch


def _infer_embed(inputs: Sequence[Value], attrs: Attrs) -> list[Shaped]:
    tokens, table, _ = inputs
    return [((tokens.shape[0], table.shape[1]), attrs["out_dtype"])]


def _place_embed(inputs: Sequence[Value], attrs: Attrs) -> list[Placement]:
    return [DISJOINT if inputs[1].placement == shard(0) else REPLICATED]


def _count_embed(inputs: Sequence[Value], outputs: Sequence[Value], attrs: Attrs) -> Traffic:
    return Traffic(inputs[0].nbytes + 2 * outputs[0].nbytes, 0)


@op(infer=_infer_embed, place=_place_embed, count=_count_embed, aten=15)
def embed(
    tokens: torch.Tensor, table: torch.Tensor, rank: torch.Tensor, *, out_dtype: str
) -> torch.Tensor:
    """Rows of the table: tokens i32 [T], table [V or V/N, D], result [T, D]; zeros where not on this rank.

    Token -1 is padding and gives a row of zeros.
    """
    local = tokens.long() - (rank.long() * table.shape[0])
    here = (tokens >= 0) & (local >= 0) & (local < table.shape[0])
    rows = table[local.clamp(0, table.shape[0] - 1)].float()
    return torch.where(here[:, None], rows, torch.zeros((), device=rows.device))


def _infer_key(inputs: Sequence[Value], attrs: Attrs) -> list[Shaped]:
    return [(inputs[0].shape[:1], "i64")]


def _place_key(inputs: Sequence[Value], attrs: Attrs) -> list[Placement]:
    logits = inputs[0]
    if logits.placement.kind in ("partial", "disjoint"):
        raise Need(0)
    need_replicated(inputs, [1])
    return [PARTIAL_MAX if logits.placement == shard(1) else REPLICATED]


@op(infer=_infer_key, place=_place_key, aten=17)
def argmax_key(logits: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
    """Greedy choice as one i64 a row, so that ``max`` over ranks picks the winner: logits [T, V], keys [T].

    High word: the logit as an ordered integer; low word: the inverted id, so that the lower id wins a tie.
    NaN ranks below every number.
    """
    logits = logits.float() + 0.0  # -0.0 becomes +0.0
    bits = logits.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    ordered = torch.where(logits.isnan(), torch.full_like(ordered, -(2**31)), ordered)
    ids = torch.arange(logits.shape[1], device=logits.device) + rank.long() * logits.shape[1]
    return ((ordered << 32) | (0xFFFFFFFF - ids)).amax(-1)


def _infer_token(inputs: Sequence[Value], attrs: Attrs) -> list[Shaped]:
    return [(inputs[0].shape, "i32")]


@op(infer=_infer_token, place=replicated(), aten=7)
def token_of_key(key: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The token id i32 [T] inside each key; -1 on padding rows (position below 0)."""
    token = 0xFFFFFFFF - (key & 0xFFFFFFFF)
    return torch.where(positions >= 0, token, torch.full_like(token, -1)).to(torch.int32)
