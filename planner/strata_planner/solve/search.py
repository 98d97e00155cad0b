"""The search for a plan: every candidate is bounded, the most promising are solved first, the rest never.

Called by `planning`. Best-first with the incumbent as cut-off: once the next bound is no better than what is held, nothing
is left to find. A time limit returns the incumbent; a first one is always at hand (everything at the fewest bits).
"""

import math
import time
from dataclasses import dataclass
from itertools import accumulate

from strata_planner.request import PlanRequest
from strata_planner.solve.bounds import lower_bound
from strata_planner.solve.candidates import Candidate, Pricer
from strata_planner.solve.exact import solve
from strata_planner.solve.feasibility import at_fewest_bits
from strata_planner.solve.orders import Fleet, fleet_of, orders
from strata_planner.solve.problem import Counts, Problem, Solution, SolutionStatus, StopReason

ORDER_LIMIT = 5000  # different device orders looked at; only large fleets of unlike devices have more
_ENUMERATION_SHARE = 0.3  # of the time limit
_IMPROVEMENT = 1e-6  # an incumbent is replaced by what is better by at least this share


@dataclass(frozen=True)
class SearchStats:
    """`pruned`: candidates whose bound or cut-off ruled them out; `solved`: ILPs run."""

    orders: int
    candidates: int
    pruned: int
    solved: int
    seconds: float
    stop: StopReason
    status: SolutionStatus


@dataclass(frozen=True)
class Found:
    """The best candidate with its solution."""

    candidate: Candidate
    problem: Problem
    solution: Solution


class Search:
    """One search. `run` returns the best plan found, or None, with what it took."""

    def __init__(self, request: PlanRequest) -> None:
        self.pricer = Pricer(request)
        self._request = request
        self._started = time.monotonic()
        self._best: Found | None = None
        self._orders = 0
        self._hops: dict[tuple[object, ...], list[tuple[float, ...]]] = {}
        self._solved = 0
        self._stop = StopReason.PROVED

    def run(self) -> tuple[Found | None, SearchStats]:
        ranked = self._ranked()
        left = len(ranked)
        for bound, _, candidate in ranked:
            if bound >= self._cutoff():
                break
            left -= 1
            remaining = self._remaining()
            if remaining <= 0:
                self._stop = StopReason.TIME_LIMIT
                break
            self._improve(candidate, remaining)
        return self._best, self._stats(len(ranked), left)

    def _improve(self, candidate: Candidate, seconds: float) -> None:
        problem = self.pricer.problem(candidate)
        self._offer(candidate, problem, at_fewest_bits(problem))
        self._solved += 1
        solution = solve(problem, self._cutoff(), seconds)
        if solution.stop is StopReason.TIME_LIMIT:
            self._stop = StopReason.TIME_LIMIT
        if solution.counts and solution.objective < self._cutoff():
            self._best = Found(candidate, problem, solution)

    def _offer(self, candidate: Candidate, problem: Problem, counts: Counts | None) -> None:
        """A first plan without any solving: what the time limit falls back to."""
        if counts is None or self._best is not None:
            return
        solution = Solution(SolutionStatus.FEASIBLE, StopReason.TIME_LIMIT, counts, problem.objective(counts))
        self._best = Found(candidate, problem, solution)

    def _ranked(self) -> list[tuple[float, int, Candidate]]:
        """Candidates that memory does not rule out, least bound first."""
        ranked: list[tuple[float, int, Candidate]] = []
        fleet = fleet_of(self._request.cluster)
        least = self.pricer.least_weight_bytes
        for order in orders(fleet, lengths(self._request, fleet, least)):
            if self._orders >= ORDER_LIMIT:
                self._stop = StopReason.ORDER_LIMIT
                break
            if self._remaining() < (1 - _ENUMERATION_SHARE) * self._request.time_limit_seconds:
                self._stop = StopReason.TIME_LIMIT
                break
            self._orders += 1
            if sum(group.usable_bytes * group.degree for group in order) < least:
                continue
            for candidate in self.pricer.micro_batches(order):
                problem = self.pricer.problem(candidate)
                bound = lower_bound(problem)
                if math.isfinite(bound) and not self._is_dominated(problem):
                    ranked.append((bound, len(ranked), candidate))
        return sorted(ranked, key=lambda each: each[:2])

    def _is_dominated(self, problem: Problem) -> bool:
        """Whether a candidate seen before has the same stages in another order and no slower hops."""
        if problem.signature is None:
            return False
        seen = self._hops.setdefault(problem.signature, [])
        if any(all(a <= b for a, b in zip(hops, problem.hops, strict=True)) for hops in seen):
            return True
        seen.append(problem.hops)
        return False

    def _cutoff(self) -> float:
        return self._best.solution.objective * (1 - _IMPROVEMENT) if self._best else math.inf

    def _remaining(self) -> float:
        return self._started + self._request.time_limit_seconds - time.monotonic()

    def _stats(self, candidates: int, pruned: int) -> SearchStats:
        seconds = time.monotonic() - self._started
        if self._best is None:
            status = SolutionStatus.INFEASIBLE if self._stop is StopReason.PROVED else SolutionStatus.UNKNOWN
        else:
            status = SolutionStatus.OPTIMAL if self._stop is StopReason.PROVED else SolutionStatus.FEASIBLE
        return SearchStats(self._orders, candidates, pruned, self._solved, seconds, self._stop, status)


def lengths(request: PlanRequest, fleet: Fleet, least_bytes: int) -> range:
    """How many stages a plan may have: as many as are wished, and at least what it takes to hold `least_bytes`."""
    most = min(fleet.size, request.model.num_layers, request.max_stages or fleet.size)
    sizes = sorted((device.usable_bytes for members in fleet.devices for device in members), reverse=True)
    enough = next((count for count, held in enumerate(accumulate(sizes), 1) if held >= least_bytes), most + 1)
    return range(max(request.min_stages, enough), most + 1)
