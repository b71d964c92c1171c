"""The arena: no two tensors that are alive together share a byte, and little of it is wasted."""
from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_graphs import graph

from k3plan.compiler.call import Scratch
from k3plan.compiler.compile import compile_spec
from k3plan.compiler.ir import DTYPE_BYTES, Graph, Node, Value
from k3plan.compiler.kernel import KernelDef, Region
from k3plan.compiler.memory import ALIGNMENT, Buffer, Tensor, _assign, contiguous, lay_out
from k3plan.compiler.model import ModelConfig
from k3plan.compiler.ops import OPS
from k3plan.compiler.plan import LaunchPlan
from k3plan.compiler.reading.source import load_spec
from k3plan.compiler.spec import Spec
from k3plan.graphs.make_checkpoint import TINY, scaled_config


def live_peak(buffers: dict[str, Buffer]) -> int:
    """Most arena bytes alive at once: the least that any assignment can need."""
    changes: dict[int, int] = {}
    for buffer in buffers.values():
        if buffer.kind == "arena":
            size = -(-buffer.bytes // ALIGNMENT) * ALIGNMENT
            changes[buffer.first] = changes.get(buffer.first, 0) + size
            changes[buffer.last + 1] = changes.get(buffer.last + 1, 0) - size
    peak = now = 0
    for index in sorted(changes):
        now += changes[index]
        peak = max(peak, now)
    return peak


def collisions(buffers: Mapping[str, Buffer], arena_bytes: int) -> list[str]:
    """Pairs of arena buffers that are alive in one launch and share a byte; what lies outside the arena."""
    arena = sorted((b.offset, b.bytes, b.first, b.last, n) for n, b in buffers.items() if b.kind == "arena")
    found = [f"{name} ends at {at + size}" for at, size, *_, name in arena if at + size > arena_bytes]
    for index, (offset, size, first, last, name) in enumerate(arena):
        for other_offset, _, other_first, other_last, other in arena[index + 1 :]:
            if other_offset >= offset + size:
                break
            if first <= other_last and other_first <= last:
                found.append(f"{name} and {other}")
    return found


lifetimes = st.lists(
    st.tuples(st.integers(1, 5000), st.integers(0, 30), st.integers(0, 12),
              st.sampled_from(["arena"] * 5 + ["output"])),
    max_size=40,
)


@settings(max_examples=300)
@given(lifetimes)
def test_lifetimes_that_overlap_get_places_that_do_not(drawn: list[tuple[int, int, int, str]]) -> None:
    made = {f"b{i}": Buffer(kind, size, 0, first, first + more)
            for i, (size, first, more, kind) in enumerate(drawn)}
    buffers = dict(sorted(made.items(), key=lambda item: (item[1].first, item[0])))  # as lay_out does
    placed, top = _assign(buffers)
    assert collisions(placed, top) == []
    assert top >= live_peak(placed)
    assert top <= sum(-(-b.bytes // ALIGNMENT) * ALIGNMENT for b in placed.values() if b.kind == "arena")
    for name, buffer in placed.items():
        assert buffer.offset % ALIGNMENT == 0
        assert replace(buffer, offset=0) == buffers[name], "only the offset is decided here"


def test_a_hole_is_used_again_and_neighbours_are_joined() -> None:
    size = ALIGNMENT
    buffers = {
        "a": Buffer("arena", size, 0, 0, 1), "b": Buffer("arena", size, 0, 0, 1),
        "c": Buffer("arena", size, 0, 0, 4), "wide": Buffer("arena", 2 * size, 0, 2, 3),
        "last": Buffer("arena", size, 0, 4, 4),
    }
    placed, top = _assign(buffers)
    offsets = {name: buffer.offset // size for name, buffer in placed.items()}
    assert offsets == {"a": 0, "b": 1, "c": 2, "wide": 0, "last": 0}
    assert top == 3 * size == live_peak(placed)


def test_a_value_read_in_the_launch_that_makes_another_is_not_overwritten() -> None:
    """The result of a launch never takes the place of that launch's own input."""
    placed, _ = _assign({"x": Buffer("arena", 100, 0, 0, 1), "y": Buffer("arena", 100, 0, 1, 2)})
    assert placed["x"].offset != placed["y"].offset


# graphs: views, updates in place


def one_by_one(made: Graph) -> tuple[Region, ...]:
    """A launch for each node that is not a view."""
    kernels = {op: KernelDef(f"torch.{op}", f"out = {op}(...)\n-> out", f"op:{op}") for op in OPS}
    return tuple(Region(kernels[n.op], (n,), {}, inputs=n.inputs, outputs=n.outputs, graph=made)
                 for n in made.nodes if OPS[n.op].kind != "view")


@st.composite
def random_graphs(draw: st.DrawFn) -> Graph:
    """Chains of additions and slices over values of several widths."""
    values = {"x": Value("x", (2, 64), "bf16", "index")}
    nodes: list[Node] = []
    for number in range(draw(st.integers(1, 20))):
        source = values[draw(st.sampled_from(sorted(values)))]
        name = f"v{number:02}"
        if draw(st.booleans()) and source.shape[1] > 1 and source.name != "x":
            start = draw(st.integers(0, source.shape[1] - 1))
            stop = draw(st.integers(start + 1, source.shape[1]))
            attrs = {"dim": 1, "start": start, "stop": stop}
            nodes.append(Node(name, "slice", (source.name,), (name,), attrs))
            values[name] = Value(name, (2, stop - start), source.dtype)
        else:
            others = [v.name for v in values.values() if v.shape == source.shape]
            nodes.append(Node(name, "add", (source.name, draw(st.sampled_from(others))), (name,)))
            values[name] = Value(name, source.shape, source.dtype)
    nodes.append(Node("end", "add", (nodes[-1].outputs[0],) * 2, ("end",)))
    values["end"] = Value("end", values[nodes[-1].inputs[0]].shape, "bf16")
    return Graph(tuple(nodes), values, ("x",), ("end",))


def inside(tensor: Tensor, buffer: Buffer) -> bool:
    last = tensor.offset + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride, strict=True))
    return tensor.offset >= 0 and (last + 1) * DTYPE_BYTES[tensor.dtype] <= buffer.bytes


def check_layout(made: Graph, regions: tuple[Region, ...], tensors: Mapping[str, Tensor],
                 buffers: Mapping[str, Buffer], arena_bytes: int) -> None:
    assert collisions(buffers, arena_bytes) == []
    for index, region in enumerate(regions):
        for name in (*region.inputs, *region.outputs):
            buffer = buffers[tensors[name].buffer]
            assert buffer.first <= index <= buffer.last, f"{name} in launch {index}"
            assert inside(tensors[name], buffer)
    for node in made.nodes:
        if OPS[node.op].kind == "view" and node.outputs[0] in tensors and node.inputs[0] in tensors:
            assert tensors[node.outputs[0]].buffer == tensors[node.inputs[0]].buffer


@settings(max_examples=200)
@given(random_graphs())
def test_random_graphs(made: Graph) -> None:
    regions = one_by_one(made)
    check_layout(made, regions, *lay_out(made, regions))


def test_a_view_keeps_its_root_alive() -> None:
    made = graph("a = add(x, x)\npart = slice(a)\nb = add(x, x)\nc = add(b, b)\nout = add(part, c)", ["out"],
                 {"x": "index"}, {"part": {"dim": 1, "start": 2, "stop": 6}})
    made = replace(made, values={**made.values, "part": replace(made.values["part"], shape=(1, 4))})
    tensors, buffers, _ = lay_out(made, one_by_one(made))
    assert tensors["part"] == Tensor("a", 2, (1, 4), (8, 1), "bf16")
    assert "part" not in buffers
    assert (buffers["a"].first, buffers["a"].last) == (0, 3)
    assert len({buffers[name].offset for name in ("a", "b", "c")}) == 3
    assert buffers["out"].kind == "output"


def test_a_view_of_a_view() -> None:
    attrs = {"outer": {"dim": 1, "start": 2, "stop": 7}, "inner": {"dim": 1, "start": 1, "stop": 3}}
    made = graph("a = add(x, x)\nouter = slice(a)\ninner = slice(outer)\nout = add(inner, inner)", ["out"],
                 {"x": "index"}, attrs)
    tensors, _, _ = lay_out(made, one_by_one(made))
    assert (tensors["inner"].buffer, tensors["inner"].offset) == ("a", 3)


def test_a_workspace_lives_for_its_launch() -> None:
    made = graph("a = add(x, x)\nb = add(a, a)\nout = add(b, b)", ["out"], {"x": "index"})
    regions = one_by_one(made)
    wanted = Scratch((300,), "fp32"), Scratch((4,), "i32", zeroed=True)
    scratch = [{}, {"parts": ("b/parts", wanted[0]), "arrived": ("b/arrived", wanted[1])}, {}]
    tensors, buffers, arena_bytes = lay_out(made, regions, scratch)
    check_layout(made, regions, tensors, buffers, arena_bytes)
    assert tensors["b/parts"] == Tensor("b/parts", 0, (300,), (1,), "fp32")
    assert (buffers["b/parts"].kind, buffers["b/parts"].first, buffers["b/parts"].last) == ("arena", 1, 1)
    # what must be zero before the first launch cannot share its bytes with anything
    assert buffers["b/arrived"].kind == "zeroed"
    assert buffers["b/arrived"].bytes == 16


def test_strides_are_row_major() -> None:
    assert contiguous((2, 3, 4)) == (12, 4, 1)
    assert contiguous((5,)) == (1,)


# plans


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("plan")
    (made / "config.json").write_text(json.dumps(scaled_config(TINY)))
    return made


def spec_of(folder: Path, model: Mapping[str, str], **sections: Any) -> Spec:
    plan = {"version": 1, "model": model, **sections}
    (folder / "plan.yaml").write_text(json.dumps(plan))
    return load_spec(folder / "plan.yaml")


def check_plan(plan: LaunchPlan) -> None:
    assert collisions(plan.buffers, plan.arena_bytes) == []
    for index, launch in enumerate(plan.launches):
        for name in (*launch.inputs, *launch.outputs):
            tensor = plan.tensors[name]
            buffer = plan.buffers[tensor.buffer]
            assert inside(tensor, buffer)
            assert buffer.first <= index <= buffer.last
    for name, value in plan.outputs.items():
        assert plan.buffers[plan.tensors[value].buffer].kind == "output", name
    # the name behind an update in place is the same storage
    for launch in plan.launches:
        definition = OPS.get(plan.choice(launch).entry.removeprefix("op:"))
        for index, source in (definition.alias.items() if definition else ()):
            if index < len(launch.results) and launch.results[index] in launch.outputs:
                assert plan.tensors[launch.results[index]] == plan.tensors[launch.inputs[source]]


TINY_PLANS: dict[str, dict[str, Any]] = {
    "tp1": {"step": {"sequences": 2, "context": 64}},
    "tp4-ep-verify": {"parallel": {"tp": 4, "experts": "ep"}, "step": {"query": 4, "context": 64}},
    "tp16-all_split": {"parallel": {"tp": 16}, "step": {"sequences": 3, "context": 64}, "choices": {
        "moe_front": "sharded", "moe_tail": "stripe", "mla_front": "sharded"}},
    "all_outputs": {"step": {"context": 64, "outputs": ["logits", "hidden", "tokens"]}},
    "fp32": {"step": {"context": 64}, "numerics": {"activation": "fp32", "kv_cache": "fp32"}},
}


@pytest.mark.parametrize("name", TINY_PLANS)
def test_tiny_plans(folder: Path, name: str) -> None:
    check_plan(compile_spec(spec_of(folder, {"config": "config.json"}, **TINY_PLANS[name])))


@pytest.mark.parametrize("model", ["kimi-k3", "kimi-linear-48b"])
@pytest.mark.parametrize(("tp", "rows"), [(1, 1), (16, 1), (16, 64)], ids=["tp1-T1", "tp16-T1", "tp16-T64"])
def test_real_models_fit_near_the_least_arena(folder: Path, model: str, tp: int, rows: int) -> None:
    plan = compile_spec(spec_of(folder, {"preset": model}, parallel={"tp": tp}, step={"sequences": rows}))
    check_plan(plan)
    assert live_peak(plan.buffers) <= plan.arena_bytes <= 1.3 * live_peak(plan.buffers)


def test_the_blocks_of_attn_res_stay_alive_to_the_end(folder: Path) -> None:
    """Finished blocks are kept, not copied: the arena of 93 layers is that of few, and eight rows more."""
    plan = compile_spec(spec_of(folder, {"preset": "kimi-k3"}, parallel={"tp": 16}))
    mix = next(launch for launch in reversed(plan.launches) if "attn_res" in plan.choice(launch).ops)
    sources = [name for name in mix.inputs if plan.tensors[name].shape == (1, 7168)]
    assert len(sources) == 9
    end = plan.launches.index(mix)
    held = [plan.buffers[plan.tensors[name].buffer] for name in sources]
    assert all(buffer.last >= end for buffer in held)
    assert len({buffer.offset for buffer in held}) == 9
    assert plan.arena_bytes < 1 << 20


def test_the_tiny_model_is_the_one_that_is_tested(folder: Path) -> None:
    model: ModelConfig = spec_of(folder, {"config": "config.json"}).model
    assert model == TINY
