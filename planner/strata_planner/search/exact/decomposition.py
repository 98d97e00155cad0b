"""The best pipeline of a lattice, proven: shares of the slowest stage, then the columns that can be part of it, then
branch and bound over them.

Called by `exact` (one candidate) and `search` (all orders of a pool at once). Every bound comes with a pipeline, too.
"""

import math
from dataclasses import dataclass

import numpy as np

from strata_planner.search.exact.blocks import Blocks, table_entries
from strata_planner.search.exact.columns import Columns, Kept
from strata_planner.search.exact.effort import CALL, Effort
from strata_planner.search.exact.lattice import Floats, Ints, Lattice
from strata_planner.search.exact.shares import Ascent, even_shares
from strata_planner.search.exact.thresholds import Thresholds

_PASSES = 3  # over the arcs of a level


@dataclass(frozen=True)
class Part:
    """A stage of a pipeline: the lattice's step to it, its kind, its units first .. end - 1, units at each bit-width."""

    step: int
    kind: int
    first: int
    end: int
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Pipeline:
    """What it costs in full, and its stages in order."""

    objective: float
    parts: tuple[Part, ...]


class Decomposition:
    """`bound`: no pipeline is below it. `best`: the best pipeline seen. Where its effort ends, both are as far as they have come."""

    def __init__(self, lattice: Lattice, blocks: Blocks, effort: Effort) -> None:
        self.lattice = lattice
        self.bound = -math.inf
        self.best: Pipeline | None = None
        self.effort = effort
        self._blocks = blocks
        self._columns = Columns(lattice, blocks, effort)
        self._weights = np.array(lattice.weights[:2])
        self._shares = even_shares(lattice)
        decode_sum = lattice.weights[2]
        self._hops = [level.hop_sum[:, 0] + decode_sum * level.hop_sum[:, 1] for level in lattice.levels]

    @property
    def table_entries(self) -> int:
        """Numbers in the blocks' tables that a solution needs."""
        lattice = self.lattice
        return table_entries(lattice.units, max(self._columns.borders.longest), len(lattice.bits))

    @property
    def objective(self) -> float:
        """Of the best pipeline seen."""
        return self.best.objective if self.best else math.inf

    def tune(self, cutoff: float, rounds: int, start: Floats | None = None) -> Floats:
        """Raise the bound by better shares, until it reaches `cutoff`; the shares, for the next one to start from."""
        ascent = Ascent(self.lattice, self._shares if start is None else start)
        for _ in range(rounds):
            bound, times = self._walk(ascent.shares)
            self.bound = max(self.bound, bound)
            target = min(cutoff, self.objective)
            target = target if math.isfinite(target) else 1.05 * bound
            if not math.isfinite(bound) or not ascent.move(bound, times, target) or self.effort.ended_by is not None:
                break
        self._shares = ascent.best
        return self._shares

    def solve(self, cutoff: float, tolerance: float) -> None:
        """Find the best pipeline below `cutoff`, and raise the bound to it or to the best pipeline less the tolerance."""
        cutoff = min(cutoff, self.objective * (1 - tolerance))
        found = self._below(cutoff)
        while found is None:  # nearer to the bound there are fewer
            if self.effort.ended_by is not None:
                return
            cutoff = (cutoff + self.bound) / 2
            found = self._below(cutoff)
        kept, arcs = found
        if not len(kept.cost) or any(not len(steps) for steps, _ in arcs):
            self.bound = max(self.bound, cutoff)
            return
        route, bound = Thresholds(self.lattice, kept, arcs, self.effort).solve(self._shares, cutoff, tolerance)
        self.bound = max(self.bound, bound)
        if route is not None and route.objective < self.objective:
            block_of = np.repeat(np.arange(len(kept.kind)), np.diff(np.append(kept.starts, len(kept.cost))))
            parts = tuple(
                Part(
                    step,
                    int(kept.kind[block_of[column]]),
                    int(kept.first[block_of[column]]),
                    int(kept.end[block_of[column]]),
                    tuple(int(each) for each in kept.counts[column]),
                )
                for step, column in zip(route.steps, route.columns, strict=True)
            )
            self.best = Pipeline(route.objective, parts)

    def unit_bits(self, part: Part) -> list[int]:
        """The bits of each unit of a stage, dealt for the least penalty."""
        return [self.lattice.bits[b] for b in self._blocks.dealt(part.first, np.array(part.counts))]

    def _linear(self, shares: Floats) -> Floats:
        """[kinds, bits]: what a unit costs beside its penalty."""
        lattice, shared = self.lattice, shares[self.lattice.group][:, None, :]
        weighed = lattice.seconds * (shared + np.array([1.0, lattice.weights[2]]))
        return np.asarray(weighed.sum(2))

    def _table(self, shares: Floats) -> Floats:
        """[kinds, end, first]: the least cost of a stage with units first .. end - 1."""
        lattice, shared = self.lattice, shares[self.lattice.group]
        fixed = (lattice.fixed * (shared + np.array([1.0, lattice.weights[2]]))).sum(1)
        table: Floats = self._columns.cheapest(self._linear(shares)) + fixed[:, None, None]
        return table

    def _walk(self, shares: Floats) -> tuple[float, Floats]:
        """The bound under `shares`, and the seconds of its path by group. The path is a pipeline: keep it if it is good."""
        table = self._table(shares)
        forward, arrivals = self._forward(table)
        bound = float(forward[-1][0, -1])
        if not math.isfinite(bound):
            return bound, np.zeros((0, 2))
        pipeline, times = self._followed(shares, table, forward, arrivals)
        if pipeline.objective < self.objective:
            self.best = pipeline
        return bound, times

    def _forward(self, table: Floats) -> tuple[list[Floats], list[Floats]]:
        """Least costs up to each state and border, level by level; and per step before they are joined."""
        at = np.full((1, self.lattice.units + 1), np.inf)
        at[0, 0] = 0.0
        states, arrivals = [at], []
        for level, hops in zip(self.lattice.levels, self._hops, strict=True):
            low, high = _span(states[-1])
            self.effort.spend(CALL + _PASSES * len(level.kind) * at.shape[1] * (high - low))
            arrived = (states[-1][level.source, None, low:high] + table[level.kind, :, low:high]).min(2)
            arrived += hops[:, None]
            arrivals.append(arrived)
            states.append(np.minimum.reduceat(arrived, level.starts, axis=0))
        return states, arrivals

    def _backward(self, table: Floats) -> list[Floats]:
        at = np.full((1, self.lattice.units + 1), np.inf)
        at[0, -1] = 0.0
        states = [at]
        for level, hops in zip(reversed(self.lattice.levels), reversed(self._hops), strict=True):
            low, high = _span(states[0])
            self.effort.spend(CALL + _PASSES * len(level.kind) * at.shape[1] * (high - low))
            left = (states[0][level.target, low:high, None] + table[level.kind, low:high]).min(1)
            left += hops[:, None]
            before = np.full((int(level.source.max()) + 1, left.shape[1]), np.inf)
            np.minimum.at(before, level.source, left)
            states.insert(0, before)
        return states

    def _followed(
        self, shares: Floats, table: Floats, forward: list[Floats], arrivals: list[Floats]
    ) -> tuple[Pipeline, Floats]:
        lattice, linear = self.lattice, self._linear(shares)
        state, end, total = 0, lattice.units, 0.0
        slowest, times = np.zeros(2), np.zeros((len(lattice.members), 2))
        parts: list[Part] = []
        for number in range(len(lattice.levels) - 1, -1, -1):
            level = lattice.levels[number]
            step = _best_step(level.starts, state, arrivals[number][:, end])
            kind, state = int(level.kind[step]), int(level.source[step])
            first = int((forward[number][state] + table[kind, end]).argmin())
            counts, penalty = self._columns.best(kind, first, end, linear[kind])
            seconds = counts @ lattice.seconds[kind] + lattice.fixed[kind]
            slowest = np.maximum(slowest, np.maximum(seconds, level.hop_max[step]))
            times[lattice.group[kind]] += seconds
            total += penalty + seconds[0] + lattice.weights[2] * seconds[1] + self._hops[number][step]
            parts.append(Part(step, kind, first, end, tuple(int(each) for each in counts)))
            end = first
        return Pipeline(float(total + self._weights @ slowest), tuple(reversed(parts))), times

    def _below(self, cutoff: float) -> tuple[Kept, list[tuple[Ints, Ints]]] | None:
        """Columns that may lie on a route below the cutoff, and per level the steps and blocks of such routes."""
        lattice, table = self.lattice, self._table(self._shares)
        linear = self._linear(self._shares)
        forward, _ = self._forward(table)
        backward = self._backward(table)
        slack = np.full_like(table, -np.inf)
        rests = []
        for number, level in enumerate(lattice.levels):
            self.effort.spend(CALL + 2 * _PASSES * len(level.kind) * table[0].size)
            rest = forward[number][level.source, None, :] + backward[number + 1][level.target, :, None]
            rest += self._hops[number][:, None, None]
            rests.append(rest)
            np.maximum.at(slack, level.kind, cutoff - rest)
        slack[table > slack] = -np.inf
        fixed = lattice.fixed * (self._shares[lattice.group] + np.array([1.0, lattice.weights[2]]))
        kept = self._columns.below(linear, slack - fixed.sum(1)[:, None, None])
        if kept is None:
            return None
        arcs = []
        for rest, level in zip(rests, lattice.levels, strict=True):
            self.effort.spend(CALL + _PASSES * len(rest) * len(kept.end))
            cost = rest[:, kept.end, kept.first] + table[kept.kind, kept.end, kept.first]
            cost[level.kind[:, None] != kept.kind] = np.inf
            steps, blocks = np.nonzero(cost <= cutoff)
            arcs.append((steps, blocks))
        return kept, arcs


def _span(states: Floats) -> tuple[int, int]:
    """The borders that some state reaches."""
    some = np.flatnonzero(np.isfinite(states).any(0))
    return (int(some[0]), int(some[-1]) + 1) if len(some) else (0, 1)


def _best_step(starts: Ints, state: int, arrived: Floats) -> int:
    low = int(starts[state])
    high = int(starts[state + 1]) if state + 1 < len(starts) else len(arrived)
    return low + int(arrived[low:high].argmin())
