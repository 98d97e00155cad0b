"""Losses by name, told to the whole chain: what the checker has found once."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from strata_planner.contract.frames import FrameHeader
from strata_runtime.gateway.routing.suspicion import MOST_FAILED_STEPS
from strata_runtime.stage.executor import Answered, Passed
from tests.chain.arithmetic import Executor
from tests.chain.client import Client
from tests.chain.cluster import NAME
from tests.chain.world import ChainWorld
from tests.laws import swept
from tests.operator.cluster_model import status_of

A_REPLICA = ("chat-c-0", "chat-d-0")
GATEWAY = "chat-gateway-x"


@pytest.fixture
def world() -> Iterator[ChainWorld]:
    """It serves, and three clients have some of their tokens."""
    made = ChainWorld()
    try:
        made.passes(6)
        for number in range(3):
            made.ask((number, 5, 6), 40, number)
        made.passes(0.6, every=0.1)
        yield made
    finally:
        made.close()


@pytest.mark.slow  # decide/test_trouble_that_stays.py has it of the operator alone
def test_two_that_never_reach_each_other_are_not_planned_side_by_side_for_ever(world: ChainWorld) -> None:
    """Their nodes are there, and both answer the operator."""
    world.part("chat-a-0", "chat-b-0", apart=True)
    world.passes(60, every=0.5)
    world.settle()
    status = status_of(world.cluster, NAME)
    assert status.phase == "Ready"
    assert not {"a", "b"} <= {stage.node for stage in status.stages}
    assert all(client.got == client.wanted for client in world.clients)


@pytest.mark.parametrize("late", ["chat-c-0", "chat-d-0"])
def test_of_two_replicas_that_lost_a_slot_each_the_first_to_be_whole_serves_and_the_other_joins_it(
    world: ChainWorld, late: str
) -> None:
    """A slot that loads for long keeps nobody waiting who has nothing of its replica."""
    node = late.split("-")[1]
    world.cluster.faults.hangs.add(node)
    for pod in ("chat-b-0", late):
        world.kill(pod)
    world.passes(8.0, every=0.1)
    assert all(client.got == client.wanted for client in world.clients)
    gateway = world.cluster.gateways[GATEWAY].dispatcher.status()
    assert (gateway.replicas, gateway.leaders_connected) == ((0,), 1)
    status = status_of(world.cluster, NAME)
    assert (status.phase, status.committed_epoch) == ("Replanning", gateway.epoch)
    world.cluster.faults.hangs.discard(node)
    world.settle()
    joined = world.cluster.gateways[GATEWAY].dispatcher.status()
    assert (joined.epoch, joined.replicas, joined.leaders_connected) == (gateway.epoch, (0, 1), 2)
    assert status_of(world.cluster, NAME).phase == "Ready"


def test_whom_its_controller_alone_does_not_hear_serves_over_the_loss_of_another_replica(world: ChainWorld) -> None:
    """Its streams stay where they are, while the other one is formed anew."""
    world.cluster.faults.deaf.add("d")
    links = world.cluster.gateways[GATEWAY].dispatcher._links
    world.kill("chat-b-0")
    world.passes(6.0, every=0.1)
    dispatcher = world.cluster.gateways[GATEWAY].dispatcher
    assert dispatcher._links[1] is links[1]
    assert dispatcher._links[0] is not links[0]
    assert (dispatcher.epoch, dispatcher.status().leaders_connected) == (2, 2)
    world.cluster.faults.deaf.clear()
    world.settle()
    assert dispatcher._links[1] is links[1]
    assert all(client.got == client.wanted for client in world.clients)


def one(world: ChainWorld) -> Client:
    """A client in the midst of its answer."""
    return next(client for client in world.clients if 0 < len(client.got) < len(client.wanted))


@pytest.mark.parametrize(
    "befalls",
    [
        pytest.param(lambda world: world.kill("chat-a-0"), id="the leader is killed"),
        pytest.param(lambda world: [world.kill(f"chat-{node}-0") for node in "ad"], id="two replicas lose a slot each"),
        pytest.param(lambda world: world.fail_step("chat-b-0"), id="a step fails"),
        pytest.param(lambda world: world.node_goes("b", power=False), id="a node loses its power"),
        pytest.param(lambda world: world.node_falls_silent("a"), id="a node loses its power, and nobody says so"),
    ],
)
def test_every_client_gets_its_text(world: ChainWorld, befalls: Callable[[ChainWorld], None]) -> None:
    client = one(world)
    befalls(world)
    world.passes(1.0, every=0.1)
    world.settle()
    assert client.done
    assert client.got == client.wanted


@pytest.mark.slow  # the machine meets it too
def test_what_later_stages_hold_outlives_their_leaders(world: ChainWorld) -> None:
    """They are started anew: their layers are computed again, those of the later stages are not."""
    for pod in ("chat-a-0", "chat-c-0"):
        world.kill(pod)
    refilled = set()
    for _ in range(40):
        world.passes(0.2, every=0.1)
        slots = world.cluster.slots().items()
        refilled |= {name for name, slot in slots if any(each.worker.executor.work.refilled for each in slot.serving)}
    world.settle()
    assert refilled == {"chat-a-0", "chat-c-0"}
    assert all(client.got == client.wanted for client in world.clients)


@pytest.mark.parametrize("logged", [64, pytest.param(2, marks=pytest.mark.slow)])
def test_what_a_stage_handed_on_is_what_the_lost_one_computes_from(logged: int) -> None:
    """Later stages are lost: nobody computes the layers before again where that is kept, and where it is of some blocks alone the text is the same."""
    world = ChainWorld(logged=logged)
    try:
        world.passes(6)
        for number in range(6):
            world.ask((number, *range(12)), 40, number)
        world.passes(0.6, every=0.1)
        for pod in ("chat-b-0", "chat-d-0"):
            world.kill(pod)
        from_log = 0
        for _ in range(40):
            world.passes(0.2, every=0.1)
            ran = [each.worker.executor for slot in world.cluster.slots().values() for each in slot.serving]
            from_log += sum(each.from_log for each in ran if isinstance(each, Executor))
        assert from_log or logged < 64
        world.settle()
        assert all(client.got == client.wanted for client in world.clients)
    finally:
        world.close()


@pytest.mark.parametrize("node", ["a", "b"])
def test_a_node_that_falls_silent_is_planned_without_at_once(world: ChainWorld, node: str) -> None:
    """Kubernetes calls it Ready all the time."""
    world.node_falls_silent(node)
    world.passes(5.0, every=0.1)
    assert "NodeLost" in {planned.reason for planned in world.planner.plans}
    assert world.is_serving()
    world.passes(20.0, every=0.5)
    assert all(client.got == client.wanted for client in world.clients)


def test_the_other_replica_serves_on_while_one_that_lost_its_leader_is_mended(world: ChainWorld) -> None:
    world.kill("chat-c-0", for_good=True)
    world.passes(3, every=0.5)
    late = [world.ask((9, number), 4, 0) for number in range(4)]
    world.passes(3, every=0.5)
    assert all(client.done for client in late)


def test_what_is_new_goes_to_the_other_replica_while_one_that_lost_a_later_stage_is_mended(world: ChainWorld) -> None:
    world.kill("chat-d-0", for_good=True)
    world.passes(3, every=0.5)
    late = [world.ask((9, number), 4, 0) for number in range(4)]
    world.passes(3, every=0.5)
    assert all(client.done for client in late)


def test_a_new_gateway_serves_what_is_whole_while_the_rest_is_mended(world: ChainWorld) -> None:
    """It was given no route before every slot served, were it for half an hour."""
    world.kill("chat-c-0", for_good=True)
    world.passes(3)
    world.kill(GATEWAY)
    late = world.ask((9, 9), 4, 0)
    world.passes(6)
    assert late.done


def test_a_replica_that_is_gone_together_with_the_gateway_is_planned_without(world: ChainWorld) -> None:
    """Nobody was left who could say that it was gone: neither a neighbour nor a gateway of that epoch."""
    for pod in A_REPLICA:
        world.kill(pod, for_good=True)
    world.kill(GATEWAY)
    world.settle()
    assert {planned.reason for planned in world.planner.plans} > {"Created"}


def test_a_slot_that_is_stopped_after_it_has_served_is_started_anew(world: ChainWorld) -> None:
    world.passes(40, every=2)
    before = world.cluster.slots()["chat-b-0"]
    world.ask((7, 8), 40, 0)
    world.passes(0.6, every=0.1)
    world.stop("chat-b-0", stopped=True)
    world.settle()
    assert world.cluster.slots()["chat-b-0"] is not before
    assert {replan.reason for replan in status_of(world.cluster, NAME).replans} == {"SlotLost"}
    assert all(client.got == client.wanted for client in world.clients)


@pytest.mark.parametrize("pod", ["chat-a-0", "chat-b-0"])
def test_a_step_that_hangs_is_noticed_and_its_slot_started_anew(world: ChainWorld, pod: str) -> None:
    """The leader, and the stage behind it. The process answers everybody as before."""
    before = world.cluster.slots()
    world.hang_step(pod)
    world.passes(20)
    assert world.cluster.slots()[pod] is before[pod], "it may only be slow"
    world.settle()
    after = world.cluster.slots()
    assert {name for name in before if after[name] is not before[name]} == {pod}
    assert {replan.reason for replan in status_of(world.cluster, NAME).replans} == {"SlotLost"}
    assert all(client.got == client.wanted for client in world.clients)


@pytest.mark.parametrize("stage", swept([0, 1], [1]))
def test_a_request_that_hangs_every_step_it_is_in_ends_and_the_others_go_on(
    world: ChainWorld, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    """After three hangs, the last ones alone: at whichever replica. Its slot was started anew for ever."""
    marker, run, hung = [7] * 6, Executor.run, []

    def poisoned(executor: Executor, header: FrameHeader, *inputs: Any) -> Passed | Answered | None:
        tokens = header.tokens
        if executor.role.stage == stage and any(tokens[at : at + 6] == marker for at in range(len(tokens))):
            hung.append(len(header.segments))
            executor.hangs = True
        return run(executor, header, *inputs)

    monkeypatch.setattr(Executor, "run", poisoned)
    poison = world.ask((*marker, 5), 40, 0)
    world.clients.remove(poison)  # no other may end by an error
    for number in range(3):
        world.ask((number, 8, 9), 40, number)
    for _ in range(60):
        if poison.error:
            break
        world.passes(10)
    assert "the pipeline failed 3 times at this request, the last time in a step that does not end" in poison.error
    world.settle()
    assert all(client.got == client.wanted for client in world.clients)
    assert len(hung) == MOST_FAILED_STEPS
    assert hung[1:] == [1, 1]


def test_gateways_are_told_of_a_stage_that_hangs(world: ChainWorld) -> None:
    """The operator is away: what is new goes to the other replica."""
    for pod in ("chat-b-0", "chat-d-0"):
        world.hang_step(pod)
    world.cluster.time.passes(45)
    assert {
        served.worker._lost
        for slot in world.cluster.slots().values()
        for served in slot.serving
        if hasattr(served.worker, "_lost")
    } == {"chat-b", "chat-d"}
    world.settle()
    assert all(client.got == client.wanted for client in world.clients)


def test_nobody_hears_a_slot_that_goes_on_after_others_took_its_place(world: ChainWorld) -> None:
    """Its kubelet cannot end it, and lets it go on at last."""
    world.stop("chat-a-0", stopped=True)
    world.cluster.faults.stuck.add("chat-a-0")
    world.passes(40)
    assert {planned.reason for planned in world.planner.plans} > {"Created"}
    world.stop("chat-a-0", stopped=False)
    world.settle()
    assert all(client.got == client.wanted for client in world.clients)
