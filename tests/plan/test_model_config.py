"""Hugging Face configs to ModelConfig: both families, both ways to write Kimi-Linear, and what is refused."""
from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from k3plan.compiler.errors import SpecError
from k3plan.compiler.model import ModelConfig, model_from_config
from k3plan.compiler.reading.hf_layers import _ranges
from k3plan.compiler.reading.planfile import FOLDER

MLA_OF_K3 = (*range(3, 92, 4), 92)


def preset(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / "presets" / f"{name}.json").read_text())


def changed(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with one dotted key set; the value ``...`` deletes it."""
    config = copy.deepcopy(config)
    *parents, last = path.split(".")
    inner = config
    for name in parents:
        inner = inner[name]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return config


def refusals(config: dict[str, Any]) -> list[str]:
    with pytest.raises(SpecError) as caught:
        model_from_config(config)
    return [str(problem) for problem in caught.value.problems]


def test_kimi_k3() -> None:
    attention = tuple("mla" if layer in MLA_OF_K3 else "kda" for layer in range(93))
    assert model_from_config(preset("kimi-k3")) == ModelConfig(
        family="kimi_k3", tensor_prefix="language_model.model.", head_name="language_model.lm_head.weight",
        hidden=7168, vocab=163840, eps=1e-5, mla_norm_eps=1e-5,
        attention=attention, mlp=("dense",) + ("moe",) * 92,
        activation="situ", situ_beta=4.0, situ_linear_beta=25.0, attn_res_block=12, dense_intermediate=33792,
        heads=96, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        mla_output_gate=True, kda_heads=96, kda_head_dim=128, conv_kernel=4, kda_full_rank_gate=True,
        kda_gate_lower_bound=-5.0, a_log_shape=(128,), experts=896, top_k=16, moe_intermediate=3072, latent=3584,
        latent_norm=True, shared_experts=2, expert_groups=1, topk_groups=1, renormalize=True, routed_scaling=1.0,
        expert_format="mxfp4", weight_dtype="bf16", vector_dtype="fp32", gate_dtype="fp32", max_positions=1048576,
    )
    assert attention.count("kda") == 69


KIMI_LINEAR_48B = ModelConfig(
    family="kimi_linear", tensor_prefix="model.", head_name="lm_head.weight",
    hidden=2304, vocab=163840, eps=1e-5, mla_norm_eps=1e-6,
    attention=tuple("mla" if layer in (3, 7, 11, 15, 19, 23, 26) else "kda" for layer in range(27)),
    mlp=("dense",) + ("moe",) * 26,
    activation="silu", situ_beta=1.0, situ_linear_beta=1.0, attn_res_block=None, dense_intermediate=9216,
    heads=32, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    mla_output_gate=False, kda_heads=32, kda_head_dim=128, conv_kernel=4, kda_full_rank_gate=False,
    kda_gate_lower_bound=None, a_log_shape=(1, 1, 32, 1), experts=256, top_k=8, moe_intermediate=1024, latent=None,
    latent_norm=False, shared_experts=1, expert_groups=1, topk_groups=1, renormalize=True, routed_scaling=2.446,
    expert_format="dense", weight_dtype="bf16", vector_dtype="bf16", gate_dtype="fp32", max_positions=1048576,
)


def test_kimi_linear_as_published() -> None:
    assert model_from_config(preset("kimi-linear-48b")) == KIMI_LINEAR_48B


@pytest.mark.parametrize("original", [True, False], ids=["from-published", "from-fields"])
def test_kimi_linear_as_transformers_writes_it(original: bool, tmp_path: Path) -> None:
    """``KimiLinearConfig.save_pretrained`` of the published config describes the same model."""
    kimi_linear = pytest.importorskip("transformers.models.kimi_linear.configuration_kimi_linear")
    published = preset("kimi-linear-48b")
    if original:
        config = kimi_linear.KimiLinearConfig(**published)
    else:
        kinds = {"kda": "linear_attention", "mla": "full_attention"}
        names = [kinds[kind] for kind in KIMI_LINEAR_48B.attention]
        config = kimi_linear.KimiLinearConfig(layer_types=names, dtype="bfloat16")
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written != published
    assert model_from_config(written) == KIMI_LINEAR_48B


@pytest.mark.parametrize(
    ("key", "name", "want"),
    [("dtype", "float32", "fp32"), ("torch_dtype", "bfloat16", "bf16"), ("torch_dtype", "float32", "fp32")],
)
def test_weight_dtype(key: str, name: str, want: str) -> None:
    config = changed(preset("kimi-linear-48b"), "dtype", ...) | {key: name}
    assert model_from_config(config).weight_dtype == want


def test_small_k3_without_quantisation_has_dense_experts() -> None:
    config = changed(preset("kimi-k3"), "text_config.quantization_config", ...)
    assert model_from_config(config).expert_format == "dense"


@pytest.mark.parametrize("heads", [1, 96, 128, 129])
def test_a_log_is_padded_to_128_heads(heads: int) -> None:
    config = changed(preset("kimi-k3"), "text_config.linear_attn_config.num_heads", heads)
    assert model_from_config(config).a_log_shape == (128 if heads <= 128 else 256,)


@pytest.mark.parametrize(("first", "every"), [(0, 1), (1, 1), (2, 3), (27, 1)])
def test_moe_layers_by_first_and_frequency(first: int, every: int) -> None:
    config = preset("kimi-linear-48b") | {"first_k_dense_replace": first, "moe_layer_freq": every}
    moe = [layer for layer, kind in enumerate(model_from_config(config).mlp) if kind == "moe"]
    assert moe == [layer for layer in range(first, 27) if layer % every == 0]


LIST = [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26]
REFUSED = [
    ("kimi-k3", "text_config.mla_use_nope", False, "rotary"),
    ("kimi-k3", "text_config.mla_use_nope", ..., "`mla_use_nope` is missing"),
    ("kimi-k3", "tie_word_embeddings", True, "tied"),
    ("kimi-k3", "text_config.tie_word_embeddings", True, "tied"),
    ("kimi-k3", "text_config.hidden_act", "gelu", '"gelu"; this family has situ or silu'),
    ("kimi-k3", "text_config.activation_situ_beta", ..., "`activation_situ_beta` is missing"),
    ("kimi-k3", "text_config.quantization_config.format", "nvfp4-pack-quantized", "nvfp4-pack-quantized"),
    ("kimi-k3", "text_config.quantization_config.config_groups.group_0.weights.group_size", 16, "mxfp4 means 32"),
    ("kimi-k3", "text_config.dtype", "float16", "float16"),
    ("kimi-k3", "text_config.model_type", "qwen3", "kimi_linear"),
    ("kimi-k3", "text_config", [], "not a mapping"),
    ("kimi-k3", "model_type", "kimi_k25", "k3plan knows kimi_k3 or kimi_linear"),
    ("kimi-k3", "model_type", ..., "`model_type` is missing"),
    ("kimi-linear-48b", "hidden_act", "situ", "this family has silu"),
    ("kimi-linear-48b", "mla_use_nope", False, "rotary"),
    ("kimi-linear-48b", "attention_bias", True, "biases"),
    ("kimi-linear-48b", "attn_res_block_size", 12, "belongs to Kimi K3"),
    ("kimi-linear-48b", "mla_use_output_gate", True, "belongs to Kimi K3"),
    ("kimi-linear-48b", "moe_router_activation_func", "softmax", "sigmoid"),
    ("kimi-linear-48b", "quantization_config", {"quant_method": "fp8"}, '"fp8"'),
    ("kimi-linear-48b", "hidden_size", True, "a boolean"),
    ("kimi-linear-48b", "hidden_size", 2304.0, "a real number"),
    ("kimi-linear-48b", "hidden_size", None, "`hidden_size` is missing"),
    ("kimi-linear-48b", "rms_norm_eps", "1e-5", "a string"),
    ("kimi-linear-48b", "num_key_value_heads", 8, "one key for each head"),
    ("kimi-linear-48b", "num_hidden_layers", 28, "layers 28 (1-based) are in neither"),
    ("kimi-linear-48b", "num_hidden_layers", ..., "`num_hidden_layers` is missing"),
    ("kimi-linear-48b", "linear_attn_config.kda_layers", [*LIST, 27], "layer 27 (1-based) is listed twice"),
    ("kimi-linear-48b", "linear_attn_config.kda_layers", LIST[2:], "layers 1-2 (1-based)"),
    ("kimi-linear-48b", "linear_attn_config.kda_layers", [*LIST, "x"], "layers are 1 to 27"),
    ("kimi-linear-48b", "linear_attn_config.kda_layers", 3, "must be a list"),
    ("kimi-linear-48b", "linear_attn_config.kda_layers", ..., "`linear_attn_config.kda_layers` is missing"),
    ("kimi-linear-48b", "first_k_dense_replace", ..., "`first_k_dense_replace` is missing"),
    ("kimi-linear-48b", "moe_layer_freq", 0, "1 or more"),
    ("kimi-linear-48b", "layer_types", ["full_attention"] * 27, "makes layer 0 mla"),
    ("kimi-linear-48b", "layer_types", ["sliding"] + ["full_attention"] * 26, "write linear_attention or"),
    ("kimi-linear-48b", "layer_types", ["full_attention"], "has 1 entries"),
    ("kimi-linear-48b", "mlp_layer_types", ["dense"] * 27, "makes layer 1 dense"),
    ("kimi-linear-48b", "linear_num_heads", 16, "but `linear_attn_config.num_heads` is 32"),
    ("kimi-linear-48b", "num_experts_per_token", 512, "there are 256"),
    ("kimi-linear-48b", "num_expert_group", 3, "do not divide"),
]


REFUSED_IDS = [f"{name}-{path.rpartition('.')[2]}-{number}" for number, (name, path, *_) in enumerate(REFUSED)]


@pytest.mark.parametrize(("name", "path", "value", "said"), REFUSED, ids=REFUSED_IDS)
def test_refused_by_name(name: str, path: str, value: Any, said: str) -> None:
    found = refusals(changed(preset(name), path, value))
    assert any(said in problem for problem in found), found
    assert all("fix: " in problem for problem in found)


def test_every_required_field_is_asked_for_at_once() -> None:
    found = refusals({"model_type": "kimi_k3", "text_config": {"linear_attn_config": {}}})
    for name in ("hidden_size", "vocab_size", "num_experts", "linear_attn_config.head_dim", "hidden_act"):
        assert any(f"`{name}` is missing" in problem for problem in found), name


@pytest.mark.parametrize("data", [[], "config", None, 3])
def test_a_config_is_a_mapping(data: Any) -> None:
    (found,) = refusals(data)
    assert "must be a mapping" in found


def test_ranges_in_words() -> None:
    assert _ranges([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10"
