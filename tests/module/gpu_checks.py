"""What must hold of the module on a GPU. Each check is a function of a folder of work; it raises, or says a figure."""
from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from made_steps import PAGES, inputs_at, layer_plan, spec_of, tensors_of
from torch import Tensor
from torch.testing import assert_close

import k3plan
from k3plan.compiler.compile import compile_spec
from k3plan.compiler.errors import AddressError
from k3plan.compiler.plan import LaunchPlan
from k3plan.face import kernels, tuning
from k3plan.graphs.checkpoint import Checkpoint
from k3plan.graphs.make_checkpoint import make_checkpoint
from k3plan.graphs.module.layer import DecodeLayer
from k3plan.graphs.module.patch import CACHE
from k3plan.graphs.module.step import DecodeStep

GPU = "h200"
BUCKETS = (4, 2, 1)
BF16 = {"activation": "bf16", "kv_cache": "bf16"}
EXACT = {"rtol": 0.0, "atol": 0.0}
SIZES: dict[str, Any] = dict(attention=("kda", "mla", "kda", "mla"), mlp=("dense", "moe", "moe", "moe"),
                             attn_res_block=2)


def models(where: Path) -> tuple[Checkpoint, Checkpoint]:
    """Two checkpoints of one small K3."""
    for seed, name in enumerate(("one", "two")):
        if not (where / name).is_dir():
            make_checkpoint(where / name, seed=seed, **SIZES)
    return Checkpoint(where / "one"), Checkpoint(where / "two")


def plans(where: Path, only: str, tp: int = 1) -> list[LaunchPlan]:
    models(where)
    menu = [kernel for kernel in kernels() if kernel.id.startswith(only)]
    return [compile_spec(spec_of(where, where / "one", gpu=GPU, numerics=BF16, sequences=n, tp=tp), menu, tuning(GPU))
            for n in BUCKETS]


def make(where: Path, which: int = 0, only: str = "triton.", **how: Any) -> DecodeStep:
    return DecodeStep.from_plan(plans(where, only), models(where)[which], device="cuda", **how)


def text(step: DecodeStep, count: int = 5) -> Tensor:
    """Logits of four sequences, decoded in groups that change their size."""
    groups = [[(0, 1, 2, 3)], [(0,), (1, 2), (3,)], [(3, 0, 1), (2,)], [(1, 3), (0, 2)], [(2, 1, 0, 3)]]
    for slot in range(4):
        step.reset(slot)
    made = torch.empty(count, 4, 512, device="cuda")
    for at in range(count):
        for slots in groups[at % len(groups)]:
            outputs = step.step(**inputs_at([at] * len(slots), slots, "cuda"))
            made[at, list(slots)] = outputs["logits"][:, 0]
    return made


def check_capture(where: Path, only: str = "triton.") -> str:
    """Replays equal launches bit for bit, in every bucket, and capturing changes no state."""
    wanted = text(make(where, only=only, capture=False))
    captured = make(where, only=only)
    assert len(captured.graphs) == len(BUCKETS)
    assert_close(text(captured), wanted, **EXACT)
    tensors = captured.executables[0].ranks[0].tensors
    kept = {name: tensor.clone() for name, tensor in tensors.items() if name.endswith((".state", ".cache"))}
    captured.capture()
    for name, tensor in kept.items():
        assert torch.equal(tensors[name][:-1], tensor[:-1]), name
    return f"{len(BUCKETS)} graphs, {wanted.numel()} logits equal to the bit"


def check_capture_with_cute(where: Path) -> str:
    """The same with the kernels of every menu."""
    return check_capture(where, "")


def check_padding(where: Path) -> str:
    """A replay of bucket 4 with three live sequences touches the slots and pages of those three."""
    step = make(where)
    text(step)
    first = step.executables[0]
    names = [n for n, b in first.plan.buffers.items() if b.kind in ("state", "cache")]
    before = {n: first.ranks[0].tensors[n][:-1].clone() for n in names}
    first.poison()
    logits = step.step(**inputs_at([5] * 3, (1, 3, 0), "cuda"))["logits"]
    assert torch.isfinite(logits).all()
    for name in names:
        rows = (first.ranks[0].tensors[name][:-1] != before[name]).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(rows) == ({s * PAGES for s in (1, 3, 0)} if name.endswith("cache") else {0, 1, 3}), (name, rows)
    return f"{len(names)} states and caches"


