"""Parts of an exported layer, and which operators a runtime could take as plugins. No TensorRT is needed here."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from made_steps import layer_plan
from test_layer import Steps, rows_of
from torch.testing import assert_close

from k3plan.graphs.checkpoint import Checkpoint
from k3plan.graphs.module.launch_ops import PLAIN, register
from k3plan.graphs.module.layer import DecodeLayer
from k3plan.graphs.module.partition import is_ours, operators, split, why_no_plugin

STAYS = {  # what updates states, or reads a list of weights
    0: {"kda_conv", "kda_delta_rule"}, 1: {"mla_append", "experts_gate_up", "experts_down"},
    2: {"kda_conv", "kda_delta_rule", "experts_gate_up", "experts_down"},
}
PLUGINS = {0: set(), 1: {"mla_attend", "router_topk"}, 2: {"router_topk"}}


@pytest.mark.parametrize("index", STAYS, ids=["kda-dense", "mla-moe", "kda-moe"])
def test_parts_of_a_layer(folder: Path, checkpoint: Checkpoint, tmp_path: Path, index: int) -> None:
    layer = DecodeLayer.from_plan(layer_plan(tmp_path, folder, index), checkpoint, parameters=False)
    layer.plain = True
    layer.register_operators()
    program = torch.export.export(Steps(layer), next(rows_of(layer)))
    found = {op.name().split("::")[1].split(".")[0]: why_no_plugin(op) for op in operators(program)}
    assert {name for name, reason in found.items() if reason} == STAYS[index]
    assert {name for name, reason in found.items() if reason is None} == PLUGINS[index]
    parts = split(program)
    kinds = [name.split("_")[0] for name, _ in parts.named_children() if name[-1].isdigit()]
    assert set(kinds) == {"plain", "k3plan"}
    for name, part in parts.named_children():
        ours = [is_ours(node) for node in getattr(part, "graph", torch.fx.Graph()).nodes if node.op == "call_function"]
        assert not any(ours) if name.startswith("plain") else True
        assert any(ours) if name.startswith("k3plan") else True
    # the program's states are the layer's own, so another layer says what is right
    layer = DecodeLayer.from_plan(layer.plans[0], checkpoint)
    for given in rows_of(layer):
        flat = [*given[:4], *given[4]]
        wanted = layer(given[0], position_ids=given[1], slots=given[2], page_table=given[3], blocks=given[4])
        assert_close(parts(*flat)[0], wanted, rtol=0, atol=0)


def test_reasons() -> None:
    ops = torch.ops.k3plan
    assert why_no_plugin(ops.mla_append.default) == "it updates cache in place"
    assert why_no_plugin(ops.kda_verify.default) == "it updates state, record in place"
    assert why_no_plugin(ops.experts_down.default) == "weights is a list of tensors"
    assert why_no_plugin(ops.router_topk.default) is None


def test_plain_ops_are_arithmetic_only(folder: Path, tmp_path: Path) -> None:
    """Nothing that keeps a state, and nothing whose shape or path depends on data, is spelled out."""
    used = {a.op for i in STAYS for a in register(layer_plan(tmp_path, folder, i)).launches}
    for op in used - PLAIN:
        assert op in {"kda_conv", "kda_delta_rule", "mla_append", "mla_attend", "router_topk", "experts_gate_up",
                      "experts_down"}
