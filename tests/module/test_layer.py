"""``DecodeLayer``: chained layers are the model, parameters are a layer's, and an exported layer computes the same."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_steps import inputs_at, layer_plan, spec_of, tensors_of
from torch import Tensor
from torch.testing import assert_close

from k3plan.compiler.compile import compile_spec
from k3plan.compiler.errors import AddressError, BindError
from k3plan.compiler.plan import LaunchPlan
from k3plan.graphs.checkpoint import Checkpoint
from k3plan.graphs.module.launch_ops import PLAIN, register
from k3plan.graphs.module.layer import DecodeLayer
from k3plan.graphs.module.step import DecodeStep

LAYERS = range(4)
ATTN_RES_BLOCK = 2
BF16 = {"activation": "bf16", "kv_cache": "bf16"}
EXACT = {"rtol": 0.0, "atol": 0.0}


@pytest.fixture
def layers(folder: Path, checkpoint: Checkpoint, tmp_path: Path) -> list[DecodeLayer]:
    return [DecodeLayer.from_plan(layer_plan(tmp_path, folder, i), checkpoint) for i in LAYERS]


def embedded(checkpoint: Checkpoint, rows: Tensor) -> Tensor:
    table = tensors_of(checkpoint, ["language_model.model.embed_tokens.weight"])
    return table["language_model.model.embed_tokens.weight"][rows.long()].float()


def chain(layers: list[DecodeLayer], x: Tensor, **where: Any) -> Tensor:
    """The layers one after the other; the input of a layer that begins a block is that block."""
    blocks: list[Tensor] = []
    for i, layer in enumerate(layers):
        before = x
        x = layer(x, blocks=list(blocks), **where)
        if i % ATTN_RES_BLOCK == 0:
            blocks.append(before)
    return x


def test_chained_layers_are_the_model(layers: list[DecodeLayer], folder: Path, checkpoint: Checkpoint, tmp_path: Path
                                      ) -> None:
    whole = DecodeStep.from_plan(compile_spec(spec_of(tmp_path, folder, outputs=["stream"])), checkpoint)
    for at in range(4):
        given = inputs_at([at, at], (1, 0))
        wanted = whole.step(**given)["stream"]
        found = chain(layers, embedded(checkpoint, given["rows"]), position_ids=given["positions"],
                      slots=given["slots"], page_table=given["page_table"])
        assert_close(found, wanted, **EXACT)


def test_a_layer_of_two_emulated_ranks(layers: list[DecodeLayer], folder: Path, checkpoint: Checkpoint, tmp_path: Path
                                       ) -> None:
    x, at = embedded(checkpoint, torch.tensor([[3], [5]])), torch.tensor([[0], [0]])
    for index in (1, 2):
        split = DecodeLayer.from_plan(layer_plan(tmp_path, folder, index, tp=2), checkpoint)
        for _ in range(2):
            assert_close(split(x, position_ids=at, blocks=[x]), layers[index](x, position_ids=at, blocks=[x]),
                         rtol=1e-4, atol=1e-4)


def test_slots_and_pages_default_to_those_of_the_row(layers: list[DecodeLayer], checkpoint: Checkpoint) -> None:
    first, mla = embedded(checkpoint, torch.tensor([[3], [5]])), layers[1]
    blocks, at = [torch.ones_like(first)], torch.tensor([[0], [0]])
    found = mla(first, position_ids=at, blocks=blocks)
    given = inputs_at([0, 0], (0, 1))
    assert_close(found, mla(first, position_ids=at, slots=given["slots"], page_table=given["page_table"],
                            blocks=blocks), **EXACT)
    assert found.data_ptr() != mla.executables[0].outputs["stream"].data_ptr()
    with pytest.raises(BindError, match="pass position_ids"):
        mla(first, blocks=blocks)
    with pytest.raises(BindError, match="has no block0"):
        mla(first, position_ids=at)


def test_parameters_are_those_of_the_layer(layers: list[DecodeLayer], checkpoint: Checkpoint, other: Checkpoint,
                                           folder: Path, tmp_path: Path) -> None:
    layer, prefix = layers[1], "language_model.model.layers.1."
    names = {n.removeprefix(prefix) for n in checkpoint.tensors if n.startswith(prefix)}
    assert layer.state_dict().keys() == names
    assert "self_attn.q_a_proj.weight" in names
    x, at = embedded(checkpoint, torch.tensor([[3], [5]])), torch.tensor([[0], [0]])
    state = tensors_of(other, [prefix + n for n in names])
    layer.load_state_dict({name.removeprefix(prefix): tensor for name, tensor in state.items()})
    wanted = DecodeLayer.from_plan(layer.plans[0], other)(x, position_ids=at, blocks=[x])
    assert_close(layer(x, position_ids=at, blocks=[x]), wanted, **EXACT)
    layer.storage.sequences2.rank0.L1__attn__cache = torch.zeros(1)
    with pytest.raises(AddressError, match=r"L1.attn.cache"):
        layer(x, position_ids=at, blocks=[x])
    layer.rebind()
    assert_close(layer(x, position_ids=at, blocks=[x]), wanted, **EXACT)
    assert layer.mirror.tensors is layer.executables[0].ranks[0].tensors
    whole = compile_spec(spec_of(tmp_path, folder))
    with pytest.raises(BindError, match=r"is not one layer\n  fix: compile with model.layers"):
        DecodeLayer.from_plan(whole, checkpoint)


class Steps(torch.nn.Module):
    """What an engine exports: the layer with tensors for everything."""

    def __init__(self, layer: DecodeLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, positions: Tensor, slots: Tensor, page_table: Tensor, blocks: list[Tensor]
                ) -> Tensor:
        return self.layer(hidden, position_ids=positions, slots=slots, page_table=page_table, blocks=blocks)


def rows_of(layer: DecodeLayer, dtype: torch.dtype = torch.float32) -> Iterator[tuple[Any, ...]]:
    """Three steps of two sequences, the second of which sits one out."""
    generator = torch.Generator().manual_seed(layer.plans[0].spec.layers[0])
    count = sum(name.startswith("block") for name in layer.plans[0].inputs)
    for at in range(3):
        x, *blocks = (torch.randn(2, 1, 256, generator=generator).to(dtype) for _ in range(count + 1))
        given = inputs_at([at, at], (1, 0))
        if at == 1:
            for name in ("positions", "slots"):
                given[name][1] = -1
            x[1] = 0
        yield x, given["positions"], given["slots"], given["page_table"], blocks


@pytest.mark.parametrize("plain", [False, True], ids=["operators", "plain"])
@pytest.mark.parametrize("index", LAYERS, ids=["kda-dense", "mla-moe", "kda-moe", "mla-moe-last"])
def test_an_exported_layer_computes_the_same(layers: list[DecodeLayer], checkpoint: Checkpoint, index: int,
                                             plain: bool, tmp_path: Path) -> None:
    """Bit for bit over three steps, through a file."""
    layer = DecodeLayer.from_plan(layers[index].plans[0], checkpoint, parameters=False)
    layer.plain = plain
    layer.register_operators()
    example = next(rows_of(layer))
    program = torch.export.export(Steps(layer), example)
    torch.export.save(program, tmp_path / "layer.pt2")
    exported = torch.export.load(tmp_path / "layer.pt2").module()
    for given in rows_of(layer):
        wanted = layer(given[0], position_ids=given[1], slots=given[2], page_table=given[3], blocks=given[4])
        assert_close(exported(*given), wanted, **EXACT)
    ours = {str(node.target).split(".")[1] for node in program.graph.nodes if str(node.target).startswith("k3plan.")}
    assert ours
    assert bool(ours & PLAIN) != plain


def test_an_export_keeps_to_the_size_of_the_plan(layers: list[DecodeLayer]) -> None:
    x, *others = next(rows_of(layers[0]))
    with pytest.raises(BindError, match="call register_operators"):
        torch.export.export(Steps(layers[0]), (x, *others))
    layers[0].register_operators()
    with pytest.raises(BindError, match=r"\(1, 1\) rows, an exported layer has \(2, 1\)"):
        torch.export.export(Steps(layers[0]), (x[:1], others[0][:1], others[1][:1], others[2][:1], []))


# launches of fused kernels, by their references


@pytest.fixture(scope="module")
def fused_plans(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LaunchPlan]:
    """Layers as planned for an H200, decode and verify steps."""
    where = tmp_path_factory.mktemp("fused")
    return [layer_plan(where, folder, i, gpu="h200", numerics=BF16, query=q) for i in (0, 1, 2)
            for q in (1, 2)]


def made_tensors(plan: LaunchPlan, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Weights, empty states and one live step of a plan, by value name."""
    cpu = compile_spec(spec_like(plan))
    layer = DecodeLayer.from_plan(cpu, checkpoint)
    tensors = {n: t.clone() for n, t in layer.executables[0].ranks[0].tensors.items()
               if n in plan.buffers and plan.buffers[n].kind in ("weight", "state", "cache", "index")}
    # of seed 0 a row has two experts nearly alike, and takes the other one when an op less is rounded
    query, generator = plan.spec.step.query, torch.Generator().manual_seed(1)
    for name in plan.inputs:
        shape = plan.tensors[name].shape
        if plan.tensors[name].dtype == "bf16":
            tensors[name] = torch.randn(shape, generator=generator).bfloat16()
    tensors["positions"] = torch.arange(query, dtype=torch.int32).repeat(2)
    tensors["slots"] = torch.tensor([1, 0], dtype=torch.int32)
    tensors["page_table"] = inputs_at([0, 0], (1, 0))["page_table"]
    tensors["accepted"] = torch.ones(2, dtype=torch.int32)
    return tensors


