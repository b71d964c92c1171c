"""A model of the mailbox protocol and an explorer of all its interleavings. Knows no GPU.

The model takes every number from the ``Protocol`` that the kernels use: which part of a mailbox an epoch reads and
writes, which part is armed again, how epochs count. What it adds is freedom: within a launch a rank publishes, arms
and reads in any order (its blocks are independent), a fragment arrives any time later, an arming store any time before
the launch ends, ranks run at any speed, a wait may give up at any time if waits are bounded, and a rank may stop for
ever. It is freer than any GPU, so that what holds here holds there.

What stands for a fragment is the number of the step that it was sent in. A read is right when it finds the reader's own
step, wrong when it finds another (a stale or a future fragment); an armed slot makes the reader look again.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from k3plan.ops_cute.protocol import Protocol

ARMED = -1


@dataclass(frozen=True)
class Model:
    """One group of ranks over some steps. ``start``: the epoch before the first, to look at the wrap.

    ``flagged``: the other format, in which a fragment carries its epoch and nothing is armed (``ops_triton``). The last
    four fields are faults to plant."""

    protocol: Protocol
    ranks: int
    steps: int
    start: int = 0
    bounded: bool = False  # waits may give up
    stops: int = 0  # ranks that may stop for ever
    recover: bool = False  # the host clears everything once all ranks rest, and the steps are run again
    stages: int = 1  # a second fragment for each peer, sent after all of the first have been read
    prompt: bool = False  # fewer states: fragments arrive as they are sent, and all slots are armed at once
    flagged: bool = False
    host_epoch: bool = False  # the epoch is a constant of the captured graph
    loose_end: bool = False  # a launch may end before its arming stores have arrived
    silent: bool = True  # a rank that gave up publishes no more

    def epoch(self, step: int) -> int:
        epoch = self.start
        for _ in range(0 if self.host_epoch else step):
            epoch = self.protocol.following(epoch)
        return epoch


class Rank(NamedTuple):
    """Where a rank is: its step, and what of the launch has happened: a bit for each peer's slot, of which there are
    ``ranks`` in each stage."""

    step: int = 0
    sent: int = 0
    armed: int = 0
    read: int = 0
    health: bool = False
    sound: bool = True  # no report when the launch began
    lost: bool = False  # this launch reads NaN
    stopped: bool = False


class State(NamedTuple):
    """``boxes[r][part][slot]``: what lies in the mailbox of r; slot s is rank s's of the first stage, ``ranks + s`` of
    the second. ``flight``: stores under way."""

    ranks: tuple[Rank, ...]
    boxes: tuple[tuple[tuple[int, ...], ...], ...]
    flight: frozenset[tuple[int, int, int, int, int]]  # by whom, in whose mailbox, part, slot, value
    stops: int
    cleared: bool = False


@dataclass
class Result:
    """How many states there are, and the first thing that went wrong with the way there."""

    states: int = 0
    fault: str = ""
    trace: list[str] = field(default_factory=list)


def initial(model: Model) -> State:
    box = tuple((ARMED,) * model.ranks * model.stages for _ in range(model.protocol.parities))
    return State(tuple(Rank() for _ in range(model.ranks)), (box,) * model.ranks, frozenset(), model.stops)


def _with_rank(state: State, index: int, rank: Rank) -> State:
    ranks = state.ranks
    return state._replace(ranks=(*ranks[:index], rank, *ranks[index + 1 :]))


def _deliver(state: State, store: tuple[int, int, int, int, int]) -> State:
    _, owner, part, slot, value = store
    box = [list(p) for p in state.boxes[owner]]
    box[part][slot] = value
    boxes = list(state.boxes)
    boxes[owner] = tuple(tuple(p) for p in box)
    return state._replace(boxes=tuple(boxes), flight=state.flight - {store})


def successors(model: Model, state: State) -> Iterator[tuple[str, State | str]]:
    """Every next state with what happened, or a text in place of the state when that is a fault."""
    for store in state.flight:
        by, owner, part, slot, value = store
        what = f"arming of slot {slot}" if value == ARMED else f"fragment of step {value}"
        yield f"{what} by rank {by} arrives in part {part} of rank {owner}", _deliver(state, store)
    for index, rank in enumerate(state.ranks):
        if rank.step < model.steps and not rank.stopped:
            yield from _launch(model, state, index, rank)
            if state.stops:
                yield f"rank {index} stops", _with_rank(
                    state, index, rank._replace(stopped=True))._replace(stops=state.stops - 1)
    if model.recover and not state.cleared and not state.flight and _at_rest(model, state):
        fresh = initial(model)
        yield "the host clears all ranks", fresh._replace(stops=0, cleared=True)


def _at_rest(model: Model, state: State) -> bool:
    """All launches have ended or will never go on, and someone has reported."""
    resting = all(rank.stopped or rank.step == model.steps for rank in state.ranks)
    return resting and any(rank.health or rank.stopped for rank in state.ranks)


def _launch(model: Model, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State | str]]:
    """What a rank can do next in its launch."""
    part = model.protocol.part(model.epoch(rank.step))
    slots = [s for s in range(model.ranks * model.stages) if s % model.ranks != index]
    peers = sum(1 << slot for slot in slots)
    for stage in range(model.stages):
        yield from _publish(model, state, index, stage, part)
    if not model.flagged:
        yield from _arm(model, state, index, peers)
    for slot in slots:
        if not rank.read >> slot & 1:
            yield from _read(model, state, index, slot, state.boxes[index][part][slot])
    armed = model.flagged or rank.armed == peers
    if rank.sent == peers and rank.read == peers and armed:
        health = rank.health or rank.lost
        yield f"rank {index} ends step {rank.step}", _with_rank(
            state, index, Rank(rank.step + 1, health=health, sound=not health))


def _publish(model: Model, state: State, index: int, stage: int, part: int) -> Iterator[tuple[str, State | str]]:
    """Fragments of one stage to all peers. ``Rank.sent`` has the peers' bits of the stage."""
    rank, others = state.ranks[index], [peer for peer in range(model.ranks) if peer != index]
    before = sum(1 << (stage - 1) * model.ranks + peer for peer in others) if stage else 0
    left = [peer for peer in others if not rank.sent >> stage * model.ranks + peer & 1]
    if not left or rank.read & before != before:
        return
    for some in [[peer] for peer in left] if model.prompt else [left]:
        bits = sum(1 << stage * model.ranks + peer for peer in some)
        after = _with_rank(state, index, rank._replace(sent=rank.sent | bits))
        if rank.sound or not model.silent:
            stores = [(index, peer, part, stage * model.ranks + index, rank.step) for peer in some]
            after = after._replace(flight=state.flight.union(stores))
            after = _deliver(after, stores[0]) if model.prompt else after
        yield f"rank {index} publishes step {rank.step} to {some}", after


