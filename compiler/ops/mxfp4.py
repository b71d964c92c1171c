"""MXFP4: the meaning of the packed expert weights, and a quantiser to make some.

OCP Microscaling Formats v1.0: blocks of 32 e2m1 numbers along the last dim share one e8m0 scale. This file
decides what the bytes mean. How a kernel wants them arranged is its own ``KernelDef``'s packing.
"""
from __future__ import annotations

from itertools import pairwise

from ._torch import torch

BLOCK = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# the magnitude from which code i+1 is taken; a tie goes to the even code, so to i when i is even
_MIDPOINTS = tuple((low + high) / 2 for low, high in pairwise(E2M1))
_LARGEST_EXPONENT = 2  # of e2m1: 6 = 1.5 * 2^2
_BIAS = 127
_NAN_SCALE = 255


def unpack_scale(scale: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes (uint8, any shape) as fp32: ``2^(s - 127)``; 0 is the subnormal ``2^-127``, 255 is NaN."""
    bits = torch.arange(256, dtype=torch.int32, device=scale.device) << 23
    bits[0] = 1 << 22
    bits[_NAN_SCALE] = 0x7FC00000
    return bits.view(torch.float32)[scale.int()]


def unpack_mxfp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Decode ``packed`` uint8 ``[..., n/2]`` with ``scale`` uint8 ``[..., n/32]`` to fp32 ``[..., n]``.

    Byte j holds column 2j in its low nibble and 2j+1 in its high one; bit 3 of a nibble is the sign. Every
    finite result is exact (and exact in bf16, except for subnormals). Raises ``ValueError`` on other shapes.
    """
    blocks = packed.shape[-1] * 2 // BLOCK
    if packed.shape[-1] * 2 % BLOCK or scale.shape != (*packed.shape[:-1], blocks):
        raise ValueError(f"{tuple(packed.shape)} packed bytes do not match {tuple(scale.shape)} scales")
    values = torch.tensor((*E2M1, *(-v for v in E2M1)), dtype=torch.float32, device=packed.device)
    byte = torch.arange(256, device=packed.device)
    pairs = torch.stack((values[byte & 15], values[byte >> 4]), dim=-1)
    elements = pairs[packed.int()].view(*packed.shape[:-1], blocks, BLOCK)
    return (elements * unpack_scale(scale).unsqueeze(-1)).flatten(-2)


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
