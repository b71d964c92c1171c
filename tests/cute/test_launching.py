"""The launch layer of the CuTe DSL kernels: what is one compiled kernel and what is two, and that a launch runs."""
from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

import cutlass
import cutlass.cute as cute

from k3plan.compiler.errors import BindError
from k3plan.compiler.launches import LaunchSequence, kernels_of
from k3plan.compiler.reading.source import load_spec
from k3plan.face import kernels
from k3plan.graphs.bench import random_inputs
from k3plan.graphs.launch import allocate, bind_region, scratch_of
from k3plan.graphs.tuner.alone import jobs
from k3plan.ops_cute import compile_check, compile_pool, launching
from k3plan.ops_cute.launching import (
    KernelLaunch,
    await_producers,
    compile_kernel,
    compile_kernels,
    content_key,
    fingerprint,
    function_name,
    named,
    row_stride,
    start_dependents,
)


@dataclass(frozen=True)
class Pairs:
    """Static parameters of the kernel below."""

    count: int
    dependent: bool = False


@cute.kernel
def _add_neighbour(arguments: Any, names: cutlass.Constexpr, p: cutlass.Constexpr):
    """y[i] += x[i] + x[i ^ 1] in the other block of the cluster + offset."""
    at = named(names, arguments)
    start_dependents(p.dependent)
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    x = cute.make_tensor(at.x, cute.make_layout((p.count,)))
    y = cute.make_tensor(at.y, cute.make_layout((p.count,)))
    mine = cute.arch.get_dyn_smem(cutlass.Float32, 16)
    index = block * 128 + thread
    await_producers(p.dependent)
    cute.make_tensor(mine, cute.make_layout((128,)))[thread] = x[index]
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    peer = cute.arch.map_dsmem_ptr(mine + (thread ^ 1), cute.arch.block_idx_in_cluster() ^ 1)
    theirs = cute.arch.inline_ptx("ld.shared::cluster.f32 {$w0}, [{$r0}];", write_only_types=[cutlass.Float32],
                                  read_only_args=[peer])
    y[index] = y[index] + x[index] + theirs + at.offset.to(cutlass.Float32)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


