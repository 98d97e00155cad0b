"""The boundary between two steps of a stage: where another thread may change it. Held by the stage executor.

A step that is under way ends first; an idle stage is changed at once. Knows nothing of what is changed.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from strata_runtime.errors import RuntimeFaultError

T = TypeVar("T")


class BoundaryClosedError(RuntimeFaultError):
    """Nothing may be changed any more: who closed the boundary says why."""


class StepBoundary:
    """Steps of one thread, changes of others. A change never runs during a step, and no step begins during a change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stepping = False
        self._waiting: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._reading: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._closed = ""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around every step. Changes that came meanwhile are made at its end, in the step's own thread, in their order."""
        with self._lock:
            self._stepping = True
        try:
            yield
        finally:
            with self._lock:
                self._stepping = False
                for change, answer in (*self._reading, *self._waiting):
                    _make(change, answer)
                self._reading.clear()
                self._waiting.clear()

    def read(self, reading: Callable[[], T]) -> T:
        """Run `reading`, which changes nothing, as soon as no step runs, and return what it does: also where nothing may be changed any more."""
        answer: Future[T] = Future()
        with self._lock:
            if self._stepping:
                self._reading.append((reading, answer))
            else:
                _make(reading, answer)
        return answer.result()

    def between_steps(self, change: Callable[[], T]) -> T:
        """Run `change` as soon as no step runs, and return what it does. Raises what it raises, or BoundaryClosedError."""
        answer: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise BoundaryClosedError(self._closed)
            if self._stepping:
                self._waiting.append((change, answer))
            else:
                _make(change, answer)
        return answer.result()

    def close(self, reason: str) -> None:
        """From now on nothing is changed, what waits is not either; never waits for a step."""
        with self._lock:
            self._closed = reason
            for _, answer in self._waiting:
                answer.set_exception(BoundaryClosedError(reason))
            self._waiting.clear()

    def open(self) -> None:
        with self._lock:
            self._closed = ""


def _make(change: Callable[[], Any], answer: Future[Any]) -> None:
    try:
        answer.set_result(change())
    except Exception as error:  # noqa: BLE001  raised where the change was asked for
        answer.set_exception(error)
