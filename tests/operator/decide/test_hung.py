"""A slot whose process is there and answers nobody: its pod is ended, and when that does not end either, its node is planned without."""

from datetime import UTC, datetime, timedelta

import pytest

from strata_operator.decide.hung import HUNG_GRACE_SECONDS, Silence, is_hung
from strata_operator.render.records import moment
from strata_planner.contract.control import HungStep
from tests.operator.world import AWorld, World

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def ago(seconds: float) -> datetime:
    return NOON - timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("silence", "patience", "expected"),
    [
        pytest.param(Silence(ago(5), is_accused=True, started=ago(600)), 5, True, id="it served, and is silent to all"),
        pytest.param(Silence(ago(4), is_accused=True, started=ago(600)), 5, False, id="it may come back"),
        pytest.param(Silence(ago(0), is_accused=True, started=ago(600)), 0, True, id="no patience"),
        pytest.param(
            Silence(ago(999), is_accused=False, started=ago(1e6)), 5, False, id="its controller alone misses it"
        ),
        pytest.param(Silence(ago(60), is_accused=True, started=ago(50)), 5, False, id="it was started anew since"),
        pytest.param(Silence(ago(60), is_accused=True, started=ago(80)), 5, False, id="its end was noticed late"),
        pytest.param(Silence(ago(60), is_accused=True, started=ago(90)), 5, True, id="it was there for long enough"),
        pytest.param(Silence(ago(60), is_accused=True, started=ago(-9)), 5, False, id="its node's clock is ahead"),
        pytest.param(Silence(ago(999), is_accused=True, started=None), 5, False, id="nobody knows since when it runs"),
        pytest.param(
            Silence(ago(99), is_accused=True, started=ago(600), reached=ago(4)), 5, False, id="its node was away"
        ),
        pytest.param(
            Silence(ago(99), is_accused=True, started=ago(600), reached=ago(5)), 5, True, id="its node is back"
        ),
        pytest.param(
            Silence(ago(-3), is_accused=True, started=ago(600)), 5, False, id="the operator's clock went back"
        ),
    ],
)
def test_what_counts_as_hung(silence: Silence, patience: int, expected: bool) -> None:  # noqa: FBT001
    assert is_hung(silence, NOON, timedelta(seconds=patience)) is expected


@pytest.fixture
def served(serving: World) -> World:
    """For a minute."""
    serving.passes(60, every=20)
    return serving


def takes(world: World, seconds: float) -> None:
    """A start and a load, of every slot, as it says itself."""
    world.slots_took(0, seconds, every=1)


def ended(world: World) -> list[dict[str, object]]:
    """What came with each request that a pod be ended."""
    asked = [each for each in world.cluster.requests if each.method == "DELETE" and "/pods/" in each.path]
    return [dict(each.body) for each in asked]


@pytest.mark.parametrize("node", ["a", "b"])
def test_a_slot_that_hangs_is_started_anew_after_the_grace_period(served: World, node: str) -> None:
    """The leader, whom the gateway misses too, and the other."""
    before = served.pods()[f"chat-{node}-0"]
    served.cluster.hang(served.cluster.pods_on(node)[0])
    served.looks(5, every=1)
    assert served.pods()[f"chat-{node}-0"] == before
    served.passes(10, every=1)
    assert served.pods()[f"chat-{node}-0"] != before
    assert (served.status.phase, served.nodes(), served.reasons()) == ("Ready", ["a", "b"], ["Created"])
    assert [each["gracePeriodSeconds"] for each in ended(served)] == [HUNG_GRACE_SECONDS]
    told = [each for each in served.cluster.all("events") if each["reason"] == "SlotHung"]
    assert [f"its pod chat-{node}-0 is ended" in each["note"] for each in told] == [True]


def test_how_long_a_slot_is_waited_for_is_the_grace_period(served: World) -> None:
    takes(served, 600)
    served.edit(replanning={"gracePeriodSeconds": 120})
    served.cluster.hang(served.cluster.pods_on("b")[0])
    served.passes(110)
    assert not ended(served)
    served.passes(20)
    assert len(ended(served)) == 1


@pytest.mark.parametrize(("seconds", "grace", "ends"), [(0, 120, 2), (30, 120, 30), (300, 60, 60), (300, 3, 3)])
def test_who_is_stopped_is_waited_for_as_long_as_its_restart_takes(
    served: World, seconds: float, grace: int, ends: float
) -> None:
    """And never for longer than its owner lets."""
    takes(served, seconds)
    served.edit(replanning={"gracePeriodSeconds": grace})
    served.cluster.hang(served.cluster.pods_on("b")[0])
    if ends > 5:
        served.passes(ends - 5, every=1)
        assert not ended(served)
    served.passes(10, every=1)
    assert len(ended(served)) == 1


def test_who_was_cut_off_has_time_to_speak_once_the_way_there_is_whole(served: World) -> None:
    """Two at once count as a false alarm. Their kernels take knocks a moment before their own connections are made anew."""
    takes(served, 3)
    served.edit(replanning={"gracePeriodSeconds": 300, "maxSimultaneousNodeLoss": 0.4})
    for node in ("a", "b"):
        served.cluster.cut_off(node)
    served.looks(40, every=1)
    served.cluster.faults.unreachable.clear()
    served.cluster.faults.deaf.update(("a", "b"))
    served.looks(2, every=1)
    served.cluster.faults.deaf.clear()
    served.passes(10, every=1)
    assert not ended(served)
    assert (served.status.phase, served.nodes()) == ("Ready", ["a", "b"])


