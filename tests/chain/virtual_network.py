"""Processes, who listens where, and what is on its way between them, by virtual time. Under `virtual_zmq`."""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from strata_runtime.wire.transport import SILENCE_MILLISECONDS

if TYPE_CHECKING:
    from tests.chain.virtual_threads import VirtualThread
    from tests.chain.virtual_zmq import Socket

LATENCY_SECONDS = 0.002
SILENCE_SECONDS = SILENCE_MILLISECONDS / 1000

Frames = list[bytes]


@dataclass(eq=False)
class Host:
    """A process. `frozen`: it is stopped, and its connections with it."""

    name: str
    wake: Callable[[], None] = lambda: None
    frozen: bool = False
    alive: bool = True
    sockets: "set[Socket]" = field(default_factory=set)
    threads: "list[VirtualThread]" = field(default_factory=list)  # beside its event or control loop
    tasks: "WeakSet[asyncio.Task[Any]]" = field(default_factory=WeakSet)  # on its event loop
    broken: list[str] = field(default_factory=list)  # laws

    def rings(self) -> None:
        """Something has come: whoever waits in it looks."""
        self.wake()
        for thread in tuple(self.threads):
            thread.wakes()


here: ContextVar[Host] = ContextVar("here")


class Network:
    """Who listens where, who cannot reach whom, and what is on its way."""

    def __init__(self, loop: asyncio.AbstractEventLoop, keep: Callable[[int], int]) -> None:
        """`keep`: of so many messages under way when a connection breaks, how many still arrive."""
        self.loop, self.keep = loop, keep
        self.listening: dict[tuple[str, int], Socket] = {}
        self.cut: set[frozenset[str]] = set()
        self.connections: set[Connection] = set()
        self.ids = itertools.count(1)
        loop.set_task_factory(_noted)
        self.altered: Callable[[Host, Frames], Frames] = lambda _, frames: frames  # by who sends them, on their way

    def reach(self, one: Host, other: Host) -> bool:
        apart = frozenset((one.name, other.name)) in self.cut
        return one.alive and other.alive and not apart and not one.frozen and not other.frozen

    def changed(self) -> None:
        """Something was cut or healed, stopped or goes on: connections find out."""
        for connection in list(self.connections):
            connection.look()

    def dies(self, host: Host) -> None:
        host.alive = False
        for thread in list(host.threads):
            thread.ends()
        for socket in list(host.sockets):
            socket.close()


@dataclass(eq=False)
class Connection:
    """Authenticated. Two queues of what is under way, in order."""

    network: Network
    client: "Socket"
    server: "Socket"
    identity: bytes
    open: bool = True
    silent_since: float | None = None
    under_way: dict["Socket", deque[Frames]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.under_way = {self.client: deque(), self.server: deque()}
        self.network.connections.add(self)
        self.look()

    def send(self, to: "Socket", frames: Frames) -> None:
        sender = self.server if to is self.client else self.client
        self.under_way[to].append(self.network.altered(sender.host, frames))
        self.network.loop.call_later(LATENCY_SECONDS, self._arrives, to)

    def _arrives(self, to: "Socket") -> None:
        queue = self.under_way[to]
        while queue and self.open and self.silent_since is None:
            to.take(self, queue.popleft())

    def look(self) -> None:
        now = self.network.loop.time()
        if self.network.reach(self.client.host, self.server.host):
            self.silent_since = None
            for end in (self.client, self.server):
                self._arrives(end)
        elif self.silent_since is None:
            self.silent_since = now
            self.network.loop.call_later(SILENCE_SECONDS, self._is_silent, now)

    def _is_silent(self, since: float) -> None:
        if self.open and self.silent_since == since:
            self.breaks(arriving=False)

    def breaks(self, *, arriving: bool = True, whole: bool = False) -> None:
        """What the kernels have of it may still arrive, or all of it; then both ends learn of it."""
        if not self.open:
            return
        ends = [end for end in (self.client, self.server) if end.open and end.host.alive]
        for end in ends:
            most = len(self.under_way[end]) if arriving and self.silent_since is None else 0
            for _ in range(most if whole else self.network.keep(most)):
                end.take(self, self.under_way[end].popleft())
        self.open = False
        self.network.connections.discard(self)
        for end in ends:
            end.lost(self)


def _noted(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], context: Context | None = None
) -> "asyncio.Task[Any]":
    """A task, which its process knows of."""
    task = asyncio.Task(work, loop=loop, context=context)
    if (host := (context or copy_context()).get(here)) is not None:
        host.tasks.add(task)
    return task
