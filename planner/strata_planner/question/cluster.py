"""The devices to plan for: nodes, what they hold, and the links between them.

Made by the operator's inventory or read from a file (`strata plan --cluster`), read by the search and the costs.
`Cluster.accelerators` resolves every device to its rates and usable memory. Knows no model and no load.

The smallest file:

    nodes: [{name: a, devices: [{type: cpu, count: 1, memoryBytes: 400000000}]}]
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations, permutations
from typing import Any, Self

import msgspec
import yaml

from strata_planner.contract.devices import DeviceProfile
from strata_planner.contract.plan import Place
from strata_planner.contract.rows import TIMED_ROWS
from strata_planner.contract.shares import Shares, of_ranks
from strata_planner.contract.values import ContractError, Value, from_builtins
from strata_planner.errors import ClusterError
from strata_planner.question.accelerators import Accelerator, DeviceGroup
from strata_planner.question.catalogue import CPU, catalogue, unknown_type
from strata_planner.question.nodes import (
    Device,
    Link,
    LinkRate,
    Node,
    ZoneLinks,
    is_positive,
    problems_of_nodes,
    problems_of_rate,
)
from strata_planner.question.nodes import Place as ZonePlace
from strata_planner.question.reading import load_yaml, problems_in, suggestion

__all__ = ["Accelerator", "Cluster", "Device", "DeviceGroup", "Link", "LinkRate", "Node", "ZoneLinks"]

# LLM-PQ's own figures (its published planner): what of a CUDA device a model can use.
CUDA_USABLE_FRACTION = 0.95
CUDA_OVERHEAD_BYTES = 1930 << 20
# A CPU device's memory is what the model may take beside the idle process, unless `overheadBytes` says otherwise.
CPU_USABLE_FRACTION = 0.95


class Cluster(Value, frozen=True, dict=True):
    """Nodes, the links between them, and profiles of device types that the catalogue lacks or has wrong.

    `profiles`: device type -> DeviceProfile. `intra_node`: replaces the interconnect of the type between devices of a node.
    Two nodes are joined by their own link, else by the rules of `zone_links`, else by `default_link`; that is None: by the
    former alone.
    """

    nodes: tuple[Node, ...]
    links: tuple[Link, ...] = ()
    default_link: LinkRate | None = LinkRate()
    intra_node: LinkRate | None = None
    profiles: dict[str, DeviceProfile] = msgspec.field(default_factory=dict)
    zone_links: ZoneLinks | None = None

    def __post_init__(self) -> None:
        problems = (*problems_of_nodes(self.nodes), *self._problems_of_links())
        if problems:
            raise ClusterError(*problems)

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        """Quantities such as `40Gi` stand for bytes. Raises ClusterError with every problem of the text."""
        try:
            data = load_yaml(text)
        except yaml.YAMLError as error:
            raise ClusterError(f"the cluster is not valid YAML: {error}") from error
        problems = [*problems_in(data, cls)]
        if problems:
            raise ClusterError(*problems)
        try:
            cluster = from_builtins(data, cls)
        except ContractError as error:
            found = error.__cause__.__cause__ if error.__cause__ else None  # what __post_init__ said
            said = found.problems if isinstance(found, ClusterError) else (str(error),)
            raise ClusterError(*said, *_problems_of_types(data)) from error
        if problems := [*_problems_of_types(data)]:
            raise ClusterError(*problems)
        return cluster

    def accelerators(self) -> tuple[Accelerator, ...]:
        """Every device with its rates. Raises ClusterError for a type that neither catalogue nor profiles know."""
        return self._accelerators

    @cached_property
    def _accelerators(self) -> tuple[Accelerator, ...]:
        found: list[Accelerator] = []
        for node in self.nodes:
            counts: dict[str, int] = {}
            for device in node.devices:
                for _ in range(device.count):
                    index = counts.get(device.type, 0)
                    counts[device.type] = index + 1
                    found.append(_resolved(node, device, index, self.profiles))
        return tuple(_beside_others(found))

    def group(self, places: tuple[Place, ...], shares: Shares = ()) -> DeviceGroup | None:
        """The devices at these places, as a plan's stage names them with their shares; None if one is not in the cluster."""
        found = tuple(self._places[place] for place in places if place in self._places)
        if len(found) < len(places):
            return None
        unlike = any((each.usable_bytes, each.profile) != (found[0].usable_bytes, found[0].profile) for each in found)
        return DeviceGroup(found, of_ranks(shares, len(found)) if shares or unlike else ())

    @cached_property
    def _places(self) -> dict[Place, Accelerator]:
        return {each.place: each for each in self._accelerators}

    def slowest_link(self, group: DeviceGroup) -> LinkRate:
        """Between any two devices of a group of at least two: what its collectives wait for."""
        pairs = ((a, b) for a in group.devices for b in group.devices if a != b)
        return min((self.link(*pair) for pair in pairs), key=lambda link: link.gbps)

    def link(self, source: Accelerator, target: Accelerator) -> LinkRate:
        """How activations get from one device to the next: inside a node by its interconnect, else over the network, in this
        direction.
        """
        if source.node == target.node:
            return self.intra_node or _interconnect(source, target)
        rate = self.own_rates.get((source.node, target.node))
        rate = rate or self.rate_between(self._zones[source.node], self._zones[target.node])
        assert rate is not None, "every pair of nodes is joined"
        return rate

    @cached_property
    def own_rates(self) -> dict[tuple[str, str], LinkRate]:
        """From one node to another, of those that a link names: what replaces rules and default link."""
        return {direction: link.rate for link in self.links for direction in link.directions}

    def rate_between(self, one: ZonePlace, other: ZonePlace) -> LinkRate | None:
        """From one zone and region to another, of nodes without a link of their own."""
        return (self.zone_links.rate(one, other) if self.zone_links else None) or self.default_link

    @cached_property
    def zones(self) -> dict[ZonePlace, tuple[str, ...]]:
        """The names of the nodes that lie alike: links that no node has of its own do not tell them apart."""
        found: dict[ZonePlace, list[str]] = {}
        for name, place in self._zones.items():
            found.setdefault(place, []).append(name)
        return {place: tuple(names) for place, names in found.items()}

    @cached_property
    def _zones(self) -> dict[str, ZonePlace]:
        """Of every node; one place where no rule looks at them."""
        return {node.name: node.place if self.zone_links else ("", "") for node in self.nodes}

    @cached_property
    def is_uniform(self) -> bool:
        """Whether every two nodes are joined by the default link."""
        return not self.links and all(
            self.rate_between(a, b) == self.default_link for a in self.zones for b in self.zones
        )

    @cached_property
    def is_directed(self) -> bool:
        """Whether some link is not as fast back as it is there."""
        zones, own = self._zones, self.own_rates
        alone = any(own.get((b, a), self.rate_between(zones[b], zones[a])) != rate for (a, b), rate in own.items())
        return alone or any(self.rate_between(a, b) != self.rate_between(b, a) for a, b in combinations(self.zones, 2))

    def joined_as(self, node: str) -> str | ZonePlace:
        """Equal for nodes that links do not tell apart, other nodes being alike."""
        if node in self._linked:
            return node
        return ("", "") if self.is_uniform else self._zones[node]

    @cached_property
    def _linked(self) -> frozenset[str]:
        return frozenset(name for link in self.links for name in (link.source, link.target))

    def cpu_threads(self) -> tuple[int, ...]:
        """Thread counts (0: not said) of CPU devices without a profile of their own: what is worth measuring."""
        counts = {
            device.threads
            for node in self.nodes
            for device in node.devices
            if device.type == CPU and not device.profile and CPU not in self.profiles
        }
        return tuple(sorted(counts))

    def restricted_to(self, names: Collection[str]) -> Self:
        """Only these nodes, and the links among them."""
        nodes = tuple(node for node in self.nodes if node.name in names)
        links = tuple(link for link in self.links if link.source in names and link.target in names)
        return msgspec.structs.replace(self, nodes=nodes, links=links)

    def without(self, names: Collection[str]) -> Self:
        """The other nodes, and the links among them."""
        return self.restricted_to({node.name for node in self.nodes} - {*names})

    def lacks(self, places: Collection[Place]) -> tuple[Place, ...]:
        """Those of the places where no device is, in their order by name."""
        return tuple(sorted(place for place in places if place not in self._places))

    def with_profile(self, profile: DeviceProfile, node: str | None = None) -> Self:
        """The cluster whose devices of `profile.type` (of one node, or all) have these rates; memory given stays.

        A profile measured with some number of threads is given to devices of that many threads, or that name none.
        """
        fields = msgspec.to_builtins(profile)

        def refine(device: Device) -> Device:
            threads_differ = profile.threads and device.threads and profile.threads != device.threads
            if device.type != profile.type or threads_differ:
                return device
            return msgspec.structs.replace(device, profile=fields | device.profile)

        nodes = tuple(
            msgspec.structs.replace(each, devices=tuple(refine(device) for device in each.devices))
            if node in {None, each.name}
            else each
            for each in self.nodes
        )
        return msgspec.structs.replace(self, nodes=nodes)

    def with_overrides(
        self,
        memory_margin_bytes: int | None = None,
        usable_memory_fraction: float | None = None,
        link_gbps: float | None = None,
    ) -> Self:
        """The cluster with a user's corrections (`spec.planning.overrides`): the margin stays free beside the overhead, the
        fraction and the bandwidth replace the rules and links.
        """

        def correct(device: Device) -> Device:
            fraction = device.usable_fraction if usable_memory_fraction is None else usable_memory_fraction
            overhead = device.overhead_bytes
            if memory_margin_bytes:
                overhead = _overhead_bytes(device, self.profiles) + memory_margin_bytes
            return msgspec.structs.replace(device, usable_fraction=fraction, overhead_bytes=overhead)

        nodes = tuple(msgspec.structs.replace(n, devices=tuple(correct(d) for d in n.devices)) for n in self.nodes)
        if link_gbps is None:
            return msgspec.structs.replace(self, nodes=nodes)
        links = tuple(msgspec.structs.replace(link, gbps=link_gbps) for link in self.links)
        default = msgspec.structs.replace(self.default_link or LinkRate(), gbps=link_gbps)
        by_zone = self.zone_links and self.zone_links.with_gbps(link_gbps)
        return msgspec.structs.replace(self, nodes=nodes, links=links, default_link=default, zone_links=by_zone)

    def _problems_of_links(self) -> Iterator[str]:
        names = {node.name for node in self.nodes}
        said: dict[tuple[str, str], Link] = {}
        for number, link in enumerate(self.links):
            path, pair = f"links[{number}]", frozenset((link.source, link.target))
            missing = sorted(pair - names)
            if missing:
                yield (
                    f"{path}: names the unknown node {', '.join(missing)}; "
                    f"{suggestion(missing[0], sorted(names), what='nodes')}"
                )
            if len(pair) == 1:
                yield f"{path}: joins {link.source} with itself; say how fast devices of one node are joined by intraNode"
            yield from problems_of_rate(link.rate, path)
            others = [said.setdefault(direction, link) for direction in link.directions]
            other = next((each for each in others if each.rate != link.rate), None)
            if other is not None:
                yield (
                    f"{path}: joins {link.source} and {link.target} by {link.gbps:g} Gbps and {link.latency_ms:g} ms, and another "
                    f"link by {other.gbps:g} Gbps and {other.latency_ms:g} ms; a link counts both ways: keep one, the slower where "
                    "they differ, or give each direction a link of its own with oneWay: true"
                )
        for field, rate in (("defaultLink", self.default_link), ("intraNode", self.intra_node)):
            yield from problems_of_rate(rate, field) if rate else ()
        yield from self.zone_links.problems() if self.zone_links else ()
        if self.default_link is None:
            names_of = permutations(self._zones, 2) if self.zone_links else ()
            by_zone = {pair for pair in names_of if self.rate_between(*(self._zones[name] for name in pair))}
            yield from _problems_of_joins([node.name for node in self.nodes], said.keys() | by_zone)


