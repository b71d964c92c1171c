"""What follows the experts in the same launch: the sums over ranks, norm, a stripe of the up-projection, the gather.

All threads of a block walk through it together. What a block has no part in it asks for nothing, so that there is no
branch around a wait.
"""
from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..mailbox import Addresses, Mailbox
from ..moe_parts import await_phase, copy_bulk, expect_bytes, init_barrier, load_matrices, store_word, stream_policy
from ..primitives import (
    flag,
    lane_value,
    lane_xor,
    load_shared,
    mma,
    pack,
    rsqrt,
    select,
    store_shared,
    store_words,
    sum_lanes,
    unpack,
)
from .plan import TILE
from .tail_plan import PACK, ROWS, STEP, Tail

LOOKS = 4  # fragments of the summed latent that a thread awaits at once
PARTS, SHARED, SUMMED, FINISHED = range(4)  # waits


class Kept:
    """What the experts' warps leave: parts of the latent in shared memory, parts of the shared columns on their way."""

    def __init__(self, box: Mailbox, shared: Any, where: Any, p: Tail) -> None:
        self.send, self.shared, self.where, self.p = box.send, shared, where, p

    def side(self, words: Any, unit: Any, lane: Any) -> None:
        """16 columns of a rank: row r of two tokens in a lane's first word, row r + 8 in the second. Lanes of rows 0 to
        3 send 8 columns of one token each."""
        row, part, p = lane >> 2, lane & 3, self.p
        pairs = []
        for word in words:
            other = lane_xor(word, 4)
            pairs += [(word & 0xFFFF) | (other << 16), ((word >> 16) & 0xFFFF) | (other & -65536)]
        fragments = [[lane_value(pair, 8 * i + part) for i in range(4)] for pair in pairs]
        upper, second = (row & 2) != 0, (row & 1) != 0
        own = [select(upper, select(second, d, c), select(second, b, a)) for a, b, c, d in zip(*fragments, strict=True)]
        each = p.stripe // (2 * TILE)
        token = 2 * part + (row & 1)
        real = (row < 4) & (token < p.tokens) & (unit < p.side_units)
        unit = select(real, unit, Int32(0))
        fragment = p.at_shared + token * (p.stripe // PACK) + 2 * (unit % each) + ((row >> 1) & 1)
        self.send(fragment, own, peer_of(unit // each, self.shared, self.where), guard=flag(real))

    def column(self, token: Any, row: Any, value: Any) -> None:
        store_shared(self.shared + self.where["parts"] + 4 * (token * (PACK * self.p.each) + row), [value])


def keep_peers(at: Addresses, thread: Any, shared: Any, where: Any, p: Tail) -> None:
    """The ranks' mailboxes in shared memory: nobody is to wait for an address when it has something to send."""
    real = thread < p.ranks
    peer = at.peer(select(real, thread, Int32(0)))
    words = [Int32(peer), Int32(peer >> 32)]
    store_shared(shared + where["peers"] + 8 * thread, [word.bitcast(Float32) for word in words], guard=real)


def peer_of(rank: Any, shared: Any, where: Any) -> Any:
    low, high = (word.bitcast(Int32) for word in load_shared(shared + where["peers"] + 8 * rank, 2))
    return (Int64(high) << 32) | (Int64(low) & 0xFFFFFFFF)


def clear(thread: Any, shared: Any, where: Any, p: Tail) -> None:
    """Zeros in what a block without columns of its own would not write."""
    for name, words in (("parts", p.tokens * PACK * p.each), ("finished", p.tokens * ROWS)):
        for start in range(0, words, p.threads):
            store_word(shared + where[name] + 4 * (thread + start), Int32(0), flag(thread + start < words))


@cute.jit
def set_up_tail(at: Any, thread: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """The barrier of the up-projection's weights, before ``set_up`` tells the copy engine of all."""
    if thread == 0:
        init_barrier(shared + where["up_full"], 1)
        if cutlass.const_expr("sources_full" in where):
            init_barrier(shared + where["sources_full"], 1)
    clear(thread, shared, where, p)
    keep_peers(at, thread, shared, where, p)


@cute.jit
def copy_up(at: Any, block: Any, thread: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """The copier, before the wait for the producers: this block's rows of the up-projection and the norm's weights."""
    lane, has = thread % 32, block < p.owners
    if cute.arch.make_warp_uniform(thread // 32) == p.warps:
        if lane == 0:
            expect_bytes(shared + where["up_full"], select(has, Int32(2 * p.out_width * (p.outputs + 1)), Int32(0)))
        cute.arch.sync_warp()
        copy_bulk(shared + where["norm"], at["norm"], Int32(2 * p.out_width), shared + where["up_full"],
                  stream_policy(), flag(has & (lane == 0)))
        real = has & (lane < p.outputs)
        row = select(real, block * p.outputs + lane, Int32(0))
        copy_bulk(shared + where["up"] + lane * p.pitch, at["up_weight"] + Int64(row) * (2 * p.out_width),
                  Int32(2 * p.out_width), shared + where["up_full"], stream_policy(), flag(real))


def _eight(at: Any) -> list[Any]:
    """8 fp32 of shared memory as 4 words of bf16."""
    return pack([*load_shared(at, 4), *load_shared(at + 16, 4)])


def send_parts(box: Mailbox, thread: Any, block: Any, shared: Any, where: Any, p: Tail) -> None:
    """This block's columns of the latent to the same block of every rank."""
    turn, own = p.blocks - 1 - block, p.tokens * p.each
    for start in range(0, own * p.ranks, p.threads):
        item = thread + start
        real = (item < own * p.ranks) & (turn < p.column_blocks)
        item = select(real, item, Int32(0))
        rest, rank = item % own, item // own
        fragment = rest // p.each * p.of_row + turn * p.each + rest % p.each
        box.send(fragment, _eight(shared + where["parts"] + rest * (4 * PACK)), peer_of(rank, shared, where),
                 guard=flag(real))


def arm(box: Mailbox, thread: Any, block: Any, p: Tail) -> None:
    """A thread's share of what this launch reads, of all senders."""
    items = p.ranks * p.message
    for start in range(0, items, p.blocks * p.threads):
        item = block * p.threads + thread + start
        box.arm(item // p.message, item % p.message, flag(item < items))


def look_at_shared(box: Mailbox, thread: Any, block: Any, p: Tail) -> tuple[Any, Any, Any]:
    """First look at a rank's part of the shared columns that this block adds: a row and a sender a thread."""
    real = (thread < p.tokens * p.ranks) & (block < p.owners)
    item = select(real, thread, Int32(0))
    column = select(block < p.owners, block, Int32(0)) * p.outputs
    fragment = p.at_shared + item // p.ranks * (p.stripe // PACK) + column // PACK
    return real, item % p.ranks, box.look(item % p.ranks, fragment, flag(real))


def sum_parts(box: Mailbox, thread: Any, block: Any, p: Tail) -> None:
    """A share of the latent's columns, summed over the ranks, rounded, and told to all blocks: of each block those that
    it multiplied, with ``few`` those that are finished have them in turn."""
    # two threads share a fragment
    split = 2 if p.ranks % 2 == 0 else 1
    each = p.ranks // split
    half, rest = thread % split, thread // split
    if p.few:
        number = rest * p.owners + block
        real = (block < p.owners) & (number < p.latents)
    else:
        turn = p.blocks - 1 - block
        number = rest // p.each * p.of_row + turn * p.each + rest % p.each
        real = (rest < p.tokens * p.each) & (turn < p.column_blocks)
    fragment = select(real, number, Int32(0))
    senders = [half * each + i for i in range(each)]
    came = box.wait([box.look(sender, fragment, flag(real)) for sender in senders])
    box.report(list(zip(senders, came, strict=True)), PARTS)
    sums = unpack(came[0])
    for words in came[1:]:
        sums = [a + b for a, b in zip(sums, unpack(words), strict=True)]
    if split == 2:
        sums = [a + lane_xor(a, 1) for a in sums]
    box.send(p.at_summed + fragment, pack(sums), box.own, guard=flag(real & (half == 0)))


def add_shared_columns(box: Mailbox, looked: Any, thread: Any, block: Any, shared: Any, where: Any,
               p: Tail) -> None:
    """This block's shared columns, summed over the ranks, in shared memory."""
    real, sender, look = looked
    (words,) = box.wait([look])
    box.report([(sender, words)], SHARED)
    values = unpack(words)
    if p.outputs < PACK:
        second = (block * p.outputs) % PACK != 0
        values = [select(second, b, a) for a, b in zip(values[:4], values[4:], strict=True)]
    step = 1
    while step < p.ranks:
        values, step = [v + lane_xor(v, step) for v in values], 2 * step
    at = shared + where["shared"] + thread // p.ranks * (4 * ROWS)
    for start in range(0, p.outputs, 4):
        store_shared(at + 4 * start, values[start : start + 4], guard=real & (sender == 0))


def gather_latent(box: Mailbox, thread: Any, block: Any, shared: Any, where: Any, p: Tail) -> None:
    """The whole latent times the norm's weights into shared memory, and the squares of each fragment."""
    await_phase(shared + where["up_full"], Int32(0))
    starts = list(range(0, p.latents, p.threads))
    for first in range(0, len(starts), LOOKS):
        looked = []
        for start in starts[first : first + LOOKS]:
            real = (thread + start < p.latents) & (block < p.owners)
            item = select(real, thread + start, Int32(0))
            inside = item % p.of_row
            column = inside // p.each * p.columns + inside % p.each * PACK
            # of its 8 columns, those before the next block's
            left = cutlass.min(Int32(p.columns) - inside % p.each * PACK, Int32(p.out_width) - column)
            guards = [real & (left > half) for half in (0, 4)]
            looked.append((real, item, column, guards, box.look(box.rank, p.at_summed + item, flag(real))))
        came = box.wait([look for *_, look in looked])
        for (real, item, column, guards, _), words in zip(looked, came, strict=True):
            box.report([(Int32(box.rank), words)], SUMMED)
            values = unpack(words)
            square = values[0] * values[0]
            for value in values[1:]:
                square = square + value * value
            store_shared(shared + where["squares"] + 4 * item, [square], guard=real)
            norm = [word.bitcast(Int32) for half in (0, 8)
                    for word in load_shared(shared + where["norm"] + 2 * column + half, 2)]
            scaled = pack([v * n for v, n in zip(values, unpack(norm), strict=True)])
            row = shared + where["rows"] + item // p.of_row * p.pitch + 2 * column
            for half, guard in enumerate(guards):
                store_shared(row + 8 * half, [w.bitcast(Float32) for w in scaled[2 * half : 2 * half + 2]], guard=guard)


@cute.jit
def multiply_up_rows(thread: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """A warp's part of the products of this block's rows of the up-projection, and of a row the sum of the squares."""
    warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
    # a warp without columns multiplies those of another by zeros
    own = cutlass.min(warp * p.own_up_steps, Int32(p.up_steps - p.own_up_steps))
    real = (warp < p.warps) & (warp * p.own_up_steps < p.up_steps)
    weight = shared + where["up"] + cutlass.min(lane & 7, Int32(p.outputs - 1)) * p.pitch + (lane >> 4) * 16
    row = shared + where["rows"] + cutlass.min(lane >> 2, Int32(p.tokens - 1)) * p.pitch + (lane & 3) * 4
    total = [Float32(0.0)] * 4
    for i in cutlass.range_constexpr(p.own_up_steps):
        x = [select(real, load_shared(row + (own + i) * (2 * STEP) + 16 * k).bitcast(Int32), Int32(0))
             for k in range(2)]
        total = mma(load_matrices(weight + (own + i) * (2 * STEP)), x, total)
    place = shared + where["products"] + 4 * ((warp * ROWS + (lane >> 2)) * 8 + 2 * (lane & 3))
    store_shared(place, total[:2], guard=warp < p.warps)
    if warp < p.tokens:
        square = Float32(0.0)
        for start in cutlass.range_constexpr(0, p.of_row, 32):
            index = cutlass.min(lane + start, Int32(p.of_row - 1))
            value = load_shared(shared + where["squares"] + 4 * (warp * p.of_row + index))
            square = square + select(lane + start < p.of_row, value, Float32(0.0))
        store_shared(shared + where["square"] + 4 * warp, [sum_lanes(square)], guard=lane == 0)


@cute.jit
def finish_rows(thread: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """This block's columns of the result in shared memory: the warps' products, norm, the shared columns."""
    if thread < p.tokens * p.outputs:
        token, output = thread // p.outputs, thread % p.outputs
        at = shared + where["products"] + 4 * (output * 8 + token)
        total = load_shared(at)
        for warp in cutlass.range_constexpr(1, p.warps):
            total = total + load_shared(at + warp * (4 * ROWS * 8))
        scale = rsqrt(load_shared(shared + where["square"] + 4 * token) * Float32(1 / p.out_width) + Float32(p.eps))
        place = 4 * (token * ROWS + output)
        beside = load_shared(shared + where["shared"] + place)
        store_shared(shared + where["finished"] + place, [total * scale + beside])


def send_finished(box: Mailbox, thread: Any, block: Any, shared: Any, where: Any, p: Tail) -> None:
    """This block's columns of the result to all ranks."""
    for start in range(0, p.tokens * p.ranks, p.threads):
        item = thread + start
        real = (item < p.tokens * p.ranks) & (block < p.owners)
        item = select(real, item, Int32(0))
        token, fragment = item // p.ranks, p.at_finished + item // p.ranks * p.owners + select(real, block, Int32(0))
        words = _eight(shared + where["finished"] + token * (4 * ROWS))
        box.send(fragment, words, peer_of(item % p.ranks, shared, where), guard=flag(real))


def collect(at: Addresses, box: Mailbox, thread: Any, block: Any, p: Tail) -> None:
    """A thread's share of the finished columns of all ranks."""
    items = p.tokens * p.ranks * p.owners
    for start in range(0, items, p.blocks * p.threads):
        item = block * p.threads + thread + start
        real = item < items
        item = select(real, item, Int32(0))
        token, sender, owner = item // (p.ranks * p.owners), item // p.owners % p.ranks, item % p.owners
        (words,) = box.wait([box.look(sender, p.at_finished + token * p.owners + owner, flag(real))])
        box.report([(sender, words)], FINISHED)
        column = sender * p.stripe + owner * p.outputs
        place = at["g"] + Int64(token) * (2 * p.stride_g) + Int64(column) * 2
        store_words(place, words[: p.outputs // 2], guard=flag(real))
