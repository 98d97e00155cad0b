"""What a process really holds: read from the kernel, for slots' status and for benchmarks."""

import time
from collections.abc import Callable
from pathlib import Path

_REST = 20  # times as long as a reading took, before the next: the kernel walks all pages, 70 ms at 4 GB


def private_bytes(process: int | None = None) -> int:
    """Private memory that a process (its id; None: this one) has written: what only its end or its own doing frees. Pages of mapped files that the
    system can drop are not counted. 0 where the kernel does not tell (not Linux), and of a process that has ended.
    """
    try:
        lines = Path(f"/proc/{process or 'self'}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_Dirty:"))


class MemoryMeter:
    """`private_bytes` for statuses that are sent often: a figure is sent again while reading it anew would take more than a small share of the time."""

    def __init__(self, read: Callable[[], int] = private_bytes, clock: Callable[[], float] = time.perf_counter) -> None:
        self._read = read
        self._clock = clock
        self._value = 0
        self._next = clock()

    def value(self, *, fresh: bool) -> int:
        """`fresh`: read now, whatever it takes."""
        started = self._clock()
        if fresh or started >= self._next:
            self._value = self._read()
            ended = self._clock()
            self._next = ended + _REST * (ended - started)
        return self._value
