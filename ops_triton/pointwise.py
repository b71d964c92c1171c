"""One op a launch: elementwise ops on two operands, the gated RMS norm of heads, and the weighted sum of experts.

Contract: the two operands and ``y`` have one shape, bf16 or fp32 each by its tensor; a matrix may be a view with any
row stride, dims before the last two must lie as one. ``gated_rms_norm``: x and gate [T, H*D], weight [D].
``experts_combine``: y [T, k, D], weights [T, k]. Every element of the result is written; nothing else is. Rows of
zeros give zeros, so padding stays zero where the op before made it zero.

Layout: blocks of ``rows`` x ``columns`` elements; for the norm ``rows`` heads; for the sum ``columns`` of one row,
with the loads of all its experts in flight.
Waits: norm weights are loaded before the wait for the producers, all else after it. The trigger is the first
instruction.
Numerics: fp32, one rounding at the store; tanh through exp, with its series near zero.
Bytes: every operand once; at one row all of these are a boundary (1.2 us on an H200). Measured: 1.1 to
1.9 us at one row (one H200, TP16, triton 3.6).
Portable: NVIDIA-only calls are behind DEPENDENT_LAUNCH.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..compiler.call import Call
from .activations import SILU, SITU, activate, sigmoid
from .launching import KernelLaunch, await_producers, launch_options, row_stride, start_dependents
from .pointwise_menu import power_of_two

SIGMOID, SUM = 3, 4  # FORM, after those of ``activate``


@dataclass(frozen=True)
class Config:
    """Elements of a thread block."""

    rows: int = 1
    columns: int = 1024
    warps: int = 4


@dataclass(frozen=True)
class NormConfig:
    """``rows`` heads a thread block."""

    rows: int = 1
    warps: int = 1


@dataclass(frozen=True)
class CombineConfig:
    """``columns`` of one row a thread block."""

    columns: int = 256
    warps: int = 4


@triton.jit
def _two_operands(left_ptr, right_ptr, y_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIDE_LEFT: tl.constexpr,
                  STRIDE_RIGHT: tl.constexpr, STRIDE_Y: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
                  FORM: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    start_dependents(DEPENDENT_LAUNCH)
    row = (tl.program_id(1) * R + tl.arange(0, R))[:, None]
    column = (tl.program_id(0) * C + tl.arange(0, C))[None, :]
    real = (row < ROWS) & (column < COLUMNS)
    await_producers(DEPENDENT_LAUNCH)
    left = tl.load(left_ptr + row * STRIDE_LEFT + column, mask=real, other=0.0).to(tl.float32)
    right = tl.load(right_ptr + row * STRIDE_RIGHT + column, mask=real, other=0.0).to(tl.float32)
    if FORM < 3:
        y = activate(left, right, FORM, BETA, LINEAR_BETA)
    elif FORM == 3:
        y = left * sigmoid(right)
    else:
        y = left + right
    tl.store(y_ptr + row * STRIDE_Y + column, y.to(y_ptr.dtype.element_ty), mask=real)


@triton.jit
def _gated_norm(x_ptr, gate_ptr, weight_ptr, y_ptr, ALL: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
                WIDTH: tl.constexpr, EPS: tl.constexpr, STRIDE_X: tl.constexpr, STRIDE_GATE: tl.constexpr,
                STRIDE_Y: tl.constexpr, R: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    start_dependents(DEPENDENT_LAUNCH)
    head = tl.program_id(0) * R + tl.arange(0, R)  # of all rows
    index = tl.arange(0, WIDTH)
    weight = tl.load(weight_ptr + index, mask=index < D, other=0.0).to(tl.float32)
    row = (head // HEADS)[:, None]
    column = (head % HEADS * D)[:, None] + index[None, :]
    real = (head < ALL)[:, None] & (index < D)[None, :]
    await_producers(DEPENDENT_LAUNCH)
    x = tl.load(x_ptr + row * STRIDE_X + column, mask=real, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * STRIDE_GATE + column, mask=real, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + EPS)
    y = x * scale[:, None] * weight[None, :] * sigmoid(gate)
    tl.store(y_ptr + row * STRIDE_Y + column, y.to(y_ptr.dtype.element_ty), mask=real)


@triton.jit
def _combine(y_ptr, weights_ptr, out_ptr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, STRIDE_WEIGHTS: tl.constexpr,
             STRIDE_OUT: tl.constexpr, C: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    start_dependents(DEPENDENT_LAUNCH)
    row = tl.program_id(1)
    column = tl.program_id(0) * C + tl.arange(0, C)
    real = column < COLUMNS
    at = y_ptr + row * (PAIRS * COLUMNS) + column
    total = tl.zeros((C,), tl.float32)
    await_producers(DEPENDENT_LAUNCH)
    for pair in tl.static_range(PAIRS):
        weight = tl.load(weights_ptr + row * STRIDE_WEIGHTS + pair).to(tl.float32)
        total += weight * tl.load(at + pair * COLUMNS, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * STRIDE_OUT + column, total.to(out_ptr.dtype.element_ty), mask=real)


def flat_rows(tensor: torch.Tensor) -> tuple[int, int]:
    """Rows along the last dim, and the elements between them, of dims that lie as one."""
    for outer in range(tensor.dim() - 2):
        inner = tensor.shape[outer + 1] * tensor.stride(outer + 1)
        assert tensor.stride(outer) == inner or tensor.shape[outer] == 1, f"{tensor.shape} strides {tensor.stride()}"
    assert tensor.stride(-1) == 1 or tensor.shape[-1] == 1, f"strided last dim: {tensor.shape} {tensor.stride()}"
    return tensor.numel() // tensor.shape[-1], tensor.stride(-2)


def _form(call: Call) -> dict[str, Any]:
    """Which op it is: its operands' names and attributes tell a sum, a gate, an activation with or without bounds."""
    attrs = call.attrs["y"]
    if "gate" not in call.tensors:
        return {"FORM": SUM, "BETA": 1.0, "LINEAR_BETA": 1.0}
    if "up" not in call.tensors:
        return {"FORM": SIGMOID, "BETA": 1.0, "LINEAR_BETA": 1.0}
    form = SITU if "beta" in attrs else SILU
    return {"FORM": form, "BETA": attrs.get("beta", 1.0), "LINEAR_BETA": attrs.get("linear_beta", 1.0)}


