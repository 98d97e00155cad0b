"""Who serves, and with how many sequences: estimates are judged by what plans are compared by."""

from itertools import pairwise

import pytest

from strata_planner.search.layouts.goals import Deadlines, Goal, Load, judge
from strata_planner.search.layouts.pipelines import Curve, Pipeline
from strata_planner.search.layouts.stages import EVENLY, Split

RUNGS = (1, 2, 4)
LOAD = Load(RUNGS, total=4, tokens=100)


def a_pipeline(rates: tuple[float, ...], penalties: tuple[float, ...] = (0.0, 0.0, 0.0)) -> Pipeline:
    """Rates with what bits cost taken off, each more than the one before by no more than that was."""
    seconds = tuple(
        sequences * LOAD.tokens / rate - penalty if rate else 0.0
        for sequences, rate, penalty in zip(RUNGS, rates, penalties, strict=True)
    )
    ends = list(zip((0, *RUNGS), (0.0, *rates), strict=True))
    steps = tuple(
        ((rate - before) / (sequences - fewer), sequences - fewer, rung)
        for rung, ((fewer, before), (sequences, rate)) in enumerate(pairwise(ends))
        if rate > before
    )
    curve = Curve(2, rates, seconds)
    return Pipeline(rates, seconds, penalties, ((), (), ()), (Split(1, EVENLY),) * 3, (curve,), steps)


def test_some_wait_where_room_for_all_would_cost_too_much_quality() -> None:
    """Four at once fit at bits only that cost 300 seconds; two after two take twice as long."""
    one = a_pipeline((10.0, 20.0, 1.2), (1.0, 1.0, 300.0))
    judged = judge(Goal("latency"), LOAD, [one], [1.0])
    assert judged.shares == (2,)
    assert judged.score == pytest.approx(-(2 * one.seconds[1] + 1.0))


def test_a_replica_whose_bits_spoil_the_mean_stays_out() -> None:
    good, bad = a_pipeline((10.0, 19.0, 30.0)), a_pipeline((0.3, 0.0, 0.0), (300.0, 0.0, 0.0))
    assert judge(Goal(), LOAD, [good, bad], [1.0, 1.0]).shares == (4, 0)
    assert judge(Goal(), Load(RUNGS, total=5, tokens=100), [good, bad], [1.0, 1.0]).shares == (4, 0)


def test_of_a_long_step_a_part_costs_all_that_its_bits_cost() -> None:
    load = Load((1, 2, 4, 5), total=5, tokens=100)
    good = _of_rates((2.5, 5.0, 10.0, 0.0), ((2.5, 4, 2),), (0.0,) * 4)
    bad = _of_rates((1.0, 2.0, 4.0, 5.0), ((1.0, 5, 3),), (50.0,) * 4)
    judged = judge(Goal(), load, [good, bad], [1.0, 1.0])
    assert (judged.score, judged.shares) == (10.0, (4, 0))


def _of_rates(
    rates: tuple[float, ...], steps: tuple[tuple[float, int, int], ...], penalties: tuple[float, ...]
) -> Pipeline:
    count = len(rates)
    return Pipeline(rates, (1.0,) * count, penalties, ((),) * count, (Split(1, EVENLY),) * count, (), steps)


def test_replicas_that_get_no_sequence_are_worth_nothing() -> None:
    goal, one = Goal("slo", Deadlines((20.0,), (0.05,))), a_pipeline((10.0, 19.0, 30.0))
    load = Load(RUNGS, total=1, tokens=100)
    alone, beside = judge(goal, load, [one], [1.0]), judge(goal, load, [one, one], [1.0, 1.0])
    assert sum(map(bool, beside.shares)) == 1
    assert beside.score == alone.score


def test_a_replica_that_is_late_for_all_stays_out() -> None:
    """It would get its part of the requests all the same."""
    quick, slow = a_pipeline((20.0, 38.0, 60.0)), a_pipeline((3.0, 5.0, 6.0))
    goal = Goal("slo", Deadlines((8.0,), (0.3,)))
    judged = judge(goal, LOAD, [quick, slow], [1.0, 1.0])
    assert judged.shares[1] == 0
    assert judged.score > judge(goal, LOAD, [quick, quick], [1.0, 1.0]).score - 0.1


def test_of_a_load_that_is_too_much_what_is_served_in_time_counts() -> None:
    """Of four at once a request takes 13.3 seconds, of two 10.5, alone 10; who serves nobody in time stays out."""
    quick, slow = a_pipeline((10.0, 19.0, 30.0)), a_pipeline((3.0, 5.0, 6.0))
    goal = Goal("slo", Deadlines((11.0,), (1.0,)))
    judged = judge(goal, LOAD, [quick, slow], [1.0, 1.0])
    assert judged.shares == (2, 0)
    assert judged.score == judge(goal, LOAD, [quick], [1.0]).score
    assert judge(goal, LOAD, [quick, quick], [1.0, 1.0]).score > judged.score + 0.1


def test_cost_counts_turns() -> None:
    """A cheap one with room for half of the load takes it twice; beside it a dearer one serves all at once."""
    cheap, dear = a_pipeline((10.0, 20.0, 0.0)), a_pipeline((10.0, 20.0, 0.0))
    assert judge(Goal("cost"), LOAD, [cheap, dear], [1.0, 1.5]).shares == (2, 2)
    assert judge(Goal("cost"), LOAD, [cheap, dear], [1.0, 9.0]).shares == (2, 0)
