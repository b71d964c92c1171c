"""Ranks that differ, refuse, are late or are gone. Threads over a store in memory stand for processes."""
from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from k3plan.compiler.errors import BindError, RankError
from k3plan.compiler.reading.source import load_spec
from k3plan.face import compile_plan, kernels
from k3plan.graphs.distributed import report, watch
from k3plan.graphs.distributed.group import Group
from k3plan.graphs.distributed.library import Library
from k3plan.graphs.distributed.rank import counted, kernel_digest, make_transport
from k3plan.graphs.distributed.watch import EXIT_CODE, Watch
from k3plan.graphs.distributed.work import first_difference


def on_ranks(work: Callable[[Group], Any], ranks: int = 2, patience: float = 5.0) -> list[Any]:
    """What ``work`` returns or raises on each rank."""
    store, results = dist.HashStore(), [None] * ranks

    def run(rank: int) -> None:
        try:
            results[rank] = work(Group(rank, ranks, torch.device("cpu"), store, patience))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def test_ranks_hear_each_other_in_rank_order() -> None:
    said = on_ranks(lambda group: group.exchange("numbers", {"n": group.rank ** 2}), ranks=3)
    assert said == [[{"n": 0}, {"n": 1}, {"n": 4}]] * 3


def test_a_rank_with_another_plan_stops_all_with_one_message() -> None:
    def work(group: Group) -> None:
        group.agree({"the plan's key": "e2a9" if group.rank != 2 else "77b1", "torch": "2.13"})

    found = on_ranks(work, ranks=3)
    assert all(isinstance(error, RankError) for error in found)
    assert len({str(error) for error in found}) == 1
    assert str(found[0]).startswith("ranks 0 and 2 do not agree: the plan's key is e2a9 on rank 0 and 77b1 on rank 2\n")
    assert "fix: " in str(found[0])


def test_the_kernels_source_is_all_that_a_kernel_is_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel in a folder of its own uses files of the package above it and of folders beside."""
    made = tmp_path / "made" / "ops"
    for folder in (made.parent, made, made / "experts", made / "rows"):
        folder.mkdir()
        (folder / "__init__.py").write_text("")
    kernel = made / "experts" / "kernel.py"
    kernel.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    plan = compile_plan("examples/tiny-k3.yaml")
    plan = replace(plan, choices=(replace(plan.choices[0], entry="made.ops.experts.kernel:bind"), *plan.choices[1:]))
    seen = {kernel_digest(plan)}
    for file in (kernel, made / "primitives.py", made / "rows" / "row.py"):
        file.write_text("x = 1\n")
        seen.add(kernel_digest(plan))
    assert len(seen) == 4


def test_a_rank_without_a_fact_that_others_have_differs() -> None:
    found = on_ranks(lambda group: group.agree({"a": 1} if group.rank else {"a": 1, "b": 2}))
    assert "b is 2 on rank 0 and not said on rank 1" in str(found[1])


def test_a_refused_rank_stops_the_others_wherever_they_are() -> None:
    """Rank 1 fails while it binds; rank 0 is already at a later meeting."""
    def work(group: Group) -> None:
        if group.rank == 1:
            with group.together("binding"):
                raise BindError("kernel triton.moe_tail runs on a GPU")
        group.exchange("some other meeting", {})

    started = time.monotonic()
    zero, one = on_ranks(work)
    assert isinstance(one, BindError)
    assert isinstance(zero, RankError)
    assert "rank 1 refused" in str(zero)
    assert "binding: BindError: kernel triton.moe_tail runs on a GPU" in str(zero)
    assert time.monotonic() - started < 3


def test_a_rank_that_does_not_come_is_named() -> None:
    zero, _, two = on_ranks(lambda group: group.rank == 1 or group.exchange("rendezvous", {}), ranks=3, patience=0.3)
    assert str(zero).startswith("rank 1 did not come to 'rendezvous' within 0 s")
    assert str(two).startswith("rank 1 did not come")


def test_the_watch_ends_a_rank_whose_peer_falls_silent(capsys: pytest.CaptureFixture[str]) -> None:
    store, ended = dist.HashStore(), threading.Event()
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    listening = Watch(0, 2, store, silence=1.0, end=end)
    listening.report = lambda: ["triton.all_reduce: 17 launches over"]
    listening.start()
    for beat in range(3):  # rank 1 lives for a while
        store.set("beat/1", str(beat))
        time.sleep(0.5)
        assert not ended.is_set()
    assert ended.wait(5)
    assert codes == [EXIT_CODE]
    said = capsys.readouterr().err
    assert "rank 0 stops: rank 1 has given no sign of life for 1 s" in said
    assert "triton.all_reduce: 17 launches over" in said


def test_a_device_that_does_not_answer_holds_nobody_up(capsys: pytest.CaptureFixture[str],
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is told before the device is asked, and the rank ends without its answer."""
    monkeypatch.setattr(watch, "ANSWER", 0.3)
    store, ended, never = dist.HashStore(), threading.Event(), threading.Event()
    silent = Watch(0, 2, store, silence=0.2, end=lambda code: ended.set())
    silent.report = lambda: [str(never.wait())]
    silent.start()
    assert ended.wait(5)
    said = capsys.readouterr().err
    assert said.startswith("k3plan: rank 0 stops: rank 1 has given no sign of life for 0 s")
    assert "nothing is known of this rank's device: no answer" in said
    never.set()


