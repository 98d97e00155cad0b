"""ZeroMQ as Strata uses it, in memory and by virtual time: what the real slots, gateways and leaders speak over in the checker.

As nasty as the real thing: messages take time, what was on its way when a process died arrives in part, a socket that connects queues
for a peer that is not there (unless IMMEDIATE) and sends it to whoever answers at that address later, a peer without the key gets no
handshake, a cut connection looks alive for as long as its silence is borne, and what was held up meanwhile arrives late.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import zmq
from zmq import constants

from tests.chain.virtual_network import LATENCY_SECONDS, Connection, Frames, Network, here
from tests.chain.virtual_threads import VirtualThread

RECONNECT_SECONDS = 0.05


@dataclass
class Frame:
    """As `recv_multipart(copy=False)` gives it."""

    bytes: bytes

    @property
    def buffer(self) -> memoryview:
        return memoryview(bytearray(self.bytes))


class Sent(asyncio.Future[None]):
    """What sending gives on an asynchronous socket: done at once, well or not."""


class Socket:
    """DEALER, PUSH and PULL, ROUTER, PAIR; `transport.listen` and `connect` give it keys and an address."""

    def __init__(self, context: "Context", kind: int) -> None:
        self.context, self.kind, self.host = context, kind, context.host
        self.open = True
        self.linger = 0
        self.maxmsgsize = 0
        self.curve_secretkey = self.curve_publickey = self.curve_serverkey = self.zap_domain = b""
        self.curve_server = False
        self.identity = b""
        self.inbox: deque[Frames] = deque()
        self.options: dict[int, Any] = {}
        self.waiting: deque[Frames] = deque()  # for a connection
        self.connection: Connection | None = None  # of an end that connects
        self.connections: dict[bytes, Connection] = {}  # of one that listens
        self.monitor: Monitor | None = None
        self.other: Socket | None = None  # of a pair
        self.endpoint: tuple[str, int] | None = None
        self.changed = asyncio.Event()
        self.host.sockets.add(self)
        context.sockets.add(self)

    # Settings.

    def setsockopt(self, option: int, value: Any) -> None:
        self.options[option] = value

    def set_hwm(self, _: int) -> None: ...

    def getsockopt_string(self, _: int) -> str:
        return f"tcp://{self.host.name}:{self.endpoint[1] if self.endpoint else 0}"

    def get_monitor_socket(self, _: int) -> "Monitor":
        self.monitor = self.monitor or Monitor()
        return self.monitor

    def disable_monitor(self) -> None:
        self.monitor = None

    # Where to.

    def bind(self, endpoint: str) -> None:
        if endpoint.startswith("inproc:"):
            self.context.named[endpoint] = self
            return
        port = int(endpoint.rpartition(":")[2])
        place = (self.host.name, port)
        if place in self.context.network.listening:
            raise zmq.ZMQError(zmq.EADDRINUSE)
        self.context.network.listening[place] = self
        self.endpoint = place

    def connect(self, endpoint: str) -> None:
        if endpoint.startswith("inproc:"):
            self.other = self.context.named[endpoint]
            self.other.other = self
            return
        name, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self.endpoint = (name.partition(".")[0], int(port))
        self.context.network.loop.call_later(LATENCY_SECONDS, self._try)

    def _try(self) -> None:
        if not self.open or self.connection is not None:
            return
        network = self.context.network
        assert self.endpoint is not None
        server = network.listening.get(self.endpoint)
        if server is None or not network.reach(self.host, server.host) or not self._is_welcome(server):
            network.loop.call_later(RECONNECT_SECONDS, self._try)
            return
        identity = b"%d" % next(network.ids)
        self.connection = server.connections[identity] = Connection(network, self, server, identity)
        self._tell(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        while self.waiting:
            self.connection.send(server, self.waiting.popleft())

    def _is_welcome(self, server: "Socket") -> bool:
        return self.curve_serverkey == server.curve_publickey and server.zap_domain == self.curve_publickey

    # Messages.

    def send_multipart(self, frames: Iterable[Any], flags: int = 0, copy: bool = True) -> Any:  # noqa: FBT001, FBT002
        """Raises as the real one does for a peer that is gone."""
        parts = [bytes(frame) for frame in frames]
        if not self.open:
            raise zmq.ZMQError(zmq.ENOTSOCK)
        if self.other is not None:
            self.other.take(None, parts)
        elif self.kind == zmq.ROUTER:
            connection = self.connections.get(parts[0])
            if connection is None:
                raise zmq.ZMQError(zmq.EHOSTUNREACH)
            connection.send(connection.client, parts[1:])
        elif self.connection is not None:
            self.connection.send(self.connection.server, parts)
        elif self.options.get(zmq.IMMEDIATE):
            raise zmq.Again
        else:
            self.waiting.append(parts)

    def send(self, message: bytes, flags: int = 0) -> Any:
        return self.send_multipart([message], flags)

    def take(self, connection: Connection | None, frames: Frames) -> None:
        if not self.open:
            return
        named = self.kind == zmq.ROUTER and connection is not None
        self.inbox.append([connection.identity, *frames] if named and connection else frames)
        self._wakes()

    def lost(self, connection: Connection) -> None:
        if self.connection is connection:
            self.connection = None
            self._tell(zmq.EVENT_DISCONNECTED)
            self.context.network.loop.call_later(RECONNECT_SECONDS, self._try)
        self.connections.pop(connection.identity, None)
        self._wakes()

    def _tell(self, event: int) -> None:
        if self.monitor is not None:
            self.monitor.tell(event)
        self._wakes()

    def _wakes(self) -> None:
        self.changed.set()
        self.host.rings()

    def poll(self, milliseconds: int | None = None) -> bool:
        if VirtualThread.current is not None:
            VirtualThread.current.wait(lambda: bool(self.inbox), _seconds(milliseconds))
        return bool(self.inbox)

    def recv_multipart(self, flags: int = 0, copy: bool = True) -> Any:  # noqa: FBT001, FBT002
        if not self.inbox:
            raise zmq.Again
        frames = self.inbox.popleft()
        return frames if copy else [Frame(each) for each in frames]

    def close(self, linger: int | None = None) -> None:
        if not self.open:
            return
        self.open = False
        if self.endpoint and self.context.network.listening.get(self.endpoint) is self:
            del self.context.network.listening[self.endpoint]
        for connection in [*self.connections.values(), *([self.connection] if self.connection else [])]:
            connection.breaks(whole=bool(self.linger if linger is None else linger))
        self.host.sockets.discard(self)
        self.context.sockets.discard(self)
        self.changed.set()

    @property
    def closed(self) -> bool:
        return not self.open


class AsyncSocket(Socket):
    """The same for an event loop."""

    def send_multipart(self, frames: Iterable[Any], flags: int = 0, copy: bool = True) -> Any:  # noqa: FBT001, FBT002
        sent = Sent()
        try:
            super().send_multipart(frames, flags, copy)
        except zmq.ZMQError as error:
            sent.set_exception(error)
            sent.exception()
        else:
            sent.set_result(None)
        return sent

    async def recv_multipart(self, flags: int = 0, copy: bool = True) -> Any:  # noqa: FBT001, FBT002
        while not self.inbox:
            self.changed.clear()
            await self.changed.wait()
        return super().recv_multipart(flags, copy)


class Monitor:
    """Tells when its socket has a peer and when it has lost it."""

    def __init__(self) -> None:
        self.events: deque[int] = deque()
        self._changed = asyncio.Event()

    def tell(self, event: int) -> None:
        self.events.append(event)
        self._changed.set()

    def poll(self, _: int) -> bool:
        return bool(self.events)

    def close(self, linger: int = 0) -> None: ...

    async def next(self) -> int:
        while not self.events:
            self._changed.clear()
            await self._changed.wait()
        return self.events.popleft()


def read_event(monitor: Monitor) -> dict[str, int]:
    """In place of `recv_monitor_message` for sockets that block."""
    return {"event": monitor.events.popleft()}


async def await_event(monitor: Monitor) -> dict[str, int]:
    """The same for an event loop."""
    return {"event": await monitor.next()}


class Context:
    """Of the process whose code makes it."""

    network: Network  # of the whole world: set on a subclass
    of = Socket

    def __init__(self) -> None:
        self.host = here.get()
        self.sockets: set[Socket] = set()
        self.named: dict[str, Socket] = {}
        self.underlying = 0

    def socket(self, kind: int) -> Socket:
        return self.of(self, kind)

    def term(self) -> None:
        for socket in list(self.sockets):
            socket.close()

    def destroy(self, linger: int = 0) -> None:
        for socket in list(self.sockets):
            socket.close(linger)


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None or milliseconds < 0 else milliseconds / 1000


class Poller:
    """Of sockets, and of whatever else has an `inbox`."""

    def __init__(self) -> None:
        self._sockets: list[Any] = []

    def register(self, socket: Any, _: int) -> None:
        self._sockets.append(socket)

    def poll(self, milliseconds: int | None = None) -> list[tuple[Any, int]]:
        if VirtualThread.current is not None:
            VirtualThread.current.wait(lambda: any(each.inbox for each in self._sockets), _seconds(milliseconds))
        return [(each, zmq.POLLIN) for each in self._sockets if each.inbox]


class VirtualZmq:
    """Stands where a module has imported zmq: constants and errors are the real ones."""

    def __init__(self, network: Network) -> None:
        self.Context = type("VirtualContext", (Context,), {"network": network})
        self.AsyncContext = type("VirtualAsyncContext", (Context,), {"network": network, "of": AsyncSocket})
        self.Poller = Poller
        self.asyncio = type("asyncio", (), {"Context": self.AsyncContext, "Socket": AsyncSocket})

    def __getattr__(self, name: str) -> Any:
        return getattr(zmq, name, None) or getattr(constants, name)
