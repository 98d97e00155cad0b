"""What nodes that are away, flap, come back or are cordoned lead to."""

from datetime import timedelta

import pytest
from msgspec import structs

from strata_operator.observe.kube import PODS
from strata_operator.render.records import stamp
from tests.operator.world import AWorld, World


def test_many_nodes_away_at_once_are_a_false_alarm(serving: World) -> None:
    for node in ("a", "b", "c"):
        serving.cluster.set_ready(node, "Unknown")
    serving.passes(300)
    assert serving.reasons() == ["Created"]
    assert (serving.status.phase, serving.condition("Degraded").reason) == ("Degraded", "ManyNodesNotReady")
    assert "3 of 4 nodes are not Ready, or silent, at once" in serving.condition("Degraded").message
    assert "maxSimultaneousNodeLoss 0.5" in serving.condition("Ready").message
    serving.passes(1800, every=100)
    assert serving.reasons() == ["Created"]  # nor does the time in which a slot must get further count
    for node in ("a", "b", "c"):
        serving.cluster.set_ready(node, "True")
    serving.passes(10)
    assert (serving.status.phase, serving.nodes()) == ("Ready", ["a", "b"])


def test_the_brake_is_the_users_to_set(serving: World) -> None:
    serving.edit(replanning={"maxSimultaneousNodeLoss": 1.0})
    for node in ("a", "b", "c"):
        serving.cluster.set_ready(node, "Unknown")
    serving.passes(30)
    assert (serving.status.phase, serving.nodes()) == ("Ready", ["d"])


def test_a_node_that_was_removed_is_lost_also_while_many_are_away(serving: World) -> None:
    for node in ("b", "c", "d"):
        serving.cluster.set_ready(node, "Unknown")
    serving.cluster.remove_node("a")
    serving.passes(30)
    assert "NodeLost" in serving.reasons()


def test_a_deployment_goes_back_when_the_better_plan_is_possible_again(serving: World) -> None:
    serving.cluster.set_ready("b", "Unknown")
    serving.passes(20)
    assert serving.nodes() == ["a", "c"]
    serving.cluster.set_ready("b", "True")
    serving.passes(30)
    assert serving.nodes() == ["a", "c"]  # it may go again: not before it has stayed
    serving.passes(60)
    assert (serving.status.phase, serving.nodes()) == ("Ready", ["a", "b"])
    assert serving.reasons() == ["Created", "NodeLost", "BetterPlan"]


def test_no_better_plan_is_looked_for_while_many_were_made_within_the_hour(serving: World) -> None:
    """Losses, drains and edits are planned all the same."""
    serving.edit(replanning={"maxPerHour": 2})
    serving.cluster.set_ready("b", "Unknown")
    serving.passes(20)
    serving.edit(replanning={"maxPerHour": 2}, workload={"concurrency": 3})
    serving.passes(30)
    serving.cluster.set_ready("b", "True")
    serving.passes(1200, every=60)
    assert serving.reasons() == ["Created", "NodeLost", "SpecChanged"]
    assert serving.nodes() == ["a", "c"]
    serving.passes(3600, every=60)
    assert serving.reasons()[3:] == ["BetterPlan"]
    assert serving.nodes() == ["a", "b"]
    for lost in ("b", "c"):
        serving.cluster.set_ready(lost, "Unknown")
        serving.passes(120)
    assert serving.reasons()[4:] == ["NodeLost", "NodeLost"]


@pytest.mark.slow
def test_a_flapping_node_does_not_make_a_deployment_flap(serving: World) -> None:
    for _ in range(15):
        serving.cluster.set_ready("b", "Unknown")
        serving.passes(20, every=10)
        serving.cluster.set_ready("b", "True")
        serving.passes(40, every=20)
    assert serving.reasons().count("NodeLost") <= 2
    assert serving.status.phase == "Ready"


@pytest.mark.parametrize(("gain", "epochs"), [(0.5, 2), (0.01, 1)])
def test_what_was_planned_in_a_hurry_is_planned_once_more_at_leisure(a_world: AWorld, gain: float, epochs: int) -> None:
    world = a_world()
    world.planner.hurries, world.planner.gain = True, gain
    world.passes(50)
    world.planner.says = lambda plan: structs.replace(plan, boundary_log_pages=1)
    world.operator_starts_anew()  # records say it
    world.passes(900, every=30)
    assert world.reasons() == ["Created", "BetterPlan"]
    assert (world.status.phase, world.status.committed_epoch) == ("Ready", epochs)


def test_what_is_no_better_is_looked_at_once_and_changes_nothing(serving: World) -> None:
    serving.cluster.add_node("e")
    serving.passes(1200, every=60)
    assert serving.reasons() == ["Created", "BetterPlan"]
    assert (serving.status.phase, serving.status.committed_epoch) == ("Ready", 1)
    assert serving.condition("Planned").status == "True"


def test_a_cordoned_node_is_left_while_the_old_epoch_serves(serving: World) -> None:
    serving.cluster.cordon("b", closed=True)
    serving.look()
    assert serving.reasons() == ["Created", "Drain"]
    serving.passes()
    assert (serving.status.phase, serving.nodes()) == ("Ready", ["a", "c"])
    assert set(serving.pods()) == {"chat-a-0", "chat-c-0"}
    serving.cluster.cordon("b", closed=False)
    serving.passes(400)
    assert serving.nodes() == ["a", "b"]


def test_a_drain_that_cannot_be_planned_is_said_and_stops_nothing(a_world: AWorld) -> None:
    world = a_world("a", "b")
    world.edit(placement={"minStages": 2})
    world.passes()
    world.cluster.cordon("b", closed=True)
    world.passes(60)
    assert (world.status.phase, world.condition("Ready").status) == ("Ready", "True")
    assert (world.condition("Planned").status, world.condition("Planned").reason) == ("False", "Infeasible")
    assert world.condition("Planned").message.startswith("Drain: ")
    assert world.reasons().count("Drain") == 1
    assert evicted_at_once(world) == 1  # it would wait for ever
    world.cluster.cordon("b", closed=False)
    world.passes(60)
    assert evicted_at_once(world) == 0


def evicted_at_once(world: World) -> int:
    """Slots that a drain may evict, of those that are healthy."""
    (budget,) = (each for each in world.cluster.all("poddisruptionbudgets") if "slots" in each["metadata"]["name"])
    return int(budget["spec"]["maxUnavailable"])


def test_a_gateway_that_is_to_end_on_a_lost_node_is_ended_there_and_delays_no_other(serving: World) -> None:
    """Its Deployment is `Recreate`: with another template it would wait for the end of this pod."""
    cluster = serving.cluster
    serving.edit(replanning={"gracePeriodSeconds": 30})
    (pod,) = [each for each in cluster.all("pods") if each["metadata"]["name"] == "chat-gateway-x"]
    meta = {**pod["metadata"], "name": "chat-gateway-old", "uid": "old", "deletionTimestamp": stamp(cluster.now())}
    old = PODS.path("default", "chat-gateway-old")
    cluster.set_ready("d", "Unknown")
    cluster.put(old, {**pod, "metadata": meta, "spec": {**pod["spec"], "nodeName": "d"}})
    end = cluster.now() + timedelta(seconds=25)
    while cluster.now() < end:
        serving.looks(1)
    assert old in cluster.objects  # the node may come back
    serving.passes(20)  # a deployment at rest is looked at every 15 s
    assert old not in cluster.objects
    assert serving.reasons() == ["Created"]
