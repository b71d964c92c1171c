"""What two values of a plan file say about each other. Divisibility by tp is the sharding pass's concern."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .planfile import MAX_ROWS

Finding = tuple[str, str, str]  # field to point at, what is wrong, what to do


@dataclass(frozen=True)
class Check:
    """``test`` gets the values of ``needs``, in order, and runs only when all of them are sound."""

    needs: tuple[str, ...]
    test: Callable[..., Finding | None]


def find_conflicts(values: Mapping[str, Any]) -> list[Finding]:
    """Every failed check. ``values`` holds the fields that are sound by themselves."""
    found = []
    for check in CHECKS:
        if all(name in values for name in check.needs):
            finding = check.test(*(values[name] for name in check.needs))
            found += [finding] if finding else []
    return found


def _one_model(preset: str | None, config: str | None) -> Finding | None:
    if preset and config:
        return "model.config", "`model` has both `preset` and `config`", "delete one of the two"
    if not preset and not config:
        return "model", "`model` names no model", "add `preset: kimi-k3` or `config: path/to/config.json`"
    return None


def _rows(sequences: int, query: int) -> Finding | None:
    if sequences * query <= MAX_ROWS:
        return None
    said = f"{sequences} sequences of {query} rows are {sequences * query} rows; a step has at most {MAX_ROWS}"
    return "step.sequences", said, f"write `sequences: {MAX_ROWS // query}` or less"


def _context_pages(context: int, page_size: int) -> Finding | None:
    if context % page_size == 0:
        return None
    said = f"`step.context` is {context}, which is not a multiple of `step.page_size` {page_size}"
    return "step.context", said, f"write `context: {-(-context // page_size) * page_size}`"


def _context_rows(context: int, query: int) -> Finding | None:
    if query <= context:
        return None
    said = f"`step.query` is {query}, but `step.context` ends at {context} tokens"
    return "step.query", said, "raise `context`: it counts the rows of the step too"


def _outputs(outputs: list[str]) -> Finding | None:
    return _unique("step.outputs", outputs)


def _layers(layers: list[int] | None) -> Finding | None:
    return _ascending("model.layers", layers or [])


def _buckets(buckets: list[int]) -> Finding | None:
    return _ascending("capture.buckets", buckets)


def _bucket_rows(buckets: list[int], query: int) -> Finding | None:
    if max(buckets) * query <= MAX_ROWS:
        return None
    said = f"a bucket of {max(buckets)} sequences has {max(buckets) * query} rows at `step.query` {query}; " \
           f"a step has at most {MAX_ROWS}"
    return "capture.buckets", said, f"end the list at {MAX_ROWS // query}"


def _scale(kv_cache: str, kv_scale: float) -> Finding | None:
    if kv_scale == 1 or kv_cache == "fp8_e4m3":
        return None
    said = f"`numerics.kv_scale` is {kv_scale:g}, but a {kv_cache} cache is not scaled"
    return "numerics.kv_scale", said, "delete `kv_scale`, or write `kv_cache: fp8_e4m3`"


def _fp32_cache(activation: str, kv_cache: str) -> Finding | None:
    if activation != "fp32" or kv_cache in ("fp32", "bf16"):
        return None
    said = f"`numerics.kv_cache` {kv_cache} loses what `numerics.activation` fp32 keeps"
    return "numerics.kv_cache", said, "write `kv_cache: fp32` or `kv_cache: bf16`"


def _fp32_experts(activation: str, expert_activation: str) -> Finding | None:
    if activation != "fp32" or expert_activation == "bf16":
        return None
    said = f"`numerics.expert_activation` {expert_activation} loses what `numerics.activation` fp32 keeps"
    return "numerics.expert_activation", said, "write `activation: bf16`, or delete `expert_activation`"


def _unique(path: str, entries: list[str]) -> Finding | None:
    twice = [entry for number, entry in enumerate(entries) if entry in entries[:number]]
    return (path, f"`{path}` lists {twice[0]} twice", f"list {twice[0]} once") if twice else None


def _ascending(path: str, numbers: list[int]) -> Finding | None:
    if all(a < b for a, b in pairwise(numbers)):
        return None
    name = path.rpartition(".")[2]
    said = f"`{path}` must ascend, without repeats"
    return path, said, f"write `{name}: {sorted(set(numbers))}`"


CHECKS = (
    Check(("model.preset", "model.config"), _one_model),
    Check(("model.layers",), _layers),
    Check(("step.sequences", "step.query"), _rows),
    Check(("step.context", "step.page_size"), _context_pages),
    Check(("step.context", "step.query"), _context_rows),
    Check(("step.outputs",), _outputs),
    Check(("numerics.kv_cache", "numerics.kv_scale"), _scale),
    Check(("numerics.activation", "numerics.kv_cache"), _fp32_cache),
    Check(("numerics.activation", "numerics.expert_activation"), _fp32_experts),
    Check(("capture.buckets",), _buckets),
    Check(("capture.buckets", "step.query"), _bucket_rows),
)