def _resolved(node: Node, device: Device, index: int, profiles: Mapping[str, DeviceProfile]) -> Accelerator:
    """Raises ClusterError."""
    name = _catalogue_name(device, profiles)
    if name is None:
        raise ClusterError(f"node '{node.name}': {unknown_type(device.type, profiles)}")
    profile = _merged(device, profiles.get(name) or catalogue().profile(name))
    rule = CUDA_USABLE_FRACTION if name != CPU else CPU_USABLE_FRACTION
    fraction = rule if device.usable_fraction is None else device.usable_fraction
    overhead = _overhead_bytes(device, profiles)
    usable = max(0, int(profile.memory_bytes * fraction) - overhead)
    return Accelerator(node.name, device.type, index, usable, overhead, profile, name, device.hourly_cost)


def _beside_others(devices: Sequence[Accelerator]) -> Iterator[Accelerator]:
    """Each with the number of those that share its node's memory."""
    sharing = Counter(each.node for each in devices if each.profile.node_bandwidth_bytes_per_second)
    for each in devices:
        count = sharing[each.node] if each.profile.node_bandwidth_bytes_per_second else 1
        profile = msgspec.structs.replace(each.profile, node_devices=count)
        yield msgspec.structs.replace(each, profile=profile) if profile != each.profile else each


