"""Ports of the local processes: free ones, and the check of the one that the user asked for."""

import asyncio
import contextlib
import errno
import random
import socket
from pathlib import Path

from strata_operator.local.errors import PortInUseError

ATTEMPTS = 200
LOWEST = 20_000
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_given: set[int] = set()  # ports that a process of ours may be about to listen on


def free_port(host: str) -> int:
    return free_ports(host, 1)


def free_ports(host: str, count: int) -> int:
    """The first of `count` consecutive ports that are free now and were not given before.

    They lie below those that the kernel gives to outgoing connections, so that none takes them before they are used.
    """
    highest = _first_ephemeral() - count
    for _ in range(ATTEMPTS):
        first = random.randint(LOWEST, highest)
        wanted = set(range(first, first + count))
        if wanted & _given:
            continue
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in wanted:
                _bind(held, host, port)
            _given.update(wanted)
            return first
    raise PortInUseError(
        f"no {count} consecutive free ports on {host} in {LOWEST}..{highest}; end a process that listens there"
    )


def check_port(host: str, port: int) -> None:
    """Raises PortInUseError if nothing could listen there."""
    try:
        with contextlib.ExitStack() as held:
            _bind(held, host, port)
    except (OSError, OverflowError) as error:
        raise PortInUseError(_why(host, port, error)) from error


def _bind(held: contextlib.ExitStack, host: str, port: int) -> int:
    listener = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the last run's closed connections do not count
    listener.bind((host, port))
    listener.listen(1)
    return int(listener.getsockname()[1])


def _why(host: str, port: int, error: OSError | OverflowError) -> str:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; choose a free one: --port {free_port(host)}"
    if isinstance(error, PermissionError):
        return f"port {port} on {host} needs privileges (ports below 1024 do); choose another with --port"
    return f"cannot listen on {host} port {port} ({error}); --host must be an address of this machine, --port 1..65535"


def _first_ephemeral() -> int:
    lowest = int(EPHEMERAL.read_text().split()[0]) if EPHEMERAL.exists() else 0
    return lowest if lowest > LOWEST + ATTEMPTS else 1 << 16


async def until_listening(host: str, port: int) -> None:
    """The gateway's control port may answer a moment before its HTTP port does."""
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
            await writer.wait_closed()
            return
        await asyncio.sleep(0.02)
