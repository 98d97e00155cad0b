"""A port lets in only who knows its secret, keeps little of what others send, and a link is lost with its neighbour alone."""

import resource
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from strata_planner.contract.keys import new_secret
from strata_runtime.wire import transport
from strata_runtime.wire.transport import Keys, Link, connect, listen
from tests.runtime.slot.strangers import SECONDS, speaks_curve, wait_for_the_end

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
def outward(context: zmq.Context[Any]) -> zmq.Socket[Any]:
    return context.socket(zmq.PUSH)


@pytest.fixture
def link(outward: zmq.Socket[Any]) -> Iterator[Link]:
    link = Link(outward, "b", NOW, PATIENCE_SECONDS)
    yield link
    link.monitor.close(linger=0)


def port_of(listening: zmq.Socket[Any]) -> int:
    return int(listening.last_endpoint.decode().rpartition(":")[2])


def read_until(link: Link, attribute: str) -> None:
    """Read the link until it has something to tell there."""
    deadline = time.monotonic() + 10
    while not getattr(link, attribute):
        assert time.monotonic() < deadline, f"no {attribute} within 10 s"
        link.monitor.poll(100)
        link.read(NOW)


def test_a_link_is_lost_when_the_neighbours_end_of_it_closes(
    inward: zmq.Socket[Any], outward: zmq.Socket[Any], link: Link
) -> None:
    keys = Keys.of(new_secret())
    listen(inward, "tcp://127.0.0.1:*", keys)
    connect(outward, f"tcp://127.0.0.1:{port_of(inward)}", keys)
    read_until(link, "connected")
    inward.close(linger=0)
    read_until(link, "reason")
    assert link.reason.startswith("connection closed")


class Relay:
    """A network between two ends: passes bytes on until it is told not to, and never closes anything by itself."""

    def __init__(self, port: int) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self._target = port
        self._passes = True
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def fall_silent(self) -> None:
        self._passes = False

    def close(self) -> None:
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        """Until an end closes its side."""
        one, _ = self._listening.accept()
        with self._listening, one, socket.create_connection(("127.0.0.1", self._target)) as other:
            ends = {one: other, other: one}
            while True:
                for ready in select.select(list(ends), [], [], SECONDS)[0]:
                    piece = ready.recv(4096)
                    if not piece:
                        return
                    if self._passes:
                        ends[ready].sendall(piece)


def test_a_neighbour_that_falls_silent_is_lost(
    inward: zmq.Socket[Any], outward: zmq.Socket[Any], link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing closes: heartbeats go unanswered."""
    monkeypatch.setattr(transport, "HEARTBEAT_MILLISECONDS", 20)
    monkeypatch.setattr(transport, "SILENCE_MILLISECONDS", 200)
    keys = Keys.of(new_secret())
    listen(inward, "tcp://127.0.0.1:*", keys)
    relay = Relay(port_of(inward))
    connect(outward, f"tcp://127.0.0.1:{relay.port}", keys)
    read_until(link, "connected")
    relay.fall_silent()
    read_until(link, "reason")
    assert "silent for 0.2 s" in link.reason
    outward.close(linger=0)
    relay.close()


def test_a_slot_may_have_all_files_open_that_the_system_lets_it() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[0]), before[1]))
        transport.take_all_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_neighbour_in_another_epoch_refuses_without_being_lost(
    inward: zmq.Socket[Any], outward: zmq.Socket[Any], link: Link
) -> None:
    """Neighbours commit one after the other: the port is first that of the epoch before."""
    before: zmq.Context[Any] = zmq.Context()
    old = listen(before.socket(zmq.PULL), "tcp://127.0.0.1:*", Keys.of(new_secret()))
    port, keys = port_of(old), Keys.of(new_secret())
    connect(outward, f"tcp://127.0.0.1:{port}", keys)
    assert link.monitor.poll(SECONDS * 1000), "no attempt within 10 s"
    assert not link.read(NOW), "an attempt that was refused is no loss"
    old.close()
    before.term()
    listen(inward, f"tcp://127.0.0.1:{port}", keys)
    read_until(link, "connected")
    assert not link.reason


def test_a_neighbour_that_never_comes_is_lost_when_patience_ends(outward: zmq.Socket[Any], link: Link) -> None:
    connect(outward, "tcp://127.0.0.1:1", Keys.of(new_secret()))
    assert not link.read(NOW + PATIENCE_SECONDS)
    assert link.read(NOW + PATIENCE_SECONDS + 0.1)
    assert link.reason == "never connected in this epoch"


def test_the_servers_public_key_alone_lets_nobody_in(inward: zmq.Socket[Any]) -> None:
    keys = Keys.of(new_secret())
    listen(inward, "tcp://127.0.0.1:*", keys)
    speaks_curve(port_of(inward), keys.server_public, zmq.curve_keypair())


@pytest.mark.parametrize("pair", ["server", "client"])
def test_another_secret_opens_nothing(inward: zmq.Socket[Any], pair: str) -> None:
    keys, others = Keys.of(new_secret()), Keys.of(new_secret())
    listen(inward, "tcp://127.0.0.1:*", keys)
    known = others.server_public if pair == "server" else keys.server_public
    speaks_curve(port_of(inward), known, (others.client_public, others.client_secret))


def test_a_socket_of_a_context_whose_gatekeeper_is_gone_lets_nobody_in(inward: zmq.Socket[Any]) -> None:
    keys = Keys.of(new_secret())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "_see_to_gatekeeper", lambda _: None)
        listen(inward, "tcp://127.0.0.1:*", keys)
    speaks_curve(port_of(inward), keys.server_public, (keys.client_public, keys.client_secret))


def test_a_silent_stranger_is_shown_out(inward: zmq.Socket[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HANDSHAKE_MILLISECONDS", 50)
    listen(inward, "tcp://127.0.0.1:*", Keys.of(new_secret()))
    with socket.create_connection(("127.0.0.1", port_of(inward)), timeout=SECONDS) as stranger:
        wait_for_the_end(stranger)


def test_a_strangers_large_frame_is_not_waited_for(inward: zmq.Socket[Any]) -> None:
    """One that announces 200 MB is shown out before it has sent them."""
    listen(inward, "tcp://127.0.0.1:*", Keys.of(new_secret()))
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    with socket.create_connection(("127.0.0.1", port_of(inward)), timeout=SECONDS) as stranger:
        stranger.sendall(greeting + b"\x06" + (200 << 20).to_bytes(8, "big"))
        wait_for_the_end(stranger)


def test_a_message_above_the_sockets_bound_ends_its_connection_alone(
    context: zmq.Context[Any], inward: zmq.Socket[Any], outward: zmq.Socket[Any], link: Link
) -> None:
    keys = Keys.of(new_secret())
    listen(inward, "tcp://127.0.0.1:*", keys, largest_bytes=1000)
    other = connect(context.socket(zmq.PUSH), f"tcp://127.0.0.1:{port_of(inward)}", keys)
    connect(outward, f"tcp://127.0.0.1:{port_of(inward)}", keys)
    outward.send(bytes(1000))
    assert inward.recv() == bytes(1000)
    outward.send(bytes(3000))
    read_until(link, "reason")
    other.send(b"goes on")
    assert inward.recv() == b"goes on"
    other.close()
