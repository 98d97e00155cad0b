"""The ILP finds what trying everything finds, and never more."""

import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from strata_planner.search.exact.bounds import lower_bound
from strata_planner.search.exact.feasibility import at_fewest_bits
from strata_planner.search.exact.ilp import solve
from strata_planner.search.exact.problem import Problem, Run, SolutionStatus, StageCosts, StopReason
from tests.laws import share
from tests.planner.search.exact.brute_force import best_objective, problems

slow = settings(max_examples=share(80), deadline=None, suppress_health_check=[HealthCheck.too_slow])


@slow
@given(problems())
def test_the_ilp_equals_brute_force(problem: Problem) -> None:
    best = best_objective(problem)
    solution = solve(problem)
    if math.isinf(best):
        assert solution.status is SolutionStatus.INFEASIBLE
        assert not solution.counts
    else:
        assert solution.status is SolutionStatus.OPTIMAL
        assert solution.stop is StopReason.PROVED
        assert problem.is_feasible(solution.counts)
        assert solution.objective == pytest.approx(best, rel=1e-5, abs=1e-6)


@slow
@given(problems())
def test_a_bound_is_never_above_the_best(problem: Problem) -> None:
    assert lower_bound(problem) <= best_objective(problem) * (1 + 1e-9)


@slow
@given(problems())
def test_a_cutoff_leaves_only_better_solutions(problem: Problem) -> None:
    best = best_objective(problem)
    if math.isfinite(best):
        assert solve(problem, cutoff=best * 0.99 - 1e-4).status is SolutionStatus.INFEASIBLE
        assert solve(problem, cutoff=best * 1.01 + 1e-4).objective == pytest.approx(best, rel=1e-5, abs=1e-6)


@slow
@given(problems())
def test_the_fewest_bits_are_feasible_when_they_are_found(problem: Problem) -> None:
    counts = at_fewest_bits(problem)
    if counts is not None:
        assert problem.is_feasible(counts)


def two_stages(omega: list[float], capacity: int) -> Problem:
    runs = tuple(Run(1, 1, {4: each, 16: 0.0}) for each in omega)
    seconds, sizes = ({4: (1.0, 1.0), 16: (1.0, 1.0)},) * len(runs), ({4: 4, 16: 16},) * len(runs)
    stage = StageCosts(capacity, 0, capacity, 0, seconds, sizes, sizes)
    return Problem(runs, (stage, stage), 1, 1, 1, 1.0)


def test_the_least_sensitive_layers_lose_their_bits() -> None:
    solution = solve(two_stages([9.0, 1.0, 2.0, 8.0], capacity=20))
    assert {r: bits for r, _, bits in solution.counts} == {0: 16, 1: 4, 2: 4, 3: 16}


def test_runs_stay_in_order() -> None:
    solution = solve(two_stages([5.0, 1.0, 1.0, 1.0, 5.0], capacity=40))
    stages = [j for _, j, _ in sorted(solution.counts)]
    assert stages == sorted(stages)


def test_a_bound_of_the_penalty_is_kept() -> None:
    problem = two_stages([9.0, 1.0, 2.0, 8.0], capacity=20)
    assert problem.penalty(solve(problem).counts) == 3
    assert solve(replace(problem, penalty_bound=3.0)).objective == solve(problem).objective
    assert solve(replace(problem, penalty_bound=2.9)).status is SolutionStatus.INFEASIBLE
