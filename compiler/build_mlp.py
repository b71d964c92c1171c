"""The MLP half of a layer: dense, or a mixture of experts with shared experts, in latent space for Kimi K3."""
from __future__ import annotations

from .graph_builder import GraphBuilder
from .ir import Axis
from .recipe import Recipe, StackLeaf


def _activate(b: GraphBuilder, name: str, gate: str, up: str) -> str:
    m = b.spec.model
    if m.activation == "situ":
        return b.apply("situ_and_mul", name, gate, up, beta=m.situ_beta, linear_beta=m.situ_linear_beta)
    return b.apply("silu_and_mul", name, gate, up)


def _mlp(b: GraphBuilder, h: str, prefix: str, tensors: tuple[str, ...], width: int, axis: str) -> str:
    """gate, up, activation, down. ``tensors`` are the alternatives of the tensors' common prefix."""
    m = b.spec.model

    def weight(name: str, shape: tuple[int, int], dim: int) -> str:
        first, *others = (f"{t}.{name}_proj.weight" for t in tensors)
        leaf = b.leaf(first, shape, None, *others)
        return b.weight(f"{prefix}{name}.weight", leaf, m.weight_dtype, Axis(axis, dim))

    gate = b.apply("linear", f"{prefix}gate", h, weight("gate", (width, m.hidden), 0))
    up = b.apply("linear", f"{prefix}up", h, weight("up", (width, m.hidden), 0))
    act = _activate(b, f"{prefix}act", gate, up)
    return b.apply("linear", f"{prefix}down", act, weight("down", (m.hidden, width), 1))


def dense_mlp(b: GraphBuilder, h: str) -> str:
    """``h`` [T, hidden] to [T, hidden]. transformers 5.24 saves these tensors under the MoE's prefix."""
    return _mlp(b, h, "", ("mlp", "block_sparse_moe"), b.spec.model.dense_intermediate, "dense intermediate")


def moe_mlp(b: GraphBuilder, h: str) -> str:
    """``h`` [T, hidden] to routed plus shared experts [T, hidden]."""
    m = b.spec.model
    router = b.weight("router.weight", b.leaf("block_sparse_moe.gate.weight", (m.experts, m.hidden)),
                      m.weight_dtype, Axis("router rows", 0))
    # fp32 whatever the activations are: 5 % of tokens would get other experts from bf16 logits
    logits = b.apply("linear", "router", h, router, out_dtype="fp32")
    bias = b.weight("router_bias", b.leaf(
        "block_sparse_moe.gate.e_score_correction_bias", (m.experts,), m.vector_dtype), "fp32")
    ids, weights = b.apply("router_topk", ("ids", "weights"), logits, bias, top_k=m.top_k,
                           groups=m.expert_groups, topk_groups=m.topk_groups, renormalize=m.renormalize,
                           scaling=m.routed_scaling)
    x = h
    if m.latent is not None:
        x = b.linear("latent_down", h, "block_sparse_moe.routed_expert_down_proj.weight",
                     (m.latent, m.hidden), Axis("latent down rows", 0))
    routed = _routed(b, x, ids, weights)
    if m.latent_norm:
        routed = b.rms_norm("latent_normed", routed, "block_sparse_moe.routed_expert_norm.weight", m.eps)
    if m.latent is not None:
        routed = b.linear("latent_up", routed, "block_sparse_moe.routed_expert_up_proj.weight",
                          (m.hidden, m.latent), Axis("latent up rows", 0))
    if not m.shared_experts:
        return routed
    shared = _mlp(b, h, "shared_", ("block_sparse_moe.shared_experts",), m.shared_intermediate,
                  "shared expert intermediate")
    return b.apply("add", "out", routed, shared)


def _routed(b: GraphBuilder, x: str, ids: str, weights: str) -> str:
    m = b.spec.model
    w1, w3 = _expert_weights(b, "w1"), _expert_weights(b, "w3")
    attrs = {"experts": m.experts, "format": m.expert_format, "activation": b.spec.numerics.expert_activation}
    # packed tensors first, then scales: (w1, w3) or (w1, w3, w1 scale, w3 scale)
    both = [weight for pair in zip(w1, w3, strict=True) for weight in pair]
    gate, up = b.apply("experts_gate_up", ("gate", "up"), x, ids, "rank", *both, **attrs)
    act = _activate(b, "act", gate, up)
    y = b.apply("experts_down", "pairs", act, ids, "rank", *_expert_weights(b, "w2"), **attrs)
    return b.apply("experts_combine", "routed", y, weights)


def _expert_weights(b: GraphBuilder, name: str) -> list[str]:
    """Stacked weights of all experts: [packed u8, scale u8] for MXFP4, [plain] otherwise.

    The split dim is the intermediate one (TP) or the experts (EP), chosen by ``parallel.experts``.
    """
    m = b.spec.model
    rows, columns = (m.moe_intermediate, m.expert_width) if name != "w2" else (m.expert_width, m.moe_intermediate)
    inter_dim = 2 if name == "w2" else 1
    prefix = f"{m.tensor_prefix}layers.{b.layer}.block_sparse_moe.experts.{{e}}.{name}.weight"

    def stacked(suffix: str, per_element: int, dtype: str) -> str:
        recipe: Recipe = StackLeaf((prefix + suffix,), m.experts, (rows, columns // per_element), dtype)
        if b.spec.parallel.experts == "ep":
            axis = Axis("experts", 0)
        else:
            # groups of 32 share a scale and stay together
            together = {"w1": 32, "w3": 32, "w2": 32 // per_element}[name] if m.expert_format == "mxfp4" else 1
            axis = Axis("expert intermediate", inter_dim, max(together, 1))
        return b.weight(f"{name}{suffix}", recipe, dtype, axis)

    if m.expert_format == "mxfp4":
        return [stacked("_packed", 2, "u8"), stacked("_scale", 32, "u8")]
    return [stacked("", 1, m.weight_dtype)]
