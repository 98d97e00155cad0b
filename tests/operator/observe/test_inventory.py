"""What a deployment may use: every rule of the inventory by name, and laws over any cluster."""

from decimal import Decimal
from itertools import permutations
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_operator.errors import InvalidInputError
from strata_operator.observe.inventory import Inventory, InventoryOptions, LinkTable, take_inventory
from strata_operator.render.requests import amounts, pod_requests
from strata_operator.render.slots import Claim, device_requests, idle_bytes
from strata_planner.contract.values import to_json
from strata_planner.question.cluster import Cluster, Device, Link, LinkRate
from tests.operator.builders import NodeBuilder, PodBuilder, a_deployment, a_node, a_pod
from tests.planner.question.test_cluster import ODD_YAML

GIB = 1 << 30
CHAT = a_deployment("chat").build()


def inventory(*things: NodeBuilder | PodBuilder | Claim, spec: dict[str, Any] | None = None) -> Inventory:
    nodes = [thing.build() for thing in things if isinstance(thing, NodeBuilder)]
    pods = [thing.build() for thing in things if isinstance(thing, PodBuilder)]
    claims = [thing for thing in things if isinstance(thing, Claim)]
    return take_inventory(a_deployment("chat").with_spec(**(spec or {})).build(), nodes, pods, claims)


def counts(found: Inventory) -> dict[tuple[str, str], int]:
    return {(node.name, device.type): device.count for node in found.cluster.nodes for device in node.devices}


def t4(name: str = "a", count: int = 2) -> NodeBuilder:
    return a_node(name).with_gpus("Tesla-T4", count, 15360)


def own_slot(node: str, gpus: int = 1) -> PodBuilder:
    return a_pod("chat-x-0").of_slot(CHAT, "x").on(node).requesting(gpu=str(gpus))


def claim(deployment: str, slot: str, node: str, **requests: str) -> Claim:
    renamed = {{"gpu": "nvidia.com/gpu"}.get(name, name): value for name, value in requests.items()}
    return Claim("default", deployment, slot, node, amounts(renamed))


STRANGERS = {  # a chart's pod, where its release is called as the deployment
    "app.kubernetes.io/name": "redis",
    "app.kubernetes.io/instance": "chat",
    "app.kubernetes.io/component": "gateway",
    "app.kubernetes.io/managed-by": "Helm",
}

# name -> (things, what is found by node)
FREE_GPUS = {
    "all of an empty node": ([t4()], 2),
    "less those of a running pod": ([t4(), a_pod().on("a").requesting(gpu="1")], 1),
    "a limit is a request": (
        [t4(), a_pod().on("a").requesting(gpu="1").with_init_container(gpu="2")],
        None,  # the init container once held both
    ),
    "a finished pod holds nothing": ([t4(), a_pod().on("a").requesting(gpu="2").in_phase("Succeeded")], 2),
    "a pod without a node holds nothing": ([t4(), a_pod().requesting(gpu="2")], 2),
    "a pod of another node": ([t4(), a_pod().on("b").requesting(gpu="2")], 2),
    "own slots are one's own": ([t4(), own_slot("a")], 2),
    "another chart's release of the same name": ([t4(), a_pod().labelled(STRANGERS).on("a").requesting(gpu="1")], 1),
    "another's claim": ([t4(), claim("other", "s", "a", gpu="1")], 1),
    "one's own claim": ([t4(), claim("chat", "s", "a", gpu="1")], 2),
    "a claim whose pod is scheduled counts once": (
        [
            t4(),
            claim("other", "s", "a", gpu="1"),
            a_pod().of_slot(a_deployment("other").build(), "s").on("a").requesting(gpu="1"),
        ],
        1,
    ),
    "a claim whose pod is pending": (
        [
            t4(),
            claim("other", "s", "a", gpu="1"),
            a_pod().of_slot(a_deployment("other").build(), "s").requesting(gpu="1").in_phase("Pending"),
        ],
        1,
    ),
    "a pod of the same name in another namespace": (
        [
            t4(),
            a_pod().of_slot(a_deployment("chat").in_namespace("b").build(), "x").on("a").requesting(gpu="1"),
        ],
        1,
    ),
    "more taken than there is": ([t4(), a_pod().on("a").requesting(gpu="3")], None),
    "cordoned, with an own slot": ([t4().cordoned(), own_slot("a")], 1),
    "cordoned, with another's pod": ([t4().cordoned(), a_pod().on("a").requesting(gpu="1")], None),
    "tainted after an own slot came": ([t4().tainted("team"), own_slot("a")], 1),
    "not ready, with an own slot": ([t4().not_ready(), own_slot("a")], None),
}


