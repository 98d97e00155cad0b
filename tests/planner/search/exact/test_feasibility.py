"""What is said when nothing fits, and that what is suggested does fit."""

import re
from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_planner.contract.formats import FORMATS_OF_METHOD, Method
from strata_planner.errors import InfeasibleError
from strata_planner.question.cluster import Cluster
from strata_planner.question.request import PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.search.exact.candidates import Pricer
from strata_planner.search.exact.feasibility import _holds, _is_beyond_all, _longest_first, fits
from strata_planner.search.exact.widths import narrowings
from strata_planner.search.planning import PlanOutcome, make_plan
from tests.laws import share
from tests.planner.builders import a_cluster, a_request


def planned(request: PlanRequest) -> PlanOutcome:
    """One pipeline with all of the load, whose reasons these are: others may do with less of it in flight."""
    return make_plan(replace(request, solver="pipeline"))


def reason(request: PlanRequest) -> str:
    with pytest.raises(InfeasibleError) as caught:
        planned(request)
    assert str(caught.value) == "; ".join(caught.value.reasons)
    return str(caught.value)


def test_by_how_much_and_what_would_fit() -> None:
    text = reason(a_request(a_cluster(0.7, 0.7)))
    assert re.match(r"needs [\d.]+ [KMG]iB at 3 bits; the cluster has [\d.]+ [KMG]iB usable on 2 devices; ", text)
    assert "smallest change that fits: 2 more card" in text


def test_a_suggested_number_of_sequences_fits_and_one_more_does_not() -> None:
    request = a_request(a_cluster(2.0), workload=Workload(30, 30, 400))
    widest = int(re.search(r"concurrency <= (\d+)", reason(request))[1])  # type: ignore[index]
    planned(replace(request, workload=Workload(30, 30, widest)))
    reason(replace(request, workload=Workload(30, 30, widest + 1)))


def test_a_suggested_length_fits_and_a_page_more_does_not() -> None:
    request = a_request(a_cluster(2.0), workload=Workload(30, 30, 1), max_model_len=2048)
    longest = int(re.search(r"maxModelLen <= (\d+)", reason(request))[1])  # type: ignore[index]
    planned(replace(request, max_model_len=longest))
    reason(replace(request, max_model_len=longest + 16))


def test_fewer_bits_are_suggested_only_where_they_help() -> None:
    assert "allow 8 bits" in reason(a_request(a_cluster(2.3), allowed_bits=(16,)))
    assert "allow" not in reason(a_request(a_cluster(0.4)))


@pytest.mark.parametrize("method", FORMATS_OF_METHOD)
def test_suggested_bits_are_of_the_method_or_name_another_and_fit(method: Method) -> None:
    request = a_request(a_cluster(1.8), allowed_bits=(8, 16), method=method)
    found = re.search(r"allow (\d) bits(?: with the method (\w+))?", reason(request))
    assert found
    named = cast("Method", found[2] or method)
    assert int(found[1]) in FORMATS_OF_METHOD[named]
    assert (named == method) is (method != "float8")
    planned(replace(request, allowed_bits=(*request.allowed_bits, int(found[1])), method=named))


def test_no_single_change() -> None:
    assert "no single change fits" in reason(a_request(a_cluster(0.1)))


REASONS = {
    "too few devices": (a_request(a_cluster(64), min_stages=2), "minStages 2: the cluster has 1 usable device"),
    "more stages than layers": (a_request(min_stages=7), "minStages 7: the model has 6 layers"),
    "no devices": (a_request(Cluster(())), "no device has usable memory"),
    "max stages": (a_request(a_cluster(0.6, 0.6, 0.6), max_stages=1), r"the largest 1 device \(maxStages 1\)"),
}


@pytest.mark.parametrize(("request_", "message"), REASONS.values(), ids=REASONS)
def test_other_reasons(request_: PlanRequest, message: str) -> None:
    assert re.search(message, reason(request_))


@pytest.mark.slow  # what planning says, above
@settings(max_examples=share(40, 8), deadline=None)
@given(st.lists(st.sampled_from([0.15, 0.2, 0.3, 0.5, 0.8]), min_size=1, max_size=4), st.sampled_from([None, 1, 2]))
def test_what_no_order_is_tried_for_is_held_by_none(memory: list[float], most: int | None) -> None:
    request = a_request(a_cluster(*memory), max_stages=most)
    for each in narrowings(request):
        if _is_beyond_all(Pricer(each)):
            assert not [order for order in _longest_first(each) if _holds(Pricer(each), order)]


def test_fits_says_what_planning_says() -> None:
    for memory in (0.5, 0.9):
        request = a_request(a_cluster(memory, memory))
        try:
            planned(request)
        except InfeasibleError:
            assert not fits(request)
        else:
            assert fits(request)
