from tests.chain.world import ChainWorld


def test_it_serves() -> None:
    world = ChainWorld()
    try:
        world.passes(20)
        print(world.story())
        client = world.ask((1, 2, 3), 12, 0)
        world.settle()
        assert client.got == client.wanted
    finally:
        world.close()
