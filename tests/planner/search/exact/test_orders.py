"""Orders: each different pipeline once."""

import itertools

import pytest

from strata_planner.question.cluster import Cluster, Device, Link, Node
from strata_planner.search.exact.orders import fleet_of, orders


def gpus(**counts: tuple[str, int]) -> Cluster:
    return Cluster(tuple(Node(name, (Device(*each),)) for name, each in counts.items()))


def count(cluster: Cluster, *lengths: int) -> int:
    return len(list(orders(fleet_of(cluster), lengths)))


CLUSTERS = {
    "one device": (gpus(a=("T4", 1)), (1,), 1),
    "equal devices of a node": (gpus(a=("T4", 4)), (4,), 1),
    "the paper's cluster 3": (gpus(a=("T4", 3), b=("V100-32GB", 1)), (4,), 4),
    "the paper's cluster 5": (gpus(a=("T4", 4), b=("V100-32GB", 2)), (6,), 15),
    "all its subsets too": (gpus(a=("T4", 4), b=("V100-32GB", 2)), (1, 2, 3, 4, 5, 6), 54),
    "a hundred equal nodes": (Cluster(tuple(Node(f"n{i}", (Device("T4"),)) for i in range(100))), (1, 50), 2),
    "more stages than devices": (gpus(a=("T4", 2)), (3,), 0),
}


@pytest.mark.parametrize(("cluster", "lengths", "expected"), CLUSTERS.values(), ids=CLUSTERS)
def test_interchangeable_devices_are_not_permuted(cluster: Cluster, lengths: tuple[int, ...], expected: int) -> None:
    assert count(cluster, *lengths) == expected


def test_unlike_devices_are_all_permuted() -> None:
    cluster = gpus(a=("T4", 1), b=("L4", 1), c=("V100-32GB", 1))
    found = {tuple(each.leader.type for each in order) for order in orders(fleet_of(cluster), (3,))}
    assert found == set(itertools.permutations(["T4", "L4", "V100-32GB"]))


def test_a_link_of_its_own_tells_nodes_apart() -> None:
    nodes = tuple(Node(name, (Device("T4"),)) for name in "abc")
    assert count(Cluster(nodes), 2) == 1
    assert count(Cluster(nodes, links=(Link("a", "b", 1),)), 2) == 6


def test_devices_of_one_node_stay_together_or_not() -> None:
    """Two nodes with two T4s each: after the first device the second is on the same node or on the other."""
    assert count(gpus(a=("T4", 2), b=("T4", 2)), 2) == 2


def test_devices_without_usable_memory_are_left_out() -> None:
    assert fleet_of(Cluster((Node("a", (Device("T4", memory_bytes=1 << 20),)),))).size == 0
