"""What a slot that gets no further leads to: plans without its node, fewer and fewer of them."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from strata_operator.api.status import Backoff
from strata_operator.decide.exclusions import LONGEST_DELAY, Memory, _struck, delay
from strata_operator.decide.troubles import Trouble
from strata_operator.observe.kube import SECRETS
from strata_operator.render.records import MARGIN, moment, stamp
from tests.operator.world import AWorld, World


def test_a_slot_that_loads_for_ever_is_planned_without_after_the_timeout(a_world: AWorld) -> None:
    world = a_world()
    world.edit(replanning={"prepareTimeoutSeconds": 300})
    world.cluster.faults.hangs.add("b")
    world.passes(295)
    assert world.reasons() == ["Created"]
    world.passes(30)
    assert world.reasons() == ["Created", "PrepareStalled"]
    assert (world.status.phase, world.nodes()) == ("Ready", ["a", "c"])
    (exclusion,) = world.status.exclusions
    assert (exclusion.node, exclusion.reason, exclusion.strikes) == ("b", "PrepareStalled", 1)
    assert "slot chat-b made no progress with epoch 1 for 300 s (replanning.prepareTimeoutSeconds)" in exclusion.message


def loses_its_neighbour(world: World, node: str, times: int) -> None:
    """Once in each epoch, while both answer the operator."""
    for _ in range(times):
        (pod, *_) = world.cluster.pods_on("a" if node == "b" else "b")
        slot = world.cluster.slot_of(pod)
        assert slot is not None
        slot.lose(f"chat-{node}")
        world.passes(40, every=5)


@pytest.mark.parametrize(("node", "left"), [("a", ["b", "c"]), ("b", ["a", "c"])])
def test_slots_that_lose_each_other_in_every_epoch_are_planned_apart(
    a_world: AWorld, node: str, left: list[str]
) -> None:
    world = a_world()
    world.passes(10)
    loses_its_neighbour(world, node, 3)
    assert world.nodes() == ["a", "b"], "it may heal"
    loses_its_neighbour(world, node, 1)
    assert (world.status.phase, world.nodes()) == ("Ready", left)
    (excluded,) = world.status.exclusions
    assert (excluded.node, excluded.reason) == (node, "PeersUnreachable")
    assert "lost it in 3 epochs in a row: see to the network between their nodes" in excluded.message


def test_who_is_started_anew_again_and_again_is_not_parted_from_its_neighbours(a_world: AWorld) -> None:
    world = a_world()
    world.passes(10)
    for _ in range(5):
        neighbour, slot = (world.cluster.slot_of(world.cluster.pods_on(node)[0]) for node in "ab")
        assert slot is not None
        assert neighbour is not None
        slot.restart()
        neighbour.lose("chat-b")
        world.passes(40, every=5)
    assert world.nodes() == ["a", "b"]


def test_a_slot_that_fetches_its_model_gets_further(a_world: AWorld) -> None:
    """For longer than it may make no progress, without a whole layer; then the download stands still."""
    world = a_world()
    world.edit(replanning={"prepareTimeoutSeconds": 300})
    world.cluster.faults.hangs.add("b")
    world.passes(10)
    for pod in world.cluster.pods_on("b"):
        slot = world.cluster.slot_of(pod)
        assert slot is not None
        for mebibytes in range(1, 40):
            slot.prepare = msgspec.structs.replace(slot.prepare, progress=20 * mebibytes)
            world.passes(20)
    assert world.reasons() == ["Created"]
    written = {stage.loaded for stage in world.status.stages}
    assert max(written) > 0
    world.passes(330)
    assert "PrepareStalled" in world.reasons()


def test_how_long_a_slot_got_no_further_outlasts_the_operator(a_world: AWorld) -> None:
    world = a_world()
    world.edit(replanning={"prepareTimeoutSeconds": 300})
    world.cluster.faults.hangs.add("b")
    world.passes(200)
    world.operator_starts_anew()
    world.passes(130)
    assert "PrepareStalled" in world.reasons()


@pytest.mark.slow
def test_a_slot_that_dies_for_good_under_a_served_epoch_is_planned_without_after_the_timeout(serving: World) -> None:
    serving.edit(replanning={"prepareTimeoutSeconds": 300})
    (pod,) = serving.cluster.pods_on("b")
    serving.passes(60)
    serving.cluster.kill(pod)
    serving.passes(290)
    assert serving.reasons() == ["Created"]
    serving.passes(20)
    assert serving.reasons() == ["Created", "PrepareStalled"]
    assert (serving.status.phase, serving.nodes()) == ("Ready", ["a", "c"])
    (exclusion,) = serving.status.exclusions
    assert "slot chat-b made no progress with epoch 1 for 300 s" in exclusion.message
    serving.passes(200)
    assert (serving.status.phase, serving.nodes()) == ("Ready", ["a", "b"])  # a new pod of it starts


def test_a_slot_that_hangs_is_ended_where_no_plan_does_without_its_node(a_world: AWorld) -> None:
    world = a_world("a", "b")
    world.edit(placement={"minStages": 2}, replanning={"prepareTimeoutSeconds": 300})
    world.passes()
    assert world.status.phase == "Ready"
    (pod,) = world.cluster.pods_on("b")
    world.cluster.kill(pod)
    world.passes(290)
    assert world.pods()["chat-b-0"] == pod["metadata"]["uid"]
    world.passes(60)
    assert world.pods()["chat-b-0"] != pod["metadata"]["uid"]
    assert (world.status.phase, world.nodes()) == ("Ready", ["a", "b"])


def test_where_a_stranger_has_the_name_of_a_slots_secret_no_node_is_left_out(a_world: AWorld) -> None:
    """As the slot of `chat-b` on the node `node` has that of `chat` on the node `b-node`."""
    world = a_world()
    world.edit(replanning={"prepareTimeoutSeconds": 300})
    owner = {"kind": "Node", "name": "d", "uid": world.cluster.all("nodes")[-1]["metadata"]["uid"]}
    meta = {"name": "chat-b-key", "namespace": "default", "annotations": {}, "ownerReferences": [owner]}
    world.cluster.put(SECRETS.path("default", "chat-b-key"), {"kind": "Secret", "metadata": meta, "data": {}})
    world.passes(400, every=20)
    assert world.reasons() == ["Created"]
    assert not world.status.exclusions
    assert (world.condition("Rendered").status, world.condition("Rendered").reason) == ("False", "ApplyRefused")
    assert "chat-b-key" in world.condition("Rendered").message


def test_the_only_slot_of_a_plan_is_missed_by_the_gateway(a_world: AWorld) -> None:
    world = a_world("a")
    world.edit(replanning={"prepareTimeoutSeconds": 300})
    world.passes()
    world.cluster.kill(world.cluster.pods_on("a")[0])
    world.cluster.add_node("b")
    world.passes(320)
    assert (world.reasons(), world.status.phase, world.nodes()) == (["Created", "PrepareStalled"], "Ready", ["b"])


@pytest.mark.slow  # hours of a controller's life
def test_a_slot_that_only_its_controller_does_not_hear_stays_where_it_is(serving: World) -> None:
    serving.edit(replanning={"prepareTimeoutSeconds": 300})
    serving.cluster.faults.unreachable.add("b")
    serving.passes(700, every=20)
    assert serving.reasons() == ["Created", "NodeLost"], "the repair is planned once, and not taken"
    assert serving.status.committed_epoch == 1
    serving.cluster.faults.end()
    serving.passes(5)
    assert (serving.status.phase, serving.status.committed_epoch) == ("Ready", 1)


def test_a_node_that_cannot_have_the_image_that_another_runs_is_planned_without(a_world: AWorld) -> None:
    world = a_world()
    world.cluster.faults.no_image.add("b")
    world.passes(50)
    assert world.reasons() == ["Created"]
    world.passes(40)
    assert world.reasons() == ["Created", "ImageUnusable"]
    assert (world.status.phase, world.nodes()) == ("Ready", ["a", "c"])
    (exclusion,) = world.status.exclusions
    assert exclusion.message.startswith("slot chat-b cannot start: pod chat-b-0: ImagePullBackOff; check spec.runtime")


def test_an_image_that_no_node_has_is_no_nodes_trouble(a_world: AWorld) -> None:
    world = a_world()
    world.cluster.faults.no_image |= {"a", "b", "c", "d"}
    world.passes(600, every=50)
    assert (world.reasons(), world.condition("Ready").reason) == (["Created"], "ImagePullBackOff")


@pytest.mark.slow  # hours of a controller's life
def test_when_every_slot_refuses_plans_are_few_and_status_says_what_goes_on(a_world: AWorld) -> None:
    world = a_world()
    world.cluster.faults.refuses |= {"a", "b", "c", "d"}
    world.passes(3600, every=40)
    assert len(world.plans) <= 24
    assert len(world.cluster.all("configmaps")) <= 11
    assert world.status.phase == "Failed"
    assert {each.node for each in world.status.exclusions} == {"a", "b", "c", "d"}
    assert max(each.strikes for each in world.status.exclusions) >= 3
    assert world.status.backoff
    assert world.status.backoff.attempts >= 5
    assert world.condition("Ready").reason in {"PrepareRefused", "NoDevices", "Infeasible"}
    assert "401 from the hub" in world.condition("Ready").message + world.condition("Planned").message


def test_the_second_plan_follows_at_once_and_each_further_one_waits_twice_as_long() -> None:
    waits = [delay(attempts, LONGEST_DELAY).total_seconds() for attempts in range(10)]
    assert waits == [0, 0, 10, 20, 40, 80, 160, 320, 600, 600]


@pytest.mark.parametrize(
    ("reason", "last", "seconds"),
    [
        pytest.param("PrepareRefused", "PrepareRefused: epoch 7", 600, id="of-itself"),
        pytest.param("SpecChanged", "SpecChanged: not found at noon", 120, id="a-wish"),
        pytest.param("NodeLost", "NodeLost: epoch 7", 60, id="losses-in-a-row"),
        pytest.param("NodeLost", "SpecChanged: not found at noon", 0, id="a-loss-waits-for-no-wish"),
    ],
)
def test_how_long_a_plan_waits_after_many(reason: str, last: str, seconds: int) -> None:
    at = "2026-01-01T00:00:00Z"
    memory = Memory((), Backoff(attempts=30, last=last, at=at, retry_at=at))
    assert memory.may_plan(moment(at) + timedelta(seconds=seconds), reason)
    assert not seconds or not memory.may_plan(moment(at) + timedelta(seconds=seconds - 1), reason)


def test_while_it_waits_nothing_is_planned(a_world: AWorld) -> None:
    world = a_world()
    world.cluster.faults.refuses |= {"a", "b", "c", "d"}
    world.passes(20)
    before = len(world.plans)
    status = world.status
    assert status.backoff
    waiting = status.backoff.model_copy(update={"attempts": 30, "at": stamp(world.cluster.now())})
    world.cluster.set_status("chat", status.model_copy(update={"backoff": waiting}))
    world.passes(500, every=50)
    assert len(world.plans) == before
    assert "the next plan is made at" in world.condition("Ready").message
    world.passes(150, every=50)
    assert len(world.plans) > before


def test_an_edit_ends_what_was_remembered_of_the_last_spec(a_world: AWorld) -> None:
    world = a_world()
    world.cluster.faults.refuses |= {"a", "b", "c", "d"}
    world.passes(1200, every=40)
    assert world.status.backoff
    world.cluster.faults.end()
    world.edit(precision={"allowed": [8]})
    world.passes(5)
    assert (world.status.phase, world.nodes()) == ("Ready", ["a", "b"])


def test_an_exclusion_ends_and_the_node_is_used_again(a_world: AWorld) -> None:
    world = a_world("a", "b")
    world.edit(placement={"minStages": 2})
    world.cluster.faults.refuses.add("b")
    world.passes(10)
    assert (world.status.phase, world.condition("Planned").reason) == ("Failed", "Infeasible")
    assert "node b is left out until" in world.condition("Planned").message
    world.cluster.faults.end()
    world.passes(90)
    assert (world.status.phase, world.nodes()) == ("Ready", ["a", "b"])


@pytest.mark.parametrize(
    ("waits", "attempts", "lasts"),
    [
        (None, 0, 60),
        (20, 2, 80),
        (-90, 2, 60),
        (600, 2, 660),
        pytest.param(600, 8, 1260, id="plan after plan has failed: beyond two"),
    ],
)
def test_a_node_is_left_out_beyond_the_next_plan_however_long_that_waits(
    waits: int | None, attempts: int, lasts: int
) -> None:
    """Else that plan would take it again, and so on; of two nodes that are gone each plan would take one (found by the checker of the whole chain)."""
    now = moment("2026-01-01T00:00:00Z")
    view: Any = SimpleNamespace(now=now)
    newest: Any = SimpleNamespace(epoch=SimpleNamespace(number=7))
    at = stamp(now + timedelta(seconds=waits or 0))
    backoff = None if waits is None else Backoff(attempts=attempts, last="PrepareStalled: epoch 7", at=at, retry_at=at)
    exclusion = _struck(view, newest, Trouble("a", "PrepareStalled", "it does not answer"), None, backoff)
    assert moment(exclusion.until) - now == timedelta(seconds=lasts)


@pytest.mark.slow  # hours of a controller's life
def test_when_a_quota_forbids_pods_plans_are_few(a_world: AWorld) -> None:
    world = a_world("a", "b")
    world.edit(placement={"maxStages": 1})
    world.cluster.faults.quota = True
    world.passes(2000, every=40)
    assert len(world.plans) <= 16
    world.cluster.faults.end()
    world.passes(3600, every=120)
    assert world.status.phase == "Ready"


@pytest.mark.slow  # hours of a controller's life
def test_a_slot_that_runs_out_of_memory_again_and_again_is_planned_with_more_left_free(serving: World) -> None:
    serving.cluster.faults.out_of_memory.add("b")
    serving.passes(600)
    assert "OutOfMemory" in serving.reasons()
    margins = [each["metadata"]["annotations"][MARGIN] for each in serving.cluster.all("configmaps")]
    assert max(margins) == "0.2"
    assert serving.status.phase == "Ready"
    assert serving.status.committed_epoch <= 12


def test_peace_ends_the_back_off(serving: World) -> None:
    serving.cluster.set_ready("b", "Unknown")
    serving.passes(30)
    assert serving.status.backoff
    assert serving.status.backoff.attempts == 1
    serving.passes(700, every=50)
    assert serving.status.backoff.attempts == 0
