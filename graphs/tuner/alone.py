"""``k3plan tune``: time every configuration of every kernel at the shapes of a plan file, on this GPU.

All kernels that fit are timed, not only those that a plan would choose, since the planner chooses by these times.
The result is a table of frozen measurements (``compiler/tuning.py``); nothing is tuned when a plan runs.
"""
from __future__ import annotations

import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ...compiler.compile import lower
from ...compiler.cost import model_us
from ...compiler.covering.match import find_regions
from ...compiler.device import load_device
from ...compiler.errors import BindError
from ...compiler.kernel import KernelDef, Menu, Region
from ...compiler.menu import LIBRARY_PRODUCT, op_kernels
from ...compiler.passes.shard import OPTIONAL
from ...compiler.spec import Spec
from ...compiler.tuning import Tuned, shape_key
from ..bench import time_region
from ..verify import check_of

# both forms of the algebra, so that the planner can price either
FORMS = ({name: whole for name, whole, *_ in OPTIONAL}, {name: split for name, _, split, _ in OPTIONAL})
ROWS = ((1, 1), (1, 8), (8, 1), (64, 1))  # sequences, verify rows


@dataclass(frozen=True)
class Job:
    """One kernel at one shape, with the configurations to time."""

    region: Region
    key: str
    configs: tuple[dict[str, Any], ...]
    model_us: float


def jobs(spec: Spec, kernels: Iterable[KernelDef], rows: Sequence[tuple[int, int]] = ROWS) -> list[Job]:
    """Every kernel of ``kernels``, and the library's product, at every different shape of ``spec`` and of ``rows``."""
    library = [kernel for kernel in op_kernels() if kernel.entry == LIBRARY_PRODUCT]
    menu, device = Menu([*kernels, *library]), load_device(spec.gpu)
    found: dict[tuple[str, str], Job] = {}
    for sequences, query in rows:
        sized = replace(spec, step=replace(spec.step, sequences=sequences, query=query))
        for form in FORMS if spec.parallel.tp > 1 else FORMS[:1]:
            graph, _ = lower(sized, form)
            regions, _ = find_regions(graph, menu, arch=device.arch, rows=sized.step.rows)
            for region in regions:
                key = shape_key(region)
                if (region.kernel.id, key) not in found:
                    configs = region.kernel.configs(region) if region.kernel.configs else [{}]
                    model = model_us(device, region, 1)
                    found[region.kernel.id, key] = Job(region, key, tuple(map(dict, configs)), model)
    return list(found.values())


