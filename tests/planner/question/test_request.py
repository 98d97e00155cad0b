"""Wishes that no cluster could fulfil are refused before any search, with value, rule and fix."""

from typing import Any

import pytest

from strata_planner.errors import InputError, PlannerError, WorkloadError
from strata_planner.question.request import Objective
from strata_planner.question.workload import Workload
from strata_planner.search.planning import make_plan
from strata_planner.sensitivity import Sensitivity
from tests.planner.builders import a_model, a_request

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "context": ({"max_model_len": 4096}, "maxModelLen 4096: the model has 2048 positions; ask for at most 2048"),
    "no context": ({"max_model_len": 0}, "maxModelLen 0"),
    "prompt": ({"max_model_len": 32}, "promptTokens 32 leaves no room"),
    "bits": ({"allowed_bits": (5, 16)}, "choose from"),
    "no bits": ({"allowed_bits": ()}, "choose from"),
    "experts": (
        {"model": a_model(model_type="mixtral", num_local_experts=2), "allowed_bits": (4,), "method": "anyPrecision"},
        "fused experts .* have no any-precision form; take the method roundToNearest, or allow 16",
    ),
    "cache": ({"kv_bits": 4}, "kvCacheBits 4"),
    "stages": ({"min_stages": 3, "max_stages": 2}, "minStages 3 and maxStages 2"),
    "theta": ({"theta": -1.0}, "qualityWeight -1"),
    "time": ({"time_limit_seconds": 0}, "timeLimitSeconds 0"),
    "compute type": ({"compute_type": "int8"}, "computeType int8"),
    "short table": ({"sensitivity": Sensitivity("t", ({"3": 1.0},))}, "has 1 layers, the model 6"),
    "poor table": ({"sensitivity": Sensitivity("t", ({"8": 1.0},) * 6)}, r"lacks layer 0 at \[3, 4\] bits"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_bad_wishes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        make_plan(a_request(**changes))
    assert isinstance(caught.value, PlannerError)


@pytest.mark.parametrize("field", range(3))
def test_a_load_of_nothing(field: int) -> None:
    with pytest.raises(InputError, match="at least 1"):
        Workload(*(0 if each == field else 1 for each in range(3)))


def test_one_long_request_must_fit_as_well_as_the_batch() -> None:
    request = a_request(workload=Workload(10, 10, 2), max_model_len=2048)
    assert request.kv_pages == 128
    assert a_request(workload=Workload(40, 40, 9), max_model_len=64).kv_pages == 9 * 4


WRONG_WISHES: dict[str, tuple[dict[str, Any], str]] = {
    "no device a stage": ({"tensor_parallel": (2, 0)}, r"tensorParallel \[2, 0\]: numbers of devices, each 1 or more"),
    "in time of nothing": ({"objective": Objective("slo")}, "needs a deadline"),
    "a latency of LLM-PQ's": ({"objective": Objective("latency"), "solver": "exact"}, "to the solvers auto and layout"),
    "groups of LLM-PQ's": ({"tensor_parallel": (2,), "solver": "pipeline"}, r"tensorParallel \[2\] to the solvers"),
}


@pytest.mark.parametrize(("wishes", "message"), WRONG_WISHES.values(), ids=WRONG_WISHES)
def test_wishes_are_checked_before_any_search(wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        a_request(**wishes).check()
