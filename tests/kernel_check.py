"""The check of every kernel of the menus: run it on each small region it fits and compare with the ops' meaning.

Regions come from planning small models, so a kernel is tested on what the planner would give it. The same code runs
in Triton's interpreter on the CPU and on a device. A kernel is right when its error against the fp32 reference is at
most ``FACTOR`` times that of the plain chain of ops, each rounded to its declared dtype, plus a small bound of the op.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from k3plan.compiler.build import build_graph
from k3plan.compiler.covering.match import find_regions
from k3plan.compiler.covering.order import FREE_OPS
from k3plan.compiler.ir import Graph, Node
from k3plan.compiler.kernel import KernelDef, Menu, Region
from k3plan.compiler.model import ModelConfig
from k3plan.compiler.ops import OPS
from k3plan.compiler.passes.merge import merge_projections
from k3plan.compiler.passes.shard import algebra_of, shard_graph
from k3plan.compiler.spec import Choices, Numerics, Parallel, Spec, Step
from k3plan.graphs.launch import allocate, bind_region, default_config, in_place, scratch_of
from k3plan.graphs.load import TORCH_DTYPES
from k3plan.graphs.make_checkpoint import TINY

FACTOR = 2.0  # allowed root-mean-square error, in units of the op-by-op chain's
PEAK_FACTOR = 4.0  # the same for the largest error, which is one draw of a tail
# added to both, in units of the reference's root mean square. A fused kernel and the chain may both be exact.
BOUND = {"bf16": 2.0**-8, "fp32": 2e-5, "fp8_e4m3": 2.0**-3}
# ops whose last step amplifies rounding before it: (op, dtype) -> bound
OP_BOUND: dict[tuple[str, str], float] = {}

# small in every direction: the interpreter takes 10 ms a thread block
K3 = replace(
    TINY, hidden=288, vocab=96, attention=("kda", "kda", "mla", "kda", "mla"), mlp=("dense", *["moe"] * 4),
    attn_res_block=2, dense_intermediate=64, heads=4, q_lora_rank=48, kda_heads=4, moe_intermediate=64, latent=96,
    shared_experts=1,
)  # fmt: skip
K3_DEEP = replace(K3, hidden=128, attention=("mla",) * 9, mlp=("dense",) * 9, attn_res_block=1)
K3_WIDE = replace(K3, hidden=64, kda_heads=6, heads=6, kda_head_dim=128, attention=("kda", "mla"), mlp=("dense", "moe"))
LINEAR = replace(
    K3, family="kimi_linear", hidden=192, activation="silu", attn_res_block=None, q_lora_rank=None,
    mla_output_gate=False, kda_full_rank_gate=False, kda_gate_lower_bound=None, a_log_shape=(1, 1, 4, 1), latent=None,
    latent_norm=False, expert_format="dense", vector_dtype="bf16", routed_scaling=2.446,
)  # fmt: skip


PLAIN = Numerics("bf16", "bf16", 1.0, "fp32", "bf16")
FP8 = Numerics("bf16", "fp8_e4m3", 0.25, "bf16", "mxfp8")
WHOLE = Choices("replicated", "all_reduce", "replicated")
SHARDED = Choices("sharded", "stripe", "sharded")
SLOTS = Choices("replicated", "all_reduce", "replicated", kda_rollback="slots")


@dataclass(frozen=True)
class Setting:
    """One small plan: the model, ranks, and rows as ``sequences`` x ``query``."""

    name: str
    model: ModelConfig
    tp: int
    sequences: int
    query: int
    experts: str = "tp"
    numerics: Numerics = PLAIN
    choices: Choices = WHOLE
    merged: bool = True  # projections of the same rows

    def graph(self) -> Graph:
        spec = Spec(
            model=self.model, layers=tuple(range(self.model.layers)), parallel=Parallel(self.tp, self.experts),
            step=Step(self.sequences, self.query, 48, 16, ("tokens", "logits")), gpu="h200", numerics=self.numerics,
            profile="auto", choices=self.choices, buckets=(self.sequences,),
        )
        picked = algebra_of(self)
        graph = shard_graph(build_graph(spec), spec, picked)[0]
        return merge_projections(graph)[0] if self.merged else graph


SETTINGS = (
    Setting("k3-T1", K3, 1, 1, 1),
    Setting("k3-tp2-S5", K3, 2, 5, 1),
    Setting("k3-tp2-L5", K3, 2, 1, 5, "ep", FP8),
    Setting("k3-tp2-S2xL4", K3, 2, 2, 4, choices=SHARDED),
    Setting("k3-deep-S2", K3_DEEP, 2, 2, 1),
    Setting("k3-wide-S2", K3_WIDE, 1, 2, 1, numerics=FP8),
    Setting("k3-wide-tp2-L8", K3_WIDE, 2, 1, 8),
    Setting("k3-slots-tp2-S2xL4", replace(K3, attention=("kda",), mlp=("dense",)), 2, 2, 4, choices=SLOTS),
    Setting("k3-wide-slots-tp2-L8", replace(K3_WIDE, attention=("kda",), mlp=("dense",)), 2, 1, 8, choices=SLOTS),
    Setting("linear-S2", LINEAR, 1, 2, 1),
    Setting("linear-tp2-S8", LINEAR, 2, 8, 1, "ep"),
    Setting("linear-L2", LINEAR, 1, 1, 2),
    Setting("linear-mxfp4-S2", replace(LINEAR, expert_format="mxfp4"), 1, 2, 1),
    Setting("k3-plain-experts-S2", replace(K3, expert_format="dense"), 1, 2, 1),
    # the output gate of MLA as a projection of its own
    Setting("k3-apart-S3", replace(K3, attention=("mla",), mlp=("dense",)), 1, 3, 1, merged=False),
    Setting("k3-apart-tp2-S10", replace(K3, attention=("mla",), mlp=("dense",)), 2, 10, 1, merged=False),
)
REGIONS = 3  # of one kernel in one setting
CONFIGS = 2  # of one kernel on one region: the default and one more, another each time


@dataclass(frozen=True)
class Case:
    """One kernel on one region in one configuration."""

    name: str
    region: Region
    config: Mapping[str, Any]
    setting: Setting


def cases(kernels: Sequence[KernelDef], settings: Sequence[Setting] = SETTINGS) -> list[Case]:
    """Every kernel on regions of different shapes, each in its default configuration and in one other."""
    found: list[Case] = []
    seen: set[object] = set()
    turn: dict[str, int] = {}
    for setting in settings:
        for region in _regions(setting, kernels, seen):
            kernel = region.kernel.id
            turn[kernel] = turn.get(kernel, 0) + 1
            for label, config in _some_configs(region, turn[kernel]):
                found.append(Case(f"{kernel}-{setting.name}-{_dims(region)}{label}", region, config, setting))
    repeated = {case.name: 0 for case in found}
    for index, case in enumerate(found):
        repeated[case.name] += 1
        if repeated[case.name] > 1:
            found[index] = replace(case, name=f"{case.name}-{repeated[case.name]}")
    return found


def _regions(setting: Setting, kernels: Sequence[KernelDef], seen: set[object]) -> Iterator[Region]:
    """Of each kernel the regions with the most inputs and with the least bytes, none of a shape in ``seen``."""
    regions, _ = find_regions(setting.graph(), Menu(kernels), rows=setting.sequences * setting.query)
    taken: dict[str, int] = {}
    regions.sort(key=lambda r: sum(r.graph.values[n].nbytes for n in r.inputs))
    fullest = {r.kernel.id: r for r in sorted(regions, key=lambda r: len(r.inputs))}
    for region in (*fullest.values(), *regions):
        shape, kernel = _shape(region), region.kernel.id
        communicates = any(OPS[node.op].kind == "comm" for node in region.nodes)
        if shape in seen or communicates or taken.get(kernel, 0) == REGIONS:
            continue
        seen.add(shape)
        taken[kernel] = taken.get(kernel, 0) + 1
        yield region


def _some_configs(region: Region, turn: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    candidates = list(region.kernel.configs(region)) if region.kernel.configs else []
    if len(candidates) < 2:
        yield "", default_config(region)
        return
    for index in dict.fromkeys((0, *(1 + (turn + i) % (len(candidates) - 1) for i in range(CONFIGS - 1)))):
        yield f"-c{index}", candidates[index]


def _shape(region: Region) -> object:
    """What makes two regions the same test: ops, attrs, wiring, shapes, dtypes and strides."""
    order = {name: i for i, name in enumerate(dict.fromkeys((*region.inputs, *_made(region))))}
    nodes = tuple((n.op, tuple(sorted(n.attrs.items())), tuple(order.get(i, -1) for i in n.inputs))
                  for n in region.nodes)
    values = tuple((region.graph.values[n].shape, region.graph.values[n].dtype, _is_view(region.graph, n))
                   for n in order)
    return region.kernel.id, nodes, values, tuple(order[o] for o in region.outputs)


def _made(region: Region) -> list[str]:
    return [out for node in region.nodes for out in node.outputs]


def _is_view(graph: Graph, name: str) -> bool:
    return name in graph.producer and graph.producer[name].op in FREE_OPS


def _dims(region: Region) -> str:
    """The largest input's shape, to tell cases of one kernel apart."""
    weights = [region.graph.values[n] for n in region.inputs]
    return "x".join(map(str, max(weights, key=lambda v: math.prod(v.shape)).shape))


