"""The shape of a plan file, as pydantic models. Decides types, ranges, names and defaults of single values.

What two values say about each other is in ``spec_checks``. The descriptions here are the hover texts of
``schema/plan.schema.json``; write it with ``python -m k3plan.compiler.reading.planfile --write``.
"""
from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

FOLDER = Path(__file__).parents[1]
SCHEMA_FILE = FOLDER / "schema" / "plan.schema.json"
VERSION = 1
MAX_QUERY = 8  # a verify step of 7 draft tokens
MAX_ROWS = 64 * MAX_QUERY


def names_in(folder: str) -> tuple[str, ...]:
    """Names of the JSON files in a folder of this package, sorted; a folder without files has none."""
    return tuple(sorted(path.stem for path in (FOLDER / folder).glob("*.json")))


def _whole(value: Any) -> Any:
    # a Literal of numbers lets true and 16.0 pass, because they compare equal to 1 and 16
    if type(value) is not int:
        raise PydanticCustomError("int_type", "must be a whole number")
    return value


Whole = BeforeValidator(_whole)
Preset: Any = Literal[names_in("presets") or ("",)]
Gpu: Any = Literal[names_in("devices") or ("b200", "cpu", "gb300", "h200")]


class Section(BaseModel):
    """A mapping of the plan file: unknown keys are errors, and no value is converted."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ModelSection(Section):
    """Which model. Give either `preset` or `config`."""

    preset: Preset | None = Field(default=None, description="A model that k3plan ships the config.json of.")
    config: str | None = Field(
        default=None, description="Path of a Hugging Face config.json, or of its folder, relative to this file."
    )
    layers: list[Annotated[int, Field(ge=0)]] | None = Field(
        default=None, min_length=1,
        description="Plan these layers only: 0-based, ascending. Default: all layers.",
    )


class ParallelSection(Section):
    """How the model is split over GPUs."""

    tp: Annotated[Literal[1, 2, 4, 8, 16, 32], Whole] = Field(
        default=1, description="Ranks of the tensor-parallel group."
    )
    experts: Literal["tp", "ep"] = Field(
        default="tp", description="tp: each routed expert is split over the ranks. ep: each rank holds whole experts."
    )


class StepSection(Section):
    """What one decode step computes."""

    sequences: int = Field(default=1, ge=1, le=MAX_ROWS, description="Sequences in the step.")
    query: int = Field(
        default=1, ge=1, le=MAX_QUERY,
        description="Rows of each sequence. More than 1 is a verify step of query - 1 draft tokens.",
    )
    context: int = Field(
        default=8192, ge=1, description="Longest sequence in tokens that is served; a multiple of page_size."
    )
    page_size: Annotated[Literal[16, 32, 64, 128], Whole] = Field(
        default=64, description="Tokens in a page of the MLA cache."
    )
    outputs: list[Literal["tokens", "logits", "hidden", "stream"]] = Field(
        default=["tokens"], min_length=1,
        description="What a step hands back. stream: the residual stream behind the last layer, before the head.",
    )
    source: Literal["tokens", "hidden"] = Field(
        default="tokens",
        description="What a step reads. hidden: rows of the residual stream, and the AttnRes blocks that are finished.",
    )


class TargetSection(Section):
    """What the plan runs on."""

    gpu: Gpu = Field(default="gb300", description="A device that k3plan has a table of measurements for.")


class NumericsSection(Section):
    """Precision. Part of the contract: a kernel that cannot honour it is not used."""

    activation: Literal["bf16", "fp32"] = Field(default="bf16", description="Type of activations between kernels.")
    kv_cache: Literal["bf16", "fp8_e4m3", "fp32"] = Field(default="bf16", description="Type of the MLA latent cache.")
    kv_scale: float = Field(
        default=1.0, gt=0, allow_inf_nan=False,
        description="A cached value is stored as value / kv_scale. Other than 1 only with fp8_e4m3.",
    )
    kda_state: Literal["fp32", "bf16"] = Field(default="fp32", description="Type of the KDA recurrent state.")
    expert_activation: Literal["bf16", "mxfp8"] = Field(
        default="bf16", description="Type in which routed experts read their input."
    )


class ChoicesSection(Section):
    """What has more than one right answer. `auto` keeps the cheapest for the target."""

    moe_front: Literal["auto", "replicated", "sharded"] = Field(
        default="auto", description="Router and latent down-projection: computed by every rank, or split and gathered."
    )
    moe_tail: Literal["auto", "all_reduce", "stripe"] = Field(
        default="auto", description="How expert outputs meet: one all-reduce, or rows split, up-projected and gathered."
    )
    mla_front: Literal["auto", "replicated", "sharded"] = Field(
        default="auto", description="Low-rank MLA projections: computed by every rank, or split and gathered."
    )
    side_stream: Literal["off", "auto"] = Field(
        default="off", description="auto: launches that nothing waits for yet run beside others, where that pays."
    )
    kda_rollback: Literal["record", "slots"] = Field(
        default="record", description="How a verify step takes rows back: one state and a record, or a state a row."
    )


class CaptureSection(Section):
    """What is captured as CUDA graphs."""

    buckets: list[Annotated[int, Field(ge=1)]] = Field(
        default=[1, 2, 4, 8, 16, 32, 64], min_length=1,
        description="Sequence counts that get a CUDA graph of their own: ascending.",
    )


class PlanFile(Section):
    """A k3plan plan file: one decode step of one model on one kind of GPU."""

    version: Annotated[Literal[1], Whole] = Field(description="Version of this file format.")
    extends: str | list[str] | None = Field(
        default=None,
        description="Plan files to start from, relative to this one. Merged deeply: later wins, this file last.",
    )
    model: ModelSection = Field(description="Which model.")
    parallel: ParallelSection = Field(default=ParallelSection(), description="How it is split.")
    step: StepSection = Field(default=StepSection(), description="What one step computes.")
    target: TargetSection = Field(default=TargetSection(), description="What it runs on.")
    numerics: NumericsSection = Field(default=NumericsSection(), description="Precision.")
    profile: Literal["auto", "fused", "stock"] = Field(
        default="auto",
        description="auto: the cheapest cover. fused: the fewest launches. stock: one kernel an op, the baseline.",
    )
    choices: ChoicesSection = Field(default=ChoicesSection(), description="Algebra to fix by hand.")
    capture: CaptureSection = Field(default=CaptureSection(), description="What is captured.")


@cache
def leaves() -> dict[str, FieldInfo]:
    """Every value of a plan file by dotted name, in file order."""
    found: dict[str, FieldInfo] = {}
    for name, info in PlanFile.model_fields.items():
        section = info.annotation
        if isinstance(section, type) and issubclass(section, Section):
            found |= {f"{name}.{field}": inner for field, inner in section.model_fields.items()}
        else:
            found[name] = info
    return found


def sections() -> dict[str, tuple[str, ...]]:
    """Field names of each section; the top level is the section with the empty name."""
    found: dict[str, list[str]] = {"": list(PlanFile.model_fields)}
    for path in leaves():
        section, _, name = path.rpartition(".")
        if section:
            found.setdefault(section, []).append(name)
    return {section: tuple(names) for section, names in found.items()}


def allowed(path: str) -> tuple[Any, ...]:
    """The values that a field is limited to, or nothing. For a list, those of its elements."""
    pending = [leaves()[path].annotation] if path in leaves() else []
    while pending:
        annotation = pending.pop()
        if get_origin(annotation) is Literal:
            return get_args(annotation)
        pending += get_args(annotation)
    return ()


def default(path: str) -> Any:
    """What a field is when no file says; ``None`` for a required one."""
    value = leaves()[path].get_default(call_default_factory=False)
    return None if leaves()[path].is_required() else value


def plan_schema() -> dict[str, Any]:
    """JSON Schema of a plan file, for editors."""
    schema = PlanFile.model_json_schema()
    # a file that extends another may leave out what that one says
    schema.pop("required")
    schema["anyOf"] = [{"required": ["version", "model"]}, {"required": ["extends"]}]
    schema = _without_titles(schema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "k3plan plan file", **schema}


def _without_titles(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_titles(entry) for entry in node]
    if isinstance(node, dict):
        drop = isinstance(node.get("title"), str)
        return {key: _without_titles(value) for key, value in node.items() if not (drop and key == "title")}
    return node


def schema_text() -> str:
    """The content of ``schema/plan.schema.json``."""
    return json.dumps(plan_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m k3plan.compiler.reading.planfile --write")
    SCHEMA_FILE.parent.mkdir(exist_ok=True)
    SCHEMA_FILE.write_text(schema_text())
    sys.stdout.write(f"wrote {SCHEMA_FILE}\n")
