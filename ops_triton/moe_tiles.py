"""Device functions that the experts kernels share: MXFP4 decode, dot products of 32, rows of activations, SiTU.

One thread holds one scale group: 16 bytes of packed weights, 32 numbers of one row, against 32 activations in 16
registers. So weights go straight from memory to registers in 16-byte loads, no shared memory, no matrix unit, and
the E8M0 scale multiplies one fp32 number a group.

Decode: a nibble ``s e e m`` moved to bits 15 and 11..9 of an fp16 is e2m1 times 2^-14, subnormals included, so
four weights cost two masks and a shift or two as high bytes, and one byte permute a pair: 11 integer operations
for 8 weights. Pairs of a word are nibbles (0, 2), (4, 6), (1, 3), (5, 7). Products and sums of 16 of them run in
fp16 (two chains, 8 each a half), everything beyond in fp32. Activations are brought to [2^14, 2^15) by a power of
two a group, which the group's fp32 factor takes back, so no range is lost: rounding is relative to the group's
largest.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launching import INTERPRET

# whether kernels must do without NVIDIA's assembly
PORTABLE = INTERPRET or torch.version.hip is not None


def _decode_and_multiply(word: str, x: list[list[str]], sums: list[str]) -> str:
    """PTX: adds the products of one word's 8 weights to one fp16 pair of sums per row of activations."""
    lines = [
        f"shl.b32 t, {word}, 4;", "and.b32 t, t, 0x80808080;",
        f"shl.b32 l, {word}, 1;", "and.b32 l, l, 0x0E0E0E0E;", "or.b32 l, l, t;",
        f"and.b32 t, {word}, 0x80808080;",
        f"shr.b32 h, {word}, 3;", "and.b32 h, h, 0x0E0E0E0E;", "or.b32 h, h, t;",
    ]
    for pair, (source, selector) in enumerate((("l", "0x1404"), ("l", "0x3424"), ("h", "0x1404"), ("h", "0x3424"))):
        lines.append(f"prmt.b32 p, {source}, 0, {selector};")
        lines += [f"fma.rn.f16x2 {total}, p, {row[pair]}, {total};" for row, total in zip(x, sums, strict=True)]
    return " ".join(lines)


def _dot_32(rows: int) -> str:
    """PTX: ``rows`` fp32 results, from 4 words of weights and 16 words of fp16 pairs for each row."""
    words = [f"${rows + i}" for i in range(4)]
    x = [[[f"${rows + 4 + 16 * r + 4 * w + p}" for p in range(4)] for w in range(4)] for r in range(rows)]
    lines = [".reg .b32 t, l, h, p;", ".reg .b16 low, high;", ".reg .f32 f;"]
    for row in range(rows):
        lines += [f".reg .b32 a{row}, b{row};", f"mov.b32 a{row}, 0;", f"mov.b32 b{row}, 0;"]
    for index, word in enumerate(words):
        sums = [f"{'ab'[index // 2]}{row}" for row in range(rows)]
        lines.append(_decode_and_multiply(word, [x[row][index] for row in range(rows)], sums))
    for row in range(rows):
        lines += [
            f"add.rn.f16x2 a{row}, a{row}, b{row};", f"mov.b32 {{low, high}}, a{row};",
            f"cvt.f32.f16 ${row}, low;", "cvt.f32.f16 f, high;", f"add.f32 ${row}, ${row}, f;",
        ]
    # one line: torch.compile (2.11) writes a kernel's constants into a source between quotes, which a newline breaks
    return " ".join(["{", *lines, "}"])


DOT_1 = tl.constexpr(_dot_32(1))
DOT_2 = tl.constexpr(_dot_32(2))
DOT_1_OPERANDS = tl.constexpr("=&f" + ",r" * 20)
DOT_2_OPERANDS = tl.constexpr("=&f,=&f" + ",r" * 36)


@triton.jit
def _pack_pair(low, high, PORTABLE: tl.constexpr):
    """Two fp32 tiles to one tile of fp16 pairs, as i32."""
    if PORTABLE:
        low = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return low | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], tl.int32, True, 1)


@triton.jit
def _half(pairs, HIGH: tl.constexpr):
    bits = (pairs >> 16) if HIGH else pairs
    return (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _nibble(words, INDEX: tl.constexpr):
    """Nibble ``INDEX`` of each word as e2m1 times 2^-14 in fp32."""
    code = (words >> (4 * INDEX)) & 15
    bits = ((code & 8) << 12) | ((code & 7) << 9)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _word_dot(words, x0, x1, x2, x3):
    """The portable product of 8 weights a word with 4 words of fp16 pairs."""
    total = _nibble(words, 0) * _half(x0, False) + _nibble(words, 2) * _half(x0, True)
    total += _nibble(words, 4) * _half(x1, False) + _nibble(words, 6) * _half(x1, True)
    total += _nibble(words, 1) * _half(x2, False) + _nibble(words, 3) * _half(x2, True)
    return total + _nibble(words, 5) * _half(x3, False) + _nibble(words, 7) * _half(x3, True)


@triton.jit
def dot_groups(w, x, PORTABLE: tl.constexpr):
    """Dot products of 32: ``w`` 4 word tiles [R, L], ``x`` 16 pair tiles [1, L]; fp32 [R, L], unscaled."""
    if PORTABLE:
        total = _word_dot(w[0], x[0], x[1], x[2], x[3]) + _word_dot(w[1], x[4], x[5], x[6], x[7])
        return total + _word_dot(w[2], x[8], x[9], x[10], x[11]) + _word_dot(w[3], x[12], x[13], x[14], x[15])
    return tl.inline_asm_elementwise(
        DOT_1, DOT_1_OPERANDS,
        [w[0], w[1], w[2], w[3], x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10], x[11], x[12],
         x[13], x[14], x[15]], tl.float32, True, 1)


