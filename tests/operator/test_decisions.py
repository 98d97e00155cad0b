"""What each trouble leads to, by name, on a cluster of real objects with a virtual clock (cluster_model)."""

import re
from datetime import timedelta
from typing import Any

import pytest

from strata_operator.api import Condition, LLMDeploymentStatus
from strata_operator.api.status import Backoff
from strata_operator.decide.actions import Action
from strata_operator.decide.claims import unshared_claim
from strata_operator.decide.epochs import SendToSlot
from strata_operator.decide.exclusions import LONGEST_DELAY, Memory, delay
from strata_operator.decide.pod_troubles import pod_trouble
from strata_operator.decide.view import View
from strata_operator.render.records import moment, stamp
from strata_planner.contract.control import Prepare
from tests.operator.builders import a_deployment
from tests.operator.cluster_model import Kubernetes, Operator, a_served, status_of
from tests.operator.fakes import a_plan


class World:
    """One deployment, `chat`, on four nodes of two GPUs; it takes the first two by name."""

    def __init__(self, *nodes: str) -> None:
        self.cluster = Kubernetes(*nodes or ("a", "b", "c", "d"))
        self.cluster.objects["LLMDeployment", "chat"] = a_served("chat")
        self.operator = Operator(self.cluster)
        self.actions: list[str] = []
        self.operator.on_action = lambda _, action: self.actions.append(type(action).__name__)

    @property
    def status(self) -> LLMDeploymentStatus:
        return status_of(self.cluster, "chat")

    def passes(self, seconds: float = 0, *, every: float = 5) -> None:
        """Time, with a look every few seconds; then until there is nothing more to do."""
        end = self.cluster.now + timedelta(seconds=seconds)
        while self.cluster.now < end:
            self.operator.look()
            self.cluster.tick(every)
        for _ in range(40):
            if not self.operator.look():
                return
            self.cluster.tick(1)
        raise AssertionError("it acts without end")

    def condition(self, name: str) -> Condition:
        return next(each for each in self.status.conditions if each.type == name)

    def nodes(self) -> list[str]:
        return [stage.node for stage in self.status.stages]

    def reasons(self) -> list[str]:
        return [planned.wish.reason for planned in self.operator.plans]

    def edit(self, **parts: Any) -> None:
        thing = self.cluster.objects["LLMDeployment", "chat"]
        thing["spec"] |= parts
        thing["metadata"]["generation"] += 1

    def pods(self) -> dict[str, str]:
        """Name -> uid."""
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in self.cluster.all("Pod")}


@pytest.fixture
def serving() -> World:
    world = World()
    world.passes()
    assert (world.status.phase, world.nodes()) == ("Ready", ["a", "b"])
    return world


# A slot that gets no further


def test_a_slot_that_loads_for_ever_is_planned_without_after_the_timeout() -> None:
    world = World()
    world.edit(replanning={"prepareTimeoutSeconds": 300})
    world.cluster.faults.hangs.add("b")
    world.passes(295)
    assert world.reasons() == ["Created"]
    world.passes(20)
    assert world.reasons() == ["Created", "PrepareStalled"]
    assert (world.status.phase, world.nodes()) == ("Ready", ["a", "c"])
    (exclusion,) = world.status.exclusions
    assert (exclusion.node, exclusion.reason, exclusion.strikes) == ("b", "PrepareStalled", 1)
    assert "slot chat-b made no progress with epoch 1 for 300 s (replanning.prepareTimeoutSeconds)" in exclusion.message


def test_how_long_a_slot_got_no_further_outlasts_the_operator() -> None:
    world = World()
    world.edit(replanning={"prepareTimeoutSeconds": 300})
    world.cluster.faults.hangs.add("b")
    world.passes(200)
    plans = world.operator.plans
    world.operator = Operator(world.cluster)
    world.operator.plans = plans
    world.passes(120)
    assert "PrepareStalled" in world.reasons()


# Trouble that stays


