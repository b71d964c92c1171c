"""Write a small Kimi K3 checkpoint in the published format: names, dtypes, shards, index and config.

``tensor_list`` says what a K3 checkpoint holds. The graph builder names the tensors that it reads on its
own; a test compares the two.
"""
from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from ..compiler.model import ModelConfig
from .checkpoint import INDEX
from .random_weights import RandomSource

Tensors = dict[str, tuple[str, tuple[int, ...]]]  # name -> (dtype, shape)

# every kind of layer and every neighbourhood of kinds of the real model: two adjacent MLA layers at the end, a
# dense layer 0, three AttnRes blocks; everything divides by 16 ranks, and experts by whole groups of 32
TINY = ModelConfig(
    family="kimi_k3", tensor_prefix="language_model.model.", head_name="language_model.lm_head.weight",
    hidden=256, vocab=512, eps=1e-5, mla_norm_eps=1e-5,
    attention=("kda", "kda", "kda", "mla", "kda", "kda", "kda", "mla", "mla"),
    mlp=("dense", "moe", "moe", "moe", "moe", "moe", "moe", "moe", "moe"),
    activation="situ", situ_beta=4.0, situ_linear_beta=25.0, attn_res_block=3, dense_intermediate=512,
    heads=16, q_lora_rank=96, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
    mla_output_gate=True, kda_heads=16, kda_head_dim=32, conv_kernel=4, kda_full_rank_gate=True,
    kda_gate_lower_bound=-5.0, a_log_shape=(128,), experts=16, top_k=4, moe_intermediate=512, latent=128,
    latent_norm=True, shared_experts=2, expert_groups=1, topk_groups=1, renormalize=True, routed_scaling=1.0,
    expert_format="mxfp4", weight_dtype="bf16", vector_dtype="fp32", gate_dtype="fp32", max_positions=1_048_576,
)  # fmt: skip

# stand-ins for the parts that a decode step never reads
_OTHER: Tensors = {
    "vision_tower.patch_embed.proj.weight": ("bf16", (8, 3, 2, 2)),
    "vision_tower.encoder.final_layernorm.weight": ("bf16", (8,)),
    "mm_projector.proj.0.weight": ("bf16", (8, 8)),
}


