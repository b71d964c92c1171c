"""Which tensors Triton loads again and again until a word has come, and how many threads read each word of them.

A program of its own, as ``compile_all.py``, whose cache in Triton it shares. Writes ``{launch: [problem, ...]}`` as
JSON to the path in its first argument, for every launch of ``launches.py`` and of the settings below that polls; a
second argument is a regular expression of the launches wanted. Reads the layouts of Triton's own IR, before it is
lowered: there a tile that is smaller than its block of threads is held, and loaded, by several threads each. A
configuration that spills kilobytes is a problem as well: a menu should not offer it.
"""
from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from launches import SHARDED, WHOLE, Setting, chosen

from k3plan.compiler.kernel import Region
from k3plan.compiler.launches import kernels_of
from k3plan.graphs.bench import random_inputs
from k3plan.graphs.launch import bind_region
from k3plan.ops_triton.compile_check import compile_for, compile_launch
from k3plan.ops_triton.launching import KernelLaunch

WAITING = r"all_reduce|reduce_scatter|all_gather|stripe|moe_tail|mla_query_absorb|attn_res|moe_front"
# with two ranks a tile of words has no dimension for the senders, so it is the smallest there is
SETTINGS = tuple(Setting(f"tp{tp}", tp=tp, layers=(0, 1, 3), choices=(choices,), kernels=WAITING)
                 for tp in (2, 8) for choices in (WHOLE, SHARDED))
MOST_SPILLED = 1024  # bytes a thread
_LAYOUT = re.compile(r"^(#\w+) = #ttg\.blocked<\{sizePerThread = \[([\d, ]+)\], threadsPerWarp = \[([\d, ]+)\], "
                     r"warpsPerCTA = \[([\d, ]+)\]", re.MULTILINE)


def problems(ir: str) -> list[str]:
    """Polled loads of which a thread repeats another's."""
    tiles = {name: [math.prod(dims) for dims in zip(*(map(int, part.split(",")) for part in parts), strict=True)]
             for name, *parts in _LAYOUT.findall(ir)}
    found = []
    for line in ir.splitlines():
        if "tt.load" in line and "isVolatile" in line and "tensor<" in line:
            kind = re.search(r": tensor<([\dx]+)x!tt\.ptr<\w+>, (#\w+)>", line)
            assert kind, line
            shape, tile = [int(n) for n in kind[1].split("x")], tiles.get(kind[2])
            if tile is None:
                found.append(f"a layout that this test does not know: {kind[2]}")
            elif any(wide > size for wide, size in zip(tile, shape, strict=True)):
                found.append(f"a tile of {shape} is polled by threads laid out as {tile}")
    return found


def waits(ir: str) -> bool:
    return "isVolatile" in ir


def launches(wanted: str) -> list[tuple[str, Region, Mapping[str, Any]]]:
    """Every region that polls: those of ``launches.py`` by default, those of one row in each configuration."""
    found = [(name, region, config) for name, region in chosen(WAITING) for config in _configs(region)[:1]]
    for setting in SETTINGS:
        for region in setting.regions(1, 1, setting.choices[0]):
            shapes = "-".join("x".join(map(str, region.graph.values[n].shape)) for n in region.inputs[:3])
            found += [(f"{region.kernel.id}-T1-{shapes}-{setting.label}-c{index}", region, config)
                      for index, config in enumerate(_configs(region))]
    return [one for one in found if re.search(wanted, one[0])]


def _configs(region: Region) -> list[Mapping[str, Any]]:
    return list(region.kernel.configs(region)) if region.kernel.configs else [{}]


def one_of_each(found: list[tuple[str, Region, Mapping[str, Any]]]) -> Iterator[tuple[str, KernelLaunch]]:
    """Launches of which no other is compiled from the same source and constants."""
    seen = set()
    for name, region, config in found:
        for launch in kernels_of(bind_region(region, random_inputs(region, "meta"), config, dependent_launch=True)):
            if launch.signature() not in seen:
                seen.add(launch.signature())
                yield name, launch


def check_one(index: int) -> tuple[str, list[str] | None]:
    name, launch = list(one_of_each(launches(_wanted())))[index]
    ir, spilled = compile_for(launch, "sm_90a").asm["ttgir"], compile_launch(launch, "sm_90a").spilled
    found = problems(ir) + ([f"{spilled} bytes spilled a thread"] if spilled > MOST_SPILLED else [])
    return f"{name} {launch.kernel.__name__}", found if waits(ir) else None


def _wanted() -> str:
    return sys.argv[2] if len(sys.argv) > 2 else ""


def main() -> None:
    count = len(list(one_of_each(launches(_wanted()))))
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        table = {name: found for name, found in pool.map(check_one, range(count), chunksize=8) if found is not None}
    Path(sys.argv[1]).write_text(json.dumps(table))


if __name__ == "__main__":
    main()
