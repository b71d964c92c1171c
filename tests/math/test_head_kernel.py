"""Logits with the greedy choice among them, on inputs whose sums are exact, so that keys must be equal to the bit."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import kernel_check
import pytest
import torch
from torch import Tensor

from k3plan.compiler.call import Call
from k3plan.compiler.covering.match import find_regions
from k3plan.compiler.kernel import Menu
from k3plan.compiler.ops import OPS
from k3plan.ops_triton.head import bind, bind_key
from k3plan.ops_triton.head_menu import KERNELS

FMA = {"form": "fma", "rows": 4, "block": 256, "warps": 4, "stages": 1}
DOT = {"form": "dot", "rows": 16, "block": 64, "warps": 4, "stages": 2}


def _exact(*shape: int, seed: int) -> Tensor:
    """Small multiples of a quarter: products and sums are exact in fp32, and ties are frequent."""
    return (torch.randint(-6, 7, shape, generator=torch.Generator().manual_seed(seed)) / 4).bfloat16()


def _call(x: Tensor, weight: Tensor, rank: int, config: dict[str, Any], *, tokens: bool, device: str) -> Call:
    rows, vocab = x.shape[0], weight.shape[0]
    positions = torch.arange(rows, dtype=torch.int32)
    positions[-1] = -1 if rows > 1 else 0
    out = torch.full((rows,), -7, dtype=torch.int32 if tokens else torch.int64)
    tensors = {"x": x, "weight": weight, "rank": torch.tensor([rank], dtype=torch.int32), "positions": positions,
               "logits": torch.full((rows, vocab), torch.nan), "token" if tokens else "key": out}
    scratch = {"best": torch.zeros(rows, dtype=torch.int64), "arrivals": torch.zeros(1, dtype=torch.int32)}
    attrs: dict[str, Any] = {"logits": {"out_dtype": "fp32"}, "key": {}}
    return Call({n: t.to(device) for n, t in tensors.items()}, attrs=attrs | ({"token": {}} if tokens else {}),
                scratch={n: t.to(device) for n, t in scratch.items()}, config=config)


@pytest.mark.parametrize("config", [FMA, DOT], ids=["fma", "dot"])
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("tokens", [False, True], ids=["key", "token"])
def test_the_choice_is_the_ops(rows: int, config: dict[str, Any], tokens: bool, device: str) -> None:
    """Twice through one launch: the best keys start at zero again."""
    call = _call(_exact(rows, 192, seed=0), _exact(50, 192, seed=1), 1, config, tokens=tokens, device=device)
    launch = bind(call)
    for seed in (2, 3):
        call.tensors["x"].copy_(_exact(rows, 192, seed=seed))
        launch()
        logits = OPS["linear"].fn(call.tensors["x"], call.tensors["weight"])
        assert torch.equal(call.tensors["logits"], logits)
        expected = OPS["argmax_key"].fn(logits, call.tensors["rank"])
        if tokens:
            expected = OPS["token_of_key"].fn(expected, call.tensors["positions"])
        assert torch.equal(call.tensors["token" if tokens else "key"], expected)
        assert not call.scratch["best"].any()
        assert not call.scratch["arrivals"].any()


SPECIAL = {
    "tie": [1.0, 7.0, 7.0, 0.0], "negative tie": [-3.0, -2.0, -2.0, -9.0], "zeros": [-0.0, 0.0, -0.0, 0.0],
    "nan": [torch.nan, 1.0, torch.nan, 1.0], "all nan": [torch.nan] * 4, "infinite": [torch.inf, torch.inf, 0.0, -1.0],
    "all -inf": [-torch.inf] * 4, "denormal": [1e-42, -1e-42, 1e-43, 0.0],
}


@pytest.mark.parametrize("values", SPECIAL.values(), ids=SPECIAL)
def test_special_logits(values: list[float], device: str) -> None:
    """The lower id wins a tie, NaN loses to every number, and an id is never out of range."""
    logits = torch.tensor([values, values[::-1]], device=device)
    rank = torch.tensor([3], dtype=torch.int32, device=device)
    key = torch.full((2,), -7, dtype=torch.int64, device=device)
    bind_key(Call({"logits": logits, "rank": rank, "key": key}, attrs={"key": {}}, config={"warps": 4}))()
    assert torch.equal(key, OPS["argmax_key"].fn(logits, rank))
    token = 0xFFFFFFFF - (key & 0xFFFFFFFF)
    assert ((token >= 12) & (token < 16)).all()


def test_logits_that_nobody_reads_are_not_written(device: str) -> None:
    call = _call(_exact(2, 64, seed=0), _exact(20, 64, seed=1), 0, FMA, tokens=False, device=device)
    tensors = {name: tensor for name, tensor in call.tensors.items() if name != "logits"}
    bind(Call(tensors, attrs=call.attrs, scratch=call.scratch, config=FMA))()
    logits = OPS["linear"].fn(tensors["x"], tensors["weight"])
    assert torch.equal(tensors["key"], OPS["argmax_key"].fn(logits, tensors["rank"]))


@pytest.mark.parametrize("config", [FMA, DOT], ids=["fma", "dot"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 192), (3, 200), (8, 200)])
def test_the_rows_are_normed_first(rows: int, columns: int, config: dict[str, Any], device: str) -> None:
    """Rows of any size, and an ``eps`` that counts; x is a view. The choice is that among the kernel's own logits."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.arange(rows)[:, None]
    call = _call(values, _exact(50, columns, seed=1), 1, config, tokens=False, device=device)
    wide = torch.full((rows, columns + 56), torch.nan, dtype=torch.bfloat16, device=device)
    norm = 1 + torch.arange(columns, device=device) / columns
    tensors = {**call.tensors, "x": wide[:, :columns].copy_(values), "norm": norm}
    bind(replace(call, tensors=tensors, attrs=call.attrs | {"h": {"eps": 0.5}}))()
    h = OPS["rms_norm"].fn(tensors["x"], norm, eps=0.5)
    if device == "cpu":  # where Triton's interpreter rounds to bf16 towards zero
        h = (h.view(torch.int32) & -0x10000).view(torch.float32)
    # a value of h below 8 that is rounded the other way moves a logit by 2^-5 x 1.5 at most
    expected = OPS["linear"].fn(h.bfloat16(), tensors["weight"])
    torch.testing.assert_close(tensors["logits"], expected, rtol=0, atol=0.05)
    assert torch.equal(tensors["key"], OPS["argmax_key"].fn(tensors["logits"], tensors["rank"]))


@pytest.mark.parametrize("read", [False, True], ids=["inside", "outside"])
def test_a_norm_that_is_read_outside_stays_a_launch_of_its_own(read: bool) -> None:
    graph = kernel_check.SETTINGS[0].graph()
    if read:
        graph = replace(graph, outputs=(*graph.outputs, "head.hidden"))
    regions, misses = find_regions(graph, Menu(KERNELS), rows=1)
    assert any(region.kernel.id == "triton.norm_logits_argmax" for region in regions) != read
    reasons = [miss.reason for miss in misses if miss.kernel == "triton.norm_logits_argmax"]
    assert reasons == (["value head.hidden is an output of the graph"] * len(reasons) if read else [])
    assert bool(reasons) == read
