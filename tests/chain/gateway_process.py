"""A real gateway, less its HTTP, as one process of the checker: `Dispatcher`, `Journal`, `LeaderLink`, `Keeper` and `TwinLinks` on virtual ZeroMQ."""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import Any

from strata_planner.contract.control import GatewayRequest, GatewayStatus, OrderRequest, SetOrders, SetRoute, SlotStatus
from strata_planner.contract.keys import journal_secret
from strata_runtime.gateway.errors import ApiError, ConflictError, GoneError, UnavailableError
from strata_runtime.gateway.http.asked import Again, wish_of
from strata_runtime.gateway.keeping.keeper import Keeper
from strata_runtime.gateway.keeping.twins import TwinLinks
from strata_runtime.gateway.metrics import Metrics
from strata_runtime.gateway.routing.dispatcher import Dispatcher
from strata_runtime.gateway.settings import Limits, Peer
from strata_runtime.gateway.standing.carrying import OrderCarrier
from strata_runtime.gateway.standing.doors import ANSWER_SECONDS
from strata_runtime.wire.transport import Keys
from tests.chain.client import PATH, Client, KeptClient
from tests.chain.virtual_network import LATENCY_SECONDS, Host, here

Order = Callable[[str, OrderRequest], SlotStatus | None]

FOR_EVER = 1e6
PATIENT = Limits(hold_seconds=FOR_EVER, resume_seconds=FOR_EVER, keep_seconds=FOR_EVER)
ASK_AGAIN_SECONDS = 1.0
JOURNAL_PORT = 7072


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
        self.dispatcher, self.keeper, self.twins = self.inside(self._make())
        self.orders = self._context.run(OrderCarrier, self.dispatcher, doors=lambda _: self)
        self._starts(self._tells())

    async def _make(self) -> tuple[Dispatcher, Keeper, TwinLinks]:
        """As `gateway.__main__` does."""
        dispatcher = Dispatcher(PATIENT, Metrics("model"))
        keeper = Keeper(dispatcher, PATIENT, b"positions")
        keys = Keys.of(journal_secret("key"))
        twins = TwinLinks(dispatcher.incarnation, "*", JOURNAL_PORT, keys, keeper.hear, keeper.kept)
        keeper.twins = twins
        twins.follow([Peer("gateways", JOURNAL_PORT)])
        return dispatcher, keeper, twins

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
        serving = self._serve_kept(client) if isinstance(client, KeptClient) else self._serve(client)
        client.reader = self._starts(serving)

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
                client.found += event.found
        except ApiError as error:
            client.error = str(error)
        finally:
            generation.close()

    async def _serve_kept(self, client: KeptClient) -> None:
        """As `http` answers a stream under a key. Its client sends the request again where it is told to."""
        while not client.done:
            try:
                self.dispatcher.check_open()
                wish = wish_of(client.headers(), PATH, client.body, b"")
                assert wish is not None, "it has a key"
                birth = self.keeper.birth(wish)
                asked = Again(self.keeper, wish, birth)
                source = asked.open([client.born(birth)])
            except (UnavailableError, ConflictError):  # 503, 409
                await asyncio.sleep(ASK_AGAIN_SECONDS)
                continue
            except GoneError as error:  # 410
                client.is_lost(str(error))
                continue
            try:
                number = 0
                while not client.done:
                    _, event = await source.next()
                    number += 1
                    line = asked.id_line(number)
                    if number > asked.events_seen:
                        client.take(number - 1, event.token, event.finish)
                        client.last_id = line.removeprefix(b"id: ").strip().decode()
            except ConflictError:  # another gateway goes on with it
                await asyncio.sleep(ASK_AGAIN_SECONDS)
            except ApiError as error:
                client.error = str(error)
                return
            finally:
                source.close()

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

    @property
    def is_whole(self) -> bool:
        """Whether another gateway knows what this one does, but for what is on its way."""
        return self.twins.connected > 0

    def dies(self) -> None:
        for task in list(self.host.tasks):
            task.cancel()
        self.dispatcher._gathering.cancel()


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
