"""The operator's shell: looks at the cluster, asks `reconcile` what to do for each deployment, has it done.

Woken by watch events, by statuses of slots and gateways, by plans that are done, and by a clock. Every deployment is served
in a task of its own: one that waits, breaks or is broken delays no other. Whatever nobody foresaw becomes the condition
ReconcileError of that deployment, which is left alone for a while; what is kept between two looks only saves work.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from strata_operator.act import metrics
from strata_operator.act.carry_out import Hands
from strata_operator.act.clock import SYSTEM_CLOCK, Clock
from strata_operator.act.control_client import OVER_ZEROMQ, Control, Links
from strata_operator.act.kept import Kept
from strata_operator.act.objects import failed_status_object
from strata_operator.act.observation import ControllerOptions, Look
from strata_operator.act.planners import Planner, Planners, PlanProcess
from strata_operator.api import deployment_from_object
from strata_operator.decide.actions import DeleteEpoch
from strata_operator.decide.backoff import Backoff
from strata_operator.decide.ledger import Dealing
from strata_operator.decide.reconcile import reconcile
from strata_operator.decide.view import View
from strata_operator.errors import InvalidInputError, NotReadyError
from strata_operator.observe.kube import PODS, Kube
from strata_operator.observe.snapshot import Snapshot, take_snapshot
from strata_operator.render.names import INSTANCE_LABEL
from strata_operator.render.records import epoch_number

__all__ = ["Controller", "ControllerOptions"]

log = logging.getLogger(__name__)

LOOK_EVERY_SECONDS = 5.0
LOOK_SOON_SECONDS = 0.5  # while something is to become Ready: time alone may be what a decision waits for
AT_REST = {"Ready", "Failed"}  # phases
DEBOUNCE_SECONDS = 0.1  # events come in bursts
PATIENCE_SECONDS = 2.0  # so long a look waits for slow deployments; they go on, and are not looked at twice
FIRST_ANSWERS_SECONDS = 3.0  # after its start an operator does not call a slot away before this

Object = dict[str, Any]


class Controller:
    """`wake` it after every change; `run` looks and acts while `leading()`."""

    def __init__(
        self,
        kube: Kube,
        options: ControllerOptions,
        leading: Callable[[], bool],
        planner: Planner | None = None,
        *,
        control: Control = OVER_ZEROMQ,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._kube = kube
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

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                if self._leading():
                    self._planners.warm()
                    await self._look_safely()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_SECONDS if self._is_at_rest else LOOK_SOON_SECONDS):
                        await self._woken.wait()
                await asyncio.sleep(DEBOUNCE_SECONDS)
                self._woken.clear()
        finally:
            await self.close()

    async def close(self) -> None:
        for kept in self._kept.values():
            await kept.close()
        await self._planners.close()

    async def look(self) -> None:
        """One look at everything, one round of actions for each deployment that is not still busy with its last one."""
        snapshot = await take_snapshot(self._kube, self._options.namespaces)
        self._note_unread(snapshot)
        phases = {(thing.get("status") or {}).get("phase") for thing in snapshot.deployments}
        self._is_at_rest = phases <= AT_REST
        look = Look(snapshot, self._options, self._clock)
        self._dealing.refresh(look.ledger(), _newest_numbers(snapshot), self._clock.seconds())
        served: dict[str, asyncio.Task[None]] = {}
        for thing in snapshot.deployments:
            uid = thing["metadata"]["uid"]
            if thing["metadata"].get("deletionTimestamp"):
                continue
            kept = self._kept_of(uid)
            if kept.task is None or kept.task.done():
                kept.task = asyncio.create_task(self._serve_safely(thing, look, kept))
            served[uid] = kept.task
        for uid in set(self._kept) - set(served):
            self._planners.drop(uid)
            await self._kept.pop(uid).close()
        if served:
            await asyncio.wait(served.values(), timeout=PATIENCE_SECONDS)
        for pod in snapshot.stranded_pods(self._options.namespaces):
            meta = pod["metadata"]
            try:
                await self._kube.delete(PODS, meta["namespace"], meta["name"], uid=meta["uid"], force=True)
            except NotReadyError as error:
                log.warning("the pod %s/%s, whose node is gone, stays: %s", meta["namespace"], meta["name"], error)
        metrics.count_phases(snapshot.deployments)

    def _note_unread(self, snapshot: Snapshot) -> None:
        """Once of each, and again when it could be read meanwhile."""
        for namespace in sorted(set(snapshot.unread) - self._unread):
            log.warning(
                "the namespace %s is left out: %s; take it out of watchNamespaces, or grant the operator its Role there",
                namespace,
                snapshot.unread[namespace],
            )
        self._unread = set(snapshot.unread)
        metrics.UNREAD.set(len(self._unread))

    def _kept_of(self, uid: str) -> Kept:
        if uid not in self._kept:
            self._kept[uid] = Kept(Links(self.wake, self._control), self._clock.seconds())
        return self._kept[uid]

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
        deployment = deployment_from_object(thing)
        self._options.tenants.check(deployment, self._options.runtime_image)
        view = look.view(deployment, self._dealing.ledger, kept)
        if _is_too_early(view, self._clock.seconds() - kept.since):
            return
        actions = reconcile(view)
        outdated = tuple(DeleteEpoch(number) for number in look.outdated(deployment))
        if await self._hands.carry_out((*actions, *outdated), look, view, kept):
            self.wake()


def _is_too_early(view: View, listened_seconds: float) -> bool:
    """Whether what serves has not been heard by this operator only because it has just started to listen."""
    unheard = any(not view.answers(stage.slot) for stage in view.stages()) or not view.seen.gateways
    serving = view.deployment.status.committed_epoch > 0
    return serving and unheard and listened_seconds < FIRST_ANSWERS_SECONDS


def _newest_numbers(snapshot: Snapshot) -> dict[str, int]:
    """The highest epoch on record of each deployment, by its uid."""
    metas = [each["metadata"] for each in snapshot.deployments]
    owners = {(meta["namespace"], meta["name"]): meta["uid"] for meta in metas}
    numbers = dict.fromkeys(owners.values(), 0)
    for config_map in snapshot.config_maps:
        meta = config_map["metadata"]
        owner = owners.get((meta.get("namespace"), (meta.get("labels") or {}).get(INSTANCE_LABEL)))
        if owner is not None:
            numbers[owner] = max(numbers[owner], epoch_number(config_map))
    return numbers
