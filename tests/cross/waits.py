"""What every Triton kernel touches before it waits: compiled with dependent launch for sm_90a, read from its PTX.

A program of its own, as ``compile_all.py``, whose cache in Triton it shares. Writes a list of findings as JSON to the
path in its first argument; a second argument is a regular expression of the launches wanted.

Before its wait a kernel may load weights, step inputs and tables of addresses, which nobody writes during a step, and
states and caches, whose launch must then be the only one of the step that writes what it reads. It may store to a
state. Anything else must be named in ``EARLY`` of its file. Every block must pass a wait before it ends, but for
kernels in ``LEAVES``. A kernel lets the next one start only behind its wait where its menu says that it is ``late``,
and there no block does so sooner.
"""
from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from launches import chosen
from ptx_waits import Pointer, find_early

from k3plan.compiler.kernel import Region
from k3plan.compiler.launches import kernels_of
from k3plan.graphs.bench import random_inputs
from k3plan.graphs.launch import bind_region, default_config
from k3plan.ops_triton import collectives, moe_front
from k3plan.ops_triton.compile_check import compile_for
from k3plan.ops_triton.exchange import make_table
from k3plan.ops_triton.launching import KernelLaunch

LOADED, STORED = {"weight", "input", "state", "cache", "table"}, {"state"}
# blocks of the grid that another one does the work of; and block numbers that no grid has. The launch ends only after
# its blocks that do wait, so what follows is in order all the same
LEAVES = {"_down_by_pair", "_exchange"}

TABLES: dict[int, list[Any]] = {}


def _remember(calls: Any, links: Any, columns: Any) -> Any:
    """``make_table``, and which tensor each column of rank 0 is."""
    table, call = make_table(calls, links, columns), calls[0]
    own = [call.scratch[name] for name in ("mailbox", "epochs", "health")]
    TABLES[_storage(table)] = [*columns[0], *own]
    return table


def _storage(tensor: Any) -> int:
    return tensor.untyped_storage()._cdata


def _roles(region: Region, tensors: Mapping[str, Any]) -> dict[int, str]:
    """Role of each storage; "input" for what the host writes before a step."""
    roles: dict[int, str] = {}
    for name, tensor in tensors.items():
        role = "input" if name in region.graph.inputs else region.graph.values[name].role
        if roles.get(_storage(tensor), "activation") == "activation":
            roles[_storage(tensor)] = role
    return roles


def _role(pointer: Pointer, launch: KernelLaunch, roles: Mapping[int, str]) -> str:
    """What a pointer of a kernel points to."""
    index, column = pointer
    name = _names(launch)[index]
    tensor = launch.pointers[name]
    if name == "table":
        if column is None:
            return "table"
        tensor = TABLES[_storage(tensor)][column]
    elif name in getattr(sys.modules[launch.kernel.__module__], "EARLY", ()):
        return "named"
    return roles.get(_storage(tensor), "scratch")


def _names(launch: KernelLaunch) -> list[str]:
    """Pointers in the order of the kernel's parameters."""
    return [name for name in launch.kernel.arg_names if name in launch.pointers]


def look_at(name: str, region: Region) -> Iterator[str]:
    """Findings of all kernels of one launch."""
    tensors = random_inputs(region, "meta")
    roles = _roles(region, tensors)
    late = region.kernel.late(default_config(region))
    bound = bind_region(region, tensors, default_config(region), dependent_launch=True)
    for launch in kernels_of(bound):
        seen = find_early(compile_for(launch, "sm_90a").asm["ptx"], 0 if _names(launch)[0] == "table" else None)
        kernel = f"{name} ({launch.kernel.__name__})"
        if not seen.waits or not seen.triggers:
            yield f"{kernel}: {seen.waits} waits, {seen.triggers} triggers"
        if late != (not seen.early):
            yield f"{kernel}: {seen.early} of {seen.triggers} triggers before the wait, its menu says late={late}"
        if seen.exits and launch.kernel.__name__ not in LEAVES:
            yield f"{kernel}: a block may end without a wait"
        for access in seen.accesses:
            found = {_role(pointer, launch, roles) for pointer in access.pointers} or {"unknown"}
            if found - (LOADED | {"named"} if access.kind == "ld" else STORED):
                yield f"{kernel}: {access.kind} of {', '.join(sorted(found))} before the wait: {access.text}"


def _findings(wanted: str, index: int) -> list[str]:
    # the tables of collectives have no addresses here, so their columns are noted as they are made
    collectives.make_table = moe_front.make_table = _remember  # type: ignore[assignment]
    return list(look_at(*chosen(wanted)[index]))


def main() -> None:
    wanted = sys.argv[2] if len(sys.argv) > 2 else ""
    looked = [name for name, _ in chosen(wanted)]
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        findings = [one for found in pool.map(partial(_findings, wanted), range(len(looked))) for one in found]
    Path(sys.argv[1]).write_text(json.dumps({"looked": looked, "findings": findings}))


if __name__ == "__main__":
    main()
