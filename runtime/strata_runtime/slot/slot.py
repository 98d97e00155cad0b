"""A slot: the process that holds the devices of one product on one node and runs the roles it is given.

Started without a role: `python -m strata_runtime.slot --name S ...` (`__main__`), by pods under the name that every release has (`strata_runtime.pipeline.slot`).
It learns its roles by `prepare`, serves them from `commit` on, and tells its whole status at every change. The main thread
is the control loop; each role's worker computes in a thread of its own. Knows nothing of Kubernetes.
"""

import logging
import secrets
import socket as sockets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import zmq

from strata_planner.contract.control import (
    CONTROL_PROTOCOL,
    LARGEST_CONTROL_BYTES,
    STEP_TIMEOUT_SECONDS,
    CarryOut,
    Commit,
    CommitOrder,
    GetStatus,
    HungStep,
    Prepare,
    PrepareState,
    SetBits,
    SlotRequest,
    SlotStatus,
    Watch,
    encode,
    slot_request_decoder,
)
from strata_planner.contract.decoding import decode_message
from strata_planner.contract.moves import taken_from
from strata_planner.contract.processors import UNDIVIDED, Division
from strata_planner.contract.roles import Role
from strata_planner.contract.values import ContractError
from strata_runtime.errors import InputError, reason_of
from strata_runtime.slot.binding import Binding
from strata_runtime.slot.deadline import LOAD_TIMES, Deadline
from strata_runtime.slot.epoch import LoadedRole, Place, PreparedEpoch, RunningEpoch, changed_roles
from strata_runtime.slot.finishing import Finishing
from strata_runtime.slot.giver import Giver
from strata_runtime.slot.kept_pages import KeptRole, leaving
from strata_runtime.slot.memory import MemoryMeter, private_bytes
from strata_runtime.slot.ordered import Ordering, received
from strata_runtime.slot.other_ranks import held_by_ranks, idle_of_ranks
from strata_runtime.slot.prepare import Held, Loading
from strata_runtime.slot.room import bytes_beside, is_on_processors, not_held, shadows_beside, usable_bytes
from strata_runtime.slot.shadowing import Shadowing
from strata_runtime.slot.switching import Switches
from strata_runtime.slot.took import FirstLoad
from strata_runtime.slot.wakeup import Wakeup
from strata_runtime.stage.handover import Pages
from strata_runtime.wire.transport import Keys, listen

log = logging.getLogger(__name__)

# Between looks at what nothing tells of by itself: steps that do not get on, links that never came about.
LOOP_MILLISECONDS = 250
LET_GO_SECONDS = 0.25
NO_PREPARE = PrepareState(epoch=0, phase="none")


@dataclass(frozen=True, slots=True)
class SlotOptions:
    """What a slot is told at start; its data and request ports come with each prepare."""

    name: str
    host: str
    control_port: int
    control_key: str
    threads: int
    verify: bool = True  # planes, as they are read
    ranks: int = 1  # devices that may share a stage here
    division: Division = UNDIVIDED  # of this machine into devices, where its processors are some
    step_timeout: float = STEP_TIMEOUT_SECONDS  # that a step may always be still; 0: for ever
    start_seconds: float = 0.0  # that its process has taken until it is made


