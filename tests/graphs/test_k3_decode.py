"""Tiny Kimi K3 on emulated ranks against the fp32 oracle: splits, algebra, verify steps, padding, caches."""
from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import Driver, Poisoned, read_text, run_plan, write_plan
from torch import Tensor
from torch.testing import assert_close

from k3plan.compiler.ops import OPS
from k3plan.compiler.spec import Spec
from k3plan.graphs.checkpoint import Checkpoint
from k3plan.graphs.decode import check, generate
from k3plan.graphs.make_checkpoint import make_checkpoint
from k3plan.graphs.reference import Reference

SEQUENCES, LENGTH, VOCAB = 3, 9, 512
# logits have a deviation near 1; fp32 sums in another order move them by 1e-5
CLOSE: dict[str, Any] = {"rtol": 5e-5, "atol": 5e-5}
TEXTS = [[random.Random(i).randrange(VOCAB) for _ in range(LENGTH)] for i in range(SEQUENCES)]
FIRST_CACHE = "L2.attn.cache"
PATTERNS = {"0x7F": 0x7F, "0xFF": 0xFF}  # NaN in e4m3 and huge in the others; NaN in all


@dataclass(frozen=True)
class Told:
    """What the oracle says of ``TEXTS``: logits [LENGTH, V] each, and the states behind the last token."""

    logits: list[Tensor]
    states: dict[str, Tensor]
    windows: dict[str, Tensor]


