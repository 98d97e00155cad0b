"""Links by zone: they join as the same links pair by pair do, and the planner finds the same plan on them."""

from dataclasses import replace
from itertools import permutations
from random import Random
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from strata_planner.errors import ClusterError
from strata_planner.question.cluster import Cluster, Link, LinkRate, ZoneLinks
from strata_planner.search import planning
from strata_planner.search.canonical import canonical
from strata_planner.search.exact.orders import fleet_of
from strata_planner.search.metric import value_of_plan
from strata_planner.search.planning import make_plan
from tests.laws import share
from tests.planner.builders import a_cluster, a_request

rates = st.builds(LinkRate, st.sampled_from([0.001, 0.01, 10.0]), st.sampled_from([0.1, 50.0]))
zones = st.sampled_from(["", "1", "2", "3"])
regions = st.sampled_from(["", "n", "s"])


@st.composite
def zoned(draw: st.DrawFn) -> Cluster:
    named = [
        Link(a, b, rate.gbps, rate.latency_ms, one_way=draw(st.booleans()))
        for a, b in draw(
            st.lists(st.sampled_from([("1", "2"), ("2", "1"), ("n", "s"), ("1", "1")]), unique=True, max_size=2)
        )
        for rate in (draw(rates),)
    ]
    between = ZoneLinks(draw(st.none() | rates), draw(st.none() | rates), tuple(named))
    cluster = a_cluster(*draw(st.lists(st.sampled_from([1.2, 1.6]), min_size=3, max_size=3)))
    nodes = tuple(structs.replace(node, zone=draw(zones), region=draw(regions)) for node in cluster.nodes)
    return structs.replace(cluster, nodes=nodes, zone_links=between)


def by_pair(cluster: Cluster) -> Cluster:
    """The same with a link for every pair."""
    devices = {each.node: each for each in cluster.accelerators()}
    rate = {pair: cluster.link(*map(devices.__getitem__, pair)) for pair in permutations(devices, 2)}
    links = tuple(Link(*pair, each.gbps, each.latency_ms, one_way=True) for pair, each in rate.items())
    return structs.replace(cluster, links=links, zone_links=None)


@given(zoned())
def test_they_join_as_links_of_pairs_do(cluster: Cluster) -> None:
    pairs = by_pair(cluster)
    for one, other in permutations(cluster.accelerators(), 2):
        assert cluster.link(one, other) == pairs.link(one, other)
    assert cluster.is_directed == pairs.is_directed
    if cluster.is_uniform:
        assert set(pairs.own_rates.values()) == {cluster.default_link}


@settings(max_examples=share(4), deadline=None)
@given(zoned())
def test_the_planner_finds_as_good_a_plan(cluster: Cluster) -> None:
    both = [replace(a_request(each), solver="pipeline", time_limit_seconds=60) for each in (cluster, by_pair(cluster))]
    with mock.patch.object(planning, "_QUICK_SECONDS", 60.0):  # the clock is a safety, which a busy machine reaches
        values = [value_of_plan(each, make_plan(each, quick=True).plan) for each in both]
    assert values[0] == pytest.approx(values[1])


@given(zoned(), st.randoms(use_true_random=False))
def test_names_and_order_change_nothing(cluster: Cluster, draw: Random) -> None:
    new = dict(zip("abc", draw.sample("pqrstu", 3), strict=True))
    nodes = [structs.replace(node, name=new[node.name]) for node in cluster.nodes]
    draw.shuffle(nodes)
    shapes = []
    for each in (canonical(cluster), canonical(structs.replace(cluster, nodes=tuple(nodes)))):
        devices = [(node.devices, node.name) for node in each.nodes]
        order = {device.node: device for device in each.accelerators()}
        shapes.append(
            [
                (held, [each.link(order[name], order[other]) for _, other in devices if other != name])
                for held, name in devices
            ]
        )
    assert shapes[0] == shapes[1]


@given(zoned())
def test_nodes_that_links_do_not_tell_apart_are_one_group(cluster: Cluster) -> None:
    """And those that they do are not: whoever tries one of a group has tried all."""
    fleet = fleet_of(cluster)
    devices = {each.node: each for each in cluster.accelerators()}
    for one, other in permutations(range(len(fleet.devices)), 2):
        if fleet.node_group[one] == fleet.node_group[other]:
            a, b = (fleet.devices[c][0].node for c in (one, other))
            for c in set(devices) - {a, b}:
                assert cluster.link(devices[a], devices[c]) == cluster.link(devices[b], devices[c])
                assert cluster.link(devices[c], devices[a]) == cluster.link(devices[c], devices[b])


def test_they_are_read_from_a_file_and_checked() -> None:
    nodes = "nodes: [{name: a, zone: x, devices: [{type: T4}]}, {name: b, zone: y, devices: [{type: T4}]}]"
    text = f"{nodes}\nzoneLinks: {{betweenZones: {{gbps: %s}}}}\ndefaultLink: null"
    cluster = Cluster.from_yaml(text % 3)
    assert cluster.link(*cluster.accelerators()).gbps == 3
    assert cluster.with_overrides(link_gbps=7).link(*cluster.accelerators()).gbps == 7
    with pytest.raises(ClusterError, match=r"zoneLinks.betweenZones.gbps: -1"):
        Cluster.from_yaml(text % -1)
    with pytest.raises(ClusterError, match=r"no link joins a-b"):
        Cluster.from_yaml(f"{nodes}\nzoneLinks: {{betweenRegions: {{gbps: 3}}}}\ndefaultLink: null")
