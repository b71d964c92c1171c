"""The KDA ops against the functions of transformers' Kimi-Linear, and verify steps against one-row steps."""
from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from k3plan.compiler.ops.kda import kda_conv, kda_delta_rule, kda_gate, kda_verify
from k3plan.compiler.ops.norm import gated_rms_norm

hf = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")

HEADS, WIDTH, TAPS = 3, 16, 4
CHANNELS = HEADS * WIDTH
EPS = 1e-5
# fp32 against fp32 over a few dozen steps: only the order of sums differs
CLOSE: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-6}


def test_the_reference_is_the_plain_torch_path() -> None:
    assert importlib.util.find_spec("fla") is None, (
        "flash-linear-attention is installed: transformers then takes its Triton kernels, which fail on a CPU"
    )


@dataclass(frozen=True)
class Rows:
    """Inputs of the ops for a text: q, k, v, raw gate and output gate [S, T, P], beta [S, T, H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    raw: Tensor
    gate: Tensor
    beta: Tensor

    @classmethod
    def random(cls, sequences: int, rows: int, seed: int) -> Rows:
        g = torch.Generator().manual_seed(seed)
        q, k, v, raw, gate = (torch.randn(sequences, rows, CHANNELS, generator=g) for _ in range(5))
        return cls(q, k, v, 3 * raw, gate, 2 * torch.randn(sequences, rows, HEADS, generator=g))

    def at(self, t: int) -> Rows:
        """Row t of every sequence."""
        return Rows(*(x[:, t] for x in vars(self).values()))


@dataclass(frozen=True)
class Weights:
    """Weights fp32: three convolutions [P, W], a_log [H], dt_bias [P], output norm [K]."""

    conv: tuple[Tensor, Tensor, Tensor]
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor

    @classmethod
    def random(cls, seed: int = 7) -> Weights:
        g = torch.Generator().manual_seed(seed)
        q, k, v = (0.4 * torch.randn(CHANNELS, TAPS, generator=g) for _ in range(3))
        return cls((q, k, v), 0.5 * torch.randn(HEADS, generator=g), torch.randn(CHANNELS, generator=g) - 2,
                   1 + 0.2 * torch.randn(WIDTH, generator=g))


class OneRow:
    """Our ops, one row of each sequence a step. ``slots`` may be permuted; -1 sits out."""

    def __init__(self, sequences: int, weights: Weights, lower_bound: float | None) -> None:
        self.weights, self.lower_bound = weights, lower_bound
        self.window = torch.zeros(sequences + 1, TAPS - 1, 3 * CHANNELS)
        self.state = torch.zeros(sequences + 1, HEADS, WIDTH, WIDTH)

    def step(self, x: Rows, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The delta rule's output [S, P] and what the gated norm makes of it [S, P]."""
        w = self.weights
        positions = torch.where(slots < 0, -1, 0)
        q, k, v, _ = kda_conv(x.q, x.k, x.v, self.window, *w.conv, slots, positions, query=1)
        decay = kda_gate(x.raw, w.a_log, w.dt_bias, lower_bound=self.lower_bound)
        out, _ = kda_delta_rule(q, k, v, decay, x.beta, self.state, slots, positions)
        return out, gated_rms_norm(out, x.gate, w.norm, eps=EPS)


class Transformers:
    """The same by transformers' functions; ``log_decay`` is its own forget gate unless given."""

    def __init__(self, sequences: int, weights: Weights) -> None:
        self.weights = weights
        self.window = torch.zeros(sequences, 3 * CHANNELS, TAPS - 1)
        self.state = torch.zeros(sequences, HEADS, WIDTH, WIDTH)  # [S, H, K, V]
        self.gate = hf.KimiLinearForgetGate(
            SimpleNamespace(linear_head_dim=WIDTH, linear_num_heads=HEADS, hidden_size=CHANNELS))
        # the projections are tested with the whole model: here the raw gate passes through unchanged
        self.gate.f_a_proj = self.gate.f_b_proj = torch.nn.Identity()
        self.norm = hf.KimiLinearRMSNormGated(WIDTH, eps=EPS)
        with torch.no_grad():
            self.gate.dt_bias.copy_(weights.dt_bias)
            self.gate.A_log.copy_(weights.a_log.view(1, 1, HEADS, 1))
            self.norm.weight.copy_(weights.norm)

    @torch.no_grad()
    def step(self, x: Rows, log_decay: Tensor | None = None) -> tuple[Tensor, Tensor]:
        mixed = torch.cat([x.q, x.k, x.v], -1)[:, :, None]
        mixed = hf.causal_conv1d_update(mixed, self.window, torch.cat(self.weights.conv), None, "silu")
        q, k, v = (part.unflatten(-1, (HEADS, WIDTH)) for part in mixed.transpose(1, 2).split(CHANNELS, -1))
        if log_decay is None:
            log_decay = self.gate(x.raw[:, None])
        out, self.state = hf.recurrent_kimi_delta_attention(
            q, k, v, g=log_decay.view(-1, 1, HEADS, WIDTH), beta=torch.sigmoid(x.beta)[:, None],
            initial_state=self.state, output_final_state=True, use_qk_l2norm_in_kernel=True)
        normed = self.norm(out, x.gate.view(-1, 1, HEADS, WIDTH))
        return out.flatten(1), normed.flatten(1)