# inputs


def make_inputs(region: Region, setting: Setting, seed: int, device: str) -> dict[str, Tensor]:
    """Random tensors of realistic scale for every input, by value name. Views lie in wider buffers of NaN."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in region.inputs:
        value = region.graph.values[name]
        content = _content(region, name, setting, generator)
        tensor = content.to(TORCH_DTYPES[value.dtype])
        if _is_view(region.graph, name) and value.role == "activation":
            tensor = _inside_wider(region.graph, name, tensor)
        tensors[name] = _to(tensor, device)
    return tensors


def _to(tensor: Tensor, device: str) -> Tensor:
    """A copy on ``device`` with the same strides."""
    if device == "cpu":
        return tensor
    base = torch.empty(_extent(tensor), dtype=tensor.dtype, device=device)
    return base.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def _extent(tensor: Tensor) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _inside_wider(graph: Graph, name: str, content: Tensor) -> Tensor:
    node = graph.producer[name]
    wide = torch.full(graph.values[node.inputs[0]].shape, torch.nan, dtype=content.dtype)
    view = wide.narrow(node.attrs["dim"], node.attrs["start"], node.attrs["stop"] - node.attrs["start"])
    return view.copy_(content)


def _reader(region: Region, name: str) -> tuple[Node, int]:
    """The node that reads ``name`` first, past views, and at which argument."""
    names = {name}
    for node in region.nodes:
        for index, argument in enumerate(node.inputs):
            if argument in names:
                if node.op not in FREE_OPS:
                    return node, index
                names.update(node.outputs)
    raise AssertionError(f"nothing in {region.kernel.id} reads {name}")


def _content(region: Region, name: str, setting: Setting, generator: torch.Generator) -> Tensor:
    value = region.graph.values[name]
    shape = value.shape
    if value.role == "index":
        return _index(name, shape, setting, generator)
    node, argument = _reader(region, name)
    if value.dtype == "u8":
        low, high = (118, 124) if name.endswith("_scale") else (0, 256)
        return torch.randint(low, high, shape, generator=generator)
    if value.dtype == "i32":  # expert ids that the router made
        experts = setting.model.experts
        return torch.stack([torch.randperm(experts, generator=generator)[: shape[1]] for _ in range(shape[0])])
    if value.dtype == "i64":
        return torch.randint(-(2**62), 2**62, shape, generator=generator)
    normal = torch.randn(shape, generator=generator)
    if any(other.op == "argmax_key" for other in region.nodes):
        # a key holds every bit of its logit: quarters have sums that are exact in any order
        if (node.op, argument) == ("rms_norm", 0):
            # rows of one size each, a power of two before which eps vanishes: the norm is the signed weight exactly
            return normal.sign() * 2.0 ** (6 + torch.arange(shape[0]))[:, None]
        return (4 * normal).round() / 4
    return SCALE.get((node.op, argument), _default_scale(value.role))(normal)


def _default_scale(role: str) -> Callable[[Tensor], Tensor]:
    if role == "weight":
        return lambda x: x * x.shape[-1] ** -0.5
    return lambda x: x


def _record(x: Tensor) -> Tensor:
    """(e, k, log decay) of the rows of the step before; k of unit length, log decay at most 0."""
    error, key, decay = x.unbind(2)
    return torch.stack([error, key / key.norm(dim=-1, keepdim=True), -decay.abs()], 2)


# (op, argument) -> from standard normal numbers to a realistic argument
SCALE: dict[tuple[str, int], Callable[[Tensor], Tensor]] = {
    ("rms_norm", 1): lambda x: 1 + 0.1 * x,
    ("gated_rms_norm", 2): lambda x: 1 + 0.1 * x,
    ("attn_res", 0): lambda x: 1.5 * x * x.shape[-1] ** -0.5,
    ("kda_conv", 4): lambda x: 0.5 * x, ("kda_conv", 5): lambda x: 0.5 * x, ("kda_conv", 6): lambda x: 0.5 * x,
    ("kda_gate", 1): lambda x: 0.5 * x, ("kda_gate", 2): lambda x: 0.5 * x - 1,
    ("kda_delta_rule", 3): lambda x: -x.abs(), ("kda_verify", 3): lambda x: -x.abs(),
    ("kda_verify_slots", 3): lambda x: -x.abs(), ("kda_verify_slots", 5): lambda x: 0.3 * x,
    ("kda_delta_rule", 5): lambda x: 0.3 * x, ("kda_verify", 5): lambda x: 0.3 * x,
    ("kda_verify", 6): _record,
    ("router_topk", 1): lambda x: 0.1 * x,
    ("experts_combine", 1): lambda x: x.abs() / x.shape[-1],
}


def _index(name: str, shape: Sequence[int], setting: Setting, generator: torch.Generator) -> Tensor:
    """Index tensors of a step: with two sequences or more the last one is padding."""
    sequences, query = setting.sequences, setting.query
    dead = sequences - 1 if sequences > 1 else sequences
    if name == "rank":
        return torch.tensor([setting.tp - 1])
    if name == "slots":
        slots = torch.randperm(sequences, generator=generator)
        slots[dead:] = -1
        return slots
    if name == "accepted":
        return torch.randint(1, query + 1, tuple(shape), generator=generator)
    if name == "page_table":
        return torch.randperm(math.prod(shape), generator=generator).view(*shape)
    if name == "tokens":
        tokens = torch.randint(0, setting.model.vocab, tuple(shape), generator=generator)
        tokens[dead * query:] = -1
        return tokens
    assert name == "positions", name
    start = torch.randint(0, 48 - query, (sequences, 1), generator=generator)
    positions = start + torch.arange(query)
    if query > 2:
        positions[0, query - 1] = -1  # a ragged verify step: the last row of the first sequence is padding
    positions[dead:] = -1
    return positions.flatten()


# evaluation


def evaluate(region: Region, inputs: Mapping[str, Tensor], *, rounded: bool) -> dict[str, Tensor]:
    """Every value of the region by the ops' own functions: in fp32 throughout, or rounded to declared dtypes."""
    values = {name: _own(tensor, rounded) for name, tensor in inputs.items()}
    for node in region.nodes:
        definition = OPS[node.op]
        results = definition.fn(*(values[n] for n in node.inputs), **node.attrs)
        results = results if isinstance(results, tuple) else (results,)
        for index, (name, result) in enumerate(zip(node.outputs, results, strict=True)):
            if rounded and index not in definition.alias and definition.kind != "view":
                result = result.to(TORCH_DTYPES[region.graph.values[name].dtype])
            values[name] = result
    return values


