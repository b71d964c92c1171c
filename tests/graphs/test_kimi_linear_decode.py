"""A random Kimi-Linear that transformers saved decodes alike through reader, loader, graph and executor."""
from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import Driver, Poisoned, read_text, run_plan, write_plan
from torch import Tensor
from torch.testing import assert_close

from k3plan.compiler.compile import compile_spec
from k3plan.compiler.errors import ConversionWarning
from k3plan.graphs.bind import bind
from k3plan.graphs.checkpoint import Checkpoint
from k3plan.graphs.decode import generate
from k3plan.graphs.load import StateDictSource

transformers = pytest.importorskip("transformers")

VOCAB, PROMPT, NEW = 96, 6, 26
# logits have a deviation near 1
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2, hidden_size=48, intermediate_size=64,
    moe_intermediate_size=16, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=16,
    qk_rope_head_dim=8, v_head_dim=12, qk_nope_head_dim=20, rms_norm_eps=1e-5, num_local_experts=8,
)
VARIANTS: dict[str, dict[str, Any]] = {
    # layer lists as in the published config, one routing group, one query projection
    "lists": dict(
        num_hidden_layers=5, num_experts_per_tok=3, n_shared_experts=1, n_group=1,
        routed_scaling_factor=2.446,
        linear_attn_config=dict(head_dim=16, num_heads=4, short_conv_kernel_size=4, full_attn_layers=[3, 5],
                                kda_layers=[1, 2, 4])),
    # layer names as transformers writes them, four groups, low-rank queries, other tap and head counts
    "groups_lora": dict(
        num_hidden_layers=5, num_experts_per_tok=2, n_shared_experts=2, n_group=4, topk_group=2,
        q_lora_rank=24, routed_scaling_factor=1.0, norm_topk_prob=False,
        linear_head_dim=8, linear_num_heads=8,
        linear_conv_kernel_dim=3, mlp_layer_types=["dense", "sparse", "sparse", "dense", "sparse"],
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention",
                     "full_attention"]),
}
SCALES = (
    (r"norm\.weight$", 1.0, 0.2), (r"A_log$", 0.5, 0.5), (r"dt_bias$", -2.0, 1.0),
    (r"e_score_correction_bias$", 0.0, 0.3), (r"conv1d\.weight$", 0.0, 0.4), (r"embed_tokens", 0.0, 1.0),
)


@dataclass(frozen=True)
class Saved:
    """A saved model, two greedy texts (prompt + new) of it, and logits [text, position, V] by two paths."""

    folder: Path
    model: Any
    texts: list[list[int]]
    cached: Tensor
    whole: Tensor


