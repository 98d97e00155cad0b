"""What a cluster is described by: nodes, the devices on them, links between them; and what can be wrong with each.

Part of `cluster`, which says how they belong together. A problem is a sentence with path, value, rule and fix.
"""

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import msgspec

from strata_planner.contract.values import Value

# More than any node has: a number above is a slip, and would only be found by running out of memory.
MOST_DEVICES, MOST_THREADS, MOST_BYTES = 256, 4096, 1 << 50


Place = tuple[str, str]  # zone and region, empty where they are not said


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

    @property
    def place(self) -> Place:
        return self.zone, self.region


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
    """What replaces the default link between two nodes: both ways, or from `source` to `target` alone where it is `one_way`."""

    source: str = msgspec.field(name="from")
    target: str = msgspec.field(name="to")
    gbps: float
    latency_ms: float = 0.1
    one_way: bool = False

    @property
    def rate(self) -> LinkRate:
        return LinkRate(gbps=self.gbps, latency_ms=self.latency_ms)

    @property
    def directions(self) -> tuple[tuple[str, str], ...]:
        """From where to where it carries."""
        there = (self.source, self.target)
        return (there,) if self.one_way else (there, (self.target, self.source))


class ZoneLinks(Value, frozen=True, dict=True):
    """Links by where nodes lie, so that a cluster need not name every pair: `named` between two zones or regions, before the rules.

    None, or a place that is not said: the rules leave it to the cluster's default link.
    """

    between_zones: LinkRate | None = None
    between_regions: LinkRate | None = None
    named: tuple[Link, ...] = ()

    def rate(self, one: Place, other: Place) -> LinkRate | None:
        """From the one place to the other."""
        for pair in zip(one, other, strict=True):
            if all(pair) and pair in self._named:
                return self._named[pair]
        zones, regions = ((a != b and bool(a and b)) for a, b in zip(one, other, strict=True))
        return self.between_regions if regions else self.between_zones if zones else None

    def with_gbps(self, gbps: float) -> "ZoneLinks":
        """Every rate replaced, latencies as they are."""
        zones, regions = (
            rate and msgspec.structs.replace(rate, gbps=gbps) for rate in (self.between_zones, self.between_regions)
        )
        return ZoneLinks(zones, regions, tuple(msgspec.structs.replace(link, gbps=gbps) for link in self.named))

    @cached_property
    def _named(self) -> dict[tuple[str, str], LinkRate]:
        return {direction: link.rate for link in self.named for direction in link.directions}

    def problems(self) -> Iterator[str]:
        """Rates that no link has, as sentences."""
        for field, rate in (("betweenZones", self.between_zones), ("betweenRegions", self.between_regions)):
            yield from problems_of_rate(rate, f"zoneLinks.{field}") if rate else ()
        for number, link in enumerate(self.named):
            yield from problems_of_rate(link.rate, f"zoneLinks.named[{number}]")


def problems_of_nodes(nodes: tuple[Node, ...]) -> Iterator[str]:
    names = [node.name for node in nodes]
    repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if repeated:
        yield f"nodes named twice: {', '.join(repeated)}; every node needs a name of its own"
    for at, node in enumerate(nodes):
        for number, device in enumerate(node.devices):
            yield from problems_of_device(device, f"nodes[{at}].devices[{number}]")


def problems_of_device(device: Device, path: str) -> Iterator[str]:
    if not 1 <= device.count <= MOST_DEVICES:
        yield f"{path}.count: {device.count}: 1 to {MOST_DEVICES} devices of a type are on one node; leave out what is not there"
    for field, value, most in (
        ("memoryBytes", device.memory_bytes, MOST_BYTES),
        ("threads", device.threads, MOST_THREADS),
        ("overheadBytes", device.overhead_bytes or 0, 2 * MOST_BYTES),  # a margin beside it
    ):
        if not 0 <= value <= most:
            yield f"{path}.{field}: {value}: cannot be negative or above {most}; give what one device has"
    if device.usable_fraction is not None and not 0 < device.usable_fraction <= 1:
        yield f"{path}.usableFraction: {device.usable_fraction}: a share above 0 and at most 1 is needed, such as 0.9"
    if device.hourly_cost is not None and not 0 <= device.hourly_cost < math.inf:
        yield f"{path}.hourlyCost: {device.hourly_cost}: a price of 0 or more is needed"


LEAST_GBPS, MOST_LATENCY_MS = 1e-6, 1e6  # beyond these a link is a mistake, and sums with others lose their digits


def problems_of_rate(rate: LinkRate, path: str) -> Iterator[str]:
    """What is wrong with a link's rate that a file gives at `path`."""
    if not LEAST_GBPS <= rate.gbps < math.inf:
        yield f"{path}.gbps: {rate.gbps}: must be at least {LEAST_GBPS:g} and finite; leave out links that are not there"
    if not 0 <= rate.latency_ms <= MOST_LATENCY_MS:
        yield f"{path}.latencyMs: {rate.latency_ms}: must be from 0 to {MOST_LATENCY_MS:g}; give milliseconds"


def is_positive(number: float) -> bool:
    """Neither nothing nor infinite; NaN is not positive."""
    return 0 < number < math.inf
