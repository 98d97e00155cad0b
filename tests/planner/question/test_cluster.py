"""Clusters as users write them: what resolves to what, and what is refused in which words."""

from typing import Any

import pytest

from strata_planner.errors import ClusterError
from strata_planner.question.cluster import CUDA_OVERHEAD_BYTES, Cluster, Device, LinkRate, Node
from tests.planner.builders import a_profile

GPUS = """
nodes:
  - name: gpu-a
    devices: [{type: T4, count: 3}]
  - name: gpu-b
    devices: [{type: Tesla-V100-SXM2-32GB}]
links: [{from: gpu-a, to: gpu-b, gbps: 800, latencyMs: 0.02}]
defaultLink: {gbps: 10, latencyMs: 1}
"""


def test_the_smallest_cluster() -> None:
    cluster = Cluster.from_yaml("nodes: [{name: a, devices: [{type: cpu, count: 1, memoryBytes: 400000000}]}]")
    (device,) = cluster.accelerators()
    assert (device.node, device.type, device.index, device.usable_bytes) == ("a", "cpu", 0, 380_000_000)
    assert device.profile.source == "assumed"
    assert cluster == Cluster((Node("a", (Device("cpu", 1, 400_000_000),)),))


def test_devices_are_counted_per_node_and_use_llm_pqs_rule() -> None:
    devices = Cluster.from_yaml(GPUS).accelerators()
    assert [(each.node, each.type, each.index) for each in devices] == [
        ("gpu-a", "T4", 0),
        ("gpu-a", "T4", 1),
        ("gpu-a", "T4", 2),
        ("gpu-b", "Tesla-V100-SXM2-32GB", 0),
    ]
    assert devices[3].name == "V100-32GB"
    assert devices[3].usable_bytes == int(0.95 * (32 << 30)) - CUDA_OVERHEAD_BYTES
    assert devices[3].overhead_bytes == CUDA_OVERHEAD_BYTES


def test_links() -> None:
    cluster = Cluster.from_yaml(GPUS)
    first, second, _, other = cluster.accelerators()
    assert cluster.link(first, other) == cluster.link(other, first) == LinkRate(gbps=800, latency_ms=0.02)
    assert cluster.link(first, second).gbps == 16 * 8  # PCIe: a T4 has no NVLink
    assert Cluster(cluster.nodes).link(first, other) == LinkRate()
    assert Cluster(cluster.nodes, intra_node=LinkRate(gbps=1)).link(first, second) == LinkRate(gbps=1)


def test_a_users_profile_describes_an_unknown_product() -> None:
    text = """
nodes: [{name: a, devices: [{type: X100}]}]
profiles:
  X100: {type: X100, memoryBytes: 1000000000, bandwidthBytesPerSecond: 1.0e+9, flopsPerSecond: 1.0e+12,
         float32FlopsPerSecond: 1.0e+11, decodeEfficiency: {dense: 0.5}, prefillEfficiency: {dense: 0.5},
         layerOverheadSeconds: 0.001, source: my own measurement}
"""
    (device,) = Cluster.from_yaml(text).accelerators()
    assert device.profile.source == "my own measurement"
    assert device.profile.memory_bytes == 1_000_000_000


def test_fields_of_a_profile_can_be_replaced_per_device() -> None:
    cluster = Cluster.from_yaml("nodes: [{name: a, devices: [{type: T4, profile: {layerOverheadSeconds: 0.5}}]}]")
    profile = cluster.accelerators()[0].profile
    assert (profile.layer_overhead_seconds, profile.bandwidth_bytes_per_second) == (0.5, 320e9)


def test_a_measured_profile_keeps_the_memory_that_was_given() -> None:
    cluster = Cluster.from_yaml("nodes: [{name: a, devices: [{type: cpu, memoryBytes: 1000}]}, {name: b, devices: []}]")
    measured = cluster.with_profile(a_profile(bandwidth_bytes_per_second=7e9, memory_bytes=10**10))
    (device,) = measured.accelerators()
    assert device.profile.bandwidth_bytes_per_second == 7e9
    assert device.profile.memory_bytes == 1000
    assert measured.cpu_threads() == ()


