"""ZeroMQ sockets as Strata uses them: authenticated by a shared secret, watched by heartbeats.

Used by slots and by the gateway. libzmq's own threads send a heartbeat every 250 ms on every connection and close one that
is silent for 1.5 s, also while the process computes; a socket's monitor tells of it at once. Knows no messages.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from strata_planner.contract.keys import curve_secret_key
from strata_runtime.errors import InputError

HEARTBEAT_MILLISECONDS = 250
SILENCE_MILLISECONDS = 1500

S = TypeVar("S", bound=zmq.Socket[Any])


@dataclass(frozen=True, slots=True)
class Keys:
    """CURVE key pairs (Z85) of both ends of the connections that share a secret."""

    server_secret: bytes
    server_public: bytes
    client_secret: bytes
    client_public: bytes

    @classmethod
    def of(cls, secret: str) -> "Keys":
        server, client = curve_secret_key(secret, "server"), curve_secret_key(secret, "client")
        return cls(server, zmq.curve_public(server), client, zmq.curve_public(client))


def listen(socket: S, endpoint: str, keys: Keys) -> S:
    """Bind; only clients that know the secret get in. Raises InputError for a port in use."""
    _watchful(socket)
    socket.curve_secretkey = keys.server_secret
    socket.curve_publickey = keys.server_public
    socket.curve_server = True
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise InputError(
            f"cannot listen at {endpoint}: {error}; choose a free port or end the process that has it"
        ) from error
    return socket


def connect(socket: S, endpoint: str, keys: Keys) -> S:
    """Connect, now or as soon as the other end is there."""
    _watchful(socket)
    socket.curve_secretkey = keys.client_secret
    socket.curve_publickey = keys.client_public
    socket.curve_serverkey = keys.server_public
    socket.connect(endpoint)
    return socket


def _watchful(socket: zmq.Socket[Any]) -> None:
    socket.linger = 0
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MILLISECONDS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MILLISECONDS)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)


_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Link:
    """The connection to one neighbour as its socket's monitor tells it. Once lost it stays lost: frames may be missing.

    `refusals`: connections without the secret, such as those of a neighbour that is still in another epoch. libzmq tells the
    end of each right after its refusal (stream_engine_base.cpp, `error`); it is no end of the neighbour's connection.
    """

    def __init__(self, socket: zmq.Socket[Any], neighbour: str, now: float, patience_seconds: float) -> None:
        self.neighbour = neighbour
        self.reason = ""
        self.connected = False
        self.refusals = 0
        self._refused = False
        self._deadline = now + patience_seconds
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _REFUSED
        self.monitor: zmq.Socket[Any] = socket.get_monitor_socket(events)

    def read(self, now: float) -> bool:
        """Take in what the monitor has; True if the link has just been lost."""
        was_lost = bool(self.reason)
        while self.monitor.poll(0):
            self._take(recv_monitor_message(self.monitor)["event"])
        if not self.connected and not self.reason and now > self._deadline:
            self.reason = "never connected in this epoch"
        return bool(self.reason) and not was_lost

    def _take(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.connected = True
        elif event & _REFUSED:
            self.refusals += 1
            self._refused = True
        elif self._refused:
            self._refused = False  # the end of the refused connection
        elif self.connected:
            self.reason = f"connection closed or silent for {SILENCE_MILLISECONDS / 1000} s"
