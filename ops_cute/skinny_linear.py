"""Projections of 1 to 8 rows: ``x @ weight.T`` with an epilogue, bound by the bytes of the weights.

Contract: as ``ops_triton/skinny_linear.py``. ``x`` bf16 [T, K] with any row stride, ``weight`` bf16 [N, K] row-major,
K a multiple of 8, outputs bf16 or fp32 by the dtype of their tensors. In the same launch, when the pattern has them:
``router`` [R, K] of the same rows with fp32 ``logits``; ``a = activation(gate, up)`` where gate and up are the last
rows of ``weight``; ``y = f + other``. Values that nobody reads outside are not written.

Bytes N K 2 + T (K + N) 2, flops 2 T N K: 3206 x 7168 at one row 46.0 MB and 46 Mflop, floor on an H200 (2.35 us +
bytes / 4.44 TB/s) 12.7 us alone, 10.4 without the ramp. Target 12.4 us at one row, 14 at 8. Measured in a chain of its
like (one H200): 3216 x 7168 12.55 us at one row and 13.14 at 8 (264 blocks, 8 warps, 4 steps), 7168 x 768 4.33 and
4.53, 2880 x 7168 11.43 and 12.12; the Triton twin takes 13.9 and 31.4, 6.2 and 6.4, 12.8 and 30.2 in the same way,
cuBLAS 18.0 and 18.3 for the first. These times are of the kernel before its weights' loads were made to stay ahead of
the wait: the assembler had moved them behind it (``tests/cute/test_cute_waits.py``). On the GPU it was timed, not yet
compared; its results were compared at every shape of a step on the CPU, by the emulator of ``tests/cute``.

Layout: the rows of all weights stand in one line (router, plain, then gate and up in turn) and are spread over
``blocks`` blocks of threads, one a multiprocessor, to within two rows: no wave is left half empty, and what stream-K
needs partial sums in memory for, needs none. A block's warps split K, 32 elements a warp at a time, so that together
they read whole lines of each row. Weights are the left operand of the matrix units, 16 rows a tile, loaded from memory
in the layout of the operand: a lane's 16 bytes of a row are its elements of two products, since K may be summed in any
order as long as x is read alike. x is the right operand, its 8 columns the rows of the step: one row costs what eight
do, and nothing beside the loads (a mma a load). ``depth`` steps are in flight. With ``splits`` a cluster shares the K
of its rows and sends its sums to its first block, for projections with fewer rows than would fill the GPU.

Waits: the first ``depth`` steps of the weights are loaded before the wait for the producers; x and ``other`` are
touched after it. The trigger is the first instruction. A cluster begins and ends with its barrier.
Numerics: exact products, fp32 sums in a fixed order, one rounding at the store; activations on the fp32 sums.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64

from ..compiler.call import Call
from .launching import KernelLaunch, await_producers, named, row_alignment, row_stride, start_dependents
from .primitives import (
    address,
    exp,
    load_bytes,
    load_half,
    load_shared,
    load_words,
    low,
    mma,
    pack,
    peer_address,
    reciprocal,
    select,
    send,
    sigmoid,
    store_half,
    store_shared,
    store_words,
    total,
)
from .skinny_linear_menu import ROWS, STEP, TILE, count_rows, row_blocks, rows_each, steps_each

COLUMNS = 8  # of the right operand


@dataclass(frozen=True)
class Projection:
    """What an epilogue and the addresses of weights depend on. Sizes and strides in elements."""

    rows: int  # of the step
    columns: int
    groups: tuple[int, int, int]  # rows of weights: router, plain, pairs
    stride_x: int
    alignment_x: int
    outputs: tuple[tuple[str, int, bool], ...]  # name, row stride, whether fp32
    stride_other: int
    fp32_other: bool
    activation: str  # "", "situ", "silu"
    beta: float
    linear_beta: float
    dependent: bool

    @property
    def filled(self) -> int:
        """Rows before the pairs, an empty one for an odd number included."""
        router, plain, pairs = self.groups
        return router + plain + ((router + plain) % 2 if pairs else 0)


@dataclass(frozen=True)
class Parameters(Projection):
    """A projection and how it is spread."""

    row_blocks: int
    each: int  # most rows of a block
    steps: int  # of a warp along K
    warps: int
    splits: int
    depth: int

    @property
    def tiles(self) -> int:
        return -(-self.each // TILE)

    @property
    def even(self) -> bool:
        return self.steps * STEP * self.warps * self.splits == self.columns

    @property
    def sums(self) -> int:
        """fp32 sums of one warp."""
        return self.tiles * TILE * COLUMNS

    @property
    def inbox(self) -> int:
        """Byte offset of what the cluster sends to its first block, behind the barrier and the warps' sums."""
        return 16 + 4 * self.sums * self.warps

    @property
    def shared(self) -> int:
        return self.inbox + (4 * self.splits * self.each * COLUMNS if self.splits > 1 else 0)


