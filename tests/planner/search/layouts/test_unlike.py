"""Groups of unlike devices: within the memory of each, never worse than without, in the shares that their speeds are worth."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from rich.console import Console

from benchmarks import unlike
from strata_planner.answer.explain import render_plan
from strata_planner.answer.picture import picture
from strata_planner.contract.plan import Plan
from strata_planner.contract.shares import Shares, equal, told
from strata_planner.contract.values import from_json, to_json
from strata_planner.costs.latency import Latencies
from strata_planner.costs.shards import Portion, portion_of, shareable
from strata_planner.errors import InfeasibleError
from strata_planner.question.cluster import Cluster, Device, DeviceGroup, LinkRate, Node
from strata_planner.question.request import PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.search.exact.problem import StageCosts, joined
from strata_planner.search.layouts.groups import Group, Grouping
from strata_planner.search.layouts.pool import Pool
from strata_planner.search.layouts.unlike import shares_of
from strata_planner.search.metric import value_of_plan
from strata_planner.search.planning import make_plan
from strata_planner.simulate import Batch
from strata_planner.simulate.pricing import StagePricer
from tests.laws import share
from tests.planner.builders import CARD, MIB, a_model, a_profile, a_request

laws = settings(max_examples=share(24, 24), deadline=None)
MODEL = a_model(num_attention_heads=8, num_key_value_heads=8)
WIDE = a_model(hidden_size=512, intermediate_size=1536, num_attention_heads=8, num_key_value_heads=8)  # 24 tiles
ONE_REQUEST = Workload(prompt_tokens=32, output_tokens=16, concurrency=1)


def a_card(memory_mib: float, speed: float, type_: str = CARD, count: int = 1) -> Device:
    rates = {"bandwidthBytesPerSecond": 1e9 * speed, "flopsPerSecond": 1e10 * speed}
    memory = int(memory_mib * MIB)
    return Device(type_, count=count, memory_bytes=memory, usable_fraction=1.0, overhead_bytes=0, profile=rates)


def on_one_node(*devices: Device) -> Cluster:
    return Cluster(
        (Node("a", devices),),
        intra_node=LinkRate(gbps=400, latency_ms=0.001),
        profiles={CARD: a_profile(type=CARD)},
    )


def asked(*devices: Device, **changes: object) -> PlanRequest:
    fields = {"model": MODEL, "tensor_parallel": (1, 2, 4), "workload": ONE_REQUEST, "allowed_bits": (16,)}
    return a_request(on_one_node(*devices), **(fields | changes))


def value(request: PlanRequest) -> float:
    try:
        return value_of_plan(request, make_plan(request).plan)
    except InfeasibleError:
        return -float("inf")


def check_memory(plan: Plan) -> None:
    plan.check()
    for stage in plan.stages:
        for memory, device in zip(stage.memories, stage.devices, strict=True):
            parts = memory.weights_bytes + memory.embedding_bytes + memory.kv_bytes + memory.temporary_bytes
            assert memory.total_bytes == parts + memory.draft_bytes <= device.usable_bytes


CARDS = st.builds(a_card, st.floats(1.2, 12), st.floats(0.2, 4))
LOADS = st.builds(Workload, st.sampled_from([8, 40]), st.just(16), st.integers(1, 12))


@laws
@given(first=CARDS, second=CARDS, third=CARDS, load=LOADS, bits=st.sampled_from([(16,), (4, 8, 16)]))
def test_a_plan_keeps_to_the_memory_of_each_device_and_is_the_same_again(
    first: Device, second: Device, third: Device, load: Workload, bits: tuple[int, ...]
) -> None:
    request = asked(first, second, third, workload=load, allowed_bits=bits)
    try:
        plan = make_plan(request).plan
    except InfeasibleError:
        return
    check_memory(plan)
    assert Plan.decode(plan.encode()) == plan
    assert make_plan(request).plan == plan


@pytest.mark.slow  # test_plan_laws.py has one more device
@laws
@given(first=CARDS, second=CARDS, load=LOADS)
def test_a_second_device_of_whatever_speed_is_never_worse(first: Device, second: Device, load: Workload) -> None:
    alone = value(asked(first, workload=load))
    both = asked(first, second, workload=load)
    assert value(both) >= alone - 1e-5 * abs(alone)
    apart = value(replace(both, tensor_parallel=(1,)))
    assert value(both) >= apart - 1e-5 * abs(apart), "what may be shared need not be"


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [((2.0, 1.0), (2, 1)), ((1.0, 3.0), (3, 1)), ((1.0, 1.0), ()), ((5.0, 3.0), (5, 3))],
)
def test_shares_are_what_speeds_are_worth(speeds: tuple[float, float], expected: Shares) -> None:
    """The fastest device leads."""
    (stage,) = make_plan(asked(a_card(60, speeds[0]), a_card(70, speeds[1]), model=WIDE)).plan.stages
    assert stage.tensor_parallel == 2
    assert stage.shares == expected
    assert stage.devices[0].index == speeds.index(max(speeds))


def test_a_large_slow_device_has_what_the_fast_one_has_no_room_for() -> None:
    """4.2 MiB of weights and what a step takes: 2 MiB hold a small part of them."""
    (stage,) = make_plan(asked(a_card(1.6, 2.0), a_card(20, 1.0))).plan.stages
    assert stage.tensor_parallel == 2
    small = next(at for at, device in enumerate(stage.devices) if device.index == 0)
    assert stage.shares[small] < stage.shares[1 - small]


def test_unlike_devices_share_only_where_it_gains() -> None:
    """Exchanges over a slow link take longer than all that they save; and unlike types of processors are of two slots."""
    slow = asked(a_card(30, 2.0), a_card(30, 1.0))
    slow = replace(slow, cluster=structs.replace(slow.cluster, intra_node=LinkRate(gbps=0.1, latency_ms=5.0)))
    assert {stage.tensor_parallel for stage in make_plan(slow).plan.stages} == {1}
    profiles = {name: a_profile(type=name) for name in ("cpu", "cpu-old")}
    nodes = (Node("a", (a_card(30, 2.0, "cpu"), a_card(30, 1.0, "cpu-old"))),)
    apart = replace(slow, cluster=Cluster(nodes, profiles=profiles, intra_node=LinkRate(gbps=400, latency_ms=0.001)))
    assert {stage.tensor_parallel for stage in make_plan(apart).plan.stages} == {1}


def test_shares_are_told() -> None:
    outcome = make_plan(asked(a_card(60, 2.0), a_card(70, 1.0), model=WIDE))
    console = Console(width=200)
    with console.capture() as captured:
        console.print(render_plan(outcome.plan, outcome))
    assert "2 x card #0,1 (2:1)" in captured.get()
    assert "tensor partition of 2 x card (2:1) on a: megatron" in captured.get()
    assert "2 x card (2:1) on a" in picture(outcome.plan)


GROUPS = st.tuples(st.floats(0.2, 4), st.floats(0.2, 4), st.sampled_from([(1, 1), (3, 1), (1, 2), (5, 3)]))


@given(
    group=GROUPS,
    decoding=st.integers(1, 64),
    tokens=st.sampled_from([0, 1, 40]),
)
def test_the_simulator_tells_a_group_as_its_slowest_device(
    group: tuple[float, float, Shares], decoding: int, tokens: int
) -> None:
    first, second, shares = group
    cluster = on_one_node(a_card(30, first), a_card(40, second))
    pricer = StagePricer(MODEL, cluster, "bfloat16", Latencies())
    devices, layers = cluster.accelerators(), {(MODEL.layers[0], "dense"): 3}
    both = pricer.stage(layers, DeviceGroup(devices, shares), kv_bits=16, head=True)
    batch = Batch(decoding + tokens, decoding, decoding, decoding * 20)
    sides = [
        pricer.stage(
            layers, structs.replace(DeviceGroup(devices, shares), rank=rank, shares=shares), kv_bits=16, head=True
        )
        for rank in (0, 1)
    ]
    assert both(batch) == max(each(batch) for each in sides)


ROOMS = st.builds(
    lambda capacity, unit, low, loading: StageCosts(
        capacity_bytes=capacity,
        quantized_bytes=low,
        loading_capacity_bytes=loading,
        loading_quantized_bytes=low // 2,
        seconds=({},),
        bytes=({16: unit * 4, 4: unit},),
        weight_bytes=({16: unit * 3, 4: unit // 2},),
    ),
    st.integers(-5, 10_000),
    st.integers(1, 500),
    st.integers(0, 300),
    st.integers(-5, 10_000),
)


@given(ranks=st.lists(ROOMS, min_size=1, max_size=4), high=st.integers(0, 12), low=st.integers(0, 12))
def test_what_fits_all_devices_in_one_fits_each(ranks: list[StageCosts], high: int, low: int) -> None:
    def fits(costs: StageCosts) -> bool:
        serving = high * costs.bytes[0][16] + low * costs.bytes[0][4] + bool(low) * costs.quantized_bytes
        loading = (
            high * costs.weight_bytes[0][16]
            + low * costs.weight_bytes[0][4]
            + bool(low) * costs.loading_quantized_bytes
        )
        return serving <= costs.capacity_bytes and loading <= costs.loading_capacity_bytes

    if fits(joined(ranks)):
        assert all(map(fits, ranks))
    if len(ranks) == 1:
        assert joined(ranks) == ranks[0]


@given(classes=st.lists(st.integers(0, 2), min_size=2, max_size=4))
def test_shares_that_are_tried_are_the_same_for_equal_devices(classes: list[int]) -> None:
    tried = shares_of(classes)
    assert len(set(tried)) == len(tried)
    assert tried[0] == (1,) * len(classes)
    for shares in tried:
        assert len(shares) == len(classes)
        assert len({*zip(classes, shares, strict=True)}) == len(set(classes))


NODES = st.lists(st.integers(0, 5), min_size=2, max_size=3).filter(lambda counts: sum(map(bool, counts)) > 0)


@given(counts=NODES, degrees=st.sampled_from([(2, 1), (4, 2, 1), (8, 4, 2, 1), (2,), (4, 2)]))
def test_every_option_deals_out_all_devices(counts: list[int], degrees: tuple[int, ...]) -> None:
    cluster = on_one_node(*(a_card(10 + at, 1 + at, count=5) for at in range(len(counts))))
    unlike = tuple(each for each in degrees if each > 1)
    whole = dict.fromkeys(degrees, ())
    grouping = Grouping(Pool(cluster), whole, unlike, lambda classes: [(2, *[1] * (len(classes) - 1))])
    found = list(grouping.options(tuple(counts)))
    for groups in found:
        held = [c for group in groups for c in group.classes]
        assert [held.count(c) for c in range(len(counts))] == counts
        assert all(len(group.classes) in degrees for group in groups)
        assert all(bool(group.shares) == (len(set(group.classes)) > 1) for group in groups)
        for group in groups:
            assert all(one >= other for one, other in pairwise(group.shares))
    assert len(set(found)) == len(found)
    if counts == [1, 1]:
        assert any(len(groups) == 1 for groups in found), "a pair"


@laws
@given(
    count=st.integers(2, 7),
    heads=st.sampled_from([(4, 2), (6, 3), (8, 8), (8, 2), (12, 4)]),
    bits=st.sampled_from([(16,), (4, 8, 16)]),
    load=LOADS,
)
def test_any_number_of_equal_devices_up_to_the_heads_share_a_stage_within_the_memory_of_each(
    count: int, heads: tuple[int, int], bits: tuple[int, ...], load: Workload
) -> None:
    queries, keys = heads
    model = a_model(num_attention_heads=queries, num_key_value_heads=keys)
    request = asked(a_card(12, 1, count=count), model=model, tensor_parallel=(count,), allowed_bits=bits, workload=load)
    if count > queries:
        with pytest.raises(InfeasibleError, match="no groups of so many equal devices"):
            make_plan(request)
        return
    plan = make_plan(request).plan
    check_memory(plan)
    (stage,) = plan.stages
    comes_out = queries % count == 0 and (keys % count == 0 or count % keys == 0)
    assert (stage.tensor_parallel, stage.shares) == (count, () if comes_out else equal(count))
    assert from_json(to_json(plan), Plan) == plan
    assert told(equal(count)) not in picture(plan), "equal shares are no news"
    parts = [portion_of(model.layers[0], Portion(equal(count), rank)) for rank in range(count)]
    assert sum(each.heads for each in parts) == queries


def test_a_group_of_more_devices_than_heads_is_none() -> None:
    assert shareable(MODEL, 8)
    assert not shareable(a_model(), 8)
    assert not shareable(a_model(num_attention_heads=4), 5)


def test_parts_of_experts_are_counted_whole() -> None:
    """Of 8 experts 5 and 3: as many bytes as the runtime's."""
    model = a_model(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)
    layer = model.layers[0]
    experts = [each for each in layer.linears if each.copies > 1]
    parts = [portion_of(layer, Portion((5, 3), rank)) for rank in (0, 1)]
    for whole in experts:
        held = [next(each for each in part.linears if each.name == whole.name).parameters for part in parts]
        assert held == [whole.parameters * 5 // 8, whole.parameters * 3 // 8]


def test_the_benchmark_runs() -> None:
    (row,) = unlike.rows(quick=True)
    assert row[-1] == "2 (2:1)"
    assert float(row[-2]) > 1


def test_names_of_a_group() -> None:
    devices = on_one_node(a_card(30, 2.0), a_card(40, 1.0)).accelerators()
    assert str(DeviceGroup(devices, (5, 3))) == "2 x card (5:3) on a"
    assert str(DeviceGroup(devices, (1, 1))) == "2 x card on a"
    assert told((5, 3)) == "5:3"
    assert Group((0, 1), (5, 3)).renamed({0: 4, 1: 2}) == Group((4, 2), (5, 3))
