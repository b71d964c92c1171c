"""More cases of ``provoke.py``: padding, host values, replays, dependent launch, moved memory, faults and hangs."""
from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from broken import launch_index, small_plan, small_step, with_step, write_live
from provoke import LAUNCH, Do, case, on_gpu

from k3plan.compiler.plan import LaunchPlan
from k3plan.graphs.bind import Executable, bind
from k3plan.graphs.debug.crash import read_health, run_watched
from k3plan.graphs.debug.findings import Finding
from k3plan.graphs.debug.inspect import compare_buckets
from k3plan.graphs.debug.lint import check_inputs, check_rows, check_shared_workspace, lint
from k3plan.graphs.debug.moved import find_moved
from k3plan.graphs.debug.padding import check_padding
from k3plan.graphs.debug.record import Record
from k3plan.graphs.debug.verify import verify
from k3plan.graphs.debug.walk import record_capture
from k3plan.graphs.module.step import DecodeStep
from k3plan.graphs.random_weights import RandomSource
from k3plan.graphs.transport import Emulated

LAYERS = (0, 1, 3)
BEFORE = "L0.attn.o_gated+4"  # the launch whose output LAUNCH reads
FAULTY = str(Path(__file__).with_name("faulty.py"))


def serious(findings: list[Finding]) -> list[Finding]:
    return [f for f in findings if f.severity != "note"]


# padding


def padded(live: int) -> Executable:
    step = small_step(LAYERS, device="cuda", more=("step.sequences=4",))
    write_live(step, live)
    return step


def also(executable: Executable, launch: str, act: Do) -> Executable:
    return with_step(executable, launch, lambda step: lambda: (step(), act()))


@case(1, "", launch=None, line=False, seconds=120.0)
def padding_is_harmless() -> list[Finding]:
    return [f for live in (0, 1, 3, 4) for f in check_padding(padded(live))]


@case(6, "", launch=None, line=False)
def padding_of_verify_rows_is_harmless() -> list[Finding]:
    step = small_step(LAYERS, device="cuda", more=("step.sequences=2", "step.query=3"))
    write_live(step, 1)
    return check_padding(step)


@case(1, "CG-041", launch="L1.attn.o_gated+4", line=False)
def padded_row_writes_a_real_slot() -> list[Finding]:
    step = padded(1)
    state = step.ranks[0].tensors["L1.attn.state"]
    return check_padding(also(step, "L1.attn.o_gated+4", lambda: state[0 if step.sequences == 1 else 3].add_(1)))


@case(2, "CG-042", launch="L1.attn.o_proj", line=False)
def padded_rows_left_unwritten() -> list[Finding]:
    step = padded(1)
    tensor = step.ranks[0].tensors["L1.attn.o_proj"]

    def early_return(own: Do) -> Do:
        def run() -> None:
            kept = tensor[1:].clone()
            own()
            tensor[1:].copy_(kept)
        return run

    return check_padding(with_step(step, "L1.attn.o_proj", early_return))


@case(3, "CG-043", launch="L0.mlp.down", line=False)
def garbage_of_another_bucket() -> list[Finding]:
    step = padded(1)
    tensor = step.ranks[0].tensors["L0.mlp.down"]

    def mask_by_zero(own: Do) -> Do:
        def run() -> None:
            left = tensor[3].clone()
            own()
            tensor[0].add_(left * 0)
        return run

    return check_padding(with_step(step, "L0.mlp.down", mask_by_zero))


@case(4, "CG-044", launch="L1.mlp.ids", line=False)
def expert_out_of_range() -> list[Finding]:
    step = padded(1)
    ids = step.ranks[0].tensors["L1.mlp.ids"]
    found = check_padding(with_step(step, "L1.mlp.ids", lambda own: lambda: (own(), ids[2].fill_(16))))
    return [f for f in found if f.code == "CG-044"]


@case(4, "", launch=None, line=False)
def logits_of_nan_give_no_id_out_of_range() -> list[Finding]:
    step = padded(4)
    head = next(n for n, w in step.plan.weights.items() if "head" in n and len(w.shape) == 2)
    step.ranks[0].tensors[head].fill_(float("nan"))
    return [f for f in check_padding(step) if f.code == "CG-044"]


@case(6, "CG-046", launch=None, line=False)
def rows_that_fill_no_bucket() -> list[Finding]:
    step = small_step(device="cuda", more=("step.sequences=2", "step.query=3"))
    step.run()
    return check_rows(step.plan, [9] * 48)


