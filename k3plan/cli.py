"""The ``k3plan`` command. Parses, calls, prints; whatever needs torch is imported by the command that needs it."""
from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from .graph_cli import graph_app
from .launch_cli import app as launch_app
from .options import Overrides, PlanFile, PlanJson, size_settings, sizes_of

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="Compiles a Kimi K3 decode step into a launch plan, runs it and explains it.")
checkpoint_app = typer.Typer(no_args_is_help=True, help="Make and check checkpoints.")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(graph_app, name="graph")
app.add_typer(launch_app, name="launch")


@app.command()
def check(plan: PlanFile, set_: Overrides = None) -> None:
    """Check a plan file: every problem at once, each with its place and its fix."""
    from .compiler.explain import plural
    from .compiler.reading.source import load_spec

    spec = load_spec(plan, set_ or ())
    typer.echo(f"{plan}: ok ({spec.model.family}, {plural(len(spec.layers), 'layer')}, "
               f"{plural(spec.step.rows, 'row')}, tp{spec.parallel.tp} on {spec.gpu})")


@app.command()
def show(plan: PlanFile, set_: Overrides = None,
         resolved: Annotated[bool, typer.Option("--resolved", help="Every value with its origin.")] = False) -> None:
    """Print a plan file, or with --resolved every value that it stands for and where that came from."""
    from .compiler.reading.source import load_spec, show_resolved

    spec = load_spec(plan, set_ or ())
    typer.echo(show_resolved(spec) if resolved else plan.read_text().rstrip())


