"""Records made by hand from a compiled plan: one kernel a launch, on one stream. What the debugger's tests share."""
from __future__ import annotations

from dataclasses import replace

from k3plan.compiler.compile import compile_spec
from k3plan.compiler.plan import LaunchPlan, seal
from k3plan.compiler.reading.source import load_spec
from k3plan.graphs.debug.record import Bound, Bucket, Edge, LaunchRecord, Machine, Node, Record
from k3plan.ops_triton.kernels import KERNELS

H200 = Machine("NVIDIA H200", 132, "13.0", "2.11.0", "3.6.0")


def small_plan(*overrides: str) -> LaunchPlan:
    """Four layers of Kimi K3 on one rank of sixteen H200: KDA with a dense MLP, KDA and MLA with experts.

    Triton kernels alone, untuned: what is tested here does not change when a table or another menu does.
    """
    return compile_spec(load_spec("examples/k3-h200-tp16.yaml", ["model.layers=[0, 1, 2, 3]", *overrides]), KERNELS)


def made_record(plan: LaunchPlan) -> Record:
    """What a faultless capture of ``plan`` would look like."""
    nodes, edges, launches = [], [], []
    last: dict[int, int] = {}
    for i, launch in enumerate(plan.launches):
        name = plan.choice(launch).kernel
        nodes.append(Node(i, "kernel", name, (8, 1, 1), (128, 1, 1), 1024, i, launch.stream))
        launches.append(LaunchRecord(launch.id, (i,), floor_us=1.0, bytes=plan.choice(launch).bytes,
                                     bound=(Bound(name, (8, 1, 1), 128, 1024),)))
        if launch.stream in last:
            edges.append(Edge(last[launch.stream], i, "programmatic" if launch.dependent else "full"))
        last[launch.stream] = i
    step = plan.spec.step
    return Record(plan.key, H200, Bucket(step.sequences, step.query), tuple(nodes), tuple(edges), tuple(launches))


def on_streams(plan: LaunchPlan, *side: int) -> LaunchPlan:
    """``plan`` with the launches ``side`` on stream 1."""
    moved = tuple(replace(x, stream=1, dependent=False) if i in side else x for i, x in enumerate(plan.launches))
    return seal(replace(plan, launches=moved))
