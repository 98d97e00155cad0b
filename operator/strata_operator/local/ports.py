"""Ports of the local processes: free ones from the kernel, and the check of the one that the user asked for."""

import contextlib
import errno
import socket

from strata_operator.local.errors import PortInUseError

ATTEMPTS = 100


def free_port(host: str) -> int:
    return free_ports(host, 1)


def free_ports(host: str, count: int) -> int:
    """The first of `count` consecutive ports that are free now."""
    for _ in range(ATTEMPTS):
        with contextlib.ExitStack() as held:
            first = _bind(held, host, 0)
            with contextlib.suppress(OSError, OverflowError):
                for port in range(first + 1, first + count):
                    _bind(held, host, port)
                return first
    raise PortInUseError(f"no {count} consecutive free ports on {host}; end a process that listens there")


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