def bounded_gate(raw: Tensor, weights: Weights, bound: float) -> Tensor:
    """K3's log decay [S, P] in float64, element by element as the formula is written."""
    out = torch.empty(raw.shape, dtype=torch.float64)
    for c in range(CHANNELS):
        rate = weights.a_log[c // WIDTH].double().exp()
        x = rate * (raw[:, c].double() + weights.dt_bias[c].double())
        out[:, c] = bound / (1 + torch.exp(-x))
    return out


@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["softplus", "lower_bound"])
def test_one_row_steps(lower_bound: float | None) -> None:
    sequences, weights = 4, Weights.random()
    text = Rows.random(sequences, 24, seed=1)
    slots = torch.tensor([2, 0, 3, 1], dtype=torch.int32)
    ours, theirs = OneRow(sequences, weights, lower_bound), Transformers(sequences, weights)
    for t in range(24):
        x = text.at(t)
        decay = None if lower_bound is None else bounded_gate(x.raw, weights, lower_bound)
        for got, want in zip(ours.step(x, slots), theirs.step(x, decay), strict=True):
            assert_close(got, want, **CLOSE)
        assert torch.equal(ours.window[slots], theirs.window.transpose(1, 2)), "raw inputs, oldest first"
        assert_close(ours.state[slots], theirs.state.transpose(2, 3), **CLOSE)
    assert theirs.state.abs().max() > 0.1, "the state must be worth comparing"


@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["softplus", "lower_bound"])
def test_gate_over_its_whole_range(lower_bound: float | None) -> None:
    weights = Weights.random()
    raw = torch.linspace(-150, 150, 301)[:, None].expand(-1, CHANNELS).contiguous()
    got = kda_gate(raw, weights.a_log, weights.dt_bias, lower_bound=lower_bound)
    if lower_bound is None:
        want = Transformers(1, weights).gate(raw[:, None]).flatten(1).detach()
    else:
        want = bounded_gate(raw, weights, lower_bound).float()
        assert got.min() >= lower_bound
    assert got.max() <= 0
    assert_close(got, want, rtol=2e-5, atol=1e-6)


def test_gated_norm() -> None:
    g = torch.Generator().manual_seed(3)
    x, gate = 5 * torch.randn(6, CHANNELS, generator=g), 4 * torch.randn(6, CHANNELS, generator=g)
    weight = torch.randn(WIDTH, generator=g)
    norm = hf.KimiLinearRMSNormGated(WIDTH, eps=EPS)
    norm.weight.data.copy_(weight)
    want = norm(x.unflatten(-1, (HEADS, WIDTH)), gate.unflatten(-1, (HEADS, WIDTH))).flatten(1).detach()
    assert_close(gated_rms_norm(x, gate, weight, eps=EPS), want, rtol=1e-5, atol=1e-6)


def same_bytes(left: Tensor, right: Tensor) -> bool:
    """Equality that NaN passes too."""
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


