"""A finding: one thing that is wrong, or worth knowing, about a captured step, and where in the plan it is.

Every tool of the debugger returns findings and nothing else decides how they read. What a code means stands in
``codes.json``; this file puts the plan op, the layer and the line of the plan file beside it.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...compiler.errors import Origin
from ...compiler.plan import Launch, LaunchPlan
from .codes import CODES

SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """``code`` is a key of the catalogue. ``launch`` is the id of a launch of the plan, ``where`` a place to open: a
    line of the plan file, of the plan, or of a Python file. ``fix`` is one imperative sentence."""

    code: str
    severity: str  # one of SEVERITIES
    launch: str | None
    layer: int | None
    where: str | None
    text: str
    fix: str

    def __str__(self) -> str:
        lines = [f"{self.code} {self.severity}: {self.text}"]
        layer = f", layer {self.layer}" if self.layer is not None else ""
        at = ", ".join(part for part in ((self.launch or "") + layer, self.where) if part)
        lines += [f"    at {at}"] if at else []
        return "\n".join([*lines, f"  fix: {self.fix}"])


def find(code: str, text: str, *, plan: LaunchPlan | None = None, launch: Launch | str | None = None,
         call: str = "", origins: Mapping[str, Origin] | None = None, field: str = "",
         severity: str = "", fix: str = "") -> Finding:
    """A finding with what the catalogue says of ``code`` wherever nothing better is given.

    ``launch`` with its ``plan`` gives layer and place, ``call`` a line of Python; ``origins`` of the plan file and the
    dotted ``field`` that the finding is about ("step.context") give its line. Raises ``KeyError`` for a code that the
    catalogue does not have.
    """
    entry = CODES[code]
    if isinstance(launch, str) and plan is not None:
        launch = next((x for x in plan.launches if x.id == launch), launch)
    known = launch if isinstance(launch, Launch) else None
    planned = place_of(plan, known, origins, field) if plan is not None else ""
    place = ", ".join(part for part in (call, planned) if part)
    return Finding(code, severity or entry.severity, known.id if known else launch if isinstance(launch, str) else None,
                   known.layer if known else None, place or None, text, fix or entry.fix)


def place_of(plan: LaunchPlan, launch: Launch | None = None, origins: Mapping[str, Origin] | None = None,
             field: str = "") -> str:
    """Place of a launch or of the whole plan: its ops, its number, and the line of the plan file that asked for it."""
    parts = []
    if launch is not None:
        ops = " + ".join(plan.choice(launch).ops)
        number = next(i for i, other in enumerate(plan.launches) if other.id == launch.id)
        parts.append(f"{ops}, launch {number} of plan {plan.key}")
    else:
        parts.append(f"plan {plan.key}")
    line = yaml_line(origins or {}, field or "model.layers")
    return ", ".join([*parts, *([line] if line else [])])


def yaml_line(origins: Mapping[str, Origin], field: str) -> str:
    """``file:line:column`` of a dotted field, or of the nearest section above it that the plan file has; else ""."""
    while field:
        found = [o for name, o in origins.items() if name == field or name.startswith(f"{field}.")]
        lines = [str(o) for o in found if o.kind == "yaml" and o.line]
        if lines:
            return lines[0]
        field = field.rpartition(".")[0]
    return ""


def render(findings: Sequence[Finding], clean: str = "no findings") -> str:
    """All findings, the worst first; equal ones of several launches once, notes of one code together. ``clean`` is
    said when there are none."""
    if not findings:
        return clean
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in sorted(findings, key=lambda f: SEVERITIES.index(f.severity)):
        groups.setdefault((finding.code, finding.text, finding.fix), []).append(finding)
    notes: dict[tuple[str, str], list[list[Finding]]] = {}
    shown = []
    for (code, _, fix), same in groups.items():
        if same[0].severity == "note":
            notes.setdefault((code, fix), []).append(same)
        else:
            shown.append(_show(same))
    for (code, fix), told in notes.items():
        if len(told) == 1:
            shown.append(_show(told[0]))
            continue
        lines = [f"    {same[0].text} ({same[0].launch or same[0].where}{_more(same)})" for same in told]
        shown.append("\n".join([f"{code} note: {CODES[code].title}", *lines, f"  fix: {fix}"]))
    return "\n".join([*shown, count_line(findings)])


def _show(same: Sequence[Finding]) -> str:
    head, _, fix = str(same[0]).rpartition("\n  fix: ")
    others = ", ".join(f.launch or "-" for f in same[1:6]) + (", ..." if len(same) > 6 else "")
    more = f"\n    and at {len(same) - 1} more: {others}" if len(same) > 1 else ""
    return f"{head}{more}\n  fix: {fix}"


def _more(same: Sequence[Finding]) -> str:
    return f" and {len(same) - 1} more" if len(same) > 1 else ""


def count_line(findings: Iterable[Finding]) -> str:
    """``2 errors, 1 warning; k3plan explain CG-003 says more``."""
    found = list(findings)
    counts = [(s, sum(f.severity == s for f in found)) for s in SEVERITIES]
    text = ", ".join(f"{n} {s}{'s' if n > 1 else ''}" for s, n in counts if n)
    return f"{text}; k3plan explain {found[0].code} says more" if found else "no findings"


def failed(findings: Iterable[Finding]) -> bool:
    """Whether a command exits with 1: any error."""
    return any(finding.severity == "error" for finding in findings)


def to_json(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Plain data, one object a finding."""
    return [asdict(finding) for finding in findings]


def from_json(data: Iterable[Mapping[str, Any]]) -> list[Finding]:
    """The opposite of ``to_json``."""
    return [Finding(**item) for item in data]
