"""From a planned kernel to a function that launches it: names to tensors, scratch, entry point.

Decides nothing: which kernel, which configuration and which buffers are the plan's. Binding from a plan file and
binding a region directly (tests, tuning) share this file, so that both hand a kernel the same ``Call``.
"""
from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from ..compiler.arguments import Arguments, arguments_of
from ..compiler.call import Call, Launch, Scratch
from ..compiler.errors import BindError
from ..compiler.kernel import Region
from ..compiler.ops import OPS
from .load import TORCH_DTYPES
from .stock import bind_op
from .transport import Loopback, Transport


def scratch_of(region: Region, config: Mapping[str, Any]) -> dict[str, Scratch]:
    """What the region's kernel wants as workspace under ``config``."""
    return dict(region.kernel.scratch(region, config)) if region.kernel.scratch else {}


def default_config(region: Region) -> dict[str, Any]:
    """The configuration of an untuned shape: the kernel's first candidate."""
    candidates = region.kernel.configs(region) if region.kernel.configs else ()
    return dict(candidates[0]) if candidates else {}


def entry_point(entry: str) -> Callable[..., Launch]:
    """The ``bind`` function that an entry string ``module:function`` names."""
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(module), name)


def make_call(arguments: Arguments, tensors: Mapping[str, torch.Tensor], *,
              scratch: Mapping[str, torch.Tensor] | None = None, config: Mapping[str, Any] | None = None,
              dependent_launch: bool = False, settled: Collection[str] = (), ranks: int = 1, number: int = 0,
              wait_limit: int = 0) -> Call:
    """A ``Call`` from value names and their tensors; ``settled`` are values."""
    named = {**arguments.names, **{f"...{i}": value for i, value in enumerate(arguments.rest)}}
    return Call(
        tensors={name: tensors[value] for name, value in arguments.names.items()},
        rest=tuple(tensors[value] for value in arguments.rest), attrs=arguments.attrs,
        scratch=scratch or {}, config=config or {}, dependent_launch=dependent_launch,
        settled=frozenset(name for name, value in named.items() if value in settled), ranks=ranks, number=number,
        wait_limit=wait_limit)


def bind_region(region: Region, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None = None, *,
                scratch: Mapping[str, torch.Tensor] | None = None, dependent_launch: bool = False,
                settled: Collection[str] | None = None) -> Launch:
    """Binds the kernel of ``region`` to ``tensors``, given by value name.

    ``config`` of None is the kernel's default. ``scratch`` is allocated here when not given. A collective is bound to
    one rank alone (loopback). ``settled`` of None are the inputs that the pattern takes by ``...``: nothing here writes
    them, and in a step the finished blocks of the residual stream are settled but for the newest at most.
    """
    config = default_config(region) if config is None else config
    kind, _, op = region.kernel.entry.partition(":")
    if kind == "op":
        return _bind_library_call(region, op, tensors)
    if scratch is None:
        device = next(iter(tensors.values())).device
        scratch = {name: allocate(wanted, device) for name, wanted in scratch_of(region, config).items()}
    arguments = arguments_of(region)
    call = make_call(arguments, tensors, scratch=scratch, config=config, dependent_launch=dependent_launch,
                     settled=arguments.rest if settled is None else settled)
    if any(OPS[node.op].kind == "comm" for node in region.nodes):
        return entry_point(region.kernel.entry)([call], links_of([call], Loopback()))
    return entry_point(region.kernel.entry)(call)


def _bind_library_call(region: Region, op: str, tensors: Mapping[str, torch.Tensor]) -> Launch:
    (node,) = region.nodes
    launch = bind_op(op, [tensors[n] for n in node.inputs], [tensors[n] for n in node.outputs], node.attrs)
    if launch is None:
        raise BindError(f"{node.name}: no library call computes {op} on these tensors\n  fix: use a kernel of a menu")
    return launch


def links_of(calls: list[Call], transport: Transport) -> list[Any]:
    """Links of each mailbox: a list with one for each call, or a list of such lists where a kernel has several."""
    names = [name for name in calls[0].scratch if name.endswith("mailbox")]
    found = [transport.links([call.scratch[name] for call in calls]) for name in names]
    return found[0] if len(found) == 1 else found


def allocate(wanted: Scratch, device: torch.device | str) -> torch.Tensor:
    """Workspace as asked for; what need not be zero is left as it comes."""
    make = torch.zeros if wanted.zeroed else torch.empty
    return make(wanted.shape, dtype=TORCH_DTYPES[wanted.dtype], device=device)


def in_place(region: Region) -> dict[str, str]:
    """Output value -> the input value whose storage it updates."""
    found: dict[str, str] = {}
    for node in region.solid:
        for out, source in OPS[node.op].alias.items():
            name = node.inputs[source]
            found[node.outputs[out]] = found.get(name, name)
    return found
