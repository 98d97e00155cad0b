"""One epoch in a slot: from prepared roles to running workers, and their end. Used by the slot alone.

Each role runs for itself: where its replica goes on into the next epoch, nothing of it changes, and where it ends nothing else does.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import zmq

from strata_planner.contract.control import STEP_TIMEOUT_SECONDS, HungStep, PeerLoss, PlannedStep, Prepare, RoleStats
from strata_planner.contract.frames import Finish, StageLost, encode
from strata_planner.contract.keys import RoleKeys
from strata_planner.contract.moves import taken_from
from strata_planner.contract.roles import Neighbour, Role
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.model.kv import PagedKvCache
from strata_runtime.model.kv.paged import HeldPages
from strata_runtime.slot.binding import UNBOUND, Binding
from strata_runtime.slot.deadline import Deadline
from strata_runtime.slot.drafter import Drafter
from strata_runtime.slot.gathering import Fetch, Gathered
from strata_runtime.slot.kept_pages import KeptRole
from strata_runtime.slot.leader import LeaderWorker
from strata_runtime.slot.other_ranks import OtherRanks
from strata_runtime.slot.reception import Gateways
from strata_runtime.stage.bounds import FrameBounds, largest_request
from strata_runtime.stage.executor import StageExecutor
from strata_runtime.stage.handover import LivePages
from strata_runtime.stage.inheritance import Inheritance
from strata_runtime.stage.worker import Follower, Inlet, Links, Outlet, Worker, serve
from strata_runtime.wire.transport import NEIGHBOUR_RETRY_MILLISECONDS, Keys, Link, connect, listen

log = logging.getLogger(__name__)

HUNG_EXIT_CODE = 75  # of sysexits.h: EX_TEMPFAIL
CONNECT_PATIENCE_SECONDS = 10.0  # neighbours commit one after the other
_OWN_WORD = "inproc://word"  # within a role's context


@dataclass(frozen=True, slots=True)
class LoadedRole:
    """A role with its weights in memory and its KV pages allocated; of a leader, the small model that drafts; of several devices, the other ranks."""

    role: Role
    model: StageModel
    cache: PagedKvCache
    drafter: Drafter | None = None
    others: OtherRanks | None = None  # the ranks that share the stage

    @property
    def usable(self) -> bool:
        """Whether it can still compute."""
        return self.others is None or self.others.alive


@dataclass(frozen=True, slots=True)
class PreparedEpoch:
    """What a slot has ready to switch to."""

    prepare: Prepare
    loaded: tuple[LoadedRole, ...]
    fetches: tuple[Fetch, ...] = ()  # of pages that other slots have


@dataclass(frozen=True, slots=True)
class Place:
    """Where roles run. `bind`: the address that their ports listen at; `wake` is called, from any thread, when one of them fails; `binding`: to which processors.
    `step_timeout`: seconds that a step may always be still, 0: for ever.
    """

    slot: str
    incarnation: str
    bind: str
    wake: Callable[[], None]
    binding: Binding = UNBOUND
    step_timeout: float = STEP_TIMEOUT_SECONDS


def changed_roles(prepare: Prepare) -> Prepare:
    """The same with those roles alone whose replicas are formed in its epoch: the others go on as they run."""
    places = [place for place in range(len(prepare.roles)) if prepare.formed_in(place) == prepare.epoch]
    steps = tuple(prepare.steps[place] for place in places) if prepare.steps else ()
    return msgspec.structs.replace(
        prepare, roles=tuple(prepare.roles[place] for place in places), role_keys=(), formed=(), steps=steps
    )


class RunningEpoch:
    """The roles of a committed epoch: some were formed in it, others in earlier ones and went on."""

    def __init__(self, epoch: int, roles: tuple["RunningRole", ...]) -> None:
        self.epoch = epoch
        self.roles = roles

    @classmethod
    def begin(
        cls, place: Place, prepared: PreparedEpoch, before: "RunningEpoch | None", kept: Sequence[KeptRole] = ()
    ) -> "RunningEpoch":
        """From `before` come those that go on; nothing of them changes, also where what is new cannot begin. `kept`: of those that have ended."""
        prepare = prepared.prepare
        begun: list[RunningRole] = []
        sources = taken_from([each.role for each in kept], [each.role for each in prepared.loaded])
        loaded = iter(prepared.loaded)
        going_on = before.going_on(prepare) if before else {}
        roles: list[RunningRole] = []
        try:
            for index in range(len(prepare.roles)):
                if index not in going_on:
                    source = sources.get(len(begun))
                    taken = None if source is None else kept[source]
                    fetches = [each for each in prepared.fetches if each.of(prepare.roles[index])]
                    begun.append(RunningRole(place, prepare, index, next(loaded), Pages(taken, fetches)))
                roles.append(going_on[index] if index in going_on else begun[-1])
        except Exception:
            for role in begun:
                role.end()
            raise
        for role in begun:
            role.start()
        return cls(prepare.epoch, tuple(roles))

    def going_on(self, prepare: Prepare) -> dict[int, "RunningRole"]:
        """Those that run on in the prepared epoch, by their places."""
        return {
            role.index: role
            for role in self.roles
            if role.index < len(prepare.roles)
            and prepare.formed_in(role.index) == role.formed < prepare.epoch
            and prepare.roles[role.index] == role.planned
        }

    def ending(self, prepare: Prepare) -> tuple["RunningRole", ...]:
        """Those that end with the prepared epoch's commit."""
        going_on = self.going_on(prepare)
        return tuple(role for role in self.roles if role.index not in going_on)

    def reduced_to(self, prepare: Prepare | None) -> "RunningEpoch | None":
        """Ends the roles that do not go on, or all. What is left, if anything is."""
        ending = self.ending(prepare) if prepare else self.roles
        for role in ending:
            role.end()
        left = tuple(role for role in self.roles if role not in ending)
        return RunningEpoch(self.epoch, left) if left else None

    @property
    def links(self) -> list[Link]:
        return [link for role in self.roles for link in role.links]

    @property
    def lost_peers(self) -> tuple[PeerLoss, ...]:
        return tuple(PeerLoss(slot=link.neighbour, reason=link.reason) for link in self.links if link.reason)

    @property
    def failure(self) -> str:
        """Of the first role that has failed."""
        return next((role.failure for role in self.roles if role.failure), "")

    @property
    def hung(self) -> tuple[HungStep, ...]:
        """Roles whose worker does not get on."""
        return tuple(HungStep(each.planned.replica, each.planned.stage, each.hung) for each in self.roles if each.hung)

    @property
    def overdue(self) -> tuple[HungStep, ...]:
        """Roles that lead and wait too long for the stages behind them."""
        late = (each for each in self.roles if each.overdue)
        return tuple(HungStep(each.planned.replica, each.planned.stage, each.overdue) for each in late)

    def watch(self) -> list[Link]:
        """Links that have been lost since the last look; at steps that do not get on it looks too."""
        now = time.monotonic()
        for role in self.roles:
            role.watch_steps(now)
        return [link for role in self.roles for link in role.watch(now)]

    def stats(self) -> tuple[RoleStats, ...]:
        return tuple(role.stats() for role in self.roles)

    def executor_of(self, replica: int, stage: int) -> StageExecutor | None:
        executors = (role.worker.executor for role in self.roles)
        return next((each for each in executors if (each.role.replica, each.role.stage) == (replica, stage)), None)


