"""Changes of a cluster as people write them: what they make of it, and what is refused in which words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_planner.errors import ClusterError
from strata_planner.question.changes import changed, parse_change, parse_prices, priced
from strata_planner.question.cluster import Cluster, Device, Node

CLUSTER = Cluster.from_yaml("""
nodes:
  - {name: a, devices: [{type: L4, count: 2, hourlyCost: 0.7, usableFraction: 0.8}, {type: T4}]}
  - {name: b, devices: [{type: NVIDIA-L4}]}
links: [{from: a, to: b, gbps: 1}]
""")


def after(text: str, cluster: Cluster = CLUSTER) -> dict[str, list[tuple[str, int]]]:
    nodes = changed(cluster, parse_change(text)).nodes
    return {node.name: [(device.type, device.count) for device in node.devices] for node in nodes}


A, B = [("L4", 2), ("T4", 1)], [("NVIDIA-L4", 1)]
CHANGES = {
    "more of a type": ("+2xL4@a", {"a": [("L4", 4), ("T4", 1)], "b": B}),
    "one more without a number": ("+T4@a", {"a": [("L4", 2), ("T4", 2)], "b": B}),
    "a label of the type": ("+1xNVIDIA-L4@a", {"a": [("L4", 3), ("T4", 1)], "b": B}),
    "another type": ("+4xH100@b", {"a": A, "b": [*B, ("H100", 4)]}),
    "a new node": ("+8xB200@c", {"a": A, "b": B, "c": [("B200", 8)]}),
    "fewer": ("-1xL4@a", {"a": [("L4", 1), ("T4", 1)], "b": B}),
    "none of a type left": ("-2xL4@a", {"a": [("T4", 1)], "b": B}),
    "no device of a node left": ("-1xL4@b", {"a": A}),
    "a node less": ("-b", {"a": A}),
}


@pytest.mark.parametrize(("text", "nodes"), CHANGES.values(), ids=CHANGES)
def test_a_change_gives(text: str, nodes: dict[str, list[tuple[str, int]]]) -> None:
    assert after(text) == nodes


def test_devices_more_are_like_those_of_their_type() -> None:
    more = changed(CLUSTER, parse_change("+1xL4@c"))
    (device,) = more.nodes[-1].devices
    assert (device.hourly_cost, device.usable_fraction) == (0.7, 0.8)
    assert more.links == CLUSTER.links


@given(st.integers(1, 20), st.sampled_from(["T4", "L4", "H100"]), st.sampled_from("abc"))
def test_what_is_added_and_taken_away_again_changes_nothing(count: int, type_: str, node: str) -> None:
    more = changed(CLUSTER, parse_change(f"+{count}x{type_}@{node}"))
    assert len(more.accelerators()) == len(CLUSTER.accelerators()) + count
    places = {each.place for each in CLUSTER.accelerators()}
    assert places <= {each.place for each in more.accelerators()}  # a plan's devices keep their names
    assert changed(more, parse_change(f"-{count}x{type_}@{node}")) == CLUSTER


REFUSED = {
    "no sign": ("2xL4@a", r"'2xL4@a' is no change of a cluster: write \+2xL4@NODE"),
    "no devices": ("+c", r"'\+c' is no change"),
    "no node": ("+2xL4@", "is no change"),
    "nothing": ("", "is no change"),
    "two signs": ("+-1xL4@a", r"'\+-1xL4@a' is no change"),
    "none": ("+0xL4@a", "0 devices: 1 to 256"),
    "far too many": ("+1000000000000xL4@a", "1000000000000 devices: 1 to 256"),
    "too many": ("+300xL4@a", "300 devices: 1 to 256"),
    "too many with those there": ("+255xL4@a", r"'\+255xL4@a': nodes\[0\].devices\[0\].count: 257: 1 to 256"),
    "an unknown type": ("+1xL5@a", r"'\+1xL5@a': device type 'L5' is unknown.* profiles: \{L5"),
    "an unknown node": ("-bb", r"no node 'bb' is in the cluster; did you mean b\?"),
    "more than there are": ("-3xL4@a", "node 'a' has 2 devices of type L4, 3 cannot go; it has 2xL4, 1xT4"),
    "none of the type": ("-1xH100@a", "node 'a' has 0 devices of type H100"),
}


@pytest.mark.parametrize(("text", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_change_is_told(text: str, words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        changed(CLUSTER, parse_change(text))


def test_no_cluster_is_left_without_devices() -> None:
    with pytest.raises(ClusterError, match="no device would be left"):
        changed(Cluster((Node("a", (Device("T4"),)),)), parse_change("-a"))


def test_a_new_node_needs_a_link() -> None:
    alone = Cluster((Node("a", (Device("T4"),)),), default_link=None)
    with pytest.raises(ClusterError, match="no defaultLink, and no link joins a new node 'b'"):
        changed(alone, parse_change("+1xT4@b"))


def test_prices_go_to_every_device_of_a_type() -> None:
    prices = parse_prices(["L4=0.5", "T4=0.2"], CLUSTER)
    assert [each.hourly_cost for each in priced(CLUSTER, prices).accelerators()] == [0.5, 0.5, 0.2, 0.5]


@pytest.mark.parametrize("text", ["L4", "L4=", "=1", "L4=-1", "L4=nan", "L4=inf", "L5=1"])
def test_what_is_no_price_is_told(text: str) -> None:
    with pytest.raises(ClusterError, match=r"such as L4=0\.7|device type 'L5' is unknown"):
        parse_prices([text], CLUSTER)


def test_a_type_has_one_price() -> None:
    assert parse_prices(["L4=0.5", "L4=0.5"], CLUSTER) == {"L4": 0.5}
    with pytest.raises(ClusterError, match=r"'L4=0\.7': L4 has the price 0\.5 already"):
        parse_prices(["L4=0.5", "L4=0.7"], CLUSTER)
