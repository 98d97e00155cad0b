"""What the API server refuses, half does, or makes something else of: what is known is kept, what is said stands still."""

import pytest

from tests.laws import swept
from tests.operator.cluster_model import NAMESPACE
from tests.operator.virtual_operator import Fault
from tests.operator.world import AWorld, World

RECORDS, KEYS = ("POST", "/configmaps"), ("POST", "/secrets")


def numbers(world: World, plural: str) -> set[str]:
    """Of the epochs that have one."""
    names = [each["metadata"]["name"] for each in world.cluster.all(plural)]
    return {name.rpartition("-")[2] for name in names if "-epoch-" in name}


@pytest.mark.parametrize("fault", swept([403, 409, "silent", "late"], [409, "late"]))
def test_of_an_epoch_that_is_refused_the_plan_is_kept(a_world: AWorld, fault: Fault) -> None:
    world = a_world()
    world.planner.seconds = 40.0
    world.api.lasting[RECORDS] = fault
    world.passes(900, every=20)
    assert world.reasons() == ["Created"]
    world.api.end()
    world.passes(600, every=20)
    assert (world.status.phase, world.reasons()) == ("Ready", ["Created"])
    (record,) = world.cluster.all("configmaps")
    assert float(record["metadata"]["annotations"]["strata.dev/seconds-to-plan"]) < 60


@pytest.mark.parametrize("fault", swept(["lost", "unanswered", "broken"], ["lost"]))
def test_an_epoch_that_is_stored_holds_its_devices_and_serves_whatever_was_answered(
    a_world: AWorld, fault: Fault
) -> None:
    world = a_world()
    world.api.lasting[RECORDS] = fault
    while not world.cluster.all("configmaps"):
        world.look()
    assert world.operator.controller._dealing.ledger.others("somebody-else")
    world.passes(120)
    assert (world.status.phase, world.reasons()) == ("Ready", ["Created"])
    said = [written.body["status"]["conditions"] for written in world.cluster.wrote("PATCH", "/status")]
    assert "ReconcileError" not in {each["type"] for conditions in said for each in conditions}


@pytest.mark.slow
def test_an_epoch_of_a_large_cluster_can_be_recorded(a_world: AWorld) -> None:
    """Of which the links alone, between all pairs of nodes of different zones, take more than an object holds."""
    world = a_world(*(f"gpu-node-of-the-large-pool-{number:03}" for number in range(170)))
    for number, node in enumerate(world.cluster.all("nodes")):
        node["metadata"]["labels"]["topology.kubernetes.io/zone"] = "abc"[number % 3]
    world.passes()
    assert world.status.phase == "Ready"
    (record,) = world.cluster.all("configmaps")
    assert len(record["data"]["cluster.json"]) < 2000


def test_what_is_deleted_while_its_epoch_is_recorded_is_not_written_about(serving: World) -> None:
    """And what it was about to take is free again."""
    serving.api.lasting[RECORDS] = "silent"
    serving.edit(precision={"allowed": [8]})
    while not serving.operator.controller._dealing._dealt:
        serving.looks(1)
    written = len(serving.cluster.wrote("PATCH", "/status"))
    serving.cluster.abandon("chat")
    serving.passes(120)
    assert len(serving.cluster.wrote("PATCH", "/status")) == written
    assert not serving.operator.controller._dealing.ledger.others("somebody-else")


def test_a_plan_that_waits_to_be_recorded_is_dropped_when_its_devices_are_gone(a_world: AWorld) -> None:
    world = a_world()
    world.api.lasting[RECORDS] = 403
    world.passes(60)
    world.cluster.remove_node("a")
    world.api.end()
    world.passes(600, every=20)
    assert (world.status.phase, world.nodes()) == ("Ready", ["b", "c"])


def test_a_conflict_about_something_else_is_no_secret_that_is_there(a_world: AWorld) -> None:
    """As one about a quota is."""
    world = a_world()
    world.api.lasting[KEYS] = 409
    world.passes(60)
    assert not world.cluster.all("configmaps")
    assert "it is not there" in world.condition("Rendered").message
    world.api.end()
    world.passes(300, every=20)
    assert world.status.phase == "Ready"


