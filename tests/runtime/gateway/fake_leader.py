"""A leader for tests: speaks the contract over loopback, answers from a script instead of a model.

Token i of the answer to a request is `model(prompt, i)`, whatever was replayed: as greedy decoding in fp32. It can be
paused, told to allow a number of steps, killed in mid-stream and started anew as another incarnation.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
import zmq.asyncio

from strata_planner.contract.control import Leader, SetRoute
from strata_planner.contract.frames import (
    Abort,
    FinishReason,
    Hello,
    LeaderHello,
    LeaderMessage,
    Rejected,
    Submit,
    TokenEvent,
    Tokens,
    encode,
    gateway_message_decoder,
)
from strata_runtime.wire.transport import Keys, listen

Model = Callable[[Sequence[int], int], int]
KEY = "key of the epoch"


@dataclass
class _Running:
    identity: bytes
    submit: Submit
    produced: int


@dataclass
class FakeLeader:
    """`start` and `stop` it inside an event loop; `port` stays the same when it is started again."""

    model: Model
    replica: int = 0
    epoch: int = 1
    key: str = KEY
    max_tokens: int = 512
    reject: str = ""  # refuse every request with this reason
    fail_at: int | None = None  # the token that fails
    fails_with: FinishReason = "error"
    lost: str = ""  # a slot of a later stage
    found: int = 0  # tokens of each prompt that its KV cache has
    counts: tuple[int, int, int, int] = (0, 0, 0, 0)  # preemptions, drafts, their tokens, those accepted
    port: int = 0
    incarnation: int = 0
    submits: list[Submit] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._allowed: int | None = None  # steps until it pauses; None: no pause
        self._running: dict[str, _Running] = {}
        self._happened = asyncio.Condition()

    async def start(self) -> None:
        self.incarnation += 1
        self._running = {}
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.ROUTER)
        listen(self._socket, f"tcp://127.0.0.1:{self.port or '*'}", Keys.of(self.key))
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._task = asyncio.create_task(self._serve())

    async def stop(self) -> None:
        """As a kill would: whatever was running or under way is gone."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._socket.close(linger=0)
        self._context.term()

    def allow(self, steps: int | None) -> None:
        """Pause after so many more steps; None: never."""
        self._allowed = steps

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait for something to have come from the gateway."""
        async with self._happened:
            await asyncio.wait_for(self._happened.wait_for(condition), 10)

    @property
    def running(self) -> list[str]:
        return list(self._running)

    def leader(self, tokens_per_second: float = 1.0) -> Leader:
        return Leader(self.replica, f"slot-{self.replica}", f"tcp://127.0.0.1:{self.port}", tokens_per_second)

    async def _serve(self) -> None:
        while True:
            while self._running and self._allowed != 0 and not await self._socket.poll(0):
                await self._step()
                await asyncio.sleep(0)  # sending does not wait: others have their turns too
            if await self._socket.poll(10):  # a change of `allow` is not a message
                identity, payload = await self._socket.recv_multipart()
                await self._take(identity, gateway_message_decoder.decode(payload))

    async def _take(self, identity: bytes, message: Submit | Abort | Hello) -> None:
        match message:
            case Hello():
                who = (self.replica, self.epoch, str(self.incarnation))
                hello = LeaderHello(*who, self.max_tokens, *self._load(), *self.counts, lost=self.lost)
                await self._send(identity, hello)
            case Submit() if self.reject:
                await self._send(identity, Rejected(message.request, self.reject))
            case Submit():
                self.submits.append(message)
                self._running[message.request] = _Running(identity, message, len(message.delivered))
            case Abort():
                self.aborts.append(message.request)
                self._running.pop(message.request, None)
        async with self._happened:
            self._happened.notify_all()

    async def _step(self) -> None:
        if self._allowed is not None:
            self._allowed -= 1
        events: dict[bytes, list[TokenEvent]] = {}
        for running in list(self._running.values()):
            event = self._next(running)
            events.setdefault(running.identity, []).append(event)
            if event.finish:
                del self._running[running.submit.request]
        for identity, of_one in events.items():  # a step's events in one message, as the real one sends them
            await self._send(identity, Tokens(self.replica, self.epoch, of_one, *self._load()))

    def _next(self, running: _Running) -> TokenEvent:
        submit, index = running.submit, running.produced
        if index == self.fail_at:
            return TokenEvent(submit.request, index, 0, 0.0, [], self.fails_with)
        running.produced += 1
        token = self.model(submit.prompt, index)
        top = [(token, -0.25), (token + 1, -1.5), (token + 2, -3.0)][: max(submit.sampling.logprobs, 0)]
        finish = "stop" if token in submit.stop_tokens else "length" if index + 1 == submit.max_tokens else None
        return TokenEvent(submit.request, index, token, -0.25, top, finish, self.found)

    async def _send(self, identity: bytes, message: LeaderMessage) -> None:
        await self._socket.send_multipart([identity, encode(message)])

    def _load(self) -> tuple[int, int, float]:
        return len(self._running), 0, 0.5 if self._running else 0.0


def route_to(*leaders: FakeLeader, max_model_len: int = 512) -> SetRoute:
    """A route of the first leader's epoch and key."""
    return SetRoute(leaders[0].epoch, leaders[0].key, tuple(one.leader() for one in leaders), max_model_len)
