"""The router's exact top-k: sigmoid, bias, groups, selection, renormalised and scaled weights.

Contract: ``logits`` fp32 [T, E], any row stride, ``bias`` fp32 [E] -> ``ids`` i32 [T, k] in falling order of
``sigmoid(logits) + bias`` and fp32 ``weights`` [T, k]. Ties go to the lower id; a NaN ranks last and weighs 0.
Ids are distinct and in range for any input: every expert has a different key.

Layout: one block a row, a bitonic top-k in registers. Its keys are 32 bits: the upper bits of the choice in an
order that integers compare, then the inverted id. When no other expert shares the last one's upper bits, those k
are the right ones, and k x k comparisons of the full 64-bit keys (score, inverted id) give their order. Otherwise
(about 1 % of rows, and all rows with exact ties at the edge) the row is selected again by full keys, at twice the
price.
Waits: the bias is loaded before the wait for the producers. The trigger is the first instruction.
Numerics: fp32; the exponential is a polynomial of one ulp and the division is exact, so that scores, and with
them ids, are those of the op up to the last bit or two of a score.
Bytes: 3.6 KB a row: all latency. Measured: 3.8 us at 1 and 8 rows of 896 (one H200, TP16, triton 3.6).
Portable: NVIDIA-only calls are behind DEPENDENT_LAUNCH.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..compiler.call import Call, Launch
from .launching import KernelLaunch, await_producers, launch_options, row_stride, start_dependents

# bits of -inf, ordered as i32; a key behind every expert's
ORDERED_MINUS_INFINITY = tl.constexpr(0x807FFFFF - (1 << 32))
LOWEST_KEY = tl.constexpr(-0x7FFFFFFFFFFFFFFF)


@dataclass(frozen=True)
class Config:
    """Threads of a row's block."""

    warps: int = 4


