"""What other devices would change: each changed cluster is planned with the plan as a hint, and compared by the request's metric.

Called by `strata plan --what-if`. Devices more are never worse, for the plan stays possible; a plan that turns out to be better on
fewer devices is the better plan of all of them.
"""

from collections.abc import Sequence

from strata_planner.answer.compared import (
    Compared,
    Told,
    best_on_own,
    compared,
    is_whole,
    planned_beside,
    tell_nobody,
    why_none,
    without_plan,
)
from strata_planner.contract.plan import Plan
from strata_planner.errors import PlannerError
from strata_planner.question.request import PlanRequest
from strata_planner.search.metric import value_of_plan

Variant = tuple[str, PlanRequest]  # its name, and the question with its cluster


def what_if(
    request: PlanRequest, plan: Plan, variants: Sequence[Variant], told: Told = tell_nobody, *, quick: bool = False
) -> tuple[Plan, list[Compared]]:
    """The plan, or a better one that a variant's search found on the request's own devices; and each variant beside it. `quick`: by
    short searches.
    """
    found: list[Plan | str] = []
    for name, asked in variants:
        told(name)
        found.append(_planned(asked, request, plan, quick=quick))
    plans = [(asked, other) for (_, asked), other in zip(variants, found, strict=True) if isinstance(other, Plan)]
    best = best_on_own(request, plan, plans)
    base = value_of_plan(request, best)
    rows = []
    for (name, asked), other in zip(variants, found, strict=True):
        stays = is_whole(best, request.cluster, asked.cluster)
        tried = [each for each in (other, best if stays else "") if isinstance(each, Plan)]
        if tried:
            rows.append(compared(name, asked, max(tried, key=lambda each: value_of_plan(asked, each)), base))
        else:
            rows.append(without_plan(name, str(other)))
    return best, rows


def _planned(asked: PlanRequest, request: PlanRequest, plan: Plan, *, quick: bool) -> Plan | str:
    """Or why there is none."""
    try:
        return planned_beside(asked, plan, request.cluster, quick=quick)
    except PlannerError as error:
        return why_none(error)
