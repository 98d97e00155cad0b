"""Laws of the simulator: nothing is lost, nothing waits without reason, pages stay within their budget, one request adds up."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_planner.contract.plan import MicroBatch
from strata_planner.errors import WorkloadError
from strata_planner.simulate import (
    Batch,
    Hop,
    Limits,
    ReplicaLoad,
    ReplicaModel,
    Request,
    StageModel,
    StageSeconds,
    at_once,
    poisson,
    simulate,
)


def per_token(seconds: float, fixed: float = 1.0) -> StageSeconds:
    return lambda batch: fixed + seconds * batch.tokens


def a_replica(
    *stage_seconds: StageSeconds,
    pages: int = 64,
    micro_batch: tuple[int, int, int] = (4, 4, 32),
    hop: Hop | None = None,
) -> ReplicaModel:
    stages = tuple(StageModel(seconds, hop or Hop()) for seconds in stage_seconds or (per_token(0.125),))
    return ReplicaModel(stages, Limits(MicroBatch(*micro_batch), page_tokens=16, page_budget=pages, max_model_len=256))


@st.composite
def replicas(draw: st.DrawFn) -> ReplicaModel:
    seconds = draw(st.lists(st.sampled_from([0.0, 0.125, 0.5]), min_size=1, max_size=3))
    decode = draw(st.integers(1, 6))
    return a_replica(
        *(per_token(each) for each in seconds),
        pages=draw(st.integers(8, 40)),
        micro_batch=(draw(st.integers(1, 4)), decode, draw(st.integers(decode, 40))),
        hop=Hop(draw(st.sampled_from([0.0, 2.0])), draw(st.sampled_from([0.0, 0.25]))),
    )


traces = st.lists(
    st.builds(Request, st.integers(0, 60).map(float), st.integers(1, 70), st.integers(1, 12), st.integers(0, 20)),
    min_size=1,
    max_size=25,
).map(tuple)


def recorded(replica: ReplicaModel) -> tuple[ReplicaModel, list[list[Batch]]]:
    """The replica, and the batches that each of its stages is asked for."""
    seen: list[list[Batch]] = [[] for _ in replica.stages]

    def watch(place: int) -> StageModel:
        stage = replica.stages[place]
        return StageModel(lambda batch: (seen[place].append(batch), stage.seconds(batch))[1], stage.hop)

    return ReplicaModel(tuple(watch(place) for place in range(len(replica.stages))), replica.limits), seen


@given(replicas(), traces)
def test_no_request_is_lost_and_no_token_computed_twice_but_for_want_of_room(
    replica: ReplicaModel, trace: tuple[Request, ...]
) -> None:
    watched, seen = recorded(replica)
    outcome = simulate([watched], trace)
    taken = [each for each in trace if each.longest <= replica.limits.most_tokens]
    assert [each.request for each in outcome.requests] == list(trace)
    for each in outcome.requests:
        fits = each.request.longest <= replica.limits.most_tokens
        assert each.produced_tokens == (each.request.output_tokens if fits else 0)
        assert (each.replica, each.finished_at is not None) == ((0, True) if fits else (None, False))
    computed = sum(each.prompt_tokens + each.output_tokens - 1 for each in taken)
    for batches in seen:
        assert batches == seen[0]
        again = sum(batch.tokens for batch in batches) - computed
        assert again >= 0 if outcome.replicas[0].preemptions else again == 0
        assert sum(batch.sampled for batch in batches) == sum(each.output_tokens for each in taken)


@given(replicas(), traces)
def test_steps_keep_to_the_plans_limits(replica: ReplicaModel, trace: tuple[Request, ...]) -> None:
    watched, seen = recorded(replica)
    outcome = simulate([watched], trace)
    limits = replica.limits.micro_batch
    assert outcome.replicas[0].kv_peak <= 1
    assert outcome.replicas[0].steps == len(seen[0])
    for batch in seen[0]:
        assert 0 < batch.tokens <= limits.max_step_tokens
        assert batch.decoding <= limits.decode
        assert len(batch.chunks) <= limits.most_prompts(batch.decoding)
        assert batch.tokens == batch.decoding + sum(chunk.tokens for chunk in batch.chunks)


@given(replicas(), traces, st.integers(1, 70))
def test_first_come_first_served(replica: ReplicaModel, trace: tuple[Request, ...], prompt: int) -> None:
    """Equal prompts are computed in the order of arrival, so first tokens come in it; ties keep the trace's order."""
    trace = tuple(each._replace(prompt_tokens=prompt) for each in trace)
    served = [each for each in simulate([replica], trace).requests if each.replica is not None]
    served.sort(key=lambda each: each.request.arrival_seconds)
    firsts = [each.first_token_at for each in served]
    assert firsts == sorted(firsts)


