"""Runs the collective CuTe DSL kernels on a CPU, all ranks of a group in step (``emulator.py``), mailboxes included.

Addresses of peers are numbers to a kernel. Here every number that is an address of one of the group's tensors becomes
its place in the emulator's memory. All ranks advance together, so whatever a wait waits for has come already, or never
comes: a wait that would look again is a failure, or gives up where it is bounded.
"""
from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import emulator
import numpy as np
import torch

from k3plan.compiler.call import Call


def hold_back(words: Sequence[Any], epoch: Any, epochs: Any) -> list[Any]:
    assert (epoch.a[emulator._now[-1].active] >= 0).all()
    return list(words)


def load_number(at: Any, kind: Any = emulator.Int32) -> Any:
    if kind is emulator.Int32:
        return emulator.load_words(at, 1)[0]
    low, high = (word.a.astype(np.int64) for word in emulator.load_words(at, 2))
    return emulator.Int64(low & 0xFFFFFFFF | high << 32)


def store_number(at: Any, value: Any, guard: Any) -> None:
    emulator.store_words(at, [value], guard=guard)


def encode(word: Any) -> Any:
    code = np.maximum(~word.a.astype(np.int64) & 0xFFFFFFFF, 1)
    return emulator.Int32(code.astype(np.uint32).view(np.int32))


def send_words(at: Any, words: Sequence[Any], guard: Any, *, multicast: bool = False) -> None:
    assert not multicast, "no address here reaches all ranks"
    emulator.store_words(at, words, guard=guard)


def look_at(at: Any, guard: Any = None) -> list[Any]:
    words = emulator.load_words(at, guard=guard)
    return words if guard is None else [emulator.select(guard != 0, word, emulator.Int32(1)) for word in words]


def wait_for(places: Sequence[Any], words: Sequence[Any]) -> list[Any]:
    words, late = _look_again(places, words)
    assert not late.any(), f"{late.sum()} words are waited for, and nobody is left to send them"
    return words


def wait_bounded(places: Sequence[Any], words: Sequence[Any], looks: Any, limit: int) -> tuple[list[Any], Any]:
    words, late = _look_again(places, words)
    return words, emulator.Int32(np.where(late.any(0), limit, looks.a))


def _look_again(places: Sequence[Any], words: Sequence[Any]) -> tuple[list[Any], np.ndarray]:
    """The words once more where one of a place is zero, and which still are."""
    found, late = [], []
    for at, four in zip(places, zip(*[iter(words)] * 4, strict=True), strict=True):
        waits = np.any([word.a == 0 for word in four], axis=0) & emulator._now[-1].active
        again = emulator.load_words(at, guard=emulator.Int32(waits))
        found += [emulator.select(emulator.Boolean(waits), new, old) for new, old in zip(again, four, strict=True)]
        late += [(word.a == 0) & waits for word in found[-4:]]
    return found, np.stack(late)


def store_report(at: Any, values: Sequence[Any], missing: Any) -> None:
    grid = emulator._now[-1]
    for thread in np.flatnonzero(grid.active & (missing.a != 0)):
        place = int(at.a[thread])
        if not grid.memory[place : place + 4].any():
            words = np.array([value.a[thread] for value in values], np.int32)
            grid.memory[place : place + words.nbytes] = words.view(np.uint8)


def _times(words: Sequence[Any], factors: Sequence[Any]) -> list[Any]:
    from k3plan.ops_cute import primitives

    unpack = emulator._execute(primitives, emulator._stand_ins()).unpack
    pairs = zip(unpack(words), unpack(factors), strict=True)
    return emulator.pack([emulator.Float32(a.a * b.a) for a, b in pairs])


MAILBOX = (emulator.fma, hold_back, load_number, store_number, encode, send_words, look_at, wait_for, wait_bounded,
           store_report)


def load(module: types.ModuleType) -> types.ModuleType:
    """A kernel module, its mailbox and what it shares with its kin, as functions over the emulator's numbers."""
    from k3plan.ops_cute import all_reduce_attn_res, mailbox, moe_tail, row_mix

    fakes = emulator.shared_modules()
    boxes = emulator._execute(mailbox, fakes)
    for function in MAILBOX:
        setattr(boxes, function.__name__, function)
    fakes[mailbox.__name__] = boxes
    for each in (row_mix, all_reduce_attn_res, moe_tail, module):
        made = fakes[each.__name__] = emulator._execute(each, fakes)
        if hasattr(made, "_times"):
            made._times = _times
            made._prefetch = lambda at, count, guard: None
    return made


def _tensors(calls: Sequence[Call]) -> list[torch.Tensor]:
    found = [t for call in calls for t in (*call.tensors.values(), *call.rest, *call.scratch.values())]
    return list({t.untyped_storage().data_ptr(): t for t in found}.values())


def run(launch: Any, calls: Sequence[Call]) -> None:
    """Executes a bound launch, or a sequence of them, of a loaded module on the tensors of ``calls``. What they do not
    know to be settled may still be written until a thread has waited."""
    for one in getattr(launch, "launches", (launch,)):
        _run(one, calls)


def unsettled(call: Call) -> list[torch.Tensor]:
    """Inputs and outputs of a call that are no weights and that it does not know to be settled."""
    named = {**call.tensors, **{f"...{i}": block for i, block in enumerate(call.rest)}}
    return [tensor for name, tensor in named.items() if name not in call.settled and name not in WEIGHTS]


WEIGHTS = ("score", "weight", "norm", "up_weight", "w")


def _run(launch: Any, calls: Sequence[Call]) -> None:
    grid = emulator.Grid(launch.grid, launch.cluster, launch.threads, launch.shared)
    tensors = _tensors(calls)
    table = launch.arguments["table"].clone()
    emulator._now.append(grid)
    try:
        grid.take([*tensors, table])
        grid.mark_written([tensor for call in calls for tensor in unsettled(call)])

        def place(number: int) -> int:
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if 0 <= number - storage.data_ptr() < storage.nbytes():
                    return grid.starts[storage.data_ptr()] + number - storage.data_ptr()
            return number

        here = torch.tensor([[place(n) for n in row] for row in table.tolist()])
        start = grid.starts[table.untyped_storage().data_ptr()]
        grid.memory[start : start + here.nbytes] = here.numpy().view(np.uint8).reshape(-1)
        arguments = [emulator.Pointer(emulator.Int64(start)) if name == "table" else emulator.Int64(place(value))
                     for name, value in launch.arguments.items()]
        launch.kernel(tuple(arguments), tuple(launch.arguments), launch.parameters)
        grid.give(tensors)
    finally:
        emulator._now.pop()


def entry_point(*, staged: bool = False) -> Callable[[str], Any]:
    """In place of ``launch.entry_point``. ``staged``: as if the blocks of all ranks did not fit at once."""
    modules: dict[str, types.ModuleType] = {}
    seen: list[Call] = []  # a rank that is bound for itself writes to the others' mailboxes

    def find(entry: str) -> Any:
        module, _, name = entry.partition(":")
        if module not in modules:
            modules[module] = load(importlib.import_module(module))
            modules[module].fits_at_once = lambda blocks, device: not staged  # type: ignore[attr-defined]
        bind = getattr(modules[module], name)

        def bound(calls: Sequence[Call], links: Iterable[Any], **more: Any) -> Callable[[], None]:
            launch = bind(calls, links, **more)
            seen.extend(calls)
            return lambda: run(launch, seen)

        return bound

    return find
