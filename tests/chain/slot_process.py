"""A real slot as one process of the checker: its own control loop, workers and sockets, on virtual ZeroMQ and by virtual time.

Real are `Slot`, `RunningEpoch`, `RunningRole`, `LeaderWorker`, `Follower`, the engine and all messages. Modelled are the arithmetic, the loading of weights
(`Loading`) and threads: each role's worker has its turns on the event loop, and is busy for as long as its steps take.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from strata_planner.contract.control import STEP_TIMEOUT_SECONDS, Prepare, PrepareState, SlotRequest, SlotStatus
from strata_planner.contract.roles import Role
from strata_runtime.slot.epoch import LoadedRole, PreparedEpoch
from strata_runtime.slot.leader import LeaderWorker
from strata_runtime.slot.prepare import Held, same_weights
from strata_runtime.slot.slot import Slot, SlotOptions
from strata_runtime.stage.worker import Follower
from tests.chain.arithmetic import Cache, Hangs, Stage
from tests.chain.virtual_network import Host, here

STEP_SECONDS = 0.05  # an answer takes some seconds: most of what goes wrong meets some
LAYER_SECONDS = 0.05  # to load
LOOK_SECONDS = 0.25
LAYER_BYTES = 100  # of 16 bits


class Wakeup:
    """In place of a pair of sockets."""

    def __init__(self) -> None:
        self.reader = None
        self._host = here.get()

    def ring(self) -> None:
        self._host.wake()

    def clear(self) -> None: ...

    def close(self) -> None: ...


class NoGiver:
    """In place of who gives pages: nobody gets any here."""

    def __init__(self, *_: object) -> None: ...

    def ended(self, _: object) -> None: ...

    def close(self, *, gives: bool = False) -> None: ...


def weights_of(role: Role) -> frozenset[tuple[int, int]]:
    """(layer, bits)"""
    return frozenset(zip(range(role.layers[0], role.layers[1] + 1), role.bits, strict=True))


def bytes_of(weights: Iterable[tuple[int, int]]) -> int:
    return sum(LAYER_BYTES * bits // 16 for _, bits in weights)


def pool_of(role: Role) -> int:
    """Beside weights."""
    return role.total_bytes - bytes_of(weights_of(role))


def cache_of(role: Role) -> Cache:
    return Cache(range(role.layers[0], role.layers[1] + 1))


@dataclass(eq=False)
class Store:
    """What other roles may take of those that are held."""

    held: frozenset[tuple[int, int]]

    def kept_bytes(self, role: Role) -> int:
        return bytes_of(self.held & weights_of(role))


def store_of(held: Iterable[LoadedRole]) -> Store:
    return Store(frozenset().union(*(weights_of(each.role) for each in held)))


class Loading:
    """As the real one, layer after layer, by timers. What is there already is shared and takes no time."""

    def __init__(self, prepare: Prepare, held: Held, changed: Callable[[], None], **_: object) -> None:
        self.prepare, self.result = prepare, None
        self._process = SlotProcess.current()
        total = sum(role.layers[1] - role.layers[0] + 1 for role in prepare.roles)
        self.state = PrepareState(epoch=prepare.epoch, phase="loading", layers_total=total)
        self.weights: set[tuple[int, int]] = set()
        self.pools: list[int] = []
        self._held = list(held.roles)
        self._changed = changed
        self._given = False
        there = frozenset().union(*(weights_of(each.role) for each in held.roles)) if not held.idle else frozenset()
        if held.before is not None:
            there |= held.before.weights
            held.before.weights.clear()
            held.before.pools.clear()
        self._missing = sorted(frozenset().union(*(weights_of(role) for role in prepare.roles)) - there)
        self.weights |= there & frozenset().union(*(weights_of(role) for role in prepare.roles))
        self._process.loadings.append(self)
        self._later(LAYER_SECONDS)

    def supersede(self, prepare: Prepare) -> None:
        if self.state.phase == "loading":
            self._change("refused", "superseded by a higher epoch")

    def leave(self) -> None: ...

    def give(self) -> list[LoadedRole]:
        self.result, self._given = None, True
        self.weights.clear()
        self.pools.clear()
        return []

    def _later(self, seconds: float) -> None:
        self._process.loop.call_later(seconds, self._process.runs, self._goes_on)

    def _goes_on(self) -> None:
        if self.state.phase != "loading":
            return
        if self._process.hangs:
            self._later(LOOK_SECONDS)
        elif self._process.refuses:
            self._change("refused", self._process.refuses)
            self.weights.clear()
        elif self._missing:
            self.weights.add(self._missing.pop())
            self._process.check_memory()
            self._later(LAYER_SECONDS)
            self._changed()
        else:
            self._is_whole()

    def _is_whole(self) -> None:
        loaded = []
        for role in self.prepare.roles:
            same = next((each for each in self._held if same_weights(each.role, role)), None)
            loaded.append(replace(same, role=role) if same else LoadedRole(role, Stage(), cache_of(role)))  # type: ignore[arg-type]
            self.pools += [] if same else [pool_of(role)]
        self._process.check_memory()
        self.result = PreparedEpoch(self.prepare, tuple(loaded))
        self._change("prepared")

    def _change(self, phase: Any, reason: str = "") -> None:
        done = self.state.layers_total if phase == "prepared" else 0
        self.state = msgspec.structs.replace(self.state, phase=phase, reason=reason, layers_loaded=done)
        self._changed()


class Served:
    """In place of a role's thread."""

    def __init__(self, worker: Any, failed: Callable[[str], None], name: str) -> None:
        self.worker, self._failed, self._name = worker, failed, name
        self.busy_until = 0.0
        self.over = False
        self.hangs = False  # in a step, for ever
        self.process = SlotProcess.current()
        self.process.serving.append(self)
        if isinstance(worker, LeaderWorker):
            worker._gateways.hello = worker._hello()
            worker.ask()

    def join(self) -> None:
        self.over = True
        self.process.serving.remove(self)
        if self.hangs:  # the control loop waits for it, until the process gives up
            self.process.host.frozen = True
            self.process.loop.call_later(STEP_TIMEOUT_SECONDS, self.process.exits)

    def turn(self, now: float) -> bool:
        """Whether it has computed something."""
        if isinstance(self.worker, LeaderWorker):
            self._receives()
        if self.over or self.hangs or now < self.busy_until:
            return False
        work = self.worker.executor.work
        steps, work.waits = work.steps, False
        try:
            self._works()
        except Hangs:
            self.hangs = True
            return False
        except Exception as error:  # noqa: BLE001  as `serve` does
            self.over = True
            self._failed(f"{self._name}: {error}")
        self._receives()
        work.waits = work.steps == steps
        if work.waits:
            return False
        self.busy_until = now + self.process.step_seconds
        return True

    def _works(self) -> None:
        worker = self.worker
        if isinstance(worker, LeaderWorker):
            worker._receive(wait=False)
            worker._step()
            return
        assert isinstance(worker, Follower)
        while worker._inlet.socket.poll(0) and not self.over:
            steps = worker.executor.work.steps
            if (received := worker._inlet.receive()) is not None:
                worker._step(*received)
            if worker.executor.work.steps != steps:
                return

    def _receives(self) -> None:
        """The thread that meets gateways lives on where the worker has failed."""
        if isinstance(self.worker, LeaderWorker):
            gateways = self.worker._gateways._reception
            gateways._pass_out()
            gateways._take_in()


