"""MXFP4 weights and MXFP8 activations inside a kernel: decode, scales, products. The bytes are the checkpoint's.

Nothing is repacked: byte j of a row holds columns 2j (low nibble) and 2j + 1, 16 bytes are one scale group of 32
columns, 4 bytes are what one lane of a matrix instruction takes of it. That is the layout that ``ldmatrix`` reads
(8 rows of 16 bytes, word q of row r to lane 4 r + q), so weights go from the checkpoint's rows in shared memory to the
registers of ``mma`` without a shuffle and a reloaded checkpoint needs no second pass.

Decode: a nibble ``s e e m`` whose sign stands in bit 15 and the rest in bits 11..9 of an fp16 is e2m1 times 2^-14,
subnormals included (bias 15 against 1). 8 weights of a word become two words of high bytes (two masks and a shift
each) and 4 byte permutes: 9 integer instructions and 2 left shifts, which the assembler gives to the multiplier, so
1.1 of the integer pipe a weight. Every e2m1 is exact. Pairs come out as columns (0, 2), (4, 6), (1, 3), (5, 7): the
activations are arranged to match, once a launch.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cutlass import Float32, Int32

from ..primitives import Words, maximum, ptx

GROUP = 32  # columns of one scale
WORD = 8  # weights
PAIRS = ((0, 2), (4, 6), (1, 3), (5, 7))  # columns of a word in the order of its decoded pairs
WEIGHT_EXPONENT = -14  # of the decoded weights: value = fp16 * 2^14
# fp16 activations are brought below 2^15 by a power of two; what is 2^-39 of the largest is still exact
TOP_EXPONENT = 15


def permute_bytes(a: Any, b: Any, selector: int) -> Any:
    """Byte i of the result is byte ``selector >> 4 i & 7`` of a (0..3) and b (4..7)."""
    return ptx(f"prmt.b32 $0, $1, $2, {selector};", [Int32], [a, b], pure=True)


def decode(word: Any, permute: Callable[[Any, Any, int], Any] | None = None, zero: Any = None) -> Words:
    """The 8 weights of a word as 4 words of fp16 pairs (``PAIRS``), each times 2^-14. On other words than the kernel's,
    ``permute`` and ``zero`` are theirs."""
    permute, zero = permute or permute_bytes, Int32(0) if zero is None else zero
    even = ((word << 1) & 0x0E0E0E0E) | ((word << 4) & -0x7F7F7F80)
    odd = ((word >> 3) & 0x0E0E0E0E) | (word & -0x7F7F7F80)
    return [permute(half, zero, selector) for half in (even, odd) for selector in (0x1404, 0x3424)]


def scale_of(byte: Any) -> Any:
    """E8M0 as fp32, 2^(byte - 127). Byte 0 counts as 0 (it is 2^-127, below every normal fp32), 255 as infinity (it is
    NaN; the products with it are infinite or NaN)."""
    return (byte << 23).bitcast(Float32)


def mma_f16(a: Sequence[Any], b: Sequence[Any], c: Sequence[Any] | None = None) -> list[Any]:
    """c + a b of m16n8k16, fp16 with fp32 sums; without ``c``, a b. Lane 4 r + q holds of a (row r), (row r + 8),
    (row r, second half of k), (row r + 8, second half); of b (column r), (second half); of c (row r, columns 2 q and
    2 q + 1), (row r + 8)."""
    c = [Float32(0.0)] * 4 if c is None else c
    return list(ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, "
        "{$10, $11, $12, $13};", [Float32] * 4, [*a, *b, *c], pure=True))


def dot_group(first: Any, second: Any, x: Sequence[Any]) -> list[Any]:
    """Products of one scale group: ``first`` and ``second`` are a lane's words of rows r and r + 8, ``x`` its 4 words
    of activations. The result is unscaled and times 2^-14 and whatever ``x`` carries."""
    p, q = decode(first), decode(second)
    half = mma_f16((p[0], q[0], p[1], q[1]), (x[0], x[1]))
    return mma_f16((p[2], q[2], p[3], q[3]), (x[2], x[3]), half)


def pack_f16(low: Any, high: Any) -> Any:
    """Two fp32 rounded to a word of fp16."""
    return ptx("cvt.rn.f16x2.f32 $0, $2, $1;", [Int32], [low, high], pure=True)


def unpack_f16(word: Any) -> list[Any]:
    """A word of fp16 as two fp32."""
    return ptx("{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }", [Float32] * 2, [word],
               pure=True)


def larger_halves(a: Any, b: Any) -> Any:
    """The larger of two unsigned 16-bit numbers, in each half of a word."""
    return ptx("max.u16x2 $0, $1, $2;", [Int32], [a, b], pure=True)


def largest_of(words: Sequence[Any]) -> Any:
    """The largest magnitude of the bf16 of some words, as fp32: without their signs they are ordered as numbers are."""
    sizes = [word & 0x7FFF7FFF for word in words]
    while len(sizes) > 1:
        pairs = [larger_halves(a, b) for a, b in zip(sizes[::2], sizes[1::2], strict=False)]
        sizes = pairs + sizes[len(pairs) * 2 :]
    return maximum([(sizes[0] << 16).bitcast(Float32), (sizes[0] & Int32(-65536)).bitcast(Float32)])


def power_of_two(biased: Any) -> Any:
    """2^(biased - 127) for a biased exponent from 1 to 254."""
    return (biased << 23).bitcast(Float32)


def biased_exponent(x: Any) -> Any:
    """The exponent bits of a non-negative fp32."""
    return x.bitcast(Int32) >> 23


def round_to_e4m3(values: Sequence[Any], largest: Any) -> list[Any]:
    """fp32 rounded to what MXFP8 holds whose scale is made for ``largest``, the largest magnitude of the group of 32.

    The scale is the smallest power of two that brings it to 448 = 1.75 * 2^8 or below (``compiler/ops/mxfp8.py``).
    """
    bits = largest.bitcast(Int32)
    above = ptx("{ .reg .pred p; setp.gt.s32 p, $1, 0x600000; selp.b32 $0, 1, 0, p; }", [Int32], [bits & 0x7FFFFF],
                pure=True)
    exponent = ptx("{ .reg .b32 t; max.s32 t, $1, 1; min.s32 $0, t, 253; }", [Int32], [(bits >> 23) - 8 + above],
                   pure=True)
    down, up = power_of_two(254 - exponent), power_of_two(exponent)
    found = []
    for first, second in zip(values[::2], values[1::2], strict=True):
        halves = ptx(
            "{ .reg .b16 e; cvt.rn.satfinite.e4m3x2.f32 e, $2, $1; cvt.rn.f16x2.e4m3x2 $0, e; }", [Int32],
            [first * down, second * down], pure=True)
        found += [half * up for half in unpack_f16(halves)]
    return found
