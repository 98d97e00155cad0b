"""Short lives of the whole chain by name, for cases of what the checker has found and for showing what it would find."""

from collections.abc import Callable

from tests.chain.client import Client, KeptClient
from tests.chain.world import ChainWorld

Scene = Callable[[ChainWorld], None]

BEGINNING = (1, 2, 3, 4, 5, 6, 7, 8, 9)
LEFT_OUT_SECONDS = 40.0  # a node that was lost is planned without for longer
MOST_SECONDS = 60  # from then until what moves has been loaded
FIRST, SECOND = "chat-gateway-x", "chat-gateway-y"


def some_have_begun(world: ChainWorld) -> None:
    """Clients with and without keys, at both gateways, in the midst of their answers."""
    world.passes(6)
    for number in range(6):
        world.ask((*BEGINNING, number), 40, number % 2 if number < 3 else None, at=number)
    world.passes(0.6, every=0.1)


def pages_are_under_way(world: ChainWorld) -> None:
    """A node was lost, and the better plan, with it left out, moves stages between slots that live."""
    some_have_begun(world)
    world.node_goes("b", power=False)
    world.passes(12.0, every=1.0)
    world.node_returns("b")
    world.passes(LEFT_OUT_SECONDS, every=2.0)
    for number in range(MOST_SECONDS):
        world.ask((*BEGINNING[: 3 + number % 4], number), 40, number % 2, at=number)
        if world.until_pages_go(1.0):
            return
    raise AssertionError("no pages went anywhere")


def pages_move(world: ChainWorld) -> None:
    """Under chats that go on over the commit."""
    pages_are_under_way(world)
    for number in range(8):
        world.ask((*BEGINNING, number), 40, number % 2, at=number)
        world.passes(0.25, every=0.05)
    world.settle()


def pages_whose(befalls: str, *, giver: bool, after: float = 0.02) -> Scene:
    def scene(world: ChainWorld) -> None:
        pages_are_under_way(world)
        world.cluster.time.passes(after)
        world.befalls_pages(befalls, giver=giver)
        world.settle()

    return scene


def later_stages_die(world: ChainWorld) -> None:
    """Of both replicas: lost layers are computed from what the leaders have handed on, where that is kept."""
    some_have_begun(world)
    for pod in ("chat-b-0", "chat-d-0"):
        world.kill(pod)
    world.settle()


def chats_go_on(world: ChainWorld) -> None:
    """Each begins with what another has had."""
    some_have_begun(world)
    for number in range(12):
        world.goes_on(number, at=number)
        world.passes(0.4, every=0.2)
    world.settle()


def chats_look_alike(world: ChainWorld) -> None:
    """Their first block is not the same, and all behind it are; a step takes one block at most, a prompt that is alone three equal parts."""
    world.passes(6)
    for number in range(8):
        world.ask((*[number] * 16, *range(5, 37)), 12, number % 2, at=number)
        world.passes(0.4, every=0.2)
    world.settle()


def bits_and_roles_change(world: ChainWorld) -> None:
    """A slot that holds all layers gets others."""
    some_have_begun(world)
    world.node_goes("b", power=False)
    world.passes(12.0, every=1.0)
    world.cluster.edit("chat", precision={"allowed": [8]})
    world.passes(5.0, every=0.5)
    world.settle()


def bits_change(world: ChainWorld) -> None:
    some_have_begun(world)
    world.cluster.edit("chat", precision={"allowed": [8]})
    world.settle()


def leaders_die(world: ChainWorld) -> None:
    """What later stages hold is gone on with."""
    some_have_begun(world)
    for leader in ("chat-a-0", "chat-c-0"):
        world.kill(leader)
    world.settle()


def gateways_die(world: ChainWorld) -> None:
    """One after the other, with time between to tell each other."""
    some_have_begun(world)
    for gateway in (FIRST, SECOND):
        world.kill(gateway)
        world.passes(3.0, every=0.5)
    world.settle()


def a_gateway_dies_that_had_more_to_tell(world: ChainWorld) -> None:
    """It has told its clients of tokens that the other one has not: these are on their way when it does."""
    some_have_begun(world)
    kept = [
        client
        for client in world.clients
        if isinstance(client, KeptClient) and client.served_by is world.cluster.gateways[FIRST]
    ]
    had = [len(client.got) for client in kept]
    while [len(client.got) for client in kept] == had:
        world.cluster.time.passes(0.0005)
    world.cluster.network.keep = lambda _: 0
    world.kill(FIRST)
    world.settle()


def a_client_changes_gateways(world: ChainWorld) -> None:
    """While both live, back and forth, with what it has and without."""
    some_have_begun(world)
    for turn in range(6):
        world.comes_back(0, at=turn, forgets=turn == 3)
        world.comes_back(1, at=turn + 1)
        world.passes(0.25, every=0.05)
    world.settle()


def the_gateways_are_parted(world: ChainWorld) -> None:
    """Both make the same answers meanwhile."""
    some_have_begun(world)
    world.part(FIRST, SECOND, apart=True)
    for number in range(3):
        world.comes_back(number, at=number % 2)
    world.passes(1.0, every=0.1)
    for number in range(3):
        world.comes_back(number, at=1 - number % 2, forgets=number == 2)
    world.passes(0.5, every=0.1)
    world.part(FIRST, SECOND, apart=False)
    world.passes(1.0, every=0.1)
    for number in range(3):
        world.comes_back(number, at=number)
    world.settle()


def whole(clients: list[Client]) -> bool:
    return all(client.done and client.got == client.wanted for client in clients)
