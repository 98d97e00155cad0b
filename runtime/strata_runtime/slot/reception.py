"""Where a leader meets its gateways: a thread of its own that answers who leads, and a queue of requests for the worker.

Made by the slot, used by the leader's worker. A step may take seconds, and hellos are answered meanwhile: a gateway that asks
whether its leader lives does not wait for the step, and its questions do not pile up. Requests wait in the queue until
the worker takes them all between two steps. Knows no sequences.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import zmq

from strata_planner.contract.decoding import decode_frame
from strata_planner.contract.frames import (
    Abort,
    Hello,
    LeaderHello,
    LeaderMessage,
    StepFailed,
    StepFailure,
    Submit,
    TokenEvent,
    Tokens,
    encode,
    gateway_message_decoder,
)
from strata_planner.contract.values import ContractError
from strata_runtime.slot.wakeup import Wakeup

log = logging.getLogger(__name__)

_ALL = b""  # in place of a gateway's identity: none is empty
_LAST = b""  # in place of a message to all: none is empty
_LINGER_MILLISECONDS = 200  # of last tokens


class Gone(msgspec.Struct, frozen=True):
    """A gateway cannot be reached any more: nobody waits for its requests."""


class Gateways:
    """The worker's side: who asked for what. All but `hello` belongs to the worker's thread."""

    def __init__(self, socket: zmq.Socket[Any], epoch: int, incarnation: str) -> None:
        self.incarnation = incarnation
        self.hello: LeaderHello | None = None  # what the thread answers; None: nothing
        self._epoch = epoch
        self._owner: dict[str, bytes] = {}
        self.suspects: dict[bytes, StepFailure] = {}  # the thread tells them
        self.finished: Callable[[], None] = lambda: None  # the thread calls it
        self._wakeup: Wakeup | None = None
        self.socket, inner = _pair(socket.context)
        self._reception = _Reception(socket, inner, self)

    def open(self, hello: LeaderHello) -> None:
        """From here on gateways are answered."""
        self.hello = hello
        self._wakeup = Wakeup()
        threading.Thread(
            target=self._reception.run, args=(self._wakeup,), name="gateways of a leader", daemon=True
        ).start()

    def received(self) -> Iterator[tuple[bytes, Submit | Abort | Gone]]:
        """All that has come, with its sender's identity."""
        while True:
            try:
                identity, payload = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = gateway_message_decoder.decode(payload) if payload else Gone()
            if not isinstance(message, Hello):  # those are answered by the thread
                yield identity, message

    def own(self, request: str, identity: bytes) -> None:
        self._owner[request] = identity

    def disown(self, request: str) -> None:
        self._owner.pop(request, None)

    def owned_by(self, identity: bytes) -> list[str]:
        return [request for request, owner in self._owner.items() if owner == identity]

    def send(self, identity: bytes, message: LeaderMessage) -> None:
        self.socket.send_multipart([identity, encode(message)])

    def tell(self, hello: LeaderHello) -> None:
        """News for all that have ever asked who leads: they would ask again some time."""
        self.hello = hello
        self.send(_ALL, hello)

    def deliver(self, events: list[TokenEvent], load: LeaderHello) -> None:
        """Send each gateway its tokens."""
        by_owner: dict[bytes, list[TokenEvent]] = {}
        for event in events:
            by_owner.setdefault(self._owner[event.request], []).append(event)
            if event.finish:
                del self._owner[event.request]
        for identity, own in by_owner.items():
            tokens = Tokens(load.replica, load.epoch, own, load.running, load.waiting, load.kv_usage)
            self.send(identity, tokens)

    def fail(self, failure: StepFailed, requests: list[str]) -> None:
        """Tell every gateway that the epoch is over and which of its requests were in the step; no hello from here on."""
        self.hello = None
        for identity in set(self._owner.values()):
            own = [request for request in requests if self._owner.get(request) == identity]
            count = len(failure.sequences)
            self.send(identity, StepFailure(failure.replica, failure.epoch, own, count, failure.reason))

    def finish(self, then: Callable[[], None]) -> None:
        """No more tokens come: `then` is called, by the thread, when the last are with the socket, which sends them before it closes."""
        self.finished = then
        self.socket.send_multipart([_ALL, _LAST])

    def suspect(self, requests: list[str], reason: str) -> None:
        """Of a step that does not end: every gateway takes back what runs here, and learns which of its requests were in it. From any thread: the worker may hang."""
        if (hello := self.hello) is not None:
            owner = self._owner.copy()
            for identity in set(owner.values()):
                own = [request for request in requests if owner.get(request) == identity]
                self.suspects[identity] = StepFailure(hello.replica, hello.epoch, own, len(requests), reason)
            if self._wakeup is not None:
                self._wakeup.ring()

    def close(self) -> None:
        self.socket.close()  # what was sent is delivered: the other end is in this process


