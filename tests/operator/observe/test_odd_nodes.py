"""Whatever a node says of itself, it is used or refused by name, and the others go on."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_operator.observe.inventory import take_inventory
from strata_planner.question.cluster import Device
from tests.laws import share
from tests.operator.builders import a_deployment, a_node, a_pod


@pytest.mark.parametrize(("label", "mib"), [("15360", 15360), ("15360MiB", 15360), ("15Gi", 15360), ("24 GiB", 24576)])
def test_a_gpus_memory_is_read_with_and_without_units(label: str, mib: int) -> None:
    node = a_node().with_gpus("Tesla-T4", 1).labelled({"nvidia.com/gpu.memory": label}).build()
    (found,) = take_inventory(a_deployment().build(), [node], []).cluster.nodes
    assert found.devices[0].memory_bytes == mib << 20


@pytest.mark.parametrize("label", ["", "many", "-1", "0", "15360XB", "1e9", "9" * 60])
def test_a_gpus_memory_that_does_not_read_refuses_its_node_by_name(label: str) -> None:
    odd = a_node("odd").with_gpus("Tesla-T4", 1).labelled({"nvidia.com/gpu.memory": label}).build()
    good = a_node("good").with_gpus("Tesla-T4", 1).build()
    inventory = take_inventory(a_deployment().build(), [odd, good], [])
    assert [node.name for node in inventory.cluster.nodes] == ["good"]
    (refusal,) = inventory.refused
    assert refusal.startswith("node odd: the label nvidia.com/gpu.memory is ")


def test_a_nodes_amount_that_does_not_read_refuses_that_node_alone() -> None:
    odd = a_node("odd").with_gpus("Tesla-T4", 1).build()
    odd["status"]["allocatable"]["nvidia.com/gpu"] = "two"
    inventory = take_inventory(a_deployment().build(), [odd, a_node("good").with_gpus("Tesla-T4", 1).build()], [])
    assert [node.name for node in inventory.cluster.nodes] == ["good"]
    assert inventory.refused == ("node odd: 'two' is not a Kubernetes quantity; write it as in 500m, 4Gi or 2",)


LABELS = (
    *("nvidia.com/gpu.product", "nvidia.com/gpu.memory", "nvidia.com/gpu.replicas", "strata.dev/device"),
    *("nvidia.com/gpu.compute.major", "nvidia.com/gpu.compute.minor", "topology.kubernetes.io/zone"),
    "strata.dev/device.count",
)
label_values = st.sampled_from(["cpu", "Tesla-T4", "7", "15360MiB", "-1", "0", ""]) | st.text(max_size=63)
quantities = st.sampled_from(["1", "0", "-3", "1e99", "1Gi", "two", "500m", 4]) | st.text(max_size=9)


@settings(max_examples=share(120), deadline=None)
@given(
    st.dictionaries(st.sampled_from(LABELS), label_values),
    st.dictionaries(st.sampled_from(["cpu", "memory", "nvidia.com/gpu", "nvidia.com/mig-1g.5gb"]), quantities),
)
def test_whatever_a_node_says_it_is_used_or_refused_by_name(labels: dict[str, str], offered: dict[str, Any]) -> None:
    odd = a_node("odd").labelled(labels).allocatable(**offered).build()
    good = a_node("good").with_gpus("Tesla-T4", 1).build()
    inventory = take_inventory(a_deployment().build(), [odd, good], [])
    assert "good" in {node.name for node in inventory.cluster.nodes}
    assert all(sentence.startswith("node odd: ") for sentence in inventory.refused)
    assert inventory.digest


def test_a_pods_word_does_not_make_a_node_larger_than_it_is() -> None:
    deployment = a_deployment().build()
    boast = Device("cpu", memory_bytes=1 << 50, threads=1000)
    node = a_node("a").as_cpu_device(cpu="4", memory="8Gi").build()
    pod = a_pod("x").on("a").of_slot(deployment, "chat-a-cpu", boast).build()
    (found,) = take_inventory(deployment, [node], [pod]).cluster.nodes
    assert found.devices[0].threads <= 4
    assert found.devices[0].memory_bytes <= 8 << 30


def test_a_node_that_offers_more_than_any_has_is_named_and_the_others_go_on() -> None:
    nodes = [a_node("a").with_gpus("Tesla-T4", 1_000_000).build(), a_node("b").with_gpus("Tesla-T4", 1).build()]
    found = take_inventory(a_deployment().build(), nodes, [])
    assert [node.name for node in found.cluster.nodes] == ["b"]
    (reason,) = found.refused
    assert reason.startswith("node a: Tesla-T4.count: 1000000: 1 to 256 devices")
