"""The controller's end of the control ports: asks slots and gateways for their status, tells them what to do.

Used by `strata up` and by the operator alike. One ZeroMQ DEALER for each question and one for each watch; CURVE keys
come from the deployment's control key, so that only who holds it can speak (contract/keys.py). Knows no epochs: it carries
the messages of contract/control.py.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from strata_operator.decide.view import Door
from strata_operator.errors import OperatorError
from strata_planner.contract.control import (
    LARGEST_CONTROL_BYTES,
    SWITCH_OVER,
    Commit,
    GetStatus,
    Prepare,
    SetBits,
    SetOrders,
    SetRoute,
    SlotStatus,
    Status,
    SwitchState,
    Watch,
    encode,
    news_of,
    status_decoder,
)
from strata_planner.contract.decoding import decode_message
from strata_planner.contract.keys import curve_secret_key
from strata_planner.contract.values import ContractError

log = logging.getLogger(__name__)

Message = Prepare | Commit | SetBits | SetRoute | SetOrders | GetStatus | Watch

ANSWER_SECONDS = 5.0
ASK_AGAIN_SECONDS = 0.5  # a watch asks by itself: a lost change is late by this much, never missed
ASK_SELDOM_SECONDS = 4.0  # at most, of a process of which nothing changes
ASK_SHARE = 0.25  # of the time since its last change
WRAPPING_BYTES = 1024  # what CURVE adds to a message; its handshake is smaller than this, too
SILENCE_SECONDS = 2.0  # unanswered for so long, the other side counts as away
BROKEN_SECONDS = 0.5  # and for so long once its connection has closed: it may come again
KNOCK_SECONDS = 0.3  # that a kernel anywhere may take to answer
KNOCK_AGAIN_SECONDS = 1.0
# libzmq's own threads ask so often, and close a connection after so long.
HEARTBEAT_SECONDS = 0.5
HEART_STOPPED_SECONDS = 0.8


class NoAnswerError(ConnectionError):
    """Nobody answered in time: the process is away, starting, or holds another control key. Try again later."""


class BitsKeptError(OperatorError):
    """A slot did not give all layers the bits that were asked for. `state` tells which it did; the message says why not the others."""

    def __init__(self, state: SwitchState) -> None:
        self.state = state
        super().__init__(state.reason)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A control port and the secret that opens it."""

    host: str
    port: int
    secret: str
    kubelet: tuple[str, int] | None = None  # of its node: whether that lives


async def ask(endpoint: Endpoint, message: Message, timeout_seconds: float = ANSWER_SECONDS) -> Status:
    """Send one message; the answer is the whole status after it. Raises NoAnswerError."""
    socket = _connect(endpoint)
    try:
        await socket.send(encode(message))
        return await _receive(socket, timeout_seconds)
    except TimeoutError as error:
        raise NoAnswerError(
            f"no answer from {endpoint.host}:{endpoint.port} in {timeout_seconds:g} s; is it running, with this control key?"
        ) from error
    finally:
        socket.close(linger=0)


async def set_bits(
    endpoint: Endpoint, request: SetBits, told: Callable[[SwitchState], None] = lambda _: None
) -> SwitchState:
    """Give layers of a running role other bits; returns when all have them. `told` hears of every layer.

    Raises BitsKeptError if the slot refuses or a layer fails, NoAnswerError if the slot is away or is started anew meanwhile. Asking again is
    always safe: layers that have their bits stay as they are.
    """
    state = _state_of(endpoint, await ask(endpoint, request), request)
    async with aclosing(watch(endpoint)) as statuses:
        while state.phase not in SWITCH_OVER:
            told(state)
            state = _state_of(endpoint, await anext(statuses), request)
    told(state)
    if state.phase != "switched":
        raise BitsKeptError(state)
    return state


async def knock(endpoint: Endpoint) -> Door:
    """Who is there: a kernel that takes or refuses a connection to the port, or the node's kubelet alone. A process that died is refused by its pod's own
    kernel, one that is stopped has it taken; a host that is gone, or behind a cut, says nothing at all.
    """
    kubelet = asyncio.create_task(_at(*endpoint.kubelet)) if endpoint.kubelet is not None else None
    try:
        own = await _at(endpoint.host, endpoint.port)
        if own or kubelet is None:
            return own
        # A process that was ended leaves its node's kernel, which tells nothing of pods.
        return "kubelet" if await kubelet == "taken" else ""
    finally:
        if kubelet is not None:
            kubelet.cancel()
            await asyncio.gather(kubelet, return_exceptions=True)


