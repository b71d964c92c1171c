"""Every error a user can meet, one class each. The text says what, where in the user's file, and what to do."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """Where a value came from: a file position, the HF config, a preset, a default or a flag."""

    kind: str  # "yaml" | "config" | "preset" | "default" | "flag" | "derived"
    file: str = ""
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        if self.file and self.line:
            return f"{self.file}:{self.line}:{self.column}"
        return self.file or self.kind


@dataclass(frozen=True)
class Problem:
    """One finding in a plan file or a config: ``message`` says what, ``hint`` says what to do."""

    message: str
    where: Origin
    excerpt: str = ""  # source line and caret line, joined by a newline
    hint: str = ""

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.message}"]
        lines += [f"    {line}" for line in self.excerpt.splitlines()]
        if self.hint:
            lines.append(f"  fix: {self.hint}")
        return "\n".join(lines)


class K3PlanError(Exception):
    """Base of all errors that a user can cause or cure."""


class SpecError(K3PlanError):
    """A plan file or model config is wrong. Carries every problem found, not only the first."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        super().__init__("\n".join([*(str(p) for p in problems), count]))


class ShardError(K3PlanError):
    """A dimension does not divide over the ranks, or an op cannot take its inputs as they are split."""


class GraphError(K3PlanError):
    """A graph broke an invariant between two passes. This is a defect of k3plan: report it."""


class CoverError(K3PlanError):
    """No kernel of the menu can compute some node for this target; the text lists each refusal."""


class PlanError(K3PlanError):
    """A plan file is not a plan, has another version, or its key does not match its content."""


class CheckpointError(K3PlanError):
    """A checkpoint is incomplete, corrupt, or does not hold what the plan reads."""


class ConversionWarning(UserWarning):
    """A checkpoint stores floats in a wider dtype than the plan reads: they are rounded. The text names them."""


class BindError(K3PlanError):
    """A plan cannot be bound on this machine, or was called with inputs it was not planned for."""


class RecordError(K3PlanError):
    """A recorded capture is not one, has another version, or is of another plan."""


class RankError(K3PlanError):
    """One of several ranks differs, refused, or is gone. The text names it; every other rank stops too."""


class AddressError(K3PlanError):
    """A captured step would read memory that has moved, was released, or is older than the parameters."""


class DebugError(K3PlanError):
    """A command of the debugger was asked for something that it cannot do."""
