"""What a search gives: the best candidate with its solution, and what finding it took.

Made by `search` and `transfer`, and by the methods that benchmarks compare with; read by assembly, prediction, explanation and benchmarks.
"""

import math
from dataclasses import dataclass, replace

from strata_planner.search.exact.candidates import Candidate
from strata_planner.search.exact.exact import RELATIVE_GAP
from strata_planner.search.exact.problem import Problem, Solution, SolutionStatus, StopReason


@dataclass(frozen=True)
class Found:
    """The best candidate with its solution."""

    candidate: Candidate
    problem: Problem
    solution: Solution


@dataclass(frozen=True)
class SearchStats:
    """`pruned`: candidates that a bound ruled out; `solved`: candidates whose splits were searched. `bound`: no plan is below
    it; `gap`: how far below the plan it is, as a share.
    """

    orders: int
    candidates: int
    pruned: int
    solved: int
    seconds: float
    stop: StopReason
    status: SolutionStatus
    bound: float = -math.inf
    gap: float = math.inf

    def cut(self, stop: StopReason) -> "SearchStats":
        """Where more was to be searched: nothing is known of all plans together."""
        status = SolutionStatus.UNKNOWN if self.status is SolutionStatus.INFEASIBLE else self.status
        status = SolutionStatus.FEASIBLE if status is SolutionStatus.OPTIMAL else status
        return replace(self, stop=stop, status=status, bound=-math.inf, gap=math.inf)

    def with_others(self, told: "SearchStats", objective: float) -> "SearchStats":
        """Of two searches over two sets of plans as of one over both; `objective`: of the best plan of both."""
        bound = min(self.bound, told.bound)
        stop = self.stop if told.stop is StopReason.PROVED else told.stop
        return SearchStats(
            orders=self.orders + told.orders,
            candidates=self.candidates + told.candidates,
            pruned=self.pruned + told.pruned,
            solved=self.solved + told.solved,
            seconds=self.seconds + told.seconds,
            stop=stop,
            status=status_of(objective, bound, stop),
            bound=bound,
            gap=gap_of(objective, bound),
        )


def status_of(objective: float, bound: float, stop: StopReason) -> SolutionStatus:
    """`objective`: infinite where no plan was found."""
    proved = stop is StopReason.PROVED
    if math.isinf(objective):
        return SolutionStatus.INFEASIBLE if proved else SolutionStatus.UNKNOWN
    near = gap_of(objective, bound) <= 2 * RELATIVE_GAP
    return SolutionStatus.OPTIMAL if proved and near else SolutionStatus.FEASIBLE


def gap_of(objective: float, bound: float) -> float:
    """How far the bound is below the objective, as a share of it; 0 where it is not below."""
    if not math.isfinite(bound) or not math.isfinite(objective):
        return 0.0 if bound >= objective else math.inf
    return max(0.0, objective - bound) / objective if objective > 0 else 0.0
