"""The tail of a sparse layer in one launch: two sums over ranks, norm, a stripe of the up-projection, gather.

Contract: ``x`` bf16 [T, L] is this rank's part of the latent, ``other`` bf16 [T, D] its part of the shared experts'
sum. ``latent = bf16(sum of x)``; ``n = latent rsqrt(mean latent^2 + eps) norm``; with ``weight`` bf16 [S, L], this
rank's S = D / ranks rows of the up-projection, and ``shared`` the S columns that are its own of the sum of ``other``:
``out = bf16(n weight^T + shared)``. ``g`` bf16 [T, D] is every rank's ``out`` side by side.

Layout: a cluster has ``tiles`` times 16 outputs, and its blocks split the latent: each sums its share over the ranks,
multiplies it with its part of the weight rows on the matrix units and sends the products to the block that finishes
the row, with the sum of the squares of the share, which the same units make. The norm's factor of a row is applied to
the finished sums. So a cluster reads the parts of the latent once, and its blocks exchange once.
All threads of all blocks share the sending, the arming and the collecting.

Order: weights and norm are asked for before the wait for the producers and multiplied with each other while parts
travel; publish both parts; arm; wait (0) for the "parts of the latent"; products; wait (1) for the "parts of the shared
columns"; publish the finished columns; wait (2) for the "finished columns" of all ranks.
Waits: a launch needs all its blocks resident, because each sends a share of what all wait for (``bind`` checks the
number; blocks of earlier launches leave by themselves, and later ones start only when all blocks of this one have).
No block waits before it has published its share of that stage. The launch for all ranks of one process is three
launches where the blocks of all ranks would not fit.
Epochs: one for each block. The last act is a cluster barrier: no block leaves while another may still write to it.
Numerics: bf16 parts, fp32 sums (the latent in halves of the ranks where two threads share a fragment, the same on every
rank); weight times norm is rounded to bf16 once; products of bf16 exact, sums fp32; one rounding of the result.
Measured in loopback on one H200, TP16, with dependent launch: 1 row 4.9 us, 2 rows 5.2, 4 rows 5.9, 8 rows 7.8; the
Triton twin 9.8, 10.9 and 17.0 at 1, 2 and 8. Where one row's time goes (stamps of the GPU's clock): parts sent 0.3,
there and summed, with the weights out of L2, 1.8, products 0.6, shared columns and exchange 0.25, finished and sent
0.25, collected 0.45, and 0.9 from there to the next launch's release. Compared there at TP 8 and 16, 1 to 16 rows, all
ranks of a group in stages and in loopback.
"""
# ruff: noqa: SIM102 - what is known while the kernel is traced stands alone
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64

from ..compiler.call import Call, Launch, Link
from ..compiler.launches import LaunchSequence
from .launching import KernelLaunch, await_producers, row_stride, start_dependents
from .mailbox import Addresses, Mailbox, addresses, columns_of, fits_at_once, hold_back, row_bytes
from .moe_tail_menu import COLUMNS, MOST_BLOCKS, MOST_ROWS, TILE, UNIT, message, tiles
from .primitives import (
    address,
    lane_xor,
    load_shared,
    load_words,
    mma,
    pack,
    peer_address,
    ptx,
    rsqrt,
    select,
    send,
    store_shared,
    store_words,
    unpack,
)
from .protocol import FRAGMENT_WORDS, PROTOCOL

WAITS = ("parts of the latent", "parts of the shared columns", "finished columns")
WHOLE, PUBLISH, MIDDLE, COLLECT = 0, 1, 2, 3
LANES = 32
LOOKS = 32  # fragments of a thread under way at once, of those that it waits for
TOGETHER = 6  # and of those that it sends


@dataclass(frozen=True)
class Config:
    """Blocks that split the latent, tiles of 16 outputs of a cluster, warps of a tile that split a block's latent."""

    cluster: int
    tiles: int
    parts: int
    early: bool  # weights in registers before the wait for the producers


