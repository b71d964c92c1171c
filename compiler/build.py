"""Boundary 2: the graph of a whole decode step, from a Spec. Says what is computed; nothing is split or fused.

This file has the frame of the step (embedding, residual stream, head). ``build_attention.py`` and
``build_mlp.py`` have the two halves of a layer. Shapes are global; weights name their checkpoint tensors.
"""
from __future__ import annotations

from dataclasses import dataclass

from .build_attention import kda_layer, mla_layer
from .build_mlp import dense_mlp, moe_mlp
from .graph_builder import GraphBuilder
from .ir import Axis, Graph, Value
from .recipe import Leaf, Mul, Recipe, Reshape
from .spec import Spec


@dataclass
class Stream:
    """The residual stream while the layers are laid down: the running prefix and the finished blocks."""

    prefix: str
    blocks: list[str]


def build_graph(spec: Spec) -> Graph:
    """The step of ``spec``: embedding, the chosen layers, head and greedy sampling."""
    b = GraphBuilder(spec)
    inputs = _step_inputs(b)
    model, delta = spec.model, None
    stream = _embedding(b) if spec.step.source == "tokens" else _stream_inputs(b, inputs)
    for layer in spec.layers:
        b.enter(f"L{layer}.attn", layer, "attn")
        h = _enter_attention(b, stream, delta, layer)
        y = kda_layer(b, h) if model.attention[layer] == "kda" else mla_layer(b, h)
        b.enter(f"L{layer}.mlp", layer, "mlp")
        h = _enter_mlp(b, stream, y, layer)
        delta = dense_mlp(b, h) if model.mlp[layer] == "dense" else moe_mlp(b, h)
    outputs = _head(b, stream, delta)
    used = {name for node in b.nodes for name in node.inputs} | set(outputs)
    unused = [name for name in inputs if name not in used]
    values = {name: value for name, value in b.values.items() if name not in unused}
    return Graph(tuple(b.nodes), values, tuple(n for n in inputs if n in values), tuple(outputs))


def _step_inputs(b: GraphBuilder) -> list[str]:
    """Index tensors that the caller writes before each step; ``rank`` is written once, when binding."""
    step = b.spec.step
    pages = -(-step.context // step.page_size)
    shapes = {
        "tokens": (step.rows,), "positions": (step.rows,), "slots": (step.sequences,),
        "page_table": (step.sequences, pages), "accepted": (step.sequences,), "rank": (1,),
    }
    return [b.add_value(Value(name, shape, "i32", "index")) for name, shape in shapes.items()]


def _embedding(b: GraphBuilder) -> Stream:
    model = b.spec.model
    b.enter("embed", None, "embed")
    table = b.weight("table", b.leaf("embed_tokens.weight", (model.vocab, model.hidden)), model.weight_dtype,
                     Axis("vocabulary", 0))
    return Stream(b.apply("embed", "rows", "tokens", table, "rank", out_dtype=b.spec.numerics.activation), [])


def _stream_inputs(b: GraphBuilder, inputs: list[str]) -> Stream:
    """The stream where the first layer begins: ``hidden`` [T, D] (the delta of the layer before it is added already)
    and ``block0``, ``block1``, ... [T, D], one for each block that an earlier layer has begun."""
    model, first = b.spec.model, b.spec.layers[0]
    blocks = 0 if model.attn_res_block is None else -(-first // model.attn_res_block)
    names = ["hidden", *(f"block{i}" for i in range(blocks))]
    for name in names:
        b.add_value(Value(name, (b.spec.step.rows, model.hidden), b.spec.numerics.activation))
    inputs += names
    return Stream(names[0], names[1:])


def _mix(b: GraphBuilder, stream: Stream, name: str, norm: str, projection: str) -> str:
    """AttnRes over the finished blocks and the prefix; the prefix itself where there is no block yet."""
    if not stream.blocks:
        return stream.prefix
    hidden = b.spec.model.hidden
    score = b.weight(f"{name}.score", Mul(b.leaf(norm, (hidden,)), _row(b.leaf(projection, (1, hidden)))), "fp32")
    return b.apply("attn_res", name, score, stream.prefix, *stream.blocks, eps=b.spec.model.eps)


def _row(leaf: Leaf) -> Recipe:
    return Reshape((leaf.shape[1],), leaf)


def _enter_attention(b: GraphBuilder, stream: Stream, delta: str | None, layer: int) -> str:
    if delta is not None:
        stream.prefix = b.apply("residual_add", "prefix", stream.prefix, delta)
    block = b.spec.model.attn_res_block
    mixed = stream.prefix
    if block is not None:
        mixed = _mix(b, stream, "mix", "self_attention_res_norm.weight", "self_attention_res_proj.weight")
        if layer % block == 0:
            # a block is kept, not copied: this value stays alive until the last mix
            stream.blocks.append(stream.prefix)
    return b.rms_norm("h", mixed, "input_layernorm.weight", b.spec.model.eps)


def _enter_mlp(b: GraphBuilder, stream: Stream, y: str, layer: int) -> str:
    block = b.spec.model.attn_res_block
    if block is not None and layer % block == 0:
        stream.prefix = y
    else:
        stream.prefix = b.apply("residual_add", "prefix", stream.prefix, y)
    mixed = stream.prefix
    if block is not None:
        mixed = _mix(b, stream, "mix", "mlp_res_norm.weight", "mlp_res_proj.weight")
    return b.rms_norm("h", mixed, "post_attention_layernorm.weight", b.spec.model.eps)


def _head(b: GraphBuilder, stream: Stream, delta: str | None) -> list[str]:
    model, wanted = b.spec.model, b.spec.step.outputs
    b.enter("head", None, "head")
    if delta is not None:
        stream.prefix = b.apply("residual_add", "prefix", stream.prefix, delta)
    if wanted == ("stream",):
        return [stream.prefix]
    mixed = stream.prefix
    if model.attn_res_block is not None:
        mixed = _mix(b, stream, "mix", "output_attn_res_norm.weight", "output_attn_res_proj.weight")
    hidden = b.rms_norm("hidden", mixed, "norm.weight", model.eps)
    weight = b.weight("logits.weight", Leaf((model.head_name,), (model.vocab, model.hidden), model.weight_dtype),
                      model.weight_dtype, Axis("vocabulary", 0))
    logits = b.apply("linear", "logits", hidden, weight, out_dtype="fp32")
    key = b.apply("argmax_key", "key", logits, "rank")
    tokens = b.apply("token_of_key", "tokens", key, "positions")
    made = {"tokens": tokens, "logits": logits, "hidden": hidden, "stream": stream.prefix}
    return [made[name] for name in wanted]