@case(7, "CG-047", launch=None, line=False)
def a_sequence_shorter_than_its_verify_rows() -> list[Finding]:
    """The step runs all the same: its first rows count as padding, which nobody would see in its numbers."""
    step = small_step(device="cuda", more=("step.sequences=2", "step.query=4"))
    step.write(positions=torch.tensor([-1, -1, -1, 0, 8, 9, 10, 11], dtype=torch.int32))
    step.run()
    torch.cuda.synchronize()
    return check_inputs(step.plan, {"positions": step.ranks[0].tensors["positions"]})


# host values


@case(8, "CG-031", launch="", line=False)
def splits_of_another_context() -> list[Finding]:
    """Attention over 65536 tokens with the splits of a short one: right and slow."""
    plan = small_plan((3,), "h200", ("step.context=65536",))
    choices = tuple(replace(c, config={**c.config, "splits": 1}) if {"splits", "block"} <= set(c.config) else c
                    for c in plan.choices)
    plan = replace(plan, choices=choices)
    step = bind(plan, RandomSource.of([w.recipe for w in plan.weights.values()], device="cuda"), device="cuda")
    write_live(step, 1, 65000)
    return serious(lint(step))


@case(9, "CG-033")
def epoch_of_the_host() -> list[Finding]:
    flag, epoch = torch.zeros(1, dtype=torch.int32, device="cuda"), [0]

    def act() -> None:
        epoch[0] += 1
        flag.fill_(epoch[0])

    return serious(lint(also(small_step(device="cuda"), LAUNCH, act)))


@case(10, "CG-034")
def a_new_tensor_each_step() -> list[Finding]:
    given, out = [on_gpu()], on_gpu()
    step = also(small_step(device="cuda"), LAUNCH, lambda: out.copy_(given[-1]))
    return serious(lint(step, change=lambda: given.append(on_gpu())))


@case(10, "CG-035")
def a_python_float() -> list[Finding]:
    temperature, x = [0.7], on_gpu()
    step = also(small_step(device="cuda"), LAUNCH, lambda: x.mul_(temperature[0]))
    return serious(lint(step, change=lambda: temperature.append(temperature.pop() + 0.1)))


@case(11, "CG-036")
def slots_sliced_to_the_live_count() -> list[Finding]:
    step, live = small_step(device="cuda"), [1]
    slots, out = step.ranks[0].tensors["slots"], torch.zeros(2, dtype=torch.int32, device="cuda")
    broken = also(step, LAUNCH, lambda: out[: live[0]].copy_(slots[: live[0]]))
    return serious(lint(broken, change=lambda: live.append(live.pop() + 1)))


# replays


@case(0, "", launch=None, line=False, seconds=120.0)
def a_sound_replay() -> list[Finding]:
    step = small_step(LAYERS, device="cuda", more=("step.sequences=4",))
    write_live(step, 3)
    found = verify(step)
    print(found.verdict)
    return list(found.findings)


@case(20, "CG-020", line=False)
def a_launch_that_the_graph_does_not_have() -> list[Finding]:
    other = torch.cuda.Stream()

    def make(own: Do) -> Do:
        def run() -> None:
            with torch.cuda.stream(other):
                own()
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize()
        return run

    return list(verify(with_step(small_step(device="cuda"), LAUNCH, make), reference=False).findings)


@triton.jit
def _show_late(x, kept, N: tl.constexpr, NS: tl.constexpr):
    """Takes the values of x away, lets the next kernel start, and brings them back NS nanoseconds later."""
    at = tl.arange(0, N)
    tl.extra.cuda.gdc_wait()
    values = tl.load(x + at)
    tl.store(kept + at, values)
    tl.store(x + at, values * 0)
    tl.debug_barrier()
    tl.extra.cuda.gdc_launch_dependents()
    start = tl.extra.cuda.globaltimer()
    while tl.extra.cuda.globaltimer() - start < NS:
        pass
    tl.store(x + at, tl.load(kept + at))


@triton.jit
def _read_without_waiting(x, y, N: tl.constexpr, M: tl.constexpr):
    at = tl.arange(0, M)
    tl.store(y + at, tl.load(x + at % N) * 2.0)