def test_a_measured_profile_goes_to_devices_with_its_threads() -> None:
    nodes = tuple(Node(name, (Device("cpu", threads=count),)) for name, count in (("a", 1), ("b", 2)))
    cluster = Cluster(nodes)
    assert cluster.cpu_threads() == (1, 2)
    once = cluster.with_profile(a_profile(threads=2, source="measured"))
    assert [each.profile.source for each in once.accelerators()] == ["assumed", "measured"]
    assert once.cpu_threads() == (1,)


def test_a_profile_can_be_given_to_one_node() -> None:
    nodes = tuple(Node(name, (Device("cpu"),)) for name in "ab")
    sources = [each.profile.source for each in Cluster(nodes).with_profile(a_profile(), node="b").accelerators()]
    assert sources == ["assumed", "measured"]


def test_overrides() -> None:
    cluster = Cluster.from_yaml(GPUS).with_overrides(memory_margin_bytes=0, usable_memory_fraction=0.5, link_gbps=3)
    first, *_, last = cluster.accelerators()
    assert first.usable_bytes == (15360 << 20) // 2
    assert cluster.link(first, last).gbps == 3


NODE = "nodes: [{{name: a, devices: [{{type: cpu{0}}}]}}]"
BAD = {
    "unknown type": ("nodes: [{name: a, devices: [{type: X100}]}]", "'X100' is unknown"),
    "unknown field": (NODE.format(", memory: 3"), "unknown field `memory`"),
    "no count": (NODE.format(", count: 0"), "count 0"),
    "negative memory": (NODE.format(", memoryBytes: -1"), "cannot be negative"),
    "memory in words": (NODE.format(", memoryBytes: 40GB"), "a whole number of bytes, such as 40000000000"),
    "fraction": (NODE.format(", usableFraction: 1.5"), "usableFraction 1.5"),
    "malformed": ("nodes: [", "not valid YAML"),
    "empty": ("", "not a valid Cluster"),
    "bad profile": (NODE.format(", profile: {bandwidth: 1}"), "unknown field `bandwidth`"),
    "node twice": ("nodes: [{name: a, devices: []}, {name: a, devices: []}]", "named twice: a"),
    "link to nowhere": ("nodes: [{name: a, devices: []}]\nlinks: [{from: a, to: c, gbps: 1}]", "unknown node c"),
    "no bandwidth": ("nodes: []\ndefaultLink: {gbps: 0}", "must be above 0"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Cluster.from_yaml(text).accelerators()


def test_an_unknown_type_lists_the_known_ones() -> None:
    with pytest.raises(ClusterError, match=r"node 'a'.*T4.*V100-32GB.*cpu"):
        Cluster.from_yaml("nodes: [{name: a, devices: [{type: X100}]}]").accelerators()


def test_without_a_default_link_every_pair_of_nodes_needs_one() -> None:
    nodes = (
        "nodes: [{name: a, devices: [{type: T4}]}, {name: b, devices: [{type: T4}]}, {name: c, devices: [{type: T4}]}]"
    )
    links = "links: [{from: a, to: b, gbps: 10}, {from: c, to: b, gbps: 10}%s]"
    with pytest.raises(ClusterError, match=r"not connected: no link joins a-c, and defaultLink is null"):
        Cluster.from_yaml(f"{nodes}\n{links % ''}\ndefaultLink: null")
    whole = Cluster.from_yaml(f"{nodes}\n{links % ', {from: a, to: c, gbps: 1}'}\ndefaultLink: null")
    first, _, last = whole.accelerators()
    assert whole.link(last, first).gbps == 1


@pytest.mark.parametrize(
    ("profile", "wrong"),
    [
        ({"bandwidthBytesPerSecond": -1.0}, "bandwidth_bytes_per_second -1"),
        ({"packedRows": {"int4": -2}}, "packedRows of int4 -2"),
    ],
)
def test_a_profile_with_impossible_rates_is_refused(profile: dict[str, Any], wrong: str) -> None:
    device = Device("T4", profile=profile)
    with pytest.raises(ClusterError, match=f"'T4': {wrong}; rates and sizes must be above 0, packedRows 0 or more"):
        Cluster((Node("a", (device,)),)).accelerators()
