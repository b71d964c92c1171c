"""The report of a plan, and of its capture where there is one: one HTML file that needs nothing else.

Puts the data block, the style and the scripts of this folder into the page. What the page shows is
``report_data``'s, how it looks the templates'.
"""
from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from ...compiler.errors import Origin
from ...compiler.plan import LaunchPlan
from .findings import Finding
from .record import Record
from .report_data import report_data

# in this order they are one script
SCRIPTS = ("report_core.js", "report_elements.js", "report_timeline.js", "report_step.js", "report_flow.js",
           "report_roofline.js", "report_time.js", "report_memory.js", "report_launch.js", "report_page.js")


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


def write_report(path: str | Path, plan: LaunchPlan, record: Record | None = None,
                 findings: Sequence[Finding] = (), origins: Mapping[str, Origin] | None = None) -> int:
    """Writes ``render_report`` to a file; returns its bytes."""
    return Path(path).write_bytes(render_report(plan, record, findings, origins).encode())


def _template(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")