@dataclass(frozen=True, slots=True)
class Pages:
    """What a role begins with: the pages of one that has ended, and those that others have."""

    kept: KeptRole | None = None
    fetches: Sequence[Fetch] = ()


def _give_up(worker: str) -> None:
    log.critical("%s does not end: this process does", worker)
    os._exit(HUNG_EXIT_CODE)


class Failure:
    """Takes the reason of whatever of a role fails first or last. Apart from the role, which would hold itself, and its weights, by its ranks."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.reason = ""
        self._wake = wake

    def __call__(self, reason: str) -> None:
        self.reason = reason
        self._wake()


class RunningRole:
    """The worker of one role and the links to its neighbours, in a ZeroMQ context of its own. It runs from `start` to `end`."""

    def __init__(self, place: Place, prepare: Prepare, index: int, loaded: LoadedRole, pages: Pages = Pages()) -> None:
        """`index`: its place in the slot's list, and so of its ports."""
        self.index = index
        self.formed = prepare.epoch
        self.planned = prepare.roles[index]
        self.loaded = loaded
        self.links: list[Link] = []
        self.keys = prepare.role_keys[index] if prepare.role_keys else RoleKeys(prepare.key, prepare.key, prepare.key)
        self.request_key = prepare.key
        self._failure = Failure(place.wake)
        self._is_finishing = False
        self._place = place
        self._slots = prepare.slots
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._word: zmq.Socket[Any] = self._context.socket(zmq.PUSH)  # to its own inlet
        # And connections that are there to be watched, or for a last word.
        self._watched: list[zmq.Socket[Any]] = [self._word]
        self.hung = ""  # why its worker counts as such
        self.overdue = ""
        planned = prepare.steps[index] if prepare.steps else PlannedStep()
        self._own = Deadline(place.step_timeout, planned.stage_seconds)
        # The stage itself is to be named first.
        self._pipeline = Deadline(2 * place.step_timeout, 2 * planned.pipeline_seconds)
        self._thread: threading.Thread | None = None
        self._fetches = pages.fetches
        for fetch in self._fetches:
            fetch.is_taken = True
        try:
            self.worker: Worker = self._worker(loaded, pages.kept)
            self.worker.done = place.wake
        except Exception:
            for fetch in self._fetches:
                fetch.close()
            self._context.destroy(linger=0)
            raise

    def start(self) -> None:
        for fetch in self._fetches:
            fetch.go()
        self._thread = serve(self.worker, self._name, self._failure, self._place.binding.of(self.planned))

    @property
    def _name(self) -> str:
        return f"{self._place.slot} replica {self.planned.replica} stage {self.planned.stage}"

    @property
    def failure(self) -> str:
        """Why it computes nothing any more."""
        return self._failure.reason

    def watch(self, now: float) -> list[Link]:
        """Links that have been lost since the last look. The role's worker hears of them as of whatever an earlier stage says."""
        lost = [link for link in self.links if link.read(now)]
        for link in lost:
            with suppress(zmq.Again):  # a worker that has failed hears nothing
                self._word.send(encode(StageLost(self.planned.replica, self.formed, link.neighbour)), zmq.NOBLOCK)
        return lost

    def finish(self) -> bool:
        """Ask its replica's leader for no more steps, once. Whether nothing more comes of those under way: it may end."""
        links = self.links if self.planned.stages > 1 and not self.failure and not self.hung else ()
        if not links or any(link.reason for link in links):
            return True
        if not self._is_finishing:
            self._is_finishing = True
            if isinstance(self.worker, LeaderWorker):
                self.worker.hold()
            with suppress(zmq.Again):
                self._word.send(encode(Finish(self.planned.replica, self.formed)), zmq.NOBLOCK)
        return self.worker.is_done

    def watch_steps(self, now: float) -> None:
        """Whether its own worker gets on, and where it leads the stages behind. Nobody but this process' control loop can tell of a worker that does not."""
        if self.failure:
            self.hung = self.overdue = ""
            return
        worker, executor, drafter = self.worker, self.worker.executor, self.loaded.drafter
        moved = None if executor.work.waits else (*executor.moved, drafter.guesser.layers_begun if drafter else 0)
        still = self._own.look(moved, now, is_first=not executor.work.steps)
        if still and not self.hung:
            self._tell_hung()
        self.hung = still and f"step {executor.work.steps} {still}"
        if isinstance(worker, LeaderWorker):
            step = worker.awaited
            late = self._pipeline.look(None if step is None or self.hung else step, now, is_first=not step or step < 1)
            if late and not self.overdue:
                worker.miss()
            self.overdue = late and f"step {step} {late}"

    def _tell_hung(self) -> None:
        """The leader, as of a slot that is lost: gateways send what is new to other replicas."""
        role, slot = self.planned, self._place.slot
        if isinstance(self.worker, LeaderWorker):
            self.worker.hang(slot)
            return
        word = self._context.socket(zmq.PUSH)  # the worker's own are the worker's
        self._watched.append(word)
        address = self._slots[role.next.slot]
        connect(word, f"tcp://{address.host}:{address.data_port + role.next.role}", Keys.of(self.keys.next))
        word.send(encode(StageLost(role.replica, self.formed, slot, hangs=True)))

    def held(self) -> LoadedRole:
        """With the bits that its layers have now. They stay so if `keep_bits` was called. Ranks of one that has failed are of no use: one may hang."""
        if self.failure and self.loaded.others is not None:
            self.loaded.others.end()
        return replace(self.loaded, role=self.worker.executor.role)

    def keep_bits(self, reason: str) -> None:
        """No layer changes its bits any more, until its boundary is opened."""
        self.worker.executor.boundary.close(reason)

    def end(self) -> None:
        """Stop the worker after the step it is in; its ports are free when this returns. A process whose worker stays in it ends: nothing else stops a thread."""
        self.keep_bits(f"the replica that was formed in epoch {self.formed} has ended")
        for fetch in self._fetches:
            fetch.close()
        if self._thread is None:
            self._context.destroy(linger=0)
            return
        for socket in (*(link.monitor for link in self.links), *self._watched):
            socket.close(linger=0)
        left = self._own.left(is_first=not self.worker.executor.work.steps)
        giving_up = threading.Timer(min(left, threading.TIMEOUT_MAX), _give_up, (self._name,))
        giving_up.daemon = True
        giving_up.start()
        self._context.term()
        self._thread.join()
        giving_up.cancel()

    def kept(self) -> KeptRole | None:
        """What its pages hold, once it has ended; nothing where it has failed."""
        if self.failure:
            return None
        executor = self.worker.executor
        return KeptRole(executor.role, self.loaded.cache.held(), executor.left(self.formed))

    def pages(self) -> LivePages:
        """What its pages hold while it runs, for other slots."""
        return LivePages(self.worker.executor, self.formed)

    def stats(self) -> RoleStats:
        executor = self.worker.executor
        work = executor.work
        return RoleStats(
            replica=executor.role.replica,
            stage=executor.role.stage,
            steps=work.steps,
            busy_seconds=work.busy_seconds,
            wall_seconds=time.monotonic() - work.started,
            prefill_tokens=work.prefill_tokens,
            decode_tokens=work.decode_tokens,
            frames_dropped=work.frames_dropped,
            sent_bytes=work.sent_bytes,
            shared_bytes=work.shared_bytes,
            bits=executor.role.bits,
            formed=self.formed,
            failure=self.failure,
            refilled=work.refilled,
        )

    def _worker(self, loaded: LoadedRole, kept: KeptRole | None) -> Worker:
        role = loaded.role
        inherited = None
        taken = loaded.cache.take(kept.pages if kept else HeldPages())
        if kept is not None:
            inherited = kept.inherited.of(taken, role.kv_page_budget)
        if loaded.drafter is not None:
            loaded.drafter.begin()
        if loaded.others is not None:
            loaded.others.begin(role, self._failure)
        executor = StageExecutor(role, loaded.model, loaded.cache, loaded.others, inherited)
        bounds = FrameBounds(role, loaded.model.hidden_size, loaded.model.vocab_size)
        gathered = Gathered(executor, inherited or Inheritance(), self._fetches)
        links = self._links(executor, bounds) if role.stages > 1 else None
        if role.leader:
            socket = self._context.socket(zmq.ROUTER)
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            endpoint = f"tcp://{self._place.bind}:{self._slots[self._place.slot].request_port + self.index}"
            listen(socket, endpoint, Keys.of(self.request_key), largest_request(role.max_model_len))
            gateways = Gateways(socket, self.formed, self._place.incarnation)
            return LeaderWorker(executor, self.formed, gateways, links, gathered, loaded.drafter)
        assert links is not None
        return Follower(executor, links, gathered)

    def _links(self, executor: StageExecutor, bounds: FrameBounds) -> Links:
        """A ring: frames come in at a port that anyone may knock at, so its end of a connection tells nothing of the neighbour
        who sends them. What tells is a connection of our own to that neighbour's port, on which nothing is sent.
        """
        role, keys = bounds.role, self.keys
        inward = self._context.socket(zmq.PULL)
        endpoint = f"tcp://{self._place.bind}:{self._slots[self._place.slot].data_port + self.index}"
        listen(inward, endpoint, Keys.of(keys.own), bounds.largest_bytes)
        inward.bind(_OWN_WORD)
        self._word.connect(_OWN_WORD)
        outward = self._connect(role.next, keys.next)
        if role.previous != role.next:
            self._watched.append(self._connect(role.previous, keys.previous))
        return Links(Inlet(inward, self.formed, executor, bounds), Outlet(outward, executor.work))

    def _connect(self, neighbour: Neighbour, secret: str) -> zmq.Socket[Any]:
        """To the data port of a role, whose loss is seen from now on."""
        address = self._slots[neighbour.slot]
        socket = self._context.socket(zmq.PUSH)
        self.links.append(Link(socket, neighbour.slot, time.monotonic(), CONNECT_PATIENCE_SECONDS))
        endpoint = f"tcp://{address.host}:{address.data_port + neighbour.role}"
        return connect(socket, endpoint, Keys.of(secret), retries=NEIGHBOUR_RETRY_MILLISECONDS)
