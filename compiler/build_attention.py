"""The attention half of a layer: Kimi delta attention or multi-head latent attention, h in, o_proj out."""
from __future__ import annotations

from .graph_builder import GraphBuilder
from .ir import Axis
from .recipe import Cat, Recipe, Reshape, Slice

KDA_HEADS, MLA_HEADS = "KDA heads", "attention heads"


def kda_layer(b: GraphBuilder, h: str) -> str:
    """``h`` [T, hidden] to the attention output [T, hidden], updating conv window and recurrent state."""
    m, step = b.spec.model, b.spec.step
    heads, width = m.kda_heads, m.kda_head_dim
    channels = heads * width
    by_head = Axis(KDA_HEADS, 0, width)
    q, k, v = (
        b.linear(n, h, f"self_attn.{n}_proj.weight", (channels, m.hidden), by_head) for n in "qkv"
    )
    gate = _output_gate(b, h, by_head)
    low = b.linear("f_a", h, "self_attn.f_a_proj.weight", (width, m.hidden))
    beta = b.linear("b", h, "self_attn.b_proj.weight", (heads, m.hidden), Axis(KDA_HEADS, 0))
    raw = b.linear("f_b", low, "self_attn.f_b_proj.weight", (channels, width), by_head)

    conv = [
        b.weight(f"{n}_conv", Reshape((channels, m.conv_kernel), b.leaf(
            f"self_attn.{n}_conv1d.weight", (channels, 1, m.conv_kernel), m.vector_dtype)), "fp32", by_head)
        for n in "qkv"
    ]
    window = b.storage("window", (step.sequences + 1, m.conv_kernel + step.query - 2, 3 * channels),
                       b.spec.numerics.activation, "state", Axis(KDA_HEADS, 2, 3 * width))
    after = ["slots", "positions", "accepted"] if step.query > 1 else ["slots", "positions"]
    q, k, v, _ = b.apply("kda_conv", ("q_act", "k_act", "v_act", "window_next"),
                         q, k, v, window, *conv, *after, query=step.query)
    decay = b.apply("kda_gate", "log_decay", raw, _a_log(b), b.weight(
        "dt_bias", b.leaf("self_attn.dt_bias", (channels,), m.gate_dtype), "fp32", by_head),
        lower_bound=m.kda_gate_lower_bound)
    o = _delta_rule(b, q, k, v, decay, beta, after)
    norm = b.weight("o_norm", b.leaf("self_attn.o_norm.weight", (width,), m.vector_dtype), "fp32")
    y = b.apply("gated_rms_norm", "o_gated", o, gate, norm, eps=m.eps)
    return b.linear("o_proj", y, "self_attn.o_proj.weight", (m.hidden, channels), Axis(KDA_HEADS, 1, width))


def _output_gate(b: GraphBuilder, h: str, by_head: Axis) -> str:
    m = b.spec.model
    channels = m.kda_heads * m.kda_head_dim
    if m.kda_full_rank_gate:
        return b.linear("g", h, "self_attn.g_proj.weight", (channels, m.hidden), by_head)
    low = b.linear("g_a", h, "self_attn.g_a_proj.weight", (m.kda_head_dim, m.hidden))
    return b.linear("g", low, "self_attn.g_b_proj.weight", (channels, m.kda_head_dim), by_head)


def _a_log(b: GraphBuilder) -> str:
    """Stored longer than the heads in Kimi K3 (zeros behind), and with extra dims in Kimi-Linear."""
    m = b.spec.model
    stored: Recipe = b.leaf("self_attn.A_log", m.a_log_shape, m.gate_dtype)
    count = 1
    for n in m.a_log_shape:
        count *= n
    if len(m.a_log_shape) > 1:
        stored = Reshape((count,), stored)
    if count > m.kda_heads:
        stored = Slice(0, 0, m.kda_heads, stored)
    return b.weight("a_log", stored, "fp32", Axis(KDA_HEADS, 0))


def _delta_rule(b: GraphBuilder, q: str, k: str, v: str, decay: str, beta: str, after: list[str]) -> str:
    m, step = b.spec.model, b.spec.step
    heads, width = m.kda_heads, m.kda_head_dim
    if step.query > 1 and b.spec.choices.kda_rollback == "slots":
        states = b.storage("state", (step.sequences + 1, step.query, heads, width, width), b.spec.numerics.kda_state,
                           "state", Axis(KDA_HEADS, 2))
        return b.apply("kda_verify_slots", ("o", "state_next"), q, k, v, decay, beta, states, *after,
                       query=step.query)[0]
    state = b.storage("state", (step.sequences + 1, heads, width, width), b.spec.numerics.kda_state, "state",
                      Axis(KDA_HEADS, 1))
    if step.query == 1:
        return b.apply("kda_delta_rule", ("o", "state_next"), q, k, v, decay, beta, state, *after)[0]
    record = b.storage("record", (step.sequences + 1, step.query, 3, heads, width), "fp32", "state",
                       Axis(KDA_HEADS, 3))
    return b.apply("kda_verify", ("o", "state_next", "record_next"), q, k, v, decay, beta, state, record,
                   *after, query=step.query)[0]


