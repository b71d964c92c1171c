"""Driving a bound plan, or the oracle, row by row: what the decode tests share. Does not use ``Batch``."""
from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3plan.compiler.compile import compile_spec
from k3plan.compiler.reading.source import load_spec
from k3plan.compiler.spec import Spec, Step
from k3plan.graphs.bind import bind
from k3plan.graphs.decode import Bound, Steps
from k3plan.graphs.load import TensorSource

FP32 = {"activation": "fp32", "kv_cache": "fp32"}


def write_plan(folder: Path, config: Path, **sections: Mapping[str, Any]) -> Spec:
    """The Spec of a plan file over ``config``, on the CPU, fp32 unless said. JSON is YAML."""
    shape = {"sequences": 2, "context": 64, "page_size": 16, "outputs": ["tokens", "logits"]}
    plan = {
        "version": 1, "model": {"config": str(config)}, "target": {"gpu": "cpu"},
        "step": shape | dict(sections.pop("step", {})), "numerics": sections.pop("numerics", FP32),
        **sections,
    }
    path = folder / "plan.yaml"
    path.write_text(json.dumps(plan))
    return load_spec(path)


class Poisoned(Bound):
    """A bound plan whose arena and outputs are NaN before each step."""

    def step(self, **inputs: Tensor) -> dict[str, Tensor]:
        self.executable.poison()
        return super().step(**inputs)


def run_plan(spec: Spec, source: TensorSource) -> Poisoned:
    return Poisoned(bind(compile_spec(spec), source))


class Driver:
    """Sequences of a plan with slots and pages of the test's choosing; counts positions and acceptance."""

    def __init__(self, runner: Steps, shape: Step, slots: Sequence[int] | None = None,
                 pages: Tensor | None = None) -> None:
        self.runner, self.shape = runner, shape
        self.slots = list(slots or range(shape.sequences))
        each = -(-shape.context // shape.page_size)
        self.pages = pages if pages is not None else (
            torch.arange(shape.sequences * each, dtype=torch.int32).view(shape.sequences, each))
        self.length, self.kept = [0] * shape.sequences, [1] * shape.sequences
        for slot in self.slots:
            runner.reset(slot)

    def inputs(self, rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Feeds ``rows[i]`` to sequence i; an empty one sits out."""
        wide = self.shape.query
        tokens = [t for row in rows for t in (*row, *[-1] * (wide - len(row)))]
        positions = [p for start, row in zip(self.length, rows, strict=True)
                     for p in (*range(start, start + len(row)), *[-1] * (wide - len(row)))]
        slots = [slot if row else -1 for slot, row in zip(self.slots, rows, strict=True)]
        as_i32 = {"tokens": tokens, "positions": positions, "slots": slots, "accepted": self.kept}
        made = {name: torch.tensor(values, dtype=torch.int32) for name, values in as_i32.items()}
        return {**made, "page_table": self.pages}

    def step(self, rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Outputs [S, L, ...], copied."""
        outputs = self.runner.step(**self.inputs(rows))
        return {n: t.unflatten(0, (-1, self.shape.query)).clone() for n, t in outputs.items()}

    def accept(self, counts: Sequence[int]) -> None:
        for i, count in enumerate(counts):
            if count:
                self.length[i] += count
                self.kept[i] = count


def read_text(driver: Driver, texts: Sequence[Sequence[int]], vocab: int, seed: int | None = None
              ) -> list[Tensor]:
    """Logits [len, V] of each text. With a ``seed``, steps are ragged and accept a random part of their rows.

    Rows behind the accepted ones are wrong drafts, and a sequence sits a step out now and then. Without a
    seed each step feeds as many rows as it takes and accepts them all.
    """
    choose = random.Random(seed)
    found: list[list[Tensor]] = [[] for _ in texts]
    while any(len(f) < len(t) for f, t in zip(found, texts, strict=True)):
        rows, counts = [], []
        for text, done in zip(texts, found, strict=True):
            left = len(text) - len(done)
            fed = min(driver.shape.query, left)
            if seed is not None and fed:
                fed = 0 if choose.random() < 0.1 else choose.randint(1, driver.shape.query)
            count = min(fed, left) if seed is None or not fed else choose.randint(1, min(fed, left))
            true = list(text[len(done) : len(done) + count])
            rows.append(true + [choose.randrange(vocab) for _ in range(fed - count)])
            counts.append(count)
        if not any(counts):
            continue
        logits = driver.step(rows)["logits"]
        driver.accept(counts)
        for i, count in enumerate(counts):
            found[i] += list(logits[i, :count])
    return [torch.stack(f) if f else torch.empty(0, vocab) for f in found]
