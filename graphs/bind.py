"""Boundary 5: a plan bound to weights, caches and an arena. ``run`` decides nothing and allocates no buffer.

The transport says which ranks this process binds: all of them (``emulated``), rank 0 alone (``loopback``), or its own
one of several processes. A launch runs on each bound rank in turn, a collective once for all of them. A torch kernel
computes in fp32 and is rounded to the dtype of the value that it fills.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..compiler.arguments import Arguments
from ..compiler.call import Call
from ..compiler.errors import BindError
from ..compiler.memory import Tensor as Placed
from ..compiler.ops import OPS
from ..compiler.plan import Launch, LaunchPlan, PlanChoice
from .launch import entry_point, links_of, make_call
from .launch_log import logged
from .load import TORCH_DTYPES, TensorSource, load_weights, source_of
from .random_weights import RankRandom
from .stock import bind_op
from .transport import Transport, transport_of

POISON = 0xFF  # NaN in every float dtype, -1 in every integer one


@dataclass(frozen=True)
class Rank:
    """The storage of one rank: a byte tensor for each buffer, and every planned tensor as a view of one."""

    index: int
    arena: Tensor
    buffers: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, repr=False)
class Executable:
    """A bound plan. ``outputs`` are the first bound rank's tensors; ``write`` fills those of all bound ranks."""

    plan: LaunchPlan
    ranks: tuple[Rank, ...]
    steps: tuple[Callable[[], None], ...]  # of all launches in order; a launch has one a rank, a collective one
    first: tuple[int, ...]  # index of each launch's first step
    sequences: int  # slots of the states, and sequences that the pages are for; more than the plan's when shared

    def __repr__(self) -> str:
        return f"Executable({self.plan!r}, {len(self.ranks)} ranks on {self.ranks[0].arena.device})"

    def steps_of(self, number: int) -> tuple[Callable[[], None], ...]:
        """The steps of launch ``number``."""
        return self.steps[self.first[number] : (*self.first, len(self.steps))[number + 1]]

    @property
    def outputs(self) -> dict[str, Tensor]:
        """Step outputs by name ("tokens" i32 [T], "logits" fp32 [T, V], "hidden" [T, D]), overwritten each step."""
        return {name: self.ranks[0].tensors[value] for name, value in self.plan.outputs.items()}

    def write(self, **inputs: Tensor) -> None:
        """Fills step inputs. Raises BindError: an unknown name, another shape, or a value out of range."""
        for name, tensor in inputs.items():
            if name not in self.plan.inputs or name == "rank":
                known = ", ".join(known for known in self.plan.inputs if known != "rank")
                raise BindError(f"the plan has no input {name!r}\n  fix: it takes {known}")
            bound = self.ranks[0].tensors[name]
            check_kind(name, tensor, bound)
            if tensor.shape != bound.shape:
                raise BindError(f"{name}: shape {tuple(tensor.shape)}, the plan has {tuple(bound.shape)}\n"
                                "  fix: pad to the plan's rows with -1, or compile a plan of that size")
            check_range(self, name, tensor)
            for rank in self.ranks:
                rank.tensors[name].copy_(tensor)

    def run(self) -> None:
        """One step over the inputs that were written last."""
        for step in self.steps:
            step()

    def reset(self, slot: int) -> None:
        """Empties the state of ``slot`` for a new sequence. Its first step has ``accepted`` 1. Raises BindError."""
        if not 0 <= slot < self.sequences:
            raise BindError(f"there is no slot {slot}\n  fix: slots are 0 to {self.sequences - 1}")
        for rank in self.ranks:
            for name, buffer in self.plan.buffers.items():
                if buffer.kind == "state":
                    rank.tensors[name][slot].zero_()

    def poison(self) -> None:
        """Fills arena and outputs with NaN, so that a value nobody wrote cannot pass for a result."""
        for rank in self.ranks:
            rank.arena.fill_(POISON)
            for name, buffer in self.plan.buffers.items():
                if buffer.kind == "output":
                    rank.buffers[name].fill_(POISON)