class Verify:
    """Our ops over ``query`` rows of each sequence a step."""

    def __init__(self, sequences: int, weights: Weights, lower_bound: float | None, query: int) -> None:
        self.weights, self.lower_bound, self.query = weights, lower_bound, query
        self.window = torch.zeros(sequences + 1, TAPS + query - 2, 3 * CHANNELS)
        self.state = torch.zeros(sequences + 1, HEADS, WIDTH, WIDTH)
        self.record = torch.zeros(sequences + 1, query, 3, HEADS, WIDTH)

    def step(self, x: Rows, live: Tensor, slots: Tensor, accepted: Tensor) -> Tensor:
        """Output [S, L, P] of rows [S, L, ...]; ``live`` [S] rows of each sequence, the rest is padding."""
        w, shape = self.weights, {"query": self.query}
        positions = torch.where(torch.arange(self.query) < live[:, None], 0, -1).flatten()
        q, k, v, raw, _, beta = (part.flatten(0, 1) for part in vars(x).values())
        q, k, v, _ = kda_conv(q, k, v, self.window, *w.conv, slots, positions, accepted, **shape)
        decay = kda_gate(raw, w.a_log, w.dt_bias, lower_bound=self.lower_bound)
        out, _, _ = kda_verify(
            q, k, v, decay, beta, self.state, self.record, slots, positions, accepted, **shape)
        return out.unflatten(0, (-1, self.query))


@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["softplus", "lower_bound"])
@pytest.mark.parametrize("query", range(2, 9))
def test_verify_steps_against_one_row_steps(query: int, lower_bound: float | None) -> None:
    """Sequence i accepts 1 + (i + step) % query rows, so that each step meets every count; drafts behind them
    are wrong. One sequence sits out each step, and the last one feeds fewer rows than it may."""
    sequences, steps, weights = query + 2, 6, Weights.random()
    text = Rows.random(sequences, steps * query + query, seed=query)
    wrong = Rows.random(sequences, query, seed=100 + query)
    slots = torch.roll(torch.arange(sequences), 2).int()
    one, many = (OneRow(sequences, weights, lower_bound), Verify(sequences, weights, lower_bound, query))
    length, kept = [0] * sequences, torch.ones(sequences, dtype=torch.int32)
    for step in range(steps):
        out_of_step = step % sequences
        live = torch.full((sequences,), query)
        live[-1] = 1 + step % query
        live[out_of_step] = 0
        count = torch.tensor([1 + (i + step) % query for i in range(sequences)]).minimum(live)
        fed = Rows(*(x.clone() for x in vars(wrong).values()))
        for i in range(sequences):
            for mine, true in zip(vars(fed).values(), vars(text).values(), strict=True):
                mine[i, : count[i]] = true[i, length[i] : length[i] + int(count[i])]
                mine[i, live[i] :] = torch.nan  # padding rows hold anything
        before = many.state.clone(), many.record.clone(), many.window.clone()
        now = torch.where(live > 0, slots, -1)
        out = many.step(fed, live, now, kept)
        assert not torch.count_nonzero(out[torch.arange(query) >= live[:, None]])
        for mine, old in zip((many.state, many.record, many.window), before, strict=True):
            assert same_bytes(mine[slots[out_of_step]], old[slots[out_of_step]])
        at_start = one.state.clone(), one.window.clone()
        for i in range(sequences):
            row_slot = torch.full((1,), int(slots[i]), dtype=torch.int32)
            for t in range(int(count[i])):
                x = Rows(*(part[i : i + 1, length[i] + t] for part in vars(text).values()))
                assert_close(out[i, t : t + 1], one.step(x, row_slot)[0], **CLOSE)
            length[i] += int(count[i])
        # the state and the window that this step started from are those of the rows accepted before it
        here = slots[live > 0].long()
        assert_close(many.state[here], at_start[0][here], **CLOSE)
        history = many.window[here, : TAPS - 2]
        assert torch.equal(history, at_start[1][here, 1:]), "history before the rows of this step"
        kept = torch.where(live > 0, count, kept).int()


def test_a_verify_step_of_one_row_is_the_one_row_step() -> None:
    weights, sequences = Weights.random(), 3
    text = Rows.random(sequences, 8, seed=5)
    slots = torch.arange(sequences, dtype=torch.int32)
    one, many = OneRow(sequences, weights, -5.0), Verify(sequences, weights, -5.0, 1)
    ones = torch.ones(sequences, dtype=torch.int32)
    for t in range(8):
        x = text.at(t)
        many_rows = Rows(*(part[:, None] for part in vars(x).values()))
        assert_close(many.step(many_rows, ones, slots, ones)[:, 0], one.step(x, slots)[0], **CLOSE)
