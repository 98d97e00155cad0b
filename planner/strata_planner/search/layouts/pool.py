"""The devices that a layout deals out: classes of equal devices of one node, and how many of each a replica takes.

Called by `pipelines`, `search` and `fleet`. A replica is a *composition*: so many devices of each class; which of several equal
ones it gets is settled at the end. Knows no model.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, permutations

from strata_planner.contract.plan import Place, Plan
from strata_planner.question.cluster import Accelerator, Cluster, LinkRate
from strata_planner.search.exact.orders import fleet_of

Composition = tuple[int, ...]  # devices of each class of the pool

_MOST_PERMUTED = 6  # nodes whose every cycle is looked at
_HIDDEN_STATE, _TOKEN = 16384, 64  # bytes of one, about


@dataclass(frozen=True)
class DeviceClass:
    """Equal devices of one node. `kind`: the same for classes of equal devices, whatever their node."""

    node: str
    kind: int
    devices: tuple[Accelerator, ...]


class Pool:
    """The devices of a cluster with usable memory, in classes. `without`: places of devices that are taken."""

    def __init__(self, cluster: Cluster, without: frozenset[Place] = frozenset()) -> None:
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

    def parts_of(self, plan: Plan) -> tuple[Composition, ...]:
        """The plan's replicas as the search deals them out; devices that are gone are left out."""
        there = {device.place: c for c, each in enumerate(self.classes) for device in each.devices}
        held = (
            Counter(there[place] for stage in replica.stages for place in stage.places if place in there)
            for replica in plan.replicas
        )
        return tuple(tuple(each[c] for c in range(len(self.classes))) for each in held)

    def link(self, source: str, target: str) -> LinkRate:
        """From one node to a different one."""
        return self.cluster.link(self._first[source], self._first[target])

    def key(self, composition: Composition) -> tuple[object, ...]:
        """Equal for compositions that no cost tells apart: equal devices, alike spread over nodes alike joined."""
        parts = self._parts(composition)
        nodes = self.nodes_of(composition)
        if self.cluster.is_uniform:
            return tuple(tuple(parts[node]) for node in nodes)
        links = tuple(
            (rate.gbps, rate.latency_ms)
            for i, a in enumerate(nodes)
            for b in nodes[:i]
            for rate in (self.link(a, b), self.link(b, a))
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
        """The nodes in the order of least delay, back to the first: every order of a few, else the nearest next. Where links differ
        by direction, the first is sought too: hidden states pass every hop but the last one back.
        """
        if nodes not in self._cycles:
            self._cycles[nodes] = self._shortest(nodes)
        return self._cycles[nodes]

    def _shortest(self, nodes: tuple[str, ...]) -> tuple[str, ...]:
        directed = self.cluster.is_directed
        if self.cluster.is_uniform or (len(nodes) <= 3 and not directed) or len(nodes) == 1:
            return nodes
        if len(nodes) <= _MOST_PERMUTED:
            ways = permutations(nodes) if directed else ((nodes[0], *rest) for rest in permutations(nodes[1:]))
            return min(ways, key=self._delay)
        return self._by_insertion(nodes) if directed else self._by_nearest(nodes)

    def _by_nearest(self, nodes: Sequence[str]) -> tuple[str, ...]:
        left, way = list(nodes[1:]), [nodes[0]]
        while left:
            nearest = min(left, key=lambda node: (self.link(way[-1], node).latency_ms, left.index(node)))
            left.remove(nearest)
            way.append(nearest)
        return tuple(way)

    def _by_insertion(self, nodes: Sequence[str]) -> tuple[str, ...]:
        """Each node in turn where it delays least: links differ by direction, and the nearest next may have no way back."""
        way = [nodes[0]]
        for node in nodes[1:]:

            def added(place: int, node: str = node) -> float:
                before, after = way[place - 1 : place], way[place : place + 1]
                parts = [self._seconds(a, node) for a in before] + [self._seconds(node, b) for b in after]
                return sum(parts) - sum(self._seconds(a, b) for a in before for b in after)

            way.insert(min(range(len(way) + 1), key=added), node)
        return tuple(way)

    def _delay(self, way: Sequence[str]) -> float:
        """Of hidden states from each to the next; all around, or where links differ by direction with sampled tokens on the way back."""
        there = sum(self._seconds(a, b) for a, b in pairwise(way))
        return there + self._seconds(way[-1], way[0], _TOKEN if self.cluster.is_directed else _HIDDEN_STATE)

    def _seconds(self, source: str, target: str, size_bytes: int = _HIDDEN_STATE) -> float:
        hop = self.link(source, target)
        return hop.latency_seconds + size_bytes / hop.bytes_per_second

    @cached_property
    def _first(self) -> dict[str, Accelerator]:
        return {each.node: each.devices[0] for each in reversed(self.classes)}


def minus(whole: Composition, part: Composition) -> Composition:
    return tuple(a - b for a, b in zip(whole, part, strict=True))


def plus(one: Composition, other: Composition) -> Composition:
    return tuple(a + b for a, b in zip(one, other, strict=True))