@pytest.fixture(scope="module")
def spec(k3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Spec:
    step = {"sequences": SEQUENCES, "context": 32}
    return write_plan(tmp_path_factory.mktemp("plan"), k3_folder, step=step)


@pytest.fixture(scope="module")
def oracle(spec: Spec, k3_checkpoint: Checkpoint) -> Reference:
    return Reference(spec, k3_checkpoint)


@pytest.fixture(scope="module")
def told(spec: Spec, oracle: Reference) -> Told:
    logits = read_text(Driver(oracle, spec.step), TEXTS, VOCAB)
    kept = {name: tensor.clone() for name, tensor in oracle.kept.items()}
    assert 0.5 < torch.stack(logits).std() < 2
    return Told(logits, {n: t for n, t in kept.items() if n.endswith(".state")},
                {n: t for n, t in kept.items() if n.endswith(".window")})


def variant(spec: Spec, *, tp: int = 1, experts: str = "tp", query: int = 1, sequences: int = SEQUENCES,
            outputs: Sequence[str] = ("tokens", "logits"), numerics: dict[str, Any] | None = None,
            **choices: str) -> Spec:
    return replace(
        spec, parallel=replace(spec.parallel, tp=tp, experts=experts),
        step=replace(spec.step, query=query, sequences=sequences, outputs=tuple(outputs)),
        numerics=replace(spec.numerics, **(numerics or {})), choices=replace(spec.choices, **choices))


def gathered(runner: Poisoned, suffix: str) -> dict[str, Tensor]:
    """States or windows of all slots but the scratch one, whole: a rank has its heads of each part."""
    ranks = runner.executable.ranks
    found = {}
    for name in ranks[0].tensors:
        if name.endswith(suffix):
            dim, parts = (1, 1) if suffix == ".state" else (2, 3)
            pieces = [rank.tensors[name][:-1].chunk(parts, dim) for rank in ranks]
            found[name] = torch.cat([piece[part] for part in range(parts) for piece in pieces], dim)
    assert found
    return found


def assert_same_states(runner: Poisoned, told: Told) -> None:
    """After one-row steps over the whole of ``TEXTS``."""
    for name, state in gathered(runner, ".state").items():
        assert_close(state, told.states[name][:-1], **CLOSE)
    for name, window in gathered(runner, ".window").items():
        assert_close(window, told.windows[name][:-1], **CLOSE)


SPLITS = [(1, "tp"), *product((2, 4, 8, 16), ("tp", "ep"))]


@pytest.mark.parametrize(("tp", "experts"), SPLITS, ids=[f"tp{tp}-experts_{e}" for tp, e in SPLITS])
def test_one_row_steps(spec: Spec, k3_checkpoint: Checkpoint, told: Told, tp: int, experts: str) -> None:
    mine = variant(spec, tp=tp, experts=experts)
    runner = run_plan(mine, k3_checkpoint)
    assert_close(read_text(Driver(runner, mine.step), TEXTS, VOCAB), told.logits, **CLOSE)
    assert_same_states(runner, told)


ALGEBRA = list(product(("replicated", "sharded"), ("all_reduce", "stripe"), ("replicated", "sharded")))


@pytest.mark.parametrize("experts", ["tp", "ep"])
@pytest.mark.parametrize(("moe_front", "moe_tail", "mla_front"), ALGEBRA, ids=map("-".join, ALGEBRA))
def test_every_algebra(spec: Spec, k3_checkpoint: Checkpoint, told: Told, moe_front: str, moe_tail: str,
                       mla_front: str, experts: str) -> None:
    algebra: dict[str, Any] = {"moe_front": moe_front, "moe_tail": moe_tail, "mla_front": mla_front}
    mine = variant(spec, tp=4, experts=experts, **algebra)
    runner = run_plan(mine, k3_checkpoint)
    assert {a.choice: a.taken for a in runner.executable.plan.alternatives} == algebra
    texts = [text[:3] for text in TEXTS]
    assert_close(read_text(Driver(runner, mine.step), texts, VOCAB), [t[:3] for t in told.logits], **CLOSE)


VERIFY = [*((1, "tp", query) for query in range(1, 9)), (2, "ep", 3), (4, "tp", 5), (16, "tp", 8)]


@pytest.mark.parametrize(("tp", "experts", "query"), VERIFY, ids=[f"tp{t}-{e}-q{q}" for t, e, q in VERIFY])
def test_verify_steps(spec: Spec, k3_checkpoint: Checkpoint, told: Told, tp: int, experts: str, query: int
                      ) -> None:
    """Ragged steps, wrong drafts, random acceptance: the accepted text is as if read row by row."""
    mine = variant(spec, tp=tp, experts=experts, query=query)
    runner = run_plan(mine, k3_checkpoint)
    driver = Driver(runner, mine.step, slots=(2, 0, 1))
    assert_close(read_text(driver, TEXTS, VOCAB, seed=query), told.logits, **CLOSE)
    if query == 1:
        return
    # one step more folds the last accepted rows into the state and leaves them as history in the window
    driver.step([[0] * query] * SEQUENCES)
    taps = mine.model.conv_kernel
    for name, state in gathered(runner, ".state").items():
        assert_close(state[driver.slots], told.states[name][:-1], **CLOSE)
    for name, window in gathered(runner, ".window").items():
        assert_close(window[driver.slots][:, : taps - 2], told.windows[name][:-1, 1:], **CLOSE)


@pytest.mark.parametrize(("tp", "experts", "query"), [(1, "tp", 4), (4, "ep", 3)], ids=["tp1-q4", "tp4-ep-q3"])
def test_verify_steps_with_a_state_for_every_row(spec: Spec, k3_checkpoint: Checkpoint, told: Told, tp: int,
                                                 experts: str, query: int) -> None:
    """The same with ``kda_rollback: slots``: the accepted row's state is the final one, without a step more."""
    mine = variant(spec, tp=tp, experts=experts, query=query, kda_rollback="slots")
    runner = run_plan(mine, k3_checkpoint)
    driver = Driver(runner, mine.step, slots=(2, 0, 1))
    assert_close(read_text(driver, TEXTS, VOCAB, seed=query), told.logits, **CLOSE)
    ranks = runner.executable.ranks
    for name, state in told.states.items():
        mine_whole = torch.cat([rank.tensors[name] for rank in ranks], 2)
        final = torch.stack([mine_whole[slot, kept - 1] for slot, kept in zip(driver.slots, driver.kept, strict=True)])
        assert_close(final, state[:-1], **CLOSE)


def kept_bytes(runner: Poisoned) -> list[dict[str, Tensor]]:
    """Every cache and state of every rank, as bytes."""
    plan = runner.executable.plan
    names = [name for name, buffer in plan.buffers.items() if buffer.kind in ("state", "cache")]
    return [{name: as_bytes(rank.tensors[name]) for name in names} for rank in runner.executable.ranks]


def as_bytes(tensor: Tensor) -> Tensor:
    """[rows, bytes of a row], copied: equality that NaN passes too."""
    return tensor.clone().contiguous().view(torch.uint8).flatten(1)


def changed_rows(before: Tensor, after: Tensor) -> set[int]:
    return set((before != after).any(1).nonzero().flatten().tolist())


PADDING: dict[str, dict[str, Any]] = {
    "fp32-q1": {},
    "fp32-q3": {"query": 3},
    "fp32-q2-tp4-ep": {"query": 2, "tp": 4, "experts": "ep"},
    "bf16-fp8-q2": {"query": 2, "numerics": {"activation": "bf16", "kv_cache": "fp8_e4m3"}},
    "bf16-q1-tp2-all_split": {"tp": 2, "numerics": {"activation": "bf16", "kv_cache": "bf16"},
                              "moe_front": "sharded", "moe_tail": "stripe", "mla_front": "sharded"},
}


@pytest.mark.parametrize("name", PADDING)
def test_padding_has_no_side_effect(spec: Spec, k3_checkpoint: Checkpoint, name: str) -> None:
    """A sequence that sits out, then a ragged step, then a step of padding alone."""
    mine = variant(spec, outputs=("tokens", "logits", "hidden"), **PADDING[name])
    runner, wide = run_plan(mine, k3_checkpoint), mine.step.query
    driver = Driver(runner, mine.step, slots=(1, 2, 0))
    scratch_slot, scratch_page = SEQUENCES, SEQUENCES * driver.pages.shape[1]
    steps: list[list[list[int]]] = [
        [[5] * wide] * 3, [[7] * wide, [], [8] * wide], [[9], [3] * wide, []], [[], [], []]]
    for step, rows in enumerate(steps):
        before = kept_bytes(runner)
        outputs = driver.step(rows)
        padded = torch.tensor([[t >= len(row) for t in range(wide)] for row in rows])
        assert torch.count_nonzero(outputs["logits"][padded]) == 0
        assert torch.count_nonzero(outputs["hidden"][padded]) == 0
        assert (outputs["tokens"][padded] == -1).all()
        assert outputs["logits"][~padded].isfinite().all()
        assert ((outputs["tokens"][~padded] >= 0) & (outputs["tokens"][~padded] < VOCAB)).all()
        live = [i for i, row in enumerate(rows) if row]
        slots = {driver.slots[i] for i in live} | {scratch_slot}
        pages = {int(driver.pages[i, 0]) for i in live} | {scratch_page}
        for rank, old in zip(kept_bytes(runner), before, strict=True):
            for buffer, content in rank.items():
                allowed = pages if buffer.endswith(".cache") else slots
                assert changed_rows(old[buffer], content) <= allowed, f"{buffer}, step {step}"
        driver.accept([len(row) for row in rows])


def test_padded_rows_do_not_change_the_others(spec: Spec, k3_checkpoint: Checkpoint, told: Told) -> None:
    """The bucket is larger than the batch: one sequence in a plan of three."""
    runner = run_plan(spec, k3_checkpoint)
    logits = read_text(Driver(runner, spec.step), [[], TEXTS[1], []], VOCAB)
    assert_close(logits[1], told.logits[1], **CLOSE)


CACHES = {"fp32": ("fp32", "fp32"), "bf16": ("fp32", "bf16"), "fp8": ("bf16", "fp8_e4m3")}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("cache", CACHES)
def test_garbage_behind_a_sequence_and_in_foreign_pages(
    spec: Spec, k3_checkpoint: Checkpoint, cache: str, pattern: str
) -> None:
    activation, kv_cache = CACHES[cache]
    mine = variant(spec, query=2, numerics={"activation": activation, "kv_cache": kv_cache})
    runner, texts = run_plan(mine, k3_checkpoint), [TEXTS[0], TEXTS[1][:5], []]
    clean = read_text(Driver(runner, mine.step), texts, VOCAB)
    for rank in runner.executable.ranks:
        for name, buffer in runner.executable.plan.buffers.items():
            if buffer.kind == "cache":
                rank.buffers[name].fill_(PATTERNS[pattern])
            elif buffer.kind == "state":
                rank.tensors[name][-1].view(torch.uint8).fill_(PATTERNS[pattern])  # the scratch slot
    again = read_text(Driver(runner, mine.step), texts, VOCAB)
    for a, b in zip(clean[:2], again[:2], strict=True):
        assert torch.equal(a, b)


def test_permuted_pages_and_slots(spec: Spec, k3_checkpoint: Checkpoint, told: Told) -> None:
    """Small pages in any order, and -1 in the table where a sequence has not come yet."""
    mine = replace(spec, step=replace(spec.step, context=48))
    texts = [[random.Random(10 + i).randrange(VOCAB) for _ in range(19 - i)] for i in range(SEQUENCES)]
    want = read_text(Driver(Reference(mine, k3_checkpoint), mine.step), texts, VOCAB)
    runner = run_plan(mine, k3_checkpoint)
    pages = torch.tensor([[7, 0, -1], [4, 8, -1], [1, 3, -1]], dtype=torch.int32)
    driver = Driver(runner, mine.step, slots=(2, 0, 1), pages=pages)
    assert_close(read_text(driver, texts, VOCAB), want, **CLOSE)
    used = {int(p) for p in pages.flatten() if p >= 0}
    cache = runner.executable.ranks[0].tensors[FIRST_CACHE]
    written = set(cache.view(torch.uint8).flatten(1).any(1).nonzero().flatten().tolist())
    assert written - {cache.shape[0] - 1} == used


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both kinds of attention without a mixture of experts."""
    folder = tmp_path_factory.mktemp("dense")
    make_checkpoint(folder, attention=("kda", "mla", "kda", "mla"), mlp=("dense",) * 4)
    return folder


@pytest.mark.parametrize("model", ["dense", "experts"])
@pytest.mark.parametrize(("query", "place"), [
    (1, "state"), (1, "window"), (1, "cache"), (2, "state"), (2, "window"), (2, "record"), (2, "cache"),
])
def test_nan_of_one_sequence_stays_there(
    k3_folder: Path, dense_folder: Path, tmp_path: Path, model: str, query: int, place: str
) -> None:
    folder = dense_folder if model == "dense" else k3_folder
    mine = write_plan(tmp_path, folder, step={"sequences": SEQUENCES, "context": 32, "query": query})
    outputs = []
    for poisoned in (False, True):
        runner = run_plan(mine, Checkpoint(folder))
        driver = Driver(runner, mine.step)
        for at in range(0, 4, query):
            driver.step([text[at : at + query] for text in TEXTS])
            driver.accept([query] * SEQUENCES)
        if poisoned:
            for name, tensor in runner.executable.ranks[0].tensors.items():
                if name.endswith(f".{place}"):
                    tensor[int(driver.pages[1, 0]) if place == "cache" else 1] = torch.nan
        outputs.append(driver.step([text[4 : 4 + query] for text in TEXTS]))
    clean, dirty = outputs
    assert dirty["logits"][1].isnan().all()
    # NaN ranks below every number, and equal logits go to the lower id
    assert (dirty["tokens"][1] == 0).all()
    others = [0, 2]
    if model == "dense":
        assert torch.equal(clean["logits"][others], dirty["logits"][others])
    else:
        # the row of NaN chooses other experts, so that a matrix product over an expert's rows has another
        # size: equal but for the order of its sums
        assert_close(clean["logits"][others], dirty["logits"][others], rtol=0, atol=1e-5)
    assert torch.equal(clean["tokens"][others], dirty["tokens"][others])


@pytest.fixture
def quantised_oracle(spec: Spec, k3_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
                     ) -> Callable[[float], Reference]:
    """The oracle with a cache of what fp8 can hold: value -> e4m3(value / scale) * scale, in fp32."""
    plain = OPS["mla_append"]

    def make(scale: float) -> Reference:
        def append(latent: Tensor, key_part: Tensor, *rest: Tensor, **attrs: Any) -> Tensor:
            held = [(x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
                    for x in (latent, key_part)]
            return plain.fn(*held, *rest, **attrs)

        monkeypatch.setitem(OPS, "mla_append", replace(plain, fn=append))
        return Reference(spec, k3_checkpoint)

    return make


@pytest.mark.parametrize("scale", [1.0, 4.0, 0.06], ids=lambda s: f"scale{s:g}")
@pytest.mark.parametrize("tp", [1, 2], ids=["tp1", "tp2"])
def test_fp8_cache_scale_is_delivered(
    spec: Spec, k3_checkpoint: Checkpoint, quantised_oracle: Callable[[float], Reference], scale: float, tp: int
) -> None:
    """fp32 everywhere but in the cache: a scale that is lost on either side cannot hide in rounding."""
    mine = variant(spec, tp=tp, numerics={"kv_cache": "fp8_e4m3", "kv_scale": scale})
    runner = run_plan(mine, k3_checkpoint)
    got = torch.stack(read_text(Driver(runner, mine.step), TEXTS, VOCAB))
    cache = runner.executable.ranks[0].tensors[FIRST_CACHE]
    oracle = quantised_oracle(scale)
    want = torch.stack(read_text(Driver(oracle, spec.step), TEXTS, VOCAB))
    held = oracle.kept[FIRST_CACHE]
    # a latent on the edge between two e4m3 values may fall either way; nearly all agree to the last bit
    same = cache.float() * scale == held
    assert same[: SEQUENCES * 2].float().mean() > 0.999
    # 6e-6 without such a latent
    assert_close(got, want, rtol=0, atol=2e-2)
    assert held.abs().max() > 1


@pytest.mark.parametrize("lost", ["mla_append", "mla_attend"])
def test_a_lost_scale_would_be_seen(spec: Spec, k3_checkpoint: Checkpoint, told: Told, lost: str) -> None:
    """The counter-proof: with scale 1 on one side only, logits are far outside the tolerance above."""
    mine = variant(spec, numerics={"kv_cache": "fp8_e4m3", "kv_scale": 4.0})
    runner = run_plan(mine, k3_checkpoint)
    op = OPS[lost]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPS, lost, replace(op, fn=lambda *a, kv_scale, **k: op.fn(*a, kv_scale=1.0, **k)))
        broken = run_plan(mine, k3_checkpoint)
    errors = [
        (torch.stack(read_text(Driver(r, mine.step), TEXTS, VOCAB)) - torch.stack(told.logits)).abs().max()
        for r in (runner, broken)
    ]
    assert errors[1] > max(2 * float(errors[0]), 0.2)


BF16: dict[str, dict[str, Any]] = {
    "tp1-bf16_cache": {"numerics": {"activation": "bf16", "kv_cache": "bf16"}},
    "tp4-ep-fp8_cache": {"tp": 4, "experts": "ep",
                         "numerics": {"activation": "bf16", "kv_cache": "fp8_e4m3", "kv_scale": 0.5}},
    "tp2-q4-mxfp8_experts": {"tp": 2, "query": 4, "numerics": {
        "activation": "bf16", "kv_cache": "bf16", "expert_activation": "mxfp8"}},
    "tp1-bf16_state": {"numerics": {"activation": "bf16", "kv_cache": "bf16", "kda_state": "bf16"}},
}


@pytest.mark.parametrize("name", BF16)
def test_bf16_stays_near_the_oracle(spec: Spec, k3_checkpoint: Checkpoint, oracle: Reference, told: Told,
                                    name: str) -> None:
    mine = variant(spec, **BF16[name])
    runner = run_plan(mine, k3_checkpoint)
    logits = torch.stack(read_text(Driver(runner, mine.step), TEXTS, VOCAB))
    error = (logits - torch.stack(told.logits)).square().mean().sqrt()
    assert error < 0.08, "of logits with a deviation near 1"
    prompts = [TEXTS[0][:5], TEXTS[1][:2], TEXTS[2][:1]]
    made = generate(runner, mine.step, prompts, 4)
    found = check(oracle, spec.step, prompts, made.tokens, "bf16")
    assert found.tokens == 12
    assert found.passed, found


def test_the_check_refuses_another_text(spec: Spec, k3_checkpoint: Checkpoint, oracle: Reference) -> None:
    prompts = [text[:2] for text in TEXTS]
    made = generate(run_plan(spec, k3_checkpoint), spec.step, prompts, 4).tokens
    found = check(oracle, spec.step, prompts, made, "fp32")
    assert (found.tokens, found.equal, found.worst_gap, found.passed) == (12, 12, 0.0, True)
    made[1][2] = (made[1][2] + 1) % VOCAB
    found = check(oracle, spec.step, prompts, made, "bf16")
    assert found.equal < found.tokens
    assert not found.passed
