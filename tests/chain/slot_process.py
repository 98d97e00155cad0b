"""A real slot as one process of the checker: its own control loop, workers and sockets, on virtual ZeroMQ and by virtual time.

Real are `Slot`, `Loading`, `Fetch`, `Giver`, `RunningEpoch`, `RunningRole`, `LeaderWorker`, `Follower`, the engine, caches and all messages. Modelled are the
arithmetic, what is read from disks (`load_stage`, `Moved`) and threads: those beside the workers are played one at a time (`virtual_threads`); each role's worker has its turns
on the event loop, and is busy for as long as its steps take.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextvars import Context, ContextVar, copy_context
from pathlib import Path
from typing import Any

import torch
from torch import nn

from strata_planner.contract.control import STEP_TIMEOUT_SECONDS, SlotRequest, SlotStatus
from strata_planner.contract.formats import BITS_OF_FORMAT, FormatName
from strata_planner.contract.roles import Role
from strata_runtime.errors import InputError
from strata_runtime.loading.layer_store import HeldLayer, Origin
from strata_runtime.loading.linear_source import ANY_FORMATS
from strata_runtime.loading.load import LoadOptions
from strata_runtime.loading.precision_switch import FORMAT_OF_BITS, Growth
from strata_runtime.model.kv.pool import LayerPool
from strata_runtime.slot.epoch import LoadedRole
from strata_runtime.slot.leader import LeaderWorker
from strata_runtime.slot.prepare import Loading
from strata_runtime.slot.slot import Slot, SlotOptions
from strata_runtime.stage.handover import LeftPages
from strata_runtime.stage.worker import Follower
from tests.chain.arithmetic import Hangs, Stage
from tests.chain.virtual_network import Host, here
from tests.chain.virtual_threads import sleep

STEP_SECONDS = 0.05  # an answer takes some seconds: most of what goes wrong meets some
LAYER_SECONDS = 0.05  # to load
LOOK_SECONDS = 0.25
PLANE_BYTES = 1_250
LAYER_BYTES = 16 * PLANE_BYTES  # of 16 bits
_MOVABLE = {*ANY_FORMATS, "dense"}


class Rings:
    """What a poller sees of a wakeup."""

    def __init__(self) -> None:
        self.inbox: list[bytes] = []


class Wakeup:
    """In place of a pair of sockets."""

    def __init__(self) -> None:
        self.reader = Rings()
        self._host = here.get()

    def ring(self) -> None:
        self.reader.inbox.append(b"")
        self._host.rings()

    def clear(self) -> None:
        self.reader.inbox.clear()

    def close(self) -> None: ...


class Weights(nn.Module):
    """A layer's, plane by plane: what is made of fewer bits of it has the first of them."""

    def __init__(self, planes: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.planes = tuple(planes)


def with_planes(layer: HeldLayer | None, name: FormatName) -> tuple[Weights, int]:
    """What a layer in that format is made of, and how many planes of it are to be read."""
    bits = BITS_OF_FORMAT[name]
    kept = planes_of(layer)[:bits] if layer is not None and {layer.format, name} <= ANY_FORMATS else ()
    read = bits - len(kept)
    return Weights((*kept, *(torch.empty(PLANE_BYTES, dtype=torch.uint8) for _ in range(read)))), read


def planes_of(layer: HeldLayer) -> tuple[torch.Tensor, ...]:
    weights = layer.module
    assert isinstance(weights, Weights)
    return weights.planes


def resolved(_: str, step: Callable[[], None]) -> Path:
    """In place of a checkpoint's folder."""
    step()
    return Path()


def load_stage(
    role: Role, _: Path, stored: Callable[[int, int], None], _device: torch.device, options: LoadOptions
) -> Stage:
    """As the real one, layer after layer, those that get fewer bits first. What is there already is shared and takes no time. Raises InputError where
    the process refuses.
    """
    process = SlotProcess.current()
    store = options.store
    assert store is not None
    process.reads_on()
    origin = Origin(role.model_uri, "", role.compute_type, "cpu")
    formats = dict(zip(range(role.layers[0], role.layers[1] + 1), role.format, strict=True))
    before = {number: store.layer(origin, number, name) for number, name in formats.items()}

    def growth(number: int) -> int:
        layer = before[number]
        return BITS_OF_FORMAT[formats[number]] - (BITS_OF_FORMAT[layer.format] if layer else 0)

    held: dict[int, HeldLayer] = {}
    for place, number in enumerate(sorted(formats, key=growth)):
        name, layer = formats[number], before.pop(number)
        if layer is None or layer.format != name:
            weights, read = with_planes(layer, name)
            if layer is not None:
                store.drop(layer)
            layer = HeldLayer(origin, number, name, None, weights)  # type: ignore[arg-type]
            store.put(layer)
            process.check_memory(layer)
            if read:
                process.reads_on()
        held[number] = layer
        stored(place + 1, len(formats))
    return Stage(held)


def check_change(model: Stage, layer: int, bits: int) -> None:
    """Before planes are moved in place. Raises InputError for a layer that has none."""
    if model.held[layer].format not in _MOVABLE or bits not in FORMAT_OF_BITS:
        raise InputError(
            f"layer {layer} is stored in {model.held[layer].format}, from which no {bits} bits can be made"
        )


def growth_of(model: Stage, layer: int, bits: int) -> Growth:
    held = model.held[layer]
    weights, _ = with_planes(held, FORMAT_OF_BITS[bits])
    before, after = set(planes_of(held)), set(weights.planes)
    return Growth(PLANE_BYTES * len(after - before), PLANE_BYTES * len(before - after))


class Moved:
    """A layer's planes, read and not yet in place."""

    def __init__(self, model: Stage, layer: int, bits: int) -> None:
        self.model, self.layer, self.bits = model, layer, bits
        self.growth = growth_of(model, layer, bits)
        self._weights, read = with_planes(model.held[layer], FORMAT_OF_BITS[bits])
        process = SlotProcess.current()
        process.check_memory(HeldLayer(model.held[layer].origin, layer, FORMAT_OF_BITS[bits], None, self._weights))  # type: ignore[arg-type]
        if read:
            process.reads_on()

    def apply(self) -> None:
        held = self.model.held[self.layer]
        held.module, held.format = self._weights, FORMAT_OF_BITS[self.bits]

    def release(self) -> None: ...


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
        if worker._gathering.awaits:
            worker._answer()
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


_current: "ContextVar[SlotProcess]" = ContextVar("slot process")


class SlotProcess:
    """One life of a slot. `broken`: what of a law it has found broken."""

    def __init__(self, loop: asyncio.AbstractEventLoop, host: Host, name: str, key: str, usable: int) -> None:
        """`usable`: bytes of all its devices."""
        self.host, self.name, self.usable = host, name, usable
        self.refuses = ""
        self.hangs = False
        self.step_seconds = STEP_SECONDS
        self.serving: list[Served] = []
        self.broken: list[str] = []
        self.told: Callable[[], None] = lambda: None
        self.exits: Callable[[], None] = lambda: None
        self._scheduled = False
        self.loop = loop
        host.wake = self.wakes
        self._context: Context = copy_context()
        self._context.run(here.set, host)
        self._context.run(_current.set, self)
        self.slot: Slot = self.inside(Slot, SlotOptions(name, "0.0.0.0", 7070, key, 1))
        self.looks()

    @classmethod
    def current(cls) -> "SlotProcess":
        return _current.get()

    def inside(self, work: Callable[..., Any], *what: Any) -> Any:
        return self._context.run(work, *what)

    def reads_on(self) -> None:
        """By a loading thread, of its disk. Raises InputError."""
        sleep(LAYER_SECONDS)
        while self.hangs:
            sleep(LOOK_SECONDS)
        if self.refuses:
            raise InputError(self.refuses)

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
        self.slot._wakeup.clear()
        self.slot._answer()
        self.slot._let_go()
        self.slot._watch_links()
        self.slot._finish()
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

    def check_memory(self, *layers: HeldLayer) -> None:
        """What it holds, with layers that have just been read, against what its devices have."""
        planes = {plane for layer in (*layers, *self._layers()) for plane in planes_of(layer)}
        held = sum(each.nbytes for each in planes) + sum(each.bytes for each in set(self._pools()))
        if held > self.usable:
            self.broken.append(f"{self.name} holds {held} bytes of {self.usable}")

    def _loadings(self) -> list[Loading]:
        slot = self.slot
        found = [each for each in (slot._loading, slot._unused) if each is not None]
        return found + [each._before for each in found if each._before is not None]

    def _loaded(self) -> Iterator[LoadedRole]:
        for epoch in (self.slot._running, self.slot._ended):
            yield from (each.loaded for each in epoch.roles) if epoch else ()
        for loading in self._loadings():
            yield from (*loading._loaded, *loading._held)

    def _layers(self) -> Iterator[HeldLayer]:
        for each in self._loaded():
            yield from each.model.held.values()
        for loading in self._loadings():
            yield from (each for each in loading._store.parts() if isinstance(each, HeldLayer))

    def _pools(self) -> Iterator[LayerPool]:
        for each in self._loaded():
            yield from each.cache.pools.values()
        for kept in self.slot._kept:
            yield from kept.pages.layers.values()
        for pages in self.slot._giver._pages if self.slot._giver else ():
            yield from pages.pools.values() if isinstance(pages, LeftPages) else ()
