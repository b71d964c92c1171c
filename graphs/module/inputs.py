"""The inputs of a step: from an engine's tensors to the static buffers of a bucket, the rest padded.

Allocates nothing. Padding is -1 in index inputs, 0 in rows of the residual stream, 1 in ``accepted``.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ...compiler.errors import BindError
from ..bind import Executable, check_kind, check_range
from ..buckets import Buckets

BY_ROW = ("tokens", "hidden", "positions")  # and the blocks: one entry a row; the others have one a sequence


def run_step(buckets: Buckets, given: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """One step of the smallest bucket that serves ``given["positions"]`` [B, l], its spare rows padded.

    Returns the plan's outputs as [B, l, ...]: views that the next step of that bucket writes over.
    Raises BindError: no bucket is so large, or an input is missing, unknown, or does not fit.
    """
    bound, query = buckets.executables[0].ranks[0].tensors, buckets.executables[0].plan.spec.step.query
    for name, tensor in given.items():
        if tensor is not None and name in bound:
            check_kind(name, tensor, bound[name])
    positions = given.get("positions")
    shape = None if positions is None else tuple(positions.shape)
    if shape is None or len(shape) != 2 or not shape[0] or not 1 <= shape[1] <= query:
        raise BindError(f"positions: shape {shape}, a step takes [sequences, 1 to {query} rows]\n"
                        "  fix: pass one row of positions for each sequence, or compile a plan for more rows")
    count, length = shape
    index = buckets.choose(count)
    executable = buckets.executables[index]
    write_inputs(executable, given)
    buckets.run(index)
    return {name: out.unflatten(0, (-1, query))[:count, :length] for name, out in executable.outputs.items()}


def write_inputs(executable: Executable, given: Mapping[str, Tensor | None]) -> None:
    """Fills the step inputs of every rank. Raises BindError: an input is missing, unknown, or does not fit."""
    plan = executable.plan
    wanted = [name for name in plan.inputs if name != "rank"]
    missing = [name for name in wanted if name != "accepted" and given.get(name) is None]
    unknown = [name for name, tensor in given.items() if tensor is not None and name.startswith("block")
               and name not in wanted]
    if missing or unknown:
        said = f"has no {', '.join(missing)}" if missing else f"does not take {', '.join(unknown)}"
        raise BindError(f"the step {said}\n  fix: pass {', '.join(wanted)}")
    positions = given["positions"]
    assert positions is not None
    for name in wanted:
        _write(executable, name, given.get(name), positions.shape)


def _write(executable: Executable, name: str, tensor: Tensor | None, live: Sequence[int]) -> None:
    """Copies ``tensor`` into the first ``live`` (sequences, rows) of an input and pads the rest."""
    first, query = executable.ranks[0].tensors[name], executable.plan.spec.step.query
    empty = 1 if name == "accepted" else 0 if first.is_floating_point() else -1
    by_row = name in BY_ROW or name.startswith("block")
    if tensor is not None:
        tail = first.shape[1:]
        lead = tuple(live) if by_row else (live[0],)
        fits = tensor.shape == (*lead, *tail) or (name == "page_table" and tensor.dim() == 2
                                                  and tensor.shape[0] == live[0] and tensor.shape[1] <= tail[0])
        if not fits:
            raise BindError(f"{name}: shape {tuple(tensor.shape)}, with these positions it must be {(*lead, *tail)}\n"
                            "  fix: pass one entry for each row, or for each sequence")
        if tensor.device.type == "cpu" and not first.is_floating_point():
            check_range(executable, name, tensor)
    for rank in executable.ranks:
        whole = rank.tensors[name]
        target = whole.unflatten(0, (-1, query)) if by_row else whole
        live_part = None
        if tensor is not None:
            live_part = target[: live[0], : live[1]] if by_row else target[: live[0]]
            live_part = live_part[:, : tensor.shape[1]] if name == "page_table" else live_part
        if live_part is None or live_part.numel() < whole.numel():
            whole.fill_(empty)
        if live_part is not None and tensor is not None:
            live_part.copy_(tensor)
