"""Around the attention core of multi-head latent attention: the query in latent space, the new cache entries, and the
projection out of latent space.

Contract: ``front`` bf16 [T, q | R | r] (any row stride) holds the low-rank query, the latent and the key part beside
it. ``q = rms_norm(q_a) q_b^T`` for q_b bf16 [H*(n + r), q]; per head ``query = [q_nope w_uk | q_rest]`` for w_uk bf16
[H, n, R]; the normed latent and the key part go to each row's entry of ``cache`` (bf16 or fp8_e4m3 [pages + 1, page,
R + r]), divided by ``kv_scale``, saturated at 448 in fp8. Rows whose position or page is negative write no entry.
``mla_absorb_v``: ``o = x w_uv^T`` per head, times ``sigmoid(gate)`` where there is a gate.

Layout of the query: grid (parts + 1, heads). The blocks of a head share its rows of ``q_b``, with ``absorb`` in turn;
each keeps its own in registers and takes 16 step rows at a time, one to four on multiply-adds, more on the matrix
units with K split over the warps. The norm is a factor of the row and is applied to the sum. With ``absorb`` they
then exchange the head's n values through a mailbox of 8-byte words, the fp32 bits below an epoch, so that value and
flag arrive together and nothing is zeroed between launches; each block takes R / parts columns of the latent. The
epoch of a head is counted up by its last block, after the exchange that every block entered having read it. The
blocks of part ``parts`` append the cache entries.

Waits: all weights are loaded before the wait; rows, caches and mailboxes are touched after it. The trigger is the
first instruction. Blocks of one head spin on each other: the grid must fit the device at once (at most 32 parts + 1
for each head; earlier kernels finish without it, later ones start only when all of its blocks have).
Numerics: bf16 products, fp32 sums, one rounding at the store.
Bytes for H = 6, n = 128, r = 64, q = 1536, R = 512: 4.3 MB; floor on an H200 (2.35 us + bytes / 4.44 TB/s) 3.3 us.
Measured: 3.1 us without the absorbed product, 5.4 with it, at one row (one H200, TP16, triton 3.6).
Portable: NVIDIA-only calls are behind DEPENDENT_LAUNCH. In the interpreter, where blocks run one after the other, the
two halves of the exchange are two launches.
"""
# ruff: noqa: SIM102 - a constexpr condition must stand alone
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..compiler.call import Call, Launch
from ..compiler.launches import LaunchSequence
from .launching import (
    COLLECT,
    INTERPRET,
    PUBLISH,
    WHOLE,
    KernelLaunch,
    await_producers,
    launch_options,
    row_stride,
    start_dependents,
)
from .mla_decode import round_to
from .mla_menu import FMA_ROWS, padded

STEP_ROWS = 16  # step rows at a time


@dataclass(frozen=True)
class QueryConfig:
    """``parts`` blocks of threads a head, or, without the exchange, ``rows`` of ``q_b`` a block."""

    parts: int = 16
    rows: int = 8
    warps: int = 8


@dataclass(frozen=True)
class HeadConfig:
    """``columns`` outputs of one head a block."""

    columns: int = 64
    warps: int = 4


