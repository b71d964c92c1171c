"""Instructions that the kernels share and the DSL has no word for, as functions that a kernel calls while it is traced.

16 bytes of bf16 are 4 words (Int32) in registers. Nothing here knows an op or decides anything.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm

_LETTERS = {Int32: "r", Uint32: "r", Int64: "l", Float32: "f"}
Words = list[Any]  # Int32
WARP = 32


def ptx(text: str, results: Sequence[Any], operands: Sequence[Any], *, tied: int = 0, pure: bool = False) -> Any:
    """Assembly with ``results`` (types, $0...) and ``operands`` (values, numbered after them). The first ``tied``
    operands begin in the registers of the results. ``pure``: may be moved, merged and dropped; otherwise it keeps its
    place among the others."""
    letters = [f"={_LETTERS[kind]}" for kind in results]
    letters += [str(i) if i < tied else _LETTERS[type(value)] for i, value in enumerate(operands)]
    letters += [] if pure else ["~{memory}"]
    kinds = [kind.mlir_type for kind in results]
    made = llvm.inline_asm(
        None if not kinds else kinds[0] if len(kinds) == 1 else llvm.StructType.get_literal(kinds),  # type: ignore[attr-defined]
        [value.ir_value() for value in operands], text, ",".join(letters), has_side_effects=not pure,
        is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT)
    if len(results) < 2:
        return results[0](made) if results else None
    return [kind(llvm.extractvalue(kind.mlir_type, made, [i])) for i, kind in enumerate(results)]


def address(pointer: Any) -> Any:
    """Address as a number: Int64 of global memory, Int32 of shared memory."""
    return pointer.toint()


def select(condition: Any, yes: Any, no: Any) -> Any:
    """``yes`` where ``condition``, else ``no``, without a branch."""
    kind = type(yes)
    return kind(llvm.select(Boolean(condition).ir_value(), yes.ir_value(), no.ir_value()))


# global memory, by address

# streamed once: the weights of a launch are not read again before they have left the caches
_STREAM = "ld.global.L1::no_allocate.L2::256B"


# of the memory of the whole GPU as it is now: what another kernel of the step has written, before this one has waited
_SETTLED = "ld.relaxed.gpu.global"


def flag(condition: Any) -> Any:
    """1 where ``condition``, else 0: a guard."""
    return select(condition, Int32(1), Int32(0))


def load_words(at: Any, count: int = 4, *, guard: Any = None, stream: bool = False, settled: bool = False) -> Words:
    """``count`` (1, 2, 4) words; zeros where ``guard`` is false. ``stream``: no kernel of a step writes them.
    ``settled``: a kernel of the step has, and this is read before the wait, past the first-level cache."""
    names = ", ".join(f"${i}" for i in range(count))
    kind = _SETTLED if settled else _STREAM if stream else "ld.global"
    load = f"{kind}.b32 $0, [$1];" if count == 1 else f"{kind}.v{count}.b32 {{{names}}}, [${count}];"
    if guard is None:
        found = ptx(load, [Int32] * count, [at])
    else:
        zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(count))
        found = ptx(f"{{ .reg .pred g; setp.ne.b32 g, ${count + 1}, 0; {zeros} @g {load} }}", [Int32] * count,
                    [at, Int32(guard)])
    return [found] if count == 1 else found


def load_half(at: Any, *, guard: Any = None) -> Any:
    """2 bytes in the lower half of a word, zero above."""
    if guard is None:
        return ptx("ld.global.u16 $0, [$1];", [Int32], [at])
    return ptx("{ .reg .pred g; setp.ne.b32 g, $2, 0; mov.b32 $0, 0; @g ld.global.u16 $0, [$1]; }", [Int32],
               [at, Int32(guard)])


def load_bytes(at: Any, count: int, alignment: int, *, guard: Any = None) -> Words:
    """``count`` bytes (a multiple of 4) as words, by the widest loads that ``alignment`` allows (2 at least)."""
    size = min(count, alignment, 16)
    if size >= 4:
        return [word for i in range(0, count, size) for word in load_words(at + i, size // 4, guard=guard)]
    return [load_half(at + i, guard=guard) | (load_half(at + i + 2, guard=guard) << 16) for i in range(0, count, 4)]


def store_words(at: Any, words: Words, *, guard: Any = None) -> None:
    """Stores 1, 2 or 4 words, where ``guard`` is true."""
    count = len(words)
    names = ", ".join(f"${i + 1}" for i in range(count))
    text = "st.global.b32 [$0], $1;" if count == 1 else f"st.global.v{count}.b32 [$0], {{{names}}};"
    if guard is None:
        ptx(text, [], [at, *words])
    else:
        ptx(f"{{ .reg .pred g; setp.ne.b32 g, ${count + 1}, 0; @g {text} }}", [], [at, *words, Int32(guard)])


def store_half(at: Any, word: Any, *, guard: Any = None) -> None:
    """Stores the lower 2 bytes of a word, where ``guard`` is true."""
    if guard is None:
        ptx("{ .reg .b16 h; cvt.u16.u32 h, $1; st.global.b16 [$0], h; }", [], [at, word])
    else:
        ptx("{ .reg .pred g; .reg .b16 h; setp.ne.b32 g, $2, 0; cvt.u16.u32 h, $1; @g st.global.b16 [$0], h; }", [],
            [at, word, Int32(guard)])


# numbers


def low(word: Any) -> Any:
    """The first bf16 of a word as fp32."""
    return (word << 16).bitcast(Float32)


def high(word: Any) -> Any:
    """The second bf16 of a word as fp32."""
    return (word & Int32(-65536)).bitcast(Float32)


def unpack(words: Words) -> list[Any]:
    """The bf16 of some words as fp32."""
    return [half(word) for word in words for half in (low, high)]


def again(words: Words) -> Words:
    """``words`` as if they were others: what was made of them before is not kept in registers but made anew."""
    return ptx("", [Int32] * len(words), words, tied=len(words))


def pack(values: Sequence[Any]) -> Words:
    """Pairs of fp32 rounded to bf16, the first of a pair in the lower half."""
    return [ptx("cvt.rn.bf16x2.f32 $0, $2, $1;", [Int32], [first, second], pure=True)
            for first, second in zip(values[::2], values[1::2], strict=True)]


def exp2(x: Any) -> Any:
    """2^x, error below 2 units in the last place."""
    return ptx("ex2.approx.ftz.f32 $0, $1;", [Float32], [x], pure=True)


def exp(x: Any) -> Any:
    """e^x through ``exp2``."""
    return exp2(x * 1.4426950408889634)


def log(x: Any) -> Any:
    """Natural logarithm, absolute error below 1e-6 near 1."""
    return ptx("lg2.approx.ftz.f32 $0, $1;", [Float32], [x], pure=True) * 0.6931471805599453


def rsqrt(x: Any) -> Any:
    """x^-1/2, error below 2 units in the last place."""
    return ptx("rsqrt.approx.ftz.f32 $0, $1;", [Float32], [x], pure=True)


def reciprocal(x: Any) -> Any:
    """1/x, error below 1 unit in the last place."""
    return ptx("rcp.approx.ftz.f32 $0, $1;", [Float32], [x], pure=True)


def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x)."""
    return reciprocal(1.0 + exp(-x))


