"""What is said of better plans: no solver finds one beyond the bound, and where none is proven that is said."""

import dataclasses
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.answer.bounded import is_proven, with_bound
from strata_planner.answer.explain import bound_lines
from strata_planner.contract.plan import Plan
from strata_planner.errors import PlannerError
from strata_planner.question.cluster import Cluster, Device, LinkRate, Node
from strata_planner.question.request import Objective, PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.search.planning import make_plan
from tests.laws import share
from tests.planner.builders import a_cluster, a_request


def drawn(seed: int, **changes: Any) -> PlanRequest:
    draw = random.Random(seed)
    memory = [draw.choice((2, 3, 6, 12)) for _ in range(draw.randint(1, 4))]
    link = LinkRate(gbps=draw.choice((1, 10)), latency_ms=draw.choice((0.1, 1.0, 20.0)))
    cluster = a_cluster(*memory, speeds=tuple(draw.choice((1.0, 2.0, 5.0)) for _ in memory), link=link)
    nodes = [
        msgspec.structs.replace(
            node, devices=(msgspec.structs.replace(node.devices[0], hourly_cost=draw.choice((1.0, 3.0))),)
        )
        for node in cluster.nodes
    ]
    load = Workload(prompt_tokens=32, output_tokens=16, concurrency=draw.choice((1, 4, 16, 200)))
    request = a_request(msgspec.structs.replace(cluster, nodes=tuple(nodes)), workload=load, **changes)
    return dataclasses.replace(request, theta=draw.choice((0.0, 1.0)))


def planned(request: PlanRequest) -> Plan | None:
    try:
        return make_plan(request, quick=True).plan
    except PlannerError:
        return None


def passes(plan: Plan, bound: float | None) -> bool:
    assert plan.objective is not None
    assert bound is not None
    if plan.objective.better == "more":
        return plan.objective.value > bound * (1 + 1e-6)
    return plan.objective.value < bound * (1 - 1e-6)


@settings(max_examples=share(12, 6), deadline=None)
@given(seed=st.integers(0, 100_000), goal=st.sampled_from(("throughput", "cost")))
def test_no_plan_of_replicas_passes_the_bound(seed: int, goal: Any) -> None:
    request = drawn(seed, solver="auto", objective=Objective(goal))
    for solver in ("auto", "layout"):
        plan = planned(dataclasses.replace(request, solver=solver))  # type: ignore[arg-type]
        if plan is not None:
            told = with_bound(request, plan).search
            assert told is not None
            assert not passes(plan, told.bound)


@settings(max_examples=share(12, 6), deadline=None)
@given(seed=st.integers(0, 100_000))
def test_no_pipeline_of_any_solver_passes_the_bound_of_another(seed: int) -> None:
    found = [planned(drawn(seed, solver=solver)) for solver in ("pipeline", "exact", "transfer")]
    plans = [plan for plan in found if plan is not None]
    bounds = [plan.search.bound for plan in plans if plan.search is not None and plan.search.bound is not None]
    assert not any(passes(plan, bound) for plan in plans for bound in bounds)


def test_how_far_it_is_from_the_best_is_said_in_the_plan() -> None:
    request = a_request(a_cluster(6, 6), solver="layout", theta=0.0)
    told = with_bound(request, make_plan(request).plan)
    assert Plan.decode(told.encode()) == told
    (line,) = bound_lines(told)
    assert line.startswith("no plan is better than ")
    assert "tokens/s: the best is better by" in line


@pytest.mark.parametrize("goal", ["latency", "slo"])
def test_of_goals_without_a_bound_it_is_said_to_be_unknown(goal: Any) -> None:
    objective = Objective("slo", 1.0, 5.0) if goal == "slo" else Objective(goal)
    request = a_request(a_cluster(6, 6), solver="layout", objective=objective)
    told = with_bound(request, make_plan(request).plan)
    assert bound_lines(told) == ["how far it is from the best plan is unknown"]


def test_nothing_is_called_proven_of_processors() -> None:
    assert is_proven(a_request())
    processor = Cluster((Node("a", (Device("cpu", memory_bytes=1 << 30),)),))
    assert not is_proven(a_request(processor))
