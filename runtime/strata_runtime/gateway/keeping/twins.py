"""The twins: connections to the other gateways of a deployment, over which each tells the others what it keeps.

Every gateway connects to every other and tells it, in order, all that becomes of its own answers; the other confirms. Nobody waits for that: what is not
confirmed yet is in the ids of events (`positions`). Who connects is told all anew, so that nothing rests on what was sent before. Who has just begun asks
those that it reaches for all that they keep, and knows of no answer for sure before they have told it. Used by `__main__`; knows no answers.
"""

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import groupby
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from strata_planner.contract.decoding import decode_message
from strata_planner.contract.values import ContractError
from strata_runtime.errors import InputError
from strata_runtime.gateway.errors import StartError
from strata_runtime.gateway.keeping.changes import (
    LARGEST_BATCH_BYTES,
    Batch,
    Begun,
    Change,
    Confirmed,
    Dropped,
    Greeting,
    Grown,
    Message,
    Told,
    Wanted,
    decoder,
    encode,
)
from strata_runtime.gateway.settings import Peer
from strata_runtime.wire.transport import Keys, connect, listen

log = logging.getLogger(__name__)

RESOLVE_SECONDS = 2.0
BEGIN_SECONDS = 5.0  # after which one that has just begun waits for no other any more
MOST_WAITING = 10_000  # batches that a connection may lag behind by
PART_BYTES = 1 << 20  # of what a twin that connects is told at once

_MONITORED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class TwinLinks:
    """Create it inside the event loop; `close` it there. Raises StartError for a port in use."""

    def __init__(
        self,
        incarnation: str,
        host: str,
        port: int,
        keys: Keys,
        hear: Callable[[Change, str], None],
        kept: Callable[[], Iterator[tuple[str, Change]]],
    ) -> None:
        """`hear`: takes what another gateway tells, with its name. `kept`: all that this one keeps, as one that knows nothing is told it, each behind who makes it."""
        self._incarnation, self._keys, self._hear, self._kept = incarnation, keys, hear, kept
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.ROUTER)
        try:
            listen(self._socket, f"tcp://{host}:{port or '*'}", keys, LARGEST_BATCH_BYTES)
        except InputError as error:
            self._context.term()
            raise StartError(f"--journal-port {port}: {error}") from error
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._links: dict[str, TwinLink] = {}
        self._has_looked = False  # whether the names of the others have been looked up
        self._clock = asyncio.get_running_loop().time
        self._begins_until = 0.0  # while it is beginning
        self._tasks = [asyncio.create_task(self._serve(), name="answers of other gateways")]

    def follow(self, peers: Iterable[Peer]) -> None:
        """Look these names up, again and again, and connect to whatever they stand for; this gateway may be among them, and begins: it asks them for all."""
        self._begins_until = self._clock() + BEGIN_SECONDS
        self._tasks.append(asyncio.create_task(self._resolve(tuple(peers)), name="other gateways"))

    def connect(self, endpoints: Iterable[str]) -> None:
        """To exactly these."""
        wanted = set(endpoints)
        for endpoint in set(self._links) - wanted:
            self._links.pop(endpoint).close()
        for endpoint in wanted - set(self._links):
            hear = None if self.knows_all else self._hear
            self._links[endpoint] = TwinLink(self._context, endpoint, self._keys, self._incarnation, self._whole, hear)
        self._has_looked = True

    def tell(self, change: Change) -> None:
        for link in self._links.values():
            link.tell(change)

    def confirmed(self, key: bytes, of: int) -> int:
        return min((link.confirmed(key) for link in self._links.values() if link.is_up), default=of)

    def forget_all_but(self, keys: Container[bytes]) -> None:
        for link in self._links.values():
            link.forget_all_but(keys)

    def _whole(self) -> Iterator[Change]:
        """What it makes itself."""
        return (change for owner, change in self._kept() if owner == self._incarnation)

    @property
    def knows_all(self) -> bool:
        """Whether this gateway has been told what the others keep; of those that it does not reach nobody knows."""
        if self._begins_until and (
            (self._has_looked and all(link.has_told for link in self._links.values()))
            or self._clock() > self._begins_until
        ):
            self._begins_until = 0.0
        return not self._begins_until

    @property
    def connected(self) -> int:
        """How many other gateways hear this one."""
        return sum(link.is_up for link in self._links.values())

    async def close(self) -> None:
        self.connect(())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close(linger=200)  # what was told last may still be on its way
        self._context.term()

    async def _resolve(self, peers: tuple[Peer, ...]) -> None:
        while True:
            self.connect([endpoint for peer in peers for endpoint in await _endpoints(peer)])
            await asyncio.sleep(RESOLVE_SECONDS)

    async def _serve(self) -> None:
        """What does not decode is dropped with a word, and so never confirmed."""
        while True:
            identity, *frames = await self._socket.recv_multipart()
            try:
                message = decode_message(decoder, frames, LARGEST_BATCH_BYTES)
            except ContractError as error:
                log.warning("another gateway: %s", error)
                continue
            if isinstance(message, Greeting):
                self._answer(identity, Greeting(self._incarnation))
            elif isinstance(message, Batch):
                self._take(identity, message)
            elif isinstance(message, Wanted):
                for owner, changes in groupby(self._kept(), lambda each: each[0]):
                    for part in _parts(change for _, change in changes):
                        self._answer(identity, Batch(owner, 0, part))
                self._answer(identity, Told())

    def _take(self, identity: bytes, batch: Batch) -> None:
        try:
            for change in batch.changes:
                self._hear(change, batch.incarnation)
        except Exception:  # the port outlives whatever a batch may hold
            log.exception("changes of gateway %s are not kept", batch.incarnation)
            return
        self._answer(identity, Confirmed(batch.number))

    def _answer(self, identity: bytes, message: Message) -> None:
        sent: Any = self._socket.send_multipart([identity, encode(message)], flags=zmq.NOBLOCK)
        sent.exception()  # it is gone: it will connect again


