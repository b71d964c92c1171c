"""How many kernels torch launches for each op: the planner prices ``torch.<op>`` on a GPU by it, so it is counted here.

Counted are the ATen operators that compute or copy, on small tensors with the dtypes of a Kimi K3 step of one row: 8
finished blocks, 16 experts a row, verify steps of 8 rows. On a GPU some of them (sort, unique, nonzero) are several
kernels, so the count is a lower bound.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from k3plan.compiler.ops import OPS

BF16, FP32, I32 = torch.bfloat16, torch.float32, torch.int32
BLOCKS, TOP_K, EXPERTS, QUERY, HEADS, WIDTH = 8, 16, 32, 8, 2, 32
# they allocate or rename, and launch nothing
SILENT = ("aten.empty", "aten.new_empty", "aten._unsafe_view", "aten.detach", "aten.lift_fresh",
          "aten.scalar_tensor")


class LaunchCount(TorchDispatchMode):
    """ATen operators that would launch a kernel, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        views = [r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns]
        if not (views and all(views)) and not str(func).startswith(SILENT):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape).to(BF16)


def fp32(*shape: int) -> Tensor:
    return torch.randn(*shape)


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=I32)


def _rule(query: int) -> tuple[Tensor, ...]:
    channels = HEADS * WIDTH
    rows = [bf16(query, channels), bf16(query, channels), bf16(query, channels), -fp32(query, channels).abs()]
    return (*rows, bf16(query, HEADS), fp32(3, HEADS, WIDTH, WIDTH))


def _conv(query: int) -> tuple[Tensor, ...]:
    channels = HEADS * WIDTH
    return (*(bf16(query, channels) for _ in range(3)), bf16(3, query + 2, 3 * channels),
            *(fp32(channels, 4) for _ in range(3)), i32(0), torch.arange(query, dtype=I32))


def _packed(count: int, rows: int, columns: int) -> list[Tensor]:
    """``count`` stacks of packed weights, then their scales."""
    packed = [torch.randint(0, 256, (EXPERTS, rows, columns // 2), dtype=torch.uint8) for _ in range(count)]
    return packed + [torch.full((EXPERTS, rows, columns // 32), 120, dtype=torch.uint8) for _ in range(count)]


IDS = torch.arange(TOP_K, dtype=I32)[None]
EXPERT = {"experts": EXPERTS, "format": "mxfp4", "activation": "bf16"}
Arguments = tuple[tuple[Tensor, ...], dict[str, Any]]
ARGUMENTS: dict[str, Callable[[], Arguments]] = {
    "add": lambda: ((bf16(1, 64), bf16(1, 64)), {}),
    "residual_add": lambda: ((bf16(1, 64), bf16(1, 64)), {}),
    "situ_and_mul": lambda: ((bf16(1, 64), bf16(1, 64)), {"beta": 4.0, "linear_beta": 25.0}),
    "silu_and_mul": lambda: ((bf16(1, 64), bf16(1, 64)), {}),
    "sigmoid_mul": lambda: ((bf16(1, 64), bf16(1, 64)), {}),
    "rms_norm": lambda: ((bf16(1, 64), bf16(64)), {"eps": 1e-5}),
    "gated_rms_norm": lambda: ((bf16(1, 64), bf16(1, 64), fp32(32)), {"eps": 1e-5}),
    "attn_res": lambda: ((fp32(64), *(bf16(1, 64) for _ in range(BLOCKS + 1))), {"eps": 1e-5}),
    "kda_conv": lambda: (_conv(1), {"query": 1}),
    "kda_gate": lambda: ((bf16(1, 64), fp32(2), fp32(64)), {"lower_bound": -5.0}),
    "kda_delta_rule": lambda: ((*_rule(1), i32(0), i32(5)), {}),
    "kda_verify": lambda: ((*_rule(QUERY), fp32(3, QUERY, 3, HEADS, WIDTH), i32(0), torch.arange(QUERY, dtype=I32),
                            i32(2)), {"query": QUERY}),
    "kda_verify_slots": lambda: ((*_rule(QUERY)[:5], fp32(3, QUERY, HEADS, WIDTH, WIDTH), i32(0),
                                  torch.arange(QUERY, dtype=I32), i32(2)), {"query": QUERY}),
    "mla_absorb_q": lambda: ((bf16(1, 2 * 48), bf16(2, 32, 64)), {}),
    "mla_absorb_v": lambda: ((bf16(1, 2, 64), bf16(2, 32, 64)), {}),
    "mla_append": lambda: ((bf16(1, 64), bf16(1, 16), bf16(5, 16, 80), i32(3), i32(0, 1)[None]),
                           {"query": 1, "kv_scale": 1.0}),
    "mla_attend": lambda: ((bf16(1, 2, 80), bf16(5, 16, 80), i32(3), i32(0, 1)[None]),
                           {"query": 1, "latent": 64, "scale": 0.1, "kv_scale": 1.0}),
    "router_topk": lambda: ((fp32(1, EXPERTS), fp32(EXPERTS)), {
        "top_k": TOP_K, "groups": 1, "topk_groups": 1, "renormalize": True, "scaling": 2.5}),
    "experts_gate_up": lambda: ((bf16(1, 64), IDS, i32(0), *_packed(2, 32, 64)), EXPERT),
    "experts_down": lambda: ((bf16(1, TOP_K, 32), IDS, i32(0), *_packed(1, 64, 32)), EXPERT),
    "experts_combine": lambda: ((bf16(1, TOP_K, 64), fp32(1, TOP_K)), {}),
    "embed": lambda: ((i32(3), bf16(50, 64), i32(0)), {"out_dtype": "bf16"}),
    "argmax_key": lambda: ((fp32(1, 50), i32(0)), {}),
    "token_of_key": lambda: ((torch.tensor([5]), i32(3)), {}),
}  # fmt: skip


def count(op: str) -> list[str]:
    """ATen operators of one call of ``op``, and of the copies of its results into place (``graphs/bind.py``)."""
    definition = OPS[op]
    inputs, attrs = ARGUMENTS[op]()
    with LaunchCount() as counted:
        results = definition.fn(*inputs, **attrs)
        results = results if isinstance(results, tuple) else (results,)
        for index, result in enumerate(results):
            if index not in definition.alias:
                torch.empty_like(result, dtype=BF16 if result.is_floating_point() else result.dtype).copy_(result)
    return counted.names


def test_every_op_is_counted() -> None:
    # views launch nothing, a projection is one library call (graphs/stock.py), collectives are the transport's
    others = {name for name, definition in OPS.items() if definition.kind != "compute"} | {"linear"}
    assert set(ARGUMENTS) == set(OPS) - others
    assert {name: OPS[name].aten for name in others} == {name: int(OPS[name].kind != "view") for name in others}


@pytest.mark.parametrize("op", ARGUMENTS)
def test_declared_launches_are_those_of_torch(op: str) -> None:
    names = count(op)
    # torch versions decompose einsum, sums and products a little differently
    assert abs(len(names) - OPS[op].aten) <= max(1, OPS[op].aten // 20), f"{len(names)}: {names}"


if __name__ == "__main__":
    for each in ARGUMENTS:
        print(each, len(count(each)), count(each)[:60])
