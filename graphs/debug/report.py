"""The report of a plan, and of its capture where there is one: one HTML file that needs nothing else.

Puts the data block, the style and the scripts of this folder into the page. What the page shows is
``report_data``'s, how it looks the templates'.
"""
from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...compiler.errors import Origin, RecordError
from ...compiler.explain import size
from ...compiler.plan import LaunchPlan, load_plan
from ...compiler.reading.source import load_spec
from .drawing import dot, timeline_svg
from .findings import Finding, from_json
from .inspect import inspect
from .perfetto import perfetto_json
from .record import Record, is_capture, load_capture
from .report_data import report_data
from .time_table import slow_kinds

# in this order they are one script
SCRIPTS = ("report_core.js", "report_elements.js", "report_timeline.js", "report_step.js", "report_flow.js",
           "report_roofline.js", "report_time.js", "report_pointers.js", "report_memory.js", "report_launch.js",
           "report_page.js")


def render_report(plan: LaunchPlan, record: Record | None = None, findings: Sequence[Finding] = (),
                  origins: Mapping[str, Origin] | None = None) -> str:
    """The page as text. Without a ``record`` every time on it is predicted, and says so; ``origins`` are those of the
    plan file (``Spec.origins``) and give each launch its lines there."""
    data = json.dumps(report_data(plan, record, findings, origins), separators=(",", ":"), ensure_ascii=False)
    spec = plan.spec
    parts = {
        "title": html.escape(f"{spec.model.family} on {spec.gpu} TP{spec.parallel.tp}: plan {plan.key}"),
        "style": _template("report.css"),
        # inside a script element only "</" could end it, and "<!--" could begin a comment
        "data": data.replace("<", "\\u003c"),
        "script": "\n".join(_template(name).replace("'use strict';\n", "") for name in SCRIPTS),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _template("report.html"))


@dataclass(frozen=True)
class Sources:
    """What a report is made from."""

    plan: LaunchPlan
    record: Record | None = None
    findings: tuple[Finding, ...] = ()
    origins: Mapping[str, Origin] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, compiled: LaunchPlan | None = None, plan: Path | None = None,
             plan_file: Path | None = None, overrides: Sequence[str] = (), findings: Sequence[Path] = ()) -> Sources:
        """``path`` is a capture (its plan is ``plan``, or lies beside it) or a launch plan, or was ``compiled``;
        ``plan_file`` with its ``overrides`` says where values came from.

        A capture is inspected and its times held against the plan; what that finds comes first. Raises PlanError,
        RecordError, SpecError.
        """
        origins = load_spec(plan_file, overrides).origins if plan_file is not None else {}
        others = [finding for file in findings for finding in read_findings(file)]
        if compiled is not None or not is_capture(path):
            return cls(compiled or load_plan(path), None, tuple(others), origins)
        record, its_plan = load_capture(path, plan)
        found = inspect(its_plan, record, origins).findings
        return cls(its_plan, record, (*found, *slow_kinds(its_plan, record, origins), *others), origins)

    def to_json(self) -> str:
        """What the page shows, as data."""
        return json.dumps(report_data(self.plan, self.record, self.findings, self.origins))


def read_findings(path: Path) -> list[Finding]:
    """Findings of a file that a command of the debugger wrote with ``--json``. Raises RecordError."""
    def walk(item: Any) -> Iterator[dict[str, Any]]:
        if isinstance(item, dict) and {"code", "severity", "text"} <= item.keys():
            yield item
        elif isinstance(item, (dict, list)):
            for inner in item.values() if isinstance(item, dict) else item:
                yield from walk(inner)

    try:
        data = json.loads(text := path.read_text())
        if isinstance(data, dict) and '"findings"' not in text:
            raise ValueError("no \"findings\" in it")
        return from_json(walk(data))
    except (OSError, ValueError, TypeError) as error:
        raise RecordError(f"{path}: no findings to read ({error})\n"
                          "  fix: pass what a k3plan graph command printed with --json") from None


def write_all(sources: Sources, wanted: Mapping[str, Path | None], *, layer: int | None = None,
              whole: bool = False) -> Iterator[str]:
    """Writes each of "html", "perfetto", "dot" and "svg" that has a path; says of each what it is."""
    plan, record = sources.plan, sources.record
    times = f"measured on {record.machine.name}" if record and record.replay_us else "predicted"
    texts: dict[str, Callable[[], str]] = {
        "html": lambda: render_report(plan, record, sources.findings, sources.origins),
        "perfetto": lambda: perfetto_json(plan, record), "dot": lambda: dot(plan, layer, whole=whole),
        "svg": lambda: timeline_svg(plan, record)}
    for kind, path in wanted.items():
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            written = path.write_bytes(texts[kind]().encode())
            yield f"{path}: {kind}, {size(written)}, {len(plan.launches)} launches, times {times}"


def _template(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")
