"""From a call to the static parameters and the arguments of an experts' kernel. All of them have the same contract."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from ...compiler.call import Call
from ..launching import row_alignment, row_stride
from ..moe_parts import multiprocessors
from .moe_experts_menu import LIST_BITS, MOST_BLOCKS, PARITIES

WEIGHTS = ("ids", "weights", "w1", "w3", "s1", "s3", "w2", "s2")
S = TypeVar("S")


def read_call(call: Call, static_of: Callable[..., S], most_tokens: int, *, most_experts: int = LIST_BITS,
              beside: int = 4, **own: Any) -> tuple[S, dict[str, torch.Tensor]]:
    """``static_of`` of the sizes of ``call`` and of ``own``, and the arguments: x, ids, rank, weights, w1, w3, s1, s3,
    w2, s2, with the projection beside a, w, s, and out, act, epochs. Rows of ``a`` lie on ``beside`` bytes."""
    tensors = call.tensors
    out, side = tensors["out"], "s" in tensors
    assert out.dtype == torch.bfloat16, f"out is {out.dtype}"
    sizes = read_sizes(call, most_tokens, most_experts=most_experts, beside=beside)
    static = static_of(**sizes, stride_out=row_stride(out), **({"stride_s": _stride_s(call)} if side else {}), **own)
    names = ("x", "ids", "rank", *WEIGHTS[1:], *(("a", "w", "s") if side else ()), "out")
    return static, {**{name: tensors[name] for name in names}, "act": call.scratch["act"],
                    "epochs": call.scratch["epochs"]}


def read_sizes(call: Call, most_tokens: int, *, most_experts: int = LIST_BITS, beside: int = 4) -> dict[str, Any]:
    """Sizes and attributes that ``Sizes`` holds, without the results' strides. Checks that a kernel can read them."""
    tensors = call.tensors
    x, ids, w1, w2 = (tensors[name] for name in ("x", "ids", "w1", "w2"))
    for name in WEIGHTS:
        assert tensors[name].is_contiguous(), f"{name} {tensors[name].shape} {tensors[name].stride()}"
    assert [ids.dtype, x.dtype] == [torch.int32, torch.bfloat16], f"ids, x are {ids.dtype}, {x.dtype}"
    assert (2 * w1.shape[2], 2 * w2.shape[2]) == (x.shape[1], w1.shape[1]), f"x {x.shape}, {w1.shape}, {w2.shape}"
    assert row_stride(x) % 8 == 0, f"rows of x {x.stride()} do not lie on 16 bytes"
    blocks = multiprocessors(x.device)
    assert blocks <= MOST_BLOCKS, f"{blocks} multiprocessors"
    assert ids.shape[0] <= most_tokens, f"{ids.shape[0]} rows"
    assert w1.shape[0] <= most_experts, f"{w1.shape[0]} experts of a rank"
    assert call.scratch["act"].shape[0] == PARITIES, f"activations {call.scratch['act'].shape}"
    activation = call.attrs["act"]
    return {
        "tokens": ids.shape[0], "top_k": ids.shape[1], "width": x.shape[1], "inter": w1.shape[1],
        "out_width": w2.shape[1], "local": w1.shape[0], "experts": call.attrs["gate"]["experts"], "blocks": blocks,
        "stride_x": row_stride(x), "beta": activation["beta"], "linear_beta": activation["linear_beta"],
        "dependent": call.dependent_launch, **(_side(tensors, beside) if "w" in tensors else {})}


def rounds(call: Call) -> bool:
    """Whether rows and activations are rounded to MXFP8."""
    return call.attrs["gate"]["activation"] == "mxfp8"


def _side(tensors: Mapping[str, torch.Tensor], alignment: int) -> dict[str, int]:
    """Sizes of the projection beside the experts."""
    a, w = tensors["a"], tensors["w"]
    assert {a.dtype, w.dtype} == {torch.bfloat16}, f"a, w are {a.dtype}, {w.dtype}"
    assert a.shape[1] == w.shape[1], f"a {a.shape}, w {w.shape}"
    assert w.is_contiguous(), f"w {w.shape} {w.stride()}"
    assert row_alignment(a) % alignment == 0, f"rows of a {a.stride()} do not lie on {alignment} bytes"
    return {"side_width": w.shape[1], "side_rows": w.shape[0], "stride_a": row_stride(a)}


def _stride_s(call: Call) -> int:
    s, rows = call.tensors["s"], call.tensors["w"].shape[0]
    assert (s.dtype, s.shape[1]) == (torch.bfloat16, rows), f"s {s.dtype} {s.shape} for {rows} columns"
    return row_stride(s)
