"""Clusters as users write them: what resolves to what, and what is refused in which words."""

import math
import re
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from strata_operator.render.requests import parse_quantity
from strata_planner.errors import ClusterError
from strata_planner.question.cluster import CUDA_OVERHEAD_BYTES, Cluster, Device, Link, LinkRate, Node
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


def test_links_may_differ_by_direction() -> None:
    nodes = "nodes: [{name: a, devices: [{type: T4}]}, {name: b, devices: [{type: T4}]}]"
    cluster = Cluster.from_yaml(
        f"{nodes}\nlinks: [{{from: a, to: b, gbps: 1, oneWay: true}}]\ndefaultLink: {{gbps: 5}}"
    )
    a, b = cluster.accelerators()
    assert (cluster.link(a, b).gbps, cluster.link(b, a).gbps) == (1, 5)


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
    assert first.usable_bytes == (15360 << 20) // 2 - CUDA_OVERHEAD_BYTES
    assert cluster.link(first, last).gbps == 3


@pytest.mark.parametrize("name", ["X100", "Quadro 9000", "5090 Ti", "no"])
def test_what_the_error_of_an_unknown_type_says_to_write_describes_it(name: str) -> None:
    nodes = f'nodes: [{{name: a, devices: [{{type: "{name}"}}]}}]'
    with pytest.raises(ClusterError, match=f"device type '{name}' is unknown") as error:
        Cluster.from_yaml(nodes)
    (written,) = re.findall(r"profiles: \{.*\}\}", str(error.value))
    (device,) = Cluster.from_yaml(f"{nodes}\n{written}").accelerators()
    assert (device.type, device.profile.memory_bytes) == (name, 48 << 30)


@pytest.mark.parametrize(("slip", "meant"), [("A100-80", "A100-80GB"), ("RTX-509", "RTX-5090"), ("MI300", "MI300X")])
def test_a_slip_in_a_type_is_told(slip: str, meant: str) -> None:
    with pytest.raises(ClusterError, match=f"did you mean {meant}\\?"):
        Cluster.from_yaml(f"nodes: [{{name: a, devices: [{{type: {slip}}}]}}]")


