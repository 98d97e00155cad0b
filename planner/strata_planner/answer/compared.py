"""Plans beside the one that is in force or was found, by the request's own metric: what `what_if`, `next_device` and `front` tell.

Knows no way to change a cluster and no way to print.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from strata_planner.answer.unused import with_unused
from strata_planner.contract.plan import Plan
from strata_planner.errors import InfeasibleError, PlannerError
from strata_planner.question.cluster import Cluster
from strata_planner.question.request import PlanRequest
from strata_planner.search.metric import Metric, gain, value_of_plan
from strata_planner.search.planning import make_plan

Told = Callable[[str], None]  # is called with the name of what is looked at next


def tell_nobody(_name: str) -> None:
    """Where nobody waits."""


@dataclass(frozen=True)
class Compared:
    """`gain`: the share of the base's value that is won, negative where it is lost. `hourly_cost`: of the devices that the plan uses, None
    where a price of them is not known. Without a plan `reason` says why there is none.
    """

    name: str
    plan: Plan | None
    value: float | None
    said: str
    gain: float | None
    hourly_cost: float | None
    reason: str = ""

    @property
    def cost_per_million_tokens(self) -> float | None:
        """At the plan's predicted rate, in the currency of `hourlyCost`."""
        if self.plan is None or self.hourly_cost is None:
            return None
        return self.hourly_cost / 3600 / self.plan.prediction.tokens_per_second * 1e6

    def as_json(self) -> dict[str, Any]:
        """Camel case, null for what is not known."""
        told = None if self.plan is None else self.plan.prediction
        return {
            "name": self.name,
            "value": self.value,
            "said": self.said,
            "gain": self.gain,
            "tokensPerSecond": told and told.tokens_per_second,
            "ttftMs": told and told.ttft_ms,
            "tpotMs": told and told.tpot_ms,
            "qualityPenalty": told and told.quality_penalty,
            "perplexityIncrease": told and told.perplexity_increase,
            "boundBy": told and told.bound_by,
            "hourlyCost": self.hourly_cost,
            "costPerMillionTokens": self.cost_per_million_tokens,
            "reason": self.reason or None,
        }


def compared(name: str, request: PlanRequest, plan: Plan, base: float) -> Compared:
    """`base`: the value that the plan's is compared with."""
    value = value_of_plan(request, plan)
    said = Metric.for_request(request).said(value)
    return Compared(name, plan, value, said, gain(value, base), hourly_cost(request.cluster, plan))


def without_plan(name: str, reason: str) -> Compared:
    return Compared(name, None, None, "-", None, None, reason)


def hourly_cost(cluster: Cluster, plan: Plan) -> float | None:
    """Of all devices that the plan uses; None where one has no price."""
    used = plan.places
    costs = [each.hourly_cost for each in cluster.accelerators() if each.place in used]
    known = [cost for cost in costs if cost is not None]
    return sum(known) if len(known) == len(costs) else None


def planned_beside(request: PlanRequest, plan: Plan, own: Cluster, *, quick: bool = False) -> Plan:
    """The best that is found for a question that differs from the plan's own in its devices: never worse than the plan where this can
    stay as it is. Raises PlannerError where nothing is found.
    """
    stays = is_whole(plan, own, request.cluster)
    try:
        outcome = make_plan(request, [plan], quick=quick)
        found = outcome.plan if quick else with_unused(request, outcome).plan  # each idle device forced in, too
    except PlannerError:
        if stays:
            return plan
        raise
    return max((plan, found), key=lambda each: value_of_plan(request, each)) if stays else found


def best_on_own(request: PlanRequest, plan: Plan, found: Iterable[tuple[PlanRequest, Plan]]) -> Plan:
    """The plan, or the best of those found for other clusters that the request's own devices can run."""
    possible = [other for asked, other in found if is_whole(other, asked.cluster, request.cluster)]
    return max((plan, *possible), key=lambda each: value_of_plan(request, each))


def why_none(error: PlannerError) -> str:
    """In one line."""
    return f"does not fit: {error.reasons[0]}" if isinstance(error, InfeasibleError) else str(error)


def is_whole(plan: Plan, own: Cluster, other: Cluster) -> bool:
    """Whether the other cluster has all of the plan's devices as its own has them, whatever they cost."""
    places = plan.places
    held, there = (
        {each.place: (each.profile, each.usable_bytes) for each in cluster.accelerators() if each.place in places}
        for cluster in (own, other)
    )
    return held == there
