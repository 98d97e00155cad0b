"""Allowing more widths never makes a plan worse, also where memory beside the weights grows with every width."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.answer.alternatives import with_alternatives
from strata_planner.contract.formats import FORMATS_OF_METHOD, Method
from strata_planner.errors import InfeasibleError
from strata_planner.question.catalogue import CPU
from strata_planner.question.cluster import Cluster, Device, Node
from strata_planner.question.request import PlanRequest, Solver
from strata_planner.replan.decision import replan
from strata_planner.search.exact.feasibility import fits
from strata_planner.search.exact.widths import narrowings
from strata_planner.search.metric import value_of_plan
from strata_planner.search.planning import make_plan
from tests.laws import share
from tests.planner.builders import MIB, a_cluster, a_request


def small_processors(*memory_mib: float) -> Cluster:
    """On a processor kernels keep memory for each format and number of rows: as much as all layers of a small model take."""
    return Cluster(
        tuple(Node(f"n{at}", (Device(CPU, memory_bytes=int(MIB * each)),)) for at, each in enumerate(memory_mib))
    )


def best(request: PlanRequest) -> float:
    try:
        return value_of_plan(request, make_plan(request).plan)
    except InfeasibleError:
        return -float("inf")


@pytest.mark.slow  # several plans of each example; test_plan_laws.py has the laws of one
@settings(max_examples=share(12, 8), deadline=None)
@given(
    memory=st.floats(8, 40),
    method=st.sampled_from(sorted(FORMATS_OF_METHOD)),
    theta=st.sampled_from([0.0, 1.0]),
    solver=st.sampled_from(["auto", "pipeline"]),
    draw=st.randoms(use_true_random=False),
)
def test_more_widths_are_never_worse(memory: float, method: Method, theta: float, solver: Solver, draw: Random) -> None:
    widths = tuple(FORMATS_OF_METHOD[method])
    request = a_request(
        small_processors(memory, memory), method=method, allowed_bits=widths, theta=theta, solver=solver
    )
    all_of_them = best(request)
    fewer = [*((each,) for each in widths), widths[:2], widths[-2:]]
    for few in draw.sample(fewer, share(len(fewer), 3)):
        few_of_them = best(replace(request, allowed_bits=few))
        assert all_of_them >= few_of_them - 1e-6 * abs(few_of_them)


@pytest.mark.slow  # answer/test_alternatives.py has the law
@pytest.mark.parametrize("memory", [14.0, 18.0, 24.0])
def test_no_alternative_of_the_same_request_is_better(memory: float) -> None:
    request = a_request(small_processors(memory, memory), method="anyPrecision", allowed_bits=(3, 4, 6, 8, 16))
    outcome = with_alternatives(request, make_plan(request))
    others = [each.objective for each in outcome.plan.alternatives if each.objective is not None]
    assert max(others, default=-float("inf")) <= value_of_plan(request, outcome.plan) * (1 + 1e-6)


@pytest.mark.slow  # the law above has the same of plans that fit
def test_what_fits_at_one_width_fits_with_more_allowed() -> None:
    request = a_request(small_processors(9.0, 9.0), method="anyPrecision", allowed_bits=(8,))
    memory = next(each for each in range(6, 40) if fits(replace(request, cluster=small_processors(each, each))))
    tight = replace(request, cluster=small_processors(memory, memory), allowed_bits=(3, 4, 5, 6, 7, 8, 16))
    assert fits(tight)
    plan = make_plan(tight).plan
    assert replan(tight, plan).kept


def test_devices_without_such_kernels_are_searched_once() -> None:
    assert len(narrowings(a_request(a_cluster(4096, 4096)))) == 1
    assert len(narrowings(a_request(small_processors(20, 20), allowed_bits=(8, 16)))) == 3
