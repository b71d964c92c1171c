"""Padded rows on a CPU: the step as it is has no side effects, and what provokes one is named."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from broken import small_step, with_step, write_live

from k3plan.graphs.bind import Executable
from k3plan.graphs.debug.findings import render
from k3plan.graphs.debug.padding import check_padding
from k3plan.graphs.debug.storage import contents

Step = Callable[[], object]
LAYERS = (0, 1, 3)  # KDA, KDA with experts, MLA with experts


@pytest.fixture(scope="module")
def padded() -> Executable:
    """Four sequences, of which the first lives."""
    step = small_step(LAYERS, more=("step.sequences=4",))
    write_live(step, 1)
    return step


def also(executable: Executable, launch: str, act: Step) -> Executable:
    def make(step: Step) -> Step:
        def run() -> None:
            step()
            act()
        return run
    return with_step(executable, launch, make)


def codes(executable: Executable) -> list[tuple[str, str | None]]:
    return [(f.code, f.launch) for f in check_padding(executable)]


@pytest.mark.parametrize("live", [0, 1, 3, 4])
def test_padding_has_no_side_effect(live: int) -> None:
    step = small_step(LAYERS, more=("step.sequences=4",))
    write_live(step, live)
    assert check_padding(step) == [], render(check_padding(step))


def test_padding_of_verify_rows() -> None:
    step = small_step(LAYERS, more=("step.sequences=2", "step.query=3"))
    write_live(step, 1)
    assert check_padding(step) == [], render(check_padding(step))


def test_everything_is_restored(padded: Executable) -> None:
    before = contents(padded, ("state", "cache", "index"))
    check_padding(padded)
    after = contents(padded, ("state", "cache", "index"))
    assert all(torch.equal(before.of[key], after.of[key]) for key in before.of)


@pytest.mark.parametrize("slot", [0, 3], ids=["clamped to the first slot", "wrapped to the last slot"])
def test_1_a_padded_row_writes_through_a_real_slot(padded: Executable, slot: int) -> None:
    write_live(padded, 1)
    # the live sequence has slot 1, so that slot 0 is nobody's
    padded.write(slots=torch.tensor([1, -1, -1, -1], dtype=torch.int32))
    state = padded.ranks[0].tensors["L1.attn.state"]
    broken = also(padded, "L1.attn.o", lambda: state[slot].add_(1))
    found = check_padding(broken)
    assert ("CG-041", "L1.attn.o") in [(f.code, f.launch) for f in found], render(found)
    assert f"slots [{slot}] of L1.attn.state" in found[0].text
    assert found[0].layer == 1
    write_live(padded, 1)


def test_1_a_padded_row_writes_through_a_real_page(padded: Executable) -> None:
    cache = padded.ranks[0].tensors["L3.attn.cache"]
    broken = also(padded, "L3.attn.cache_next", lambda: cache[9].add_(1))
    found = check_padding(broken)
    assert ("CG-041", "L3.attn.cache_next") in [(f.code, f.launch) for f in found], render(found)
    assert "pages [9] of L3.attn.cache" in found[0].text


def test_2_a_kernel_that_leaves_padded_rows_unwritten(padded: Executable) -> None:
    name = "L1.attn.o_proj"
    tensor = padded.ranks[0].tensors[name]

    def early_return(step: Step) -> Step:
        def run() -> None:
            kept = tensor[1:].clone()
            step()
            tensor[1:].copy_(kept)
        return run

    found = check_padding(with_step(padded, name, early_return))
    first = next(f for f in found if f.code == "CG-042")
    assert first.launch == name, render(found)
    assert "padded rows [1, 2, 3] hold what the arena held" in first.text


def test_2_garbage_reaches_the_router(padded: Executable) -> None:
    ids = padded.ranks[0].tensors["L1.mlp.ids"]
    found = check_padding(also(padded, "L1.mlp.ids", lambda: ids[2].fill_(2**30)))
    named = [f for f in found if f.code == "CG-044"]
    assert [f.launch for f in named] == ["L1.mlp.ids"], render(found)
    assert "row 2 (padded)" in named[0].text
    assert "ids end at 15" in named[0].text


def test_3_what_another_bucket_left_reaches_a_sum(padded: Executable) -> None:
    name = "L0.mlp.down"
    tensor = padded.ranks[0].tensors[name]

    def mask_by_zero(step: Step) -> Step:
        def run() -> None:
            left = tensor[3].clone()
            step()
            tensor[0].add_(left * 0)  # instead of selecting
        return run

    found = check_padding(with_step(padded, name, mask_by_zero))
    assert ("CG-043", name) == next((f.code, f.launch) for f in found if f.code == "CG-043"), render(found)
    assert "live rows differ" in next(f.text for f in found if f.code == "CG-043")


def test_4_a_row_of_nan_becomes_no_token(padded: Executable) -> None:
    write_live(padded, 4)
    head = next(name for name in padded.plan.weights if "head" in name and len(padded.plan.weights[name].shape) == 2)
    weight = padded.ranks[0].tensors[head]
    kept = weight.clone()
    weight.fill_(float("nan"))
    try:
        assert [c for c, _ in codes(padded) if c == "CG-044"] == []
    finally:
        weight.copy_(kept)
        write_live(padded, 1)


def test_4_a_token_past_the_vocabulary_is_named(padded: Executable) -> None:
    name, vocab = padded.plan.outputs["tokens"], padded.plan.spec.model.vocab
    tokens = padded.ranks[0].tensors[name]
    launch = next(x.id for x in padded.plan.launches if name in x.outputs)
    found = check_padding(also(padded, launch, lambda: tokens[0].fill_(vocab)))
    assert [(f.code, f.launch) for f in found] == [("CG-044", launch)], render(found)


def test_2_a_padded_token_that_is_not_minus_one(padded: Executable) -> None:
    name = padded.plan.outputs["tokens"]
    tokens = padded.ranks[0].tensors[name]
    launch = next(x.id for x in padded.plan.launches if name in x.outputs)
    found = check_padding(also(padded, launch, lambda: tokens[3].fill_(0)))
    assert [(f.code, f.launch) for f in found] == [("CG-042", launch)], render(found)
