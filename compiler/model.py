"""Model dimensions, from a Hugging Face ``config.json``. Knows two families: Kimi K3 and Kimi-Linear."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelConfig:
    """What the graph builder needs to know about a model. Sizes are elements, layers are 0-based."""

    family: str  # "kimi_k3" | "kimi_linear"
    tensor_prefix: str  # "language_model.model." | "model."
    head_name: str  # name of the output projection's weight
    hidden: int
    vocab: int
    eps: float  # all RMSNorms but the two of MLA
    mla_norm_eps: float
    attention: tuple[str, ...]  # per layer "kda" | "mla"
    mlp: tuple[str, ...]  # per layer "dense" | "moe"
    activation: str  # "situ" | "silu"
    situ_beta: float
    situ_linear_beta: float
    attn_res_block: int | None  # layers per AttnRes block; None: plain residual stream
    dense_intermediate: int
    # multi-head latent attention
    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int  # carried, never rotated (NoPE)
    v_head_dim: int
    mla_output_gate: bool
    # Kimi delta attention
    kda_heads: int
    kda_head_dim: int
    conv_kernel: int
    kda_full_rank_gate: bool
    kda_gate_lower_bound: float | None  # None: the softplus gate of Kimi-Linear
    a_log_shape: tuple[int, ...]  # as stored; the first ``kda_heads`` entries are valid
    # mixture of experts
    experts: int
    top_k: int
    moe_intermediate: int
    latent: int | None  # routed experts work in this width; None: in ``hidden``
    latent_norm: bool
    shared_experts: int
    expert_groups: int
    topk_groups: int
    renormalize: bool
    routed_scaling: float
    expert_format: str  # "mxfp4" | "dense"
    weight_dtype: str  # "bf16" | "fp32": every weight that has no dtype of its own
    vector_dtype: str  # dtype of conv weights, o_norm and the router bias
    gate_dtype: str  # dtype of A_log and dt_bias
    max_positions: int | None = None  # longest sequence the model was made for; None: not said

    @property
    def layers(self) -> int:
        return len(self.attention)

    @property
    def expert_width(self) -> int:
        """Input and output width of a routed expert."""
        return self.latent or self.hidden

    @property
    def shared_intermediate(self) -> int:
        """Width of the fused shared-expert MLP."""
        return self.shared_experts * self.moe_intermediate


def model_from_config(data: Mapping[str, Any], file: str = "config.json") -> ModelConfig:
    """The model that a Hugging Face config describes; raises ``SpecError`` with every problem at once.

    ``file`` is the name that problems quote. Problems carry lines only when the text itself was
    read (``model: {config: ...}`` in a plan file), because plain data has no positions.
    """
    from .reading.document import Source, wrap
    from .reading.hf_config import read_model

    return read_model(wrap(data, Source("config", file)))[0]
