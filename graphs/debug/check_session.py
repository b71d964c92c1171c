"""What the commands ``lint``, ``capture`` and ``verify`` bind, and what they print. Decides only where a plan can run.

A plan gets random weights and live inputs; on a GPU one rank of it over ``loopback``, on a CPU all of its ranks.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...compiler.errors import BindError, Origin
from ...compiler.plan import LaunchPlan
from ..bench_step import bind_random, live_inputs
from ..bind import Executable, bind
from ..random_weights import RandomSource
from .audit import Audit, audit_capture
from .codes import CODES
from .findings import Finding, failed, render, to_json
from .inspect import inspect
from .lint import lint, lint_plan
from .padding import check_padding
from .record import Record
from .verify import Verification, verify

Origins = Mapping[str, Origin]


@dataclass(frozen=True)
class Said:
    """What a command prints, and the findings in it."""

    head: str
    findings: tuple[Finding, ...]
    more: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([self.head, *(f"  {line}" for line in self.more), render(self.findings)])

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"head": self.head, "more": list(self.more), "findings": to_json(self.findings)}

    @property
    def failed(self) -> bool:
        return failed(self.findings)


def lint_bound(plan: LaunchPlan, origins: Origins, *, plan_only: bool = False, seed: int = 0) -> Said:
    """``lint`` over two eager steps where this machine can run the plan, else of the plan alone."""
    where = "" if plan_only else _where(plan)
    if not where:
        why = "as asked" if plan_only else f"no GPU here for a plan of {plan.spec.gpu}; two eager steps need one"
        return Said(f"plan {plan.key}, the plan alone ({why})", tuple(lint_plan(plan, origins=origins)))
    executable = _bind(plan, where, seed)

    def change() -> None:
        executable.write(**live_inputs(plan, seed + 1))

    found = lint(executable, change=change, origins=origins)
    return Said(f"plan {plan.key}, two eager steps on a {'GPU' if where == 'cuda' else 'CPU'}", tuple(found))


def capture_bound(plan: LaunchPlan, origins: Origins, *, live: bool = False, mode: str = "thread_local",
                  seed: int = 0) -> Said:
    """``audit_capture``. ``live`` warms up on live rows instead of padding, as a careless engine does."""
    audit: Audit = audit_capture(_on_gpu(plan, "capture", seed), pad=not live, mode=mode, origins=origins)
    if audit.captured is None:
        return Said(f"plan {plan.key}: the capture failed", audit.findings)
    return Said(f"plan {plan.key}: captured {len(plan.launches)} launches in {audit.captured.seconds:.2f} s",
                audit.findings)


def capture_recorded(record: Record, plan: LaunchPlan, origins: Origins) -> Said:
    """What a recorded capture tells of itself on any machine: launches that left no node, streams that hang loose.

    What broke a capture that failed is told only where it is made; a record is of one that did not.
    """
    found = [f for f in inspect(plan, record, origins).findings if "capture" in CODES[f.code].tools]
    return Said(f"plan {plan.key}: {len(record.launches)} launches captured on {record.machine.name} in "
                f"{record.capture_s:.2f} s", tuple(found), record.notes)


def verify_bound(plan: LaunchPlan, origins: Origins, *, replays: int, tolerance: float, live: int | None = None,
                 reference: bool = True, seed: int = 0) -> tuple[Verification, Said]:
    """``verify`` and ``check_padding``; of ``live`` sequences, the others are padding."""
    executable = _on_gpu(plan, "verify", seed)
    if live is not None:
        _pad(executable, live)
    verification = verify(executable, replays=replays, tolerance=tolerance, reference=reference, origins=origins)
    padding = check_padding(executable, origins)
    found = (*verification.findings, *padding)
    tried = tuple(f"{name}: {'right' if right else 'wrong as well'}" for name, right in verification.variants.items())
    return verification, Said(f"plan {plan.key}: {verification.verdict}", found, tried)


def _where(plan: LaunchPlan) -> str:
    """"cuda", "cpu", or "" where this machine cannot run the plan."""
    if plan.spec.gpu == "cpu":
        return "cpu"
    return "cuda" if torch.cuda.is_available() else ""


def _bind(plan: LaunchPlan, where: str, seed: int) -> Executable:
    if where == "cuda":
        return bind_random(plan, seed)[0]
    executable = bind(plan, RandomSource.of([w.recipe for w in plan.weights.values()], seed))
    executable.write(**live_inputs(plan, seed))
    return executable


def _on_gpu(plan: LaunchPlan, command: str, seed: int) -> Executable:
    if _where(plan) != "cuda":
        raise BindError(f"k3plan graph {command} needs an NVIDIA GPU and a plan for it; this is a plan of "
                        f"{plan.spec.gpu} and torch sees {torch.cuda.device_count()} GPUs\n"
                        "  fix: run it on the machine with the GPU, with --set target.gpu of that GPU")
    return _bind(plan, "cuda", seed)


def _pad(executable: Executable, live: int) -> None:
    """Turns the sequences after the first ``live`` into padding."""
    step = executable.plan.spec.step
    for rank in executable.ranks:
        for name in ("tokens", "positions", "slots", "page_table"):
            if name in executable.plan.inputs:
                tensor = rank.tensors[name]
                tensor[live * (tensor.shape[0] // step.sequences):] = -1
