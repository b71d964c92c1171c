"""Compiles the default configuration of every CuTe DSL kernel at the shapes of a TP16 rank of Kimi K3, and beside it
the form for blocks that are not settled, the late, the lean and the paced one and that with units in registers, where
it has them.

A program of its own, so that the work spreads over processes. Writes ``{launch: {target: [registers, shared,
spilled]}}`` as JSON to the path in its first argument, an error's text in place of the numbers. The second argument is
a file that keeps results by the content of what was compiled; only what has changed is compiled again. A third is a
regular expression: only launches whose name it finds.
"""
from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from k3plan.compiler.build import build_graph
from k3plan.compiler.covering.match import find_regions
from k3plan.compiler.kernel import KernelDef, Menu, Region
from k3plan.compiler.passes.merge import merge_projections
from k3plan.compiler.passes.shard import algebra_of, shard_graph
from k3plan.compiler.spec import Choices, Spec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import real_shapes  # tests/real_shapes.py

CHOICES = (Choices("sharded", "stripe", "replicated"), Choices("replicated", "all_reduce", "replicated"))
ROWS = ((1, 1), (1, 8), (8, 1), (64, 1))
# kernels for more rows, or for rounded activations: sequences, and what the experts' rows are
EXPERTS = "block_scaled"
EXPERT_ROWS = ((1, "mxfp8"), (64, "mxfp8"), (64, "bf16"))
Line = tuple[str, str, list[int] | str, str]  # launch, target, usage or the error, key


@cache
def chosen(wanted: str) -> list[tuple[str, Region]]:
    """Names and regions, collectives included; the fewest and the most blocks stand for those between."""
    from k3plan.ops_cute.kernels import KERNELS

    found: dict[str, Region] = {}
    for sequences, query in ROWS:
        for choices in CHOICES:
            for region in _regions(real_shapes._spec(sequences, query, choices), KERNELS):
                name = real_shapes.name_of(region, sequences, query)
                if re.search(wanted, name) and not re.search("-nb[2-7]-", name):
                    found.setdefault(name, region)
    for sequences, activation in EXPERT_ROWS:
        spec = real_shapes._spec(sequences, 1, CHOICES[1])
        spec = replace(spec, layers=(1,), numerics=replace(spec.numerics, expert_activation=activation))
        for region in _regions(spec, [kernel for kernel in KERNELS if EXPERTS in kernel.id]):
            name = real_shapes.name_of(region, sequences, 1)
            if re.search(wanted, name):
                found.setdefault(name, region)
    return list(found.items())


def _regions(spec: Spec, kernels: Sequence[KernelDef]) -> list[Region]:
    graph = merge_projections(shard_graph(build_graph(spec), spec, algebra_of(spec))[0])[0]
    return find_regions(graph, Menu(kernels), arch="sm_103", rows=spec.step.rows)[0]


def targets_of(kernel: KernelDef) -> list[str]:
    """Names of ``TARGETS`` that a kernel is for."""
    from k3plan.ops_cute.compile_check import TARGETS

    return [target for target in TARGETS if not kernel.arch or target[:-1] in kernel.arch]


def forms_of(region: Region) -> Iterator[tuple[str, dict[str, Any]]]:
    """The end of a form's name and what ``bind_region`` is told for it."""
    configs = list(region.kernel.configs(region)) if region.kernel.configs else [{}]
    yield "", {"config": configs[0]}
    if configs[0].get("settled"):
        yield "-fresh", {"config": configs[0], "settled": ()}
    for config in [config for config in configs if region.kernel.late(config)][:1]:
        yield "-late", {"config": config}
    for key in ("lean", "pace", "held"):
        for config in [config for config in configs if config.get(key)][:1]:
            yield f"-{key}", {"config": config}


def compile_one(task: tuple[int, str, dict[str, list[int]]]) -> list[Line]:
    """All forms and targets of one region; ``known`` usage by key is taken over."""
    index, wanted, known = task
    name, region = chosen(wanted)[index]
    return [line for suffix, form in forms_of(region) for line in _compile(name + suffix, region, form, known)]


def _compile(name: str, region: Region, form: dict[str, Any], known: dict[str, list[int]]) -> list[Line]:
    from k3plan.compiler.launches import kernels_of
    from k3plan.graphs.bench import random_inputs
    from k3plan.graphs.launch import bind_region
    from k3plan.ops_cute.compile_check import compile_launch
    from k3plan.ops_cute.launching import content_key

    try:
        launch = bind_region(region, random_inputs(region, "meta"), dependent_launch=True, **form)
        single = list(kernels_of(launch))
    except Exception as error:
        return [(name, target, _text(error), "") for target in targets_of(region.kernel)]
    lines: list[Line] = []
    for part, one in enumerate(single):
        for target in targets_of(region.kernel):
            label = f"{name}.{part}" if len(single) > 1 else name
            try:
                key = f"{content_key(one, target)}-{one.shared}"
                if key not in known:
                    usage = compile_launch(one, target)
                    known[key] = [usage.registers, usage.shared, usage.spilled]
                lines.append((label, target, known[key], key))
            except Exception as error:
                lines.append((label, target, _text(error), ""))
    return lines


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:400]


def main() -> None:
    out, cache = Path(sys.argv[1]), Path(sys.argv[2])
    wanted = sys.argv[3] if len(sys.argv) > 3 else ""
    known = json.loads(cache.read_text()) if cache.is_file() else {}
    table: dict[str, dict[str, Any]] = {}
    used: dict[str, list[int]] = {}
    tasks = [(index, wanted, known) for index in range(len(chosen(wanted)))]
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        for lines in pool.map(compile_one, tasks):
            for name, target, usage, key in lines:
                table.setdefault(name, {})[target] = usage
                if isinstance(usage, list):
                    used[key] = usage
    out.write_text(json.dumps(table))
    cache.write_text(json.dumps(used))


if __name__ == "__main__":
    main()
