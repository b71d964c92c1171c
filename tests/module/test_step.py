"""``DecodeStep``: parameters over packed weights, buckets with shared storage, padding, loads in place."""
from __future__ import annotations

import copy
import os
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from made_steps import PAGES, inputs_at, spec_of, tensors_of
from test_operators import check_collectives_of_two_processes
from torch import Tensor
from torch.testing import assert_close

from k3plan.compiler.compile import compile_spec
from k3plan.compiler.errors import AddressError, BindError, CheckpointError
from k3plan.compiler.plan import LaunchPlan, load_plan
from k3plan.graphs.bind import bind
from k3plan.graphs.checkpoint import Checkpoint
from k3plan.graphs.distributed.group import Group
from k3plan.graphs.distributed.library import Library
from k3plan.graphs.module.layer import DecodeLayer
from k3plan.graphs.module.step import DecodeStep

EXACT = {"rtol": 0.0, "atol": 0.0}


@pytest.fixture
def step(plans: list[LaunchPlan], checkpoint: Checkpoint) -> DecodeStep:
    return DecodeStep.from_plan(plans, checkpoint)


def logits_of(step: DecodeStep, count: int = 3, slots: tuple[int, ...] = (0, 1, 2)) -> Tensor:
    """Logits [steps, sequences, V] of fresh sequences, read row by row."""
    for slot in slots:
        step.reset(slot)
    return torch.stack([step.step(**inputs_at([at] * len(slots), slots))["logits"][:, 0].clone()
                        for at in range(count)])


def kept_bytes(step: DecodeStep) -> dict[str, Tensor]:
    """States and caches without their scratch rows, as bytes."""
    first = step.executables[0]
    names = [n for n, b in first.plan.buffers.items() if b.kind in ("state", "cache")]
    return {n: first.ranks[0].tensors[n][:-1].clone().view(torch.uint8) for n in names}


# parameters


def test_parameters_have_the_names_shapes_and_values_of_the_checkpoint(step: DecodeStep, checkpoint: Checkpoint
                                                                       ) -> None:
    state = step.state_dict()
    read = {n for n in checkpoint.tensors if n.startswith("language_model.") and "layers.0.self_attention_res" not in n}
    assert state.keys() == read
    for name, tensor in tensors_of(checkpoint, list(state)).items():
        assert torch.equal(state[name], tensor), name


def test_most_parameters_are_the_weights_themselves(step: DecodeStep) -> None:
    views, apart = step._parameters_kept.views, step._parameters_kept.apart
    weights = {t.untyped_storage().data_ptr() for t in step.executables[0].ranks[0].buffers.values()}
    assert all(t.untyped_storage().data_ptr() in weights for t in views.values())
    assert not any(t.untyped_storage().data_ptr() in weights for t in apart.values())
    # products of two vectors, slices by head, and a vector longer than the heads
    kinds = {name.removesuffix(".weight").rpartition(".")[2] for name in apart}
    assert kinds == {"self_attention_res_norm", "self_attention_res_proj", "mlp_res_norm", "mlp_res_proj",
                     "output_attn_res_norm", "output_attn_res_proj", "kv_b_proj", "A_log"}
    assert sum(t.nbytes for t in apart.values()) < 0.05 * sum(t.nbytes for t in views.values())


def test_a_state_dict_is_as_good_as_a_checkpoint(plans: list[LaunchPlan], step: DecodeStep) -> None:
    state = {name: tensor.clone() for name, tensor in step.state_dict().items()}
    assert_close(logits_of(DecodeStep.from_plan(plans, state)), logits_of(step), **EXACT)


def test_without_parameters(plans: list[LaunchPlan], step: DecodeStep, checkpoint: Checkpoint, other: Checkpoint
                            ) -> None:
    bare = DecodeStep.from_plan(plans, checkpoint, parameters=False)
    assert not list(bare.parameters())
    assert_close(logits_of(bare), logits_of(step), **EXACT)
    bare.reload(other)
    step.reload(other)
    assert_close(logits_of(bare), logits_of(step), **EXACT)
    with pytest.raises(BindError, match="reload"):
        bare.prepare()
    with pytest.raises(BindError, match="from_plan"):
        bare.rebind()


