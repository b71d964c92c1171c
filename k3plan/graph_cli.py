"""``k3plan graph``: commands that look into a captured graph. Parses, calls, prints, as ``cli.py`` does."""
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from .compiler.plan import LaunchPlan
    from .graphs.debug.record import Record

graph_app = typer.Typer(no_args_is_help=True, help="Look into a captured graph: inspect, time, diff and more.")

RecordFile = Annotated[Path, typer.Argument(help="Capture that graph record --out wrote.", show_default=False)]
PlanOption = Annotated[Path | None, typer.Option("--plan", help="Its launch plan; else CAPTURE.plan.json.")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


def load_capture(record: Path, plan: Path | None) -> tuple[Record, LaunchPlan]:
    """A recorded capture and the plan that was captured. Raises RecordError when they do not belong together."""
    from .compiler.errors import RecordError
    from .compiler.plan import load_plan
    from .graphs.debug.record import load_record

    found, where = load_record(record), plan or plan_path(record)
    loaded = load_plan(where)
    if loaded.key != found.plan_key:
        raise RecordError(f"{record}: a capture of plan {found.plan_key}, {where} is plan {loaded.key}\n"
                          "  fix: pass the plan that was captured with --plan")
    return found, loaded


def plan_path(record: Path) -> Path:
    """Where ``graph record`` writes the plan of a capture."""
    return record.with_suffix(".plan.json")


@graph_app.command()
def diff(old: Annotated[Path, typer.Argument(help="Launch plan or capture.", show_default=False)],
         new: Annotated[Path, typer.Argument(help="Launch plan or capture.", show_default=False)],
         json_: AsJson = False) -> None:
    """Say what changed from one plan or capture to another, and whether a captured graph could be updated in place."""
    from .graphs.debug.diff import diff_files

    difference = diff_files(old, new)
    typer.echo(difference.to_json() if json_ else str(difference))
    raise typer.Exit(int(not difference.equal))
