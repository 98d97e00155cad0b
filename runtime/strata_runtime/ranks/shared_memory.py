"""Collectives of ranks that are processes (or, in tests, threads) of one machine: over a segment of shared memory, in the native library.

A sum is one meeting of the ranks (kernels/native/ranks.cpp): each writes what it has, waits for the others awake for microseconds, then reads theirs.
"""

import contextlib
import ctypes
import math
import mmap
import os
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property

import torch
from torch import Tensor

from strata_runtime.errors import InputError
from strata_runtime.kernels.native import library
from strata_runtime.kernels.native_calls import counting
from strata_runtime.ranges import Range
from strata_runtime.ranks import collectives
from strata_runtime.ranks.collectives import RankLostError
from strata_runtime.ranks.cut import share

BUFFER_BYTES = 1 << 20  # larger tensors go in pieces
# Of addresses, for what a rank shows the others of its weights: only pages that are written to are memory. A process has 2^47 in all.
WEIGHTS_BYTES = 1 << 38
_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14
_LINE = 64
_MEET = struct.Struct("6q")
_SUM = struct.Struct("9q")
Numbers = tuple[int, int, int, int, int, int]  # `MeetCall` of kernels/native/calls.h


def runs() -> bool:
    """Whether the library is here."""
    return library() is not None


def make_segment(ranks: int) -> int:
    """The file descriptor of a segment for so many ranks: memory that ends with the last process that has it."""
    descriptor = os.memfd_create("strata-ranks", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, _weights_begin(ranks, ranks))
    return descriptor


