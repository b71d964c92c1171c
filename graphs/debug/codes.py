"""The catalogue of finding codes and of CUDA's errors, and ``explain`` over both. Works without a GPU or a network.

A code never changes its meaning and is never used again. What each says is data: ``codes.json`` and
``cuda_errors.json`` beside this file.
"""
from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from ...compiler.errors import PlanError


@dataclass(frozen=True)
class Code:
    """One kind of finding. ``kinds`` are numbers of failures that engines of this kind really had, ``tools`` the
    commands that report it."""

    code: str
    severity: str
    title: str
    means: str
    arises: str
    fix: str
    tools: tuple[str, ...]
    kinds: tuple[int, ...]

    def __str__(self) -> str:
        return (f"{self.code}: {self.title} ({self.severity}, from k3plan graph {', '.join(self.tools)})\n"
                f"  means: {self.means}\n  arises: {self.arises}\n  fix: {self.fix}")


@dataclass(frozen=True)
class CudaCode:
    """One CUDA error: number, runtime and driver name, CUDA's own words, what causes it in a captured step."""

    number: int
    runtime: str
    driver: str
    text: str
    causes: str
    fix: str
    codes: tuple[str, ...]

    def __str__(self) -> str:
        names = " = ".join(name for name in (self.runtime, self.driver) if name)
        more = f"\n  see: {', '.join(f'{c} ({CODES[c].title})' for c in self.codes)}" if self.codes else ""
        return f"{self.number} {names}: {self.text}\n  causes: {self.causes}\n  fix: {self.fix}{more}"


def _read(name: str) -> list[dict]:
    return json.loads((files(__package__) / name).read_text(encoding="utf-8"))


CODES: Mapping[str, Code] = {
    item["code"]: Code(**{**item, "tools": tuple(item["tools"]), "kinds": tuple(item["kinds"])})
    for item in _read("codes.json")
}


@cache
def cuda_errors() -> tuple[CudaCode, ...]:
    """All errors of the CUDA runtime and driver, by number."""
    return tuple(CudaCode(**{**item, "codes": tuple(item["codes"])}) for item in _read("cuda_errors.json"))


def look_up(text: str) -> list[Code | CudaCode]:
    """Codes that ``text`` names, else the CUDA errors, three at most. Raises PlanError when there is neither."""
    wanted = text.strip()
    ours = [f"CG-{int(n):03d}" for n in re.findall(r"CG-?(\d+)", wanted, re.I)]
    known: list[Code | CudaCode] = [CODES[code] for code in ours if code in CODES]
    if ours and not known:
        raise PlanError(f"no finding has the code {wanted}\n  fix: k3plan graph explain all lists them")
    found = known or list[Code | CudaCode](find_errors(wanted)[:3])
    if not found:
        raise PlanError(f"{wanted!r} is no finding code and no CUDA error\n"
                        "  fix: give a code such as CG-003, a number such as 700, or words of CUDA's own message")
    return found


def explain_code(text: str) -> str:
    """What a code, a CUDA error number or an error text means and what to do. Raises PlanError when it is none."""
    return "\n\n".join(map(str, look_up(text)))


def explained(text: str) -> list[dict[str, Any]]:
    """The same as plain data; "all" is every code."""
    return [asdict(entry) for entry in (CODES.values() if text == "all" else look_up(text))]


def find_errors(text: str) -> list[CudaCode]:
    """CUDA errors that a number, a name or a message names; the longest match first."""
    wanted = text.strip()
    if re.fullmatch(r"-?\d+", wanted):
        return [e for e in cuda_errors() if e.number == int(wanted)]
    words = set(re.findall(r"\w+", wanted))
    named = [e for e in cuda_errors() if words & {e.runtime, e.driver} - {""}]
    if named:
        return named
    low = _plain(wanted)
    within = [e for e in cuda_errors() if _plain(e.text) in low or (len(low) > 8 and low in _plain(e.text))]
    return sorted(within, key=lambda e: -len(e.text))


def _plain(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def listing() -> str:
    """All codes with their titles."""
    return "\n".join(f"{c.code}  {c.severity:7}  {c.title}" for c in CODES.values())