class Slot:
    """Roles by prepare, service by commit, whole statuses to whoever watches."""

    def __init__(self, options: SlotOptions) -> None:
        self._name = options.name
        self._verify = options.verify
        self._incarnation = secrets.token_hex(8)
        self._memory = MemoryMeter(lambda: private_bytes() + held_by_ranks())
        self._idle_bytes = private_bytes()
        self._loading: Loading | None = None
        self._unused: Loading | None = (
            None  # prepared for an epoch that could not begin: what it holds may be wanted again
        )
        self._asked: Prepare | None = None  # what is being prepared, with the roles that go on
        self._running: RunningEpoch | None = None
        self._finishing: Finishing | None = None
        self._ended: RunningEpoch | None = None  # its weights are let go of when the next one runs: that takes a while
        self._switched = 0.0
        self._kept: list[KeptRole] = []  # of roles that have ended, for those of the next epoch
        self._giver: Giver | None = None  # of pages, to other slots
        self._failure = ""
        self._first_load = FirstLoad(options.start_seconds)
        self._load = Deadline(LOAD_TIMES * options.step_timeout, 0.0)
        self._hung_load: tuple[HungStep, ...] = ()
        self._told: tuple[HungStep, ...] = ()  # of steps that do not get on, as the log has them
        self._watchers: set[bytes] = set()
        self._published: SlotStatus | None = None
        self._wakeup = Wakeup()
        self._switches = Switches(self._wakeup.ring)
        self._shadowing = Shadowing(self._wakeup.ring)
        self._stopping = False
        self._ordering = Ordering(options.name, options.control_key)
        self._context: zmq.Context[Any] = zmq.Context()
        self._control = self._context.socket(zmq.ROUTER)
        self._control.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a peer that is gone is told, not left out silently
        self._bind = _bindable(options.host)
        endpoint = f"tcp://{self._bind}:{options.control_port}"
        listen(self._control, endpoint, Keys.of(options.control_key), LARGEST_CONTROL_BYTES, self._ordering.keys)
        binding = Binding.here(options.division)
        self._place = Place(
            options.name, self._incarnation, self._bind, self._wakeup.ring, binding, options.step_timeout
        )
        self._poller = zmq.Poller()
        self._polled: tuple[zmq.Socket[Any], ...] | None = None

    def run(self) -> None:
        """Serve until `stop`."""
        try:
            while not self._stopping:
                self._poll_too(tuple(link.monitor for link in self._running.links) if self._running else ())
                self._poller.poll(LOOP_MILLISECONDS)
                self._wakeup.clear()
                self._answer()
                self._let_go()
                self._watch_links()
                self._finish()
                self._watch_progress()
                if self._loading is not None and self._loading.state.phase == "refused":
                    self._shadowing.resume()
                self._publish()
        finally:
            self._end_roles()
            self._shadowing.close()
            for loading in (self._loading, self._unused):
                if loading is not None:
                    loading.leave()
            if self._giver is not None:
                self._giver.close(gives=True)
            self._switches.close()
            self._context.destroy(linger=0)
            self._wakeup.close()

    def _poll_too(self, monitors: tuple[zmq.Socket[Any], ...]) -> None:
        """Links tell of a loss at once. Those of an epoch that has ended are closed: none is polled again."""
        if self._polled == monitors:
            return
        self._poller, self._polled = zmq.Poller(), monitors
        for each in (self._control, self._wakeup.reader, *monitors):
            self._poller.register(each, zmq.POLLIN)

    def stop(self) -> None:
        self._stopping = True
        self._wakeup.ring()

    def status(self, *, fresh: bool = True) -> SlotStatus:
        """`fresh`: with the memory that is held now; else with a figure that may be some seconds old."""
        return self._with_memory(self._essence(), fresh=fresh)

    def _with_memory(self, status: SlotStatus, *, fresh: bool) -> SlotStatus:
        roles = self._running.stats() if self._running else ()
        memory, shadow = self._memory.value(fresh=fresh), self._shadowing.state()
        return msgspec.structs.replace(status, private_bytes=memory, roles=roles, shadow=shadow)

    def _essence(self) -> SlotStatus:
        """All of the status but its counters."""
        return SlotStatus(
            slot=self._name,
            incarnation=self._incarnation,
            committed_epoch=self._running.epoch if self._running else 0,
            prepare=self._loading.state if self._loading else NO_PREPARE,
            lost_peers=self._running.lost_peers if self._running else (),
            private_bytes=0,
            idle_bytes=self._idle_bytes + idle_of_ranks(),
            roles=(),
            failure=self._failure or (self._running.failure if self._running else ""),
            switches=self._switches.states,
            protocol=CONTROL_PROTOCOL,
            shadow=self._shadowing.state(fresh=False),
            hung=(self._running.hung if self._running else ()) + self._hung_load,
            overdue=self._running.overdue if self._running else (),
            took=self._first_load.look(self._loading.state if self._loading else NO_PREPARE, time.monotonic()),
        )

    def _answer(self) -> None:
        while frames := received(self._control):
            identity, *rest = (frame.bytes for frame in frames)
            try:
                request = decode_message(slot_request_decoder, rest, LARGEST_CONTROL_BYTES)
            except ContractError as error:
                log.warning("control: %s", error)
                continue
            if not self._ordering.lets(str(frames[-1].get("User-Id")), request):
                continue
            try:
                self._handle(request, identity)
            except Exception as error:  # what was asked for cannot be done; who asked reads why in the status
                log.exception("control: %s failed", type(request).__name__)
                self._fail(f"{type(request).__name__}: {reason_of(error)}")
            if self._finishing is not None and isinstance(request, Commit | CommitOrder):
                self._finishing.asking.add(identity)
            else:
                self._send(identity, encode(self.status(fresh=isinstance(request, GetStatus))))

    def _handle(self, request: SlotRequest, identity: bytes) -> None:
        match request:
            case Prepare():
                self._prepare(request)
            case Commit(epoch=epoch):
                self._commit(epoch)
            case SetBits():
                self._set_bits(request)
            case CarryOut():
                if prepare := self._ordering.prepare_of(request, self._running.epoch if self._running else 0):
                    self._prepare(prepare)
            case CommitOrder(epoch=epoch) if epoch == self._ordering.number:
                self._commit(epoch)
            case Watch():
                self._watchers.add(identity)

    def _prepare(self, prepare: Prepare) -> None:
        """Idempotent: an epoch that is known is not loaded twice, a lower one is out of date."""
        self._finish(now=True)
        known = max(self._loading.prepare.epoch if self._loading else 0, self._running.epoch if self._running else 0)
        if prepare.epoch <= known or not self._can_go_on(prepare):
            return
        self._ended = None
        before = self._loading or self._unused
        if before is not None:
            before.supersede(changed_roles(prepare))
        ending = self._running.ending(prepare) if self._running else ()
        for role in ending:
            role.keep_bits(f"epoch {prepare.epoch} is being prepared: its plan decides the bits")
        held = tuple(role.held() for role in ending)
        idle = self._make_room(prepare, held)
        self._shadowing.pause(shadows_beside(prepare, () if idle else held, self._shadowing.shadow.held_bytes))
        log.info("%s: preparing epoch %d: %s", self._name, prepare.epoch, _summary(prepare))
        self._asked = prepare
        changed = changed_roles(prepare)
        if idle:
            self._shrink_kept(changed.roles)
        self._give(prepare, [] if idle else [role.pages() for role in ending if not role.failure])
        giving = (*(each.role for each in self._kept), *(() if idle else (each.role for each in held)))
        held_now = Held(held, before, idle=idle, giving=giving, shadow=self._shadowing.shadow)
        self._loading = Loading(changed, held_now, self._wakeup.ring, verify=self._verify, binding=self._place.binding)
        self._unused = None

    def _give(self, prepare: Prepare, pages: Sequence[Pages]) -> None:
        """To other slots, from now on, where they are told to ask for pages."""
        if self._giver is not None:
            self._giver.close()
            self._giver = None
        if prepare.giving is None:
            return
        try:
            self._giver = Giver(self._bind, prepare.giving, prepare.epoch, pages)
        except InputError as error:  # others compute again what they would have got
            log.warning("%s: no pages are given in epoch %d: %s", self._name, prepare.epoch, error)

    def _can_go_on(self, prepare: Prepare) -> bool:
        """Whether all that is to run on from earlier epochs runs here. If not, the status shows it, and the controller makes another epoch."""
        going_on = self._running.going_on(prepare) if self._running else {}
        missing = [
            place
            for place in range(len(prepare.roles))
            if prepare.formed_in(place) != prepare.epoch and place not in going_on
        ]
        if missing:
            role = prepare.roles[missing[0]]
            log.warning(
                "%s: epoch %d is not prepared: replica %d stage %d of epoch %d, which is to go on, does not run here",
                *(self._name, prepare.epoch, role.replica, role.stage, prepare.formed_in(missing[0])),
            )
        return not missing

    def _make_room(self, prepare: Prepare, held: Sequence[LoadedRole]) -> bool:
        """Stop serving before loading if weights of the roles that are `held`, which end, and what the new ones need beside them do not fit together.
        Whether none of the old serves.
        """
        if held and not_held(prepare, held) and bytes_beside(prepare, held) > usable_bytes(prepare):
            log.info(
                "%s: %d role(s) end now: their weights and those of the next do not fit together", self._name, len(held)
            )
            self._end_roles(prepare)
            return True
        return not held

    def _shrink_kept(self, changed: Sequence[Role]) -> None:
        """To what the next roles take of it: they load beside it."""
        sources = taken_from([each.role for each in self._kept], changed)
        self._kept = [self._kept[source].shrunk(changed[place]) for place, source in sources.items()]

    def _commit(self, epoch: int) -> None:
        """Switch if that epoch is prepared and newer, once the steps under way have ended; anything else changes nothing and shows in the status."""
        current = self._running.epoch if self._running else 0
        if self._prepared_for(epoch) is not None and epoch > current:
            if self._finishing is None or self._finishing.epoch != epoch:
                self._finishing = Finishing(epoch)
            self._finish()

    def _prepared_for(self, epoch: int) -> tuple[Loading, PreparedEpoch, Prepare] | None:
        loading, asked = self._loading, self._asked
        prepared = loading.result if loading else None
        if loading is None or prepared is None or asked is None or asked.epoch != epoch:
            return None
        return loading, prepared, asked

    def _finish(self, *, now: bool = False) -> None:
        """Switch to what has been committed, if no step is worth waiting for any more. `now`: whatever they are worth."""
        finishing = self._finishing
        ready = finishing and self._prepared_for(finishing.epoch)
        if finishing is None or not ready:
            return
        ending = self._running.ending(ready[2]) if self._running else ()
        if now or finishing.is_over(ending):
            self._finishing = None
            self._switch(*ready)
            for identity in finishing.asking:
                self._send(identity, encode(self.status(fresh=False)))

    def _let_go(self) -> None:
        """Of the weights of roles that have ended, once streams go on: while they are given back nothing else of this process runs."""
        if self._ended is not None and time.monotonic() > self._switched + LET_GO_SECONDS:
            self._ended = None

    def _switch(self, loading: Loading, prepared: PreparedEpoch, asked: Prepare) -> None:
        self._ended, self._switched = self._running, time.monotonic()
        self._end_roles(asked)
        self._failure = ""
        kept, self._kept = self._kept, []
        if self._giver is not None:
            self._giver.ended(leaving(kept, [each.role for each in prepared.loaded]))
        try:
            ready = replace(prepared, prepare=asked)
            self._running = RunningEpoch.begin(self._place, ready, self._running, kept)
        except (
            Exception
        ) as error:  # a port is taken, or the epoch's addresses are none: the controller makes another epoch
            log.exception("epoch %d cannot be in force", asked.epoch)
            self._unused, self._loading = loading, None
            self._fail(str(error) if isinstance(error, InputError) else f"epoch {asked.epoch}: {reason_of(error)}")
        else:
            loading.give()  # the running epoch has it
            self._shadowing.follow(asked.shadow, pinned=not is_on_processors(asked))
            log.info("%s: epoch %d is in force", self._name, asked.epoch)

    def _set_bits(self, request: SetBits) -> None:
        """Idempotent; what cannot be is refused and shows in the status."""
        running = self._running
        if running is None or running.epoch != request.epoch:
            in_force = f"epoch {running.epoch} is" if running else "no epoch is"
            self._switches.refuse(
                request, f"{in_force} in force here, not {request.epoch}: look at the status and ask again"
            )
            return
        coming = self._loading.state if self._loading else NO_PREPARE
        if coming.epoch > running.epoch and coming.phase != "refused":
            self._switches.refuse(request, f"epoch {coming.epoch} is being prepared: its plan decides the bits")
            return
        executor = running.executor_of(request.replica, request.stage)
        if executor is None:
            self._switches.refuse(
                request, f"slot {self._name} has no role of replica {request.replica} stage {request.stage}"
            )
            return
        executor.boundary.open()
        self._switches.ask(request, executor)

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self._wakeup.ring()

    def _end_roles(self, prepare: Prepare | None = None) -> None:
        """All that run, but for those that go on into the prepared epoch."""
        if self._running is None:
            return
        ending = self._running.ending(prepare) if prepare else ()
        self._running = self._running.reduced_to(prepare)
        self._kept += [kept for role in ending if (kept := role.kept()) is not None]

    def _watch_links(self) -> None:
        for link in self._running.watch() if self._running else ():
            log.warning("%s: neighbour %s is lost: %s", self._name, link.neighbour, link.reason)

    def _watch_progress(self) -> None:
        """Of a load that nobody is served beside, and what is said in the log of it and of steps. A load beside what serves has the controller's patience."""
        loading = self._loading
        state = loading.state if loading and not self._running and loading.state.phase == "loading" else None
        moved = state and (state.epoch, state.progress, state.layers_loaded)
        still = self._load.look(moved, time.monotonic(), is_first=False)
        role = loading.prepare.roles[0] if loading and still else None
        self._hung_load = (HungStep(role.replica, role.stage, f"loading it {still}"),) if role else ()
        told, running = self._told, self._running
        self._told = (*self._hung_load, *((*running.hung, *running.overdue) if running else ()))
        for each in self._told:
            if each not in told:
                which = (each.replica, each.stage, each.reason)
                log.warning("%s: replica %d stage %d does not get on: %s", self._name, *which)

    def _publish(self) -> None:
        """Send the status to the watchers if more than its counters changed."""
        if not self._watchers:
            return
        essence = self._essence()
        known = self._published
        if essence == known:
            return
        self._published = essence
        turned = known is None or _phase(essence) != _phase(known)
        message = encode(self._with_memory(essence, fresh=turned))
        for identity in tuple(self._watchers):
            self._send(identity, message)

    def _send(self, identity: bytes, message: bytes) -> None:
        """To a peer that may be gone, or read nothing any more: no watcher then, until it asks again."""
        try:
            self._control.send_multipart([identity, message], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.info("%s: a controller is gone: %s", self._name, error)
            self._watchers.discard(identity)


def _phase(status: SlotStatus) -> tuple[object, ...]:
    """After a change of this, a slot holds other memory."""
    return (status.committed_epoch, status.prepare.epoch, status.prepare.phase)


def _summary(prepare: Prepare) -> str:
    return ", ".join(
        f"replica {role.replica} stage {role.stage} layers {role.layers[0]}-{role.layers[1]}" for role in prepare.roles
    )


def _bindable(host: str) -> str:
    """ZeroMQ binds to addresses, not to names."""
    return "*" if host in ("0.0.0.0", "::", "*") else sockets.gethostbyname(host)  # noqa: S104  compared, not bound
