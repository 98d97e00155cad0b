"""The fleet of the examples: 17 devices of four types on three machines, which any rule of thumb plans poorly."""

from dataclasses import replace
from pathlib import Path

import pytest

from strata_planner.answer.alternatives import with_alternatives
from strata_planner.question.cluster import Cluster
from strata_planner.question.model import Model
from strata_planner.question.request import PlanRequest
from strata_planner.question.workload import Workload
from strata_planner.search.metric import value_of_plan
from strata_planner.search.planning import make_plan

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.slow  # test_plan_laws.py has the laws for few devices
SAME = 1e-6


@pytest.fixture(scope="module")
def request_() -> PlanRequest:
    cluster = Cluster.from_yaml((EXAMPLES / "clusters/mixed-17.yaml").read_text(encoding="utf-8"))
    return PlanRequest(
        deployment="llama-70b",
        model_uri="file:///models/llama-3.1-70b",
        model=Model.from_folder(EXAMPLES / "models/llama-3.1-70b", for_serving=False),
        cluster=cluster,
        workload=Workload(prompt_tokens=2048, output_tokens=256, concurrency=16),
        max_model_len=2304,
    )


def test_nobody_beats_its_plan(request_: PlanRequest) -> None:
    """Neither an alternative that is shown, nor a solver that looks at fewer plans, nor parts of the fleet alone."""
    told = with_alternatives(request_, make_plan(request_)).plan
    value = value_of_plan(request_, told)
    others = {each.summary: each.objective for each in told.alternatives if each.objective is not None}
    for solver in ("layout", "pipeline"):
        others[solver] = value_of_plan(request_, make_plan(replace(request_, solver=solver)).plan)
    for nodes in ({"a"}, {"a", "b"}, {"b", "c"}):
        part = request_.cluster.restricted_to(nodes)
        others[" and ".join(sorted(nodes))] = value_of_plan(request_, make_plan(replace(request_, cluster=part)).plan)
    assert {name for name, other in others.items() if other > value + SAME * abs(value)} == set()
