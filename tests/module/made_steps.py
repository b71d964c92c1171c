"""Driving a module: specs, whole texts, and the inputs of a step for some of its sequences."""
from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3plan.compiler.compile import compile_spec
from k3plan.compiler.plan import LaunchPlan
from k3plan.compiler.reading.source import load_spec
from k3plan.compiler.spec import Spec
from k3plan.face import kernels, tuning
from k3plan.graphs.boxes import whole
from k3plan.graphs.load import TensorSource

CONTEXT, PAGE = 32, 16
PAGES = CONTEXT // PAGE


def spec_of(folder: Path, config: Path, *, gpu: str = "cpu", numerics: dict[str, Any] | None = None,
            tp: int = 1, layers: list[int] | None = None, profile: str = "auto", **step: Any) -> Spec:
    """A plan file over ``config``, fp32 on the CPU unless said."""
    shape = {"sequences": 2, "context": CONTEXT, "page_size": PAGE, "outputs": ["tokens", "logits"], **step}
    model = {"config": str(config)} | ({} if layers is None else {"layers": layers})
    plan = {"version": 1, "model": model, "target": {"gpu": gpu}, "step": shape,
            "parallel": {"tp": tp}, "profile": profile,
            "numerics": {"activation": "fp32", "kv_cache": "fp32"} if numerics is None else numerics}
    path = folder / f"plan-{abs(hash(json.dumps(plan)))}.yaml"
    path.write_text(json.dumps(plan))
    return load_spec(path)


def layer_plan(where: Path, folder: Path, layer: int, *, gpu: str = "cpu", only: str = "", **how: Any) -> LaunchPlan:
    """The plan of one layer, with the kernels of every menu whose id begins with ``only``."""
    spec = spec_of(where, folder, gpu=gpu, layers=[layer], source="hidden", outputs=["stream"], **how)
    return compile_spec(spec, [k for k in kernels() if k.id.startswith(only)], tuning(gpu))


def text_of(sequence: int, length: int, vocab: int = 512) -> list[int]:
    """Fixed token ids that differ by sequence."""
    return [(37 * sequence + 101 * i + 3) % vocab for i in range(length)]


def inputs_at(positions: Sequence[int], slots: Sequence[int], device: str = "cpu") -> dict[str, Tensor]:
    """One row of each sequence: token ``text_of(slot)[position]``, pages that belong to its slot."""
    rows = {"rows": [[text_of(s, p + 1)[p]] for s, p in zip(slots, positions, strict=True)],
            "positions": [[p] for p in positions], "slots": list(slots),
            "page_table": [[slot * PAGES + page for page in range(PAGES)] for slot in slots]}
    return {name: torch.tensor(values, dtype=torch.int32, device=device) for name, values in rows.items()}


def tensors_of(source: TensorSource, names: Sequence[str]) -> dict[str, Tensor]:
    """A state dict of checkpoint tensors."""
    found = {}
    for name in names:
        info = source.find(name)
        assert info is not None, name
        found[name] = source.read(name, whole(info.shape)).clone()
    return found
