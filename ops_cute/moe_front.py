"""The front of a sparse layer in one launch: router, latent and shared projections, SiTU, exact top-k; 1 to 8 rows.

Contract: ``x`` bf16 [T, K], any row stride that keeps rows on 16 bytes; ``router`` bf16 [E, K]; ``weight`` bf16 [P + 2
A, K], P rows of the latent, then gate and up of the shared experts; ``bias`` fp32 [E] -> ``f`` bf16 [T, P + 2 A],
``a`` bf16 [T, A] (SiTU), ``ids`` i32 and ``weights`` fp32 [T, k] as ``moe_topk.py`` says. Every rank has all rows of
the router here.

Layout: one block on each multiprocessor. A unit is 8 weight rows; the router's units come first, so that the top-k
runs while the others are streamed; a unit of the shared experts is 4 gate rows and their 4 up rows.
* the copier streams this block's units (every ``blocks``-th) through a ring of slots, 1024 columns of 8 rows each. The
  weights depend on nothing: it begins before the wait for the producers, and a block's ring (12 slots, 200 KB) may be
  full by then;
* 16 warps have their columns of x in registers for the whole launch. A lane's 16 bytes of a weight row are two
  operands of a matrix instruction; the tokens are rows 0 to 7 of the other for the first half of those columns and
  rows 8 to 15 for the second, so that x is used as it was loaded and half of each product is left unused;
* the finisher adds up the 16 warps' sums of a unit and sends them where they belong: logits as words that are their
  own flags (zero is "not yet", plus zero is written as minus zero), everything else to its output;
* one warp of block ``blocks - 1 - t`` waits for the logits of row t and chooses. There is no launch, no counter and no
  last arriver between the projection and the top-k.

Waits: only a row's chooser waits for other blocks; nothing waits for it. Two parts of the logits are used in turn
(``epochs``, counted by each block for itself); a launch zeroes the part of the launch before. A launch ends if all
blocks run at once: there is one for each multiprocessor.
Numerics: fp32 sums of exact products; logits never pass through bf16; SiTU on the fp32 sums.
Bytes of a TP16 rank of Kimi K3 with a replicated front: 75 MB, floor 19.3 us on an H200 (2.35 us + bytes / 4.44 TB/s);
656 units lie on 132 blocks, 99 % of them busy to the end. A weight costs 0.05 instructions: nothing but memory counts.
Measured on an H200 (TP16, weights cold, one graph): one row 18.4 us with programmatic edges (a part of the next
launch's weights is on its way early), 19.6 to 20.6 with plain ones; 8 rows 21.6 with plain ones. The two Triton
launches for the same (projections with SiTU, top-k) take 31.0 + 3.5 and 33.6 + 3.6 with programmatic edges. Ids are
those of the op in every row tried, with equal scores, 41 equal experts at the edge, NaN rows, NaN logits and a bias of
-inf among them.
"""
from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64

from ..compiler.call import Call, Launch
from .launching import KernelLaunch, await_producers, named, row_stride, start_dependents
from .moe_front_menu import MOST_BLOCKS, PARITIES
from .moe_front_plan import BLOCK, PARTIALS, THREADS, TILE, TOKENS, WARPS, Config, Static
from .moe_parts import (
    arrive,
    await_phase,
    copy_bulk,
    expect_bytes,
    init_barriers,
    is_late,
    look,
    multiprocessors,
    publish,
    publish_barriers,
    situ,
    stream_policy,
)
from .moe_topk import choose, clear_keys
from .primitives import lane_xor, load_shared, load_words, mma, pack, select, store_shared, store_words, total

COPIER, FINISHER, ROUTER = WARPS, WARPS + 1, WARPS + 2
EPOCH_READ = 1  # named barrier of the two warps that read the epoch


