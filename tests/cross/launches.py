"""What is cross-compiled: every kernel of the Triton menu on regions that real plans have, each under a readable name.

Kimi K3 on 16 ranks gives most of them; a setting of its own gives what that plan does not have: FP8 caches and
MXFP8 activations, the fewest and the most heads of KDA on a rank, and Kimi-Linear's plain residual stream, SiLU and
unpacked experts. Of each kernel and row count the regions with the fewest and with the most bytes stand for those
between, at 8 rows those with the most. Decides nothing about how they are compiled.
"""
from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from k3plan.compiler.build import build_graph
from k3plan.compiler.covering.match import find_regions
from k3plan.compiler.kernel import Menu, Region
from k3plan.compiler.model import ModelConfig, model_from_config
from k3plan.compiler.passes.merge import merge_projections
from k3plan.compiler.passes.shard import algebra_of, shard_graph
from k3plan.compiler.spec import Choices, Numerics, Parallel, Spec, Step
from k3plan.ops_triton.kernels import KERNELS

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from real_shapes import name_of  # tests/real_shapes.py

PLAIN = Numerics("bf16", "bf16", 1.0, "fp32", "bf16")
FP8 = Numerics("bf16", "fp8_e4m3", 0.25, "bf16", "mxfp8")
WHOLE = Choices("replicated", "all_reduce", "replicated")
SHARDED = Choices("sharded", "stripe", "replicated")
SLOTS = Choices("replicated", "all_reduce", "replicated", kda_rollback="slots")
# dense and sparse layers of both kinds of attention, with one finished block and with the most
K3_LAYERS = (0, 1, 3, 12, 84, 85)


def _model(preset: str) -> ModelConfig:
    return model_from_config(json.loads(files("k3plan.compiler").joinpath(f"presets/{preset}.json").read_text()))


K3, LINEAR = _model("kimi-k3"), _model("kimi-linear-48b")


@dataclass(frozen=True)
class Setting:
    """Plans of one model, and the kernels whose regions are taken from them; ``label`` goes into the names."""

    label: str = ""
    model: ModelConfig = K3
    layers: tuple[int, ...] = K3_LAYERS
    tp: int = 16
    rows: tuple[tuple[int, int], ...] = ()  # sequences x rows of each
    choices: tuple[Choices, ...] = (SHARDED, WHOLE)
    numerics: Numerics = PLAIN
    kernels: str = "."  # regular expression that finds their ids
    both: bool = True  # of each form the fewest and the most bytes, or the most only
    merged: bool = True  # projections of the same rows

    def regions(self, sequences: int, query: int, choices: Choices) -> list[Region]:
        spec = Spec(
            model=self.model, layers=self.layers, parallel=Parallel(self.tp, "tp"),
            step=Step(sequences, query, 8192, 64, ("tokens",)), gpu="h200", numerics=self.numerics, profile="fused",
            choices=choices, buckets=(sequences,))
        graph = shard_graph(build_graph(spec), spec, algebra_of(spec))[0]
        graph = merge_projections(graph)[0] if self.merged else graph
        menu = Menu(kernel for kernel in KERNELS if re.search(self.kernels, kernel.id))
        return find_regions(graph, menu, arch="sm_90", rows=spec.step.rows)[0]


