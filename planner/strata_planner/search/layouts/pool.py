"""The devices that a layout deals out: classes of equal devices of one node, and how many of each a replica takes.

Called by `pipelines`, `search` and `fleet`. A replica is a *composition*: so many devices of each class; which of several equal
ones it gets is settled at the end. Knows no model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations

from strata_planner.question.cluster import Accelerator, Cluster, LinkRate
from strata_planner.search.exact.orders import fleet_of

Composition = tuple[int, ...]  # devices of each class of the pool

_MOST_PERMUTED = 6  # nodes whose every cycle is looked at


@dataclass(frozen=True)
class DeviceClass:
    """Equal devices of one node. `kind`: the same for classes of equal devices, whatever their node."""

    node: str
    kind: int
    devices: tuple[Accelerator, ...]


class Pool:
    """The devices of a cluster with usable memory, in classes. `without`: places of devices that are taken."""

    def __init__(self, cluster: Cluster, without: frozenset[tuple[str, str, int]] = frozenset()) -> None:
        fleet = fleet_of(cluster)
        self.cluster = cluster
        free = (tuple(each for each in devices if each.place not in without) for devices in fleet.devices)
        self.classes = tuple(
            DeviceClass(devices[0].node, kind, devices)
            for devices, kind in zip(free, fleet.kind, strict=True)
            if devices
        )
        self.whole: Composition = tuple(len(each.devices) for each in self.classes)
        self._cycles: dict[tuple[str, ...], tuple[str, ...]] = {}

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(each.node for each in self.classes))

    @cached_property
    def _rank(self) -> dict[str, int]:
        """Of each node, in the cluster's order: names decide nothing."""
        return {node: place for place, node in enumerate(self.nodes)}

    @cached_property
    def usable_bytes(self) -> tuple[int, ...]:
        """Of one device of each class."""
        return tuple(each.devices[0].usable_bytes for each in self.classes)

    def bytes_of(self, composition: Composition) -> int:
        return sum(count * size for count, size in zip(composition, self.usable_bytes, strict=True))

    def link(self, source: str, target: str) -> LinkRate:
        """Between two different nodes."""
        return self.cluster.link(self._first[source], self._first[target])

    def key(self, composition: Composition) -> tuple[object, ...]:
        """Equal for compositions that no cost tells apart: equal devices, alike spread over nodes alike joined."""
        parts = self._parts(composition)
        nodes = self.nodes_of(composition)
        if not self.cluster.links:
            return tuple(tuple(parts[node]) for node in nodes)
        links = tuple(
            (rate.gbps, rate.latency_ms) for i, a in enumerate(nodes) for b in nodes[:i] for rate in [self.link(a, b)]
        )
        return (*(tuple(parts[node]) for node in nodes), links)

    def nodes_of(self, composition: Composition) -> tuple[str, ...]:
        """The nodes it has devices on, by what it has of them: in the same order for compositions of one key."""
        parts = self._parts(composition)
        return tuple(sorted(parts, key=lambda node: (parts[node], self._rank[node])))

    def _parts(self, composition: Composition) -> dict[str, list[tuple[int, int]]]:
        """Kinds of devices and how many, of each node."""
        parts: dict[str, list[tuple[int, int]]] = {}
        for each, count in zip(self.classes, composition, strict=True):
            if count:
                parts.setdefault(each.node, []).append((each.kind, count))
        return parts

    def cycle(self, nodes: tuple[str, ...]) -> tuple[str, ...]:
        """The nodes in the order of least delay, back to the first: every order of a few, else the nearest next."""
        if nodes not in self._cycles:
            self._cycles[nodes] = self._shortest(nodes)
        return self._cycles[nodes]

    def _shortest(self, nodes: tuple[str, ...]) -> tuple[str, ...]:
        if len(nodes) <= 3 or not self.cluster.links:
            return nodes
        if len(nodes) <= _MOST_PERMUTED:
            return min(((nodes[0], *rest) for rest in permutations(nodes[1:])), key=self._delay)
        left, way = list(nodes[1:]), [nodes[0]]
        while left:
            nearest = min(left, key=lambda node: (self.link(way[-1], node).latency_ms, left.index(node)))
            left.remove(nearest)
            way.append(nearest)
        return tuple(way)

    def _delay(self, way: Sequence[str]) -> float:
        """Of one value of 16 KB, a hidden state, all around."""
        hops = [self.link(a, b) for a, b in _around(way)]
        return sum(hop.latency_seconds + 16384 / hop.bytes_per_second for hop in hops)

    @cached_property
    def _first(self) -> dict[str, Accelerator]:
        return {each.node: each.devices[0] for each in reversed(self.classes)}


def _around(way: Sequence[str]) -> Iterator[tuple[str, str]]:
    yield from zip(way, (*way[1:], way[0]), strict=True)


def minus(whole: Composition, part: Composition) -> Composition:
    return tuple(a - b for a, b in zip(whole, part, strict=True))


def plus(one: Composition, other: Composition) -> Composition:
    return tuple(a + b for a, b in zip(one, other, strict=True))
