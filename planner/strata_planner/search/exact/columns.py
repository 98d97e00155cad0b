"""Columns of a lattice: a block of units on a kind of stage with so many units at each bit-width, within memory.

Called by `decomposition`. Prices all columns at once under given shares of the slowest stage, and keeps those that can be
part of a plan below a cutoff. A stage's memory is exact here; only the slowest stage is still relaxed.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from strata_planner.search.exact.blocks import Blocks, Counts
from strata_planner.search.exact.effort import CALL, Effort
from strata_planner.search.exact.lattice import Floats, Ints, Lattice
from strata_planner.search.exact.problem import StageCosts

MOST_COLUMNS = 2_000_000
_PIVOTS = 24  # of a block's cheapest columns that the others are held against
_PASSES_TO_FIT, _PASSES_TO_PRICE = 6, 3  # over the numbers of a table


@dataclass(frozen=True)
class Borders:
    """For each kind: where its blocks may begin (first to last) and end, and how long they may be."""

    begin: tuple[tuple[int, int], ...]
    end: tuple[tuple[int, int], ...]
    longest: tuple[int, ...]


@dataclass(frozen=True)
class Kept:
    """Columns sorted by block: `starts[b]` is where block b's columns begin. Of a block: its kind and borders. Of a column:
    counts [columns, bits], seconds [columns, phase] of its stage, and its cost without any share of the slowest.
    """

    kind: Ints
    first: Ints
    end: Ints
    starts: Ints
    counts: Counts
    seconds: Floats
    cost: Floats


class Columns:
    """Of one lattice, whose blocks' penalties may be shared with others of the same model."""

    def __init__(self, lattice: Lattice, blocks: Blocks, effort: Effort) -> None:
        self.lattice = lattice
        self._blocks, self._effort = blocks, effort
        self._usable: dict[tuple[int, int], Ints] = {}

    @cached_property
    def borders(self) -> Borders:
        """What memory alone allows: no block longer than its stage holds, and the other stages must hold the rest."""
        lattice = self.lattice
        longest = [self._longest(kind) for kind in lattice.kinds]
        lows, highs = self._reach(np.array(longest))
        begin = [[lattice.units, 0] for _ in lattice.kinds]
        end = [[lattice.units, 0] for _ in lattice.kinds]
        for number, level in enumerate(lattice.levels):
            for source, target, kind in zip(level.source, level.target, level.kind, strict=True):
                for window, at, state in ((begin, number, source), (end, number + 1, target)):
                    window[kind][0] = min(window[kind][0], int(lows[at][state]))
                    window[kind][1] = max(window[kind][1], int(highs[at][state]))
        return Borders(tuple((a, b) for a, b in begin), tuple((a, b) for a, b in end), tuple(longest))

    def _reach(self, longest: Ints) -> tuple[list[Ints], list[Ints]]:
        """The least and the most units before each state, at least one on every stage."""
        lattice = self.lattice
        places, units = len(lattice.levels), lattice.units
        highs: list[Ints] = [np.zeros(1, dtype=np.int64)]
        for number, level in enumerate(lattice.levels):
            most = np.maximum.reduceat(highs[-1][level.source] + longest[level.kind], level.starts)
            highs.append(np.minimum(most, units - (places - 1 - number)))
        lows: list[Ints] = [np.array([units])]
        for number in range(places - 1, -1, -1):
            level = lattice.levels[number]
            least = np.full(len(highs[number]), units)
            np.minimum.at(least, level.source, lows[0][level.target] - longest[level.kind])
            lows.insert(0, np.maximum(least, number))
        return lows, highs

    def _longest(self, kind: StageCosts) -> int:
        """Units that the stage holds at most, whatever their bits."""
        sizes = [(kind.bytes[0][b], kind.weight_bytes[0][b], b < 16) for b in kind.seconds[0]]
        most = [
            min(
                (kind.capacity_bytes - (kind.quantized_bytes if low else kind.dense_bytes)) // max(size, 1),
                (kind.loading_capacity_bytes - low * kind.loading_quantized_bytes) // max(weights, 1),
            )
            for size, weights, low in sizes
        ]
        return max(0, min(max(most, default=0), self.lattice.units - len(self.lattice.levels) + 1))

    def usable(self, kind: int, size: int) -> Ints:
        """Which of the blocks' counts of a length the kind of stage has the bits and the memory for."""
        key = (kind, size)
        if key not in self._usable:
            stage, bits = self.lattice.kinds[kind], np.array(self.lattice.bits)
            counts = self._blocks.counts(size).astype(np.int64)
            self._effort.spend(CALL + _PASSES_TO_FIT * counts.size)
            lacking = np.array([b not in stage.seconds[0] for b in self.lattice.bits])
            low, high = (counts[:, bits < 16] > 0).any(1), (counts[:, bits >= 16] > 0).any(1)
            serving = counts @ np.array([stage.bytes[0][b] for b in self.lattice.bits])
            serving += low * stage.quantized_bytes + high * stage.dense_bytes + (low & high) * stage.mixed_bytes
            loading = counts @ np.array([stage.weight_bytes[0][b] for b in self.lattice.bits])
            loading += low * stage.loading_quantized_bytes
            fits = (serving <= stage.capacity_bytes) & (loading <= stage.loading_capacity_bytes)
            self._usable[key] = np.flatnonzero(fits & ~(counts[:, lacking] > 0).any(1))
        return self._usable[key]

    def _sizes(self, kind: int) -> list[tuple[int, Ints]]:
        """Every length that a block of the kind may have, and where such blocks begin."""
        borders, units = self.borders, self.lattice.units
        (low, high), (least, most) = borders.begin[kind], borders.end[kind]
        found = []
        for size in range(1, borders.longest[kind] + 1):
            firsts = np.arange(max(low, least - size), min(high, most - size, units - size) + 1)
            if len(firsts):
                found.append((size, firsts))
        return found

    def _priced(self, kind: int, size: int, firsts: Ints, beside: Floats) -> Floats:
        """[blocks, usable counts]: cost of each column; `beside` [counts] its penalty. One row where the blocks are equal."""
        usable = self.usable(kind, size)
        table = self._blocks.penalties(size)
        rows = table if len(table) == 1 else table[firsts[0] : firsts[-1] + 1]
        self._effort.spend(CALL + _PASSES_TO_PRICE * rows.size)
        if len(usable) < rows.shape[1]:
            rows, beside = rows[:, usable], beside[usable]
        return rows + beside

    def _beside(self, size: int, linear: Floats) -> Floats:
        """[kinds, counts] what blocks cost beside their penalty; `linear` [kinds, bits] of a unit. Of all kinds at once: numbers are made of counts
        for that, which takes longer than to weigh them.
        """
        counts = self._blocks.counts(size)
        self._effort.spend(CALL + (1 + len(linear)) * counts.size)
        costs: Floats = linear @ counts.T.astype(np.float64)
        return costs

    def cheapest(self, linear: Floats) -> Floats:
        """[kinds, end, first]: the least cost of a block's units on a kind of stage; infinite where none fits."""
        units = self.lattice.units
        table = np.full((len(self.lattice.kinds), units + 1, units + 1), np.inf)
        beside: dict[int, Floats] = {}
        for kind in range(len(table)):
            for size, firsts in self._sizes(kind):
                if len(self.usable(kind, size)):
                    if size not in beside:
                        beside[size] = self._beside(size, linear)
                    table[kind, firsts + size, firsts] = self._priced(kind, size, firsts, beside[size][kind]).min(1)
        return table

    def best(self, kind: int, first: int, end: int, linear: Floats) -> tuple[Ints, float]:
        """The cheapest counts of a block, and their penalty."""
        size = end - first
        costs = self._priced(kind, size, np.array([first]), self._beside(size, linear[None])[0])[0]
        at = self.usable(kind, size)[int(costs.argmin())]
        penalty = self._blocks.penalties(size)[self._blocks.row(first), at]
        return self._blocks.counts(size)[at].astype(np.int64), float(penalty)

    def below(self, linear: Floats, slack: Floats) -> Kept | None:
        """Columns that cost at most `slack` [kinds, end, first] under `linear`; None where they are too many to hold."""
        blocks: list[tuple[int, int, int, int]] = []
        picked: list[Ints] = []
        total = 0
        for kind in range(len(self.lattice.kinds)):
            for size, firsts in self._sizes(kind):
                allowed = slack[kind, firsts + size, firsts]
                some = np.flatnonzero(allowed > -np.inf)
                if not len(some):
                    continue
                near = slice(some[0], some[-1] + 1)
                priced = self._priced(kind, size, firsts[near], self._beside(size, linear[kind : kind + 1])[0])
                row, column = np.nonzero(priced <= allowed[near, None])
                usable = self.usable(kind, size)[column]
                total += len(column)
                if total > MOST_COLUMNS:
                    return None
                ends = np.searchsorted(row, np.arange(len(firsts[near]) + 1))
                for first, low, high in zip(firsts[near], ends, ends[1:], strict=False):
                    if high > low:
                        blocks.append((kind, int(first), size, int(high - low)))
                        picked.append(usable[low:high])
        return self._kept(blocks, picked)

    def _kept(self, blocks: list[tuple[int, int, int, int]], picked: list[Ints]) -> Kept:
        lattice = self.lattice
        kind, first, size, number = (np.array([block[i] for block in blocks], dtype=np.int64) for i in range(4))
        tables = [self._blocks.counts(block[2])[mine] for block, mine in zip(blocks, picked, strict=True)]
        empty = np.zeros((0, len(lattice.bits)), dtype=np.int16)
        counts = np.concatenate([empty, *tables])
        penalties = [
            self._blocks.penalties(block[2])[self._blocks.row(block[1])][mine]
            for block, mine in zip(blocks, picked, strict=True)
        ]
        of_column = np.repeat(kind, number)
        seconds = np.einsum("cb,cbp->cp", counts, lattice.seconds[of_column]) + lattice.fixed[of_column]
        self._effort.spend(_PIVOTS * len(seconds))
        cost = np.concatenate([np.zeros(0), *penalties]) + seconds[:, 0] + lattice.weights[2] * seconds[:, 1]
        return _undominated(Kept(kind, first, first + size, _starts(number), counts, seconds, cost))


def _starts(number: Ints) -> Ints:
    return np.cumsum(np.concatenate([[0], number]))[:-1].astype(np.int64)


def _undominated(kept: Kept) -> Kept:
    """Without columns that another of their block beats in cost and in both phases: no path needs them."""
    number = np.diff(np.append(kept.starts, len(kept.cost)))
    block = np.repeat(np.arange(len(number)), number)
    left = np.lexsort((kept.seconds[:, 0], kept.cost, block))
    prefill, decode = kept.seconds[:, 0], kept.seconds[:, 1]
    for rank in range(_PIVOTS):
        mine = block[left]
        starts = np.searchsorted(mine, np.arange(len(number)))
        pivot = starts[mine] + rank
        below = pivot < np.arange(len(left))
        if not below.any():
            break
        best = left[np.minimum(pivot, len(left) - 1)]
        beaten = below & (prefill[best] <= prefill[left]) & (decode[best] <= decode[left])
        left = left[~beaten]
    number = np.bincount(block[left], minlength=len(number))
    return Kept(
        kept.kind, kept.first, kept.end, _starts(number), kept.counts[left], kept.seconds[left], kept.cost[left]
    )