def weight_row(row: Any, at: Any, p: Projection) -> tuple[Any, Any]:
    """Address of a row of the line of weights and whether it exists."""
    router, plain, pairs = p.groups
    inner = row - router
    real = row < router + plain
    if pairs:
        pair = row - p.filled
        inner = select(pair < 0, inner, plain + pair // 2 + (pair % 2) * pairs)
        real = real | ((pair >= 0) & (pair < 2 * pairs))
    start = address(at.weight) + Int64(inner) * (2 * p.columns)
    if router:
        start = select(row < router, address(at.router) + Int64(row) * (2 * p.columns), start)
    return start, real


def _load_step(weights: list[Any], step: int, first: Any, p: Parameters) -> list[Any]:
    """Both halves of each tile's operand: 16 bytes of row r and of row r + 8."""
    offset = step * STEP * p.warps
    inside = None if p.even else first + offset < p.columns
    return [load_words(start + 2 * offset, guard=real if inside is None else real & inside, stream=True)
            for start, real in weights]


def _load_x(x: Any, step: int, first: Any, r: Any, p: Parameters) -> list[Any]:
    offset = step * STEP * p.warps
    wanted = r < p.rows
    if not p.even:
        wanted = wanted & (first + offset < p.columns)
    return load_bytes(x + 2 * offset, 16, p.alignment_x, guard=wanted)


def _activate(gate: Any, up: Any, p: Projection) -> Any:
    if p.activation == "silu":
        return gate * sigmoid(gate) * up
    return p.beta * _tanh(gate * (1.0 / p.beta)) * sigmoid(gate) * (p.linear_beta * _tanh(up * (1.0 / p.linear_beta)))


def _tanh(x: Any) -> Any:
    """Through e^-2|x|, which cannot overflow."""
    size = cute.arch.fmax(x, -x)
    small = exp(size * -2.0)
    value = (1.0 - small) * reciprocal(1.0 + small)
    return select(x < 0.0, -value, value)


def _store(at: Any, value: Any, fp32: bool, guard: Any) -> None:
    if fp32:
        store_words(at, [value.bitcast(Int32)], guard=guard)
    else:
        store_half(at, pack([value, value])[0], guard=guard)


def finish(values: list[Any], row: Any, m: Any, wanted: Any, at: Any, p: Projection) -> None:
    """Epilogue of ``row`` of the line of weights, and of the one after it if there are two, for row m of the step."""
    router, plain, pairs = p.groups
    places = {name: (stride, fp32) for name, stride, fp32 in p.outputs}
    for i, one in enumerate(values):
        of_router = row + i < router
        inner = row + i - router
        real = wanted & (row + i < router + plain)
        if pairs:
            pair = row + i - p.filled
            inner = select(pair < 0, inner, plain + pair // 2 + (pair % 2) * pairs)
            real = wanted & ((row + i < router + plain) | ((pair >= 0) & (pair < 2 * pairs)))
        if "logits" in places:
            stride, fp32 = places["logits"]
            start = address(at.logits) + (Int64(m) * stride + Int64(row + i)) * (4 if fp32 else 2)
            _store(start, one, fp32, wanted & of_router)
        for name in ("f", "y"):
            if name in places:
                stride, fp32 = places[name]
                guard, value = real & (row + i >= router), one
                if name == "y":
                    other = address(at.other) + (Int64(m) * p.stride_other + Int64(inner)) * (4 if p.fp32_other else 2)
                    value = value + (load_words(other, 1, guard=guard)[0].bitcast(Float32) if p.fp32_other
                                     else low(load_half(other, guard=guard)))
                start = address(getattr(at, name)) + (Int64(m) * stride + Int64(inner)) * (4 if fp32 else 2)
                _store(start, value, fp32, guard)
    if "a" in places:
        stride, fp32 = places["a"]
        pair = (row - p.filled) // 2
        start = address(at.a) + (Int64(m) * stride + Int64(pair)) * (4 if fp32 else 2)
        _store(start, _activate(values[0], values[1], p), fp32, wanted & (row >= p.filled) & (pair < pairs))


@cute.kernel
def _skinny_linear(arguments: Any, names: cutlass.Constexpr, p: cutlass.Constexpr):
    at = named(names, arguments)
    start_dependents(p.dependent)
    thread, _, _ = cute.arch.thread_idx()
    rank, block, _ = cute.arch.block_idx()
    lane = thread % 32
    warp = thread // 32
    r = lane // 4
    barrier = cute.arch.get_dyn_smem(Int64, 16)
    base = address(barrier)
    if cutlass.const_expr(p.splits > 1):
        if thread == 0:
            cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
            if rank == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, 4 * p.splits * p.each * p.rows)
        cute.arch.cluster_arrive()

    # pairs of rows, spread evenly: block b begins at pair b * pairs / blocks
    half = cutlass.const_expr(-(-count_rows(p.groups) // 2))
    begin = 2 * (block * half // p.row_blocks)
    end = 2 * ((block + 1) * half // p.row_blocks)
    first = (rank * p.steps * p.warps + warp) * STEP + 8 * (lane % 4)
    weights = []
    for i in cutlass.range_constexpr(2 * p.tiles):
        row = begin + 8 * i + r
        start, real = weight_row(row, at, p)
        weights.append((start + Int64(first) * 2, real & (row < end)))
    flight = [_load_step(weights, step, first, p) for step in range(p.depth)]
    await_producers(p.dependent)

    x = address(at.x) + (Int64(r) * p.stride_x + Int64(first)) * 2
    rows_flight = [_load_x(x, step, first, r, p) for step in range(p.depth)]
    sums = [[Float32(0.0)] * 4 for _ in range(p.tiles)]
    for step in cutlass.range_constexpr(p.steps):
        tile, b = flight[step % p.depth], rows_flight[step % p.depth]
        for i in cutlass.range_constexpr(p.tiles):
            upper, lower = tile[2 * i], tile[2 * i + 1]
            for part in cutlass.range_constexpr(2):
                a = [upper[2 * part], lower[2 * part], upper[2 * part + 1], lower[2 * part + 1]]
                sums[i] = mma(a, b[2 * part : 2 * part + 2], sums[i])
        if cutlass.const_expr(step + p.depth < p.steps):
            flight[step % p.depth] = _load_step(weights, step + p.depth, first, p)
            rows_flight[step % p.depth] = _load_x(x, step + p.depth, first, r, p)

    own = base + 16 + 4 * (warp * p.sums + r * COLUMNS + 2 * (lane % 4))
    for i in cutlass.range_constexpr(p.tiles):
        store_shared(own + 4 * i * TILE * COLUMNS, sums[i][:2])
        store_shared(own + 4 * (i * TILE + 8) * COLUMNS, sums[i][2:])
    if cutlass.const_expr(p.splits > 1):
        cute.arch.cluster_wait()
    cute.arch.sync_threads()
    items = cutlass.const_expr(p.each // 2 * p.rows)
    for start in cutlass.range_constexpr(0, items, 32 * p.warps):
        item = thread + start
        if item < items:
            local = 2 * (item // p.rows)
            m = item % p.rows
            from_warps = base + 16 + 4 * (local * COLUMNS + m)
            two = [total([load_shared(from_warps + 4 * (w * p.sums + i * COLUMNS)) for w in range(p.warps)])
                   for i in range(2)]
            if cutlass.const_expr(p.splits > 1):
                for i in cutlass.range_constexpr(2):
                    place = base + p.inbox + 4 * ((rank * 2 + i) * items + item)
                    send(peer_address(place, Int32(0)), [two[i]], peer_address(base, Int32(0)))
            else:
                finish(two, begin + local, m, begin + local < end, at, p)
    if cutlass.const_expr(p.splits > 1):
        if rank == 0:
            cute.arch.mbarrier_wait(barrier, 0)
            for start in cutlass.range_constexpr(0, items, 32 * p.warps):
                item = thread + start
                if item < items:
                    two = [total([load_shared(base + p.inbox + 4 * ((k * 2 + i) * items + item))
                                  for k in range(p.splits)]) for i in range(2)]
                    row = begin + 2 * (item // p.rows)
                    finish(two, row, item % p.rows, row < end, at, p)
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()


def read_call(call: Call) -> tuple[dict[str, torch.Tensor], Projection]:
    """The tensors of a projection and what its epilogue depends on; pattern names as in ``skinny_linear_menu.py``."""
    x, weight, router = call.tensors["x"], call.tensors["weight"], call.get("router")
    rows, columns = x.shape
    assert weight.is_contiguous(), f"weight {weight.shape} has strides {weight.stride()}"
    assert weight.shape[1] == columns, f"weight {weight.shape} against x {x.shape}"
    assert x.dtype == weight.dtype == torch.bfloat16, f"x {x.dtype}, weight {weight.dtype}"
    assert ROWS[0] <= rows <= ROWS[1], f"{rows} rows"
    assert columns % 8 == 0, f"{columns} columns"
    pairs = call.attrs["up"]["stop"] - call.attrs["up"]["start"] if "a" in call.attrs else 0
    groups = (0 if router is None else router.shape[0], weight.shape[0] - 2 * pairs, pairs)
    outputs = {name: call.tensors[name] for name in ("logits", "f", "a", "y") if name in call.tensors}
    tensors = {"x": x, "weight": weight, **outputs}
    if router is not None:
        tensors["router"] = router
    other = call.get("other")
    if other is not None:
        tensors["other"] = other
    activation = call.attrs.get("a")
    return tensors, Projection(
        rows=rows, columns=columns, groups=groups, stride_x=row_stride(x), alignment_x=row_alignment(x),
        outputs=tuple((name, row_stride(t), t.dtype == torch.float32) for name, t in outputs.items()),
        stride_other=0 if other is None else row_stride(other),
        fp32_other=other is not None and other.dtype == torch.float32,
        activation="" if activation is None else "situ" if "beta" in activation else "silu",
        beta=(activation or {}).get("beta", 1.0), linear_beta=(activation or {}).get("linear_beta", 1.0),
        dependent=call.dependent_launch)


def bind(call: Call) -> KernelLaunch:
    """The launch for ``call``."""
    tensors, projection = read_call(call)
    config, count = call.config, count_rows(projection.groups)
    parameters = Parameters(
        **vars(projection), row_blocks=row_blocks(config, count), each=rows_each(config, count),
        steps=steps_each(config, projection.columns), warps=config["warps"], splits=config["splits"],
        depth=config["depth"])
    assert parameters.depth <= parameters.steps, f"{parameters.depth} of {parameters.steps} steps in flight"
    return KernelLaunch(_skinny_linear, (parameters.splits, parameters.row_blocks, 1), 32 * parameters.warps, tensors,
                        parameters, cluster=(parameters.splits, 1, 1), shared=parameters.shared,
                        dependent=call.dependent_launch)
