"""The devices to plan for: nodes, what they hold, and the links between them.

Made by the operator's inventory or read from a file (`strata plan --cluster`), read by the search and the costs.
`Cluster.accelerators` resolves every device to its rates and usable memory. Knows no model and no load.

The smallest file:

    nodes: [{name: a, devices: [{type: cpu, count: 1, memoryBytes: 400000000}]}]
"""

from functools import cached_property
from typing import Any, Self

import msgspec
import yaml

from strata_planner.contract.devices import DeviceProfile
from strata_planner.contract.values import ContractError, Value, from_builtins
from strata_planner.errors import ClusterError
from strata_planner.question.catalogue import CPU, catalogue

# LLM-PQ's own figures (its published planner): what of a CUDA device a model can use.
CUDA_USABLE_FRACTION = 0.95
CUDA_OVERHEAD_BYTES = 1930 << 20
# A CPU device's memory is what the model may take beside the idle process, unless `overheadBytes` says otherwise.
CPU_USABLE_FRACTION = 0.95


class Device(Value, frozen=True):
    """`count` equal devices of one node. `memory_bytes` (per device), the profile's where 0.

    `profile`: fields of DeviceProfile (camelCase) that replace the catalogue's. `overhead_bytes`: what the framework
    takes of each device; `usable_fraction`: the share of the memory that plans may fill. None: the rule of its kind.
    `hourly_cost`: of one device, in any one currency; only layouts that minimise costs need it.
    """

    type: str
    count: int = 1
    memory_bytes: int = 0
    threads: int = 0
    overhead_bytes: int | None = None
    usable_fraction: float | None = None
    hourly_cost: float | None = None
    profile: dict[str, Any] = msgspec.field(default_factory=dict)


class Node(Value, frozen=True):
    name: str
    devices: tuple[Device, ...]
    zone: str = ""
    region: str = ""


class LinkRate(Value, frozen=True):
    """A link: 10^9 bits per second, and the milliseconds before the first byte arrives."""

    gbps: float = 10.0
    latency_ms: float = 0.1

    @property
    def bytes_per_second(self) -> float:
        return self.gbps * 1e9 / 8

    @property
    def latency_seconds(self) -> float:
        return self.latency_ms / 1e3


class Link(Value, frozen=True):
    """What replaces the default link between two nodes, both ways."""

    source: str = msgspec.field(name="from")
    target: str = msgspec.field(name="to")
    gbps: float
    latency_ms: float = 0.1

    @property
    def rate(self) -> LinkRate:
        return LinkRate(gbps=self.gbps, latency_ms=self.latency_ms)


class Accelerator(Value, frozen=True):
    """One device, resolved. `index` counts the devices of this type on its node; `usable_bytes` is free of overhead."""

    node: str
    type: str
    index: int
    usable_bytes: int
    overhead_bytes: int
    profile: DeviceProfile
    name: str = ""  # catalogue name, or the type where a user's profile names it
    hourly_cost: float | None = None

    @property
    def place(self) -> tuple[str, str, int]:
        """What no other device has: node, type, index."""
        return self.node, self.type, self.index


class DeviceGroup(Value, frozen=True):
    """The devices of one stage: equal ones of one node, which split its layers by tensor parallelism. Often just one."""

    devices: tuple[Accelerator, ...]

    @property
    def degree(self) -> int:
        return len(self.devices)

    @property
    def leader(self) -> Accelerator:
        """The device that sends and receives hidden states (HexGen, section 3.3)."""
        return self.devices[0]

    @property
    def node(self) -> str:
        return self.leader.node

    @property
    def profile(self) -> DeviceProfile:
        return self.leader.profile

    @property
    def places(self) -> tuple[tuple[str, str, int], ...]:
        return tuple(device.place for device in self.devices)

    @property
    def usable_bytes(self) -> int:
        """Of each device."""
        return min(device.usable_bytes for device in self.devices)

    def __str__(self) -> str:
        count = f"{self.degree} x " if self.degree > 1 else ""
        return f"{count}{self.leader.type} on {self.node}"


