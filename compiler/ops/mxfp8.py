"""MXFP8 activations: e4m3 elements with one E8M0 scale per 32, as block-scaled matrix units take them."""
from __future__ import annotations

from ._torch import torch

GROUP = 32
E4M3_MAX = 448.0


def round_to_mxfp8(x: torch.Tensor) -> torch.Tensor:
    """x [..., n] rounded to what MXFP8 holds, as fp32. The scale is the smallest power of two that fits 448."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    # 448 is 0.875 * 2^9, and frexp's mantissa is in [0.5, 1)
    mantissa, exponent = torch.frexp(largest)
    exponent = torch.where(largest.isinf(), 127, exponent - 9 + (mantissa > 0.875)).clamp(-127, 127)
    scale = torch.exp2(torch.where(largest > 0, exponent, 0).float())
    quantised = (groups / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()
    return (quantised * scale).flatten(-2)
