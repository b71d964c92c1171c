"""What a pass says about its work."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Note:
    """One thing that a pass did, or did not do, and why."""

    stage: str
    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.stage}: {self.what} ({self.why})"
