"""What a capture enqueues and in which order, on the CPU with streams that only take notes; on a GPU the real thing."""
from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from made_records import on_streams, small_plan

from k3plan.compiler.errors import BindError
from k3plan.compiler.plan import LaunchPlan
from k3plan.face import compile_buckets, compile_plan
from k3plan.graphs import capture as capturing
from k3plan.graphs.bench_step import bind_random, live_inputs
from k3plan.graphs.bind import Executable, bind
from k3plan.graphs.buckets import bind_buckets, capture_buckets
from k3plan.graphs.debug.diff import SUCCESS, predict_update, update_result
from k3plan.graphs.debug.inspect import inspect
from k3plan.graphs.debug.session import record_random
from k3plan.graphs.debug.time import segment_us
from k3plan.graphs.debug.walk import record_capture
from k3plan.graphs.random_weights import RankRandom
from k3plan.graphs.streams import stream_waits


def independent(plan: LaunchPlan) -> tuple[int, ...]:
    """Launches that the very next one does not depend on: what a side stream is for."""
    return tuple(i for i in range(1, len(plan.launches) - 1) if not stream_waits(on_streams(plan, i)).get(i + 1))


SIDE = independent(small_plan())


class Stream:
    """A stream that knows what is in order before its next launch."""

    def __init__(self) -> None:
        self.done: set[int] = set()

    def wait_stream(self, other: Stream) -> None:
        self.done |= other.done

    def wait_event(self, event: frozenset[int]) -> None:
        self.done |= event

    def record_event(self) -> frozenset[int]:
        return frozenset(self.done)


def enqueued(plan: LaunchPlan, monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[int, set[int]]], Stream]:
    """Each launch with all launches that are surely over before it, and the main stream at the end."""
    log: list[tuple[int, set[int]]] = []
    current: list[Stream] = []

    @contextmanager
    def enter(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def step(index: int):
        def run() -> None:
            log.append((index, set(current[-1].done)))
            current[-1].done.add(index)
        return run

    monkeypatch.setattr(capturing.torch.cuda, "stream", enter)
    count = len(plan.launches)
    executable = Executable(plan, (), tuple(map(step, range(count))), tuple(range(count)), 1)
    streams = {0: Stream(), 1: Stream()}
    capturing.enqueue(executable, streams, stream_waits(plan))
    return log, streams[0]


def test_every_launch_once_in_order_and_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = on_streams(small_plan(), *SIDE)
    log, main = enqueued(plan, monkeypatch)
    assert [index for index, _ in log] == list(range(len(plan.launches)))
    assert main.done == set(range(len(plan.launches))), "a side stream was not joined"
    over = dict(log)
    for index, sources in stream_waits(plan).items():
        assert set(sources) <= over[index]
    side = [i for i in over if plan.launches[i].stream]
    assert side == list(SIDE)
    assert all(over[i] for i in side), "a side stream was not forked from the main one"


def test_side_streams_do_run_beside_the_main_one(monkeypatch: pytest.MonkeyPatch) -> None:
    log, _ = enqueued(on_streams(small_plan(), *SIDE), monkeypatch)
    assert any(over != set(range(index)) for index, over in log)


def test_a_capture_needs_a_gpu() -> None:
    plan = compile_plan("examples/tiny-k3.yaml", ["model.layers=[0]", "parallel.tp=1"])
    with pytest.raises(BindError, match="fix: bind it with device='cuda'"):
        capturing.capture(bind(plan, RankRandom(0)))


def test_garbage_collection_is_off_and_on_again() -> None:
    with capturing.no_garbage_collection():
        assert not gc.isenabled()
    assert gc.isenabled()


# what follows runs on a GPU: `pytest -m gpu tests/debug`


def gpu_plan(*overrides: str) -> LaunchPlan:
    settings = ["model.layers=[0, 1, 2, 3]", "step.outputs=[tokens, logits]", *overrides]
    return compile_plan("examples/k3-h200-tp16.yaml", settings)


def kept(executable: Executable) -> dict[str, torch.Tensor]:
    rank = executable.ranks[0]
    kinds = ("state", "cache", "output")
    return {n: rank.tensors[n].clone() for n, b in executable.plan.buffers.items() if b.kind in kinds}


def empty(executable: Executable) -> None:
    for name, buffer in executable.plan.buffers.items():
        if buffer.kind in ("state", "cache"):
            executable.ranks[0].buffers[name].zero_()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ["step.query=1", "step.query=8"])
