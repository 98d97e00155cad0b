"""LLMDeployments over a simulated fleet of GPU nodes: inventory, plan, rendering and scheduling, where nothing really runs.

The namespace enforces the restricted Pod Security Standard: these deployments have no mounts of the test, so every pod that
exists has passed it.
"""

import json
import re
import secrets
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.deployed import Deployed, condition, holds, wait_so
from tests.cluster.operator_release import OperatorRelease
from tests.cluster.testbed.cluster import Cluster, Manifest
from tests.cluster.timings import Steps

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

GPUS_PER_NODE = 2
PRODUCTS = ["Tesla-T4", "Tesla-V100-SXM2-32GB", "Tesla-T4", "Tesla-T4"]
CAPABILITY = {"Tesla-T4": "7.5", "Tesla-V100-SXM2-32GB": "7.0"}
MEBIBYTES = {"Tesla-T4": 15360, "Tesla-V100-SXM2-32GB": 32768}


@pytest.fixture(scope="module")
def fleet(cluster: Cluster, operator: OperatorRelease) -> Iterator[dict[str, str]]:
    """Simulated nodes with two GPUs each: name -> product."""
    names = cluster.add_fleet(PRODUCTS, gpus_per_node=GPUS_PER_NODE)
    yield dict(zip(names, PRODUCTS, strict=True))
    cluster.remove_fleet()


@pytest.fixture(scope="module")
def restricted(cluster: Cluster, fleet: dict[str, str]) -> Iterator[str]:
    """A namespace that enforces the restricted profile."""
    name = f"fleet-{secrets.token_hex(3)}"
    cluster.kubectl("create", "namespace", name)
    cluster.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    yield name
    cluster.kubectl("delete", "namespace", name, "--timeout=60s")


@pytest.fixture(scope="module")
def big(cluster: Cluster, operator: OperatorRelease, restricted: str) -> Deployed:
    """OPT-30b by its shapes alone, planned and rendered."""
    big = Deployed(cluster, operator, gpu_manifest("big", restricted, "opt-30b"))
    steps = Steps("apply over a fleet")
    big.apply()
    big.wait(holds("Planned"), "Planned", 60)
    steps.mark("planned")
    big.wait_pods_running()
    steps.mark("pods scheduled")
    return big


def gpu_manifest(name: str, namespace: str, model: str, **spec: Any) -> Manifest:
    """A model of examples/models on GPU nodes; nothing is mounted, as nothing will run."""
    return {
        "apiVersion": "strata.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "model": {"uri": f"file:///models/{model}", "maxModelLen": 640},
            "workload": {"promptTokens": 512, "outputTokens": 100, "concurrency": 8},
            "placement": {"nodeSelector": {"type": "kwok"}},
            "planning": {"timeLimitSeconds": 5},  # what is found by then will do
            **spec,
        },
    }


def epoch_file(deployed: Deployed, file: str) -> dict[str, Any]:
    """`plan.json` or `cluster.json` (the nodes that it takes) of the newest epoch."""
    epoch = deployed.get()["status"]["plan"]["epoch"]
    record = deployed.cluster.get("configmap", f"{deployed.name}-epoch-{epoch}", f"--namespace={deployed.namespace}")
    return dict(json.loads(record["data"][file]))


def gpus_planned(deployed: Deployed) -> Counter[str]:
    """Node -> how many of its GPUs the plan takes."""
    return Counter(stage["node"] for stage in deployed.get()["status"]["stages"] for _ in stage["devices"])


def test_the_inventory_is_what_the_labels_say(big: Deployed, fleet: dict[str, str]) -> None:
    found = {node["name"]: node for node in epoch_file(big, "cluster.json")["nodes"]}
    status = big.get()["status"]
    assert set(found) == {stage["node"] for stage in status["stages"]}
    for name, node in found.items():
        (device,) = node["devices"]
        assert (device["type"], device["count"]) == (fleet[name], GPUS_PER_NODE)
        assert device["memoryBytes"] == MEBIBYTES[fleet[name]] << 20
        assert device["profile"]["computeCapability"] == CAPABILITY[fleet[name]]
        assert node["zone"] in {"zone-a", "zone-b", "zone-c"}
    assert condition(status, "Inventoried")["message"].startswith(f"{GPUS_PER_NODE * len(fleet)} devices may be used")


