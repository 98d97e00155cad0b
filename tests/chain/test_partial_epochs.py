"""An epoch that one replica serves while another one still loads into it, told to the whole chain: nobody else is accused, excluded or judged for that."""

from collections.abc import Iterator

import pytest

from tests.chain.cluster import NAME
from tests.chain.world import ChainWorld
from tests.operator.cluster_model import status_of

GATEWAY = "chat-gateway-x"


@pytest.fixture
def world() -> Iterator[ChainWorld]:
    made = ChainWorld()
    made.cluster.edit(NAME, replanning={"prepareTimeoutSeconds": 600})
    try:
        yield made
    finally:
        made.close()


def uid_of(world: ChainWorld, pod: str) -> str | None:
    found = world.cluster.one("pods", pod)
    return found["metadata"]["uid"] if found else None


def reasons(world: ChainWorld) -> list[str]:
    return [each.reason for each in status_of(world.cluster, NAME).replans]


@pytest.mark.parametrize("fault", ["deaf", "unreachable"])
def test_the_leader_that_serves_is_left_alone_where_only_its_controller_does_not_hear_it(
    world: ChainWorld, fault: str
) -> None:
    """Gateways reach all leaders that they were told of."""
    world.cluster.faults.hangs.add("c")
    world.passes(45)
    before = uid_of(world, "chat-a-0")
    failing: set[str] = getattr(world.cluster.faults, fault)
    failing.add("a")
    world.passes(20)
    assert uid_of(world, "chat-a-0") == before
    assert reasons(world) == []
    status = world.cluster.gateways[GATEWAY].dispatcher.status()
    assert (status.replicas, status.leaders_connected) == ((0,), 1)


@pytest.mark.slow
def test_a_pod_of_a_replica_that_serves_may_be_replaced_meanwhile(world: ChainWorld) -> None:
    """However old the epoch is: its place is no question of loading."""
    world.passes(45)
    world.cluster.faults.deaf.add("d")
    world.passes(3, every=0.1)
    world.kill("chat-b-0")
    world.passes(70)
    pod = world.cluster.one("pods", "chat-a-0")
    assert pod is not None
    world.cluster.end(pod)
    world.passes(15)
    assert set(reasons(world)) == {"SlotLost"}
    assert status_of(world.cluster, NAME).exclusions == ()


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_a_slot_that_is_stopped_while_another_replica_is_formed_anew_is_started_again(
    world: ChainWorld, seconds: float
) -> None:
    """Its neighbour, which waits for it to pass into the epoch, misses it."""
    world.passes(45)
    before = uid_of(world, "chat-d-0")
    world.stop("chat-d-0", stopped=True)
    world.passes(seconds, every=0.1)
    world.kill("chat-b-0")
    world.passes(8, every=0.1)
    assert uid_of(world, "chat-d-0") != before
    world.settle()


@pytest.mark.slow
def test_a_replica_that_breaks_for_the_first_time_waits_for_no_pause_that_another_one_has_earned(
    world: ChainWorld,
) -> None:
    """Of which a slot ends again and again, as soon as it is formed."""
    world.passes(45)
    for _ in range(6):
        world.kill("chat-d-0")
        world.passes(4, every=0.2)
    gateway = world.cluster.gateways[GATEWAY].dispatcher
    before = gateway.status().epoch
    world.kill("chat-b-0")
    world.passes(6, every=0.2)
    assert gateway.status().epoch > before
    assert 0 in gateway.status().replicas
