"""Multi-head latent attention in its absorbed form, without rotary embedding, over a paged latent cache.

A cache entry is ``[latent R | key part without projection r]``. cache [pages + 1, page, R + r]: the last page
is scratch for padding rows. page_table i32 [S, pages of the planned context]; positions i32 [T], -1 is padding.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

from ..ir import Value
from ._registry import Attrs, Shaped, Traffic, expect, op, replicated, split_along
from ._torch import torch


def _infer_absorb_q(inputs: Sequence[Value], attrs: Attrs) -> list[Shaped]:
    q, weight = inputs
    heads, nope, latent = weight.shape
    expect(q.shape[1] % heads == 0, f"mla_absorb_q: {q.shape} over {heads} heads")
    return [((q.shape[0], heads, latent + q.shape[1] // heads - nope), q.dtype)]


def _count_heads(inputs: Sequence[Value], outputs: Sequence[Value], attrs: Attrs) -> Traffic:
    moved = sum(v.nbytes for v in (*inputs, *outputs))
    return Traffic(moved, 2 * inputs[0].shape[0] * math.prod(inputs[1].shape))


@op(infer=_infer_absorb_q, place=split_along((1, 0), (1,)), count=_count_heads, aten=5)
def mla_absorb_q(q: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Query in latent space: q [T, H*(n + r)], weight [H, n, R], result [T, H, R + r]."""
    heads, nope, _ = weight.shape
    per_head = q.float().unflatten(-1, (heads, -1))
    latent = torch.einsum("thn,hnr->thr", per_head[..., :nope], weight.float())
    return torch.cat([latent, per_head[..., nope:]], -1)


def _cache_slot(positions: torch.Tensor, page_table: torch.Tensor, pages: int, page: int, query: int):
    """Flat cache row of every step row; padding goes to the scratch page."""
    sequence = torch.arange(positions.shape[0], device=positions.device) // query
    at = positions.long().clamp(min=0)
    entry = page_table[sequence, (at // page).clamp(max=page_table.shape[1] - 1)].long()
    real = (positions >= 0) & (entry >= 0)
    return torch.where(real, entry * page + at % page, torch.full_like(at, (pages - 1) * page))


def _infer_append(inputs: Sequence[Value], attrs: Attrs) -> list[Shaped]:
    latent, key_part, cache = inputs[:3]
    expect(cache.shape[2] == latent.shape[1] + key_part.shape[1], "mla_append: width of the cache")
    return [(cache.shape, cache.dtype)]


def _count_append(inputs: Sequence[Value], outputs: Sequence[Value], attrs: Attrs) -> Traffic:
    rows, cache = inputs[0].shape[0], inputs[2]
    written = rows * cache.nbytes // cache.shape[0] // cache.shape[1]
    return Traffic(inputs[0].nbytes + inputs[1].nbytes + written, 0)


@op(infer=_infer_append, place=replicated(), count=_count_append, alias={0: 2}, aten=22)
def mla_append(
    latent: torch.Tensor, key_part: torch.Tensor, cache: torch.Tensor, positions: torch.Tensor,
    page_table: torch.Tensor, *, query: int, kv_scale: float,
) -> torch.Tensor:
    """Writes ``[latent | key_part] / kv_scale`` of each row at its position; latent [T, R], key_part [T, r].

    fp8_e4m3 caches saturate at 448.
    """
    pages, page, _width = cache.shape
    rows = torch.cat([latent.float(), key_part.float()], -1) / kv_scale
    if cache.dtype == torch.float8_e4m3fn:
        rows = rows.clamp(-448.0, 448.0)
    where = _cache_slot(positions, page_table, pages, page, query)
    flat = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
    flat.view(pages * page, -1).index_copy_(0, where, rows.to(cache.dtype).view(flat.dtype).view(len(rows), -1))
    return cache


def _infer_attend(inputs: Sequence[Value], attrs: Attrs) -> list[Shaped]:
    query, cache = inputs[:2]
    expect(query.shape[2] == cache.shape[2], f"mla_attend: query {query.shape} against cache {cache.shape}")
    return [((*query.shape[:2], attrs["latent"]), query.dtype)]


def _count_attend(inputs: Sequence[Value], outputs: Sequence[Value], attrs: Attrs) -> Traffic:
    query, cache, table = inputs[0], inputs[1], inputs[3]
    context = table.shape[1] * cache.shape[1]
    read = table.shape[0] * context * cache.nbytes // cache.shape[0] // cache.shape[1]
    flops = 2 * math.prod(query.shape[:2]) * context * (query.shape[2] + attrs["latent"])
    return Traffic(query.nbytes + outputs[0].nbytes + read, flops)


@op(infer=_infer_attend, place=split_along((1, None), (1,)), count=_count_attend, aten=21)
def mla_attend(
    query_rows: torch.Tensor, cache: torch.Tensor, positions: torch.Tensor, page_table: torch.Tensor, *,
    query: int, latent: int, scale: float, kv_scale: float,
) -> torch.Tensor:
    """Attention of each row over cache positions 0..position: query_rows [T, H, R + r], result [T, H, R].

    All heads share the entries; the value is their first ``latent`` elements. Rows of one sequence see each
    other causally because a row's entry is appended before it attends. Entries past a row's position are
    selected away, never multiplied. Padding rows give zeros.
    """
    sequences, page = page_table.shape[0], cache.shape[1]
    entries = cache[page_table.long().clamp(min=0)].flatten(1, 2).float() * kv_scale  # [S, C, R + r]
    rows = query_rows.float().unflatten(0, (sequences, query))  # [S, L, H, R + r]
    limit = positions.unflatten(0, (sequences, query))  # [S, L]
    seen = torch.arange(page_table.shape[1] * page, device=cache.device) <= limit[..., None]  # [S, L, C]
    entries = torch.where(seen.any(1)[..., None], entries, torch.zeros((), device=cache.device))
    scores = torch.einsum("slhd,scd->slhc", rows, entries) * scale
    scores = torch.where(seen[:, :, None], scores, torch.full((), -torch.inf, device=cache.device))
    weights = torch.softmax(scores, -1)
    weights = torch.where((limit >= 0)[..., None, None], weights, torch.zeros((), device=cache.device))
    return torch.einsum("slhc,scd->slhd", weights, entries[..., :latent]).flatten(0, 1)


def _infer_absorb_v(inputs: Sequence[Value], attrs: Attrs) -> list[Shaped]:
    x, weight = inputs
    expect(x.shape[1:] == (weight.shape[0], weight.shape[2]), "mla_absorb_v: shapes")
    return [((x.shape[0], weight.shape[0] * weight.shape[1]), x.dtype)]


@op(infer=_infer_absorb_v, place=split_along((1, 0), (1,)), count=_count_heads, aten=4)
def mla_absorb_v(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Out of latent space: x [T, H, R], weight [H, v, R], result [T, H*v]."""
    return torch.einsum("thr,hvr->thv", x.float(), weight.float()).flatten(1)