def make_checkpoint(folder: str | Path, *, seed: int = 0, **sizes: Any) -> ModelConfig:
    """Write a random Kimi K3 checkpoint (39 MB by default) and return its dimensions.

    ``sizes`` are fields of ``ModelConfig`` that replace those of ``TINY``. Layer i goes to file i + 1 and
    the rest to one file more. The tensors are those of ``RandomSource(seed)``, with ``A_log`` zero behind the
    last head. Raises ``ValueError`` for sizes that the format cannot hold, ``OSError`` when writing fails.
    """
    model = replace(TINY, **sizes)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = tensor_list(model) | _OTHER
    source = RandomSource(tensors, seed)
    count = model.layers + 1
    weight_map: dict[str, str] = {}
    total = 0
    for number in range(1, count + 1):
        prefix = f"{model.tensor_prefix}layers.{number - 1}."
        names = [name for name in tensors if name.startswith(prefix)]
        if number == count:
            names = [name for name in tensors if name not in weight_map]
        shard = {name: source.whole(name) for name in names}
        for name in names:
            if name.endswith("A_log"):
                shard[name][model.kda_heads :] = 0
        file = f"model-{number:05d}-of-{count:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
        total += sum(tensor.nbytes for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text(json.dumps(scaled_config(model), indent=2))
    return model


def tensor_list(model: ModelConfig) -> Tensors:
    """Every language-model tensor of a Kimi K3 checkpoint: name -> (dtype, shape), layers first.

    Source: the published index and headers. For the full model this is 1,559,965,606,912 bytes.
    """
    if model.family != "kimi_k3" or model.latent is None or model.q_lora_rank is None:
        raise ValueError(f"only the Kimi K3 format can be listed, not {model.family} with these fields")
    if model.latent % 32 or model.moe_intermediate % 32:
        raise ValueError(f"MXFP4 experts of {model.moe_intermediate} x {model.latent} do not divide into 32s")
    tensors: Tensors = {}
    for layer, (attention, mlp) in enumerate(zip(model.attention, model.mlp, strict=True)):
        parts = _norms(model) | (_kda(model) if attention == "kda" else _mla(model, model.q_lora_rank))
        parts |= _dense(model) if mlp == "dense" else _moe(model, model.latent)
        tensors |= {f"{model.tensor_prefix}layers.{layer}.{name}": entry for name, entry in parts.items()}
    outer = _matrices({
        "embed_tokens": (model.vocab, model.hidden), "norm": (model.hidden,),
        "output_attn_res_norm": (model.hidden,), "output_attn_res_proj": (1, model.hidden),
    })  # fmt: skip
    tensors |= {model.tensor_prefix + name: entry for name, entry in outer.items()}
    return tensors | {model.head_name: ("bf16", (model.vocab, model.hidden))}


def _matrices(shapes: dict[str, tuple[int, ...]]) -> Tensors:
    return {f"{name}.weight": ("bf16", shape) for name, shape in shapes.items()}


def _norms(m: ModelConfig) -> Tensors:
    vectors = ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm")
    scores = ("self_attention_res_proj", "mlp_res_proj")
    return _matrices(dict.fromkeys(vectors, (m.hidden,)) | dict.fromkeys(scores, (1, m.hidden)))


def _kda(m: ModelConfig) -> Tensors:
    width, channels = m.kda_head_dim, m.kda_heads * m.kda_head_dim
    parts = _matrices({
        **{f"self_attn.{name}_proj": (channels, m.hidden) for name in "qkvg"},
        "self_attn.f_a_proj": (width, m.hidden), "self_attn.f_b_proj": (channels, width),
        "self_attn.b_proj": (m.kda_heads, m.hidden), "self_attn.o_proj": (m.hidden, channels),
    })  # fmt: skip
    vectors = {
        **{f"self_attn.{name}_conv1d.weight": (channels, 1, m.conv_kernel) for name in "qkv"},
        "self_attn.A_log": m.a_log_shape, "self_attn.dt_bias": (channels,), "self_attn.o_norm.weight": (width,),
    }  # fmt: skip
    return parts | {name: ("fp32", shape) for name, shape in vectors.items()}


def _mla(m: ModelConfig, q_rank: int) -> Tensors:
    return _matrices({
        "self_attn.q_a_proj": (q_rank, m.hidden), "self_attn.q_a_layernorm": (q_rank,),
        "self_attn.q_b_proj": (m.heads * (m.qk_nope_head_dim + m.qk_rope_head_dim), q_rank),
        "self_attn.kv_a_proj_with_mqa": (m.kv_lora_rank + m.qk_rope_head_dim, m.hidden),
        "self_attn.kv_a_layernorm": (m.kv_lora_rank,),
        "self_attn.kv_b_proj": (m.heads * (m.qk_nope_head_dim + m.v_head_dim), m.kv_lora_rank),
        "self_attn.g_proj": (m.heads * m.v_head_dim, m.hidden),
        "self_attn.o_proj": (m.hidden, m.heads * m.v_head_dim),
    })  # fmt: skip


def _dense(m: ModelConfig, prefix: str = "mlp", width: int | None = None) -> Tensors:
    inner = width or m.dense_intermediate
    return _matrices({
        f"{prefix}.gate_proj": (inner, m.hidden), f"{prefix}.up_proj": (inner, m.hidden),
        f"{prefix}.down_proj": (m.hidden, inner),
    })  # fmt: skip


def _moe(m: ModelConfig, latent: int) -> Tensors:
    prefix, inner = "block_sparse_moe", m.moe_intermediate
    parts = _matrices({
        f"{prefix}.gate": (m.experts, m.hidden), f"{prefix}.routed_expert_norm": (latent,),
        f"{prefix}.routed_expert_down_proj": (latent, m.hidden),
        f"{prefix}.routed_expert_up_proj": (m.hidden, latent),
    })  # fmt: skip
    parts |= _dense(m, f"{prefix}.shared_experts", m.shared_intermediate)
    parts[f"{prefix}.gate.e_score_correction_bias"] = ("fp32", (m.experts,))
    for expert in range(m.experts):
        for name, (rows, columns) in {"w1": (inner, latent), "w2": (latent, inner), "w3": (inner, latent)}.items():
            stem = f"{prefix}.experts.{expert}.{name}.weight"
            parts[f"{stem}_packed"] = ("u8", (rows, columns // 2))
            parts[f"{stem}_scale"] = ("u8", (rows, columns // 32))
    return parts


def scaled_config(model: ModelConfig) -> dict[str, Any]:
    """The published ``config.json`` with the sizes of ``model``; every other field as it is."""
    preset = files("k3plan.compiler") / "presets" / "kimi-k3.json"
    config: dict[str, Any] = json.loads(preset.read_text())
    tokens = {"bos_token_id": model.vocab - 4, "eos_token_id": model.vocab - 3, "pad_token_id": model.vocab - 1}
    config |= {**tokens, "media_placeholder_token_id": model.vocab - 2}
    config["vision_config"]["text_hidden_size"] = model.hidden
    text = config["text_config"]
    text |= {
        **tokens,
        "hidden_size": model.hidden, "vocab_size": model.vocab, "num_hidden_layers": model.layers,
        "max_position_embeddings": model.max_positions, "rms_norm_eps": model.eps,
        "intermediate_size": model.dense_intermediate, "first_k_dense_replace": model.mlp.count("dense"),
        "attn_res_block_size": model.attn_res_block, "activation_situ_beta": model.situ_beta,
        "activation_situ_linear_beta": model.situ_linear_beta,
        "num_attention_heads": model.heads, "num_key_value_heads": model.heads,
        "q_lora_rank": model.q_lora_rank, "kv_lora_rank": model.kv_lora_rank,
        "qk_nope_head_dim": model.qk_nope_head_dim, "qk_rope_head_dim": model.qk_rope_head_dim,
        "v_head_dim": model.v_head_dim, "num_experts": model.experts, "num_experts_per_token": model.top_k,
        "moe_intermediate_size": model.moe_intermediate, "routed_expert_hidden_size": model.latent,
        "num_shared_experts": model.shared_experts, "routed_scaling_factor": model.routed_scaling,
        "num_expert_group": model.expert_groups, "topk_group": model.topk_groups,
    }  # fmt: skip
    text["linear_attn_config"] |= {
        "full_attn_layers": [i + 1 for i, kind in enumerate(model.attention) if kind == "mla"],
        "kda_layers": [i + 1 for i, kind in enumerate(model.attention) if kind == "kda"],
        "head_dim": model.kda_head_dim, "num_heads": model.kda_heads,
        "short_conv_kernel_size": model.conv_kernel, "gate_lower_bound": model.kda_gate_lower_bound,
    }  # fmt: skip
    return config