def _catalogue_name(device: Device, profiles: Mapping[str, DeviceProfile]) -> str | None:
    return device.type if device.type in profiles else catalogue().name_of(device.type)


def _overhead_bytes(device: Device, profiles: Mapping[str, DeviceProfile]) -> int:
    """What the device says, or the rule of its kind."""
    if device.overhead_bytes is not None:
        return device.overhead_bytes
    return 0 if _catalogue_name(device, profiles) == CPU else CUDA_OVERHEAD_BYTES


def _merged(device: Device, base: DeviceProfile) -> DeviceProfile:
    """The profile with the device's own fields, and its memory and threads where they are given."""
    try:
        profile = from_builtins(msgspec.to_builtins(base) | device.profile, DeviceProfile)
    except ContractError as error:
        raise ClusterError(f"the profile of device type '{device.type}' is {error}") from error
    _check_profile(device.type, profile)
    profile = msgspec.structs.replace(
        profile,
        decode_efficiency=catalogue().completed(profile.decode_efficiency),
        prefill_efficiency=catalogue().completed(profile.prefill_efficiency),
    )
    memory = device.memory_bytes or profile.memory_bytes
    return msgspec.structs.replace(profile, memory_bytes=memory, threads=device.threads or profile.threads)


def _check_profile(type_: str, profile: DeviceProfile) -> None:
    rates = ("memory_bytes", "bandwidth_bytes_per_second", "flops_per_second", "float32_flops_per_second")
    wrong = [f"{name} {getattr(profile, name):g}" for name in rates if not is_positive(getattr(profile, name))]
    shares = {**profile.decode_efficiency, **profile.prefill_efficiency}
    wrong += [f"efficiency of {name} {share:g}" for name, share in shares.items() if not is_positive(share)]
    wrong += [
        f"unpackedPerSecond of {name} {rate:g}"
        for name, rate in profile.unpacked_per_second.items()
        if not is_positive(rate)
    ]
    wrong += [
        f"fewRowsEfficiency of {name} {list(found)} (one for each of {', '.join(map(str, TIMED_ROWS))} rows)"
        for name, found in profile.few_rows_efficiency.items()
        if len(found) != len(TIMED_ROWS) or not all(map(is_positive, found))
    ]
    wrong += [f"packedRows of {name} {rows}" for name, rows in profile.packed_rows.items() if rows < 0]
    not_negative = (
        "layer_overhead_seconds",
        "step_overhead_seconds",
        "sequence_layer_seconds",
        "sequence_step_seconds",
        "sampled_row_seconds",
        "attention_bytes_per_second",
        "attention_flops_per_second",
        "activation_bytes_per_second",
        "chunk_layer_seconds",
        "step_variation",
        "gateway_token_seconds",
        "node_bandwidth_bytes_per_second",
    )
    wrong += [
        f"{name} {getattr(profile, name):g}" for name in not_negative if not 0 <= getattr(profile, name) < math.inf
    ]
    if wrong:
        raise ClusterError(
            f"the profile of device type '{type_}': {', '.join(wrong)}; rates and sizes must be above 0, packedRows 0 or more, "
            "all of them finite"
        )


