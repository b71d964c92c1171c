"""The router's exact top-k alone, for steps whose front is not one launch: a thread block a row.

Contract: ``logits`` fp32 [T, E], rows 16 bytes aligned, ``bias`` fp32 [E] -> ``ids`` i32 [T, k] in falling order of
``sigmoid(logits) + bias`` and fp32 ``weights`` [T, k]. Ties go to the lower id; a NaN ranks last and weighs 0.

Layout: four experts a thread, 7 warps for 896; they choose together as ``moe_topk.py`` says, in shared memory.
Waits: the bias is loaded and shared memory is made ready before the wait for the producers. The trigger is the first
instruction.
Numerics: those of ``moe_topk.py``: ids and scores are the op's up to the last bit or two of a score.
Bytes: 3.6 KB a row: all latency. Measured on one H200 in a chain of its like: 1.7 us at one row of 896, 2.3 at 8, 3.3
at 64; Triton's 3.5, 3.6 and 5.2.
"""
from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64

from ..compiler.call import Call
from .launching import KernelLaunch, await_producers, named, row_stride, start_dependents
from .moe_topk import choose, clear_keys
from .primitives import load_words, select
from .router_topk_plan import EACH, WARP, Static


@cute.kernel
def _router_topk(arguments: Any, names: cutlass.Constexpr, p: cutlass.Constexpr):
    start_dependents(p.dependent)
    at, where = named(names, arguments), p.place()
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    shared = cute.arch.get_dyn_smem(cutlass.Uint8, 128).toint()
    real = select(thread < p.holders, Int32(1), Int32(0))
    first = EACH * cutlass.min(thread, Int32(p.holders - 1))
    bias = [word.bitcast(Float32) for word in load_words(at.bias.toint() + Int64(first) * 4)]
    clear_keys(thread, Int32(1), shared, where, p)
    await_producers(p.dependent)
    words = load_words(at.logits.toint() + (Int64(row) * p.stride + Int64(first)) * 4)
    chosen = Int64(row * p.top_k) * 4
    choose([word.bitcast(Float32) for word in words], bias, [first + i for i in range(EACH)], [real] * EACH, thread,
           shared, where, at.ids.toint() + chosen, at.weights.toint() + chosen, p)


def bind(call: Call) -> KernelLaunch:
    """logits, bias -> ids, weights."""
    tensors = {name: call.tensors[name] for name in ("logits", "bias", "ids", "weights")}
    logits, attrs = tensors["logits"], call.attrs["ids"]
    rows, experts = logits.shape
    for name in ("bias", "ids", "weights"):
        assert tensors[name].is_contiguous(), f"strided {name} {tensors[name].shape} {tensors[name].stride()}"
    assert logits.dtype == tensors["bias"].dtype == torch.float32, f"logits {logits.dtype}"
    assert row_stride(logits) % EACH == logits.data_ptr() % 16 == 0, f"logits {logits.shape} {logits.stride()}"
    static = Static(experts=experts, top_k=attrs["top_k"], stride=row_stride(logits), renormalize=attrs["renormalize"],
                    scaling=attrs["scaling"], dependent=call.dependent_launch)
    return KernelLaunch(_router_topk, (rows, 1, 1), WARP * static.routers, tensors, static,
                        shared=static.place()["end"], dependent=static.dependent)
