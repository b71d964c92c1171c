"""Mapping nodes to launches from the frontier, and the order of nodes, on graphs made by hand."""
from __future__ import annotations

from k3plan.graphs.debug.record import Edge, Node
from k3plan.graphs.debug.walk import GraphFacts, _node_id, bound_kernels, in_order, owners


def facts(count: int, *edges: tuple[int, int]) -> GraphFacts:
    nodes = tuple(Node(i, "kernel") for i in range(count))
    return GraphFacts(tuple(100 + i for i in range(count)), nodes, tuple(Edge(s, t) for s, t in edges))


def test_a_chain_with_a_launch_of_three_nodes() -> None:
    chain = facts(5, (0, 1), (1, 2), (2, 3), (3, 4))
    assert owners(chain, [(100,), (103,), (104,)]) == {0: 0, 1: 1, 2: 1, 3: 1, 4: 2}


def test_a_launch_that_left_no_node_owns_none() -> None:
    """It ran on a stream that does not capture: the frontier stayed where it was."""
    assert owners(facts(2, (0, 1)), [(100,), (100,), (101,)]) == {0: 0, 1: 2}


def test_a_node_that_nobody_launched_is_not_owned() -> None:
    assert 2 not in owners(facts(3, (0, 1), (0, 2)), [(100,), (101,)])


def test_fork_and_join() -> None:
    # 0 -> 1 on the main stream, 0 -> 2 on the side stream, 3 waits for both
    diamond = facts(4, (0, 1), (0, 2), (1, 3), (2, 3))
    assert owners(diamond, [(100,), (102,), (101,), (103,)]) == {0: 0, 2: 1, 1: 2, 3: 3}


def test_nodes_stand_after_what_they_wait_for() -> None:
    edges = [(5, 1), (1, 9), (5, 7), (7, 9)]
    order = in_order([9, 7, 1, 5], edges)
    assert sorted(order) == [1, 5, 7, 9]
    assert all(order.index(s) < order.index(t) for s, t in edges)
    assert in_order([3, 1, 2], [(3, 1), (1, 2)]) == [3, 1, 2]


class Kernel:
    __name__ = "_attn_res"


class BoundLaunch:
    kernel, grid, num_warps = Kernel(), (7, 8), 4

    def shared_bytes(self) -> int:
        return 512


class CuteLaunch:
    kernel, grid, threads, shared = None, (7, 8, 1), 96, 2048


class Sequence:
    launches = (BoundLaunch(), BoundLaunch())


def test_bound_kernels() -> None:
    assert list(bound_kernels(BoundLaunch())) == [("_attn_res", (7, 8, 1), 128, 512)]
    assert list(bound_kernels(CuteLaunch())) == [("", (7, 8, 1), 96, 2048)]
    assert len(list(bound_kernels(Sequence()))) == 2
    assert list(bound_kernels(lambda: None)) == []


def test_numbers_of_nodes_where_the_driver_has_them() -> None:
    class Driver:
        def cuGraphNodeGetLocalId(self, node: int) -> tuple[int, int]:
            if node == 2:
                raise RuntimeError('Function "cuGraphNodeGetLocalId" not found')
            return (801, 0) if node == 3 else (0, 17)

    assert [_node_id(Driver(), node) for node in (1, 2, 3)] == [17, 0, 0]
    assert _node_id(object(), 1) == 0
