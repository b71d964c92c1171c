"""``k3plan run``: a plan, a checkpoint and some prompts to decoded text, its speed and its check."""
from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..compiler.errors import BindError
from ..compiler.plan import LaunchPlan
from .bind import Executable, bind
from .checkpoint import NOT_DECODED, Checkpoint
from .decode import Bound, Check, Generated, check, generate
from .reference import Reference

# below this many bytes a product is done before a second thread has woken
SMALL_WEIGHT = 4 << 20


@dataclass(frozen=True)
class Report:
    """What ``run`` prints, and whether the check passed (true when it was not asked for)."""

    text: str
    passed: bool
    tokens: list[list[int]]


def check_checkpoint(plan: LaunchPlan, folder: str | Path) -> str:
    """Raises CheckpointError with everything that is wrong, or says how much is right."""
    return _check(plan, Checkpoint(folder), folder)


def _check(plan: LaunchPlan, checkpoint: Checkpoint, folder: str | Path) -> str:
    note = checkpoint.check(plan.weights, ignore=(*NOT_DECODED, *_other_layers(plan)))
    rounded = f"\nnote: {note}" if note else ""
    return f"{folder}: ok, {len(checkpoint.tensors)} tensors, {len(plan.weights)} weights can be made{rounded}"


def run_plan(plan: LaunchPlan, folder: str | Path, count: int, prompts: Sequence[str] | None = None, *,
             verify: bool = True,
             bind_plan: Callable[[LaunchPlan, Checkpoint], Executable] | None = None) -> Report:
    """Decodes ``count`` tokens for each sequence of the plan, on this machine's CPU unless ``bind_plan`` says where.

    Raises CheckpointError, or BindError when the plan was made for another device or the prompts do not fit.
    """
    texts = _prompts(plan, prompts, count)
    if max(b.bytes for b in plan.buffers.values()) < SMALL_WEIGHT:
        torch.set_num_threads(1)
    checkpoint = Checkpoint(folder)
    lines = [_check(plan, checkpoint, folder)]
    started = time.perf_counter()
    executable = bind(plan, checkpoint, progress=True) if bind_plan is None else bind_plan(plan, checkpoint)
    lines.append(f"bound plan {plan.key} to {len(executable.ranks)} rank{'s' if len(executable.ranks) > 1 else ''} "
                 f"in {time.perf_counter() - started:.2f} s: {len(plan.launches)} launches a step")
    made = generate(Bound(executable), plan.spec.step, texts, count)
    lines += _show_text(texts, made)
    step_ms = 1e3 * made.seconds / max(made.steps, 1)
    lines.append(f"{made.tokens_per_second:.1f} tokens/s on this {_device_name(executable)} ({step_ms:.1f} ms a step)")
    if not verify:
        return Report("\n".join([*lines, "not checked (--no-verify)"]), True, made.tokens)
    result = check(Reference(plan.spec, checkpoint), plan.spec.step, texts, made.tokens,
                   plan.spec.numerics.activation)
    lines.append(_show_check(result))
    return Report("\n".join(lines), result.passed, made.tokens)


def _device_name(executable: Executable) -> str:
    return "CPU" if executable.ranks[0].arena.device.type == "cpu" else "GPU"


def _prompts(plan: LaunchPlan, given: Sequence[str] | None, count: int) -> list[list[int]]:
    """Token ids of each sequence, with room for ``count`` more; without any, short fixed ones that differ."""
    step, vocab, given = plan.spec.step, plan.spec.model.vocab, given or ()
    try:
        texts = [[int(token) for token in text.split(",")] for text in given]
    except ValueError:
        raise BindError(f"--prompt {' '.join(given)}: not token ids\n  fix: write numbers, such as 1,2,3") from None
    texts = texts or [[(7 * i + 11 * j + 3) % vocab for j in range(5 + i)] for i in range(step.sequences)]
    if len(texts) != step.sequences:
        raise BindError(f"{len(texts)} prompts for {step.sequences} sequences\n  fix: give --prompt once for each")
    unknown = [token for text in texts for token in text if not 0 <= token < vocab]
    if unknown:
        raise BindError(f"--prompt: the model has no token {unknown[0]}\n  fix: write numbers from 0 to {vocab - 1}")
    longest = max(map(len, texts))
    room = step.context - longest + 1  # the last token is not fed back
    if count > room:
        raise BindError(f"a prompt of {longest} tokens and {count} more do not fit the plan's context of "
                        f"{step.context}\n  fix: ask for {room} tokens at most, or compile with a larger step.context")
    return texts


def _show_text(prompts: Sequence[Sequence[int]], made: Generated) -> list[str]:
    return [f"sequence {i}: {' '.join(map(str, prompt))} | {' '.join(map(str, new))}"
            for i, (prompt, new) in enumerate(zip(prompts, made.tokens, strict=True))]


def _show_check(result: Check) -> str:
    verdict = "passed" if result.passed else "FAILED"
    return (f"check {verdict}: {result.equal} of {result.tokens} tokens are the fp32 reference's own choice, the "
            f"others trail it by {result.worst_gap:.3f} standard deviations of the logits or less "
            f"(allowed {result.tolerance})")


def _other_layers(plan: LaunchPlan) -> Mapping[str, None]:
    """Prefixes of the layers that the plan leaves out."""
    model = plan.spec.model
    return {f"{model.tensor_prefix}layers.{i}.": None for i in range(model.layers) if i not in plan.spec.layers}


