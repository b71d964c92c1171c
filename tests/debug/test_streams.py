"""Waits between streams follow from the bytes that launches share, the reused arena included."""
from __future__ import annotations

from dataclasses import replace

import pytest
from made_records import on_streams, small_plan

from k3plan.compiler.plan import Launch, LaunchPlan
from k3plan.graphs.streams import last_launches, spans, stream_waits

PLAN = small_plan()


def touch(plan: LaunchPlan, a: Launch, b: Launch) -> bool:
    """Whether two launches touch the same byte and one of them writes it, byte interval by byte interval."""
    return any(x[0] == y[0] and (x[3] or y[3]) and max(x[1], y[1]) < min(x[2], y[2])
               for x in spans(plan, a) for y in spans(plan, b))


def ordered(plan: LaunchPlan) -> set[tuple[int, int]]:
    """Every pair (earlier, later) that streams, waits and the final join put in order."""
    waits = stream_waits(plan)
    before: list[set[int]] = []
    for i, launch in enumerate(plan.launches):
        direct = [j for j in range(i) if plan.launches[j].stream == launch.stream][-1:] + list(waits.get(i, ()))
        before.append(set(direct).union(*(before[j] for j in direct)))
    return {(j, i) for i, earlier in enumerate(before) for j in earlier}


def test_one_stream_needs_no_wait() -> None:
    assert stream_waits(PLAN) == {}
    assert last_launches(PLAN) == ()


SHARED = [i for i, x in enumerate(PLAN.launches) if "shared_down" in x.id or "router" in x.id]


@pytest.mark.parametrize("plan", [
    pytest.param(on_streams(PLAN, *SHARED, 7, 8, 21), id="by hand"),
    pytest.param(small_plan("choices.side_stream=auto"), id="by the scheduler"),
])
def test_every_conflict_is_ordered_and_nothing_else_waits(plan: LaunchPlan) -> None:
    side = [i for i, x in enumerate(plan.launches) if x.stream]
    assert side
    known = ordered(plan)
    launches = plan.launches
    for i, a in enumerate(launches):
        for j in range(i):
            if launches[j].stream != a.stream and touch(plan, launches[j], a):
                assert (j, i) in known, f"{launches[j].id} and {a.id} race"
    for i, sources in stream_waits(plan).items():
        for j in sources:
            assert touch(plan, launches[j], launches[i])
            assert launches[j].stream != launches[i].stream
    assert last_launches(plan) == (max(side),)


def test_arena_reuse_alone_is_a_conflict() -> None:
    """Two launches with no tensor in common, one of which writes where the other's dead input lay."""
    first, second = PLAN.launches[3], PLAN.launches[9]
    name = next(n for n in second.outputs if PLAN.buffers[PLAN.tensors[n].buffer].kind == "arena")
    buffers = dict(PLAN.buffers)
    read = next(n for n in first.inputs if PLAN.buffers[PLAN.tensors[n].buffer].kind == "arena")
    buffers[name] = replace(buffers[name], offset=buffers[PLAN.tensors[read].buffer].offset)
    plan = on_streams(replace(PLAN, buffers=buffers, launches=(first, replace(second, inputs=())) ), 1)
    assert stream_waits(plan) == {1: (0,)}
