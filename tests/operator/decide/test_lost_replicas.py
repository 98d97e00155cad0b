"""What the operator's planner makes of a lost node where many replicas serve: those that are whole stay as they are."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_operator.act.planner_call import Question, answer_to
from strata_planner.contract.plan import Plan, Replica
from strata_planner.question.cluster import Cluster, Device, Node
from tests.laws import share, swept
from tests.operator.builders import a_deployment
from tests.operator.decide.test_planning import CONFIG

NAMES = [f"n{number:02}" for number in range(12)]


@dataclass(frozen=True)
class Fleet:
    """`overheads`: of a layer on each node's processors, in seconds; `count`: devices of each node."""

    overheads: tuple[float, ...]
    count: int
    degree: int

    def cluster(self, lost: str = "") -> Cluster:
        nodes = (
            Node(name, (Device("cpu", self.count, 1 << 30, 2, profile={"layerOverheadSeconds": overhead}),))
            for name, overhead in zip(NAMES, self.overheads, strict=True)
        )
        return Cluster(nodes=tuple(node for node in nodes if node.name != lost))


fleets = st.builds(
    Fleet,
    st.lists(st.sampled_from([0.0002, 0.001, 0.004]), min_size=12, max_size=12).map(tuple),
    st.just(2),
    st.sampled_from([1, 2]),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def planned(model: Path, fleet: Fleet, lost: str = "", running: Plan | None = None) -> Plan:
    spec: dict[str, Any] = {
        "model": {"uri": f"file://{model}", "maxModelLen": 128},
        "workload": {"promptTokens": 32, "outputTokens": 32, "concurrency": 48},
        "precision": {"allowed": [16]},
        "placement": {"tensorParallel": [fleet.degree], "maxStages": 1},
    }
    thing = a_deployment().with_spec(**spec).to_object()
    answer = answer_to(Question(thing, fleet.cluster(lost), running=running))
    assert answer.plan is not None, answer.message
    return answer.plan


def held(replica: Replica) -> tuple[Any, ...]:
    """What its slots hold, and on which devices."""
    return tuple((stage.slot, stage.devices, stage.layers, stage.format) for stage in replica.stages)


def check_kept(model: Path, fleet: Fleet, lost: str) -> tuple[Plan, Plan]:
    running = planned(model, fleet)
    after = planned(model, fleet, lost, running)
    whole = [each for each in running.replicas if all(stage.node != lost for stage in each.stages)]
    assert {held(each) for each in whole} <= {held(each) for each in after.replicas}
    return running, after


@pytest.mark.slow
@pytest.mark.parametrize("degree", swept([1, 2], [2]))
def test_of_twelve_replicas_eleven_stay_where_a_node_is_lost(model: Path, degree: int) -> None:
    running, after = check_kept(model, Fleet((0.001,) * 12, degree, degree), NAMES[4])
    assert (len(running.replicas), len(after.replicas)) == (12, 11)
    assert {stage.tensor_parallel for stage in after.stages} == {degree}
    assert sum(each.concurrency for each in after.replicas) == 48  # what the lost one carried, the others carry


@pytest.mark.slow  # planner/replan/test_decision.py has one case of it
@settings(max_examples=share(8), deadline=None)
@given(fleets, st.sampled_from(NAMES))
def test_replicas_that_are_whole_stay_where_a_node_is_lost(model: Path, fleet: Fleet, lost: str) -> None:
    check_kept(model, fleet, lost)
