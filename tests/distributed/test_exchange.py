"""The exchange between ranks: its protocol in every interleaving, and its kernels one rank at a time.

The interpreter runs a launch as two halves, sending and collecting, so that a test can put the halves of two ranks in
any order that real ranks could have.
"""
from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from k3plan.compiler.call import Call, emulated_links
from k3plan.compiler.launches import LaunchSequence
from k3plan.face import compile_plan
from k3plan.ops_triton.collectives import bind_exchange, bind_two_shot
from k3plan.ops_triton.collectives_menu import HEALTH, mailbox

RANKS, WIDTH, LIMIT = 2, 128, 3
ALL_ONES = -1  # as i32: a NaN, and the one payload that armed words cannot carry


# the protocol


@dataclass(frozen=True)
class Rules:
    """What ``exchange.py`` says of a form of words; ``rearm`` is the part zeroed in epoch e, None for flagged words."""

    parts: int
    rearm: int | None = None


FLAGGED, ARMED = Rules(2), Rules(3, -1)


def explore(rules: Rules, launches: int = 4, ranks: int = 2) -> str:
    """Runs all interleavings of sends, collections and re-arming; how the first bad one ends, or ""."""
    # a rank's state: launch, what it does next; a box: (epoch, payload) of each part and sender
    acts = ranks - 1 + 1 + (1 if rules.rearm is not None else 0)
    start = ((0,) * ranks, ((None,) * (rules.parts * ranks),) * ranks)
    seen, todo = {start}, [start]
    while todo:
        counters, boxes = todo.pop()
        moved = False
        for rank in range(ranks):
            epoch, act = divmod(counters[rank], acts)
            if epoch == launches:
                continue
            part, held = epoch % rules.parts, [list(box) for box in boxes]
            if act < ranks - 1:
                peer = (rank + 1 + act) % ranks
                held[peer][part * ranks + rank] = epoch
            elif act == ranks - 1:
                got = [boxes[rank][part * ranks + peer] for peer in range(ranks) if peer != rank]
                if rules.rearm is None:
                    if any(word != epoch for word in got):
                        continue
                elif any(word is None for word in got):
                    continue
                elif any(word != epoch for word in got):
                    return f"rank {rank} read {got} in epoch {epoch}"
            else:
                for peer in range(ranks):
                    held[rank][(epoch + (rules.rearm or 0)) % rules.parts * ranks + peer] = None
            moved = True
            state = (tuple(c + (r == rank) for r, c in enumerate(counters)), tuple(map(tuple, held)))
            if state not in seen:
                seen.add(state)
                todo.append(state)
        if not moved and any(c < launches * acts for c in counters):
            return f"hangs at {counters}"
    return ""


@pytest.mark.parametrize(("rules", "ranks"), [(FLAGGED, 2), (FLAGGED, 3), (ARMED, 2), (ARMED, 3)])
def test_no_interleaving_goes_wrong(rules: Rules, ranks: int) -> None:
    assert explore(rules, 7 if ranks == 2 else 4, ranks) == ""


@pytest.mark.parametrize("rules", [Rules(1), Rules(3, 1), Rules(2, -1)],
                         ids=["one-part", "rearm-next", "two-armed-parts"])
def test_the_exploration_finds_protocols_that_do_not_work(rules: Rules) -> None:
    assert explore(rules, 7)


# the kernels


