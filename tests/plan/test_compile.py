"""The pipeline: what a compiled plan must be true of, whatever the model, and golden texts of two plans."""
from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from k3plan.compiler.compile import compile_spec, lower
from k3plan.compiler.difference import diff
from k3plan.compiler.errors import PlanError, ShardError
from k3plan.compiler.explain import explain, kinds, ranges, settings, summarise
from k3plan.compiler.kernel import KernelDef
from k3plan.compiler.plan import LaunchPlan, load_plan
from k3plan.compiler.reading.source import load_spec
from k3plan.compiler.tuning import Tuning
from k3plan.face import kernels, tuning
from k3plan.graphs.tuner.alone import tuned_lines

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/golden/plans"
K3 = ROOT / "examples/k3-gb300-tp16.yaml"
LINEAR = ROOT / "examples/kimi-linear-48b.yaml"

CASES = {
    "k3-tp16": (K3, ()),
    "k3-tp16-verify": (K3, ("step.query=8",)),
    "k3-tp8-ep": (K3, ("parallel={tp: 8, experts: ep}",)),
    "k3-tp1": (K3, ("parallel.tp=1", "step.outputs=[tokens, logits, hidden]")),
    "k3-tp32-sharded": (K3, ("parallel.tp=32", "choices={moe_front: sharded, moe_tail: stripe, mla_front: sharded}")),
    "linear-tp1": (LINEAR, ()),
    "linear-tp4": (LINEAR, ("parallel.tp=4", "step.sequences=3")),
}


def plan_of(case: str) -> LaunchPlan:
    path, overrides = CASES[case]
    return compile_spec(load_spec(path, overrides))


@pytest.fixture(scope="module", params=CASES)
def plan(request: pytest.FixtureRequest) -> LaunchPlan:
    return plan_of(request.param)


def test_every_node_is_computed_once(plan: LaunchPlan) -> None:
    graph, _ = lower(plan.spec)
    computed = [name for launch in plan.launches for name in launch.nodes]
    assert sorted(computed) == sorted(node.name for node in graph.nodes if node.op != "slice")


def test_launches_read_only_what_was_written(plan: LaunchPlan) -> None:
    written = {name for name, b in plan.buffers.items() if b.kind not in ("arena", "output")}
    for launch in plan.launches:
        for name in launch.inputs:
            assert plan.tensors[name].buffer in written, (launch.id, name)
        written.update(plan.tensors[name].buffer for name in launch.outputs)
    assert {plan.tensors[n].buffer for n in plan.outputs.values()} <= written


def test_live_arena_buffers_never_overlap(plan: LaunchPlan) -> None:
    arena = {n: b for n, b in plan.buffers.items() if b.kind == "arena"}
    by_start = sorted(arena.values(), key=lambda b: b.first)
    live: list = []
    for buffer in by_start:
        live = [b for b in live if b.last >= buffer.first]
        for other in live:
            apart = other.offset + other.bytes <= buffer.offset or buffer.offset + buffer.bytes <= other.offset
            assert apart, (buffer, other)
        live.append(buffer)
    assert max(b.offset + b.bytes for b in by_start) <= plan.arena_bytes


def test_tensors_stay_inside_their_buffers(plan: LaunchPlan) -> None:
    size = {"bf16": 2, "fp32": 4, "fp8_e4m3": 1, "u8": 1, "i32": 4, "i64": 8}
    for name, t in plan.tensors.items():
        last = t.offset + sum((n - 1) * s for n, s in zip(t.shape, t.stride, strict=True)) + 1
        assert last * size[t.dtype] <= plan.buffers[t.buffer].bytes, name


