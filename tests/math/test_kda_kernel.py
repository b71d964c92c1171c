"""The KDA kernel over several steps: slots, padding, ragged rows, partial acceptance, and what it must not touch.

One launch on each planned region is tested by ``test_kernels.py``; here the same bound launch runs step after step
and its states go on from its own, while the ops run beside it in fp32.
"""
from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from k3plan.compiler.call import Call, Launch
from k3plan.compiler.ops.kda import kda_conv, kda_delta_rule, kda_gate, kda_verify
from k3plan.compiler.ops.norm import gated_rms_norm
from k3plan.ops_triton.kda_decode import bind
from k3plan.ops_triton.kda_decode_menu import private_rows

TAPS, EPS = 4, 1e-5
BF16, FP32, I32 = torch.bfloat16, torch.float32, torch.int32
# y is rounded once to bf16; states differ by the order of fp32 sums, over several steps
CLOSE = {"y": {"rtol": 2.0**-7, "atol": 2e-3}, "state": {"rtol": 1e-4, "atol": 1e-5},
         "record": {"rtol": 1e-4, "atol": 1e-5}}
ROUGH = {"rtol": 2.0**-5, "atol": 2e-2}


@dataclass(frozen=True)
class Sizes:
    heads: int = 3
    width: int = 16
    query: int = 1
    slots: int = 5
    splits: int = 2
    lower_bound: float | None = -5.0
    state: torch.dtype = FP32

    @property
    def channels(self) -> int:
        return self.heads * self.width