def test_a_control_key_that_is_lost_ends_no_process_and_keeps_nobody_from_being_heard(serving: World) -> None:
    before = serving.pods()
    del serving.cluster.objects[f"/api/v1/namespaces/{NAMESPACE}/secrets/chat-control"]
    serving.operator_starts_anew()
    serving.passes(400, every=20)
    assert (serving.status.phase, serving.pods(), serving.reasons()) == ("Ready", before, ["Created"])
    assert serving.cluster.one("secrets", "chat-control")
    serving.cluster.remove_node("b")  # what comes instead has a key that follows from the new one
    serving.passes(400, every=20)
    assert (serving.status.phase, serving.nodes()) == ("Ready", ["a", "c"])


def test_a_record_without_its_key_is_none_and_gives_its_number_to_nobody(serving: World) -> None:
    del serving.cluster.objects[f"/api/v1/namespaces/{NAMESPACE}/secrets/chat-epoch-1"]
    serving.passes(30)
    assert serving.status.phase == "Ready"
    assert numbers(serving, "configmaps") == numbers(serving, "secrets") == {"2"}


def test_a_key_without_its_record_is_removed_once_a_later_epoch_serves(serving: World) -> None:
    serving.api.lasting["DELETE", "/configmaps"] = 403
    for bits in (4, 8, 16, 4, 8, 16):
        serving.edit(precision={"allowed": [bits]})
        serving.passes(20)
    serving.api.end()
    key = serving.cluster.one("secrets", "chat-epoch-6")
    assert key is not None
    old = {**key, "metadata": {**key["metadata"], "name": "chat-epoch-2"}}
    old["metadata"]["labels"] = {**old["metadata"]["labels"], "strata.dev/epoch": "2"}
    serving.cluster.put(f"/api/v1/namespaces/{NAMESPACE}/secrets/chat-epoch-2", old)
    serving.passes(600, every=20)
    assert numbers(serving, "configmaps") == numbers(serving, "secrets") == {"4", "5", "6", "7"}


def test_while_a_loss_is_planned_what_is_missing_is_applied(serving: World) -> None:
    serving.planner.seconds = 400.0
    serving.cluster.set_ready("b", "Unknown")
    serving.looks(6)
    assert serving.reasons() == ["Created", "NodeLost"]
    serving.edit(runtime={"image": "runtime:1", "pod": {"env": [{"name": "X", "value": "1"}]}})
    before = serving.cluster.one("deployments", "chat-gateway")
    serving.looks(3)
    assert serving.planner.under_way
    assert serving.cluster.one("deployments", "chat-gateway") != before


@pytest.mark.slow
def test_a_delete_that_is_refused_is_said_until_it_is_done(serving: World) -> None:
    serving.api.lasting["DELETE", "/statefulsets"] = 403
    serving.cluster.cordon("b", closed=True)
    serving.passes(60)
    turned = set()
    for _ in range(60):
        serving.looks(1, every=20)
        turned.add((serving.condition("Rendered").status, serving.condition("Rendered").last_transition_time))
    assert len(turned) == 1
    assert "the end of chat-b" in serving.condition("Rendered").message
    serving.api.end()
    serving.passes(600, every=20)
    assert serving.condition("Rendered").status == "True"


def test_what_cannot_be_planned_is_said_once_however_the_cluster_moves(serving: World) -> None:
    serving.edit(placement={"minStages": 9})
    serving.passes(60)
    events = len(serving.cluster.wrote("POST", "/events"))
    turned = {serving.condition("Planned").last_transition_time}
    for number in range(12):
        serving.cluster.allow_gpus("d", number % 2 + 1)
        serving.passes(10)
        turned.add(serving.condition("Planned").last_transition_time)
    assert (serving.condition("Planned").reason, len(turned)) == ("Infeasible", 1)
    assert len(serving.cluster.wrote("POST", "/events")) == events


@pytest.mark.parametrize("field", swept(["stages", "conditions"], ["stages"]))
def test_a_status_that_is_changed_on_its_way_is_written_again_but_seldom(a_world: AWorld, field: str) -> None:
    world = a_world()
    world.cluster.faults.pruned.add(field)
    world.passes(100, every=20)
    written = len(world.cluster.wrote("PATCH", "/status"))
    world.passes(1000, every=20)
    assert 1 <= len(world.cluster.wrote("PATCH", "/status")) - written <= 4
    assert world.status.phase == "Ready"
    world.cluster.faults.end()
    world.passes(400, every=20)
    assert world.condition("Ready").status == "True"
    assert world.status.stages
