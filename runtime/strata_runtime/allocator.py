"""How a slot's process holds memory: returned at once while it loads, kept for the next step while it serves.

Called by the slot at start, by `load_stage` and by the stage executor. glibc alone; elsewhere nothing happens. Knows no tensors.
Constants and rules: mallopt(3).
"""

import contextlib
import ctypes
import sys
import threading
from collections.abc import Collection, Hashable, Iterator

_MAX_FAST, _TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = 1, -1, -3, -8
_MAPPED_ALONE_BYTES = 64 << 10  # while loading: whatever is larger is a mapping of its own, whose end is its return
_KERNELS_ALONE_BYTES = 16 << 10  # in first steps: what kernels keep would lie in the holes that later steps fill
# While serving, glibc's most: steps take and free the same blocks, and fresh pages cost seven times a copy into old ones.
_KEPT_BYTES = 32 << 20
_loads: list[None] = []  # and first steps
_lock = threading.Lock()


def set_up_heap() -> None:
    """One arena for all threads: what the loading thread frees, the serving one can take. And small blocks join their neighbours at once, as they do
    without the threads' caches (`contract.environment`). Call before threads start.
    """
    _mallopt(_ARENA_MAX, 1)
    _mallopt(_MAX_FAST, 0)
    _serve()


@contextlib.contextmanager
def freed_at_once(larger_than: int = _MAPPED_ALONE_BYTES) -> Iterator[None]:
    """Within it no dense weight that was quantized and freed stays in the process, and weights leave no holes."""
    with _lock:
        _loads.append(None)
        _mallopt(_MMAP_THRESHOLD, larger_than)
    try:
        yield
    finally:
        with _lock:
            _loads.pop()
            if not _loads:
                _serve()
        _trim()


class FirstTimes:
    """Which sizes of steps a stage has had. In the first step of a size the libraries make kernels that stay for good: were they
    taken from the heap between that step's temporaries, the freed ones could never join again.
    """

    def __init__(self) -> None:
        self._met: set[Hashable] = set()

    def step(self, sizes: Collection[Hashable]) -> contextlib.AbstractContextManager[None]:
        """Around a step, never around a part of it: kernels would lie between what the rest of it has alive. `sizes`: all that kernels are made for."""
        if self._met.issuperset(sizes):
            return contextlib.nullcontext()
        self._met.update(sizes)
        _trim()  # what earlier steps left in the heap and this one does not use
        return freed_at_once(_KERNELS_ALONE_BYTES)


def _serve() -> None:
    _mallopt(_MMAP_THRESHOLD, _KEPT_BYTES)
    _mallopt(_TRIM_THRESHOLD, 2 * _KEPT_BYTES)


def _mallopt(parameter: int, value: int) -> None:
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        if hasattr(library, "mallopt"):
            library.mallopt(parameter, value)


def _trim() -> None:
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        if hasattr(library, "malloc_trim"):
            library.malloc_trim(0)
