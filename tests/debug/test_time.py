"""Shares of launches add up to the step whatever overlaps, and the table compares them with the plan."""
from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_records import made_record, on_streams, small_plan

from k3plan.compiler.errors import RecordError
from k3plan.graphs.debug import time as timing
from k3plan.graphs.debug.record import Node, Record
from k3plan.graphs.debug.time import Event, Span, device_events, match, time_replay, with_times
from k3plan.graphs.debug.time_table import by_kind, show_kinds, show_times, slow_kinds, times_json, totals

PLAN = small_plan()
RECORD = replace(made_record(PLAN), replay_us=260.0)


def chain(busy: float, every: float) -> list[Span]:
    return [Span(i * every, i * every + busy) for i in range(len(RECORD.nodes))]


def test_shares_add_up_to_the_step() -> None:
    timed = with_times(RECORD, [chain(4.0, 5.0)])
    count = len(timed.launches)
    assert totals(timed)["us"] == pytest.approx(5.0 * count - 1.0)
    assert totals(timed)["busy_us"] == pytest.approx(4.0 * count)
    assert totals(timed)["gap_us"] == pytest.approx(count - 1.0)
    assert timed.launches[1].us == 5.0


def test_overlap_is_counted_once() -> None:
    """With programmatic edges a kernel starts early and waits: its duration is not its share."""
    timed = with_times(RECORD, [chain(7.0, 5.0)])
    assert totals(timed)["us"] == pytest.approx(5.0 * len(timed.launches) + 2.0)
    assert totals(timed)["gap_us"] == 0.0
    assert timed.launches[3].busy_us == 7.0
    assert timed.launches[3].us == 5.0


def test_a_kernel_hidden_behind_another_costs_nothing() -> None:
    spans = chain(5.0, 5.0)
    spans[10], spans[11] = Span(50.0, 60.0), Span(52.0, 55.0)
    timed = with_times(RECORD, [spans])
    assert timed.launches[11].us == 5.0  # ends first, so the other's share is what is left
    assert timed.launches[10].us == 5.0
    assert totals(timed)["us"] == pytest.approx(max(s.end for s in spans))


def test_the_median_of_replays() -> None:
    timed = with_times(RECORD, [chain(4.0, 5.0), chain(4.0, 50.0), chain(4.0, 6.0)])
    assert timed.launches[7].us == 6.0


def test_kinds_sum_to_the_totals() -> None:
    timed = with_times(RECORD, [chain(4.0, 5.0)])
    kinds = by_kind(PLAN, timed)
    assert sum(k.count for k in kinds) == len(PLAN.launches)
    assert sum(k.us for k in kinds) == pytest.approx(totals(timed)["us"])
    assert sum(k.planned_us for k in kinds) == pytest.approx(PLAN.us)
    text = show_kinds(kinds)
    assert all(PLAN.choice(launch).kernel in text for launch in PLAN.launches)
    assert "7168x768" in text


def test_events_of_two_streams_go_to_their_functions() -> None:
    nodes = [Node(0, "kernel", "a"), Node(1, "kernel", "b", stream=1), Node(2, "kernel", "_Zlib"),
             Node(3, "kernel", "b")]
    now = 1_800_000_000_000_000_001  # ns since 1970
    events = [Event("a", now, now + 1000), Event("void lib<1>()", now + 1500, now + 2500),
              Event("b", now + 2000, now + 3000), Event("b", now + 4000, now + 5001)]
    assert match(events, nodes) == [Span(0.0, 1.0), Span(2.0, 3.0), Span(1.5, 2.5), Span(4.0, 5.001)]
    # the second b ran first: only the driver's numbers tell, and only where each event has one
    numbered = [replace(node, id=number) for node, number in zip(nodes, (1, 4, 3, 2), strict=True)]
    told = [event._replace(node=number) for event, number in zip(events, (1, 3, 2, 4), strict=True)]
    assert match(told, numbered) == [Span(0.0, 1.0), Span(4.0, 5.001), Span(1.5, 2.5), Span(2.0, 3.0)]
    assert match([told[0], *events[1:]], numbered) == match(events, nodes)


def test_numbers_of_nodes_in_a_profile() -> None:
    """As torch 2.13 tells them, with the executable graph's number above; older ones have no such word."""
    def event(words: str | None) -> Any:
        told = {} if words is None else {"metadata_json": lambda: words}
        return SimpleNamespace(device_type=lambda: torch.autograd.DeviceType.CUDA, is_user_annotation=lambda: False,
                               name=lambda: "a", start_ns=lambda: 5, duration_ns=lambda: 2, **told)

    seen = [event(None), event(""), event(f'"stream": 7, "graph node id": {(3 << 32) + 12}')]
    profiler = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: seen))
    found = list(device_events(SimpleNamespace(profiler=profiler)))
    assert found == [Event("a", 5, 7), Event("a", 5, 7), Event("a", 5, 7, 12)]


