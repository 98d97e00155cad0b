"""Weights, keys and values in pages of 2 MiB: steps read them from end to end, and a processor has to be told where a page lies 512 times as often in pages
of 4 KiB, in a virtual machine by two tables.

`load_stage`, changes of bits and measurements hand over tensors that they have filled, the KV pool memory that it has not touched yet. Linux alone, where an
administrator has not switched such pages off; elsewhere, and where no such page is free, memory stays as it is. Rules: madvise(2), and the kernel's
Documentation/admin-guide/mm/transhuge.rst.
"""

import ctypes
import errno
import queue
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from torch import Tensor, nn

Span = tuple[int, int]  # addresses: first, and behind the last

_FOLDER = Path("/sys/kernel/mm/transparent_hugepage")
_HUGE_PAGE, _COLLAPSE = 14, 25  # advice
# Of a page that weights take: what lies between them is memory that is freed and taken, or nothing yet.
_LEAST_SHARE = 3 / 4
# Larger ones, as processors with pages of 64 KiB have them, would take more than they are worth.
_MOST_PAGE_BYTES = 2 << 20
# Times as long as a page took, before the next: whoever computes beside it waits for a page while it is moved.
_REST = 1.0


@cache
def page_bytes() -> int:
    """Of a huge page; 0: there are none."""
    if sys.platform != "linux":
        return 0
    try:
        enabled, size = ((_FOLDER / name).read_text(encoding="ascii").strip() for name in ("enabled", "hpage_pmd_size"))
    except OSError:
        return 0
    return int(size) if "[never]" not in enabled and int(size) <= _MOST_PAGE_BYTES else 0


def mostly_taken(spans: Iterable[Span], size: int) -> list[int]:
    """Addresses of the pages of `size` bytes of which spans take three quarters. Overlapping spans count once."""
    taken: dict[int, int] = {}
    end_before = 0
    for begin, end in sorted(spans):
        at, end_before = max(begin, end_before), max(end, end_before)
        while at < end:
            page = at - at % size
            behind = min(end, page + size)
            taken[page] = taken.get(page, 0) + behind - at
            at = behind
    return [page for page, count in taken.items() if count >= _LEAST_SHARE * size]


def untouched(tensor: Tensor) -> Tensor:
    """The same, its memory to come in huge pages when it is touched."""
    if size := _size_of(tensor):
        first, behind = span_of(tensor)
        begin, end = -(-first // size) * size, behind // size * size
        if begin < end:
            _advise(begin, end - begin, _HUGE_PAGE)
    return tensor


def gather(tensors: Iterable[Tensor]) -> None:
    """Before it comes back; those that lie in huge pages already stay."""
    for page in _pages(tensors):
        _move(page)


def gather_beside(modules: Iterable[nn.Module]) -> None:
    """All that the modules keep, in a thread that others can compute beside; addresses that are freed meanwhile do no harm."""
    if pages := _pages(kept_by(modules)):
        _gatherer().put(pages)


def wait() -> None:
    """Until all is gathered that was asked for."""
    _gatherer().join()


def kept_by(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """What is neither parameter nor buffer a module tells in `opaque`."""
    for module in modules:
        yield from module.parameters()
        yield from module.buffers()
        for child in module.modules():
            yield from getattr(child, "opaque", ())


def span_of(tensor: Tensor) -> Span:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def _pages(tensors: Iterable[Tensor]) -> list[int]:
    spans = [span_of(tensor) for tensor in tensors if _size_of(tensor)]
    return mostly_taken(spans, page_bytes())


def _size_of(tensor: Tensor) -> int:
    """Of the pages that it can lie in; 0: none, as of what is elsewhere."""
    return page_bytes() if tensor.device.type == "cpu" and tensor.nbytes else 0


@cache
def _gatherer() -> "queue.Queue[Sequence[int]]":
    waiting: queue.Queue[Sequence[int]] = queue.Queue()

    def run() -> None:
        while True:
            for page in waiting.get():
                started = time.perf_counter()
                _move(page)
                time.sleep(_REST * (time.perf_counter() - started))
            waiting.task_done()

    threading.Thread(target=run, name="huge pages", daemon=True).start()
    return waiting


def _move(page: int) -> None:
    """What lies there into one page; a kernel that cannot be told to do it now (before Linux 6.1) is asked to do it later."""
    _advise(page, page_bytes(), _COLLAPSE if _collapses() else _HUGE_PAGE)


@cache
def _collapses() -> bool:
    """Advice that a kernel does not know is wrong for no memory at all, too."""
    return _advise(0, 0, _COLLAPSE) != errno.EINVAL


def _advise(address: int, length: int, advice: int) -> int:
    """The error's number, or 0."""
    if _library().madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), advice):
        return ctypes.get_errno()
    return 0


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