@pytest.mark.parametrize("given", ["demo/tiny-k3", Path("demo/tiny-k3"), None], ids=repr)
def test_what_is_no_checkpoint_is_named(plans: list[LaunchPlan], step: DecodeStep, given: Any) -> None:
    for use in (lambda: DecodeStep.from_plan(plans, given), lambda: step.reload(given),
                lambda: bind(plans[0], given)):
        with pytest.raises(BindError, match=re.escape(f"{given!r} is no checkpoint\n  fix: pass k3plan.Checkp")):
            use()


@pytest.mark.parametrize("plan", ["plan.json", Path("plan.json"), ["plan.json"], None], ids=repr)
def test_what_is_no_plan_is_named(plan: Any, checkpoint: Checkpoint) -> None:
    for use in (bind, DecodeStep.from_plan, DecodeLayer.from_plan):
        with pytest.raises(BindError, match=r"is not a launch plan\n  fix: pass what k3plan.compile_plan"):
            use(plan, checkpoint)


def test_a_device_that_is_not_there_is_named(plans: list[LaunchPlan], checkpoint: Checkpoint,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BindError, match="torch sees no GPU here, and device is cuda"):
        DecodeStep.from_plan(plans, checkpoint, device="cuda")


@pytest.mark.parametrize(("change", "said"), [
    (lambda state, name: state.pop(name), "the checkpoint has no tensor {name}\n  fix: "),
    (lambda state, name: state.update({name: state[name][:-1]}), "tensor {name}: the plan reads bf16"),
    (lambda state, name: state.update({name: state[name].int()}), "found i32"),
], ids=["missing", "shape", "dtype"])
def test_a_state_dict_that_does_not_fit_is_named(plans: list[LaunchPlan], step: DecodeStep, change: Any, said: str
                                                 ) -> None:
    state = {name: tensor.clone() for name, tensor in step.state_dict().items()}
    name = next(n for n in state if n.endswith("self_attn.o_proj.weight"))
    change(state, name)
    with pytest.raises(CheckpointError, match=re.escape(said.format(name=name))):
        DecodeStep.from_plan(plans, state)


def test_loading_into_no_parameters_is_refused(plans: list[LaunchPlan], step: DecodeStep, checkpoint: Checkpoint
                                               ) -> None:
    """With ``strict=False`` nothing would be loaded and nothing said."""
    bare = DecodeStep.from_plan(plans, checkpoint, parameters=False)
    with pytest.raises(BindError, match=r"keeps no parameters\n  fix: call reload\(state_dict\)"):
        bare.load_state_dict(step.state_dict(), strict=False)


def test_a_bound_step_is_not_copied(step: DecodeStep) -> None:
    """A copy's launches would still read the tensors of the original."""
    for use in (copy.deepcopy, pickle.dumps):
        with pytest.raises(BindError, match=r"neither copied nor pickled\n  fix: save its state_dict\(\)"):
            use(step)


def test_what_is_bound_is_shown_in_a_line(step: DecodeStep) -> None:
    shown = repr(step.executables[0])
    assert f"LaunchPlan({step.plans[0].key}: kimi_k3, " in shown
    assert shown.endswith("1 ranks on cpu)")
    assert len(shown) < 150


# steps


