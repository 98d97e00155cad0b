"""What a plan's users see while requests come at random, as often as the workload says: a short simulation of the plan.

Called by `strata plan` and `strata up`. A plan's own figures are of a closed loop, each request followed by the next; at random they come in bunches,
and find less or more in flight than that. The simulation begins amid the steady state (Little's law), and only who comes after those it begins with
counts. What it may cost is counted in steps of stages, whatever the machine.
"""

import math

import msgspec

from strata_planner.contract.forecast import ArrivalForecast
from strata_planner.contract.plan import Plan
from strata_planner.costs.latency import Latencies
from strata_planner.question.request import PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.simulate.outcome import percentile
from strata_planner.simulate.replica import fleet
from strata_planner.simulate.simulation import simulate
from strata_planner.simulate.trace import Request, of_clients, poisson

_MOST_STEPS = 200_000  # of stages: a second or so
_MOST, _FEWEST = 1000, 40  # requests that are counted
_SEED = 1
_FULL = 0.98  # of what a plan answers: from there on queues grow for longer than anybody waits


def with_arrivals(plan: Plan, request: PlanRequest) -> Plan:
    """The plan with what its users see in its prediction."""
    told = msgspec.structs.replace(plan.prediction, arrivals=arrivals(plan, request))
    return msgspec.structs.replace(plan, prediction=told)


def arrivals(plan: Plan, request: PlanRequest) -> ArrivalForecast | None:
    """None where nobody says how often requests come, or where a plan is too large for a short simulation."""
    rate, load = request.objective.requests_per_second, request.workload
    if rate is None:
        return None
    capacity = plan.prediction.tokens_per_second / load.output_tokens
    if rate >= _FULL * capacity:
        return ArrivalForecast(rate, capacity)
    beginning = max(1, math.ceil(rate * _request_seconds(plan, load)))
    stages = sum(len(replica.stages) for replica in plan.replicas) / len(plan.replicas)
    count = min(beginning + _MOST, int(_MOST_STEPS / stages / load.output_tokens))
    if count < beginning + _FEWEST:
        return None
    replicas = fleet(plan, request.model, request.cluster, Latencies(request.latency_sources))
    most = min(replica.limits.most_tokens for replica in replicas)
    outcome = simulate(replicas, _trace(rate, beginning, count, load, most))
    counted = outcome.requests[2 * beginning :]
    first = sorted(each.ttft_seconds for each in counted if each.ttft_seconds is not None)
    later = [each.tpot_seconds for each in counted if each.tpot_seconds is not None]
    if not first:
        return None
    tail = percentile(first, 90)
    assert tail is not None, "there are some"
    return ArrivalForecast(
        requests_per_second=rate,
        most_requests_per_second=capacity,
        ttft_ms=sum(first) / len(first) * 1e3,
        ttft_p90_ms=tail * 1e3,
        tpot_ms=sum(later) / len(later) * 1e3 if later else None,
        simulated_requests=len(first),
    )


def _request_seconds(plan: Plan, load: Workload) -> float:
    told = plan.prediction
    return (told.ttft_ms + (load.output_tokens - 1) * told.tpot_ms) / 1e3


def _trace(rate: float, beginning: int, count: int, load: Workload, most: int) -> tuple[Request, ...]:
    """`beginning` requests that are amid their answers at time 0, then `count` at random. Lengths from half to one and a half of the workload's, or all
    alike where the longest of these would be longer than `most` tokens.
    """
    means = (load.prompt_tokens, load.output_tokens)
    there = of_clients(beginning, 1, *means, _SEED, most)[:beginning]
    if sum(mean * 3 // 2 for mean in means) > most:
        return there + poisson(rate, count, *means, _SEED)
    prompts, answers = (range(-(-mean // 2), mean * 3 // 2 + 1) for mean in means)
    return there + poisson(rate, count, prompts, answers, _SEED)
