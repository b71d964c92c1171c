"""Kimi K3 written down once more, from its published description, against the oracle of all other tests.

Those compare plans with ``Reference``, which evaluates the same graph: a layer that was built wrong would
agree with itself. Here a whole text goes through in float64, without a cache, without absorbing, one head and
one expert at a time, from the tensors and the config as they are stored.
"""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import Driver, read_text, write_plan
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

from k3plan.compiler.ops.mxfp4 import unpack_mxfp4
from k3plan.graphs.checkpoint import Checkpoint
from k3plan.graphs.make_checkpoint import make_checkpoint
from k3plan.graphs.reference import Reference

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "other_sizes": {
        "attention": ("mla", "kda", "kda", "mla", "mla"), "mlp": ("dense", "dense", "moe", "moe", "moe"),
        "attn_res_block": 4, "heads": 4, "kda_heads": 6, "qk_nope_head_dim": 24, "v_head_dim": 40,
        "conv_kernel": 3, "experts": 12, "top_k": 3, "expert_groups": 4, "topk_groups": 2,
        "routed_scaling": 2.5, "situ_beta": 3.0, "situ_linear_beta": 6.0, "shared_experts": 1,
        "kda_gate_lower_bound": -2.0,
    },
}


class Book:
    """Tensors and config of one checkpoint; ``logits`` of a whole text."""

    def __init__(self, folder: Path) -> None:
        self.c = json.loads((folder / "config.json").read_text())["text_config"]
        self.kda = self.c["linear_attn_config"]
        self.tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            self.tensors |= load_file(file)

    def w(self, name: str) -> Tensor:
        return self.tensors[f"language_model.{name}"].double()

    def logits(self, text: list[int]) -> Tensor:
        """[T, V]. A site of the residual stream is a softmax over the finished blocks and the running sum."""
        prefix = self.w("model.embed_tokens.weight")[text]
        delta = torch.zeros_like(prefix)
        blocks: list[Tensor] = []
        every = self.c["attn_res_block_size"]
        for i in range(self.c["num_hidden_layers"]):
            name = f"model.layers.{i}."
            prefix = prefix + delta
            h = self.norm(self.mix(prefix, blocks, f"{name}self_attention_res"), f"{name}input_layernorm")
            if i % every == 0:
                blocks.append(prefix)
            is_mla = i + 1 in self.kda["full_attn_layers"]
            y = self.mla(h, f"{name}self_attn.") if is_mla else self.delta_attention(h, f"{name}self_attn.")
            prefix = y if i % every == 0 else prefix + y
            h = self.norm(self.mix(prefix, blocks, f"{name}mlp_res"), f"{name}post_attention_layernorm")
            is_dense = i < self.c["first_k_dense_replace"]
            delta = self.mlp(h, f"{name}mlp.") if is_dense else self.moe(h, f"{name}block_sparse_moe.")
        end = self.mix(prefix + delta, blocks, "model.output_attn_res")
        return self.norm(end, "model.norm") @ self.w("lm_head.weight").T

    def norm(self, x: Tensor, name: str) -> Tensor:
        return self.scaled(x) * self.w(f"{name}.weight")

    def scaled(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.c["rms_norm_eps"]).sqrt()

    def mix(self, prefix: Tensor, blocks: list[Tensor], name: str) -> Tensor:
        sources = torch.stack([*blocks, prefix])
        keys = self.scaled(sources) * self.w(f"{name}_norm.weight")
        weights = torch.softmax(keys @ self.w(f"{name}_proj.weight")[0], 0)
        return (weights[..., None] * sources).sum(0)

    def delta_attention(self, h: Tensor, name: str) -> Tensor:
        heads, width, taps = self.kda["num_heads"], self.kda["head_dim"], self.kda["short_conv_kernel_size"]

        def short_convolution(which: str) -> Tensor:
            x = h @ self.w(f"{name}{which}_proj.weight").T
            filters = self.w(f"{name}{which}_conv1d.weight")[:, 0]
            before = torch.cat([torch.zeros(taps - 1, x.shape[1], dtype=x.dtype), x])
            y = torch.stack([(before[t : t + taps] * filters.T).sum(0) for t in range(len(x))])
            return (y / (1 + torch.exp(-y))).view(-1, heads, width)

        q, k, v = (short_convolution(which) for which in "qkv")
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        raw = (h @ self.w(f"{name}f_a_proj.weight").T) @ self.w(f"{name}f_b_proj.weight").T
        rate = self.w(f"{name}A_log")[:heads].exp()[:, None]
        raw = (raw + self.w(f"{name}dt_bias")).view(-1, heads, width)
        decay = torch.exp(self.kda["gate_lower_bound"] * torch.sigmoid(rate * raw))
        beta = torch.sigmoid(h @ self.w(f"{name}b_proj.weight").T)
        out = torch.zeros_like(v)
        for head in range(heads):
            state = torch.zeros(width, width, dtype=torch.float64)  # [V, K]
            for t in range(len(h)):
                state = state * decay[t, head]
                error = beta[t, head] * (v[t, head] - state @ k[t, head])
                state = state + torch.outer(error, k[t, head])
                out[t, head] = state @ q[t, head] / width**0.5
        gate = torch.sigmoid(h @ self.w(f"{name}g_proj.weight").T)
        normed = self.scaled(out) * self.w(f"{name}o_norm.weight")
        return (normed.flatten(1) * gate) @ self.w(f"{name}o_proj.weight").T

    def mla(self, h: Tensor, name: str) -> Tensor:
        sizes = ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank")
        heads, nope, rope, rank = (self.c[size] for size in sizes)
        q = self.norm(h @ self.w(f"{name}q_a_proj.weight").T, f"{name}q_a_layernorm")
        q = (q @ self.w(f"{name}q_b_proj.weight").T).view(-1, heads, nope + rope)
        latent, shared = (h @ self.w(f"{name}kv_a_proj_with_mqa.weight").T).split([rank, rope], -1)
        kv = self.norm(latent, f"{name}kv_a_layernorm") @ self.w(f"{name}kv_b_proj.weight").T
        kv = kv.view(len(h), heads, -1)
        future = torch.ones(len(h), len(h)).triu(1).bool()
        out = []
        for head in range(heads):
            key = torch.cat([kv[:, head, :nope], shared], -1)
            scores = (q[:, head] @ key.T / (nope + rope) ** 0.5).masked_fill(future, -torch.inf)
            out.append(torch.softmax(scores, -1) @ kv[:, head, nope:])
        gate = torch.sigmoid(h @ self.w(f"{name}g_proj.weight").T)
        return (torch.cat(out, -1) * gate) @ self.w(f"{name}o_proj.weight").T

    def situ(self, gate: Tensor, up: Tensor) -> Tensor:
        a, b = self.c["activation_situ_beta"], self.c["activation_situ_linear_beta"]
        return a * torch.tanh(gate / a) * torch.sigmoid(gate) * b * torch.tanh(up / b)

    def mlp(self, h: Tensor, name: str) -> Tensor:
        gate, up = (h @ self.w(f"{name}{which}_proj.weight").T for which in ("gate", "up"))
        return self.situ(gate, up) @ self.w(f"{name}down_proj.weight").T

    def moe(self, h: Tensor, name: str) -> Tensor:
        scores = torch.sigmoid(h @ self.w(f"{name}gate.weight").T)
        chosen_by = scores + self.w(f"{name}gate.e_score_correction_bias")
        latent = h @ self.w(f"{name}routed_expert_down_proj.weight").T
        routed = torch.zeros_like(latent)
        for t in range(len(h)):
            ids = self.choose(chosen_by[t])
            weights = scores[t, ids] / scores[t, ids].sum() * self.c["routed_scaling_factor"]
            for expert, weight in zip(ids, weights, strict=True):
                w1, w2, w3 = (self.expert(f"{name}experts.{expert}.w{n}.weight") for n in (1, 2, 3))
                routed[t] += weight * (w2 @ self.situ(w1 @ latent[t], w3 @ latent[t]))
        routed = self.norm(routed, f"{name}routed_expert_norm")
        up = self.w(f"{name}routed_expert_up_proj.weight")
        return routed @ up.T + self.mlp(h, f"{name}shared_experts.")

    def choose(self, choice: Tensor) -> list[int]:
        groups, kept = self.c["num_expert_group"], self.c["topk_group"]
        if groups > 1:
            sums = choice.view(groups, -1).topk(2).values.sum(-1)
            inside = torch.zeros(groups, dtype=torch.bool)
            inside[sums.topk(kept).indices] = True
            choice = choice.masked_fill(~inside.repeat_interleave(len(choice) // groups), -torch.inf)
        return choice.topk(self.c["num_experts_per_token"]).indices.tolist()

    def expert(self, name: str) -> Tensor:
        packed, scale = (self.tensors[f"language_model.{name}_{part}"] for part in ("packed", "scale"))
        return unpack_mxfp4(packed, scale).double()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_graph_is_the_published_model(tmp_path: Path, variant: str) -> None:
    make_checkpoint(tmp_path, seed=3, **VARIANTS[variant])
    spec = write_plan(tmp_path, tmp_path / "config.json", step={"sequences": 1})
    text = torch.randint(0, 512, (14,), generator=torch.Generator().manual_seed(1)).tolist()
    (got,) = read_text(Driver(Reference(spec, Checkpoint(tmp_path)), spec.step), [text], spec.model.vocab)
    assert_close(got.double(), Book(tmp_path).logits(text), rtol=5e-5, atol=5e-5)
