"""Joins the compiler with the kernel menus, which it does not import itself."""
from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from importlib.resources import files
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .compiler.compile import compile_spec
from .compiler.device import load_device
from .compiler.kernel import KernelDef
from .compiler.ops import OPS
from .compiler.plan import LaunchPlan
from .compiler.reading.source import load_spec
from .compiler.tuning import Calibration, Tuned, Tuning

if TYPE_CHECKING:
    from .graphs.module.patch import Patched

MENUS = ("k3plan.ops_triton.kernels", "k3plan.ops_cute.kernels")


def kernels() -> list[KernelDef]:
    """All kernels of all menus."""
    return [k for menu in MENUS if find_spec(menu) for k in importlib.import_module(menu).KERNELS]


def tuning(gpu: str) -> Tuning:
    """The frozen measurements of all menus for ``gpu``; for kernels without any, how far the model was off on the GPU
    that its device table names."""
    other = load_device(gpu).calibrated_on
    return Tuning(tuned(gpu), None if other is None else Calibration(
        other, tuned(other), load_device(other)["launch_in_step_us"]))


def tuned(gpu: str) -> list[Tuned]:
    """The same, line by line."""
    lines = []
    for menu in MENUS:
        table = files(menu.rpartition(".")[0]) / "tuned" / f"{gpu}.json"
        if table.is_file():
            data = json.loads(table.read_text())
            lines += [Tuned(**{"source": data["source"], **line}) for line in data["lines"]]
    return lines


def compile_plan(path: str | os.PathLike[str], overrides: Sequence[str] = (), *,
                 collectives: bool = True) -> LaunchPlan:
    """Plan file to launch plan. ``overrides`` are as ``--set``: ``"step.query=4"``. Without ``collectives`` no kernel
    has one inside, so that any transport can carry them.

    Raises SpecError (the file), ShardError (a size does not divide), CoverError (no kernel for some op).
    """
    spec = load_spec(path, overrides)
    menu = kernels() if collectives else [k for k in kernels() if not _has_collective(k)]
    return compile_spec(spec, menu, tuning(spec.gpu))


def _has_collective(kernel: KernelDef) -> bool:
    return any(OPS[node.op].kind == "comm" for node in kernel.parsed.variants[0].nodes)


def compile_buckets(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> list[LaunchPlan]:
    """One launch plan for each of the plan file's ``capture.buckets`` (numbers of sequences), ascending."""
    buckets = load_spec(path, overrides).buckets
    return [compile_plan(path, [*overrides, f"step.sequences={bucket}"]) for bucket in buckets]


def patch(model: Any, *, sequences: int = 1, context: int = 4096, gpu: str = "cpu") -> Patched:
    """Makes the decoder layers of a transformers Kimi-Linear decode with launch plans; prompts stay in transformers.

    The plans are for ``sequences`` sequences of up to ``context`` tokens on ``gpu``. Use it as
    ``with k3plan.patch(model): model.generate(...)``, or keep the result and call ``restore()``.

    Raises BindError (another model, dtype or device), CoverError.
    """
    from .graphs.module.patch import patch_model

    return patch_model(model, lambda spec: compile_spec(spec, kernels(), tuning(spec.gpu)), sequences=sequences,
                       context=context, gpu=gpu)
