"""Reads a captured graph into a Record: nodes, edges with their kinds, and which planned launch made which node.

While the capture grows, ``Frontier`` asks the capturing stream after each launch which nodes the next one would wait
for. Every node behind that frontier which no launch before had is of this launch. This needs no node ids; where the
driver has them (CUDA 13.1), they are read too, so that a profiler's events find their nodes. Decides nothing about
what it finds.
"""
from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from ...compiler.device import load_device
from ...compiler.errors import RecordError
from ...compiler.explain import floor_us
from ...compiler.plan import LaunchPlan
from ..bind import Executable
from ..capture import CapturedStep, capture
from .record import Bound, Bucket, Edge, LaunchRecord, Machine, Node, Pointer, Record

KINDS = {
    "KERNEL": "kernel", "MEMCPY": "memcpy", "MEMSET": "memset", "HOST": "host", "GRAPH": "child", "EMPTY": "empty",
    "WAIT_EVENT": "event_wait", "EVENT_RECORD": "event_record", "MEM_ALLOC": "alloc", "MEM_FREE": "free",
}  # fmt: skip


@dataclass
class Frontier:
    """A hook for ``capture``: the nodes at the end of the capturing stream after each launch, as handles."""

    ends: list[tuple[int, ...]] = field(default_factory=list)

    def __call__(self, launch: int) -> None:
        driver = _driver()
        stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        _, _, _, nodes, *_ = _call(driver.cuStreamGetCaptureInfo, stream)
        self.ends.append(tuple(map(int, nodes)))


@dataclass(frozen=True)
class GraphFacts:
    """Nodes in an order in which each stands after those that it waits for; ``handles`` are theirs."""

    handles: tuple[int, ...]
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]


def record_capture(executable: Executable, pool: Any = None, *, warm_runs: int = 2) -> tuple[CapturedStep, Record]:
    """Captures a bound step and reads its graph. Raises BindError off a GPU, RecordError without cuda-bindings."""
    _driver()
    frontier = Frontier()
    step = capture(executable, pool, after=frontier, warm_runs=warm_runs, keep_graph=True)
    return step, replace(record_of(step, frontier), graph_bytes=step.graph_bytes + upload(step))


def upload(step: CapturedStep) -> int:
    """Puts the graph on the device, which else its first replay does; returns the memory that the driver took."""
    driver = _driver()
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info()
    graph, stream = step.graph.raw_cuda_graph_exec(), torch.cuda.current_stream().cuda_stream
    _call(driver.cuGraphUpload, driver.CUgraphExec(int(graph)), driver.CUstream(stream))
    torch.cuda.synchronize()
    return before - torch.cuda.mem_get_info()[0]


def record_of(step: CapturedStep, frontier: Frontier) -> Record:
    """The record of a step that was captured with ``frontier`` as its hook and with ``keep_graph``."""
    plan = step.executable.plan
    facts = read_graph(step.graph.raw_cuda_graph())
    owner = owners(facts, frontier.ends)
    nodes = []
    for node in facts.nodes:
        launch = owner.get(node.index)
        nodes.append(replace(node, launch=launch, stream=plan.launches[launch].stream if launch is not None else 0))
    size = plan.spec.step
    return Record(
        plan_key=plan.key, machine=this_machine(), bucket=Bucket(size.sequences, size.query), nodes=tuple(nodes),
        edges=facts.edges, launches=launch_records(step.executable, owner), pointers=pointers(step.executable),
        captured_bytes=step.captured_bytes, capture_s=round(step.seconds, 3),
        compile_s=round(step.compile_seconds, 3))


def owners(facts: GraphFacts, ends: Sequence[Sequence[int]]) -> dict[int, int]:
    """Node -> the launch that made it, from the ends (handles) of the stream after each launch."""
    index = {handle: i for i, handle in enumerate(facts.handles)}
    before: dict[int, list[int]] = {}
    for edge in facts.edges:
        before.setdefault(edge.target, []).append(edge.source)
    owner: dict[int, int] = {}
    for launch, end in enumerate(ends):
        waiting = [index[handle] for handle in end]
        while waiting:
            node = waiting.pop()
            if node not in owner:
                owner[node] = launch
                waiting += before.get(node, ())
    return owner


