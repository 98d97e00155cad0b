"""The timeline and the picture of it: what they show is what the plan predicts."""

import itertools
from functools import lru_cache
from xml.etree import ElementTree as ET

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_planner.answer.picture import picture
from strata_planner.answer.timeline import busy_share, decode_timeline, prefill_timeline
from strata_planner.contract.plan import MicroBatch, Plan, Replica, Stage, StageTimes
from strata_planner.search.planning import make_plan
from tests.planner.builders import a_cluster, a_request

seconds = st.floats(0.001, 1.0)


@pytest.fixture(name="plan", scope="module")
def a_plan() -> Plan:
    return make_plan(a_request(a_cluster(3, 3, 6), min_stages=3)).plan


@lru_cache
def a_stage() -> Stage:
    return make_plan(a_request()).plan.stages[0]


@st.composite
def replicas(draw: st.DrawFn) -> Replica:
    """Stages of any speeds; nothing else about them matters here."""
    template = a_stage()
    stages: list[Stage] = []
    for number in range(draw(st.integers(1, 4))):
        times = StageTimes(*(draw(seconds) for _ in range(4)), source="drawn")
        stages.append(msgspec.structs.replace(template, stage=number, times=times))
    return Replica(0, tuple(stages), MicroBatch(1, 1, 64), 1)


@given(replicas(), st.integers(1, 6))
def test_prefilling_takes_all_stages_once_and_the_slowest_again_for_each_further_micro_batch(
    replica: Replica, count: int
) -> None:
    times = [stage.times for stage in replica.stages]
    work = prefill_timeline(replica, count)
    through = sum(each.prefill_seconds for each in times) + sum(each.prefill_transfer_seconds for each in times[:-1])
    slowest = max(each.prefill_seconds for each in times)
    assert max(each.end for each in work) == pytest.approx(through + (count - 1) * slowest)


@given(replicas(), st.integers(1, 5), st.integers(1, 3))
def test_a_stage_does_one_thing_at_a_time_and_tokens_follow_each_other(
    replica: Replica, count: int, rounds: int
) -> None:
    work = decode_timeline(replica, count, rounds)
    for j in range(len(replica.stages)):
        mine = sorted((each.start, each.end) for each in work if each.stage == j)
        assert all(before[1] <= after[0] + 1e-12 for before, after in itertools.pairwise(mine))
        assert 0 < busy_share(work, j) <= 1 + 1e-12
    of_one = [each for each in work if each.micro_batch == 0]
    assert of_one == sorted(of_one, key=lambda each: each.start)


def test_the_picture_has_every_layer_and_every_micro_batch(plan: Plan) -> None:
    workload = a_request().workload
    drawn = ET.fromstring(picture(plan))
    titles = [each.text or "" for each in drawn.iter("{http://www.w3.org/2000/svg}title")]
    batch, stages = plan.replicas[0].micro_batch, len(plan.replicas[0].stages)
    assert sum(title.startswith("layer ") for title in titles) == plan.num_layers
    under_way = min(batch.under_way(stages), -(-workload.concurrency // batch.decode))
    with_prompts, decoding = under_way, 2 * under_way
    assert sum(title.startswith("micro-batch ") for title in titles) == stages * (with_prompts + decoding)


def test_names_are_escaped(plan: Plan) -> None:
    odd = msgspec.structs.replace(plan, architecture="<&>")
    assert "<&>" not in picture(odd)
