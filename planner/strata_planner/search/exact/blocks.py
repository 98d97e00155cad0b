"""What a block of consecutive units costs in quality for every way to deal bits to it by number, exactly.

Called by `columns`. A stage's time and memory depend on how many of its units are at each bit-width; which of them are is
decided here: the least penalty over all dealings, by a recursion over the block's last unit, all blocks of a length at once.

Of more than four bit-widths a block mixes only neighbouring ones, as many as tables of a bounded size allow: what a block wants is one
trade between its memory, its time and its penalty, which layers of unlike sensitivity answer with widths that lie near each other.
"""

import math
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt

from strata_planner.search.exact.lattice import Floats, Ints

MOST_ENTRIES = 12_000_000  # of the penalties' tables
_ALL_MIX = 4  # so many widths mix freely
_MANY_WIDTHS_ENTRIES = 3_000_000  # of more: the tables of mixes that are looked at

Counts = npt.NDArray[np.int16]


def table_entries(units: int, longest: int, bits: int) -> int:
    """How many numbers the penalties of all blocks up to a length are."""
    return _entries(units, longest, bits, mixed_widths(units, bits))


def mixed_widths(units: int, bits: int) -> int:
    """How many neighbouring widths, of `bits`, a block of a model of `units` units mixes."""
    free = min(bits, _ALL_MIX)
    more = (mixed for mixed in range(bits, 1, -1) if _entries(units, units, bits, mixed) <= _MANY_WIDTHS_ENTRIES)
    return free if bits == free else next(more, 2)


def _entries(units: int, longest: int, bits: int, mixed: int) -> int:
    return sum((units - size + 1) * ways(size, bits, mixed) for size in range(1, longest + 1))


def ways(size: int, bits: int, mixed: int) -> int:
    """How many counts of `size` units there are: those within each run of `mixed` neighbouring widths, none twice."""
    windows = bits - mixed + 1
    shared = math.comb(size + mixed - 2, mixed - 2) if mixed > 1 else 0
    return windows * math.comb(size + mixed - 1, mixed - 1) - (windows - 1) * shared


class Blocks:
    """`penalty` [units, bits]. Tables are made on demand, up to the longest block asked for."""

    def __init__(self, penalty: Floats) -> None:
        self._rows = penalty
        self._bits = penalty.shape[1]
        self._mixed = mixed_widths(len(penalty), self._bits)
        self._counts: list[Counts] = [np.zeros((1, self._bits), dtype=np.int16)]
        self._ranks: list[Ints] = []  # of the counts with one unit fewer at each bit-width; -1: there is none
        self._penalties: list[Floats] = [np.zeros((len(penalty) + 1, 1))]

    @cached_property
    def equal(self) -> bool:
        """Whether all units are equal: then blocks of one length are, too."""
        return bool((self._rows == self._rows[0]).all())

    def counts(self, size: int) -> Counts:
        """[ways, bits]: every way to deal bits to `size` units, by number."""
        while len(self._counts) <= size:
            self._extend()
        return self._counts[size]

    def penalties(self, size: int) -> Floats:
        """[first unit, ways]: the least penalty of the block for each of `counts(size)`. One row where units are equal."""
        self.counts(size)
        while len(self._penalties) <= size:
            self._append()
        return self._penalties[size]

    def row(self, first: int) -> int:
        """The row of a block in its table."""
        return 0 if self.equal else first

    def dealt(self, first: int, counts: Ints) -> list[int]:
        """The bits (by index) of each unit of a block for which the penalty is least."""
        size = int(counts.sum())
        rank = int(np.flatnonzero((self.counts(size) == counts).all(1))[0])
        bits: list[int] = []
        for left in range(size, 0, -1):
            unit = first + left - 1
            before = self._ranks[left - 1][:, rank]
            table = self.penalties(left - 1)[self.row(first)]
            costs = np.where(before >= 0, table[before] + self._rows[unit], np.inf)
            chosen = int(costs.argmin())
            bits.append(chosen)
            rank = int(before[chosen])
        return bits[::-1]

    def _extend(self) -> None:
        size = len(self._counts)
        counts = _neighbouring(size, self._bits, self._mixed)
        ranks = np.full((self._bits, len(counts)), -1, dtype=np.int64)
        smaller = self._keys(self._counts[-1])
        for b in range(self._bits):
            some = counts[:, b] > 0
            fewer = counts[some].copy()
            fewer[:, b] -= 1
            ranks[b, some] = np.searchsorted(smaller, self._keys(fewer))
        self._counts.append(counts)
        self._ranks.append(ranks)

    def _keys(self, counts: Counts) -> Ints:
        """A number for each vector, in lexicographic order."""
        powers = (len(self._rows) + 1) ** np.arange(self._bits - 1, -1, -1, dtype=np.int64)
        return np.asarray(counts.astype(np.int64) @ powers)

    def _append(self) -> None:
        size = len(self._penalties)
        before = self._penalties[-1][: 1 if self.equal else len(self._rows) - size + 1]
        last = self._rows[size - 1 : size] if self.equal else self._rows[size - 1 :]
        ranks = self._ranks[size - 1]
        before = np.pad(before, ((0, 0), (0, 1)), constant_values=np.inf)  # for the rank -1
        best = np.full((len(before), ranks.shape[1]), np.inf)
        for b in range(self._bits):
            np.minimum(best, np.take(before, ranks[b], axis=1) + last[:, b, None], out=best)
        self._penalties.append(best)


def _neighbouring(size: int, bits: int, mixed: int) -> Counts:
    """All vectors of `bits` numbers that add up to `size`, of which only neighbouring ones are not zero, in lexicographic order."""
    within = _compositions(size, mixed)
    if mixed == bits:
        return within
    found = []
    for start in range(bits - mixed + 1):
        some = within if start == 0 else within[within[:, -1] > 0]  # else the run before has it
        found.append(np.pad(some, ((0, 0), (start, bits - mixed - start))))
    every = np.concatenate(found)
    return every[np.lexsort(every.T[::-1])]


@cache  # of fewer bits, which those of more are made of, again for every size
def _compositions(size: int, bits: int) -> Counts:
    """All vectors of `bits` numbers that add up to `size`, in lexicographic order."""
    if bits == 1:
        return np.array([[size]], dtype=np.int16)
    parts = [_compositions(size - head, bits - 1) for head in range(size + 1)]
    heads = np.repeat(np.arange(size + 1, dtype=np.int16), [len(part) for part in parts])
    found = np.column_stack([heads, np.concatenate(parts)])
    found.flags.writeable = False
    return found