def test_a_replay_is_the_eager_step_bit_for_bit(rows: str) -> None:
    executable, _ = bind_random(gpu_plan(rows))
    step, record = record_capture(executable)
    found = inspect(executable.plan, record)
    assert not found.missing
    assert not found.extra
    assert not found.unlike
    results = []
    for run in (executable.run, step.replay, step.replay):
        empty(executable)
        executable.poison()
        run()
        torch.cuda.synchronize()
        results.append(kept(executable))
    for other in results[1:]:
        for name, tensor in results[0].items():
            assert torch.equal(tensor, other[name]), name


@pytest.mark.gpu
def test_a_replay_allocates_nothing() -> None:
    executable, _ = bind_random(gpu_plan())
    step = capturing.capture(executable)
    step.replay()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(3):
        step.replay()
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert step.host_us()[1] < 20.0


@pytest.mark.gpu
def test_a_side_stream_is_in_the_graph() -> None:
    side = independent(gpu_plan())
    plan = on_streams(gpu_plan(), *side)
    executable, _ = bind_random(plan)
    step, record = record_capture(executable)
    found = inspect(plan, record)
    assert not found.missing
    assert found.streams[1] >= len(side) > 0
    assert found.forks
    assert found.joins
    wanted, _ = bind_random(replace(plan, launches=tuple(replace(x, stream=0) for x in plan.launches)))
    for bound, run in ((executable, step.replay), (wanted, wanted.run)):
        empty(bound)
        run()
    torch.cuda.synchronize()
    assert torch.equal(executable.outputs["logits"], wanted.outputs["logits"])


@pytest.mark.gpu
def test_launches_are_timed_and_add_up() -> None:
    record = record_random(gpu_plan())
    total = sum(launch.us or 0.0 for launch in record.launches)
    assert record.replay_us is not None
    assert 0.5 < total / record.replay_us < 2.0
    assert all(launch.us is not None and launch.us >= 0.0 for launch in record.launches)


@pytest.mark.gpu
def test_events_in_the_graph_agree_with_the_profiler() -> None:
    """Layer by layer, but for the first, whose weights are the coldest."""
    executable, _ = bind_random(gpu_plan())
    launches = executable.plan.launches
    ends = [i for i, x in enumerate(launches) if x.layer is not None and launches[i + 1].layer != x.layer]
    segments = segment_us(executable, ends)
    record = record_random(gpu_plan())
    for (first, last), us in zip(pairwise(ends), segments, strict=True):
        shares = sum(x.us or 0.0 for x in record.launches[first + 1 : last + 1])
        assert 0.85 < shares / us < 1.1


@pytest.mark.gpu
def test_cuda_agrees_with_the_predicted_update() -> None:
    executable, _ = bind_random(gpu_plan())
    (first, one), (second, two) = record_capture(executable), record_capture(executable)
    assert predict_update(one, two).word == SUCCESS
    assert update_result(first.graph.raw_cuda_graph_exec(), second.graph.raw_cuda_graph()).word == SUCCESS


@pytest.mark.gpu
def test_buckets_are_captured_on_padding_and_alternate() -> None:
    plans = compile_buckets("examples/k3-h200-tp16.yaml", [
        "model.layers=[0, 1, 2, 3]", "capture.buckets=[1, 8]", "step.outputs=[tokens, logits]"])
    buckets = bind_buckets(plans, RankRandom(0), device="cuda", transport="loopback")
    largest = buckets.executables[0]
    before = kept(largest)
    buckets = capture_buckets(buckets)
    for name, tensor in kept(largest).items():
        if largest.plan.buffers[name].kind != "output":
            assert torch.equal(tensor[:-1], before[name][:-1]), name
    seen: dict[int, torch.Tensor] = {}
    for turn in range(6):
        executable, step = buckets.executables[turn % 2], buckets.steps[turn % 2]
        empty(largest)
        executable.write(**live_inputs(executable.plan))
        step.replay()
        torch.cuda.synchronize()
        logits = executable.outputs["logits"].clone()
        assert torch.equal(logits, seen.setdefault(turn % 2, logits))