def test_when_every_slot_refuses_plans_are_few_and_status_says_what_goes_on() -> None:
    world = World()
    world.cluster.faults.refuses |= {"a", "b", "c", "d"}
    world.passes(3600, every=40)
    assert len(world.operator.plans) <= 24
    assert len(world.cluster.all("ConfigMap")) <= 11
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


def test_while_it_waits_nothing_is_planned() -> None:
    world = World()
    world.cluster.faults.refuses |= {"a", "b", "c", "d"}
    world.passes(20)
    before = len(world.operator.plans)
    status = world.status
    assert status.backoff
    waiting = status.backoff.model_copy(update={"attempts": 30, "at": stamp(world.cluster.now)})
    thing = world.cluster.objects["LLMDeployment", "chat"]
    thing["status"] = status.model_copy(update={"backoff": waiting}).model_dump(
        mode="json", by_alias=True, exclude_none=True
    )
    world.passes(500, every=50)
    assert len(world.operator.plans) == before
    assert "the next plan is made at" in world.condition("Ready").message
    world.passes(150, every=50)
    assert len(world.operator.plans) > before


def test_an_edit_ends_what_was_remembered_of_the_last_spec() -> None:
    world = World()
    world.cluster.faults.refuses |= {"a", "b", "c", "d"}
    world.passes(1200, every=40)
    assert world.status.backoff
    world.cluster.faults.end()
    world.edit(precision={"allowed": [8]})
    world.passes(5)
    assert (world.status.phase, world.nodes()) == ("Ready", ["a", "b"])


def test_an_exclusion_ends_and_the_node_is_used_again() -> None:
    world = World("a", "b")
    world.edit(placement={"minStages": 2})
    world.cluster.faults.refuses.add("b")
    world.passes(10)
    assert (world.status.phase, world.condition("Planned").reason) == ("Failed", "Infeasible")
    assert "node b is left out until" in world.condition("Planned").message
    world.cluster.faults.end()
    world.passes(90)
    assert (world.status.phase, world.nodes()) == ("Ready", ["a", "b"])


def test_when_a_quota_forbids_pods_plans_are_few() -> None:
    world = World("a", "b")
    world.edit(placement={"maxStages": 1})
    world.cluster.faults.quota = True
    world.passes(2000, every=40)
    assert len(world.operator.plans) <= 16
    world.cluster.faults.end()
    world.passes(3600, every=120)
    assert world.status.phase == "Ready"


def test_a_slot_that_runs_out_of_memory_again_and_again_is_planned_with_more_left_free(serving: World) -> None:
    serving.cluster.faults.out_of_memory.add("b")
    serving.passes(600)
    assert "OutOfMemory" in serving.reasons()
    assert [plan.wish.margin for plan in serving.operator.plans if plan.wish.reason == "OutOfMemory"] == [0.1, 0.2]
    assert serving.status.phase == "Ready"
    assert serving.status.committed_epoch <= 12


def test_peace_ends_the_back_off(serving: World) -> None:
    serving.cluster.set_ready("b", "Unknown")
    serving.passes(30)
    assert serving.status.backoff
    assert serving.status.backoff.attempts == 1
    serving.passes(700, every=50)
    assert serving.status.backoff.attempts == 0


# Losses


def test_many_nodes_away_at_once_are_a_false_alarm(serving: World) -> None:
    for node in ("a", "b", "c"):
        serving.cluster.set_ready(node, "Unknown")
    serving.passes(300)
    assert serving.reasons() == ["Created"]
    assert (serving.status.phase, serving.condition("Degraded").reason) == ("Degraded", "ManyNodesNotReady")
    assert "3 of 4 nodes are not Ready at once" in serving.condition("Degraded").message
    assert "maxSimultaneousNodeLoss 0.5" in serving.condition("Ready").message
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


def test_a_flapping_node_does_not_make_a_deployment_flap(serving: World) -> None:
    for _ in range(15):
        serving.cluster.set_ready("b", "Unknown")
        serving.passes(20, every=10)
        serving.cluster.set_ready("b", "True")
        serving.passes(40, every=20)
    assert serving.reasons().count("NodeLost") <= 2
    assert serving.status.phase == "Ready"


