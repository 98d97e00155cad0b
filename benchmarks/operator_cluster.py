"""A generated cluster for `benchmarks.operator`: nodes of six types over three zones, other people's pods, deployments with a pool each.

Objects as an API server has them, with what nobody decides by: images, addresses, who wrote which field. There is no kubelet behind them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

Object = dict[str, Any]

GPUS = (  # product, MiB of one, how many on a node
    ("Tesla-T4", 15360, 4),
    ("Tesla-V100-SXM2-32GB", 32768, 4),
    ("NVIDIA-A10", 23028, 2),
    ("NVIDIA-L4", 23034, 4),
    ("NVIDIA-A100-SXM4-40GB", 40960, 2),
)
NAMESPACE, OTHERS = "models", "others"
MODELS = ("llama-3.1-8b", "llama-2-7b", "opt-13b", "llama-2-13b")
_SINCE = "2026-01-01T00:00:00Z"


@dataclass(frozen=True)
class Size:
    """`pods`: of others. Each deployment has a pool of nodes of its own."""

    nodes: int
    pods: int
    deployments: int

    def pool_of(self, node: int) -> int:
        return node * self.deployments // self.nodes

    def __str__(self) -> str:
        return f"{self.nodes}_nodes"


def node_name(number: int) -> str:
    return f"node-{number:04}"


def a_node(number: int, size: Size) -> Object:
    """The sixth type is a machine without GPUs whose processors serve."""
    kind = number % (len(GPUS) + 1)
    amounts = {"cpu": "64", "memory": "263856508Ki", "pods": "110", "ephemeral-storage": "100Gi"}
    labels = {
        "kubernetes.io/hostname": node_name(number),
        "kubernetes.io/os": "linux",
        "topology.kubernetes.io/zone": f"zone-{number % 3}",
        "topology.kubernetes.io/region": "here",
        "pool": f"pool-{size.pool_of(number)}",
    }
    if kind < len(GPUS):
        product, memory, count = GPUS[kind]
        amounts["nvidia.com/gpu"] = str(count)
        labels |= {
            "nvidia.com/gpu.product": product,
            "nvidia.com/gpu.memory": str(memory),
            "nvidia.com/gpu.count": str(count),
        }
    else:
        labels["strata.dev/device"] = "cpu"
    conditions = [
        {"type": name, "status": status, "lastHeartbeatTime": _SINCE, "lastTransitionTime": _SINCE, "reason": "Kubelet"}
        for name, status in (
            ("MemoryPressure", "False"),
            ("DiskPressure", "False"),
            ("PIDPressure", "False"),
            ("Ready", "True"),
        )
    ]
    images = [
        {"names": [f"registry.example/image-{image}:1", f"image-{image}"], "sizeBytes": 1 << 28} for image in range(20)
    ]
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": node_name(number), "labels": labels},
        "spec": {},
        "status": {"capacity": amounts, "allocatable": amounts, "conditions": conditions, "images": images},
    }


def a_pod(number: int, size: Size) -> Object:
    """Somebody's, on some node: it takes processors and memory there, and one in twenty a GPU."""
    node = number * 7919 % size.nodes
    asked: Object = {"cpu": f"{100 + number % 9 * 100}m", "memory": f"{256 + number % 7 * 128}Mi"}
    if number % 20 == 0 and node % (len(GPUS) + 1) < len(GPUS):
        asked["nvidia.com/gpu"] = "1"
    limits = {name: amount for name, amount in asked.items() if name == "nvidia.com/gpu"}
    container = {
        "name": "main",
        "image": "registry.example/service:1",
        "resources": {"requests": asked, "limits": limits},
        "env": [{"name": f"VARIABLE_{each}", "value": "x" * 40} for each in range(10)],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"pod-{number:05}", "namespace": OTHERS, "labels": {"app": f"service-{number % 300}"}},
        "spec": {
            "nodeName": node_name(node),
            "containers": [container],
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
        },
    }


def a_deployment(number: int, models: Path) -> Object:
    """Of mixed sizes, on the nodes of its own pool."""
    return {
        "apiVersion": "strata.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": f"chat-{number:03}", "namespace": NAMESPACE},
        "spec": {
            "model": {"uri": f"file://{models}/{MODELS[number % len(MODELS)]}", "maxModelLen": 2048},
            "workload": {"promptTokens": 512, "outputTokens": 128, "concurrency": (4, 16, 32)[number % 3]},
            "placement": {"nodeSelector": {"pool": f"pool-{number}"}, "maxStages": 4, "maxReplicas": 1},
            "planning": {"timeLimitSeconds": 10},
        },
    }


def stored(thing: Object, version: int) -> Object:
    """As an API server hands it out."""
    managed = [
        {"manager": "kubelet", "operation": "Update", "fieldsV1": {"f:metadata": {"f:labels": {}}}, "time": _SINCE}
    ] * 3
    meta = {
        "uid": f"uid-{version}",
        "resourceVersion": str(version),
        "creationTimestamp": _SINCE,
        "managedFields": managed,
    }
    return {**thing, "metadata": {**thing["metadata"], **meta}}
