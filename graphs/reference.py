"""The oracle: the graph as built, before any pass, evaluated op by op in fp32 without rounding between."""
from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..compiler.build import build_graph
from ..compiler.ops import OPS
from ..compiler.spec import Parallel, Spec
from .load import TORCH_DTYPES, TensorSource, load_weights
from .load import Weight as Loaded


class Reference:
    """One step of ``spec`` on one rank, with caches and states in fp32. Slow, and as plain as it can be."""

    def __init__(self, spec: Spec, source: TensorSource, *, device: str | torch.device = "cpu") -> None:
        numerics = replace(spec.numerics, activation="fp32", kv_cache="fp32", kv_scale=1.0, kda_state="fp32")
        spec = replace(spec, parallel=Parallel(1, "tp"), numerics=numerics,
                       step=replace(spec.step, outputs=("tokens", "logits", "hidden")))
        self.graph = build_graph(spec)
        self.device = torch.device(device)
        weights = {n: Loaded(v.recipe, v.dtype) for n, v in self.graph.values.items() if v.recipe is not None}
        self.kept: dict[str, Tensor] = dict(load_weights(source, weights, 0, device=device))
        for name, value in self.graph.values.items():
            if value.role in ("state", "cache") and name not in self.graph.producer:
                self.kept[name] = torch.zeros(value.shape, dtype=TORCH_DTYPES[value.dtype], device=self.device)
        self.kept["rank"] = torch.zeros(1, dtype=torch.int32, device=self.device)

    def step(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Outputs "tokens" i32 [T], "logits" fp32 [T, V] and "hidden" fp32 [T, D] for the given step inputs."""
        values = {**self.kept, **{name: tensor.to(self.device) for name, tensor in inputs.items()}}
        for node in self.graph.nodes:
            results = OPS[node.op].fn(*(values[n] for n in node.inputs), **node.attrs)
            values.update(zip(node.outputs, results if isinstance(results, tuple) else (results,), strict=True))
        return dict(zip(("tokens", "logits", "hidden"), (values[n] for n in self.graph.outputs), strict=True))

    def reset(self, slot: int) -> None:
        """Empties the state of ``slot``."""
        for name, value in self.graph.values.items():
            if value.role == "state" and name in self.kept:
                self.kept[name][slot].zero_()
