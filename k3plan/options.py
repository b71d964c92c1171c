"""Arguments and options that several commands have, and what their texts mean."""
from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PlanFile = Annotated[Path, typer.Argument(help="Plan file (YAML).", show_default=False)]
PlanJson = Annotated[Path, typer.Argument(help="Launch plan that compile --out wrote.", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a value.")]


def sizes_of(rows: str) -> tuple[tuple[int, int], ...]:
    """"8x1,1x8" as numbers of sequences and verify rows. Raises BadParameter."""
    found = []
    for size in rows.split(","):
        sequences, _, query = size.partition("x")
        if not (sequences.isdecimal() and query.isdecimal()):
            raise typer.BadParameter(f"{size!r} is not SEQUENCES x ROWS, such as 8x1", param_hint="--rows")
        found.append((int(sequences), int(query)))
    return tuple(found)


def size_settings(sequences: int, query: int) -> list[str]:
    """The same of one step, as ``--set`` has it."""
    return [f"step.sequences={sequences}", f"step.query={query}"]