class TwinLink:
    """To one other gateway. Until it has greeted nobody knows whether it is one: the name may be this gateway's own."""

    def __init__(
        self,
        context: "zmq.asyncio.Context",
        endpoint: str,
        keys: Keys,
        incarnation: str,
        whole: Callable[[], Iterator[Change]],
        hear: Callable[[Change, str], None] | None = None,
    ) -> None:
        """`hear`: takes all that it keeps, which it is asked for once; None: it is not."""
        self.is_up = False
        self.has_told = hear is None  # or is this gateway itself
        self._hear = hear
        self._incarnation, self._whole = incarnation, whole
        self._waiting: list[Change] = []
        self._number = 0
        self._sent: deque[tuple[int, list[Change]]] = deque()  # not confirmed yet
        self._known: dict[bytes, int] = {}  # key -> tokens that it has
        self._socket: zmq.asyncio.Socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # to nobody who is not there: who connects is told all
        self._socket.setsockopt(zmq.SNDHWM, MOST_WAITING)
        self._monitor = self._socket.get_monitor_socket(_MONITORED)
        connect(self._socket, endpoint, keys, LARGEST_BATCH_BYTES)
        self._endpoint = endpoint
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._receive())]

    def tell(self, change: Change) -> None:
        """With all else of this turn of the event loop."""
        if not self.is_up:
            return
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(change)

    def confirmed(self, key: bytes) -> int:
        return self._known.get(key, 0)

    def close(self) -> None:
        self.is_up = False
        for task in self._tasks:
            task.cancel()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=200)

    def _flush(self) -> None:
        changes, self._waiting = self._waiting, []
        if self.is_up and changes:
            self._send_batch(changes)

    def _send_batch(self, changes: list[Change]) -> None:
        self._number += 1
        self._sent.append((self._number, changes))
        if not self._send(Batch(self._incarnation, self._number, changes)):
            self._lost()

    def _send(self, message: Message) -> bool:
        sent: Any = self._socket.send(encode(message), flags=zmq.NOBLOCK)
        return sent.exception() is None

    def _lost(self) -> None:
        if self.is_up:
            log.warning("the gateway at %s is not reached: it is told all when it is back", self._endpoint)
        self.is_up = False
        self._waiting, self._known = [], {}
        self._sent.clear()

    async def _watch(self) -> None:
        while True:
            event = (await recv_monitor_message(self._monitor))["event"]
            self._lost()
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._send(Greeting(self._incarnation))

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            with contextlib.suppress(ContractError):
                self._heard(decode_message(decoder, frames, LARGEST_BATCH_BYTES))

    def _heard(self, message: Message) -> None:
        if not self.has_told and self._hear is not None:
            self._learn(message, self._hear)
        if isinstance(message, Greeting) and message.incarnation != self._incarnation and not self.is_up:
            log.info("gateway %s at %s keeps what this one keeps", message.incarnation, self._endpoint)
            self.is_up = True
            for part in _parts(self._whole()):
                self._send_batch(part)
        elif isinstance(message, Confirmed):
            while self._sent and self._sent[0][0] <= message.number:
                for change in self._sent.popleft()[1]:
                    self._note(change)

    def _learn(self, message: Message, hear: Callable[[Change, str], None]) -> None:
        """What the other one kept before this gateway began."""
        match message:
            case Greeting(incarnation) if incarnation == self._incarnation:
                self.has_told = True
            case Greeting():
                self._send(Wanted())
            case Batch(incarnation, _, changes):
                for change in changes:
                    hear(change, incarnation)
            case Told():
                self.has_told = True

    def _note(self, change: Change) -> None:
        match change:
            case Begun(key=key):
                self._known[key] = 0
            case Grown(key=key, first=first, entries=entries):
                self._known[key] = first + len(entries)
            case Dropped(key=key):
                self._known.pop(key, None)

    def forget_all_but(self, keys: Container[bytes]) -> None:
        self._known = {key: count for key, count in self._known.items() if key in keys}


def _parts(changes: Iterable[Change]) -> Iterator[list[Change]]:
    part: list[Change] = []
    size = 0
    for change in changes:
        part.append(change)
        size += sum(map(len, change.entries)) if isinstance(change, Grown) else 200
        if size > PART_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


async def _endpoints(peer: Peer) -> list[str]:
    """Where a name leads now; nowhere while nobody knows it."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(peer.host, peer.port, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({f"tcp://{address[0]!s}:{peer.port}" for *_, address in found})
