"""One epoch in a slot: from prepared roles to running workers, and their end. Used by the slot alone."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import zmq

from strata_planner.contract.control import PeerLoss, Prepare, RoleStats
from strata_planner.contract.keys import RoleKeys
from strata_planner.contract.roles import Neighbour, Role
from strata_runtime.loading.stage_model import StageModel
from strata_runtime.model.kv import PagedKvCache
from strata_runtime.slot.drafter import Drafter
from strata_runtime.slot.leader import LeaderWorker
from strata_runtime.slot.other_ranks import OtherRanks
from strata_runtime.slot.reception import Gateways
from strata_runtime.stage.bounds import FrameBounds, largest_request
from strata_runtime.stage.executor import StageExecutor
from strata_runtime.stage.worker import Follower, Inlet, Outlet, Worker, serve
from strata_runtime.wire.transport import Keys, Link, connect, listen

log = logging.getLogger(__name__)

CONNECT_PATIENCE_SECONDS = 10.0  # neighbours commit one after the other


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


class RunningEpoch:
    """The workers of a committed epoch and the links to their neighbours."""

    def __init__(
        self, slot: str, incarnation: str, prepared: PreparedEpoch, bind: str, failed: Callable[[str], None]
    ) -> None:
        """`bind`: the address that its ports listen at."""
        self.prepared = prepared
        self.epoch = prepared.prepare.epoch
        self._slot = slot
        self._incarnation = incarnation
        self._bind = bind
        self._failed = failed
        key = prepared.prepare.key
        self._request_keys = Keys.of(key)
        self._role_keys = prepared.prepare.role_keys or (RoleKeys(key, key, key),) * len(prepared.loaded)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.links: list[Link] = []
        self._watched: list[zmq.Socket[Any]] = []  # connections that are there to be watched
        self._workers: list[Worker] = []
        self._threads = []
        try:
            self._workers = [self._worker(place, loaded) for place, loaded in enumerate(prepared.loaded)]
        except Exception:
            self._context.destroy(linger=0)
            raise
        for worker in self._workers:
            name = f"{slot} replica {worker.executor.role.replica} stage {worker.executor.role.stage}"
            self._threads.append(serve(worker, name, failed))

    @property
    def lost_peers(self) -> tuple[PeerLoss, ...]:
        return tuple(PeerLoss(slot=link.neighbour, reason=link.reason) for link in self.links if link.reason)

    def watch(self) -> list[Link]:
        """Links that have been lost since the last look."""
        now = time.monotonic()
        return [link for link in self.links if link.read(now)]

    def stats(self) -> tuple[RoleStats, ...]:
        return tuple(_stats(worker.executor) for worker in self._workers)

    def executor_of(self, replica: int, stage: int) -> StageExecutor | None:
        executors = (worker.executor for worker in self._workers)
        return next((each for each in executors if (each.role.replica, each.role.stage) == (replica, stage)), None)

    def held(self) -> tuple[LoadedRole, ...]:
        """The roles with the bits that their layers have now. They stay so if `keep_bits` was called."""
        pairs = zip(self._workers, self.prepared.loaded, strict=True)
        return tuple(replace(loaded, role=worker.executor.role) for worker, loaded in pairs)

    def keep_bits(self, reason: str) -> None:
        """No layer changes its bits any more, until `move_bits`."""
        for worker in self._workers:
            worker.executor.boundary.close(reason)

    def move_bits(self) -> None:
        for worker in self._workers:
            worker.executor.boundary.open()

    def end(self) -> None:
        """Stop the workers after the step they are in; their ports are free when this returns."""
        self.keep_bits(f"epoch {self.epoch} has ended")
        for socket in (*(link.monitor for link in self.links), *self._watched):
            socket.close(linger=0)
        self._context.term()
        for thread in self._threads:
            thread.join()

    def _worker(self, place: int, loaded: LoadedRole) -> Worker:
        role = loaded.role
        loaded.cache.reset()
        if loaded.drafter is not None:
            loaded.drafter.begin()
        if loaded.others is not None:
            loaded.others.begin(role, self._failed)
        executor = StageExecutor(role, loaded.model, loaded.cache, loaded.others)
        bounds = FrameBounds(role, loaded.model.hidden_size, loaded.model.vocab_size)
        links = self._links(place, executor, bounds) if role.stages > 1 else None
        if role.leader:
            socket = self._context.socket(zmq.ROUTER)
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            endpoint = f"tcp://{self._bind}:{self._address(self._slot).request_port + place}"
            listen(socket, endpoint, self._request_keys, largest_request(role.max_model_len))
            gateways = Gateways(socket, self.epoch, self._incarnation)
            return LeaderWorker(executor, self.epoch, loaded.model.hidden_size, gateways, links, loaded.drafter)
        assert links is not None
        return Follower(executor, *links)

    def _links(self, place: int, executor: StageExecutor, bounds: FrameBounds) -> tuple[Inlet, Outlet]:
        """A ring: frames come in at a port that anyone may knock at, so its end of a connection tells nothing of the neighbour
        who sends them. What tells is a connection of our own to that neighbour's port, on which nothing is sent.
        """
        role, keys = bounds.role, self._role_keys[place]
        inward = self._context.socket(zmq.PULL)
        endpoint = f"tcp://{self._bind}:{self._address(self._slot).data_port + place}"
        listen(inward, endpoint, Keys.of(keys.own), bounds.largest_bytes)
        outward = self._connect(role.next, keys.next)
        if role.previous != role.next:
            self._watched.append(self._connect(role.previous, keys.previous))
        return Inlet(inward, self.epoch, executor, bounds), Outlet(outward)

    def _connect(self, neighbour: Neighbour, secret: str) -> zmq.Socket[Any]:
        """To the data port of a role, whose loss is seen from now on."""
        address = self._address(neighbour.slot)
        socket = self._context.socket(zmq.PUSH)
        self.links.append(Link(socket, neighbour.slot, time.monotonic(), CONNECT_PATIENCE_SECONDS))
        return connect(socket, f"tcp://{address.host}:{address.data_port + neighbour.role}", Keys.of(secret))

    def _address(self, slot: str) -> Any:
        return self.prepared.prepare.slots[slot]


def _stats(executor: StageExecutor) -> RoleStats:
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
        bits=executor.role.bits,
    )
