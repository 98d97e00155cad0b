"""Carries standing orders out: hears whether a controller is there, looks at the slots while none is, and does what `decision` says.

One per gateway, on its event loop. `control` tells it of every word of a controller and gives it the orders. While a controller speaks it does nothing.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from strata_planner.contract.control import GetStatus, OrderRequest, SetOrders, SetRoute, SlotDoor, SlotStatus
from strata_runtime.gateway.standing.decision import Seen, TakeRoute, next_steps
from strata_runtime.gateway.standing.doors import Doors

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.25


class Asking(Protocol):
    """A way to ask slots, closed when it is needed no more."""

    def ask(self, slot: str, message: OrderRequest) -> Awaitable[SlotStatus | None]: ...

    def close(self) -> None: ...


class Routing(Protocol):
    """What takes a route: the dispatcher."""

    @property
    def epoch(self) -> int: ...

    def set_route(self, route: SetRoute) -> None: ...


class OrderCarrier:
    """Create it inside the event loop; `close` it there. `done`: called for every order whose epoch this gateway routes to."""

    def __init__(
        self,
        routing: Routing,
        done: Callable[[str], None] = lambda _: None,
        doors: Callable[[Mapping[str, SlotDoor]], Asking] = Doors,
    ) -> None:
        self._routing, self._done, self._make_doors = routing, done, doors
        self._orders: SetOrders | None = None
        self._doors: Asking | None = None
        self._heard = time.monotonic()
        self._answered: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    def hear(self) -> None:
        """A controller has spoken."""
        self._heard = time.monotonic()

    def take(self, orders: SetOrders) -> None:
        """In place of those of the epoch before; those of an older one are out of date."""
        if self._orders is not None and orders.epoch < self._orders.epoch:
            return
        self._shut()
        self._orders = orders
        log.info("epoch %d: %d standing orders", orders.epoch, len(orders.orders))
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="standing orders")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._shut()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.look()
            except Exception:  # whatever a slot answers, the next look is made
                log.exception("standing orders: a look failed")

    async def look(self) -> None:
        """Nothing while a controller was heard in time."""
        orders, silence = self._orders, time.monotonic() - self._heard
        if orders is None:
            return
        if silence < orders.silence_seconds:
            self._shut()
            return
        if self._doors is None:
            log.warning(
                "no controller was heard for %.0f s: looking after the slots by %d standing orders",
                silence,
                len(orders.orders),
            )
            self._doors = self._make_doors(orders.doors)
            self._answered = dict.fromkeys(orders.doors, time.monotonic())
        doors = self._doors
        seen = await self._seen(orders, doors)
        for step in next_steps(orders, seen, self._routing.epoch):
            if self._orders is not orders:
                return
            if isinstance(step, TakeRoute):
                self._take_route(step)
            else:
                await doors.ask(step.slot, step.message)

    async def _seen(self, orders: SetOrders, doors: Asking) -> Seen:
        names = sorted(orders.doors)
        answers = await asyncio.gather(*(doors.ask(name, GetStatus()) for name in names))
        now = time.monotonic()
        slots = {name: status for name, status in zip(names, answers, strict=True) if status is not None}
        self._answered |= dict.fromkeys(slots, now)
        return Seen(slots, {name: now - self._answered[name] for name in names if name not in slots})

    def _take_route(self, step: TakeRoute) -> None:
        lost = ", ".join(step.order.lost)
        what = f"{lost} is lost, the others took over" if lost else "replicas were formed anew"
        log.warning("epoch %d was made by a standing order: %s", step.order.number, what)
        self._routing.set_route(step.route)
        self._done("takeover" if lost else "renewal")

    def _shut(self) -> None:
        if self._doors is not None:
            self._doors.close()
            self._doors = None
