"""What a cluster would be with other devices: changes as people write them (`+2xL4@c`, `-1xL4@a`, `-b`), and prices.

Called by `strata plan --what-if` and `--next-device`. Knows no model and no plan.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from strata_planner.errors import ClusterError
from strata_planner.question.catalogue import catalogue, unknown_type
from strata_planner.question.cluster import Cluster, Device, Node
from strata_planner.question.nodes import MOST_DEVICES
from strata_planner.question.reading import suggestion

_DEVICES = re.compile(r"(?P<sign>[+-])(?:(?P<count>[0-9]{1,40})x)?(?P<type>[A-Za-z0-9][^@]*)@(?P<node>[^@]+)")
_NODE = re.compile(r"-(?P<node>[^@]+)")
_HOW = "write +2xL4@NODE for devices more, -1xL4@NODE for devices fewer, -NODE for a node less"


@dataclass(frozen=True)
class Change:
    """`count` devices of a type more on a node, or fewer below 0. Without a type the whole node goes."""

    text: str
    node: str
    type: str = ""
    count: int = 0


def parse_change(text: str) -> Change:
    """Raises ClusterError with the way to write it."""
    text = text.strip()
    devices = _DEVICES.fullmatch(text)
    if devices is None:
        node = _NODE.fullmatch(text)
        if node is None:
            raise ClusterError(f"'{text}' is no change of a cluster: {_HOW}")
        return Change(text, node["node"].strip())
    count = int(devices["count"] or 1)
    if not 1 <= count <= MOST_DEVICES:
        raise ClusterError(f"'{text}': {count} devices: 1 to {MOST_DEVICES} of a type are on one node")
    signed = count if devices["sign"] == "+" else -count
    return Change(text, devices["node"].strip(), devices["type"].strip(), signed)


def changed(cluster: Cluster, change: Change) -> Cluster:
    """The cluster after the change. Devices that are added are like those of their type on the node, else in the cluster, else as the
    catalogue has them. Raises ClusterError for what there is not.
    """
    try:
        if change.count > 0:
            return _with_more(cluster, change)
        return _with_fewer(cluster, change)
    except ClusterError as error:
        raise ClusterError(*(f"'{change.text}': {each}" for each in error.problems)) from error


def priced(cluster: Cluster, prices: Mapping[str, float]) -> Cluster:
    """With `hourlyCost` of each device whose type has a price here."""
    by_name = {_name(cluster, type_): price for type_, price in prices.items()}

    def with_price(device: Device) -> Device:
        price = by_name.get(_name(cluster, device.type), device.hourly_cost)
        return msgspec.structs.replace(device, hourly_cost=price)

    nodes = (msgspec.structs.replace(node, devices=tuple(map(with_price, node.devices))) for node in cluster.nodes)
    return msgspec.structs.replace(cluster, nodes=tuple(nodes))


def parse_prices(texts: Iterable[str], cluster: Cluster) -> dict[str, float]:
    """From `L4=0.7`: type -> an hour of one device. Raises ClusterError with every problem."""
    found, problems = dict[str, float](), []
    for text in texts:
        type_, _, amount = text.rpartition("=")
        try:
            price = float(amount)
        except ValueError:
            price = math.nan
        if not type_ or not 0 <= price < math.inf:
            problems.append(f"'{text}' is no price: write TYPE=AMOUNT, an hour of one device, such as L4=0.7")
        elif not _is_known(cluster, type_):
            problems.append(f"'{text}': {unknown_type(type_, cluster.profiles)}")
        elif found.setdefault(type_, price) != price:
            problems.append(f"'{text}': {type_} has the price {found[type_]:g} already; name each type once")
    if problems:
        raise ClusterError(*problems)
    return found


def _with_more(cluster: Cluster, change: Change) -> Cluster:
    if not _is_known(cluster, change.type):
        raise ClusterError(unknown_type(change.type, cluster.profiles))
    node = _found(cluster, change.node)
    if node is None and cluster.default_link is None and cluster.nodes:
        raise ClusterError(
            f"the cluster has no defaultLink, and no link joins a new node '{change.node}'; give it a defaultLink, or add the node and its "
            "links to the cluster file"
        )
    there = [] if node is None else list(node.devices)
    last = max((at for at, each in enumerate(there) if _is_a(cluster, each, change.type)), default=None)
    if last is not None:
        there[last] = msgspec.structs.replace(there[last], count=there[last].count + change.count)
    else:
        others = (each for other in cluster.nodes for each in other.devices)
        like = next((each for each in others if _is_a(cluster, each, change.type)), Device(change.type))
        there.append(msgspec.structs.replace(like, count=change.count))
    if node is None:
        return msgspec.structs.replace(cluster, nodes=(*cluster.nodes, Node(change.node, tuple(there))))
    return _with_devices(cluster, node, there)


def _with_fewer(cluster: Cluster, change: Change) -> Cluster:
    node = _found(cluster, change.node)
    names = [each.name for each in cluster.nodes]
    if node is None:
        raise ClusterError(f"no node '{change.node}' is in the cluster; {suggestion(change.node, names, what='nodes')}")
    left: list[Device] = []
    missing = -change.count
    for each in reversed(node.devices if change.type else ()):  # the last ones go: those before keep their numbers
        taken = min(missing, each.count) if _is_a(cluster, each, change.type) else 0
        missing -= taken
        if each.count > taken:
            left.insert(0, msgspec.structs.replace(each, count=each.count - taken))
    if missing:
        held = sum(each.count for each in node.devices if _is_a(cluster, each, change.type))
        kinds = ", ".join(f"{each.count}x{each.type}" for each in node.devices)
        raise ClusterError(
            f"node '{node.name}' has {held} devices of type {change.type}, {-change.count} cannot go; it has {kinds or 'none'}"
        )
    if left:
        return _with_devices(cluster, node, left)
    if len(names) == 1:
        raise ClusterError("no device would be left; name a change that leaves one")
    return cluster.without({node.name})


def _with_devices(cluster: Cluster, node: Node, devices: Iterable[Device]) -> Cluster:
    new = msgspec.structs.replace(node, devices=tuple(devices))
    return msgspec.structs.replace(cluster, nodes=tuple(new if each is node else each for each in cluster.nodes))


def _found(cluster: Cluster, name: str) -> Node | None:
    return next((node for node in cluster.nodes if node.name == name), None)


def _is_known(cluster: Cluster, type_: str) -> bool:
    return type_ in cluster.profiles or catalogue().name_of(type_) is not None


def _is_a(cluster: Cluster, device: Device, type_: str) -> bool:
    """Labels of one product are one type."""
    return _name(cluster, device.type) == _name(cluster, type_)


def _name(cluster: Cluster, type_: str) -> str:
    return type_ if type_ in cluster.profiles else catalogue().name_of(type_) or type_
