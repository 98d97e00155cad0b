"""The operator's shell: looks at the cluster, asks `reconcile` what to do for each deployment, has it done.

Woken by watch events, by statuses of slots and gateways, by plans that are done, and by a clock. Every deployment is served
in a task of its own: one that waits, breaks or is broken delays no other. Whatever nobody foresaw becomes the condition
ReconcileError of that deployment, which is left alone for a while; what is kept between two looks only saves work.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from strata_operator.act import metrics
from strata_operator.act.carry_out import Hands
from strata_operator.act.clock import SYSTEM_CLOCK, Clock
from strata_operator.act.control_client import OVER_ZEROMQ, Control, Links
from strata_operator.act.kept import Kept
from strata_operator.act.objects import failed_status_object
from strata_operator.act.observation import ControllerOptions, Look
from strata_operator.act.pace import Pace
from strata_operator.act.plan_process import PlanProcess
from strata_operator.act.planners import Planner, Planners
from strata_operator.act.readings import Readings
from strata_operator.decide.actions import DeleteEpoch
from strata_operator.decide.backoff import Backoff
from strata_operator.decide.ledger import Dealing
from strata_operator.decide.reconcile import reconcile
from strata_operator.decide.view import View
from strata_operator.decide.weighing import weighed
from strata_operator.errors import InvalidInputError, NotReadyError
from strata_operator.observe.inventories import Inventories
from strata_operator.observe.kube import PODS, Kind, Kube
from strata_operator.observe.source import Lists, Source
from strata_operator.observe.stock import Stock

__all__ = ["Controller", "ControllerOptions"]

log = logging.getLogger(__name__)

LOOK_EVERY_SECONDS = 5.0
LOOK_SOON_SECONDS = 0.5  # while something is to become Ready: time alone may be what a decision waits for
UNSERVED_SECONDS = 2.0  # the same of a deployment that has never served: nobody waits for an answer of its
AT_REST = {"Ready", "Failed"}  # phases
PATIENCE_SECONDS = 2.0  # so long a look waits for slow deployments; they go on, and are not looked at twice
QUIET_SECONDS = 15.0  # between looks at a deployment of which nothing changes
PATIENT_SHARE = (
    0.1  # of the time since the last change: so much later than its end a time that began then may be noticed
)
FIRST_ANSWERS_SECONDS = 3.0  # after its start an operator does not call a slot away before this

Object = dict[str, Any]


class Controller:
    """`wake` it after every change; `run` looks and acts while `leading()`."""

    def __init__(  # noqa: PLR0913  each is a border of its own
        self,
        kube: Kube,
        options: ControllerOptions,
        leading: Callable[[], bool],
        planner: Planner | None = None,
        *,
        source: Source | None = None,
        control: Control = OVER_ZEROMQ,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._kube = kube
        self._source = source or Lists(kube, options.namespaces)
        kube.written = self._wrote
        self._readings, self._inventories = Readings(), Inventories(self._source.stock, options.inventory)
        self._led = False
        self._options = options
        self._leading = leading
        self._control, self._clock = control, clock
        self._woken = asyncio.Event()
        self._is_at_rest = True
        self._kept: dict[str, Kept] = {}  # by uid
        self._unread: set[str] = set()  # watched namespaces that may not be read, as said last
        self._dealing = Dealing()
        limits = options.limits
        self._planners = Planners(planner or PlanProcess(limits), limits.side_by_side, self.wake)
        self._hands = Hands(kube, self._planners, self._dealing, leading, clock)

    def wake(self) -> None:
        self._woken.set()

    def _wrote(self, kind: Kind, thing: Object) -> None:
        """The watch will tell nothing new of it: what follows from it is done at once."""
        stock = self._source.stock
        before = stock.news
        stock.wrote(kind, thing)
        if stock.news != before:
            self.wake()

    async def run(self) -> None:
        """Until cancelled."""
        pace = Pace()
        try:
            while True:
                busy = time.process_time()
                if self._leading():
                    self._planners.warm()
                    await self._look_safely()
                else:
                    await self.stand_back()
                busy = time.process_time() - busy
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_SECONDS if self._is_at_rest else LOOK_SOON_SECONDS):
                        await self._woken.wait()
                await asyncio.sleep(pace.pause(time.monotonic(), busy))
                self._woken.clear()
        finally:
            await self.close()

    async def close(self) -> None:
        for kept in self._kept.values():
            await kept.close()
        await self._planners.close()
        await self._source.close()

    async def stand_back(self) -> None:
        """While this operator may not act it is not heard either: gateways that hear a controller leave their standing orders alone. Once it leads again it
        goes on as one that has just started.
        """
        self._led = False
        await self._forget_all_but(())

    async def look(self) -> None:
        """One look, and one round of actions for each deployment that is due and not still busy with its last one."""
        await self._refresh()
        stock = self._source.stock
        self._note_unread(stock)
        things = {thing["metadata"]["uid"]: thing for thing in stock.deployments}
        self._is_at_rest = {(thing.get("status") or {}).get("phase") for thing in things.values()} <= AT_REST
        look = Look(stock, self._options, self._clock, self._readings, self._inventories)
        self._dealing.refresh(look.ledger(), look.newest_numbers(), self._clock.seconds())
        alive = {uid: thing for uid, thing in things.items() if not thing["metadata"].get("deletionTimestamp")}
        await self._forget_all_but(alive)
        await self._serve_all(self._due(alive, look), look)
        await self._end_stranded(look)
        metrics.count_phases(stock.deployments)

    async def _refresh(self) -> None:
        if not self._led:
            await self._source.led()
            self._led = True
        await self._source.refresh()

    def _due(self, things: dict[str, Object], look: Look) -> list[Object]:
        """Those of which something has changed, those that time alone may move, and at long intervals all others."""
        touched, now = look.stock.take_touched(), self._clock.seconds()
        due: list[Object] = []
        for uid, thing in things.items():
            kept, meta = self._kept_of(uid), thing["metadata"]
            kept.is_touched |= (meta["namespace"], meta["name"]) in touched
            is_touched = kept.is_touched or self._planners.answer(uid) is not None
            if is_touched or self._inventory_moved(thing, look, kept):
                kept.changed_at = now
                due.append(thing)
            elif now >= kept.due_at:
                due.append(thing)
        return due

    def _inventory_moved(self, thing: Object, look: Look, kept: Kept) -> bool:
        """Whether it may use other devices than when it was looked at last."""
        try:
            return look.inventory(self._readings.deployment(thing), self._dealing.ledger) is not kept.inventory
        except InvalidInputError:
            return True

    async def _serve_all(self, things: list[Object], look: Look) -> None:
        tasks = []
        for thing in things:
            kept = self._kept_of(thing["metadata"]["uid"])
            if kept.task is None or kept.task.done():
                kept.is_touched, kept.due_at = False, self._due_again(kept)
                kept.task = asyncio.create_task(self._serve_safely(thing, look, kept))
            tasks.append(kept.task)
        if tasks:
            await asyncio.wait(tasks, timeout=PATIENCE_SECONDS)

    def _due_again(self, kept: Kept) -> float:
        """What time alone decides has begun with some change: the longer ago the last one is, the longer it can wait."""
        now = self._clock.seconds()
        return now + min(QUIET_SECONDS, max(LOOK_SOON_SECONDS, PATIENT_SHARE * (now - kept.changed_at)))

    async def _forget_all_but(self, alive: Collection[str]) -> None:
        for uid in set(self._kept) - set(alive):
            self._planners.drop(uid)
            self._readings.drop(uid)
            self._inventories.drop(uid)
            await self._kept.pop(uid).close()

    async def _end_stranded(self, look: Look) -> None:
        for pod in look.stranded_pods():
            meta = pod["metadata"]
            try:
                await self._kube.delete(PODS, meta["namespace"], meta["name"], uid=meta["uid"], grace_seconds=0)
            except NotReadyError as error:
                log.warning("the pod %s/%s, whose node is gone, stays: %s", meta["namespace"], meta["name"], error)

    def _note_unread(self, stock: Stock) -> None:
        """Once of each, and again when it could be read meanwhile."""
        for namespace in sorted(set(stock.unread) - self._unread):
            log.warning(
                "the namespace %s is left out: %s; take it out of watchNamespaces, or grant the operator its Role there",
                namespace,
                stock.unread[namespace],
            )
        self._unread = set(stock.unread)
        metrics.UNREAD.set(len(self._unread))

    def _kept_of(self, uid: str) -> Kept:
        if uid not in self._kept:
            self._kept[uid] = Kept(Links(lambda: self._touch(uid), self._control), self._clock.seconds())
        return self._kept[uid]

    def _touch(self, uid: str) -> None:
        """One of its processes says something new."""
        if uid in self._kept:
            self._kept[uid].is_touched = True
        self.wake()

    async def _look_safely(self) -> None:
        """A look that fails is a look that comes again; an error of ours must not end the operator."""
        with metrics.LOOKS.time():
            try:
                await self.look()
            except NotReadyError as error:
                log.warning("%s", error)
            except Exception:
                metrics.ERRORS.inc()
                log.exception("a look at the cluster failed")

    async def _serve_safely(self, thing: Object, look: Look, kept: Kept) -> None:
        """Never raises. After an error the deployment is left alone, longer each time, until its spec changes."""
        meta, now = thing["metadata"], self._clock.seconds()
        generation = int(meta.get("generation") or 0)
        if kept.errors.waits(now) and kept.generation == generation:
            return
        try:
            await self._serve(thing, look, kept)
        except NotReadyError as error:
            log.warning("%s/%s: %s", meta["namespace"], meta["name"], error)
        except Exception as error:  # noqa: BLE001  said in status, and logged there
            kept.errors, kept.generation = kept.errors.failed(now), generation
            await self._tell(thing, error)
        else:
            kept.errors = Backoff()

    async def _tell(self, thing: Object, error: Exception) -> None:
        """The condition ReconcileError. What the user can mend is no error of ours."""
        meta = thing["metadata"]
        if isinstance(error, InvalidInputError):
            log.warning("%s/%s: %s", meta["namespace"], meta["name"], error)
        else:
            metrics.ERRORS.inc()
            log.error("%s/%s: a look at it failed", meta["namespace"], meta["name"], exc_info=error)
        reason = type(error).__name__.removesuffix("Error")
        sentence = str(error) if isinstance(error, InvalidInputError) else f"{type(error).__name__}: {error}"
        status = failed_status_object(thing, reason, sentence, self._clock.now())
        if status is None:
            return
        try:
            await self._kube.apply(status, "status")
        except NotReadyError as refusal:
            log.warning("%s/%s: its status could not be written: %s", meta["namespace"], meta["name"], refusal)

    async def _serve(self, thing: Object, look: Look, kept: Kept) -> None:
        deployment = self._readings.deployment(thing)
        self._options.tenants.check(deployment, self._options.runtime_image)
        kept.inventory = look.inventory(deployment, self._dealing.ledger)
        view = look.view(deployment, self._dealing.ledger, kept)
        if _is_too_early(view, self._clock.seconds() - kept.since):
            return
        kept.note_weighed(weighed(view))
        actions = reconcile(view)
        outdated = tuple(DeleteEpoch(number) for number in look.outdated(deployment))
        if not actions and not outdated and is_quiet(view, kept):
            kept.due_at = self._clock.seconds() + QUIET_SECONDS
        if await self._hands.carry_out((*actions, *outdated), look, view, kept):
            kept.is_touched = True
            self.wake()
        elif waits_for_its_first_plan(view, kept):
            kept.due_at = self._clock.seconds() + QUIET_SECONDS
        elif view.deployment.status.committed_epoch == 0:
            kept.due_at = max(kept.due_at, self._clock.seconds() + UNSERVED_SECONDS)


def _is_too_early(view: View, listened_seconds: float) -> bool:
    """Whether what serves has not been heard by this operator only because it has just started to listen."""
    unheard = any(not view.answers(stage.slot) for stage in view.stages()) or not view.seen.gateways
    serving = view.deployment.status.committed_epoch > 0
    return serving and unheard and listened_seconds < FIRST_ANSWERS_SECONDS


def waits_for_its_first_plan(view: View, kept: Kept) -> bool:
    """Whether only the planner's answer, or a change, can give it something to do."""
    is_asked = kept.asked is not None and not kept.asked.seconds
    return is_asked and view.newest is None and not kept.refusals and not kept.unsaid


def is_quiet(view: View, kept: Kept) -> bool:
    """Whether only a change can give it something to do, as far as that can wait for QUIET_SECONDS."""
    status = view.deployment.status
    nodes = [view.nodes.get(stage.node) for stage in view.stages()]
    return (
        status.phase == "Ready"
        and not status.exclusions
        and all(node is not None and node.away_since is None and not node.cordoned for node in nodes)
        and all(view.answers(stage.slot) for stage in view.stages())
        and kept.asked is None
        and not kept.refusals
        and not kept.unsaid
        and not any(failure.passing for failure in kept.failures.values())
    )
