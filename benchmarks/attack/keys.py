"""Sockets that hold the right keys. The one place of the attacks that knows how secrets become keys.

The holder of a deployment's control secret, or of an epoch's key, is no stranger: what it sends gets past the handshake.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import zmq

from benchmarks.attack.target import HOST
from strata_planner.contract.control import GetStatus, Status, encode, status_decoder
from strata_runtime.wire.transport import Keys, connect


@contextlib.contextmanager
def holder(kind: int, port: int, secret: str, linger_milliseconds: int = 0) -> Iterator[zmq.Socket[Any]]:
    """A connected socket of `kind` whose keys come from the secret of the other end. What is not sent yet has so long at its close."""
    with zmq.Context() as context:
        socket = connect(context.socket(kind), f"tcp://{HOST}:{port}", Keys.of(secret))
        try:
            yield socket
        finally:
            socket.close(linger=linger_milliseconds)


def server_public_key(secret: str) -> bytes:
    """What somebody who has seen a server's public key, and nothing else, knows."""
    return Keys.of(secret).server_public


def ask_status(port: int, secret: str, seconds: float = 5.0) -> Status | None:
    """The status of a slot or gateway; None if it does not answer in time."""
    with holder(zmq.DEALER, port, secret) as socket:
        socket.send(encode(GetStatus()))
        return status_decoder.decode(socket.recv()) if socket.poll(int(seconds * 1000)) else None