@pytest.mark.parametrize(("name", "value", "said"), [
    ("rows", torch.zeros(3, 1), "tokens: torch.float32, the step reads torch.int32"),
    ("positions", torch.full((3, 1), torch.nan), "positions: torch.float32, the step reads torch.int32"),
    ("rows", [[1], [2], [3]], "tokens: a list, the step reads torch.int32"),
    ("positions", [[0], [0], [0]], "positions: a list, the step reads torch.int32"),
    ("slots", torch.tensor([2, 0, 2]), "slots: [2, 0, 2] has one twice"),
    ("slots", torch.tensor([0, 1, 9]), "slots: values 0 to 9, the plan allows -1 to 3\n  fix: -1 is padding"),
])
def test_inputs_that_would_be_cut_or_mixed_are_refused(step: DecodeStep, name: str, value: Any, said: str) -> None:
    with pytest.raises(BindError, match=re.escape(said)):
        step.step(**{**inputs_at([0, 0, 0], (0, 1, 2)), name: value})


def test_padded_slots_may_repeat(step: DecodeStep) -> None:
    given = inputs_at([0, 0, 0], (0, 1, 2))
    live = torch.tensor([True, False, False])
    step.step(**{name: torch.where(live.view(3, *[1] * (t.dim() - 1)), t, -1) for name, t in given.items()})


@pytest.mark.parametrize("slot", [-1, 4])
def test_a_slot_that_is_not_there_is_not_reset(step: DecodeStep, slot: int) -> None:
    with pytest.raises(BindError, match=rf"there is no slot {slot}\n  fix: slots are 0 to 3"):
        step.reset(slot)


def test_steps_equal_those_of_the_bound_plan(plans: list[LaunchPlan], step: DecodeStep, checkpoint: Checkpoint
                                             ) -> None:
    """Bucket 4 with 3 live sequences against a plan of 4 that is bound and written by hand."""
    plain = bind(plans[0], checkpoint)
    for at in range(3):
        given = inputs_at([at] * 3, (2, 0, 3))
        whole = {"tokens": given["rows"].flatten(), "positions": given["positions"].flatten(),
                 "slots": given["slots"], "page_table": given["page_table"]}
        whole = {n: torch.cat([t, torch.full((1, *t.shape[1:]), -1, dtype=torch.int32)]) for n, t in whole.items()}
        plain.write(**whole)
        plain.run()
        found = step.step(**given)
        assert found["tokens"].shape == (3, 1)
        assert_close(found["logits"][:, 0], plain.outputs["logits"][:3], **EXACT)
        assert torch.equal(found["tokens"][:, 0], plain.outputs["tokens"][:3])


def test_every_bucket_continues_what_another_began(step: DecodeStep) -> None:
    """Four sequences, decoded in groups of changing size: the text does not depend on the grouping."""
    wanted = logits_of(step, 6, (0, 1, 2, 3))
    for slot in range(4):
        step.reset(slot)
    groups = [[(0, 1, 2, 3)], [(0,), (1, 2), (3,)], [(3, 0, 1), (2,)], [(1,), (0,), (2, 3)], [(2, 1, 0, 3)],
              [(0, 3), (1, 2)]]
    for at, parts in enumerate(groups):
        for slots in parts:
            got = step.step(**inputs_at([at] * len(slots), slots))["logits"][:, 0]
            assert_close(got, wanted[at, list(slots)], rtol=1e-5, atol=1e-5)


def test_buckets_share_weights_states_and_caches(step: DecodeStep) -> None:
    first, *others = step.executables
    for small in others:
        for name, buffer in small.plan.buffers.items():
            mine, its = small.ranks[0].buffers[name], first.ranks[0].buffers[name]
            shared = buffer.kind in ("weight", "state", "cache")
            assert (mine.data_ptr() == its.data_ptr()) == shared, name


@pytest.mark.parametrize("live", [1, 3])
def test_padding_has_no_side_effects(step: DecodeStep, live: int) -> None:
    """Everything poisoned before the step: live rows alone change, and only their slots and pages."""
    slots = (1, 3, 0)[:live]
    logits_of(step, 2, (0, 1, 2, 3))
    before = kept_bytes(step)
    for executable in step.executables:
        executable.poison()
    outputs = step.step(**inputs_at([2] * live, slots))
    assert torch.isfinite(outputs["logits"]).all()
    for name, now in kept_bytes(step).items():
        changed = {int(row) for row in (now != before[name]).flatten(1).any(1).nonzero()}
        allowed = {s * PAGES for s in slots} if name.endswith("cache") else set(slots)
        assert changed == allowed, name


