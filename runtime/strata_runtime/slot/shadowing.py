"""Keeping shadows in a slot: a thread beside the workers that brings what is ordered into host memory, slowly, and lets go of what is not.

Used by the slot alone: it pauses when an epoch is prepared, whose loads take what they want of it, and goes on with the order of the epoch that is committed, or with its
own where that prepare is refused. What stays wanted is not read again. The thread has the lowest priority and rests between two reads longer than they take.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection

from strata_planner.contract.shadows import ShadowOrder, ShadowPhase, ShadowState
from strata_runtime.errors import reason_of
from strata_runtime.loading.shadow import Place, Shadow, file_state
from strata_runtime.loading.shadow_places import Wanted, read_slowly, wanted_of
from strata_runtime.loading.uri import resolve_model

log = logging.getLogger(__name__)

BYTES_PER_SECOND = 256 << 20  # at most
_REST = 3  # times as long as a read took, before the next
_LOWEST_PRIORITY = 19
_PATIENCE_SECONDS = 5.0  # for a thread that waits for a hub or a disk, when the slot ends


class _PausedError(Exception):
    """Something else is to be done."""


class Shadowing:
    """`shadow`: what loads take from. `changed` is called, from any thread, when it is done or cannot go on."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.shadow = Shadow()
        self._changed = changed
        self._order: ShadowOrder | None = None
        self._phase: ShadowPhase = "reading"
        self._reason = ""
        self._layers = 0
        self._is_pinned = self._is_paused = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def state(self, *, fresh: bool = True) -> ShadowState | None:
        """None: nothing is ordered. `fresh`: with bytes that grow while it reads."""
        if self._order is None:
            return None
        held = self.shadow.held_bytes if fresh or self._phase != "reading" else 0
        return ShadowState(phase=self._phase, held_bytes=held, layers=self._layers, reason=self._reason)

    def pause(self, layers: Collection[int | None]) -> None:
        """Reads no more, and keeps only what belongs to these layers; None: what lies outside of all."""
        self._stop.set()
        self._is_paused = True
        self.shadow.keep_layers(layers)

    def resume(self) -> None:
        """What it was paused for will not be: what was taken, or had to give way, is read once more."""
        if self._is_paused:
            self.follow(self._order, pinned=self._is_pinned)

    def follow(self, order: ShadowOrder | None, *, pinned: bool) -> None:
        """Keep this from now on. `pinned`: in page-locked memory, for devices that copy from there."""
        self._stop.set()
        self._stop = stop = threading.Event()
        before, self._order = self._thread, order
        self._is_pinned, self._is_paused = pinned, False
        self._phase, self._reason, self._layers = "reading", "", 0
        if order is None:
            self.shadow.clear()
            return

        def run() -> None:
            if before is not None:
                before.join()  # it ends after the read that it is in
            self._run(order, stop, pinned=pinned)

        self._thread = threading.Thread(target=run, name="shadows", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE_SECONDS)
        self.shadow.clear()

    def _run(self, order: ShadowOrder, stop: threading.Event, *, pinned: bool) -> None:
        with contextlib.suppress(OSError, AttributeError):  # where threads have no priority of their own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        try:
            reason = self._fill(order, stop, pinned=pinned)
        except _PausedError:
            return
        except Exception as error:  # noqa: BLE001  whatever it is: a takeover reads files then, and the status says why
            log.warning("layers of others are not kept any further: %s", reason_of(error))
            self._end("failed", reason_of(error), stop)
        else:
            log.info("%d MiB of other slots' layers are kept for a takeover", self.shadow.held_bytes >> 20)
            self._end("held", reason, stop)

    def _end(self, phase: ShadowPhase, reason: str, stop: threading.Event) -> None:
        if not stop.is_set():
            self._phase, self._reason = phase, reason
            self._changed()

    def _fill(self, order: ShadowOrder, stop: threading.Event, *, pinned: bool) -> str:
        """Why not all is kept, if so."""
        wanted = wanted_of(order, resolve_model(order.model_uri))
        within = _within(wanted, order.most_bytes)
        self.shadow.keep(within.keys())
        rest = _Rest(stop)
        for place, each in within.items():
            rest.check()
            if not self.shadow.has(place):
                state = file_state(place.file)
                flat = read_slowly(each, rest, pinned=pinned)
                rest.check()
                self.shadow.put(place, flat, state, each.layer)
        left_out = {each.layer for place, each in wanted.items() if place not in within}
        self._layers = len({each.layer for each in within.values()} - left_out - {None})
        if not left_out:
            return ""
        return f"{order.most_bytes} bytes are allowed, and {sum(place.size_bytes for place in wanted)} would be read in a takeover"


def _within(wanted: dict[Place, Wanted], most_bytes: int) -> dict[Place, Wanted]:
    """The first of them, as many as there is room for."""
    found = dict[Place, Wanted]()
    for place, each in wanted.items():
        most_bytes -= place.size_bytes
        if most_bytes < 0:
            break
        found[place] = each
    return found


class _Rest:
    """Called after each read with its bytes. Raises _PausedError when there is something else to be done."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._began = time.perf_counter()

    def check(self) -> None:
        if self._stop.is_set():
            raise _PausedError
        self._began = time.perf_counter()

    def __call__(self, count: int) -> None:
        took = time.perf_counter() - self._began
        self._stop.wait(max(_REST * took, count / BYTES_PER_SECOND))
        self.check()
