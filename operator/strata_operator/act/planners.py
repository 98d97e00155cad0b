"""Plans under way: several deployments side by side, losses before wishes.

The controller says at every look what it wants planned and takes what is done; it never waits. `moves` is the pure decision,
`Planners` carries it out. While more are waiting than can be planned, first plans are made in a hurry: a short search, nothing to compare;
those that were begun at leisure are begun anew.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from strata_operator.act.planner_call import Answer, Question

log = logging.getLogger(__name__)

LOSSES = {
    "NodeLost",
    "Takeover",
    "Unschedulable",
    "PrepareRefused",
    "PrepareStalled",
    "EndStalled",
    "OutOfMemory",
}  # reasons: something that was planned cannot be had any more


@dataclass(frozen=True, slots=True)
class Ticket:
    """Somebody's wish for a plan. `order`: who came first. `at_leisure`: a first plan under way, which could be made in a hurry."""

    owner: str
    urgent: bool
    order: int
    at_leisure: bool = False

    @property
    def rank(self) -> tuple[bool, int]:
        return (not self.urgent, self.order)


@dataclass(frozen=True, slots=True)
class Moves:
    """`hasten`: to begin anew, in a hurry. `is_crowded`: others are left waiting."""

    start: tuple[Ticket, ...] = ()
    put_back: tuple[Ticket, ...] = ()
    hasten: tuple[Ticket, ...] = ()
    is_crowded: bool = False


def moves(waiting: Sequence[Ticket], running: Sequence[Ticket], places: int) -> Moves:
    """Whom to start, whom to put back (a loss takes the place of the wish that came last), and who is to be quicker where others are left waiting."""
    start: list[Ticket] = []
    put_back: list[Ticket] = []
    free = places - len(running)
    wishes = sorted((each for each in running if not each.urgent), key=lambda each: each.order)
    for ticket in sorted(waiting, key=lambda each: each.rank):
        if free <= 0 and ticket.urgent and wishes:
            put_back.append(wishes.pop())
            free += 1
        if free > 0:
            start.append(ticket)
            free -= 1
    is_crowded = len(waiting) + len(put_back) > len(start)
    hasten = [each for each in running if is_crowded and each.at_leisure and each not in put_back]
    return Moves(tuple(start), tuple(put_back), tuple(hasten), is_crowded)


class Planner(Protocol):
    """Answers one question; cancelled when nobody wants the answer any more."""

    def warm(self) -> None:
        """A question may come soon."""

    async def answer(self, question: Question) -> Answer: ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class _Order:
    ticket: Ticket
    question: Question
    task: asyncio.Task[Answer] | None = None
    is_hurried: bool = False  # as it was begun

    @property
    def is_under_way(self) -> bool:
        return self.task is not None and not self.task.done()

    @property
    def under_way(self) -> Ticket:
        return replace(self.ticket, at_leisure=self.question.running is None and not self.is_hurried)


class Planners:
    """At most one plan for each owner. `changed` is called whenever one is done."""

    def __init__(self, planner: Planner, places: int, changed: Callable[[], None]) -> None:
        self._planner, self._places, self._changed = planner, places, changed
        self._orders: dict[str, _Order] = {}
        self._came = 0

    def warm(self) -> None:
        self._planner.warm()

    def want(self, owner: str, question: Question, *, urgent: bool) -> None:
        """In place of what this owner wanted before, and where that has not been begun, in its turn."""
        if self.is_waiting(owner):
            order = self._orders[owner]
            order.ticket, order.question = replace(order.ticket, urgent=urgent), question
        else:
            self.drop(owner)
            self._came += 1
            self._orders[owner] = _Order(Ticket(owner, urgent, self._came), question)
        self._go_on()

    def is_waiting(self, owner: str) -> bool:
        """Its plan has not been begun: what it is to be planned on may still be said anew."""
        return owner in self._orders and self._orders[owner].task is None

    def hurry(self, owner: str) -> None:
        """What was a wish has become a loss."""
        order = self._orders.get(owner)
        if order is not None and not order.ticket.urgent:
            order.ticket = replace(order.ticket, urgent=True)
            self._go_on()

    def answer(self, owner: str) -> Answer | None:
        """None while there is none. It stays until it is dropped: what it leads to may have to be tried again."""
        order = self._orders.get(owner)
        if order is None or order.task is None or not order.task.done():
            return None
        if order.task.cancelled():  # not by `drop` or `put_back`, which forget the task
            return Answer(None, "PlannerFault", "planning was broken off", passing=True)
        error = order.task.exception()
        if error is not None:
            log.error("a plan failed", exc_info=error)
            return Answer(None, "PlannerFault", f"planning failed: {error}", passing=True)
        return order.task.result()

    def drop(self, owner: str) -> None:
        """Nobody waits for it any more."""
        order = self._orders.pop(owner, None)
        if order is not None and order.task is not None:
            order.task.cancel()
            self._go_on()

    async def close(self) -> None:
        tasks = [order.task for order in self._orders.values() if order.task]
        self._orders.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._planner.close()

    def _go_on(self) -> None:
        orders = self._orders.values()
        waiting = [order.ticket for order in orders if order.task is None]
        running = [order.under_way for order in orders if order.is_under_way]
        decided = moves(waiting, running, self._places)
        for ticket in (*decided.put_back, *decided.hasten):
            order = self._orders[ticket.owner]
            if order.task is not None:
                order.task.cancel()
            order.task = None
        for ticket in (*decided.hasten, *decided.start):
            order = self._orders[ticket.owner]
            order.is_hurried = decided.is_crowded
            question = msgspec.structs.replace(order.question, hurried=decided.is_crowded)
            order.task = asyncio.create_task(self._planner.answer(question))
            order.task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Answer]) -> None:
        if not task.cancelled() or any(order.task is task for order in self._orders.values()):
            self._go_on()
            self._changed()