def test_a_row_of_padding_gives_no_token(step: DecodeStep) -> None:
    given = inputs_at([0, 0], (0, 1))
    for name in ("rows", "positions", "slots"):
        given[name][1] = -1
    before = kept_bytes(step)
    assert step.step(**given)["tokens"].flatten().tolist()[1] == -1
    assert all(torch.equal(before[n][1], now[1]) for n, now in kept_bytes(step).items() if n.endswith("state"))


@pytest.mark.parametrize(("change", "said"), [
    ({"positions": torch.zeros(5, 1, dtype=torch.int32)}, "5 sequences, the largest bucket has 4"),
    ({"positions": torch.zeros(2, 2, dtype=torch.int32)}, "1 to 1 rows"),
    ({"rows": torch.zeros(3, 1, dtype=torch.int32)}, r"rows|tokens: shape \(3, 1\)"),
    ({"slots": torch.tensor([0, 4], dtype=torch.int32)}, "allows -1 to 3"),
    ({"rows": torch.tensor([[512], [0]], dtype=torch.int32)}, "allows -1 to 511"),
    ({"page_table": None}, "has no page_table"),
    ({"blocks": [torch.zeros(2, 1, 256)]}, "does not take block0"),
], ids=["sequences", "rows", "shape", "slot", "token", "pages", "blocks"])
def test_inputs_that_do_not_fit(step: DecodeStep, change: dict[str, Tensor], said: str) -> None:
    with pytest.raises(BindError, match=said) as caught:
        step.step(**{**inputs_at([0, 0], (0, 1)), **change})
    assert "fix:" in str(caught.value) or "allows" in str(caught.value)


def test_plans_of_another_step_are_refused(plans: list[LaunchPlan], checkpoint: Checkpoint, folder: Path,
                                           tmp_path: Path) -> None:
    longer = compile_spec(spec_of(tmp_path, folder, sequences=8, context=64))
    with pytest.raises(BindError, match="not the buckets of one step"):
        DecodeStep.from_plan([*plans, longer], checkpoint)
    with pytest.raises(BindError, match="no plan"):
        DecodeStep.from_plan([], checkpoint)


@pytest.mark.parametrize("tp", [2])
def test_emulated_ranks(folder: Path, checkpoint: Checkpoint, other: Checkpoint, tmp_path: Path, step: DecodeStep,
                        tp: int) -> None:
    """All ranks in one process: whole parameters, a part of each packed for every rank."""
    spec = spec_of(tmp_path, folder, sequences=4, tp=tp)
    split = DecodeStep.from_plan(compile_spec(spec), checkpoint)
    assert_close(logits_of(split), logits_of(step), rtol=1e-4, atol=1e-4)
    assert split.state_dict().keys() == step.state_dict().keys()
    for module in (split, step):
        module.load_state_dict(tensors_of(other, list(step.state_dict())))
    assert_close(logits_of(split), logits_of(step), rtol=1e-4, atol=1e-4)
    with pytest.raises(BindError, match="parameters=False"):
        DecodeStep.from_plan(compile_spec(spec), checkpoint, transport="loopback", parameters=True)


def test_one_process_a_rank(folder: Path, step: DecodeStep, tmp_path: Path) -> None:
    """Two processes over torch.distributed, each with its own rank of two plans."""
    for count in (4, 1):
        compile_spec(spec_of(tmp_path, folder, sequences=count, tp=2)).save(tmp_path / f"{count}.json")
    torch.multiprocessing.spawn(_one_rank, args=(str(tmp_path), str(folder)), nprocs=2)
    wanted = logits_of(step)
    for rank in range(2):
        assert_close(torch.load(tmp_path / f"rank{rank}.pt"), wanted, rtol=1e-4, atol=1e-4)


