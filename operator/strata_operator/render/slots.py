"""Slots as Kubernetes sees them: which devices of which node each holds, and what its pod must ask for.

Called by render (pods), inventory (what other deployments have claimed) and the operator. A slot's identity is its name, node
and devices: nothing else of a plan may reach its pod. Knows no Kubernetes object.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from strata_operator.api import LLMDeployment
from strata_operator.render.names import COMPONENT_LABEL, labels
from strata_operator.render.requests import CPU, GPU, MEMORY, Amounts, amounts
from strata_planner.contract.plan import DeviceRef, Plan
from strata_planner.contract.values import to_json
from strata_planner.question.cluster import Cluster, Device

# What the process of a slot on a CPU takes before it has a role: Python, torch and one model class take 850 MB on
# x86-64 with torch 2.15. A CPU device is what a node has beside this.
SLOT_IDLE_BYTES = 1 << 30
# Of each device beyond the first, which may be a rank of a stage: a fork that shares what the slot has imported takes 26 MB of its own, beside
# 2 MiB of the segment that ranks add up in. That is a memfd, so of the pod's memory: how large its /dev/shm is does not matter.
RANK_IDLE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot of a plan. `device.count` is how many devices of the type it holds."""

    name: str  # as in the plan; its StatefulSet is called so
    node: str
    device: Device

    @property
    def is_cpu(self) -> bool:
        return self.device.type == CPU


@dataclass(frozen=True, slots=True)
class Claim:
    """What a slot of a committed plan takes from its node from the moment its pod is scheduled there."""

    namespace: str
    deployment: str
    slot: str
    node: str
    requests: Amounts


def slots_of(plan: Plan, cluster: Cluster) -> tuple[Slot, ...]:
    """The slots of a plan made for `cluster`, in the order of its stages. Raises KeyError for another cluster's plan."""
    devices = {(node.name, device.type): device for node in cluster.nodes for device in node.devices}
    held: dict[tuple[str, str], set[DeviceRef]] = {}
    for replica in plan.replicas:
        for stage in replica.stages:
            held.setdefault((stage.slot, stage.node), set()).update(stage.devices)
    return tuple(
        Slot(name, node, msgspec.structs.replace(devices[node, next(iter(refs)).type], count=len(refs)))
        for (name, node), refs in held.items()
    )


def device_requests(device: Device) -> dict[str, str]:
    """Kubernetes resources that a pod needs to hold these devices; requests and limits alike where both exist."""
    if device.type == CPU:
        memory = device.count * device.memory_bytes + idle_bytes(device.count)
        return {CPU: str(device.count * max(1, device.threads)), MEMORY: str(memory)}
    return {GPU: str(device.count)}


def idle_bytes(count: int) -> int:
    """What a slot on so many CPU devices takes before it has a role."""
    return SLOT_IDLE_BYTES + (count - 1) * RANK_IDLE_BYTES


def claims_of(deployment: LLMDeployment, plan: Plan, cluster: Cluster) -> tuple[Claim, ...]:
    """What a committed plan claims, for the inventories of other deployments."""
    return tuple(
        Claim(
            namespace=deployment.namespace,
            deployment=deployment.name,
            slot=slot.name,
            node=slot.node,
            requests=amounts(device_requests(slot.device)),
        )
        for slot in slots_of(plan, cluster)
    )


def encode_device(device: Device) -> str:
    """For the annotation that a slot's pod carries."""
    return to_json(device).decode()


def decode_device(text: str) -> Device | None:
    """The device in a pod's annotation; None where it is absent or not ours to read."""
    try:
        return msgspec.json.decode(text, type=Device)
    except msgspec.MsgspecError:
        return None


def asks_the_same(one: str, other: str) -> bool:
    """Whether two annotations stand for devices that a pod must ask the same for."""
    devices = [decode_device(text) for text in (one, other)]
    return len({None if each is None else encode_asked(each) for each in devices}) == 1


def encode_asked(device: Device) -> str:
    """What a pod must ask for to hold these devices, and be told of them: a digest of a template rests on it."""
    return json.dumps([device.type, device.threads, device_requests(device)], sort_keys=True)


def is_pod_of(deployment: LLMDeployment, pod: Mapping[str, Any]) -> bool:
    """Slots and gateway of this deployment, by every label that its selectors choose by: others call theirs by its name, too."""
    component = pod_label(pod, COMPONENT_LABEL)
    if not component or pod["metadata"].get("namespace") != deployment.namespace:
        return False  # most of a cluster's pods
    return all(pod_label(pod, name) == value for name, value in labels(deployment, component).items())


def pod_label(pod: Mapping[str, Any], name: str) -> str:
    return str((pod.get("metadata", {}).get("labels") or {}).get(name, ""))
