"""Comparing what was read of an any-precision copy with the checks of its manifest, beside the load that reads it.

Used by `artefact`, which says what to compare, and by `load_stage`, which waits for all of it before a stage is whole. What comes here is what was not
checked as it was read: all of it where checks are zlib's, some 3 GB/s for each thread, and files and cuts whose checks need another read. CRC-32 finds
every change of up to 32 bits in a row. Knows no weights.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

Check = Callable[[], None]
_THREADS = 2
_WAITING = 4  # checks at once, each with the memory of what was read for it


def at_once(check: Check) -> None:
    """In the thread that has read."""
    check()


def never(_: Check) -> None:
    """What is read is believed."""


class Beside:
    """Runs checks in threads of its own, a few at a time. A context: the checks that wait at its end are done, and the first that fails is raised, also where
    the load was ended half-way: what is whole of it may be taken by the next.

    A check that has failed is raised at the next one, too: a load does not go on for minutes with a damaged file.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="verify")
        self._waiting: deque[Future[None]] = deque()

    def __call__(self, check: Check) -> None:
        self._waiting.append(self._pool.submit(check))
        while self._waiting and (len(self._waiting) > _WAITING or self._waiting[0].done()):
            self._waiting.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            while self._waiting:
                self._waiting.popleft().result()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)