def test_a_rank_that_left_in_order_is_not_missed() -> None:
    store = dist.HashStore()
    listening = Watch(0, 3, store, silence=0.0)
    for rank in (1, 2):
        store.set(f"beat/{rank}", "left" if rank == 1 else "1")
    assert listening.missing() == ""
    time.sleep(0.01)
    assert listening.missing().startswith("rank 2 ")
    store.set("refused/1", "out of memory")
    assert listening.missing() == "rank 1 refused: out of memory"


def test_transports_between_processes_refuse_what_they_cannot_do() -> None:
    group = Group(0, 2, torch.device("cpu"), dist.HashStore())
    assert isinstance(make_transport(group), Library)
    with pytest.raises(BindError, match="memory of GPUs"):
        make_transport(group, "symmetric")
    with pytest.raises(BindError, match="no transport 'nccl'"):
        make_transport(group, "nccl")
    with pytest.raises(BindError, match="the plan is for 4 ranks, 2 were started"):
        Library(group).local_ranks(4)
    with pytest.raises(BindError, match="collectives inside kernels \\(box\\)"):
        Library(group).allocate_mailboxes({"box": 8}, torch.device("cpu"))


def test_links_say_that_nothing_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "Symmetric", lambda group: None)
    monkeypatch.setattr(report, "measure_link", lambda group, transport: SimpleNamespace(hop_us=1, ramp_us=2, gbs=3))
    spec = load_spec("examples/k3-h200-tp2.yaml", ["model.layers=[0]"])
    _, said = report.links(spec, kernels(), None, [1], "all_redcue", 9.0)
    assert said == "no collective kernel that fits the plan has all_redcue in its id"


def test_the_first_launch_that_differs_is_named() -> None:
    """Two records of a step; a later difference is not told, nor one of a launch that came after."""
    plan = compile_plan("examples/tiny-k3.yaml", ["model.layers=[0]"])
    names = [(number, launch.outputs[0]) for number, launch in enumerate(plan.launches[:6])]
    one = {(step, number, name): torch.full((4,), float(number)) for step in range(2) for number, name in names}
    other = {key: tensor.clone() for key, tensor in one.items()}
    assert first_difference(plan, one, other) == "launch by launch they are the same"
    other[(1, *names[3])][2] += 0.5
    other[(1, *names[5])] += 1
    said = first_difference(plan, one, other)
    assert f"is {plan.launches[3].id} ({plan.choice(plan.launches[3]).kernel}) in step 1: 1 of 4 values" in said
    assert said.endswith("by up to 0.5")


@pytest.mark.parametrize(("epochs", "wanted"), [
    ([41, 42, 41], (41, 42)), ([41, 41], (41, 41)), ([42, 41, 0, 0], (41, 42)), ([0, 0], (0, 0)), ([1, 0], (0, 1)),
])
def test_blocks_that_a_gpu_does_not_have_are_not_behind(epochs: list[int], wanted: tuple[int, int]) -> None:
    assert counted(torch.tensor(epochs, dtype=torch.int32)) == wanted
