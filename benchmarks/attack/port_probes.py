"""Named probes of slots' and the gateway's ZeroMQ ports: what strangers once broke epochs or memory with. Each gives its complaints."""

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import zmq

from benchmarks.attack.held import hold_ports
from benchmarks.attack.keys import ask_status, holder, server_public_key
from benchmarks.attack.port_frames import GRPC, HTTP, SIGNATURE, TLS_HELLO, command, greeting, message, metadata
from benchmarks.attack.port_send import handshake_succeeds, unanswered
from benchmarks.attack.target import HOST, Target
from strata_planner.contract.control import GetStatus, Watch, encode

_HUGE_BYTES = 200 << 20
_PIECE_BYTES = 1 << 20
_REPEATS = 8
_WATCHERS = 500
_PAUSE_SECONDS = 0.3  # between strangers: a loss that is believed takes some time to show
_LOOPBACK = ("127.", "::1")


def addresses(target: Target) -> list[str]:
    """A deployment of one machine listens to that machine alone."""
    return [f"port {port} is bound to {ip}" for port, ip in target.addresses.items() if not ip.startswith(_LOOPBACK)]


def strangers(target: Target, first: bytes) -> list[str]:
    """One after the other at every inner port."""
    for port in target.inner_ports * (_REPEATS // len(target.inner_ports) + 1):
        _say(port, [first])
        time.sleep(_PAUSE_SECONDS)
    return unanswered(target)


def huge(target: Target, start: bytes, flags: int) -> list[str]:
    """A frame of 200 MB after a greeting, at every port; the last is left unfinished for a while."""
    piece = bytes(_PIECE_BYTES)
    head = start + bytes([flags]) + struct.pack(">Q", _HUGE_BYTES)
    for port in (*target.inner_ports, *target.control_ports):
        _say(port, [head, *([piece] * (_HUGE_BYTES // _PIECE_BYTES - 1))], wait_seconds=1.0)
    return unanswered(target)


def public_key(target: Target) -> list[str]:
    """Who has seen the server's public key, and holds no other secret, is a stranger."""
    if any(ask_status(port, target.secrets[port]) is None for port in target.control_ports):
        return ["the control ports do not even answer the right keys: nothing can be said"]
    complaints = []
    for port in target.control_ports:
        with zmq.Context() as context:
            client: zmq.Socket[Any] = context.socket(zmq.DEALER)
            client.linger = 0
            client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
            client.curve_serverkey = server_public_key(target.secrets[port])
            if handshake_succeeds(client, port, 1.0, [encode(GetStatus())]) and client.poll(1000):
                complaints.append(f"control port {port} answers a client that knows nothing but its public key")
            client.close()
    return complaints


def multipart(target: Target) -> list[str]:
    """Messages of none to many frames from the holder of the right key."""
    request = encode(GetStatus())
    shapes: Sequence[Sequence[bytes]] = (
        [b"", request],
        [request, request],
        [b"a", b"b", request],
        [b""],
        [request] * 64,
    )
    complaints = []
    for port in target.control_ports:
        for shape in shapes:
            with holder(zmq.DEALER, port, target.secrets[port]) as client:
                client.send_multipart(shape)
                client.poll(300)
            if ask_status(port, target.secrets[port]) is None:
                who = "the gateway" if port == target.gateway_control else "a slot"
                complaints.append(f"{who}'s control port is silent after a message of {len(shape)} frames")
                break
    return complaints


def oversize(target: Target) -> list[str]:
    """200 MB in one message from the holder of the right key."""
    for port in target.control_ports:
        with holder(zmq.DEALER, port, target.secrets[port]) as client:
            client.send(b'{"type":"getStatus","x":"' + bytes([0x61]) * _HUGE_BYTES + b'"}', copy=False)
            client.poll(3000)
    return unanswered(target)


def broken_text(target: Target) -> list[str]:
    """Bytes that are no UTF-8, where a message has its type."""
    for port in target.control_ports:
        with holder(zmq.DEALER, port, target.secrets[port]) as client:
            for payload in (
                b'{"type":"\xff"}',
                b'{"type":"getStatus","\xa3":1}',
                b"\xff\xfe{",
                b'{"type":"setBits","\xc0":{}}',
            ):
                client.send(payload)
                client.poll(200)
    return unanswered(target)


def watchers(target: Target) -> list[str]:
    """Watchers that go away without a word."""
    for number in range(_WATCHERS):
        port = target.control_ports[number % len(target.control_ports)]
        with holder(zmq.DEALER, port, target.secrets[port]) as client:
            client.send(encode(Watch()))
            client.poll(100)
    return unanswered(target)


def silent(target: Target, connections: int, seconds: float) -> list[str]:
    """Connections that say nothing, or half a greeting, or a greeting and nothing more."""
    starts = (b"", SIGNATURE, greeting(b"CURVE")[:30], greeting(b"CURVE"))
    return hold_ports(target, connections, lambda number: starts[number % len(starts)], seconds)


def _ready() -> bytes:
    return command(b"READY", metadata(Socket_Type=b"PUSH", Identity=b"a"))


PROBES: dict[str, Callable[[Target], list[str]]] = {
    "addresses": addresses,
    "stranger-http": partial(strangers, first=HTTP),
    "stranger-tls": partial(strangers, first=TLS_HELLO),
    "stranger-http2": partial(strangers, first=GRPC),
    "stranger-bytes": partial(strangers, first=bytes(range(256)) * 2),
    "stranger-nothing": partial(strangers, first=b""),
    "stranger-signature": partial(strangers, first=SIGNATURE),
    "stranger-null": partial(strangers, first=greeting(b"NULL") + _ready() + message(b"x" * 300)),
    "stranger-curve": partial(strangers, first=greeting(b"CURVE") + command(b"HELLO", b"\x01\x00" + bytes(192))),
    "huge-command": partial(huge, start=greeting(b"CURVE"), flags=6),
    "huge-message": partial(huge, start=greeting(b"NULL") + _ready(), flags=2),
    "huge-old": partial(huge, start=b"", flags=0xFF),
    "public-key": public_key,
    "multipart": multipart,
    "broken-text": broken_text,
    "watchers": watchers,
    "oversize": oversize,
}


def _say(port: int, pieces: Sequence[bytes], wait_seconds: float = 0.1) -> None:
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=2) as connection:
        for piece in pieces:
            connection.sendall(piece)
        connection.settimeout(wait_seconds)
        connection.recv(4096)
        connection.recv(4096)
