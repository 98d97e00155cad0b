"""Which device to have next: one more of each type, planned with the plan as a hint, ranked by what it gains.

Called by `strata plan --next-device`. A short search of each type, then a thorough one of the few that gain most, by themselves or for
their price.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from strata_planner.answer.compared import (
    Compared,
    Told,
    best_on_own,
    compared,
    planned_beside,
    tell_nobody,
    without_plan,
)
from strata_planner.contract.plan import Plan
from strata_planner.errors import PlannerError
from strata_planner.question.cluster import Cluster
from strata_planner.question.request import PlanRequest
from strata_planner.search.metric import value_of_plan

THOROUGH = 3  # of the types that gain most, and of those that gain most for their price


@dataclass(frozen=True)
class Offer:
    """One device more of a type: the question with it, and its price by the hour, None where nobody named one."""

    type: str
    asked: PlanRequest
    price: float | None


@dataclass(frozen=True)
class Ranked:
    """`thorough`: its plan was searched for as long as the plan itself."""

    offer: Offer
    compared: Compared
    thorough: bool

    @property
    def gain_for_price(self) -> float | None:
        """Gained for an `hourlyCost` of 1: the share of the plan's value."""
        gained = self.compared.gain
        return gained / self.offer.price if gained is not None and self.offer.price else None

    def as_json(self) -> dict[str, Any]:
        own = {"type": self.offer.type, "price": self.offer.price, "gainPerHourlyCost": self.gain_for_price}
        return own | self.compared.as_json() | {"thorough": self.thorough}


def next_device(
    request: PlanRequest, plan: Plan, offers: Sequence[Offer], told: Told = tell_nobody, thorough: int = THOROUGH
) -> tuple[Plan, list[Ranked]]:
    """The plan, or a better one that a search found on the request's own devices; and the offers, best gain first, those without a plan
    last. `thorough`: how many are searched long, by either ranking.
    """
    base = value_of_plan(request, plan)
    found: dict[str, Ranked] = {}
    for offer in offers:
        told(offer.type)
        found[offer.type] = _ranked(offer, plan, request.cluster, base, quick=True)
    by_gain = sorted(found.values(), key=_gain)
    by_price = sorted((each for each in by_gain if each.gain_for_price is not None), key=_gain_for_price)
    for each in dict.fromkeys(each.offer.type for each in (*by_gain[:thorough], *by_price[:thorough])):
        told(f"{each}, thoroughly")
        offer = found[each].offer
        known = found[each].compared.plan
        own = request.cluster if known is None else offer.asked.cluster
        found[each] = _ranked(offer, known or plan, own, base, quick=False)
    return _beside_best(request, plan, list(found.values()))


def _ranked(offer: Offer, plan: Plan, own: Cluster, base: float, *, quick: bool) -> Ranked:
    """`plan`: what is known to be possible on the devices of the cluster `own`."""
    try:
        best = planned_beside(offer.asked, plan, own, quick=quick)
    except PlannerError as error:
        return Ranked(offer, without_plan(offer.type, str(error)), not quick)
    return Ranked(offer, compared(offer.type, offer.asked, best, base), not quick)


def _beside_best(request: PlanRequest, plan: Plan, rows: list[Ranked]) -> tuple[Plan, list[Ranked]]:
    """A plan that leaves the new device idle was to be had without it."""
    plans = [(each.offer.asked, each.compared.plan) for each in rows if each.compared.plan is not None]
    best = best_on_own(request, plan, plans)
    base = value_of_plan(request, best)
    return best, sorted((_beside(each, best, base) for each in rows), key=_gain)


def _beside(each: Ranked, best: Plan, base: float) -> Ranked:
    """`best`: possible with every offer."""
    if each.compared.plan is None:
        return each
    chosen = max((each.compared.plan, best), key=lambda other: value_of_plan(each.offer.asked, other))
    return replace(each, compared=compared(each.offer.type, each.offer.asked, chosen, base))


def _gain(each: Ranked) -> tuple[bool, float, float, str]:
    gained = each.compared.gain
    return gained is None, -(gained or 0.0), each.offer.price or 0.0, each.offer.type


def _gain_for_price(each: Ranked) -> float:
    return -(each.gain_for_price or 0.0)
