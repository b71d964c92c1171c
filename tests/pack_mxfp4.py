"""A quantiser to MXFP4, for tests that need packed weights: k3plan itself only reads them."""
from __future__ import annotations

from itertools import pairwise

import torch

from k3plan.compiler.ops.mxfp4 import BLOCK, E2M1

# the magnitude from which code i+1 is taken; a tie goes to the even code, so to i when i is even
_MIDPOINTS = tuple((low + high) / 2 for low, high in pairwise(E2M1))
_LARGEST_EXPONENT = 2  # of e2m1: 6 = 1.5 * 2^2
_BIAS = 127
_NAN_SCALE = 255


def pack_mxfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise fp32 ``[..., n]`` to packed uint8 ``[..., n/2]`` and scale uint8 ``[..., n/32]``.

    The OCP rule (section 6.3): the shared exponent is ``floor(log2(max |x|)) - 2``, clamped to [-127, 127];
    elements are rounded to nearest, ties to the even code, and saturate at 6. Zeros keep their sign. A block
    of zeros gets scale byte 0; one with an infinity or a NaN gets scale byte 255, which decodes to NaN.
    Raises ``ValueError`` when n is not a multiple of 32.
    """
    if x.shape[-1] % BLOCK:
        raise ValueError(f"the last dim of {tuple(x.shape)} is not a multiple of {BLOCK}")
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1)
    finite = torch.isfinite(largest)
    # frexp gives a mantissa in [0.5, 1), so its exponent is floor(log2) + 1, subnormals included
    exponent = torch.frexp(torch.where(finite, largest, 1.0)).exponent - 1 - _LARGEST_EXPONENT
    exponent = torch.where(largest == 0, -_BIAS, exponent.clamp(-_BIAS, _BIAS))
    scaled = torch.ldexp(blocks, -exponent.unsqueeze(-1))
    code = _round_to_code(scaled.abs()) | (torch.signbit(scaled).to(torch.uint8) << 3)
    scale = torch.where(finite, exponent + _BIAS, _NAN_SCALE).to(torch.uint8)
    code = code.flatten(-2)
    return code[..., 0::2] | (code[..., 1::2] << 4), scale


def _round_to_code(magnitude: torch.Tensor) -> torch.Tensor:
    """The e2m1 code (uint8, 0..7) nearest to each fp32 magnitude; NaN gives 7."""
    bounds = torch.tensor(_MIDPOINTS, dtype=torch.float32, device=magnitude.device)
    above = torch.nextafter(bounds, torch.full_like(bounds, torch.inf))
    bounds[0::2] = above[0::2]
    return torch.bucketize(magnitude, bounds, out_int32=True, right=True).to(torch.uint8)