@triton.jit
def _exp(x):
    """e^x within an ulp: x = n ln 2 + r, |r| <= ln 2 / 2, a polynomial of r, and the scale in two halves."""
    x = tl.minimum(tl.maximum(x, -104.0), 90.0)
    # adding and taking away 1.5 * 2^23 rounds to an integer
    n = (x * 1.4426950408889634 + 12582912.0) - 12582912.0
    r = (x - n * 0.693145751953125) - n * 1.4286067653e-06
    p = 1.0 / 720.0 + r * (1.0 / 5040.0)
    p = 1.0 / 120.0 + r * p
    p = 1.0 / 24.0 + r * p
    p = 1.0 / 6.0 + r * p
    p = 0.5 + r * p
    p = 1.0 + (r + r * r * p)
    half = n.to(tl.int32) >> 1
    rest = n.to(tl.int32) - half
    scale = ((half + 127) << 23).to(tl.float32, bitcast=True)
    return p * scale * ((rest + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _score(logit):
    """Sigmoid; 0 for NaN."""
    score = tl.div_rn(1.0, 1.0 + _exp(-logit))
    return tl.where(logit == logit, score, 0.0)


@triton.jit
def _drop_groups(choice, real, GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr, GP: tl.constexpr, SP: tl.constexpr):
    """``choice`` [GP, SP] with -inf in all but the groups of the largest sums of two; ties to the lower group."""
    inside = tl.arange(0, SP)[None, :]
    group = tl.arange(0, GP)
    known = tl.where(real, choice, float("-inf"))
    best = tl.max(known, 1)
    at = tl.min(tl.where((known == best[:, None]) & real, inside, SP), 1)
    second = tl.max(tl.where(inside == at[:, None], float("-inf"), known), 1)
    total = tl.where(group < GROUPS, best + second, float("-inf"))
    # sums again along the other dimension: a tile against its own transpose
    other = tl.sum(tl.where(group[:, None] == group[None, :], total[:, None], 0.0), 0)
    ahead = (other[None, :] > total[:, None]) | ((other[None, :] == total[:, None]) & (group[None, :] < group[:, None]))
    rank = tl.sum((ahead & (group[None, :] < GROUPS)).to(tl.int32), 1)
    return tl.where((rank < TOPK_GROUPS)[:, None], choice, float("-inf"))


@triton.jit
def _ordered(x):
    """fp32 to i32 of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _full_key(order, expert):
    """i64 of the order of (score, inverted id)."""
    return (order.to(tl.int64) << 32) + (0x7FFFFFFF - expert)


@triton.jit
def _store(ids, score, slot, used, row, ids_ptr, weights_ptr, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr,
           SCALING: tl.constexpr):
    weight = score
    if RENORMALIZE:
        weight = tl.div_rn(score, tl.zeros_like(score) + (tl.sum(tl.where(used, score, 0.0), 0) + 1e-20))
    tl.store(ids_ptr + row * TOP_K + slot, ids, mask=used)
    tl.store(weights_ptr + row * TOP_K + slot, weight * SCALING, mask=used)


@triton.jit
def choose(logit, bias, expert, real, logits_at, bias_ptr, row, ids_ptr, weights_ptr, TOP_K: tl.constexpr,
           KP: tl.constexpr, GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr, GP: tl.constexpr, SP: tl.constexpr,
           RENORMALIZE: tl.constexpr, SCALING: tl.constexpr):
    """Ids and weights of one row from its logits [GP, SP], which stand at ``logits_at`` too, seen by this block."""
    choice = _score(logit) + bias
    choice = tl.where((logit == logit) & (choice == choice), choice, float("-inf"))
    if GROUPS > 1:
        choice = _drop_groups(choice, real, GROUPS, TOPK_GROUPS, GP, SP)
    order = _ordered(choice)
    lowest = GP * SP - 1
    # first with 32-bit keys: as much of the score as the id leaves room for
    key = tl.where(real, (order & -(lowest + 1)) | (lowest - expert), -0x80000000)
    best = tl.topk(tl.reshape(key, (GP * SP,)), KP)
    slot = tl.arange(0, KP)
    used = slot < TOP_K
    last = tl.min(tl.where(used, best, 0x7FFFFFFF), 0) & -(lowest + 1)
    rivals = tl.sum(tl.sum((real & ((order & -(lowest + 1)) >= last)).to(tl.int32), 1), 0)
    if (rivals == TOP_K) & (last > ORDERED_MINUS_INFINITY):
        # nobody outside shares what is seen of the last one's score: the set is right, only its order may not be
        ids = lowest - (best & lowest)
        score = _score(tl.load(logits_at + ids, mask=used, other=0.0))
        full = _full_key(_ordered(score + tl.load(bias_ptr + ids, mask=used, other=0.0)), ids)
        full = tl.where(used, full, LOWEST_KEY)
        rank = tl.sum((full[None, :] > full[:, None]).to(tl.int32), 1)
        _store(ids, score, rank, used, row, ids_ptr, weights_ptr, TOP_K, RENORMALIZE, SCALING)
    else:
        every = tl.where(real, _full_key(order, expert), LOWEST_KEY)
        best_full = tl.topk(tl.reshape(every, (GP * SP,)), KP)
        ids = 0x7FFFFFFF - (best_full & 0x7FFFFFFF).to(tl.int32)
        score = _score(tl.load(logits_at + ids, mask=used, other=0.0))
        _store(ids, score, slot, used, row, ids_ptr, weights_ptr, TOP_K, RENORMALIZE, SCALING)


@triton.jit
def _route(logits_ptr, bias_ptr, ids_ptr, weights_ptr, STRIDE: tl.constexpr, TOP_K: tl.constexpr, KP: tl.constexpr,
           GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr, SIZE: tl.constexpr, GP: tl.constexpr, SP: tl.constexpr,
           RENORMALIZE: tl.constexpr, SCALING: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    start_dependents(DEPENDENT_LAUNCH)
    row = tl.program_id(0)
    group = tl.arange(0, GP)[:, None]
    inside = tl.arange(0, SP)[None, :]
    expert = group * SIZE + inside
    real = (group < GROUPS) & (inside < SIZE)
    bias = tl.load(bias_ptr + expert, mask=real, other=0.0)
    await_producers(DEPENDENT_LAUNCH)
    logits_at = logits_ptr + row * STRIDE
    logit = tl.load(logits_at + expert, mask=real, other=0.0)
    choose(logit, bias, expert, real, logits_at, bias_ptr, row, ids_ptr, weights_ptr, TOP_K, KP, GROUPS, TOPK_GROUPS,
           GP, SP, RENORMALIZE, SCALING)


def bind(call: Call) -> Launch:
    """logits, bias -> ids, weights."""
    logits, bias = call.tensors["logits"], call.tensors["bias"]
    ids, weights = call.tensors["ids"], call.tensors["weights"]
    attrs = call.attrs["ids"]
    rows, experts = logits.shape
    groups, top_k = attrs["groups"], attrs["top_k"]
    assert logits.dtype == bias.dtype == torch.float32, f"logits {logits.dtype}, bias {bias.dtype}"
    assert bias.shape == (experts,), f"bias {bias.shape}, {experts} experts"
    for tensor in (bias, ids, weights):
        assert tensor.is_contiguous(), f"strided {tensor.shape} {tensor.stride()}"
    assert experts % groups == 0, f"{experts} experts in {groups} groups"
    constants = {
        "STRIDE": row_stride(logits), "TOP_K": top_k, "KP": triton.next_power_of_2(top_k), "GROUPS": groups,
        "TOPK_GROUPS": attrs["topk_groups"], "SIZE": experts // groups, "GP": triton.next_power_of_2(groups),
        "SP": triton.next_power_of_2(experts // groups), "RENORMALIZE": attrs["renormalize"],
        "SCALING": attrs["scaling"], "DEPENDENT_LAUNCH": call.dependent_launch,
    }
    pointers = {"logits_ptr": logits, "bias_ptr": bias, "ids_ptr": ids, "weights_ptr": weights}
    return KernelLaunch(_route, (rows,), pointers, constants, Config(**call.config).warps, 1,
                        launch_options(call.dependent_launch))