def test_what_is_no_better_is_looked_at_once_and_changes_nothing(serving: World) -> None:
    serving.cluster.add_node("e")
    serving.passes(1200, every=60)
    assert serving.reasons() == ["Created", "BetterPlan"]
    assert (serving.status.phase, serving.status.committed_epoch) == ("Ready", 1)
    assert serving.condition("Planned").status == "True"


def test_a_cordoned_node_is_left_while_the_old_epoch_serves(serving: World) -> None:
    serving.cluster.cordon("b", closed=True)
    serving.operator.look()
    assert serving.reasons() == ["Created", "Drain"]
    serving.passes()
    assert (serving.status.phase, serving.nodes()) == ("Ready", ["a", "c"])
    assert set(serving.pods()) == {"chat-a-0", "chat-c-0"}
    serving.cluster.cordon("b", closed=False)
    serving.passes(400)
    assert serving.nodes() == ["a", "b"]


def test_a_drain_that_cannot_be_planned_is_said_and_stops_nothing() -> None:
    world = World("a", "b")
    world.edit(placement={"minStages": 2})
    world.passes()
    world.cluster.cordon("b", closed=True)
    world.passes(60)
    assert (world.status.phase, world.condition("Ready").status) == ("Ready", "True")
    assert (world.condition("Planned").status, world.condition("Planned").reason) == ("False", "Infeasible")
    assert world.condition("Planned").message.startswith("Drain: ")
    assert world.reasons().count("Drain") == 1


# An edit that cannot be planned


def test_an_infeasible_edit_leaves_what_serves_ready(serving: World) -> None:
    serving.edit(placement={"minStages": 9})
    serving.passes(60)
    assert (serving.status.phase, serving.condition("Ready").status) == ("Ready", "True")
    planned = serving.condition("Planned")
    assert (planned.status, planned.reason, planned.observed_generation) == ("False", "Infeasible", 2)
    assert planned.message == "SpecChanged: there are too few nodes; epoch 1 goes on"
    assert serving.condition("Degraded").status == "False"
    assert serving.reasons() == ["Created", "SpecChanged"]


def test_its_failure_does_not_mask_a_loss(serving: World) -> None:
    serving.edit(placement={"minStages": 9})
    serving.passes(10)
    serving.cluster.set_ready("b", "Unknown")
    serving.passes(20)
    assert (serving.status.phase, serving.nodes()) == ("Ready", ["a", "c"])
    serving.passes(20)
    assert (serving.status.phase, serving.condition("Planned").status) == ("Ready", "False")
    serving.edit(placement={"minStages": 1})
    serving.passes(10)
    assert (serving.status.phase, serving.condition("Planned").status) == ("Ready", "True")


def test_nothing_is_rendered_for_a_spec_that_has_no_plan(serving: World) -> None:
    before = serving.pods()
    serving.edit(model={"uri": "pvc://other/model"}, placement={"minStages": 9})
    serving.passes(60)
    assert serving.pods() == before
    gateway = serving.cluster.objects["Deployment", "chat-gateway"]["spec"]["template"]["spec"]["containers"][0]
    assert "file:///models/tiny" in gateway["command"]


# Changed templates


def test_an_environment_reaches_one_slot_at_a_time(serving: World) -> None:
    before = serving.pods()
    serving.edit(runtime={"image": "runtime:1", "pod": {"env": [{"name": "X", "value": "1"}]}})
    most_apart = 0
    for _ in range(40):
        acted = serving.operator.look()
        ending = [pod for pod in serving.cluster.all("Pod") if pod["metadata"].get("deletionTimestamp")]
        most_apart = max(most_apart, len(ending))
        serving.cluster.tick(1)
        if not acted:
            break
    assert most_apart == 1
    assert serving.actions.count("DeletePod") == 2
    assert not set(before.values()) & set(serving.pods().values())
    assert (serving.status.phase, serving.condition("Updated").status) == ("Ready", "True")
    assert serving.reasons() == ["Created"]


