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


@settings(max_examples=share(12, 12), deadline=None)
@given(seed=st.integers(0, 100_000), goal=st.sampled_from(("throughput", "cost", "latency", "slo")))
def test_no_plan_of_replicas_passes_the_bound(seed: int, goal: Any) -> None:
    """By any solver, with any of several chunks, numbers of stages and of replicas."""
    request = drawn(seed, solver="auto", objective=Objective(goal))
    draw = random.Random(seed)
    if goal == "slo":
        deadline, rate = draw.choice((1e-3, 0.1, 1.0, 10.0, 100.0)), draw.choice((0.01, 1.0, 100.0))
        request = dataclasses.replace(request, objective=Objective(goal, deadline, rate))
    variants: list[dict[str, Any]] = [{"solver": "layout"}, {"chunk_tokens": 8}, {"max_replicas": 1}, {"max_stages": 1}]
    for variant in ({}, draw.choice(variants)):
        plan = planned(dataclasses.replace(request, **variant))
        if plan is not None:
            told = with_bound(request, plan).search
            assert told is not None
            assert not passes(plan, told.bound)


@pytest.mark.slow  # the law above has plans of replicas
@settings(max_examples=share(12, 12), deadline=None)
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


def test_of_a_lone_request_the_bound_is_near() -> None:
    """All but the head, a step's own time and the prompt is counted."""
    load = Workload(prompt_tokens=8, output_tokens=64, concurrency=1)
    request = a_request(a_cluster(30), solver="layout", theta=0.0, objective=Objective("latency"), workload=load)
    told = with_bound(request, make_plan(request).plan)
    assert told.search is not None
    assert told.search.bound is not None
    assert told.objective is not None
    assert 0.5 * told.objective.value < told.search.bound <= told.objective.value
    (line,) = bound_lines(told)
    assert " s a request" in line


def test_where_no_bound_is_proven_it_is_said_to_be_unknown() -> None:
    unlike = Cluster((Node("a", (Device("L4"), Device("T4"))),))
    request = a_request(unlike, solver="layout", tensor_parallel=(1, 2))
    assert not is_proven(request)
    told = with_bound(request, make_plan(request).plan)
    assert bound_lines(told) == ["how far it is from the best plan is unknown"]


def test_nothing_is_called_proven_of_processors() -> None:
    assert is_proven(a_request())
    processor = Cluster((Node("a", (Device("cpu", memory_bytes=1 << 30),)),))
    assert not is_proven(a_request(processor))