@pytest.fixture(scope="module", params=VARIANTS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    torch.manual_seed(0)
    config = transformers.KimiLinearConfig(**COMMON, **VARIANTS[request.param])
    model = transformers.KimiLinearForCausalLM(config).float().eval()
    randomise(model)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    ids = torch.randint(3, VOCAB, (2, PROMPT))
    cache = transformers.DynamicCache(config=config)
    logits = []
    with torch.no_grad():
        for at in range(PROMPT + NEW - 1):
            logits.append(model(ids[:, at : at + 1], cache=cache, use_cache=True).logits[:, 0])
            if at >= PROMPT - 1:
                ids = torch.cat([ids, logits[-1].argmax(-1, keepdim=True)], 1)
        whole = model(ids[:, :-1], use_cache=False).logits
    return Saved(folder, model, ids.tolist(), torch.stack(logits, 1), whole)


def randomise(model: Any) -> None:
    """Weights that matter, the router's bias too: transformers' own start leaves every logit near 0."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    with torch.no_grad():
        for name, tensor in tensors:
            mean, deviation = next(((m, d) for pattern, m, d in SCALES if re.search(pattern, name)),
                                   (0.0, tensor.shape[-1] ** -0.5))
            tensor.normal_(mean, deviation)


def test_the_two_paths_of_transformers_agree(saved: Saved) -> None:
    assert_close(saved.cached, saved.whole, **CLOSE)
    assert 0.5 < saved.cached.std() < 5
    assert len({*saved.texts[0][PROMPT:], *saved.texts[1][PROMPT:]}) > 12, "the texts must not be one loop"


def test_the_router_bias_matters(saved: Saved) -> None:
    buffers = [b for n, b in saved.model.named_buffers() if n.endswith("e_score_correction_bias")]
    kept = [b.clone() for b in buffers]
    for buffer in buffers:
        buffer.zero_()
    with torch.no_grad():
        logits = saved.model(torch.tensor(saved.texts)[:, :-1], use_cache=False).logits
    for buffer, value in zip(buffers, kept, strict=True):
        buffer.copy_(value)
    assert (logits - saved.whole).abs().max() > 0.1


def test_every_saved_tensor_is_read_and_no_other(saved: Saved, tmp_path: Path) -> None:
    plan = compile_spec(write_plan(tmp_path, saved.folder))
    assert Checkpoint(saved.folder).check(plan.weights, ignore=()) == ""


@pytest.mark.parametrize(
    ("tp", "experts"), [(1, "tp"), (2, "tp"), (2, "ep"), (4, "tp"), (4, "ep")],
    ids=["tp1", "tp2", "tp2-ep", "tp4", "tp4-ep"],
)
def test_tokens_and_logits(saved: Saved, tmp_path: Path, tp: int, experts: str) -> None:
    spec = write_plan(tmp_path, saved.folder, parallel={"tp": tp, "experts": experts})
    runner = run_plan(spec, Checkpoint(saved.folder))
    logits = read_text(Driver(runner, spec.step), [text[:-1] for text in saved.texts], VOCAB)
    assert_close(torch.stack(logits), saved.cached, **CLOSE)
    made = generate(runner, spec.step, [text[:PROMPT] for text in saved.texts], NEW)
    assert made.tokens == [text[PROMPT:] for text in saved.texts]


@pytest.mark.parametrize(("tp", "query", "rollback"), [(1, 4, "record"), (2, 4, "slots"), (4, 8, "record")],
                         ids=["tp1-q4", "tp2-q4-slots", "tp4-q8"])
def test_verify_steps(saved: Saved, tmp_path: Path, tp: int, query: int, rollback: str) -> None:
    spec = write_plan(tmp_path, saved.folder, parallel={"tp": tp}, step={"query": query},
                      choices={"kda_rollback": rollback})
    runner = run_plan(spec, Checkpoint(saved.folder))
    logits = read_text(Driver(runner, spec.step), [text[:-1] for text in saved.texts], VOCAB, seed=query)
    assert_close(torch.stack(logits), saved.cached, **CLOSE)
    made = generate(runner, spec.step, [text[:PROMPT] for text in saved.texts], NEW)
    assert made.tokens == [text[PROMPT:] for text in saved.texts]


def test_from_a_state_dict(saved: Saved, tmp_path: Path) -> None:
    """The path of an engine that holds the tensors already; transformers turns its names into stored ones."""
    loading = pytest.importorskip("transformers.core_model_loading")
    tensors = loading.revert_weight_conversion(saved.model, saved.model.state_dict())
    spec = write_plan(tmp_path, saved.folder, parallel={"tp": 2})
    runner = run_plan(spec, StateDictSource(tensors))
    logits = read_text(Driver(runner, spec.step), [text[:8] for text in saved.texts], VOCAB)
    assert_close(torch.stack(logits), saved.cached[:, :8], **CLOSE)


def test_a_bf16_model_as_transformers_saves_it(saved: Saved, tmp_path: Path) -> None:
    """Transformers keeps the router in fp32 and narrows A_log: neither is the published checkpoint's dtype."""
    folder = tmp_path / "bf16"
    model = transformers.KimiLinearForCausalLM.from_pretrained(saved.folder, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    spec = write_plan(tmp_path, folder, parallel={"tp": 2})
    plan, checkpoint = compile_spec(spec), Checkpoint(folder)
    short = r".*\.(self_attn|block_sparse_moe)\."
    stored = {re.sub(short, "", name): info.dtype for name, info in checkpoint.tensors.items()}
    assert stored["A_log"] == "bf16"
    assert stored["gate.weight"] == stored["gate.e_score_correction_bias"] == "fp32"

    routers = sum(kind == "moe" for kind in spec.model.mlp)
    note = checkpoint.check(plan.weights, ignore=())
    assert note.startswith(f"{routers} tensors stored as fp32 will be read as bf16: "), note
    assert note.count("block_sparse_moe.gate.weight") == routers, "the bias becomes fp32 anyway"
    with pytest.warns(ConversionWarning, match=f"{routers} tensors stored as fp32 lost digits when read as bf16"):
        runner = Poisoned(bind(plan, checkpoint))

    same = transformers.KimiLinearForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in same.named_parameters():
            if name.endswith("gate.weight"):
                parameter.copy_(parameter.bfloat16())
        want = same(torch.tensor(saved.texts)[:, :-1], use_cache=False).logits
    logits = read_text(Driver(runner, spec.step), [text[:-1] for text in saved.texts], VOCAB)
    assert_close(torch.stack(logits), want, **CLOSE)
