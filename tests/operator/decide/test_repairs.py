"""A lost node: the repair is served at once, and what a search finds meanwhile is taken if it gains enough."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from strata_operator.act.planner_call import Answer, Question, answer_to
from strata_operator.api import deployment_from_object
from strata_operator.decide.planning import takeover_of
from strata_operator.errors import InvalidInputError
from strata_operator.render.records import moment
from strata_planner.contract.plan import Plan
from strata_planner.question.cluster import Cluster, Device, Node
from strata_planner.replan.repair import Takeover
from tests.operator.builders import a_deployment
from tests.operator.decide.test_planning import CONFIG
from tests.operator.world import World


@pytest.fixture
def repairing(serving: World) -> World:
    """Its planner repairs."""
    serving.passes(100)  # so that its nodes may be counted on
    serving.planner.repairs = True
    return serving


def lose(world: World, node: str = "b") -> None:
    world.cluster.set_ready(node, "Unknown")


def test_a_loss_is_repaired_by_what_is_left_and_a_better_plan_follows_at_once(repairing: World) -> None:
    lose(repairing)
    repairing.passes(30)
    assert repairing.reasons()[-2:] == ["NodeLost", "BetterPlan"]
    assert (repairing.status.phase, repairing.nodes()) == ("Ready", ["a", "c"])
    repaired, better = repairing.status.replans[-2:]
    assert (repaired.reason, better.reason) == ("NodeLost", "BetterPlan")
    assert repaired.repair is not None
    assert (repaired.repair.kind, repaired.repair.bits_lowered, repaired.repair.kept_share) == ("neighbours", 2, 0.5)
    assert (better.repair, better.gain) == (None, 0.5)


def test_a_repair_serves_on_where_nothing_found_gains_enough_and_status_says_by_how_much(repairing: World) -> None:
    repairing.planner.gain = 0.04
    lose(repairing)
    repairing.passes(600)
    assert (repairing.status.phase, repairing.nodes()) == ("Ready", ["a"])
    assert repairing.reasons()[-2:] == ["NodeLost", "BetterPlan"]  # and not again for the same
    newest = repairing.status.replans[-1]
    assert newest.repair is not None
    assert newest.repair.improvement == pytest.approx(0.04)


def test_moments_of_a_repair_are_told_in_their_order_and_stay(repairing: World) -> None:
    repairing.planner.gain = 0.04
    lose(repairing)
    repairing.passes(30)
    replan = repairing.status.replans[-1]
    told = [replan.noticed_at, replan.planned_at, replan.prepared_at, replan.committed_at]
    assert all(each is not None and "." in each for each in told)
    moments = [moment(each) for each in told if each]
    assert moments == sorted(moments)
    repairing.passes(60)
    assert repairing.status.replans[-1] == replan


def test_an_operator_that_starts_anew_knows_that_a_repair_serves(repairing: World) -> None:
    repairing.planner.gain = 0.04
    lose(repairing)
    repairing.passes(30)
    asked = len(repairing.plans)
    repairing.operator_starts_anew()
    repairing.planner.gain = 0.5
    repairing.passes(30)
    assert repairing.reasons()[asked:] == ["BetterPlan"]
    assert repairing.nodes() == ["a", "c"]


def test_a_repair_that_is_lost_too_is_repaired_again(repairing: World) -> None:
    repairing.planner.gain = 0.0
    lose(repairing)
    repairing.passes(30)
    lose(repairing, "a")
    repairing.passes(60)
    assert repairing.status.phase == "Ready"
    assert not {"a", "b"} & set(repairing.nodes())


NAMES = ("n0", "n1", "n2")


def asked(folder: Path, *names: str, running: Plan | None = None, repair: bool = False, **takeover: Any) -> Answer:
    spec: dict[str, Any] = {
        "model": {"uri": f"file://{folder}", "maxModelLen": 128},
        "workload": {"promptTokens": 32, "outputTokens": 32, "concurrency": 8},
        "precision": {"allowed": [4, 8, 16]},
        "placement": {"minStages": 3 if running is None else 1, "maxReplicas": 1, "tensorParallel": [1]},
        "planning": {"timeLimitSeconds": 2},
        "replanning": {"takeover": takeover},
    }
    cluster = Cluster(nodes=tuple(Node(name, (Device("cpu", 1, 1 << 30, 2),)) for name in names))
    thing = a_deployment().with_spec(**spec).to_object()
    return answer_to(Question(thing, cluster, running=running, repair=repair))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    (made / "config.json").write_text(json.dumps(CONFIG))
    return made


def test_the_planner_answers_a_loss_with_a_repair_and_a_wish_with_a_search(folder: Path) -> None:
    running = asked(folder, *NAMES).plan
    assert running is not None
    answer = asked(folder, "n0", "n2", running=running, repair=True)
    assert answer.plan is not None
    assert answer.repair is not None
    assert [stage.node for stage in answer.plan.stages] == [s.node for s in running.stages if s.node != "n1"]
    assert answer.repair.kind == "neighbours"
    searched = asked(folder, "n0", "n2", running=answer.plan)
    assert searched.repair is None
    assert searched.gain is not None


@pytest.mark.slow  # planner/replan/test_shadows.py has what is kept, test_shadow_status.py what is told
def test_a_takeover_is_shadowed_where_the_object_wants_it(folder: Path) -> None:
    running = asked(folder, *NAMES).plan
    assert running is not None
    assert running.shadows == ()
    shadow = {"maxMemory": "1Gi"}
    plan = asked(folder, *NAMES, running=running, shadow=shadow).plan
    assert plan is not None
    assert plan.shadows
    assert all(each.room_bytes <= 1 << 30 and each.against != each.node for each in plan.shadows)
    assert asked(folder, *NAMES, running=plan, shadow=shadow).plan == plan  # no epoch is made for the same
    lost = plan.shadows[0].against
    answer = asked(folder, *(name for name in NAMES if name != lost), running=plan, repair=True, shadow=shadow)
    assert answer.repair is not None
    assert answer.repair.shadowed_bytes > 0


@pytest.mark.slow  # replan/test_repair.py says what cannot
def test_what_cannot_be_repaired_is_searched_for(folder: Path) -> None:
    running = asked(folder, *NAMES).plan
    assert running is not None
    gone = asked(folder, "other", running=running, repair=True)
    assert gone.plan is not None
    other = asked(folder, "n0", "n2", running=msgspec.structs.replace(running, max_model_len=64), repair=True)
    assert (other.plan is None, other.repair) == (False, None)


def test_the_object_says_what_a_takeover_may_cost() -> None:
    wish = {"minBits": 4, "maxPerplexityIncrease": 0.5}
    thing = a_deployment().with_spec(replanning={"takeover": wish}).to_object()
    assert takeover_of(deployment_from_object(thing)) == Takeover(4, 0.5)
    assert takeover_of(a_deployment().build()) == Takeover()
    both = a_deployment().with_spec(replanning={"takeover": {"exact": True, "maxPerplexityIncrease": 0.5}})
    with pytest.raises(InvalidInputError, match="an exact takeover lowers no bits"):
        deployment_from_object(both.to_object())