def spread(found: Sequence[Job], most: int) -> list[Job]:
    """Of jobs of one kernel, one size of step and equal weights, ``most`` evenly: of 8 numbers of residual blocks the
    first and the last of two. The others take the configuration of the nearest."""
    groups: dict[object, list[Job]] = defaultdict(list)
    for job in found:
        region = job.region
        values = [region.graph.values[name] for name in region.inputs]
        weights = tuple(value.shape for value in values if value.role == "weight")
        rows = frozenset(value.shape[:1] for value in values if value.role != "weight")
        groups[region.kernel.id, frozenset(region.binding), weights, rows].append(job)
    kept: set[int] = set()
    for group in groups.values():
        few, last = min(most, len(group)), len(group) - 1
        kept.update(id(group[i * last // max(1, few - 1)]) for i in range(few))
    return [job for job in found if id(job) in kept]


@dataclass(frozen=True)
class Outcome:
    """The timings of one job: us by configuration (none when the process died), and why some did not run."""

    job: Job
    us: tuple[float | None, ...]
    failures: tuple[str, ...]

    @property
    def best(self) -> tuple[float, dict[str, Any]] | None:
        timed = [(us, config) for us, config in zip(self.us, self.job.configs) if us is not None]  # noqa: B905
        return min(timed, key=lambda pair: pair[0]) if timed else None


def time_job(job: Job, time_one: Callable[..., Any] = time_region, check_of: Callable[..., Any] = check_of) -> Outcome:
    """Checks and times every configuration of a job. One that fails or computes something else than its ops is told
    and gets no time; a fault ends the process. Kernels with a collective are timed unchecked."""
    times: list[float | None] = []
    failures = []
    wrong_with = check_of(job.region)
    for config in job.configs:
        try:
            wrong = wrong_with(config)
            us = time_one(job.region, config).us
            times.append(None if wrong else us)
            failures += [f"{config}: {wrong} ({us:.2f} us)"] if wrong else []
        except Exception as error:  # a configuration may ask for more than the chip has
            times.append(None)
            failures.append(f"{config}: {type(error).__name__} {str(error)[:200]}")
    return Outcome(job, tuple(times), tuple(failures))


def describe(outcome: Outcome) -> str:
    """One line: kernel, shape, fastest time and configuration, how many failed."""
    best, failed = outcome.best, len(outcome.failures)
    note = f", {failed} of {len(outcome.job.configs)} failed: {outcome.failures[0]}" if failed else ""
    text = f"{best[0]:8.2f} us (model {outcome.job.model_us:.2f}) {best[1]}" if best else "   no time"
    return f"{text}  {outcome.job.region.kernel.id} {outcome.job.key}{note}"


def all_times(outcome: Outcome, source: str) -> list[Tuned]:
    """A line for every configuration that was timed."""
    return [Tuned(outcome.job.region.kernel.id, outcome.job.key, config, round(us, 3), source,
                  round(outcome.job.model_us, 3))
            for us, config in zip(outcome.us, outcome.job.configs) if us is not None]  # noqa: B905


def table(outcomes: Iterable[Outcome], source: str) -> str:
    """The tuned table as JSON text, a line a shape. ``source`` names GPU, versions and date."""
    times = [all_times(outcome, source) for outcome in outcomes]
    return lines_text([min(lines, key=lambda line: line.us) for lines in times if lines], source)


def lines_text(lines: Iterable[Tuned], source: str) -> str:
    """``lines``, all measured as ``source`` says, as the JSON text of a table."""
    found = [{"kernel": line.kernel, "key": line.key, "config": dict(line.config), "us": line.us,
              "model_us": line.model_us, **({"in_step": True} if line.in_step else {})} for line in lines]
    found.sort(key=lambda line: (line["kernel"], line["key"]))
    body = ",\n".join("  " + json.dumps(line) for line in found)
    return f'{{"source": {json.dumps(source)},\n"lines": [\n{body}\n]}}\n'


def merge_tables(path: Path, new: str, by: Sequence[str] = ("kernel", "key")) -> str:
    """``new`` laid over the table at ``path``: lines that are alike in ``by`` are replaced, the others keep the source
    that they had. Raises BindError when the file is no table."""
    fresh = json.loads(new)
    try:
        old = json.loads(path.read_text()) if path.is_file() else {"lines": []}
        own = {} if old.get("source") in (None, fresh["source"]) else {"source": old["source"]}
        kept = [{**own, **line} for line in old["lines"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BindError(f"{path}: not a table that k3plan tune wrote\n  fix: name another file to write") from None
    lines = {tuple(str(x[name]) for name in by): x for x in (*kept, *fresh["lines"])}
    body = ",\n".join("  " + json.dumps(lines[at]) for at in sorted(lines))
    return f'{{"source": {json.dumps(fresh["source"])},\n"lines": [\n{body}\n]}}\n'


def source_text() -> str:
    """GPU, versions and date of a measurement made now."""
    properties = torch.cuda.get_device_properties(0)
    compilers = [f"{name} {version(name)}" for name in ("triton", "nvidia-cutlass-dsl") if _installed(name)]
    return (f"{properties.name}, {properties.multi_processor_count} SMs, torch {torch.__version__}, "
            f"{', '.join(compilers)}, {time.strftime('%Y-%m-%d')}")


def _installed(distribution: str) -> bool:
    with contextlib.suppress(PackageNotFoundError):
        return bool(version(distribution))
    return False


def tuned_lines(text: str) -> list[Tuned]:
    """The lines of a table's text."""
    data = json.loads(text)
    return [Tuned(**{"source": data["source"], **line}) for line in data["lines"]]
