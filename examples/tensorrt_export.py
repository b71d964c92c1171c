"""A decoder layer in TensorRT: arithmetic in engines, operators of k3plan as plugins, states through torch.

THIS SCRIPT HAS NOT BEEN RUN: neither TensorRT nor torch-tensorrt was there when it was written. What it rests on and
can be tested without them is tested in tests/module/test_partition.py: the export, its parts, and which operators can
be plugins. The calls of torch-tensorrt follow its documentation of version 2.12 (plugins need TensorRT 10.7).

    pip install k3plan[tensorrt]
    k3plan checkpoint make demo/tiny-k3
    python examples/tensorrt_export.py demo/tiny-k3 3
"""
from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch_tensorrt

import k3plan
from k3plan.graphs.module.partition import operators, why_no_plugin


class Layer(torch.nn.Module):
    """The layer with a tensor for every argument, as ``torch.export`` wants it."""

    def __init__(self, layer: k3plan.DecodeLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, page_table: torch.Tensor,
                blocks: list[torch.Tensor]) -> torch.Tensor:
        return self.layer(hidden, position_ids=positions, slots=slots, page_table=page_table, blocks=blocks)


def main(folder: str, index: str) -> None:
    """Exports layer ``index`` of the checkpoint in ``folder``, compiles it, and compares one step."""
    plan = k3plan.compile_plan(Path(__file__).parent / "tiny-k3.yaml", [
        "parallel.tp=1", "target.gpu=h200", f"model.layers=[{index}]", "step.source=hidden", "step.outputs=[stream]"])
    layer = k3plan.DecodeLayer.from_plan(plan, k3plan.Checkpoint(folder), device="cuda", parameters=False)
    layer.plain = True  # arithmetic that TensorRT has is spelled out
    layer.register_operators()
    step, hidden = plan.spec.step, plan.spec.model.hidden
    pages = step.context // step.page_size
    rows = torch.randn(step.sequences, 1, hidden, device="cuda").bfloat16()
    blocks = [torch.randn_like(rows) for name in plan.inputs if name.startswith("block")]
    whole = {"dtype": torch.int32, "device": "cuda"}
    example = (rows, torch.zeros(step.sequences, 1, **whole), torch.arange(step.sequences, **whole),
               torch.arange(step.sequences * pages, **whole).view(step.sequences, pages), blocks)
    wanted = layer(example[0], position_ids=example[1], slots=example[2], page_table=example[3], blocks=blocks)
    for slot in range(step.sequences):
        layer.reset(slot)

    program = torch.export.export(Layer(layer), example)
    kept = []
    for operator in operators(program):
        reason = why_no_plugin(operator)
        if reason is None:
            name = operator.name().rpartition(".")[0]  # without the overload
            torch_tensorrt.dynamo.conversion.plugins.custom_op(
                name, supports_dynamic_shapes=False, requires_output_allocator=False)
        else:
            kept.append(operator)
        print(f"{operator.name()}: {'a plugin' if reason is None else f'stays in torch, {reason}'}")
    compiled = torch_tensorrt.dynamo.compile(program, arg_inputs=example, torch_executed_ops=kept, min_block_size=1)
    found = compiled(*example)
    error = (found.float() - wanted.float()).square().mean().sqrt() / wanted.float().std()
    print(f"layer {index}: error {float(error):.1e} of the stream's standard deviation")


if __name__ == "__main__":
    main(*sys.argv[1:])
