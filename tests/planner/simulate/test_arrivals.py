"""What users see while requests come at random: as a long simulation has it, never less than a lone request takes, and nothing where it grows for ever."""

import dataclasses

import msgspec
import pytest

from strata_planner.answer.explain import first_token_lines
from strata_planner.contract.forecast import ArrivalForecast
from strata_planner.contract.plan import Plan
from strata_planner.costs.latency import Latencies
from strata_planner.question.request import Objective, PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.search.planning import make_plan
from strata_planner.simulate import fleet, of_clients, poisson, simulate
from strata_planner.simulate.arrivals import arrivals, with_arrivals
from tests.planner.builders import a_cluster, a_request

LOAD = Workload(prompt_tokens=64, output_tokens=16, concurrency=8)
BASE = dataclasses.replace(a_request(a_cluster(8, 8, 8)), workload=LOAD, max_model_len=256, solver="layout", theta=0.0)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(BASE).plan


def at(share: float, plan: Plan) -> PlanRequest:
    """As many requests a second as this share of what the plan answers."""
    rate = share * plan.prediction.tokens_per_second / LOAD.output_tokens
    return dataclasses.replace(BASE, objective=Objective(requests_per_second=rate))


def told(share: float, plan: Plan) -> ArrivalForecast:
    found = arrivals(plan, at(share, plan))
    assert found is not None
    return found


def test_where_nobody_says_how_often_requests_come_it_is_the_closed_loop(plan: Plan) -> None:
    found = arrivals(plan, BASE)
    assert found is not None
    assert found.requests_per_second is None
    clients = sum(replica.concurrency for replica in plan.replicas)
    replicas = fleet(plan, BASE.model, BASE.cluster, Latencies(()))
    trace = of_clients(clients, 2000, LOAD.prompt_tokens, LOAD.output_tokens, 7, BASE.max_model_len)
    long = simulate(replicas, trace, in_flight=clients)
    assert found.ttft_ms == pytest.approx((long.mean("ttft") or 0) * 1e3, rel=0.15)
    (line,) = first_token_lines(with_arrivals(plan, BASE))
    assert line.startswith("simulated, each as another ends: first token ")
    assert "give workload.requestsPerSecond" in line
    assert first_token_lines(plan) == []


def test_it_is_what_a_long_simulation_tells(plan: Plan) -> None:
    found, request = told(0.5, plan), at(0.5, plan)
    replicas = fleet(plan, request.model, request.cluster, Latencies(()))
    lengths = [range(mean // 2, mean * 3 // 2 + 1) for mean in (LOAD.prompt_tokens, LOAD.output_tokens)]
    long = simulate(replicas, poisson(found.requests_per_second, 2000, *lengths, seed=7))
    assert found.ttft_ms == pytest.approx((long.mean("ttft") or 0) * 1e3, rel=0.15)
    assert found.ttft_p90_ms == pytest.approx((long.percentile("ttft", 90) or 0) * 1e3, rel=0.2)
    assert found.tpot_ms == pytest.approx((long.mean("tpot") or 0) * 1e3, rel=0.1)
    assert found == told(0.5, plan)


def test_the_more_come_the_longer_they_wait_until_no_time_holds(plan: Plan) -> None:
    waits = [told(share, plan).ttft_ms or 0.0 for share in (0.05, 0.5, 0.9)]
    assert waits == sorted(waits)
    full = told(1.2, plan)
    assert (full.ttft_ms, full.ttft_p90_ms, full.tpot_ms, full.simulated_requests) == (None, None, None, 0)


def test_it_is_part_of_the_plan_and_said_in_words(plan: Plan) -> None:
    shown = with_arrivals(plan, at(0.5, plan))
    assert Plan.decode(shown.encode()) == shown
    (line,) = first_token_lines(shown)
    assert "50% of what is answered at most: first token" in line
    assert "or more for one in ten, then" in line
    (line,) = first_token_lines(with_arrivals(plan, at(2, plan)))
    assert "the queue grows" in line


def test_a_plan_too_large_for_a_short_simulation_is_not_simulated(plan: Plan) -> None:
    long = msgspec.structs.replace(LOAD, output_tokens=500_000)
    rate = 0.5 * plan.prediction.tokens_per_second / long.output_tokens
    request = dataclasses.replace(BASE, workload=long, objective=Objective(requests_per_second=rate))
    assert arrivals(plan, request) is None


@pytest.mark.parametrize("share", [None, 0.6])
def test_prompts_that_the_workload_says_are_unlike_are_drawn_unlike(share: float | None, plan: Plan) -> None:
    """One in ten waits longer for its first token, in a closed loop and at random."""
    request = BASE if share is None else at(share, plan)
    alike, unlike = (
        arrivals(plan, dataclasses.replace(request, workload=msgspec.structs.replace(LOAD, prompt_deviation=each)))
        for each in (0.5, 60.0)
    )
    assert alike is not None
    assert unlike is not None
    assert unlike.ttft_p90_ms > 1.1 * alike.ttft_p90_ms