@dataclass(frozen=True)
class Static:
    """What the kernel is compiled for."""

    columns: tuple[str, ...]  # of the address table
    rows: int
    latent: int
    stripe: int  # columns of a rank
    ranks: int
    slot: int  # bytes
    cluster: int
    tiles: int
    parts: int
    early: bool
    clusters: int
    eps: float
    stride_x: int  # elements between rows
    stride_other: int
    stride_g: int
    phase: int
    limit: int
    dependent: bool
    multicast: bool = False

    @property
    def warps(self) -> int:
        return self.tiles * self.parts

    @property
    def threads(self) -> int:
        return self.warps * LANES

    @property
    def all_threads(self) -> int:
        """Of a rank."""
        return self.clusters * self.cluster * self.threads

    @property
    def share(self) -> int:
        """Columns of the latent of one block."""
        return self.latent // self.cluster

    @property
    def units(self) -> int:
        """Products of a warp along the latent."""
        return self.share // (UNIT * self.parts)

    @property
    def copies(self) -> int:
        """Stores that bring a fragment to all ranks."""
        return 1 if self.multicast else self.ranks

    # fragments: of the latent's rows, of the stripe's rows, and where the messages begin in a slot
    @property
    def latents(self) -> int:
        return self.rows * self.latent // 8

    @property
    def stripes(self) -> int:
        return self.rows * self.stripe // 8

    @property
    def items(self) -> int:
        """Fragments that a rank sends, each to one rank or to all at once."""
        return self.copies * self.latents + self.ranks * self.stripes

    @property
    def turns(self) -> int:
        """Of them, what a thread sends at most."""
        return -(-self.items // self.all_threads)

    @property
    def pitch(self) -> int:
        """Bytes between rows of the latent in shared memory: neighbours in other banks."""
        return 2 * self.share + (64 if self.share % 64 == 0 else 0)

    @property
    def finishing(self) -> int:
        """Rows that one block of a cluster finishes."""
        return -(-self.rows // self.cluster)

    @property
    def partials(self) -> int:
        """Bytes for one row's sums from all blocks: of each warp its outputs, then the sums of squares."""
        return -(-self.partial_bytes // 16) * 16

    @property
    def partial_bytes(self) -> int:
        """What arrives of them."""
        return 4 * self.cluster * self.parts * (TILE * self.tiles + 1)

    @property
    def per_warp(self) -> int:
        """Fragments of a row's outputs that a warp finishes."""
        return -(-2 // self.parts)

    @property
    def shared(self) -> int:
        return HEAD + self.finishing * self.partials + self.rows * self.pitch


HEAD = 16  # bytes of the barrier


def _prefetch(at: Any, count: int, guard: Any) -> None:
    """Asks for ``count`` bytes in the L2 cache, where ``guard`` (Int32) is not zero."""
    ptx(f"{{ .reg .pred g; setp.ne.b32 g, $1, 0; @g cp.async.bulk.prefetch.L2.global [$0], {count}; }}", [],
        [at, guard])


def _prefetch_weights(at: Addresses, thread: Any, part: Any, cluster: Any, p: Static) -> None:
    """A block's part of its weight rows, a row a thread."""
    for start in range(0, TILE * p.tiles, p.threads):
        output = cluster * p.tiles * TILE + thread + start
        real = (output < p.stripe) & (thread + start < TILE * p.tiles)
        source = at["up"] + (Int64(select(real, output, Int32(0))) * p.latent + Int64(part * p.share)) * 2
        _prefetch(source, 2 * p.share, Int32(real))


def _load_weights(at: Addresses, part: Any, cluster: Any, warp: Any, lane: Any, p: Static) -> tuple[Any, Any]:
    """The words of a lane's weights, row g before row g + 8 of each unit, and of the norm beside them."""
    first = part * p.share + (warp % p.parts) * p.units * UNIT + (lane % 4) * 8
    output = (cluster * p.tiles + warp // p.parts) * TILE + lane // 4
    weight, norm = [], []
    for unit in range(p.units):
        for lower in (0, 8):
            o = select(output + lower < p.stripe, output + lower, Int32(p.stripe - 1))
            weight += load_words(at["up"] + (Int64(o) * p.latent + Int64(first + unit * UNIT)) * 2)
        norm += load_words(at["norm"] + Int64(first + unit * UNIT) * 2)
    return weight, norm


def _times(words: Sequence[Any], factors: Sequence[Any]) -> list[Any]:
    """Pairs of bf16 multiplied."""
    return [ptx("mul.rn.bf16x2 $0, $1, $2;", [Int32], [w, f], pure=True)
            for w, f in zip(words, factors, strict=True)]


def _share_of_parts(at: Addresses, number: Any, first: int, p: Static) -> list[Any]:
    """A thread's share of this rank's two parts, ``TOGETHER`` items at most from its item ``first``: source, fragment,
    mailbox, whether it is of the shared columns, and whether there is one. Neighbouring threads send neighbouring
    fragments to one rank."""
    whole, stripe = p.latent // 8, p.stripe // 8
    everywhere = p.copies * p.latents
    found = []
    for turn in range(first, min(first + TOGETHER, p.turns)):
        real = number + turn * p.all_threads < p.items
        item = select(real, number + turn * p.all_threads, Int32(0))
        other = item >= everywhere
        rest = select(other, item - everywhere, Int32(0))
        peer = select(other, rest // p.stripes, item // p.latents)
        fragment = select(other, rest % p.stripes, item % p.latents)
        row = select(other, fragment // stripe, fragment // whole)
        column = select(other, fragment % stripe + peer * stripe, fragment % whole)
        stride = select(other, Int32(p.stride_other), Int32(p.stride_x))
        source = select(other, at["other"], at["x"]) + Int64(row) * Int64(stride) * 2 + Int64(column) * 16
        found.append((source, select(other, fragment + p.latents, fragment), at.peer(peer), other, real))
    return found


def _publish(at: Addresses, box: Mailbox, number: Any, share: Sequence[Any], p: Static) -> None:
    """Sends a thread's share; ``share`` is its beginning."""
    for first in range(0, p.turns, TOGETHER):
        share = share if first == 0 else _share_of_parts(at, number, first, p)
        words = [load_words(source) for source, *_ in share]
        for (_, fragment, peer, other, real), w in zip(share, words, strict=True):
            if p.multicast:
                box.send(fragment, w, guard=select(other, Int32(0), Int32(real)))
                box.send(fragment, w, peer, guard=select(other, Int32(real), Int32(0)))
            else:
                box.send(fragment, w, peer, guard=Int32(real))


def _arm(box: Mailbox, number: Any, p: Static) -> None:
    """A thread's share of what this launch reads, for all senders."""
    each = p.latents + 2 * p.stripes
    for start in range(0, p.ranks * each, p.all_threads):
        item = number + start
        box.arm(item // each, item % each, Int32(item < p.ranks * each))


def _sum_latent(box: Mailbox, thread: Any, part: Any, rows: Any, p: Static) -> None:
    """This block's share of the latent, summed over the ranks and rounded, into shared memory at ``rows``."""
    own = p.share // 8
    items = p.rows * own
    # two threads share a fragment while there are threads enough
    split = 2 if 2 * items <= p.threads and p.ranks % 2 == 0 else 1
    each = p.ranks // split
    starts = list(range(0, items * split, p.threads))
    together = max(1, LOOKS // each)
    for first in range(0, len(starts), together):
        looked = []
        for start in starts[first : first + together]:
            item = thread + start
            item = select(item < items * split, item, item % split)
            fragment, half = item // split, item % split
            row, column = fragment // own, fragment % own
            where = row * (p.latent // 8) + part * own + column
            looked.append((thread + start < items * split, half, row * p.pitch + column * 16,
                           [(half * each + i, box.look(half * each + i, where)) for i in range(each)]))
        came = box.wait([look for *_, looks in looked for _, look in looks])
        for turn, (real, half, place, looks) in enumerate(looked):
            received = came[turn * each : (turn + 1) * each]
            box.report([(sender, words) for (sender, _), words in zip(looks, received, strict=True)], 0)
            total = unpack(received[0])
            for words in received[1:]:
                total = [a + b for a, b in zip(total, unpack(words), strict=True)]
            if split == 2:
                total = [a + lane_xor(a, 1) for a in total]
            store_shared(rows + place, [word.bitcast(Float32) for word in pack(total)], guard=real & (half == 0))


def _send_partial(at: Any, value: Any, barrier: Any, block: Any, guard: Any, p: Static) -> None:
    """fp32 into the shared memory of a block of the cluster, counted at its barrier."""
    if p.cluster == 1:
        store_shared(at, [value], guard=guard)
    else:
        send(peer_address(at, block), [value], peer_address(barrier, block), guard=guard)


def _multiply(weight: Sequence[Any], rows: Any, base: Any, part: Any, warp: Any, lane: Any, p: Static) -> None:
    """A warp's products, sent to the blocks that finish the rows. ``weight``: words by unit, row g before row g + 8."""
    g, q = lane // 4, lane % 4
    split, tile = warp % p.parts, warp // p.parts
    source = part * p.parts + split
    for first in range(0, p.rows, COLUMNS):
        row = select(first + g < p.rows, first + g, Int32(p.rows - 1))
        at = rows + row * p.pitch + (split * p.units * UNIT + q * 8) * 2
        # two chains of products each, so that one does not wait for itself
        sums, squares = ([[Float32(0.0)] * 4 for _ in range(2)] for _ in range(2))
        for unit in range(p.units):
            x = [value.bitcast(Int32) for value in load_shared(at + unit * 2 * UNIT, 4)]
            upper, lower = weight[8 * unit : 8 * unit + 4], weight[8 * unit + 4 : 8 * unit + 8]
            for chain, step in enumerate((0, 2)):
                b = x[step : step + 2]
                sums[chain] = mma([upper[step], lower[step], upper[step + 1], lower[step + 1]], b, sums[chain])
                # the rows times themselves: squares are the diagonal
                squares[chain] = mma([b[0], Int32(0), b[1], Int32(0)], b, squares[chain])
        sums, squares = ([a + b for a, b in zip(*both, strict=True)] for both in (sums, squares))
        for i, value in enumerate(sums):
            column = first + 2 * q + i % 2
            output = tile * TILE + g + 8 * (i // 2)
            place = base + (column // p.cluster) * p.partials + (source * TILE * p.tiles + output) * 4
            _send_partial(place, value, base - HEAD, column % p.cluster, column < p.rows, p)
        own, row = select(g % 2 == 0, squares[0], squares[1]), first + g
        place = base + (row // p.cluster) * p.partials + (p.cluster * p.parts * TILE * p.tiles + source) * 4
        guard = (g // 2 == q) & (row < p.rows) & (tile == 0)
        _send_partial(place, own, base - HEAD, row % p.cluster, guard, p)


def _look_shared(box: Mailbox, part: Any, cluster: Any, warp: Any, lane: Any, p: Static) -> list[Any]:
    """First looks at the shared columns that a warp adds: row, fragment, whether it finishes it, and of the lane the
    sender and the look."""
    found = []
    sender = select(lane < p.ranks, lane, Int32(0))
    for turn in range(p.finishing):
        for k in range(p.per_warp):
            row, fragment = part + turn * p.cluster, warp + k * p.warps
            column = cluster * 2 * p.tiles + fragment
            real = (row < p.rows) & (fragment < 2 * p.tiles) & (column < p.stripe // 8)
            row, column = select(real, row, Int32(0)), select(real, column, Int32(0))
            where = p.latents + row * (p.stripe // 8) + column
            found.append((where + p.stripes, fragment, real, sender, box.look(sender, where)))
    return found


def _add_shared(box: Mailbox, looked: Sequence[Any], lane: Any) -> list[Any]:
    """The sums over ranks of the shared columns of each fragment, four columns a lane: even lanes have the first."""
    half = lane % 2
    found = []
    for (_, _, _, sender, _), words in zip(looked, box.wait([one[4] for one in looked]), strict=True):
        words = [select(sender == lane, w, Int32(0)) for w in words]
        box.report([(sender, words)], 1)
        parts = unpack(words)
        kept = [select(half == 0, a, b) for a, b in zip(parts[:4], parts[4:], strict=True)]
        sent = [select(half == 0, b, a) for a, b in zip(parts[:4], parts[4:], strict=True)]
        total = [a + lane_xor(b, 1) for a, b in zip(kept, sent, strict=True)]
        for step in (2, 4, 8, 16):
            total = [t + lane_xor(t, step) for t in total]
        found.append(total)
    return found


def _finish(box: Mailbox, peer: Any, looked: Sequence[Any], shared: Sequence[Any], base: Any, lane: Any,
            p: Static) -> None:
    """Sums, norm, the shared columns and the sending of a block's rows, a fragment of 8 outputs a warp at a time."""
    half = lane % 2
    sources = p.cluster * p.parts
    for turn, (where, fragment, real, _, _) in enumerate(looked):
        slot = base + (turn // p.per_warp) * p.partials
        total, square = [Float32(0.0)] * 4, Float32(0.0)
        for first in range(0, sources, LANES // 2):
            source = first + lane // 2
            there = source < sources
            source = select(there, source, Int32(0))
            values = load_shared(slot + (source * TILE * p.tiles + (fragment % (2 * p.tiles)) * 8 + half * 4) * 4, 4)
            total = [t + select(there, v, Float32(0.0)) for t, v in zip(total, values, strict=True)]
            value = load_shared(slot + (sources * TILE * p.tiles + source) * 4)
            square = square + select(there, value, Float32(0.0))
        for step in (2, 4, 8, 16):
            total = [t + lane_xor(t, step) for t in total]
            square = square + lane_xor(square, step)
        scale = rsqrt(square * Float32(1 / p.latent) + Float32(p.eps))
        own = pack([t * scale + s for t, s in zip(total, shared[turn], strict=True)])
        theirs = [lane_xor(w, 1) for w in own]
        words = [select(half == 0, w, t) for w, t in zip(own, theirs, strict=True)]
        words += [select(half == 0, t, w) for w, t in zip(own, theirs, strict=True)]
        box.send(where, words, peer, guard=Int32(real & (lane < p.copies)))


def _collect(at: Addresses, box: Mailbox, number: Any, p: Static) -> None:
    """A thread's share of the finished columns of all ranks."""
    looked = []
    stripe = p.stripe // 8
    for start in range(0, p.ranks * p.stripes, p.all_threads):
        item = number + start
        real = item < p.ranks * p.stripes
        item = select(real, item, Int32(0))
        sender, fragment = item // p.stripes, item % p.stripes
        column = sender * stripe + fragment % stripe
        place = at["g"] + Int64(fragment // stripe) * (2 * p.stride_g) + Int64(column) * 16
        looked.append((real, sender, place, box.look(sender, p.latents + p.stripes + fragment)))
    for first in range(0, len(looked), LOOKS):
        some = looked[first : first + LOOKS]
        for (real, sender, place, _), words in zip(some, box.wait([look for *_, look in some]), strict=True):
            box.report([(sender, words)], 2)
            store_words(place, words, guard=real)


def open_tail(part: Any, p: Static) -> None:
    """First thing in a block, by one thread: the barrier that counts what the cluster sends to the block."""
    mine = Int32(0)
    for turn in range(p.finishing):
        mine = mine + select(part + turn * p.cluster < p.rows, Int32(p.partial_bytes), Int32(0))
    barrier = cute.arch.get_dyn_smem(Int64, 16)
    cute.arch.mbarrier_init(barrier, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.mbarrier_arrive_and_expect_tx(barrier, mine)


def run_tail(at: Addresses, thread: Any, part: Any, cluster: Any, p: Static, *, collect: bool) -> None:
    """A block's share: parts sent, its columns finished and sent, and with ``collect`` those of all ranks stored.
    Without it other blocks of the rank read them, and a block counts its epoch once its own are on their way."""
    lane, warp = thread % LANES, thread // LANES
    barrier = cute.arch.get_dyn_smem(Int64, 16)
    base = address(barrier) + HEAD
    rows = base + p.finishing * p.partials
    middle = p.phase in (WHOLE, MIDDLE)
    number = (cluster * p.cluster + part) * p.threads + thread
    weight: list[Any] = []
    norm: list[Any] = []
    if middle:
        cute.arch.cluster_arrive_relaxed()
        if p.early:
            weight, norm = _load_weights(at, part, cluster, warp, lane, p)
        else:
            _prefetch_weights(at, thread, part, cluster, p)
    peer = at.peer(select(lane < p.ranks, lane, Int32(0))) if middle and not p.multicast else None
    share = _share_of_parts(at, number, 0, p) if p.phase in (WHOLE, PUBLISH) else []
    await_producers(p.dependent)

    box = Mailbox(at, ranks=p.ranks, slot=p.slot, block=cluster * p.cluster + part, limit=p.limit,
                  multicast=p.multicast)
    if p.phase in (WHOLE, PUBLISH):
        _publish(at, box, number, share, p)
    if middle:
        _arm(box, number, p)
        if p.early:
            weight = hold_back(weight, box.epoch, box.epochs)
        else:
            weight, norm = _load_weights(at, part, cluster, warp, lane, p)
        weight = _times(weight, [w for unit in range(p.units) for w in 2 * norm[4 * unit : 4 * unit + 4]])
        cute.arch.cluster_wait()
        looked = _look_shared(box, part, cluster, warp, lane, p)
        _sum_latent(box, thread, part, rows, p)
        cute.arch.sync_threads()
        _multiply(weight, rows, base, part, warp, lane, p)
        shared = _add_shared(box, looked, lane)
        if p.cluster == 1:
            cute.arch.sync_threads()
        else:
            cute.arch.mbarrier_wait(barrier, 0)
        cute.arch.cluster_arrive_relaxed()
        _finish(box, peer, looked, shared, base, lane, p)
    if collect and p.phase in (WHOLE, COLLECT):
        _collect(at, box, number, p)
    if p.phase == (COLLECT if collect else MIDDLE) or p.phase == WHOLE:
        box.count(Int32(thread == 0))
    if middle:
        cute.arch.cluster_wait()


@cute.kernel
def _moe_tail(arguments: Any, names: cutlass.Constexpr, p: cutlass.Constexpr):
    start_dependents(p.dependent)
    thread, _, _ = cute.arch.thread_idx()
    part, index, cluster = cute.arch.block_idx()
    at = Addresses(arguments, names, p.columns, index)
    if cutlass.const_expr(p.phase in (WHOLE, MIDDLE)):
        if thread == 0:
            open_tail(part, p)
    run_tail(at, thread, part, cluster, p, collect=True)


def static_of(calls: Sequence[Call], links: Sequence[Link], config: Config, names: Mapping[str, str], *,
              multicast: bool) -> tuple[Static, list[dict[str, torch.Tensor]]]:
    """What a kernel with ``run_tail`` is compiled for, and the tensors of each rank by their names in it; ``names``:
    those of the plan for them. Checks that the plan's shapes and addresses allow it."""
    assert not multicast or len(calls) == 1, "a process with several ranks has no multicast address"
    first = calls[0]
    x, other, weight = (first.tensors[names[name]] for name in ("x", "other", "up"))
    rows, latent = x.shape
    stripe = weight.shape[0]
    parities, ranks, slot = first.scratch["mailbox"].shape
    assert parities == PROTOCOL.parities, f"mailbox of {parities} parts"
    assert rows <= MOST_ROWS, f"{rows} rows"
    assert other.shape == (rows, ranks * stripe), f"{other.shape} for {ranks} x {stripe}"
    assert weight.is_contiguous(), f"weight {weight.stride()}"
    assert slot >= FRAGMENT_WORDS * message(rows, latent, stripe), f"slot of {slot} words"
    assert latent % (UNIT * config.cluster * config.parts) == 0, f"latent of {latent} for {config}"
    assert all(len(link.peers) == ranks for link in links), f"links to {[len(k.peers) for k in links]} of {ranks} ranks"
    tensors = [{own: call.tensors[name] for own, name in names.items()} for call in calls]
    for named in tensors:
        misaligned = [name for name, tensor in named.items() if tensor.data_ptr() % 16 or row_bytes(tensor) % 16]
        assert not misaligned, f"{misaligned} do not lie on 16 bytes"
    static = Static(
        columns=(), rows=rows, latent=latent, stripe=stripe, ranks=ranks, slot=4 * slot,
        cluster=config.cluster, tiles=config.tiles, parts=config.parts, early=config.early,
        clusters=tiles(stripe, first.config), eps=first.attrs["n"]["eps"], stride_x=row_stride(x),
        stride_other=row_stride(other), stride_g=0, phase=WHOLE, limit=first.wait_limit,
        dependent=first.dependent_launch, multicast=multicast)
    waiting = static.all_threads
    assert waiting <= MOST_BLOCKS * 128, f"{waiting} threads in blocks of {static.threads} wait together"
    return static, tensors


NAMES = {"x": "x", "other": "other", "norm": "norm", "up": "weight", "g": "g"}


def bind(calls: Sequence[Call], links: Sequence[Link], *, multicast: int = 0) -> Launch:
    """The launch for the ranks of this process; ``links`` are those of their mailboxes. ``multicast``: the address at
    which one store reaches the mailboxes of all ranks, where the device has one."""
    x, g, config = calls[0].tensors["x"], calls[0].tensors["g"], Config(**calls[0].config)
    static, tensors = static_of(calls, links, config, NAMES, multicast=bool(multicast))
    assert g.shape == calls[0].tensors["other"].shape, f"{g.shape} for {static.ranks} x {static.stripe}"
    static = replace(static, columns=columns_of(tuple(tensors[0]), static.ranks), stride_g=row_stride(g))
    grid, cluster = (config.cluster, len(calls), static.clusters), (config.cluster, 1, 1)
    launch = KernelLaunch(_moe_tail, grid, static.threads, addresses(calls, links, tensors, multicast), static,
                          cluster=cluster, shared=static.shared, dependent=static.dependent)
    if len(calls) == 1 or fits_at_once(len(calls) * static.clusters * config.cluster, x.device):
        return launch
    return LaunchSequence(tuple(replace(launch, parameters=replace(static, phase=phase))
                                for phase in (PUBLISH, MIDDLE, COLLECT)))
