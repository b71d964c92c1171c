"""Experts and router kernels where the generic check does not go: odd loads of experts, extreme numbers, absences.

The assembly that decodes weights cannot run here, so a small machine executes its text.
"""
from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from pack_mxfp4 import pack_mxfp4
from torch import Tensor

from k3plan.compiler.call import Call
from k3plan.compiler.ops import OPS
from k3plan.compiler.ops.mxfp4 import E2M1
from k3plan.compiler.ops.mxfp8 import round_to_mxfp8

SITU = {"beta": 4.0, "linear_beta": 25.0}
FORMS = ("split", "dedupe", "by_pair", "chained-dedupe")


@dataclass
class Experts:
    """Random experts and their meaning. ``rank`` of ``ranks`` holds a slice of them."""

    rows: int
    experts: int = 8
    top_k: int = 4
    width: int = 64
    inter: int = 96
    ranks: int = 1
    rank: int = 0
    activation: str = "bf16"
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def weights(*shape: int) -> tuple[Tensor, Tensor]:
            return pack_mxfp4(torch.randn(shape, generator=generator) * shape[-1] ** -0.5)

        local = self.experts // self.ranks
        self.w1, self.s1 = weights(local, self.inter, self.width)
        self.w3, self.s3 = weights(local, self.inter, self.width)
        self.w2, self.s2 = weights(local, self.width, self.inter)
        # a view: the rows of a merged projection
        self.x = torch.randn(self.rows, self.width + 32, generator=generator).bfloat16()[:, : self.width]
        self.ids = torch.stack([torch.randperm(self.experts, generator=generator)[: self.top_k]
                                for _ in range(self.rows)]).int()
        self.weights = torch.rand(self.rows, self.top_k, generator=generator) / self.top_k
        self.index = torch.tensor([self.rank], dtype=torch.int32)

    @property
    def attrs(self) -> dict[str, Any]:
        return {"experts": self.experts, "format": "mxfp4", "activation": self.activation}

    def exact(self, *, rounded: bool) -> tuple[Tensor, Tensor]:
        """Activations and output by the ops; ``rounded`` to bf16 after each."""
        store = (lambda t: t.bfloat16().float()) if rounded else (lambda t: t)
        gate, up = OPS["experts_gate_up"].fn(
            self.x, self.ids, self.index, self.w1, self.w3, self.s1, self.s3, **self.attrs)
        act = store(OPS["situ_and_mul"].fn(store(gate), store(up), **SITU))
        pairs = store(OPS["experts_down"].fn(act, self.ids, self.index, self.w2, self.s2, **self.attrs))
        return act, store(OPS["experts_combine"].fn(pairs, self.weights))