class Layer:
    """Weights and states of one layer with a launch bound to them, and the ops on copies in fp32."""

    def __init__(self, sizes: Sizes, sequences: int, device: str, seed: int = 0) -> None:
        self.sizes, self.sequences, self.device = sizes, sequences, device
        self.random = torch.Generator().manual_seed(seed)
        self.tensors = {**self._weights(), **self._states(), **self._rows()}
        self.launch = self._bind()
        kept = ("window", "state", "record")
        self.own = {n: t.float().cpu().clone() for n, t in self.tensors.items() if n in kept}

    def _normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = FP32) -> Tensor:
        return (scale * torch.randn(*shape, generator=self.random)).to(self.device, dtype)

    def _weights(self) -> dict[str, Tensor]:
        s = self.sizes
        return {
            **{f"weight_{n}": self._normal(s.channels, TAPS, scale=0.4) for n in "qkv"},
            "f_b": self._normal(s.channels, s.width, scale=s.width**-0.5, dtype=BF16),
            "a_log": self._normal(s.heads, scale=0.5), "dt_bias": self._normal(s.channels) - 2,
            "norm": 1 + self._normal(s.width, scale=0.2),
        }

    def _states(self) -> dict[str, Tensor]:
        s = self.sizes
        found = {
            "window": self._normal(s.slots + 1, TAPS + s.query - 2, 3 * s.channels, dtype=BF16),
            "state": self._normal(s.slots + 1, s.heads, s.width, s.width, scale=0.3, dtype=s.state),
        }
        if s.query > 1:
            found["record"] = self._normal(s.slots + 1, s.query, 3, s.heads, s.width, scale=0.3)
            found["record"][:, :, 2] = -found["record"][:, :, 2].abs()
        return found

    def _rows(self) -> dict[str, Tensor]:
        """Slices of one wide projection, as the planner makes them; the row stride is odd."""
        s, rows = self.sizes, self.sequences * self.sizes.query
        widths = {"q": s.channels, "k": s.channels, "v": s.channels, "gate": s.channels, "f_a": s.width,
                  "beta": s.heads}
        total = sum(widths.values())
        self.wide = torch.zeros(rows, total + 1 - total % 2, dtype=BF16, device=self.device)
        found, start = {}, 0
        for name, width in widths.items():
            found[name] = self.wide[:, start : start + width]
            start += width
        found["y"] = torch.empty(rows, s.channels, dtype=BF16, device=self.device)
        index = {"slots": self.sequences, "positions": rows, "accepted": self.sequences}
        return found | {n: torch.zeros(c, dtype=I32, device=self.device) for n, c in index.items()}

    def _bind(self) -> Launch:
        s, n = self.sizes, self.sequences
        new = {"dtype": FP32, "device": self.device}
        scratch = {"arrivals": torch.zeros(n * s.heads, dtype=I32, device=self.device)}
        scratch["mixed"] = torch.full((n * s.query * s.channels * 4,), torch.nan, **new)
        if s.query > 1:
            scratch["private"] = torch.full(
                (n * s.heads * s.splits * private_rows(s.query, s.width, s.splits),), torch.nan, **new)
        attrs = {"q_act": {"query": s.query}, "decay": {"lower_bound": s.lower_bound}, "y": {"eps": EPS}}
        config = {"splits": s.splits, "warps": 4}
        self.arrivals = scratch["arrivals"]
        return bind(Call(self.tensors, attrs=attrs, scratch=scratch, config=config))

    def step(self, wide: Tensor, slots: Tensor, positions: Tensor, accepted: Tensor | None = None) -> Tensor:
        """One launch on these inputs; the output."""
        self.wide.copy_(wide)
        accepted = torch.ones_like(slots) if accepted is None else accepted
        for name, value in (("slots", slots), ("positions", positions), ("accepted", accepted)):
            self.tensors[name].copy_(value)
        self.tensors["y"].fill_(torch.nan)
        self.launch()
        assert not self.arrivals.any(), "the counters must be left at zero"
        return self.tensors["y"].float().cpu()

    def expect(self) -> Tensor:
        """The ops on the same inputs and on their own states."""
        s, t = self.sizes, {n: x.cpu() for n, x in self.tensors.items()}
        index = [t["slots"], t["positions"]] + ([t["accepted"]] if s.query > 1 else [])
        weights = (t["weight_q"], t["weight_k"], t["weight_v"])
        q, k, v, _ = kda_conv(t["q"].float(), t["k"].float(), t["v"].float(), self.own["window"], *weights, *index,
                              query=s.query)
        decay = kda_gate(t["f_a"].float() @ t["f_b"].float().T, t["a_log"], t["dt_bias"], lower_bound=s.lower_bound)
        beta = t["beta"].float()
        if s.query == 1:
            out, _ = kda_delta_rule(q, k, v, decay, beta, self.own["state"], *index)
        else:
            out, _, _ = kda_verify(q, k, v, decay, beta, self.own["state"], self.own["record"], *index, query=s.query)
        return gated_rms_norm(out, t["gate"], t["norm"], eps=EPS)

    def compare(self, got: Tensor, want: Tensor) -> None:
        """Output, window exactly, state and record; the last slot is scratch."""
        rough = self.sizes.state == BF16  # every step rounds the state
        torch.testing.assert_close(got, want, **(ROUGH if rough else CLOSE["y"]))
        for name, own in self.own.items():
            mine = self.tensors[name][:-1].float().cpu()
            if name == "window":
                assert torch.equal(mine, own[:-1]), "raw inputs are moved, not computed"
            else:
                close = ROUGH if rough else CLOSE[name]
                torch.testing.assert_close(mine, own[:-1], **close, msg=lambda text, name=name: f"{name}: {text}")