class _Reception:
    """The thread's side. Ends with the context, as the worker does: a worker that failed leaves it to say nothing."""

    def __init__(self, outer: zmq.Socket[Any], inner: zmq.Socket[Any], gateways: Gateways) -> None:
        self._outer = outer
        self._inner = inner
        self._gateways = gateways
        self._known: set[bytes] = set()  # who has said hello and was reached last
        self._poller = zmq.Poller()
        self._poller.register(outer, zmq.POLLIN)
        self._poller.register(inner, zmq.POLLIN)

    def run(self, wakeup: Wakeup) -> None:
        self._poller.register(wakeup.reader, zmq.POLLIN)
        try:
            while True:
                ready = dict(self._poller.poll())
                if is_rung := wakeup.reader.fileno() in ready:
                    wakeup.clear()
                if is_rung or self._inner in ready:
                    self._pass_out()
                if self._outer in ready:
                    self._take_in()
        except zmq.ContextTerminated:
            return
        finally:
            self._outer.close()
            self._inner.close()
            wakeup.close()

    def _pass_out(self) -> None:
        while self._gateways.suspects:
            gateway, suspects = self._gateways.suspects.popitem()
            self._send(gateway, encode(suspects))
        while self._inner.poll(0):
            identity, payload = self._inner.recv_multipart()
            if payload == _LAST:
                self._outer.linger = _LINGER_MILLISECONDS
                self._gateways.finished()
                continue
            for each in tuple(self._known) if identity == _ALL else (identity,):
                self._send(each, payload)

    def _take_in(self) -> None:
        asked = set()
        while self._outer.poll(0):
            parts = self._outer.recv_multipart()
            identity, payload = parts[0], parts[-1]
            try:
                message = decode_frame(gateway_message_decoder, payload, len(payload))  # the socket has bounded it
            except ContractError as error:
                log.warning("a gateway: %s", error)
                continue
            if isinstance(message, Hello):
                asked.add(identity)
            else:
                self._hand_in(identity, payload)
        self._known |= asked
        hello = self._gateways.hello
        if hello is not None:
            for identity in asked:
                self._send(identity, encode(hello))

    def _send(self, identity: bytes, payload: bytes) -> None:
        try:
            self._outer.send_multipart([identity, payload])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._known.discard(identity)
            self._hand_in(identity, b"")

    def _hand_in(self, identity: bytes, payload: bytes) -> None:
        try:
            self._inner.send_multipart([identity, payload], zmq.NOBLOCK)
        except zmq.Again:
            return  # the worker has failed and is gone: the next epoch replays


def _pair(context: zmq.Context[Any]) -> tuple[zmq.Socket[Any], zmq.Socket[Any]]:
    ends = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    for end in ends:
        end.set_hwm(0)  # bounded by what gateways may ask: their own bound on requests
    endpoint = f"inproc://gateways-{id(ends[0])}"
    ends[0].bind(endpoint)
    ends[1].connect(endpoint)
    return ends
