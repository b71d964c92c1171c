"""Streams and early starts: what runs beside what, what that saves, and that memory knows of it."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from small_graphs import graph, kernel

from k3plan.compiler.compile import compile_spec
from k3plan.compiler.device import load_device
from k3plan.compiler.kernel import Cost, Region
from k3plan.compiler.plan import Launch, LaunchPlan
from k3plan.compiler.reading.source import load_spec
from k3plan.compiler.schedule import schedule
from k3plan.face import kernels, tuning
from k3plan.graphs.streams import stream_waits

K3 = Path(__file__).resolve().parents[2] / "examples/k3-h200-tp16.yaml"
H200 = load_device("h200")
TOLL = 2 * (H200["boundary_us"] - H200["dependent_boundary_us"])
# b needs a only and is wanted by e only: c and d may run meanwhile
FORK = "a = add(x, y)\nc = add(a, a)\nb = linear(a, w)\nd = add(c, c)\ne = add(d, b)"


def slots(text: str, us: dict[str, float], *, torch_ops: tuple[str, ...] = (), beside: bool = True):
    built = graph(text, [text.rsplit("\n", 1)[-1].split(" = ")[0]])
    regions, costs = [], []
    for node in built.nodes:
        pattern = f"o = {node.op}(...)\n-> o"
        made = kernel(f"k.{node.name}", pattern)
        if node.name in torch_ops:
            made = replace(made, entry=f"op:{node.op}")
        regions.append(Region(made, (node,), {}, node.inputs, node.outputs, built))
        costs.append(Cost(us.get(node.name, 2.0), 0, 0, True, ""))
    names = [node.name for node in built.nodes]
    return dict(zip(names, schedule(built, regions, costs, H200, beside=beside), strict=True))


def test_a_launch_starts_early_between_kernels_of_ours() -> None:
    found = slots("a = add(x, x)\nb = add(a, a)\nc = add(b, b)\nd = add(c, c)", {}, torch_ops=("c",))
    assert [slot.dependent for slot in found.values()] == [False, True, False, False]


def test_what_nothing_waits_for_runs_beside() -> None:
    found = slots(FORK, {"b": 3.0, "c": 2.5, "d": 1.0})
    assert {name: slot.stream for name, slot in found.items()} == {"a": 0, "c": 0, "b": 1, "d": 0, "e": 0}
    # at work from behind a until before e
    assert (found["b"].first, found["b"].last) == (1, 3)
    assert found["b"].hidden_us == pytest.approx(3.0 - TOLL)
    # it starts and is waited for at full edges; the others do not notice it
    assert {name: slot.dependent for name, slot in found.items()} == {
        "a": False, "c": True, "b": False, "d": True, "e": False}


def test_nothing_runs_beside_where_it_does_not_pay() -> None:
    for us in ({"b": TOLL}, {"b": 9.0, "c": TOLL / 2, "d": TOLL / 2}):
        assert not any(slot.stream for slot in slots(FORK, us).values())
    assert not any(slot.stream for slot in slots(FORK, {"b": 9.0, "c": 9.0}, beside=False).values())


def test_what_hides_one_launch_hides_no_other() -> None:
    text = "a = add(x, y)\nc = add(a, a)\nb = linear(a, w)\nf = linear(a, v)\ne = add(c, b)\ng = add(e, f)"
    found = slots(text, {"b": 3.0, "c": 3.0, "f": 3.1, "e": 0.1})
    assert sum(slot.stream for slot in found.values()) == 1
    assert found["f"].stream == 1


@pytest.fixture(scope="module")
def both() -> tuple[LaunchPlan, LaunchPlan]:
    layers = "model.layers=[0, 1, 2, 3]"
    # without the experts that take the shared one in: nothing of their layer could run beside them
    whole = ("cute.moe_experts_shared", "cute.moe_experts_tail")
    menu = [kernel for kernel in kernels() if not kernel.id.startswith(whole)]
    off, auto = (compile_spec(load_spec(K3, (layers, f"choices.side_stream={value}")), menu, tuning("h200"))
                 for value in ("off", "auto"))
    return off, auto


def test_the_real_plan_hides_launches_of_sparse_layers(both: tuple[LaunchPlan, LaunchPlan]) -> None:
    off, auto = both
    beside = [launch for launch in auto.launches if launch.stream]
    assert beside
    assert not any(launch.stream for launch in off.launches)
    assert all(launch.stage == "mlp" and launch.hidden_us > 0 for launch in beside)
    assert off.us - auto.us == pytest.approx(sum(launch.hidden_us for launch in beside))
    assert [launch.id for launch in off.launches] == [launch.id for launch in auto.launches]


def test_a_side_launch_is_waited_for_by_its_reader_alone(both: tuple[LaunchPlan, LaunchPlan]) -> None:
    """No launch in between touches what it reads or writes, and its reader starts at a full edge."""
    _, plan = both
    waits = stream_waits(plan)
    made = {name: index for index, launch in enumerate(plan.launches) for name in launch.outputs}
    for index, launch in enumerate(plan.launches):
        if launch.stream:
            readers = [i for i, other in enumerate(plan.launches) if set(launch.outputs) & set(other.inputs)]
            waiting = [i for i, sources in waits.items() if index in sources]
            assert waiting == readers[:1]
            assert not plan.launches[readers[0]].dependent
            assert _needed(plan, launch, made) <= set(waits.get(index, ())) | set(range(index - 1))


def _needed(plan: LaunchPlan, launch: Launch, made: dict[str, int]) -> set[int]:
    return {made[name] for name in launch.inputs if name in made}
