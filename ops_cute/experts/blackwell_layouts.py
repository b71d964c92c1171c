"""Where the tensor cores of sm_100 and sm_103 want operands, scales and sums, and the bits that tell them so.

Of ``tcgen05.mma``, kind mxf8f6f4 with block scales, 128 x n x 32: sums[128, n] += weights[128, 32] times rows[n, 32],
every row of both with one E8M0 scale for its 32 columns; and kind f16 for plain bf16, 128 x n x 16. Weights come from
tensor memory, rows from shared memory. Pure functions of numbers: kernels compute addresses with them, and the tests
hold them against a model of the instruction that reads its bits back (``tests/cute/tensor_core.py``). Decides no tile
and no schedule.

Sources: PTX ISA 9.7.16.2 (shapes), .3 (strides), .4 (descriptors), .10.4 (packing), .10.5 (sums), .10.7 (scales).
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LANES, COLUMNS = 128, 512  # of tensor memory, 4 bytes each
QUARTER = 32  # lanes that one warp of four reaches
DEPTH = 32  # columns of one instruction, and of one scale
SCALES = 4  # groups whose scales make a word of tensor memory
SCALE_BLOCK = 512  # bytes in shared memory of such words for up to 128 rows

# formats of weights: bits in the instruction's descriptor, and what their value times is e2m1
FORMATS = {"e4m3": 0, "e2m1": 5}
FACTORS = {"e4m3": 2.0**6, "e2m1": 1.0}

# a row's 8 columns in the order of the bytes of both operands: what masks and shifts make of a word of 8 nibbles.
# Columns of one scale may stand in any order that both operands share
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def tensor_address(lane: int, column: int) -> int:
    """Address in tensor memory, to add to what an allocation returned."""
    return lane << 16 | column


def instruction(weights: str, n: Any, group: int) -> Any:
    """The 32-bit descriptor of the instruction for ``n`` rows (a multiple of 8 up to 256), whose scales are byte
    ``group`` (0 to 3) of their words: both operands by rows, rows e4m3, scales E8M0, sums fp32. ``n`` may be a number
    of the kernel's."""
    fixed = FORMATS[weights] << 7 | group << 4 | 1 << 23 | (LANES >> 7) << 27 | group << 29
    return (n << 14) + fixed


def instruction_bf16(n: Any) -> Any:
    """The 32-bit descriptor of kind f16 for ``n`` rows: both operands bf16 by rows, sums fp32."""
    return (n << 14) + (1 << 4 | 1 << 7 | 1 << 10 | (LANES >> 4) << 24)


def shared_descriptor(leading: int, stride: int) -> int:
    """The 64-bit descriptor of a matrix at address 0 of shared memory, not swizzled: blocks of 8 rows of 16 bytes, the
    next 16 columns ``leading`` bytes on and the next 8 rows ``stride`` bytes on. Add ``address >> 4``."""
    return leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46


def leading_bytes(rows: int) -> int:
    """Between 16 columns and the next of an operand that has room for ``rows`` rows, a multiple of 8."""
    return 16 * rows


ROW_BLOCK = 128  # bytes of 8 rows of 16 columns: between 8 rows and the next


def row_place(row: Any, chunk: Any, rows: int) -> Any:
    """Where the 16 bytes of ``row`` and of columns 16 ``chunk`` to 16 ``chunk`` + 15 lie in an operand of ``rows``."""
    return chunk * leading_bytes(rows) + (row >> 3) * ROW_BLOCK + (row & 7) * 16


def scale_place(row: Any, group: Any) -> Any:
    """Byte in shared memory of the scale of ``row`` (below 128) and ``group``, in blocks of ``SCALE_BLOCK`` as
    ``tcgen05.cp`` with shape 32x128b takes them. It puts a block into 4 columns: word ``row // 32`` of lane ``row %
    32``, repeated in all four quarters."""
    return (group >> 2) * SCALE_BLOCK + (row & 31) * 16 + (row >> 5) * 4 + (group & 3)


def scale_column(group: int) -> int:
    """First of the 4 columns of tensor memory with the scales of a group."""
    return 4 * (group // SCALES)


def weight_column(group: int) -> int:
    """First of the 8 columns of tensor memory with a group of weights; lane r has row r, a byte each."""
    return DEPTH // 4 * group


def weight_words(word: Any, weights: str) -> Sequence[Any]:
    """The 8 weights of a checkpoint's word (low nibble first) as two words of bytes in ``ORDER``. Exact.

    "e4m3": the bits s eem of a nibble as s00eem00, which is e2m1 times 2^-6, subnormals included (bias 7 against 1).
    "e2m1": the nibble in the middle of its byte, as kind mxf8f6f4 takes 4-bit numbers in 8-bit containers.
    """
    if weights == "e2m1":
        return (word << 2) & 0x3C3C3C3C, (word >> 2) & 0x3C3C3C3C
    return (((word << 2) & 0x1C1C1C1C) | ((word << 4) & -0x7F7F7F80),
            ((word >> 2) & 0x1C1C1C1C) | (word & -0x7F7F7F80))
