"""Buckets share weights, states and caches; a padded batch gives what the exact one gives and touches nothing else."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from k3plan.compiler.errors import BindError
from k3plan.compiler.plan import LaunchPlan
from k3plan.face import compile_buckets
from k3plan.graphs.buckets import Buckets, bind_buckets, kept_twice
from k3plan.graphs.checkpoint import Checkpoint
from k3plan.graphs.make_checkpoint import make_checkpoint
from k3plan.graphs.module.inputs import run_step

ROOT = Path(__file__).resolve().parents[2]
SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("buckets")
    make_checkpoint(folder / "tiny")
    return Checkpoint(folder / "tiny")


@pytest.fixture(scope="module")
def plans() -> list[LaunchPlan]:
    return compile_buckets(ROOT / "examples/tiny-k3.yaml", [
        f"capture.buckets={list(SIZES)}", "step.outputs=[tokens, logits]",
        "numerics={activation: fp32, kv_cache: fp32}"])


@pytest.fixture
def buckets(plans: list[LaunchPlan], checkpoint: Checkpoint) -> Buckets:
    return bind_buckets(plans, checkpoint)


def inputs(slots: list[int], position: int, tokens: list[int]) -> dict[str, torch.Tensor]:
    """One row of each sequence; slot i has pages 4 i to 4 i + 3."""
    pages = torch.tensor([[4 * s + p for p in range(4)] for s in slots])
    return {name: torch.as_tensor(value, dtype=torch.int32) for name, value in {
        "tokens": [[t] for t in tokens], "positions": [[position]] * len(slots), "slots": slots,
        "page_table": pages}.items()}


def storages(buckets: Buckets) -> dict[str, torch.Tensor]:
    largest = buckets.executables[0]
    return {f"{rank.index}.{name}": rank.tensors[name] for rank in largest.ranks
            for name, buffer in largest.plan.buffers.items() if buffer.kind in ("state", "cache")}


def test_one_plan_for_each_bucket(plans: list[LaunchPlan]) -> None:
    assert [plan.spec.step.sequences for plan in plans] == list(SIZES)
    assert kept_twice(plans) == []


def test_weights_states_and_caches_are_bound_once(buckets: Buckets) -> None:
    first, *others = buckets.executables
    assert first.plan.spec.step.sequences == max(SIZES)
    for other in others:
        for a, b in zip(first.ranks, other.ranks, strict=True):
            for name, buffer in other.plan.buffers.items():
                if buffer.kind in ("weight", "state", "cache"):
                    assert a.buffers[name].data_ptr() == b.buffers[name].data_ptr(), name


@pytest.mark.parametrize(("live", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4)])
def test_the_smallest_bucket_that_holds_the_batch(buckets: Buckets, live: int, bucket: int) -> None:
    assert buckets.executables[buckets.choose(live)].plan.spec.step.sequences == bucket


def test_a_batch_that_is_too_large(buckets: Buckets) -> None:
    with pytest.raises(BindError, match="5 sequences, the largest bucket has 4"):
        buckets.choose(5)
    with pytest.raises(BindError, match="has no slots"):
        run_step(buckets, {**inputs([0], 0, [1]), "slots": None})


def test_sequences_move_between_buckets(buckets: Buckets, plans: list[LaunchPlan], checkpoint: Checkpoint) -> None:
    """Slot 3 is fed alone, in a pair, in a padded three: as in a bucket of four from the first step on."""
    alone = bind_buckets(plans[-1:], checkpoint)
    for position, slots in enumerate(([3], [3, 0], [1, 3, 0], [3])):
        tokens = [7 * s + position for s in slots]
        found = run_step(buckets, inputs(slots, position, tokens))
        wanted = run_step(alone, inputs(slots, position, tokens))
        assert found["logits"].shape[0] == len(slots)
        # a product of other rows sums in another order
        torch.testing.assert_close(found["logits"], wanted["logits"], rtol=1e-3, atol=1e-5)
        assert torch.equal(found["tokens"], wanted["tokens"])
    for (name, a), (_, b) in zip(storages(buckets).items(), storages(alone).items(), strict=True):
        torch.testing.assert_close(a[:-1], b[:-1], rtol=1e-3, atol=1e-5, msg=name)


def test_padding_has_no_side_effect(buckets: Buckets) -> None:
    """Three sequences in a bucket of four: slots and pages of the fourth keep every byte, whatever the arena held."""
    for tensor in storages(buckets).values():
        tensor.copy_(torch.randn(tensor.shape))
    before = {name: tensor.clone() for name, tensor in storages(buckets).items()}
    executable = buckets.executables[buckets.choose(3)]
    results = []
    for filling in (0x00, 0x7F, 0xFF):
        for name, tensor in storages(buckets).items():
            tensor.copy_(before[name])
        for rank in executable.ranks:
            rank.arena.fill_(filling)
        run_step(buckets, inputs([2, 0, 1], 5, [1, 2, 3]))
        outputs = executable.outputs
        assert torch.equal(outputs["logits"][3:], torch.zeros_like(outputs["logits"][3:]))
        assert int(outputs["tokens"][3]) == -1
        results.append(outputs["logits"].clone())
    assert all(torch.equal(results[0], r) for r in results)
    changed = 0
    for name, tensor in storages(buckets).items():
        untouched = slice(12, 16) if name.endswith("cache") else slice(3, 4)
        assert torch.equal(tensor[untouched], before[name][untouched]), name
        changed += not torch.equal(tensor, before[name])
    assert changed == len(before)


def test_a_step_of_padding_alone_changes_nothing(buckets: Buckets) -> None:
    for tensor in storages(buckets).values():
        tensor.copy_(torch.randn(tensor.shape))
    before = {name: tensor.clone() for name, tensor in storages(buckets).items()}
    for executable in buckets.executables:
        executable.run()
    for name, tensor in storages(buckets).items():
        assert torch.equal(tensor[:-1], before[name][:-1]), name


def test_weights_in_another_form_are_told(plans: list[LaunchPlan]) -> None:
    small, *_, large = plans
    name = next(iter(small.weights))
    other = replace(small, weights={**small.weights, name: replace(small.weights[name], dtype="fp32")})
    (note,) = kept_twice([other, large])
    assert "bucket 1: 1 weights are kept a second time" in note
    assert name in note


def test_weights_that_are_kept_twice_are_warned_of(plans: list[LaunchPlan], checkpoint: Checkpoint,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k3plan.graphs.buckets.kept_twice", lambda plans: ["98 GB twice"])
    with pytest.warns(UserWarning, match="98 GB twice"):
        bind_buckets(plans, checkpoint)
