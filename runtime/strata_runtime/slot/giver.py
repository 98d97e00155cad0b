"""Whoever gives KV pages to other slots: a port, and a thread of its own beside the workers. Made by the slot with a prepare that says so, ended by the next one.

Until the commit it gives full blocks of the roles that serve; behind it all that they have left, once to each taker, and then lets go of it: after `KEPT_SECONDS` in any
case. Knows no roles of the next epoch.
"""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import zmq

from strata_planner.contract.control import PageGiving
from strata_planner.contract.decoding import decode_message
from strata_planner.contract.frames import PagesGiven, WantPages, encode, pages_decoder
from strata_planner.contract.values import ContractError
from strata_runtime.slot.wakeup import Wakeup
from strata_runtime.stage.handover import Outgoing, Pages
from strata_runtime.stage.tensors import to_bytes
from strata_runtime.wire.transport import Keys, listen

log = logging.getLogger(__name__)

KEPT_SECONDS = 8.0  # behind the commit, for takers that do not ask
MOST_CREDIT = 8  # messages that may wait in a taker's memory
MOST_TAKERS = 64  # connections whose state is kept: who connects anew begins anew
LARGEST_WANT_BYTES = 1 << 16
_LOOK_MILLISECONDS = 250
_LINGER_MILLISECONDS = 500
_JOIN_SECONDS = 2.0


class Giver:
    """`pages`: of the roles that serve. Raises InputError where its port is taken."""

    def __init__(self, bind: str, giving: PageGiving, epoch: int, pages: Sequence[Pages]) -> None:
        self._giving, self._epoch = giving, epoch
        self._pages = tuple(pages)
        self._takers: dict[bytes, Outgoing] = {}
        self._parked: dict[bytes, WantPages] = {}  # behind the commit
        self._served = 0  # that have all
        self._until = 0.0  # pages are kept; 0: they are still in use
        self._has_ended = False  # as the thread knows
        self._stopped = False
        self._wakeup = Wakeup()
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            listen(self._socket, f"tcp://{bind}:{giving.port}", Keys.of(giving.key), LARGEST_WANT_BYTES)
        except Exception:
            self._context.destroy(linger=0)
            self._wakeup.close()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wakeup.reader, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name=f"pages of epoch {epoch}", daemon=True)
        self._thread.start()

    def ended(self, left: Sequence[Pages]) -> None:
        """The roles have: this is what they leave."""
        self._pages = tuple(left)
        self._until = time.monotonic() + KEPT_SECONDS
        self._wakeup.ring()

    def close(self, *, gives: bool = False) -> None:
        """`gives`: first what is left, as long as that is kept."""
        if gives and self._until:
            self._thread.join(KEPT_SECONDS)
        self._stopped = True
        self._wakeup.ring()
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        try:
            while not self._is_over():
                ready = dict(self._poller.poll(_LOOK_MILLISECONDS))
                self._wakeup.clear()
                if self._until and not self._has_ended:
                    self._go_on()
                if self._socket in ready:
                    self._take()
        except Exception:
            log.exception("no pages are given any more in epoch %d", self._epoch)
        finally:
            self._pages = ()
            self._takers.clear()
            self._context.destroy(linger=0 if self._stopped else _LINGER_MILLISECONDS)
            self._wakeup.close()

    def _go_on(self) -> None:
        """With what the roles have left: of those that served nothing is held any more."""
        self._has_ended = True
        for outgoing in self._takers.values():
            outgoing.begin_anew()
        for identity, want in self._parked.items():
            self._answer(identity, want)
        self._parked.clear()

    def _is_over(self) -> bool:
        if self._stopped:
            return True
        return self._until > 0 and (self._served >= self._giving.takers or time.monotonic() > self._until)

    def _take(self) -> None:
        identity, *rest = self._socket.recv_multipart()
        try:
            want = decode_message(pages_decoder, rest, LARGEST_WANT_BYTES)
        except ContractError as error:
            log.warning("pages of epoch %d: %s", self._epoch, error)
            return
        if not isinstance(want, WantPages) or want.epoch != self._epoch:
            return
        if want.rest and not self._has_ended:
            self._parked[identity] = want
        else:
            self._answer(identity, want)

    def _answer(self, identity: bytes, want: WantPages) -> None:
        if identity not in self._takers and len(self._takers) >= MOST_TAKERS:
            self._takers.pop(next(iter(self._takers)))
        outgoing, done = self._takers.setdefault(identity, Outgoing()), False
        try:
            for _ in range(min(want.credit, MOST_CREDIT)):
                part = outgoing.part(want, self._pages)
                if done := part is None:
                    break
                pages, tensors = part
                self._send([identity, encode(pages), *map(to_bytes, tensors)])
            self._send([identity, encode(PagesGiven(self._epoch, done))])
        except zmq.ZMQError as error:
            log.info("pages of epoch %d: who wanted them is gone: %s", self._epoch, error)
            self._takers.pop(identity, None)
            return
        self._served += done and want.rest

    def _send(self, frames: list[Any]) -> None:
        self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
