"""What `strata plan` and `strata up` tell of a plan beside its own prediction: how far the best can be from it, what its users see, what speculation brings."""

from strata_operator.local.acceptance import kept_acceptance
from strata_planner.answer.bounded import with_bound
from strata_planner.contract.plan import Plan
from strata_planner.question.request import PlanRequest
from strata_planner.simulate.arrivals import with_arrivals
from strata_planner.simulate.speculation import with_forecast


def foretold(plan: Plan, request: PlanRequest, *, simulated: bool) -> Plan:
    """`simulated`: with its users, which takes a second."""
    plan = with_bound(request, plan)
    if simulated:
        plan = with_arrivals(plan, request)
    return with_forecast(plan, request, kept_acceptance(request.model_uri, plan.speculation))
