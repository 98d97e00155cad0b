"""Collectives of ranks that are processes (or, in tests, threads) of one machine: over a segment of shared memory, in the native library.

A sum is one meeting of the ranks (kernels/native/ranks.cpp): each writes what it has, waits for the others awake for microseconds, then reads theirs.
"""

import ctypes
import mmap
import os
import struct
from functools import cache
from typing import Any

import torch
from torch import Tensor

from strata_runtime.kernels.native import library
from strata_runtime.ranks.collectives import RankLostError

BUFFER_BYTES = 1 << 20  # larger tensors go in pieces
PATIENCE_SECONDS = 10.0  # ranks are apart by far less, unless one hangs: they meet twice in every layer
_LINE = 64
_MEET = struct.Struct("6q")
_SUM = struct.Struct("9q")


def runs() -> bool:
    """Whether the library is here."""
    return library() is not None


def make_segment(ranks: int) -> int:
    """The file descriptor of a segment for so many ranks: memory that ends with the last process that has it."""
    descriptor = os.memfd_create("strata-ranks", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, _LINE * (1 + ranks) + 2 * ranks * BUFFER_BYTES)
    return descriptor


class SharedMemory:
    """One rank's end of a segment: see `Collectives`. float32 and bfloat16; other types are added up in float32."""

    def __init__(self, segment: int, rank: int, ranks: int, patience: float | None = None) -> None:
        """segment: its file descriptor, which may be closed afterwards."""
        self.rank, self.ranks = rank, ranks
        self._patience = PATIENCE_SECONDS if patience is None else patience
        self._memory = mmap.mmap(segment, 0)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._meeting = 0

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
            self._check(_functions().strata_ranks_sum(call))

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

    def end(self) -> None:
        _functions().strata_ranks_end(self._bytes.data_ptr())

    def _next(self) -> tuple[int, ...]:
        self._meeting += 1
        return self._call()

    def _call(self) -> tuple[int, ...]:
        patience = int(self._patience * 1e9)
        return (self._bytes.data_ptr(), self.rank, self.ranks, BUFFER_BYTES, self._meeting, patience)

    def _meet(self) -> None:
        self._check(_functions().strata_ranks_meet(_MEET.pack(*self._call())))

    def _check(self, late: int) -> None:
        if late < 0:
            raise RankLostError(f"rank {self.rank} of {self.ranks}: the ranks of this stage were ended")
        if late:
            raise RankLostError(
                f"rank {late - 1} of {self.ranks} did not come to a collective within {self._patience:g} s: it hangs, or died"
            )

    def _buffer(self, rank: int, dtype: torch.dtype, count: int) -> Tensor:
        """That a rank writes to for this meeting."""
        begin = _LINE * (1 + self.ranks) + (2 * rank + self._meeting % 2) * BUFFER_BYTES
        return self._bytes[begin : begin + count * dtype.itemsize].view(dtype)


@cache
def _functions() -> Any:
    found = library()
    assert found is not None, "there is no native library: `runs` was not asked"
    for name in ("strata_ranks_meet", "strata_ranks_sum"):
        function = getattr(found, name)
        function.argtypes, function.restype = (ctypes.c_char_p,), ctypes.c_int64
    found.strata_ranks_end.argtypes, found.strata_ranks_end.restype = (ctypes.c_int64,), None
    return found
