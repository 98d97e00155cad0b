"""Plans under way: several deployments side by side, each plan in a process of its own, losses before wishes.

The controller says at every look what it wants planned and takes what is done; it never waits. `moves` is the pure decision,
`Planners` carries it out, `PlanProcess` is one plan: bounded in memory, killed at its deadline, started ahead of its question.
"""

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from strata_operator.act.planner_call import TOO_LARGE, Answer, Question
from strata_planner.contract.values import ContractError, from_json, to_json

log = logging.getLogger(__name__)

LOSSES = {
    "NodeLost",
    "Unschedulable",
    "PrepareRefused",
    "PrepareStalled",
    "OutOfMemory",
}  # reasons: something that was planned cannot be had any more
# The stacks and buffers of a thread per processor would count as the plan's memory, and the solvers use one thread.
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_BESIDE_SECONDS = 60.0  # starting, reading the model's files, comparing with alternatives


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """The administrator's, over what deployments ask for."""

    side_by_side: int = 2
    memory_bytes: int = 768 << 20  # of one plan
    time_limit_seconds: float = 300.0

    def deadline_seconds(self, question: Question) -> float:
        """The planner keeps its own time limit; this is for when it does not. A layout is searched and then solved."""
        asked = (question.deployment.get("spec", {}).get("planning") or {}).get("timeLimitSeconds", 30)
        return 2 * min(float(asked), self.time_limit_seconds) + _BESIDE_SECONDS


@dataclass(frozen=True, slots=True)
class Ticket:
    """Somebody's wish for a plan. `order`: who came first."""

    owner: str
    urgent: bool
    order: int

    @property
    def rank(self) -> tuple[bool, int]:
        return (not self.urgent, self.order)


@dataclass(frozen=True, slots=True)
class Moves:
    start: tuple[Ticket, ...] = ()
    put_back: tuple[Ticket, ...] = ()


def moves(waiting: Sequence[Ticket], running: Sequence[Ticket], places: int) -> Moves:
    """Whom to start, and whom to put back: a loss takes the place of the wish that came last."""
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
    return Moves(tuple(start), tuple(put_back))


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


class Planners:
    """At most one plan for each owner. `changed` is called whenever one is done."""

    def __init__(self, planner: Planner, places: int, changed: Callable[[], None]) -> None:
        self._planner, self._places, self._changed = planner, places, changed
        self._orders: dict[str, _Order] = {}
        self._came = 0

    def warm(self) -> None:
        self._planner.warm()

    def want(self, owner: str, question: Question, *, urgent: bool) -> None:
        """In place of what this owner wanted before."""
        self.drop(owner)
        self._came += 1
        self._orders[owner] = _Order(Ticket(owner, urgent, self._came), question)
        self._go_on()

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
        running = [order.ticket for order in orders if order.task is not None and not order.task.done()]
        decided = moves(waiting, running, self._places)
        for ticket in decided.put_back:
            order = self._orders[ticket.owner]
            if order.task is not None:
                order.task.cancel()
            order.task = None
        for ticket in decided.start:
            order = self._orders[ticket.owner]
            order.task = asyncio.create_task(self._planner.answer(order.question))
            order.task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Answer]) -> None:
        if not task.cancelled() or any(order.task is task for order in self._orders.values()):
            self._go_on()
            self._changed()


class PlanProcess:
    """Each question has a process of its own; the next one is started ahead and waits for its question."""

    def __init__(self, limits: PlanLimits) -> None:
        self._limits = limits
        self._spare: asyncio.Task[asyncio.subprocess.Process] | None = None

    def warm(self) -> None:
        """Have a process ready for the next question."""
        if self._spare is None:
            self._spare = asyncio.create_task(self._start())

    async def answer(self, question: Question) -> Answer:
        self.warm()
        spare, self._spare = self._spare, None
        assert spare is not None
        try:
            process = await asyncio.shield(spare)
        except asyncio.CancelledError:
            self._spare, spare = spare, self._spare  # it serves the next question
            if spare is not None:
                await _end(await spare)
            raise
        self.warm()
        if process.returncode is not None:  # it died while it waited
            process = await self._start()
        return await self._ask(process, question)

    async def close(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            await _end(await spare)

    async def _start(self) -> asyncio.subprocess.Process:
        command = (sys.executable, "-m", "strata_operator.act.plan_worker", str(self._limits.memory_bytes))
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=os.environ | _ONE_THREAD)

    async def _ask(self, process: asyncio.subprocess.Process, question: Question) -> Answer:
        name = question.deployment.get("metadata", {}).get("name", "")
        log.info("%s is planned on %d nodes: %s", name, len(question.cluster.nodes), question.reason)
        question = msgspec.structs.replace(question, time_limit_seconds=self._limits.time_limit_seconds)
        seconds, began = self._limits.deadline_seconds(question), time.monotonic()
        try:
            async with asyncio.timeout(seconds):
                said, _ = await process.communicate(to_json(question))
        except TimeoutError:
            return Answer(
                None, "NoPlanInTime", f"planning was ended after {time.monotonic() - began:.0f} s; {TOO_LONG}"
            )
        finally:
            await _end(process)
        try:
            return from_json(said, Answer)
        except ContractError:
            message = (
                f"planning ended with code {process.returncode}, as a process does that needs more than its "
                f"{self._limits.memory_bytes >> 20} MiB: {TOO_LARGE}"
            )
            return Answer(None, "PlanTooLarge", message, passing=True)


TOO_LONG = "lower planning.timeLimitSeconds, or narrow the search by placement.maxStages or placement.nodeSelector"


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()
