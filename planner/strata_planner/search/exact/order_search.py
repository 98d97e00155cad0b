"""The best plan over all device orders and micro-batch pairs, each candidate on its own, least bound first.

Called by `search` where layers cost unlike, and where a user asks for LLM-PQ's ILP or for its heuristic. Best-first with the
incumbent as cut-off: once the next bound is no better than what is held, nothing is left to find.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from strata_planner.search.exact.bounds import lower_bound, pooled_bound
from strata_planner.search.exact.candidates import Candidate, Pricer
from strata_planner.search.exact.effort import Effort
from strata_planner.search.exact.feasibility import at_fewest_bits
from strata_planner.search.exact.found import Found
from strata_planner.search.exact.lattice import alike, lattice_of
from strata_planner.search.exact.orders import Fleet, orders
from strata_planner.search.exact.pool_search import ENUMERATION_SHARE, ORDER_LIMIT, WORK_OF_BOUND, Step
from strata_planner.search.exact.problem import Counts, Problem, Solution, SolutionStatus, StopReason

Solve = Callable[[Problem, float, Effort], Solution]  # of a candidate, below a cutoff

_IMPROVEMENT = 1e-6  # an incumbent is replaced by what is better by at least this share


@dataclass
class OrderSearch:
    """One search. `run` returns the best plan found, `bound` and `stop` say what is known of it."""

    pricer: Pricer
    fleet: Fleet
    effort: Effort
    solve: Solve
    step: Step | None = None
    stop: StopReason = StopReason.PROVED
    bound: float = math.inf
    orders: int = 0
    candidates: int = 0
    solved: int = 0

    def __post_init__(self) -> None:
        self._best: Found | None = None
        self._hops: dict[tuple[object, ...], list[tuple[float, ...]]] = {}
        self._unsolved: list[float] = []

    def run(self, lengths: Sequence[int]) -> Found | None:
        ranked = self._ranked(lengths)
        self.candidates = len(ranked)
        for at, (bound, _, candidate) in enumerate(ranked):
            if bound >= self._cutoff():
                break
            ended_by = self.effort.ended_by
            if ended_by is not None:
                self.stop = ended_by
                self._unsolved += [each[0] for each in ranked[at:]]
                break
            self._improve(candidate, bound)
            if self.step is not None:
                self.step(self._best.solution.objective if self._best else math.inf)
        held = self._best.solution.objective * (1 - _IMPROVEMENT) if self._best else math.inf
        self.bound = min([held, *self._unsolved])
        return self._best

    def _improve(self, candidate: Candidate, bound: float) -> None:
        problem = self.pricer.problem(candidate)
        self._offer(candidate, problem, at_fewest_bits(problem))
        self.solved += 1
        solution = self.solve(problem, self._cutoff(), self.effort)
        if solution.stop in {StopReason.TIME_LIMIT, StopReason.WORK_LIMIT}:
            self.stop = solution.stop
        if solution.status in {SolutionStatus.FEASIBLE, SolutionStatus.UNKNOWN}:
            self._unsolved.append(max(bound, solution.bound))
        if solution.counts and solution.objective < self._cutoff():
            self._best = Found(candidate, problem, solution)

    def _offer(self, candidate: Candidate, problem: Problem, counts: Counts | None) -> None:
        """A first plan without any solving: what the time limit falls back to."""
        if counts is None or self._best is not None or not problem.is_feasible(counts):
            return
        solution = Solution(SolutionStatus.FEASIBLE, StopReason.TIME_LIMIT, counts, problem.objective(counts))
        self._best = Found(candidate, problem, solution)

    def _ranked(self, lengths: Sequence[int]) -> list[tuple[float, int, Candidate]]:
        """Candidates that memory does not rule out, least bound first."""
        ranked: list[tuple[float, int, Candidate]] = []
        least = self.pricer.least_weight_bytes
        enough = self.effort.until(ENUMERATION_SHARE)
        for order in orders(self.fleet, lengths):
            if self.orders >= ORDER_LIMIT or enough():
                self.stop = StopReason.ORDER_LIMIT if self.orders >= ORDER_LIMIT else self.effort.share_ended_by
                self._unsolved.append(0.0)
                break
            self.orders += 1
            if sum(group.usable_bytes * group.degree for group in order) < least:
                continue
            for candidate in self.pricer.micro_batches(order):
                problem = self.pricer.problem(candidate)
                self.effort.spend(WORK_OF_BOUND)
                bound = pooled_bound(lattice_of(problem)) if alike(problem) else lower_bound(problem)
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