def test_plan_survives_its_json(plan: LaunchPlan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert again.to_json() == plan.to_json()
    assert (again.key, again.launches, again.weights, again.spec.model) == (
        plan.key, plan.launches, plan.weights, plan.spec.model)


def test_equal_specs_give_equal_plans() -> None:
    assert plan_of("k3-tp16").to_json() == plan_of("k3-tp16").to_json()


def test_equal_layers_share_their_choices() -> None:
    plan = plan_of("k3-tp16")
    assert len(plan.launches) > 2000
    assert len(plan.choices) < 60


@pytest.mark.parametrize("query", [1, 8])
def test_arena_of_the_full_model_is_small(query: int) -> None:
    plan = compile_spec(load_spec(K3, (f"step.query={query}", "step.sequences=8")))
    # 64 rows: 9 sources of 7168 bf16 and the widest layer; the promise is 200 MB
    assert plan.arena_bytes < (40e6 if query == 8 else 6e6)


def golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert path.read_text() == text, f"{path} differs; UPDATE_GOLDEN=1 rewrites it"


def small() -> LaunchPlan:
    return compile_spec(load_spec(K3, ("model.layers=[0, 1, 3]", "choices.moe_tail=stripe")))


def test_golden_plan() -> None:
    golden("k3-three-layers.json", small().to_json())


def test_golden_summary() -> None:
    golden("k3-gb300-tp16.txt", summarise(plan_of("k3-tp16")) + "\n")


def test_golden_diff() -> None:
    other = compile_spec(load_spec(K3, ("model.layers=[0, 1, 3]", "choices.moe_tail=all_reduce", "step.query=4")))
    golden("diff.txt", diff(small(), other) + "\n")


def test_diff_tells_what_changed_and_counts_what_hardly_did() -> None:
    old = small()
    layer = next(x for x in old.launches if x.id == "L1.attn.in_proj")
    for factor, told in ((1.005, "  1 more at another price, by 1% at most"),
                         (1.5, "  attn.in_proj: torch.linear, 13.04 -> 19.56 us (layers 1)")):
        choices = (*old.choices, replace(old.choice(layer), us=old.choice(layer).us * factor))
        launches = tuple(replace(x, choice=len(old.choices)) if x == layer else x for x in old.launches)
        assert diff(old, replace(old, choices=choices, launches=launches, key="other")).splitlines()[1] == told
    moved = replace(old, launches=tuple(replace(x, dependent=not x.dependent) if x == layer else x
                                        for x in old.launches), key="other")
    edges = [f"stream 0{' early' * early}" for early in (layer.dependent, not layer.dependent)]
    assert f"  attn.in_proj: torch.linear {edges[0]} -> {edges[1]}, 13.04 -> 13.04 us (layers 1)" in diff(old, moved)


def test_diff_with_a_plan_of_fewer_launches_and_choices() -> None:
    other = compile_spec(load_spec(K3, ("model.layers=[0]", "choices.moe_tail=stripe")))
    assert len(other.choices) < len(small().choices)
    removed = [line for line in diff(small(), other).splitlines() if ": removed, " in line]
    assert any("mlp.gate" in line and "(layers 1, 3)" in line for line in removed)


def test_diff_of_a_plan_with_itself() -> None:
    assert diff(small(), small()) == f"equal: {small().key}"


def fused_menu() -> list[KernelDef]:
    return [
        KernelDef("test.residual_norm", "p = residual_add(x, d)\nh = rms_norm(p, w)\n-> p, h", "test:bind"),
        KernelDef("test.mix_norm", "m = attn_res(s, p, ...)\nh = rms_norm(m, w)\n-> h", "test:bind"),
        KernelDef("test.add_mix_norm",
                  "p = residual_add(x, d)\nm = attn_res(s, p, ...)\nh = rms_norm(m, w)\n-> p, h", "test:bind"),
        KernelDef("test.big_rows", "m = attn_res(s, p, ...)\nh = rms_norm(m, w)\n-> h", "test:bind", rows=(16, 64)),
        KernelDef("test.blackwell", "m = attn_res(s, p, ...)\nh = rms_norm(m, w)\n-> h", "test:bind",
                  arch=("sm_100",)),
    ]


def test_explain_by_layer_tensor_and_lost_kernel() -> None:
    plan = compile_spec(load_spec(K3, ("model.layers=[1, 3, 12, 13]",)), fused_menu())
    for what in ("L1", "L13", "L1.mlp"):
        told = [line for line in explain(plan, what).splitlines() if line.startswith("L")]
        assert {line.split(".")[0] for line in told} == {what.split(".")[0]}
    assert explain(plan, "L1.attn.in_proj.weight").startswith("L1.attn.in_proj: ")
    lost = explain(plan, "test.big_rows")
    assert lost.splitlines()[0] == "no launch is test.big_rows"
    assert "which test.mix_norm computes: rows 1 below 16" in lost
    with pytest.raises(PlanError, match=r"fix: take a name from the launch table, such as L1.attn.in_proj$"):
        explain(plan, "L1.attn.inproj")


def test_fusions_are_taken_and_explained_with_numbers() -> None:
    plan = compile_spec(load_spec(K3, ("model.layers=[0, 1, 3]",)), fused_menu())
    taken = {plan.choice(launch).kernel for launch in plan.launches}
    assert {"test.add_mix_norm", "test.mix_norm"} <= taken
    text = explain(plan, "L1.mlp.h+2")
    assert "L1.mlp.h+2" in text
    assert "split: torch.residual_add" in text
    assert "us dearer" in text
    assert "not test.big_rows: rows 1 below 16" in text
    assert "not test.blackwell: needs sm_100, target is sm_103" in text
    assert "x test.add_mix_norm = residual_add + attn_res + rms_norm" in summarise(plan)


def test_stock_takes_one_node_kernels_only() -> None:
    plan = compile_spec(load_spec(K3, ("model.layers=[0, 1, 3]", "profile=stock")), fused_menu())
    assert all(len(plan.choice(launch).ops) == 1 for launch in plan.launches)
    assert "not test.add_mix_norm: profile stock takes one-node kernels only" in explain(plan, "L1.mlp.prefix")


def test_auto_beats_both_extremes() -> None:
    """By the prices of the shipped menus and tables: the fewest launches, and one kernel for each op."""
    layers = "model.layers=[0, 1, 3, 12]"
    path = K3.with_name("k3-h200-tp16.yaml")
    auto, fused, stock = (compile_spec(load_spec(path, (layers, f"profile={p}")), kernels(), tuning("h200"))
                          for p in ("auto", "fused", "stock"))
    assert auto.us <= min(fused.us, stock.us)
    assert len(fused.launches) <= len(auto.launches) < len(stock.launches)
    assert {choice.kernel for choice in stock.choices if "linear" in choice.ops} == {"torch.linear"}


def test_explain_of_an_unknown_name() -> None:
    with pytest.raises(PlanError, match="no launch, node, tensor or kernel is named 'nothing'"):
        explain(small(), "nothing")


def test_auto_takes_the_cheapest_algebra() -> None:
    plan = plan_of("k3-tp16")
    for alternative in plan.alternatives:
        assert alternative.us[alternative.taken] == min(alternative.us.values())
        assert len(alternative.us) == 2


@pytest.mark.parametrize(("layers", "exact"), [(["model.layers=[0, 1, 2, 3]"], 1e-4), ([], 1e-3)], ids=str)
def test_every_algebra_costs_what_auto_said(layers: list[str], exact: float) -> None:
    """The taken one to the last digit, so that the table adds up with the step below it; the others as if planned, but
    for layers with many residual blocks, which no sample has and which are tuned apart under each algebra."""
    path = K3.with_name("k3-h200-tp16.yaml")
    menu, tuned = kernels(), tuning("h200")
    auto = compile_spec(load_spec(path, layers), menu, tuned)
    taken = {a.choice: a.taken for a in auto.alternatives}
    for alternative in auto.alternatives:
        for value, us in alternative.us.items():
            if value == alternative.taken:
                assert us == pytest.approx(auto.us, abs=1e-3)
                continue
            choices = [f"choices.{name}={v}" for name, v in (taken | {alternative.choice: value}).items()]
            forced = compile_spec(load_spec(path, [*layers, *choices]), menu, tuned)
            assert getattr(forced.spec.choices, alternative.choice) == value
            assert forced.us == pytest.approx(us, rel=exact), alternative.choice


@pytest.mark.parametrize(("query", "kda", "mla"), [(1, 6, 9), (2, 7, 10), (8, 5, 8)])
def test_layers_have_as_many_launches_as_promised(query: int, kda: int, mla: int) -> None:
    """GB300, TP16: at most 7 in a KDA + MoE layer at 1 and 2 rows, 8 at 3 to 8, 10 in an MLA + MoE layer."""
    plan = compile_spec(load_spec(K3, (f"step.query={query}",)), kernels(), tuning("gb300"))
    attention, mlp = plan.spec.model.attention, plan.spec.model.mlp
    for layer in range(2, len(mlp) - 1):
        launches = [launch for launch in plan.launches if launch.layer == layer]
        assert mlp[layer] == "moe"
        assert len(launches) == (kda if attention[layer] == "kda" else mla), layer


def test_all_of_a_sparse_layer_can_be_one_launch() -> None:
    """At 8 rows of a GB300 the shared expert, both sums and the begin of the next layer are in the experts' launch."""
    plan = compile_spec(load_spec(K3, ("step.query=8",)), kernels(), tuning("gb300"))
    names = [plan.choice(launch).kernel for launch in plan.launches if launch.layer == 5]
    assert (names[0], names[-1]) == ("cute.moe_experts_tail_add_attn_res", "cute.moe_front_sharded")


def test_on_a_gpu_that_nobody_measured_all_prices_are_guesses() -> None:
    """The library's product has no advance there: in-projections of a GB300 are the CuTe DSL's, by the model."""
    plan = compile_spec(load_spec(K3, ("model.layers=[1, 3]",)), kernels(), tuning("gb300"))
    (found,) = {plan.choice(x).kernel for x in plan.launches if x.id.endswith("attn.in_proj")}
    assert found.startswith("cute.")
    assert not [reason for choice in plan.choices for *_, reason in choice.losers if "never timed" in reason]


@pytest.mark.parametrize(("query", "kda", "mla"), [(1, {7}, {10}), (8, {7, 8}, {10, 11})])
def test_an_h200_has_as_many_launches_as_measured(query: int, kda: set[int], mla: set[int]) -> None:
    """A layer with experts: 10 and 13 at most are promised at one row. Which of it are one launch was settled for each
    number of residual blocks."""
    plan = compile_spec(load_spec(K3.with_name("k3-h200-tp16.yaml"), (f"step.query={query}",)), kernels(),
                        tuning("h200"))
    attention, mlp = plan.spec.model.attention, plan.spec.model.mlp
    counts = {kind: {sum(launch.layer == layer for launch in plan.launches) for layer in range(2, len(mlp) - 1)
                     if attention[layer] == kind} for kind in ("kda", "mla")}
    assert counts == {"kda": kda, "mla": mla}


def test_a_kernel_that_was_never_timed_leaves_the_h200_its_timed_ones() -> None:
    experts = {kernel.id for kernel in kernels() if kernel.id.startswith("cute.moe_experts")}
    for query in (1, 8):
        spec = load_spec(K3.with_name("k3-h200-tp16.yaml"), ("model.layers=[1, 3]", f"step.query={query}"))
        with_times = compile_spec(spec, kernels(), tuning("h200"))
        assert {c.kernel for c in with_times.choices} & experts
        lines = [line for path in (ROOT / "ops_triton", ROOT / "ops_cute")
                 for line in tuned_lines((path / "tuned/h200.json").read_text()) if line.kernel not in experts]
        plan = compile_spec(spec, kernels(), Tuning(lines))
        assert not {c.kernel for c in plan.choices} & experts


@pytest.mark.parametrize("sequences", [16, 32, 64])
def test_an_op_of_torch_that_was_never_timed_leaves_the_h200_its_timed_kernel(sequences: int) -> None:
    """By its bytes torch's attention would be cheaper than ours; it takes 25 times its price. 16 and 32 sequences have
    no line of their own: what was timed at half or twice as many counts as timed."""
    path, rows = K3.with_name("k3-h200-tp16.yaml"), f"step.sequences={sequences}"
    plan = compile_spec(load_spec(path, ("model.layers=[3]", rows)), kernels(), tuning("h200"))
    assert {c.kernel for c in plan.choices if c.kernel.startswith("torch.")} <= {"torch.linear"}
    (core,) = {c.kernel for c in plan.choices} & {"triton.mla_attend", "cute.mla_attend"}
    assert "  not torch.mla_attend: torch.mla_attend " in explain(plan, core)


def test_both_ways_to_take_rows_back_are_planned_and_priced_in_bytes() -> None:
    """Kimi K3 on 16 ranks: 6 heads of 128 x 128 fp32 states in 69 layers; 8 rows of 3 fp32 vectors a head."""
    state, record = 69 * 6 * 128 * 128 * 4, 69 * 8 * 3 * 6 * 128 * 4
    texts = []
    for taken, total in (("record", state + record), ("slots", 8 * state)):
        plan = compile_spec(load_spec(K3, ("step.query=8", f"choices.kda_rollback={taken}")), kernels())
        held = sum(b.bytes for name, b in plan.buffers.items() if name.endswith((".state", ".record")))
        assert held == 2 * total, "one sequence and the scratch slot"
        texts.append(next(x for x in summarise(plan).splitlines() if x.startswith("KDA rollback")))
    assert texts == ["KDA rollback by record: 32.2 MB of states a sequence (slots 217.1 MB)",
                     "KDA rollback by slots: 217.1 MB of states a sequence (record 32.2 MB)"]
    assert "KDA rollback" not in summarise(plan_of("k3-tp16")), "one row a sequence: nothing is taken back"


def test_a_configuration_is_told_in_words() -> None:
    assert settings({"rows": 4, "block": 1024, "warps": 8}) == "rows 4, block 1024, warps 8"
    assert settings({"form": "dot", "armed": True, "dedupe": False}) == "form dot, armed, not dedupe"
    menu = [kernel for kernel in kernels() if kernel.id.startswith("triton.")]
    plan = compile_spec(load_spec(K3, ("model.layers=[0]", "target.gpu=h200")), menu, tuning("h200"))
    text = explain(plan, "skinny_linear")
    assert "  configuration: form fma, rows " in text
    assert "{" not in text


def test_a_dimension_that_does_not_divide_is_named(tmp_path: Path) -> None:
    config = json.loads((ROOT / "compiler/presets/kimi-k3.json").read_text())
    config["text_config"]["linear_attn_config"]["num_heads"] = 24
    config["text_config"]["moe_intermediate_size"] = 3072 - 32
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ShardError) as error:
        compile_spec(load_spec(K3, (f"model.config={tmp_path / 'config.json'}", "parallel.tp=16")))
    assert "KDA heads: 24 do not divide over tp=16" in str(error.value)
    assert "expert intermediate: 95 groups of 32 do not divide over tp=16" in str(error.value)


