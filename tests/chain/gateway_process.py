"""A real gateway, less its HTTP, as one process of the checker: `Dispatcher`, `Journal`, `LeaderLink` and control port on virtual ZeroMQ; and its clients."""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

from strata_planner.contract.control import GatewayRequest, GatewayStatus, OrderRequest, SetOrders, SetRoute, SlotStatus
from strata_planner.contract.frames import Sampling
from strata_runtime.gateway.errors import ApiError, UnavailableError
from strata_runtime.gateway.metrics import Metrics
from strata_runtime.gateway.routing.dispatcher import Dispatcher
from strata_runtime.gateway.routing.journal import GenerationRequest
from strata_runtime.gateway.settings import Limits
from strata_runtime.gateway.standing.carrying import OrderCarrier
from strata_runtime.gateway.standing.doors import ANSWER_SECONDS
from tests.chain.arithmetic import STOP, text_of
from tests.chain.virtual_network import LATENCY_SECONDS, Host, here

Order = Callable[[str, OrderRequest], SlotStatus | None]

PATIENT = Limits(hold_seconds=1e6)
ASK_AGAIN_SECONDS = 1.0


@dataclass
class Client:
    """One request: what its client has, and what it should have."""

    request: GenerationRequest
    got: list[int] = field(default_factory=list)
    error: str = ""
    done: bool = False
    broken: str = ""  # a law
    served_by: "GatewayProcess | None" = None
    reader: "asyncio.Task[None] | None" = None

    def __post_init__(self) -> None:
        self.wanted = text_of(self.request.prompt, self.request.max_tokens, self.request.sampling)

    def leave(self) -> None:
        """It wants no more."""
        self.done = True
        if self.reader is not None:
            self.reader.cancel()

    def take(self, index: int, token: int, finish: str | None) -> None:
        if index != len(self.got):
            self.broken = f"{self.request.id}: token {index} came where {len(self.got)} was due"
        self.got.append(token)
        if self.got != self.wanted[: len(self.got)]:
            self.broken = f"{self.request.id}: {self.got} is no beginning of {self.wanted}"
        self.done = finish is not None
        if self.done and self.got != self.wanted:
            self.broken = f"{self.request.id} ended after {len(self.got)} tokens of {len(self.wanted)}"


def a_client(name: str, prompt: tuple[int, ...], most: int, seed: int) -> Client:
    sampling = Sampling(temperature=0.0 if seed == 0 else 1.0, seed=seed)
    return Client(GenerationRequest(name, prompt, most, (STOP,), sampling))


class GatewayProcess:
    """One life of a gateway. What its clients have not got by its end is theirs to ask for again."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, host: Host, told: Callable[[], None], order: Order = lambda *_: None
    ) -> None:
        """`order`: asks a slot by the key for standing orders."""
        self._loop, self.host, self._told = loop, host, told
        self._tasks: set[asyncio.Task[None]] = set()
        self._context = copy_context()
        self._context.run(here.set, host)
        self._order = order
        self.dispatcher: Dispatcher = self.inside(self._make())
        self.orders = self._context.run(OrderCarrier, self.dispatcher, doors=lambda _: self)
        self._starts(self._tells())

    async def _make(self) -> Dispatcher:
        return Dispatcher(PATIENT, Metrics("model"))

    def inside(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs what never waits, within the loop and the process."""
        return self._context.run(run_now, self._loop, work)

    def _starts(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = self._loop.create_task(work, context=self._context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def ask(self, slot: str, message: OrderRequest) -> SlotStatus | None:
        """In place of `Doors`."""
        await asyncio.sleep(LATENCY_SECONDS)
        status = self._order(slot, message)
        await asyncio.sleep(ANSWER_SECONDS if status is None else LATENCY_SECONDS)
        return status

    def close(self) -> None: ...

    async def _tells(self) -> None:
        while True:
            await self.dispatcher.changed.wait()
            self.dispatcher.changed.clear()
            self._told()
            await asyncio.sleep(0.05)

    def serve(self, client: Client) -> None:
        client.reader = self._starts(self._serve(client))

    async def _serve(self, client: Client) -> None:
        while True:
            try:
                generation = self.dispatcher.open([client.request])
                break
            except UnavailableError:  # 503: a client asks again
                await asyncio.sleep(ASK_AGAIN_SECONDS)
        try:
            while not client.done:
                _, event = await generation.next()
                client.take(event.index, event.token, event.finish)
        except ApiError as error:
            client.error = str(error)
        finally:
            generation.close()

    def handle(self, request: GatewayRequest) -> GatewayStatus:
        async def answer() -> GatewayStatus:
            self.orders.hear()
            if isinstance(request, SetRoute):
                self.dispatcher.set_route(request)
            elif isinstance(request, SetOrders):
                self.orders.take(request)
            return self.dispatcher.status()

        status: GatewayStatus = self.inside(answer())
        return status

    def dies(self) -> None:
        for task in self._tasks:
            task.cancel()
        self.inside(self._close())

    async def _close(self) -> None:
        if self.orders._task is not None:
            self.orders._task.cancel()
        self.dispatcher._housekeeper.cancel()
        self.dispatcher._gathering.cancel()
        self.dispatcher._end(self.dispatcher._links.values())


def run_now(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any]) -> Any:
    """A coroutine that never waits, run to its end at once, also while the loop does not run."""
    before = asyncio._get_running_loop()
    asyncio._set_running_loop(loop)
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    finally:
        asyncio._set_running_loop(before)
    raise AssertionError("it waits")