ROW_BY_ROW = ((1, 1), (64, 1))
# a few rows take other forms of these: verify rows, matrix units, several steps a block
FEW_ROWS = "kda|mla|experts|router_topk|skinny_linear|stripe|moe_tail|logits"
SETTINGS = (
    Setting(rows=ROW_BY_ROW),
    Setting(rows=((1, 8), (8, 1)), kernels=FEW_ROWS, both=False),
    Setting("fp8", numerics=FP8, rows=((1, 8),), choices=(WHOLE,), layers=(1, 3),
            kernels=r"\.(mla_(append|attend_out|query)|experts_gate_up_situ|experts_down_by_pair|kda_verify)$"),
    Setting("fp8", numerics=FP8, rows=((1, 1),), choices=(WHOLE,), layers=(1, 3),
            kernels=r"\.(mla_attend_out|experts_situ|kda_decode)$"),
    Setting(rows=((1, 8),), choices=(SLOTS,), layers=(0,), kernels="kda_.*_slots"),
    # two ranks have so many columns each that a block walks along the weight
    Setting("tp2", tp=2, rows=((8, 1),), choices=(SHARDED,), layers=(1,), kernels="stripe_gather|moe_tail"),
    Setting("tp1", tp=1, rows=((1, 1),), choices=(WHOLE,), layers=(0,), kernels="kda_decode"),
    Setting("tp32", tp=32, rows=((1, 1),), choices=(WHOLE,), layers=(0,), kernels="kda_decode"),
    Setting(rows=((1, 1), (8, 1), (64, 1)), choices=(WHOLE,), layers=(3,), kernels="skinny_linear_gate", merged=False),
    Setting("plain", replace(K3, expert_format="dense"), (1,), rows=((1, 1),), choices=(WHOLE,), kernels="dense"),
    Setting("linear", LINEAR, (0, 1, 3), 2, ROW_BY_ROW, (WHOLE,),
            kernels="add_norm|silu|dense|kda_decode|router_topk"),
    Setting("linear-mxfp4", replace(LINEAR, expert_format="mxfp4"), (1,), 2, ((1, 1),), (WHOLE,),
            kernels="experts_silu|experts_gate_up_silu$"),
)


@cache
def chosen(wanted: str = "") -> list[tuple[str, Region]]:
    """Names and regions to compile, those whose name the regular expression ``wanted`` finds."""
    found: dict[str, Region] = {}
    for setting in SETTINGS:
        for sequences, query in setting.rows:
            groups: dict[object, dict[str, Region]] = {}
            for choices in setting.choices:
                for region in setting.regions(sequences, query, choices):
                    name = "-".join(filter(None, (name_of(region, sequences, query), _messages(region), setting.label)))
                    groups.setdefault(_form(region), {}).setdefault(name, region)
            for group in groups.values():
                found |= _extremes(group, (min, max) if setting.both else (max,))
    return [(name, region) for name, region in found.items() if re.search(wanted, name)]


def _bounce() -> Any:
    import torch

    from k3plan.ops_triton.link_probe import bind_bounce

    return bind_bounce(torch.empty(1, dtype=torch.int64, device="meta"), 0, 0, 1000)


def _push() -> Any:
    import torch

    from k3plan.ops_triton.link_probe import bind_push

    return bind_push(torch.empty(1 << 24, dtype=torch.int32, device="meta"), 0)


# kernels that no menu has
PROBES: dict[str, Callable[[], Any]] = {"link_probe.bounce": _bounce, "link_probe.push": _push}


def chosen_probes(wanted: str = "") -> list[str]:
    return [name for name in PROBES if re.search(wanted, name)]


def _form(region: Region) -> object:
    """Regions of one form differ in their shapes: kernel, optional parts, what is read of the results."""
    return (region.kernel.id, tuple(node.op for node in region.nodes), len(region.outputs),
            tuple(region.graph.values[n].dtype for n in region.inputs))


def _extremes(group: dict[str, Region], picks: tuple[Any, ...]) -> Iterator[tuple[str, Region]]:
    def nbytes(name: str) -> tuple[int, int]:
        values = group[name].graph.values
        # inputs by '...' count by their number: a block more is another kernel, whatever the rows
        return sum(values[n].nbytes for n in group[name].inputs), len(group[name].inputs)

    for pick in picks:
        name = pick(group, key=nbytes)
        yield name, group[name]


def _messages(region: Region) -> str:
    """What the ranks exchange: the shapes that no weight tells."""
    values = region.graph.values
    sent = [values[node.inputs[0]].shape for node in region.nodes if "ranks" in node.attrs]
    return "-".join("x".join(map(str, shape[1:])) for shape in sent)
