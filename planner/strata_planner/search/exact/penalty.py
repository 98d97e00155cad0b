"""A bound on the sum of omega, kept by its price: the pool search with theta raised as little as it takes.

Called by `search`. Without a bound it is one pool search. With one, the price of a unit of penalty is found where the dual
function's two nearest lines meet (Kelley's cutting planes in one dimension): each price gives a plan and a lower bound of all
plans within the bound. What is left between the two is reported as the gap.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from strata_planner.question.request import PlanRequest
from strata_planner.search.exact.candidates import Pricer
from strata_planner.search.exact.effort import Effort
from strata_planner.search.exact.exact import RELATIVE_GAP
from strata_planner.search.exact.found import Found
from strata_planner.search.exact.orders import Fleet, fleet_of
from strata_planner.search.exact.pool_search import PoolSearch, Step
from strata_planner.search.exact.pools import joined, pools
from strata_planner.search.exact.problem import SolutionStatus, StopReason

_PRICES = 24  # tried at most
_DEAR = 1e9  # a price, in seconds of the batch per the bound: dearer than any plan is slow


@dataclass(frozen=True)
class _Line:
    """The dual function touches value + slope * (price - this price)."""

    price: float
    value: float
    slope: float  # penalty beyond the bound


def least_penalty(request: PlanRequest) -> float | None:
    """Of all plans that fit; None where layers cost unlike, or where time was too short."""
    pricer, fleet = Pricer(request), joined(fleet_of(request.cluster))
    if not pricer.alike:
        return None
    effort = Effort.of(request.time_limit_seconds)
    found = PoolSearch(pricer, fleet, _DEAR, RELATIVE_GAP, effort).run(pools(fleet, range(1, fleet.size + 1)))
    return found.problem.penalty(found.solution.counts) if found else None


class PenaltySearch:
    """`run` returns the best plan found, `bound` and `stop` say what is known of it."""

    def __init__(self, pricer: Pricer, fleet: Fleet, effort: Effort, step: Step | None = None) -> None:
        self.stop = StopReason.PROVED
        self.bound = -math.inf
        self.orders = self.candidates = self.solved = 0
        self._pricer, self._fleet, self._effort = pricer, joined(fleet), effort
        self._best: Found | None = None
        self._step = step

    def run(self, stages: Sequence[int]) -> Found | None:
        limit = self._pricer.request.penalty_bound
        if limit is None:
            found, self.bound = self._searched(stages, self._pricer.request.theta)
            return found
        low = self._line(stages, 0.0, limit)
        if low is None or low.slope <= 0:
            return self._best
        high = self._line(stages, _DEAR / max(limit, 1e-9), limit)
        if high is None or high.slope > 0:
            self.bound = math.inf if self.stop is StopReason.PROVED else self.bound
            return None
        for _ in range(_PRICES):
            price = (high.value - low.value + low.slope * low.price - high.slope * high.price) / (
                low.slope - high.slope
            )
            crossing = low.value + low.slope * (price - low.price)
            line = self._line(stages, price, limit)
            if line is None or line.value >= crossing * (1 - RELATIVE_GAP) or self._closed:
                break
            low, high = (line, high) if line.slope > 0 else (low, line)
        return self._best

    @property
    def _closed(self) -> bool:
        return self._best is not None and self.bound >= self._best.solution.objective * (1 - RELATIVE_GAP)

    def _line(self, stages: Sequence[int], price: float, limit: float) -> _Line | None:
        """A search at a price, its plan kept if it is within the limit; None once the effort ends."""
        ended_by = self._effort.ended_by
        if ended_by is not None:
            self.stop = ended_by
            return None
        theta = self._pricer.request.theta
        found, bound = self._searched(stages, theta + price)
        if found is None:
            self.bound = max(self.bound, bound - price * limit)
            return None
        penalty = found.problem.penalty(found.solution.counts)
        value = found.problem.objective(found.solution.counts) + price * (penalty - limit)
        self.bound = max(self.bound, bound - price * limit)
        if found.problem.is_feasible(found.solution.counts):
            self._keep(found)
        return _Line(price, value, penalty - limit)

    def _keep(self, found: Found) -> None:
        objective = found.problem.objective(found.solution.counts)
        if self._best is None or objective < self._best.solution.objective:
            solution = replace(found.solution, objective=objective, status=SolutionStatus.FEASIBLE)
            self._best = replace(found, solution=solution)

    def _searched(self, stages: Sequence[int], theta: float) -> tuple[Found | None, float]:
        bounded = self._pricer.request.penalty_bound is not None  # what a price finds may lie beyond it
        step = None if bounded else self._step
        search = PoolSearch(self._pricer, self._fleet, theta, RELATIVE_GAP, self._effort, step)
        found = search.run(pools(self._fleet, stages))
        if search.stop is not StopReason.PROVED:
            self.stop = search.stop
        self.orders, self.candidates, self.solved = search.orders, search.candidates, search.solved
        return found, search.bound
