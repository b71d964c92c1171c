"""The one-op kernels at their edges: special values, padding, strides, slots, and several steps over one state.

One launch on each planned region is tested by ``test_kernels.py``.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from k3plan.compiler.call import Call
from k3plan.compiler.ops.head import argmax_key, embed, token_of_key
from k3plan.compiler.ops.kda import kda_conv, kda_delta_rule, kda_gate, kda_verify
from k3plan.compiler.ops.linear import situ_and_mul
from k3plan.ops_triton import head, kda_parts, pointwise

I32, BF16 = torch.int32, torch.bfloat16
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def launch(bind: Any, tensors: Mapping[str, Tensor], device: str, attrs: Mapping[str, Any] | None = None,
           config: Mapping[str, Any] | None = None, scratch: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Runs a kernel on copies of ``tensors`` on the device and returns them."""
    own = {name: _copy(t, device) for name, t in tensors.items()}
    workspace = {name: t.to(device) for name, t in (scratch or {}).items()}
    bind(Call(own, attrs=attrs or {}, config=config or {}, scratch=workspace))()
    return {name: t.cpu() for name, t in own.items()}


def _copy(tensor: Tensor, device: str) -> Tensor:
    """With the same strides."""
    size = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return torch.empty(size, dtype=tensor.dtype, device=device).as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def special_logits() -> Tensor:
    """Rows in which ties, signs of zero, infinities and NaN decide."""
    x = torch.randn(7, 300, generator=torch.Generator().manual_seed(0)) - 50
    x[0, [5, 120, 299]] = 3.0
    x[1] = -0.0
    x[1, 40] = 0.0
    x[2] = torch.nan
    x[3] = -torch.inf
    x[4] = torch.nan
    x[4, 250] = -torch.inf
    x[5, 299] = torch.inf
    x[6] = torch.tensor(-1e-45)
    return x


def test_greedy_choice_of_special_rows(device: str) -> None:
    logits, rank = special_logits(), torch.tensor([3], dtype=I32)
    found = launch(head.bind_key, {"logits": logits, "rank": rank, "key": torch.full((7,), -1)}, device,
                   config={"warps": 4})
    assert torch.equal(found["key"], argmax_key(logits, rank))
    positions = torch.tensor([0, 1, 2, 3, 4, -1, 6], dtype=I32)
    tokens = launch(head.bind_token, {"key": found["key"], "positions": positions,
                                      "token": torch.full((7,), -7, dtype=I32)}, device)["token"]
    assert torch.equal(tokens, token_of_key(found["key"], positions))
    # ties and rows without a number take the lowest id of the shard
    assert [token - 900 if token >= 0 else token for token in tokens.tolist()] == [5, 0, 0, 0, 250, -1, 0]


def test_embedding_of_padding_and_of_other_shards_is_zero(device: str) -> None:
    table = torch.randn(50, 72).to(BF16)
    tokens, rank = torch.tensor([-1, 0, 49, 50, 99, 100, 149, -1], dtype=I32), torch.tensor([1], dtype=I32)
    y = launch(head.bind_embed, {"tokens": tokens, "table": table, "rank": rank,
                                 "rows": torch.full((8, 72), torch.nan, dtype=BF16)}, device,
               config={"columns": 64, "warps": 2})["rows"]
    assert torch.equal(y.float(), embed(tokens, table, rank, out_dtype="bf16"))
    assert [row for row in range(8) if y[row].any()] == [3, 4]


@pytest.mark.parametrize("shape", [(3, 5, 40), (6, 40), (33, 7)])
def test_activation_of_strided_rows_with_large_values(device: str, shape: tuple[int, ...]) -> None:
    wide = torch.randn(*shape[:-1], 2 * shape[-1]) * torch.tensor([1.0, 100.0]).repeat(shape[-1])
    gate, up = wide.chunk(2, -1)
    if len(shape) == 3:  # only matrices are views
        gate, up = gate.contiguous(), up.contiguous()
    y = launch(pointwise.bind, {"gate": gate, "up": up, "y": torch.full(shape, torch.nan)}, device,
               {"y": {"beta": 4.0, "linear_beta": 25.0}}, {"rows": 2, "columns": 16, "warps": 1})["y"]
    torch.testing.assert_close(y, situ_and_mul(gate, up, beta=4.0, linear_beta=25.0), **CLOSE)


@pytest.mark.parametrize("bound", [-5.0, None])
def test_log_decay_far_from_zero(device: str, bound: float | None) -> None:
    raw = torch.tensor([-200.0, -30.0, -5.0, 0.0, 5.0, 19.99, 20.01, 200.0]).repeat(2, 4)
    a_log, bias = torch.tensor([-1.0, 1.5]), torch.zeros(32)
    decay = launch(kda_parts.bind_gate, {"raw": raw, "a_log": a_log, "dt_bias": bias,
                                         "decay": torch.full((2, 32), torch.nan)}, device,
                   {"decay": {"lower_bound": bound}}, {"rows": 1, "columns": 16, "warps": 1})["decay"]
    torch.testing.assert_close(decay, kda_gate(raw, a_log, bias, lower_bound=bound), rtol=1e-5, atol=1e-30)


