"""Connections of strangers: all that knocks at a port without knowing its secret."""

import socket
import ssl
import struct
import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

SECONDS = 10.0
_GREETING = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x01"  # ZMTP 3.1, up to the mechanism's name
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_GONE = _REFUSED | zmq.EVENT_DISCONNECTED


def says(words: bytes) -> Callable[[int], None]:
    """Says this; is shown out."""

    def knock(port: int) -> None:
        with _connected(port) as stranger:
            stranger.sendall(words)
            wait_for_the_end(stranger)

    return knock


def is_shown_out(stranger: socket.socket) -> bool:
    try:
        return not stranger.recv(4096)
    except ConnectionError:
        return True


def wait_for_the_end(stranger: socket.socket) -> None:
    """Until the other side has closed the connection."""
    while not is_shown_out(stranger):
        pass


def comes_and_goes(port: int) -> None:
    _connected(port).close()


def resets(port: int) -> None:
    with _connected(port) as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def says_half_a_greeting(port: int) -> None:
    with _connected(port) as stranger:
        stranger.sendall(_GREETING[:7])


def says_a_tls_hello(port: int) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    hello = context.wrap_bio(incoming, outgoing, server_hostname="slot")
    try:
        hello.do_handshake()
    except ssl.SSLWantReadError:
        says(outgoing.read())(port)


def greets_with(mechanism: bytes) -> Callable[[int], None]:
    return says(_GREETING + mechanism.ljust(20, b"\0") + bytes(32) + b"\x04\x29\x05READY" + bytes(35))


def knows_another_key(port: int) -> None:
    """A CURVE client that does not know the server's key."""
    client = zmq.curve_keypair()
    speaks_curve(port, zmq.curve_keypair()[0], client)


def speaks_curve(port: int, server_public: bytes, client: tuple[bytes, bytes], kind: int = zmq.PUSH) -> None:
    """Until it is refused. Fails if it is let in. `kind`: of a socket that the one at the port takes."""
    with zmq.Context() as context, context.socket(kind) as stranger:
        stranger.linger = 0
        stranger.curve_publickey, stranger.curve_secretkey = client
        stranger.curve_serverkey = server_public
        with stranger.get_monitor_socket(_GONE | zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor:
            stranger.connect(f"tcp://127.0.0.1:{port}")
            assert monitor.poll(int(SECONDS * 1000)), "neither let in nor refused"
            assert recv_monitor_message(monitor)["event"] & _GONE, "a stranger was let in"
            stranger.disable_monitor()


def _connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=SECONDS)


PROBES: dict[str, Callable[[int], None]] = {
    "opens and closes": comes_and_goes,
    "resets": resets,
    "half a greeting": says_half_a_greeting,
    "HTTP": says(b"GET / HTTP/1.1\r\nHost: slot\r\nUser-Agent: a stranger\r\nAccept: */*\r\n\r\n"),
    "TLS": says_a_tls_hello,
    "noise": says(bytes(range(7, 256)) * 2),
    "NULL": greets_with(b"NULL"),
    "PLAIN": greets_with(b"PLAIN"),
    "another key": knows_another_key,
}


def until(wanted: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not wanted():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.005)