def _one_rank(rank: int, where: str, folder: str) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{where}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    group = Group(rank, 2, torch.device("cpu"), torch.distributed.PrefixStore("k3plan", store))
    plans = [load_plan(f"{where}/{count}.json") for count in (4, 1)]
    step = DecodeStep.from_plan(plans, Checkpoint(folder), transport=Library(group))
    assert not list(step.parameters())
    assert [r.index for e in step.executables for r in e.ranks] == [rank, rank]
    torch.save(logits_of(step), f"{where}/rank{rank}.pt")
    with pytest.raises(BindError, match="parameters=False"):
        DecodeStep.from_plan(plans, Checkpoint(folder), transport=Library(group), parameters=True)
    check_collectives_of_two_processes(rank)
    # a rank that leaves first takes the connection from under the other
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    # threads of gloo have ended a process on its way out ("terminate called without an active exception", seen once)
    sys.stdout.flush()
    os._exit(0)


# loads and moves


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_load_state_dict_is_in_place(step: DecodeStep, plans: list[LaunchPlan], other: Checkpoint, assign: bool
                                     ) -> None:
    wanted = logits_of(DecodeStep.from_plan(plans, other))
    before = logits_of(step)
    pointers = {n: t.data_ptr() for n, t in step.executables[0].ranks[0].buffers.items()}
    step.load_state_dict(tensors_of(other, list(step.state_dict())), assign=assign)
    assert {n: t.data_ptr() for n, t in step.executables[0].ranks[0].buffers.items()} == pointers
    found = logits_of(step)
    assert_close(found, wanted, **EXACT)
    assert (found - before).abs().max() > 0.1
    step.verify_addresses()


def test_reload_is_in_place(step: DecodeStep, plans: list[LaunchPlan], other: Checkpoint) -> None:
    pointers = {n: t.data_ptr() for n, t in step.named_parameters()}
    step.reload(other)
    assert {n: t.data_ptr() for n, t in step.named_parameters()} == pointers
    assert_close(logits_of(step), logits_of(DecodeStep.from_plan(plans, other)), **EXACT)
    for name, tensor in tensors_of(other, list(pointers)).items():
        assert torch.equal(step.get_parameter(name), tensor), name


def test_a_tensor_of_another_shape_is_refused(step: DecodeStep) -> None:
    name = "language_model.model.norm.weight"
    with pytest.raises(RuntimeError, match="size mismatch"):
        step.load_state_dict({name: torch.zeros(3)}, strict=False)
    step.language_model.model.norm.weight = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    with pytest.raises(CheckpointError, match=r"norm.weight: torch.float32 of shape \[3\], the plan reads"):
        step.prepare()


def test_numbers_for_packed_bytes_are_refused(step: DecodeStep) -> None:
    name = next(n for n, _ in step.named_parameters() if n.endswith("w1.weight_packed"))
    numbers = step.get_parameter(name).float()
    with pytest.raises(CheckpointError, match=r"weight_packed: torch.float32 of shape"):
        step.load_state_dict({name: numbers}, strict=False, assign=True)


def test_a_buffer_that_was_set_is_named_with_its_launches(step: DecodeStep) -> None:
    step.step(**inputs_at([0], (0,)))
    rank = step.storage.sequences4.rank0
    rank.L1__attn__cache = rank.L1__attn__cache.clone()
    with pytest.raises(AddressError) as caught:
        step.step(**inputs_at([1], (0,)))
    text = str(caught.value)
    assert "1 tensor is not where" in text
    assert "L1.attn.cache: bound at 0x" in text
    assert "used by L1.attn.cache_next, L1.attn.latent_out" in text
    assert "fix: call rebind()" in text