async def _at(host: str, port: int) -> Door:
    try:
        async with asyncio.timeout(KNOCK_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return "refused"
    except OSError:  # TimeoutError is one
        return ""
    writer.close()
    return "taken"


def _state_of(endpoint: Endpoint, status: Status | None, request: SetBits) -> SwitchState:
    switches = status.switches if isinstance(status, SlotStatus) else ()
    for state in switches:
        if state.request == request:
            return state
    raise NoAnswerError(
        f"{endpoint.host}:{endpoint.port} knows no such request: it fell silent or was started anew; ask again"
    )


async def watch(endpoint: Endpoint, broken: Callable[[], None] = lambda: None) -> AsyncGenerator[Status | None]:
    """The status now and after every change; None whenever nobody answers. Never ends by itself. `broken` is called when a connection ends that was made."""
    while True:
        connection = _Connection(endpoint, broken)
        try:
            while not await connection.is_made():
                yield None
            async with aclosing(_listen(connection)) as statuses:
                async for status in statuses:
                    yield status
        finally:
            connection.close()
        yield None


async def _listen(connection: "_Connection") -> AsyncGenerator[Status]:
    """Statuses of one connection, until it falls silent or another process answers on it."""
    connection.begin()
    incarnation = None
    while not connection.is_silent:
        status = await connection.next_status()
        if status is None:
            continue
        if incarnation not in (None, status.incarnation):
            return  # started anew: it does not know yet that it is watched
        incarnation = status.incarnation
        yield status


class _Connection:
    """What has been heard and asked. Who says the same again and again is asked more and more seldom: that it is there at all, libzmq's
    heartbeats tell, and the monitor when they stop.

    There are hundreds, quiet nearly always: their descriptors are given to the event loop as they are, as `zmq.asyncio` takes ten times as long to wait.
    """

    def __init__(self, endpoint: Endpoint, broken: Callable[[], None]) -> None:
        self._broken = broken
        self._socket: zmq.Socket[bytes] = _socket(_many_sockets(), endpoint)
        self._events = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._socket.connect(_address(endpoint))
        self._loop, self._stirred = asyncio.get_running_loop(), asyncio.Event()
        self._descriptors = [int(each.getsockopt(zmq.FD)) for each in (self._socket, self._events)]
        for each in self._descriptors:
            self._loop.add_reader(each, self._stirred.set)
        self._last: Status | None = None
        self._changed = self._asked = self._unanswered = time.monotonic()
        self._patience = SILENCE_SECONDS
        self._waits = True

    def close(self) -> None:
        for each in self._descriptors:
            self._loop.remove_reader(each)
        self._socket.disable_monitor()
        self._events.close(linger=0)
        self._socket.close(linger=0)

    async def is_made(self) -> bool:
        """Whether somebody who has the key is there within SILENCE_SECONDS. libzmq goes on trying: another socket would only begin anew."""
        until = time.monotonic() + SILENCE_SECONDS
        while (event := self._event()) is None and time.monotonic() < until:
            _taken(self._socket)  # nothing yet: its descriptor is to be quiet
            await self._stir(until - time.monotonic())
        return event == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def begin(self) -> None:
        self._unanswered = time.monotonic()
        self._ask(Watch())

    @property
    def is_silent(self) -> bool:
        return self._waits and self._silence() <= 0

    async def next_status(self) -> Status | None:
        """None where it is time to ask, or to look whether it is silent."""
        event, frames = self._event(), _taken(self._socket)
        if event is not None or frames is not None:
            await asyncio.sleep(0)  # who talks without end has not the event loop for itself
        else:
            await self._stir(min(self._seconds(), self._silence()) if self._waits else self._seconds())
            event, frames = self._event(), _taken(self._socket)
        if event == zmq.EVENT_DISCONNECTED:
            self._patience = BROKEN_SECONDS
            self._broken()
            self._ask(Watch())  # who is connected anew is not the one that watched
        if frames is not None:
            return self._heard(_status(self._socket, frames))
        if self._seconds() <= 0:
            self._ask(GetStatus())
        return None

    async def _stir(self, seconds: float) -> None:
        """Until something may have come, or so long. A descriptor tells once: whoever is woken takes all that is there before it waits again."""
        timer = self._loop.call_later(max(0.001, seconds), self._stirred.set)
        try:
            await self._stirred.wait()
        finally:
            timer.cancel()
        self._stirred.clear()

    def _event(self) -> int | None:
        frames = _taken(self._events)
        return None if frames is None else int(parse_monitor_message(frames)["event"])

    def _silence(self) -> float:
        """Seconds until what was asked has been unanswered for too long."""
        return self._unanswered + self._patience - time.monotonic()

    def _seconds(self) -> float:
        """Until it is asked again."""
        now = time.monotonic()
        pause = ASK_AGAIN_SECONDS if self._waits else ASK_SHARE * (now - self._changed)
        return self._asked + min(ASK_SELDOM_SECONDS, max(ASK_AGAIN_SECONDS, pause)) - now

    def _ask(self, message: Watch | GetStatus) -> None:
        self._asked = time.monotonic()
        if not self._waits:
            self._waits, self._unanswered = True, self._asked
        with suppress(zmq.Again):  # a thousand questions lie unsent: it is silent, as its silence tells
            self._socket.send(encode(message), zmq.NOBLOCK)

    def _heard(self, status: Status | None) -> Status | None:
        """None: what came was none."""
        if status is None:
            return None
        self._waits, self._patience = False, SILENCE_SECONDS
        if self._last is None or news_of(status) != news_of(self._last):
            self._changed = time.monotonic()
        self._last = status
        return status


async def _receive(socket: "zmq.asyncio.Socket", timeout_seconds: float) -> Status:
    async with asyncio.timeout(timeout_seconds):
        while (status := await _read(socket)) is None:
            pass
        return status


async def _read(socket: "zmq.asyncio.Socket") -> Status | None:
    """None for what is no status."""
    return _status(socket, await socket.recv_multipart())


def _taken(socket: "zmq.Socket[bytes]") -> list[bytes] | None:
    """A message; None where none is there."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


def _status(socket: "zmq.Socket[Any]", frames: list[bytes]) -> Status | None:
    try:
        return decode_message(status_decoder, frames, LARGEST_CONTROL_BYTES)
    except ContractError as error:
        log.warning("%s: %s", socket.getsockopt_string(zmq.LAST_ENDPOINT), error)
        return None


def _connect(endpoint: Endpoint) -> "zmq.asyncio.Socket":
    socket: zmq.asyncio.Socket = _socket(zmq.asyncio.Context.instance(), endpoint)
    socket.connect(_address(endpoint))
    return socket


@cache
def _many_sockets() -> "zmq.Context[Any]":
    """Each process that is followed takes three, and libzmq gives 1,023 unless it is asked for more."""
    context: zmq.Context[Any] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    return context


def _address(endpoint: Endpoint) -> str:
    return f"tcp://{endpoint.host}:{endpoint.port}"


def _socket(context: "zmq.Context[Any]", endpoint: Endpoint) -> Any:
    """Of the context's own kind."""
    socket = context.socket(zmq.DEALER)
    client = curve_secret_key(endpoint.secret, "client")
    socket.curve_secretkey = client
    socket.curve_publickey = zmq.curve_public(client)
    socket.curve_serverkey = zmq.curve_public(curve_secret_key(endpoint.secret, "server"))
    socket.maxmsgsize = LARGEST_CONTROL_BYTES + WRAPPING_BYTES
    socket.handshake_ivl = int(ANSWER_SECONDS * 1000)
    socket.heartbeat_ivl = int(HEARTBEAT_SECONDS * 1000)
    socket.heartbeat_timeout = int(HEART_STOPPED_SECONDS * 1000)
    socket.reconnect_ivl = 50  # milliseconds: a process that starts again is found at once
    socket.reconnect_ivl_max = 500
    socket.connect_timeout = (
        1500  # milliseconds: a kernel tries again ever more seldom, and a cut may be mended any time
    )
    return socket


@dataclass(frozen=True, slots=True)
class Control:
    """How control ports are spoken with: over ZeroMQ, unless somebody brings something else."""

    ask: Callable[[Endpoint, Message, float], Awaitable[Status]] = ask
    watch: Callable[[Endpoint, Callable[[], None]], AsyncGenerator[Status | None]] = watch
    knock: Callable[[Endpoint], Awaitable[Door]] = knock


OVER_ZEROMQ = Control()


class Links:
    """Watches many control ports at once and keeps the last status of each; `changed` is called after every change.

    A name whose endpoint changes is watched anew; a name that is gone is forgotten. `statuses` holds only who answers; `unreachable` who fell silent, and where
    nobody answers a knock; `doors` who answered it there last.
    """

    def __init__(self, changed: Callable[[], None], control: Control = OVER_ZEROMQ) -> None:
        self._changed, self._control = changed, control
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._endpoints: dict[str, Endpoint] = {}
        self._knocks: dict[str, asyncio.Task[None]] = {}
        self.statuses: dict[str, Status] = {}
        self.unreachable: set[str] = set()
        self.doors: dict[str, Door] = {}

    def follow(self, endpoints: dict[str, Endpoint]) -> None:
        """Watch exactly these."""
        for name in set(self._endpoints) - set(endpoints):
            self.forget(name)
        for name, endpoint in endpoints.items():
            if self._endpoints.get(name) != endpoint:
                self.forget(name)
                self._endpoints[name] = endpoint
                self._tasks[name] = asyncio.create_task(self._watch(name, endpoint))

    def forget(self, name: str) -> None:
        """It ended: its last status counts no more."""
        for tasks in (self._tasks, self._knocks):
            if task := tasks.pop(name, None):
                task.cancel()
        self._endpoints.pop(name, None)
        self.statuses.pop(name, None)
        self.unreachable.discard(name)
        self.doors.pop(name, None)

    def doubt(self, name: str) -> None:
        """Somebody misses it, or its connection has ended: it is knocked at, unless it is already."""
        knock = self._knocks.get(name)
        if name in self._endpoints and (knock is None or knock.done()):
            self._knocks[name] = asyncio.create_task(self._knock(name, self._endpoints[name]))

    async def send(self, name: str, message: Message) -> bool:
        """Deliver and keep the status that answers; silence is only logged, the next round sends again. Whether one came."""
        endpoint = self._endpoints.get(name)
        if endpoint is None:
            return False
        try:
            status = await self._control.ask(endpoint, message, ANSWER_SECONDS)
        except NoAnswerError as error:
            log.warning("%s: %s", name, error)
            return False
        if self._endpoints.get(name) == endpoint:
            self._keep(name, status)
        return True

    def secrets(self) -> dict[str, str]:
        """Of the control ports that are watched."""
        return {name: endpoint.secret for name, endpoint in self._endpoints.items()}

    async def all_answer(self, names: Iterable[str], timeout_seconds: float = SILENCE_SECONDS) -> bool:
        """Ask them now; who does not answer has no status any more. An accused process is asked before it is given up. One that is not watched has ended."""
        wanted = tuple(names)
        asked = {name: self._endpoints[name] for name in wanted if name in self._endpoints}
        if len(asked) < len(wanted):
            return False
        answers = await asyncio.gather(
            *(self._answer(endpoint, timeout_seconds) for endpoint in asked.values()), return_exceptions=True
        )
        for name, answer in zip(asked, answers, strict=True):
            if isinstance(answer, NoAnswerError):
                self.statuses.pop(name, None)
        return not any(isinstance(answer, BaseException) for answer in answers)

    async def _answer(self, endpoint: Endpoint, timeout_seconds: float) -> Status:
        """Nobody is waited for where nobody answers a knock either."""
        asking = asyncio.ensure_future(self._control.ask(endpoint, GetStatus(), timeout_seconds))
        knocking = asyncio.ensure_future(self._control.knock(endpoint))
        try:
            await asyncio.wait([asking, knocking], return_when=asyncio.FIRST_COMPLETED)
            if not asking.done() and not await knocking:
                raise NoAnswerError(f"nobody is at {endpoint.host}:{endpoint.port}")
            return await asking
        finally:
            for each in (asking, knocking):
                each.cancel()
            await asyncio.gather(asking, knocking, return_exceptions=True)

    async def close(self) -> None:
        tasks = [*self._tasks.values(), *self._knocks.values()]
        self.follow({})
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, name: str, endpoint: Endpoint) -> None:
        async for status in self._control.watch(endpoint, lambda: self.doubt(name)):
            self._keep(name, status)

    async def _knock(self, name: str, endpoint: Endpoint) -> None:
        """Until somebody is there, or speaks."""
        while not (door := await self._control.knock(endpoint)):
            if name not in self.unreachable:
                self.unreachable.add(name)
                self.doors.pop(name, None)
                self.statuses.pop(name, None)
                self._changed()
            await asyncio.sleep(KNOCK_AGAIN_SECONDS)
            if name in self.statuses:
                break
        is_news = name in self.unreachable
        self.unreachable.discard(name)
        if name not in self.statuses:
            is_news |= self.doors.get(name) != door
            self.doors[name] = door
        if is_news:
            self._changed()

    def _keep(self, name: str, status: Status | None) -> None:
        """None: nobody answers. Who says the same again, as all do twice a second, has changed nothing."""
        before = self.statuses.pop(name, None)
        if status is not None:
            self.statuses[name] = status
            self.unreachable.discard(name)
            self.doors.pop(name, None)
        elif before is not None:
            self.doubt(name)
        if (status and news_of(status)) != (before and news_of(before)):
            self._changed()


def as_kind(statuses: dict[str, Status], kind: type[Any]) -> dict[str, Any]:
    """Those of one kind: slots or gateways."""
    return {name: status for name, status in statuses.items() if isinstance(status, kind)}