def spec_like(plan: LaunchPlan) -> Any:
    return replace(plan.spec, gpu="cpu", profile="fused")


def test_a_plan_for_a_gpu_runs_on_a_cpu_by_its_references(fused_plans: list[LaunchPlan], checkpoint: Checkpoint
                                                          ) -> None:
    """Against the CPU's plan of the same layer, which rounds after each op."""
    for plan in fused_plans:
        tensors = made_tensors(plan, checkpoint)
        copies = {n: t.clone() for n, t in tensors.items()}
        found = register(plan).run(tensors)["stream"].float()
        cpu = compile_spec(spec_like(plan))
        wanted = register(cpu).run(copies)["stream"].float()
        assert (found - wanted).square().mean().sqrt() < 0.02 * wanted.std()
        for name in tensors:
            if name.endswith((".state", ".cache", ".window")):
                assert_close(tensors[name].float(), copies[name].float(), rtol=0.1, atol=0.05)
                if plan.spec.step.query == 1 or not name.endswith(".state"):  # a verify step records, and folds later
                    assert tensors[name].float().abs().sum() > 0


def test_opcheck_of_fused_launches(fused_plans: list[LaunchPlan], checkpoint: Checkpoint) -> None:
    """Each distinct operator once, on the tensors that reach it."""
    checked: dict[str, Any] = {}
    for plan in fused_plans:
        program = register(plan)
        assert {a.fused.kernel for a in program.launches if a.fused} - {"triton.rms_norm"}
        replace(program, launches=tuple(checking(a, checked) for a in program.launches)).run(
            made_tensors(plan, checkpoint))
    assert {name.split("_")[0] for name in checked} >= {"triton"}
    assert any(a.fused.mutated for a in checked.values())
    for application in checked.values():
        schema = application.operator.default._schema
        written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
        assert written == set(application.fused.mutated)


def checking(application: Any, checked: dict[str, Any]) -> Any:
    """The application, with opcheck before its first run."""
    if application.fused is None or application.fused.name in checked:
        return application
    checked[application.fused.name] = application

    def run(*arguments: Any) -> Any:
        copies = tuple([t.clone() for t in a] if isinstance(a, list) else a.clone() for a in arguments)
        torch.library.opcheck(application.operator.default, copies)
        return application.operator(*arguments)

    return replace(application, operator=run)


def test_equal_launches_share_an_operator(folder: Path, tmp_path: Path) -> None:
    """Layers 2 and 1 have one MoE: by another name, not by another meaning."""
    names = [{a.fused.name for a in register(layer_plan(tmp_path, folder, i, gpu="h200", numerics=BF16)).launches
              if a.fused} for i in (1, 3)]
    assert names[0] & names[1]
    again = {a.fused.name for a in register(layer_plan(tmp_path, folder, 1, gpu="h200", numerics=BF16)).launches
             if a.fused}
    assert again == names[0]


def test_plans_of_several_ranks_have_no_operators(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BindError, match=r"2 ranks has no operators.*\n  fix: export a plan with parallel.tp: 1"):
        register(layer_plan(tmp_path, folder, 1, tp=2))
