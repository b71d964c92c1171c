"""Attention over the paged latent cache where it can go wrong: page sizes, scales, garbage, short rows, many splits."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from k3plan.compiler.call import Call
from k3plan.compiler.ops import OPS
from k3plan.ops_triton.mla_decode import bind

HEADS, LATENT, REST, SCALE = 3, 32, 16, 48**-0.5
CONFIG: dict[str, Any] = {"splits": 4, "block": 32, "warps": 4, "stages": 3, "merge": "launch", "partial": "fp32",
                          "columns": 32, "group": 1, "merge_warps": 4}


def _call(positions: list[int], *, query: int = 1, page: int = 32, context: int = 256, dtype: torch.dtype | None = None,
          kv_scale: float = 1.0, device: str = "cpu", **config: Any) -> Call:
    """A launch over random entries; the cache holds NaN wherever no row may look."""
    generator = torch.Generator().manual_seed(3)
    rows, sequences, pages = len(positions), len(positions) // query, context // page
    table = torch.randperm(sequences * pages, generator=generator).view(sequences, pages)
    cache = torch.randn(sequences * pages + 1, page, LATENT + REST, generator=generator).to(dtype or torch.bfloat16)
    where = torch.tensor(positions).view(sequences, query).amax(1)
    one_byte = dtype == torch.float8_e4m3fn
    flat = cache.view(torch.uint8 if one_byte else torch.int16).view(-1, LATENT + REST)
    for sequence in range(sequences):
        for token in range(int(where[sequence]) + 1, context):
            flat[table[sequence, token // page] * page + token % page] = 0x7F if one_byte else 0x7FC0
    chosen = CONFIG | config
    splits = int(chosen["splits"])
    query_rows = torch.randn(rows, HEADS, LATENT + REST, generator=generator).bfloat16()
    partial = torch.full((sequences, splits, query * HEADS, LATENT), torch.nan)
    scratch = {"partial": partial, "log_sum": torch.full((sequences, splits, query * HEADS), torch.nan),
               "arrivals": torch.zeros(sequences * 4, dtype=torch.int32)}
    tensors = {"query": query_rows, "cache": cache, "positions": torch.tensor(positions, dtype=torch.int32),
               "page_table": table.int(), "mixed": torch.full((rows, HEADS, LATENT), torch.nan, dtype=torch.bfloat16)}
    attrs = {"query": query, "latent": LATENT, "scale": SCALE, "kv_scale": kv_scale}
    return Call({n: t.to(device) for n, t in tensors.items()}, attrs={"mixed": attrs},
                scratch={n: t.to(device) for n, t in scratch.items()}, config=chosen)


def _expected(call: Call, **other: Any) -> Tensor:
    names = ("query", "cache", "positions", "page_table")
    return OPS["mla_attend"].fn(*(call.tensors[n] for n in names), **(call.attrs["mixed"] | other))


def _run(call: Call) -> Tensor:
    bind(call)()
    assert not call.scratch["arrivals"].any()
    return call.tensors["mixed"].float()


MERGES: list[Mapping[str, Any]] = [{"merge": "launch"}, {"merge": "last"}, {"splits": 1}, {"splits": 8, "stages": 1}]


@pytest.mark.parametrize("config", MERGES, ids=lambda c: "-".join(f"{k}{v}" for k, v in c.items()))
@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
def test_pages_and_lengths(page: int, dtype: torch.dtype, config: Mapping[str, Any], device: str) -> None:
    """Rows at the first entry, around borders of tiles, pages and splits, at the end; a padding row."""
    call = _call([0, 31, 32, 63, 64, 127, 255, -1], page=page, dtype=dtype, device=device, **config)
    got, expected = _run(call), _expected(call)
    assert torch.isfinite(got).all(), "an entry past the end of a row came in"
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)
    assert not got[-1].any(), "the padding row is not zero"


@pytest.mark.parametrize("positions", [[0, -1, -1, -1], [0, 1, 2, -1], [30, 31, 32, 33], [252, 253, 254, 255]])
def test_rows_of_a_verify_step_are_causal(positions: list[int], device: str) -> None:
    """Also a sequence that is shorter than the rows of its step."""
    call = _call([*positions, 5, 6, 7, 8], query=4, device=device)
    torch.testing.assert_close(_run(call), _expected(call), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kv_scale", [1.0, 4.0, 0.0625])
def test_the_scale_of_the_cache_is_delivered(kv_scale: float, device: str) -> None:
    call = _call([100, 200], dtype=torch.float8_e4m3fn, kv_scale=kv_scale, device=device)
    got = _run(call)
    torch.testing.assert_close(got, _expected(call), rtol=0.02, atol=0.02 * kv_scale)
    if kv_scale != 1.0:
        assert (got - _expected(call, kv_scale=1.0)).abs().max() > 0.1 * kv_scale


def test_a_row_does_not_depend_on_the_others(device: str) -> None:
    """NaN in one sequence's entries leaves all other rows bit-equal."""
    call = _call([100, 200, 50], device=device)
    clean = _run(call).clone()
    call.tensors["cache"][call.tensors["page_table"][1, 0].long()] = torch.nan
    broken = _run(call)
    assert torch.equal(broken[[0, 2]], clean[[0, 2]])
    assert broken[1].isnan().any()


def test_many_heads_take_several_tiles_of_rows(device: str) -> None:
    """A verify step of 8 rows x 24 heads is three tiles of 64 rows, or twelve of 16."""
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(8, 24, LATENT + REST, generator=generator).bfloat16().to(device)
    base = _call([40], device=device)
    tensors = dict(base.tensors) | {
        "query": query, "positions": torch.arange(33, 41, dtype=torch.int32, device=device),
        "mixed": torch.full((8, 24, LATENT), torch.nan, dtype=torch.bfloat16, device=device)}
    attrs = {"mixed": dict(base.attrs["mixed"]) | {"query": 8}}
    scratch = {"partial": torch.full((1, 4, 192, LATENT), torch.nan, device=device),
               "log_sum": torch.full((1, 4, 192), torch.nan, device=device),
               "arrivals": torch.zeros(12, dtype=torch.int32, device=device)}
    for merge, tile in (("launch", 64), ("last", 64), ("launch", 16), ("last", 16)):
        call = Call(tensors, attrs=attrs, scratch=scratch, config=CONFIG | {"merge": merge, "tile": tile})
        torch.testing.assert_close(_run(call), _expected(call), rtol=0.02, atol=0.02)