NODE = "nodes: [{{name: a, devices: [{{type: cpu{0}}}]}}]"
BAD = {
    "unknown type": ("nodes: [{name: a, devices: [{type: X100}]}]", "'X100' is unknown"),
    "unknown field": (
        NODE.format(", memory: 3"),
        r"nodes\[0\].devices\[0\].memory: no such field; did you mean nodes\[0\].devices\[0\].memoryBytes\?",
    ),
    "no count": (NODE.format(", count: 0"), r"devices\[0\].count: 0: 1 to 256 devices"),
    "negative memory": (NODE.format(", memoryBytes: -1"), "cannot be negative"),
    "memory in words": (
        NODE.format(", memoryBytes: 40GB"),
        '40GB": a whole number of bytes, such as 40000000000, or a quantity such as 40Gi',
    ),
    "fraction": (NODE.format(", usableFraction: 1.5"), "usableFraction: 1.5: a share above 0"),
    "malformed": ("nodes: [", "not valid YAML"),
    "empty": ("", "the text: null: an object is expected; its fields are nodes, links"),
    "bad profile": (
        NODE.format(", profile: {bandwidth: 1}"),
        r"profile.bandwidth: no such field; did you mean .*profile.bandwidthBytesPerSecond\?",
    ),
    "node twice": ("nodes: [{name: a, devices: []}, {name: a, devices: []}]", "named twice: a"),
    "link to nowhere": ("nodes: [{name: a, devices: []}]\nlinks: [{from: a, to: c, gbps: 1}]", "unknown node c"),
    "a key twice": ("nodes: []\nnodes: []", "'nodes' is given twice"),
    "a slip of the finger": (NODE.format(", count: 1000000"), r"devices\[0\].count: 1000000: 1 to 256"),
    "more threads than machines have": (NODE.format(", threads: 100000"), r"devices\[0\].threads: 100000"),
    "no memory": (NODE.format(", memoryBytes: 0"), r"devices\[0\].memoryBytes: 0: give the memory .* or leave it out"),
    "no price": (NODE.format(", hourlyCost: .nan"), "hourlyCost: nan"),
    "a rate that YAML takes for text": (NODE.format(", usableFraction: 1e-1"), r"write 1.0e\+9"),
    "a profile without end": (
        NODE.format(", profile: {bandwidthBytesPerSecond: .inf}"),
        "bandwidth_bytes_per_second inf",
    ),
    "a link to itself": ("nodes: [{name: a, devices: []}]\nlinks: [{from: a, to: a, gbps: 1}]", "with itself"),
    "inside a node": ("nodes: []\nintraNode: {gbps: .nan}", "intraNode.gbps: nan"),
    "no bandwidth": ("nodes: []\ndefaultLink: {gbps: 0}", "must be at least 1e-06"),
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
    with pytest.raises(ClusterError, match=r"defaultLink: null: the cluster is not connected: no link joins a-c"):
        Cluster.from_yaml(f"{nodes}\n{links % ''}\ndefaultLink: null")
    whole = Cluster.from_yaml(f"{nodes}\n{links % ', {from: a, to: c, gbps: 1}'}\ndefaultLink: null")
    first, _, last = whole.accelerators()
    assert whole.link(last, first).gbps == 1


@pytest.mark.parametrize(
    ("profile", "wrong"),
    [
        ({"bandwidthBytesPerSecond": -1.0}, "bandwidth_bytes_per_second -1"),
        ({"packedRows": {"int4": -2}}, "packedRows of int4 -2"),
        (
            {"fewRowsEfficiency": {"dense": [0.9, 0.8]}},
            r"fewRowsEfficiency of dense \[0.9, 0.8\] \(one for each of 2, 4, 8, 16 rows\)",
        ),
        (
            {"fewRowsEfficiency": {"any4": [0.9, 0.8, 0.0, 1.0]}},
            r"fewRowsEfficiency of any4 \[0.9, 0.8, 0.0, 1.0\] \(one .* rows\)",
        ),
    ],
)
def test_a_profile_with_impossible_rates_is_refused(profile: dict[str, Any], wrong: str) -> None:
    device = Device("T4", profile=profile)
    with pytest.raises(ClusterError, match=f"'T4': {wrong}; rates and sizes must be above 0, packedRows 0 or more"):
        Cluster((Node("a", (device,)),)).accelerators()


PLACES = {
    "a link's rate": "links[0].gbps",
    "a link's latency": "links[0].latencyMs",
    "the default's rate": "defaultLink.gbps",
    "the default's latency": "defaultLink.latencyMs",
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, -1.0])
def test_links_are_finite(place: str, number: float) -> None:
    rate = {"gbps": 1.0, "latency_ms": 1.0, ("gbps" if "rate" in place else "latency_ms"): number}
    more: dict[str, Any] = {
        "links": (Link(source="a", target="b", **rate),) if place.startswith("a link") else (),
        "default_link": LinkRate() if place.startswith("a link") else LinkRate(**rate),
    }
    with pytest.raises(ClusterError) as refused:
        Cluster((Node("a", ()), Node("b", ())), **more)
    assert refused.value.problems[0].startswith(f"{PLACES[place]}: {number}:")


RATES = st.builds(LinkRate, gbps=st.floats(0.1, 100), latency_ms=st.floats(0, 10))


@given(there=RATES, back=RATES, turned=st.booleans())
def test_a_pair_of_nodes_has_one_rate_whatever_the_order_of_its_links(
    there: LinkRate, back: LinkRate, *, turned: bool
) -> None:
    ends = [("a", "b"), ("b", "a")]
    links = [
        Link(source=source, target=target, gbps=rate.gbps, latency_ms=rate.latency_ms)
        for (source, target), rate in zip(ends, (there, back), strict=True)
    ]
    nodes = (Node("a", (Device("T4"),)), Node("b", (Device("T4"),)))
    told = tuple(reversed(links)) if turned else tuple(links)
    if there != back:
        with pytest.raises(ClusterError, match=r"links\[1\]: joins"):
            Cluster(nodes, links=told)
        return
    cluster = Cluster(nodes, links=told)
    first, second = cluster.accelerators()
    assert there == cluster.link(first, second) == cluster.link(second, first)


