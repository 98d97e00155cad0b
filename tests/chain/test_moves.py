"""Pages that go from slot to slot while epochs change, blocks that chats share, and answers that outlive their gateway: by name, in the whole chain."""

from collections.abc import Iterator

import pytest

from tests.chain import scenes
from tests.chain.client import KeptClient
from tests.chain.world import BEFALLS, ChainWorld


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["tight", "roomy"])
def world(request: pytest.FixtureRequest) -> Iterator[ChainWorld]:
    made = ChainWorld(tight=request.param)
    try:
        yield made
    finally:
        made.close()


def test_pages_of_stages_that_move_are_computed_by_nobody_again(world: ChainWorld) -> None:
    scenes.pages_are_under_way(world)
    world.passes(2.0, every=0.1)
    slots = world.cluster.slots()
    assert {"chat-c-0", "chat-d-0"} <= set(slots)
    begun = [served.worker.executor.work for slot in slots.values() for served in slot.serving]
    assert not any(work.refilled for work in begun)
    world.settle()
    assert scenes.whole(world.clients)


@pytest.mark.slow  # runtime/slot/test_givers.py has each, without an operator
@pytest.mark.parametrize("giver", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["giver", "taker"])
@pytest.mark.parametrize("befalls", [BEFALLS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in BEFALLS[1:])])
def test_whatever_befalls_pages_under_way_nobody_waits_for_ever(world: ChainWorld, befalls: str, giver: bool) -> None:  # noqa: FBT001
    scenes.pages_whose(befalls, giver=giver)(world)
    assert scenes.whole(world.clients)


@pytest.mark.slow  # one more of what may befall them
def test_pages_of_another_epoch_are_none(world: ChainWorld) -> None:
    """What a giver tells of it is not used: the layers are computed again."""
    scenes.pages_are_under_way(world)
    world.befalls_pages("answers for another epoch", giver=True)
    world.passes(8.0, every=0.5)
    begun = [served.worker.executor.work for slot in world.cluster.slots().values() for served in slot.serving]
    assert any(work.refilled or work.prefill_tokens for work in begun) or scenes.whole(world.clients)
    world.settle()
    assert scenes.whole(world.clients)


@pytest.mark.slow  # the machine meets them too
def test_chats_find_what_others_have_computed(world: ChainWorld) -> None:
    scenes.chats_go_on(world)
    assert scenes.whole(world.clients)
    assert sum(client.found for client in world.clients[6:]) > 100


@pytest.mark.parametrize(
    "scene",
    [
        scenes.a_gateway_dies_that_had_more_to_tell,
        pytest.param(scenes.gateways_die, marks=pytest.mark.slow),
        pytest.param(scenes.a_client_changes_gateways, marks=pytest.mark.slow),
    ],
)
def test_an_answer_under_a_key_goes_on_at_the_other_gateway(world: ChainWorld, scene: scenes.Scene) -> None:
    scene(world)
    kept = [client for client in world.clients if isinstance(client, KeptClient)]
    assert kept
    assert all(client.times == 1 for client in kept), "somebody had to begin anew"
    assert scenes.whole(world.clients)


@pytest.mark.slow  # the machine meets it too
def test_gateways_that_were_parted_tell_no_client_two_answers(world: ChainWorld) -> None:
    scenes.the_gateways_are_parted(world)
    assert scenes.whole(world.clients)