def maximum(values: Sequence[Any]) -> Any:
    """The largest of some fp32, by a tree."""
    values = list(values)
    while len(values) > 1:
        pairs = [cute.arch.fmax(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


def total(values: Sequence[Any]) -> Any:
    """The sum of some fp32, by a tree."""
    values = list(values)
    while len(values) > 1:
        pairs = [a + b for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


def mma(a: Words, b: Words, c: Sequence[Any]) -> list[Any]:
    """c + a b of m16n8k16, bf16 with fp32 sums. Lane 4 r + q holds of a the words (row r, columns 2 q and 2 q + 1),
    (row r + 8), (row r, columns + 8), (row r + 8, columns + 8); of b the words (rows 2 q and 2 q + 1, column r),
    (rows + 8); of c (row r, columns 2 q and 2 q + 1), (row r + 8)."""
    return list(ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, "
        "{$10, $11, $12, $13};", [Float32] * 4, [*a, *b, *c], pure=True))


# warps


def lane_xor(value: Any, lanes: int) -> Any:
    """The value of the lane whose number differs in the bits of ``lanes``."""
    return cute.arch.shuffle_sync_bfly(value, offset=lanes)


def lane_value(value: Any, lane: Any) -> Any:
    """The value of one lane."""
    return cute.arch.shuffle_sync(value, lane)


def sum_each(values: Sequence[Any], lane: Any) -> Any:
    """Sums over the lanes of a warp of a power of two of values: lane l holds that of value ``l mod len(values)``.

    A step halves the values that a lane is responsible for, so that n values cost n + 4 shuffles at most, not 5 n.
    """
    held, step = list(values), len(values) // 2
    while step:
        upper = (lane & step) != 0
        kept = [select(upper, held[i + step], held[i]) for i in range(step)]
        sent = [select(upper, held[i], held[i + step]) for i in range(step)]
        held = [mine + lane_xor(other, step) for mine, other in zip(kept, sent, strict=True)]
        step //= 2
    value, step = held[0], len(values)
    while step < WARP:
        value = value + lane_xor(value, step)
        step *= 2
    return value


def sum_lanes(value: Any, lanes: int = WARP) -> Any:
    """The sum over ``lanes`` neighbouring lanes, in each of them."""
    while lanes > 1:
        lanes //= 2
        value = value + lane_xor(value, lanes)
    return value


def own_thread() -> Any:
    """The thread's number, read where it is used: what follows from it takes no registers over a loop."""
    return ptx("mov.u32 $0, %tid.x;", [Int32], [])


# shared memory of the cluster, by address


def peer_address(at: Any, rank: Any) -> Any:
    """Where a shared address of this block lies in block ``rank`` of the cluster."""
    return ptx("mapa.shared::cluster.u32 $0, $1, $2;", [Int32], [at, rank], pure=True)


def send(at: Any, values: Sequence[Any], barrier: Any, *, guard: Any = None) -> None:
    """Stores 1 or 4 fp32 at a cluster address and counts their bytes at the barrier beside them, where ``guard`` is
    true."""
    count = len(values)
    names = ", ".join(f"${i + 1}" for i in range(count))
    form, place = (".v4", f"{{{names}}}") if count == 4 else ("", names)
    text = f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{form}.f32 [$0], {place}, [${count + 1}];"
    if guard is None:
        ptx(text, [], [at, *values, barrier])
    else:
        ptx(f"{{ .reg .pred g; setp.ne.b32 g, ${count + 2}, 0; @g {text} }}", [], [at, *values, barrier, Int32(guard)])


def load_shared(at: Any, count: int = 1) -> Any:
    """1, 2 or 4 fp32 of this block's shared memory."""
    names = ", ".join(f"${i}" for i in range(count))
    if count == 1:
        return ptx("ld.shared.f32 $0, [$1];", [Float32], [at])
    return ptx(f"ld.shared.v{count}.f32 {{{names}}}, [${count}];", [Float32] * count, [at])


def store_shared(at: Any, values: Sequence[Any], *, guard: Any = None) -> None:
    """Stores 1, 2 or 4 fp32 in this block's shared memory, where ``guard`` is true."""
    count = len(values)
    names = ", ".join(f"${i + 1}" for i in range(count))
    text = "st.shared.f32 [$0], $1;" if count == 1 else f"st.shared.v{count}.f32 [$0], {{{names}}};"
    if guard is None:
        ptx(text, [], [at, *values])
    else:
        ptx(f"{{ .reg .pred g; setp.ne.b32 g, ${count + 1}, 0; @g {text} }}", [], [at, *values, Int32(guard)])