@given(
    margin=st.integers(0, 1 << 40),
    kind=st.sampled_from(["T4", "cpu"]),
    overhead=st.none() | st.integers(0, 1 << 34),
    memory=st.integers(1, 1 << 40),
)
def test_a_margin_stays_free_beside_the_overhead(margin: int, kind: str, overhead: int | None, memory: int) -> None:
    cluster = Cluster((Node("a", (Device(kind, memory_bytes=memory, overhead_bytes=overhead, usable_fraction=1.0),)),))
    (before,) = cluster.accelerators()
    (after,) = cluster.with_overrides(memory_margin_bytes=margin).accelerators()
    assert after.usable_bytes == max(0, memory - before.overhead_bytes - margin)


def test_every_problem_of_a_text_is_told_at_once() -> None:
    with pytest.raises(ClusterError) as refused:
        Cluster.from_yaml("nodes: [{name: a, device: [], devices: [{typ: T4, count: x}]}]\nlink: []")
    assert len(refused.value.problems) == 5
    with pytest.raises(ClusterError) as refused:
        Cluster.from_yaml(
            "nodes: [{name: a, devices: [{type: T4, count: 0}, {type: Größe}]}]\ndefaultLink: {gbps: .nan}"
        )
    assert len(refused.value.problems) == 3
    assert "Größe" in str(refused.value)


@given(number=st.integers(1, 999), unit=st.sampled_from(["", "k", "M", "G", "Ki", "Mi", "Gi"]))
def test_quantities_are_those_of_kubernetes(number: int, unit: str) -> None:
    text = f"nodes: [{{name: a, devices: [{{type: cpu, memoryBytes: {number}{unit}}}]}}]"
    (device,) = Cluster.from_yaml(text).accelerators()
    assert device.profile.memory_bytes == parse_quantity(f"{number}{unit}")


KEYS = st.sampled_from(
    ["nodes", "name", "devices", "type", "count", "memoryBytes", "profile", "links", "from", "gbps", "x", 3]
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text("a1e-.Gi", max_size=4)
    | st.sampled_from(["T4", "cpu"])
)
ANYTHING = st.recursive(
    LEAVES, lambda below: st.lists(below, max_size=3) | st.dictionaries(KEYS, below, max_size=5), max_leaves=20
)


@given(data=ANYTHING | st.fixed_dictionaries({"nodes": ANYTHING, "links": ANYTHING, "profiles": ANYTHING}))
def test_any_text_is_a_cluster_or_its_problems(data: Any) -> None:
    try:
        Cluster.from_yaml(yaml.safe_dump(data))
    except ClusterError as error:
        problems = error.problems
    else:
        return
    assert problems
    assert all(problems)


ODD_YAML = {
    "itself": "&a [*a]", "itself below": "nodes: &a [*a]", "a list for a key": "? [a]\n: b", "an object for a key": "{? {a: b} : c}",
    "no digits": "nodes: 0x_", "a control character": "\x00", "no number": "a: !!int x", "nothing for a number": 'a: !!int ""',
    "neither true nor false": "a: !!bool x", "no time": "a: !!timestamp x", "too many digits": f"a: {'9' * 5000}",
    "a number that is too long to be shown": f"0x{'f' * 5000}", "too deep": "[" * 600 + "]" * 600,
}  # fmt: skip


@pytest.mark.parametrize("text", ODD_YAML.values(), ids=ODD_YAML)
def test_odd_yaml_is_refused(text: str) -> None:
    with pytest.raises(ClusterError):
        Cluster.from_yaml(text)


def test_a_cluster_without_some_nodes_lacks_their_devices_and_links() -> None:
    text = "nodes: [{name: a, devices: [{type: L4, count: 2}]}, {name: b, devices: [{type: L4}]}, {name: c, devices: [{type: L4}]}]"
    cluster = Cluster.from_yaml(f"{text}\nlinks: [{{from: a, to: b, gbps: 1}}, {{from: b, to: c, gbps: 2}}]")
    left = cluster.without({"a", "nobody"})
    assert [node.name for node in left.nodes] == ["b", "c"]
    assert [link.gbps for link in left.links] == [2]
    places = [device.place for device in reversed(cluster.accelerators())]
    assert left.lacks(places) == (("a", "L4", 0), ("a", "L4", 1))
    assert cluster.lacks(places) == ()
