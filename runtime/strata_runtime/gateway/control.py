"""The control port of the gateway: a controller sets routes and reads the status.

Every request is answered by the whole status; a watcher gets it again whenever it changed. Runs beside `app` on the
same event loop; knows only the dispatcher.
"""

import asyncio
import contextlib
import logging
from typing import Any

import zmq
import zmq.asyncio

from strata_planner.contract.control import (
    LARGEST_CONTROL_BYTES,
    GatewayStatus,
    SetOrders,
    SetRoute,
    Status,
    Watch,
    encode,
    gateway_request_decoder,
    news_of,
)
from strata_planner.contract.decoding import decode_message
from strata_planner.contract.values import ContractError
from strata_runtime.errors import InputError
from strata_runtime.gateway.errors import StartError
from strata_runtime.gateway.routing.dispatcher import Dispatcher
from strata_runtime.gateway.standing.carrying import OrderCarrier
from strata_runtime.wire.transport import Keys, listen

log = logging.getLogger(__name__)

NEWS_SECONDS = 0.05  # changes closer together than this reach watchers as one


class ControlServer:
    """Serves until `close`. Create it inside the event loop. Raises StartError for a port in use."""

    def __init__(
        self, dispatcher: Dispatcher, host: str, port: int, key: str, orders: OrderCarrier | None = None
    ) -> None:
        """`orders`: carries standing orders out; None: nobody does."""
        self._dispatcher, self._orders = dispatcher, orders
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a watcher that is gone is an error, not silence
        try:
            listen(self._socket, f"tcp://{host}:{port or '*'}", Keys.of(key), LARGEST_CONTROL_BYTES)
        except InputError as error:
            self._context.term()
            raise StartError(f"--control-port {port}: {error}") from error
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._watchers: set[bytes] = set()
        self._published: Status | None = None
        self._tasks = [
            asyncio.create_task(self._serve(), name="gateway control"),
            asyncio.create_task(self._publish(), name="gateway status"),
        ]

    async def failed(self) -> None:
        """Waits for as long as the port is served; raises what ended that."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError, Exception):  # `failed` has told it
                await task
        self._socket.close(linger=200)  # the last status may still be on its way
        self._context.term()

    async def _serve(self) -> None:
        while True:
            identity, *frames = await self._socket.recv_multipart()
            try:
                request = decode_message(gateway_request_decoder, frames, LARGEST_CONTROL_BYTES)
            except ContractError as error:
                log.warning("control: %s; the status answers it", error)
                request = None
            if self._orders is not None:
                self._orders.hear()
            if isinstance(request, SetRoute):
                self._set_route(request)
            elif isinstance(request, Watch):
                self._watchers.add(identity)
            elif isinstance(request, SetOrders) and self._orders is not None:
                self._orders.take(request)
            self._send(identity, self._dispatcher.status())

    def _set_route(self, route: SetRoute) -> None:
        try:
            self._dispatcher.set_route(route)
        except Exception:  # the port outlives whatever a route may hold
            log.exception("control: the route of epoch %d is refused", route.epoch)

    async def _publish(self) -> None:
        changed = self._dispatcher.changed
        while True:
            await changed.wait()
            changed.clear()
            status = self._dispatcher.status()
            if (news := news_of(status)) != self._published:
                self._published = news
                for identity in tuple(self._watchers):
                    self._send(identity, status)
            await asyncio.sleep(NEWS_SECONDS)

    def _send(self, identity: bytes, status: GatewayStatus) -> None:
        sent: Any = self._socket.send_multipart([identity, encode(status)], flags=zmq.NOBLOCK)
        if sent.exception() is not None:  # gone, or so slow that its queue is full: it will ask again
            self._watchers.discard(identity)
