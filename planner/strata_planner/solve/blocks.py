"""What a block of consecutive units costs in quality for every way to deal bits to it by number, exactly.

Called by `columns`. A stage's time and memory depend on how many of its units are at each bit-width; which of them are is
decided here: the least penalty over all dealings, by a recursion over the block's last unit, all blocks of a length at once.
"""

import math
from functools import cached_property

import numpy as np
import numpy.typing as npt

from strata_planner.solve.lattice import Floats, Ints

MOST_ENTRIES = 12_000_000  # of the penalties' tables

Counts = npt.NDArray[np.int16]


def table_entries(units: int, longest: int, bits: int) -> int:
    """How many numbers the penalties of all blocks up to a length are."""
    return sum((units - size + 1) * ways(size, bits) for size in range(1, longest + 1))


def ways(size: int, bits: int) -> int:
    return math.comb(size + bits - 1, bits - 1)


class Blocks:
    """`penalty` [units, bits]. Tables are made on demand, up to the longest block asked for."""

    def __init__(self, penalty: Floats) -> None:
        self._rows = penalty
        self._bits = penalty.shape[1]
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
        counts = _compositions(size, self._bits)
        ranks = np.full((self._bits, len(counts)), -1, dtype=np.int64)
        for b in range(self._bits):
            some = counts[:, b] > 0
            fewer = counts[some].copy()
            fewer[:, b] -= 1
            ranks[b, some] = _rank(fewer, size - 1)
        self._counts.append(counts)
        self._ranks.append(ranks)

    def _append(self) -> None:
        size = len(self._penalties)
        before = self._penalties[-1][: 1 if self.equal else len(self._rows) - size + 1]
        last = self._rows[size - 1 : size] if self.equal else self._rows[size - 1 :]
        ranks = self._ranks[size - 1]
        best = np.full((len(before), ranks.shape[1]), np.inf)
        for b in range(self._bits):
            some = np.flatnonzero(ranks[b] >= 0)
            reached = before[:, ranks[b, some]]
            reached += last[:, b, None]
            best[:, some] = np.minimum(best[:, some], reached)
        self._penalties.append(best)


def _compositions(size: int, bits: int) -> Counts:
    """All vectors of `bits` numbers that add up to `size`, in lexicographic order."""
    if bits == 1:
        return np.array([[size]], dtype=np.int16)
    parts = [_compositions(size - head, bits - 1) for head in range(size + 1)]
    heads = np.repeat(np.arange(size + 1, dtype=np.int16), [len(part) for part in parts])
    return np.column_stack([heads, np.concatenate(parts)])


def _rank(counts: Counts, size: int) -> Ints:
    """Where vectors stand in the lexicographic order of `_compositions`."""
    bits = counts.shape[1]
    rank = np.zeros(len(counts), dtype=np.int64)
    left = np.full(len(counts), size, dtype=np.int64)
    for b in range(bits - 1):
        rest = bits - 1 - b
        # Vectors whose number at b is less: ways of what is left, summed over those numbers.
        before = np.concatenate([[0], np.cumsum([ways(each, rest) for each in range(size + 1)])])
        rank += before[left + 1] - before[left + 1 - counts[:, b]]
        left -= counts[:, b]
    return rank