def check_reload(where: Path) -> str:
    """The graphs see new weights without a new capture, however they come."""
    wanted, step = text(make(where, 1)), make(where)
    graphs, old = step.graphs, text(step)
    for assign in (False, True):
        step.load_state_dict(tensors_of(models(where)[1], list(step.state_dict())), assign=assign)
        assert_close(text(step), wanted, **EXACT)
        step.reload(models(where)[0])
        assert_close(text(step), old, **EXACT)
    assert step.graphs is graphs
    return f"largest change of a logit {float((wanted - old).abs().max()):.2f}"


def check_move(where: Path) -> str:
    """To the CPU and back: refused, then bound and captured again."""
    step = make(where)
    wanted = text(step)
    step.to("cpu").to("cuda")
    try:
        step.step(**inputs_at([0], (0,), "cuda"))
    except AddressError as error:
        said = str(error).splitlines()[0]
    else:
        raise AssertionError("a moved module was replayed")
    step.rebind()
    assert_close(text(step), wanted, **EXACT)
    return said


def check_memory(where: Path) -> str:
    """Parameters are views: the module takes little more than the checkpoint. A step allocates nothing."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    step = make(where)
    taken = torch.cuda.memory_allocated() - before
    stored = sum(t.nbytes for t in step.state_dict().values())
    given = inputs_at([0, 0, 0], (0, 1, 2), "cuda")
    step.step(**given)
    counts = [torch.cuda.memory_stats()["allocation.all.allocated"]]
    for _ in range(3):
        step.step(**given)
        counts.append(torch.cuda.memory_stats()["allocation.all.allocated"])
    assert len(set(counts)) == 1, counts
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()  # the graphs are not replayed any more
    library = held - torch.cuda.memory_allocated()
    sizes = {"checkpoint": stored, "module with arenas, states and graphs": taken - library, "cuBLAS": library}
    return ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sizes.items())


def check_host(where: Path) -> str:
    """Host time of a step: inputs that are on the GPU already, copies and replay enqueued, nothing waited for."""
    step = make(where)
    given = inputs_at([0, 0, 0, 0], (0, 1, 2, 3), "cuda")
    inside, replay = [], []
    for _ in range(30):
        torch.cuda.synchronize()
        started = time.perf_counter()
        step.step(**given)
        inside.append(time.perf_counter() - started)
        torch.cuda.synchronize()
        started = time.perf_counter()
        step.graphs[0].replay()
        replay.append(time.perf_counter() - started)
    torch.cuda.synchronize()
    started = time.perf_counter()
    step.verify_addresses()
    checked = time.perf_counter() - started
    whole, graph = (1e6 * statistics.median(times) for times in (inside, replay))
    return f"step() {whole:.1f} us, of which replay {graph:.1f} us; verify_addresses() {1e6 * checked:.0f} us"


def layer_on_gpu(where: Path, index: int) -> tuple[DecodeLayer, dict[str, Any]]:
    models(where)
    plan = layer_plan(where, where / "one", index, gpu=GPU, only="triton.", numerics=BF16)
    layer = DecodeLayer.from_plan(plan, models(where)[0], device="cuda", parameters=False)
    generator = torch.Generator("cuda").manual_seed(index)
    count = sum(n.startswith("block") for n in plan.inputs)
    rows = [torch.randn(2, 1, 256, generator=generator, device="cuda").bfloat16() for _ in range(count + 1)]
    given = inputs_at([0, 0], (1, 0), "cuda")
    return layer, {"hidden_states": rows[0], "position_ids": given["positions"], "slots": given["slots"],
                   "page_table": given["page_table"], "blocks": rows[1:]}


def check_operators(where: Path) -> str:
    """Each launch as an operator: opcheck with the kernel itself, and the layer's result to the bit."""
    checked, layers = set(), 0
    for index in (0, 1, 2):
        layer, given = layer_on_gpu(where, index)
        wanted = layer(**given)
        plan, tensors = layer.plans[0], {n: t.clone() for n, t in layer.executables[0].ranks[0].tensors.items()}
        for name in (n for n, b in plan.buffers.items() if b.kind in ("state", "cache")):
            tensors[name].zero_()
        program = layer.register_operators()
        program = replace(program, launches=tuple(_checking(a, checked) for a in program.launches))
        kept = {n for n, b in plan.buffers.items() if b.kind in ("weight", "state", "cache", "index")}
        found = program.run({name: tensor for name, tensor in tensors.items() if name in kept})
        assert_close(found["stream"], wanted.flatten(0, 1), **EXACT)
        layers += 1
    return f"{len(checked)} fused launches checked, {layers} layers equal to the bit"