class Cluster(Value, frozen=True, dict=True):
    """Nodes, the links between them, and profiles of device types that the catalogue lacks or has wrong.

    `profiles`: device type -> DeviceProfile. `intra_node`: replaces the interconnect of the type between devices of a node.
    `default_link` None: only nodes with a link of their own are joined.
    """

    nodes: tuple[Node, ...]
    links: tuple[Link, ...] = ()
    default_link: LinkRate | None = LinkRate()
    intra_node: LinkRate | None = None
    profiles: dict[str, DeviceProfile] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [node.name for node in self.nodes]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ClusterError(f"nodes named twice: {', '.join(repeated)}; every node needs a name of its own")
        for node in self.nodes:
            for device in node.devices:
                _check_device(node, device)
        for link in self.links:
            _check_link(link, names)
        if self.default_link is None:
            _check_joined(names, self._own_rates)
        else:
            _check_rate("defaultLink", self.default_link)

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        """Raises ClusterError for malformed YAML and unknown or malformed fields."""
        try:
            return from_builtins(yaml.safe_load(text), cls)
        except yaml.YAMLError as error:
            raise ClusterError(f"the cluster is not valid YAML: {error}") from error
        except ContractError as error:
            hint = "; memory is a whole number of bytes, such as 40000000000" if "emoryBytes" in str(error) else ""
            raise ClusterError(f"the cluster is {error}{hint}") from error

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
                    found.append(self._accelerator(node, device, index))
        return tuple(found)

    def group(self, places: tuple[tuple[str, str, int], ...]) -> DeviceGroup | None:
        """The devices at these places, as a plan's stage names them; None if one is not in the cluster."""
        found = tuple(self._places[place] for place in places if place in self._places)
        return DeviceGroup(found) if len(found) == len(places) else None

    @cached_property
    def _places(self) -> dict[tuple[str, str, int], Accelerator]:
        return {each.place: each for each in self._accelerators}

    def slowest_link(self, group: DeviceGroup) -> LinkRate:
        """Between any two devices of a group of at least two: what its collectives wait for."""
        pairs = ((a, b) for a in group.devices for b in group.devices if a != b)
        return min((self.link(*pair) for pair in pairs), key=lambda link: link.gbps)

    def link(self, source: Accelerator, target: Accelerator) -> LinkRate:
        """How activations get from one device to the next: inside a node by its interconnect, else over the network."""
        if source.node == target.node:
            return self.intra_node or _interconnect(source, target)
        rate = self._own_rates.get(frozenset((source.node, target.node)), self.default_link)
        assert rate is not None, "every pair of nodes is joined"
        return rate

    @cached_property
    def _own_rates(self) -> dict[frozenset[str], LinkRate]:
        """Of each pair of nodes that a link names; the first that names a pair counts."""
        return {frozenset((link.source, link.target)): link.rate for link in reversed(self.links)}

    def cpu_threads(self) -> tuple[int, ...]:
        """Thread counts (0: not said) of CPU devices without a profile of their own: what is worth measuring."""
        counts = {
            device.threads
            for node in self.nodes
            for device in node.devices
            if device.type == CPU and not device.profile and CPU not in self.profiles
        }
        return tuple(sorted(counts))

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
        """The cluster with a user's corrections (`spec.planning.overrides`) in place of the rules and links."""

        def correct(device: Device) -> Device:
            fraction = device.usable_fraction if usable_memory_fraction is None else usable_memory_fraction
            overhead = device.overhead_bytes if memory_margin_bytes is None else memory_margin_bytes
            return msgspec.structs.replace(device, usable_fraction=fraction, overhead_bytes=overhead)

        nodes = tuple(msgspec.structs.replace(n, devices=tuple(correct(d) for d in n.devices)) for n in self.nodes)
        if link_gbps is None:
            return msgspec.structs.replace(self, nodes=nodes)
        links = tuple(msgspec.structs.replace(link, gbps=link_gbps) for link in self.links)
        default = msgspec.structs.replace(self.default_link or LinkRate(), gbps=link_gbps)
        return msgspec.structs.replace(self, nodes=nodes, links=links, default_link=default)

    def _accelerator(self, node: Node, device: Device, index: int) -> Accelerator:
        name = device.type if device.type in self.profiles else catalogue().name_of(device.type)
        if name is None:
            known = ", ".join(sorted({*catalogue().devices, CPU, *self.profiles}))
            raise ClusterError(
                f"node '{node.name}': device type '{device.type}' is unknown. Use one of {known}, a GPU feature "
                "discovery product label of these, or describe it under 'profiles' in the cluster"
            )
        profile = _merged(device, self.profiles.get(name) or catalogue().profile(name))
        cuda = name != CPU
        fraction = (CUDA_USABLE_FRACTION if cuda else CPU_USABLE_FRACTION, device.usable_fraction)
        overhead = device.overhead_bytes if device.overhead_bytes is not None else CUDA_OVERHEAD_BYTES * cuda
        usable = int(profile.memory_bytes * (fraction[0] if fraction[1] is None else fraction[1])) - overhead
        usable, cost = max(0, usable), device.hourly_cost
        return Accelerator(node.name, device.type, index, usable, overhead, profile, name, cost)


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
    positive = ("memory_bytes", "bandwidth_bytes_per_second", "flops_per_second", "float32_flops_per_second")
    wrong = [f"{name} {getattr(profile, name):g}" for name in positive if getattr(profile, name) <= 0]
    shares = {**profile.decode_efficiency, **profile.prefill_efficiency}
    wrong += [f"efficiency of {name} {share:g}" for name, share in shares.items() if share <= 0]
    wrong += [f"packedRows of {name} {rows}" for name, rows in profile.packed_rows.items() if rows < 0]
    if wrong:
        raise ClusterError(
            f"the profile of device type '{type_}': {', '.join(wrong)}; rates and sizes must be above 0, packedRows 0 or more"
        )