def _own(tensor: Tensor, rounded: bool) -> Tensor:
    """A private copy (ops write states in place), widened for the reference."""
    tensor = tensor.detach().cpu().clone()
    return tensor.float() if tensor.dtype.is_floating_point and not rounded else tensor


# the check


def check(case: Case, device: str = "cpu", launches: int = 2) -> None:
    """Runs ``case`` on fresh inputs ``launches`` times through one bound launch. Raises AssertionError."""
    region = case.region
    inputs = make_inputs(region, case.setting, 0, device)
    tensors = {**inputs, **_outputs(region, inputs, device)}
    wanted = scratch_of(region, case.config)
    scratch = {name: allocate(one, device) for name, one in wanted.items()}
    for name, one in wanted.items():
        if not one.zeroed:
            _poison(scratch[name])
    launch = bind_region(region, tensors, case.config, scratch=scratch)
    for seed in range(launches):
        for name, fresh in make_inputs(region, case.setting, seed, device).items():
            tensors[name].copy_(fresh)
        for name in region.outputs:
            if name not in in_place(region):
                _poison(tensors[name])
        before = {name: tensors[name].clone() for name in region.inputs}
        launch()
        if device == "cuda":
            torch.cuda.synchronize()
        _compare(case, before, tensors, seed)
        dirty = [name for name, one in wanted.items() if one.zeroed and not one.kept and scratch[name].any()]
        assert not dirty, f"{case.name}: launch {seed} left scratch {dirty} not zero"


