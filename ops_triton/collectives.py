"""Collectives as one launch for all ranks of this process, alone and with what follows them.

Contract: see ``exchange.py`` for mailboxes, epochs and links. Every rank sends its part to every other and adds what
it has received in fp32, all ranks in the same order, so that replicated values stay equal to the bit.
``exchange``: all-reduce (sum of bf16 or fp32, maximum of i64 keys, with or without the token inside the winner),
reduce-scatter and all-gather of columns. ``two_shot``: a sum in which each rank adds up one part and sends it to all,
for messages that are too large to go whole to every rank. ``mix``: the sum, rounded to bf16, is added to the prefix;
then AttnRes and norm as in ``attn_res.py``, whose exchange between the blocks of a row follows on each rank.
``stripe``: RMSNorm of the latent, a rank's rows of the up-projection, its shard of the shared experts' sum added, all
stripes gathered.

Layout: the fastest grid axis is the rank. ``exchange``: a block per ``units`` words of a row. ``mix``: a block per
``columns`` of a row. ``stripe``: a block per ``rows`` rows of the weight, all step rows, with those rows in registers
or, above 4 step rows, walking along them ``block`` at a time; the norm is a factor of the row, applied to the sum.

Waits: each block sends its own share before it waits for others. Weights and addresses are loaded before the wait for
the producers. The trigger is the first instruction. With LIMIT > 0 (debug) a wait gives up and says so in ``health``.
Numerics: bf16 payloads, fp32 sums, one rounding of each result.
Bytes a rank at one row of 7168 and 16 ranks: 0.43 MB sent (8 bytes a word of two bf16, 4 if armed). Measured between
two H200s, programmatic edges: all-reduce of 1 / 8 / 64 rows 2.02 / 2.27 / 4.89 us (NCCL 12.6 / 12.7 / 18.6), MoE tail
of a row 14.2 (its parts 19.0). In loopback, where no link is passed, TP16: all-reduce of a row 2.6 us, with add,
AttnRes and norm 6.7 to 7.4, MoE tail 10.3. ``two_shot`` has not run on a GPU. Triton 3.6, 2026-11-29.
Portable: NVIDIA-only calls are behind DEPENDENT_LAUNCH.
"""
# ruff: noqa: SIM102 - a constexpr condition must stand alone
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from ..compiler.call import Call, Launch, Link
from ..compiler.launches import LaunchSequence
from .attn_res import _exchange as _exchange_grams
from .attn_res import _products
from .collectives_menu import units
from .exchange import (
    EPOCHS,
    RANK,
    address,
    alignment,
    bf16_bits,
    high_half,
    low_half,
    make_pair,
    make_table,
    make_word,
    next_epoch,
    phases,
    polled,
    receive,
    send,
    store_epoch,
)
from .launching import (
    INTERPRET,
    KernelLaunch,
    await_producers,
    launch_options,
    row_stride,
    start_dependents,
)

SUM, MAX, GATHER = 0, 1, 2  # OP


@triton.jit
def _rounded(x):
    """fp32 rounded to the values of bf16."""
    return bf16_bits(x).to(tl.float32, bitcast=True)


