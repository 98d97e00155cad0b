"""What a plan's users see, by a short simulation of the plan: while requests come at random as often as the workload says, or in the closed loop that
plans are predicted for.

Called by `strata plan` and `strata up`. At random requests come in bunches, and find less or more in flight than in a closed loop. The simulation begins
amid the steady state (Little's law), and only who comes after those it begins with counts. What it may cost is counted in steps of stages and in
tokens, whatever the machine.
"""

import math
from collections.abc import Sequence

import msgspec

from strata_planner.contract.forecast import ArrivalForecast
from strata_planner.contract.plan import Plan
from strata_planner.costs.latency import Latencies
from strata_planner.question.request import PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.simulate.outcome import Served, percentile
from strata_planner.simulate.replica import fleet
from strata_planner.simulate.simulation import simulate
from strata_planner.simulate.trace import Request, of_clients, poisson, spread, within

_MOST_STEPS, _MOST_TOKENS = 200_000, 600_000  # of stages; of answers: a second or so each
_MOST, _FEWEST = 1000, 40  # requests that are counted
_SEED = 1
_FULL = 0.98  # of what a plan answers: from there on queues grow for longer than anybody waits


def with_arrivals(plan: Plan, request: PlanRequest) -> Plan:
    """The plan with what its users see in its prediction."""
    told = msgspec.structs.replace(plan.prediction, arrivals=arrivals(plan, request))
    return msgspec.structs.replace(plan, prediction=told)


def arrivals(plan: Plan, request: PlanRequest) -> ArrivalForecast | None:
    """Where nobody says how often requests come, of the closed loop. None where a plan is too large for a short simulation."""
    rate, load = request.objective.requests_per_second, request.workload
    capacity = plan.prediction.tokens_per_second / load.output_tokens
    if rate is not None and rate >= _FULL * capacity:
        return ArrivalForecast(rate, capacity)
    beginning = _clients(plan) if rate is None else max(1, math.ceil(rate * _request_seconds(plan, load)))
    count = min(beginning + _MOST, _affordable(plan, load, in_turn=rate is not None))
    if count < beginning + _FEWEST:
        return None
    replicas = fleet(plan, request.model, request.cluster, Latencies(request.latency_sources))
    most = min(replica.limits.most_tokens for replica in replicas)
    if rate is None:
        closed = of_clients(beginning, count, *lengths_of(load), _SEED, most)
        outcome = simulate(replicas, closed, in_flight=beginning)
    else:
        outcome = simulate(replicas, _at_random(rate, beginning, count, load, most))
    return _told(outcome.requests[2 * beginning :], rate, capacity)


def _told(counted: Sequence[Served], rate: float | None, capacity: float) -> ArrivalForecast | None:
    first = sorted(each.ttft_seconds for each in counted if each.ttft_seconds is not None)
    later = [each.tpot_seconds for each in counted if each.tpot_seconds is not None]
    tail = percentile(first, 90)
    if tail is None:
        return None
    return ArrivalForecast(
        requests_per_second=rate,
        most_requests_per_second=capacity,
        ttft_ms=sum(first) / len(first) * 1e3,
        ttft_p90_ms=tail * 1e3,
        tpot_ms=sum(later) / len(later) * 1e3 if later else None,
        simulated_requests=len(first),
    )


def _clients(plan: Plan) -> int:
    return sum(replica.concurrency for replica in plan.replicas)


def _affordable(plan: Plan, load: Workload, *, in_turn: bool) -> int:
    """Requests; `in_turn`: they may be alone in their steps, else as many share one as the plan has in flight."""
    stages = sum(len(replica.stages) for replica in plan.replicas) / len(plan.replicas)
    under_way = sum(replica.micro_batch.under_way(len(replica.stages)) for replica in plan.replicas)
    together = 1.0 if in_turn else max(1.0, _clients(plan) / under_way)
    return int(min(_MOST_STEPS * together / stages, _MOST_TOKENS) / load.output_tokens)


def _request_seconds(plan: Plan, load: Workload) -> float:
    told = plan.prediction
    return (told.ttft_ms + (load.output_tokens - 1) * told.tpot_ms) / 1e3


def lengths_of(load: Workload) -> tuple[Sequence[int], Sequence[int]]:
    """Of prompts and answers, to draw from: spread as the workload says."""
    return spread(load.prompt_tokens, load.prompt_deviation), spread(load.output_tokens, load.output_deviation)


def _at_random(rate: float, beginning: int, count: int, load: Workload, most: int) -> tuple[Request, ...]:
    """`beginning` requests that are amid their answers at time 0, then `count` at random. Lengths are spread as the workload says and cut to `most`
    tokens; where it says nothing and the longest would be longer than that, all are alike.
    """
    prompts, answers = lengths_of(load)
    there = of_clients(beginning, 1, prompts, answers, _SEED, most)[:beginning]
    said = load.prompt_deviation or load.output_deviation
    if not said and max(prompts) + max(answers) > most:
        return there + poisson(rate, count, load.prompt_tokens, load.output_tokens, _SEED)
    return there + tuple(within(each, most) for each in poisson(rate, count, prompts, answers, _SEED))
