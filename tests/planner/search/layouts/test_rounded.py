"""Quick splits of a candidate: they fit, they lose nothing to one width alone, and memory that is left is not left lying where bits are worth it."""

import math
from dataclasses import replace

from hypothesis import given, settings

from strata_planner.search.exact.problem import Problem, Run, StageCosts
from strata_planner.search.layouts.rounded import rounded
from tests.laws import share
from tests.planner.search.exact.brute_force import MIB, best_objective, problems

WIDE = 1 << 60


def a_stage(room: int, loading: int = WIDE) -> StageCosts:
    sizes = ({4: 4 * MIB, 8: 8 * MIB},)
    seconds = ({4: (0.001, 0.001), 8: (0.002, 0.002)},)
    return StageCosts(room * MIB, 0, loading, 0, seconds, sizes, ({4: 4 * MIB, 8: 8 * MIB},))


def a_problem(*stages: StageCosts, units: int = 10, theta: float = 1.0) -> Problem:
    return Problem((Run(units, 1, {4: 1.0, 8: 0.1}),), stages, 1, 1, 1, theta)


@settings(max_examples=share(300, 60), deadline=None)
@given(problem=problems())
def test_a_quick_split_fits_and_is_no_better_than_the_best(problem: Problem) -> None:
    found = rounded(problem)
    if found is None:
        return
    assert problem.is_feasible(found.counts)
    assert found.objective == problem.objective(found.counts)
    assert found.objective >= best_objective(problem) - 1e-9


def test_memory_that_is_left_goes_to_more_bits() -> None:
    """Ten layers of 4 MiB, or 8, in 60 MiB: five of each."""
    problem = a_problem(a_stage(40), a_stage(20))
    found = rounded(problem)
    assert found is not None
    assert sum(count for (_, _, bits), count in found.counts.items() if bits == 8) == 5
    assert math.isclose(found.objective, best_objective(problem), rel_tol=1e-9)


def test_more_bits_are_not_taken_where_time_is_worth_more() -> None:
    found = rounded(a_problem(a_stage(40), a_stage(20), theta=1e-4))
    assert found is not None
    assert {bits for _, _, bits in found.counts} == {4}


def test_what_loading_has_no_room_for_is_not_planned() -> None:
    """The first stage could serve all ten layers, and load four of them."""
    roomy = a_problem(a_stage(400, loading=16 * MIB), a_stage(400))
    found = rounded(replace(roomy, theta=0.0))
    assert found is not None
    assert sum(count for (_, place, _), count in found.counts.items() if place == 0) <= 4
