"""The testbed's nodes: unlike in what they offer, GPU nodes by label, and fleets of simulated ones."""

import kubernetes
import pytest

from tests.cluster.testbed.cluster import Cluster
from tests.cluster.testbed.images import IMAGE
from tests.cluster.testbed.nodes import DEFAULT_NODES
from tests.cluster.testbed.processes import wait_until

pytestmark = pytest.mark.cluster


def test_nodes_are_ready_and_offer_what_they_were_asked_to(cluster: Cluster) -> None:
    kubernetes.config.load_kube_config(str(cluster.kubeconfig))
    with kubernetes.client.ApiClient() as client:
        nodes = {node.metadata.name: node for node in kubernetes.client.CoreV1Api(client).list_node().items}

    offered = {
        name: (
            float(kubernetes.utils.parse_quantity(node.status.allocatable["cpu"])),
            int(kubernetes.utils.parse_quantity(node.status.allocatable["memory"])),
        )
        for name, node in nodes.items()
    }
    assert {spec.name: (spec.cpus, spec.memory_bytes) for spec in DEFAULT_NODES}.items() <= offered.items()
    assert len(set(offered.values())) == len(offered)
    assert all(cluster.is_ready(spec.name) for spec in DEFAULT_NODES)


def test_a_node_can_stand_for_one_with_gpus(cluster: Cluster, namespace: str) -> None:
    cluster.make_gpu_node("node-b", "Tesla-T4", gpus=2)
    try:
        cluster.apply(gpu_pod(namespace, "Tesla-T4"))
        cluster.kubectl("wait", "--for=condition=Ready", "pod/gpu", f"--namespace={namespace}", "--timeout=60s")
        pod = cluster.get("pod", "gpu", f"--namespace={namespace}")
        assert pod["spec"]["nodeName"] == "node-b"
    finally:
        cluster.kubectl("delete", "pod", "gpu", f"--namespace={namespace}", "--force")
        cluster.remove_gpus("node-b")
    node = cluster.get("node", "node-b")
    assert not [name for name in (*node["metadata"]["labels"], *node["status"]["capacity"]) if "nvidia" in name]


def test_a_fleet_of_a_hundred_takes_pods_by_gpu_model(cluster: Cluster, namespace: str) -> None:
    products = ["Tesla-T4", "Tesla-V100-SXM2-32GB", "Tesla-P100-PCIE-12GB", "NVIDIA-A100-SXM4-40GB"] * 25
    names = cluster.add_fleet(products, gpus_per_node=4)
    try:
        cluster.apply(gpu_pod(namespace, "Tesla-V100-SXM2-32GB"))
        wait_until(lambda: running(cluster, namespace), "running simulated pod", 60)
        pod = cluster.get("pod", "gpu", f"--namespace={namespace}")
        assert products[names.index(pod["spec"]["nodeName"])] == "Tesla-V100-SXM2-32GB"
    finally:
        cluster.kubectl("delete", "pod", "gpu", f"--namespace={namespace}", "--force")
        cluster.remove_fleet()
    assert set(cluster.nodes()) == {node["metadata"]["name"] for node in cluster.get("nodes")["items"]}


def running(cluster: Cluster, namespace: str) -> bool:
    return bool(cluster.get("pod", "gpu", f"--namespace={namespace}")["status"]["phase"] == "Running")


def gpu_pod(namespace: str, product: str) -> dict[str, object]:
    """A pod that asks for two GPUs of a model."""
    two = {"nvidia.com/gpu": "2"}
    container = {"name": "idle", "image": IMAGE, "resources": {"requests": two, "limits": two}}
    selector = {"nvidia.com/gpu.product": product}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "gpu", "namespace": namespace},
        "spec": {"containers": [container], "nodeSelector": selector, "terminationGracePeriodSeconds": 1},
    }
