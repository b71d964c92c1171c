"""Hugging Face config items to ``ModelConfig``. Decides which models are understood."""
from __future__ import annotations

from typing import Any

from ..errors import Origin, SpecError
from ..model import ModelConfig
from .document import Item, a_kind, show
from .hf_layers import attention_kinds, mlp_kinds
from .hf_reader import Reader, Row

FAMILIES = {"kimi_k3": "Kimi K3", "kimi_linear": "Kimi-Linear"}
DTYPES = {"bfloat16": "bf16", "float32": "fp32", "torch.bfloat16": "bf16", "torch.float32": "fp32"}
MXFP4_FORMAT = "mxfp4-pack-quantized"
MXFP4_WEIGHTS = {"group_size": 32, "num_bits": 4, "type": "float", "symmetric": True}
# K3 stores A_log padded to this many heads (tensor of shape [128] for 96 heads)
A_LOG_MULTIPLE = 128
COMMON = (
    Row("hidden", ("hidden_size",)),
    Row("vocab", ("vocab_size",)),
    Row("eps", ("rms_norm_eps",), float, 0.0),
    Row("dense_intermediate", ("intermediate_size",)),
    Row("heads", ("num_attention_heads",)),
    Row("q_lora_rank", ("q_lora_rank",), default=None),
    Row("kv_lora_rank", ("kv_lora_rank",)),
    Row("qk_nope_head_dim", ("qk_nope_head_dim",)),
    Row("qk_rope_head_dim", ("qk_rope_head_dim",), least=0),
    Row("v_head_dim", ("v_head_dim",)),
    Row("kda_heads", ("linear_attn_config.num_heads", "linear_num_heads")),
    Row("kda_head_dim", ("linear_attn_config.head_dim", "linear_head_dim")),
    Row("conv_kernel", ("linear_attn_config.short_conv_kernel_size", "linear_conv_kernel_dim"), least=2),
    Row("experts", ("num_experts", "num_local_experts")),
    Row("top_k", ("num_experts_per_token", "num_experts_per_tok")),
    Row("moe_intermediate", ("moe_intermediate_size",)),
    Row("shared_experts", ("num_shared_experts", "n_shared_experts"), least=0),
    Row("expert_groups", ("num_expert_group", "n_group"), default=1),
    Row("topk_groups", ("topk_group",), default=1),
    Row("renormalize", ("moe_renormalize", "norm_topk_prob"), bool, None),
    Row("routed_scaling", ("routed_scaling_factor",), float, 0.0),
    Row("max_positions", ("max_position_embeddings", "model_max_length"), default=None),
)
K3_ONLY = (
    Row("attn_res_block", ("attn_res_block_size",), default=None),
    Row("mla_output_gate", ("mla_use_output_gate",), bool, None, default=False),
    Row("kda_full_rank_gate", ("linear_attn_config.use_full_rank_gate",), bool, None, default=False),
    Row("kda_gate_lower_bound", ("linear_attn_config.gate_lower_bound",), float, None, default=None),
    Row("latent", ("routed_expert_hidden_size",), default=None),
    Row("latent_norm", ("latent_moe_use_norm",), bool, None, default=False),
)
SITU = (
    Row("situ_beta", ("activation_situ_beta",), float, 0.0),
    Row("situ_linear_beta", ("activation_situ_linear_beta",), float, 0.0),
)
# key -> the only value that is planned, and what another value would need
FIXED: dict[str, tuple[bool | str, str]] = {
    "mla_use_nope": (True, "rotary position embedding is not planned"),
    "tie_word_embeddings": (False, "an output projection tied to the embedding is not planned"),
    "attention_bias": (False, "attention biases are not planned"),
    "moe_router_activation_func": ("sigmoid", "only the sigmoid router is planned"),
    "topk_method": ("noaux_tc", "only bias-corrected top-k selection is planned"),
}


def read_model(root: Item) -> tuple[ModelConfig, dict[str, Origin]]:
    """The model and the origin of each of its fields; raises ``SpecError`` with every problem found."""
    family, text = _family(root)
    reader = Reader(root, text)
    values: dict[str, Any] = {row.field: reader.take(row) for row in COMMON}
    values |= _family_values(reader, family, values)
    values |= _layers(reader)
    _check_fixed(reader, family)
    _check_sizes(reader, values)
    if reader.problems:
        raise SpecError(reader.problems)
    kind_origin = (root.get("model_type") or root).origin
    origins = {field: reader.origins.get(field, kind_origin) for field in values}
    return ModelConfig(**values), origins


