"""The decomposition finds what trying everything finds; its bounds are never above it, whatever the shares."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.small_instances import best_objective as judged_best
from benchmarks.small_instances import instances
from strata_planner.search.exact import blocks as blocks_module
from strata_planner.search.exact import exact
from strata_planner.search.exact.blocks import Blocks, mixed_widths, table_entries
from strata_planner.search.exact.bounds import pooled_bound
from strata_planner.search.exact.decomposition import Decomposition
from strata_planner.search.exact.effort import Effort
from strata_planner.search.exact.lattice import alike, lattice_of
from strata_planner.search.exact.problem import Problem, SolutionStatus, StopReason
from tests.laws import share
from tests.planner.search.exact.brute_force import best_objective, problems

slow = settings(
    max_examples=share(60), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
alike_problems = problems().filter(alike)


def decomposition(problem: Problem, effort: Effort | None = None) -> Decomposition:
    lattice = lattice_of(problem)
    return Decomposition(lattice, Blocks(lattice.penalty), effort or Effort())


@slow
@given(problems())
def test_a_proven_split_equals_brute_force(problem: Problem) -> None:
    best, solution = best_objective(problem), exact.solve(problem)
    assert solution.stop is StopReason.PROVED
    if math.isinf(best):
        assert solution.status is SolutionStatus.INFEASIBLE
    else:
        assert problem.is_feasible(solution.counts)
        assert solution.objective == pytest.approx(best, rel=2e-6, abs=1e-9)
        assert solution.bound <= best * (1 + 1e-9)


@pytest.mark.slow  # laws compare with one of them
def test_both_brute_forces_agree() -> None:
    for problem in instances(40, seed=7):
        best = judged_best(problem)
        assert best == pytest.approx(best_objective(problem), rel=1e-9)


def test_seeded_instances_are_solved() -> None:
    for problem in instances(30, seed=11):
        best, solution = judged_best(problem), exact.solve(problem)
        assert solution.objective == pytest.approx(best, rel=2e-6) or math.isinf(best) == (not solution.counts)


@slow
@given(alike_problems, st.integers(0, 6))
def test_bounds_hold_whatever_the_shares(problem: Problem, rounds: int) -> None:
    best = best_objective(problem)
    solver = decomposition(problem)
    solver.tune(math.inf, rounds)
    assert solver.bound <= best * (1 + 1e-9)
    assert solver.objective >= best * (1 - 1e-9)
    assert pooled_bound(solver.lattice) <= best * (1 + 1e-9)


@slow
@given(alike_problems, st.floats(0.5, 2.0))
def test_a_cutoff_leaves_only_better_splits(problem: Problem, share: float) -> None:
    best = best_objective(problem)
    if math.isinf(best):
        return
    cutoff = best * share + 1e-9
    solution = exact.solve(problem, cutoff)
    if share < 0.999:
        assert solution.status is SolutionStatus.INFEASIBLE
    elif share > 1.001:
        assert solution.objective == pytest.approx(best, rel=2e-6, abs=1e-9)


@pytest.mark.parametrize("effort", [Effort.of(seconds=-1), Effort(work=1)])
def test_an_effort_that_ends_leaves_the_best_seen_and_a_bound(effort: Effort) -> None:
    problem = next(each for each in instances(60, seed=3) if alike(each) and math.isfinite(judged_best(each)))
    solver = decomposition(problem, effort)
    solver.tune(math.inf, 3)
    exact.finish(solver, math.inf, 1e-6)
    best = judged_best(problem)
    assert solver.bound * (1 - 1e-9) <= best <= solver.objective * (1 + 1e-9)


@slow
@given(alike_problems, st.floats(1e5, 1e7), st.floats(1.0, 10.0))
def test_more_work_is_never_worse_and_the_same_work_is_the_same(problem: Problem, work: float, more: float) -> None:
    few, again, many = (exact.solve(problem, effort=Effort(work=each)) for each in (work, work, work * more))
    assert few == again
    assert many.objective <= few.objective
    assert many.bound >= few.bound
    assert few.stop in {StopReason.PROVED, StopReason.WORK_LIMIT}
    assert few.bound * (1 - 1e-9) <= best_objective(problem)


def test_a_problem_too_large_for_the_tables_goes_to_the_ilp(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = next(each for each in instances(60, seed=3) if alike(each) and math.isfinite(judged_best(each)))
    monkeypatch.setattr(exact, "MOST_ENTRIES", 0)
    assert exact.solve(problem).objective == pytest.approx(judged_best(problem), rel=1e-5)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**32))
@settings(max_examples=share(40), deadline=None)
def test_blocks_deal_bits_as_well_as_trying_everything(units: int, bits: int, seed: int) -> None:
    penalty = np.random.default_rng(seed).random((units, bits))
    blocks = Blocks(penalty)
    for size in range(1, units + 1):
        table, counts = blocks.penalties(size), blocks.counts(size)
        for first in range(units - size + 1):
            for at in range(len(counts)):
                dealt = blocks.dealt(first, counts[at].astype(np.int64))
                assert [dealt.count(b) for b in range(bits)] == counts[at].tolist()
                cost = sum(penalty[first + i, b] for i, b in enumerate(dealt))
                assert cost == pytest.approx(table[first, at])
                assert cost <= _any_dealing(penalty, first, dealt) + 1e-9


def _any_dealing(penalty: "np.ndarray[tuple[int, int], np.dtype[np.float64]]", first: int, dealt: list[int]) -> float:
    """The same bits the other way round: never less."""
    return float(sum(penalty[first + i, b] for i, b in enumerate(reversed(dealt))))


def test_tables_are_as_large_as_they_are_said_to_be() -> None:
    blocks = Blocks(np.random.default_rng(0).random((9, 4)))
    assert sum(blocks.penalties(size).size for size in range(1, 7)) == table_entries(9, 6, 4)


def test_of_many_widths_neighbouring_ones_mix_as_far_as_the_tables_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [mixed_widths(units, 7) for units in (12, 24, 48)] == [7, 5, 3]
    assert mixed_widths(48, 4) == 4
    monkeypatch.setattr(blocks_module, "_MANY_WIDTHS_ENTRIES", 400)
    blocks = Blocks(np.random.default_rng(0).random((6, 7)))
    assert sum(blocks.penalties(size).size for size in range(1, 7)) == table_entries(6, 6, 7) <= 400
    spans = [np.flatnonzero(row) for row in blocks.counts(6)]
    assert {int(span[-1] - span[0]) for span in spans} == set(range(mixed_widths(6, 7)))
    assert blocks.dealt(0, blocks.counts(6)[-1].astype(np.int64)) == [0] * 6
