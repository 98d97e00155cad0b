"""What a search gives: the best candidate with its solution, and what finding it took.

Made by `search`, `transfer` and `baselines`; read by assembly, prediction, explanation and benchmarks.
"""

import math
from dataclasses import dataclass

from strata_planner.solve.candidates import Candidate
from strata_planner.solve.problem import Problem, Solution, SolutionStatus, StopReason


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


def gap_of(objective: float, bound: float) -> float:
    """How far the bound is below the objective, as a share of it; 0 where it is not below."""
    if not math.isfinite(bound) or not math.isfinite(objective):
        return 0.0 if bound >= objective else math.inf
    return max(0.0, objective - bound) / objective if objective > 0 else 0.0
