"""What was not chosen: never better than what was, and said in which term it is worse."""

import pytest

from strata_planner.answer.alternatives import MOST, with_alternatives
from strata_planner.search.metric import value_of_plan
from strata_planner.search.planning import make_plan
from tests.laws import swept
from tests.planner.builders import a_cluster, a_request

REQUESTS = {
    "three unlike devices": a_request(a_cluster(3, 3, 6, speeds=(1, 2, 4))),
    "speed alone": a_request(a_cluster(3, 3, 6), theta=0.0),
    "quality above all": a_request(a_cluster(2, 3, 3), theta=1e6),
}


@pytest.mark.parametrize("name", swept(REQUESTS, ["three unlike devices"]))
def test_no_alternative_is_better_and_each_says_why(name: str) -> None:
    request_ = REQUESTS[name]
    plan = with_alternatives(request_, make_plan(request_)).plan
    assert type(plan).decode(plan.encode()) == plan
    assert 0 < len(plan.alternatives) <= MOST
    value = value_of_plan(request_, plan)
    for each in plan.alternatives:
        assert each.rejected_because
        if each.objective is not None:
            assert each.objective <= value + 1e-5 * abs(value)


@pytest.mark.slow
def test_what_does_not_fit_says_by_how_much() -> None:
    request = a_request(a_cluster(1.2, 1.2), theta=0.0)
    plan = with_alternatives(request, make_plan(request)).plan
    assert any(each.rejected_because.startswith("does not fit: needs ") for each in plan.alternatives)
