"""The goal's number: of two plans the better one is never the worse one in what people are shown."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_planner.contract.plan import Prediction
from strata_planner.question.request import GoalName, Objective
from strata_planner.search.metric import Metric

TOLD: dict[str, Any] = {
    "latency_seconds": 1.0,
    "quality_penalty": 0.0,
    "sensitivity_source": "prior",
    "bound_by": "nothing",
}
predictions = st.builds(
    lambda rate, first, each: Prediction(tokens_per_second=rate, ttft_ms=first, tpot_ms=each, **TOLD),
    st.floats(0.1, 1e5),
    st.floats(0.1, 1e5),
    st.floats(0.1, 1e3),
)


def metric(goal: GoalName) -> Metric:
    objective = Objective("slo", 10.0, 3.0) if goal == "slo" else Objective(goal)
    return Metric(objective, theta=0.0, output_tokens=100, asked=8, of_the_batch=False)


@given(
    goal=st.sampled_from(("throughput", "latency", "slo", "cost")),
    one=predictions,
    other=predictions,
    costs=st.tuples(st.floats(0.1, 50), st.floats(0.1, 50)),
)
def test_what_is_shown_has_the_order_of_what_is_compared(
    goal: GoalName, one: Prediction, other: Prediction, costs: tuple[float, float]
) -> None:
    by = metric(goal)
    low, high = sorted((by.of(one, 8, costs[0]), by.of(other, 8, costs[1])))
    worse, better = by.stated(low), by.stated(high)
    assert worse.unit == better.unit
    assert worse.value >= 0
    assert better.value >= worse.value if better.better == "more" else better.value <= worse.value


@given(one=predictions, times=st.floats(1.01, 10))
def test_where_none_or_all_are_in_time_the_quicker_plan_is_the_better_one(one: Prediction, times: float) -> None:
    quick = msgspec.structs.replace(
        one,
        tokens_per_second=one.tokens_per_second * times,
        ttft_ms=one.ttft_ms / times,
        tpot_ms=one.tpot_ms / times,
    )
    by = metric("slo")
    assert by.of(quick, 8) > by.of(one, 8) or 0 < by.of(one, 8) == by.of(quick, 8) < 1


@given(one=predictions, cost=st.floats(0.1, 50))
def test_a_load_that_takes_two_turns_costs_twice(one: Prediction, cost: float) -> None:
    by = metric("cost")
    assert by.of(one, 4, cost) == pytest.approx(2 * by.of(one, 8, cost))
    assert by.of(one, 16, cost) == pytest.approx(by.of(one, 8, cost))  # nobody waits for fewer than one turn