@pytest.mark.parametrize(("change", "message"), [
    (lambda d: {**d, "version": 9}, "plan version 9"),
    (lambda d: {**d, "arena_bytes": 1}, "content does not match its key"),
    (lambda d: [], "not a launch plan"),
    (lambda d: {"version": 1, "launches": []}, "content does not match its key None"),
])
def test_plans_that_are_not_read(tmp_path: Path, change, message: str) -> None:
    path = tmp_path / "plan.json"
    small().save(path)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(PlanError, match=message):
        load_plan(path)


def test_a_plan_that_is_not_there_or_not_json(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="No such file"):
        load_plan(tmp_path / "none.json")
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(PlanError, match="not JSON"):
        load_plan(tmp_path / "plan.json")
    with pytest.raises(PlanError, match=r"a plan file, not a launch plan\n  fix: k3plan compile .* --out plan.json"):
        load_plan(K3)


def test_kinds_of_the_full_model() -> None:
    titles = [title.split(":")[0] for title, _ in kinds(plan_of("k3-tp16"))]
    assert titles[0] == "embedding"
    assert titles[1].startswith("KDA + dense MLP, 1 layer (0)")
    assert titles[2].startswith("KDA + MoE, 68 layers (1-2, 4-6")
    assert titles[3].startswith("MLA + MoE, 24 layers (3, 7,")
    assert titles[3].split(")")[0].endswith("87, 91-92")


def test_ranges() -> None:
    assert ranges([5, 0, 1, 2, 9]) == "0-2, 5, 9"


def test_layers_can_be_left_out() -> None:
    spec = load_spec(K3)
    assert {launch.layer for launch in compile_spec(replace(spec, layers=(3, 92))).launches} == {None, 3, 92}
