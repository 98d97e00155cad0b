"""What edits of the spec lead to: those that cannot be planned, and those that change what is asked of pods."""

from typing import Any

from strata_planner.contract.control import Prepare
from tests.operator.world import AWorld, World


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
    gateway = serving.cluster.one("deployments", "chat-gateway")["spec"]["template"]["spec"]["containers"][0]
    assert "file:///models/tiny" in gateway["command"]


def test_an_environment_reaches_one_slot_at_a_time(serving: World) -> None:
    before = serving.pods()
    serving.edit(runtime={"image": "runtime:1", "pod": {"env": [{"name": "X", "value": "1"}]}})
    most_apart = 0
    for _ in range(40):
        acted = serving.look()
        ending = [pod for pod in serving.cluster.all("pods") if pod["metadata"].get("deletionTimestamp")]
        most_apart = max(most_apart, len(ending))
        serving.cluster.tick(1)
        if not acted:
            break
    assert most_apart == 1
    assert len(serving.cluster.wrote("DELETE", "/pods/")) == 2
    assert not set(before.values()) & set(serving.pods().values())
    assert (serving.status.phase, serving.condition("Updated").status) == ("Ready", "True")
    assert serving.reasons() == ["Created"]


def test_another_image_reaches_all_slots_at_once_and_nothing_is_prepared_over_two(serving: World) -> None:
    serving.edit(runtime={"image": "runtime:2"})
    images_of_epochs = set()
    for _ in range(40):
        acted = serving.look()
        running = {
            pod["spec"]["containers"][0]["image"]: slot.prepare.epoch
            for pod in serving.cluster.all("pods")
            if (slot := serving.cluster.slot_of(pod)) and slot.prepare.epoch
        }
        images_of_epochs |= set(running.items())
        serving.cluster.tick(1)
        if not acted:
            break
    epochs = [epoch for _, epoch in images_of_epochs]
    assert len(epochs) == len(set(epochs))
    assert serving.status.phase == "Ready"
    assert {pod["spec"]["containers"][0]["image"] for pod in serving.cluster.all("pods")} == {"runtime:2"}
    assert serving.status.committed_epoch == 2


def test_a_slot_that_comes_with_another_image_waits_for_those_that_have_the_old_one(serving: World) -> None:
    def check(_: Any, message: Any) -> None:
        if isinstance(message, Prepare):
            pods = [pod for pod in serving.cluster.pods_of("chat") if pod["metadata"]["name"][:-2] in message.slots]
            assert {pod["spec"]["containers"][0]["image"] for pod in pods} == {"runtime:2"}

    serving.operator.control.on_message = check
    serving.cluster.cordon("b", closed=True)
    serving.edit(runtime={"image": "runtime:2"}, precision={"allowed": [8]})
    serving.passes()
    assert (serving.status.phase, serving.nodes()) == ("Ready", ["a", "c"])


def test_a_slot_that_is_to_hold_more_devices_gets_them_before_it_prepares(a_world: AWorld) -> None:
    world = a_world()
    for node in ("a", "b"):
        world.cluster.allow_gpus(node, 1)
    world.passes()
    before = world.pods()
    world.cluster.allow_gpus("b", 2)
    world.edit(precision={"allowed": [8]})
    world.passes(10)
    assert world.status.phase == "Ready"
    assert [len(stage.devices) for stage in world.status.stages] == [1, 2]
    after = world.pods()
    assert (after["chat-a-0"] == before["chat-a-0"], after["chat-b-0"] == before["chat-b-0"]) == (True, False)
    (pod,) = [pod for pod in world.cluster.all("pods") if pod["metadata"]["name"] == "chat-b-0"]
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