def _arm(model: Model, state: State, index: int, peers: int) -> Iterator[tuple[str, State | str]]:
    rank, part = state.ranks[index], model.protocol.armed_part(model.epoch(state.ranks[index].step))
    left = [slot for slot in range(model.ranks * model.stages) if (peers & ~rank.armed) >> slot & 1]
    for some in ([left] if left else []) if model.prompt else [[peer] for peer in left]:
        after = _with_rank(state, index, rank._replace(armed=rank.armed | sum(1 << peer for peer in some)))
        for peer in some:
            store = (index, index, part, peer, ARMED)
            # a store that arrives before the launch ends may as well be issued when it arrives
            after = after._replace(flight=state.flight | {store}) if model.loose_end else _deliver(after, store)
        yield f"rank {index} arms slots {some} of part {part}", after


def _read(model: Model, state: State, index: int, peer: int, found: int) -> Iterator[tuple[str, State | str]]:
    rank = state.ranks[index]
    done = rank._replace(read=rank.read | 1 << peer)
    if not rank.sound:
        # with a report nothing is waited for, and nothing that lies there is taken for a number
        yield f"rank {index} reads NaN for rank {peer}", _with_rank(state, index, done._replace(lost=True))
        return
    come = found != ARMED
    if model.flagged:
        come = come and model.epoch(found) == model.epoch(rank.step)
    if come:
        what = f"rank {index} reads step {found} of rank {peer} in its step {rank.step}"
        yield what, _with_rank(state, index, done) if found == rank.step else f"{what}: not its own step"
    elif model.bounded:
        yield f"rank {index} gives up on rank {peer}", _with_rank(
            state, index, done._replace(lost=True, health=True))


def explore(model: Model, most: int = 3_000_000) -> Result:
    """Visits every state that can be reached, breadth first. A state in which nothing can happen any more is a fault
    unless all ranks are done; with ranks that stop and waits that never give up it is what must be."""
    first = initial(model)
    before: dict[State, tuple[State, str] | None] = {first: None}
    frontier = [first]
    while frontier:
        level, frontier = frontier, []
        for state in level:
            moved = False
            for what, after in successors(model, state):
                moved = True
                if isinstance(after, str):
                    return Result(len(before), after, _way(before, state))
                if after not in before:
                    before[after] = (state, what)
                    frontier.append(after)
            if not moved and not all(rank.step == model.steps or rank.stopped for rank in state.ranks):
                waiting = [i for i, rank in enumerate(state.ranks) if rank.step < model.steps and not rank.stopped]
                return Result(len(before), f"ranks {waiting} wait for ever", _way(before, state))
            assert len(before) <= most, f"more than {most} states"
    return Result(len(before))


def _way(before: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    way: list[str] = []
    step = before[state]
    while step is not None:
        way.append(step[1])
        step = before[step[0]]
    return way[::-1]
