"""The ops against plain loops in float64: routing, sampling, AttnRes, norms, MLA, experts, MXFP8."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_mxfp4 import pack_mxfp4
from torch import Tensor
from torch.testing import assert_close

from k3plan.compiler.ops.attn_res import attn_res
from k3plan.compiler.ops.comm import all_reduce
from k3plan.compiler.ops.head import argmax_key, token_of_key
from k3plan.compiler.ops.linear import add, linear, sigmoid_mul, silu_and_mul, situ_and_mul
from k3plan.compiler.ops.mla import mla_absorb_q, mla_absorb_v, mla_append, mla_attend
from k3plan.compiler.ops.moe import experts_combine, experts_down, experts_gate_up, router_topk
from k3plan.compiler.ops.mxfp4 import unpack_mxfp4
from k3plan.compiler.ops.mxfp8 import E4M3_MAX, GROUP, round_to_mxfp8
from k3plan.compiler.ops.norm import gated_rms_norm, rms_norm

CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}
EXPERTS, TOP_K = 896, 16
INF, NAN = float("inf"), float("nan")


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# router


def route(logits: Tensor, bias: Tensor, *, top_k: int, groups: int = 1, topk_groups: int = 1,
          renormalize: bool = True, scaling: float = 1.0) -> tuple[list[list[int]], list[list[float]]]:
    """Routing as it is written, expert by expert. Scores are torch's, so that ties are the same ties."""
    scores = torch.sigmoid(logits)
    ids, weights = [], []
    for row, score in zip((scores + bias).tolist(), scores.tolist(), strict=True):
        choice = [-INF if math.isnan(c) else c for c in row]
        size = len(choice) // groups
        parts = [choice[g * size : (g + 1) * size] for g in range(groups)]
        sums = [sum(sorted(part)[-2:]) for part in parts]
        best = sorted(range(groups), key=lambda g: (-sums[g], g))[:topk_groups]
        allowed = [e for e in range(len(choice)) if e // size in best]
        taken = sorted(allowed, key=lambda e: (-choice[e], e))[:top_k]
        found = [0.0 if math.isnan(score[e]) else score[e] for e in taken]
        total = sum(found) + 1e-20 if renormalize else 1.0
        ids.append(taken)
        weights.append([w / total * scaling for w in found])
    return ids, weights


def hard_logits() -> dict[str, tuple[Tensor, Tensor]]:
    """Logits [T, 896] and bias [896] of the kinds that gave engines wrong or repeated experts."""
    plain, bias = randn(4, EXPERTS, seed=1), randn(EXPERTS, seed=2, scale=0.05)
    zeros = torch.zeros(EXPERTS)
    boundary = plain.clone()
    order = plain[0].sort(descending=True).indices
    boundary[0, order[TOP_K]] = boundary[0, order[TOP_K - 1]]  # a tie at ranks 16 and 17
    boundary[1, order[TOP_K - 3 : TOP_K + 4]] = boundary[1].max() + 1  # a run of ties
    few = torch.full((4, EXPERTS), -INF)
    few[:, 5:9] = 1.0  # fewer numbers than choices
    nan = plain.clone()
    nan[0, ::2], nan[1, :], nan[2, 895], nan[3, 0] = NAN, NAN, NAN, NAN
    ulp = plain.clone()
    ulp[:, 100] = 3.0
    ulp[:, 99] = torch.nextafter(torch.tensor(3.0), torch.tensor(INF))  # below one bf16 step
    return {
        "plain": (plain, bias),
        "tie_at_the_boundary": (boundary, zeros),
        "identical_rows": (plain[:1].expand(4, -1).contiguous(), bias),
        "all_equal": (torch.zeros(4, EXPERTS), zeros),
        "all_minus_inf": (torch.full((4, EXPERTS), -INF), zeros),
        "all_plus_inf": (torch.full((4, EXPERTS), INF), zeros),
        "few_above_minus_inf": (few, zeros),
        "saturated": (20 + 20 * torch.rand(4, EXPERTS, generator=torch.Generator().manual_seed(3)), zeros),
        "biased_below_minus_1": (plain, bias - 3),
        "nan": (nan, bias),
        "nan_biased_below_minus_1": (nan, bias - 3),
        "one_bf16_step": (ulp, zeros),
    }


@pytest.mark.parametrize("kind", hard_logits())
def test_router_takes_distinct_experts_and_the_lower_id_of_a_tie(kind: str) -> None:
    logits, bias = hard_logits()[kind]
    ids, weights = router_topk(
        logits, bias, top_k=TOP_K, groups=1, topk_groups=1, renormalize=True, scaling=2.5)
    want_ids, want_weights = route(logits, bias, top_k=TOP_K, scaling=2.5)
    assert ids.dtype == torch.int32
    assert weights.dtype == torch.float32
    assert ids.tolist() == want_ids
    assert_close(weights, torch.tensor(want_weights), **CLOSE)
    for row in ids.tolist():
        assert len(set(row)) == TOP_K
        assert all(0 <= e < EXPERTS for e in row)


GROUPS = [(16, 4, 2, 3), (16, 8, 3, 4), (16, 4, 4, 4), (896, 8, 4, 16), (24, 2, 1, 5)]


@pytest.mark.parametrize(("experts", "groups", "topk_groups", "top_k"), GROUPS,
                         ids=[f"E{e}-{t}of{g}-k{k}" for e, g, t, k in GROUPS])
@pytest.mark.parametrize("renormalize", [True, False], ids=["renormalized", "raw"])
def test_router_with_groups(experts: int, groups: int, topk_groups: int, top_k: int, renormalize: bool
                            ) -> None:
    # few distinct values, so that groups and experts tie
    logits = randn(32, experts, seed=5).mul(2).round().div(2)
    bias = randn(experts, seed=6).round().div(4)
    options: dict[str, Any] = {"top_k": top_k, "groups": groups, "topk_groups": topk_groups,
                               "renormalize": renormalize, "scaling": 1.5}
    ids, weights = router_topk(logits, bias, **options)
    want_ids, want_weights = route(logits, bias, **options)
    assert ids.tolist() == want_ids
    assert_close(weights, torch.tensor(want_weights), **CLOSE)


def test_router_stays_in_its_groups_when_they_hold_nan() -> None:
    logits = torch.zeros(1, 16)
    logits[0, 8:12] = torch.tensor([5.0, 4.0, NAN, NAN])  # the best group has fewer numbers than choices
    ids, weights = router_topk(logits, torch.zeros(16), top_k=4, groups=4, topk_groups=1, renormalize=False,
                               scaling=1.0)
    assert ids.tolist() == [[8, 9, 10, 11]]
    assert weights[0, 2:].tolist() == [0.0, 0.0]


# sampling


def pick(row: Sequence[float]) -> int:
    """The first of the largest numbers; NaN is below all, and 0 stands for a row of NaN."""
    best = 0
    for index, value in enumerate(row):
        if not math.isnan(value) and (math.isnan(row[best]) or value > row[best]):
            best = index
    return best


def chosen(logits: Tensor, ranks: int = 1) -> list[int]:
    """Tokens of ``logits`` [T, V] with the vocabulary split over ``ranks``."""
    parts = enumerate(logits.chunk(ranks, 1))
    keys = [argmax_key(part, torch.tensor([rank], dtype=torch.int32)) for rank, part in parts]
    key = all_reduce(keys, ranks=ranks, reduce="max")[0]
    return token_of_key(key, torch.zeros(len(logits), dtype=torch.int32)).tolist()


special = st.sampled_from([0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 3.4e38, -3.4e38, 1e-45, -1e-45])
numbers = st.one_of(special, st.floats(width=32), st.floats(-2, 2, width=16))


@settings(max_examples=200)
@given(st.lists(st.lists(numbers, min_size=8, max_size=8), min_size=1, max_size=4),
       st.sampled_from([1, 2, 4, 8]))
def test_greedy_choice_of_any_logits(rows: list[list[float]], ranks: int) -> None:
    assert chosen(torch.tensor(rows), ranks) == [pick(row) for row in torch.tensor(rows).tolist()]


def test_greedy_choice_edge_by_edge() -> None:
    rows = {
        "nan before the largest": ([NAN, 1.0, 2.0, NAN], 2),
        "nothing but nan": ([NAN, NAN, NAN, NAN], 0),
        "minus infinity beats nan": ([NAN, NAN, NAN, -INF], 3),
        "a tie": ([1.0, 7.0, 7.0, 7.0], 1),
        "zeros of both signs are equal": ([-0.0, 0.0, -1.0, -0.0], 0),
        "negative numbers in order": ([-3.0, -2.0, -1.0, -2.0], 2),
    }
    for name, (row, want) in rows.items():
        for ranks in (1, 2, 4):
            assert chosen(torch.tensor([row]), ranks) == [want], name


def test_greedy_choice_over_the_real_vocabulary() -> None:
    logits = randn(3, 163_840, seed=8)
    logits[1, [5, 163_839]] = 9.0
    logits[2, 163_839] = 9.0
    for ranks in (1, 16):
        assert chosen(logits, ranks) == [int(logits[0].argmax()), 5, 163_839]


def test_padding_rows_have_no_token() -> None:
    key = argmax_key(torch.tensor([[1.0, 2.0], [NAN, NAN], [0.0, 0.0]]), torch.zeros(1, dtype=torch.int32))
    assert token_of_key(key, torch.tensor([4, 0, -1])).tolist() == [1, 0, -1]


# attention residuals, norms, activations


@pytest.mark.parametrize("blocks", range(9))
def test_attn_res(blocks: int) -> None:
    rows, width, eps = 5, 48, 1e-5
    score = randn(width, seed=1, scale=2 * width**-0.5)
    prefix, *others = (randn(rows, width, seed=10 + i, scale=1.0 + i) for i in range(blocks + 1))
    want = torch.empty(rows, width, dtype=torch.float64)
    for t in range(rows):
        sources = [x[t].double() for x in (*others, prefix)]
        scores = [float(v @ score.double()) / math.sqrt(float(v @ v) / width + eps) for v in sources]
        top = max(scores)
        powers = [math.exp(s - top) for s in scores]
        want[t] = sum(p / sum(powers) * v for p, v in zip(powers, sources, strict=True))
    got = attn_res(score, prefix, *others, eps=eps)
    if blocks == 0:
        assert torch.equal(got, prefix)
    assert_close(got.double(), want, **CLOSE)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_rms_norms(scale: float) -> None:
    x, weight, gate = randn(7, 96, seed=1, scale=scale), randn(96, seed=2), randn(7, 96, seed=3, scale=3)
    want = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert_close(rms_norm(x, weight, eps=1e-5).double(), want, **CLOSE)
    heads = x.double().view(7, 3, 32)
    normed = heads / (heads.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight[:32].double()
    want = normed.view(7, 96) / (1 + torch.exp(-gate.double()))
    assert_close(gated_rms_norm(x, gate, weight[:32], eps=1e-5).double(), want, **CLOSE)


def test_activations() -> None:
    gate, up = torch.meshgrid(torch.linspace(-90, 90, 181), torch.linspace(-150, 150, 61), indexing="ij")
    g, u = gate.double(), up.double()
    sigmoid = 1 / (1 + torch.exp(-g))
    want = 4 * torch.tanh(g / 4) * sigmoid * 25 * torch.tanh(u / 25)
    assert_close(situ_and_mul(gate, up, beta=4.0, linear_beta=25.0).double(), want, **CLOSE)
    assert_close(silu_and_mul(gate, up).double(), g * sigmoid * u, **CLOSE)
    assert_close(sigmoid_mul(up, gate).double(), u * sigmoid, **CLOSE)


def test_products_of_bf16_are_summed_in_fp32() -> None:
    x, w = randn(5, 4096, seed=1).bfloat16(), randn(8, 4096, seed=2).bfloat16()
    got = linear(x, w, out_dtype="fp32")
    assert got.dtype == torch.float32
    assert_close(got.double(), x.double() @ w.double().T, rtol=1e-5, atol=1e-3)
    assert torch.equal(add(x, x), 2 * x.float())


# multi-head latent attention


@pytest.mark.parametrize("query", [1, 3])
def test_absorbed_attention_is_attention(query: int) -> None:
    """q against keys [W_UK latent | shared part] and values W_UV latent, head by head, row by row."""
    heads, nope, rope, rank, width, page = 3, 8, 4, 16, 6, 4
    history, scale = (5, 0), (nope + rope) ** -0.5
    table = torch.tensor([[3, 0, 2], [1, 4, 5]], dtype=torch.int32)
    cache = torch.full((7, page, rank + rope), NAN)
    w_uk, w_uv = randn(heads, nope, rank, seed=1, scale=0.4), randn(heads, width, rank, seed=2)
    total = [h + query for h in history]
    latent = [randn(n, rank, seed=3 + i) for i, n in enumerate(total)]
    shared = [randn(n, rope, seed=5 + i) for i, n in enumerate(total)]
    q = randn(2 * query, heads * (nope + rope), seed=7, scale=2)
    for at in range(max(history)):
        live = [at < h for h in history]
        row = [x[at] if alive else torch.full_like(x[0], NAN) for x, alive in zip(latent, live, strict=True)]
        key = [x[at] if alive else torch.full_like(x[0], NAN) for x, alive in zip(shared, live, strict=True)]
        mla_append(torch.stack(row), torch.stack(key), cache, torch.tensor([at if a else -1 for a in live]),
                   table, query=1, kv_scale=1.0)
    positions = torch.tensor([h + t for h in history for t in range(query)])
    new = [torch.cat([x[-query:] for x in both]) for both in (latent, shared)]
    mla_append(*new, cache, positions, table, query=query, kv_scale=1.0)
    rows = mla_absorb_q(q, w_uk)
    mixed = mla_attend(rows, cache, positions, table, query=query, latent=rank, scale=scale, kv_scale=1.0)
    got = mla_absorb_v(mixed, w_uv)
    for s in range(2):
        for t in range(query):
            for h in range(heads):
                asked = q[s * query + t].view(heads, -1)[h].double()
                seen = range(history[s] + t + 1)
                keys = [torch.cat([w_uk[h].double() @ latent[s][p].double(), shared[s][p].double()])
                        for p in seen]
                powers = torch.softmax(torch.stack([asked @ k for k in keys]) * scale, 0)
                want = sum(power * (w_uv[h].double() @ latent[s][p].double())
                           for power, p in zip(powers, seen, strict=True))
                mine = got[s * query + t].view(heads, width)[h].double()
                assert_close(mine, want, **CLOSE)


@pytest.mark.parametrize("scale", [0.06, 1.0, 4.0])
def test_a_cache_of_fp8_saturates_and_is_scaled(scale: float) -> None:
    cache = torch.zeros(3, 4, 3).to(torch.float8_e4m3fn)
    rows = torch.tensor([[1.0, 1e4], [-0.3, -1e4]])
    mla_append(rows, torch.tensor([[0.1], [7.0]]), cache, torch.tensor([1, 2]),
               torch.tensor([[0], [1]], dtype=torch.int32), query=1, kv_scale=scale)
    stored = cache.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    values = np.array([[1.0, 1e4, 0.1], [-0.3, -1e4, 7.0]], np.float32) / np.float32(scale)
    want = values.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(stored[[0, 1], [1, 2]], want)


# experts


def expert_matrices(form: str, experts: int, rows: int, columns: int, seed: int
                    ) -> tuple[list[Tensor], Tensor]:
    """Operands of an expert op ([packed, scale] or [plain]) and their meaning, float64 [E, rows, columns]."""
    plain = randn(experts, rows, columns, seed=seed, scale=columns**-0.5)
    if form == "dense":
        return [plain], plain.double()
    packed, scale = pack_mxfp4(plain)
    return [packed, scale], unpack_mxfp4(packed, scale).double()


def expert_ids(kind: str, rows: int, experts: int) -> Tensor:
    if kind == "all_to_one":
        return torch.full((rows, 1), experts - 1, dtype=torch.int32)
    g = torch.Generator().manual_seed(rows)
    return torch.stack([torch.randperm(experts, generator=g)[:3] for _ in range(rows)]).int()


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("form", ["dense", "mxfp4"])
@pytest.mark.parametrize("rows", [1, 3, 5, 17, 33])
@pytest.mark.parametrize("kind", ["random", "all_to_one"])
def test_experts(form: str, rows: int, kind: str, ranks: int) -> None:
    """Whole experts on each of ``ranks``; their sum is what every row's experts make one by one."""
    experts, width, inner = 8, 64, 32
    x, ids = randn(rows, width, seed=rows), expert_ids(kind, rows, experts)
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1))
    w1, true1 = expert_matrices(form, experts, inner, width, 1)
    w3, true3 = expert_matrices(form, experts, inner, width, 2)
    w2, true2 = expert_matrices(form, experts, width, inner, 3)
    attrs = {"experts": experts, "format": form, "activation": "bf16"}
    parts, local = [], experts // ranks
    for rank in range(ranks):
        here = slice(rank * local, (rank + 1) * local)
        number = torch.tensor([rank], dtype=torch.int32)
        both = [part[here] for pair in zip(w1, w3, strict=True) for part in pair]
        gate, up = experts_gate_up(x, ids, number, *both, **attrs)
        absent = (ids < here.start) | (ids >= here.stop)
        assert torch.count_nonzero(gate[absent]) == torch.count_nonzero(up[absent]) == 0
        y = experts_down(silu_and_mul(gate, up), ids, number, *(w[here] for w in w2), **attrs)
        parts.append(experts_combine(y, weights))
    want = torch.zeros(rows, width, dtype=torch.float64)
    for t in range(rows):
        for j, e in enumerate(ids[t].tolist()):
            gate64, up64 = true1[e] @ x[t].double(), true3[e] @ x[t].double()
            want[t] += weights[t, j].double() * (true2[e] @ (gate64 / (1 + torch.exp(-gate64)) * up64))
    assert_close(all_reduce(parts, ranks=ranks)[0].double(), want, rtol=1e-4, atol=1e-6)


