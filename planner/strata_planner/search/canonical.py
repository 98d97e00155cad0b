"""A cluster in an order of its own: whatever its nodes are called and however they are listed, the search sees the same.

Called by `planning`. Nodes are told apart by what they hold and by how they are linked (colour refinement, Weisfeiler and Leman
1968); those that even their links do not tell apart keep the order they came in, which changes no plan but the names in it.
"""

import hashlib
from itertools import product

import msgspec

from strata_planner.question.cluster import Cluster, Node
from strata_planner.question.nodes import Place


def canonical(cluster: Cluster) -> Cluster:
    """The same cluster with its nodes, and the types of devices on each, in an order that names have no part in."""
    nodes = tuple(_sorted_devices(node) for node in cluster.nodes)
    content = {node.name: _digest([msgspec.json.encode(node.devices, order="sorted")]) for node in nodes}
    colour = _refined(cluster, content)
    return msgspec.structs.replace(
        cluster, nodes=tuple(sorted(nodes, key=lambda node: (content[node.name], colour[node.name])))
    )


def _sorted_devices(node: Node) -> Node:
    """By type; those of one type stay as they are, for they are counted in their order."""
    return msgspec.structs.replace(node, devices=tuple(sorted(node.devices, key=lambda device: device.type)))


def _refined(cluster: Cluster, colour: dict[str, bytes]) -> dict[str, bytes]:
    """Each node's colour, then that with its neighbours', until no two more are told apart."""
    joined: dict[str, list[tuple[bytes, str]]] = {name: [] for name in colour}
    rates = {direction: msgspec.json.encode(rate) for direction, rate in cluster.own_rates.items()}
    usual = msgspec.json.encode(cluster.default_link)
    for pair in {direction for a, b in rates for direction in ((a, b), (b, a))}:
        there, back = pair, (pair[1], pair[0])
        joined[pair[0]].append((rates.get(there, usual) + rates.get(back, usual), pair[1]))
    around = {} if cluster.is_uniform else _rates_between(cluster)
    while True:
        seen = (
            {place: _digest(sorted(colour[name] for name in names)) for place, names in cluster.zones.items()}
            if around
            else {}
        )
        by_zone = {place: sorted(rates + seen[other] for other, rates in others) for place, others in around.items()}
        finer = {
            name: _digest(
                [colour[name], *sorted(rate + colour[other] for rate, other in joined[name]), *by_zone.get(place, ())]
            )
            for place, names in cluster.zones.items()
            for name in names
        }
        if len(set(finer.values())) == len(set(colour.values())):
            return finer
        colour = finer


def _rates_between(cluster: Cluster) -> dict[Place, list[tuple[Place, bytes]]]:
    """Of each zone and region with nodes: to which it is joined otherwise than by the default link, and how, there and back."""
    encode, usual = msgspec.json.encode, cluster.default_link
    found: dict[Place, list[tuple[Place, bytes]]] = {place: [] for place in cluster.zones}
    for one, other in product(cluster.zones, repeat=2):
        there, back = cluster.rate_between(one, other), cluster.rate_between(other, one)
        if not there == back == usual:
            found[one].append((other, encode(there) + encode(back)))
    return found


def _digest(parts: list[bytes]) -> bytes:
    return hashlib.sha256(b"\0".join(parts)).digest()
