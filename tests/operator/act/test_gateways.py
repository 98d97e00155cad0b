"""Several gateways in front of the same leaders: each is told its route, and one that is away stops neither the others nor the operator."""

from typing import Any

import pytest
from prometheus_client import REGISTRY

from strata_operator.api import LLMDeployment
from strata_operator.decide.view import gateway_hosts
from strata_operator.render.names import GATEWAY, labels
from strata_operator.render.records import moment
from strata_planner.contract.control import EpochChange
from tests.operator.builders import a_deployment, a_pod
from tests.operator.fakes import FakeGateway
from tests.operator.world import AWorld, World

TWO = {"replicas": 2}


def gateways(world: World) -> dict[str, FakeGateway]:
    """The processes that run, by pod."""
    found = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in world.cluster.gateways_of("chat")}
    running = {name: world.cluster.processes.get(uid) for name, uid in found.items()}
    return {name: each.speaks for name, each in running.items() if each and isinstance(each.speaks, FakeGateway)}


def epochs_of(world: World) -> dict[str, int]:
    return {name: one.status().epoch for name, one in gateways(world).items()}


@pytest.fixture
def two(a_world: AWorld) -> World:
    world = a_world()
    world.edit(gateway=TWO)
    world.passes(60)
    return world


def test_each_gateway_gets_the_route(two: World) -> None:
    assert epochs_of(two) == {"chat-gateway-x": 1, "chat-gateway-y": 1}
    assert (two.status.phase, two.status.gateways_ready) == ("Ready", "2/2")


def test_more_gateways_are_no_reason_for_another_plan(a_world: AWorld) -> None:
    world = a_world()
    world.passes(60)
    before = world.pods()
    world.edit(gateway={"replicas": 3})
    world.passes(60)
    assert (world.pods(), world.reasons(), world.status.gateways_ready) == (before, ["Created"], "3/3")


def test_one_that_is_away_stops_nothing(two: World) -> None:
    (victim, *_) = two.cluster.gateways_of("chat")
    two.cluster.kill(victim)
    two.passes(30)
    assert (two.status.phase, two.status.gateways_ready) == ("Ready", "1/2")
    assert "1 of 2 gateways" in two.condition("Ready").message
    two.cluster.set_ready(two.nodes()[0], "False")
    two.passes(120)
    assert (two.status.phase, two.status.committed_epoch) == ("Ready", 2)
    assert epochs_of(two) == {"chat-gateway-y": 2}


def test_one_that_takes_no_route_keeps_nobody_from_being_ready(two: World, monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = gateways(two)["chat-gateway-x"]
    monkeypatch.setattr(deaf, "handle", lambda message: deaf.status())
    two.edit(precision={"allowed": [8]})
    two.looks(30)
    assert epochs_of(two) == {"chat-gateway-x": 1, "chat-gateway-y": 2}
    assert (two.status.phase, two.status.gateways_ready) == ("Ready", "1/2")


def test_one_that_is_started_anew_gets_the_route_again(two: World) -> None:
    first = gateways(two)["chat-gateway-x"]
    (victim, *_) = two.cluster.gateways_of("chat")
    two.cluster.end(victim)
    two.passes(30)
    assert gateways(two)["chat-gateway-x"] is not first
    assert (epochs_of(two), two.status.gateways_ready) == ({"chat-gateway-x": 1, "chat-gateway-y": 1}, "2/2")


def test_only_what_is_lost_for_all_of_them_is_lost(two: World) -> None:
    """The slot is silent for the operator alone, and for one gateway."""
    slot = two.status.stages[0].slot
    two.cluster.faults.unreachable.add(two.nodes()[0])
    gateways(two)["chat-gateway-x"].lost.add(slot)
    two.passes(1500, every=60)
    assert (two.reasons(), two.status.committed_epoch) == (["Created", "NodeLost"], 1), (
        "a repair is foreseen and not taken"
    )
    gateways(two)["chat-gateway-y"].lost.add(slot)
    two.passes(1500, every=60)
    assert two.status.committed_epoch > 1


def a_gateway_pod(deployment: LLMDeployment, name: str, **status: Any) -> dict[str, Any]:
    pod = a_pod(name).labelled(labels(deployment, GATEWAY)).build()
    return {**pod, "metadata": {**pod["metadata"], "namespace": deployment.namespace}, "status": status}


def test_gateways_are_reached_where_their_pods_are() -> None:
    deployment = a_deployment().build()
    both = {"podIP": "fd00::1", "podIPs": [{"ip": "fd00::1"}, {"ip": "10.0.0.1"}]}
    pods = [
        a_gateway_pod(deployment, "runs", **both),
        a_gateway_pod(deployment, "starts"),
        a_gateway_pod(deployment, "ended", phase="Failed", podIP="10.0.0.2"),
        a_gateway_pod(deployment, "fails", phase="Running", podIP="10.0.0.3"),
        a_gateway_pod(a_deployment("other").build(), "foreign", podIP="10.0.0.4"),
    ]
    assert gateway_hosts(deployment, pods) == {"runs": "10.0.0.1", "fails": "10.0.0.3"}


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def test_what_a_loss_cost_is_told_once_all_gateways_have(two: World) -> None:
    """Held, lost and computed again are sums, the pause is the longest, the next token the first."""
    one, other = gateways(two).values()
    one.cost = EpochChange(0, 3, 1, 0.25, two.cluster.now().timestamp() + 9, 40, 8)
    other.cost, other.tells = EpochChange(0, 2, 0, 1.5, two.cluster.now().timestamp() + 7, 2), False
    before = {
        name: metric(name, reason="NodeLost")
        for name in ("strata_operator_lost_requests_total", "strata_operator_pause_seconds_sum")
    }
    two.cluster.set_ready("b", "Unknown")
    two.passes(20)
    assert (two.status.phase, two.reasons()) == ("Ready", ["Created", "NodeLost"])
    (replan,) = two.status.replans
    assert (replan.requests_held, replan.pause_ms, replan.next_token_at) == (None, None, None)
    two.edit(workload={"concurrency": 3})
    two.passes(20)
    other.tells = True
    two.passes(10)
    assert two.reasons() == ["Created", "NodeLost", "SpecChanged"]
    told, _ = two.status.replans  # of the one before the newest, too
    assert (told.requests_held, told.requests_lost) == (5, 1)
    assert (told.pause_ms, told.tokens_recomputed, told.tokens_refilled) == (1500.0, 42, 8)
    assert told.next_token_at is not None
    assert moment(told.next_token_at).timestamp() == pytest.approx(other.cost.resumed_at, abs=0.001)
    event, _ = [each for each in two.cluster.all("events") if each["reason"] == "RequestsResumed"]
    assert (event["type"], "5 requests waited for it, 1 were lost" in event["note"]) == ("Warning", True)
    assert (
        metric("strata_operator_lost_requests_total", reason="NodeLost") - before["strata_operator_lost_requests_total"]
        == 1
    )
    assert (
        metric("strata_operator_pause_seconds_sum", reason="NodeLost") - before["strata_operator_pause_seconds_sum"]
        == 1.5
    )
    reached = metric("strata_operator_replan_seconds_count", reason="NodeLost", reached="nextToken")
    one.cost = EpochChange(0)
    two.operator_starts_anew()
    two.passes(30)
    assert two.status.replans[0] == told  # what is on record stays, and is counted once
    assert metric("strata_operator_replan_seconds_count", reason="NodeLost", reached="nextToken") == reached
