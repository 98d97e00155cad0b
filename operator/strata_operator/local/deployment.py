"""A plan as local processes: starts its slots and a gateway, drives the epochs, replaces what dies.

Called by `strata up` and the demo: `async with LocalDeployment(...) as deployment`, then `await deployment.ready()` and
`await deployment.supervise()`. It is the controller of its deployment: what it records lives and ends with this process, and
so does every process it started.
"""

import asyncio
import logging
import subprocess
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from strata_operator.act.control_client import Endpoint, Links, as_kind
from strata_operator.act.order_giving import OrderGiving
from strata_operator.decide.backoff import Backoff
from strata_operator.decide.epochs import (
    CreateEpoch,
    Ledger,
    Observed,
    PlanWithout,
    RecordCommit,
    SendToGateway,
    SendToSlot,
    Step,
    hung_slots,
    is_ready,
    next_steps,
    slots_of,
    to_be_formed,
    unheard,
)
from strata_operator.decide.formation import is_broken_again
from strata_operator.decide.parts import waiting
from strata_operator.decide.standing_orders import OrderTerms, carried_out
from strata_operator.local import launcher as launching
from strata_operator.local.errors import CrashedError, RefusedError
from strata_operator.local.launcher import LAUNCHER_LOG, Launcher, begin
from strata_operator.local.losses import Down, Losses
from strata_operator.local.mending import Mender, told
from strata_operator.local.phases import Phases, phase_of
from strata_operator.local.ports import check_port, until_listening
from strata_operator.local.progress import Progress
from strata_operator.local.services import HOST, GatewayService, Service, SlotService
from strata_operator.render.epoch import Epoch
from strata_operator.render.records import Weighed
from strata_planner.contract.control import STEP_TIMEOUT_SECONDS, Commit, GatewayStatus, SlotStatus
from strata_planner.contract.keys import gateway_secret, new_secret, slot_secret
from strata_planner.contract.plan import Plan
from strata_planner.contract.processors import Division
from strata_planner.contract.roles import roles_of
from strata_planner.replan.repair import Repair

log = logging.getLogger(__name__)

EPOCHS_AT_ONCE = 8  # so many new epochs of one plan in `EPOCH_SECONDS` are made without a pause
EPOCH_SECONDS = 20.0
LOOK_SECONDS = 5.0  # while slots load, whether they get any further
LOSS_SECONDS = 0.5  # the same while slots are away
RETRY_SECONDS = 10.0  # before a slot that others have taken over is started again, twice as long each time
REPEAT_SECONDS = 0.2  # before the same steps are tried once more


@dataclass(frozen=True, slots=True)
class Programs:
    """What is started: the runtime's modules, by name, and where slots listen that do so elsewhere than at the loopback address. Tests put others here."""

    launcher: Sequence[str] = launching.COMMAND
    slot: str = "strata_runtime.slot.__main__"
    gateway: str = "strata_runtime.gateway.__main__"
    hosts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """How a plan is run on this machine."""

    served_model_name: str
    logs: Path
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys_file: Path | None = None
    page_flags: Sequence[str] = ()  # of the gateway, for web pages
    threads: Mapping[str, int] = field(default_factory=dict)  # by slot; absent: one
    divisions: Mapping[str, Division] = field(default_factory=dict)  # of the machine, by slot; absent: not divided
    prepare_timeout_seconds: float = 1800.0  # so long a slot may load without getting any further
    step_timeout_seconds: float = STEP_TIMEOUT_SECONDS  # so long a step may always be still
    programs: Programs = Programs()
    verify: bool = True  # what slots read of any-precision copies
    mender: Mender | None = None  # None: a slot that ends again and again ends the deployment
    orders: OrderTerms | None = None  # of standing orders, where the plan has any

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Begun:
    """What of a start lies before its deployment: a launcher that imports already, and the phases that are counted."""

    launcher: subprocess.Popen[bytes] | None = None
    phases: Phases | None = None


