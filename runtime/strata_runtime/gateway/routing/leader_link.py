"""One authenticated connection to the leader of a replica, from the epoch in which that is formed on.

Made by `dispatcher` at each new route that forms it. It asks who leads until the leader says hello in this epoch, goes on asking for load
and liveness, and tells its owner when the leader is lost: the connection ends (the transport's heartbeat closes a
silent one), it is another incarnation, or it answers no question for long. Knows no requests.
"""

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from strata_planner.contract.control import Leader
from strata_planner.contract.decoding import decode_message
from strata_planner.contract.frames import (
    LARGEST_ANSWER_BYTES,
    GatewayMessage,
    Hello,
    LeaderHello,
    Rejected,
    StepFailure,
    Tokens,
    encode,
    leader_message_decoder,
)
from strata_planner.contract.values import ContractError
from strata_runtime.errors import InputError
from strata_runtime.gateway.metrics import Counts
from strata_runtime.wire.transport import Keys, connect

log = logging.getLogger(__name__)

_MONITORED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


@dataclass(frozen=True, slots=True)
class Patience:
    """How often to ask and how long to wait. A leader answers between two steps, and a step may take seconds."""

    ask_seconds: float = 0.2  # until the leader has said hello
    ping_seconds: float = 1.0  # from then on
    silence_seconds: float = 30.0


class LinkOwner(Protocol):
    """What a link tells; all calls happen on the event loop's thread."""

    def leader_connected(self, link: "LeaderLink") -> None: ...

    def leader_lost(self, link: "LeaderLink", reason: str) -> None: ...

    def leader_counted(self, more: Counts) -> None: ...

    def leader_said(self, link: "LeaderLink", message: Tokens | Rejected | StepFailure) -> None: ...


class LeaderLink:
    """Starts at once, runs until `close`."""

    def __init__(self, context: zmq.asyncio.Context, leader: Leader, epoch: int, keys: Keys, owner: LinkOwner) -> None:
        self.leader = leader
        self.hello: LeaderHello | None = None  # the newest, while connected
        self._epoch = epoch
        self._owner = owner
        self._patience = Patience()
        self._heard_at = 0.0
        self._counts = Counts()  # that its leader has told of,
        self._counted = ""  # the one of this incarnation
        self._up = False  # between a handshake and the end of its connection
        self._socket: zmq.asyncio.Socket = context.socket(zmq.DEALER)
        # Without a connection a message is refused instead of queued: after a reconnect everything is sent afresh.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._monitor = self._socket.get_monitor_socket(_MONITORED)
        try:
            connect(self._socket, leader.endpoint, keys, LARGEST_ANSWER_BYTES)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise InputError(
                f"leader endpoint {leader.endpoint!r} of replica {leader.replica}: {error}; use tcp://host:port"
            ) from error
        self._task = asyncio.create_task(self._run(), name=f"leader link {leader.replica}")
        self._task.add_done_callback(_log_failure)

    def reaches(self, leader: Leader) -> bool:
        """Whether a newer route's leader is this one, going on."""
        here = (self._epoch, self.leader.slot, self.leader.endpoint)
        return here == (leader.formed, leader.slot, leader.endpoint)

    def send(self, message: GatewayMessage) -> bool:
        """False when there is no connection to send it on."""
        sent: Any = self._socket.send(encode(message), flags=zmq.NOBLOCK)
        return sent.exception() is None  # done already: the flag makes it succeed or fail at once

    def lose(self, reason: str) -> None:
        """What was sent may not have arrived: tell the owner, ask again."""
        if self.hello is None:
            return
        self.hello = None
        log.warning(
            "epoch %d: lost the leader of replica %d, slot %s at %s: %s",
            self._epoch,
            self.leader.replica,
            self.leader.slot,
            self.leader.endpoint,
            reason,
        )
        self._owner.leader_lost(self, reason)

    def update(self, tokens: Tokens) -> None:
        """Take the load that came with tokens."""
        if self.hello is not None:
            load = {"running": tokens.running, "waiting": tokens.waiting, "kv_usage": tokens.kv_usage}
            self.hello = msgspec.structs.replace(self.hello, **load)

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    async def _run(self) -> None:
        """Whatever fails here, the leader is lost by it and asked again: a link never dies in silence."""
        while True:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._watch_connection())
                    group.create_task(self._ask())
                    group.create_task(self._receive())
            except* Exception as errors:
                for error in errors.exceptions:
                    log.error("the link to the leader of replica %d failed", self.leader.replica, exc_info=error)  # noqa: TRY400
            self.lose("its link failed")
            await asyncio.sleep(self._patience.ask_seconds)

    async def _watch_connection(self) -> None:
        while True:
            event = (await recv_monitor_message(self._monitor))["event"]
            self._up = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if self._up:
                self.send(Hello())
            else:
                self.lose("the connection ended")

    async def _ask(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            self.send(Hello())
            connected = self.hello is not None
            if connected and clock() - self._heard_at > self._patience.silence_seconds:
                self.lose(f"it was silent for {self._patience.silence_seconds:g} s")
            await asyncio.sleep(self._patience.ping_seconds if connected else self._patience.ask_seconds)

    async def _receive(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            frames = await self._socket.recv_multipart()
            self._heard_at = clock()
            try:
                message = decode_message(leader_message_decoder, frames, LARGEST_ANSWER_BYTES)
            except ContractError as error:
                log.warning("leader %s: %s", self.leader.slot, error)
                continue
            if isinstance(message, LeaderHello):
                self._take_hello(message)
            elif self.hello is not None or isinstance(message, StepFailure):
                self._owner.leader_said(self, message)
                await asyncio.sleep(0)  # what waits here is no reason to keep clients from theirs

    def _take_hello(self, hello: LeaderHello) -> None:
        if not self._up:  # the last words of a connection that has ended: what is sent now would be lost
            return
        if hello.epoch != self._epoch or hello.replica != self.leader.replica:
            self.lose(f"it leads replica {hello.replica} in epoch {hello.epoch}")
            return
        if self.hello is not None and self.hello.incarnation != hello.incarnation:
            self.lose("it was started anew")
        counts = Counts.of(hello)
        if self._counted == hello.incarnation:  # else this is what it counts from
            self._owner.leader_counted(counts.since(self._counts))
        self._counts, self._counted = counts, hello.incarnation
        known, self.hello = self.hello, hello
        if hello.lost and not (known and known.lost):
            log.warning(
                "epoch %d: replica %d cannot reach its slot %s: others get what is new",
                hello.epoch,
                hello.replica,
                hello.lost,
            )
        if known is None:
            log.info("epoch %d: replica %d is led by %s", hello.epoch, hello.replica, self.leader.slot)
            self._owner.leader_connected(self)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s failed, its replica gets no requests until the next epoch", task.get_name(), exc_info=error)
