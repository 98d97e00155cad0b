"""How far a plan is from the best: a bound that no plan of the question passes, where one is proven; else that it is unknown.

Called by `strata plan` and `strata up`. The bound over stages (`search/layouts/bound.py`) is one of tokens a second and of their cost. By Little's law it is one
of latency too: who is answered in turns of so many in flight waits, in the mean, all that are asked for over the rate; and no request is quicker than one row
through every layer. Who is in time is bounded by both. It is proven for groups of equal devices and seconds like a roofline's: not where a node has unlike ones that may share a stage,
for processors, whose steps are padded, for models of many experts, whose steps read more the more tokens they carry, and for measured tables. One pipeline's
bound is its search's own.
"""

import msgspec

from strata_planner.contract.plan import Plan
from strata_planner.question.catalogue import CPU
from strata_planner.question.request import ONE_PIPELINE, PlanRequest
from strata_planner.search.layouts.bound import least_request_seconds, most_tokens_for, most_tokens_per_second
from strata_planner.search.metric import share_in_time


def with_bound(request: PlanRequest, plan: Plan) -> Plan:
    """The plan that says what no plan of the request passes, in its objective's unit; as it is where that is unknown."""
    if plan.search is None or request.solver in ONE_PIPELINE or not is_proven(request):
        return plan
    return msgspec.structs.replace(plan, search=msgspec.structs.replace(plan.search, bound=bound_of(request)))


def is_proven(request: PlanRequest) -> bool:
    """Whether groups and the seconds of a step are as the bound's proof wants them."""
    if max(request.tensor_parallel) > 1 and any(len(node.devices) > 1 for node in request.cluster.nodes):
        return False
    processors = any(each.type == CPU for each in request.cluster.accelerators())
    measured, experts = bool(request.latency_sources), request.model.has_experts
    return not (processors or measured or experts) and request.workload.output_tokens > 1


def bound_of(request: PlanRequest) -> float:
    """In the goal's own unit; of bits nothing is counted."""
    if request.objective.goal == "cost":
        return 1e6 / most_tokens_for(request)
    load, goal, rate = request.workload, request.objective, most_tokens_per_second(request)
    match goal.goal:
        case "latency":
            return max(load.concurrency * load.output_tokens / max(rate, 1e-300), least_request_seconds(request))
        case "slo":
            assert goal.deadline_seconds is not None, "the request is checked"
            assert goal.requests_per_second is not None, "the request is checked"
            served = min(1.0, rate / load.output_tokens / goal.requests_per_second)
            return served * share_in_time(goal.deadline_seconds, least_request_seconds(request))
        case _:
            return rate
