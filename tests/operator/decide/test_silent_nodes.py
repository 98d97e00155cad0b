"""Nodes that lose their power, or are cut off, while Kubernetes still calls them Ready."""

import pytest

from strata_operator.render.records import stamp
from tests.operator.world import AWorld, World


def goes(world: World, *nodes: str) -> None:
    """Without a word: its kubelet is gone too, and nobody has noticed."""
    for node in nodes:
        world.cluster.set_ready(node, "True", power=False)


def serves(world: World) -> tuple[str, list[str]]:
    return world.status.phase, world.nodes()


@pytest.mark.parametrize(("node", "left"), [("a", ["b", "c"]), ("b", ["a", "c"])], ids=["the leader's", "another"])
def test_a_node_that_nobody_reaches_is_planned_without_before_kubernetes_says_so(
    serving: World, node: str, left: list[str]
) -> None:
    goes(serving, node)
    serving.passes(3, every=0.2)
    assert serves(serving) == ("Ready", left)
    assert [(replan.reason, replan.node) for replan in serving.status.replans] == [("NodeLost", node)]
    assert [(each.node, each.reason) for each in serving.status.exclusions] == [(node, "NodeSilent")]


def test_it_is_not_taken_again_although_it_is_called_ready(serving: World) -> None:
    serving.planner.repairs = True  # beside which a better plan is looked for at once
    goes(serving, "b")
    serving.passes(20, every=0.5)
    assert "b" not in serving.nodes()
    assert "BetterPlan" in serving.reasons()


def test_it_is_taken_again_when_it_is_back_and_stays(serving: World) -> None:
    goes(serving, "b")
    serving.passes(10, every=0.5)
    serving.cluster.set_ready("b", "True")
    serving.passes(300)
    assert serves(serving) == ("Ready", ["a", "b"])


def test_once_kubernetes_has_noticed_its_word_counts(serving: World) -> None:
    """Back within a minute, it may replace another loss."""
    goes(serving, "b")
    serving.passes(10, every=0.5)
    serving.cluster.set_ready("b", "Unknown")
    serving.passes(2, every=0.5)
    serving.cluster.set_ready("b", "True")
    goes(serving, "c", "d")
    serving.passes(10, every=0.5)
    assert serves(serving) == ("Ready", ["a", "b"])


def test_a_node_that_answers_a_knock_is_not_lost(serving: World) -> None:
    """Its slot's process ends for good, and others miss it."""
    serving.cluster.kill(serving.cluster.pods_on("b")[0])
    serving.passes(20, every=1)
    assert "NodeLost" not in serving.reasons()


def test_a_pod_that_its_kubelet_ends_is_not_lost_with_its_node(serving: World) -> None:
    goes(serving, "b")
    serving.cluster.mark(serving.cluster.pods_on("b")[0])
    serving.passes(3, every=0.2)
    assert serves(serving) == ("Degraded", ["a", "b"])


def test_a_gateway_that_ran_there_is_replaced_at_once(serving: World) -> None:
    before, other = serving.cluster.gateways_of("chat")
    before["spec"]["nodeName"] = "b"
    goes(serving, "b")
    serving.passes(5, every=0.2)
    uids = {each["metadata"]["uid"] for each in serving.cluster.gateways_of("chat")}
    assert len(uids) == 2
    assert other["metadata"]["uid"] in uids
    assert before["metadata"]["uid"] not in uids
    assert serves(serving) == ("Ready", ["a", "c"])


def test_many_that_fall_silent_at_once_are_a_false_alarm(a_world: AWorld) -> None:
    world = a_world("a", "b", "c")
    world.passes()
    goes(world, "a", "b")
    world.passes(60)
    assert (world.reasons(), world.condition("Degraded").reason) == (["Created"], "ManyNodesNotReady")
    assert "2 of 3 nodes are not Ready, or silent, at once" in world.condition("Degraded").message
    for node in "ab":
        world.cluster.set_ready(node, "True")
    world.passes(10)
    assert serves(world) == ("Ready", ["a", "b"])


def test_a_second_loss_while_the_first_is_mended(serving: World) -> None:
    goes(serving, "a")
    serving.cluster.faults.hangs.add("c")
    serving.looks(12, every=0.2)
    assert serving.nodes() == ["b", "c"]
    goes(serving, "c")
    serving.cluster.faults.hangs.clear()
    serving.passes(10, every=0.2)
    assert serves(serving) == ("Ready", ["b", "d"])