def test_since_when_it_is_silent_outlasts_the_operator(served: World) -> None:
    takes(served, 600)
    served.edit(replanning={"gracePeriodSeconds": 60})
    served.cluster.hang(served.cluster.pods_on("b")[0])
    served.passes(40)
    served.operator_starts_anew()
    served.passes(25)
    assert len(ended(served)) == 1


@pytest.mark.parametrize("node", ["a", "b"])
def test_a_slot_whose_step_hangs_is_started_anew_at_once(served: World, node: str) -> None:
    """It has waited for longer than it could take, and answers everybody meanwhile."""
    (slot,) = [served.cluster.slot_of(pod) for pod in served.cluster.pods_on(node)]
    assert slot is not None
    before = served.pods()
    slot.hang()
    served.cluster.told()
    served.look()
    assert served.status.phase == "Degraded"
    assert f"chat-{node}: it hangs: step 7 has not got on for 30.1 s" in served.condition("Ready").message
    served.passes(10, every=1)
    assert {name for name, pod in served.pods().items() if before[name] != pod} == {f"chat-{node}-0"}
    assert (served.status.phase, served.nodes(), served.reasons()) == ("Ready", ["a", "b"], ["Created"])
    assert [each["gracePeriodSeconds"] for each in ended(served)] == [HUNG_GRACE_SECONDS]
    (told,) = [each["note"] for each in served.cluster.all("events") if each["reason"] == "SlotHung"]
    assert told.startswith(f"slot chat-{node} hangs (stage {'ab'.index(node)} of replica 0: step 7 has not got on")


def test_whom_a_leader_waits_for_too_long_is_ended_if_it_answers_nobody(served: World) -> None:
    """Its process hangs whole, and libzmq's threads go on: no neighbour loses it."""
    slots = {node: served.cluster.slot_of(served.cluster.pods_on(node)[0]) for node in "ab"}
    leader = slots["a"]
    assert leader is not None
    leader.overdue = (HungStep(0, 0, "step 7 has not got on for 60.1 s, with 60 allowed"),)
    served.passes(300, every=20)
    assert ended(served) == [], "who answers is only slow"
    served.cluster.faults.unreachable.add("b")
    served.passes(30, every=1)
    assert len(ended(served)) == 1


@pytest.mark.parametrize("fault", ["unreachable", "mute"])
def test_whom_only_the_controller_does_not_hear_stays(served: World, fault: str) -> None:
    getattr(served.cluster.faults, fault).add("b")
    served.passes(300, every=20)
    foreseen = (
        ["NodeLost"] if fault == "unreachable" else []
    )  # planned in case somebody else misses it, and never taken
    assert (ended(served), served.reasons(), served.status.committed_epoch) == ([], ["Created", *foreseen], 1)


def test_what_is_started_in_its_container_again_is_not_ended(served: World) -> None:
    served.cluster.kill(served.cluster.pods_on("b")[0])
    served.passes(10, every=1)
    served.passes(300, every=20)
    assert ended(served) == []


def test_a_slot_on_a_node_that_is_away_is_the_brakes(served: World) -> None:
    served.edit(replanning={"gracePeriodSeconds": 3600})
    served.cluster.set_ready("b", "Unknown", power=True)
    served.cluster.hang(served.cluster.pods_on("b")[0])
    served.passes(300, every=20)
    assert ended(served) == []


def test_the_only_slot_hangs(a_world: AWorld) -> None:
    world = a_world("a")
    world.passes()
    world.passes(60, every=20)
    world.cluster.hang(world.cluster.pods_on("a")[0])
    world.passes(15, every=1)
    assert (world.status.phase, world.status.committed_epoch, len(ended(world))) == ("Ready", 2, 1)


def test_a_process_that_nothing_ends_is_planned_without(served: World) -> None:
    """It hangs in its kernel, with its device."""
    served.cluster.hang(served.cluster.pods_on("b")[0])
    served.cluster.faults.stuck.add("chat-b-0")
    served.passes(60)
    assert (served.reasons(), len(ended(served))) == (["Created"], 1)
    served.passes(25)
    assert (served.reasons(), served.nodes(), served.status.phase) == (["Created", "EndStalled"], ["a", "c"], "Ready")
    (exclusion,) = served.status.exclusions
    assert exclusion.message.startswith("slot chat-b does not end: pod chat-b-0 was to be gone at 2026-01-01T00:0")
    assert moment(exclusion.until) > served.cluster.now()
    assert len(ended(served)) == 1


def test_a_slot_that_hangs_while_it_goes_on_into_an_epoch_is_known_by_what_it_serves(served: World) -> None:
    """It loads nothing for that epoch: how far it is, its commit says."""
    (slot,) = [served.cluster.slot_of(pod) for pod in served.cluster.pods_on("b")]
    assert slot is not None
    slot.prepare = type(slot.prepare)(epoch=slot.committed, phase="prepared")
    served.passes(60, every=20)
    served.cluster.hang(served.cluster.pods_on("b")[0])
    served.looks(3, every=1)
    assert ended(served) == []
    served.passes(10, every=1)
    assert len(ended(served)) == 1