def _family(root: Item) -> tuple[str, Item]:
    """The family name and the item that holds the language model's fields."""
    known = " or ".join(FAMILIES)
    if not isinstance(root.value, dict):
        said = f"a config must be a mapping, not {a_kind(root)}"
        raise SpecError([root.problem(said, "give a config.json")])
    kind = root.get("model_type")
    if kind is None or kind.value not in FAMILIES:
        said = f"`model_type` is {show(kind)}" if kind else "`model_type` is missing"
        hint = f"give the config.json of a {' or '.join(FAMILIES.values())} model"
        raise SpecError([(kind or root).problem(f"{said}; k3plan knows {known}", hint)])
    if kind.value == "kimi_linear":
        return "kimi_linear", root
    text = root.get("text_config")
    if text is None or not isinstance(text.value, dict):
        where = text or root
        hint = 'add "text_config": {...} with the language model\'s fields'
        raise SpecError([where.problem("`text_config` is missing or not a mapping", hint)])
    inner = text.get("model_type")
    if inner is not None and inner.value != "kimi_linear":
        said = f"`text_config.model_type` is {show(inner)}; Kimi K3's language model is kimi_linear"
        raise SpecError([inner.problem(said, 'write "kimi_linear"')])
    return "kimi_k3", text


def _family_values(reader: Reader, family: str, common: dict[str, Any]) -> dict[str, Any]:
    """The fields in which the families differ."""
    k3 = family == "kimi_k3"
    values: dict[str, Any] = {
        "family": family,
        "tensor_prefix": "language_model.model." if k3 else "model.",
        "head_name": "language_model.lm_head.weight" if k3 else "lm_head.weight",
        "activation": _activation(reader, ("situ", "silu") if k3 else ("silu",)),
        # K3 is served with its own eps here; Kimi-Linear's code builds both norms with the class default
        "mla_norm_eps": common["eps"] if k3 else 1e-6,
        "weight_dtype": _weight_dtype(reader),
        # the published Kimi-Linear keeps fp32 for the decay gate alone
        "vector_dtype": "fp32" if k3 else _weight_dtype(reader),
        "gate_dtype": "fp32",
        "expert_format": _expert_format(reader, k3),
    }
    if k3 and "eps" in reader.origins:
        reader.origins["mla_norm_eps"] = reader.origins["eps"]
    for row in K3_ONLY:
        values[row.field] = reader.take(row) if k3 else row.default
        if not k3 and (item := reader.at(row.keys[0])) and item.value is not False:
            said = f"`{row.keys[0]}` belongs to Kimi K3, but `model_type` is kimi_linear"
            hint = 'delete it, or put these fields under "text_config" with "model_type": "kimi_k3" on top'
            reader.problems.append(item.problem(said, hint, at_key=True))
    situ = values["activation"] == "situ"
    values |= {row.field: reader.take(row) if situ else 1.0 for row in SITU}
    heads = common["kda_heads"] or 0
    padded = -(-heads // A_LOG_MULTIPLE) * A_LOG_MULTIPLE
    values["a_log_shape"] = (padded,) if k3 else (1, 1, heads, 1)
    return values


def _activation(reader: Reader, known: tuple[str, ...]) -> str | None:
    item = reader.at("hidden_act")
    if item is None:
        reader.missing("hidden_act", " or ".join(known))
        return None
    reader.origins["activation"] = item.origin
    if item.value in known:
        return str(item.value)
    said = f"`hidden_act` is {show(item)}; this family has {' or '.join(known)}"
    reader.problems.append(item.problem(said, f"use a model with {' or '.join(known)}"))
    return None


def _weight_dtype(reader: Reader) -> str:
    """dtype of the checkpoint: the language model's, else the whole model's, else bf16."""
    for section in (reader.text, reader.root):
        for key in ("dtype", "torch_dtype"):
            item = section.get(key)
            if item is None or item.value is None:
                continue
            reader.origins["weight_dtype"] = item.origin
            if item.value in DTYPES:
                return DTYPES[item.value]
            said = f"`{key}` is {show(item)}; weights are read as bfloat16 or float32"
            reader.problems.append(item.problem(said, "use a bfloat16 or float32 checkpoint"))
    reader.origins.setdefault("weight_dtype", Origin("default"))
    return "bf16"


def _expert_format(reader: Reader, k3: bool) -> str:
    """``mxfp4`` for K3's compressed-tensors checkpoint, ``dense`` without quantisation; refuses others."""
    item = reader.at("quantization_config") or reader.root.get("quantization_config")
    if item is None or item.value is None:
        return "dense"
    reader.origins["expert_format"] = item.origin
    form = item.get("format")
    if not k3 or form is None or form.value != MXFP4_FORMAT:
        method = form or item.get("quant_method")
        what = f"format {show(method)}" if method else "a config without a format"
        said = f"`quantization_config` has {what}; " + (
            f"only {MXFP4_FORMAT} is read" if k3 else "Kimi-Linear is read unquantised only"
        )
        where = form or item
        reader.problems.append(where.problem(said, "use the published checkpoint", at_key=form is None))
        return "dense"
    # a config without these entries is taken at its word: the format name says it all
    weights, _ = item.find(("config_groups", "group_0", "weights"))
    for key, want in MXFP4_WEIGHTS.items():
        given = weights.get(key)
        if given is not None and given.value != want:
            said = f"`{key}` of the quantised weights is {show(given)}; mxfp4 means {want}"
            reader.problems.append(given.problem(said, f"write {want}"))
    return "mxfp4"


def _layers(reader: Reader) -> dict[str, Any]:
    """``attention`` and ``mlp``, one name a layer."""
    count = reader.take(Row("layers", ("num_hidden_layers",)))
    if count is None:
        return {"attention": (), "mlp": ()}
    return {"attention": attention_kinds(reader, count), "mlp": mlp_kinds(reader, count)}


def _check_fixed(reader: Reader, family: str) -> None:
    for key, (want, why) in FIXED.items():
        given = [reader.at(key)] + ([reader.root.get(key)] if reader.root is not reader.text else [])
        for item in given:
            if item is None or item.value is None or item.value == want:
                continue
            wanted = str(want).lower() if isinstance(want, bool) else f'"{want}"'
            said = f"`{key}` is {show(item)}: {why}"
            reader.problems.append(item.problem(said, f"use a model with `{key}` {wanted}"))
    if family == "kimi_k3" and reader.at("mla_use_nope") is None:
        reader.missing("mla_use_nope", "true")


def _check_sizes(reader: Reader, values: dict[str, Any]) -> None:
    """Fields that must fit each other. A field that had a problem of its own is ``None`` and skipped."""
    def known(*fields: str) -> bool:
        return all(values.get(field) is not None for field in fields)

    def refuse(key: str, said: str, hint: str) -> None:
        reader.problems.append((reader.at(key) or reader.text).problem(said, hint))

    heads = reader.at("num_key_value_heads")
    if heads and known("heads") and heads.value != values["heads"]:
        said = f"`num_key_value_heads` is {show(heads)}, `num_attention_heads` is {values['heads']}"
        refuse("num_key_value_heads", said, "give both the same value: MLA has one key for each head")
    width = reader.at("qk_head_dim")
    if width and known("qk_nope_head_dim", "qk_rope_head_dim"):
        total = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
        if width.value != total:
            said = f"`qk_head_dim` is {show(width)}, but the two parts sum to {total}"
            refuse("qk_head_dim", said, f"write {total}")
    if known("experts", "top_k") and values["top_k"] > values["experts"]:
        said = f"{values['top_k']} experts a token, but there are {values['experts']}"
        refuse("num_experts_per_token", said, f"write at most {values['experts']}")
    if known("experts", "expert_groups") and values["experts"] % values["expert_groups"]:
        said = f"{values['experts']} experts do not divide into {values['expert_groups']} groups"
        refuse("num_expert_group", said, f"write a divisor of {values['experts']}")
    if known("expert_groups", "topk_groups") and values["topk_groups"] > values["expert_groups"]:
        said = f"`topk_group` is {values['topk_groups']}, but there are {values['expert_groups']} groups"
        refuse("topk_group", said, f"write at most {values['expert_groups']}")
    bound = values["kda_gate_lower_bound"]
    if bound is not None and bound >= 0:
        said = f"`gate_lower_bound` is {bound}; a bound of the log decay is negative"
        refuse("linear_attn_config.gate_lower_bound", said, "write a negative number, such as -5.0")
    if values["latent_norm"] and values["latent"] is None:
        said = "`latent_moe_use_norm` is true, but there is no `routed_expert_hidden_size`"
        refuse("latent_moe_use_norm", said, "add `routed_expert_hidden_size`, or write false")
