"""The best split of one candidate, proven: the decomposition where its units are alike, the ILP elsewhere.

Called by `search` and by replanning. Knows only the Problem.
"""

import math
import threading
from functools import lru_cache

import numpy as np

from strata_planner.search.exact.blocks import MOST_ENTRIES, Blocks
from strata_planner.search.exact.decomposition import Decomposition, Pipeline
from strata_planner.search.exact.effort import Effort
from strata_planner.search.exact.lattice import alike, lattice_of, unit_runs
from strata_planner.search.exact.problem import Counts, Problem, Solution, SolutionStatus, StopReason

ROUNDS = 20
FIRST_SLACK, WIDER = 0.003, 3.0  # how far above the bound a solution is looked for first, and by what that grows
RELATIVE_GAP = 1e-6


def solve(problem: Problem, cutoff: float = math.inf, effort: Effort | None = None) -> Solution:
    """The best split of this candidate that beats `cutoff`; INFEASIBLE where there is none. `effort` is spent; None: it takes what it takes."""
    effort = effort or Effort()
    solver = _decomposition(problem, effort)
    if solver is None:
        return reference(problem, cutoff, effort)
    solver.tune(cutoff, ROUNDS)
    finish(solver, cutoff, RELATIVE_GAP)
    done = solver.bound >= min(cutoff, solver.objective * (1 - RELATIVE_GAP))
    stop = StopReason.PROVED if done else effort.ended_by or StopReason.TIME_LIMIT
    if solver.best is None or solver.objective > cutoff:
        return Solution(SolutionStatus.INFEASIBLE if done else SolutionStatus.UNKNOWN, stop)
    counts = counts_of(solver, solver.best, unit_runs(problem))
    status = SolutionStatus.OPTIMAL if done else SolutionStatus.FEASIBLE
    return Solution(status, stop, counts, problem.objective(counts), solver.bound)


def reference(problem: Problem, cutoff: float = math.inf, effort: Effort | None = None) -> Solution:
    """The same by LLM-PQ's ILP, whose work nobody counts."""
    from strata_planner.search.exact import ilp  # noqa: PLC0415  the solver takes longer to load than most plans to make

    return ilp.solve(problem, cutoff, effort)


def _decomposition(problem: Problem, effort: Effort) -> Decomposition | None:
    """None where the units' costs or a bound of the penalty need the ILP."""
    if not alike(problem) or math.isfinite(problem.penalty_bound):
        return None
    lattice = lattice_of(problem)
    solver = Decomposition(lattice, _blocks(lattice.penalty.tobytes(), lattice.penalty.shape[1]), effort)
    return solver if solver.table_entries <= MOST_ENTRIES else None


def _blocks(penalty: bytes, bits: int) -> Blocks:
    """Shared by the candidates of a search, whose units have the same penalties; not by threads, for they grow while they are used."""
    return _of_thread(threading.get_ident(), penalty, bits)


@lru_cache(maxsize=4)
def _of_thread(_: int, penalty: bytes, bits: int) -> Blocks:
    return Blocks(np.frombuffer(penalty).reshape(-1, bits))


def finish(solver: Decomposition, cutoff: float, tolerance: float) -> None:
    """Search ever further above the bound, until a solution is found and proven or none is left below `cutoff`, or the solver's effort ends."""
    slack = FIRST_SLACK
    while solver.bound < min(cutoff, solver.objective * (1 - tolerance)) and solver.effort.ended_by is None:
        ceiling = solver.bound + slack * max(abs(solver.bound), 1e-9)
        solver.solve(min(cutoff, ceiling), tolerance)
        slack *= WIDER


def counts_of(solver: Decomposition, pipeline: Pipeline, runs: list[int]) -> Counts:
    """Units per (run, stage, bits); `runs`: the run of each unit."""
    counts: Counts = {}
    for j, part in enumerate(pipeline.parts):
        for unit, bits in zip(range(part.first, part.end), solver.unit_bits(part), strict=True):
            key = (runs[unit], j, bits)
            counts[key] = counts.get(key, 0) + 1
    return counts
