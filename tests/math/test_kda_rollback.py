"""The two ways to take rows of a verify step back: a state a row against one state and a record, over many steps."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from k3plan.compiler.call import Call
from k3plan.compiler.ops.kda import kda_delta_rule, kda_verify, kda_verify_slots
from k3plan.ops_triton.kda_parts import bind_rule

HEADS, WIDTH, SEQUENCES, SLOTS = 2, 16, 3, 5
CHANNELS = HEADS * WIDTH
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class Steps:
    """Random steps of some sequences: rows, slots, ragged positions, and how many rows the next step accepts."""

    def __init__(self, query: int, seed: int) -> None:
        self.query, self.random = query, torch.Generator().manual_seed(seed)
        self.accepted = torch.ones(SEQUENCES, dtype=torch.int32)

    def rows(self) -> list[Tensor]:
        total = SEQUENCES * self.query
        q, k, v, decay = (torch.randn(total, CHANNELS, generator=self.random) for _ in range(4))
        return [q, k, v, -decay.abs(), torch.randn(total, HEADS, generator=self.random)]

    def places(self) -> tuple[Tensor, Tensor]:
        """Slots, the middle one absent now and then, and positions with up to ``query - 1`` padding rows."""
        slots = torch.tensor([3, 0, 1], dtype=torch.int32)
        if torch.rand(1, generator=self.random) < 0.3:
            slots[1] = -1
        self.live = torch.randint(1, self.query + 1, (SEQUENCES,), generator=self.random)
        row = torch.arange(self.query)[None]
        positions = torch.where((row < self.live[:, None]) & (slots >= 0)[:, None], 7 + row, -1)
        return slots, positions.flatten().int()

    def accept(self, slots: Tensor) -> Tensor:
        """At least the first row of those fed; a sequence that sat out keeps its count."""
        counts = (torch.rand(SEQUENCES, generator=self.random) * self.live).int() + 1
        self.accepted = torch.where(slots >= 0, counts, self.accepted)
        return torch.where(slots >= 0, counts, 0)


def states(*more: int) -> Tensor:
    return torch.zeros(SLOTS + 1, *more, HEADS, WIDTH, WIDTH)


@pytest.mark.parametrize("query", [2, 3, 5, 8])
def test_both_designs_and_one_row_steps_agree(query: int) -> None:
    steps = Steps(query, query)
    kept, one, plain = states(query), states(), states()
    record = torch.zeros(SLOTS + 1, query, 3, HEADS, WIDTH)
    for _ in range(12):
        rows, (slots, positions) = steps.rows(), steps.places()
        after = (slots, positions, steps.accepted)
        out, _ = kda_verify_slots(*rows, kept, *after, query=query)
        assert_close(out, kda_verify(*rows, one, record, *after, query=query)[0], **CLOSE)
        for t, final in enumerate(steps.accept(slots)[None] > torch.arange(query)[:, None]):
            single = [x.unflatten(0, (-1, query))[:, t].contiguous() for x in rows]
            want, _ = kda_delta_rule(*single, plain, torch.where(final, slots, -1), torch.where(final, 7, -1).int())
            assert_close(out.unflatten(0, (-1, query))[final, t], want[final], **CLOSE)
        for slot, count in zip((3, 0, 1), steps.accepted.tolist(), strict=True):
            assert_close(kept[slot, count - 1], plain[slot], **CLOSE)
    assert not kept[[2, 4]].any(), "slots that nobody named"


@pytest.mark.parametrize(("query", "splits"), [(2, 1), (4, 4), (8, 2)])
def test_the_kernel_goes_on_from_its_own_states(query: int, splits: int) -> None:
    steps = Steps(query, 10 + query)
    mine, record, one = states(query), torch.zeros(SLOTS + 1, query, 3, HEADS, WIDTH), states()
    names = ("q", "k", "v", "log_decay", "beta")
    tensors = dict(zip(names, steps.rows(), strict=True)) | {
        "state": mine, "state_next": mine, "slots": torch.zeros(SEQUENCES, dtype=torch.int32),
        "positions": torch.zeros(SEQUENCES * query, dtype=torch.int32), "accepted": steps.accepted.clone(),
        "o": torch.empty(SEQUENCES * query, CHANNELS)}
    launch = bind_rule(Call(tensors, attrs={"o": {"query": query}}, config={"splits": splits, "warps": 1}))
    for _ in range(5):
        rows, (slots, positions) = steps.rows(), steps.places()
        fresh = dict(zip(names, rows, strict=True)) | {"slots": slots, "positions": positions,
                                                       "accepted": steps.accepted}
        for name, tensor in fresh.items():
            tensors[name].copy_(tensor)
        tensors["o"].fill_(torch.nan)
        launch()
        want, *_ = kda_verify(*rows, one, record, slots, positions, steps.accepted, query=query)
        assert_close(tensors["o"], want, **CLOSE)
        steps.accept(slots)
    assert not mine[[2, 4, 5]].any(), "a sequence without a slot touches nothing"
