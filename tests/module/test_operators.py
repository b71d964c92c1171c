"""Operators of torch: each op of the graph, with tensors from real steps, through ``torch.library.opcheck``."""
from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_steps import spec_of
from torch import Tensor
from torch.testing import assert_close

from k3plan.compiler.compile import compile_spec
from k3plan.compiler.errors import BindError
from k3plan.compiler.ops import OPS
from k3plan.graphs.bind import Executable, bind
from k3plan.graphs.checkpoint import Checkpoint
from k3plan.graphs.decode import Batch
from k3plan.graphs.load import TORCH_DTYPES
from k3plan.graphs.module.ops import DTYPE_NAMES, arguments_of, flatten, schema_of

COMPUTE = sorted(name for name, op in OPS.items() if op.kind == "compute")
COLLECTIVES = sorted(name for name, op in OPS.items() if op.kind == "comm")
BF16 = {"activation": "bf16", "kv_cache": "bf16"}
FP8 = {"activation": "bf16", "kv_cache": "fp8_e4m3", "kv_scale": 0.5}


@dataclass(frozen=True)
class Seen:
    """One launch of a step: the arguments as they were before it, and what the bound launch made."""

    positional: list[Any]
    keywords: dict[str, Any]
    made: list[Tensor]


@pytest.fixture(scope="module")
def seen(folder: Path, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Seen]]:
    """Launches of live steps by op, two of each op and plan: decode in fp32, verify in bf16, with fp8, by slots."""
    where, found = tmp_path_factory.mktemp("ops"), {}
    specs = [spec_of(where, folder), spec_of(where, folder, query=2, numerics=BF16),
             spec_of(where, folder, query=2, numerics=FP8)]
    slots = replace(specs[1], choices=replace(specs[1].choices, kda_rollback="slots"))
    for spec in (*specs, slots, replace(specs[0], model=replace(specs[0].model, activation="silu"))):
        executable, batch, own = bind(compile_spec(spec), checkpoint), Batch(spec.step), {}
        for rows in ([[3], [5]], [[7], [9]]):
            executable.write(**{n: t for n, t in batch.inputs(rows).items() if n in executable.plan.inputs})
            for index, launch in enumerate(executable.plan.launches):
                entry = look(executable, index)
                if rows == [[7], [9]] and len(own.setdefault(launch_op(executable, index), [])) < 2:
                    own[launch_op(executable, index)].append(entry)
                assert launch.inputs
            batch.accept([1, 1])
        for op, entries in own.items():
            found.setdefault(op, []).extend(entries)
    return found


def launch_op(executable: Executable, index: int) -> str:
    return executable.plan.choice(executable.plan.launches[index]).entry.removeprefix("op:")


def look(executable: Executable, index: int) -> Seen:
    """Runs one launch. Strides are kept: sums may go in another order over other strides."""
    launch, tensors = executable.plan.launches[index], executable.ranks[0].tensors
    inputs = [torch.empty_strided(tensors[n].shape, tensors[n].stride(), dtype=tensors[n].dtype).copy_(tensors[n])
              for n in launch.inputs]
    executable.steps[executable.first[index]]()
    made = [tensors[n].clone() for n in launch.results if n in tensors]
    return Seen(*arguments_of(launch_op(executable, index), inputs, executable.plan.choice(launch).attrs["o0"]), made)


def operator(op: str) -> Any:
    return getattr(torch.ops.k3plan, op).default


@pytest.mark.parametrize("op", COMPUTE)
def test_opcheck(seen: dict[str, list[Seen]], op: str) -> None:
    checked = 0
    for entry in (seen[op][0], seen[op][-1]):
        # opcheck perturbs inputs with a product, which torch has not for fp8
        if all(t.dtype != torch.float8_e4m3fn for t in flatten(entry.positional)):
            torch.library.opcheck(operator(op), copied(entry.positional), entry.keywords)
            checked += 1
    assert checked


def copied(positional: list[Any]) -> tuple[Any, ...]:
    return tuple([t.clone() for t in x] if isinstance(x, list) else x.clone() for x in positional)


@pytest.mark.parametrize("op", COMPUTE)
def test_an_operator_computes_what_the_bound_launch_does(seen: dict[str, list[Seen]], op: str) -> None:
    """Bit for bit, updated arguments included, in each dtype."""
    alias = OPS[op].alias
    for entry in seen[op]:
        results = operator(op)(*entry.positional, **entry.keywords)
        results = list(results) if isinstance(results, tuple) else [] if results is None else [results]
        for index, wanted in enumerate(entry.made):
            found = entry.positional[alias[index]] if index in alias else results.pop(0)
            assert found.dtype == wanted.dtype
            assert_close(found.float(), wanted.float(), rtol=0, atol=0, equal_nan=True)
        assert not results


@pytest.mark.parametrize("op", COMPUTE)
def test_schema_says_what_is_updated(op: str) -> None:
    schema = getattr(torch.ops.k3plan, op).default._schema
    updated = {i for i, argument in enumerate(schema.arguments) if argument.alias_info and argument.alias_info.is_write}
    assert updated == set(OPS[op].alias.values())
    assert len(schema.returns) == OPS[op].outputs - len(updated)


def test_every_dtype_has_one_name() -> None:
    assert {DTYPE_NAMES[dtype]: dtype for dtype in TORCH_DTYPES.values()} == TORCH_DTYPES
    assert schema_of(OPS["linear"]) == "(Tensor x, Tensor weight, *, str? out_dtype=None) -> Tensor"


@pytest.mark.parametrize("op", COLLECTIVES)
def test_collectives_of_one_rank(op: str) -> None:
    x = torch.randn(4, 6)
    attrs = {"ranks": 1} | ({} if op == "all_reduce" else {"dim": 1})
    assert torch.equal(getattr(torch.ops.k3plan, op)(x, **attrs), x)
    torch.library.opcheck(getattr(torch.ops.k3plan, op).default, (x,), attrs)
    with pytest.raises(BindError, match=r"has no torch\.distributed group"):
        getattr(torch.ops.k3plan, op)(x, **{**attrs, "ranks": 2})


def check_collectives_of_two_processes(rank: int) -> None:
    """Called by the test that has two processes, in test_step.py."""
    x = torch.arange(8.0).view(2, 4) + 100 * rank
    other = torch.arange(8.0).view(2, 4) + 100 * (1 - rank)
    ops = torch.ops.k3plan
    assert torch.equal(ops.all_reduce(x, ranks=2), x + other)
    assert torch.equal(ops.all_reduce(x, ranks=2, reduce="max"), torch.maximum(x, other))
    first, second = (x, other) if rank == 0 else (other, x)
    assert torch.equal(ops.all_gather(x, ranks=2, dim=1), torch.cat([first, second], 1))
    assert torch.equal(ops.reduce_scatter(x, ranks=2, dim=1), (x + other)[:, 2 * rank : 2 * rank + 2])