def test_experts_read_mxfp8_rows_when_asked() -> None:
    x, ids, rank = randn(3, 64), expert_ids("random", 3, 8), torch.zeros(1, dtype=torch.int32)
    w1, w3, w2 = randn(8, 32, 64, seed=1), randn(8, 32, 64, seed=2), randn(8, 64, 32, seed=3)
    plain = {"experts": 8, "format": "dense", "activation": "bf16"}
    rounded = plain | {"activation": "mxfp8"}
    for got, want in zip(experts_gate_up(x, ids, rank, w1, w3, **rounded),
                         experts_gate_up(round_to_mxfp8(x), ids, rank, w1, w3, **plain), strict=True):
        assert torch.equal(got, want)
    act = randn(3, 3, 32, seed=4)
    got = experts_down(act, ids, rank, w2, **rounded)
    assert torch.equal(got, experts_down(round_to_mxfp8(act), ids, rank, w2, **plain))
    assert not torch.equal(got, experts_down(act, ids, rank, w2, **plain))


# MXFP8


def by_ml_dtypes(x: np.ndarray) -> np.ndarray:
    """fp32 [n, 32]: the exponent by exact comparison, the elements by ml_dtypes."""
    out = np.empty_like(x)
    for row, group in enumerate(x):
        largest = float(np.abs(group).max())
        scale = min((s for s in range(-127, 128) if largest <= E4M3_MAX * 2.0**s), default=127)
        scaled = (group.astype(np.float64) / 2.0**scale).clip(-E4M3_MAX, E4M3_MAX)
        out[row] = scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * 2.0**scale
    return out