OPERANDS = (("gate", "up"), ("x", "gate"), ("prefix", "delta"), ("left", "right"))


def bind(call: Call) -> KernelLaunch:
    """The launch for ``call``: any of the ops on two operands, told apart by the names of the pattern."""
    config = Config(**call.config)
    names = next(pair for pair in OPERANDS if all(name in call.tensors for name in pair))
    left, right = (call.tensors[name] for name in names)
    y = call.tensors["y"]
    assert left.shape == right.shape == y.shape, f"shapes {left.shape}, {right.shape}, {y.shape}"
    rows, stride = flat_rows(left)
    columns = left.shape[-1]
    constants = {
        "ROWS": rows, "COLUMNS": columns, "STRIDE_LEFT": stride, "STRIDE_RIGHT": flat_rows(right)[1],
        "STRIDE_Y": flat_rows(y)[1], "R": config.rows, "C": config.columns, **_form(call),
        "DEPENDENT_LAUNCH": call.dependent_launch,
    }
    grid = (-(-columns // config.columns), -(-rows // config.rows))
    return KernelLaunch(_two_operands, grid, {"left_ptr": left, "right_ptr": right, "y_ptr": y}, constants,
                        config.warps, 1, launch_options(call.dependent_launch))


def bind_norm(call: Call) -> KernelLaunch:
    """The launch of ``gated_rms_norm``."""
    config = NormConfig(**call.config)
    x, gate, weight, y = (call.tensors[name] for name in ("x", "gate", "weight", "y"))
    width, heads = weight.shape[0], x.shape[1] // weight.shape[0]
    assert x.shape == gate.shape == y.shape == (x.shape[0], heads * width), f"x {x.shape}, gate {gate.shape}"
    constants = {
        "ALL": x.shape[0] * heads, "HEADS": heads, "D": width, "WIDTH": power_of_two(width),
        "EPS": call.attrs["y"]["eps"], "STRIDE_X": row_stride(x), "STRIDE_GATE": row_stride(gate),
        "STRIDE_Y": row_stride(y), "R": config.rows, "DEPENDENT_LAUNCH": call.dependent_launch,
    }
    pointers = {"x_ptr": x, "gate_ptr": gate, "weight_ptr": weight, "y_ptr": y}
    return KernelLaunch(_gated_norm, (-(-x.shape[0] * heads // config.rows),), pointers, constants, config.warps, 1,
                        launch_options(call.dependent_launch))


def bind_combine(call: Call) -> KernelLaunch:
    """The launch of ``experts_combine``."""
    config = CombineConfig(**call.config)
    y, weights, out = (call.tensors[name] for name in ("y", "weights", "out"))
    rows, pairs, columns = y.shape
    assert y.is_contiguous(), f"pairs are strided: {y.shape} {y.stride()}"
    assert weights.shape == (rows, pairs), f"weights {weights.shape}, out {out.shape}"
    constants = {"PAIRS": pairs, "COLUMNS": columns, "STRIDE_WEIGHTS": row_stride(weights),
                 "STRIDE_OUT": row_stride(out), "C": config.columns, "DEPENDENT_LAUNCH": call.dependent_launch}
    return KernelLaunch(_combine, (-(-columns // config.columns), rows),
                        {"y_ptr": y, "weights_ptr": weights, "out_ptr": out}, constants, config.warps, 1,
                        launch_options(call.dependent_launch))