def _interconnect(source: Accelerator, target: Accelerator) -> LinkRate:
    slower = min(catalogue().peer_bytes_per_second(each.name) for each in (source, target))
    return LinkRate(gbps=slower * 8 / 1e9, latency_ms=0.05 if CPU in {source.name, target.name} else 0.01)


def _problems_of_joins(names: list[str], joined: Collection[tuple[str, str]]) -> Iterator[str]:
    apart = [
        f"{a}-{b}" if (b, a) not in joined else f"{a} to {b}"
        for at, a in enumerate(names)
        for place, b in enumerate(names)
        if a != b and (a, b) not in joined and (place > at or (b, a) in joined)
    ]
    if apart:
        some = ", ".join(apart[:5]) + (f" and {len(apart) - 5} more" if len(apart) > 5 else "")
        yield (
            f"defaultLink: null: the cluster is not connected: no link joins {some}. Add these links, give a "
            "defaultLink for the rest, or plan for the parts one by one"
        )


def _problems_of_types(data: Any) -> Iterator[str]:
    """Of a text whose fields are in order: types that nobody knows, profiles, and memory that is said to be none."""
    nodes = from_builtins(data["nodes"], tuple[Node, ...])
    profiles = from_builtins(data.get("profiles") or {}, dict[str, DeviceProfile])
    for at, node in enumerate(nodes):
        for number, device in enumerate(node.devices):
            path = f"nodes[{at}].devices[{number}]"
            if data["nodes"][at]["devices"][number].get("memoryBytes") == 0:
                yield f"{path}.memoryBytes: 0: give the memory of one device, such as 16Gi, or leave it out for that of its type"
            wrong = [*problems_in(device.profile, DeviceProfile, f"{path}.profile", partial=True)]
            yield from wrong
            try:
                if not wrong:
                    _resolved(node, device, 0, profiles)
            except ClusterError as error:
                yield f"{path}: {error}"
