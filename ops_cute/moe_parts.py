"""What the MoE kernels share while they are traced: bulk copies and their barriers, ``ldmatrix``, SiTU.

Addresses are numbers: Int64 of global memory, Int32 of this block's shared memory. Nothing here knows an op's contract.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from cutlass import Float32, Int32, Int64

from .primitives import Words, exp, ptx, reciprocal, select, sigmoid

ABSENT_MULTIPROCESSORS = 132  # of a GPU that is not here

# barriers in shared memory, 8 bytes each


def init_barrier(at: Any, arrivals: int) -> None:
    ptx(f"mbarrier.init.shared::cta.b64 [$0], {arrivals};", [], [at])


def init_barriers(at: Any, count: int, arrivals: int) -> None:
    """``count`` barriers in a row: of the slots of a ring, or of the buffers of sums."""
    for index in range(count):
        init_barrier(at + 8 * index, arrivals)


def publish_barriers() -> None:
    """Makes initialised barriers known to the copy engine. The threads still have to meet."""
    ptx("fence.mbarrier_init.release.cluster;", [], [])


def arrive(at: Any, count: int = 1, guard: Any = 1) -> None:
    ptx(f"{{ .reg .pred g; setp.ne.b32 g, $1, 0; @g mbarrier.arrive.shared::cta.b64 _, [$0], {count}; }}", [],
        [at, Int32(guard)])


def expect_bytes(at: Any, count: Any) -> None:
    """Arrives once, and lets the barrier's phase end only when ``count`` bytes more have been copied."""
    ptx("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", [], [at, count])


def await_phase(at: Any, parity: Any) -> None:
    """Waits until the phase of that parity has ended. Of a fresh barrier, parity 1 (before its first phase) has."""
    ptx("""{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @p bra done; bra again;
        done: }""", [], [at, parity])


def stream_policy() -> Any:
    """The cache policy of weights: gone from L2 before anything else."""
    return ptx("createpolicy.fractional.L2::evict_first.b64 $0, 1.0;", [Int64], [], pure=True)


def copy_bulk(to: Any, source: Any, size: Any, barrier: Any, policy: Any, guard: Any) -> None:
    """``size`` bytes (a multiple of 16, both ends on 16) into shared memory, counted at ``barrier``."""
    ptx("{ .reg .pred g; setp.ne.b32 g, $5, 0; @g cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [$0], [$1], $2, [$3], $4; }", [], [to, source, size, barrier, policy, Int32(guard)])


def copy_async(to: Any, source: Any, policy: Any, guard: Any) -> None:
    """16 bytes of each lane into shared memory; ``arrive_copied`` tells when they are there."""
    ptx("{ .reg .pred g; setp.ne.b32 g, $3, 0; @g cp.async.cg.shared.global.L2::cache_hint [$0], [$1], 16, $2; }", [],
        [to, source, policy, Int32(guard)])


def arrive_copied(at: Any) -> None:
    """Arrives for this thread at a barrier once all its copies so far have come."""
    ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", [], [at])


# shared memory


def load_matrices(at: Any, count: int = 4) -> Words:
    """``count`` (2 or 4) matrices of 8 rows of 16 bytes: lane 8 m + r gives the address of row r of matrix m, lane
    4 r + q gets word q of row r of each."""
    names = ", ".join(f"${i}" for i in range(count))
    return list(ptx(f"ldmatrix.sync.aligned.m8n8.x{count}.shared.b16 {{{names}}}, [${count}];", [Int32] * count, [at]))


def load_byte(at: Any) -> Any:
    return ptx("ld.shared.u8 $0, [$1];", [Int32], [at])


def load_signed_byte(at: Any) -> Any:
    return ptx("ld.shared.s8 $0, [$1];", [Int32], [at])


def store_byte(at: Any, value: Any, guard: Any) -> None:
    ptx("{ .reg .pred g; setp.ne.b32 g, $2, 0; @g st.shared.u8 [$0], $1; }", [], [at, value, Int32(guard)])


def load_word(at: Any) -> Any:
    return ptx("ld.shared.b32 $0, [$1];", [Int32], [at])


def store_word(at: Any, value: Any, guard: Any = 1) -> None:
    ptx("{ .reg .pred g; setp.ne.b32 g, $2, 0; @g st.shared.b32 [$0], $1; }", [], [at, value, Int32(guard)])


def add_shared(at: Any, value: Any, guard: Any) -> Any:
    """Adds to a word together with other threads: what it was before; undefined where ``guard`` is false."""
    return ptx("{ .reg .pred g; setp.ne.b32 g, $3, 0; mov.b32 $0, 0; @g atom.shared.add.u32 $0, [$1], $2; }", [Int32],
               [at, value, Int32(guard)])


def set_bits(at: Any, bits: Any, guard: Any) -> None:
    """Or of ``bits`` into a word, together with other threads."""
    ptx("{ .reg .pred g; setp.ne.b32 g, $2, 0; @g red.shared.or.b32 [$0], $1; }", [], [at, bits, Int32(guard)])


# words that are their own flags: zero has not come yet


def look(at: Any, guard: Any, count: int = 4) -> Words:
    """1 or 4 words that another block may be writing; ones where ``guard`` is false."""
    ones = " ".join(f"mov.b32 ${i}, 1;" for i in range(count))
    names = ", ".join(f"${i}" for i in range(count))
    form, place = (".v4", f"{{{names}}}") if count == 4 else ("", "$0")
    found = ptx(f"{{ .reg .pred g; setp.ne.b32 g, ${count + 1}, 0; {ones} "
                f"@g ld.relaxed.gpu.global{form}.b32 {place}, [${count}]; }}", [Int32] * count, [at, Int32(guard)])
    return list(found) if count > 1 else [found]


def publish(at: Any, word: Any, guard: Any) -> None:
    """Stores a word that other blocks look for."""
    ptx("{ .reg .pred g; setp.ne.b32 g, $2, 0; @g st.relaxed.gpu.global.b32 [$0], $1; }", [], [at, word, Int32(guard)])


def is_late(words: Sequence[Any]) -> Any:
    """1 where one of some words is zero, else 0."""
    least = words[0]
    for word in words[1:]:
        least = ptx("min.u32 $0, $1, $2;", [Int32], [least, word], pure=True)
    return select(least == 0, Int32(1), Int32(0))


def not_zero(word: Any) -> Any:
    """A word of two fp16, with minus zeros for plus zeros where both are."""
    return select(word == 0, Int32(-0x7FFF8000), word)


# numbers


def tanh(x: Any) -> Any:
    """The series keeps the relative accuracy of small arguments; exp(-2|x|) cannot overflow."""
    size = select(x < 0.0, -x, x)
    e = exp(size * -2.0)
    large = (1.0 - e) * reciprocal(1.0 + e)
    square = x * x
    small = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return select(size < 0.25, small, select(x < 0.0, -large, large))


def situ(gate: Any, up: Any, beta: float, linear_beta: float) -> Any:
    """beta tanh(gate / beta) sigmoid(gate) times linear_beta tanh(up / linear_beta), in fp32."""
    bounded = tanh(gate * (1.0 / beta)) * sigmoid(gate)
    return bounded * tanh(up * (1.0 / linear_beta)) * Float32(beta * linear_beta)


# the device


def multiprocessors(device: torch.device) -> int:
    """Blocks of a launch that waits inside itself: one on each multiprocessor, so that all run at once."""
    if device.type != "cuda":
        return ABSENT_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
