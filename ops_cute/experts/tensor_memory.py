"""The fifth-generation tensor core of sm_100 and sm_103 while a kernel is traced: its memory, its instructions.

Addresses of tensor memory are Int32 (``blackwell_layouts.tensor_address``). A warp reaches the 32 lanes of its place
among four: its loads and stores name the lane ``32 (warp % 4)``. Multiplying and copying are issued by one thread and
end later: ``commit`` arrives at a barrier when all that the thread has issued has ended. Threads that hand tensor
memory to one another fence on both sides of the barrier.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32

from ..primitives import Words, ptx


def allocate(at: Any, columns: int) -> None:
    """One warp: takes ``columns`` (a power of two, 32 to 512) of tensor memory, and stores their address in shared
    memory. Waits while a block beside this one has them."""
    ptx(f"tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [$0], {columns};", [], [at])
    ptx("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;", [], [])


def deallocate(tensor: Any, columns: int) -> None:
    """One warp: gives them back. A kernel must, before it ends."""
    ptx(f"tcgen05.dealloc.cta_group::1.sync.aligned.b32 $0, {columns};", [], [tensor])


def fence_before() -> None:
    """What this thread did in tensor memory is done before its next arrival at a barrier."""
    ptx("tcgen05.fence::before_thread_sync;", [], [])


def fence_after() -> None:
    """What this thread does next in tensor memory comes after the barrier that it has passed."""
    ptx("tcgen05.fence::after_thread_sync;", [], [])


def fence_shared() -> None:
    """What this thread stored in shared memory is there for the tensor core, and for the copy engine."""
    ptx("fence.proxy.async.shared::cta;", [], [])


def store_columns(at: Any, words: Words) -> None:
    """Each lane's 4 or 8 words into as many columns."""
    count = len(words)
    names = ", ".join(f"${i + 1}" for i in range(count))
    ptx(f"tcgen05.st.sync.aligned.32x32b.x{count}.b32 [$0], {{{names}}};", [], [at, *words])


def await_stores() -> None:
    """Until this thread's stores to tensor memory have ended."""
    ptx("tcgen05.wait::st.sync.aligned;", [], [])


def load_columns(places: Sequence[Any]) -> list[list[Any]]:
    """8 columns of fp32 from each of one or two places: each lane gets its own row. They have come when it returns."""
    text, last = "", 8 * len(places)
    for index in range(len(places)):
        names = ", ".join(f"${8 * index + i}" for i in range(8))
        text += f"tcgen05.ld.sync.aligned.32x32b.x8.b32 {{{names}}}, [${last + index}]; "
    found = list(ptx(f"{{ {text}tcgen05.wait::ld.sync.aligned; }}", [Float32] * last, list(places)))
    return [found[start : start + 8] for start in range(0, last, 8)]


def copy_scales(at: Any, descriptor: Any) -> None:
    """One thread: a block of scales from shared memory to 4 columns, in all four quarters. Comes before what the same
    thread multiplies later."""
    ptx("tcgen05.cp.cta_group::1.32x128b.warpx4 [$0], $1;", [], [at, descriptor])


def multiply(sums: Any, weights: Any, rows: Any, instruction: Any, weight_scales: Any, row_scales: Any,
             add: Any) -> None:
    """One thread: 128 x n x 32 with block scales; ``sums`` is overwritten where ``add`` is 0. ``rows`` is a descriptor
    of shared memory, the others are addresses of tensor memory."""
    ptx("{ .reg .pred p; setp.ne.b32 p, $6, 0; tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale "
        "[$0], [$1], $2, $3, [$4], [$5], p; }", [],
        [sums, weights, rows, instruction, weight_scales, row_scales, Int32(add)])


def multiply_bf16(sums: Any, weights: Any, rows: Any, instruction: Any, add: Any) -> None:
    """One thread: 128 x n x 16 of bf16, as ``multiply`` without scales."""
    ptx("{ .reg .pred p; setp.ne.b32 p, $4, 0; tcgen05.mma.cta_group::1.kind::f16 [$0], [$1], $2, $3, p; }", [],
        [sums, weights, rows, instruction, Int32(add)])


def commit(barrier: Any) -> None:
    """One thread: one arrival at ``barrier`` when all that it has issued has ended."""
    ptx("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [$0];", [], [barrier])


# shared memory beside it


def load_four(at: Any) -> Words:
    """16 bytes as 4 words."""
    return list(ptx("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", [Int32] * 4, [at]))


def store_many(at: Any, words: Words, guard: Any) -> None:
    """Stores 2 or 4 words together, where ``guard`` is true."""
    count = len(words)
    names = ", ".join(f"${i + 1}" for i in range(count))
    ptx(f"{{ .reg .pred g; setp.ne.b32 g, ${count + 1}, 0; @g st.shared.v{count}.b32 [$0], {{{names}}}; }}", [],
        [at, *words, Int32(guard)])


def copy_small(to: Any, source: Any, size: int) -> None:
    """4 or 8 bytes of each lane from global into shared memory; ``moe_parts.arrive_copied`` tells when they are
    there."""
    ptx(f"cp.async.ca.shared.global [$0], [$1], {size};", [], [to, source])
