"""Bounds on HTTP connections: how many there are, how long headers and bodies may take, how long a client may not read.

Uvicorn bounds keep-alive alone. Its h11 protocol is given timers here; used by `__main__` as the server's settings. Knows
no routes.
"""

import asyncio
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, ClassVar

import h11
import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from strata_runtime.gateway.settings import Limits

WAITING_CLIENTS = 2048  # of a connection that the kernel holds until it is accepted
ACCEPTED_AT_ONCE = 16  # then running streams have their turn, and who is refused is gone before the next ones come
FREE_CHUNKS = 1024  # of a body; a chunk costs 10 us whatever is in it
LEAST_CHUNK_BYTES = 64  # on an average of those beyond that
LEAST_READ_BYTES = 1 << 14  # within `write_seconds`, by who is not to count as one that does not read


def server_config(app: Any, limits: Limits) -> uvicorn.Config:
    """Uvicorn's settings for an application behind these limits."""
    protocol = type("LimitedProtocol", (BoundedProtocol,), {"limits": limits})
    return uvicorn.Config(
        app, http=protocol, ws="none", log_config=None, access_log=False, lifespan="off", backlog=ACCEPTED_AT_ONCE
    )


class BoundedServer(uvicorn.Server):  # type: ignore[misc]  # checked without uvicorn's types
    """Accepts few clients at a turn of the event loop. asyncio has one number for that and for the clients that may wait."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(WAITING_CLIENTS)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are handled by the process: uvicorn's own handling ends it by the signal instead of with exit code 0."""
        yield


class StrictConnection(h11.Connection):
    """Refuses what h11 takes: a request that tells its length in two ways (RFC 9112, 6.1: a proxy that goes by the other one takes
    a part of it for the next request), and bodies in chunks so small that reading them keeps all others waiting.
    """

    _chunks = 0
    _chunked_bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._chunked_bytes = 0
            if {b"content-length", b"transfer-encoding"} <= dict(event.headers).keys():
                raise h11.RemoteProtocolError("Content-Length and Transfer-Encoding are both there: send one of them")
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_end
            self._chunked_bytes += len(event.data)
            if self._chunked_bytes < (self._chunks - FREE_CHUNKS) * LEAST_CHUNK_BYTES:
                raise h11.RemoteProtocolError(
                    f"{self._chunks} chunks have {self._chunked_bytes} bytes: send chunks of {LEAST_CHUNK_BYTES} bytes or more"
                )
        return event


class BoundedProtocol(H11Protocol):  # type: ignore[misc]  # checked without uvicorn's types
    """One connection. It waits for a request's headers, then for its body, then its answer is written."""

    limits: ClassVar[Limits] = Limits()

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.conn.__class__ = StrictConnection  # uvicorn makes it, and has no setting for its kind
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._idle_since = self.loop.time()

    @property
    def is_idle(self) -> bool:
        """No request is being answered; one may be on its way."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:
        crowded = len(self.connections) >= self.limits.max_connections
        evicted = crowded and self._evict()
        super().connection_made(transport)
        if crowded and not evicted:
            self._refuse(
                HTTPStatus.SERVICE_UNAVAILABLE, f"{self.limits.max_connections} connections are open: try later"
            )
        else:
            self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_reading()
        self._cancel_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        if self._reading is None and self.is_idle:  # the next request on a connection that was kept
            self._await_headers()
        super().data_received(data)
        self._look(before)

    def on_response_complete(self) -> None:
        before = self.cycle
        self._idle_since = self.loop.time()
        super().on_response_complete()
        self._look(before)  # the next request may have come already

    def _look(self, before: Any) -> None:
        """Is another request being read than before, and how far is it?"""
        if self.cycle is not before:
            self._cancel_reading()
            if self.cycle.more_body:
                self._reading = self.loop.call_later(self.limits.body_seconds, self._too_slow, "body")
        elif self.cycle is not None and not self.cycle.more_body and not self.is_idle:
            self._cancel_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._writing is None:
            self._await_reader()

    def resume_writing(self) -> None:
        self._cancel_writing()
        super().resume_writing()

    def _await_reader(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._writing = self.loop.call_later(self.limits.write_seconds, self._look_at_reader, unread)

    def _look_at_reader(self, unread: int) -> None:
        """A whole answer is written at once: who reads it slowly, but reads it, gets all of it."""
        if self.transport.get_write_buffer_size() <= unread - LEAST_READ_BYTES:
            self._await_reader()
        else:
            self._reset()

    def _reset(self) -> None:
        """Without lingering: the kernel would keep for minutes what a client does not read, and the client would not hear of its end."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _await_headers(self) -> None:
        self._cancel_reading()
        self._reading = self.loop.call_later(self.limits.header_seconds, self._too_slow, "header")

    def _too_slow(self, part: str) -> None:
        seconds = self.limits.header_seconds if part == "header" else self.limits.body_seconds
        self._refuse(
            HTTPStatus.REQUEST_TIMEOUT,
            f"the request's {part} took more than {seconds:g} s (--{part}-seconds): send it faster",
        )

    def send_400_response(self, msg: str) -> None:
        """Uvicorn's answer to what is no HTTP; also when another answer is on its way, which uvicorn does not expect."""
        self._refuse(
            HTTPStatus.BAD_REQUEST, f"{msg.rstrip('.')}: send a request as RFC 9112 has it, its length in one way"
        )

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Say why, if nothing else has been said yet, and close."""
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE} and not (self.cycle and self.cycle.response_started):
            kind = "invalid_request_error" if status == HTTPStatus.BAD_REQUEST else "server_error"
            error = {"message": message, "type": kind, "param": None, "code": None}
            body = msgspec.json.encode({"error": error})
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            self.transport.write(
                self.conn.send(h11.Response(status_code=status, headers=headers, reason=status.phrase.encode()))
                + self.conn.send(h11.Data(data=body))
                + self.conn.send(h11.EndOfMessage())
            )
        self.transport.close()

    def _evict(self) -> bool:
        """Close the connection that has been idle for the longest time; False if all are at work."""
        idle = [one for one in self.connections if one.is_idle]
        if not idle:
            return False
        victim = min(idle, key=lambda one: one._idle_since)  # noqa: SLF001  of this class
        self.connections.discard(victim)
        victim.transport.abort()
        return True

    def _cancel_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _cancel_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
