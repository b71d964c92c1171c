"""A Kimi-delta-attention layer between its projections, for one row a sequence or the 2 to 8 rows of a verify step:
gate projection, short convolution, decay gate, delta rule and gated output norm in one launch; a cluster a head.

Contract: as ``ops_triton/kda_decode.py``. ``q``, ``k``, ``v``, ``gate`` [T, H*D], ``beta`` [T, H] and ``f_a`` [T, R]
bf16 with any row stride; ``f_b`` bf16 [H*D, R]; convolution weights fp32 [H*D, 4]; ``window`` bf16 [slots + 1, L + 2,
3*H*D] and ``state`` fp32 or bf16 [slots + 1, H, D, D] updated in place; ``y`` bf16 [T, H*D]. For L > 1 also ``record``
fp32 [slots + 1, L, 3, H, D] and ``accepted``: the accepted rows of the record are folded into the state, which is
written then; the new rows start from it and leave only a record. A sequence whose slot is -1 gives zeros and uses the
last slot, which is scratch; a row whose position is -1 gives zeros and changes nothing but the window.

Bytes for H 6, D and R 128, one row: state 0.79 MB (read and written), f_b 0.20 MB, the rest 0.03 MB; 8 verify rows:
the record's 0.15 MB more. flops 0.9 M a row, nothing. Floor on an H200 (2.35 us + bytes / 4.44 TB/s) 2.6 us alone; in
a chain the reads come before the wait. Target 2.8 us at one row, 5.5 at 8. Measured in a chain of its like (one H200,
TP16): 2.02 us at one row, 4.40 at 8 verify rows (both 8 splits, 4 warps), 3.77 at 8 sequences (2 splits, 8 warps),
20.9 at 64; the Triton twin takes 4.01, 7.21 and 5.96 there. Alone, without the dependent launch: 3.50, 6.49 and 5.47.

Layout: ``splits`` blocks of threads share a head; each has D / splits rows of the state in registers, D / lanes
elements a thread, and repeats the small work on q, k and the decay (an exchange would cost more). The gate projection
runs on the matrix units with f_b as the left operand, in registers before the wait, and the step's rows as the 8
columns of the right one. q, k, decay and v of all rows then lie in shared memory. A row of the recurrence is one sweep
over the registers and one sum over ``lanes``; with one row the sweep over the old state gives the output as well, ``o
= S (decay q) + e (k . q)``. The norm over the head's D values is the one exchange inside the cluster: each warp sends
its sum of squares to all blocks, by stores that count their own bytes at the receiver's barrier.

Waits: state, window, record, slots and all weights are read before the wait for the producers, and a verify step
writes the folded state there: the last kernel that touched them belongs to the previous step, which is complete before
this step's first kernel starts. Window and record are written after the cluster's first barrier, which all blocks
enter after they have read them. The last instruction is the cluster's second barrier. The trigger is the first, or with
``late`` the one behind the wait: then all that ran before the launch before this one is settled for those behind it
(``compiler/settled.py``; not timed).
Numerics: fp32 throughout, one rounding at each store; the gate projection uses exact bf16 products.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64

from ..compiler.call import Call
from .kda_decode_menu import QUERY, TAPS, lanes_of
from .launching import KernelLaunch, await_producers, named, row_alignment, row_stride, start_dependents
from .primitives import (
    address,
    exp,
    lane_xor,
    load_bytes,
    load_half,
    load_shared,
    load_words,
    log,
    low,
    mma,
    pack,
    peer_address,
    rsqrt,
    select,
    send,
    sigmoid,
    store_shared,
    store_words,
    sum_each,
    sum_lanes,
    total,
    unpack,
)

HISTORY = TAPS - 1  # rows before a row that the convolution reads


@dataclass(frozen=True)
class Parameters:
    """Sizes and strides in elements, alignments of rows in bytes."""

    heads: int
    width: int
    inner: int
    query: int
    slots: int  # states, the scratch one included
    splits: int
    warps: int
    lower_bound: float | None
    eps: float
    fp32_state: bool
    strides: tuple[int, ...]  # of ROW_INPUTS
    alignments: tuple[int, ...]
    dependent: bool
    late: bool  # lets the next launch start behind its own wait

    @property
    def values(self) -> int:
        """Rows of the state in a block."""
        return self.width // self.splits

    @property
    def lanes(self) -> int:
        return lanes_of(self.width, self.splits, self.warps)

    @property
    def each(self) -> int:
        """Elements of a row of the state in a thread."""
        return self.width // self.lanes

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def channels(self) -> int:
        return self.heads * self.width

    @property
    def verify(self) -> bool:
        return self.query > 1

    def places(self) -> dict[str, int]:
        """Byte offsets in shared memory behind the barrier, and the end: vectors of the rows, sums of squares."""
        rows = self.query
        sizes = {
            "q": rows * self.width, "k": rows * self.width, "decay": rows * self.width, "v": rows * self.values,
            "out": rows * self.values, "squares": -(-2 * (self.width // 64) * rows // 4) * 4,
            "inbox": rows * self.splits * self.warps,
        }
        if self.verify:
            sizes |= {"log_decay": rows * self.width, "error": rows * self.values}
        found, at = {}, 16
        for name, size in sizes.items():
            found[name] = at
            at += 4 * size
        return found | {"end": at}

    def row(self, name: str) -> tuple[int, int]:
        """Stride in bytes and alignment of an input with rows of its own."""
        index = ROW_INPUTS.index(name)
        return 2 * self.strides[index], self.alignments[index]


ROW_INPUTS = ("f_a", "q", "k", "v", "gate", "beta", "y")
INPUTS = ("f_a", "f_b", "q", "k", "v", "gate", "beta", "window", "weight_q", "weight_k", "weight_v", "a_log",
          "dt_bias", "norm", "state", "slots", "positions", "y")


def _floats(at: Any, count: int, *, guard: Any = None) -> list[Any]:
    """fp32 weights."""
    return [word.bitcast(Float32) for i in range(0, count, 4)
            for word in load_words(at + 4 * i, min(4, count - i), guard=guard, stream=True)]


def _silu(x: Any) -> Any:
    return x * sigmoid(x)


def _log_decay(x: Any, rate: Any, p: Parameters) -> Any:
    """x is the raw gate plus its bias. Softplus is linear above 20."""
    if p.lower_bound is not None:
        return sigmoid(rate * x) * p.lower_bound
    soft = log(1.0 + exp(cute.arch.fmin(x, Float32(20.0))))
    return -rate * select(x > 20.0, x, soft)


def _state_words(at: Any, p: Parameters) -> list[Any]:
    """The thread's elements of its row: 4 neighbours, then the next 4 ``4 lanes`` further."""
    found = []
    for i in range(p.each // 4):
        words = load_words(at + 4 * i * p.lanes * (4 if p.fp32_state else 2), 4 if p.fp32_state else 2)
        found += [word.bitcast(Float32) for word in words] if p.fp32_state else unpack(words)
    return found


def _store_state(at: Any, state: list[Any], p: Parameters) -> None:
    for i in range(p.each // 4):
        four = state[4 * i : 4 * i + 4]
        words = [x.bitcast(Int32) for x in four] if p.fp32_state else pack(four)
        store_words(at + 4 * i * p.lanes * (4 if p.fp32_state else 2), words)


def _vector(at: Any, row: int, g: Any, p: Parameters) -> list[Any]:
    """The thread's elements of a vector over the state's columns, of one row of the step."""
    start = at + 4 * row * p.width + 16 * g
    return [x for i in range(p.each // 4) for x in load_shared(start + 16 * i * p.lanes, 4)]


def _dot(a: list[Any], b: list[Any]) -> Any:
    """Sum of products in four chains."""
    chains = [Float32(0.0)] * 4
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        chains[i % 4] = chains[i % 4] + x * y
    return total(chains)


def _fold(state: list[Any], base: Any, v_local: Any, g: Any, p: Parameters) -> list[Any]:
    """The state after the rows of the record, which lie where the step's own vectors will."""
    places = p.places()
    for t in range(p.query):
        decay, key = _vector(base + places["decay"], t, g, p), _vector(base + places["k"], t, g, p)
        error = load_shared(base + places["v"] + 4 * (t * p.values + v_local))
        state = [x * d + error * k for x, d, k in zip(state, decay, key, strict=True)]
    return state


def _inverse_norm(base: Any, vector: int, row: Any, p: Parameters) -> Any:
    """1 / |x| of q (0) or k (1) of one row."""
    parts = p.width // 64
    at = base + p.places()["squares"] + 4 * vector * parts * p.query
    return rsqrt(total([load_shared(at + 4 * (i * p.query + row)) for i in range(parts)]) + 1e-6)


def _only_row(state: list[Any], strength: Any, base: Any, v_local: Any, g: Any, p: Parameters) -> tuple[Any, ...]:
    """State and output of a decode row by one sweep over the old state; the output lacks the scale of q."""
    places = p.places()
    decay, key, query = (_vector(base + places[name], 0, g, p) for name in ("decay", "k", "q"))
    unit = _inverse_norm(base, 1, 0, p)
    target = load_shared(base + places["v"] + 4 * v_local)
    state = [x * d for x, d in zip(state, decay, strict=True)]
    seen, kept, k_q = (sum_lanes(_dot(a, b), p.lanes) for a, b in ((state, key), (state, query), (key, query)))
    error = strength * (target - seen * unit) * unit
    return [x + error * k for x, k in zip(state, key, strict=True)], kept + error * k_q


def _next_row(state: list[Any], strength: Any, t: int, base: Any, v_local: Any, g: Any,
              p: Parameters) -> tuple[Any, ...]:
    """State, output (less the scale of q) and error of row t of a verify step."""
    places = p.places()
    decay, key, query = (_vector(base + places[name], t, g, p) for name in ("decay", "k", "q"))
    unit = _inverse_norm(base, 1, t, p)
    target = load_shared(base + places["v"] + 4 * (t * p.values + v_local))
    state = [x * d for x, d in zip(state, decay, strict=True)]
    error = strength * (target - sum_lanes(_dot(state, key), p.lanes) * unit)
    step = error * unit
    state = [x + step * k for x, k in zip(state, key, strict=True)]
    return state, sum_lanes(_dot(state, query), p.lanes), error


def _pick(values: list[Any], start: int, g: Any, p: Parameters) -> Any:
    """``values[start + g]``."""
    found = values[start]
    for i in range(1, min(p.lanes, p.query - start)):
        found = select(g == i, values[start + i], found)
    return found


@cute.kernel
def _kda(arguments: Any, names: cutlass.Constexpr, p: cutlass.Constexpr):
    at = named(names, arguments)
    start_dependents(p.dependent and not p.late)
    thread, _, _ = cute.arch.thread_idx()
    rank, head, sequence = cute.arch.block_idx()
    lane = thread % 32
    warp = thread // 32
    rows = cutlass.const_expr(p.query)
    places = cutlass.const_expr(p.places())
    barrier = cute.arch.get_dyn_smem(Int64, 16)
    base = address(barrier)
    if cutlass.const_expr(p.splits > 1):  # noqa: SIM102 - a branch while tracing, and one of the threads
        if thread == 0:
            cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, 4 * rows * p.splits * p.warps)

    # what no kernel of this step writes: state, window, record, weights
    slot = load_words(address(at.slots) + Int64(sequence) * 4, 1)[0]
    used = Int64(select(slot < 0, Int32(p.slots - 1), slot))
    kept = Int32(1)
    if cutlass.const_expr(p.verify):
        kept = load_words(address(at.accepted) + Int64(sequence) * 4, 1)[0]
        kept = select(kept < 1, Int32(1), select(kept > rows, Int32(rows), kept))
    g = lane % p.lanes
    v_local = warp * (32 // p.lanes) + lane // p.lanes
    element = cutlass.const_expr(4 if p.fp32_state else 2)
    row_of_state = (used * p.heads + head) * p.width + rank * p.values + v_local
    state_at = address(at.state) + (row_of_state * p.width + 4 * g) * element
    state = _state_words(state_at, p)

    # q and k: thread t < D takes two channels of q (t < D / 2) or of k
    half = cutlass.const_expr(p.width // 2)
    of_key = thread >= half
    mine = thread < p.width
    pair = select(of_key, thread - half, thread)
    channel = Int64(head * p.width + 2 * pair)
    window = address(at.window) + used * ((rows + 2) * 3 * p.channels * 2)
    window_row = cutlass.const_expr(3 * p.channels * 2)
    oldest = window + Int64(kept - 1) * window_row
    own = select(of_key, Int64(p.channels), Int64(0)) + channel
    history = [load_words(oldest + j * window_row + own * 2, 1, guard=mine)[0] for j in range(HISTORY)]
    weight_at = select(of_key, address(at.weight_k), address(at.weight_q)) + channel * 16
    taps = _floats(weight_at, 8, guard=mine)

    # v, and later the outputs: two channels of one row a thread
    pairs = cutlass.const_expr(p.values // 2)
    passes = cutlass.const_expr(-(-rows * pairs // p.threads))
    first_value = head * p.width + rank * p.values
    v_rows = []
    v_channels = []
    v_real = []
    v_history = []
    v_taps = []
    for i in cutlass.range_constexpr(passes):
        item = thread + i * p.threads
        real = item < rows * pairs
        row = item // pairs
        at_channel = Int64(first_value + 2 * (item % pairs))
        v_rows.append(row)
        v_channels.append(at_channel)
        v_real.append(real)
        v_history.append([load_words(oldest + Int64(row + j) * window_row + (2 * p.channels + at_channel) * 2, 1,
                                     guard=real & (row + j < HISTORY))[0] for j in range(HISTORY)])
        v_taps.append(_floats(address(at.weight_v) + at_channel * 16, 8, guard=real))

    # the gate projection's weights, 16 outputs a tile
    r = lane // 4
    c = lane % 4
    tiles = cutlass.const_expr(-(-p.width // 16 // p.warps))
    groups = cutlass.const_expr(p.inner // 32)
    outputs = []
    projection = []
    bias = []
    for i in cutlass.range_constexpr(tiles):
        tile = warp * tiles + i
        # more warps than tiles: some do the last one again
        output = 16 * select(tile < p.width // 16, tile, Int32(p.width // 16 - 1)) + r
        outputs.append(output)
        from_row = address(at.f_b) + (Int64(head * p.width + output) * p.inner + 8 * c) * 2
        projection.append([(load_words(from_row + 64 * j, stream=True),
                            load_words(from_row + 64 * j + 16 * p.inner, stream=True)) for j in range(groups)])
        bias.append([_floats(address(at.dt_bias) + Int64(head * p.width + output + 8 * j) * 4, 1)[0]
                     for j in range(2)])
    rate = exp(_floats(address(at.a_log) + Int64(head) * 4, 1)[0])

    record = Int64(0)
    if cutlass.const_expr(p.verify):
        record = address(at.record) + (used * (rows * 3) * p.heads + head) * (p.width * 4)
        record_row = cutlass.const_expr(3 * p.channels * 4)
        # keys and decays of the accepted rows; the others become the identity
        for i in cutlass.range_constexpr(-(-rows * p.width // (4 * p.threads))):
            item = thread + i * p.threads
            t = item // (p.width // 4)
            accepted = (t < kept) & (item < rows * p.width // 4)
            vector = record + Int64(t) * record_row + Int64(item % (p.width // 4)) * 16
            keys = load_words(vector + p.channels * 4, guard=accepted)
            decays = load_words(vector + 2 * p.channels * 4, guard=accepted)
            inside = item < rows * p.width // 4
            store_shared(base + places["k"] + 16 * item, [x.bitcast(Float32) for x in keys], guard=inside)
            store_shared(base + places["decay"] + 16 * item, [exp(x.bitcast(Float32)) for x in decays], guard=inside)
        for i in cutlass.range_constexpr(-(-rows * p.values // p.threads)):
            item = thread + i * p.threads
            t = item // p.values
            inside = item < rows * p.values
            error = load_words(record + Int64(t) * record_row + Int64(rank * p.values + item % p.values) * 4, 1,
                               guard=inside & (t < kept))[0]
            store_shared(base + places["v"] + 4 * item, [error.bitcast(Float32)], guard=inside)
        cute.arch.sync_threads()
        state = _fold(state, base, v_local, g, p)
        _store_state(state_at, state, p)
        cute.arch.sync_threads()
    if cutlass.const_expr(p.splits > 1):
        cute.arch.cluster_arrive()
    await_producers(p.dependent)
    start_dependents(p.dependent and p.late)

    first_row = sequence * rows
    step, alignment = cutlass.const_expr(p.row("f_a"))
    low_at = address(at.f_a) + Int64(first_row + r) * step + 16 * c
    x_low = [load_bytes(low_at + 64 * j, 16, alignment, guard=r < rows) for j in range(groups)]
    q_step, q_alignment = cutlass.const_expr(p.row("q"))
    k_step, k_alignment = cutlass.const_expr(p.row("k"))
    x_at = select(of_key, address(at.k) + Int64(first_row) * k_step, address(at.q) + Int64(first_row) * q_step)
    x_at = x_at + channel * 2
    x_step = select(of_key, Int64(k_step), Int64(q_step))
    inputs = [load_bytes(x_at + t * x_step, 4, min(q_alignment, k_alignment), guard=mine)[0] for t in range(rows)]
    v_step, v_alignment = cutlass.const_expr(p.row("v"))
    v_inputs = []
    for i in cutlass.range_constexpr(passes):
        v_at = address(at.v) + Int64(first_row + v_rows[i]) * v_step + v_channels[i] * 2
        v_inputs.append([load_bytes(v_at + (j - HISTORY) * v_step, 4, v_alignment,
                                    guard=v_real[i] & (v_rows[i] + j >= HISTORY))[0] for j in range(TAPS)])
    beta_step, _ = cutlass.const_expr(p.row("beta"))
    beta_at = address(at.beta) + Int64(first_row) * beta_step + Int64(head) * 2
    strengths = [sigmoid(low(load_half(beta_at + t * beta_step))) for t in range(rows)]
    positions = [load_words(address(at.positions) + Int64(first_row + t) * 4, 1)[0] for t in range(rows)]
    alive = [(position >= 0) & (slot >= 0) for position in positions]
    living = Int32(0)
    for t in cutlass.range_constexpr(rows):
        living = living | select(alive[t], Int32(1 << t), Int32(0))
    gate_step, gate_alignment = cutlass.const_expr(p.row("gate"))
    gates = [load_bytes(address(at.gate) + Int64(first_row + v_rows[i]) * gate_step + v_channels[i] * 2, 4,
                        gate_alignment, guard=v_real[i])[0] for i in range(passes)]

    # decays
    for i in cutlass.range_constexpr(tiles):
        sums = [[Float32(0.0)] * 4, [Float32(0.0)] * 4]
        for j in cutlass.range_constexpr(groups):
            upper, lower = projection[i][j]
            for part in cutlass.range_constexpr(2):
                a = [upper[2 * part], lower[2 * part], upper[2 * part + 1], lower[2 * part + 1]]
                sums[part] = mma(a, x_low[j][2 * part : 2 * part + 2], sums[part])
        for n in cutlass.range_constexpr(4):
            # of 8 columns as many are rows of the step
            if cutlass.const_expr(n % 2 < rows):
                t = 2 * c + n % 2
                inside = t < rows
                place = 4 * (t * p.width + outputs[i] + 8 * (n // 2))
                log_decay = _log_decay(sums[0][n] + sums[1][n] + bias[i][n // 2], rate, p)
                decay = select(((living >> t) & 1) != 0, exp(log_decay), Float32(1.0))
                store_shared(base + places["decay"] + place, [decay], guard=inside)
                if cutlass.const_expr(p.verify):
                    store_shared(base + places["log_decay"] + place, [log_decay], guard=inside)

    # convolutions
    squares = []
    x = [unpack([word]) for word in [*history, *inputs]]
    for t in cutlass.range_constexpr(rows):
        two = [_silu(total([x[t + j][n] * taps[4 * n + j] for j in range(TAPS)])) for n in range(2)]
        two = [select(alive[t], value, Float32(0.0)) for value in two]
        vector = base + places["q"] + select(of_key, Int32(places["k"] - places["q"]), Int32(0))
        store_shared(vector + 4 * (t * p.width + 2 * pair), two, guard=mine)
        squares.append(two[0] * two[0] + two[1] * two[1])
    count = cutlass.const_expr(1 << (rows - 1).bit_length())
    squared = sum_each(squares + [Float32(0.0)] * (count - rows), lane)
    store_shared(base + places["squares"] + 4 * (warp * rows + lane), [squared], guard=mine & (lane < rows))
    for i in cutlass.range_constexpr(passes):
        taken = [unpack([v_inputs[i][j] | v_history[i][j]]) if j < HISTORY else unpack([v_inputs[i][j]])
                 for j in range(TAPS)]
        two = [_silu(total([taken[j][n] * v_taps[i][4 * n + j] for j in range(TAPS)])) for n in range(2)]
        two = [select(((living >> v_rows[i]) & 1) != 0, value, Float32(0.0)) for value in two]
        store_shared(base + places["v"] + 8 * (thread + i * p.threads), two, guard=v_real[i])
    cute.arch.sync_threads()

    outs = []
    errors = []
    if cutlass.const_expr(p.verify):
        for t in cutlass.range_constexpr(rows):
            state, out, error = _next_row(state, strengths[t], t, base, v_local, g, p)
            outs.append(out)
            errors.append(error)
    else:
        state, out = _only_row(state, strengths[0], base, v_local, g, p)
        outs.append(out)
    outs = [out * _inverse_norm(base, 0, t, p) * p.width**-0.5 for t, out in enumerate(outs)]

    # sums of squares to every block of the head
    if cutlass.const_expr(p.splits > 1):
        cute.arch.cluster_wait()
    for start in cutlass.range_constexpr(0, rows, p.lanes):
        t = start + g
        held = g < min(p.lanes, rows - start)
        out = _pick(outs, start, g, p)
        store_shared(base + places["out"] + 4 * (t * p.values + v_local), [out], guard=held)
        if cutlass.const_expr(p.verify):
            error = _pick(errors, start, g, p)
            store_shared(base + places["error"] + 4 * (t * p.values + v_local), [error], guard=held)
        square = out * out
        offset = p.lanes
        while cutlass.const_expr(offset < 32):
            square = square + lane_xor(square, offset)
            offset *= 2
        place = base + places["inbox"] + 4 * ((t * p.splits + rank) * p.warps + warp)
        if cutlass.const_expr(p.splits == 1):
            store_shared(place, [square], guard=held & (lane < p.lanes))
        for peer in cutlass.range_constexpr(0, p.splits if p.splits > 1 else 0, 32 // p.lanes):
            to = peer + lane // p.lanes
            inside = held & (to < p.splits)
            to = select(to < p.splits, to, Int32(0))
            send(peer_address(place, to), [square], peer_address(base, to), guard=inside)
    if cutlass.const_expr(not p.verify):
        _store_state(state_at, state, p)
    cute.arch.sync_threads()

    # what all blocks of the head have read before the cluster's barrier
    writes = mine & (pair // pairs == rank)
    window_at = window + own * 2
    for t in cutlass.range_constexpr(rows + 2):
        store_words(window_at + t * window_row, [([*history, *inputs])[t + 1]], guard=writes)
    for i in cutlass.range_constexpr(passes):
        v_window = window + (2 * p.channels + v_channels[i]) * 2
        store_words(v_window + Int64(2 + v_rows[i]) * window_row, [v_inputs[i][HISTORY]], guard=v_real[i])
        for j in cutlass.range_constexpr(2):
            store_words(v_window + j * window_row, [v_history[i][1 + j]], guard=v_real[i] & (v_rows[i] == 0))
        if cutlass.const_expr(p.verify):
            # a thread without a row takes row 0, whose norm exists
            row = select(v_real[i], v_rows[i], Int32(0))
            item = row * pairs + (thread + i * p.threads) % pairs
            across = 4 * (row * p.width + rank * p.values) + 8 * ((thread + i * p.threads) % pairs)
            unit = _inverse_norm(base, 1, row, p)
            made = [load_shared(base + places["error"] + 8 * item, 2),
                    [value * unit for value in load_shared(base + places["k"] + across, 2)],
                    load_shared(base + places["log_decay"] + across, 2)]
            record_at = record + Int64(v_rows[i]) * record_row + (v_channels[i] - head * p.width) * 4
            for j in cutlass.range_constexpr(3):
                store_words(record_at + j * p.channels * 4, [value.bitcast(Int32) for value in made[j]],
                            guard=v_real[i])

    scales = [_floats(address(at.norm) + (v_channels[i] - head * p.width) * 4, 2, guard=v_real[i])
              for i in range(passes)]
    if cutlass.const_expr(p.splits > 1):
        cute.arch.mbarrier_wait(barrier, 0)
        cute.arch.cluster_arrive_relaxed()
    y_step, _ = cutlass.const_expr(p.row("y"))
    for i in cutlass.range_constexpr(passes):
        parts = base + places["inbox"] + 4 * p.splits * p.warps * select(v_real[i], v_rows[i], Int32(0))
        sums = [total(list(load_shared(parts + 16 * j, 4))) for j in range(p.splits * p.warps // 4)]
        scale = rsqrt(total(sums) * (1.0 / p.width) + p.eps)
        two = load_shared(base + places["out"] + 8 * (thread + i * p.threads) * Int32(v_real[i]), 2)
        alive_here = ((living >> v_rows[i]) & 1) != 0
        two = [select(alive_here, value * scale * factor * sigmoid(x_gate), Float32(0.0))
               for value, factor, x_gate in zip(two, scales[i], unpack([gates[i]]), strict=True)]
        store_words(address(at.y) + Int64(first_row + v_rows[i]) * y_step + v_channels[i] * 2, pack(two),
                    guard=v_real[i])
    if cutlass.const_expr(p.splits > 1):
        cute.arch.cluster_wait()


def bind(call: Call) -> KernelLaunch:
    """The launch for ``call``; pattern names as in ``kda_decode_menu.py``."""
    query = call.attrs["q_act"]["query"]
    tensors = {name: call.tensors[name] for name in (INPUTS if query == 1 else (*INPUTS, "record", "accepted"))}
    slots, heads, width, _ = tensors["state"].shape
    splits, warps = call.config["splits"], call.config["warps"]
    parameters = Parameters(
        heads=heads, width=width, inner=tensors["f_b"].shape[1], query=query, slots=slots, splits=splits, warps=warps,
        lower_bound=call.attrs["decay"]["lower_bound"], eps=call.attrs["y"]["eps"],
        fp32_state=tensors["state"].dtype == torch.float32,
        strides=tuple(row_stride(tensors[name]) for name in ROW_INPUTS),
        alignments=tuple(row_alignment(tensors[name]) for name in ROW_INPUTS), dependent=call.dependent_launch,
        late=call.config.get("late", False),
    )
    _check(tensors, parameters)
    sequences = tensors["slots"].shape[0]
    return KernelLaunch(_kda, (splits, heads, sequences), parameters.threads, tensors, parameters,
                        cluster=(splits, 1, 1), shared=parameters.places()["end"], dependent=call.dependent_launch)


def _check(tensors: dict[str, torch.Tensor], p: Parameters) -> None:
    sequences = tensors["slots"].shape[0]
    assert 1 <= p.query <= QUERY, f"{p.query} rows a sequence"
    assert p.threads >= p.width, f"{p.threads} threads for heads of {p.width}"
    assert 2 <= p.lanes <= 32, f"{p.lanes} lanes a row"
    assert p.each >= 4, f"{p.lanes} lanes a row of {p.width}"
    assert tensors["state"].dtype in (torch.float32, torch.bfloat16), f"state {tensors['state'].dtype}"
    assert tensors["q"].shape == (sequences * p.query, p.channels), f"q {tensors['q'].shape}, {sequences} sequences"
    assert tensors["window"].shape[1:] == (TAPS + p.query - 2, 3 * p.channels), f"window {tensors['window'].shape}"
    assert tensors["f_b"].shape[0] == p.channels, f"f_b {tensors['f_b'].shape}"
    assert p.row("y")[1] >= 4, f"rows of y begin at multiples of {p.row('y')[1]} bytes"
    if p.verify:
        assert tensors["record"].shape[1:] == (p.query, 3, p.heads, p.width), f"record {tensors['record'].shape}"
    for name, tensor in tensors.items():
        assert name in ROW_INPUTS or tensor.is_contiguous(), f"{name} is strided: {tensor.shape} {tensor.stride()}"
