"""Links that differ by direction: which way a pipeline goes, and what equal directions and names have no part in."""

from dataclasses import replace
from random import Random
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from strata_planner.contract.plan import Plan
from strata_planner.question.cluster import Cluster, Link
from strata_planner.question.request import PlanRequest, Solver
from strata_planner.search import planning
from strata_planner.search.canonical import canonical
from strata_planner.search.layouts.clusters import grouped
from strata_planner.search.layouts.pool import Pool
from strata_planner.search.metric import value_of_plan
from strata_planner.search.planning import make_plan
from tests.laws import share, swept
from tests.planner.builders import a_cluster, a_request

laws = settings(max_examples=share(4), deadline=None)
PAIRS = [("a", "b"), ("a", "c"), ("b", "c")]
SOLVERS = st.sampled_from(["layout", "pipeline"])
rates = st.sampled_from([0.001, 0.01, 10.0])


def joined(links: list[Link], memory: tuple[float, ...] = (1.2, 1.2, 1.2)) -> PlanRequest:
    """No device holds the model by itself, and hops weigh much."""
    return a_request(structs.replace(a_cluster(*memory), links=tuple(links)))


def planned(request: PlanRequest) -> Plan:
    with mock.patch.object(planning, "_QUICK_SECONDS", 60.0):  # the clock is a safety, which a busy machine reaches
        return make_plan(request, quick=True).plan


@st.composite
def directed(draw: st.DrawFn) -> list[Link]:
    ways = [way for a, b in PAIRS for way in ((a, b), (b, a))]
    return [Link(a, b, draw(rates), draw(st.sampled_from([0.1, 50.0])), one_way=True) for a, b in ways]


@pytest.mark.slow
@laws
@given(st.lists(rates, min_size=3, max_size=3), SOLVERS)
def test_two_equal_directions_are_one_link(gbps: list[float], solver: Solver) -> None:
    both = [Link(a, b, each) for (a, b), each in zip(PAIRS, gbps, strict=True)]
    each_way = [Link(*way, link.gbps, one_way=True) for link in both for way in link.directions]
    one, other = (replace(joined(links), solver=solver) for links in (both, each_way))
    assert planned(one) == planned(other)


@pytest.mark.slow
@laws
@given(directed(), SOLVERS, st.randoms(use_true_random=False))
def test_names_and_order_change_nothing(links: list[Link], solver: Solver, draw: Random) -> None:
    request = replace(joined(links, (1.2, 1.6, 2.0)), solver=solver)
    new = dict(zip("abc", draw.sample("pqrstu", 3), strict=True))
    nodes = [structs.replace(node, name=new[node.name]) for node in request.cluster.nodes]
    renamed = [structs.replace(link, source=new[link.source], target=new[link.target]) for link in links]
    draw.shuffle(nodes)
    draw.shuffle(renamed)
    other = replace(request, cluster=structs.replace(request.cluster, nodes=tuple(nodes), links=tuple(renamed)))
    assert value_of_plan(other, planned(other)) == value_of_plan(request, planned(request))


QUICK_WAYS: list[tuple[Solver, str]] = [
    (solver, way) for solver in ("auto", "layout", "pipeline") for way in ("ab", "ba")
]


@pytest.mark.parametrize("case", swept(QUICK_WAYS, [("pipeline", "ba")]), ids=str)
def test_hidden_states_go_the_quick_way(case: tuple[Solver, str]) -> None:
    solver, way = case
    slow = Link(way[1], way[0], 0.0001, 1.0, one_way=True)
    request = replace(joined([slow], (1.7, 1.7)), solver=solver)
    (replica,) = planned(request).replicas
    assert tuple(stage.node for stage in replica.stages) == tuple(way)


@pytest.mark.parametrize("count", [2, 4, 7])
@pytest.mark.parametrize("rate", [0.1, 0.2, 0.3])
def test_the_nodes_of_a_replica_are_passed_the_quick_way(count: int, rate: float) -> None:
    """Downwards in a row of nodes, whichever of them is first in the cluster's own order."""
    names = "abcdefg"[:count]
    slow = tuple(Link(b, a, rate, 10.0, one_way=True) for at, a in enumerate(names) for b in names[at + 1 :])
    pool = Pool(canonical(structs.replace(a_cluster(*(2.0,) * count), links=slow)))
    way = pool.cycle(pool.nodes)
    assert way == tuple(names)


def test_compositions_are_alike_only_if_both_directions_are() -> None:
    links = (Link("a", "b", 1.0, one_way=True), Link("c", "d", 1.0))
    pool = Pool(structs.replace(a_cluster(2, 2, 2, 2), links=links))
    by_node = {each.node: c for c, each in enumerate(pool.classes)}
    pairs = [tuple(int(c in {by_node[a], by_node[b]}) for c in range(4)) for a, b in ("ab", "cd")]
    assert pool.key(pairs[0]) != pool.key(pairs[1])


def test_nodes_are_grouped_by_both_directions() -> None:
    """a and b are far from the rest one way only: c and d cannot be told from each other by what they send."""
    far = [Link(a, b, 0.001, 90.0, one_way=True) for a in "cd" for b in "ab"]
    groups = grouped(Pool(structs.replace(a_cluster(2, 2, 2, 2), links=tuple(far))), seed=0)
    assert {frozenset(each) for each in groups} == {frozenset("ab"), frozenset("cd")}


def test_a_way_that_no_link_goes_is_told() -> None:
    text = """
nodes: [{name: a, devices: [{type: T4}]}, {name: b, devices: [{type: T4}]}]
links: [{from: a, to: b, gbps: 1, oneWay: true}]
defaultLink: null
"""
    with pytest.raises(Exception, match="no link joins b to a"):
        Cluster.from_yaml(text)