def groups_of(exponents: st.SearchStrategy[int]) -> st.SearchStrategy[np.ndarray]:
    """fp32 [1, 32] with a common exponent."""
    elements = st.lists(st.floats(-8, 8, width=32), min_size=GROUP, max_size=GROUP)

    def scaled(exponent: int, values: list[float]) -> np.ndarray:
        return np.ldexp(np.array([values], np.float32), exponent).astype(np.float32)

    return st.builds(scaled, exponents, elements)


@settings(max_examples=150)
@given(groups_of(st.integers(-130, 124)))
def test_mxfp8_is_ml_dtypes_and_idempotent(x: np.ndarray) -> None:
    got = round_to_mxfp8(torch.from_numpy(x))
    assert np.array_equal(got.numpy(), by_ml_dtypes(x))
    assert torch.equal(round_to_mxfp8(got), got)


@pytest.mark.parametrize("above", [False, True], ids=["just_fits", "one_ulp_above"])
def test_mxfp8_exponent_at_every_power_of_two(above: bool) -> None:
    """448 * 2^k fits the scale 2^k; the next fp32 number needs 2^(k + 1), as the smallest element shows."""
    exponents = np.arange(-118, 119)
    x = np.zeros((len(exponents), GROUP), np.float32)
    x[:, 0] = np.ldexp(np.float32(E4M3_MAX), exponents)
    if above:
        x[:, 0] = np.nextafter(x[:, 0], np.float32(INF))
    x[:, 1] = np.ldexp(np.float32(2.0**-9), exponents)  # the least subnormal of scale 2^k
    got = round_to_mxfp8(torch.from_numpy(x)).numpy()
    assert np.array_equal(got, by_ml_dtypes(x))
    assert np.array_equal(got[:, 1] == x[:, 1], np.full(len(exponents), not above))


def test_mxfp8_extremes() -> None:
    x = torch.zeros(4, GROUP)
    x[1, 0] = 1.9 * 2.0**127  # above it is 2^128, which fp32 does not have
    x[2, 0] = 2.0**-149
    x[3, 3] = -0.0
    got = round_to_mxfp8(x)
    assert got[1, 0] == 1.875 * 2.0**127
    assert not torch.count_nonzero(got[[0, 2, 3]])
    assert got.isfinite().all()
    x[0, :2] = torch.tensor([NAN, 1.0])
    x[1, 0] = -INF
    got = round_to_mxfp8(x)
    assert got[0, 0].isnan()
    assert got[1, 0] == -INF