def _poison(tensor: Tensor) -> None:
    tensor.fill_(torch.nan if tensor.dtype.is_floating_point else -(2**30) if tensor.dtype != torch.uint8 else 255)


def _outputs(region: Region, inputs: Mapping[str, Tensor], device: str) -> dict[str, Tensor]:
    shared = in_place(region)
    found = {}
    for name in region.outputs:
        value = region.graph.values[name]
        found[name] = inputs[shared[name]] if name in shared else torch.empty(
            value.shape, dtype=TORCH_DTYPES[value.dtype], device=device)
    return found


def _compare(case: Case, before: Mapping[str, Tensor], tensors: Mapping[str, Tensor], seed: int) -> None:
    region, shared = case.region, in_place(case.region)
    exact = evaluate(region, before, rounded=False)
    chain = evaluate(region, before, rounded=True)
    for name in region.outputs:
        where = f"{case.name}: launch {seed}, {region.graph.producer[name].op} -> {name}"
        got = tensors[name].cpu()
        if not got.dtype.is_floating_point:
            assert torch.equal(got, chain[name]), f"{where}: {(got != chain[name]).sum()} integers differ"
            continue
        live = slice(None, -1) if name in shared else slice(None)  # the last slot or page is scratch
        if name in shared:
            _check_untouched(where, before[shared[name]].cpu()[live], chain[name][live], got[live])
        _check_close(case, name, where, got[live].float(), chain[name][live].float(), exact[name][live].float())
    for name in region.inputs:
        if name not in shared.values():
            same = _bytes(tensors[name]).equal(_bytes(before[name]))
            assert same, f"{case.name}: launch {seed} changed its input {name}"


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _check_untouched(where: str, old: Tensor, chain: Tensor, got: Tensor) -> None:
    """What the plain chain leaves alone must keep its bytes."""
    kept = _bytes(old).eq(_bytes(chain))
    wrong = kept & _bytes(old).ne(_bytes(got))
    rows = kept.flatten(1).all(1)
    assert not wrong[rows].any(), f"{where}: slots {rows.nonzero().flatten().tolist()} must keep their bytes"


