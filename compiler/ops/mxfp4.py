"""MXFP4: the meaning of the packed expert weights.

OCP Microscaling Formats v1.0: blocks of 32 e2m1 numbers along the last dim share one e8m0 scale. This file
decides what the bytes mean. How a kernel wants them arranged is its own ``KernelDef``'s packing.
"""
from __future__ import annotations

from ._torch import torch

BLOCK = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
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