@dataclass
class Pair:
    """Two ranks with a binding each; ``halves[rank]`` are the two halves of its launch."""

    calls: list[Call]
    halves: list[tuple[Any, ...]]

    @classmethod
    def make(cls, *, armed: bool, epoch: int = 0, limit: int = LIMIT) -> Pair:
        scratch = [{name: torch.zeros(want.shape, dtype={"i64": torch.int64, "i32": torch.int32}[want.dtype])
                    for name, want in mailbox(RANKS, WIDTH // 2, 2, armed=armed).items()} for _ in range(RANKS)]
        for own in scratch:
            own["epochs"].fill_(epoch)
        calls = [Call({"x": torch.zeros(1, WIDTH, dtype=torch.bfloat16), "y": torch.zeros(1, WIDTH).bfloat16()},
                      attrs={"y": {"ranks": RANKS, "reduce": "sum"}}, scratch=own,
                      config={"units": WIDTH // 4, "warps": 1}, number=11, wait_limit=limit) for own in scratch]
        links = emulated_links([own["mailbox"] for own in scratch])
        halves = []
        for rank in range(RANKS):
            launch: Any = bind_exchange(calls[rank : rank + 1], links[rank : rank + 1])
            assert isinstance(launch, LaunchSequence)
            halves.append(launch.launches)
        return cls(calls, halves)

    def give(self, rank: int, seed: int) -> Tensor:
        """A new input of a rank; multiples of 1/8, whose sums are exact."""
        values = torch.randint(-64, 64, (1, WIDTH), generator=torch.Generator().manual_seed(seed)) / 8
        self.calls[rank].tensors["x"].copy_(values)
        return values

    def health(self, rank: int) -> list[int]:
        return self.calls[rank].scratch["health"].tolist()


@pytest.mark.parametrize("armed", [False, True], ids=["flagged", "armed"])
@pytest.mark.parametrize("seed", [0, 2])
def test_a_rank_may_be_a_step_ahead(armed: bool, seed: int) -> None:
    """Halves of both ranks in a random order that real ranks could have: what is collected is what was sent."""
    pair, choose = Pair.make(armed=armed), random.Random(seed)
    done, sent = [0, 0], [[], []]  # halves run; inputs
    ahead = 0
    while min(done) < 24:
        rank = choose.randrange(RANKS)
        launch, half = divmod(done[rank], 2)
        if launch == 12 or (half == 1 and done[1 - rank] < 2 * launch + 1):
            continue  # all over, or it would wait for the peer's sending
        if half == 0:
            sent[rank].append(pair.give(rank, 100 * launch + rank))
        pair.halves[rank][half]()
        done[rank] += 1
        ahead = max(ahead, abs(done[0] - done[1]))
        if half == 1:
            assert torch.equal(pair.calls[rank].tensors["y"].float(), sent[0][launch] + sent[1][launch])
            assert not any(pair.health(rank))
    assert ahead >= 2, "no order of this seed had a rank ahead"


@pytest.mark.parametrize(("ranks", "armed", "dtype"), [
    (4, True, torch.bfloat16), (2, True, torch.float32), (4, False, torch.float32)], ids=str)
def test_a_sum_in_two_shots(ranks: int, armed: bool, dtype: torch.dtype) -> None:
    """Each rank adds up a part of each block; all ranks have the whole sum, two launches in a row."""
    rows, words = 2, 64
    width = words * 4 // dtype.itemsize
    kinds = {"i64": torch.int64, "i32": torch.int32}
    scratch = [{name: torch.zeros(want.shape, dtype=kinds[want.dtype])
                for name, want in mailbox(ranks, 2 * rows * words // ranks, rows * 2, armed=armed).items()}
               for _ in range(ranks)]
    calls = [Call({"x": torch.zeros(rows, width, dtype=dtype), "y": torch.empty(rows, width, dtype=dtype)},
                  attrs={"y": {"ranks": ranks, "reduce": "sum"}}, scratch=own, config={"units": 32, "warps": 1},
                  wait_limit=LIMIT) for own in scratch]
    launch = bind_two_shot(calls, emulated_links([own["mailbox"] for own in scratch]))
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        values = torch.randint(-64, 64, (ranks, rows, width), generator=generator) / 8
        for call, own in zip(calls, values, strict=True):
            call.tensors["x"].copy_(own)
            call.tensors["y"].fill_(torch.nan)
        launch()
        for call in calls:
            assert torch.equal(call.tensors["y"].float(), values.sum(0))
            assert not any(call.scratch["health"])


def test_a_plan_of_many_ranks_and_rows_takes_two_shots() -> None:
    """At 64 rows and 16 ranks a whole message to everyone is 14 MB; at 8 rows one shot is kept, with 2 ranks always."""
    def kernels_of(ranks: int, rows: int) -> set[str]:
        plan = compile_plan("examples/k3-h200-tp16.yaml", [
            "model.layers=[0]", f"parallel.tp={ranks}", f"step.sequences={rows}"])
        return {c.kernel for c in plan.choices if c.ops == ("all_reduce",) and c.attrs["y"]["reduce"] == "sum"}

    assert kernels_of(16, 64) == {"triton.all_reduce_two_shot"}
    assert kernels_of(2, 64) == {"triton.all_reduce"}


@pytest.mark.parametrize("armed", [False, True], ids=["flagged", "armed"])
def test_an_aborted_step_is_told_and_forgotten(armed: bool) -> None:
    """Rank 1 dies before it sends: rank 0 says whom it missed where. Cleared on both, the next step is right."""
    pair = Pair.make(armed=armed)
    for step in range(2):
        sent = [pair.give(rank, 10 * step + rank) for rank in range(RANKS)]
        for half in range(2):
            for rank in range(RANKS):
                pair.halves[rank][half]()
    for half in range(2):
        pair.halves[0][half]()
    # rank 0, launch 11, its third epoch, a block, 32 words from rank 1
    report = pair.health(0)
    assert report[:3] == [1, 11, 3]
    assert report[4:6] == [32, 0b10]
    for call in pair.calls:
        for words in call.scratch.values():
            words.zero_()
    sent = [pair.give(rank, 70 + rank) for rank in range(RANKS)]
    for half in range(2):
        for rank in range(RANKS):
            pair.halves[rank][half]()
    for rank in range(RANKS):
        assert torch.equal(pair.calls[rank].tensors["y"].float(), sent[0] + sent[1])
        assert pair.health(rank) == [0] * HEALTH


@pytest.mark.parametrize(("armed", "last"), [(False, 2**31 - 1), (False, -1), (True, (3 << 29) - 1)],
                         ids=["flagged-signed", "flagged-unsigned", "armed"])
def test_epochs_wrap(armed: bool, last: int) -> None:
    """Six launches around the largest epoch, each with its own sum."""
    pair = Pair.make(armed=armed, epoch=last - 3)
    for step in range(6):
        sent = [pair.give(rank, 10 * step + rank) for rank in range(RANKS)]
        for half in range(2):
            for rank in range(RANKS):
                pair.halves[rank][half]()
        for rank in range(RANKS):
            assert torch.equal(pair.calls[rank].tensors["y"].float(), sent[0] + sent[1]), f"launch {step}"
            assert not any(pair.health(rank))


@pytest.mark.parametrize("armed", [False, True], ids=["flagged", "armed"])
def test_no_payload_looks_like_a_flag(armed: bool) -> None:
    """Every bit pattern that the protocol itself uses, as data: zeros, negative zeros, epochs, all ones."""
    pair = Pair.make(armed=armed)
    patterns = torch.tensor([0, -(2**31), 0x80008000 - 2**32, 1, 2, 3, ALL_ONES, -2, 0x7FC07FC0, 0x00010002] * 7)[:64]
    for _ in range(3):
        for call in pair.calls:
            call.tensors["x"].view(torch.int32).copy_(patterns.to(torch.int32))
            call.tensors["y"].fill_(torch.nan)
        for half in range(2):
            for rank in range(RANKS):
                pair.halves[rank][half]()
        for rank in range(RANKS):
            x, y = (pair.calls[rank].tensors[name].float() for name in ("x", "y"))
            assert torch.equal(y.isnan(), x.isnan())
            assert torch.equal(y[~y.isnan()], 2 * x[~x.isnan()])
            assert not any(pair.health(rank))