def _check_close(case: Case, name: str, where: str, got: Tensor, chain: Tensor, exact: Tensor) -> None:
    assert torch.isfinite(got).all(), f"{where}: {(~torch.isfinite(got)).sum()} of {got.numel()} not finite"
    rows = exact.flatten(1) if exact.dim() > 1 else exact[:, None]
    silent = rows.eq(0).all(1)
    assert not got[silent].any(), f"{where}: rows {silent.nonzero().flatten().tolist()} must be zero"
    dtype = case.region.graph.values[name].dtype
    bound = OP_BOUND.get((case.region.graph.producer[name].op, dtype), BOUND[dtype])
    scale = exact.square().mean().sqrt()
    error, plain = (got - exact), (chain - exact)
    limit = FACTOR * plain.square().mean().sqrt() + bound * scale / 2
    rms = error.square().mean().sqrt()
    assert rms <= limit, f"{where}: rms error {rms:.3g}, allowed {limit:.3g}, values {scale:.3g}"
    limit = PEAK_FACTOR * plain.abs().max() + 4 * bound * scale
    assert error.abs().max() <= limit, f"{where}: largest error {error.abs().max():.3g}, allowed {limit:.3g}"


def all_kernels() -> list[KernelDef]:
    """Both menus. They import neither language; ``interpreted`` says which kernels need no GPU."""
    from k3plan.ops_cute.kernels import KERNELS as CUTE
    from k3plan.ops_triton.kernels import KERNELS as TRITON

    return list(itertools.chain(TRITON, CUTE))


def interpreted(kernel: KernelDef) -> bool:
    """Whether Triton's interpreter can run it on a CPU."""
    return kernel.entry.startswith("k3plan.ops_triton.")