HEADS, WIDTH, CHANNELS = 2, 16, 32


def step_rows(seed: int, sequences: int, query: int) -> dict[str, Tensor]:
    """Rows of one step; q, k and v are views of one projection, the last row of sequence 0 is padding."""
    random = torch.Generator().manual_seed(seed)
    wide = torch.randn(sequences * query, 3 * CHANNELS + 8, generator=random)
    rows = {n: wide[:, i * CHANNELS: (i + 1) * CHANNELS] for i, n in enumerate("qkv")}
    rows["log_decay"] = -torch.rand(sequences * query, CHANNELS, generator=random)
    rows["beta"] = torch.randn(sequences * query, HEADS, generator=random)
    positions = torch.arange(sequences * query, dtype=I32)
    if query > 1:
        positions[query - 1] = -1
    positions[-query:] = -1  # the last sequence is padding
    rows["positions"] = positions
    rows["accepted"] = torch.randint(1, query + 1, (sequences,), generator=random, dtype=I32)
    return rows


SLOTS = torch.tensor([4, 0, -1], dtype=I32)


@pytest.mark.parametrize("query", [1, 2, 5])
def test_windows_over_several_steps(device: str, query: int) -> None:
    weights = {f"weight_{n}": torch.randn(CHANNELS, 4) for n in "qkv"}
    window = torch.randn(6, query + 2, 3 * CHANNELS)
    window[5] = torch.nan  # scratch
    expected = window.clone()
    for seed in range(3):
        rows = step_rows(seed, 3, query)
        after = {"accepted": rows["accepted"]} if query > 1 else {}
        inputs = {n: rows[n] for n in "qkv"}
        before = window.clone()
        found = launch(kda_parts.bind_conv, {
            **inputs, **weights, "window": window, "slots": SLOTS, "positions": rows["positions"], **after,
            **{f"{n}_act": torch.full((3 * query, CHANNELS), torch.nan) for n in "qkv"}}, device,
            {"q_act": {"query": query}}, {"channels": 16, "warps": 1})
        *outs, expected = kda_conv(*inputs.values(), expected, *weights.values(), SLOTS, rows["positions"],
                                   *after.values(), query=query)
        window = found["window"]
        for name, out in zip("qkv", outs, strict=True):
            torch.testing.assert_close(found[f"{name}_act"], out, **CLOSE)
        assert torch.equal(window[:5], expected[:5])
        assert torch.equal(window[1:4], before[1:4]), "slots of no sequence must keep their bytes"
        assert not found["q_act"][rows["positions"] < 0].any()


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("query", [0, 1, 5])
def test_states_over_several_steps(device: str, query: int, splits: int) -> None:
    """``query`` 0 is the op of one row, 1 a verify step of one row."""
    state = torch.randn(6, HEADS, WIDTH, WIDTH)
    record = 0.1 * torch.randn(6, max(query, 1), 3, HEADS, WIDTH)
    record[:, :, 2] = -record[:, :, 2].abs()
    state[2] = torch.nan  # another sequence's
    own_state, own_record = state.clone(), record.clone()
    for seed in range(3):
        rows = step_rows(seed, 3, max(query, 1))
        inputs = [rows[n] for n in ("q", "k", "v", "log_decay", "beta")]
        tensors = {**dict(zip(("q", "k", "v", "log_decay", "beta"), inputs, strict=True)), "state": state,
                   "slots": SLOTS, "positions": rows["positions"],
                   "o": torch.full((len(rows["beta"]), CHANNELS), torch.nan)}
        if query:
            tensors |= {"record": record, "accepted": rows["accepted"]}
            o, own_state, own_record = kda_verify(*inputs, own_state, own_record, SLOTS, rows["positions"],
                                                  rows["accepted"], query=query)
        else:
            o, own_state = kda_delta_rule(*inputs, own_state, SLOTS, rows["positions"])
        before = state.clone()
        found = launch(kda_parts.bind_rule, tensors, device, {"o": {"query": query} if query else {}},
                       {"splits": splits, "warps": 4}, {"arrivals": torch.zeros(3 * HEADS, dtype=I32)})
        state = found["state"]
        torch.testing.assert_close(found["o"], o, **CLOSE)
        torch.testing.assert_close(state[[4, 0]], own_state[[4, 0]], **CLOSE)
        assert torch.equal(state[[1, 3]], before[[1, 3]]), "slots of no sequence must keep their bytes"
        assert not found["o"][rows["positions"] < 0].any()
        if query:
            record = found["record"]
            torch.testing.assert_close(record[[4, 0]], own_record[[4, 0]], **CLOSE)
