"""Sends strangers' frames to every port of slots and gateway but HTTP's, several at once."""

import contextlib
import socket
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import zmq

from benchmarks.attack.keys import ask_status
from benchmarks.attack.port_frames import PortAttack, make
from benchmarks.attack.target import HOST, Outcome, Target

AT_ONCE = 8
_PATIENCE_SECONDS = 0.2
_LIBRARY_EVERY = 20  # each so manieth attack is a real libzmq client with other keys, or with none


def fuzz(target: Target, seed: int, first: int, count: int) -> Outcome:
    """Attacks number `first` to `first + count` of this seed, each on the next port in turn."""
    ports = (*target.inner_ports, *target.control_ports)
    outcome = Outcome()

    def one(number: int) -> str:
        port = ports[number % len(ports)]
        if number % _LIBRARY_EVERY == 0:
            return as_client(port, _MECHANISMS[number // _LIBRARY_EVERY % len(_MECHANISMS)])
        return send(port, make(seed, number))

    with ThreadPoolExecutor(AT_ONCE) as threads:
        for answer in threads.map(one, range(first, first + count)):
            outcome.attacks += 1
            outcome.answers[answer] += 1
    where = f"frames {first}..{first + count} of seed {seed}"
    if outcome.answers["believed"]:
        outcome.complaints.append(
            f"{where}: {outcome.answers['believed']} clients without the key passed the handshake"
        )
    outcome.complaints += [f"{where}: {complaint}" for complaint in unanswered(target)]
    return outcome


def send(port: int, attack: PortAttack) -> str:
    """Says "sent", "answered" (greetings count) or "refused"."""
    try:
        with socket.create_connection((HOST, port), timeout=_PATIENCE_SECONDS) as connection:
            if attack.resets:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(ConnectionError, TimeoutError):
                connection.sendall(attack.data)
                if attack.lingers:
                    return "answered" if connection.recv(4096) else "closed"
            return "sent"
    except OSError:
        return "refused"


_MECHANISMS = ("other keys", "no mechanism", "a password")


def as_client(port: int, mechanism: str) -> str:
    """A libzmq client without the right keys: "believed" if its handshake succeeds, else "sent"."""
    with zmq.Context() as context:
        client: zmq.Socket[Any] = context.socket(zmq.DEALER)
        client.linger = 0
        if mechanism == "other keys":
            client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
            client.curve_serverkey = zmq.curve_keypair()[0]
        elif mechanism == "a password":
            client.plain_username, client.plain_password = b"admin", b"admin"
        believed = handshake_succeeds(client, port, _PATIENCE_SECONDS)
        client.close()
    return "believed" if believed else "sent"


def handshake_succeeds(
    client: "zmq.Socket[Any]", port: int, seconds: float, frames: Sequence[bytes] = (b"{}",)
) -> bool:
    """Connects and sends; whether the other end believes this client."""
    monitor = client.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    client.sndtimeo = int(seconds * 1000)  # who was refused before it sends has nobody to send to any more
    client.connect(f"tcp://{HOST}:{port}")
    with contextlib.suppress(zmq.Again):
        client.send_multipart(frames)
    believed = bool(monitor.poll(int(seconds * 1000)))
    client.disable_monitor()
    monitor.close(linger=0)
    return believed


def unanswered(target: Target) -> list[str]:
    """Complaints about control ports that no longer answer who holds the right key."""
    silent = [port for port in target.control_ports if ask_status(port, target.secrets[port]) is None]
    names = {target.gateway_control: "the gateway's control port"}
    return [f"{names.get(port, f'a slot control port ({port})')} does not answer any more" for port in silent]
