"""What two runs of a bound step left behind, held against each other, and the launch where they part.

Compares everything that some launch wrote and none has written over since, and the states and caches but for their
spare last slot or page.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...compiler.plan import LaunchPlan
from ..bind import Executable
from ..streams import spans
from .storage import KEPT

Results = Mapping[tuple[int, str], Tensor]  # (rank, tensor) -> a copy


@dataclass(frozen=True)
class Unlike:
    """A tensor that two ways left different: the launch that wrote it, and how much."""

    launch: int
    rank: int
    tensor: str
    text: str


def first_unlike(count: int, unlike: Callable[[int], bool]) -> int:
    """The smallest beginning found, by halving, that is unlike while one launch less is alike. ``count`` is unlike."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if unlike(middle) else (middle, high)
    return high


def producer(plan: LaunchPlan, number: int) -> str:
    """The nearest earlier launch whose bytes a launch reads."""
    reads = [(s, a, b) for s, a, b, _ in spans(plan, plan.launches[number])]
    for earlier in range(number - 1, -1, -1):
        for storage, a, b, written in spans(plan, plan.launches[earlier]):
            if written and any(storage == s and a < y and x < b for s, x, y in reads):
                return plan.launches[earlier].id
    return "the launch before it"


def alive(plan: LaunchPlan, count: int) -> dict[str, int]:
    """Tensors that one of the first ``count`` launches wrote and none of them wrote over since, with that launch."""
    found: dict[str, int] = {}
    taken: list[tuple[str, int, int]] = []
    for number in range(count - 1, -1, -1):
        launch = plan.launches[number]
        outputs = {plan.tensors[name].buffer: name for name in launch.outputs}
        for buffer, name in outputs.items():
            placed = plan.buffers[buffer]
            span = ("arena", placed.offset, placed.offset + placed.bytes) if placed.kind == "arena" \
                else (buffer, 0, placed.bytes)
            if not any(span[0] == s and span[1] < b and a < span[2] for s, a, b in taken):
                found[name] = number
        taken += [(s, a, b) for s, a, b, written in spans(plan, launch) if written]
    return found


def results(executable: Executable) -> Results:
    """Copies of what a step left, after waiting for it."""
    wait_for(executable)
    names = [*alive(executable.plan, len(executable.plan.launches)), *_kept_tensors(executable.plan)]
    return {(rank.index, name): rank.tensors[name].clone() for rank in executable.ranks for name in names}


def _kept_tensors(plan: LaunchPlan) -> Iterator[str]:
    return (name for name, buffer in plan.buffers.items() if buffer.kind in KEPT)


def compare(plan: LaunchPlan, count: int, truth: Results, found: Results, tolerance: float) -> Unlike | None:
    """The difference that the earliest launch left."""
    writers = alive(plan, count)
    worst: Unlike | None = None
    for (rank, name), wanted in truth.items():
        got, number = found[rank, name], writers.get(name, _toucher(plan, name, count))
        if name in _kept_tensors(plan):  # the spare slot or page is nobody's
            got, wanted = got[:-1], wanted[:-1]
        if (worst is None or number < worst.launch) and not _alike(got, wanted, tolerance):
            worst = Unlike(number, rank, name, f"{name} of rank {rank}: {_how_unlike(got, wanted)}")
    return worst


def _toucher(plan: LaunchPlan, buffer: str, count: int) -> int:
    touching = [i for i, x in enumerate(plan.launches[:count])
                if any(plan.tensors[t].buffer == buffer for t in (*x.inputs, *x.outputs))]
    return touching[0] if touching else 0


def _alike(got: Tensor, wanted: Tensor, tolerance: float) -> bool:
    if torch.equal(bytes_of(got), bytes_of(wanted)):
        return True
    if not tolerance or not got.is_floating_point():
        # keys of the arg-max hold the bits of a logit, which may round
        return bool(tolerance) and got.dtype == torch.int64
    error = (got.float() - wanted.float()).square().mean().sqrt()
    return bool(error <= tolerance * wanted.float().square().mean().sqrt())


def _how_unlike(got: Tensor, wanted: Tensor) -> str:
    unlike = bytes_of(got).ne(bytes_of(wanted)).view(-1, got.element_size())
    many = int(unlike.any(1).sum())
    text = f"{many} of {got.numel()} elements differ"
    if got.is_floating_point():
        gap = (got.float() - wanted.float()).abs().nan_to_num(float("inf")).max()
        text += f", by up to {float(gap):.3g}"
    return text


def bytes_of(tensor: Tensor) -> Tensor:
    """The elements as u8, in order."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def beginning(executable: Executable, count: int) -> Executable:
    """The first ``count`` launches of a bound step."""
    if count == len(executable.plan.launches):
        return executable
    return replace(executable, plan=replace(executable.plan, launches=executable.plan.launches[:count]),
                   steps=executable.steps[: executable.first[count]], first=executable.first[:count])


def only(executable: Executable, number: int) -> Executable:
    """One launch of a bound step."""
    return replace(executable, plan=replace(executable.plan, launches=(executable.plan.launches[number],)),
                   steps=executable.steps_of(number), first=(0,))


def wait_for(executable: Executable) -> None:
    """Until the device has done everything."""
    if executable.ranks[0].arena.device.type == "cuda":
        torch.cuda.synchronize(executable.ranks[0].arena.device)
