"""Greedy decoding with a bound plan: positions, slots, pages and acceptance, and the check against the oracle."""
from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ..compiler.errors import BindError
from ..compiler.spec import Step
from .bind import Executable
from .reference import Reference


class Steps(Protocol):
    """Something that runs one step of a plan's shape: an Executable or the Reference."""

    def step(self, **inputs: Tensor) -> dict[str, Tensor]: ...
    def reset(self, slot: int) -> None: ...


class Bound:
    """An Executable seen as ``Steps``."""

    def __init__(self, executable: Executable) -> None:
        self.executable = executable

    def step(self, **inputs: Tensor) -> dict[str, Tensor]:
        known = {n: t for n, t in inputs.items() if n in self.executable.plan.inputs}
        self.executable.write(**known)
        self.executable.run()
        return self.executable.outputs

    def reset(self, slot: int) -> None:
        self.executable.reset(slot)


@dataclass
class Batch:
    """The sequences of a plan: sequence i has slot i and its own pages. Makes the step inputs, row by row."""

    shape: Step
    length: list[int] = field(init=False)  # rows of each sequence that are final
    kept: list[int] = field(init=False)  # rows of its previous step that were accepted

    def __post_init__(self) -> None:
        self.length = [0] * self.shape.sequences
        self.kept = [1] * self.shape.sequences

    def inputs(self, rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Step inputs that feed ``rows[i]`` (0 to ``query`` tokens) to sequence i; the rest is padding."""
        shape, pages = self.shape, -(-self.shape.context // self.shape.page_size)
        tokens = torch.full((shape.sequences, shape.query), -1, dtype=torch.int32)
        positions = tokens.clone()
        for i, row in enumerate(rows):
            if len(row) > shape.query or self.length[i] + len(row) > shape.context:
                raise BindError(f"sequence {i}: {len(row)} rows at length {self.length[i]}, the plan serves "
                                f"{shape.query} rows a step and {shape.context} tokens")
            tokens[i, : len(row)] = torch.tensor(row, dtype=torch.int32)
            positions[i, : len(row)] = torch.arange(self.length[i], self.length[i] + len(row), dtype=torch.int32)
        slots = torch.tensor([i if row else -1 for i, row in enumerate(rows)], dtype=torch.int32)
        table = torch.arange(shape.sequences * pages, dtype=torch.int32).view(shape.sequences, pages)
        return {"tokens": tokens.flatten(), "positions": positions.flatten(), "slots": slots,
                "page_table": table, "accepted": torch.tensor(self.kept, dtype=torch.int32)}

    def accept(self, counts: Sequence[int]) -> None:
        """Says how many rows of the step just run are kept: 1 to what was fed, 0 for a sequence that sat out."""
        for i, count in enumerate(counts):
            if count:
                self.length[i] += count
                self.kept[i] = count


@dataclass(frozen=True)
class Generated:
    """Result of ``generate``. ``seconds`` covers the steps that made new tokens, not the prompt."""

    tokens: list[list[int]]
    seconds: float
    steps: int

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds if self.seconds else 0.0


def generate(runner: Steps, shape: Step, prompts: Sequence[Sequence[int]], count: int) -> Generated:
    """Feeds each prompt (``query`` tokens a step), then decodes ``count`` tokens greedily, one row a step."""
    if len(prompts) != shape.sequences or not all(prompts):
        raise BindError(f"{len(prompts)} prompts for {shape.sequences} sequences\n"
                        "  fix: pass one non-empty prompt each")
    for slot in range(shape.sequences):
        runner.reset(slot)
    batch = Batch(shape)
    waiting = [list(p) for p in prompts]
    made: list[list[int]] = [[] for _ in prompts]
    started, steps = time.perf_counter(), 0
    while any(len(m) < count for m in made):
        rows = [w[: shape.query] if w else [m[-1]] if len(m) < count else []
                for w, m in zip(waiting, made, strict=True)]
        fed_prompt = any(waiting)
        tokens = runner.step(**batch.inputs(rows))["tokens"].view(shape.sequences, shape.query)
        batch.accept([len(row) for row in rows])
        for i, row in enumerate(rows):
            waiting[i] = waiting[i][len(row) :]
            if row and not waiting[i]:
                made[i].append(int(tokens[i, len(row) - 1]))
        if fed_prompt:
            started, steps = time.perf_counter(), 0
        else:
            steps += 1
    new = [m[:count] for m in made]
    return Generated(new, time.perf_counter() - started, steps)


@dataclass(frozen=True)
class Check:
    """A decoded text held against the fp32 oracle, teacher-forced with the same tokens."""

    tokens: int
    equal: int  # tokens that are the oracle's own first choice
    worst_gap: float  # largest lead of the oracle's first choice over a decoded token, in logit std
    tolerance: float  # largest gap that rounding may explain

    @property
    def passed(self) -> bool:
        return self.worst_gap <= self.tolerance


# largest lead, in standard deviations of the logits, that an oracle may have over a rounded decode. The small
# checkpoint's bf16 logits are off by 5 % as a rule and 13 % at worst; a wrong token trails by about 3
TOLERANCE = {"bf16": 0.4, "fp32": 1e-3}


def check(reference: Reference, shape: Step, prompts: Sequence[Sequence[int]],
          made: Sequence[Sequence[int]], activation: str) -> Check:
    """Feeds prompts and decoded tokens to the oracle and looks at what it would have chosen at each."""
    for slot in range(shape.sequences):
        reference.reset(slot)
    batch = Batch(shape)
    texts = [[*prompt, *new] for prompt, new in zip(prompts, made, strict=True)]
    equal = total = 0
    worst = 0.0
    for at in range(max(map(len, texts)) - 1):
        rows = [[text[at]] if at < len(text) - 1 else [] for text in texts]
        logits = reference.step(**batch.inputs(rows))["logits"].unflatten(0, (shape.sequences, shape.query))
        batch.accept([len(row) for row in rows])
        for i, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
            if not rows[i] or at + 1 < len(prompt):
                continue
            row = logits[i, 0]
            gap = float((row.max() - row[text[at + 1]]) / row.std())
            total, equal, worst = total + 1, equal + (int(row.argmax()) == text[at + 1]), max(worst, gap)
    return Check(total, equal, worst, TOLERANCE[activation])
