"""``k3plan launch``: a plan on several ranks, one process each, on one host.

Outside, a command starts torchrun with itself; inside, as one of the ranks, it does the work. Each rank has a log; when
one fails, the last words of every rank are shown.
"""
from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Annotated

import typer

from .options import Overrides, PlanFile, PlanJson

app = typer.Typer(no_args_is_help=True, help="Run a plan on several ranks of this host, one process each.")

# a name that is no beginning of an option of torchrun's, which looks at ours too
Logs = Annotated[Path | None, typer.Option("--log-folder", help="Folder for a log of each rank; a new one if none.")]
Carrier = Annotated[str, typer.Option("--transport", help="symmetric (NVLink, peer pointers), library "
                                      "(torch.distributed: NCCL or gloo), or auto.")]
LAST_LINES = 30


@app.command()
def decode(plan: PlanJson, checkpoint: Annotated[Path, typer.Option(help="Folder of the checkpoint.")],
           tokens: Annotated[int, typer.Option(help="Tokens to decode for each sequence.", min=1)] = 32,
           verify: Annotated[bool, typer.Option(help="Hold the text against the fp32 reference.")] = True,
           transport: Carrier = "auto", logs: Logs = None) -> None:
    """Decode greedily from a checkpoint, a rank a process, and check the text on rank 0."""
    from . import __version__
    from .compiler.plan import load_plan

    loaded = load_plan(plan)
    start_ranks(loaded.spec.parallel.tp, logs)
    from .graphs.distributed.work import decode as work
    from .graphs.distributed.work import session

    with session(device_of(loaded.spec.gpu)) as group:
        say(group, work(loaded, checkpoint, tokens, group, transport=transport, version=__version__, verify=verify))


@app.command()
def check(plan: PlanFile, set_: Overrides = None,
          steps: Annotated[int, typer.Option(help="Steps to run.", min=1)] = 4,
          emulate: Annotated[bool, typer.Option(help="Hold the steps against emulated ranks on rank 0.")] = True,
          wait_limit: Annotated[int, typer.Option(help="Looks at a mailbox after which a wait gives up; 0: none.")] = 0,
          transport: Carrier = "auto", logs: Logs = None) -> None:
    """Run steps with random weights and hold every rank's hidden states against each other and emulated ranks."""
    from . import __version__
    from .face import compile_plan

    compiled = compile_plan(plan, [*(set_ or ()), "step.outputs=[tokens,hidden]"], collectives=transport != "library")
    start_ranks(compiled.spec.parallel.tp, logs)
    from .graphs.distributed.work import check as work
    from .graphs.distributed.work import session

    with session(device_of(compiled.spec.gpu)) as group:
        say(group, work(compiled, group, steps=steps, transport=transport, version=__version__, emulate=emulate,
                        wait_limit=wait_limit))


@app.command()
def bench(plan: PlanFile, set_: Overrides = None, transport: Carrier = "auto", logs: Logs = None) -> None:
    """Time the captured step over the links, and in loopback on the same GPUs."""
    from . import __version__
    from .face import compile_plan

    compiled = compile_plan(plan, set_ or (), collectives=transport != "library")
    start_ranks(compiled.spec.parallel.tp, logs)
    from .graphs.distributed.work import bench as work
    from .graphs.distributed.work import session

    with session("cuda") as group:
        say(group, work(compiled, group, transport=transport, version=__version__))


@app.command()
def links(plan: PlanFile, set_: Overrides = None,
          rows: Annotated[str, typer.Option(help="Numbers of step rows.")] = "1,8,64",
          only: Annotated[str, typer.Option(help="Kernels whose id contains this, or one of these: a,b.")] = "",
          seconds: Annotated[float, typer.Option(help="Stop starting new kernels after this long.")] = 1e9,
          logs: Logs = None) -> None:
    """Measure the link between the GPUs, and every collective kernel that fits the plan against its unfused forms."""
    from .compiler.reading.source import load_spec
    from .face import kernels

    spec = load_spec(plan, set_ or ())
    counts = rows.split(",")
    if not all(count.isdecimal() for count in counts):
        raise typer.BadParameter(f"{rows!r} is not numbers of rows, such as 1,8,64", param_hint="--rows")
    start_ranks(spec.parallel.tp, logs)
    from .graphs.distributed.report import links as work
    from .graphs.distributed.work import session

    with session("cuda") as group:
        for line in work(spec, kernels(), group, [int(count) for count in counts], only, seconds):
            say(group, line)


def device_of(gpu: str) -> str:
    """The kind of device that a plan for ``gpu`` runs on."""
    return "cpu" if gpu == "cpu" else "cuda"


def say(group: object, text: str) -> None:
    """Rank 0 speaks."""
    if getattr(group, "rank", 0) == 0:
        typer.echo(text)
        sys.stdout.flush()


def start_ranks(count: int, logs: Path | None) -> None:
    """As one of the ranks, nothing. Else starts ``count`` of them with this process's arguments and ends with their
    verdict; raises ``typer.Exit``."""
    from .compiler.knobs import rank_environment, started_as_rank

    if started_as_rank():
        return
    folder = logs or Path(tempfile.mkdtemp(prefix="k3plan-ranks-"))
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count),
               "--redirects", "3", "--tee", "0:1", "--log-dir", str(folder), "-m", "k3plan.launch_cli",
               *sys.argv[sys.argv.index("launch") + 1 :]]
    with (folder / "launcher.log").open("w") as log:
        code = subprocess.run(command, stderr=log, env=rank_environment(), check=False).returncode
    if code:
        typer.echo("\n".join(last_words(folder, count)), err=True)
    typer.echo(f"logs of the ranks: {folder}", err=True)
    raise typer.Exit(code)


def last_words(folder: Path, count: int) -> list[str]:
    """What each rank said last, from its log: its own account of the end if it gave one."""
    lines = [f"k3plan launch: at least one of {count} ranks failed"]
    for rank in range(count):
        found = sorted(folder.glob(f"*/attempt_*/{rank}/stderr.log"), key=lambda path: path.stat().st_mtime)
        said = found[-1].read_text(errors="replace").splitlines() if found else []
        ends = [i for i, line in enumerate(said) if line.startswith("k3plan: ")]
        kept = said[ends[0] :] if ends else said[-LAST_LINES:]
        lines += [f"rank {rank}:", *(f"  {line}" for line in kept or ["(said nothing)"])]
    if not any(folder.glob("*/attempt_*")):
        lines += ["torchrun:", *(folder / "launcher.log").read_text().splitlines()[-LAST_LINES:]]
    return lines


def main() -> None:
    """Entry point of a rank: errors of the user's making are one account, not a traceback."""
    from .compiler.errors import K3PlanError

    try:
        app(standalone_mode=False)
    except K3PlanError as error:
        typer.echo(f"k3plan: {error}", err=True)
    except Exception:
        traceback.print_exc()
    else:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    # no destructors: with a fault on the device, or a peer gone, freeing symmetric memory aborts the process
    os._exit(2)


if __name__ == "__main__":
    main()
