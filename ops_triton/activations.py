"""Activations in fp32 that every kernel with a gate shares: sigmoid, tanh, SiTU and SiLU of gate and up."""
from __future__ import annotations

import triton
import triton.language as tl

NONE, SITU, SILU = 0, 1, 2  # ACTIVATION


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    # the series keeps the relative accuracy of small arguments; exp(-2|x|) cannot overflow
    e = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - e) / (1.0 + e)
    square = x * x
    small = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.25, small, tl.where(x < 0, -large, large))


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr):
    """SiTU or SiLU of ``gate``, times (bounded) ``up``, in fp32."""
    if ACTIVATION == 1:
        return BETA * tanh(gate / BETA) * sigmoid(gate) * (LINEAR_BETA * tanh(up / LINEAR_BETA))
    return gate * sigmoid(gate) * up