def racing(executable: Executable) -> Executable:
    """LAUNCH reads what BEFORE wrote and never waits for it; with a programmatic edge it may read too early."""
    x, y = (executable.ranks[0].tensors[n] for n in ("L0.attn.o_gated", "L0.attn.o_proj"))
    kept = torch.zeros_like(x)
    launch = executable.plan.launches[launch_index(executable, LAUNCH)]
    early = {"launch_pdl": True} if launch.dependent else {}
    n, m = triton.next_power_of_2(x.numel()), triton.next_power_of_2(y.numel())
    assert (n, m) == (x.numel(), y.numel())

    def late(own: Do) -> Do:
        return lambda: (own(), _show_late[(1,)](x, kept, N=n, NS=200_000, launch_pdl=True))

    def reader(own: Do) -> Do:
        return lambda: _read_without_waiting[(1,)](x, y, N=n, M=m, **early)

    return with_step(with_step(executable, BEFORE, late), LAUNCH, reader)


@case(24, "CG-063", line=False, seconds=120.0)
def a_consumer_that_never_waits() -> list[Finding]:
    step = small_step(device="cuda")

    def rebind(plan: LaunchPlan) -> Executable:
        return racing(bind(plan, RandomSource({}), device="cuda", shared=step))

    found = verify(racing(step), reference=False, rebind=rebind)
    print(found)
    assert found.verdict == f"only with programmatic launch: {LAUNCH} reads before {BEFORE} wrote", found.verdict
    return list(found.findings)


@case(22, "", launch=None, line=False, seconds=120.0)
def two_sizes_that_alternate() -> list[Finding]:
    """Plans of 1 and 4 sequences with collectives, replayed in turn: each still equals its eager step."""
    more = ("parallel.tp=2",)
    plans = [small_plan((0,), "h200", (*more, f"step.sequences={n}")) for n in (4, 1)]
    source = RandomSource.of([w.recipe for w in plans[0].weights.values()], device="cuda")
    large = bind(plans[0], source, device="cuda")
    small = bind(plans[1], source, device="cuda", shared=large)
    found: list[Finding] = []
    for step in (large, small, large, small):
        write_live(step, step.plan.spec.step.sequences)
        found += verify(step, reference=False, replays=2).findings
    return found


