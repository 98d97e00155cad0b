"""Clients that hold what they have: connections without a request, headers and bodies that never end, streams that nobody reads.

All are opened at once and held together, so that their time-outs are waited for once.
"""

import contextlib
import select
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.attack.http_requests import post, written
from benchmarks.attack.http_send import await_quiet, get
from benchmarks.attack.target import HOST, Target

_TAKEN_AWAY_SECONDS = 30.0  # a new client gets through within this, whatever is held
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Kind:
    """One way to hold a connection: what is sent first and what each second after that."""

    name: str
    share: float  # of all that are held
    first: bytes
    drip: bytes = b""
    reads: bool = True
    tolerated: int = 0  # of them may be open at the end


def kinds(model: str) -> tuple[Kind, ...]:
    # More than the kernel keeps for a client that does not read; one such answer, for more would rightly keep others waiting.
    body = written(
        {"model": model, "prompt": "a", "max_tokens": 900, "n": 8, "stream": True, "ignore_eos": True, "logprobs": 20}
    )
    whole = post("/v1/completions", body)
    return (
        Kind("idle", 0.7, b""),
        Kind("half a line", 0.05, b"POST /v1/comp"),
        Kind("half headers", 0.05, whole[: whole.index(b"Content-Length")]),
        Kind(
            "slow headers",
            0.08,
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n",
            drip=b"X: y\r\n",
        ),
        Kind("half a body", 0.07, whole[:-10]),
        Kind(
            "slow body",
            0.04,
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n",
            drip=b" ",
        ),
        Kind("a stream that nobody reads", 0.0003, whole, reads=False),
    )


def hold(target: Target, connections: int, seconds: float) -> list[str]:
    """Complaints about kinds that stay beyond `seconds`, and about new clients that were kept out for long."""
    held = {kind: list(_open(target.http_port, kind, connections)) for kind in kinds(target.model)}
    complaints = _get_through(target, held, seconds)
    for kind, sockets in held.items():
        still = [connection for connection in sockets if _is_open(connection, reads=kind.reads)]
        if len(still) > kind.tolerated:
            complaints.append(f"{kind.name}: {len(still)} of {len(sockets)} connections stay after {seconds:g} s")
    for connection in (each for sockets in held.values() for each in sockets):
        connection.close()
    return complaints + await_quiet(target)


def hold_ports(target: Target, connections: int, first: Callable[[int], bytes], seconds: float) -> list[str]:
    """The same for ZeroMQ ports: `first(number)` is sent, nothing follows; all must be gone after `seconds`."""
    ports = (*target.inner_ports, *target.control_ports)
    held = []
    for number in range(connections):
        with contextlib.suppress(OSError):
            connection = socket.create_connection((HOST, ports[number % len(ports)]), timeout=2)
            held.append(connection)
            connection.sendall(first(number))
    time.sleep(seconds)
    still = sum(_is_open(connection, reads=True) for connection in held)
    for connection in held:
        connection.close()
    return [f"{still} of {len(held)} silent connections stay at ZeroMQ ports after {seconds:g} s"] if still else []


def _open(port: int, kind: Kind, connections: int) -> Iterator[socket.socket]:
    for _ in range(max(1, round(connections * kind.share))):
        with contextlib.suppress(OSError):  # more than the server takes at a time: refused is right too
            connection = socket.socket()
            if not kind.reads:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(2)
            connection.connect((HOST, port))
            connection.sendall(kind.first)
            yield connection


def _get_through(target: Target, held: dict[Kind, list[socket.socket]], seconds: float) -> list[str]:
    """Drips, and asks as a new client each second."""
    complaints = []
    started = kept_out_since = time.monotonic()
    while (now := time.monotonic()) - started < seconds:
        for kind, sockets in held.items():
            for connection in sockets if kind.drip else ():
                with contextlib.suppress(OSError):
                    connection.send(kind.drip)
        with contextlib.suppress(OSError):
            if get(target.http_port, "/health", seconds=5)[0] == "200":
                kept_out_since = time.monotonic()
        if time.monotonic() - kept_out_since > _TAKEN_AWAY_SECONDS:
            complaints.append(f"a new client gets no answer for {_TAKEN_AWAY_SECONDS:g} s while connections are held")
            kept_out_since = time.monotonic()
        time.sleep(max(0.0, _LOOK_SECONDS - (time.monotonic() - now)))
    return complaints


def _is_open(connection: socket.socket, *, reads: bool) -> bool:
    """Whether the server has not ended it. One that does not read hears of its end as a hang-up alone."""
    poll = select.poll()
    poll.register(connection, select.POLLIN | select.POLLRDHUP)
    events = dict(poll.poll(0)).get(connection.fileno(), 0)
    if events & (select.POLLHUP | select.POLLERR | select.POLLRDHUP):
        return False
    if not reads or not events:
        return True
    try:  # an answer, then perhaps the end
        connection.settimeout(0.1)
        while connection.recv(65536):
            pass
    except TimeoutError:
        return True
    except OSError:
        return False
    return False
