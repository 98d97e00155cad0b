"""Simulated and GPU nodes: what GPU feature discovery would say about them, and kwok in place of kubelets for fleets.

A simulated node's pods are said to run and never do: fleets serve inventory, planning, rendering and scheduling, not tokens.
Called by `cluster`.
"""

from dataclasses import dataclass
from pathlib import Path

from tests.cluster.testbed.addresses import SIMULATED_PODS
from tests.cluster.testbed.processes import Daemon
from tests.cluster.testbed.tools import tool_path

_SIMULATED = {"kwok.x-k8s.io/node": "fake"}


@dataclass(frozen=True)
class GpuModel:
    """A GPU as its node's labels name it (NVIDIA/k8s-device-plugin, docs/gpu-feature-discovery, "Generated Labels")."""

    product: str
    memory_mebibytes: int
    compute: str
    family: str


# Memory as `nvidia-smi` reports it for the product, which is what the label carries.
GPU_MODELS = {
    model.product: model
    for model in (
        GpuModel("Tesla-P100-PCIE-12GB", 12288, "6.0", "pascal"),
        GpuModel("Tesla-V100-SXM2-32GB", 32768, "7.0", "volta"),
        GpuModel("Tesla-T4", 15360, "7.5", "turing"),
        GpuModel("NVIDIA-A100-SXM4-40GB", 40960, "8.0", "ampere"),
        GpuModel("NVIDIA-H100-80GB-HBM3", 81559, "9.0", "hopper"),
    )
}


def gpu_labels(model: GpuModel, count: int) -> dict[str, str]:
    """The labels of a node with so many whole GPUs of one model: not shared, not partitioned."""
    major, minor = model.compute.split(".")
    return {
        "nvidia.com/gpu.present": "true",
        "nvidia.com/gpu.product": model.product,
        "nvidia.com/gpu.family": model.family,
        "nvidia.com/gpu.memory": str(model.memory_mebibytes),
        "nvidia.com/gpu.count": str(count),
        "nvidia.com/gpu.replicas": "1",
        "nvidia.com/gpu.compute.major": major,
        "nvidia.com/gpu.compute.minor": minor,
        "nvidia.com/cuda.driver-version.full": "570.133.20",
        "nvidia.com/cuda.runtime-version.full": "12.8",
        "nvidia.com/mig.capable": "false",
    }


def simulated_node(name: str, model: GpuModel, gpus: int, zone: str) -> dict[str, object]:
    """A Node object that kwok keeps Ready."""
    resources = {"cpu": "64", "memory": "512Gi", "pods": "110", "ephemeral-storage": "1Ti", "nvidia.com/gpu": str(gpus)}
    labels = {
        **gpu_labels(model, gpus),
        "kubernetes.io/hostname": name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        "topology.kubernetes.io/zone": zone,
        "type": "kwok",
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels, "annotations": dict(_SIMULATED)},
        "status": {"capacity": resources, "allocatable": resources},
    }


def start_kwok(directory: Path, kubeconfig: Path, node_grace_seconds: int) -> Daemon:
    """Start the program that plays kubelet for every node with its annotation; leases last as long as the grace period."""
    daemon = Daemon("kwok", directory)
    if daemon.pid is None:
        selector = ",".join(f"{key}={value}" for key, value in _SIMULATED.items())
        daemon.start(
            [
                str(tool_path("kwok")),
                f"--kubeconfig={kubeconfig}",
                "--manage-all-nodes=false",
                f"--manage-nodes-with-annotation-selector={selector}",
                f"--cidr={SIMULATED_PODS}",
                f"--node-lease-duration-seconds={node_grace_seconds}",
            ]
        )
    return daemon