@app.command("compile")
def compile_(plan: PlanFile, set_: Overrides = None,
             out: Annotated[Path | None, typer.Option(help="Write the launch plan there.")] = None,
             quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No table.")] = False) -> None:
    """Compile a plan file to a launch plan and print its launches, bytes, floor and predicted time."""
    from .compiler.explain import summarise
    from .face import compile_plan

    started = time.perf_counter()
    compiled = compile_plan(plan, set_ or ())
    seconds = time.perf_counter() - started
    if not quiet:
        typer.echo(f"{summarise(compiled)}\n")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        compiled.save(out)
    where = f", written to {out}" if out is not None else ""
    typer.echo(f"compiled in {seconds:.2f} s{where}")


@app.command()
def explain(plan: Annotated[str, typer.Argument(metavar="PLAN|CODE", help="Launch plan, or alone: a finding's code "
                                                "(CG-003), a CUDA error's number, name or text.", show_default=False)],
            what: Annotated[str, typer.Argument(help="Launch, node, tensor or kernel of the plan.")] = "") -> None:
    """Say why a launch is as it is: its kernel, its cost, and each kernel that lost. Or what a code or error means."""
    from .compiler.explain import explain as explain_plan
    from .compiler.plan import load_plan

    if what:
        typer.echo(explain_plan(load_plan(plan), what))
    elif Path(plan).exists():
        raise typer.BadParameter("name a launch, node, tensor or kernel of the plan as well")
    else:
        from .graphs.debug.codes import explain_code

        typer.echo(explain_code(plan))


@app.command()
def diff(old: PlanJson, new: PlanJson) -> None:
    """Say what changed from one launch plan to another. Exits with 1 when they differ."""
    from .compiler.difference import diff as diff_plans
    from .compiler.plan import load_plan

    a, b = load_plan(old), load_plan(new)
    typer.echo(diff_plans(a, b))
    raise typer.Exit(int(a.key != b.key))


@app.command()
def run(plan: PlanJson,
        checkpoint: Annotated[Path, typer.Option(help="Folder of the checkpoint.", show_default=False)],
        tokens: Annotated[int, typer.Option(help="Tokens to decode for each sequence.", min=1)] = 32,
        prompt: Annotated[list[str] | None, typer.Option(
            help="Token ids of one sequence, such as 1,2,3; once for each sequence.")] = None,
        verify: Annotated[bool, typer.Option(help="Hold the text against the fp32 reference.")] = True) -> None:
    """Decode greedily from a checkpoint with a launch plan, on emulated ranks, and check the text."""
    from .compiler.plan import load_plan
    from .graphs.session import run_plan

    report = run_plan(load_plan(plan), checkpoint, tokens, prompt, verify=verify)
    typer.echo(report.text)
    raise typer.Exit(int(not report.passed))


@app.command()
def tune(plan: PlanFile, out: Annotated[Path, typer.Option(help="Table to write; lines of other shapes are kept.")],
         set_: Overrides = None,
         only: Annotated[str, typer.Option(help="Kernels whose id contains one of these: attn_res,linear.")] = "",
         rows: Annotated[str, typer.Option(help="Sequences x verify rows.")] = "1x1,1x8,8x1,64x1",
         most: Annotated[int, typer.Option(help="Time so many configurations of a shape at most.", min=1)] = 1000,
         shapes: Annotated[int, typer.Option(help="Time so many shapes that differ in no weight at most: of 8 "
                                             "numbers of residual blocks, say.", min=1)] = 1000,
         seconds: Annotated[float, typer.Option(help="Stop starting new shapes after this long.")] = 1e9,
         times: Annotated[Path | None, typer.Option(help="Keep the time of every configuration here as well.")] = None,
         in_step: Annotated[bool, typer.Option("--in-step", help="Then settle the plan by times in the step, from all "
                                               "that --times has.")] = False,
         exchanges: Annotated[int, typer.Option(help="With --in-step, then try so many other configurations of its "
                                                "launches, each in the whole step.", min=0)] = 0) -> None:
    """Time every configuration of every kernel at the shapes of a plan file on this machine's GPUs; write the table."""
    from .compiler.reading.source import load_spec
    from .face import kernels, tuned
    from .graphs.bench import require_gpu
    from .graphs.tuner.alone import all_times, describe, lines_text, merge_tables, source_text, table, tuned_lines
    from .graphs.tuner.pool import Workload
    from .graphs.tuner.pool import tune as time_all

    require_gpu("k3plan tune")
    work = Workload(load_spec(plan, set_ or ()), sizes_of(rows), only, kernels, most, most_shapes=shapes)
    source, timed = source_text(), 0
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(merge_tables(out, table([], source)))
    # shape by shape: what was timed is not lost when the command is stopped
    for outcome in time_all(work, seconds=seconds, say=typer.echo):
        typer.echo(describe(outcome))
        timed += outcome.best is not None
        out.write_text(merge_tables(out, table([outcome], source)))
        if times is not None:
            every = lines_text(all_times(outcome, source), source)
            times.write_text(merge_tables(times, every, by=("kernel", "key", "config")))
    typer.echo(f"{timed} shapes timed, written to {out}")
    if in_step:
        from .graphs.tuner.in_step import settle_table

        known = tuned_lines(times.read_text()) if times is not None and times.is_file() else []
        for size in work.rows:
            settle_table(work.spec, size, kernels(), [*tuned(work.spec.gpu), *known], out, typer.echo,
                         exchanges)


@app.command()
def bench(plan: PlanFile, set_: Overrides = None,
          profiles: Annotated[str, typer.Option(help="Profiles to compare.")] = "stock,auto",
          rows: Annotated[str, typer.Option(help="Sequences x verify rows.")] = "1x1,1x8,8x1,64x1") -> None:
    """Time one rank's whole step on this GPU: random weights, loopback transport, one CUDA graph."""
    from .compiler.reading.planfile import allowed
    from .face import compile_plan
    from .graphs.bench import require_gpu
    from .graphs.bench_step import time_step

    sizes, wanted = sizes_of(rows), profiles.split(",")
    if not set(wanted) <= set(allowed("profile")):
        raise typer.BadParameter(f"{profiles!r} is not some of {','.join(allowed('profile'))}", param_hint="--profiles")
    require_gpu("k3plan bench")
    for sequences, query in sizes:
        for profile in wanted:
            settings = [*(set_ or ()), *size_settings(sequences, query), f"profile={profile}"]
            timing = time_step(compile_plan(plan, settings))
            typer.echo(f"{sequences}x{query} {profile}: {timing.line()}")


@app.command()
def doctor(json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """Say what this machine can plan, compile and run, and what to do about the rest."""
    from .graphs.doctor import doctor as examine

    typer.echo(examine(json=json_))


@app.command()
def schema() -> None:
    """Print the JSON Schema of plan files, for editors."""
    from .compiler.reading.planfile import plan_schema

    typer.echo(json.dumps(plan_schema(), indent=2))


@checkpoint_app.command("make")
def make(folder: Annotated[Path, typer.Argument(help="Where to write it.", show_default=False)],
         seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0) -> None:
    """Write a small Kimi K3 checkpoint with random weights in the real format."""
    from .graphs.make_checkpoint import make_checkpoint

    model = make_checkpoint(folder, seed=seed)
    files = sorted(folder.glob("*.safetensors"))
    total = sum(f.stat().st_size for f in files)
    typer.echo(f"{folder}: {model.layers} layers in {len(files)} files, {total / 1e6:.1f} MB")


@checkpoint_app.command("check")
def check_checkpoint(folder: Annotated[Path, typer.Argument(help="Folder of the checkpoint.", show_default=False)],
                     plan: Annotated[Path, typer.Option(help="Launch plan that will read it.", show_default=False)],
                     ) -> None:
    """Check names, shapes and dtypes of a checkpoint against what a launch plan reads; reads headers only."""
    from .compiler.plan import load_plan
    from .graphs.session import check_checkpoint as check_folder

    typer.echo(check_folder(load_plan(plan), folder))


def main() -> None:
    """Entry point: errors of the user's making are printed, not raised."""
    from .compiler.errors import K3PlanError

    try:
        app()
    except K3PlanError as error:
        typer.echo(str(error), err=True)
    except OSError as error:
        if error.filename is None:
            raise
        typer.echo(f"{error.filename}: {error.strerror}\n  fix: correct the path, or the permissions there", err=True)
    else:
        return
    sys.exit(2)