@triton.jit
def _append_row(front, norm, cache, positions, page_table, row, START: tl.constexpr, R: tl.constexpr,
                REST: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr, L: tl.constexpr, KV_SCALE: tl.constexpr,
                EPS: tl.constexpr, STRIDE: tl.constexpr, STRIDE_KEY: tl.constexpr, key_part, NORM: tl.constexpr,
                FP8: tl.constexpr, PRODUCT: tl.constexpr):
    """One row's entry: normed latent from ``front`` + START, key part."""
    column = tl.arange(0, R)
    rest = tl.arange(0, REST)
    latent = tl.load(front + row * STRIDE + START + column).to(tl.float32)
    key = tl.load(key_part + row * STRIDE_KEY + rest).to(tl.float32)
    if NORM:
        scale = tl.load(norm + column).to(tl.float32)
        latent = latent * tl.rsqrt(tl.sum(latent * latent, axis=0) / R + EPS) * scale
    latent = latent / KV_SCALE
    key = key / KV_SCALE
    if FP8:
        latent = tl.minimum(tl.maximum(latent, -448.0), 448.0)
        key = tl.minimum(tl.maximum(key, -448.0), 448.0)
    position = tl.load(positions + row)
    index = tl.minimum(tl.maximum(position, 0) // PAGE, PAGES - 1)
    page = tl.load(page_table + (row // L) * PAGES + index)
    if (position >= 0) & (page >= 0):
        at = cache + (page.to(tl.int64) * PAGE + position % PAGE) * (R + REST)
        tl.store(at + column, round_to(latent, cache.dtype.element_ty, PRODUCT))
        tl.store(at + R + rest, round_to(key, cache.dtype.element_ty, PRODUCT))


@triton.jit
def _append(latent, key_part, norm, cache, positions, page_table, R: tl.constexpr, REST: tl.constexpr,
            PAGE: tl.constexpr, PAGES: tl.constexpr, L: tl.constexpr, KV_SCALE: tl.constexpr, EPS: tl.constexpr,
            STRIDE: tl.constexpr, STRIDE_KEY: tl.constexpr, NORM: tl.constexpr, FP8: tl.constexpr,
            PRODUCT: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    start_dependents(DEPENDENT_LAUNCH)
    await_producers(DEPENDENT_LAUNCH)
    _append_row(latent, norm, cache, positions, page_table, tl.program_id(0), 0, R, REST, PAGE, PAGES, L, KV_SCALE,
                EPS, STRIDE, STRIDE_KEY, key_part, NORM, FP8, PRODUCT)


@triton.jit
def _project(x, norm, weight, start, M: tl.constexpr, MP: tl.constexpr, K: tl.constexpr, KB: tl.constexpr,
             KW: tl.constexpr, RP: tl.constexpr, EPS: tl.constexpr, STRIDE: tl.constexpr, FMA: tl.constexpr,
             PRODUCT: tl.constexpr):
    """fp32 [MP, RP]: normed rows from ``start`` on, times ``weight`` [KB, RP, KW] in registers, ``norm`` [KB, KW]."""
    k = tl.arange(0, KB)[:, None] * KW + tl.arange(0, KW)[None, :]
    m = tl.arange(0, MP)
    if FMA:
        acc = tl.zeros((MP, RP), tl.float32)
        wide = weight.to(tl.float32)
        for i in tl.static_range(MP):
            if start + i < M:
                row = tl.load(x + (start + i) * STRIDE + k, mask=k < K, other=0.0).to(tl.float32)
                scale = tl.rsqrt(tl.sum(tl.sum(row * row, axis=1), axis=0) / K + EPS)
                part = tl.sum(tl.sum(wide * (row * norm)[:, None, :], axis=2), axis=0) * scale
                acc = tl.where((m == i)[:, None], part[None, :], acc)
        return acc
    else:
        here = (start + m < M)[None, :, None] & (k < K)[:, None, :]
        rows = tl.load(x + (start + m)[None, :, None] * STRIDE + k[:, None, :], mask=here, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(tl.sum(rows * rows, axis=2), axis=0) / K + EPS)
        scaled = (rows * norm[:, None, :]).to(PRODUCT)
        parts = tl.dot(scaled, tl.permute(weight.to(PRODUCT), (0, 2, 1)), input_precision="ieee")
        return tl.sum(parts, axis=0) * scale[:, None]


@triton.jit
def _absorb(query, w_uk, words, head, part, epoch, start, M: tl.constexpr, MP: tl.constexpr, POLLED: tl.constexpr,
            HEADS: tl.constexpr, NOPE: tl.constexpr, R: tl.constexpr, REST: tl.constexpr, COLUMNS: tl.constexpr,
            FMA: tl.constexpr, PRODUCT: tl.constexpr):
    """COLUMNS of the query in latent space, from the head's values in the mailbox; w_uk [NOPE, COLUMNS].

    POLLED rows, MP or more, so that a word is read by one thread: see ``exchange.py``."""
    m = tl.arange(0, POLLED)
    n = tl.arange(0, NOPE)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    real = ((m < MP) & (start + m < M))[:, None] & (n >= 0)[None, :]
    at = words + ((start + m)[:, None] * HEADS + head) * NOPE + n[None, :]
    got = tl.load(at, mask=real, other=0, volatile=True)
    # the condition reads what the loop carries and nothing else: triton 3.6 fails on a loop whose results are fewer
    while tl.max(tl.max(tl.where(real & ((got >> 32).to(tl.int32) != epoch), 1, 0), axis=0), axis=0) > 0:
        got = tl.load(at, mask=real, other=0, volatile=True)
    values = tl.where(real, (got & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True), 0.0)
    if FMA:
        mixed = tl.zeros((POLLED, COLUMNS), tl.float32)
        wide = w_uk.to(tl.float32)
        for i in tl.static_range(MP):
            row = tl.sum(tl.where((m == i)[:, None], values, 0.0), axis=0)
            mixed = tl.where((m == i)[:, None], tl.sum(wide * row[:, None], axis=0)[None, :], mixed)
    else:
        mixed = tl.dot(values.to(PRODUCT), w_uk.to(PRODUCT), input_precision="ieee")
    out = query + ((start + m)[:, None] * HEADS + head) * (R + REST) + column[None, :]
    tl.store(out, mixed.to(query.dtype.element_ty),
             mask=((m < MP) & (start + m < M))[:, None] & (column >= 0)[None, :])


@triton.jit
def _build_query(front, q_norm, q_b, kv_norm, w_uk, cache, positions, page_table, out, words, epochs,
                 M: tl.constexpr, MP: tl.constexpr, POLLED: tl.constexpr, HEADS: tl.constexpr, NOPE: tl.constexpr,
                 REST: tl.constexpr, R: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, KW: tl.constexpr,
                 PER_HEAD: tl.constexpr, PARTS: tl.constexpr, OWN: tl.constexpr, RP: tl.constexpr,
                 Q_START: tl.constexpr, KV_START: tl.constexpr, KEY_START: tl.constexpr,
                 PAGE: tl.constexpr, PAGES: tl.constexpr, L: tl.constexpr, KV_SCALE: tl.constexpr, EPS: tl.constexpr,
                 KV_EPS: tl.constexpr, STRIDE: tl.constexpr, ABSORB: tl.constexpr, FP8: tl.constexpr,
                 FMA: tl.constexpr, PHASE: tl.constexpr, PRODUCT: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    start_dependents(DEPENDENT_LAUNCH)
    COLUMNS: tl.constexpr = R // PARTS
    part = tl.program_id(0)
    head = tl.program_id(1)
    if part >= PARTS:
        await_producers(DEPENDENT_LAUNCH)
        if PHASE != 2:
            first = (part - PARTS) * HEADS + head
            for appended in range(first, M, (tl.num_programs(0) - PARTS) * HEADS):
                _append_row(front, kv_norm, cache, positions, page_table, appended, KV_START, R, REST, PAGE, PAGES, L,
                            KV_SCALE, KV_EPS, STRIDE, STRIDE, front + KEY_START, True, FP8, PRODUCT)
    else:
        i = tl.arange(0, RP)
        k = tl.arange(0, KB)[:, None] * KW + tl.arange(0, KW)[None, :]
        mine = part * OWN + i  # of the head's rows of q_b
        if ABSORB:
            # in turn, so that every block sends words: the last one ends only after all have read the epoch
            mine = i * PARTS + part
        whole = (i < OWN) & (mine < PER_HEAD)
        at = q_b + (head * PER_HEAD + mine)[None, :, None] * K + k[:, None, :]
        weight = tl.load(at, mask=whole[None, :, None] & (k < K)[:, None, :], other=0.0)
        norm = tl.load(q_norm + k, mask=k < K, other=0.0).to(tl.float32)
        if ABSORB:
            n = tl.arange(0, NOPE)
            column = part * COLUMNS + tl.arange(0, COLUMNS)
            up = tl.load(w_uk + (head * NOPE + n)[:, None] * R + column[None, :])
        await_producers(DEPENDENT_LAUNCH)

        if ABSORB:
            epoch = tl.load(epochs + head, volatile=True) + 1
            # every thread has read it before any sends what the block that counts it up waits for
            tl.debug_barrier()
        if PHASE != 2:
            for start in tl.static_range(0, M, MP):
                q = _project(front + Q_START, norm, weight, start, M, MP, K, KB, KW, RP, EPS, STRIDE, FMA, PRODUCT)
                row = start + tl.arange(0, MP)
                real = (row < M)[:, None] & whole[None, :]
                if ABSORB:
                    word = (q.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) | (epoch.to(tl.int64) << 32)
                    tl.store(words + (row[:, None] * HEADS + head) * NOPE + mine[None, :], word,
                             mask=real & (mine < NOPE)[None, :])
                    tl.store(out + (row[:, None] * HEADS + head) * (R + REST) + R - NOPE + mine[None, :],
                             q.to(out.dtype.element_ty), mask=real & (mine >= NOPE)[None, :])
                else:
                    tl.store(out + (row[:, None] * HEADS + head) * PER_HEAD + mine[None, :],
                             q.to(out.dtype.element_ty), mask=real)
        if ABSORB:
            if PHASE != 1:
                for start in tl.static_range(0, M, MP):
                    _absorb(out, up, words, head, part, epoch, start, M, MP, POLLED, HEADS, NOPE, R, REST, COLUMNS,
                            FMA, PRODUCT)
                # all blocks of the head have read the epoch before they wrote what was awaited, and all write
                if part == PARTS - 1:
                    tl.store(epochs + head, epoch)


@triton.jit
def _absorb_q(q, w_uk, query, M: tl.constexpr, MP: tl.constexpr, HEADS: tl.constexpr, NOPE: tl.constexpr,
              REST: tl.constexpr, R: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, PRODUCT: tl.constexpr,
              DEPENDENT_LAUNCH: tl.constexpr):
    start_dependents(DEPENDENT_LAUNCH)
    head = tl.program_id(1)
    m = tl.program_id(2) * MP + tl.arange(0, MP)
    n = tl.arange(0, NOPE)
    rest = tl.arange(0, REST)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    up = tl.load(w_uk + (head * NOPE + n)[:, None] * R + column[None, :])
    await_producers(DEPENDENT_LAUNCH)
    real = (m < M)[:, None]
    at = q + m[:, None] * STRIDE + head * (NOPE + REST)
    out = query + (m[:, None] * HEADS + head) * (R + REST)
    x = tl.load(at + n[None, :], mask=real, other=0.0)
    mixed = tl.dot(x.to(PRODUCT), up.to(PRODUCT), input_precision="ieee")
    tl.store(out + column[None, :], mixed.to(query.dtype.element_ty), mask=real)
    if tl.program_id(0) == 0:
        tl.store(out + R + rest[None, :], tl.load(at + NOPE + rest[None, :], mask=real, other=0.0), mask=real)


@triton.jit
def _absorb_v(x, w_uv, gate, out, M: tl.constexpr, MP: tl.constexpr, HEADS: tl.constexpr, R: tl.constexpr,
              V: tl.constexpr, COLUMNS: tl.constexpr, STRIDE_GATE: tl.constexpr, GATED: tl.constexpr,
              PRODUCT: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    start_dependents(DEPENDENT_LAUNCH)
    head = tl.program_id(1)
    m = tl.program_id(2) * MP + tl.arange(0, MP)
    r = tl.arange(0, R)
    value = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    weight = tl.load(w_uv + (head * V + value)[:, None] * R + r[None, :], mask=(value < V)[:, None], other=0.0)
    await_producers(DEPENDENT_LAUNCH)
    rows = tl.load(x + (m[:, None] * HEADS + head) * R + r[None, :], mask=(m < M)[:, None], other=0.0)
    o = tl.dot(rows.to(PRODUCT), tl.trans(weight.to(PRODUCT)), input_precision="ieee")
    real = (m < M)[:, None] & (value < V)[None, :]
    if GATED:
        opening = tl.load(gate + m[:, None] * STRIDE_GATE + head * V + value[None, :], mask=real, other=0.0)
        o = o / (1.0 + tl.exp(-opening.to(tl.float32)))
    tl.store(out + (m[:, None] * HEADS + head) * V + value[None, :], o.to(out.dtype.element_ty), mask=real)


PRODUCT = tl.float32 if INTERPRET else tl.bfloat16


def _rows(rows: int) -> tuple[int, int]:
    """Step rows of a tile, and how many tiles."""
    tile = min(64, padded(rows, 16))
    return tile, -(-rows // tile)


def _contiguous(call: Call, *names: str) -> None:
    for name in names:
        tensor = call.get(name)
        assert tensor is None or tensor.is_contiguous(), f"{name} is strided: {tensor.shape} {tensor.stride()}"


def bind_absorb_q(call: Call) -> Launch:
    """``query = mla_absorb_q(q, w_uk)``."""
    config = HeadConfig(**call.config)
    q, w_uk, query = (call.tensors[n] for n in ("q", "w_uk", "query"))
    heads, nope, latent = w_uk.shape
    _contiguous(call, "w_uk", "query")
    assert latent % config.columns == 0, f"{config.columns} of {latent} columns"
    tile, tiles = _rows(q.shape[0])
    constants = {"M": q.shape[0], "MP": tile, "HEADS": heads, "NOPE": nope, "REST": q.shape[1] // heads - nope,
                 "R": latent, "COLUMNS": config.columns, "STRIDE": row_stride(q), "PRODUCT": PRODUCT,
                 "DEPENDENT_LAUNCH": call.dependent_launch}
    return KernelLaunch(_absorb_q, (latent // config.columns, heads, tiles), {"q": q, "w_uk": w_uk, "query": query},
                        constants, config.warps, 1, launch_options(call.dependent_launch))


def bind_absorb_v(call: Call) -> Launch:
    """``y = sigmoid_mul(mla_absorb_v(x, w_uv), gate)``, or without the gate."""
    config = HeadConfig(**call.config)
    x, w_uv, gate = call.tensors["x"], call.tensors["w_uv"], call.get("gate")
    out = call.tensors["y" if gate is not None else "o"]
    heads, values, latent = w_uv.shape
    _contiguous(call, "w_uv", "x", "y", "o")
    columns = min(config.columns, padded(values, 16))
    tile, tiles = _rows(x.shape[0])
    constants = {"M": x.shape[0], "MP": tile, "HEADS": heads, "R": latent, "V": values, "COLUMNS": columns,
                 "STRIDE_GATE": 0 if gate is None else row_stride(gate), "GATED": gate is not None,
                 "PRODUCT": PRODUCT, "DEPENDENT_LAUNCH": call.dependent_launch}
    return KernelLaunch(_absorb_v, (-(-values // columns), heads, tiles),
                        {"x": x, "w_uv": w_uv, "gate": x if gate is None else gate, "out": out}, constants,
                        config.warps, 1, launch_options(call.dependent_launch))


def _cache_constants(call: Call, line: str) -> dict[str, Any]:
    cache, table = call.tensors["cache"], call.tensors["page_table"]
    attrs = call.attrs[line]
    assert cache.dtype in (torch.bfloat16, torch.float8_e4m3fn), f"cache {cache.dtype}"
    _contiguous(call, "cache", "page_table", "positions")
    return {"PAGE": cache.shape[1], "PAGES": table.shape[1], "L": attrs["query"], "KV_SCALE": attrs["kv_scale"],
            "FP8": cache.dtype == torch.float8_e4m3fn}


def bind_append(call: Call) -> Launch:
    """``mla_append`` of a latent that is normed on the way, or not."""
    raw = call.get("kv")
    latent = call.tensors["latent"] if raw is None else raw
    key, norm = call.tensors["key_part"], call.get("kv_norm")
    constants = _cache_constants(call, "cache_next") | {
        "R": latent.shape[1], "REST": key.shape[1], "EPS": call.attrs["latent"]["eps"] if norm is not None else 0.0,
        "STRIDE": row_stride(latent), "STRIDE_KEY": row_stride(key), "NORM": norm is not None,
        "PRODUCT": PRODUCT, "DEPENDENT_LAUNCH": call.dependent_launch}
    tensors = {"latent": latent, "key_part": key, "norm": latent if norm is None else norm}
    tensors |= {name: call.tensors[name] for name in ("cache", "positions", "page_table")}
    return KernelLaunch(_append, (latent.shape[0],), tensors, constants, call.config["warps"], 1,
                        launch_options(call.dependent_launch))


def bind_query(call: Call) -> Launch:
    """Norms, query projection and cache entries; with ``w_uk`` the query in latent space as well."""
    config = QueryConfig(**call.config)
    front, q_b, w_uk = (call.get(name) for name in ("front", "q_b", "w_uk"))
    assert front is not None, "no front rows"
    assert q_b is not None, "no query projection"
    _contiguous(call, "q_b", "w_uk", "q", "query")
    constants = _query_constants(call, config, front, q_b, w_uk)
    tensors = {name: call.tensors[name] for name in ("front", "q_norm", "q_b", "kv_norm", "cache", "positions",
                                                     "page_table")}
    tensors |= {"w_uk": q_b if w_uk is None else w_uk, "out": call.tensors["q" if w_uk is None else "query"]}
    tensors |= {name: call.scratch.get(name, tensors["out"]) for name in ("words", "epochs")}
    assert w_uk is None or call.scratch, "the exchange needs its scratch"
    # a block of threads for every 16 rows appends where no head gives one
    appenders = 1 if w_uk is not None else min(16, constants["M"])
    grid = (constants["PARTS"] + appenders, constants["HEADS"])
    phases = (PUBLISH, COLLECT) if INTERPRET and w_uk is not None else (WHOLE,)
    launches = tuple(KernelLaunch(_build_query, grid, tensors, constants | {"PHASE": phase}, config.warps, 1,
                                  launch_options(call.dependent_launch)) for phase in phases)
    return launches[0] if len(launches) == 1 else LaunchSequence(launches)


def _query_constants(call: Call, config: QueryConfig, front: torch.Tensor, q_b: torch.Tensor,
                     w_uk: torch.Tensor | None) -> dict[str, Any]:
    q_a, kv, key = (call.attrs[name] for name in ("q_a", "kv", "key_part"))
    rows, columns = front.shape[0], q_b.shape[1]
    latent, rest = kv["stop"] - kv["start"], key["stop"] - key["start"]
    assert q_a["stop"] - q_a["start"] == columns, f"q_b {q_b.shape}, low-rank query {q_a}"
    heads = 1 if w_uk is None else w_uk.shape[0]
    nope = q_b.shape[0] if w_uk is None else w_uk.shape[1]
    per_head = q_b.shape[0] // heads
    own = config.rows if w_uk is None else -(-per_head // config.parts)
    parts = -(-per_head // own) if w_uk is None else config.parts
    assert w_uk is None or latent % parts == 0, f"{parts} parts of {latent} columns"
    assert w_uk is None or parts <= nope, f"{parts} parts send {nope} values"
    k = padded(columns, 16 * config.warps)
    tile = padded(rows) if rows <= FMA_ROWS else STEP_ROWS
    return {
        "M": rows, "MP": tile, "POLLED": max(tile, 32 * config.warps // nope), "FMA": rows <= FMA_ROWS, "HEADS": heads,
        "NOPE": nope, "REST": rest, "R": latent, "K": columns, "KB": config.warps, "KW": k // config.warps,
        "PER_HEAD": per_head, "PARTS": parts, "OWN": own, "RP": padded(own), "Q_START": q_a["start"],
        "KV_START": kv["start"], "KEY_START": key["start"], "EPS": call.attrs["n"]["eps"],
        "KV_EPS": call.attrs["latent"]["eps"], "STRIDE": row_stride(front), "ABSORB": w_uk is not None,
        "PRODUCT": PRODUCT, "DEPENDENT_LAUNCH": call.dependent_launch, **_cache_constants(call, "cache_next"),
    }
