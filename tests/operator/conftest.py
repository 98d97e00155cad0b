"""Worlds, which end with their test."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.laws import Lazy

if TYPE_CHECKING:
    from tests.operator.world import AWorld, World

world = Lazy("tests.operator.world")


@pytest.fixture
def a_world() -> "Iterator[AWorld]":
    made: list[World] = []

    def make(*nodes: str) -> "World":
        made.append(world.World(*nodes))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def serving(a_world: "AWorld") -> "World":
    made = a_world()
    made.passes()
    assert (made.status.phase, made.nodes()) == ("Ready", ["a", "b"])
    return made