def test_a_parameter_that_was_set_is_refused_until_prepared(step: DecodeStep, plans: list[LaunchPlan]) -> None:
    norm = step.language_model.model.norm
    fresh = norm.weight + 1.0
    norm.weight = torch.nn.Parameter(fresh, requires_grad=False)
    with pytest.raises(AddressError, match=r"language_model.model.norm.weight: bound at .*; used by head.hidden"):
        step.step(**inputs_at([0], (0,)))
    step.prepare()
    found = logits_of(step)
    assert torch.equal(norm.weight, fresh)
    assert_close(found, logits_of(DecodeStep.from_plan(plans, dict(step.state_dict()))), **EXACT)


def test_a_parameter_written_behind_its_packed_weight_is_stale(step: DecodeStep) -> None:
    weight = step.get_parameter("language_model.model.layers.1.self_attn.kv_b_proj.weight")
    before = logits_of(step)
    with torch.no_grad():
        weight.mul_(3.0)
    with pytest.raises(AddressError, match=r"kv_b_proj.weight: written since") as caught:
        step.verify_addresses()
    assert "fix: call prepare()" in str(caught.value)
    step.prepare()
    assert (logits_of(step) - before).abs().max() > 1e-3


def test_a_source_of_packed_weights_that_was_set_is_stale(step: DecodeStep) -> None:
    attention = step.language_model.model.layers.get_submodule("1").self_attn
    attention.kv_b_proj.weight = torch.nn.Parameter(attention.kv_b_proj.weight.clone(), requires_grad=False)
    with pytest.raises(AddressError, match=r"kv_b_proj.weight: written since"):
        step.step(**inputs_at([0], (0,)))
    step.prepare()
    step.step(**inputs_at([0], (0,)))


def test_a_moved_module_is_refused_until_bound_again(step: DecodeStep) -> None:
    """What ``.to()`` another device does to every tensor, on any machine."""
    wanted = logits_of(step)
    step._apply(torch.clone)
    with pytest.raises(AddressError, match="not where the launches use them") as caught:
        step.step(**inputs_at([0], (0,)))
    assert "... and" in str(caught.value)
    step.rebind()
    assert_close(logits_of(step), wanted, **EXACT)


def test_another_dtype_is_a_move_too(step: DecodeStep) -> None:
    step.language_model.lm_head.double()
    with pytest.raises(AddressError, match=r"1 tensor is not .*\n  language_model.lm_head.weight"):
        step.step(**inputs_at([0], (0,)))
    step.prepare()
    step.step(**inputs_at([0], (0,)))


def test_sleep_and_wake(step: DecodeStep) -> None:
    """An engine that gives memory back and takes other memory later."""
    wanted = logits_of(step)
    kept = {n: t.clone() for n, t in step.state_dict().items()}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in step.buffers()}
    sizes = {storage: storage.nbytes() for storage in storages.values()}
    for storage in sizes:
        storage.resize_(0)
    with pytest.raises(AddressError, match="its memory was released"):
        step.verify_addresses()
    with pytest.raises(AddressError):
        step.step(**inputs_at([0], (0,)))
    taken = [torch.empty(size, dtype=torch.uint8) for size in sizes.values()]
    for storage, size in sizes.items():
        storage.resize_(size)
    assert len(taken) == len(sizes)
    step.load_state_dict(kept)
    with pytest.raises(AddressError, match="not where"):
        step.step(**inputs_at([0], (0,)))
    step.rebind()
    assert_close(logits_of(step), wanted, **EXACT)


def test_rebind_keeps_the_module_and_drops_the_storage(step: DecodeStep) -> None:
    wanted, names = logits_of(step), list(step.state_dict())
    old = step.executables
    step.storage.sequences4.rank0.arena = torch.empty(1)
    with pytest.raises(AddressError, match="arena"):
        step.step(**inputs_at([0], (0,)))
    step.rebind()
    assert list(step.state_dict()) == names
    assert all(a is not b for a, b in zip(old, step.executables, strict=True))
    assert_close(logits_of(step), wanted, **EXACT)
