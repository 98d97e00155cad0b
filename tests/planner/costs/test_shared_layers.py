"""Layers that ranks share, told by what was measured of as many ranks: a plan has their seconds, sums included, and no others."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.contract.formats import FormatName
from strata_planner.contract.latencies import LatencyProfile, SharedLayers
from strata_planner.contract.values import ContractError
from strata_planner.costs.communication import hidden_states_bytes, layer_sums_seconds
from strata_planner.costs.fitted import FittedLatency
from strata_planner.costs.latency import Latencies
from strata_planner.costs.shards import sharded
from strata_planner.costs.source import Phase, Rates
from strata_planner.question.cluster import Cluster, Device, DeviceGroup, Node
from strata_planner.question.workload import Workload
from strata_planner.search.layouts.search import laid, layout_plan
from strata_planner.simulate import Batch
from strata_planner.simulate.pricing import StagePricer
from tests.planner.builders import a_model, a_profile, a_request
from tests.planner.latency_profiles import a_latency_profile, law, the_points

MODEL = a_model()
LAYER = MODEL.layers[0]
SHARE = 0.6  # of one rank's seconds: what two take here
RATES = Rates(a_profile(threads=1), "bfloat16", 16, "cpu")


def measured(*names: FormatName) -> SharedLayers:
    points = [point for name in names for point in the_points(name)]
    return SharedLayers(
        2, tuple(msgspec.structs.replace(each, layer_seconds=SHARE * each.layer_seconds) for each in points)
    )


PROFILE = a_latency_profile().with_shared(measured("dense", "int8"))
SOURCE = FittedLatency(PROFILE)


def a_node(devices: int) -> Cluster:
    rates = msgspec.to_builtins(a_profile(threads=1))
    return Cluster((Node("a", (Device("cpu", count=devices, memory_bytes=4 << 30, threads=1, profile=rates),)),))


@settings(deadline=None)  # a busy machine is no failure
@given(
    name=st.sampled_from(["dense", "int8"]),
    phase=st.one_of(
        st.builds(Phase, st.sampled_from([1, 3, 5, 20]), st.just(1), st.integers(17, 400).map(float)),
        st.integers(130, 340).map(lambda tokens: Phase(1, tokens, tokens / 2)),
    ),
)
def test_a_part_and_its_sums_take_what_was_measured(name: FormatName, phase: Phase) -> None:
    told = SOURCE.layer(sharded(LAYER, 2), name, RATES, phase)
    assert told is not None
    assert told.source.endswith("by 2 ranks")
    sums = layer_sums_seconds(2, hidden_states_bytes(MODEL, phase.total_tokens, "bfloat16"))
    expected = SHARE * law(name, phase.sequences, phase.tokens, phase.context - 1 if phase.decoding else 0)
    assert told.seconds + sums == pytest.approx(expected, rel=0.02)


def test_the_simulator_has_the_same_seconds() -> None:
    cluster = a_node(2)
    pricer = StagePricer(MODEL, cluster, "bfloat16", Latencies((SOURCE,)))
    stage = pricer.stage({(LAYER, "dense"): 4}, DeviceGroup(cluster.accelerators()), kv_bits=16, head=False)
    other = pricer.stage({(LAYER, "dense"): 5}, DeviceGroup(cluster.accelerators()), kv_bits=16, head=False)
    batch = Batch(4, 4, 4, 4 * 128)
    assert other(batch) - stage(batch) == pytest.approx(SHARE * law("dense", 4, 1, 127), rel=0.02)


@pytest.mark.parametrize(("degree", "name"), [(4, "dense"), (2, "int4")], ids=["as many ranks", "format"])
def test_parts_that_were_not_measured_are_left_to_other_sources(degree: int, name: FormatName) -> None:
    assert SOURCE.layer(sharded(LAYER, degree), name, RATES, Phase(1, 1, 100)) is None


def test_parts_of_other_layers_are_left_to_other_sources() -> None:
    wider = a_model(intermediate_size=512).layers[0]
    assert SOURCE.layer(sharded(wider, 2), "dense", RATES, Phase(1, 1, 100)) is None


def test_sums_that_are_told_longer_than_all_was_leave_some_seconds() -> None:
    quick = tuple(msgspec.structs.replace(each, layer_seconds=1e-9) for each in measured("dense").points)
    told = FittedLatency(a_latency_profile().with_shared(SharedLayers(2, quick))).layer(
        sharded(LAYER, 2), "dense", RATES, Phase(1, 1, 100)
    )
    assert told is not None
    assert told.seconds > 0


def test_a_plan_of_a_group_says_that_it_was_measured() -> None:
    request = a_request(
        a_node(2),
        workload=Workload(prompt_tokens=32, output_tokens=32, concurrency=4),
        allowed_bits=(16,),
        solver="layout",
        tensor_parallel=(1, 2),
        latency_sources=(SOURCE,),
    )
    told = {
        degrees: layout_plan(laid(request, ((2,),), degrees=(degrees,))).stages[0].times.source
        for degrees in ((2,), (1, 1))
    }
    assert "by 2 ranks" in told[2,]
    assert "ranks" not in told[1, 1]


def test_what_is_measured_again_replaces_its_format_alone() -> None:
    more = SharedLayers(2, measured("int8", "int4").points)
    both = PROFILE.with_shared(more)
    assert both.shared_by(2).formats == {"dense", "int8", "int4"}
    assert len(both.shared_by(2).points) == 3 * len(the_points("dense"))
    assert both.with_shared(SharedLayers(4, more.points)).shared_by(2) == both.shared_by(2)
    assert both.of(("int4",)).shared_by(2).formats == {"int4"}
    assert LatencyProfile.decode(both.encode()) == both


def test_points_of_ranks_are_checked_as_others_are() -> None:
    broken = msgspec.structs.replace(measured("dense").points[0], layer_seconds=-1.0)
    with pytest.raises(ContractError, match="must be positive"):
        LatencyProfile.decode(a_latency_profile().with_shared(SharedLayers(2, (broken,))).encode())