@given(traces)
def test_one_stage_works_whenever_there_is_work(trace: tuple[Request, ...]) -> None:
    outcome = simulate([a_replica()], trace)
    spans = sorted((e.request.arrival_seconds, e.finished_at) for e in outcome.requests if e.finished_at is not None)
    present, until = 0.0, 0.0
    for arrival, finish in spans:
        present += max(0.0, finish - max(arrival, until))
        until = max(until, finish)
    assert outcome.replicas[0].busy_seconds[0] == pytest.approx(present)


@given(replicas(), traces)
def test_littles_law(replica: ReplicaModel, trace: tuple[Request, ...]) -> None:
    """Requests in the system, counted by stopping the clock halfway between events, x time = the sum of their latencies."""
    whole = simulate([replica], trace)
    served = [each for each in whole.requests if each.finished_at is not None]
    events = sorted({0.0, *(e.request.arrival_seconds for e in served), *(e.finished_at for e in served)})
    area = 0.0
    for begin, end in pairwise(events):
        stopped = simulate([replica], trace, horizon=(begin + end) / 2).requests
        area += (end - begin) * sum(each.replica is not None and each.finished_at is None for each in stopped)
    assert area == pytest.approx(sum(each.latency_seconds for each in served))


@given(replicas(), traces, st.integers(0, 100))
def test_a_horizon_only_cuts_off(replica: ReplicaModel, trace: tuple[Request, ...], horizon: int) -> None:
    whole = {id(each.request): each for each in simulate([replica], trace).requests}
    cut = simulate([replica], trace, horizon=horizon)
    assert cut.seconds <= max(horizon, 0)
    for each in cut.requests:
        assert each.request.arrival_seconds <= horizon
        full = whole[id(each.request)]
        done = full.finished_at is not None and full.finished_at <= horizon
        assert each.finished_at == (full.finished_at if done else None)


@given(
    st.lists(st.sampled_from([0.25, 1.0, 3.5]), min_size=1, max_size=4),
    st.integers(1, 32),
    st.integers(1, 9),
    st.sampled_from([Hop(), Hop(0.5, 0.125)]),
)
def test_a_single_request_takes_the_sum_of_its_steps(fixed: list[float], prompt: int, output: int, hop: Hop) -> None:
    """Every step passes every stage and, where there are several, every hop; all numbers are exact in binary."""
    replica = a_replica(*(per_token(0.125, each) for each in fixed), hop=hop)
    served = simulate([replica], [Request(7.0, prompt, output)]).requests[0]

    def step(tokens: int) -> Fraction:
        stages = sum(Fraction(each) + Fraction(tokens, 8) for each in fixed)
        hops = (len(fixed) - 1) * (hop.latency_seconds + tokens * hop.seconds_per_token)
        back = hop.latency_seconds + hop.seconds_per_token
        return stages + (Fraction(hops + back) if len(fixed) > 1 else 0)

    assert served.ttft_seconds == step(prompt)
    assert served.latency_seconds == step(prompt) + (output - 1) * step(1)


@given(replicas(), st.integers(0, 10**6))
def test_the_same_seed_gives_the_same_outcome(replica: ReplicaModel, seed: int) -> None:
    traces = [poisson(0.5, 20, [8, 40], [1, 9], seed) for _ in range(2)]
    assert traces[0] == traces[1]
    assert simulate([replica, replica], traces[0]) == simulate([replica, replica], traces[1])


@given(st.integers(0, 10**6))
def test_one_at_a_time_more_rate_never_lowers_a_latency(seed: int) -> None:
    """A prompt takes most pages: a queue with one server, where everyone waits at least as long when all come sooner."""
    replica = a_replica(pages=4)
    slow, fast = (
        simulate([replica], [each._replace(max_tokens=24) for each in poisson(rate, 20, 40, [1, 9, 24], seed)])
        for rate in (0.01, 0.02)
    )
    for late, soon in zip(slow.requests, fast.requests, strict=True):
        assert soon.latency_seconds >= late.latency_seconds - 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_mean_latency_grows_with_the_rate(seed: int) -> None:
    replica = a_replica(per_token(0.125), per_token(0.25))
    means = [
        simulate([replica], poisson(rate, 150, [8, 40], [4, 16], seed)).mean("latency")
        for rate in (0.001, 0.02, 0.1, 1)
    ]
    assert means == sorted(means)