def launch_on(device: str, count: int = 512, *, dependent: bool = False, offset: int = 3) -> KernelLaunch:
    x = torch.randn(count, device="cpu" if device == "meta" else device).to(device)
    return KernelLaunch(_add_neighbour, (count // 128, 1, 1), 128,
                        {"x": x, "y": torch.zeros(count, device=device), "offset": offset},
                        Pairs(count, dependent), cluster=(2, 1, 1), shared=512, dependent=dependent)


def test_equal_launches_are_one_kernel_whatever_their_data() -> None:
    one, other = launch_on("cpu"), launch_on("cpu", offset=5)
    assert content_key(one, "sm_90a") == content_key(other, "sm_90a")
    assert compile_kernel(one, "sm_90a") is compile_kernel(other, "sm_90a")


def test_a_compiled_kernel_is_kept_for_other_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("K3PLAN_CACHE", str(tmp_path))
    monkeypatch.setattr(launching, "_COMPILED", {})
    first = compile_kernel(launch_on("meta", 1024), "sm_90a")
    (kept,) = (tmp_path / "cute").iterdir()

    def compiles(launch: KernelLaunch, target: str) -> launching.Compiled:
        raise RuntimeError("compiled again")

    monkeypatch.setattr(launching, "_compile", compiles)
    launching._COMPILED.clear()  # as another process
    assert compile_kernel(launch_on("meta", 1024), "sm_90a") == first
    # neither half a file nor a folder that is a file, nor a cache that is off, is an error: it is compiled
    kept.write_bytes(kept.read_bytes()[:-100])
    for place in (str(tmp_path), str(kept), "off"):
        monkeypatch.setenv("K3PLAN_CACHE", place)
        launching._COMPILED.clear()
        with pytest.raises(RuntimeError, match="compiled again"):
            compile_kernel(launch_on("meta", 1024), "sm_90a")
    monkeypatch.setattr(launching, "_compile", lambda launch, target: first)
    monkeypatch.setenv("K3PLAN_CACHE", str(kept))
    assert compile_kernel(launch_on("meta", 1024), "sm_90a") == first


def test_many_kernels_are_compiled_by_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by one of two, as this one would; pointers that are aligned to less are other kernels."""
    monkeypatch.setenv("K3PLAN_CACHE", "off")
    monkeypatch.setattr(launching, "_COMPILED", {})
    monkeypatch.setattr(compile_pool, "workers_for", lambda kernels, most: min(2, kernels))
    odd = launch_on("cpu", 256)
    odd = replace(odd, arguments={**odd.arguments, "x": torch.zeros(257)[1:]})
    launches = [launch_on("cpu", 256), odd, launch_on("cpu", 768), launch_on("cpu", 256, offset=9)]
    alone = {content_key(launch, "sm_90a"): launching._compile(launch, "sm_90a") for launch in launches}
    with monkeypatch.context() as patch:
        patch.setattr(launching, "_compile", lambda launch, target: pytest.fail("compiled here"))
        compile_kernels(launches, "sm_90a", 2)
        assert alone == launching._COMPILED
        compile_kernels(launches, "sm_90a", 2)  # nothing is left to do
    assert len(alone) == 3


def test_what_other_processes_cannot_compile_is_compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """And if it cannot be compiled at all, with its own error."""
    monkeypatch.setenv("K3PLAN_CACHE", "off")
    monkeypatch.setattr(launching, "_COMPILED", {})
    monkeypatch.setattr(compile_pool, "workers_for", lambda kernels, most: 1)
    good, bad = launch_on("meta", 256), replace(launch_on("meta", 512), parameters=Pairs(-1))
    with pytest.raises(ValueError, match="strictly positive"):
        compile_kernels([good, bad], "sm_90a", 2)
    assert list(launching._COMPILED) == [content_key(good, "sm_90a")]


@pytest.mark.parametrize("gpu", ["h200", "gb300"])
def test_every_kernel_of_the_menu_can_be_compiled_elsewhere(gpu: str) -> None:
    """What says all of a launch is data that another process can read."""
    spec = load_spec(Path(__file__).resolve().parents[2] / f"examples/k3-{gpu}-tp16.yaml", ("model.layers=[0, 1, 3]",))
    ours = [kernel for kernel in kernels() if kernel.id.startswith("cute.")]
    found = {job.region.kernel.id: job for job in jobs(spec, ours, ((8, 1), (64, 1))) if job.region.kernel in ours}
    assert len(found) > 15
    for job in found.values():
        scratch = {name: allocate(one, "meta") for name, one in scratch_of(job.region, job.configs[0]).items()}
        bound = bind_region(job.region, random_inputs(job.region, "meta"), job.configs[0], scratch=scratch)
        for launch in kernels_of(bound):
            wanted = launching._as_data("key", launch, "sm_90a")
            assert wanted is not None, job.region.kernel.id
            assert pickle.loads(pickle.dumps(wanted)) == wanted


def test_a_handful_of_kernels_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pool.os, "sched_getaffinity", lambda _: range(16))
    assert [compile_pool.workers_for(kernels, 12) for kernels in (0, 7, 8, 40, 400)] == [0, 0, 1, 5, 12]


def test_what_changes_the_code_changes_the_key() -> None:
    base = launch_on("meta")
    x, y = base.arguments["x"], base.arguments["y"]
    assert isinstance(x, torch.Tensor)
    variants = {
        "parameters": replace(base, parameters=Pairs(512, dependent=True)),
        "threads": replace(base, threads=64),
        "cluster": replace(base, cluster=(4, 1, 1)),
        "registers": replace(base, blocks_per_sm=4),
        "dtype": replace(base, arguments={**base.arguments, "x": x.bfloat16()}),
        "alignment": replace(base, arguments={**base.arguments, "x": torch.empty(513, device="meta")[1:]}),
        "order": replace(base, arguments={"y": y, "x": x, "offset": 3}),
        "kind": replace(base, arguments={**base.arguments, "offset": x}),
    }
    keys = {name: content_key(launch, "sm_90a") for name, launch in variants.items()}
    keys |= {"base": content_key(base, "sm_90a"), "target": content_key(base, "sm_103a")}
    assert len(set(keys.values())) == len(keys), keys


def test_what_only_the_launch_needs_does_not_change_the_key() -> None:
    base = launch_on("meta")
    larger = replace(base, grid=(8, 1, 1), shared=4096)
    assert content_key(base, "sm_90a") == content_key(larger, "sm_90a")


@pytest.mark.parametrize("value", [torch.zeros(1), test_equal_launches_are_one_kernel_whatever_their_data, object()])
def test_a_parameter_without_a_text_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="would not show in the key"):
        fingerprint({"sizes": (1, value)})


def test_a_kernel_that_reads_local_names_is_refused() -> None:
    local = 3

    @cute.kernel
    def nested(arguments: Any, names: cutlass.Constexpr, p: cutlass.Constexpr):
        named(names, arguments).x.store(local)

    with pytest.raises(AssertionError, match="reads names of the function around it"):
        content_key(replace(launch_on("meta"), kernel=nested), "sm_90a")


def test_a_launch_made_from_another_is_prepared_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages of a sequence are made by ``replace``: sharing what was prepared, each would run the first."""
    ran = []

    class Prepared:
        def __init__(self, launch: KernelLaunch) -> None:
            self.launch = lambda: ran.append(launch.parameters.count)

    monkeypatch.setattr(launching, "_Prepared", Prepared)
    base = launch_on("meta")
    sequence = LaunchSequence(tuple(replace(base, parameters=Pairs(count)) for count in (1, 2, 3)))
    for _ in range(2):
        sequence()
    assert ran == [1, 2, 3] * 2


def test_a_preferred_carveout_is_asked_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, int]] = []
    driver = SimpleNamespace(
        CUresult=launching.cuda.CUresult, CUfunction_attribute=launching.cuda.CUfunction_attribute,
        cuModuleLoadData=lambda cubin: (launching.cuda.CUresult.CUDA_SUCCESS, "module"),
        cuModuleGetFunction=lambda module, name: (launching.cuda.CUresult.CUDA_SUCCESS, "function"),
        cuFuncSetAttribute=lambda _, attribute, value: (
            asked.append((attribute, value)) or launching.cuda.CUresult.CUDA_SUCCESS,))
    own = launch_on("cpu")
    compile_kernel(own, "sm_90a")
    monkeypatch.setattr(launching, "cuda", driver)
    monkeypatch.setattr(launching, "target_of", lambda device: "sm_90a")
    monkeypatch.setattr(launching, "_FUNCTIONS", {})
    assert launching._function(own, torch.device("cuda", 0)) == "function"
    assert not asked
    monkeypatch.setenv("K3PLAN_CARVEOUT", "100")
    launching._function(own, torch.device("cuda", 0))
    assert asked == [(driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)]
    for wrong in ("101", "all", "-1"):
        monkeypatch.setenv("K3PLAN_CARVEOUT", wrong)
        with pytest.raises(BindError, match="0 to 100"):
            launching._function(own, torch.device("cuda", 0))


