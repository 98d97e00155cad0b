"""The search for a plan: which method answers a request, within its time limit and its bound on the penalty.

Called by `planning` and by replanning. Layers that cost alike go to `pool_search`; others, and requests for LLM-PQ's ILP or
its heuristic, to `order_search`.
"""

import math
import time
from itertools import accumulate

from strata_planner.question.request import PlanRequest
from strata_planner.search.exact import exact, transfer
from strata_planner.search.exact.candidates import Pricer
from strata_planner.search.exact.effort import Effort
from strata_planner.search.exact.found import Found, SearchStats, gap_of, status_of
from strata_planner.search.exact.order_search import OrderSearch, Solve
from strata_planner.search.exact.orders import Fleet, fleet_of
from strata_planner.search.exact.penalty import PenaltySearch
from strata_planner.search.exact.widths import narrowings
from strata_planner.search.watch import Progress, Watch, best_of_all, unwatched

__all__ = ["Found", "Search", "SearchStats", "lengths"]

_SOLVERS: dict[str, Solve] = {"exact": exact.reference, "transfer": transfer.solve}  # the others: exact.solve


class Search:
    """One search. `run` returns the best plan found, or None, with what it took; `pricer` is then that of the widths it was found among.

    `narrower`: the requests with fewer widths that are searched beside it. `work`: as `Effort` counts it, beside the request's time.
    """

    def __init__(self, request: PlanRequest, watch: Watch = unwatched, work: float = math.inf) -> None:
        self.pricer = Pricer(request)
        self.narrower = narrowings(request)[1:]
        self._limit = request.time_limit_seconds
        self._effort = Effort.of(self._limit, work)
        self._watch = best_of_all(watch)

    def run(self) -> tuple[Found | None, SearchStats]:
        best, stats = self._searched(self.pricer)
        for narrower in self.narrower:
            ended_by = self._effort.ended_by
            if ended_by is not None:
                stats = stats.cut(ended_by)
                break
            pricer = Pricer(narrower)
            found, told = self._searched(pricer)
            if found and (best is None or found.solution.objective < best.solution.objective):
                best, self.pricer = found, pricer
            stats = stats.with_others(told, best.solution.objective if best else math.inf)
        return best, stats

    def _searched(self, pricer: Pricer) -> tuple[Found | None, SearchStats]:
        request, started = pricer.request, time.monotonic()
        fleet = fleet_of(request.cluster)
        stages = lengths(request, fleet, pricer.least_weight_bytes)
        if request.solver not in _SOLVERS and pricer.alike:
            pooled = PenaltySearch(pricer, fleet, self._effort, self._step)
            return _told(pooled.run(stages), pooled, started)
        single = OrderSearch(pricer, fleet, self._effort, _SOLVERS.get(request.solver, exact.solve), self._step)
        return _told(single.run(stages), single, started)

    def _step(self, objective: float) -> None:
        """The best so far, infinite before the first."""
        done = min(1.0, 1 - self._effort.seconds / self._limit) if self._limit else 1.0
        self._watch(Progress(-objective if math.isfinite(objective) else None, done))


def _told(found: Found | None, by: PenaltySearch | OrderSearch, started: float) -> tuple[Found | None, SearchStats]:
    objective = found.solution.objective if found else math.inf
    stats = SearchStats(
        orders=by.orders,
        candidates=by.candidates,
        pruned=by.candidates - by.solved,
        solved=by.solved,
        seconds=time.monotonic() - started,
        stop=by.stop,
        status=status_of(objective, by.bound, by.stop),
        bound=by.bound,
        gap=gap_of(objective, by.bound),
    )
    return found, stats


def lengths(request: PlanRequest, fleet: Fleet, least_bytes: int) -> range:
    """How many stages a plan may have: as many as are wished, and at least what it takes to hold `least_bytes`."""
    most = min(fleet.size, request.model.num_layers, request.max_stages or fleet.size)
    sizes = sorted((device.usable_bytes for members in fleet.devices for device in members), reverse=True)
    enough = next((count for count, held in enumerate(accumulate(sizes), 1) if held >= least_bytes), most + 1)
    return range(max(request.min_stages, enough), most + 1)
