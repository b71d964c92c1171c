"""The mailbox protocol in all its interleavings: what must hold holds, and each planted fault is found.

Steps count from an epoch that makes them pass the wrap; the wrap itself is 6 instead of 3 * 2^29.
"""
from __future__ import annotations

import math
import struct
from dataclasses import replace

import pytest
from protocol_model import Model, explore, initial

from k3plan.ops_cute.protocol import HEALTH_WORDS, PROTOCOL, Health, decode, encode, read_health

SHORT = replace(PROTOCOL, wrap=2 * PROTOCOL.parities)
WRAP = SHORT.wrap - 2  # the epoch of the first step: the second is the last before the wrap
FLAGGED = replace(PROTOCOL, parities=2, wrap=6)

HOLDS = {
    "2 ranks, 3 steps": Model(SHORT, 2, 3),
    "2 ranks, 7 steps over the wrap": Model(SHORT, 2, 7, start=WRAP),
    "3 ranks, 3 steps": Model(SHORT, 3, 3, prompt=True),
    "3 ranks, 4 steps over the wrap": Model(SHORT, 3, 4, start=WRAP, prompt=True),
    "2 ranks, 3 steps, waits give up": Model(SHORT, 2, 3, bounded=True),
    "2 ranks, 4 steps over the wrap, one stops, the host clears": Model(
        SHORT, 2, 4, start=WRAP, bounded=True, stops=1, recover=True),
    "2 ranks, 4 steps over the wrap, two stages": Model(SHORT, 2, 4, start=WRAP, stages=2),
    "2 ranks, 2 steps, two stages, one stops, the host clears": Model(
        SHORT, 2, 2, bounded=True, stops=1, recover=True, stages=2, prompt=True),
    "words with their epoch: 2 ranks, 7 steps": Model(FLAGGED, 2, 7, start=WRAP, flagged=True),
    "words with their epoch: 3 ranks, 3 steps": Model(FLAGGED, 3, 3, flagged=True, prompt=True),
}
LARGE = {
    "3 ranks, 2 steps, fragments under way": Model(SHORT, 3, 2),
    "3 ranks, 2 steps, two stages": Model(SHORT, 3, 2, stages=2, prompt=True),
    "3 ranks, one stops, waits give up, the host clears": Model(
        SHORT, 3, 1, bounded=True, stops=1, recover=True, prompt=True),
}
# name: model, what is found
FAULTS = {
    "the part that is read is armed": (Model(replace(SHORT, rearm_lag=0), 2, 3), "wait for ever"),
    "the next part is armed": (Model(replace(SHORT, rearm_lag=2), 2, 3), "wait for ever"),
    "the next part is armed, 3 ranks": (Model(replace(SHORT, rearm_lag=2), 3, 3, prompt=True), "wait for ever"),
    "one part fewer": (Model(replace(SHORT, parities=2), 2, 3), "wait for ever"),
    "one part fewer, two stages": (Model(replace(SHORT, parities=2), 2, 3, stages=2), "wait for ever"),
    "the epoch is a constant of the graph": (Model(SHORT, 2, 3, host_epoch=True), "not its own step"),
    "epochs wrap at a power of two": (Model(replace(SHORT, wrap=4), 2, 5), "not its own step"),
    "a launch ends before its stores have arrived": (Model(SHORT, 2, 4, loose_end=True), "not its own step"),
    "a rank that gave up goes on sending": (
        Model(SHORT, 2, 4, bounded=True, silent=False, prompt=True), "not its own step"),
    "a rank stops and no wait gives up": (Model(SHORT, 2, 2, stops=1), "ranks [0] wait for ever"),
    "words with their epoch, one part": (Model(replace(FLAGGED, parities=1), 2, 3, flagged=True), "wait for ever"),
}


@pytest.mark.parametrize("name", HOLDS)
def test_nothing_is_lost_stale_or_waited_for_in_vain(name: str) -> None:
    result = explore(HOLDS[name])
    assert not result.fault, "\n".join([result.fault, *result.trace])
    assert result.states > 50


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_large_models(name: str) -> None:
    result = explore(LARGE[name])
    assert not result.fault, "\n".join([result.fault, *result.trace])


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    model, found = FAULTS[name]
    result = explore(model)
    assert found in result.fault, f"found {result.fault!r}"
    assert result.trace, "no way that leads there"


def test_the_way_to_a_fault_is_told() -> None:
    """Arming the next part: a peer that is a step ahead has already written there."""
    result = explore(Model(replace(SHORT, rearm_lag=2), 2, 2))
    sent = next(i for i, what in enumerate(result.trace) if "fragment of step 1" in what)
    armed = next(i for i, what in enumerate(result.trace) if "arms" in what and i > sent)
    assert armed > sent, "\n".join(result.trace)


def test_the_model_takes_its_numbers_from_the_protocol() -> None:
    assert all(len(box) == PROTOCOL.parities for box in initial(Model(PROTOCOL, 2, 1)).boxes)
    assert PROTOCOL.wrap % PROTOCOL.parities == 0
    assert PROTOCOL.wrap < 2**31
    assert PROTOCOL.following(PROTOCOL.wrap - 1) == 0
    around = [PROTOCOL.wrap - 2]
    for _ in range(4):
        around.append(PROTOCOL.following(around[-1]))
    parts = [PROTOCOL.part(epoch) for epoch in around]
    assert parts == [1, 2, 0, 1, 2]
    assert [PROTOCOL.armed_part(epoch) for epoch in around[1:]] == parts[:-1]


def bf16_pair(low: float, high: float) -> int:
    bits = [struct.unpack("<I", struct.pack("<f", x))[0] >> 16 for x in (low, high)]
    return bits[0] | bits[1] << 16


@pytest.mark.parametrize("pair", [(0.0, 0.0), (-0.0, -0.0), (-0.0, 0.0), (1.0, -2.0), (math.inf, -math.inf),
                                  (math.nan, 1.0), (math.nan, math.nan)])
def test_every_payload_travels_as_it_is(pair: tuple[float, float]) -> None:
    word = bf16_pair(*pair)
    assert encode(word) != 0
    assert decode(encode(word)) == word


def test_the_one_word_without_a_code_stays_not_a_number() -> None:
    """All ones, as poisoned memory has it: two NaN as bf16, one as fp32."""
    travels = encode(0xFFFFFFFF)
    assert travels != 0
    word = decode(travels)
    halves = [word & 0xFFFF, word >> 16]
    assert all(half & 0x7F80 == 0x7F80 and half & 0x7F for half in halves), f"{word:08x}"
    assert math.isnan(struct.unpack("<f", struct.pack("<I", word))[0])
    assert math.isnan(struct.unpack("<f", struct.pack("<I", decode(0)))[0]), "what never came must not be a number"


def test_a_report_names_rank_launch_epoch_and_wait() -> None:
    words = [0] * HEALTH_WORDS
    assert read_health(words) is None
    words[:7] = [4, 17, 5, 2, 3, 0b1011, 0]
    report = read_health(words)
    assert report == Health(3, 17, 5, 2, 3, (0, 1, 3), 0)
    text = report.describe(("parts of a row",))
    for part in ("rank 3", "launch 17", "epoch 5", "block 2", "parts of a row of rank 0, 1, 3", "\n  fix: "):
        assert part in text
