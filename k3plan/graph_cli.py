"""``k3plan graph``: commands that look into a captured graph. Parses, calls, prints, as ``cli.py`` does."""
from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import Overrides, PlanFile, size_settings, sizes_of

if TYPE_CHECKING:
    from .compiler.errors import Origin
    from .compiler.plan import LaunchPlan
    from .graphs.debug.check_session import Said

graph_app = typer.Typer(no_args_is_help=True, help="Look into a captured graph: inspect, time, diff and more.")

RecordFile = Annotated[Path, typer.Argument(help="Capture that graph record --out wrote.", show_default=False)]
PlanOption = Annotated[Path | None, typer.Option("--plan", help="Its launch plan; else CAPTURE.plan.json.")]
Rows = Annotated[str, typer.Option("--rows", help="Sequences x verify rows, such as 1x8; else the plan file's.")]
YamlOption = Annotated[Path | None, typer.Option("--yaml", help="Its plan file, for the lines that findings name.")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


def load_origins(plan_file: Path | None, settings: list[str] | None = None) -> dict[str, Origin]:
    """Where a plan file says what; nothing without one."""
    from .compiler.reading.source import load_spec

    return dict(load_spec(plan_file, settings or []).origins) if plan_file else {}


def _row_settings(rows: str) -> list[str]:
    """``--rows`` of one size as settings; none without it. Raises BadParameter."""
    found = sizes_of(rows) if rows else ()
    if len(found) > 1:
        raise typer.BadParameter("one size, such as 8x1", param_hint="--rows")
    return [setting for size in found for setting in size_settings(*size)]


@graph_app.command()
def diff(old: Annotated[Path, typer.Argument(help="Launch plan or capture.", show_default=False)],
         new: Annotated[Path, typer.Argument(help="Launch plan or capture.", show_default=False)],
         json_: AsJson = False) -> None:
    """Say what changed from one plan or capture to another, and whether a captured graph could be updated in place."""
    from .graphs.debug.diff import diff_files

    difference = diff_files(old, new)
    typer.echo(difference.to_json() if json_ else str(difference))
    raise typer.Exit(int(not difference.equal))


@graph_app.command()
def record(plan: PlanFile,
           out: Annotated[Path, typer.Option(help="Capture to write; its plan goes beside it.")],
           set_: Overrides = None, rows: Rows = "",
           buckets: Annotated[bool, typer.Option(
               "--buckets", help="Every bucket of the plan file: OUT with the bucket in its name.")] = False,
           timed: Annotated[bool, typer.Option("--time/--no-time", help="Time each launch as well.")] = True,
           json_: AsJson = False) -> None:
    """Capture a step with random weights on this GPU and write down its graph, for every other command here."""
    from .face import compile_buckets, compile_plan
    from .graphs.debug.record import plan_path
    from .graphs.debug.session import bucket_costs, bucket_table, record_buckets, record_random

    settings = [*(set_ or ()), *_row_settings(rows)]
    plans = compile_buckets(plan, settings) if buckets else [compile_plan(plan, settings)]
    by_key = {one.key: one for one in plans}
    found = list(record_buckets(plans, timed=timed, say=partial(typer.echo, err=True)) if buckets
                 else [record_random(plans[0], timed=timed)])
    out.parent.mkdir(parents=True, exist_ok=True)
    for one in found:
        path = out.with_name(f"{out.stem}-{one.bucket}.json") if buckets else out
        one.save(path)
        by_key[one.plan_key].save(plan_path(path))
        typer.echo(f"{path} and {plan_path(path).name}: {len(one.nodes)} nodes of {len(one.launches)} launches",
                   err=json_)
    typer.echo(json.dumps(bucket_costs(found), indent=1) if json_ else bucket_table(found))


@graph_app.command()
def inspect(captures: Annotated[list[Path], typer.Argument(help="Captures of one model.", show_default=False)],
            plan: PlanOption = None, yaml: YamlOption = None, json_: AsJson = False) -> None:
    """Hold a capture against its plan: nodes, launches, geometry, edges, streams. Exits with 1 on an error found."""
    from .graphs.debug.findings import failed, render, to_json
    from .graphs.debug.inspect import compare_buckets
    from .graphs.debug.inspect import inspect as examine
    from .graphs.debug.record import load_capture

    loaded = [load_capture(path, plan) for path in captures]
    origins = load_origins(yaml)
    found = [examine(its_plan, its_record, origins) for its_record, its_plan in loaded]
    together = compare_buckets([its_record for its_record, _ in loaded]) if len(loaded) > 1 else []
    if json_:
        typer.echo('{"captures": [' + ",\n".join(one.to_json() for one in found) + '],\n"buckets": '
                   + json.dumps(to_json(together), indent=1) + "}")
    else:
        typer.echo("\n\n".join([*map(str, found), *([f"buckets\n{render(together)}"] if together else [])]))
    raise typer.Exit(int(failed([*together, *(f for one in found for f in one.findings)])))


@graph_app.command("time")
def time_(capture: RecordFile, plan: PlanOption = None, yaml: YamlOption = None,
          by: Annotated[str, typer.Option(help="kind or launch.")] = "kind", json_: AsJson = False) -> None:
    """Say where the time of a recorded step went: us, bytes, floor and gap, and what the plan expected."""
    from .graphs.debug.record import load_capture
    from .graphs.debug.time_table import show_times, times_json

    found, its_plan = load_capture(capture, plan)
    say = times_json if json_ else show_times
    typer.echo(say(its_plan, found, by, load_origins(yaml)))


@graph_app.command()
def report(source: Annotated[Path, typer.Argument(help="Capture, launch plan or plan file.", show_default=False)],
           out: Annotated[Path | None, typer.Option(help="HTML file to write; else report.html.")] = None,
           plan: PlanOption = None, set_: Overrides = None,
           yaml: Annotated[Path | None, typer.Option(help="The plan file, for the lines of its values.")] = None,
           findings: Annotated[list[Path] | None, typer.Option(help="What another command found, as --json.")] = None,
           perfetto: Annotated[Path | None, typer.Option(help="Trace for Perfetto to write.")] = None,
           dot: Annotated[Path | None, typer.Option(help="Data flow for Graphviz to write.")] = None,
           layer: Annotated[int | None, typer.Option(help="Layer of --dot; else one of each kind.")] = None,
           whole: Annotated[bool, typer.Option("--whole", help="All layers in --dot.")] = False,
           svg: Annotated[Path | None, typer.Option(help="Timeline of one layer of each kind to write.")] = None,
           json_: AsJson = False) -> None:
    """Write a step as one HTML page: timeline with floors, data flow, roofline, memory, findings, every reason.

    A capture gives measured times; a launch plan or a plan file gives predicted ones."""
    from .face import compile_plan
    from .graphs.debug.report import Sources, write_all

    if (layer is not None or whole) and dot is None:
        raise typer.BadParameter("--layer and --whole are of --dot FILE")
    is_plan_file = source.suffix in (".yaml", ".yml")
    if not (is_plan_file or yaml):
        _refuse(set_ or (), source)
    compiled = compile_plan(source, set_ or ()) if is_plan_file else None
    sources = Sources.read(source, compiled, plan, yaml or (source if is_plan_file else None), set_ or (),
                           findings or ())
    if json_:
        typer.echo(sources.to_json())
    wanted = {"html": out or (None if json_ else Path("report.html")), "perfetto": perfetto, "dot": dot, "svg": svg}
    for line in write_all(sources, wanted, layer=layer, whole=whole):
        typer.echo(line, err=json_)


PlanOrYaml = Annotated[Path, typer.Argument(help="Plan file (YAML) or launch plan; for capture a record too.",
                                            show_default=False)]


def _plan_and_origins(path: Path, settings: list[str]) -> tuple[LaunchPlan, dict[str, Origin]]:
    """The plan, and where its plan file says what; a launch plan knows no lines."""
    from .compiler.plan import load_plan
    from .face import compile_plan

    if path.suffix in (".yaml", ".yml"):
        return compile_plan(path, settings), load_origins(path, settings)
    _refuse(settings, path)
    return load_plan(path), {}


def _refuse(settings: Sequence[str], path: Path) -> None:
    """Raises BadParameter: settings for what was compiled already."""
    if settings:
        raise typer.BadParameter(f"{path} is no plan file: what it was compiled with stays")


def _say(said: Said, as_json: bool) -> None:
    typer.echo(json.dumps(said.as_json(), indent=1) if as_json else str(said))
    raise typer.Exit(int(said.failed))


@graph_app.command()
def lint(plan: PlanOrYaml, set_: Overrides = None, rows: Rows = "",
         plan_only: Annotated[bool, typer.Option("--plan-only", help="Run nothing.")] = False,
         json_: AsJson = False) -> None:
    """Run two eager steps and say what would break a capture or be frozen into it. Exits with 1 on an error found."""
    from .graphs.debug.check_session import lint_bound

    compiled, origins = _plan_and_origins(plan, [*(set_ or ()), *_row_settings(rows)])
    _say(lint_bound(compiled, origins, plan_only=plan_only), json_)


@graph_app.command()
def capture(plan: PlanOrYaml, set_: Overrides = None, rows: Rows = "", yaml: YamlOption = None,
            live: Annotated[bool, typer.Option("--live", help="Warm up on live rows instead of padding.")] = False,
            mode: Annotated[str, typer.Option(help="CUDA's error mode.")] = "thread_local",
            json_: AsJson = False) -> None:
    """Capture a step and name the first launch that broke the capture, and what still works after it.

    Of a recorded capture: which launches are not in it, and which streams hang loose. That needs no GPU."""
    from .graphs.debug.check_session import capture_bound, capture_recorded
    from .graphs.debug.record import is_capture, load_capture

    if is_capture(plan):
        _refuse([*(set_ or ()), *_row_settings(rows)], plan)
        _say(capture_recorded(*load_capture(plan, None), load_origins(yaml)), json_)
    compiled, origins = _plan_and_origins(plan, [*(set_ or ()), *_row_settings(rows)])
    _say(capture_bound(compiled, origins, live=live, mode=mode), json_)


@graph_app.command()
def verify(plan: PlanOrYaml, set_: Overrides = None, rows: Rows = "",
           replays: Annotated[int, typer.Option(help="Replays to compare.", min=1)] = 3,
           tolerance: Annotated[float, typer.Option(help="Relative rms error; 0 asks for equal bytes.")] = 0.0,
           live: Annotated[int | None, typer.Option(help="Live sequences; the others are padding.")] = None,
           reference: Annotated[bool, typer.Option(help="Hold each launch against its ops as well.")] = True,
           json_: AsJson = False) -> None:
    """Hold replays against the eager step and the reference, and padding against what padding may do."""
    from .graphs.debug.check_session import verify_bound

    compiled, origins = _plan_and_origins(plan, [*(set_ or ()), *_row_settings(rows)])
    _, said = verify_bound(compiled, origins, replays=replays, tolerance=tolerance, live=live, reference=reference)
    _say(said, json_)


@graph_app.command(context_settings={"ignore_unknown_options": True})
def crash(command: Annotated[list[str], typer.Argument(help="The command, after --.", show_default=False)],
          limit: Annotated[float, typer.Option(help="Seconds after which it hangs.")] = 600.0,
          record: Annotated[Path | None, typer.Option("--capture", help="Record of the graph that it replays.")] = None,
          plan: PlanOption = None, yaml: YamlOption = None,
          folder: Annotated[Path, typer.Option(help="For the core dump, the log and the output.")] = Path("crash"),
          json_: AsJson = False) -> None:
    """Run a command and name the launch at which it faulted or hung. Exits with 1 when it did."""
    from .graphs.debug.crash import run_watched
    from .graphs.debug.record import load_capture

    found = run_watched(command, folder, limit=limit, capture=load_capture(record, plan) if record else None,
                        origins=load_origins(yaml), echo=partial(typer.echo, nl=False, err=True))
    typer.echo(json.dumps(found.as_json(), indent=1) if json_ else str(found))
    raise typer.Exit(int(bool(found.findings)))


@graph_app.command()
def explain(what: Annotated[str, typer.Argument(help="CG-003, a CUDA error number, name or text; all: every code.")],
            json_: AsJson = False) -> None:
    """Say what a finding or a CUDA error means, how it comes about and what to do. Works without a GPU or a network."""
    from .graphs.debug.codes import explain_code, explained, listing

    if json_:
        typer.echo(json.dumps(explained(what), indent=1))
    else:
        typer.echo(listing() if what == "all" else explain_code(what))
