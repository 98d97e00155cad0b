"""Slots whose process ended, on nodes that are there: waited for, or taken over by the others, whichever is sooner."""

import pytest

from tests.operator.world import World


@pytest.fixture
def repaired(serving: World) -> World:
    """Where a repair is known at once, gives half, and reads nothing: neighbours keep shadows."""
    serving.planner.repairs, serving.planner.reads, serving.planner.gain = True, 0, 0.0
    return serving


def takes(world: World, seconds: float) -> None:
    """A load, of every slot that runs, as it says itself."""
    world.slots_took(0.5, seconds, every=0.2)


def ends_and_is_back(world: World) -> None:
    """The slot on b: its next process starts a second later."""
    world.cluster.faults.stuck.add("chat-b-0")
    world.cluster.end(world.cluster.pods_on("b")[0])
    world.looks(5, every=0.2)
    world.cluster.faults.stuck.clear()
    world.passes(5, every=0.2)


def choices(world: World) -> list[tuple[str, str]]:
    return [(each.reason, each.choice.chosen) for each in world.status.replans if each.choice]


@pytest.mark.parametrize("node", ["a", "b"])
@pytest.mark.parametrize("goes", ["its container ends", "its pod is deleted"])
def test_who_would_take_long_is_taken_over_at_once(repaired: World, goes: str, node: str) -> None:
    """A pod that is deleted has another one at once: nobody loads there meanwhile."""
    takes(repaired, 60)
    (pod, *_) = repaired.cluster.pods_on(node)
    repaired.cluster.faults.hangs.add(node)
    repaired.cluster.kill(pod) if goes == "its container ends" else repaired.cluster.end(pod)
    repaired.passes(3, every=0.2)
    assert (repaired.status.phase, repaired.nodes()) == ("Ready", ["a" if node == "b" else "b"])
    assert choices(repaired) == [("Takeover", "takeover")]
    (choice,) = [each.choice for each in repaired.status.replans if each.choice]
    assert choice.restart_seconds == pytest.approx(60, abs=3)
    assert choice.takeover_seconds < 2
    assert repaired.status.exclusions == (), "its node is there, and of the next better plan"
    (told,) = [each["note"] for each in repaired.cluster.all("events") if each["reason"] == "TakeoverChosen"]
    assert f"the slot on {node} was lost: a restart takes" in told


def test_its_device_is_taken_again_by_the_better_plan(repaired: World) -> None:
    repaired.passes(60)
    takes(repaired, 60)
    repaired.planner.gain = 0.5
    repaired.cluster.kill(repaired.cluster.pods_on("b")[0])
    repaired.passes(30, every=0.5)
    assert [each.reason for each in repaired.status.replans] == ["Takeover", "BetterPlan"]
    assert repaired.nodes() == ["a", "b"]


def test_who_is_back_sooner_is_waited_for(repaired: World) -> None:
    takes(repaired, 0.3)
    ends_and_is_back(repaired)
    assert (repaired.status.phase, repaired.nodes()) == ("Ready", ["a", "b"])
    assert choices(repaired) == [("SlotLost", "restart")]


def test_who_only_forms_anew_what_it_holds_is_not_away(repaired: World) -> None:
    """The other one of its replica was started again, and loads sooner than this one lets go of its steps."""
    takes(repaired, 0.3)
    repaired.cluster.faults.hangs.add("a")
    repaired.cluster.end(repaired.cluster.pods_on("b")[0])
    repaired.looks(60, every=0.5)
    assert choices(repaired) == []
    assert repaired.status.replans[-1].reason == "SlotLost"
    assert "Takeover" not in repaired.reasons()[2:], "asked for b at once, for a never"


def test_who_does_not_come_back_is_taken_over_all_the_same(repaired: World) -> None:
    """What it should take is believed for so long."""
    takes(repaired, 0.3)
    repaired.cluster.kill(repaired.cluster.pods_on("b")[0])
    repaired.passes(5, every=0.5)
    assert choices(repaired) == []
    repaired.passes(30, every=1)
    assert choices(repaired) == [("Takeover", "takeover")]


def test_whose_next_process_has_ended_too_is_waited_for_no_longer(repaired: World) -> None:
    """Its kubelet says how long it waits before the next."""
    takes(repaired, 0.3)
    (pod, *_) = repaired.cluster.pods_on("b")
    repaired.cluster.kill(pod)
    repaired.cluster.faults.stuck.add(pod["metadata"]["name"])
    waiting = {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting failed container=slot"}
    pod["status"]["containerStatuses"][0]["state"] = {"waiting": waiting}
    repaired.passes(3, every=0.2)
    assert choices(repaired) == [("Takeover", "takeover")]


def test_an_operator_that_starts_meanwhile_weighs_anew(repaired: World) -> None:
    takes(repaired, 60)
    repaired.planner.seconds = 3600  # nothing is known before it ends
    repaired.cluster.kill(repaired.cluster.pods_on("b")[0])
    repaired.looks(5, every=1)
    repaired.planner.seconds = 0
    repaired.operator_starts_anew()
    repaired.passes(8, every=0.5)
    assert choices(repaired) == [("Takeover", "takeover")]


def test_of_slots_that_say_nothing_bytes_are_counted(repaired: World) -> None:
    """Of an earlier image, say: of the pretended plan that is next to nothing, so that it is waited for."""
    ends_and_is_back(repaired)
    assert (repaired.status.phase, repaired.nodes()) == ("Ready", ["a", "b"])
    assert {stage.start_seconds for stage in repaired.status.stages} == {None}
    assert choices(repaired) == [("SlotLost", "restart")]


def test_without_a_repair_it_is_waited_for(serving: World) -> None:
    takes(serving, 60)
    serving.cluster.kill(serving.cluster.pods_on("b")[0])
    serving.passes(60, every=2)
    assert (serving.reasons(), serving.nodes()) == (["Created"], ["a", "b"])


def test_many_at_once_are_waited_for(repaired: World) -> None:
    """As many as would be a false alarm of nodes: an image that ends everywhere, say."""
    repaired.edit(replanning={"maxSimultaneousNodeLoss": 0.4})
    takes(repaired, 60)
    for pod in repaired.cluster.pods_of("chat"):
        repaired.cluster.kill(pod)
    repaired.passes(60, every=2)
    assert repaired.status.replans == ()


def test_who_is_stopped_is_not_gone_before_it_has_had_its_time(repaired: World) -> None:
    takes(repaired, 60)
    repaired.cluster.hang(repaired.cluster.pods_on("b")[0])
    repaired.passes(3, every=0.2)
    assert choices(repaired) == []


def test_what_a_slot_took_outlasts_its_process_and_the_operator(repaired: World) -> None:
    takes(repaired, 60)
    stages = {each.node: each for each in repaired.status.stages}
    assert (stages["b"].start_seconds, stages["b"].load_seconds) == (0.5, 60)
    repaired.operator_starts_anew()
    repaired.cluster.kill(repaired.cluster.pods_on("b")[0])
    repaired.passes(8, every=0.5)
    assert choices(repaired) == [("Takeover", "takeover")]
