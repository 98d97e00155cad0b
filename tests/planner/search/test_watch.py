"""How far a search is, told while it goes on; and that the clock cut it, told of its plan."""

import dataclasses
import itertools
import time
from contextlib import suppress

import pytest

from strata_planner.contract.plan import Plan
from strata_planner.errors import PlannerError
from strata_planner.replan.decision import replan
from strata_planner.search.metric import value_of_plan
from strata_planner.search.planning import make_plan
from strata_planner.search.watch import Progress
from tests.planner.builders import a_cluster, a_request

CLUSTER = a_cluster(3, 3, 6, 6, speeds=(1, 2, 4, 3))


@pytest.mark.parametrize("solver", ["layout", "pipeline", "exact"])
def test_the_best_so_far_only_gets_better_and_ends_as_the_plan(solver: str) -> None:
    request = dataclasses.replace(a_request(CLUSTER), solver=solver)  # type: ignore[arg-type]
    told: list[Progress] = []
    plan = make_plan(request, watch=told.append).plan
    assert plan == make_plan(request).plan
    values = [each.value for each in told if each.value is not None]
    assert values
    assert values == sorted(values)
    value = value_of_plan(request, plan)
    assert values[-1] <= value + 1e-6 * abs(value)
    shares = [each.share for each in told]
    assert shares == sorted(shares)
    assert 0 <= shares[0] <= shares[-1] <= 1


@pytest.mark.parametrize("solver", ["layout", "pipeline"])
def test_a_search_that_the_clock_cuts_is_told_of_in_its_plan(solver: str) -> None:
    request = dataclasses.replace(
        a_request(a_cluster(*range(3, 11), speeds=tuple(range(1, 9)))),
        solver=solver,  # type: ignore[arg-type]
    )
    limit, outcome = 0.002, None
    while outcome is None:  # a busy machine finds no plan at all so soon
        with suppress(PlannerError):
            outcome = make_plan(dataclasses.replace(request, time_limit_seconds=limit))
        limit *= 2
    limit /= 2
    ended = Plan.decode(outcome.plan.encode()).search
    assert ended is not None
    assert ended.ended == "timeLimit"
    assert ended.cut_after_seconds == limit
    assert f"cut by the clock after {limit:g} s" in ended.warning
    assert any("cut by the clock" in note or "ended at its time limit" in note for note in outcome.notes)


def test_a_search_that_ends_by_itself_says_so_and_warns_of_nothing() -> None:
    request = dataclasses.replace(a_request(CLUSTER), solver="layout")
    ended = make_plan(request).plan.search
    assert ended is not None
    assert ended.ended == "settled"
    assert not ended.warning


def test_beside_a_running_plan_the_search_that_was_cut_is_told_of_too(monkeypatch: pytest.MonkeyPatch) -> None:
    request = dataclasses.replace(a_request(CLUSTER), solver="layout")
    running = make_plan(request).plan
    few = dataclasses.replace(request, cluster=a_cluster(*range(3, 11), speeds=tuple(range(1, 9))))
    looks = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: 0.05 * next(looks))  # each look at the clock takes a while
    short = replan(dataclasses.replace(few, time_limit_seconds=1.0), running)
    assert short.search is not None
    assert short.search.was_cut
    assert short.kept or short.plan.search == short.search
