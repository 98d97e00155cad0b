"""ZeroMQ sockets as Strata uses them: both ends authenticated by a shared secret, watched by heartbeats, messages bounded.

Used by slots and by the gateway. libzmq's own threads send a heartbeat every 250 ms on every connection and close one that
is silent for 1 s, also while the process computes; a socket's monitor tells of it at once. Knows no messages.
"""

import resource
import sys
import threading
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from strata_planner.contract.keys import curve_secret_key
from strata_runtime.errors import InputError

HEARTBEAT_MILLISECONDS = 250
SILENCE_MILLISECONDS = 1000
HANDSHAKE_MILLISECONDS = 5000  # who has not authenticated by then is shown out, with what was kept of its bytes
RETRY_MILLISECONDS = (5, 500)
# Of neighbours that switch to the same epoch, one after the other: streams wait. Until then the other end is of the epoch before, and refuses.
NEIGHBOUR_RETRY_MILLISECONDS = (1, 4)
SMALL_BYTES = 4 << 20  # of one message where nothing larger is said
_WRAPPING_BYTES = 1024  # what CURVE adds to a message; its handshake is smaller than this, too

S = TypeVar("S", bound=zmq.Socket[Any])


@dataclass(frozen=True, slots=True)
class Keys:
    """CURVE key pairs (Z85) of both ends of the connections that share a secret."""

    server_secret: bytes
    server_public: bytes
    client_secret: bytes
    client_public: bytes

    def of_server(self, public_key: str) -> "Keys":
        """The client's pair, for a server with another pair of its own."""
        return replace(self, server_secret=b"", server_public=public_key.encode())

    @classmethod
    def of(cls, secret: str) -> "Keys":
        server, client = curve_secret_key(secret, "server"), curve_secret_key(secret, "client")
        return cls(server, zmq.curve_public(server), client, zmq.curve_public(client))


def listen(socket: S, endpoint: str, keys: Keys, largest_bytes: int = SMALL_BYTES, also: Keys | None = None) -> S:
    """Bind; only clients that know the secret get in: the server's public key alone opens nothing. `also`: other clients that do; whose key opened the
    connection is then the `User-Id` of its frames. libzmq sends that ahead of them, so that such a socket may be readable and have nothing: never wait in it.

    Raises InputError for a port in use.
    """
    _prepare(socket, largest_bytes)
    socket.curve_secretkey = keys.server_secret
    socket.curve_publickey = keys.server_public
    socket.curve_server = True
    socket.zap_domain = keys.client_public + (b" " + also.client_public if also else b"")
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a gatekeeper nobody gets in
    _see_to_gatekeeper(socket.context)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise InputError(
            f"cannot listen at {endpoint}: {error}; choose a free port or end the process that has it"
        ) from error
    return socket


def connect(
    socket: S,
    endpoint: str,
    keys: Keys,
    largest_bytes: int = SMALL_BYTES,
    retries: tuple[int, int] = RETRY_MILLISECONDS,
) -> S:
    """Connect, now or as soon as the other end is there. `retries`: milliseconds between two attempts, at first and, doubled each time, at most."""
    _prepare(socket, largest_bytes)
    socket.setsockopt(zmq.RECONNECT_IVL, retries[0])
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, retries[1])
    socket.curve_secretkey = keys.client_secret
    socket.curve_publickey = keys.client_public
    socket.curve_serverkey = keys.server_public
    socket.connect(endpoint)
    return socket


def take_all_files() -> int:
    """Let this process have as many files open as the system lets it: each connection is one, a stranger's until it is shown out.

    How many those are.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return sys.maxsize if most == resource.RLIM_INFINITY else most


def _prepare(socket: zmq.Socket[Any], largest_bytes: int) -> None:
    socket.linger = 0
    socket.maxmsgsize = largest_bytes + _WRAPPING_BYTES
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MILLISECONDS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MILLISECONDS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MILLISECONDS)


def _see_to_gatekeeper(context: zmq.Context[Any]) -> None:
    """libzmq asks at this address (ZAP, RFC 27) about every client of this context's sockets; one thread answers.

    It ends with the context. A shadow of the context makes its socket, so that who closes all of the context's sockets from
    another thread does not close this one.
    """
    socket: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(zmq.REP)
    try:
        socket.bind("inproc://zeromq.zap.01")
    except zmq.ZMQError as error:
        socket.close()
        if error.errno != zmq.EADDRINUSE:  # in use: the context has its gatekeeper
            raise
        return
    threading.Thread(target=_keep_gate, args=(socket,), name="gatekeeper", daemon=True).start()


def _keep_gate(socket: zmq.Socket[bytes]) -> None:
    try:
        while True:
            version, request, domain, _address, _identity, mechanism, *credentials = socket.recv_multipart()
            keys = [z85.encode(key) for key in credentials]
            known = domain.split(b" ")
            welcome = mechanism == b"CURVE" and len(keys) == 1 and keys[0] in known
            code, text = (b"200", b"OK") if welcome else (b"400", b"not the key of this socket's client")
            socket.send_multipart([version, request, code, text, keys[0] if welcome and len(known) > 1 else b"", b""])
    except zmq.ContextTerminated:
        socket.close(linger=0)


class Link:
    """The way to one neighbour, as the monitor of the socket that *connects* to it tells. Once lost it stays lost.

    Never of a socket that listens: its monitor tells of everybody who comes and goes, and not who it was. A connection that
    this end has made and that has authenticated can end only with the neighbour, its silence, or the network between.
    """

    def __init__(self, socket: zmq.Socket[Any], neighbour: str, now: float, patience_seconds: float) -> None:
        self.neighbour = neighbour
        self.reason = ""
        self.connected = False
        self._deadline = now + patience_seconds
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
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
        elif (
            self.connected
        ):  # before that: a refused attempt, such as one at a neighbour that is still in another epoch
            self.reason = f"connection closed or silent for {SILENCE_MILLISECONDS / 1000} s"
