"""Rounding to MXFP8 inside a kernel, to bytes: e4m3 numbers and the E8M0 byte of their group of 32.

The rule is the op's (``compiler/ops/mxfp8.py``): the scale is the smallest power of two that brings the largest of the
group to 448 = 1.75 * 2^8 or below. ``two_terms`` is not MXFP8: it writes numbers of up to 8 significant bits, which is
what bf16 has, as a sum of two e4m3 with scales 16 apart.
"""
from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32

from ..primitives import ptx

LOW_SHIFT = 4  # binary places between the scales of the two terms
LEAST, MOST = 1, 253  # E8M0 bytes of scales; their reciprocals are normal fp32


def scale_byte(largest: Any, least: int = LEAST) -> Any:
    """The E8M0 byte of a group whose largest magnitude is ``largest``, at least ``least``."""
    bits = largest.bitcast(Int32)
    above = ptx("{ .reg .pred p; setp.gt.s32 p, $1, 0x600000; selp.b32 $0, 1, 0, p; }", [Int32], [bits & 0x7FFFFF],
                pure=True)
    return ptx(f"{{ .reg .b32 t; max.s32 t, $1, {least}; min.s32 $0, t, {MOST}; }}", [Int32],
               [(bits >> 23) - 8 + above], pure=True)


def to_e4m3(first: Any, second: Any) -> Any:
    """Two fp32 rounded to e4m3, as the lower two bytes of a word."""
    return ptx("{ .reg .b16 e; cvt.rn.satfinite.e4m3x2.f32 e, $2, $1; cvt.u32.u16 $0, e; }", [Int32], [first, second],
               pure=True)


def from_e4m3(pair: Any) -> list[Any]:
    """The lower two bytes of a word as fp32."""
    return list(ptx("{ .reg .b16 e, l, h; .reg .b32 w; cvt.u16.u32 e, $2; cvt.rn.f16x2.e4m3x2 w, e; "
                    "mov.b32 {l, h}, w; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }", [Float32] * 2, [pair], pure=True))


def terms_of(first: Any, second: Any, down: Any, terms: int) -> list[Any]:
    """Two numbers of a group, times ``down`` (the reciprocal of its scale), as pairs of e4m3: the rounded numbers, and
    with two terms what rounding has left, for a scale 2^-4 of the first one's.

    At most 16 is left of a number up to 448, 256 in the second scale, and it has 4 significant bits, as an e4m3 has: a
    bf16 above 2^-13 of the group's largest is the sum of both exactly, of smaller ones less than 2^-21 of the largest
    is lost.
    """
    values = [first * down, second * down]
    found = [to_e4m3(*values)]
    if terms == 2:
        left = [value - near for value, near in zip(values, from_e4m3(found[0]), strict=True)]
        found.append(to_e4m3(left[0] * 2.0**LOW_SHIFT, left[1] * 2.0**LOW_SHIFT))
    return found
