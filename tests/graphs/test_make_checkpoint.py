"""The small checkpoint: its tensors are the published format's, and a model of them is numerically alive."""
from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from k3plan.compiler.build import build_graph
from k3plan.compiler.model import ModelConfig
from k3plan.compiler.ops.mxfp4 import unpack_mxfp4
from k3plan.compiler.reading.source import load_spec
from k3plan.compiler.recipe import Recipe
from k3plan.compiler.spec import Spec
from k3plan.graphs.checkpoint import INDEX, NOT_DECODED, Checkpoint
from k3plan.graphs.load import TORCH_DTYPES, TensorInfo, Weight, stored_tensors
from k3plan.graphs.make_checkpoint import TINY, make_checkpoint, scaled_config, tensor_list
from k3plan.graphs.random_weights import RandomSource

PREFIX = "language_model.model."
# the published dimensions, written out on purpose: the preset is checked against the same bytes
KIMI_K3 = replace(
    TINY, hidden=7168, vocab=163840, attention=(*(("kda",) * 3 + ("mla",)) * 23, "mla"),
    mlp=("dense", *("moe",) * 92), attn_res_block=12, dense_intermediate=33792, heads=96, q_lora_rank=1536,
    kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, kda_heads=96,
    kda_head_dim=128, experts=896, top_k=16, moe_intermediate=3072, latent=3584,
)  # fmt: skip
LANGUAGE_MODEL_BYTES = 1_559_965_606_912  # published total less the vision tower and its projector
KDA_BYTES, MLA_BYTES, EXPERT_BYTES = 887_800_832, 464_392_192, 17_547_264


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_checkpoint(folder)
    return folder


def spec_of(folder: Path, model: dict[str, Any], **parallel: Any) -> Spec:
    """The Spec of a plan over ``model``; JSON is YAML."""
    plan = {"version": 1, "model": model, "parallel": {"tp": 1, **parallel}, "target": {"gpu": "gb300"}}
    (folder / "plan.yaml").write_text(json.dumps(plan))
    return load_spec(folder / "plan.yaml")


def recipes_of(spec: Spec) -> dict[str, Recipe]:
    values = build_graph(spec).values
    return {name: value.recipe for name, value in values.items() if value.recipe is not None}


def test_the_list_has_the_published_bytes() -> None:
    tensors = tensor_list(KIMI_K3)

    def stored(names: Iterable[str]) -> int:
        return sum(TORCH_DTYPES[tensors[n][0]].itemsize * prod(tensors[n][1]) for n in names)

    assert stored(tensors) == LANGUAGE_MODEL_BYTES
    assert len(tensors) == 497_220 - 165 - 3
    stem = f"{PREFIX}layers.92.block_sparse_moe.experts.895."
    assert stored(n for n in tensors if n.startswith(stem)) == EXPERT_BYTES
    for layer, size in ((0, KDA_BYTES), (90, KDA_BYTES), (91, MLA_BYTES), (92, MLA_BYTES)):
        assert stored(n for n in tensors if n.startswith(f"{PREFIX}layers.{layer}.self_attn.")) == size


@pytest.mark.parametrize("model", ["tiny", "kimi-k3"])
def test_the_builder_reads_exactly_the_list(tiny: Path, tmp_path: Path, model: str) -> None:
    spec = spec_of(tmp_path, {"config": str(tiny / "config.json")} if model == "tiny" else {"preset": model})
    read = {names[0]: (dtype, shape) for names, shape, dtype in stored_tensors(recipes_of(spec).values())}
    listed = tensor_list(spec.model)
    assert {n: e for n, e in listed.items() if not n.startswith(NOT_DECODED)} == read
    if model == "kimi-k3":
        assert spec.model == KIMI_K3


def test_the_config_says_what_was_made(tiny: Path, tmp_path: Path) -> None:
    assert spec_of(tmp_path, {"config": str(tiny / "config.json")}).model == TINY
    sizes: dict[str, Any] = {"hidden": 128, "attention": ("mla", "kda"), "mlp": ("dense", "moe"), "experts": 32}
    model = make_checkpoint(tmp_path / "other", **sizes)
    assert spec_of(tmp_path, {"config": str(tmp_path / "other" / "config.json")}).model == model
    assert (model.hidden, model.experts) == (128, 32)


