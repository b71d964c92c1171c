"""Small transformers Kimi-Linear models with weights that matter, and prompts for them."""
from __future__ import annotations

import re
from typing import Any

import torch
import transformers
from torch import Tensor

VOCAB = 96
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=None, hidden_size=48, intermediate_size=64,
    moe_intermediate_size=16, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=16, qk_rope_head_dim=8,
    v_head_dim=12, qk_nope_head_dim=20, rms_norm_eps=1e-5, num_local_experts=8, num_hidden_layers=4,
    num_experts_per_tok=3, n_shared_experts=1, n_group=1, routed_scaling_factor=2.446,
    linear_attn_config=dict(head_dim=16, num_heads=4, short_conv_kernel_size=4, full_attn_layers=[2, 4],
                            kda_layers=[1, 3]),
)
SCALES = ((r"norm\.weight$", 1.0, 0.2), (r"A_log$", 0.5, 0.5), (r"dt_bias$", -2.0, 1.0),
          (r"e_score_correction_bias$", 0.0, 0.3), (r"conv1d\.weight$", 0.0, 0.4), (r"embed_tokens", 0.0, 1.0))


def make_model(dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    """Weights that matter: transformers' own start leaves every logit near 0."""
    torch.manual_seed(0)
    model = transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**{**SIZES, **sizes})).float().eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            mean, deviation = next(((m, d) for pattern, m, d in SCALES if re.search(pattern, name)),
                                   (0.0, tensor.shape[-1] ** -0.5))
            tensor.normal_(mean, deviation)
    return model.to(dtype)


def texts(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Random ids [B, longest], left-padded, and their mask."""
    generator = torch.Generator().manual_seed(sum(lengths))
    wide = max(lengths)
    ids = torch.randint(3, VOCAB, (len(lengths), wide), generator=generator)
    mask = torch.stack([torch.arange(wide) >= wide - n for n in lengths]).long()
    return torch.where(mask.bool(), ids, 0), mask