def test_slots_are_scheduled_where_they_are_planned(big: Deployed, fleet: dict[str, str]) -> None:
    stages = big.get()["status"]["stages"]
    assert sum(sum(stage["bits"].values()) for stage in stages) == 48  # OPT-30b's layers
    planned = {f"{stage['slot']}-0": stage["node"] for stage in stages}
    pods = big.pods("slot")
    assert {name: pod["spec"]["nodeName"] for name, pod in pods.items()} == planned
    asked = {
        pod["spec"]["nodeName"]: int(pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
        for pod in pods.values()
    }
    assert asked == gpus_planned(big)
    assert all(fleet[stage["node"]] == product for stage in stages for product in stage["devices"])


def test_pods_keep_the_restricted_profile(big: Deployed, cluster: Cluster) -> None:
    pods = [*big.pods("slot").values(), *big.pods("gateway").values()]
    owners = big.objects("statefulsets,deployments")
    assert len(pods) == sum(owner["spec"]["replicas"] for owner in owners)
    templates = [owner["spec"]["template"] for owner in owners]
    for number, template in enumerate(templates):
        pod = {"name": f"dry-{number}", "namespace": big.namespace}
        cluster.dry_run({"apiVersion": "v1", "kind": "Pod", "metadata": pod, "spec": template["spec"]})


def test_what_is_dropped_from_the_object_disappears(big: Deployed) -> None:
    def templates() -> list[dict[str, Any]]:
        return [thing["spec"]["template"] for thing in big.objects("statefulsets,deployments")]

    def noted(template: dict[str, Any]) -> tuple[bool, bool]:
        names = {each["name"] for each in template["spec"]["containers"][0]["env"]}
        return "example.org/note" in template["metadata"].get("annotations", {}), "EXAMPLE" in names

    overlay = {"annotations": {"example.org/note": "1"}, "env": [{"name": "EXAMPLE", "value": "1"}]}
    big.apply(runtime={"pod": overlay})
    wait_so(lambda: all(noted(template) == (True, True) for template in templates()), "annotation and variable", 30)
    big.apply(runtime={})
    wait_so(lambda: all(noted(template) == (False, False) for template in templates()), "neither of them", 30)
    wait_so(lambda: bool(big.pods("slot")) and not any(noted(pod)[0] for pod in big.pods("slot").values()), "slots", 60)
    owners = {
        (field["manager"], field["operation"])
        for thing in big.objects("statefulsets")
        for field in thing["metadata"]["managedFields"]
        if field.get("subresource") is None
    }
    assert owners == {("strata-operator", "Apply")}
    assert not [thing["metadata"]["name"] for thing in big.objects() if thing["metadata"].get("finalizers")]


def test_two_deployments_at_once_never_plan_the_same_device(
    big: Deployed, cluster: Cluster, fleet: dict[str, str]
) -> None:
    big.delete()
    pair = [
        Deployed(cluster, big.operator, gpu_manifest(name, big.namespace, "opt-13b", placement=four_stages()))
        for name in ("one", "two")
    ]
    steps = Steps("two deployments at once")
    cluster.apply(*(each.manifest for each in pair))
    for each in pair:
        each.wait(holds("Planned"), "Planned", 60)
    steps.mark("both planned")
    for each in pair:
        each.wait_pods_running()
    steps.mark("all pods scheduled")
    taken = gpus_planned(pair[0]) + gpus_planned(pair[1])
    assert sum(taken.values()) == GPUS_PER_NODE * len(fleet)
    assert max(taken.values()) == GPUS_PER_NODE

    third = Deployed(cluster, big.operator, gpu_manifest("three", big.namespace, "opt-13b"))
    third.apply()
    status = third.wait(lambda now: now["phase"] == "Failed", "refused", 60)
    assert condition(status, "Planned")["reason"] == "NoDevices"
    assert "all 2 Tesla-T4 are in use by other pods" in condition(status, "Planned")["message"]

    pair[1].delete()
    status = third.wait(holds("Planned"), "planned on what is free now", 60)
    assert max((gpus_planned(third) + gpus_planned(pair[0])).values()) == GPUS_PER_NODE
    third.delete()
    pair[0].delete()


def four_stages() -> dict[str, Any]:
    return {"nodeSelector": {"type": "kwok"}, "minStages": 4, "maxStages": 4}


def test_what_does_not_fit_says_by_how_much(
    cluster: Cluster, operator: OperatorRelease, restricted: str, fleet: dict[str, str]
) -> None:
    small_ones = {"nodeSelector": {"type": "kwok"}, "exclude": [name for name in fleet if fleet[name] != "Tesla-T4"]}
    spec = {"placement": small_ones, "precision": {"allowed": [16]}}
    huge = Deployed(cluster, operator, gpu_manifest("huge", restricted, "opt-66b", **spec))
    huge.apply()
    status = huge.wait(lambda now: now["phase"] == "Failed", "refused", 60)
    assert condition(status, "Planned")["reason"] == "Infeasible"
    print(condition(status, "Planned")["message"])
    assert re.search(r"needs [0-9.]+ GiB .*has [0-9.]+ GiB", condition(status, "Planned")["message"])
    assert "Infeasible" in {event["reason"] for event in huge.events() if event["type"] == "Warning"}
    huge.delete()


def test_a_node_whose_gpus_are_shared_is_named(
    cluster: Cluster, operator: OperatorRelease, restricted: str, fleet: dict[str, str]
) -> None:
    shared = next(iter(fleet))
    cluster.kubectl("label", "node", shared, "--overwrite", "nvidia.com/gpu.replicas=4")
    small = Deployed(cluster, operator, gpu_manifest("small", restricted, "opt-13b"))
    try:
        small.apply()
        status = small.wait(holds("Planned"), "Planned", 60)
        assert f"node {shared}: its GPUs (Tesla-T4) are time-sliced" in condition(status, "Inventoried")["message"]
        assert shared not in {stage["node"] for stage in status["stages"]}
    finally:
        cluster.kubectl("label", "node", shared, "--overwrite", "nvidia.com/gpu.replicas=1")
        small.delete()
