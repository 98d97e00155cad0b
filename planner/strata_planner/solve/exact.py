"""The best split of one candidate, proven: the decomposition where its units are alike, the ILP elsewhere.

Called by `search` and by replanning. Knows only the Problem.
"""

import math
import time

from strata_planner.solve import ilp
from strata_planner.solve.blocks import Blocks, table_entries
from strata_planner.solve.decomposition import Decomposition, Pipeline
from strata_planner.solve.lattice import alike, lattice_of, unit_runs
from strata_planner.solve.problem import Counts, Problem, Solution, SolutionStatus, StopReason

MOST_ENTRIES = 12_000_000  # of the penalties' tables; beyond, the ILP
_ROUNDS = 20
_FIRST_SLACK, _WIDER = 0.003, 3.0  # how far above the bound a solution is looked for first, and by what that grows
RELATIVE_GAP = 1e-6


def solve(problem: Problem, cutoff: float = math.inf, time_limit_seconds: float | None = None) -> Solution:
    """The best split of this candidate that beats `cutoff`; INFEASIBLE where there is none."""
    if not decomposable(problem):
        return ilp.solve(problem, cutoff, time_limit_seconds)
    deadline = time.monotonic() + (math.inf if time_limit_seconds is None else time_limit_seconds)
    lattice = lattice_of(problem)
    solver = Decomposition(lattice, Blocks(lattice.penalty))
    solver.tune(cutoff, _ROUNDS)
    finish(solver, cutoff, RELATIVE_GAP, deadline)
    done = solver.bound >= min(cutoff, solver.objective) * (1 - RELATIVE_GAP)
    stop = StopReason.PROVED if done else StopReason.TIME_LIMIT
    if solver.best is None or solver.objective > cutoff:
        return Solution(SolutionStatus.INFEASIBLE if done else SolutionStatus.UNKNOWN, stop)
    counts = counts_of(solver, solver.best, unit_runs(problem))
    status = SolutionStatus.OPTIMAL if done else SolutionStatus.FEASIBLE
    return Solution(status, stop, counts, problem.objective(counts), solver.bound)


def decomposable(problem: Problem) -> bool:
    units, places = sum(run.units for run in problem.runs), len(problem.stages)
    return alike(problem) and table_entries(units, units - places + 1, len(problem.runs[0].omega)) <= MOST_ENTRIES


def finish(solver: Decomposition, cutoff: float, tolerance: float, deadline: float) -> None:
    """Search ever further above the bound, until a solution is found and proven or none is left below `cutoff`."""
    slack = _FIRST_SLACK
    while solver.bound < min(cutoff, solver.objective) * (1 - tolerance) and time.monotonic() < deadline:
        ceiling = solver.bound + slack * max(abs(solver.bound), 1e-9)
        solver.solve(min(cutoff, ceiling), tolerance, deadline)
        slack *= _WIDER


def counts_of(solver: Decomposition, pipeline: Pipeline, runs: list[int]) -> Counts:
    """Units per (run, stage, bits); `runs`: the run of each unit."""
    counts: Counts = {}
    for j, part in enumerate(pipeline.parts):
        for unit, bits in zip(range(part.first, part.end), solver.unit_bits(part), strict=True):
            key = (runs[unit], j, bits)
            counts[key] = counts.get(key, 0) + 1
    return counts