def test_stages_overlap() -> None:
    """Two equal stages serve two sequences at the rate of one stage, one sequence at half of it."""
    replica = a_replica(per_token(0, 1.0), per_token(0, 1.0), micro_batch=(1, 1, 32))
    pair = simulate([replica], at_once([Request(0, 1, 101)] * 2))
    alone = simulate([replica], [Request(0, 1, 101)])
    assert alone.tokens_per_second == 0.5
    assert pair.tokens_per_second == pytest.approx(1.0, rel=0.01)
    assert pair.utilisation[0] == pytest.approx((1.0, 1.0), rel=0.01)


def test_a_request_waits_for_pages_not_for_later_ones() -> None:
    """The first in line needs all pages: the one behind it, which would fit, waits too."""
    replica = a_replica(pages=4)
    trace = [Request(0, 16, 16), Request(1, 48, 16), Request(2, 8, 8)]
    first, large, small = simulate([replica], trace).requests
    assert first.finished_at < large.first_token_at < large.finished_at < small.first_token_at


def test_routing_sees_what_each_replica_has() -> None:
    seen: list[list[ReplicaLoad]] = []

    def to_the_last(loads: list[ReplicaLoad]) -> int:
        seen.append(list(loads))
        return len(loads) - 1

    outcome = simulate([a_replica(), a_replica()], [Request(0, 8, 2), Request(1, 8, 2), Request(90, 8, 2)], to_the_last)
    assert [each.replica for each in outcome.requests] == [1, 1, 1]
    assert [loads[1].outstanding for loads in seen] == [0, 1, 0]
    assert seen[2][1].kv_usage == 0


def test_a_replica_twice_as_fast_gets_twice_the_requests() -> None:
    fast = ReplicaModel(a_replica(per_token(0.0625, 0.5)).stages, a_replica().limits, tokens_per_second=2)
    slow = ReplicaModel(a_replica(per_token(0.125, 1.0)).stages, a_replica().limits, tokens_per_second=1)
    outcome = simulate([slow, fast], poisson(1, 600, 16, 8, seed=1))
    assert outcome.replicas[1].requests / outcome.replicas[0].requests == pytest.approx(2, rel=0.1)


def test_without_replicas_nothing_is_simulated() -> None:
    with pytest.raises(WorkloadError, match="at least one replica"):
        simulate([], [Request(0, 1, 1)])


@given(replicas(), traces, st.integers(1, 6))
def test_in_a_closed_loop_so_many_are_in_flight(
    replica: ReplicaModel, trace: tuple[Request, ...], clients: int
) -> None:
    """Each as soon as another has its answer, in the trace's order; nobody is left out but those that never fit."""
    outcome = simulate([replica], trace, in_flight=clients)
    fitting = [each for each in outcome.requests if each.replica is not None]
    assert len(outcome.requests) == len(trace)
    assert all(each.finished_at is not None for each in fitting)
    arrivals = [each.request.arrival_seconds for each in outcome.requests]
    assert arrivals == sorted(arrivals)
    for each in fitting:
        at = each.request.arrival_seconds
        there = sum(other.request.arrival_seconds <= at < (other.finished_at or 0.0) for other in fitting)
        assert there <= clients
    ends = {each.finished_at for each in fitting} | {0.0}
    assert set(arrivals) <= ends


def test_a_closed_loop_has_a_client() -> None:
    with pytest.raises(WorkloadError, match="0 requests in flight: a closed loop needs at least 1"):
        simulate([a_replica()], [Request(0, 1, 1)], in_flight=0)


def test_tokens_of_a_window_come_evenly() -> None:
    (one,) = simulate([a_replica(per_token(0.0))], [Request(0, 8, 5)]).requests
    assert (one.first_token_at, one.finished_at) == (1.0, 5.0)
    assert [one.tokens_between(0, at) for at in (1, 1.5, 3, 9)] == [0.0, 1.5, 3.0, 5.0]


def test_requests_that_come_together_are_in_one_step() -> None:
    """The leader takes all that have come before it steps."""
    replica, batches = recorded(a_replica(micro_batch=(8, 8, 64)))
    simulate([replica], at_once([Request(0, 4, 2)] * 8))
    assert [batch.sampled for batch in batches[0]] == [8, 8]