def _checking(application: Any, checked: set[str]) -> Any:
    if application.fused is None or application.fused.name in checked:
        return application
    checked.add(application.fused.name)

    def run(*arguments: Any) -> Any:
        copies = tuple([t.clone() for t in a] if isinstance(a, list) else a.clone() for a in arguments)
        torch.library.opcheck(application.operator.default, copies)
        return application.operator(*arguments)

    return replace(application, operator=run)


class Exported(torch.nn.Module):
    """A layer with tensors for everything."""

    def __init__(self, layer: DecodeLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, positions: Tensor, slots: Tensor, pages: Tensor, blocks: list[Tensor]) -> Tensor:
        return self.layer(hidden, position_ids=positions, slots=slots, page_table=pages, blocks=blocks)


def check_export(where: Path) -> str:
    """An exported layer runs its kernels, and equals the bound one to the bit."""
    for index in (0, 1, 2):
        layer, given = layer_on_gpu(where, index)
        wanted = layer(**given)
        again, _ = layer_on_gpu(where, index)
        again.register_operators()
        arguments = tuple(given.values())
        program = torch.export.export(Exported(again), arguments)
        assert_close(program.module()(*arguments), wanted, **EXACT)
    return "3 layers"


def check_compile(where: Path) -> str:
    """torch.compile opens the Triton operators; the layer's result stays."""
    worst = 0.0
    for index in (0, 2):
        layer, given = layer_on_gpu(where, index)
        wanted = layer(**given).float()
        again, _ = layer_on_gpu(where, index)
        again.register_operators()
        found = torch.compile(Exported(again), fullgraph=True)(*given.values()).float()
        worst = max(worst, float((found - wanted).abs().max() / wanted.std()))
    assert worst < 0.02, worst
    return f"worst difference {worst:.1e} standard deviations"


# sizes that the kernels take: with those of the CPU's tests most launches would be torch's
WIDE: dict[str, Any] = dict(
    hidden_size=256, intermediate_size=512, moe_intermediate_size=128, kv_lora_rank=128, qk_rope_head_dim=32,
    v_head_dim=64, qk_nope_head_dim=64, num_hidden_layers=2, linear_attn_config=dict(
        head_dim=64, num_heads=4, short_conv_kernel_size=4, full_attn_layers=[2], kda_layers=[1]))


def check_patch(where: Path) -> str:
    """A transformers Kimi-Linear in bf16: the logits of a patched one are as near to fp32 as the unpatched one's.

    Teacher-forced over ten steps of three sequences of different lengths; of each row the error, of those the median.
    """
    from hf_models import VOCAB, make_model, texts
    from transformers import DynamicCache

    model = make_model(torch.bfloat16, **WIDE).cuda()
    exact = make_model(torch.bfloat16, **WIDE).float().cuda()
    ids, mask = (t.cuda() for t in texts([6, 2, 4]))
    more = torch.randint(3, VOCAB, (3, 10), generator=torch.Generator().manual_seed(1)).cuda()
    name = next(n for n in CACHE if n in inspect.signature(model.forward).parameters)

    def logits(one: Any) -> Tensor:
        seen, rows, kept = mask, [], {name: DynamicCache(config=one.config), "use_cache": True}
        with torch.no_grad():
            one(ids, attention_mask=seen, **kept)
            for at in range(more.shape[1]):
                seen = torch.cat([seen, torch.ones_like(seen[:, :1])], 1)
                rows.append(one(more[:, at : at + 1], attention_mask=seen, **kept).logits[:, -1])
        return torch.cat(rows).float()

    wanted, own = logits(exact), logits(model)
    with k3plan.patch(model, sequences=3, context=128, gpu=GPU) as handle:
        kernels_used = {x for layer in handle.layers.values() for x in (c.kernel for c in layer.plans[0].choices)}
        found = logits(model)
    assert_close(logits(model), own, **EXACT)
    theirs, ours = (float(((x - wanted).norm(dim=1) / wanted.norm(dim=1)).median()) for x in (own, found))
    assert not torch.equal(found, own), "the plans did not run"
    assert ours < 1.5 * theirs, (ours, theirs)
    languages = ", ".join(sorted(k for k in kernels_used if "." in k))
    return f"error {ours:.4f}, unpatched {theirs:.4f}; {languages}"


CHECKS: dict[str, Callable[[Path], str]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}