def test_another_image_reaches_all_slots_at_once_and_nothing_is_prepared_over_two(serving: World) -> None:
    serving.edit(runtime={"image": "runtime:2"})
    images_of_epochs = set()
    for _ in range(40):
        acted = serving.operator.look()
        running = {
            pod["spec"]["containers"][0]["image"]: slot.prepare.epoch
            for pod in serving.cluster.all("Pod")
            if (slot := serving.cluster.slots.get(pod["metadata"]["uid"])) and slot.prepare.epoch
        }
        images_of_epochs |= set(running.items())
        serving.cluster.tick(1)
        if not acted:
            break
    epochs = [epoch for _, epoch in images_of_epochs]
    assert len(epochs) == len(set(epochs))
    assert serving.status.phase == "Ready"
    assert {pod["spec"]["containers"][0]["image"] for pod in serving.cluster.all("Pod")} == {"runtime:2"}
    assert serving.status.committed_epoch == 2


def test_a_slot_that_comes_with_another_image_waits_for_those_that_have_the_old_one(serving: World) -> None:
    def check(view: View, action: Action) -> None:
        if isinstance(action, SendToSlot) and isinstance(action.message, Prepare):
            slots = {stage.slot for stage in view.stages()}
            assert {pod.image for pod in view.pods if pod.stateful_set in slots} == {"runtime:2"}

    serving.operator.on_action = check
    serving.cluster.cordon("b", closed=True)
    serving.edit(runtime={"image": "runtime:2"}, precision={"allowed": [8]})
    serving.passes()
    assert (serving.status.phase, serving.nodes()) == ("Ready", ["a", "c"])


def test_a_slot_that_is_to_hold_more_devices_gets_them_before_it_prepares() -> None:
    world = World()
    for node in ("a", "b"):
        world.cluster.objects["Node", node]["status"]["allocatable"]["nvidia.com/gpu"] = "1"
    world.passes()
    before = world.pods()
    world.cluster.objects["Node", "b"]["status"]["allocatable"]["nvidia.com/gpu"] = "2"
    world.edit(precision={"allowed": [8]})
    world.passes(10)
    assert world.status.phase == "Ready"
    assert [len(stage.devices) for stage in world.status.stages] == [1, 2]
    after = world.pods()
    assert (after["chat-a-0"] == before["chat-a-0"], after["chat-b-0"] == before["chat-b-0"]) == (True, False)
    (pod,) = [pod for pod in world.cluster.all("Pod") if pod["metadata"]["name"] == "chat-b-0"]
    assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"


def test_a_template_that_cannot_run_stops_at_the_first_slot_and_its_mend_reaches_it(serving: World) -> None:
    serving.cluster.faults.no_place.add("a")  # as a request for more than the node has would
    before = serving.pods()
    serving.edit(runtime={"image": "runtime:1", "pod": {"env": [{"name": "X", "value": "1"}]}})
    serving.passes(20)
    assert serving.pods()["chat-b-0"] == before["chat-b-0"]
    assert serving.condition("Updated").reason == "RollingOut"
    serving.cluster.faults.end()
    serving.edit(runtime={"image": "runtime:1", "pod": {"env": [{"name": "X", "value": "2"}]}})
    serving.passes(20)
    assert (serving.status.phase, serving.condition("Updated").status) == ("Ready", "True")


# Pods that do not start


def a_waiting_pod(reason: str, **status: Any) -> dict[str, Any]:
    placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    waiting = {"state": {"waiting": {"reason": reason, "message": "back-off 40s"}}, "restartCount": 3, **status}
    return {"metadata": {"name": "chat-a-0"}, "status": {"conditions": [placed], "containerStatuses": [waiting]}}


