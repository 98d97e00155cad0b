"""Threads of played processes, by virtual time: the real code of whoever gives, fetches and loads runs in them as it is.

Each is a thread of this machine, and only one of all runs at any time: it goes on where the event loop lets it, and hands back where it waits (`wait`). What it waits
for is looked at whenever its process is woken. A process that dies ends its threads where they wait; one that is stopped stops them.
"""

import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any

from tests.chain.virtual_network import Network, here

_STOPPED_SECONDS = 0.25  # between two looks of a thread whose process is stopped
_MOST_TURNS = 10_000  # of a thread that the control loop waits for


class ProcessEndedError(BaseException):
    """The process is no more: no `except Exception` sees to it."""


class VirtualThread:
    """As `threading.Thread`, of the process whose code makes it."""

    network: Network  # of the whole world: set on a subclass
    current: "VirtualThread | None" = None  # that runs now; None: the event loop does

    def __init__(
        self, target: Callable[..., None], name: str = "", args: Sequence[Any] = (), *, daemon: bool = True
    ) -> None:
        self.name = name
        self._loop = self.network.loop
        self._host = here.get()
        self._ready: Callable[[], bool] = lambda: True
        self._until = 0.0
        self._is_asked = self._is_over = self._is_begun = self._ends = False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._real = threading.Thread(target=copy_context().run, args=(self._body, target, *args), daemon=daemon)

    def start(self) -> None:
        self._is_begun = True
        self._host.threads.append(self)
        self._real.start()
        self.wakes()

    def is_alive(self) -> bool:
        return self._is_begun and not self._is_over

    def join(self, timeout: float | None = None) -> None:
        """By another played thread: as long as it takes. By a control loop: time stands still, and this thread's waits are over at once."""
        if VirtualThread.current is not None:
            VirtualThread.current.wait(lambda: not self.is_alive(), timeout)
            return
        for _ in range(_MOST_TURNS):
            if not self.is_alive():
                return
            self._resume()
        assert timeout is not None, f"a control loop waits for ever for {self.name}"

    def wait(self, ready: Callable[[], bool], seconds: float | None) -> None:
        """Called by the thread itself, for so long at most."""
        self._ready, self._until = ready, self._loop.time() + (1e9 if seconds is None else seconds)
        if not ready():
            if seconds is not None:
                self._loop.call_later(max(0.0, seconds), self.wakes)
            self._back.release()
            self._go.acquire()
        if self._ends:
            raise ProcessEndedError

    # By the event loop.

    def wakes(self) -> None:
        """It may be able to go on."""
        if not self._is_asked and self.is_alive():
            self._is_asked = True
            self._loop.call_soon(self._look)

    def ends(self) -> None:
        """Its process does."""
        self._ends = True
        self.join()

    def _look(self) -> None:
        self._is_asked = False
        if not self.is_alive():
            return
        if self._host.frozen:
            self._loop.call_later(_STOPPED_SECONDS, self.wakes)
        elif self._ready() or self._loop.time() >= self._until - 1e-9:
            self._resume()

    def _resume(self) -> None:
        before, VirtualThread.current = VirtualThread.current, self
        self._go.release()
        self._back.acquire()
        VirtualThread.current = before
        if self._is_over and self in self._host.threads:
            self._host.threads.remove(self)
            self._host.rings()

    def _body(self, target: Callable[..., None], *what: Any) -> None:
        self._go.acquire()
        try:
            if not self._ends:
                target(*what)
        except ProcessEndedError:
            pass
        finally:
            self._is_over = True
            self._back.release()


def sleep(seconds: float) -> None:
    """Of the thread that runs now."""
    assert VirtualThread.current is not None, "only threads wait"
    VirtualThread.current.wait(lambda: False, seconds)


class VirtualThreading:
    """Stands where a module has imported threading."""

    def __init__(self, network: Network) -> None:
        self.Thread = type("Thread", (VirtualThread,), {"network": network})

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)