def _weights_begin(ranks: int, rank: int) -> int:
    """Where in a segment the weights of a rank lie."""
    behind = _LINE * (1 + ranks) + 2 * ranks * BUFFER_BYTES
    return -(-behind // mmap.PAGESIZE) * mmap.PAGESIZE + rank * WEIGHTS_BYTES


class SharedMemory:
    """One rank's end of a segment: see `RowCollectives`. float32 and bfloat16; other types are added up in float32."""

    def __init__(self, segment: int, rank: int, ranks: int, patience: float | None = None) -> None:
        """segment: its file descriptor, which may be closed afterwards."""
        self.rank, self.ranks = rank, ranks
        self._patience = collectives.PATIENCE_SECONDS if patience is None else patience
        self._memory = mmap.mmap(segment, _weights_begin(ranks, 0))
        self._segment = os.dup(segment)
        weakref.finalize(self, os.close, self._segment)
        self._sees_weights = False
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._meeting = ctypes.c_int64()  # its number; the library counts on

    def join(self) -> None:
        """All have the segment."""

    def finish(self) -> None:
        """Calls come back when they are done."""

    def all_reduce(self, items: Tensor) -> None:
        if items.dtype not in {torch.float32, torch.bfloat16}:
            wide = items.float()
            self.all_reduce(wide)
            items.copy_(wide)
            return
        flat = items.view(-1)
        for begin in range(0, flat.numel(), BUFFER_BYTES // flat.itemsize):
            piece = flat[begin : begin + BUFFER_BYTES // flat.itemsize]
            call = _SUM.pack(*self._next(), piece.data_ptr(), piece.numel(), piece.itemsize)
            self.check(counting("strata_ranks_sum")(call))

    def gather(self, items: Tensor, widths: tuple[int, ...]) -> Tensor:
        rows = items.shape[0]
        whole = items.new_empty(rows, sum(widths))
        starts = [sum(widths[:rank]) for rank in range(self.ranks)]
        step = max(1, BUFFER_BYTES // (max(widths) * items.itemsize))
        for begin in range(0, rows, step):
            count = min(step, rows - begin)
            self._next()
            self._buffer(self.rank, items.dtype, count * widths[self.rank]).copy_(
                items[begin : begin + count].reshape(-1)
            )
            self._meet()
            for rank, (start, width) in enumerate(zip(starts, widths, strict=True)):
                theirs = self._buffer(rank, items.dtype, count * width)
                whole[begin : begin + count, start : start + width] = theirs.view(count, width)
        return whole

    def reduce_scatter(self, items: Tensor) -> Tensor:
        shares = self._shares(items.shape[0])
        first, last = shares[self.rank]
        own = items.new_empty(last - first, items.shape[1])
        for begin, end in self._turns(shares, items.shape[1] * items.itemsize):
            mine = items[first + begin : min(first + end, last)]
            self._hand_out(items, shares, (begin, end))
            parts = [
                mine if rank == self.rank else self._handed(rank, mine, (end - begin) * mine.shape[1])
                for rank in range(self.ranks)
            ]
            own[begin:end] = added(parts)
        return own

    def gather_rows(self, own: Tensor, rows: int) -> Tensor:
        shares = self._shares(rows)
        whole = own.new_empty(rows, own.shape[1])
        first, last = shares[self.rank]
        whole[first:last] = own
        step = max(1, BUFFER_BYTES // (own.shape[1] * own.itemsize))
        for begin in range(0, shares[0][1], step):
            self._next()
            mine = own[begin : begin + step]
            self._buffer(self.rank, own.dtype, mine.numel()).view_as(mine).copy_(mine)
            self._meet()
            for rank, (start, stop) in enumerate(shares):
                theirs = whole[start + begin : min(start + begin + step, stop)]
                if rank != self.rank and theirs.numel():
                    theirs.copy_(self._buffer(rank, own.dtype, theirs.numel()).view_as(theirs))
        return whole

    def _shares(self, rows: int) -> list[Range]:
        """Of each rank; the first one's is the largest."""
        return [share(rows, self.ranks, rank) for rank in range(self.ranks)]

    def _turns(self, shares: list[Range], row_bytes: int) -> Iterator[tuple[int, int]]:
        """Rows of every rank's share that the ranks hand each other at once: as many as a buffer has room for."""
        step = max(1, BUFFER_BYTES // (self.ranks * row_bytes))
        most = shares[0][1]
        return ((begin, min(begin + step, most)) for begin in range(0, most, step))

    def _hand_out(self, items: Tensor, shares: list[Range], turn: tuple[int, int]) -> None:
        """The other ranks' rows of this turn, each in its place, and meet."""
        self._next()
        count, width = turn[1] - turn[0], items.shape[1]
        buffer = self._buffer(self.rank, items.dtype, self.ranks * count * width).view(self.ranks, count, width)
        for rank, (first, last) in enumerate(shares):
            theirs = items[first + turn[0] : min(first + turn[1], last)]
            if rank != self.rank:
                buffer[rank, : theirs.shape[0]].copy_(theirs)
        self._meet()

    def _handed(self, rank: int, place: Tensor, place_items: int) -> Tensor:
        """What a rank has handed this one, in the shape of `place`; place_items: of a whole place."""
        items = self._buffer(rank, place.dtype, (self.rank + 1) * place_items)[self.rank * place_items :]
        return items[: place.numel()].view(place.shape)

    def place(self, rank: int, begin: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """In what the ranks see of each other's weights: a tensor of `rank`, `begin` bytes behind the first; 0 where nothing was written."""
        count = math.prod(shape)
        if begin + count * dtype.itemsize > WEIGHTS_BYTES:
            raise InputError(f"rank {rank} has more than {WEIGHTS_BYTES >> 30} GiB of weights to share: use more ranks")
        start = rank * WEIGHTS_BYTES + begin
        return torch.frombuffer(self._weights, dtype=dtype, count=count, offset=start).view(*shape)

    @cached_property
    def _weights(self) -> mmap.mmap:
        """Mapped where a stage shares some: so many addresses are not to be had for every one that is loaded."""
        return mmap.mmap(self._segment, self.ranks * WEIGHTS_BYTES, offset=_weights_begin(self.ranks, 0))

    def forget(self, begin: int, end: int) -> None:
        """Give the system back whole pages of this rank's weights."""
        first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            self._weights.madvise(mmap.MADV_REMOVE, self.rank * WEIGHTS_BYTES + first, last - first)

    def see(self, rank: int, begin: int, end: int) -> None:
        """This process is to have these bytes of a rank's weights in its page table: not one by one, in the middle of a step. `begin`: of a page."""
        self._sees_weights = True
        with contextlib.suppress(OSError):  # older kernels: then it has them one by one
            self._weights.madvise(_POPULATE_READ, rank * WEIGHTS_BYTES + begin, end - begin)

    def meet(self) -> None:
        """All ranks have come here."""
        self._next()
        self._meet()

    @property
    def shared_bytes(self) -> int:
        """Memory of the segment that is private to no process any more."""
        return os.fstat(self._segment).st_blocks * 512 if self._sees_weights else 0

    def end(self) -> None:
        _end()(self._bytes.data_ptr())

    def _next(self) -> Numbers:
        self._meeting.value += 1
        return self._call()

    def _call(self) -> Numbers:
        return self._met_by(self._meeting.value)

    def _met_by(self, meeting: int) -> Numbers:
        """As the library takes a meeting. `meeting`: its number, or where that lies."""
        patience = int(self._patience * 1e9)
        return (self._bytes.data_ptr(), self.rank, self.ranks, BUFFER_BYTES, meeting, patience)

    def _meet(self) -> None:
        self.check(counting("strata_ranks_meet")(_MEET.pack(*self._call())))

    @property
    def numbers(self) -> Numbers:
        """For sums within a call of the library, which goes on with the numbers of meetings."""
        return self._met_by(ctypes.addressof(self._meeting))

    def check(self, late: int) -> None:
        """Raises RankLostError for what a meeting has come to in the library."""
        if late < 0:
            raise RankLostError(f"rank {self.rank} of {self.ranks}: the ranks of this stage were ended")
        if late:
            raise RankLostError(
                f"rank {late - 1} of {self.ranks} did not come to a collective within {self._patience:g} s: it hangs, or died"
            )

    def _buffer(self, rank: int, dtype: torch.dtype, count: int) -> Tensor:
        """That a rank writes to for this meeting."""
        begin = _LINE * (1 + self.ranks) + (2 * rank + self._meeting.value % 2) * BUFFER_BYTES
        return self._bytes[begin : begin + count * dtype.itemsize].view(dtype)


def added(parts: Sequence[Tensor]) -> Tensor:
    """Sums in the order of the parts, rounded once: as the library adds up what ranks have. All of one shape and type."""
    if len(parts) == 1:
        return parts[0]
    total = parts[0].float() + parts[1]
    for part in parts[2:]:
        total += part
    return total.to(parts[0].dtype)


@cache
def _end() -> Callable[[int], None]:
    found = library()
    assert found is not None, "there is no native library: `runs` was not asked"
    found.strata_ranks_end.argtypes, found.strata_ranks_end.restype = (ctypes.c_int64,), None
    end: Callable[[int], None] = found.strata_ranks_end
    return end