@pytest.mark.parametrize(
    ("pod", "told"),
    [
        pytest.param(
            a_waiting_pod("ImagePullBackOff", image="runtime:9"),
            "pod chat-a-0: ImagePullBackOff of runtime:9; check spec.runtime.image, and that its node may pull it",
            id="image",
        ),
        pytest.param(
            a_waiting_pod("CreateContainerConfigError"),
            "pod chat-a-0: CreateContainerConfigError (back-off 40s); a Secret or ConfigMap that it names is missing or lacks a key: "
            "create it, or correct spec.runtime.pod",
            id="secret",
        ),
        pytest.param(
            a_waiting_pod("CrashLoopBackOff", lastState={"terminated": {"reason": "Error", "exitCode": 2}}),
            "pod chat-a-0: CrashLoopBackOff: its process ends again and again (exit code 2); see kubectl logs --previous chat-a-0",
            id="crash",
        ),
        pytest.param(
            a_waiting_pod("CrashLoopBackOff", lastState={"terminated": {"reason": "OOMKilled", "exitCode": 137}}),
            "pod chat-a-0: CrashLoopBackOff: its process ends again and again (OOMKilled); raise its memory, or plan less for it",
            id="out-of-memory",
        ),
    ],
)
def test_what_keeps_a_pod_from_running_is_told_with_the_remedy(pod: dict[str, Any], told: str) -> None:
    trouble = pod_trouble(pod)
    assert trouble is not None
    assert trouble.message == told


def test_a_pod_in_trouble_is_named_in_the_conditions(serving: World) -> None:
    pod = serving.cluster.objects["Pod", "chat-b-0"]
    serving.cluster.slots.pop(pod["metadata"]["uid"])
    serving.cluster._move = lambda pod: None  # type: ignore[method-assign]  # the kubelet gets no further
    pod["status"]["containerStatuses"] = a_waiting_pod("ImagePullBackOff", image="runtime:9")["status"][
        "containerStatuses"
    ]
    serving.passes(10)
    assert serving.condition("Ready").reason == "ImagePullBackOff"
    assert "check spec.runtime.image" in serving.condition("Degraded").message
    assert "check spec.runtime.image" in serving.condition("StagesReady").message


def test_a_pod_that_is_created_for_long_names_the_mounts(serving: World) -> None:
    pod = serving.cluster.objects["Pod", "chat-b-0"]
    serving.cluster.slots.pop(pod["metadata"]["uid"])
    serving.cluster._move = lambda pod: None  # type: ignore[method-assign]
    pod["status"]["containerStatuses"] = [{"state": {"waiting": {"reason": "ContainerCreating"}}}]
    serving.passes(20)
    assert serving.condition("Ready").reason == "StagesNotReady"
    serving.passes(60)
    assert serving.condition("Ready").reason == "ContainerCreating"
    assert "FailedMount" in serving.condition("Ready").message


@pytest.mark.parametrize(
    ("modes", "nodes", "refused"),
    [
        pytest.param(["ReadWriteOnce"], ("a", "b"), True, id="one-node-alone"),
        pytest.param(["ReadWriteOncePod"], ("a", "b"), True, id="one-pod-alone"),
        pytest.param(["ReadWriteOnce"], ("a",), False, id="and-it-is-one"),
        pytest.param(["ReadWriteOnce", "ReadWriteMany"], ("a", "b"), False, id="many"),
        pytest.param([], ("a", "b"), False, id="not-known"),
    ],
)
def test_a_cache_that_one_node_alone_may_mount_is_refused_for_slots_on_two(
    modes: list[str],
    nodes: tuple[str, ...],
    refused: bool,  # noqa: FBT001
) -> None:
    deployment = a_deployment("chat").with_spec(model={"cache": {"persistentVolumeClaim": "models"}}).build()
    claim = {"metadata": {"name": "models", "namespace": "default"}, "status": {"accessModes": modes}}
    elsewhere = {"metadata": {"name": "models", "namespace": "other"}, "status": {"accessModes": ["ReadWriteOnce"]}}
    sentence = unshared_claim(deployment, a_plan(*nodes), [elsewhere, claim])
    assert bool(sentence) is refused
    if refused:
        assert re.match(r"spec.model.cache: the claim models is ReadWriteOnce.* 2 nodes \(a, b\)", sentence)