def test_grids_are_whole_clusters() -> None:
    with pytest.raises(AssertionError, match=r"grid \(3, 1, 1\) is not whole clusters of \(2, 1, 1\)"):
        replace(launch_on("meta"), grid=(3, 1, 1))


@pytest.mark.parametrize("target", compile_check.TARGETS)
def test_cross_compile_tells_what_the_binary_uses(target: str) -> None:
    usage = compile_check.compile_launch(launch_on("meta", dependent=True), target)
    assert 8 <= usage.registers <= 32
    assert (usage.shared, usage.spilled) == (512, 0)
    compiled = compile_kernel(launch_on("meta", dependent=True), target)
    assert compiled.name.startswith(function_name(_add_neighbour))
    assert compiled.name.encode() in compiled.cubin


@cute.kernel
def _index_locals(arguments: Any, names: cutlass.Constexpr, p: cutlass.Constexpr):
    """An array in registers that is indexed at run time has to live in local memory."""
    at = named(names, arguments)
    x = cute.make_tensor(at.x, cute.make_layout((p.count,)))
    kept = cute.make_rmem_tensor((64,), cutlass.Float32)
    kept.fill(0.0)
    thread, _, _ = cute.arch.thread_idx()
    for i in cutlass.range(thread):
        kept[i % 64] = x[i]
    cute.make_tensor(at.y, cute.make_layout((p.count,)))[thread] = kept[thread % 64] + kept[thread % 7]


@pytest.mark.parametrize("target", compile_check.TARGETS)
def test_local_memory_is_seen(target: str) -> None:
    usage = compile_check.compile_launch(replace(launch_on("meta"), kernel=_index_locals, cluster=(1, 1, 1)), target)
    assert usage.spilled >= 256


def test_row_stride_wants_contiguous_rows() -> None:
    assert row_stride(torch.empty(4, 6)[:, :3]) == 6
    with pytest.raises(AssertionError, match="strided last dim"):
        row_stride(torch.empty(4, 6).t())


def expected(x: torch.Tensor, offset: int) -> torch.Tensor:
    blocks = x.view(-1, 2, 128)
    neighbour = blocks.flip(1).view(-1, 64, 2).flip(2).reshape(-1)
    return x + neighbour + offset


@pytest.mark.gpu
@pytest.mark.parametrize("dependent", [False, True])
def test_a_launch_runs_eagerly_and_in_a_graph(device: str, dependent: bool) -> None:
    launch = launch_on(device, dependent=dependent)
    x, y = launch.arguments["x"], launch.arguments["y"]
    assert isinstance(x, torch.Tensor)
    assert isinstance(y, torch.Tensor)
    launch()
    torch.testing.assert_close(y, expected(x, 3))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            launch()
    for _ in range(2):
        x.normal_()
        y.zero_()
        graph.replay()
        torch.cuda.synchronize()
        # each launch adds to what the one before it wrote
        torch.testing.assert_close(y, 10 * expected(x, 3), rtol=1e-5, atol=1e-4)