@triton.jit
def _one(table, X: tl.constexpr, Y: tl.constexpr, OWN: tl.constexpr, row, chunk, block, base,
         OP: tl.constexpr, SCATTER: tl.constexpr, BF16: tl.constexpr, TOKEN: tl.constexpr, WIDTH: tl.constexpr,
         UNITS: tl.constexpr, STRIDE_X: tl.constexpr, STRIDE_Y: tl.constexpr, RANKS: tl.constexpr,
         PADDED: tl.constexpr, SLOT: tl.constexpr, LIMIT: tl.constexpr, ALIGN: tl.constexpr, ARMED: tl.constexpr,
         PHASE: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    """One message: UNITS of the WIDTH words of a row. ``base`` is where the message begins in a slot."""
    # addresses do not depend on what ran before
    rank = tl.load(table + OWN + RANK).to(tl.int32)
    x = address(table, X, tl.int32, ALIGN) + row * STRIDE_X
    y = address(table, Y, tl.int32, ALIGN) + row * STRIDE_Y
    positions = address(table, 2, tl.int32, ALIGN)
    epochs = address(table, OWN + EPOCHS, tl.int32, ALIGN) + block
    unit = chunk * UNITS + tl.arange(0, UNITS)
    real = unit < WIDTH
    at = base + row * WIDTH + unit
    await_producers(DEPENDENT_LAUNCH)
    epoch = next_epoch(epochs, ARMED)
    own = tl.load(x + (rank * WIDTH if SCATTER else 0) + unit, mask=real, other=0)
    if PHASE != 2:
        word = make_word(own, epoch, ARMED)
        for peer in tl.static_range(RANKS):
            if SCATTER:
                word = make_word(tl.load(x + peer * WIDTH + unit, mask=real, other=0), epoch, ARMED)
            send(table, OWN, peer, word, at, real, epoch, rank, RANKS, SLOT, ALIGN, ARMED)
    if PHASE != 1:
        got = receive(table, OWN, own, at, real, epoch, rank, RANKS, PADDED, SLOT, LIMIT, ALIGN, ARMED)
        if OP == 2:
            sender = tl.arange(0, PADDED)[:, None]
            tl.store(y + sender * WIDTH + unit[None, :], got, mask=(sender < RANKS) & real[None, :])
        elif OP == 1:
            low, high = tl.split(tl.reshape(got, (PADDED, UNITS // 2, 2)))
            keys = (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
            lowest: tl.constexpr = -9223372036854775808
            best = tl.max(tl.where(tl.arange(0, PADDED)[:, None] < RANKS, keys, lowest), axis=0)
            key = chunk * (UNITS // 2) + tl.arange(0, UNITS // 2)
            if TOKEN:
                token = (4294967295 - (best & 4294967295)).to(tl.int32)
                live = tl.load(positions + row + key, mask=key < WIDTH // 2, other=-1) >= 0
                tl.store(y + key, tl.where(live, token, -1), mask=key < WIDTH // 2)
            else:
                tl.store(y.to(tl.pointer_type(tl.int64), bitcast=True) + key, best, mask=key < WIDTH // 2)
        elif BF16:
            total = make_pair(tl.sum(low_half(got), axis=0), tl.sum(high_half(got), axis=0))
            tl.store(y + unit, total, mask=real)
        else:
            total = tl.sum(got.to(tl.float32, bitcast=True), axis=0).to(tl.int32, bitcast=True)
            tl.store(y + unit, total, mask=real)
        store_epoch(epochs, epoch)


@triton.jit
def _exchange(table, COLUMNS: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, OP: tl.constexpr,
              SCATTER: tl.constexpr, BF16: tl.constexpr, TOKEN: tl.constexpr, WIDTH: tl.constexpr,
              UNITS: tl.constexpr, STRIDE_X: tl.constexpr, STRIDE_Y: tl.constexpr, TWO: tl.constexpr,
              WIDTH2: tl.constexpr, STRIDE_X2: tl.constexpr, STRIDE_Y2: tl.constexpr, RANKS: tl.constexpr,
              PADDED: tl.constexpr, SLOT: tl.constexpr, LIMIT: tl.constexpr, ALIGN: tl.constexpr,
              ARMED: tl.constexpr, PHASE: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    """Tensors: x, y, positions (or any), and with TWO the operands of a second exchange, a reduce-scatter."""
    start_dependents(DEPENDENT_LAUNCH)
    OWN: tl.constexpr = 5
    table += tl.program_id(0) * COLUMNS
    block = tl.program_id(1)
    if block < ROWS * CHUNKS:
        _one(table, 0, 1, OWN, block // CHUNKS, block % CHUNKS, block, 0, OP, SCATTER, BF16, TOKEN, WIDTH, UNITS,
             STRIDE_X, STRIDE_Y, RANKS, PADDED, SLOT, LIMIT, ALIGN, ARMED, PHASE, DEPENDENT_LAUNCH)
    elif TWO:
        CHUNKS2: tl.constexpr = (WIDTH2 + UNITS - 1) // UNITS
        second = block - ROWS * CHUNKS
        _one(table, 3, 4, OWN, second // CHUNKS2, second % CHUNKS2, block, ROWS * WIDTH, 0, True, BF16, False,
             WIDTH2, UNITS, STRIDE_X2, STRIDE_Y2, RANKS, PADDED, SLOT, LIMIT, ALIGN, ARMED, PHASE, DEPENDENT_LAUNCH)


@triton.jit
def _two_shot(table, COLUMNS: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, BF16: tl.constexpr,
              UNITS: tl.constexpr, STRIDE_X: tl.constexpr, STRIDE_Y: tl.constexpr, RANKS: tl.constexpr,
              PADDED: tl.constexpr, SLOT: tl.constexpr, LIMIT: tl.constexpr, ALIGN: tl.constexpr,
              ARMED: tl.constexpr, PHASE: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    """Tensors: x, y. Of a block's UNITS words each rank adds up one part, then all parts go to all ranks. PHASE 1: send
    the parts, 2: send the sum."""
    start_dependents(DEPENDENT_LAUNCH)
    OWN: tl.constexpr = 2
    PART: tl.constexpr = UNITS // RANKS
    SECOND: tl.constexpr = SLOT // 2  # where the sums lie in a slot
    table += tl.program_id(0) * COLUMNS
    block = tl.program_id(1)
    row, chunk = block // CHUNKS, block % CHUNKS
    rank = tl.load(table + OWN + RANK).to(tl.int32)
    x = address(table, 0, tl.int32, ALIGN) + row * STRIDE_X + chunk * UNITS
    y = address(table, 1, tl.int32, ALIGN) + row * STRIDE_Y + chunk * UNITS
    epochs = address(table, OWN + EPOCHS, tl.int32, ALIGN) + block
    j = tl.arange(0, PART)
    at = block * PART + j
    all_of_it = j < PART
    await_producers(DEPENDENT_LAUNCH)
    epoch = next_epoch(epochs, ARMED)
    own = tl.load(x + rank * PART + j)
    if (PHASE == 0) | (PHASE == 1):
        for peer in tl.static_range(RANKS):
            word = make_word(tl.load(x + peer * PART + j), epoch, ARMED)
            send(table, OWN, peer, word, at, all_of_it, epoch, rank, RANKS, SLOT, ALIGN, ARMED)
    if PHASE != 1:
        got = receive(table, OWN, own, at, all_of_it, epoch, rank, RANKS, PADDED, SLOT, LIMIT, ALIGN, ARMED)
        if BF16:
            total = make_pair(tl.sum(low_half(got), axis=0), tl.sum(high_half(got), axis=0))
        else:
            total = tl.sum(got.to(tl.float32, bitcast=True), axis=0).to(tl.int32, bitcast=True)
        if (PHASE == 0) | (PHASE == 2):
            word = make_word(total, epoch, ARMED)
            for peer in tl.static_range(RANKS):
                send(table, OWN, peer, word, SECOND + at, all_of_it, epoch, rank, RANKS, SLOT, ALIGN, ARMED)
        if PHASE != 2:
            sums = receive(table, OWN, total, SECOND + at, all_of_it, epoch, rank, RANKS, PADDED, SLOT, LIMIT, ALIGN,
                           ARMED)
            sender = tl.arange(0, PADDED)[:, None]
            tl.store(y + sender * PART + j[None, :], sums, mask=(sender < RANKS) & all_of_it[None, :])
            store_epoch(epochs, epoch)


@triton.jit
def _mix(table, COLUMNS: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, SLICES: tl.constexpr,
         SLICES_PADDED: tl.constexpr, NB: tl.constexpr, EPS: tl.constexpr, OUT_EPS: tl.constexpr,
         STRIDE_X: tl.constexpr, STRIDE_PREFIX: tl.constexpr, STRIDE_BLOCK: tl.constexpr, STRIDE_P: tl.constexpr,
         STRIDE_H: tl.constexpr, ADD: tl.constexpr, HAS_P: tl.constexpr, RANKS: tl.constexpr, PADDED: tl.constexpr,
         SLOT: tl.constexpr, LIMIT: tl.constexpr, ALIGN: tl.constexpr, ARMED: tl.constexpr, PHASE: tl.constexpr,
         WARPS: tl.constexpr, WIDEN: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    """Tensors: x, prefix, score, weight, p, h, grams, row epochs, eight blocks. PHASE 1: send, 2: up to the grams."""
    start_dependents(DEPENDENT_LAUNCH)
    OWN: tl.constexpr = 16
    table += tl.program_id(0) * COLUMNS
    part = tl.program_id(1)
    row = tl.program_id(2)
    rank = tl.load(table + OWN + RANK).to(tl.int32)
    j = tl.arange(0, 16)
    source = j[:, None]
    column = part * PART + tl.arange(0, PART)
    real = (column < D)[None, :]
    score = tl.load(address(table, 2, tl.float32, ALIGN) + column[None, :] + source * 0, mask=real & (source >= 13),
                    other=0.0)
    weight = tl.load(address(table, 3, tl.bfloat16, ALIGN) + column, mask=column < D, other=0.0)
    block = row * SLICES + part
    epochs = address(table, OWN + EPOCHS, tl.int32, ALIGN) + block
    x = address(table, 0, tl.int32, ALIGN) + row * STRIDE_X
    unit = part * (PART // 2) + tl.arange(0, PART // 2)
    whole = unit < D // 2
    at = row * (D // 2) + unit
    await_producers(DEPENDENT_LAUNCH)

    epoch = next_epoch(epochs, ARMED)
    own = tl.load(x + unit, mask=whole, other=0)
    if (PHASE == 0) | (PHASE == 1):
        word = make_word(own, epoch, ARMED)
        for peer in tl.static_range(RANKS):
            send(table, OWN, peer, word, at, whole, epoch, rank, RANKS, SLOT, ALIGN, ARMED)
    if PHASE != 1:
        row_epochs = address(table, 7, tl.int32, ALIGN)
        row_epoch = tl.load(row_epochs + row, volatile=True) + 1
        # everything but the sum is on its way before the wait for the other ranks
        base = address(table, 1, tl.bfloat16, ALIGN) + row * STRIDE_PREFIX + source * 0
        for i in tl.static_range(NB):
            base = tl.where(source == i, address(table, 8 + i, tl.bfloat16, ALIGN) + row * STRIDE_BLOCK, base)
        HELD: tl.constexpr = NB if ADD else NB - 1
        tile = tl.load(base + column[None, :], mask=real & (source <= HELD), other=0.0)
        got = receive(table, OWN, own, at, whole, epoch, rank, RANKS, PADDED, SLOT, LIMIT, ALIGN, ARMED)
        low = tl.sum(low_half(got), axis=0)
        high = tl.sum(high_half(got), axis=0)
        total = tl.reshape(tl.join(_rounded(low), _rounded(high)), (PART,))
        summed = tl.where(source == NB, total[None, :] + (tile.to(tl.float32) if ADD else 0.0), tile.to(tl.float32))
        tile = _rounded(summed).to(tl.bfloat16)
        if HAS_P:
            if PHASE != 2:
                p_at = address(table, 4, tl.bfloat16, ALIGN) + row * STRIDE_P + column[None, :] + source * 0
                tl.store(p_at, tile, mask=real & (source == NB))
        # score = high + middle + low exactly: 24 bits in three times 8
        high = score.to(tl.bfloat16).to(tl.float32)
        middle = (score - high).to(tl.bfloat16).to(tl.float32)
        piece = tl.where(source == 13, high, tl.where(source == 14, middle, score - high - middle))
        gram = _products(tl.where(source >= 13, piece.to(tl.bfloat16), tile), PART, WARPS, WIDEN)
        # row 15 takes the scores, the sum of the three pieces' rows
        scores = tl.sum(tl.where(source >= 13, gram, 0.0), axis=0)
        gram = tl.where(source == 15, scores[None, :], gram)
        needed = (j[None, :] <= NB) & ((source <= NB) | (source == 15))
        if SLICES > 1:
            gram = _exchange_grams(gram, needed, address(table, 6, tl.int64, ALIGN), row_epochs, row_epoch, row, part,
                                   SLICES, SLICES_PADDED, 1 if PHASE == 2 else 2 if PHASE == 3 else 0)
        if PHASE != 2:
            square = tl.sum(tl.where(source == j[None, :], gram, 0.0), axis=0)
            scores = tl.sum(tl.where(source == 15, gram, 0.0), axis=0)
            scores = tl.where(j <= NB, scores * tl.rsqrt(square / D + EPS), float("-inf"))
            share = tl.exp(scores - tl.max(scores, axis=0))
            share = share / tl.sum(share, axis=0)
            mix = tl.sum(share[:, None] * tile.to(tl.float32), axis=0)
            pairs = tl.sum(tl.where(source <= NB, gram, 0.0) * share[None, :], axis=1)
            mean = tl.sum(tl.where(j <= NB, pairs * share, 0.0), axis=0) / D
            mix = mix * tl.rsqrt(tl.maximum(mean, 0.0) + OUT_EPS) * weight.to(tl.float32)
            h = address(table, 5, tl.bfloat16, ALIGN) + row * STRIDE_H + column
            tl.store(h, _rounded(mix).to(tl.bfloat16), mask=column < D)
            store_epoch(epochs, epoch)


@triton.jit
def _gather_stripe(table, OWN: tl.constexpr, up, block, rank, epoch, epochs, M: tl.constexpr, MP: tl.constexpr,
                   STRIPE: tl.constexpr, R: tl.constexpr, POLLED: tl.constexpr, STRIDE_SHARED: tl.constexpr,
                   STRIDE_Y: tl.constexpr, RANKS: tl.constexpr, PADDED: tl.constexpr, SLOT: tl.constexpr,
                   LIMIT: tl.constexpr, ALIGN: tl.constexpr, ARMED: tl.constexpr, PHASE: tl.constexpr):
    """Adds the shared experts' part to ``up`` fp32 [MP, R] and puts the columns of every rank into each."""
    m = tl.arange(0, MP)
    out = block * R + tl.arange(0, R)
    unit = block * (R // 2) + tl.arange(0, R // 2)
    # as limits: a mask that is reshaped costs a conversion
    rows = tl.reshape(m[:, None] + (unit * 0)[None, :], (MP * R // 2,))
    pairs = tl.reshape((m * 0)[:, None] + unit[None, :], (MP * R // 2,))
    real = (rows < M) & (pairs < STRIPE // 2)
    shared = address(table, 3, tl.bfloat16, ALIGN) + m[:, None] * STRIDE_SHARED + out[None, :]
    up += tl.load(shared, mask=(m < M)[:, None] & (out < STRIPE)[None, :], other=0.0).to(tl.float32)
    low, high = tl.split(tl.reshape(up, (MP, R // 2, 2)))
    own = tl.reshape(make_pair(low, high), (MP * R // 2,))
    if PHASE != 2:
        word = make_word(own, epoch, ARMED)
        for peer in tl.static_range(RANKS):
            send(table, OWN, peer, word, rows * (STRIPE // 2) + pairs, real, epoch, rank, RANKS, SLOT, ALIGN, ARMED)
    if PHASE != 1:
        y = address(table, 4, tl.int32, ALIGN)
        tl.store(y + rows * STRIDE_Y + rank * (STRIPE // 2) + pairs, own, mask=real)
        # as many words as threads or more, which this rank's own are not
        i = tl.arange(0, POLLED)
        row = i // (R // 2)
        pair = block * (R // 2) + i % (R // 2)
        wanted = (row < M) & (pair < STRIPE // 2)
        got = receive(table, OWN, i * 0, row * (STRIPE // 2) + pair, wanted, epoch, rank, RANKS, PADDED, SLOT, LIMIT,
                      ALIGN, ARMED)
        sender = tl.arange(0, PADDED)[:, None]
        others = (sender < RANKS) & wanted[None, :] & (sender != rank)
        tl.store(y + row[None, :] * STRIDE_Y + sender * (STRIPE // 2) + pair[None, :], got, mask=others)
        store_epoch(epochs, epoch)


@triton.jit
def _stripe(table, COLUMNS: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, K: tl.constexpr, KB: tl.constexpr,
            KW: tl.constexpr, STRIPE: tl.constexpr, R: tl.constexpr, POLLED: tl.constexpr, EPS: tl.constexpr,
            STRIDE_X: tl.constexpr, STRIDE_SHARED: tl.constexpr, STRIDE_Y: tl.constexpr, FMA: tl.constexpr,
            RANKS: tl.constexpr, PADDED: tl.constexpr, SLOT: tl.constexpr, LIMIT: tl.constexpr, ALIGN: tl.constexpr,
            ARMED: tl.constexpr, PHASE: tl.constexpr, PRODUCT: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    """Tensors: latent, norm, weight, shared, y. A block has R rows of the weight in registers, [KB, R, KW]."""
    start_dependents(DEPENDENT_LAUNCH)
    OWN: tl.constexpr = 5
    table += tl.program_id(0) * COLUMNS
    block = tl.program_id(1)
    rank = tl.load(table + OWN + RANK).to(tl.int32)
    k = tl.arange(0, KB)[:, None] * KW + tl.arange(0, KW)[None, :]
    out = block * R + tl.arange(0, R)
    m = tl.arange(0, MP)
    weight = tl.load(address(table, 2, tl.bfloat16, ALIGN) + out[None, :, None] * K + k[:, None, :],
                     mask=(out < STRIPE)[None, :, None] & (k < K)[:, None, :], other=0.0)
    norm = tl.load(address(table, 1, tl.bfloat16, ALIGN) + k, mask=k < K, other=0.0).to(tl.float32)
    x = address(table, 0, tl.bfloat16, ALIGN)
    epochs = address(table, OWN + EPOCHS, tl.int32, ALIGN) + block
    await_producers(DEPENDENT_LAUNCH)

    epoch = next_epoch(epochs, ARMED)
    if FMA:
        up = tl.zeros((MP, R), tl.float32)
        wide = weight.to(tl.float32)
        for i in tl.static_range(M):
            row = tl.load(x + i * STRIDE_X + k, mask=k < K, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(tl.sum(row * row, axis=1), axis=0) / K + EPS)
            part = tl.sum(tl.sum(wide * (row * norm)[:, None, :], axis=2), axis=0) * scale
            up = tl.where((m == i)[:, None], part[None, :], up)
    else:
        here = (m < M)[None, :, None] & (k < K)[:, None, :]
        row = tl.load(x + m[None, :, None] * STRIDE_X + k[:, None, :], mask=here, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(tl.sum(row * row, axis=2), axis=0) / K + EPS)
        parts = tl.dot((row * norm[:, None, :]).to(PRODUCT), tl.permute(weight.to(PRODUCT), (0, 2, 1)),
                       input_precision="ieee")
        up = tl.sum(parts, axis=0) * scale[:, None]
    _gather_stripe(table, OWN, up, block, rank, epoch, epochs, M, MP, STRIPE, R, POLLED, STRIDE_SHARED, STRIDE_Y, RANKS,
                   PADDED, SLOT, LIMIT, ALIGN, ARMED, PHASE)


@triton.jit
def _walk_stripe(table, COLUMNS: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
                 STEPS: tl.constexpr, STAGES: tl.constexpr, STRIPE: tl.constexpr, R: tl.constexpr,
                 POLLED: tl.constexpr, EPS: tl.constexpr, STRIDE_X: tl.constexpr, STRIDE_SHARED: tl.constexpr,
                 STRIDE_Y: tl.constexpr, RANKS: tl.constexpr, PADDED: tl.constexpr, SLOT: tl.constexpr,
                 LIMIT: tl.constexpr, ALIGN: tl.constexpr, ARMED: tl.constexpr, PHASE: tl.constexpr,
                 PRODUCT: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    """The same tensors. A block walks along K with BK elements of its R rows at a time, the next ones on their way."""
    start_dependents(DEPENDENT_LAUNCH)
    OWN: tl.constexpr = 5
    table += tl.program_id(0) * COLUMNS
    block = tl.program_id(1)
    rank = tl.load(table + OWN + RANK).to(tl.int32)
    k = tl.arange(0, BK)
    m = tl.arange(0, MP)
    out = block * R + tl.arange(0, R)
    x_at = address(table, 0, tl.bfloat16, ALIGN) + m[:, None] * STRIDE_X + k[None, :]
    norm_at = address(table, 1, tl.bfloat16, ALIGN) + k
    weight_at = address(table, 2, tl.bfloat16, ALIGN) + out[None, :] * K + k[:, None]
    epochs = address(table, OWN + EPOCHS, tl.int32, ALIGN) + block
    real = (out < STRIPE)[None, :]
    weight = tl.load(weight_at, mask=real & (k < K)[:, None], other=0.0)
    norm = tl.load(norm_at, mask=k < K, other=0.0)
    await_producers(DEPENDENT_LAUNCH)

    epoch = next_epoch(epochs, ARMED)
    x = tl.load(x_at, mask=(m < M)[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)
    squares = x * x
    up = tl.dot((x * norm.to(tl.float32)[None, :]).to(PRODUCT), weight.to(PRODUCT), input_precision="ieee")
    for step in tl.range(1, STEPS, num_stages=STAGES):
        here = k + step * BK < K
        x = tl.load(x_at + step * BK, mask=(m < M)[:, None] & here[None, :], other=0.0).to(tl.float32)
        norm = tl.load(norm_at + step * BK, mask=here, other=0.0)
        weight = tl.load(weight_at + step * BK, mask=real & here[:, None], other=0.0)
        squares += x * x
        up = tl.dot((x * norm.to(tl.float32)[None, :]).to(PRODUCT), weight.to(PRODUCT), up, input_precision="ieee")
    up = up * tl.rsqrt(tl.sum(squares, axis=1) / K + EPS)[:, None]
    _gather_stripe(table, OWN, up, block, rank, epoch, epochs, M, MP, STRIPE, R, POLLED, STRIDE_SHARED, STRIDE_Y, RANKS,
                   PADDED, SLOT, LIMIT, ALIGN, ARMED, PHASE)


def _padded(count: int, least: int = 1) -> int:
    return max(least, 1 << (count - 1).bit_length())


def _words_between_rows(tensor: torch.Tensor) -> int:
    """Row stride in words of 4 bytes."""
    if tensor.dim() == 1:
        assert tensor.is_contiguous(), f"strided vector {tensor.stride()}"
        return 0
    nbytes = row_stride(tensor) * tensor.element_size()
    assert nbytes % 4 == 0, f"rows of {nbytes} bytes"
    assert tensor.data_ptr() % 4 == 0, f"{tensor.shape} begins within a word"
    return nbytes // 4


def group_constants(calls: Sequence[Call], links: Sequence[Link],
                    columns: Sequence[Sequence[torch.Tensor]]) -> dict[str, Any]:
    """Constants of an exchange. Raises AssertionError when the mailboxes of the ranks differ."""
    boxes = {(*call.scratch["mailbox"].shape, call.scratch["mailbox"].dtype) for call in calls}
    assert len(boxes) == 1, f"mailboxes {boxes}"
    parts, ranks, slot, dtype = boxes.pop()
    assert (parts, dtype) in ((2, torch.int64), (3, torch.int32)), f"a mailbox of {parts} parts of {dtype}"
    assert all(len(link.peers) == ranks for link in links), f"links to {[len(k.peers) for k in links]} of {ranks} ranks"
    return {"RANKS": ranks, "PADDED": _padded(ranks), "SLOT": slot, "LIMIT": calls[0].wait_limit,
            "ALIGN": alignment(columns, links), "ARMED": parts == 3, "DEPENDENT_LAUNCH": calls[0].dependent_launch}


def make_launches(kernel: Any, grid: tuple[int, ...], table: torch.Tensor, constants: dict[str, Any], warps: int,
                  dependent_launch: bool, parts: Sequence[int] | None = None, stages: int = 1) -> Launch:
    """One launch, or in the interpreter one for each part of it."""
    made = tuple(KernelLaunch(kernel, grid, {"table": table}, constants | {"COLUMNS": table.shape[1], "PHASE": phase},
                              warps, stages, launch_options(dependent_launch)) for phase in parts or phases())
    return made[0] if len(made) == 1 else LaunchSequence(made)


def bind_exchange(calls: Sequence[Call], links: Sequence[Link]) -> Launch:
    """One collective; ``calls`` and ``links`` are those of the ranks in this process."""
    first = calls[0]
    name = "k" if "k" in first.attrs else "y"
    out = "token" if name == "k" else "y"
    columns = [[call.tensors["x"], call.tensors[out], call.get("positions") if name == "k" else call.tensors["x"]]
               for call in calls]
    columns = [[*c, c[0], c[0]] for c in columns]
    return _bind_exchange(calls, links, columns, first.attrs[name], name == "k", None)


def _bind_exchange(calls: Sequence[Call], links: Sequence[Link], columns: Sequence[Sequence[Any]],
                   attrs: Any, token: bool, second: Sequence[torch.Tensor] | None) -> Launch:
    """``columns``: x, y, positions, x and y of the second exchange; ``second`` is rank 0's when there is one."""
    first, x, y = calls[0], columns[0][0], columns[0][1]
    constants = group_constants(calls, links, columns)
    ranks = constants["RANKS"]
    assert not (constants["ARMED"] and x.dtype == torch.int64), "keys need flagged words"
    scatter = "dim" in attrs and y.shape[1] < x.shape[1]
    dtype = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int64: "i64"}[x.dtype]
    rows, width = units(tuple(x.shape), dtype)
    if dtype == "i64":
        rows, width = 1, rows * width
    width = width // ranks if scatter else width
    width2 = second[1].shape[1] // 2 if second is not None else 0
    chunk = polled(min(first.config["units"], _padded(max(width, width2), 2)), first.config["warps"], ranks)
    chunks = -(-width // chunk)
    blocks = rows * chunks
    constants |= {
        "ROWS": rows, "CHUNKS": chunks, "SCATTER": scatter, "BF16": dtype == "bf16", "TOKEN": token, "WIDTH": width,
        "OP": GATHER if "dim" in attrs and not scatter else MAX if dtype == "i64" else SUM, "UNITS": chunk,
        "STRIDE_X": _words_between_rows(x), "STRIDE_Y": _words_between_rows(y), "TWO": second is not None,
        "WIDTH2": width2, "STRIDE_X2": 0, "STRIDE_Y2": 0}
    if second is not None:
        constants |= {"STRIDE_X2": _words_between_rows(second[0]), "STRIDE_Y2": _words_between_rows(second[1])}
        blocks += rows * -(-width2 // chunk)
    assert blocks <= first.scratch["epochs"].numel(), f"{blocks} blocks, {first.scratch['epochs'].numel()} epochs"
    table = make_table(calls, links, columns)
    return make_launches(_exchange, (len(calls), blocks), table, constants, first.config["warps"],
                         first.dependent_launch)


def bind_two_shot(calls: Sequence[Call], links: Sequence[Link]) -> Launch:
    """A large sum over ranks: parts to their ranks, sums to all."""
    first = calls[0]
    columns = [[call.tensors["x"], call.tensors["y"]] for call in calls]
    x, y = columns[0]
    constants = group_constants(calls, links, columns)
    rows, width = units(tuple(x.shape), "bf16" if x.dtype == torch.bfloat16 else "fp32")
    chunk = first.config["units"]
    assert width % chunk == 0, f"{width} words, blocks of {chunk}"
    constants |= {"ROWS": rows, "CHUNKS": width // chunk, "BF16": x.dtype == torch.bfloat16, "UNITS": chunk,
                  "STRIDE_X": _words_between_rows(x), "STRIDE_Y": _words_between_rows(y)}
    return make_launches(_two_shot, (len(calls), rows * width // chunk), make_table(calls, links, columns), constants,
                         first.config["warps"], first.dependent_launch, (1, 2, 3) if INTERPRET else (0,))


def bind_mix(calls: Sequence[Call], links: Sequence[Link]) -> Launch:
    """Sum over ranks, residual add where the pattern has it, AttnRes and norm."""
    first = calls[0]
    x, h, p = first.tensors["x"], first.tensors["h"], first.get("p")
    add = "y" in first.attrs
    rows, width = x.shape
    part, warps, blocks = first.config["columns"], first.config["warps"], len(first.rest)
    slices = -(-width // part)
    if torch.cuda.is_available() and x.is_cuda:
        # the blocks of a row wait for each other on each rank
        fitting = torch.cuda.get_device_properties(x.device).multi_processor_count
        assert len(calls) * slices <= fitting, f"{len(calls)} ranks x {slices} blocks, {fitting} run at once"
    strides = {row_stride(block) for block in first.rest}
    assert len(strides) == 1, f"blocks with strides {strides}"
    columns = [[call.tensors["x"], call.tensors["prefix"] if add else call.tensors["x"], call.tensors["score"],
                call.tensors["weight"], call.tensors["h"] if call.get("p") is None else call.tensors["p"],
                call.tensors["h"], call.scratch["grams"], call.scratch["row_epochs"],
                *(call.rest[min(i, blocks - 1)] for i in range(8))] for call in calls]
    constants = group_constants(calls, links, columns) | {
        "D": width, "PART": part, "SLICES": slices, "SLICES_PADDED": _padded(slices), "NB": blocks,
        "EPS": first.attrs["m"]["eps"], "OUT_EPS": first.attrs["h"]["eps"], "STRIDE_X": _words_between_rows(x),
        "STRIDE_PREFIX": row_stride(columns[0][1]), "STRIDE_BLOCK": strides.pop(),
        "STRIDE_P": row_stride(columns[0][4]), "STRIDE_H": row_stride(h), "ADD": add, "HAS_P": p is not None,
        "WARPS": warps, "WIDEN": INTERPRET}
    return make_launches(_mix, (len(calls), slices, rows), make_table(calls, links, columns), constants, warps,
                         first.dependent_launch, (1, 2, 3) if INTERPRET else (0,))


def bind_stripe(calls: Sequence[Call], links: Sequence[Link]) -> Launch:
    """Norm, stripe of the up-projection, add, gather."""
    columns = [[call.tensors[n] for n in ("latent", "norm", "weight", "shared", "g")] for call in calls]
    return _bind_stripe(calls, links, columns)


def _bind_stripe(calls: Sequence[Call], links: Sequence[Link], columns: Sequence[Sequence[torch.Tensor]]) -> Launch:
    first = calls[0]
    latent, _, weight, shared, gathered = columns[0]
    rows, width = latent.shape
    stripe, own, warps = weight.shape[0], first.config["rows"], first.config["warps"]
    assert weight.is_contiguous(), f"weight {weight.stride()}"
    block, stages = first.config.get("block"), first.config.get("stages", 1)
    fma = rows <= 4 and block is None
    constants = group_constants(calls, links, columns) | {
        "M": rows, "MP": _padded(rows) if fma else 16, "K": width, "STRIPE": stripe, "R": own,
        "EPS": first.attrs["n"]["eps"], "STRIDE_X": row_stride(latent), "STRIDE_SHARED": row_stride(shared),
        "STRIDE_Y": _words_between_rows(gathered), "PRODUCT": tl.float32 if INTERPRET else tl.bfloat16}
    constants["POLLED"] = polled(constants["MP"] * own // 2, warps, constants["RANKS"])
    if block is None:
        constants |= {"KB": warps, "KW": _padded(width, 16 * warps) // warps, "FMA": fma}
    else:
        constants |= {"BK": block, "STEPS": -(-width // block), "STAGES": stages}
    return make_launches(_stripe if block is None else _walk_stripe, (len(calls), -(-stripe // own)),
                         make_table(calls, links, columns), constants, warps, first.dependent_launch, stages=stages)


def bind_tail(calls: Sequence[Call], links: Sequence[Sequence[Link]]) -> Launch:
    """Both sums of a sparse layer, then the stripe. ``links`` of the first mailbox and of the second."""
    sums = [[c.tensors["x"], c.scratch["latent"], c.tensors["x"], c.tensors["other"], c.scratch["shared"]]
            for c in calls]
    first = _bind_exchange(calls, links[0], sums, calls[0].attrs["latent"], False, sums[0][3:])
    names = ("mailbox", "epochs", "health")
    seconds = [replace(c, scratch={name: c.scratch[f"stripe_{name}"] for name in names}) for c in calls]
    columns = [[c.scratch["latent"], c.tensors["norm"], c.tensors["weight"], c.scratch["shared"], c.tensors["g"]]
               for c in calls]
    second = _bind_stripe(seconds, links[1], columns)
    return LaunchSequence(tuple(one for launch in (first, second) for one in _flat(launch)))


def _flat(launch: Launch) -> tuple[KernelLaunch, ...]:
    if isinstance(launch, LaunchSequence):
        return launch.launches
    assert isinstance(launch, KernelLaunch), f"{type(launch).__name__}"
    return (launch,)