def nan(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def run(e: Experts, form: str) -> tuple[Tensor | None, Tensor]:
    """Activations (None when they stay inside) and output of one form, through outputs that held NaN."""
    from k3plan.ops_triton import moe_down_by_pair, moe_experts

    tensors = {name: getattr(e, name) for name in ("x", "ids", "w1", "w3", "s1", "s3", "w2", "s2", "weights")}
    tensors |= {"rank": e.index, "out": nan(e.rows, e.width)}
    attrs: dict[str, Any] = {"gate": e.attrs, "act": SITU}
    rest: dict[str, Any] = {"pairs": e.attrs, "out": {}}
    act = nan(e.rows, e.top_k, e.inter)
    # half of the second step of 64 rows is beyond 96
    config = {"rows": 64, "columns": 32, "steps": 2, "warps": 4, "dedupe": form.endswith("dedupe")}
    if form.startswith("chained"):
        scratch = {"act": act, "ready": torch.zeros(2, e.rows, dtype=torch.int32)}
        launch = moe_experts.bind(Call(tensors, attrs=attrs | rest, scratch=scratch, config=config))
        for _ in range(2):
            launch()
        assert not scratch["ready"].any()
        return None, tensors["out"]
    tensors["act"] = act
    moe_experts.bind(Call(tensors, attrs=attrs, config=config))()
    if form == "by_pair":
        partial = nan(e.rows * e.top_k, e.width, dtype=torch.float32)
        arrivals = torch.zeros(e.rows, -(-e.width // 64), dtype=torch.int32)
        launch = moe_down_by_pair.bind(Call(
            tensors, attrs=rest, scratch={"partial": partial, "arrivals": arrivals}, config={"columns": 64}))
        for _ in range(2):
            launch()
        assert not arrivals.any()
    else:
        moe_experts.bind(Call(tensors, attrs=rest, config=config))()
    return act, tensors["out"]


def check(e: Experts, form: str) -> None:
    act, out = run(e, form)
    exact, chain = e.exact(rounded=False), e.exact(rounded=True)
    for got, true, plain in ((act, exact[0], chain[0]), (out, exact[1], chain[1])):
        if got is None:
            continue
        assert got.isfinite().all()
        silent = true.flatten(0, -2).eq(0).all(-1)
        assert not got.flatten(0, -2)[silent].any(), "what absent experts add is zero"
        scale = true.square().mean().sqrt()
        error, allowed = (got.float() - true).square().mean().sqrt(), (plain - true).square().mean().sqrt()
        assert error <= 2 * allowed + 1e-3 * scale, f"{form}: rms error {error:.3g}, plain chain {allowed:.3g}"


@pytest.mark.parametrize("form", [*FORMS, "chained"])
@pytest.mark.parametrize("rows", [1, 5])
def test_rows(rows: int, form: str) -> None:
    check(Experts(rows), form)


@pytest.mark.parametrize("form", ["dedupe", "by_pair"])
def test_many_rows(form: str) -> None:
    check(Experts(17, top_k=2, inter=64), form)


@pytest.mark.parametrize("form", FORMS)
def test_all_rows_to_one_expert(form: str) -> None:
    e = Experts(8, experts=32, top_k=1)
    e.ids[:] = 29
    check(e, form)


@pytest.mark.parametrize("form", FORMS)
def test_same_experts_for_all_rows(form: str) -> None:
    e = Experts(5, experts=32)
    e.ids[:] = torch.tensor([31, 0, 7, 8])
    check(e, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rank", [0, 3])
def test_absent_experts_add_exact_zeros(rank: int, form: str) -> None:
    e = Experts(5, experts=16, ranks=4, rank=rank)
    e.ids[0] = torch.tensor([4, 5, 8, 11])  # nothing here on either rank
    e.ids[1] = torch.tensor([0, 1, 2, 3]) + 4 * rank
    act, out = run(e, form)
    assert not out[0].any()
    assert act is None or not act[0].any()
    check(e, form)


@pytest.mark.parametrize("form", FORMS)
def test_ids_out_of_range_are_nobodys(form: str) -> None:
    e = Experts(3)
    e.ids[1] = torch.tensor([-1, -(2**30), 2**30, 8])
    act, out = run(e, form)
    assert not out[1].any()
    assert act is None or not act[1].any()
    assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(32, 32), (96, 32), (256, 64), (64, 192)], ids=lambda s: f"D{s[0]}-I{s[1]}")
def test_widths(shape: tuple[int, int], form: str) -> None:
    check(Experts(2, width=shape[0], inter=shape[1], top_k=3), form)


@pytest.mark.parametrize("form", FORMS)
def test_mxfp8_rows(form: str) -> None:
    check(Experts(4, activation="mxfp8", seed=3), form)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_of_nan_stays_alone(form: str) -> None:
    e = Experts(4)
    e.ids[:] = torch.tensor([1, 2, 3, 4])
    clean = run(e, form)[1].clone()
    e.x = e.x.clone()
    e.x[2] = torch.nan
    out = run(e, form)[1]
    assert out[2].isnan().all()
    assert torch.equal(out[[0, 1, 3]], clean[[0, 1, 3]])


def gate_of(x: Tensor, w1: Tensor, s1: Tensor, activation: str = "bf16") -> Tensor:
    """fp32 gate of one expert for each row of x."""
    from k3plan.ops_triton import moe_experts

    rows = x.shape[0]
    gate, up = nan(rows, 1, w1.shape[1], dtype=torch.float32), nan(rows, 1, w1.shape[1], dtype=torch.float32)
    tensors = {"x": x, "ids": torch.zeros(rows, 1, dtype=torch.int32), "rank": torch.zeros(1, dtype=torch.int32),
               "w1": w1, "w3": w1, "s1": s1, "s3": s1, "gate": gate, "up": up}
    attrs = {"gate": {"experts": 1, "format": "mxfp4", "activation": activation}}
    moe_experts.bind(Call(tensors, attrs=attrs, config={"rows": 32}))()
    assert torch.equal(gate, up) or gate.isnan().any()
    return gate[:, 0]


def identity(width: int) -> tuple[Tensor, Tensor]:
    return tuple(t[None] for t in pack_mxfp4(torch.eye(width)))  # type: ignore[return-value]


def test_mxfp8_rounding_is_that_of_the_op() -> None:
    """Weights 1 on the diagonal give back the rounded activations, exactly."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(6, 64, generator=generator) * torch.logspace(-9, 9, 6)[:, None]
    x[0, :32] = 0.0
    x[1, 3] = 448.0
    x[2, :40] = 1.75 * 2.0 ** torch.arange(-20, 20)
    x[3, 32:] = torch.linspace(-1.8, 1.8, 32)
    x = x.bfloat16()
    assert torch.equal(gate_of(x, *identity(64), "mxfp8"), round_to_mxfp8(x))


def test_rows_of_any_magnitude_pass() -> None:
    x = (torch.randn(5, 64) * torch.tensor([1e-30, 1e-12, 1.0, 1e12, 1e30])[:, None]).bfloat16()
    assert torch.equal(gate_of(x, *identity(64)), x.float())


def test_every_scale_byte() -> None:
    w1, s1 = identity(32)
    s1 = torch.arange(256, dtype=torch.uint8).view(8, 32, 1).clone()
    x = torch.full((1, 32), 0.0078125).bfloat16()
    from k3plan.compiler.ops.mxfp4 import unpack_scale

    for block in range(8):
        got = gate_of(x, w1, s1[block : block + 1])[0]
        # the identity packs 1 as 4 * 2^-2
        wanted = 4 * 0.0078125 * unpack_scale(s1[block, :, 0])
        assert torch.equal(got.nan_to_num(nan=-1.0), wanted.nan_to_num(nan=-1.0))
        assert got.isnan().sum() == (block == 7)


def test_an_outlier_does_not_drown_other_groups() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 128, generator=generator)
    x[0, 0] = 1e6
    w = torch.randn(32, 128, generator=generator)
    w[:, 0] = 0.0
    packed, scale = pack_mxfp4(w)
    got = gate_of(x.bfloat16(), packed[None], scale[None])[0]
    wanted = OPS["experts_gate_up"].fn(x.bfloat16(), torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1), packed[None],
                                       packed[None], scale[None], scale[None], experts=1, format="mxfp4",
                                       activation="bf16")[0][0, 0]
    # inside the outlier's group, numbers 2^-39 below it are lost; the other three are as precise as ever
    assert (got - wanted).square().mean().sqrt() <= 2e-3 * wanted.square().mean().sqrt()


# the assembly


def execute(text: str, operands: list[Any]) -> None:
    """Runs PTX of 32-bit registers and fp16 pairs; ``operands`` are $0, $1, ...; results replace them."""
    registers: dict[str, Any] = {}

    def read(name: str) -> Any:
        if name.startswith("$"):
            return operands[int(name[1:])]
        return registers[name] if name in registers else int(name, 0)

    def write(name: str, value: Any) -> None:
        if name.startswith("$"):
            operands[int(name[1:])] = value
        else:
            registers[name] = value

    for line in re.findall(r"([a-z.][^;{}]*(?:\{[^}]*\}[^;]*)?);", text):
        op, _, rest = line.strip().partition(" ")
        if op == ".reg":
            continue
        if op == "mov.b32" and rest.startswith("{"):
            low, high = re.findall(r"\w+", rest.partition("}")[0])
            value = read(rest.partition("}")[2].strip(" ,"))
            write(low, value & 0xFFFF)
            write(high, value >> 16)
            continue
        target, *sources = (part.strip() for part in rest.split(","))
        write(target, _step(op, [read(source) for source in sources]))


def _halves(word: int) -> np.ndarray:
    return np.array([word & 0xFFFF, word >> 16], np.uint16).view(np.float16).astype(np.float64)


def _word(halves: np.ndarray) -> int:
    low, high = halves.astype(np.float16).view(np.uint16)
    return int(low) | int(high) << 16


def _step(op: str, a: list[Any]) -> Any:
    if op == "prmt.b32":
        source = [(a[0] >> 8 * i) & 255 for i in range(4)] + [(a[1] >> 8 * i) & 255 for i in range(4)]
        return sum(source[(a[2] >> 4 * i) & 7] << 8 * i for i in range(4))
    table = {
        "mov.b32": lambda: a[0], "shl.b32": lambda: (a[0] << a[1]) & 0xFFFFFFFF, "shr.b32": lambda: a[0] >> a[1],
        "and.b32": lambda: a[0] & a[1], "or.b32": lambda: a[0] | a[1],
        "fma.rn.f16x2": lambda: _word(_halves(a[0]) * _halves(a[1]) + _halves(a[2])),
        "add.rn.f16x2": lambda: _word(_halves(a[0]) + _halves(a[1])),
        "cvt.f32.f16": lambda: float(np.array([a[0]], np.uint16).view(np.float16)[0]),
        "add.f32": lambda: float(np.float32(a[0]) + np.float32(a[1])),
    }
    return table[op]()


def _pairs(x: np.ndarray) -> list[int]:
    """32 numbers as 16 words, in the order that ``moe_tiles.load_activations`` gives them."""
    return [_word(x[8 * w + np.array(pair)]) for w in range(4) for pair in ((0, 2), (4, 6), (1, 3), (5, 7))]


@pytest.mark.parametrize("rows", [1, 2])
def test_assembly_multiplies_the_numbers_that_the_codes_mean(rows: int) -> None:
    from k3plan.ops_triton.moe_tiles import _dot_32

    generator = np.random.default_rng(rows)
    values = np.array([*E2M1, *(-v for v in E2M1)])
    text = _dot_32(rows)
    for trial in range(40):
        codes = generator.integers(0, 16, 32)
        words = [int(sum(int(c) << 4 * i for i, c in enumerate(codes[8 * w : 8 * w + 8]))) for w in range(4)]
        x = generator.standard_normal((rows, 32)) * 2.0**14
        if trial < 32:  # one weight at a time: exact
            x = np.where(np.arange(32) == trial, x.astype(np.float16).astype(np.float64), 0.0)
        x = np.clip(x, -65504, 65504).astype(np.float16).astype(np.float64)
        operands: list[Any] = [None] * rows + words + [word for row in x for word in _pairs(row)]
        execute(text, operands)
        wanted = (x * values[codes]).sum(1) * 2.0**-14
        bound = np.abs(x * values[codes]).sum(1).max() * 2.0**-14 * 2.0**-9
        if trial < 32:  # only the product is rounded to fp16
            wanted, bound = wanted.astype(np.float16).astype(np.float64), 0.0
        assert np.abs(np.array(operands[:rows]) - wanted).max() <= bound


# the router


def route(logits: Tensor, bias: Tensor, **attrs: Any) -> tuple[Tensor, Tensor]:
    from k3plan.ops_triton import moe_route

    attrs = {"top_k": 4, "groups": 1, "topk_groups": 1, "renormalize": True, "scaling": 1.0} | attrs
    ids = torch.full((logits.shape[0], attrs["top_k"]), -9, dtype=torch.int32)
    weights = nan(*ids.shape, dtype=torch.float32)
    tensors = {"logits": logits, "bias": bias, "ids": ids, "weights": weights}
    moe_route.bind(Call(tensors, attrs={"ids": attrs}))()
    wanted_ids, wanted = OPS["router_topk"].fn(logits, bias, **attrs)
    assert torch.equal(ids, wanted_ids)
    assert (weights - wanted).abs().max() <= 1e-6 * wanted.abs().max()
    assert all(len(set(row.tolist())) == len(row) for row in ids)
    return ids, weights


@pytest.mark.parametrize(("experts", "top_k"), [(8, 8), (28, 3), (40, 6), (64, 16), (100, 16)])
def test_random_logits(experts: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(experts)
    wide = torch.randn(3, experts + 9, generator=generator)
    route(wide[:, :experts], 0.1 * torch.randn(experts, generator=generator), top_k=top_k)


def test_the_real_shape() -> None:
    generator = torch.Generator().manual_seed(0)
    route(torch.randn(2, 896, generator=generator), 0.1 * torch.randn(896, generator=generator), top_k=16)


EVEN = torch.arange(40) % 2 == 0
HARD = {
    "all equal": torch.zeros(40), "minus infinity": torch.full((40,), -torch.inf), "nan": torch.full((40,), torch.nan),
    "half nan": torch.where(EVEN, torch.nan, 1.0), "saturated": torch.linspace(20, 40, 40),
    "few values": (torch.arange(40) * 7 % 3).float(), "infinite": torch.where(EVEN, torch.inf, -1.0),
    "one ulp apart": torch.where(EVEN, torch.tensor(0.5), torch.nextafter(torch.tensor(0.5), torch.tensor(1.0))),
    "far down": torch.linspace(-120, -80, 40), "all but three": torch.where(torch.arange(40) < 37, -torch.inf, 0.3),
}  # fmt: skip


@pytest.mark.parametrize("bias", [0.0, -5.0], ids=["plain", "negative"])
@pytest.mark.parametrize("name", HARD)
def test_hard_scores(name: str, bias: float) -> None:
    route(HARD[name].repeat(2, 1), torch.full((40,), bias), top_k=6)


def test_ties_at_the_edge_go_to_the_lower_id() -> None:
    logits = torch.full((1, 64), -3.0)
    logits[0, [60, 50, 40]] = torch.tensor([2.0, 1.0, 0.5])
    logits[0, [9, 33, 62]] = 0.25
    assert route(logits, torch.zeros(64), top_k=4)[0].tolist() == [[60, 50, 40, 9]]


def test_scores_closer_than_the_short_keys_tell() -> None:
    """Falling order of 64 scores that differ in their last bits only: both ways through the kernel."""
    base = torch.tensor(0.7).view(torch.int32)
    bias = (base + torch.arange(64, dtype=torch.int32) * 5 % 64).view(torch.float32)
    for top_k in (1, 4, 16, 64):
        route(torch.full((1, 64), -torch.inf), bias, top_k=top_k)
    bias[:4] += torch.tensor([0.4, 0.1, 0.3, 0.2])
    assert route(torch.full((1, 64), -torch.inf), bias, top_k=4)[0].tolist() == [[0, 2, 3, 1]]


@pytest.mark.parametrize("groups", [(4, 2), (8, 3), (2, 1)], ids=lambda g: f"{g[1]}of{g[0]}")
@pytest.mark.parametrize("kind", ["random", "ties", "dead groups"])
def test_groups(groups: tuple[int, int], kind: str) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(3, 48, generator=generator)
    if kind == "ties":
        logits = logits.sign()
    if kind == "dead groups":
        logits[:, 12:24] = torch.nan
        logits[1] = -torch.inf
    route(logits, torch.zeros(48), top_k=5, groups=groups[0], topk_groups=groups[1], scaling=2.446)


def test_scaling_without_renormalising() -> None:
    generator = torch.Generator().manual_seed(4)
    route(torch.randn(2, 30, generator=generator), torch.zeros(30), renormalize=False, scaling=2.5)
