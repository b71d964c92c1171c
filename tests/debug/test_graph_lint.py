"""``lint``: two eager steps held against each other. Kinds of failure by their numbers in the catalogue."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from broken import EXAMPLE, launch_index, small_plan, small_step, with_step, write_live

from k3plan.compiler.compile import compile_spec
from k3plan.compiler.plan import LaunchPlan
from k3plan.compiler.reading.source import load_spec
from k3plan.face import kernels, tuning
from k3plan.graphs.bind import Executable
from k3plan.graphs.debug.findings import Finding, render
from k3plan.graphs.debug.lint import check_inputs, check_rows, check_shared_workspace, lint, lint_plan

LAUNCH = "L0.attn.o_gated"
Step = Callable[[], None]


@pytest.fixture(scope="module")
def sound() -> Executable:
    return small_step()


def serious(findings: list[Finding]) -> list[Finding]:
    return [f for f in findings if f.severity != "note"]


def only(findings: list[Finding], code: str, launch: str = LAUNCH) -> Finding:
    """The one finding that there is: of this code, at this launch and its layer."""
    found = serious(findings)
    assert [(f.code, f.launch) for f in found] == [(code, launch)], render(found)
    assert found[0].layer == 0
    assert found[0].text in render(found)
    return found[0]


def test_a_sound_step_has_no_findings(sound: Executable) -> None:
    assert serious(lint(sound, change=lambda: write_live(sound, 2, 6))) == []


def test_lint_leaves_states_and_inputs_alone(sound: Executable) -> None:
    rank = sound.ranks[0]
    kept = {n: rank.buffers[n].clone() for n, b in sound.plan.buffers.items() if b.kind in ("state", "index")}
    lint(sound, change=lambda: write_live(sound, 1, 9))
    assert kept
    assert all(torch.equal(rank.buffers[n], old) for n, old in kept.items())


def test_8_split_count_of_another_context() -> None:
    spec = load_spec("examples/k3-gb300-tp16.yaml", ["step.context=131072"])
    plan = compile_spec(spec, [kernel for kernel in kernels() if kernel.id.startswith("triton.")], tuning("gb300"))
    assert serious(lint_plan(plan)) == []
    choices = [replace(c, config={**c.config, "splits": 1}) if "splits" in c.config and "block" in c.config else c
               for c in plan.choices]
    origins = load_spec("examples/k3-gb300-tp16.yaml").origins
    found = serious(lint_plan(replace(plan, choices=tuple(choices)), origins=origins))
    assert {f.code for f in found} == {"CG-031"}
    assert len(found) == sum("page_table" in x.inputs and "splits" in plan.choice(x).config for x in plan.launches)
    assert "1 splits of 131072 tokens" in found[0].text
    assert "k3-gb300-tp16.yaml:" in (found[0].where or "")


def test_8_every_baked_number_is_reported(sound: Executable) -> None:
    notes = [f.text for f in lint(sound) if f.code == "CG-032"]
    for choice in sound.plan.choices:
        for name, value in choice.attrs.get("o0", {}).items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                assert any(choice.kernel in text and f"{name}={value}" in text for text in notes), name


def test_9_epoch_of_the_host(sound: Executable) -> None:
    epoch = [0]
    flag = torch.zeros(1, dtype=torch.int32)

    def count(step: Step) -> Step:
        def run() -> None:
            step()
            epoch[0] += 1
            flag.fill_(epoch[0])
        return run

    finding = only(lint(with_step(sound, LAUNCH, count)), "CG-033")
    assert "is 1 in one step and 2 in the next" in finding.text
    assert Path(__file__).name in (finding.where or "")


@triton.jit
def _scale(x, y, factor, epoch, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at) * factor + epoch)


@pytest.mark.parametrize(("what", "code"), [("epoch", "CG-033"), ("factor", "CG-035"), ("tensor", "CG-034")])
def test_9_10_arguments_of_a_triton_kernel(sound: Executable, what: str, code: str, device: str) -> None:
    if device != "cpu":
        pytest.skip("the step is bound to the CPU")
    calls, y = [0], torch.zeros(16)
    inputs = [torch.ones(16), torch.ones(16), torch.ones(16)]

    def launch(step: Step) -> Step:
        def run() -> None:
            step()
            calls[0] += 1
            n = calls[0]
            _scale[(1,)](inputs[n if what == "tensor" else 0], y, 0.5 + n if what == "factor" else 0.5,
                         n if what == "epoch" else 3, N=16)
        return run

    finding = only(lint(with_step(sound, LAUNCH, launch)), code)
    assert "_scale" in finding.text


def test_10_a_new_tensor_instead_of_the_static_buffer(sound: Executable) -> None:
    given, out = [torch.ones(4)], torch.zeros(4)

    def take(step: Step) -> Step:
        def run() -> None:
            step()
            out.copy_(given[-1])
        return run

    def change() -> None:
        given.append(torch.full((4,), 2.0))

    finding = only(lint(with_step(sound, LAUNCH, take), change=change), "CG-034")
    assert "copy_" in finding.text


def test_10_a_python_float(sound: Executable) -> None:
    temperature, x = [0.7], torch.ones(4)

    def scale(step: Step) -> Step:
        def run() -> None:
            step()
            x.mul_(temperature[0])
        return run

    def change() -> None:
        temperature[0] = 0.9

    assert "0.7 in one step and 0.9" in only(lint(with_step(sound, LAUNCH, scale), change=change), "CG-035").text


def test_11_index_buffer_sliced_to_the_live_count(sound: Executable) -> None:
    slots, out, live = sound.ranks[0].tensors["slots"], torch.zeros(2, dtype=torch.int32), [1]

    def cut(step: Step) -> Step:
        def run() -> None:
            step()
            out[: live[0]].copy_(slots[: live[0]])
        return run

    def change() -> None:
        live[0] = 2

    only(lint(with_step(sound, LAUNCH, cut), change=change), "CG-036")


def test_11_a_branch_on_the_host(sound: Executable) -> None:
    live = [1]

    def branch(step: Step) -> Step:
        def run() -> None:
            step()
            for _ in range(live[0]):
                torch.zeros(1).add_(1)
        return run

    def change() -> None:
        live[0] = 2

    only(lint(with_step(sound, LAUNCH, branch), change=change), "CG-037")


@pytest.mark.parametrize("how", ["item", "bool", "nonzero", "print", "mask", "synchronize"])
def test_12_the_host_waits(sound: Executable, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(4.0)
    # stands in for CUDA's own, which needs a GPU
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    waits = {
        "item": lambda: x[0].item(), "bool": lambda: bool(x[0] > 1), "nonzero": lambda: x.nonzero(),
        "print": lambda: str(x), "mask": lambda: x[x > 1], "synchronize": torch.cuda.synchronize,
    }

    def wait(step: Step) -> Step:
        def run() -> None:
            step()
            if how == "synchronize":
                torch.cuda.synchronize()
            else:
                waits[how]()
        return run

    found = serious(lint(with_step(sound, LAUNCH, wait)))
    assert {(f.code, f.launch) for f in found} == {("CG-001", LAUNCH)}, render(found)
    assert all(f"{Path(__file__).name}:" in (f.where or "") for f in found)


def verify_plan(sequences: int = 2) -> LaunchPlan:
    return small_plan(more=("step.query=4", f"step.sequences={sequences}"))


@pytest.mark.parametrize(("rows", "severity"), [
    ([9] * 48, "error"), ([4] * 3, "error"), ([4, 3], "warning"), ([4, 4], ""), ([3, 3], ""),
])
def test_6_rows_that_fill_no_bucket(rows: list[int], severity: str) -> None:
    found = check_rows(verify_plan(), rows)
    assert [(f.code, f.severity) for f in found] == ([("CG-046", severity)] if severity else [])


def test_6_ragged_rows_say_how_many_are_padded() -> None:
    plan = small_plan(more=("step.query=4", "step.sequences=96"))
    found = check_rows(plan, [4] * 72 + [3] * 24)
    assert "72 x 4 + 24 x 3" in found[0].text
    assert "24 rows must be padded" in found[0].text


def test_7_sequence_shorter_than_its_verify_rows() -> None:
    plan = verify_plan()
    inputs = {"positions": torch.tensor([-1, -1, -1, 0, 8, 9, 10, 11])}
    found = check_inputs(plan, inputs)
    assert [f.code for f in found] == ["CG-047"]
    assert "sequence 0 ends at position 0, shorter than its 4 verify rows" in found[0].text
    assert check_inputs(plan, {"positions": torch.tensor([0, 1, 2, -1, -1, -1, -1, -1])}) == []
    assert [f.code for f in check_inputs(plan, {"positions": torch.tensor([0, 0, 0, 0, 4, 5, 6, 7])})] == ["CG-047"]


def test_22_two_graphs_share_a_workspace(sound: Executable) -> None:
    def mailboxes(words: int) -> Executable:
        launch = launch_index(sound, LAUNCH)
        planned = list(sound.plan.launches)
        planned[launch] = replace(planned[launch], scratch={"mailbox": "box"})
        kind = next(b for b in sound.plan.buffers.values())
        buffers = {**sound.plan.buffers, "box": replace(kind, kind="zeroed")}
        tensors = {**sound.plan.tensors, "box": replace(sound.plan.tensors["slots"], buffer="box")}
        plan = replace(sound.plan, launches=tuple(planned), buffers=buffers, tensors=tensors)
        rank = replace(sound.ranks[0], tensors={**sound.ranks[0].tensors, "box": shared[:words]})
        return replace(sound, plan=plan, ranks=(rank,))

    shared = torch.zeros(64)
    one, eight = mailboxes(8), mailboxes(64)
    found = check_shared_workspace([one, eight])
    assert [(f.code, f.launch) for f in found] == [("CG-016", LAUNCH)]
    assert check_shared_workspace([one]) == []


def test_the_line_of_the_plan_file(sound: Executable) -> None:
    found = lint(sound, origins=load_spec(EXAMPLE).origins)
    assert all(f.where and "launch " in f.where for f in found)
