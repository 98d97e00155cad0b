"""Losses while no operator is there, by name: gateway and slots repair them by the standing orders of the plan, and who returns records it."""

from collections.abc import Iterator

import pytest

from tests.chain.ordered_world import SILENCE_SECONDS, OrderedWorld
from tests.laws import swept

GATEWAY = "chat-gateway-x"
World = OrderedWorld


@pytest.fixture
def world() -> Iterator[World]:
    """It serves, its operator has been away for a while, and three clients have some of their tokens."""
    made = OrderedWorld(gateways=1)
    try:
        made.passes(8)
        made.operator_dies()
        made.passes(SILENCE_SECONDS + 1)
        for number in range(3):
            made.ask((number, 5, 6), 40, number)
        made.passes(0.6, every=0.1)
        yield made
    finally:
        made.close()


def answered(world: World) -> bool:
    return all(client.done for client in world.clients) and all(client.got == client.wanted for client in world.clients)


def routed(world: World) -> int:
    (gateway,) = world.cluster.gateways.values()
    return gateway.dispatcher.status().epoch


@pytest.mark.parametrize("pod", swept(["chat-a-0", "chat-b-0"], ["chat-b-0"]))
def test_a_slot_that_is_lost_while_no_operator_is_there_is_done_without(world: World, pod: str) -> None:
    """The leader, and the stage behind it."""
    before = routed(world)
    world.kill(pod, for_good=True)
    world.passes(25)
    assert answered(world)
    assert routed(world) > before
    world.operator_returns()
    world.passes(20)
    assert ("StandingOrder", pod[len("chat-") : -len("-0")]) in world.replans
    world.settle()


def test_a_slot_that_is_started_anew_gets_its_part_again(world: World) -> None:
    """Its kubelet has: with nobody there it would wait."""
    world.kill("chat-b-0")
    world.passes(12)
    assert answered(world)
    assert routed(world) > 1
    world.operator_returns()
    world.passes(20)
    assert ("StandingOrder", None) in world.replans
    world.settle()


@pytest.mark.parametrize("after", swept([0.2, 5.2, 5.5, 5.7, 5.9, 6.1, 6.4, 7.0], [5.7]))
def test_an_operator_that_returns_in_the_midst_of_it_goes_on_from_there(world: World, after: float) -> None:
    """Before anything is done, while survivors load, between their commits, and behind the last."""
    world.kill("chat-b-0", for_good=True)
    world.passes(after, every=0.1)
    world.operator_returns()
    world.settle()
    assert answered(world)


def test_whoever_was_only_cut_off_is_heard_no_more(world: World) -> None:
    """It serves on as if its epoch were in force: nobody has its keys any more."""
    others = [name for name in world.cluster.hosts if name != "chat-a-0"]
    for other in others:
        world.part("chat-a-0", other, apart=True)
    world.passes(15)
    assert routed(world) > 1
    for other in others:
        world.part("chat-a-0", other, apart=False)
    world.passes(5)
    assert answered(world)
    world.operator_returns()
    world.settle()


def test_two_losses_at_once_wait_for_an_operator(world: World) -> None:
    """No order is for them: each would take the other slot for one that serves."""
    for pod in ("chat-a-0", "chat-d-0"):
        world.kill(pod, for_good=True)
    world.passes(30)
    assert routed(world) == 1
    world.operator_returns()
    world.settle()
    assert answered(world)
    assert "StandingOrder" not in {reason for reason, _ in world.replans}


def test_a_second_loss_behind_the_first_waits_for_an_operator(world: World) -> None:
    """What is left of an order's epoch has none of its own; the other replica serves on."""
    world.kill("chat-a-0", for_good=True)
    world.passes(12)
    made = routed(world)
    world.kill("chat-d-0", for_good=True)
    late = world.ask((9, 9), 4, 0)
    world.passes(15)
    assert late.done
    assert routed(world) == made
    world.operator_returns()
    world.settle()
    assert answered(world)


def test_nothing_is_done_while_an_operator_is_heard(world: World) -> None:
    """By the slots, if not by the gateway: whoever is asked to take part says no."""
    world.operator_returns()
    world.passes(2)
    for _ in range(40):
        for pod in ("chat-b-0", "chat-c-0"):
            world.cluster.slots()[pod].hears_the_controller()
        if not world.away:
            world.operator_dies()
            world.kill("chat-a-0", for_good=True)
        world.passes(0.5, every=0.25)
    assert routed(world) == 1


def test_a_slot_that_one_gateway_cannot_reach_is_not_lost(world: World) -> None:
    """Nobody but it says so: its neighbours hear it."""
    world.part("chat-b-0", GATEWAY, apart=True)
    world.passes(20)
    assert routed(world) == 1
    assert answered(world)