def mla_layer(b: GraphBuilder, h: str) -> str:
    """``h`` [T, hidden] to the attention output [T, hidden], appending to the paged latent cache."""
    m, step, numerics = b.spec.model, b.spec.step, b.spec.numerics
    per_query = m.qk_nope_head_dim + m.qk_rope_head_dim
    by_query_head = Axis(MLA_HEADS, 0, per_query)
    q, latent, key_part = _query_and_latent(b, h, per_query, by_query_head)

    pages = step.sequences * -(-step.context // step.page_size)
    cache = b.storage("cache", (pages + 1, step.page_size, m.kv_lora_rank + m.qk_rope_head_dim),
                      numerics.kv_cache, "cache")
    cache = b.apply("mla_append", "cache_next", latent, key_part, cache, "positions", "page_table",
                    query=step.query, kv_scale=numerics.kv_scale)
    w_uk, w_uv = _absorbed(b)
    rows = b.apply("mla_absorb_q", "query", q, w_uk)
    mixed = b.apply("mla_attend", "latent_out", rows, cache, "positions", "page_table", query=step.query,
                    latent=m.kv_lora_rank, scale=per_query**-0.5, kv_scale=numerics.kv_scale)
    o = b.apply("mla_absorb_v", "o", mixed, w_uv)
    by_value_head = Axis(MLA_HEADS, 0, m.v_head_dim)
    if m.mla_output_gate:
        gate = b.linear("g", h, "self_attn.g_proj.weight", (m.heads * m.v_head_dim, m.hidden), by_value_head)
        o = b.apply("sigmoid_mul", "o_gated", o, gate)
    return b.linear("o_proj", o, "self_attn.o_proj.weight", (m.hidden, m.heads * m.v_head_dim),
                    Axis(MLA_HEADS, 1, m.v_head_dim))


def _query_and_latent(b: GraphBuilder, h: str, per_query: int, by_head: Axis) -> tuple[str, str, str]:
    """Query rows [T, H*(n + r)], normed latent [T, R] and unrotated key part [T, r]."""
    m = b.spec.model
    kv_rows, kv_leaf = m.kv_lora_rank + m.qk_rope_head_dim, "self_attn.kv_a_proj_with_mqa.weight"
    rows = m.heads * per_query
    if m.q_lora_rank is None:
        q = b.linear("q", h, "self_attn.q_proj.weight", (rows, m.hidden), by_head)
        kv, start = b.linear("kv_a", h, kv_leaf, (kv_rows, m.hidden), Axis("MLA front rows", 0)), 0
    else:
        front = Cat(0, (b.leaf("self_attn.q_a_proj.weight", (m.q_lora_rank, m.hidden)),
                        b.leaf(kv_leaf, (kv_rows, m.hidden))))
        weight = b.weight("qkv_a.weight", front, m.weight_dtype, Axis("MLA front rows", 0))
        kv, start = b.apply("linear", "qkv_a", h, weight), m.q_lora_rank
        q_a = b.apply("slice", "q_a", kv, dim=1, start=0, stop=start)
        q_a = b.rms_norm("q_a_norm", q_a, "self_attn.q_a_layernorm.weight", m.mla_norm_eps)
        q = b.linear("q", q_a, "self_attn.q_b_proj.weight", (rows, m.q_lora_rank), by_head)
    latent = b.apply("slice", "kv_latent", kv, dim=1, start=start, stop=start + m.kv_lora_rank)
    latent = b.rms_norm("kv_norm", latent, "self_attn.kv_a_layernorm.weight", m.mla_norm_eps)
    key_part = b.apply("slice", "key_part", kv, dim=1, start=start + m.kv_lora_rank, stop=start + kv_rows)
    return q, latent, key_part


def _absorbed(b: GraphBuilder) -> tuple[str, str]:
    """kv_b by head: W_UK [H, n, R] from rows 0..n-1 of each head, W_UV [H, v, R] from the rest."""
    m = b.spec.model
    per_head = m.qk_nope_head_dim + m.v_head_dim
    kv_b = b.leaf("self_attn.kv_b_proj.weight", (m.heads * per_head, m.kv_lora_rank))
    heads = Reshape((m.heads, per_head, m.kv_lora_rank), kv_b)
    axis = Axis(MLA_HEADS, 0)
    w_uk = b.weight("w_uk", Slice(1, 0, m.qk_nope_head_dim, heads), m.weight_dtype, axis)
    w_uv = b.weight("w_uv", Slice(1, m.qk_nope_head_dim, per_head, heads), m.weight_dtype, axis)
    return w_uk, w_uv