class LocalDeployment:
    """The controller and supervisor of one plan. `progress` is called after every change."""

    def __init__(
        self,
        plan: Plan,
        options: LocalOptions,
        progress: Callable[[], None] = lambda: None,
        begun: Begun | None = None,
    ) -> None:
        self.plan = plan
        self._begun = begun or Begun()
        self.options = options
        self._progress = progress
        self._changed = asyncio.Event()
        self._links = Links(self._changed.set)
        self._ledger = Ledger()
        self._orders = OrderGiving()
        self._epochs_made: list[float] = []
        self._loading = Progress(options.prepare_timeout_seconds)
        self._ready = asyncio.Event()
        self._was_ready = False
        self._not_ready_since = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []
        self._launcher: Launcher | None = None
        self._improving: asyncio.Task[tuple[Plan, Plan]] | None = (
            None  # a better plan than the one that serves is looked for
        )
        self._may_improve = False  # by a plan that was not looked for yet
        self._losses = Losses()
        self._foretold: tuple[Plan, frozenset[str], Repair | None] | None = None  # what a loss would come to
        self._weighed: Weighed | None = None
        self._changed_to = 1  # the epoch whose cost was told last
        self._slots, self._gateway = _make_services(plan, options, new_secret())

    async def __aenter__(self) -> Self:
        check_port(self.options.host, self.options.port)
        process = self._begun.launcher or begin(self.options.logs / LAUNCHER_LOG, self.options.programs.launcher)
        self._launcher = launcher = Launcher(process)
        self._tasks = [asyncio.create_task(self._keep_alive(service, launcher)) for service in self._services()]
        self._tasks.append(asyncio.create_task(self._control()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End everything that was started, however this came about."""
        tasks: list[asyncio.Task[Any]] = [*self._tasks, *([self._improving] if self._improving else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._links.close()
        if self._launcher is not None:
            # What has not answered anybody yet holds nothing that is worth waiting for.
            await self._launcher.close(at_once=not self._was_ready)

    async def ready(self) -> None:
        """Returns once the deployment answers requests. Raises LocalError if it never will."""
        await self._or_failure(self._ready.wait())

    async def supervise(self) -> None:
        """Runs until cancelled. Raises LocalError when the deployment cannot be kept alive."""
        await self._or_failure(asyncio.Event().wait())

    @property
    def slot_statuses(self) -> dict[str, SlotStatus]:
        return as_kind(self._links.statuses, SlotStatus)

    @property
    def gateway_status(self) -> GatewayStatus | None:
        """Of the gateway, while it answers."""
        return next(iter(as_kind(self._links.statuses, GatewayStatus).values()), None)

    @property
    def slot_endpoints(self) -> dict[str, Endpoint]:
        """Control ports of the slots that run now."""
        return {name: slot.control for name, slot in self._slots.items() if slot.control}

    @property
    def pids(self) -> dict[str, int]:
        """Name -> process id of everything that runs now."""
        return {service.name: service.pid for service in self._services() if service.control}

    def _services(self) -> list[Service]:
        return [*self._slots.values(), self._gateway]

    async def _or_failure(self, wanted: Coroutine[Any, Any, object]) -> None:
        """Wait for it as long as nothing fails, nor has failed while nobody waited."""
        waiting = asyncio.create_task(wanted)
        ended: set[asyncio.Task[Any]] = set()
        try:
            while not waiting.done():
                done, _ = await asyncio.wait({waiting, *self._tasks} - ended, return_when=asyncio.FIRST_COMPLETED)
                for task in done:  # of a slot that others took over there is nothing to say
                    task.result()
                ended |= done
        finally:
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                await waiting

    def _look_at(self, service: Service) -> None:
        """Its process has started or ended. What one that has ended said last is forgotten before there is another: at the same port it would pass for its word."""
        if service.control is None:
            self._links.forget(service.name)
        self._changed.set()

    async def _keep_alive(self, service: Service, launcher: Launcher) -> None:
        """As long as that is of use. A slot that ends again and again is taken over by the others, and tried again later."""
        retries = Backoff()
        while True:
            try:
                await service.keep_alive(launcher, lambda: self._look_at(service))
            except CrashedError:
                if service is self._gateway or not self._lets_go(service.name):
                    raise
            now = time.monotonic()
            retries = (retries if now - retries.until < RETRY_SECONDS else Backoff()).failed(now, RETRY_SECONDS)
            await asyncio.sleep(retries.until - now)

    def _lets_go(self, slot: str) -> bool:
        """Whether the deployment serves without it."""
        return slot in self._losses.away or self._take_over(frozenset({slot}))

    def _take_over(self, slots: frozenset[str]) -> bool:
        """The others get the layers of these, if there is anybody who can have them and anything was ever served."""
        mender = self.options.mender
        if mender is None or not (self._was_ready or self._in_use()):
            return False
        if needed := slots & slots_of(self.plan):
            found = self._repair_without(mender, needed)
            if found is None:
                return False
            log.warning("%s", told(found, needed))
            mender.lose(self.plan, slots)
            self.plan, self._may_improve = found.plan, True
        else:
            mender.lose(self.plan, slots)
        self._losses = self._losses.taken_over(slots)
        self._changed.set()
        return True

    def _repair_without(self, mender: Mender, slots: frozenset[str]) -> Repair | None:
        known = self._foretold
        if known is None or known[0] is not self.plan or known[1] != slots:
            known = self._foretold = (self.plan, slots, mender.repaired(self.plan, slots))
        return known[2]

    def _weigh(self) -> None:
        """Slots whose process has ended are started again as ever; the others take over where that costs users less."""
        mender, now = self.options.mender, time.monotonic()
        self._losses = self._losses.seen(self.slot_statuses, now)
        there = [self._slots[slot] for slot in slots_of(self.plan)]
        gone = [slot for slot in there if slot.ended_at and not slot.has_served]
        down = {slot.name: Down(now - slot.ended_at, slot.failed) for slot in gone if slot.ended_at}
        if mender is None or not self._was_ready or not down or len(down) == len(there):
            self._weighed = None
            return
        found = self._repair_without(mender, frozenset(down))
        choice = None if found is None else self._losses.weighed(self.plan, found, down)
        if choice is not None and (self._weighed is None or choice.chosen != self._weighed.chosen):
            seconds = (
                f"a restart takes {choice.restart_seconds:g} s, a takeover {choice.takeover_seconds:g} s, as predicted"
            )
            log.warning("%s: %s: %s", " and ".join(sorted(down)), seconds, choice.chosen)
        self._weighed = choice
        if choice is not None and choice.chosen == "takeover":
            self._take_over(frozenset(down))

    def _regain(self) -> None:
        """Slots that were taken over and stay are planned with again."""
        mender, back = self.options.mender, self._losses.back(time.monotonic())
        for slot in sorted(back) if mender else ():
            assert mender is not None
            log.info("%s is there again", slot)
            mender.regain(slot)
            self._slots[slot].ended_at = None  # it serves nothing that anybody would wait for
            self._may_improve = True
        self._losses = self._losses.without(back)

    def _improve(self) -> None:
        """While a repair serves, or since a slot is there again, a better plan is looked for, in a thread of its own; it is taken if it gains enough."""
        mender = self.options.mender
        if self._improving is not None and self._improving.done():
            (asked, found), self._improving = self._improving.result(), None
            if asked is self.plan and not slots_of(found) & set(self._losses.away):
                self.plan = found
                self._changed.set()  # the steps of this look are those of the plan before
            else:
                self._may_improve = True
        if self._improving is None and mender is not None and self._may_improve and self._ready.is_set():
            self._may_improve = False
            self._improving = asyncio.create_task(asyncio.to_thread(_improved, mender, self.plan))
            self._improving.add_done_callback(lambda _: self._changed.set())

    async def _control(self) -> None:
        """Look, act, wait for a change."""
        steps: tuple[Step, ...] = ()
        while True:
            self._changed.clear()
            self._links.follow({service.name: service.control for service in self._services() if service.control})
            self._record_order()
            seen = self._observed()
            before, steps = steps, next_steps(self.plan, self._ledger, seen)
            self._end_hung()
            await self._say_ready()
            await self._give_orders()
            self._weigh()
            self._regain()
            self._improve()
            self._tell_cost()
            self._tell_phase()
            self._progress()
            if steps:
                await asyncio.sleep(REPEAT_SECONDS if steps == before else 0)
                await asyncio.gather(*(self._do(step, seen) for step in steps))
            else:
                await self._wait()

    def _record_order(self) -> bool:
        """What gateway and slots have done by themselves while this process was stopped is gone on from. Whether there was anything."""
        served = carried_out(self._ledger, self._observed())
        if served is None:
            return False
        number = served.epoch.number
        what = (
            f"{', '.join(served.lost)} was lost, and the others took over" if served.lost else "slots were formed anew"
        )
        log.warning("epoch %d was made by a standing order while nobody controlled the deployment: %s", number, what)
        self._ledger = self._ledger.with_newest(served.epoch).with_commit(number)
        return True

    async def _give_orders(self) -> None:
        epoch, terms = self._ledger.newest, self.options.orders
        if terms is not None and epoch is not None and epoch.has_orders and not self._is_loading:
            await self._orders.give(self._links, epoch, self._observed(), terms)

    def _tell_cost(self) -> None:
        """Of a change of epoch, once nobody waits for it any more."""
        for change in self.gateway_status.changes if self.gateway_status else ():
            if change.held and change.epoch > self._changed_to:
                log.info(
                    "epoch %d: %d requests waited, %d were lost; the longest pause between two tokens was %.0f ms; %d tokens were computed again, and %d in lost layers",
                    change.epoch,
                    change.held,
                    change.lost,
                    1e3 * change.pause_seconds,
                    change.recomputed_tokens,
                    change.refilled_tokens,
                )
            self._changed_to = max(self._changed_to, change.epoch)

    def _tell_phase(self) -> None:
        if self._begun.phases is not None and self._launcher is not None:
            forks = self._launcher.has_imported
            self._begun.phases.enter(phase_of(self.plan, self._ledger, self._observed(), forks=forks))

    async def _wait(self) -> None:
        """For a change; while slots load or are away, not for long. Raises RefusedError for one that gets no further."""
        newest = self._ledger.newest if self._is_loading else None
        stalled = self._loading.stalled(newest, self.slot_statuses, time.monotonic())
        if stalled:
            raise RefusedError(stalled)
        looks = [min(LOOK_SECONDS, self.options.prepare_timeout_seconds / 4)] if newest else []
        looks += [LOSS_SECONDS] if self._weighed else []
        if (until_back := self._losses.next_look(time.monotonic())) is not None:
            looks.append(until_back)
        with suppress(TimeoutError):
            async with asyncio.timeout(min(looks, default=None)):
                await self._changed.wait()

    @property
    def _is_loading(self) -> bool:
        """Whether slots have to prepare the newest epoch still."""
        newest = self._ledger.newest
        return newest is not None and (
            self._ledger.committed < newest.number or bool(waiting(newest, self.slot_statuses))
        )

    def _observed(self) -> Observed:
        addresses = {name: slot.address for name, slot in self._slots.items() if slot.address is not None}
        return Observed(
            slots=self.slot_statuses, gateways=as_kind(self._links.statuses, GatewayStatus), addresses=addresses
        )

    async def _do(self, step: Step, seen: Observed) -> None:
        """`seen`: what the step was decided on."""
        match step:
            case CreateEpoch():
                if self._ledger.committed and not await self._all_answer(step.plan, seen):
                    return  # one has just died: it is started again first
                if self._record_order():
                    return  # nobody had said so yet: what they said last is as old as this process has been stopped
                await self._pace(step)
                log.info("epoch %d: %s", step.number, step.reason)
                epoch = Epoch(step.number, new_secret(), step.plan, step.formations)
                self._ledger = self._ledger.with_newest(epoch)
            case RecordCommit(number=number):
                self._ledger = self._ledger.with_commit(number)
            case SendToSlot(slot=name, message=message):
                await self._links.send(name, message)
                if isinstance(message, Commit):
                    self._check_switch(name, message.epoch)
            case SendToGateway(gateway=name, message=route):
                await self._links.send(name, route)
            case PlanWithout(slot=slot, reason=reason):
                self._without_refused(slot, f"slot {slot} refused its part of the plan: {reason}")

    def _without_refused(self, slot: str, refusal: str) -> None:
        """The others take over, if anything is served. Raises RefusedError if that is not so."""
        if slot in self._losses.away:
            return
        if not self._lets_go(slot):
            raise RefusedError(refusal)
        log.warning("%s", refusal)
        self._losses = self._losses.with_refusal(slot)

    async def _all_answer(self, plan: Plan, seen: Observed) -> bool:
        """Whether every slot does that is to be formed anew and seemed to. One that has ended since then does not; one that ends while it is asked is not waited for."""
        wanted = to_be_formed(plan, self._ledger, seen)
        asking = asyncio.create_task(self._links.all_answer(wanted))
        while not asking.done() and all(self._slots[slot].control for slot in wanted):
            self._changed.clear()
            news = asyncio.create_task(self._changed.wait())
            await asyncio.wait([asking, news], return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
        if asking.done():
            return asking.result()
        asking.cancel()
        return False

    def _check_switch(self, slot: str, epoch: int) -> None:
        """A slot that cannot switch (a port was taken meanwhile) is started anew, at other ports if it happens again."""
        status = self.slot_statuses.get(slot)
        if status and status.failure and status.prepare.epoch == epoch != status.committed_epoch:
            log.warning("slot %s cannot switch to epoch %d: %s", slot, epoch, status.failure)
            self._slots[slot].kill()

    def _end_hung(self) -> None:
        """A slot that served, whose process lives and whom nobody hears any more, neither this process nor its neighbours in the epoch in force:
        it is stopped or stuck, and is started anew. Whoever only computes for long is heard by its neighbours. And one that says itself that a step hangs.
        """
        epoch = self._ledger.newest
        for name, why in (hung_slots(epoch, self._observed()) if epoch else {}).items():
            if self._slots[name].kill_once(self.slot_statuses[name].incarnation):
                log.warning("slot %s hangs, and is started anew: %s", name, why)
        for name in unheard(self._ledger, self._observed()) & set(self._slots):
            if self._slots[name].has_served:
                log.warning("slot %s lives and does not answer; it is started anew", name)
                self._slots[name].kill()

    async def _pace(self, step: CreateEpoch) -> None:
        """The first epochs at once; if they keep breaking, one by one with a pause between. A replica that breaks for the first time waits for no other one."""
        now, newest = time.monotonic(), self._ledger.newest
        if newest is not None and not is_broken_again(newest, step.formations):
            self._epochs_made = []
        self._epochs_made = [made for made in self._epochs_made if now - made < EPOCH_SECONDS] + [now]
        if len(self._epochs_made) > EPOCHS_AT_ONCE:
            log.warning("%d epochs in %g s did not last; pausing", len(self._epochs_made), EPOCH_SECONDS)
            await asyncio.sleep(EPOCH_SECONDS / EPOCHS_AT_ONCE)

    def _in_use(self) -> set[str]:
        """The gateway, and slots of replicas that it leads to, while others load."""
        newest, gateway = self._ledger.newest, self.gateway_status
        if newest is None or gateway is None or gateway.epoch != newest.number or not gateway.leaders_connected:
            return set()
        serving = {name for name, status in self.slot_statuses.items() if status.committed_epoch == newest.number}
        return {self._gateway.name, *serving}

    async def _say_ready(self) -> None:
        ready = is_ready(self.plan, self._ledger, self._observed())
        serving = {*slots_of(self.plan), self._gateway.name} if ready else self._in_use()
        for service in self._services():
            service.has_served = service.has_served or service.name in serving
        if ready and not self._ready.is_set():
            await until_listening(self.options.host, self.options.port)
            log.info("ready in %.1f s", time.monotonic() - self._not_ready_since)
            self._ready.set()
            self._was_ready = True
        elif not ready and self._ready.is_set():
            self._not_ready_since = time.monotonic()
            self._ready.clear()


def _improved(mender: Mender, plan: Plan) -> tuple[Plan, Plan]:
    """The plan that was asked about, and what was found."""
    return plan, mender.improved(plan)


def _make_services(
    plan: Plan, options: LocalOptions, control_secret: str
) -> tuple[dict[str, SlotService], GatewayService]:
    """Each with a key of its own: no process can speak to another as this one does."""
    modules, logs = options.programs, options.logs
    slots = {}
    for name, roles in sorted(roles_of(plan).items()):
        ranks = max(role.tensor_parallel for role in roles)
        secret, flags = slot_secret(control_secret, name), _slot_flags(options, name, ranks)
        slots[name] = SlotService(name, modules.slot, logs, secret, roles=len(roles), flags=flags)
        slots[name].host = modules.hosts.get(name, HOST)
    secret = gateway_secret(control_secret)
    return slots, GatewayService(modules.gateway, logs, secret, _gateway_arguments(plan, options))


def _slot_flags(options: LocalOptions, slot: str, ranks: int) -> list[str]:
    sizes = ["--threads", str(options.threads.get(slot, 1)), *(("--ranks", str(ranks)) if ranks > 1 else ())]
    if options.step_timeout_seconds != STEP_TIMEOUT_SECONDS:
        sizes += ["--step-timeout", f"{options.step_timeout_seconds:g}"]
    division = options.divisions.get(slot)
    devices = [] if division is None else ["--devices", f"{division.first}/{division.devices}"]
    return [*sizes, *devices] + ["--no-verify"] * (not options.verify)


def _gateway_arguments(plan: Plan, options: LocalOptions) -> list[str]:
    keys = ["--api-keys-file", str(options.api_keys_file)] if options.api_keys_file else []
    return [
        *("--host", options.host, "--port", str(options.port)),
        *("--model-uri", plan.model_uri, "--served-model-name", options.served_model_name),
        *keys,
        *options.page_flags,
    ]
