"""The front door: one pipeline, or replicas and groups where the request asks for a layout."""

from typing import Any

import pytest

from strata_planner.contract.plan import Plan
from strata_planner.question.cluster import Cluster, Device, Node
from strata_planner.question.request import Objective, PlanRequest
from strata_planner.search.planning import make_plan
from tests.planner.builders import a_cluster, a_request, a_wide_model


def a_layout_request(**wishes: Any) -> PlanRequest:
    nodes = tuple(Node(name, (Device("L4", 2),)) for name in ("a", "b"))
    return a_request(Cluster(nodes), model=a_wide_model(), time_limit_seconds=60.0, **wishes)


def test_a_layout_forms_replicas_that_each_hold_the_model() -> None:
    outcome = make_plan(a_layout_request())
    assert Plan.decode(outcome.plan.encode()) == outcome.plan
    assert len(outcome.plan.replicas) > 1
    assert {stage.tensor_parallel for each in outcome.plan.replicas for stage in each.stages} == {1}
    assert sum(replica.concurrency for replica in outcome.plan.replicas) == 4


def test_groups_say_how_their_layers_are_cut() -> None:
    outcome = make_plan(a_layout_request(objective=Objective("latency"), tensor_parallel=(1, 2)))
    assert any(stage.tensor_parallel == 2 for each in outcome.plan.replicas for stage in each.stages)
    assert any(note.startswith("tensor partition of 2 x L4: megatron from 1 tokens") for note in outcome.notes)


def test_one_pipeline_is_planned_where_it_is_asked_for() -> None:
    assert len(make_plan(a_request(a_cluster(64, 64))).plan.replicas) == 2  # each device holds the model
    assert len(make_plan(a_request(a_cluster(64, 64), solver="pipeline")).plan.replicas) == 1


@pytest.mark.parametrize("goal", ["throughput", "latency", "slo"])
def test_the_same_question_has_the_same_answer(goal: str) -> None:
    asked = Objective(goal, deadline_seconds=5.0, requests_per_second=2.0)  # type: ignore[arg-type]
    first, second = (make_plan(a_layout_request(objective=asked, tensor_parallel=(1, 2))).plan for _ in range(2))
    assert first == second
