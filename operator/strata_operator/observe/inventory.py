"""What a deployment may use now: nodes and pods of a Kubernetes cluster -> the planner's Cluster, and why not the rest.

    free = allocatable - requests of others' pods - what other deployments have claimed and not scheduled yet

A deployment's own slots are its own: what they hold is free to it, also on a cordoned node, as long as they run. The
result is the same however the own pods change, so that it changes only when the cluster does. Called by `inventories`,
which offers node by node. Pure; knows no model.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any, Self

import msgspec
import yaml

from strata_operator.api import LLMDeployment
from strata_operator.errors import InvalidInputError
from strata_operator.observe.nodes import node_labels, node_name, why_closed, why_unusable
from strata_operator.render.names import COMPONENT_LABEL, DEVICE_ANNOTATION, INSTANCE_LABEL, SLOT, SLOT_LABEL
from strata_operator.render.requests import CPU, GPU, MEMORY, Amounts, added, amounts, pod_requests, remaining
from strata_operator.render.slots import (
    RANK_IDLE_BYTES,
    SLOT_IDLE_BYTES,
    Claim,
    decode_device,
    idle_bytes,
    is_pod_of,
    pod_label,
)
from strata_planner.contract.devices import DeviceProfile
from strata_planner.contract.values import ContractError, Value, from_builtins, to_json
from strata_planner.question.catalogue import catalogue
from strata_planner.question.cluster import Cluster, Device, Link, LinkRate, Node, ZoneLinks
from strata_planner.question.nodes import problems_of_device, problems_of_rate
from strata_planner.question.reading import load_yaml, problems_in

DEVICE_LABEL = "strata.dev/device"  # on nodes: `cpu` makes the node's free processors and memory a device
COUNT_LABEL = "strata.dev/device.count"  # or so many equal ones, which stages may share
PRODUCT_LABEL = "nvidia.com/gpu.product"
MEMORY_LABEL = "nvidia.com/gpu.memory"  # MiB of one GPU
REPLICAS_LABEL = "nvidia.com/gpu.replicas"
# GPU feature discovery's own, then that which some clusters carry instead.
COMPUTE_LABELS = ("nvidia.com/gpu.compute", "nvidia.com/cuda.compute")  # with .major and .minor
ZONE_LABEL = "topology.kubernetes.io/zone"
REGION_LABEL = "topology.kubernetes.io/region"

MOST_TOLD = 20  # sentences about nodes that are left out
_MIB = 1 << 20
_GIB = 1 << 30
_MOST_LABEL_BYTES = 1 << 50  # no GPU has a petabyte


class LinkTable(Value, frozen=True):
    """Bandwidth between nodes, by topology. `named`: between two zones or regions, before the rules.

    The defaults between zones and regions are those of HexGen's pool (section 5: 5 Gbps and 2 ms within a region,
    0.3 to 1 Gbps and 40 to 150 ms between regions).
    """

    within_zone: LinkRate = LinkRate()
    between_zones: LinkRate = LinkRate(gbps=5.0, latency_ms=2.0)
    between_regions: LinkRate = LinkRate(gbps=0.5, latency_ms=90.0)
    named: tuple[Link, ...] = ()

    @property
    def between(self) -> ZoneLinks:
        """All but what joins nodes of one zone."""
        return ZoneLinks(self.between_zones, self.between_regions, self.named)

    def problems(self) -> Iterator[str]:
        """Rates that no link has, as sentences."""
        rules = (
            ("withinZone", self.within_zone),
            ("betweenZones", self.between_zones),
            ("betweenRegions", self.between_regions),
        )
        named = ((f"named[{number}]", link.rate) for number, link in enumerate(self.named))
        for place, rate in (*rules, *named):
            yield from problems_of_rate(rate, f"links.{place}")


class InventoryOptions(Value, frozen=True):
    """What the administrator knows better: profiles of device types, and the network. The operator reads it from a file."""

    profiles: dict[str, DeviceProfile] = msgspec.field(default_factory=dict)
    links: LinkTable = LinkTable()

    @classmethod
    def from_yaml(cls, text: str, source: str) -> Self:
        """Raises InvalidInputError that names `source`, with every problem."""
        try:
            data = load_yaml(text) or {}
            problems = [*problems_in(data, cls)]
            options = cls() if problems else from_builtins(data, cls)
        except (yaml.YAMLError, ContractError) as error:
            raise InvalidInputError(source, [str(error)]) from error
        problems += [*options.links.problems()]
        if problems:
            raise InvalidInputError(source, problems)
        return options


@dataclass(frozen=True)
class Inventory:
    """The cluster to plan for; `refused` says of every node with devices that is not (wholly) in it why."""

    cluster: Cluster
    refused: tuple[str, ...]

    @property
    def told(self) -> tuple[str, ...]:
        """Of what was refused as much as people read, and status holds."""
        more = len(self.refused) - MOST_TOLD
        return (*self.refused[:MOST_TOLD], f"and {more} nodes more") if more > 0 else self.refused

    @cached_property
    def usable(self) -> frozenset[str]:
        """Names of its nodes."""
        return frozenset(node.name for node in self.cluster.nodes)

    @cached_property
    def devices(self) -> int:
        """How many there are."""
        return sum(device.count for node in self.cluster.nodes for device in node.devices)

    @cached_property
    def digest(self) -> str:
        """Equal for equal clusters: another one leads to a new plan."""
        return hashlib.sha256(to_json(self.cluster)).hexdigest()[:16]


def take_inventory(
    deployment: LLMDeployment,
    nodes: Iterable[Mapping[str, Any]],
    pods: Sequence[Mapping[str, Any]],
    claims: Iterable[Claim] = (),
    options: InventoryOptions | None = None,
) -> Inventory:
    """Inventory for one deployment, from everything at once: the law that `inventories` is held to by tests, and its peer in benchmarks; the
    operator itself never takes it. `claims`: of all committed plans; those of this deployment are left out.
    """
    options = options or InventoryOptions()
    taken = _taken_by_others(deployment, pods, claims)
    own = _own_slot_pods(deployment, pods)
    offers = (
        offer_of(deployment, node, taken.get(node_name(node), {}), tuple(own.get(node_name(node), ())), options)
        for node in sorted(nodes, key=node_name)
    )
    return inventory_of(offers, options)


@dataclass(frozen=True, slots=True)
class Offer:
    """What one node offers a deployment, and sentences about what it does not."""

    node: Node | None = None
    refused: tuple[str, ...] = ()


def offer_of(
    deployment: LLMDeployment,
    node: Mapping[str, Any],
    taken: Amounts,
    own_pods: tuple[Mapping[str, Any], ...],
    options: InventoryOptions,
) -> Offer:
    """`taken`: by others. `own_pods`: slots of the deployment that hold devices there."""
    seen = _SeenNode(deployment, node, taken, own_pods, options)
    if not has_devices(node):
        return NO_OFFER
    name = node_name(node)
    try:
        devices, reasons = seen.devices()
    except InvalidInputError as error:  # one node's odd label or amount is that node's trouble
        devices, reasons = [], list(error.problems)
    labels = node_labels(node)
    found = Node(name, tuple(devices), labels.get(ZONE_LABEL, ""), labels.get(REGION_LABEL, "")) if devices else None
    return Offer(found, tuple(f"node {name}: {reason}" for reason in reasons))


def has_devices(node: Mapping[str, Any]) -> bool:
    """Amounts are not read here: a node whose amounts do not read is named, not passed over."""
    labels, allocatable = node_labels(node), node.get("status", {}).get("allocatable") or {}
    offered = any(name.startswith("nvidia.com/") and str(amount) != "0" for name, amount in allocatable.items())
    return DEVICE_LABEL in labels or PRODUCT_LABEL in labels or offered


def refusal(node: Mapping[str, Any], reason: str) -> Offer:
    """Of a node with devices that may not be used at all."""
    return Offer(None, (f"node {node_name(node)}: {reason}",))


def inventory_of(offers: Iterable[Offer], options: InventoryOptions) -> Inventory:
    """Of nodes in the order of their names."""
    known = list(offers)
    cluster = Cluster(
        nodes=tuple(offer.node for offer in known if offer.node),
        default_link=options.links.within_zone,
        profiles=dict(options.profiles),
        zone_links=options.links.between,
    )
    return Inventory(cluster, tuple(sentence for offer in known for sentence in offer.refused))


NO_OFFER = Offer()


@dataclass(frozen=True, slots=True)
class _SeenNode:
    """One node as a deployment sees it."""

    deployment: LLMDeployment
    node: Mapping[str, Any]
    taken: Amounts
    own_pods: tuple[Mapping[str, Any], ...]
    options: InventoryOptions

    def devices(self) -> tuple[list[Device], list[str]]:
        """Usable devices, and sentences about what is not usable."""
        unusable = why_unusable(self.node, self.deployment)
        if unusable:
            return [], [unusable]
        closed = why_closed(self.node, self.deployment)
        results = [_bounded(each) for each in (self._gpus(only_own=bool(closed)), self._cpu(only_own=bool(closed)))]
        devices = [result for result in results if isinstance(result, Device)]
        reasons = [closed] if closed else [result for result in results if isinstance(result, str)]
        return devices, reasons

    def _gpus(self, *, only_own: bool) -> Device | str | None:
        labels = node_labels(self.node)
        total = int(self._allocatable().get(GPU, 0))
        unsupported = _unsupported_sharing(labels, self._allocatable())
        if unsupported or (total == 0 and PRODUCT_LABEL not in labels):
            return unsupported
        if total == 0:
            return (
                f"its {labels[PRODUCT_LABEL]} GPUs are not allocatable as {GPU}; run NVIDIA's device plugin there "
                "(dynamic resource allocation is not supported yet)"
            )
        missing = [label for label in (PRODUCT_LABEL, MEMORY_LABEL) if label not in labels]
        if missing:
            return f"has {total} GPUs without the label {' and '.join(missing)}; run GPU feature discovery there"
        product = labels[PRODUCT_LABEL]
        if product not in self.options.profiles and catalogue().name_of(product) is None:
            return f"the product {product} is not in the catalogue; give the operator a profile of it"
        free = int(remaining({GPU: Decimal(total)}, [self.taken])[GPU])
        count = min(free, self._own_gpus()) if only_own else free
        if count == 0:
            return f"all {total} {product} are in use by other pods"
        return Device(
            type=product, count=count, memory_bytes=_label_bytes(labels[MEMORY_LABEL]), profile=_compute(labels)
        )

    def _cpu(self, *, only_own: bool) -> Device | str | None:
        wanted = node_labels(self.node).get(DEVICE_LABEL)
        if wanted is None:
            return None
        if wanted != CPU:
            return f"the label {DEVICE_LABEL} is {wanted!r}; the one kind of device it can name is 'cpu'"
        held = next((device for device in self._own_devices() if device.type == CPU and self._has(device)), None)
        if only_own:
            return held
        count = _count(node_labels(self.node))
        return self._like(held, count) if held else self._divided(count)

    def _like(self, held: Device, most: int) -> Device:
        """A running pod's memory and processors cannot change; the node may have more like them."""
        processors, memory = self._free()
        each, first = held.memory_bytes + RANK_IDLE_BYTES, SLOT_IDLE_BYTES - RANK_IDLE_BYTES
        fit = min(int(processors) // held.threads, (memory - first) // each, most)
        return msgspec.structs.replace(held, count=max(held.count, fit))

    def _divided(self, count: int) -> Device | str:
        processors, memory = self._free()
        if processors < count:
            needs = "a slot needs" if count == 1 else f"the label {COUNT_LABEL} makes them {count} devices, each needs"
            return f"{processors} processors are free beside the gateways' share; {needs} a whole one"
        idle = idle_bytes(count)
        if memory - idle < count:
            return (
                f"{memory / _GIB:.1f} GiB of memory are free; the process of a slot alone takes {idle / _GIB:.1f} GiB"
            )
        return Device(type=CPU, count=count, memory_bytes=(memory - idle) // count, threads=int(processors) // count)

    def _free(self) -> tuple[Decimal, int]:
        """Processors, and bytes, of which the gateways must find some wherever they land, all of them on one node where there is no other."""
        gateway = self.deployment.spec.gateway
        reserve = amounts(gateway.resources.requests)
        free = remaining(self._allocatable(), [self.taken, *[reserve] * gateway.replicas])
        return free.get(CPU, Decimal()), int(free.get(MEMORY, 0))

    def _has(self, held: Device) -> bool:
        """A pod's annotation is its writer's word: no deployment may hold more than the node has."""
        whole = self._allocatable()
        sizes = (held.count, held.threads, held.memory_bytes)
        return min(sizes) >= 1 and (
            held.count * held.threads <= whole.get(CPU, 0) and held.count * held.memory_bytes <= whole.get(MEMORY, 0)
        )

    def _allocatable(self) -> Amounts:
        return amounts(self.node.get("status", {}).get("allocatable"))

    def _own_gpus(self) -> int:
        return int(added(*(pod_requests(pod) for pod in self.own_pods)).get(GPU, 0))

    def _own_devices(self) -> list[Device]:
        texts = [(pod["metadata"].get("annotations") or {}).get(DEVICE_ANNOTATION, "") for pod in self.own_pods]
        return [device for text in texts if (device := decode_device(text)) is not None]


def _bounded(device: Device | str | None) -> Device | str | None:
    """What no node has is the node's own slip, and a sentence in place of the device."""
    if not isinstance(device, Device):
        return device
    return "; ".join(problems_of_device(device, device.type)) or device


def _unsupported_sharing(labels: Mapping[str, str], allocatable: Amounts) -> str | None:
    """Ways to hand out parts of a GPU whose rates nobody has planned for yet."""
    product = labels.get(PRODUCT_LABEL, "")
    if product.endswith("-SHARED") or labels.get(REPLICAS_LABEL, "1") not in {"0", "1"}:
        return f"its GPUs ({product}) are time-sliced; turn sharing off there: only whole GPUs are planned"
    slices = sorted(name for name, amount in allocatable.items() if name.startswith("nvidia.com/mig-") and amount > 0)
    if "-MIG-" in product or slices:
        return f"its GPUs are split by MIG ({', '.join(slices) or product}); turn MIG off there: only whole GPUs are planned"
    shared = allocatable.get(f"{GPU}.shared", Decimal())
    return f"its GPUs are shared ({GPU}.shared); turn sharing off there" if shared > 0 else None


def _label_bytes(text: str) -> int:
    """Bytes of one GPU. GPU feature discovery writes MiB as a bare number; hands write units, as in 15360MiB or 15Gi."""
    number = re.fullmatch(r"\s*([0-9]+)\s*(MiB|GiB|Mi|Gi)?\s*", text)
    count = int(number[1]) * (_GIB if (number[2] or "M").startswith("G") else _MIB) if number else 0
    if not 0 < count < _MOST_LABEL_BYTES:
        reason = (
            f"the label {MEMORY_LABEL} is {text!r}; it must be the MiB of one GPU, as in 15360, above 0 and below "
            f"{_MOST_LABEL_BYTES // _MIB}: correct it, or let GPU feature discovery write it"
        )
        raise InvalidInputError(MEMORY_LABEL, [reason])
    return count


def _count(labels: Mapping[str, str]) -> int:
    """Devices that a node's processors make."""
    text = labels.get(COUNT_LABEL, "1")
    if not re.fullmatch("[1-8]", text):
        reason = f"the label {COUNT_LABEL} is {text!r}; it must be a number from 1 to 8: how many equal devices the node's processors make"
        raise InvalidInputError(COUNT_LABEL, [reason])
    return int(text)


def _compute(labels: Mapping[str, str]) -> dict[str, Any]:
    for label in COMPUTE_LABELS:
        major, minor = labels.get(f"{label}.major"), labels.get(f"{label}.minor")
        if major and minor and not re.fullmatch("[0-9]{1,3}[.][0-9]{1,3}", f"{major}.{minor}"):
            raise InvalidInputError(
                label, [f"the labels {label}.major and .minor are {major!r} and {minor!r}; whole numbers are needed"]
            )
        if major and minor:
            return {"computeCapability": f"{major}.{minor}"}
    return {}


def _taken_by_others(
    deployment: LLMDeployment, pods: Iterable[Mapping[str, Any]], claims: Iterable[Claim]
) -> dict[str, Amounts]:
    """Node -> what is not this deployment's."""
    taken: dict[str, list[Amounts]] = {}
    scheduled: dict[tuple[Any, str, str], Amounts] = {}
    for pod in pods:
        name = pod.get("spec", {}).get("nodeName")
        if not name or pod.get("status", {}).get("phase") in {"Succeeded", "Failed"}:
            continue
        slot = (pod["metadata"].get("namespace"), pod_label(pod, INSTANCE_LABEL), pod_label(pod, SLOT_LABEL))
        scheduled[slot] = pod_requests(pod)
        if not is_pod_of(deployment, pod):
            taken.setdefault(name, []).append(pod_requests(pod))
    for claim in claims:
        is_own = (claim.namespace, claim.deployment) == (deployment.namespace, deployment.name)
        if not is_own:
            held = scheduled.get((claim.namespace, claim.deployment, claim.slot), {})
            taken.setdefault(claim.node, []).append(remaining(claim.requests, [held]))
    return {name: added(*parts) for name, parts in taken.items()}


def _own_slot_pods(deployment: LLMDeployment, pods: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Node -> slot pods of this deployment that hold devices there."""
    own: dict[str, list[Mapping[str, Any]]] = {}
    for pod in pods:
        running = pod.get("status", {}).get("phase") not in {"Succeeded", "Failed"}
        if running and is_pod_of(deployment, pod) and pod_label(pod, COMPONENT_LABEL) == SLOT:
            own.setdefault(pod.get("spec", {}).get("nodeName", ""), []).append(pod)
    return own
