"""The example that the demo runs: it must split over both unlike devices, and memory must make it mix bits."""

import pytest

from strata_operator.commands.inputs import read_question
from strata_operator.demo import CLUSTER, DEPLOYMENT
from strata_planner.search.planning import make_plan


@pytest.mark.slow  # planner/test_plan_laws.py has the law; this is the example
def test_the_quickstart_is_split_and_mixes_bits() -> None:
    plan = make_plan(read_question(DEPLOYMENT, CLUSTER, measure=False).request).plan
    (replica,) = plan.replicas
    assert {stage.node for stage in replica.stages} == {"small", "large"}
    assert len({bits for stage in replica.stages for bits in stage.bits}) > 1
