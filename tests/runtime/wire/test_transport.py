"""A link is lost with its neighbour's connection, and with no one else's."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from strata_planner.contract.keys import new_secret
from strata_runtime.wire.transport import Keys, Link, connect, listen

NOW = 100.0
PATIENCE_SECONDS = 10.0


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def inward(context: zmq.Context[Any]) -> zmq.Socket[Any]:
    return context.socket(zmq.PULL)


@pytest.fixture
def link(inward: zmq.Socket[Any]) -> Iterator[Link]:
    link = Link(inward, "b", NOW, PATIENCE_SECONDS)
    yield link
    link.monitor.close(linger=0)


def read_until(link: Link, attribute: str) -> None:
    """Read the link until it has something to tell there."""
    deadline = time.monotonic() + 10
    while not getattr(link, attribute):
        assert time.monotonic() < deadline, f"no {attribute} within 10 s"
        link.monitor.poll(100)
        link.read(NOW)


def test_a_stranger_that_comes_and_goes_is_not_the_neighbours_loss(
    context: zmq.Context[Any], inward: zmq.Socket[Any], link: Link
) -> None:
    keys = Keys.of(new_secret())
    listen(inward, "tcp://127.0.0.1:0", keys)
    endpoint = inward.last_endpoint.decode()
    neighbour = connect(context.socket(zmq.PUSH), endpoint, keys)
    read_until(link, "connected")

    stranger = connect(context.socket(zmq.PUSH), endpoint, Keys.of(new_secret()))  # of the epoch before
    read_until(link, "refusals")
    stranger.close(linger=0)
    neighbour.send(b"frame")
    assert inward.recv() == b"frame"
    assert not link.read(NOW)

    neighbour.close(linger=0)
    read_until(link, "reason")
    assert link.reason.startswith("connection closed")


def test_a_neighbour_that_never_comes_is_lost_when_patience_ends(inward: zmq.Socket[Any], link: Link) -> None:
    listen(inward, "tcp://127.0.0.1:0", Keys.of(new_secret()))
    assert not link.read(NOW + PATIENCE_SECONDS)
    assert link.read(NOW + PATIENCE_SECONDS + 0.1)
    assert link.reason == "never connected in this epoch"
