"""The lines of ``k3plan launch links``: the link, then every collective kernel of a plan file at several step sizes.

As in a plan, launches have programmatic edges: a time is what a launch adds to a chain.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ...compiler.compile import lower
from ...compiler.covering.match import find_regions
from ...compiler.device import load_device
from ...compiler.kernel import KernelDef, Menu, Region
from ...compiler.menu import op_kernels
from ...compiler.ops import OPS
from ...compiler.spec import Spec
from ...compiler.tuning import shape_key
from ..bench import random_inputs
from ..launch import bind_region, default_config
from ..tuner.alone import FORMS
from .group import Group
from .measure import bind_ranks, library_launch, measure_link, time_together, unfused, worst_error
from .symmetric import Symmetric

MOST_CONFIGS = 6


def links(spec: Spec, kernels: Iterable[KernelDef], group: Group, rows: Sequence[int], only: str,
          seconds: float) -> Iterator[str]:
    """Yields a line for each thing measured; all ranks must iterate alike."""
    transport, started = Symmetric(group), time.monotonic()
    link = measure_link(group, transport)
    yield (f"link: {link.hop_us:.2f} us a hop (a store, seen by the other rank); a kernel of stores takes "
           f"{link.ramp_us:.2f} us + bytes / {link.gbs:.0f} GB/s")
    menu, met = Menu([*op_kernels(), *kernels]), False
    for count in rows:
        sized = replace(spec, step=replace(spec.step, sequences=count, query=1))
        for region, found in collective_regions(sized, menu):
            if not any(part in region.kernel.id for part in only.split(",")):
                continue
            met = True
            # rank 0's clock decides for all
            if group.exchange("time", {"s": time.monotonic() - started})[0]["s"] > seconds:
                yield "time is up"
                return
            yield from _measure(region, found, count, group, transport)
    if not met:
        yield f"no collective kernel that fits the plan has {' or '.join(only.split(','))} in its id"


def collective_regions(spec: Spec, menu: Menu) -> list[tuple[Region, list[Region]]]:
    """Each collective kernel and shape once, with all regions of its graph; both forms of the algebra."""
    seen: dict[tuple[str, str], tuple[Region, list[Region]]] = {}
    for form in FORMS:
        graph, _ = lower(spec, form)
        found, _ = find_regions(graph, menu, arch=load_device(spec.gpu).arch, rows=spec.step.rows)
        for region in found:
            if is_collective(region) and not region.kernel.entry.startswith("op:"):
                seen.setdefault((region.kernel.id, shape_key(region)), (region, list(found)))
    return list(seen.values())


def is_collective(region: Region) -> bool:
    return any(OPS[node.op].kind == "comm" for node in region.nodes)


def _measure(region: Region, found: Sequence[Region], rows: int, group: Group, transport: Symmetric) -> Iterator[str]:
    where = f"{region.kernel.id} {shape_key(region)}, {rows} rows"
    times: list[tuple[float, dict[str, Any]]] = []
    configs = [dict(c) for c in (region.kernel.configs(region) if region.kernel.configs else [{}])][:MOST_CONFIGS]
    for config in configs:
        with group.together(where):
            bound = bind_ranks(region, config, group, transport, dependent_launch=True)
            for launch in bound.launches:
                getattr(launch, "compile", lambda: None)()
        us = time_together(bound.launches, group)
        error, chain = worst_error(region, bound, group.rank)
        worst = max(fact["error"] for fact in group.exchange("error", {"error": error}))
        if worst > 2 * chain + 2.0**-8:
            yield f"WRONG {where} {config}: error {worst:.2e}, the chain of ops has {chain:.2e}"
        times.append((us, config))
        transport.release()
    us, config = min(times, key=lambda pair: pair[0])
    if len(region.nodes) == 1:
        name = "NCCL" if region.nodes[0].op == "all_reduce" else "the library transport"
        against = f"{name} {time_together([library_launch(region, group)], group):.2f} us"
    else:
        against = f"unfused {_unfused_us(region, found, group, transport):.2f} us"
    every = ", ".join(f"{t:.2f}" for t, _ in times)
    yield f"{us:7.2f} us {where} {config}; {against}; all configurations {every}"


def _unfused_us(region: Region, found: Sequence[Region], group: Group, transport: Symmetric) -> float:
    launches: list[Callable[[], None]] = []
    kept: list[Any] = []  # kernels of collectives know their tensors by address only
    for part in unfused(region, [r for r in found if not r.kernel.entry.startswith("op:")]):
        if is_collective(part):
            kept.append(bind_ranks(part, default_config(part), group, transport, sets=1, dependent_launch=True))
            launches += kept[-1].launches
        else:
            launches.append(bind_region(part, random_inputs(part, str(group.device)), dependent_launch=True))

    def all_of_them() -> None:
        for launch in launches:
            launch()

    us = time_together([all_of_them], group)
    transport.release()
    return us
