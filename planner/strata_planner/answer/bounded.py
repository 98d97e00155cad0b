"""How far a plan is from the best: a bound that no plan of the question passes, where one is proven; else that it is unknown.

Called by `strata plan` and `strata up`. The bound over stages (`search/layouts/bound.py`) is one of tokens a second and of their cost; of latency and of
requests in time none is known. It is proven for groups of equal devices and seconds like a roofline's: not where a node has unlike ones that may share a stage,
for processors, whose steps are padded, for models of many experts, whose steps read more the more tokens they carry, and for measured tables. One pipeline's
bound is its search's own.
"""

import msgspec

from strata_planner.contract.plan import Plan
from strata_planner.question.catalogue import CPU
from strata_planner.question.request import ONE_PIPELINE, PlanRequest
from strata_planner.search.layouts.bound import most_tokens_for, most_tokens_per_second


def with_bound(request: PlanRequest, plan: Plan) -> Plan:
    """The plan that says what no plan of the request passes, in its objective's unit; as it is where that is unknown."""
    if plan.search is None or request.solver in ONE_PIPELINE or not is_proven(request):
        return plan
    bound = bound_of(request)
    return (
        plan
        if bound is None
        else msgspec.structs.replace(plan, search=msgspec.structs.replace(plan.search, bound=bound))
    )


def is_proven(request: PlanRequest) -> bool:
    """Whether groups and the seconds of a step are as the bound's proof wants them."""
    if max(request.tensor_parallel) > 1 and any(len(node.devices) > 1 for node in request.cluster.nodes):
        return False
    processors = any(each.type == CPU for each in request.cluster.accelerators())
    measured, experts = bool(request.latency_sources), request.model.has_experts
    return not (processors or measured or experts) and request.workload.output_tokens > 1


def bound_of(request: PlanRequest) -> float | None:
    """None for a goal of which no bound is known."""
    match request.objective.goal:
        case "throughput":
            return most_tokens_per_second(request)
        case "cost":
            return 1e6 / most_tokens_for(request)
        case _:
            return None