class OneWorkspace(Emulated):
    """A communicator with one workspace for every size of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.boxes: list[dict[str, torch.Tensor]] = []

    def allocate_mailboxes(self, sizes: Mapping[str, int], device: torch.device) -> list[dict[str, torch.Tensor]]:
        self.boxes = self.boxes or super().allocate_mailboxes(sizes, device)
        named = [dict(zip(sizes, own.values(), strict=True)) for own in self.boxes]
        return [{name: own[name][:size] for name, size in sizes.items()} for own in named]


def two_sizes(transport: Emulated) -> tuple[Executable, Executable]:
    plans = [small_plan((0,), "h200", ("parallel.tp=2", f"step.sequences={n}")) for n in (4, 1)]
    source = RandomSource.of([w.recipe for w in plans[0].weights.values()], device="cuda")
    large = bind(plans[0], source, device="cuda", transport=transport)
    return large, bind(plans[1], source, device="cuda", transport=transport, shared=large)


@case(22, "CG-016", launch="", line=False)
def two_sizes_share_a_workspace_when_bound() -> list[Finding]:
    return check_shared_workspace(two_sizes(OneWorkspace()))


@case(22, "CG-016", launch=None, line=False)
def two_graphs_share_a_workspace() -> list[Finding]:
    """Captured one after the other; replayed in turn each would read what the other left."""
    return compare_buckets([record_capture(step)[1] for step in two_sizes(OneWorkspace())])


@case(50, "CG-054", launch=None, line=False)
def what_each_bucket_costs() -> list[Finding]:
    large, small = two_sizes(Emulated())
    step, first = record_capture(large)
    _, second = record_capture(small, step.graph.pool())
    found = compare_buckets([first, second])
    assert "bucket 4x1" in found[0].text or first.captured_bytes <= second.captured_bytes, found
    return found


@case(32, "CG-072", launch="", line=False, seconds=90.0)
def a_rank_that_is_one_step_ahead() -> list[Finding]:
    plan = small_plan((0,), "h200", ("parallel.tp=2",))
    source = RandomSource.of([w.recipe for w in plan.weights.values()], device="cuda")
    step = bind(plan, source, device="cuda", wait_limit=4096)
    write_live(step, plan.spec.step.sequences)
    step.run()
    torch.cuda.synchronize()
    assert read_health(step) == []
    ahead = next(t for x in plan.launches for n, t in x.scratch.items() if n.endswith("epochs") and "row" not in n)
    step.ranks[1].tensors[ahead].add_(1)
    step.run()
    torch.cuda.synchronize()
    return read_health(step)


# after the capture


def module() -> DecodeStep:
    plan = small_plan((0,), "h200")
    source = RandomSource.of([w.recipe for w in plan.weights.values()], device="cuda")
    step = DecodeStep.from_plan(plan, source, device="cuda")
    assert step.graphs
    return step


def after_capture(act: Callable[[torch.nn.Module, str], Any]) -> list[Finding]:
    step = module()
    name = next(n for n, _ in step.named_parameters() if n.endswith("o_proj.weight"))
    path, _, leaf = name.rpartition(".")
    act(step.get_submodule(path), leaf)
    return find_moved(step.plans[0], step.addresses)


@case(47, "", launch=None, line=False)
def nothing_moved() -> list[Finding]:
    return after_capture(lambda owner, leaf: None)


@case(48, "CG-052", launch="", line=False)
def a_parameter_is_replaced() -> list[Finding]:
    def act(owner: torch.nn.Module, leaf: str) -> None:
        setattr(owner, leaf, torch.nn.Parameter(getattr(owner, leaf).detach().clone(), requires_grad=False))

    return after_capture(act)


@case(48, "", launch=None, line=False)
def assign_is_harmless() -> list[Finding]:
    step = module()
    step.load_state_dict({n: t.clone() for n, t in step.state_dict().items()}, assign=True)
    return find_moved(step.plans[0], step.addresses)


@case(49, "CG-053", launch="", line=False)
def memory_released_while_asleep() -> list[Finding]:
    found = after_capture(lambda owner, leaf: getattr(owner, leaf).untyped_storage().resize_(0))
    return [f for f in found if f.code == "CG-053"]


@case(47, "CG-051", launch="", line=False)
def an_index_table_is_made_anew() -> list[Finding]:
    step = small_step(device="cuda")
    from k3plan.graphs.debug.moved import table_of

    held = {"page_table" if "page_table" in step.plan.buffers else "slots": None}
    name = next(iter(held))
    tensors = {name: step.ranks[0].buffers[name]}
    table = table_of(step, {name: lambda: tensors[name]})
    tensors[name] = tensors[name].clone()
    return find_moved(step.plan, table)


# faults and hangs


def crashed(how: str, limit: float, captured: tuple[Record, LaunchPlan] | None = None) -> list[Finding]:
    with tempfile.TemporaryDirectory() as folder:
        crash = run_watched([sys.executable, FAULTY, "gpu", how], folder, limit=limit, capture=captured)
        print(*crash.output, *(p.read_text() for p in Path(folder).glob("gdb.*")), *Path(folder).iterdir(), sep="\n")
        print(crash, crash.faults, sep="\n")
        return list(crash.findings)


@case(0, "CG-071", line=False, seconds=200.0)
def a_fault_in_an_eager_step() -> list[Finding]:
    return crashed("fault", 90.0)


@case(0, "CG-071", launch=None, line=False, seconds=200.0)
def a_fault_in_a_replay() -> list[Finding]:
    return crashed("graph fault", 90.0)


@case(0, "CG-071", launch="L0.attn.o_gated+4", line=False, seconds=200.0)
def a_fault_in_a_replay_whose_capture_was_recorded() -> list[Finding]:
    """The kernel in the driver's dump, by its name and grid in the record, is a launch of the plan."""
    step, record = record_capture(small_step(device="cuda"))
    return crashed("graph slots", 90.0, (record, step.executable.plan))


@case(0, "CG-073", line=False, seconds=200.0)
def a_hang_in_an_eager_step() -> list[Finding]:
    return crashed("hang", 30.0)


@case(0, "CG-073", launch=None, line=False, seconds=200.0)
def a_hang_in_a_replay() -> list[Finding]:
    return crashed("graph hang", 30.0)


@case(32, "CG-072", launch="embed.rows.all_reduce", line=False, seconds=200.0)
def a_collective_that_waits_for_ever() -> list[Finding]:
    """Without a bound on its waits: the command is ended at its limit, and the launch is one that waits for ranks."""
    return crashed("collective", 30.0)
