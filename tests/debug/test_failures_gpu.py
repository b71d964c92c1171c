"""Failures provoked on a GPU, each in a process of its own: the tool must name the failure, its launch and its line.

``provoke.py`` and ``provoke_steps.py`` hold the cases; one process runs them all, as forks that never touch its GPU.
"""
from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import provoke
import provoke_steps  # noqa: F401 - declares more cases
import pytest

SCRIPT = Path(__file__).with_name("provoke.py")
KINDS = {*range(1, 23), *range(47, 51)}


class Outcomes:
    """Of the cases ``names``, run one after the other in one process; a case is waited for when it is asked for."""

    def __init__(self, names: Sequence[str], log: Path) -> None:
        self._log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen([sys.executable, str(SCRIPT), *names], stdout=subprocess.PIPE,
                                            stderr=errors, text=True)
        self._known: dict[str, dict[str, Any]] = {}

    def __getitem__(self, name: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        while name not in self._known:
            line = self.process.stdout.readline()
            assert line, f"ended before {name}\n{self._log.read_text()[-2000:]}"
            if line.startswith("{"):
                found = json.loads(line)
                self._known[found["name"]] = found
        return self._known[name]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    """Of the cases that are selected."""
    names = [item.callspec.params["name"] for item in request.session.items
             if item.path == request.path and isinstance(item, pytest.Function) and "outcomes" in item.fixturenames]
    found = Outcomes(names, tmp_path_factory.mktemp("provoke") / "errors.txt")
    yield found
    found.process.kill()
    found.process.communicate()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", provoke.CASES)
def test_the_failure_is_named(name: str, outcomes: Outcomes) -> None:
    outcome = outcomes[name]
    said = "\n".join(f"{f['code']} at {f['launch']}, {f['where']}: {f['text']}" for f in outcome.get("findings", []))
    assert outcome["named"], f"expected {outcome['expected'] or 'nothing'}\n{said}\n{outcome.get('log', '')}"


def test_the_launches_of_the_cases_are_in_their_plans() -> None:
    """As the cases themselves need a GPU: their kernels can be imported, and the plans of today have their launches."""
    provoke.import_kernels()
    plans = [provoke.small_plan((0, 1, 3), "h200"), provoke.small_plan((0,), "h200", ("parallel.tp=2",))]
    launches = {launch.id for plan in plans for launch in plan.launches}
    assert not {case.launch for case in provoke.CASES.values()} - launches - {None, ""}


def test_every_kind_has_a_case() -> None:
    covered = {case.kind for case in provoke.CASES.values()}
    assert covered >= KINDS, f"no case for {sorted(KINDS - covered)}"
