"""Compiles the default configuration of every Triton kernel at the shapes of a TP16 rank of Kimi K3, for every target.

A program of its own: the test suite runs Triton's interpreter, and a process either interprets or compiles. Writes
``{launch: {target: [registers, shared, spilled]}}`` as JSON to the path in its first argument, an error's text in place
of the numbers. A second argument is a regular expression: only launches whose name it finds.
"""
from __future__ import annotations

import json
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from k3plan.compiler.kernel import Region

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from real_shapes import real_regions  # tests/real_shapes.py

Line = tuple[str, str, list[int] | str]


def chosen() -> list[tuple[str, Region]]:
    """What is compiled: the fewest and the most blocks stand for those between."""
    wanted = sys.argv[2] if len(sys.argv) > 2 else ""
    return [(name, region) for name, region in real_regions()
            if re.search(wanted, name) and not re.search("-nb[2-7]-", name)]


def compile_one(index: int) -> list[Line]:
    """All targets of one region: (launch, target, usage or the error)."""
    from k3plan.graphs.bench import random_inputs
    from k3plan.graphs.launch import bind_region
    from k3plan.ops_triton.compile_check import TARGETS, compile_launch, kernels_of

    name, region = chosen()[index]
    try:
        launch = bind_region(region, random_inputs(region, "meta"), dependent_launch=True)
        single = list(kernels_of(launch))
    except Exception as error:
        return [(name, target, _text(error)) for target in TARGETS]
    lines: list[Line] = []
    for part, one in enumerate(single):
        for target in TARGETS:
            label = f"{name}.{part}" if part else name
            try:
                usage = compile_launch(one, target)
                lines.append((label, target, [usage.registers, usage.shared, usage.spilled]))
            except Exception as error:
                lines.append((label, target, _text(error)))
    return lines


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:400]


def main() -> None:
    table: dict[str, dict[str, Any]] = {}
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        for lines in pool.map(compile_one, range(len(chosen()))):
            for name, target, usage in lines:
                table.setdefault(name, {})[target] = usage
    Path(sys.argv[1]).write_text(json.dumps(table))


if __name__ == "__main__":
    main()