@pytest.mark.parametrize("name", FREE_GPUS)
def test_free_gpus(name: str) -> None:
    things, expected = FREE_GPUS[name]
    assert counts(inventory(*things)) == ({} if expected is None else {("a", "Tesla-T4"): expected})


# name -> (node, spec, the sentence)
REFUSALS = {
    "time slicing by name": (
        t4().labelled({"nvidia.com/gpu.product": "Tesla-T4-SHARED"}),
        {},
        "node a: its GPUs (Tesla-T4-SHARED) are time-sliced; turn sharing off there",
    ),
    "time slicing by replicas": (
        t4().labelled({"nvidia.com/gpu.replicas": "4"}),
        {},
        "node a: its GPUs (Tesla-T4) are time",
    ),
    "MIG slices": (
        a_node().allocatable(**{"nvidia.com/mig-1g.5gb": "7"}),
        {},
        "node a: its GPUs are split by MIG (nvidia.com/mig-1g.5gb)",
    ),
    "MIG single strategy": (
        a_node().with_gpus("NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", 7, 4864),
        {},
        "node a: its GPUs are split by MIG (NVIDIA-A100-SXM4-40GB-MIG-1g.5gb)",
    ),
    "dynamic resource allocation only": (
        a_node().labelled({"nvidia.com/gpu.product": "Tesla-T4"}),
        {},
        "node a: its Tesla-T4 GPUs are not allocatable as nvidia.com/gpu; run NVIDIA's device plugin",
    ),
    "no labels": (
        a_node().allocatable(**{"nvidia.com/gpu": "2"}),
        {},
        "node a: has 2 GPUs without the label nvidia.com/gpu.product and nvidia.com/gpu.memory; run GPU feature",
    ),
    "no memory label": (
        t4().without_label("nvidia.com/gpu.memory"),
        {},
        "node a: has 2 GPUs without the label nvidia.com/gpu.memory; run GPU feature discovery",
    ),
    "unknown product": (
        a_node().with_gpus("Quadro-9000", 1),
        {},
        "node a: the product Quadro-9000 is not in the catalogue; give the operator a profile of it",
    ),
    "not ready": (t4().not_ready(), {}, "node a: is not Ready (NodeStatusUnknown)"),
    "another system": (
        t4().labelled({"kubernetes.io/os": "windows"}),
        {},
        "node a: has kubernetes.io/os=windows; slots run on linux alone",
    ),
    "cordoned": (t4().cordoned(), {}, "node a: is cordoned; uncordon it to use it"),
    "tainted": (
        t4().tainted("nvidia.com/gpu", value="true"),
        {},
        "node a: has the taint nvidia.com/gpu=true:NoSchedule; add it to spec.placement.tolerations",
    ),
    "evicting": (t4().tainted("down", "NoExecute"), {}, "node a: has the taint down:NoExecute"),
    "not selected": (
        t4(),
        {"placement": {"nodeSelector": {"pool": "llm"}}},
        "node a: lacks pool=llm, which spec.placement.nodeSelector asks for",
    ),
    "excluded": (t4(), {"placement": {"exclude": ["a"]}}, "node a: is excluded by spec.placement.exclude"),
    "another kind of device": (
        a_node().labelled({"strata.dev/device": "tpu"}),
        {},
        "node a: the label strata.dev/device is 'tpu'; the one kind of device it can name is 'cpu'",
    ),
    "no whole processor": (
        a_node().as_cpu_device(cpu="1200m"),
        {},
        "node a: 0.700 processors are free beside the gateways' share; a slot needs a whole one",
    ),
    "no memory": (
        a_node().as_cpu_device(memory="1536Mi"),
        {},
        "node a: 0.5 GiB of memory are free; the process of a slot alone takes 1.0 GiB",
    ),
    "more devices than processors": (
        a_node().as_cpu_device(cpu="4", count=4),
        {},
        "node a: 3.500 processors are free beside the gateways' share; the label strata.dev/device.count makes them 4 devices",
    ),
    "a count that is none": (
        a_node().as_cpu_device().labelled({"strata.dev/device.count": "two"}),
        {},
        "node a: the label strata.dev/device.count is 'two'; it must be a number from 1 to 8",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused(name: str) -> None:
    node, spec, sentence = REFUSALS[name]
    found = inventory(node, spec=spec)
    assert found.cluster.nodes == ()
    assert len(found.refused) == 1
    assert found.refused[0].startswith(sentence)


TOLERATIONS = {
    "by key": ({"key": "nvidia.com/gpu", "operator": "Exists"}, True),
    "by value": ({"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"}, True),
    "everything": ({"operator": "Exists"}, True),
    "another value": ({"key": "nvidia.com/gpu", "value": "false"}, False),
    "another effect": ({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoExecute"}, False),
    "another key": ({"key": "amd.com/gpu", "operator": "Exists"}, False),
}


@pytest.mark.parametrize("name", TOLERATIONS)
def test_a_taint_is_tolerated(name: str) -> None:
    toleration, tolerated = TOLERATIONS[name]
    node = t4().tainted("nvidia.com/gpu", value="true")
    assert bool(inventory(node, spec={"placement": {"tolerations": [toleration]}}).cluster.nodes) == tolerated


def test_nodes_without_devices_are_not_mentioned() -> None:
    assert inventory(a_node("control-plane").tainted("x")) == Inventory(inventory().cluster, ())


@pytest.mark.parametrize("label", ["nvidia.com/gpu.compute", "nvidia.com/cuda.compute"])
def test_a_gpu_has_the_memory_and_capability_of_its_labels(label: str) -> None:
    labels = {f"{label}.major": "7", f"{label}.minor": "5"}
    (accelerator, *_) = inventory(t4().labelled(labels)).cluster.accelerators()
    assert (accelerator.profile.memory_bytes, accelerator.profile.compute_capability) == (15360 << 20, "7.5")


def test_a_product_with_a_profile_is_planned() -> None:
    profile = inventory(t4()).cluster.accelerators()[0].profile
    options = InventoryOptions(profiles={"Quadro-9000": profile})
    found = take_inventory(CHAT, [a_node().with_gpus("Quadro-9000", 1, 20480).build()], [], options=options)
    assert found.cluster.accelerators()[0].profile.memory_bytes == 20480 << 20


def test_a_cpu_device_is_what_is_free_beside_process_and_gateways() -> None:
    (node,) = inventory(
        a_node().as_cpu_device("4", "8Gi"), a_pod().on("a").requesting(cpu="1500m", memory="1Gi")
    ).cluster.nodes
    # 4 - 1.5 - two gateways' 0.25 each, in whole processors; 8 - 1 - the gateways' 0.5 each - the process' 1
    assert node.devices == (Device(type="cpu", memory_bytes=5 * GIB, threads=2),)


def test_a_running_cpu_slot_keeps_what_it_holds() -> None:
    node, held = a_node().as_cpu_device("4", "8Gi"), Device(type="cpu", memory_bytes=3 * GIB, threads=2)
    slot = a_pod().of_slot(CHAT, "x", held).on("a")
    for seen in (node, node.cordoned()):
        assert inventory(seen, slot).cluster.nodes[0].devices == (held,)


def test_a_nodes_processors_may_be_several_devices() -> None:
    (node,) = inventory(a_node().as_cpu_device("9", "8Gi", 2)).cluster.nodes
    # 9 - two gateways' 0.25 each, halved; 8 - the gateways' 0.5 each - what a slot with two devices takes before it has a role
    memory = (7 * GIB - idle_bytes(2)) // 2
    assert node.devices == (Device(type="cpu", count=2, memory_bytes=memory, threads=4),)


@pytest.mark.parametrize("planned", [1, 2, 3])
def test_a_running_slot_leaves_the_other_devices_of_its_node_to_be_planned(planned: int) -> None:
    """However few of them it holds, and however much less is free than they were made of."""
    node = a_node().as_cpu_device("12", "16Gi", 3)
    (device,) = inventory(node).cluster.nodes[0].devices
    slot = a_pod().of_slot(CHAT, "x", msgspec.structs.replace(device, count=planned)).on("a")
    assert inventory(node, slot).cluster.nodes[0].devices == (device,)
    assert inventory(node.cordoned(), slot).cluster.nodes[0].devices == (
        msgspec.structs.replace(device, count=planned),
    )
    other = a_pod().on("a").requesting(cpu=str(device.threads))
    left = msgspec.structs.replace(device, count=max(planned, 2))
    node = a_node().as_cpu_device("12", "16Gi", 3)
    assert inventory(node, slot, other).cluster.nodes[0].devices == (left,)


@pytest.mark.parametrize("count", [1, 2])
def test_the_inventory_is_the_same_once_the_slots_run(count: int) -> None:
    nodes = [a_node("a").as_cpu_device("4", "8Gi", count), t4("b")]
    before = inventory(*nodes)
    device = before.cluster.nodes[0].devices[0]
    gateway = a_pod("gateway").of_slot(CHAT, "g").on("a").requesting(cpu="250m", memory="512Mi")
    gateway.object["metadata"]["labels"]["app.kubernetes.io/component"] = "gateway"
    after = inventory(*nodes, a_pod().of_slot(CHAT, "x", device).on("a"), own_slot("b"), gateway)
    assert (after, after.digest) == (before, before.digest)
    assert inventory(t4("b")).digest != before.digest


def test_of_many_nodes_that_are_left_out_some_are_told() -> None:
    found = inventory(*(t4(f"n{number:03}").cordoned() for number in range(50)))
    assert len(found.refused) == 50
    assert found.told[:2] == found.refused[:2]
    assert found.told[-1] == "and 30 nodes more"
    assert inventory(t4("a").cordoned()).told == inventory(t4("a").cordoned()).refused


def rates_in(cluster: Cluster) -> dict[tuple[str, str], LinkRate]:
    return {
        (a.node, b.node): cluster.link(a, b) for a, b in permutations(cluster.accelerators(), 2) if a.node != b.node
    }


def test_what_is_told_of_links_does_not_grow_with_pairs() -> None:
    """An object of Kubernetes holds a megabyte."""
    nodes = [t4(f"n{number}").in_zone(str(number % 3), "n") for number in range(60)]
    few, many = inventory(*nodes[:6]).cluster, inventory(*nodes).cluster
    sizes = [len(to_json(msgspec.structs.replace(cluster, nodes=()))) for cluster in (few, many)]
    assert sizes[0] == sizes[1]


def test_links_follow_zones_and_regions() -> None:
    nodes = [t4("a").in_zone("1", "n"), t4("b").in_zone("1", "n"), t4("c").in_zone("2", "n"), t4("d").in_zone("3", "s")]
    rates = rates_in(inventory(*nodes).cluster)
    assert {pair: rate.gbps for pair, rate in rates.items() if pair[0] < pair[1]} == {
        ("a", "b"): 10.0, ("a", "c"): 5.0, ("b", "c"): 5.0, ("a", "d"): 0.5, ("b", "d"): 0.5, ("c", "d"): 0.5,
    }  # fmt: skip
    named = InventoryOptions(links=LinkTable(named=(Link("1", "2", 100.0),)))
    found = take_inventory(CHAT, [node.build() for node in nodes], [], options=named).cluster
    assert {rate.gbps for pair, rate in rates_in(found).items() if "c" in pair} == {100.0, 0.5}


def test_named_links_may_differ_by_direction() -> None:
    nodes = [t4("a").in_zone("1", "n").build(), t4("c").in_zone("2", "n").build()]
    options = InventoryOptions.from_yaml("links: {named: [{from: '2', to: '1', gbps: 1, oneWay: true}]}", "f")
    cluster = take_inventory(CHAT, nodes, [], options=options).cluster
    assert rates_in(cluster) == {("a", "c"): LinkRate(5.0, 2.0), ("c", "a"): LinkRate(1.0, 0.1)}


def test_options_come_from_a_file() -> None:
    options = InventoryOptions.from_yaml("links: {betweenZones: {gbps: 25}, named: [{from: a, to: b, gbps: 1}]}", "f")
    assert options.links.between_zones.gbps == 25
    with pytest.raises(InvalidInputError, match=r"^f: not accepted"):
        InventoryOptions.from_yaml("link: {}", "f")
    with pytest.raises(InvalidInputError, match=r"links.betweenZones.gbps: nan(.|\n)*links.named\[0\].gbps: inf"):
        InventoryOptions.from_yaml("links: {betweenZones: {gbps: .nan}, named: [{from: a, to: b, gbps: .inf}]}", "f")


@pytest.mark.parametrize("text", ODD_YAML.values(), ids=ODD_YAML)
def test_odd_options_are_refused(text: str) -> None:
    with pytest.raises(InvalidInputError):
        InventoryOptions.from_yaml(text, "f")


node_names = st.sampled_from(["a", "b", "c"])
others = st.builds(
    lambda node, gpus, cpu, memory: a_pod().on(node).requesting(gpu=str(gpus), cpu=str(cpu), memory=f"{memory}Gi"),
    node_names,
    st.integers(0, 5),
    st.integers(0, 20),
    st.integers(0, 70),
)
claimed = st.builds(
    lambda slot, node, gpus: claim("other", f"s{slot}", node, gpu=str(gpus)),
    st.integers(0, 9),
    node_names,
    st.integers(0, 3),
)
gpu_totals = st.dictionaries(node_names, st.integers(1, 8), min_size=1)


@given(
    totals=gpu_totals,
    taken=st.lists(others, max_size=6),
    claims=st.lists(claimed, max_size=6, unique_by=lambda c: c.slot),
)
def test_what_is_free_and_what_is_taken_never_exceed_what_is_there(
    totals: dict[str, int], taken: list[PodBuilder], claims: list[Claim]
) -> None:
    found = counts(inventory(*(t4(name, count) for name, count in totals.items()), *taken, *claims))
    for name, total in totals.items():
        used = sum(
            int(pod_requests(pod.build())["nvidia.com/gpu"]) for pod in taken if pod.object["spec"]["nodeName"] == name
        )
        used += sum(int(each.requests["nvidia.com/gpu"]) for each in claims if each.node == name)
        assert found.get((name, "Tesla-T4"), 0) == max(0, total - used)


@given(claims=st.lists(claimed, max_size=6, unique_by=lambda c: c.slot), scheduled=st.sets(st.integers(0, 9)))
def test_a_claim_counts_once_whether_its_pod_is_scheduled_or_not(claims: list[Claim], scheduled: set[int]) -> None:
    other, nodes = a_deployment("other").build(), [t4(name, 8) for name in "abc"]
    pods = [
        a_pod().of_slot(other, each.slot).on(each.node).requesting(gpu=str(each.requests["nvidia.com/gpu"]))
        for each in claims
        if int(each.slot[-1]) in scheduled
    ]
    assert counts(inventory(*nodes, *claims, *pods)) == counts(inventory(*nodes, *claims))


@given(taken=st.lists(others, max_size=4), cpu=st.integers(1, 16), memory=st.integers(1, 32), count=st.integers(1, 4))
def test_cpu_devices_fit_beside_everything_else(taken: list[PodBuilder], cpu: int, memory: int, count: int) -> None:
    """By what the pod of a slot that holds all of them would ask for."""
    found = inventory(a_node("a").as_cpu_device(str(cpu), f"{memory}Gi", count), *taken)
    used = [pod_requests(pod.build()) for pod in taken if pod.object["spec"]["nodeName"] == "a"]
    for device in (device for node in found.cluster.nodes for device in node.devices):
        assert device.count == count
        assert device.threads >= 1
        asked = amounts(device_requests(device))
        assert asked["cpu"] + sum(each["cpu"] for each in used) <= cpu
        assert asked["memory"] + sum(each["memory"] for each in used) <= memory * GIB


def test_a_slot_that_is_to_hold_more_than_its_pod_does_has_claimed_the_rest() -> None:
    """Its plan counts on two devices before its pod gets its new template."""
    node = a_node().with_gpus("Tesla-T4", 2).build()
    other = a_deployment("other").build()
    pod = a_pod("other-a-0").on("a").of_slot(other, "other-a", Device("Tesla-T4", count=1)).build()
    claim = Claim("default", "other", "other-a", "a", {"nvidia.com/gpu": Decimal(2)})
    inventory = take_inventory(a_deployment().build(), [node], [pod], [claim])
    assert not inventory.cluster.nodes
