"""Assignments: least in sum, whatever the costs; equal devices and nodes exchanged, unlike ones never."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from strata_planner.question.cluster import Cluster, Device, DeviceGroup, Node
from strata_planner.replan.matching import assign, closest
from strata_planner.search.exact.orders import fleet_of


@given(st.integers(1, 4), st.integers(0, 2), st.data())
def test_an_assignment_is_the_best_of_all(rows: int, more: int, data: st.DataObject) -> None:
    columns = rows + more
    cost = st.floats(-100, 100)
    costs = [data.draw(st.lists(cost, min_size=columns, max_size=columns)) for _ in range(rows)]
    placed = assign(costs)
    assert len(set(placed)) == rows
    best = min(sum(costs[i][j] for i, j in enumerate(each)) for each in itertools.permutations(range(columns), rows))
    assert abs(sum(costs[i][j] for i, j in enumerate(placed)) - best) < 1e-6


def test_equal_nodes_and_devices_are_exchanged_for_those_that_cost_least() -> None:
    cluster = Cluster(tuple(Node(name, (Device(kind, 2),)) for name, kind in (("a", "T4"), ("b", "T4"), ("c", "L4"))))
    first = {each.node: each for each in reversed(cluster.accelerators())}
    order = (DeviceGroup((first["c"],)), DeviceGroup((first["a"],)))
    cheap = {("b", 1), ("c", 1)}

    def cost(_: int, group: DeviceGroup) -> float:
        return 0.0 if (group.node, group.leader.index) in cheap else 1.0

    named = closest(order, fleet_of(cluster), cost)
    assert [(each.node, each.leader.index) for each in named] == [("c", 1), ("b", 1)]


def test_groups_stay_groups() -> None:
    cluster = Cluster((Node("a", (Device("L4", 4),)),))
    devices = cluster.accelerators()
    order = (DeviceGroup(devices[:2]), DeviceGroup(devices[2:3]))
    named = closest(order, fleet_of(cluster), lambda j, group: float(group.leader.index != (2, 0)[j]))
    assert [[each.index for each in group.devices] for group in named] == [[2, 3], [0]]
