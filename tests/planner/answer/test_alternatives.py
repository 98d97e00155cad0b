"""What was not chosen: never better than what was, and said in which term it is worse."""

import dataclasses
import io

import msgspec
import pytest
from rich.console import Console

from strata_planner.answer.alternatives import MOST, with_alternatives
from strata_planner.answer.explain import alternatives_table
from strata_planner.question.request import Objective, PlanRequest
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


def for_goal(goal: str) -> PlanRequest:
    cluster = a_cluster(3, 3, 6, speeds=(1, 2, 4))
    priced = [
        msgspec.structs.replace(node, devices=(msgspec.structs.replace(node.devices[0], hourly_cost=1.0 + place),))
        for place, node in enumerate(cluster.nodes)
    ]
    cluster = msgspec.structs.replace(cluster, nodes=tuple(priced))
    asked = Objective("slo", 1.0, 5.0) if goal == "slo" else Objective(goal)  # type: ignore[arg-type]
    return dataclasses.replace(a_request(cluster, theta=0.0), objective=asked, solver="auto")


UNITS = {
    "throughput": ("tokens/s", "more"),
    "latency": ("s a request", "less"),
    "cost": ("for 1M tokens, times the turns of the load", "less"),
    "slo": ("of requests in time", "more"),
}


@pytest.mark.parametrize("goal", swept(UNITS, ["latency", "cost"]))
def test_all_are_told_in_the_goals_own_unit_and_none_is_better_in_it(goal: str) -> None:
    request = for_goal(goal)
    plan = with_alternatives(request, make_plan(request)).plan
    mine = plan.objective
    assert mine is not None
    assert (mine.unit, mine.better) == UNITS[goal]
    values = [each.value for each in plan.alternatives if each.value is not None]
    assert values
    for value in values:
        assert value <= mine.value * (1 + 1e-5) if mine.better == "more" else value >= mine.value * (1 - 1e-5)
    written = io.StringIO()
    Console(file=written, width=160).print(alternatives_table(plan))
    shown = written.getvalue()
    assert mine.unit in shown
    assert "tokens/s" not in shown or goal == "throughput"
    assert all(mine.said(value).removesuffix(f" {mine.unit}") in shown for value in values)


@pytest.mark.slow
def test_what_does_not_fit_says_by_how_much() -> None:
    request = a_request(a_cluster(1.2, 1.2), theta=0.0)
    plan = with_alternatives(request, make_plan(request)).plan
    assert any(each.rejected_because.startswith("does not fit: needs ") for each in plan.alternatives)
