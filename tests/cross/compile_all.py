"""Compiles every launch of ``launches.py`` for every target: registers, shared memory, spills.

A program of its own: the test suite runs Triton's interpreter, and a process either interprets or compiles. Writes
``{launch: {target: [registers, shared, spilled]}}`` as JSON to the path in its first argument, an error's text in place
of the numbers. A second argument is a regular expression: only launches whose name it finds. Triton's cache keeps
every result by content, so that a second run compiles only what has changed.

Every launch has the configuration of an untuned shape in a plan for that target, the first that its menu offers there.
"""
from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from launches import PROBES, chosen, chosen_probes

from k3plan.compiler.kernel import Region

Line = tuple[str, str, list[Any] | str]  # launch, target, usage or an error's text


def compile_one(index: int) -> list[Line]:
    """All targets of one region. Where it is several launches, those behind the first have a number in their name."""
    from k3plan.ops_triton.compile_check import TARGETS

    name, region = chosen(_wanted())[index]
    lines: list[Line] = []
    for target in TARGETS:
        try:
            for part, usage in enumerate(_usage(region, target)):
                lines.append((f"{name}.{part}" if part else name, target, usage))
        except Exception as error:
            lines.append((name, target, f"{type(error).__name__}: {error}"[:400]))
    return lines


def compile_probe(name: str) -> list[Line]:
    """All targets of a kernel that measures links; no plan has it."""
    from k3plan.ops_triton.compile_check import TARGETS

    return [(name, target, _numbers(PROBES[name](), target)[0]) for target in TARGETS]


def _usage(region: Region, target: str) -> list[list[Any]]:
    from k3plan.graphs.bench import random_inputs
    from k3plan.graphs.launch import bind_region

    planned = replace(region, arch=target.removesuffix("a"))
    return _numbers(bind_region(planned, random_inputs(planned, "meta"), dependent_launch=True), target)


def _numbers(launch: Any, target: str) -> list[list[Any]]:
    from k3plan.compiler.launches import kernels_of
    from k3plan.ops_triton.compile_check import compile_launch

    found = [compile_launch(one, target) for one in kernels_of(launch)]
    return [[usage.registers, usage.shared, usage.spilled] for usage in found]


def _wanted() -> str:
    return sys.argv[2] if len(sys.argv) > 2 else ""


def _largest_first() -> Iterator[int]:
    """Kernels of many nodes take longest; begun last they would keep one core busy alone."""
    regions = chosen(_wanted())
    return iter(sorted(range(len(regions)), key=lambda i: -len(regions[i][1].nodes)))


def main() -> None:
    table: dict[str, dict[str, Any]] = {}
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        found = [pool.map(compile_one, _largest_first()), pool.map(compile_probe, chosen_probes(_wanted()))]
        for results in found:
            for name, target, usage in (line for lines in results for line in lines):
                table.setdefault(name, {})[target] = usage
    Path(sys.argv[1]).write_text(json.dumps(table))


if __name__ == "__main__":
    main()
