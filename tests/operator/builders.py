"""Fluent builders of the objects that operator tests read: `a_node("a").with_gpus("T4", 2)`."""

import copy
import json
from typing import Any, Self

from strata_operator.api import LLMDeployment, deployment_from_object
from strata_operator.render import names
from strata_operator.render.slots import device_requests, encode_device
from strata_planner.question.cluster import Device


class DeploymentBuilder:
    """An LLMDeployment; `with_spec(workload={...})` merges into its spec."""

    def __init__(self, name: str) -> None:
        self.object: dict[str, Any] = {
            "apiVersion": "strata.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": name, "namespace": "default", "uid": f"uid-of-{name}", "generation": 1},
            "spec": {"model": {"uri": "hf://owner/name"}, "workload": {}, "placement": {}},
        }

    def with_spec(self, **changes: Any) -> Self:
        _merge(self.object["spec"], changes)
        return self

    def with_status(self, **changes: Any) -> Self:
        _merge(self.object.setdefault("status", {}), changes)
        return self

    def in_namespace(self, namespace: str) -> Self:
        self.object["metadata"]["namespace"] = namespace
        return self

    def to_object(self) -> dict[str, Any]:
        return copy.deepcopy(self.object)

    def build(self) -> LLMDeployment:
        return deployment_from_object(json.loads(json.dumps(self.object)))


def a_deployment(name: str = "chat") -> DeploymentBuilder:
    return DeploymentBuilder(name)


def _merge(target: dict[str, Any], changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = copy.deepcopy(value)


class NodeBuilder:
    """A Node: Ready, schedulable, with 16 processors and 64 GiB, no devices."""

    def __init__(self, name: str) -> None:
        self.object: dict[str, Any] = {
            "metadata": {
                "name": name,
                "creationTimestamp": "2026-01-01T00:00:00Z",
                "labels": {"kubernetes.io/hostname": name},
            },
            "spec": {},
            "status": {
                "allocatable": {"cpu": "16", "memory": "64Gi", "pods": "110"},
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        }

    def with_gpus(self, product: str, count: int, memory_mib: int = 16384) -> Self:
        self.object["status"]["allocatable"]["nvidia.com/gpu"] = str(count)
        return self.labelled(
            {
                "nvidia.com/gpu.product": product,
                "nvidia.com/gpu.memory": str(memory_mib),
                "nvidia.com/gpu.count": str(count),
                "nvidia.com/gpu.replicas": "1",
            }
        )

    def as_cpu_device(self, cpu: str = "4", memory: str = "8Gi", count: int = 1) -> Self:
        self.object["status"]["allocatable"] |= {"cpu": cpu, "memory": memory}
        more = {"strata.dev/device.count": str(count)} if count > 1 else {}
        return self.labelled({"strata.dev/device": "cpu", **more})

    def labelled(self, labels: dict[str, str]) -> Self:
        self.object["metadata"]["labels"] |= labels
        return self

    def without_label(self, label: str) -> Self:
        del self.object["metadata"]["labels"][label]
        return self

    def allocatable(self, **amounts: str) -> Self:
        self.object["status"]["allocatable"] |= amounts
        return self

    def in_zone(self, zone: str, region: str = "") -> Self:
        labels = {"topology.kubernetes.io/zone": zone}
        return self.labelled(labels | ({"topology.kubernetes.io/region": region} if region else {}))

    def tainted(self, key: str, effect: str = "NoSchedule", value: str = "") -> Self:
        self.object["spec"].setdefault("taints", []).append({"key": key, "effect": effect, "value": value})
        return self

    def cordoned(self) -> Self:
        self.object["spec"]["unschedulable"] = True
        return self.tainted("node.kubernetes.io/unschedulable")

    def not_ready(self) -> Self:
        self.object["status"]["conditions"] = [{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}]
        return self.tainted("node.kubernetes.io/unreachable", "NoExecute")

    def build(self) -> dict[str, Any]:
        return copy.deepcopy(self.object)


class PodBuilder:
    """A running Pod with one container that asks for nothing."""

    def __init__(self, name: str) -> None:
        self.object: dict[str, Any] = {
            "metadata": {"name": name, "namespace": "default", "labels": {}, "annotations": {}},
            "spec": {"containers": [{"name": "main"}]},
            "status": {"phase": "Running"},
        }

    def on(self, node: str) -> Self:
        self.object["spec"]["nodeName"] = node
        return self

    def requesting(self, **amounts: str) -> Self:
        self.object["spec"]["containers"][0]["resources"] = {"requests": {_resource(k): v for k, v in amounts.items()}}
        return self

    def with_init_container(self, *, sidecar: bool = False, **amounts: str) -> Self:
        container: dict[str, Any] = {"resources": {"requests": {_resource(k): v for k, v in amounts.items()}}}
        if sidecar:
            container["restartPolicy"] = "Always"
        self.object["spec"].setdefault("initContainers", []).append(container)
        return self

    def with_overhead(self, **amounts: str) -> Self:
        self.object["spec"]["overhead"] = {_resource(k): v for k, v in amounts.items()}
        return self

    def labelled(self, labels: dict[str, str]) -> Self:
        self.object["metadata"]["labels"] |= labels
        return self

    def in_phase(self, phase: str) -> Self:
        self.object["status"]["phase"] = phase
        return self

    def of_slot(self, deployment: LLMDeployment, slot: str, device: Device | None = None) -> Self:
        self.object["metadata"]["namespace"] = deployment.namespace
        self.object["metadata"]["labels"] = names.slot_labels(deployment, slot)
        if device is not None:
            self.object["metadata"]["annotations"][names.DEVICE_ANNOTATION] = encode_device(device)
            self.object["spec"]["containers"][0]["resources"] = {"requests": device_requests(device)}
        return self

    def build(self) -> dict[str, Any]:
        return copy.deepcopy(self.object)


def a_node(name: str = "a") -> NodeBuilder:
    return NodeBuilder(name)


def a_pod(name: str = "other") -> PodBuilder:
    return PodBuilder(name)


def _resource(name: str) -> str:
    return {"gpu": "nvidia.com/gpu"}.get(name, name)
