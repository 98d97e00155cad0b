"""Seconds of simulated stages: what the sources say for batches of one phase, the sum of their parts for mixed ones."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_planner.contract.formats import FormatName
from strata_planner.contract.plan import NO_SPECULATION, Plan
from strata_planner.contract.rows import padded_rows
from strata_planner.costs.communication import layer_collectives_seconds
from strata_planner.costs.latency import Latencies
from strata_planner.costs.source import Phase, Rates, Timed
from strata_planner.errors import ClusterError
from strata_planner.question.cluster import Cluster, Device, DeviceGroup, Node
from strata_planner.question.model import LayerShape
from strata_planner.question.workload import Workload
from strata_planner.search.planning import make_plan
from strata_planner.simulate import (
    Batch,
    Chunk,
    ReplicaModel,
    Request,
    StagePricer,
    StageSeconds,
    at_once,
    fleet,
    simulate,
)
from tests.planner.builders import EAGLE, HEAD, a_cluster, a_model, a_profile, a_request

MODEL = a_model()
COUNT = 3
DEVICE = Device("cpu", count=2, profile={"stepOverheadSeconds": 0.001, "layerOverheadSeconds": 0.0001})
CLUSTER = Cluster((Node("a", (DEVICE,)),), profiles={"cpu": a_profile()})


def a_stage(degree: int = 1, *, head: bool = True) -> StageSeconds:
    group = DeviceGroup(CLUSTER.accelerators()[:degree])
    layers = {(MODEL.layers[0], "dense"): COUNT}
    return StagePricer(MODEL, CLUSTER, "bfloat16", Latencies()).stage(layers, group, kv_bits=16, head=head)


def source_seconds(phase: Phase) -> float:
    """Of a stage of COUNT layers without the head."""
    rates = Rates(CLUSTER.accelerators()[0].profile, "bfloat16", 16, "cpu")
    layer = Latencies().layer(MODEL.layers[0], "dense", rates, phase).seconds
    return COUNT * layer + Latencies().step(MODEL, rates, phase).seconds


def decoding(sequences: int, keys: int) -> Batch:
    return Batch(sequences, sequences, sequences, keys)


@given(st.integers(1, 40), st.integers(1, 3000))
def test_decoding_costs_what_the_source_says(sequences: int, context: int) -> None:
    expected = source_seconds(Phase(sequences, 1, context))
    assert a_stage(head=False)(decoding(sequences, sequences * context)) == pytest.approx(expected)


@given(st.integers(2, 2048))
def test_a_whole_prompt_costs_what_the_source_says(tokens: int) -> None:
    batch = Batch(tokens, 1, 0, 0, (Chunk(tokens, 0),))
    assert a_stage(head=False)(batch) == pytest.approx(source_seconds(Phase(1, tokens, tokens / 2)), rel=1e-3)


@given(st.integers(1, 20), st.integers(1, 500), st.integers(2, 512), st.integers(0, 1024))
def test_a_mixed_step_reads_the_weights_once(sequences: int, context: int, tokens: int, past: int) -> None:
    """Dearer than each of its parts; cheaper than both one after the other, unless padding makes more rows of it than of both."""
    stage = a_stage(head=False)
    chunks = (Chunk(tokens, past),)
    mixed = stage(Batch(sequences + tokens, 0, sequences, sequences * context, chunks))
    parts = stage(decoding(sequences, sequences * context)), stage(Batch(tokens, 0, 0, 0, chunks))
    assert max(parts) - 1e-12 <= mixed
    assert mixed < sum(parts) or padded_rows(sequences + tokens) > padded_rows(sequences) + padded_rows(tokens)


def test_the_head_counts_rows_and_only_where_it_is() -> None:
    rates = Rates(CLUSTER.accelerators()[0].profile, "bfloat16", 16, "cpu")
    more = a_stage()(decoding(4, 40)) - a_stage(head=False)(decoding(4, 40))
    assert more == pytest.approx(Latencies().head(MODEL, rates, 4).seconds)
    unfinished = Batch(8, 0, 0, 0, (Chunk(8, 0),))
    assert a_stage()(unfinished) == a_stage(head=False)(unfinished)


def test_a_group_adds_its_collectives() -> None:
    one, two = CLUSTER.accelerators()
    link = CLUSTER.link(one, two)
    alone, pair = (a_stage(degree, head=False)(decoding(4, 40)) for degree in (1, 2))
    collectives = COUNT * layer_collectives_seconds(MODEL, link, 2, 4, "bfloat16")
    overheads = 0.001 + COUNT * 0.0001
    assert collectives + overheads < pair < collectives + alone


def test_devices_alike_share_what_the_sources_answered() -> None:
    class Counting(Latencies):
        asked = 0

        def layer(self, layer: LayerShape, format_name: FormatName, rates: Rates, phase: Phase) -> Timed:
            Counting.asked += 1
            return super().layer(layer, format_name, rates, phase)

    pricer = StagePricer(MODEL, CLUSTER, "bfloat16", Counting())
    for accelerator in CLUSTER.accelerators():
        stage = pricer.stage({(MODEL.layers[0], "dense"): 2}, DeviceGroup((accelerator,)), kv_bits=16, head=False)
        stage(decoding(4, 40))
    assert Counting.asked == 2  # the two ends that the mean context lies between


@pytest.fixture(scope="module")
def plan() -> Plan:
    load = Workload(prompt_tokens=32, output_tokens=64, concurrency=8)
    cluster = a_cluster(64, 64, speeds=(1.0, 2.0))
    return make_plan(a_request(cluster, workload=load, max_model_len=128, min_stages=2)).plan


def test_stages_cost_what_the_plan_says(plan: Plan) -> None:
    """A full step of either kind, at the plan's own workload."""
    cluster = a_cluster(64, 64, speeds=(1.0, 2.0))
    (replica,) = fleet(plan, MODEL, cluster, Latencies())
    micro_batch = plan.replicas[0].micro_batch
    xi = micro_batch.decode
    with_prompts = Batch(xi + 32, xi + 1, xi, xi * 64, (Chunk(32, 0),))
    for stage, planned in zip(replica.stages, plan.replicas[0].stages, strict=True):
        assert stage.seconds(decoding(xi, xi * 64)) == pytest.approx(planned.times.decode_seconds)
        assert stage.seconds(with_prompts) == pytest.approx(planned.times.prefill_seconds, rel=1e-3)
        hop, sampled = stage.hop, planned.head
        for tokens, told in (
            (xi + 32 * (not sampled), planned.times.prefill_transfer_seconds),
            (xi, planned.times.decode_transfer_seconds),
        ):
            assert hop.latency_seconds + tokens * hop.seconds_per_token == pytest.approx(told)