def random_wide(layer: Layer, seed: int) -> Tensor:
    return torch.randn(layer.wide.shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def positions_of(slots: Tensor, query: int, live: Tensor | None = None) -> Tensor:
    """Positions that only tell live rows from padding; ``live`` rows of each sequence."""
    row = torch.arange(query).expand(len(slots), query)
    alive = (slots >= 0)[:, None] & (row < (query if live is None else live[:, None]))
    return torch.where(alive, row, -1).flatten()


GRID = [
    Sizes(query=query, splits=splits, lower_bound=bound, heads=heads, width=width, state=state)
    for query, splits, bound, heads, width, state in (
        (1, 1, -5.0, 3, 16, FP32), (1, 4, -5.0, 3, 32, FP32), (1, 2, None, 2, 16, FP32), (1, 2, -5.0, 2, 16, BF16),
        (2, 1, -5.0, 3, 16, FP32), (5, 2, -5.0, 3, 16, FP32), (8, 4, -5.0, 2, 32, FP32), (8, 2, None, 1, 16, FP32),
        (3, 2, -5.0, 2, 16, BF16),
    )
]


def name_of(s: Sizes) -> str:
    gate = "softplus" if s.lower_bound is None else "bounded"
    return f"L{s.query}-H{s.heads}-D{s.width}-C{s.splits}-{gate}-{str(s.state)[6:]}"


@pytest.mark.parametrize("sizes", GRID, ids=name_of)
def test_steps(sizes: Sizes, device: str) -> None:
    """Permuted slots, one sequence without a slot, ragged rows and a hole in them, any number accepted."""
    layer = Layer(sizes, 4, device)
    for step in range(3):
        order = torch.randperm(sizes.slots, generator=layer.random)[:4]
        slots = torch.where(torch.arange(4) == step, -1, order)
        live = torch.randint(1, sizes.query + 1, (4,), generator=layer.random)
        accepted = torch.randint(1, sizes.query + 1, (4,), generator=layer.random)
        positions = positions_of(slots, sizes.query, live)
        positions[3 * sizes.query] = -1
        got = layer.step(random_wide(layer, step), slots, positions, accepted)
        layer.compare(got, layer.expect())
        assert not got[positions < 0].any(), "padding rows are zero"


@pytest.mark.parametrize("query", [2, 5, 8])
def test_drafts_against_one_row_steps(query: int, device: str) -> None:
    """A text, drafted ``query`` rows at a time of which some are kept, gives what one row a step gives."""
    sizes = Sizes(query=query, slots=2, heads=2)
    layer, plain = Layer(sizes, 1, device), Layer(Sizes(slots=2, heads=2), 1, "cpu")
    for name in ("window", "state", "record"):
        layer.tensors[name].zero_()
    plain.tensors |= {n: layer.tensors[n].cpu() for n in plain._weights()}
    plain.own = {n: torch.zeros_like(t) for n, t in plain.own.items()}
    text = torch.randn(3 * query, layer.wide.shape[1], generator=layer.random).to(BF16)
    slots = torch.tensor([1], dtype=I32)
    want = []
    for row in text:
        plain.wide.copy_(row)
        plain.tensors["slots"].copy_(slots)
        want.append(plain.expect())
    start, accepted = 0, 1  # accepted of a record of zeros changes nothing
    for step in range(3):
        drafts = text[start : start + query].clone()
        kept = (1 + query // 2 + step) % query + 1
        drafts[kept:] = 9.0  # wrong drafts
        got = layer.step(drafts, slots, positions_of(slots, query), torch.tensor([accepted]))
        torch.testing.assert_close(got[:kept], torch.cat(want[start : start + kept]), **CLOSE["y"])
        start, accepted = start + kept, kept


@pytest.mark.parametrize("query", [1, 4])
def test_other_sequences_do_not_matter(query: int, device: str) -> None:
    """NaN in one sequence's state and rows: the others' rows, and slots nobody names, keep every bit."""
    clean, dirty = (Layer(Sizes(query=query), 3, device) for _ in range(2))
    slots = torch.tensor([4, 1, 2])
    wide, positions = random_wide(clean, 1), positions_of(slots, query)
    dirty.tensors["state"][1] = torch.nan
    dirty.tensors["state"][3] = torch.nan  # nobody's
    unused = {n: dirty.tensors[n][[0, 3]].clone() for n in dirty.own}
    accepted = torch.full((3,), query)
    want = clean.step(wide, slots, positions, accepted)
    spoiled = wide.clone()
    spoiled[query : 2 * query] = torch.nan
    got = dirty.step(spoiled, slots, positions, accepted)
    others = [*range(query), *range(2 * query, 3 * query)]
    assert torch.equal(got[others], want[others])
    for name, before in unused.items():
        assert torch.equal(before.view(torch.uint8), dirty.tensors[name][[0, 3]].view(torch.uint8)), name
        assert torch.equal(dirty.tensors[name][[4, 2]], clean.tensors[name][[4, 2]]), name


@pytest.mark.parametrize("query", [1, 4])
def test_rows_beyond_the_accepted_are_not_read(query: int, device: str) -> None:
    """Whatever the record holds there, NaN too."""
    layer = Layer(Sizes(query=query), 2, device)
    slots = torch.tensor([3, -1])
    if query > 1:
        layer.tensors["record"][:, 2:] = torch.nan
    layer.tensors["window"][:, 2 + 3 :] = torch.nan  # inputs of rows beyond the second
    got = layer.step(random_wide(layer, 1), slots, positions_of(slots, query), torch.full((2,), min(2, query)))
    assert torch.isfinite(got).all()
    assert torch.isfinite(layer.tensors["state"]).all()
