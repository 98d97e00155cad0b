"""Devices of one node that share its memory: what each is left with when several read at once."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_planner.contract.formats import FORMAT_NAMES
from strata_planner.costs.latency import Latencies
from strata_planner.costs.shards import sharded
from strata_planner.costs.source import Phase, Rates
from strata_planner.question.cluster import Cluster, Device, DeviceGroup, Node
from strata_planner.question.workload import Workload
from strata_planner.search.exact.orders import fleet_of
from strata_planner.search.layouts.search import laid, layout_plan
from strata_planner.simulate import Batch
from strata_planner.simulate.pricing import StagePricer
from tests.planner.builders import a_profile, a_request, a_wide_model

MODEL = a_wide_model()
LAYER = MODEL.layers[0]
OWN = 0.5e9  # bytes a second that a device of `a_profile` reads alone
WHOLE = st.floats(0.1e9, 8e9)


def rates(devices: int, whole: float) -> Rates:
    """Of one of so many devices of a node whose memory gives so much."""
    fields = {"node_bandwidth_bytes_per_second": whole, "attention_bytes_per_second": 0.4e9}
    return Rates(a_profile(**fields, node_devices=devices), "bfloat16", 16, "cpu")


def a_group(devices: int, whole: float) -> tuple[Cluster, DeviceGroup]:
    profile = msgspec.to_builtins(a_profile(node_bandwidth_bytes_per_second=whole))
    cluster = Cluster((Node("a", (Device("cpu", count=devices, memory_bytes=8 << 30, profile=profile),)),))
    return cluster, DeviceGroup(cluster.accelerators())


@given(
    whole=WHOLE,
    readers=st.integers(1, 16),
    more=st.integers(1, 16),
    name=st.sampled_from(FORMAT_NAMES),
    phase=st.builds(Phase, st.integers(1, 64), st.sampled_from([1, 7, 300]), st.floats(0, 4096)),
)
def test_more_readers_never_make_a_device_faster(
    whole: float, readers: int, more: int, name: str, phase: Phase
) -> None:
    few, many = (
        Latencies().layer(LAYER, name, rates(each, whole), phase).seconds for each in (readers, readers + more)
    )
    assert few <= many
    heads = [Latencies().head(MODEL, rates(each, whole), phase.sequences).seconds for each in (readers, readers + more)]
    assert heads[0] <= heads[1]


@given(phase=st.builds(Phase, st.integers(1, 64), st.sampled_from([1, 300]), st.floats(0, 4096)), whole=WHOLE)
def test_one_alone_and_devices_of_unknown_memory_are_priced_by_their_own_rates(phase: Phase, whole: float) -> None:
    """To the digit: neither one device of a node, which its memory is fast enough for, nor a GPU has to do with any others."""
    own = Latencies().layer(LAYER, "dense", rates(1, 0.0), phase)
    assert Latencies().layer(LAYER, "dense", rates(1, OWN + whole), phase) == own
    assert Latencies().layer(LAYER, "dense", rates(8, 0.0), phase) == own


@given(readers=st.integers(2, 32), whole=WHOLE)
def test_all_that_read_at_once_read_what_the_memory_gives(readers: int, whole: float) -> None:
    """Never more than it gives, nor than each could alone; and one of the two in full."""
    together = readers * rates(readers, whole).reading("dense")
    assert together == pytest.approx(min(whole, readers * OWN))


def test_what_arithmetic_binds_takes_as_long_in_company() -> None:
    prompts = Phase(8, 512, 256)
    alone, beside = (Latencies().layer(LAYER, "dense", rates(each, 0.9e9), prompts).seconds for each in (1, 4))
    assert beside == pytest.approx(alone)


@pytest.mark.parametrize(("whole", "gain"), [(0.0, 2.0), (4 * OWN, 2.0), (1.5 * OWN, 1.5), (OWN, 1.0), (OWN / 2, 1.0)])
def test_ranks_of_a_group_decode_as_fast_as_the_memory_that_they_share(whole: float, gain: float) -> None:
    """A simulated step of one sequence, beside one of a lone device."""

    def seconds(devices: int) -> float:
        cluster, group = a_group(devices, whole)
        pricer = StagePricer(MODEL, cluster, "bfloat16", Latencies())
        stage = pricer.stage({(LAYER, "dense"): 4}, group, kv_bits=16, head=False)
        return stage(Batch(1, 1, 1, 32))

    assert seconds(1) / seconds(2) == pytest.approx(gain, rel=0.02)


@pytest.mark.parametrize("prompt", [8, 256])
def test_plans_of_a_group_are_told_no_faster_where_memory_is_shared(prompt: int) -> None:
    load = Workload(prompt_tokens=prompt, output_tokens=32, concurrency=4)

    def told(whole: float) -> float:
        cluster, _ = a_group(2, whole)
        request = a_request(
            cluster,
            model=MODEL,
            workload=load,
            max_model_len=512,
            allowed_bits=(16,),
            solver="layout",
            tensor_parallel=(1, 2),
        )
        return layout_plan(laid(request, ((2,),), degrees=((2,),))).prediction.tokens_per_second

    plenty, some, little = told(0.0), told(1.2 * OWN), told(0.8 * OWN)
    assert little < some < plenty


def test_shards_of_a_group_read_less_each_and_all_of_it_together() -> None:
    """Of a memory that one device saturates, two take as long as one."""
    phase = Phase(1, 1, 0)
    one = Latencies().layer(LAYER, "dense", rates(1, OWN), phase).seconds
    two = Latencies().layer(sharded(LAYER, 2), "dense", rates(2, OWN), phase).seconds
    assert two == pytest.approx(one, rel=0.02)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ((Device("cpu", count=3),), [3, 3, 3]),
        ((Device("cpu", count=1),), [1]),
        ((Device("cpu", count=2), Device("cpu", count=1, threads=4)), [3, 3, 3]),
        ((Device("cpu", count=2), Device("T4", count=2)), [2, 2, 1, 1]),
        ((Device("cpu", count=2, profile={"nodeDevices": 9}),), [2, 2]),
    ],
    ids=["equal ones", "one", "of unlike size", "GPUs have their own", "whatever a file says"],
)
def test_a_node_counts_those_that_share_its_memory(devices: tuple[Device, ...], expected: list[int]) -> None:
    cluster = Cluster(
        (Node("a", devices), Node("b", devices)), profiles={"cpu": a_profile(node_bandwidth_bytes_per_second=1e9)}
    )
    counted = [each.profile.node_devices for each in cluster.accelerators()]
    assert counted == 2 * expected


def test_equal_devices_of_nodes_that_have_more_and_fewer_of_them_are_unlike() -> None:
    """What a search takes for equal costs the same."""
    rates_of = msgspec.to_builtins(a_profile(node_bandwidth_bytes_per_second=OWN))
    nodes = tuple(
        Node(name, (Device("cpu", count=count, memory_bytes=8 << 30, profile=rates_of),))
        for name, count in (("a", 1), ("b", 2), ("c", 2))
    )
    kinds = fleet_of(Cluster(nodes)).kind
    assert kinds[0] != kinds[1] == kinds[2]