def test_a_second_stream_in_the_plan() -> None:
    plan = on_streams(PLAN, 8)
    assert made_record(plan).nodes[8].stream == 1


def test_tables_and_their_json() -> None:
    timed = with_times(RECORD, [chain(4.0, 5.0)])
    text, _, found = show_times(PLAN, timed, "launch").partition("\nfindings\n")
    assert len(text.splitlines()) == len(PLAN.launches) + 4
    assert found.startswith("CG-055 warning: ")
    assert text.splitlines()[-1].endswith(f"{5.0 * len(PLAN.launches) - 1:.1f}")
    data = json.loads(times_json(PLAN, timed, "launch"))
    assert data["totals"]["us"] == pytest.approx(sum(row["us"] for row in data["launches"]))
    assert f"{(5 * len(PLAN.launches) - 1) / 260:.2f} of the replay" in show_times(PLAN, timed)


def priced(us: float, kernel: str) -> Record:
    """Every launch as planned, those of ``kernel`` ``us`` longer."""
    return replace(RECORD, launches=tuple(
        replace(own, us=PLAN.choice(x).us + us * (PLAN.choice(x).kernel == kernel), busy_us=1.0, gap_us=0.0)
        for x, own in zip(PLAN.launches, RECORD.launches, strict=True)))


def test_a_launch_that_takes_many_times_its_price() -> None:
    at = next(x for x in PLAN.launches if PLAN.choice(x).kernel.endswith("kda_decode"))
    kernel, planned = PLAN.choice(at).kernel, PLAN.choice(at).us
    assert slow_kinds(PLAN, priced(0.0, kernel)) == []
    assert slow_kinds(PLAN, priced(planned * 0.9, kernel)) == []
    (found,) = slow_kinds(PLAN, priced(24 * planned, kernel))
    count = sum(PLAN.choice(x).kernel == kernel for x in PLAN.launches)
    assert (found.code, found.severity, found.launch, found.layer) == ("CG-055", "warning", at.id, at.layer)
    assert f"{25 * planned:.1f} us a launch, 25.0 x its planned {planned:.1f} us" in found.text
    assert f"{count} launches, {24 * planned * count / 1e3:.3f} ms more than planned" in found.text
    assert f"k3plan tune PLAN.yaml --only {kernel} --rows 1x1" in found.fix
    shown = show_times(PLAN, priced(24 * planned, kernel))
    assert "CG-055 warning" in shown
    assert "CG-055" not in show_times(PLAN, priced(0.0, kernel))
    (told,) = json.loads(times_json(PLAN, priced(24 * planned, kernel)))["findings"]
    assert (told["code"], told["fix"]) == ("CG-055", found.fix)


def test_what_is_slow_and_not_worth_a_word() -> None:
    """Four times its price, once, in a step of which that is 0.1 %."""
    first = PLAN.choice(PLAN.launches[0])
    plan = replace(PLAN, choices=tuple(replace(c, us=2000 * first.us) if c.kernel != first.kernel else c
                                       for c in PLAN.choices))
    timed = replace(RECORD, launches=tuple(
        replace(own, us=plan.choice(x).us * (4 if plan.choice(x).kernel == first.kernel else 1), busy_us=1.0)
        for x, own in zip(plan.launches, RECORD.launches, strict=True)))
    assert slow_kinds(plan, timed) == []


def test_a_slow_op_of_torch_names_what_competes_with_it() -> None:
    """It cannot be tuned: the others must have measured prices."""
    index = next(i for i, x in enumerate(PLAN.launches) if PLAN.choice(x).kernel.endswith("kda_decode"))
    kernel = PLAN.choice(PLAN.launches[index]).kernel
    plan = replace(PLAN, choices=tuple(replace(c, kernel="torch.mla_attend") if c.kernel == kernel else c
                                       for c in PLAN.choices))
    (found,) = slow_kinds(plan, priced(100.0, kernel))
    assert f"k3plan explain PLAN {PLAN.launches[index].id}" in found.fix


@pytest.mark.parametrize(("record", "by", "message"), [
    (RECORD, "kind", "was not timed"), (RECORD, "hour", "no table by"),
])
def test_what_cannot_be_shown(record: Record, by: str, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        show_times(PLAN, record, by)


class Step:
    """A captured step whose clock is made up."""

    def time_us(self) -> float:
        return 300.0

    def queued_us(self) -> float:
        return 290.0

    def host_us(self) -> tuple[float, float]:
        return 9.0, 8.0


def test_times_after_a_profile_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    first = time_replay(Step(), RECORD)
    assert (first.replay_us, first.queued_us, first.notes) == (300.0, 290.0, ())
    assert (first.host_us, first.host_least_us) == (9.0, 8.0)
    monkeypatch.setattr(timing, "_profiled", True)
    assert time_replay(Step(), RECORD).notes == (timing.PROFILED,)