@cute.jit
def start_ring(thread: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """Makes the barriers; all threads meet."""
    if thread == 0:
        init_barriers(shared + where["full"], p.slots, 1)
        init_barriers(shared + where["empty"], p.slots, WARPS)
        init_barriers(shared + where["partials_full"], 2, WARPS)
        init_barriers(shared + where["partials_empty"], 2, 1)
        publish_barriers()
    cute.arch.sync_threads()


@cute.jit
def _await_copied(fill: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """The weights of fill number ``fill``, if there is one. Fewer are on their way than there are slots."""
    if fill >= 0:
        await_phase(shared + where["full"] + fill % p.slots * 8, (fill // p.slots) & 1)


@cute.jit
def copy_units(router: Any, weight: Any, block: Any, lane: Any, shared: Any, where: cutlass.Constexpr,
               p: cutlass.Constexpr):
    """One warp: streams this block's units of weight rows through the ring, a chunk of columns a slot."""
    policy = stream_policy()
    fill = Int32(0)
    row = lane & (TILE - 1)
    for unit in cutlass.range(block, p.units, p.blocks, unroll=1):
        inside = (unit - p.router_units) * TILE + row
        # of a unit of pairs the first 4 lanes take gate rows, the others up rows
        pair = (unit - p.router_units - p.plain_units) * (TILE // 2) + (row & 3)
        paired = p.plain + pair + select(row >= TILE // 2, Int32(p.pairs), Int32(0))
        inside = select(unit >= p.router_units + p.plain_units, paired, inside)
        routes = unit < p.router_units
        source = select(routes, router, weight)
        source = source + Int64(select(routes, unit * TILE + row, inside)) * (2 * p.columns)
        for chunk in cutlass.range(p.chunks, unroll=1):
            slot = fill % p.slots
            await_phase(shared + where["empty"] + slot * 8, ((fill // p.slots) & 1) ^ 1)
            if cutlass.const_expr(p.pace > 0):
                _await_copied(fill - p.pace, shared, where, p)
            full = shared + where["full"] + slot * 8
            if lane == 0:
                expect_bytes(full, Int32(TILE * 64 * p.chunk))
            cute.arch.sync_warp()
            copy_bulk(shared + where["ring"] + slot * p.slot_bytes + row * p.row_bytes,
                      source + Int64(chunk) * (64 * p.chunk), Int32(64 * p.chunk), full, policy,
                      select(lane < TILE, Int32(1), Int32(0)))
            fill = fill + 1


@cute.jit
def multiply_units(source: Any, block: Any, warp: Any, lane: Any, shared: Any, where: cutlass.Constexpr,
                   p: cutlass.Constexpr):
    """The warps that multiply: this warp's columns of x, at address ``source``, with the 8 rows of each unit."""
    token, part = lane >> 2, lane & 3
    row = source + Int64(token * p.stride_x) * 2 + Int64(part * 16)
    real = select((token < p.tokens) & (warp * p.own < p.chunk), Int32(1), Int32(0))
    loaded = [load_words(row + Int64((chunk * p.chunk + warp * p.own + i) * 64), guard=real)
              for chunk in range(p.chunks) for i in range(p.own)]
    x = [[words[0], words[2], words[1], words[3]] for words in loaded]
    fill, done = Int32(0), Int32(0)
    # a warp without blocks multiplies those of another by zeros
    first = cutlass.min(warp * p.own, Int32(p.chunk - p.own))
    inside = (lane >> 2) * p.row_bytes + first * 64 + (lane & 3) * 16
    for _unit in cutlass.range(block, p.units, p.blocks, unroll=1):
        sums = [[Float32(0.0)] * 4 for _ in range(p.chains)]
        for chunk in cutlass.range_constexpr(p.chunks):
            slot = fill % p.slots
            await_phase(shared + where["full"] + slot * 8, (fill // p.slots) & 1)
            at = shared + where["ring"] + slot * p.slot_bytes + inside
            for i in cutlass.range_constexpr(p.own):
                w = [word.bitcast(Int32) for word in load_shared(at + 64 * i, 4)]
                index = chunk * p.own + i
                # rows 0 to 7 of the first operand are the tokens at the columns of w[0] and w[1], rows 8 to 15 the same
                # tokens at those of w[2] and w[3]: of each product one half is wanted
                half = p.chains // 2
                early, late = index % half, half + index % half
                sums[early] = mma(x[index], w[:2], sums[early])
                sums[late] = mma(x[index], w[2:], sums[late])
            cute.arch.sync_warp()
            if lane == 0:
                arrive(shared + where["empty"] + slot * 8)
            fill = fill + 1
        buffer = done & 1
        await_phase(shared + where["partials_empty"] + buffer * 8, ((done >> 1) & 1) ^ 1)
        both = [total([chain[i + 2 * (c >= p.chains // 2)] for c, chain in enumerate(sums)]) for i in range(2)]
        store_shared(shared + where["partials"] + buffer * PARTIALS + (warp * 32 + lane) * 8, both)
        cute.arch.sync_warp()
        if lane == 0:
            arrive(shared + where["partials_full"] + buffer * 8)
        done = done + 1


def sum_unit(done: Any, lane: Any, shared: Any, where: Any) -> list[Any]:
    """The sums over the warps of the next unit: of token ``lane / 4`` and rows ``2 (lane % 4)`` and the one after."""
    buffer = done & 1
    await_phase(shared + where["partials_full"] + buffer * 8, (done >> 1) & 1)
    source = shared + where["partials"] + buffer * PARTIALS + lane * 8
    sums = load_shared(source, 2)
    for warp in range(1, WARPS):
        sums = [a + b for a, b in zip(sums, load_shared(source + warp * 256, 2), strict=True)]
    cute.arch.sync_warp()
    arrive(shared + where["partials_empty"] + buffer * 8, guard=select(lane == 0, Int32(1), Int32(0)))
    return sums


def _word_of(value: Any) -> Any:
    """The bits of an fp32, with minus zero for zero."""
    word = value.bitcast(Int32)
    return select(word == 0, Int32(-(2**31)), word)


@cute.jit
def _finish(at: Any, logits: Any, block: Any, lane: Any, shared: Any, where: cutlass.Constexpr, p: cutlass.Constexpr):
    """One warp: adds up the warps' sums of a unit and sends them where they belong."""
    done = Int32(0)
    token, part = lane >> 2, lane & 3
    real = select(token < p.tokens, Int32(1), Int32(0))
    for unit in cutlass.range(block, p.units, p.blocks, unroll=1):
        sums = sum_unit(done, lane, shared, where)
        if unit < p.router_units:
            to = logits + Int64(token * p.router + unit * TILE + 2 * part) * 4
            publish(to, _word_of(sums[0]), real)
            publish(to + 4, _word_of(sums[1]), real)
        else:
            inside = unit - p.router_units
            column = inside * TILE + 2 * part
            if inside >= p.plain_units:
                pair = (inside - p.plain_units) * (TILE // 2) + 2 * (part & 1)
                column = p.plain + pair + select(part >= 2, Int32(p.pairs), Int32(0))
                if cutlass.const_expr(p.pairs > 0):
                    ups = [lane_xor(value, 2) for value in sums]
                    both = [situ(g, u, p.beta, p.linear_beta) for g, u in zip(sums, ups, strict=True)]
                    gates = select(part < 2, real, Int32(0))
                    store_words(at.a.toint() + Int64(token * p.stride_a + pair) * 2, pack(both), guard=gates)
            store_words(at.f.toint() + Int64(token * p.stride_f + column) * 2, pack(sums), guard=real)
        done = done + 1


@cute.jit
def _route(at: Any, logits: Any, bias: Any, block: Any, lane: Any, shared: Any, where: cutlass.Constexpr,
           p: cutlass.Constexpr):
    """One warp of one block for each row: waits for the row's logits and chooses. Lane l has experts l, l + 32, ..."""
    token = p.blocks - 1 - block
    if token < p.tokens:
        row = logits + Int64(token * p.router) * 4
        guards = [select(lane + 32 * i < p.router, Int32(1), Int32(0)) for i in range(p.keys)]
        words = [look(row + Int64(lane + 32 * i) * 4, guard, 1)[0] for i, guard in enumerate(guards)]
        late = is_late(words)
        while late != 0:
            words = [look(row + Int64(lane + 32 * i) * 4, guard, 1)[0] for i, guard in enumerate(guards)]
            late = is_late(words)
        choose([word.bitcast(Float32) for word in words], bias, [lane + 32 * i for i in range(p.keys)], guards, lane,
               shared, where, at.ids.toint() + Int64(token * p.top_k) * 4,
               at.weights.toint() + Int64(token * p.top_k) * 4, p)


@cute.kernel
def _moe_front(arguments: Any, names: cutlass.Constexpr, p: cutlass.Constexpr):
    start_dependents(p.dependent)
    at = named(names, arguments)
    where = p.place()
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
    shared = cute.arch.get_dyn_smem(cutlass.Uint8, 128).toint()
    start_ring(thread, shared, where, p)
    if warp == COPIER:
        # weights depend on nothing: they are on their way before the producers have finished
        copy_units(at.router.toint(), at.weight.toint(), block, lane, shared, where, p)
    elif warp >= FINISHER:
        bias = [load_words(at.bias.toint() + Int64(lane + 32 * i) * 4, 1, guard=select(
            lane + 32 * i < p.router, Int32(1), Int32(0)))[0].bitcast(Float32) for i in range(p.keys)]
        clear_keys(lane, Int32(warp == ROUTER), shared, where, p)
        await_producers(p.dependent)
        epochs = at.epochs.toint() + Int64(block) * 4
        epoch = load_words(epochs, 1)[0]
        cute.arch.barrier(barrier_id=EPOCH_READ, number_of_threads=64)
        half = p.tokens * p.router * 4
        logits = at.logits.toint() + Int64(epoch & 1) * half
        if warp == FINISHER:
            _finish(at, logits, block, lane, shared, where, p)
        else:
            if lane == 0:
                store_words(epochs, [epoch + 1])
            _route(at, logits, bias, block, lane, shared, where, p)
            # the other half was read by the launch before and has to be zero for the next
            before = at.logits.toint() + Int64((epoch & 1) ^ 1) * half
            for index in cutlass.range(block * 32 + lane, p.tokens * p.router, p.blocks * 32, unroll=1):
                store_words(before + Int64(index) * 4, [Int32(0)])
    else:
        await_producers(p.dependent)
        multiply_units(at.x.toint(), block, warp, lane, shared, where, p)


def bind(call: Call) -> Launch:
    """x, router, weight, bias -> f, ids, weights, and a where the shared experts are inside."""
    config, tensors = Config(**call.config), call.tensors
    x, router, weight, f, a = (call.get(name) for name in ("x", "router", "weight", "f", "a"))
    assert x is not None and router is not None and weight is not None and f is not None  # noqa: PT018
    for name in ("router", "weight", "bias", "ids", "weights"):
        assert tensors[name].is_contiguous(), f"{name} {tensors[name].shape} {tensors[name].stride()}"
    dtypes = [tensors[name].dtype for name in ("x", "router", "weight", "f", "bias", "weights")]
    assert dtypes == [torch.bfloat16] * 4 + [torch.float32] * 2, f"{dtypes}"
    assert router.shape[1] == weight.shape[1] == x.shape[1], f"x {x.shape}, {router.shape}, {weight.shape}"
    assert row_stride(x) % 8 == row_stride(f) % 2 == 0, f"rows of x {x.stride()}, f {f.stride()}"
    attrs, activation = call.attrs["ids"], call.attrs.get("a", {"beta": 1.0, "linear_beta": 1.0})
    pairs, blocks = 0 if a is None else a.shape[1], multiprocessors(x.device)
    assert TOKENS >= x.shape[0] <= blocks <= MOST_BLOCKS, f"{x.shape[0]} rows, {blocks} multiprocessors"
    static = Static(
        tokens=x.shape[0], columns=x.shape[1], router=router.shape[0], plain=weight.shape[0] - 2 * pairs, pairs=pairs,
        top_k=attrs["top_k"], blocks=blocks, slots=config.slots, stride_x=row_stride(x), stride_f=row_stride(f),
        stride_a=0 if a is None else row_stride(a), beta=activation["beta"], linear_beta=activation["linear_beta"],
        renormalize=attrs["renormalize"], scaling=attrs["scaling"], dependent=call.dependent_launch,
        lean=False, pace=0)
    assert static.columns % BLOCK == 0, f"x {x.shape}"
    assert call.scratch["logits"].shape[0] == PARITIES, f"logits {call.scratch['logits'].shape}"
    arguments = {name: tensors[name] for name in ("x", "router", "weight", "bias", "f", "ids", "weights")}
    arguments |= {"a": f if a is None else a, **{name: call.scratch[name] for name in ("logits", "epochs")}}
    return KernelLaunch(_moe_front, (blocks, 1, 1), THREADS, arguments, static, shared=static.place()["end"],
                        dependent=static.dependent)
