"""Boundary 1: the resolved contents of a plan file, as frozen data. Reading files is ``reading/source.py``'s work."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import Origin
from .model import ModelConfig


@dataclass(frozen=True)
class Parallel:
    tp: int  # 1, 2, 4, 8, 16 or 32
    experts: str  # "tp": each expert split over the ranks; "ep": whole experts on each rank


@dataclass(frozen=True)
class Step:
    sequences: int
    query: int  # rows per sequence, 1..8; more than 1 is a verify step
    context: int  # longest sequence in tokens that the plan serves
    page_size: int  # tokens per page of the MLA cache
    outputs: tuple[str, ...]  # of "tokens", "logits", "hidden", "stream"
    source: str = "tokens"  # or "hidden": rows of the residual stream come in, there is no embedding

    @property
    def rows(self) -> int:
        return self.sequences * self.query


@dataclass(frozen=True)
class Numerics:
    activation: str  # "bf16" | "fp32"
    kv_cache: str  # "bf16" | "fp8_e4m3" | "fp32"
    kv_scale: float  # stored value = latent / kv_scale
    kda_state: str  # "fp32" | "bf16"
    expert_activation: str  # "bf16" | "mxfp8"


@dataclass(frozen=True)
class Choices:
    """What has more than one right answer; ``auto`` lets the planner cost each."""

    moe_front: str  # "auto" | "replicated" | "sharded"
    moe_tail: str  # "auto" | "all_reduce" | "stripe"
    mla_front: str  # "auto" | "replicated" | "sharded"
    side_stream: str = "off"  # or "auto": launches run beside others where that pays
    kda_rollback: str = "record"  # or "slots": a state for every row of a verify step


@dataclass(frozen=True)
class Spec:
    """One plan file, resolved. ``origins`` maps a dotted field name to where its value came from."""

    model: ModelConfig
    layers: tuple[int, ...]  # indices into the model's layers, ascending
    parallel: Parallel
    step: Step
    gpu: str  # key of the device table
    numerics: Numerics
    profile: str  # "auto" | "fused" | "stock"
    choices: Choices
    buckets: tuple[int, ...]
    origins: Mapping[str, Origin] = field(default_factory=dict, compare=False, repr=False)