@triton.jit
def dot_groups_of_two(w, x, y, PORTABLE: tl.constexpr):
    """``dot_groups`` of two rows of activations, with one decode."""
    if PORTABLE:
        return dot_groups(w, x, PORTABLE), dot_groups(w, y, PORTABLE)
    return tl.inline_asm_elementwise(
        DOT_2, DOT_2_OPERANDS,
        [w[0], w[1], w[2], w[3], x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10], x[11], x[12],
         x[13], x[14], x[15], y[0], y[1], y[2], y[3], y[4], y[5], y[6], y[7], y[8], y[9], y[10], y[11], y[12],
         y[13], y[14], y[15]], (tl.float32, tl.float32), True, 1)


@triton.jit
def split_four(tile, ROWS: tl.constexpr, LANES: tl.constexpr):
    """[ROWS, LANES, 4] to 4 tiles [ROWS, LANES]."""
    even, odd = tl.split(tl.reshape(tile, (ROWS, LANES, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def load_words(at, mask, ROWS: tl.constexpr, LANES: tl.constexpr):
    """One group a lane: ``at`` i32 pointers and ``mask`` [ROWS, 4 LANES]; 4 tiles [ROWS, LANES].

    Two dimensions, because the load decides which thread holds what: along a row, 4 words each.
    """
    words = tl.load(at, mask=mask, other=0, eviction_policy="evict_first")
    return split_four(words, ROWS, LANES)


@triton.jit
def scale_of(byte):
    """E8M0 as fp32: 0 is 2^-127, 255 is NaN."""
    bits = tl.maximum(byte.to(tl.int32) << 23, 0x00400000)
    scale = bits.to(tl.float32, bitcast=True)
    return tl.where(byte == 255, float("nan"), scale)


@triton.jit
def first_expert(rank_ptr, LOCAL: tl.constexpr, EXPERTS: tl.constexpr):
    """The lowest expert id of this rank."""
    if LOCAL < EXPERTS:
        return tl.load(rank_ptr) * LOCAL
    return 0


@triton.jit
def next_pair(every, same, pair, IDS: tl.constexpr):
    """The next index after ``pair`` in the set ``same`` of the indices ``every`` [IDS]; IDS when there is none."""
    return tl.min(tl.where(same & (every > pair), every, IDS), 0)


@triton.jit
def _power_of_two(biased):
    return (biased << 23).to(tl.float32, bitcast=True)


@triton.jit
def _round_to_e4m3(x, largest):
    """x [L, 4, 8] to the numbers that MXFP8 with a scale for ``largest`` [L] holds."""
    bits = largest.to(tl.int32, bitcast=True)
    # the smallest exponent with largest <= 448 * 2^e; 448 is 1.75 * 2^8
    exponent = tl.where(largest > 0, (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32), 127)
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)[:, None, None]
    scaled = x * _power_of_two(254 - exponent)
    # adding and taking away 1.5 * 2^23 quanta rounds to nearest even. e4m3 has 3 mantissa bits and normals from 2^-6
    quantum = tl.maximum((scaled.to(tl.int32, bitcast=True) >> 23) & 255, 121) - 3
    magic = 1.5 * _power_of_two(quantum + 23)
    return ((scaled + magic) - magic) * _power_of_two(exponent)


@triton.jit
def load_activations(at, mask, LANES: tl.constexpr, ROUND: tl.constexpr, PORTABLE: tl.constexpr):
    """Groups of 32 activations for ``dot_groups``: ``at`` pointers and ``mask`` [32 LANES].

    Returns 16 tiles [1, LANES] of fp16 pairs and the factor fp32 [1, LANES] that scales the products back.
    ``ROUND`` rounds to MXFP8 first.
    """
    x = tl.reshape(tl.load(at, mask=mask, other=0.0).to(tl.float32), (LANES, 4, 8))
    largest = tl.max(tl.max(tl.abs(x), 2), 1)
    if ROUND:
        x = _round_to_e4m3(x, largest)
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 15)
    x = x * _power_of_two(268 - exponent)[:, None, None]
    even, odd = tl.split(tl.reshape(x, (LANES, 4, 2, 2, 2)))
    even_low, even_high = tl.split(even)
    odd_low, odd_high = tl.split(odd)
    p0, p1 = tl.split(_pack_pair(even_low, even_high, PORTABLE))
    p2, p3 = tl.split(_pack_pair(odd_low, odd_high, PORTABLE))
    a0, a1, a2, a3 = split_four(p0[None, :, :], 1, LANES)
    b0, b1, b2, b3 = split_four(p1[None, :, :], 1, LANES)
    c0, c1, c2, c3 = split_four(p2[None, :, :], 1, LANES)
    d0, d1, d2, d3 = split_four(p3[None, :, :], 1, LANES)
    pairs = (a0, b0, c0, d0, a1, b1, c1, d1, a2, b2, c2, d2, a3, b3, c3, d3)
    return pairs, _power_of_two(exponent)[None, :]
