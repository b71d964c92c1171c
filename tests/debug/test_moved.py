"""After the capture: tensors that moved, were replaced or lost their memory. On a CPU nothing replays; the table does
the same there."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from broken import small_plan, small_step

from k3plan.compiler.errors import AddressError
from k3plan.graphs.debug.findings import render
from k3plan.graphs.debug.moved import find_moved, table_of
from k3plan.graphs.module.step import DecodeStep
from k3plan.graphs.random_weights import RandomSource


def module() -> DecodeStep:
    plan = small_plan()
    return DecodeStep.from_plan(plan, RandomSource.of([w.recipe for w in plan.weights.values()]))


def first_parameter(step: DecodeStep, ending: str) -> tuple[torch.nn.Module, str]:
    """The owner and the leaf name of a parameter."""
    name = next(n for n, _ in step.named_parameters() if n.endswith(ending))
    path, _, leaf = name.rpartition(".")
    return step.get_submodule(path), leaf


def test_nothing_moved() -> None:
    step = module()
    assert find_moved(step.plans[0], step.addresses) == []


def test_47_a_weight_is_made_anew() -> None:
    executable = small_step()
    held = dict(executable.ranks[0].buffers)
    looks: dict[str, Callable[[], torch.Tensor | None]] = {n: (lambda n=n: held[n]) for n in executable.plan.weights}
    table = table_of(executable, looks)
    assert find_moved(executable.plan, table) == []
    name = "L0.attn.o_proj.weight" if "L0.attn.o_proj.weight" in held else next(
        n for n in executable.plan.weights if "o_proj" in n)
    held[name] = held[name].clone()
    found = find_moved(executable.plan, table)
    assert [(f.code, f.launch, f.layer) for f in found] == [("CG-051", "L0.attn.o_proj", 0)], render(found)
    assert name in found[0].text
    assert "bound at 0x" in found[0].text


def test_47_a_workspace_is_made_anew() -> None:
    executable = small_step()
    state = "L0.attn.state"
    held = {state: executable.ranks[0].buffers[state]}
    table = table_of(executable, {state: lambda: held[state]})
    held[state] = torch.zeros_like(held[state])
    found = find_moved(executable.plan, table)
    assert [(f.code, f.layer) for f in found] == [("CG-051", 0)]


def test_48_load_state_dict_with_assign_is_harmless() -> None:
    step = module()
    state = {name: tensor.clone() for name, tensor in step.state_dict().items()}
    step.load_state_dict(state, assign=True)
    step.verify_addresses()
    assert find_moved(step.plans[0], step.addresses) == []


def test_48_a_replaced_parameter_is_named() -> None:
    step = module()
    owner, leaf = first_parameter(step, "o_proj.weight")
    setattr(owner, leaf, torch.nn.Parameter(getattr(owner, leaf).detach().clone(), requires_grad=False))
    found = find_moved(step.plans[0], step.addresses)
    assert {f.code for f in found} == {"CG-052"}, render(found)
    assert "o_proj.weight" in found[0].text
    with pytest.raises(AddressError, match=r"o_proj\.weight"):
        step.verify_addresses()


def test_49_memory_that_was_released() -> None:
    step = module()
    owner, leaf = first_parameter(step, "o_proj.weight")
    getattr(owner, leaf).untyped_storage().resize_(0)
    found = find_moved(step.plans[0], step.addresses)
    assert "CG-053" in {f.code for f in found}, render(found)
    with pytest.raises(AddressError, match="released"):
        step.verify_addresses()


def test_47_a_parameter_written_after_packing() -> None:
    step = module()
    before = len(find_moved(step.plans[0], step.addresses))
    names = [name for name, _, _ in step.addresses.sources]
    assert names, "every weight of the small model is read as it is"
    with torch.no_grad():
        dict(step.named_parameters())[names[0]].add_(1)
    found = find_moved(step.plans[0], step.addresses)
    assert [f.code for f in found[before:]] == ["CG-051"]
    assert "Call prepare()" in found[-1].fix