def bind(plan: LaunchPlan, source: TensorSource | Mapping[str, Tensor] | RankRandom, *,
         device: str | torch.device = "cpu", transport: Transport | str = "emulated", progress: bool = False,
         wait_limit: int = 0, shared: Executable | None = None) -> Executable:
    """Loads the weights of the transport's ranks from ``source`` (a Checkpoint or a state dict), allocates and resolves
    each launch to a callable.

    ``transport`` is a Transport, or "emulated" or "loopback". ``wait_limit`` bounds every wait between ranks to so
    many looks at the mailbox, for debugging; 0 waits for ever. ``shared`` is another plan of the same model, bound for
    at least as many sequences: its weights, states and caches are used here too, and only what differs is loaded.

    Raises CheckpointError (weights) and BindError (a kernel that cannot run on ``device``).
    """
    require_plan(plan)
    read = source.load if isinstance(source, RankRandom) else partial(load_weights, source_of(source))
    device = _device(device)
    transport = transport_of(transport)
    indices = transport.local_ranks(plan.spec.parallel.tp)
    # first of all: between processes this is a meeting, and whatever fails later fails alone
    boxes = transport.allocate_mailboxes(mailbox_sizes(plan), device)
    ranks = []
    for number, (index, own) in enumerate(zip(indices, boxes, strict=True)):
        kept = _kept(plan, shared, number) if shared is not None else {}
        wanted = {name: weight for name, weight in plan.weights.items() if name not in kept}
        weights = read(wanted, index, device=device, progress=progress)
        ranks.append(_allocate(plan, index, {**weights, **own, **kept}, device))
    steps: list[Callable[[], None]] = []
    first = []
    for number, launch in enumerate(plan.launches):
        first.append(len(steps))
        steps += _resolve(plan, launch, ranks, transport, number, wait_limit)
    sequences = plan.spec.step.sequences if shared is None else shared.sequences
    executable = Executable(plan, tuple(ranks), tuple(steps), tuple(first), sequences)
    executable.poison()
    return logged(executable)


def require_plan(plan: object) -> LaunchPlan:
    """``plan``. Raises BindError: it is something else, such as a path."""
    if isinstance(plan, LaunchPlan):
        return plan
    raise BindError(f"{plan!r} is not a launch plan\n  fix: pass what k3plan.compile_plan or k3plan.load_plan returns")


def _device(name: str | torch.device) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BindError(f"torch sees no GPU here, and device is {device}\n  fix: k3plan doctor says what is missing")
    return device


def mailbox_sizes(plan: LaunchPlan) -> dict[str, int]:
    """Bytes of each mailbox of a plan, by buffer. Other ranks write there."""
    names = {plan.tensors[tensor].buffer for launch in plan.launches for name, tensor in launch.scratch.items()
             if name.endswith("mailbox")}
    return {name: plan.buffers[name].bytes for name in sorted(names)}


def _kept(plan: LaunchPlan, shared: Executable, number: int) -> dict[str, Tensor]:
    """Weights, states and caches of a rank of ``shared`` that are ``plan``'s too."""
    other, tensors = shared.plan, shared.ranks[number].tensors
    kept = {name: tensors[name] for name, weight in plan.weights.items() if other.weights.get(name) == weight}
    for name, buffer in plan.buffers.items():
        if buffer.kind in ("state", "cache"):
            bound, wanted = tensors.get(name), plan.tensors[name]
            if bound is None or bound.shape[1:] != wanted.shape[1:] or bound.shape[0] < wanted.shape[0]:
                raise BindError(f"{name}: shape {wanted.shape}, the plan that was bound first has no such tensor\n"
                                "  fix: compile both plans from one file, and bind the one of most sequences first")
            kept[name] = bound
    return kept


def check_kind(name: str, tensor: object, bound: Tensor) -> None:
    """Raises BindError: not a tensor, or floats where the step reads integers, which a copy would cut."""
    if not isinstance(tensor, Tensor) or tensor.is_floating_point() != bound.is_floating_point():
        said = tensor.dtype if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
        raise BindError(f"{name}: {said}, the step reads {bound.dtype}\n  fix: pass a tensor of that dtype")