def read_graph(handle: int) -> GraphFacts:
    """Nodes and edges of a cudaGraph_t."""
    driver = _driver()
    graph = driver.CUgraph(int(handle))
    _, count = _call(driver.cuGraphGetNodes, graph, 0)
    found, _ = _call(driver.cuGraphGetNodes, graph, count)
    _, _, _, many = _call(driver.cuGraphGetEdges, graph, 0)
    pairs: list[tuple[int, int, str]] = []
    if many:
        sources, targets, data, _ = _call(driver.cuGraphGetEdges, graph, many)
        programmatic = int(driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
        pairs = [(int(s), int(t), "programmatic" if int(d.type) == programmatic else "full")
                 for s, t, d in zip(sources, targets, data, strict=True)]
    by_handle = {int(node): node for node in found}
    order = in_order(list(by_handle), [(s, t) for s, t, _ in pairs])
    index = {handle: i for i, handle in enumerate(order)}
    names: dict[int, str] = {}
    nodes = tuple(replace(_read_node(driver, i, by_handle[handle], names), id=_node_id(driver, by_handle[handle]))
                  for i, handle in enumerate(order))
    edges = sorted((Edge(index[s], index[t], kind) for s, t, kind in pairs), key=lambda e: (e.target, e.source))
    return GraphFacts(tuple(order), nodes, tuple(edges))


def in_order(nodes: Sequence[int], edges: Sequence[tuple[int, int]]) -> list[int]:
    """``nodes`` so that each stands after its predecessors, otherwise in the order given."""
    after: dict[int, list[int]] = {}
    missing = dict.fromkeys(nodes, 0)
    for source, target in edges:
        after.setdefault(source, []).append(target)
        missing[target] += 1
    ready = [node for node in reversed(nodes) if not missing[node]]
    order: list[int] = []
    while ready:
        order.append(node := ready.pop())
        for target in reversed(after.get(node, ())):
            missing[target] -= 1
            if not missing[target]:
                ready.append(target)
    return order


def _read_node(driver: Any, index: int, node: Any, names: dict[int, str]) -> Node:
    (kind,) = _call(driver.cuGraphNodeGetType, node)
    kind = KINDS.get(kind.name.removeprefix("CU_GRAPH_NODE_TYPE_"), kind.name.lower())
    if kind != "kernel":
        return Node(index, kind)
    (p,) = _call(driver.cuGraphKernelNodeGetParams, node)
    # kernels of libraries come as a CUkernel, kernels of modules as a CUfunction
    handle = int(p.func) or int(p.kern)
    if handle not in names:
        ask = driver.cuFuncGetName if int(p.func) else driver.cuKernelGetName
        (name,) = _call(ask, p.func if int(p.func) else p.kern)
        names[handle] = name.decode() if isinstance(name, bytes) else str(name)
    return Node(index, kind, names[handle], (p.gridDimX, p.gridDimY, p.gridDimZ),
                (p.blockDimX, p.blockDimY, p.blockDimZ), p.sharedMemBytes)


def _node_id(driver: Any, node: Any) -> int:
    """The driver's number of a node; 0 where there is none."""
    try:
        error, number = driver.cuGraphNodeGetLocalId(node)
    except (AttributeError, RuntimeError):  # an older cuda-bindings, an older driver
        return 0
    return 0 if int(error) else int(number)


def launch_records(executable: Executable, owner: Mapping[int, int]) -> tuple[LaunchRecord, ...]:
    """One for each planned launch: its nodes, bytes and floor, and the kernels that its bound form starts."""
    plan, device = executable.plan, load_device(executable.plan.spec.gpu)
    nodes: dict[int, list[int]] = {}
    for node, owning in sorted(owner.items()):
        nodes.setdefault(owning, []).append(node)
    records = []
    for index, launch in enumerate(plan.launches):
        steps = executable.steps_of(index)
        choice = plan.choice(launch)
        records.append(LaunchRecord(
            launch.id, tuple(nodes.get(index, ())), floor_us=round(floor_us(choice, device), 3), bytes=choice.bytes,
            bound=tuple(bound for step in steps for bound in bound_kernels(step))))
    return tuple(records)


def bound_kernels(step: Any) -> Iterator[Bound]:
    """The kernels that a bound launch says it starts; none where it is a function of torch."""
    if hasattr(step, "launches"):
        for one in step.launches:
            yield from bound_kernels(one)
    elif hasattr(step, "grid"):
        grid = tuple(step.grid) + (1,) * (3 - len(step.grid))
        if hasattr(step, "num_warps"):
            yield Bound(step.kernel.__name__, grid, 32 * step.num_warps, step.shared_bytes())
        else:
            # a CuTe kernel's name in the binary is the DSL's
            yield Bound("", grid, step.threads, step.shared)


def pointers(executable: Executable) -> tuple[Pointer, ...]:
    """Every storage of the first bound rank with the launches that read and write it; the arena counts as one."""
    plan, rank = executable.plan, executable.ranks[0]
    kinds = {"index": "input"}
    readers, writers = _users(plan)
    found = [Pointer("arena", rank.arena.data_ptr(), plan.arena_bytes, "arena", readers["arena"], writers["arena"])]
    for name, buffer in plan.buffers.items():
        if buffer.kind != "arena":
            found.append(Pointer(name, rank.buffers[name].data_ptr(), buffer.bytes, kinds.get(buffer.kind, buffer.kind),
                                 readers[name], writers[name]))
    known = sorted((p.address, p.address + p.bytes) for p in found)
    return tuple([*found, *_tables(executable, known)])


class _Uses(dict):
    def __missing__(self, name: str) -> tuple[int, ...]:
        return ()


def _users(plan: LaunchPlan) -> tuple[_Uses, _Uses]:
    readers, writers = _Uses(), _Uses()
    for index, launch in enumerate(plan.launches):
        scratch = launch.scratch.values()
        for names, uses in (((*launch.inputs, *scratch), readers), ((*launch.outputs, *scratch), writers)):
            buffers = dict.fromkeys(plan.tensors[name].buffer for name in names)
            for name in dict.fromkeys("arena" if plan.buffers[b].kind == "arena" else b for b in buffers):
                uses[name] = (*uses[name], index)
    return readers, writers


def _tables(executable: Executable, known: Sequence[tuple[int, int]]) -> Iterator[Pointer]:
    """Tensors that a bound launch made for itself, such as tables of addresses."""
    for index, launch in enumerate(executable.plan.launches):
        for step in executable.steps_of(index):
            for one in getattr(step, "launches", (step,)):
                for name, tensor in (getattr(one, "pointers", None) or getattr(one, "arguments", {})).items():
                    if not isinstance(tensor, torch.Tensor):
                        continue
                    at = tensor.data_ptr()
                    place = bisect.bisect_right(known, (at, 1 << 62)) - 1
                    if tensor.numel() and not (place >= 0 and at < known[place][1]):
                        yield Pointer(f"{launch.id}.{name}", at, tensor.nbytes, "table", (index,))


def this_machine() -> Machine:
    """The current GPU and what runs on it."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    (number,) = _call(_driver().cuDriverGetVersion)
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return Machine(properties.name, properties.multi_processor_count, f"{number // 1000}.{number % 1000 // 10}",
                   str(torch.__version__), triton)


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        raise RecordError("reading a captured graph needs cuda-bindings\n  fix: pip install 'k3plan[cuda]'") from None
    return driver


def _call(function: Callable[..., tuple[Any, ...]], *args: Any) -> tuple[Any, ...]:
    """Results of a driver call. Raises RecordError with the driver's word for the failure."""
    code, *results = function(*args)
    if int(code):
        raise RecordError(f"{function.__name__} said {code.name}\n"
                          f"  fix: k3plan explain {code.name}")
    return tuple(results)
