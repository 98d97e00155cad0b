"""Worlds, which end with their test."""

from collections.abc import Iterator

import pytest

from tests.operator.world import AWorld, World


@pytest.fixture
def a_world() -> Iterator[AWorld]:
    made: list[World] = []

    def make(*nodes: str) -> World:
        made.append(World(*nodes))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture
def serving(a_world: AWorld) -> World:
    world = a_world()
    world.passes()
    assert (world.status.phase, world.nodes()) == ("Ready", ["a", "b"])
    return world