def check_range(executable: Executable, name: str, tensor: Tensor) -> None:
    """Raises BindError: a value of step input ``name`` that the storage does not have. Reads the values back."""
    step, sequences = executable.plan.spec.step, executable.sequences
    pages = sequences * -(-step.context // step.page_size)
    limits = {
        "tokens": (-1, executable.plan.spec.model.vocab - 1), "positions": (-1, step.context - 1),
        "slots": (-1, sequences - 1), "page_table": (-1, pages - 1), "accepted": (1, step.query),
    }
    if name not in limits or not tensor.numel():
        return
    low, high = limits[name]
    if int(tensor.min()) < low or int(tensor.max()) > high:
        padding = "-1 is padding; " if low < 0 else ""
        raise BindError(f"{name}: values {int(tensor.min())} to {int(tensor.max())}, the plan allows {low} to {high}\n"
                        f"  fix: {padding}correct the values, or compile a plan that serves more")
    live = [slot for slot in tensor.tolist() if slot >= 0] if name == "slots" else []
    if len(set(live)) < len(live):
        raise BindError(f"slots: {live} has one twice\n  fix: give each sequence of the step a slot of its own")


def _allocate(plan: LaunchPlan, index: int, given: Mapping[str, Tensor], device: torch.device) -> Rank:
    """The storage of a rank; ``given`` are its weights and mailboxes, and storage of another plan."""
    arena = torch.empty(plan.arena_bytes, dtype=torch.uint8, device=device)
    buffers = {}
    for name, buffer in plan.buffers.items():
        if buffer.kind == "arena":
            buffers[name] = arena[buffer.offset : buffer.offset + buffer.bytes]
        elif name in given:
            buffers[name] = given[name].reshape(-1).view(torch.uint8)
        else:
            buffers[name] = torch.zeros(buffer.bytes, dtype=torch.uint8, device=device)
    tensors = {name: _view(buffers[placed.buffer], placed, plan.buffers[placed.buffer].kind)
               for name, placed in plan.tensors.items()}
    for name in plan.inputs:
        empty = -1 if plan.tensors[name].dtype == "i32" else 0
        tensors[name].fill_(index if name == "rank" else 1 if name == "accepted" else empty)
    return Rank(index, arena, buffers, tensors)


def _view(storage: Tensor, placed: Placed, kind: str) -> Tensor:
    typed, shape = storage.view(TORCH_DTYPES[placed.dtype]), placed.shape
    if kind in ("state", "cache"):
        # storage of a larger plan has more slots or pages, and its scratch one is the last of those
        shape = (typed.numel() // placed.stride[0], *shape[1:])
    return typed.as_strided(shape, placed.stride, typed.storage_offset() + placed.offset)


def _resolve(plan: LaunchPlan, launch: Launch, ranks: list[Rank], transport: Transport, number: int,
             wait_limit: int) -> list[Callable[[], None]]:
    choice = plan.choice(launch)
    kind, _, name = choice.entry.partition(":")
    if kind != "op":
        calls = [_call(choice, launch, rank, plan.spec.parallel.tp, number, wait_limit) for rank in ranks]
        if any(OPS[op].kind == "comm" for op in choice.ops):
            return [entry_point(choice.entry)(calls, links_of(calls, transport))]
        return [entry_point(choice.entry)(call) for call in calls]
    if OPS[name].kind == "comm":
        inputs, outputs = ([rank.tensors[n[0]] for rank in ranks] for n in (launch.inputs, launch.outputs))
        return [transport.collective(name, choice.attrs["o0"], inputs, outputs)]
    return [_compute(choice, launch, rank, name) for rank in ranks]


def _call(choice: PlanChoice, launch: Launch, rank: Rank, ranks: int, number: int, wait_limit: int) -> Call:
    if rank.arena.device.type != "cuda":
        raise BindError(f"{launch.id}: kernel {choice.kernel} runs on a GPU, this is {rank.arena.device}\n"
                        "  fix: compile with --set target.gpu=cpu")
    scratch = {name: rank.tensors[tensor] for name, tensor in launch.scratch.items()}
    return make_call(Arguments(launch.names, launch.rest, choice.attrs), rank.tensors, scratch=scratch,
                     config=choice.config, dependent_launch=launch.dependent,
                     settled=launch.settled if launch.dependent else launch.inputs, ranks=ranks, number=number,
                     wait_limit=wait_limit)


def _compute(choice: PlanChoice, launch: Launch, rank: Rank, name: str) -> Callable[[], None]:
    definition, attrs = OPS[name], choice.attrs["o0"]
    inputs = [rank.tensors[n] for n in launch.inputs]
    # an output that updates an input in place is that input already
    written = {n: rank.tensors[n] for n in launch.outputs}
    outs = [(i, written[n]) for i, n in _output_slots(launch, definition.alias) if n in written]
    if rank.arena.device.type == "cuda" and all(n in rank.tensors for n in launch.results):
        direct = bind_op(name, inputs, [rank.tensors[n] for n in launch.results], attrs)
        if direct is not None:
            return direct

    def step() -> None:
        results = definition.fn(*inputs, **attrs)
        results = results if isinstance(results, tuple) else (results,)
        for index, out in outs:
            out.copy_(results[index])

    return step


def _output_slots(launch: Launch, alias: Mapping[int, int]) -> list[tuple[int, str]]:
    """Result index of each output that must be copied."""
    return [(i, n) for i, n in enumerate(launch.results) if i not in alias]