def test_what_comes_back_before_its_repair_is_planned_is_kept(serving: World) -> None:
    serving.planner.seconds = 3
    goes(serving, "b")
    serving.looks(6, every=0.2)
    assert serving.reasons()[-1] == "NodeLost"
    serving.cluster.set_ready("b", "True")
    serving.passes(10)
    assert serves(serving) == ("Ready", ["a", "b"])


@pytest.fixture
def repairing(serving: World) -> World:
    """Node b is cut off, its processes live on, and a loads the repair."""
    serving.planner.repairs, serving.planner.lowers = True, 0
    is_cut_off(serving)
    return serving


def is_cut_off(world: World) -> None:
    world.cluster.faults.hangs.add("a")
    world.cluster.cut_off("b")
    world.looks(8, every=0.2)
    assert world.nodes() == ["a"]
    assert world.status.phase != "Ready"


def is_back(world: World) -> None:
    world.cluster.faults.unreachable.clear()
    world.cluster.told()
    world.looks(3, every=0.2)


def test_what_is_back_while_its_repair_is_loaded_goes_on(repairing: World) -> None:
    """The others let go of what they load, and nothing is held against it."""
    is_back(repairing)
    repairing.cluster.faults.hangs.clear()
    repairing.passes(5, every=0.2)
    assert serves(repairing) == ("Ready", ["a", "b"])
    assert [(each.reason, each.node) for each in repairing.status.replans][-1] == ("NodeBack", "b")
    (excluded,) = repairing.status.exclusions
    assert (excluded.node, excluded.until <= stamp(repairing.cluster.now()), excluded.strikes) == ("b", True, 1)
    repairing.passes(300)
    assert serves(repairing) == ("Ready", ["a", "b"])
    assert "BetterPlan" not in repairing.reasons()


def test_an_operator_that_starts_meanwhile_has_it_go_on_too(repairing: World) -> None:
    repairing.operator_starts_anew()
    is_back(repairing)
    repairing.cluster.faults.hangs.clear()
    repairing.passes(5, every=0.2)
    assert serves(repairing) == ("Ready", ["a", "b"])
    assert repairing.status.replans[-1].reason == "NodeBack"


def test_who_is_cut_off_again_is_believed_no_more(repairing: World) -> None:
    """Within the hour: who comes and goes costs a plan each time."""
    is_back(repairing)
    repairing.cluster.faults.hangs.clear()
    repairing.passes(5, every=0.2)
    is_cut_off(repairing)
    is_back(repairing)
    repairing.cluster.faults.hangs.clear()
    repairing.passes(3, every=0.2)
    assert serves(repairing) == ("Ready", ["a"])


@pytest.mark.parametrize(
    "why", ["its process was started anew", "planes are gone", "the repair is ready", "it is cordoned"]
)
def test_a_repair_is_carried_out_where_it_is_the_shorter_way(serving: World, why: str) -> None:
    serving.planner.repairs, serving.planner.lowers = True, 2 if why == "planes are gone" else 0
    is_cut_off(serving)
    (pod, *_) = serving.cluster.pods_on("b")
    if why == "its process was started anew":
        slot = serving.cluster.slot_of(pod)
        assert slot is not None
        slot.restart()
    if why == "the repair is ready":
        serving.cluster.faults.hangs.clear()
        serving.cluster.tick(0.1)
        serving.look()
    if why == "it is cordoned":
        serving.cluster.cordon("b", closed=True)
    is_back(serving)
    serving.cluster.faults.hangs.clear()
    serving.passes(5, every=0.2)
    assert serving.status.phase == "Ready"
    assert "NodeBack" not in {each.reason for each in serving.status.replans}


def test_its_pod_is_not_ended_while_its_plan_takes_long(serving: World) -> None:
    """As one that hangs would be: whose end nobody there could confirm."""
    serving.passes(60)
    serving.planner.seconds = 30
    before = serving.pods()["chat-b-0"]
    goes(serving, "b")
    serving.looks(40, every=0.5)
    (pod,) = serving.cluster.pods_on("b")
    assert (pod["metadata"]["uid"], pod["metadata"].get("deletionTimestamp")) == (before, None)
    serving.passes(20, every=1)
    assert serves(serving) == ("Ready", ["a", "c"])


def test_without_another_node_it_is_waited_for(a_world: AWorld) -> None:
    world = a_world("a", "b")
    world.edit(placement={"minStages": 2})
    world.passes()
    goes(world, "b")
    world.passes(30, every=1)
    assert serves(world) == ("Degraded", ["a", "b"])
    assert world.condition("Ready").reason == "Infeasible"
    world.cluster.set_ready("b", "True")
    world.passes(30, every=1)
    assert serves(world) == ("Ready", ["a", "b"])
