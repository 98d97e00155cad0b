"""Device orders: which devices form the stages and in which sequence, each different pipeline once.

Called by `candidates`. Devices of one type, memory and node are interchangeable, and so are nodes that hold the same devices
behind the same links until one of their devices is used. Knows no model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from strata_planner.question.cluster import Accelerator, Cluster, DeviceGroup

Order = tuple[DeviceGroup, ...]


@dataclass(frozen=True)
class Fleet:
    """The cluster's devices in classes: equal devices of one node. `kind[c]`: equal for classes with equal rates and
    memory; `node_group[c]`: equal for classes on nodes that nothing tells apart.
    """

    devices: tuple[tuple[Accelerator, ...], ...]
    kind: tuple[int, ...]
    node_group: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(len(each) for each in self.devices)

    def class_of(self, group: DeviceGroup) -> int:
        return next(c for c, members in enumerate(self.devices) if group.leader in members)


def fleet_of(cluster: Cluster) -> Fleet:
    """Devices without usable memory are left out."""
    classes: dict[tuple[str, bytes], list[Accelerator]] = {}
    for each in cluster.accelerators():
        if each.usable_bytes > 0:
            classes.setdefault((each.node, _identity(each)), []).append(each)
    kinds: dict[bytes, int] = {}
    kind = tuple(kinds.setdefault(identity, len(kinds)) for _, identity in classes)
    content: dict[str, list[tuple[int, int]]] = {}
    for (node, _), number, members in zip(classes, kind, classes.values(), strict=True):
        content.setdefault(node, []).append((number, len(members)))
    groups: dict[object, int] = {}
    node_group = tuple(groups.setdefault((cluster.joined_as(node), *content[node]), len(groups)) for node, _ in classes)
    return Fleet(tuple(tuple(members) for members in classes.values()), kind, node_group)


def orders(fleet: Fleet, lengths: Sequence[int]) -> Iterator[Order]:
    """Every different order of each length in turn."""
    for length in lengths:
        if length <= fleet.size:
            yield from _extend(fleet, [], length)


def _extend(fleet: Fleet, chosen: list[int], length: int) -> Iterator[Order]:
    """`chosen`: classes, in order."""
    if length == 0:
        yield picked(fleet, chosen)
        return
    touched = {fleet.devices[c][0].node for c in chosen}
    seen: set[tuple[int, int, str]] = set()
    for c, members in enumerate(fleet.devices):
        node = members[0].node
        signature = (fleet.kind[c], fleet.node_group[c], node if node in touched else "")
        if signature in seen or chosen.count(c) == len(members):
            continue
        seen.add(signature)
        yield from _extend(fleet, [*chosen, c], length - 1)


def picked(fleet: Fleet, chosen: Sequence[int]) -> Order:
    """The devices of an order given by classes, the first unused of each class in turn."""
    used: dict[int, int] = {}
    order = []
    for c in chosen:
        order.append(DeviceGroup((fleet.devices[c][used.get(c, 0)],)))
        used[c] = used.get(c, 0) + 1
    return tuple(order)


def _identity(each: Accelerator) -> bytes:
    """What two devices share when plans cannot tell them apart."""
    return msgspec.json.encode((each.type, each.usable_bytes, each.profile, each.hourly_cost), order="sorted")