def test_a_batch_at_once_takes_about_what_the_plan_predicts(plan: Plan) -> None:
    cluster = a_cluster(64, 64, speeds=(1.0, 2.0))
    outcome = simulate(fleet(plan, MODEL, cluster, Latencies()), at_once([Request(0, 32, 64)] * 8))
    assert outcome.tokens_per_second == pytest.approx(plan.prediction.tokens_per_second, rel=0.1)


def test_one_replica_of_a_plan(plan: Plan) -> None:
    cluster = a_cluster(64, 64, speeds=(1.0, 2.0))
    one = ReplicaModel.from_plan(plan, plan.replicas[0], MODEL, cluster, Latencies())
    (same,) = fleet(plan, MODEL, cluster, Latencies())
    trace = [Request(0, 32, 8)] * 3
    assert simulate([one], trace) == simulate([same], trace)
    assert one.tokens_per_second > 0
    assert replace(one, tokens_per_second=2.0).stages == one.stages


def test_a_plan_of_another_cluster_is_refused(plan: Plan) -> None:
    with pytest.raises(ClusterError, match="does not have: simulate a plan with the cluster it was made for"):
        fleet(plan, MODEL, a_cluster(64), Latencies())


def test_hops_carry_the_states_that_a_head_reads() -> None:
    """Those of the layers so far beside each token's own, and all of them on the way back."""
    request = a_request(a_cluster(24, 24, 24), workload=Workload(32, 16, 3))
    request = replace(request, min_stages=3, speculation=EAGLE, draft_model=HEAD)
    plan = make_plan(request).plan
    stages = plan.replicas[0].stages
    plain = msgspec.structs.replace(plan, speculation=NO_SPECULATION)
    (hops,), (bare,) = (
        [[each.hop for each in replica.stages] for replica in fleet(each, MODEL, request.cluster, Latencies())]
        for each in (plan, plain)
    )
    row = bare[0].seconds_per_token
    for stage, hop in list(zip(stages, hops, strict=True))[:-1]:
        states = sum(layer <= stage.layers[1] for layer in EAGLE.fused)
        assert hop.seconds_per_token == pytest.approx((1 + states) * row)
    assert hops[-1].seconds_per_token == bare[-1].seconds_per_token
    assert hops[-1].seconds_per_row == pytest.approx(len(EAGLE.fused) * row)
    assert all(hop.seconds_per_row == 0 for hop in (*hops[:-1], *bare))
    requests = [Request(0.0, 32, 16)]
    ends = [simulate(fleet(each, MODEL, request.cluster, Latencies()), requests) for each in (plan, plain)]
    assert ends[0] != ends[1]
