"""Fuzzed frames of strangers, for slots' and gateways' ZeroMQ ports: bytes that number N of a seed always is. Pure.

A stranger knows the protocol (ZMTP 3.1, rfc.zeromq.org/spec/37) but holds no key: greetings of all mechanisms, whole and cut,
handshakes in the wrong order, lengths that lie, and what other protocols say first.
"""

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.attack.http_requests import turned


@dataclass(frozen=True)
class PortAttack:
    """Bytes to send on a fresh connection. `lingers`: waits for an answer before it goes; `resets`: goes with RST."""

    what: str
    data: bytes
    lingers: bool
    resets: bool


SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
HTTP = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
TLS_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(range(32)) + bytes(152)
GRPC = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9)


def make(seed: int, number: int) -> PortAttack:
    """Attack number `number` of this seed."""
    rng = random.Random(f"frames/{seed}/{number}")
    kind = rng.choices(KINDS, weights=WEIGHTS)[0]
    what, data = kind(rng)
    return PortAttack(what, data, lingers=rng.random() < 0.3, resets=rng.random() < 0.3)


def greeting(mechanism: bytes, *, server: bool = False, version: bytes = b"\x03\x00") -> bytes:
    return SIGNATURE + version + mechanism.ljust(20, b"\0")[:20] + bytes([server]) + bytes(31)


def command(name: bytes, body: bytes = b"") -> bytes:
    data = bytes([len(name)]) + name + body
    return b"\x04" + bytes([len(data)]) + data if len(data) < 256 else b"\x06" + struct.pack(">Q", len(data)) + data


def message(body: bytes, *, more: bool = False) -> bytes:
    if len(body) < 256:
        return bytes([more, len(body)]) + body
    return bytes([2 + more]) + struct.pack(">Q", len(body)) + body


def metadata(**properties: bytes) -> bytes:
    return b"".join(
        bytes([len(name)]) + name.replace("_", "-").encode() + struct.pack(">I", len(value)) + value
        for name, value in properties.items()
    )


def curve_hello(rng: random.Random) -> bytes:
    """The right shape with keys that nobody knows."""
    return command(b"HELLO", b"\x01\x00" + bytes(72) + rng.randbytes(32 + 8 + 80))


def _raw(rng: random.Random) -> tuple[str, bytes]:
    return "random bytes", rng.randbytes(rng.choice((0, 1, 9, 10, 64, 300, 4096)))


def _greeting(rng: random.Random) -> tuple[str, bytes]:
    whole = greeting(rng.choice((b"CURVE", b"NULL", b"PLAIN", b"GSSAPI", b"", b"X" * 20)), server=rng.random() < 0.3)
    return "a greeting that stops", whole[: rng.randrange(len(whole) + 1)]


def _old(rng: random.Random) -> tuple[str, bytes]:
    versions = (b"\x00\x00", b"\x01\x08", b"\x02\x00", b"\x03\x63", b"\xff\xff")
    return "a greeting of another version", greeting(b"CURVE", version=rng.choice(versions)) + rng.randbytes(40)


def _null(rng: random.Random) -> tuple[str, bytes]:
    kind = rng.choice((b"PUSH", b"DEALER", b"REQ", b"PULL", b"SUB", b"XYZ", b"D" * 300))
    ready = command(b"READY", metadata(Socket_Type=kind, Identity=rng.randbytes(rng.choice((0, 5, 255)))))
    return "NULL mechanism", greeting(b"NULL") + ready + _messages(rng)


def _plain(rng: random.Random) -> tuple[str, bytes]:
    names = rng.choice((b"\x05admin\x05admin", b"\x00\x00", b"\xffadmin", rng.randbytes(30)))
    rest = command(b"INITIATE", metadata(Socket_Type=b"PUSH"))
    return "PLAIN mechanism", greeting(b"PLAIN") + command(b"HELLO", names) + rest + _messages(rng)


def _curve(rng: random.Random) -> tuple[str, bytes]:
    first = (
        curve_hello(rng),
        command(b"HELLO", b"\x01\x00" + rng.randbytes(rng.choice((0, 50, 250, 5000)))),
        command(b"HELLO", b"\x09\x09" + bytes(192)),
        command(b"INITIATE", rng.randbytes(rng.choice((0, 113, 257, 2000)))),
        command(b"MESSAGE", rng.randbytes(60)),
        command(b"READY", metadata(Socket_Type=b"PUSH")),
        command(b"ERROR", b"\x03400"),
        command(b"PING", b"\x00\x00ctx"),
        command(b"X" * 255),
        message(rng.randbytes(200)),
    )
    return "CURVE handshake without keys", greeting(b"CURVE") + b"".join(rng.choices(first, k=rng.choice((1, 2, 3))))


def _lengths(rng: random.Random) -> tuple[str, bytes]:
    size = rng.choice((0, 1, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1))
    flags = rng.choice((0, 1, 2, 3, 4, 6, 7, 0x80, 0xFF))
    start = greeting(rng.choice((b"CURVE", b"NULL", b"PLAIN")))
    return f"a frame of {size} bytes", start + bytes([flags]) + struct.pack(">Q", size) + rng.randbytes(500)


def _foreign(rng: random.Random) -> tuple[str, bytes]:
    first = (
        HTTP, TLS_HELLO, GRPC, b"SSH-2.0-OpenSSH_9.6\r\n", b"EHLO x\r\n", b"\x00\x00\x00\x08\x04\xd2\x16\x2f", b"*1\r\n$4\r\nPING\r\n", b"\x03\x00\x00\x13\x0e\xe0",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n" + b"{" * 2000,
    )  # fmt: skip
    data = rng.choice(first)
    return f"another protocol, {data[:12]!r}", data


def _turned(rng: random.Random) -> tuple[str, bytes]:
    whole = greeting(b"CURVE") + curve_hello(rng) + command(b"INITIATE", rng.randbytes(257))
    return "a handshake with bytes turned over", turned(rng, whole)


KINDS: tuple[Callable[[random.Random], tuple[str, bytes]], ...] = (
    _raw, _greeting, _old, _null, _plain, _curve, _lengths, _foreign, _turned,
)  # fmt: skip
WEIGHTS = (12, 12, 4, 14, 10, 18, 10, 12, 8)


def _messages(rng: random.Random) -> bytes:
    """What would be a multipart message if the handshake were believed."""
    bodies = [rng.randbytes(rng.choice((0, 1, 20, 255, 256, 4000))) for _ in range(rng.choice((0, 1, 2, 5)))]
    return b"".join(message(body, more=place < len(bodies) - 1) for place, body in enumerate(bodies))
