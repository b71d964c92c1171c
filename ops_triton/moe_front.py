"""The sharded front of a sparse layer in one launch: projections, activation, both gathers, top-k.

Contract: ``x`` bf16 [T, K] on every rank; a rank's rows of ``router`` bf16 [E / ranks, K] and of ``weight`` bf16
[P + 2 A, K]: P rows of the latent, then gate and up of the shared experts. Results: ``a`` bf16 [T, A] of this rank,
``latent`` bf16 [T, P ranks], ``ids`` i32 and ``weights`` fp32 [T, k] of all experts, equal on all ranks. Mailboxes,
epochs and links as in ``exchange.py``; numerics and ties of the top-k as in ``moe_route.py``.

Layout: the fastest grid axis is the rank. First come the blocks of ``skinny_linear.py``, each with ``rows`` rows of the
weights; what is to be gathered goes from their registers into the mailboxes of all ranks, this one's too. Behind
them come, for each row of the step, one block that collects the logits and routes, and blocks of UNITS words that
collect the latent. Blocks that wait for others start last and blocks that send never wait for a rank, so that a launch
cannot block itself however few blocks run at once.

Waits: the first weight tile and the bias are loaded before the wait for the producers. Every block counts its own
epoch. Two halves of the mailbox are enough: the launch ends on a rank when all words of all ranks have come.
Numerics: fp32 sums; logits travel as fp32, the latent as bf16, rounded once.
Bytes of a TP16 rank at one row: 15.0 MB, floor 5.7 us on an H200 (2.35 us + bytes / 4.44 TB/s). As four launches
13.9 us there (5.4 + 2.4 + 3.5 + 2.6, loopback, triton 3.6).
Portable: NVIDIA-only calls are behind DEPENDENT_LAUNCH.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ..compiler.call import Call, Launch, Link
from .activations import SITU
from .collectives import group_constants, make_launches
from .exchange import (
    EPOCHS,
    RANK,
    address,
    make_pair,
    make_table,
    make_word,
    next_epoch,
    polled,
    receive,
    send,
    store_epoch,
)
from .launching import INTERPRET, await_producers, row_stride, start_dependents
from .moe_front_menu import UNITS, collectors
from .moe_route import choose
from .skinny_linear import _store, _sum_dot, _sum_fma, _tile_rows
from .skinny_linear_menu import count_tiles, padded_rows

OWN = tl.constexpr(9)  # first column of the table behind the tensors


@triton.jit
def _project(table, tile, epoch_at, M: tl.constexpr, MP: tl.constexpr, K: tl.constexpr, ROUTER: tl.constexpr,
             PLAIN: tl.constexpr, PAIRS: tl.constexpr, TILES_ROUTER: tl.constexpr, TILES_PLAIN: tl.constexpr,
             STRIDE_X: tl.constexpr, STRIDE_A: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr,
             DOT: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
             EVEN_K: tl.constexpr, WIDEN: tl.constexpr, ACTIVATION: tl.constexpr, RANKS: tl.constexpr,
             SLOT: tl.constexpr, ALIGN: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    """One tile of weight rows, and its results to where they are wanted."""
    WIDE: tl.constexpr = ROUTER + PLAIN // 2
    x = address(table, 0, tl.bfloat16, ALIGN)
    weight = address(table, 1, tl.bfloat16, ALIGN)
    if tile < TILES_ROUTER:
        weight = address(table, 2, tl.bfloat16, ALIGN)
    rank = tl.load(table + OWN + RANK).to(tl.int32)
    rows, real = _tile_rows(tile, R, TILES_ROUTER, TILES_PLAIN, ROUTER, PLAIN, PAIRS)
    if DOT:
        acc = _sum_dot(x, weight, rows, real, 0, M, MP, K, STRIDE_X, R, BK, STEPS, STAGES, EVEN_K, WIDEN,
                       DEPENDENT_LAUNCH)
    else:
        acc = _sum_fma(x, weight, rows, real, 0, M, MP, K, STRIDE_X, R, BK, STEPS, EVEN_K, DEPENDENT_LAUNCH)
    epoch = next_epoch(epoch_at, False)
    m = tl.arange(0, MP)
    if tile < TILES_ROUTER:
        word = make_word(acc.to(tl.int32, bitcast=True), epoch, False)
        at = (m * WIDE)[:, None] + rows[None, :]
        for peer in tl.static_range(RANKS):
            here = (m < M)[:, None] & real[None, :]
            send(table, OWN, peer, word, at, here, epoch, rank, RANKS, SLOT, ALIGN, False, True)
    elif tile < TILES_ROUTER + TILES_PLAIN:
        low, high = tl.split(tl.reshape(acc, (MP, R // 2, 2)))
        word = make_word(make_pair(low, high), epoch, False)
        unit = (tile - TILES_ROUTER) * (R // 2) + tl.arange(0, R // 2)
        at = (m * WIDE + ROUTER)[:, None] + unit[None, :]
        mask = (m < M)[:, None] & (unit < PLAIN // 2)[None, :]
        for peer in tl.static_range(RANKS):
            send(table, OWN, peer, word, at, mask, epoch, rank, RANKS, SLOT, ALIGN, False, True)
    else:
        a = address(table, 3, tl.bfloat16, ALIGN)
        _store(acc, tile, rows, real, x, x, a, x, x, M, MP, R, 0, TILES_ROUTER + TILES_PLAIN, PAIRS, 0, 0, STRIDE_A,
               0, 0, False, 0, ACTIVATION, BETA, LINEAR_BETA)
    store_epoch(epoch_at, epoch)


@triton.jit
def _collect_latent(table, row, chunk, epoch_at, WIDE: tl.constexpr, ROUTER: tl.constexpr, WORDS: tl.constexpr,
                    STRIDE_LATENT: tl.constexpr, UNITS: tl.constexpr, RANKS: tl.constexpr, PADDED: tl.constexpr,
                    SLOT: tl.constexpr, LIMIT: tl.constexpr, ALIGN: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    unit = chunk * UNITS + tl.arange(0, UNITS)
    rank = tl.load(table + OWN + RANK).to(tl.int32)
    latent = address(table, 7, tl.int32, ALIGN) + row * STRIDE_LATENT
    await_producers(DEPENDENT_LAUNCH)
    epoch = next_epoch(epoch_at, False)
    got = receive(table, OWN, unit, row * WIDE + ROUTER + unit, unit < WORDS, epoch, rank, RANKS, PADDED, SLOT, LIMIT,
                  ALIGN, False, True)
    sender = tl.arange(0, PADDED)[:, None]
    tl.store(latent + sender * WORDS + unit[None, :], got, mask=(sender < RANKS) & (unit < WORDS)[None, :])
    store_epoch(epoch_at, epoch)


@triton.jit
def _route_row(table, row, epoch_at, WIDE: tl.constexpr, ROUTER: tl.constexpr, SP: tl.constexpr, TOP_K: tl.constexpr,
               KP: tl.constexpr, RENORMALIZE: tl.constexpr, SCALING: tl.constexpr, RANKS: tl.constexpr,
               PADDED: tl.constexpr, SLOT: tl.constexpr, LIMIT: tl.constexpr, ALIGN: tl.constexpr,
               DEPENDENT_LAUNCH: tl.constexpr):
    unit = tl.arange(0, SP)
    sender = tl.arange(0, PADDED)[:, None]
    expert = sender * ROUTER + unit[None, :]
    real = (sender < RANKS) & (unit < ROUTER)[None, :]
    rank = tl.load(table + OWN + RANK).to(tl.int32)
    bias_ptr = address(table, 4, tl.float32, ALIGN)
    bias = tl.load(bias_ptr + expert, mask=real, other=0.0)
    gathered = address(table, 8, tl.float32, ALIGN) + row * (RANKS * ROUTER)
    await_producers(DEPENDENT_LAUNCH)
    epoch = next_epoch(epoch_at, False)
    got = receive(table, OWN, unit, row * WIDE + unit, unit < ROUTER, epoch, rank, RANKS, PADDED, SLOT, LIMIT, ALIGN,
                  False, True)
    logit = got.to(tl.float32, bitcast=True)
    # the chosen ones are looked up by their ids
    tl.store(gathered + expert, logit, mask=real)
    tl.debug_barrier()
    choose(logit, bias, expert, real, gathered, bias_ptr, row, address(table, 5, tl.int32, ALIGN),
           address(table, 6, tl.float32, ALIGN), TOP_K, KP, 1, 1, PADDED, SP, RENORMALIZE, SCALING)
    store_epoch(epoch_at, epoch)


@triton.jit
def _moe_front(table, COLUMNS: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, K: tl.constexpr,
               ROUTER: tl.constexpr, PLAIN: tl.constexpr, PAIRS: tl.constexpr, TILES_ROUTER: tl.constexpr,
               TILES_PLAIN: tl.constexpr, TILES: tl.constexpr, STRIDE_X: tl.constexpr, STRIDE_A: tl.constexpr,
               STRIDE_LATENT: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, DOT: tl.constexpr,
               R: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, EVEN_K: tl.constexpr,
               WIDEN: tl.constexpr, ACTIVATION: tl.constexpr, SP: tl.constexpr, UNITS: tl.constexpr,
               CHUNKS: tl.constexpr, TOP_K: tl.constexpr, KP: tl.constexpr, RENORMALIZE: tl.constexpr,
               SCALING: tl.constexpr, RANKS: tl.constexpr, PADDED: tl.constexpr, SLOT: tl.constexpr,
               LIMIT: tl.constexpr, ALIGN: tl.constexpr, PHASE: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    """Tensors: x, weight, router, a, bias, ids, weights, latent, gathered."""
    start_dependents(DEPENDENT_LAUNCH)
    WIDE: tl.constexpr = ROUTER + PLAIN // 2
    table += tl.program_id(0) * COLUMNS
    block = tl.program_id(1)
    epoch_at = address(table, OWN + EPOCHS, tl.int32, 4) + block
    if block < TILES:
        if PHASE != 2:
            _project(table, block, epoch_at, M, MP, K, ROUTER, PLAIN, PAIRS, TILES_ROUTER, TILES_PLAIN, STRIDE_X,
                     STRIDE_A, BETA, LINEAR_BETA, DOT, R, BK, STEPS, STAGES, EVEN_K, WIDEN, ACTIVATION, RANKS, SLOT,
                     ALIGN, DEPENDENT_LAUNCH)
    elif PHASE != 1:
        row = (block - TILES) % M
        job = (block - TILES) // M
        if job == 0:
            _route_row(table, row, epoch_at, WIDE, ROUTER, SP, TOP_K, KP, RENORMALIZE, SCALING, RANKS, PADDED, SLOT,
                       LIMIT, ALIGN, DEPENDENT_LAUNCH)
        else:
            _collect_latent(table, row, job - 1, epoch_at, WIDE, ROUTER, PLAIN // 2, STRIDE_LATENT, UNITS, RANKS,
                            PADDED, SLOT, LIMIT, ALIGN, DEPENDENT_LAUNCH)


def bind(calls: Sequence[Call], links: Sequence[Link]) -> Launch:
    """The launch for all ranks of this process; pattern names as in ``moe_front_menu.py``."""
    first = calls[0]
    names = ("x", "weight", "router", "a", "bias", "ids", "weights", "latent")
    columns = [[*(call.tensors[n] for n in names), call.scratch["gathered"]] for call in calls]
    x, weight, router, a, bias, ids, weights, latent, _ = columns[0]
    for tensor in (weight, router, bias, ids, weights):
        assert tensor.is_contiguous(), f"strided {tensor.shape} {tensor.stride()}"
    assert x.dtype == weight.dtype == router.dtype == torch.bfloat16, f"{x.dtype} {weight.dtype} {router.dtype}"
    constants = group_constants(calls, links, columns) | _shape(first)
    assert constants.pop("ARMED") is False, "logits go by flagged words"
    ranks = constants["RANKS"]
    assert bias.shape == (ranks * router.shape[0],), f"bias {bias.shape}, {ranks} x {router.shape[0]} experts"
    constants |= {"STRIDE_X": row_stride(x), "STRIDE_A": row_stride(a), "STRIDE_LATENT": row_stride(latent) // 2,
                  "SP": polled(router.shape[0], first.config["warps"], ranks), "UNITS": UNITS}
    blocks = constants["TILES"] + x.shape[0] * (1 + constants["CHUNKS"])
    return make_launches(_moe_front, (len(calls), blocks), make_table(calls, links, columns), constants,
                         first.config["warps"], first.dependent_launch, stages=first.config["stages"])


def _shape(call: Call) -> dict[str, Any]:
    config, x, router, weight = call.config, *(call.tensors[n] for n in ("x", "router", "weight"))
    pairs = call.attrs["up"]["stop"] - call.attrs["up"]["start"]
    plain = weight.shape[0] - 2 * pairs
    tiles = count_tiles(config, router.shape[0], plain, pairs)
    steps = -(-x.shape[1] // config["block"])
    route, activation = call.attrs["ids"], call.attrs["a"]
    return {
        "M": x.shape[0], "MP": padded_rows(config["form"], x.shape[0]), "K": x.shape[1], "ROUTER": router.shape[0],
        "PLAIN": plain, "PAIRS": pairs, "TILES_ROUTER": tiles[0], "TILES_PLAIN": tiles[1], "TILES": sum(tiles),
        "BETA": activation["beta"], "LINEAR_BETA": activation["linear_beta"], "ACTIVATION": SITU,
        "DOT": config["form"] == "dot", "R": config["rows"], "BK": config["block"], "STEPS": steps,
        "STAGES": config["stages"], "EVEN_K": x.shape[1] == steps * config["block"], "WIDEN": INTERPRET,
        "CHUNKS": collectors(plain // 2) - 1, "TOP_K": route["top_k"], "KP": triton.next_power_of_2(route["top_k"]),
        "RENORMALIZE": route["renormalize"], "SCALING": route["scaling"],
    }