class SlotProcess:
    """One life of a slot. `broken`: what of a law it has found broken."""

    _now: "SlotProcess"

    def __init__(self, loop: asyncio.AbstractEventLoop, host: Host, name: str, key: str) -> None:
        self.host, self.name = host, name
        self.refuses = ""
        self.hangs = False
        self.step_seconds = STEP_SECONDS
        self.serving: list[Served] = []
        self.loadings: list[Loading] = []
        self.broken: list[str] = []
        self.told: Callable[[], None] = lambda: None
        self.exits: Callable[[], None] = lambda: None
        self._scheduled = False
        self.loop = loop
        host.wake = self.wakes
        self._context: Context = copy_context()
        self._context.run(here.set, host)
        self.slot: Slot = self.inside(Slot, SlotOptions(name, "0.0.0.0", 7070, key, 1))
        self.looks()

    @classmethod
    def current(cls) -> "SlotProcess":
        return cls._now

    def inside(self, work: Callable[..., Any], *what: Any) -> Any:
        SlotProcess._now = self
        return self._context.run(work, *what)

    def runs(self, work: Callable[[], None]) -> None:
        """A timer of its own, which waits while it is stopped."""
        if not self.host.alive:
            return
        if self.host.frozen:
            self.loop.call_later(LOOK_SECONDS, self.runs, work)
            return
        self.inside(work)
        self.wakes()

    def looks(self) -> None:
        if self.host.alive:
            self.wakes()
            self.loop.call_later(LOOK_SECONDS, self.looks)

    def wakes(self) -> None:
        if not self._scheduled and self.host.alive:
            self._scheduled = True
            self.loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        if not self.host.alive or self.host.frozen:
            return
        before = self.slot._essence()
        self.inside(self.turn)
        self.check_memory()
        if self.slot._essence() != before:
            self.told()

    def turn(self) -> None:
        self.slot._answer()
        self.slot._watch_links()
        self.slot._watch_progress()
        self.slot._publish()
        now = self.loop.time()
        for served in list(self.serving):
            if served.turn(now):
                self.loop.call_later(self.step_seconds, self.wakes)

    def hears_the_controller(self) -> None:
        """It asks for the status now and then."""
        self.slot._ordering.hear()

    def handle(self, request: SlotRequest) -> SlotStatus:
        """As `Slot._answer` does with what comes by the control port from a controller."""
        self.hears_the_controller()
        return self.ordered(request)

    def ordered(self, request: SlotRequest) -> SlotStatus:
        """The same from a gateway, by the key for standing orders."""

        def answer() -> SlotStatus:
            try:
                self.slot._handle(request, b"controller")
            except Exception as error:  # noqa: BLE001  what was asked for cannot be done
                self.slot._fail(f"{type(request).__name__}: {error}")
            return self.slot.status()

        status: SlotStatus = self.inside(answer)
        self.check_memory()
        self.wakes()
        return status

    # Laws.

    def check_hung(self) -> None:
        """Nobody hangs who only takes long, was stopped or waits."""
        hanging = {
            (each.worker.executor.role.replica, each.worker.executor.role.stage) for each in self.serving if each.hangs
        }
        told = {(each.replica, each.stage) for each in self.slot._essence().hung}
        if told - hanging:
            self.broken.append(f"{self.name} says that {told} of replica and stage hang, of which {hanging} do")

    def check_memory(self) -> None:
        """What it holds, against what its devices have."""
        running = self.slot._running.roles if self.slot._running else ()
        weights = frozenset().union(*(weights_of(role.loaded.role) for role in running))
        pools = sum(pool_of(role.loaded.role) for role in running)
        loading = self.slot._loading
        if (loading is not None and loading.result is None) or (loading is not None and not loading._given):
            weights |= loading.weights
            pools += sum(loading.pools)
        roles: Sequence[Role] = loading.prepare.roles if loading else [role.planned for role in running]
        usable = sum(device.usable_bytes for device in {each for role in roles for each in role.devices})
        if roles and bytes_of(weights) + pools > usable:
            self.broken.append(f"{self.name} holds {bytes_of(weights) + pools} bytes of {usable}")