def _interconnect(source: Accelerator, target: Accelerator) -> LinkRate:
    slower = min(catalogue().peer_bytes_per_second(each.name) for each in (source, target))
    return LinkRate(gbps=slower * 8 / 1e9, latency_ms=0.05 if CPU in {source.name, target.name} else 0.01)


def _check_device(node: Node, device: Device) -> None:
    where = f"node '{node.name}' device '{device.type}'"
    if device.count < 1:
        raise ClusterError(f"{where}: count {device.count}; at least 1, or leave the device out")
    if device.memory_bytes < 0 or device.threads < 0 or (device.overhead_bytes or 0) < 0:
        raise ClusterError(f"{where}: memoryBytes, threads and overheadBytes cannot be negative")
    if device.usable_fraction is not None and not 0 < device.usable_fraction <= 1:
        raise ClusterError(f"{where}: usableFraction {device.usable_fraction} must lie above 0 and be at most 1")


def _check_link(link: Link, names: list[str]) -> None:
    missing = sorted({link.source, link.target} - set(names))
    if missing:
        raise ClusterError(f"a link names the unknown node {', '.join(missing)}; nodes are {', '.join(names)}")
    _check_rate(f"the link {link.source}-{link.target}", link.rate)


def _check_joined(names: list[str], rates: dict[frozenset[str], LinkRate]) -> None:
    apart = [f"{a}-{b}" for at, a in enumerate(names) for b in names[at + 1 :] if frozenset((a, b)) not in rates]
    if apart:
        some = ", ".join(apart[:5]) + (f" and {len(apart) - 5} more" if len(apart) > 5 else "")
        raise ClusterError(
            f"the cluster is not connected: no link joins {some}, and defaultLink is null. Add these links, give a "
            "defaultLink for the rest, or plan for the parts one by one"
        )


def _check_rate(where: str, rate: LinkRate) -> None:
    if rate.gbps <= 0 or rate.latency_ms < 0:
        raise ClusterError(f"{where}: gbps {rate.gbps} must be above 0 and latencyMs {rate.latency_ms} not negative")