def test_folder_is_in_the_published_format(tiny: Path) -> None:
    files = sorted(tiny.glob("*.safetensors"))
    assert [f.name for f in files] == [f"model-{i:05d}-of-00010.safetensors" for i in range(1, 11)]
    assert sum(f.stat().st_size for f in files) < 40e6
    index = json.loads((tiny / INDEX).read_text())
    checkpoint = Checkpoint(tiny)
    assert index["metadata"]["total_size"] == sum(load_bytes(f) for f in files)
    for name, file in index["weight_map"].items():
        layer = name.removeprefix(f"{PREFIX}layers.").split(".")[0]
        assert file == files[int(layer) if layer.isdigit() else 9].name
    stored = {name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()}
    other = {name for name in stored if name.startswith(("vision_tower.", "mm_projector."))}
    assert {name: entry for name, entry in stored.items() if name not in other} == tensor_list(TINY)
    assert len(other) == 3


def load_bytes(file: Path) -> int:
    return sum(tensor.nbytes for tensor in load_file(file).values())


def test_it_fits_its_plan(tiny: Path, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, {"config": str(tiny / "config.json")}, experts="ep")
    weights = {name: Weight(v.recipe, v.dtype) for name, v in build_graph(spec).values.items() if v.recipe is not None}
    assert Checkpoint(tiny).check(weights) == ""


def test_an_expert_lies_in_one_piece(tiny: Path) -> None:
    checkpoint = Checkpoint(tiny)
    stem = f"{PREFIX}layers.5.block_sparse_moe.experts.7."
    found: list[TensorInfo] = [info for name, info in checkpoint.tensors.items() if name.startswith(stem)]
    assert len(found) == 6
    sizes = [info.shape[0] * info.shape[1] for info in found]
    assert max(i.offset for i in found) - min(i.offset for i in found) < sum(sizes)


def test_tensors_are_those_of_the_random_source(tiny: Path) -> None:
    file = load_file(tiny / "model-00002-of-00010.safetensors")
    source = RandomSource({n: ("fp32" if t.dtype == torch.float32 else "bf16", tuple(t.shape))
                           for n, t in file.items() if t.dtype != torch.uint8})  # fmt: skip
    for name in source.tensors:
        want = source.whole(name)
        if name.endswith("A_log"):
            assert torch.count_nonzero(want[TINY.kda_heads :])
            want[TINY.kda_heads :] = 0
        assert torch.equal(file[name], want), name


def test_scales_keep_the_model_alive(tiny: Path) -> None:
    """Expert matrices, router and decay gates by their statistics, on rows of unit variance."""
    torch.manual_seed(0)
    layer = {n.split("layers.1.")[1]: t for n, t in load_file(tiny / "model-00002-of-00010.safetensors").items()}
    x = torch.randn(256, TINY.hidden)
    moe = "block_sparse_moe"
    w1 = f"{moe}.experts.3.w1.weight"
    gate = torch.randn(256, 128) @ unpack_mxfp4(layer[f"{w1}_packed"], layer[f"{w1}_scale"]).T
    assert 0.5 < gate.std().item() < 2
    scores = torch.sigmoid(x @ layer[f"{moe}.gate.weight"].float().T)
    ids = (scores + layer[f"{moe}.gate.e_score_correction_bias"]).topk(TINY.top_k).indices
    share = torch.bincount(ids.flatten(), minlength=TINY.experts) / ids.numel()
    assert share.min() > 0.02, "every expert is chosen"
    assert share.max() < 0.15
    raw = x @ layer["self_attn.f_a_proj.weight"].float().T @ layer["self_attn.f_b_proj.weight"].float().T
    rate = layer["self_attn.A_log"][: TINY.kda_heads].exp().repeat_interleave(TINY.kda_head_dim)
    decay = (-5 * torch.sigmoid(rate * (raw + layer["self_attn.dt_bias"]))).exp()
    assert 0.8 < decay.median().item() < 0.97
    assert 0.2 < decay.quantile(0.1).item() < 0.8


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"family": "kimi_linear"}, "only the Kimi K3 format can be listed, not kimi_linear"),
        ({"latent": None}, "only the Kimi K3 format"),
        ({"moe_intermediate": 48}, "experts of 48 x 128 do not divide into 32s"),
    ],
)
def test_sizes_are_checked(tmp_path: Path, sizes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_checkpoint(tmp_path, **sizes)
    assert isinstance(TINY, ModelConfig)


def test_the_example_names_the_checkpoint_that_is_made() -> None:
    example = Path(__file__).resolve().parents[2] / "examples/tiny-k3-config.json"
    assert json.loads(example.read_text()) == scaled_config(TINY)
