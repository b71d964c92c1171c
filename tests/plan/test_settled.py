"""What a launch finds written before it waits: planted cases, the order of events itself, and the plans of Kimi K3."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_graphs import graph, kernel

from k3plan.compiler.compile import compile_spec
from k3plan.compiler.errors import GraphError
from k3plan.compiler.explain import explain
from k3plan.compiler.ir import Graph
from k3plan.compiler.kernel import KernelDef, Region
from k3plan.compiler.plan import LaunchPlan
from k3plan.compiler.reading.source import load_spec
from k3plan.compiler.schedule import Slot
from k3plan.compiler.settled import settle
from k3plan.face import kernels, tuning
from k3plan.graphs.bind import _call

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CHAIN = "a = add(x, w)\nb = add(a, w)\nc = add(b, w)\nd = add(a, c)"


def settled(text: str, *, late: str = "", full: str = "", side: dict[str, tuple[int, int]] | None = None,
            ) -> dict[str, tuple[str, str | None]]:
    """By node its settled inputs and the node that says so. ``late`` nodes trigger after their wait, ``full`` ones
    start at a full edge, ``side`` ones run beside the launches from the first to the last number."""
    built = graph(text, [text.rsplit("\n", 1)[-1].split(" = ")[0]])
    regions = regions_of(built)
    slots = [Slot(1, False, *side[n.name]) if side and n.name in side else Slot(0, i > 0 and n.name not in full, i, i)
             for i, n in enumerate(built.nodes)]
    found = settle(built, regions, slots, [node.name in late for node in built.nodes])
    return {node.name: (",".join(one.inputs), None if one.by is None else built.nodes[one.by].name)
            for node, one in zip(built.nodes, found, strict=True)}


def regions_of(built: Graph) -> list[Region]:
    return [Region(kernel(f"k.{n.name}", f"o = {n.op}(...)\n-> o"), (n,), {}, n.inputs, n.outputs, built)
            for n in built.nodes]


def test_what_no_launch_writes_is_settled() -> None:
    assert settled(CHAIN)["a"] == ("x,w", None)


def test_with_early_triggers_nothing_of_the_step_is_settled() -> None:
    found = settled(CHAIN)
    assert found["b"] == ("w", None)
    assert found["d"] == ("", None)


def test_a_late_trigger_settles_what_ran_before_it() -> None:
    # b has waited for a before c could start; of b itself c and d know nothing
    found = settled(CHAIN, late="b")
    assert found["b"] == ("w", None)
    assert found["c"] == ("w", None)
    assert found["d"] == ("a", "b")


def test_a_late_trigger_does_not_settle_its_own_writes_nor_help_itself() -> None:
    assert settled(CHAIN, late="a")["d"] == ("", None)
    # c waits for b before d starts: a and b have ended, c may run
    assert settled(CHAIN, late="c")["d"] == ("a", "c")
    assert settled("a = add(x, w)\nb = add(a, w)\nc = add(b, a)", late="b")["c"] == ("a", "b")
    assert settled("a = add(x, w)\nb = add(a, w)\nc = add(b, a)", late="c")["c"] == ("", None)


def test_a_full_edge_settles_everything_before_it() -> None:
    found = settled(CHAIN, full="d")
    assert found["d"] == ("a,c", "d")
    found = settled(CHAIN, full="c")
    assert found["c"] == ("b,w", "c")
    assert found["d"] == ("a", "c")


def test_the_writer_right_before() -> None:
    assert settled("a = add(x, w)\nb = add(a, w)", late="a") == {"a": ("x,w", None), "b": ("w", None)}
    assert settled("a = add(x, w)\nb = add(a, w)", full="b")["b"] == ("a,w", "b")


FORK = "a = add(x, y)\ns = linear(a, w)\nc = add(a, a)\nd = add(c, c)\ne = add(d, s)\nf = add(e, s)\ng = add(f, a)"


def test_another_stream_is_settled_where_it_is_waited_for() -> None:
    # s runs beside c and d; e waits for it at a full edge
    found = settled(FORK, side={"s": (1, 3)}, full="e")
    assert found["s"] == ("a,w", "s")
    assert found["d"] == ("", None)
    assert found["e"] == ("d,s", "e")
    assert found["f"] == ("s", "e")
    assert found["g"] == ("a", "e")


def test_a_late_trigger_says_nothing_of_another_stream() -> None:
    text = "a = add(x, y)\ns = linear(a, w)\nc = add(a, a)\nd = add(c, a)\ne = add(d, s)\nf = add(s, a)"
    found = settled(text, side={"s": (1, 5)}, late="c,d")
    assert found["d"] == ("a", "c")
    assert found["e"] == ("", None)  # the launch that waits for s comes later
    assert found["f"] == ("a", "d")


def test_views_and_updates_in_place_are_their_storage() -> None:
    text = "a = add(x, w)\nv = slice(a)\nb = add(x, w)\nc = add(b, w)\nd = add(v, w)"
    built = graph(text, ["d"])
    regions = [region for region in regions_of(built) if region.nodes[0].op != "slice"]
    slots = [Slot(0, i > 0, i, i) for i in range(len(regions))]
    found = settle(built, regions, slots, [False, True, False, False])
    assert found[3].inputs == ("v", "w")
    assert settle(built, regions, slots, [False] * 4)[3].inputs == ("w",)


# the rule against the order of events


def certain(late: Sequence[bool], dependent: Sequence[bool], ranks: int, parts: Sequence[int]) -> list[set[int]]:
    """For each launch those that have certainly ended when any of it starts, by what a launch, a wait and a trigger
    mean and nothing else. Launches are repeated for each rank and have ``parts`` kernels; of a late one the
    last kernel is late, or of every other one the first."""
    kernels_ = [(i, late[i] and part == (0 if i % 2 else count - 1)) for i, count in enumerate(parts)
                for _ in range(ranks) for part in range(count)]
    after: list[set[str]] = []  # what has certainly happened when a kernel starts, when it has waited, when it triggers
    known: dict[str, set[str]] = {}
    for k, (i, is_late) in enumerate(kernels_):
        start: set[str] = set()
        waited: set[str] = set()
        if k:
            ended = {f"end {k - 1}"} | known[f"end {k - 1}"]
            triggered = known[f"trigger {k - 1}"]
            start = triggered if dependent[i] else ended
            waited = ended
        known[f"wait {k}"] = start | waited
        known[f"trigger {k}"] = known[f"wait {k}"] if is_late else start
        known[f"end {k}"] = known[f"wait {k}"] | known[f"trigger {k}"]
        after.append(start)
    found: list[set[int]] = []
    for i in range(len(late)):
        own = [k for k, (launch, _) in enumerate(kernels_) if launch == i]
        over = set.intersection(*({e for e in after[k] if e.startswith("end")} for k in own))
        found.append({j for j in range(i) if all(f"end {k}" in over for k, (n, _) in enumerate(kernels_) if n == j)})
    return found


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([True, True, True, False]), st.integers(1, 2)), min_size=1,
                max_size=9), st.integers(1, 3))
def test_the_rule_is_what_the_order_of_events_says(launches: list[tuple[bool, bool, int]], ranks: int) -> None:
    """Every launch reads all before it; one stream, ranks one after the other, some launches in two kernels. The rule
    finds nothing that is not certain, and with one rank and one kernel each all that is."""
    late, dependent, parts = zip(*launches, strict=True)
    dependent = (False, *dependent[1:])
    names = [f"v{i}" for i in range(len(launches))]
    text = "\n".join(f"{name} = add({', '.join(['x', *names[:i]])})" for i, name in enumerate(names))
    built = graph(text, names[-1:])
    slots = [Slot(0, edge, i, i) for i, edge in enumerate(dependent)]
    found = settle(built, regions_of(built), slots, late)
    events = certain(late, dependent, ranks, parts)
    for i, one in enumerate(found):
        mine = {names.index(name) for name in one.inputs if name != "x"}
        assert mine <= events[i]
        if ranks == 1 and set(parts) == {1}:
            assert mine == events[i]


# plans


def late_kda(kernel: KernelDef) -> KernelDef:
    """KDA in its late configurations only."""
    if not kernel.id.startswith("cute.kda_"):
        return kernel
    return replace(kernel, configs=lambda region: [c for c in kernel.configs(region) if kernel.late(c)])  # type: ignore


@cache
def plan_of(name: str, *overrides: str, late: bool = False) -> LaunchPlan:
    spec = load_spec(EXAMPLES / f"{name}.yaml", overrides)
    return compile_spec(spec, [late_kda(k) if late else k for k in kernels()], tuning(spec.gpu))


def blocks_of(plan: LaunchPlan) -> list[tuple[int, int, bool]]:
    """Of each launch with attention residuals: blocks, how many are settled, whether its prefix is."""
    found = []
    for launch in (x for x in plan.launches if "attn_res" in plan.choice(x).ops):
        over = launch.settled if launch.dependent else launch.inputs
        found.append((len(launch.rest), len(set(launch.rest) & set(over)), launch.names.get("prefix") in over))
    return found


@pytest.mark.parametrize("name", ["k3-h200-tp16", "k3-gb300-tp16"])
def test_with_a_late_kda_every_block_is_settled(name: str) -> None:
    """Of 186 launches, and before the MLP of KDA layers that begin no block the prefix, which is older than KDA."""
    plan = plan_of(name, late=True)
    found = blocks_of(plan)
    assert len(found) == 186
    assert all(blocks == count for blocks, count, _ in found)
    assert sum(prefix for *_, prefix in found) >= 69 - 8


def test_no_block_of_the_h200_plan_is_settled_yet() -> None:
    """Each of its kernels triggers with its first instruction, as they were timed."""
    plan = plan_of("k3-h200-tp16")
    assert all(not count and not prefix for _, count, prefix in blocks_of(plan))
    assert sum(not launch.dependent for launch in plan.launches) == 1


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["k3-h200-tp16", "k3-gb300-tp16"])
def test_plans_say_what_the_order_of_events_says(name: str, late: bool) -> None:
    plan = plan_of(name, "model.layers=[0, 1, 2, 3, 12, 13]", late=late)
    menu = {kernel.id: kernel for kernel in kernels()}
    choices = [plan.choice(launch) for launch in plan.launches]
    is_late = [c.kernel in menu and menu[c.kernel].late(c.config) for c in choices]
    events = certain(is_late, [x.dependent for x in plan.launches], 1, [1] * len(plan.launches))
    made = {name: index for index, launch in enumerate(plan.launches) for name in launch.outputs}
    for index, launch in enumerate(plan.launches):
        kinds = {n: plan.buffers[plan.tensors[n].buffer].kind for n in launch.inputs}
        over = {n for n in launch.inputs if kinds[n] in ("arena", "output") and made.get(n, index) in events[index]}
        if launch.dependent:
            assert over == {n for n in launch.settled if n in made}


def test_a_launch_at_a_full_edge_says_nothing_and_has_everything() -> None:
    spec = load_spec(EXAMPLES / "k3-gb300-tp16.yaml", ("model.layers=[0, 1, 3]",))
    menu = [k for k in kernels() if "skinny_linear" not in k.id and "staged_linear" not in k.id]
    plan = compile_spec(spec, menu, tuning(spec.gpu))
    full = [launch for launch in plan.launches if not launch.dependent]
    assert full
    assert not any(launch.settled or launch.settled_by for launch in full)
    for launch in (x for x in full if not plan.choice(x).entry.startswith("op:")):
        names = (*launch.names.values(), *launch.rest, *launch.scratch.values())
        rank = SimpleNamespace(arena=SimpleNamespace(device=SimpleNamespace(type="cuda")),
                               tensors=dict.fromkeys(names, torch.empty(1, device="meta")))
        call = _call(plan.choice(launch), launch, rank, 16, 0, 0)  # type: ignore[arg-type]
        assert {launch.names[name] for name in call.settled if name in launch.names} >= {
            n for n in launch.inputs if n in launch.names.values()}
        assert len([name for name in call.settled if name.startswith("...")]) == len(launch.rest)


def test_ids_that_are_read_early_are_settled() -> None:
    """``experts_down*`` read ``ids`` before they wait (``EARLY`` in their files)."""
    menu = [k for k in kernels() if not k.id.startswith("cute.") and k.id != "triton.experts_situ"]
    menu = [k for k in menu if not k.id.startswith("triton.experts_gate_up_dense")]
    seen = 0
    for name in ("k3-h200-tp16", "k3-gb300-tp16"):
        spec = load_spec(EXAMPLES / f"{name}.yaml", ("model.layers=[0, 1, 3]",))
        plan = compile_spec(spec, menu, tuning(spec.gpu))
        for launch in plan.launches:
            if "triton.experts_down" in plan.choice(launch).kernel:
                seen += 1
                assert launch.names["ids"] in launch.settled, launch.id
    assert seen


def test_a_kernel_that_reads_early_what_is_not_settled_is_refused() -> None:
    """No late launch is left between the router and ``experts_down*``."""
    spec = load_spec(EXAMPLES / "k3-h200-tp16.yaml", ("model.layers=[0, 1]",))
    whole = ("triton.experts_situ", "triton.moe_front")
    menu = [k for k in kernels() if not k.id.startswith("cute.") and k.id not in whole]
    compile_spec(spec, menu, tuning("h200"))
    early = [replace(k, late=lambda config: False) if "experts_gate_up" in k.id else k for k in menu]
    with pytest.raises(GraphError, match="may read \\('ids',\\) too early"):
        compile_spec(spec, early, tuning("h200"))


def test_explain_says_who_settles_what() -> None:
    plan = plan_of("k3-h200-tp16", "model.layers=[0, 1, 2, 3]", late=True)
    text = explain(plan, "L2.mlp.h+3")
    assert ("settled before it starts: L2.attn.prefix, embed.rows.all_reduce (all before L2.attn.o_gated+4 have ended, "
            "which triggers after its wait)") in text


def test_a_launch_that_is_late_is_declared_by_its_configuration() -> None:
    one: KernelDef = replace(kernel("k.a", "o = add(...)\n-> o"), late=lambda config: bool(config.get("late")))
    assert not one.late({})
    assert one.late({"late": True})
    assert not kernel("k.b", "o = add(...)\n-> o").late({"late": True})
