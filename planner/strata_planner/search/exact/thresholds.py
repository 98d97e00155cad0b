"""The best path of a lattice over columns: branch and bound over how long the slowest stage of each phase may take.

Called by `decomposition`. For P_low < slowest prefill <= P_high and the same of decode, columns beyond the upper limits are
out and what is short of the lower ones is lifted to them: under any shares that add up to the weight of the slowest, the
shortest path is a lower bound, and it is exact once the limits meet. Each path is a plan, too.
"""

import heapq
import math
from dataclasses import dataclass, field

import numpy as np

from strata_planner.search.exact.columns import Kept
from strata_planner.search.exact.effort import CALL, Effort
from strata_planner.search.exact.lattice import Floats, Ints, Lattice
from strata_planner.search.exact.shares import Ascent

_ROUNDS = 20  # of better shares before branching
_PASSES = 8  # over all columns and arcs, of a shortest path


@dataclass(frozen=True)
class Limits:
    """Of the slowest stage or hop, [phase] each."""

    low: tuple[float, float]
    high: tuple[float, float]

    def halves(self, phase: int, at: float) -> tuple["Limits", "Limits"]:
        """At most `at`, and more than that."""

        def put(pair: tuple[float, float], value: float) -> tuple[float, float]:
            return (value, pair[1]) if phase == 0 else (pair[0], value)

        return Limits(self.low, put(self.high, at)), Limits(put(self.low, at), self.high)


@dataclass(frozen=True)
class Route:
    """A path: its steps (level by level) and columns, and what it costs in full."""

    steps: tuple[int, ...]
    columns: tuple[int, ...]
    objective: float


@dataclass(frozen=True)
class _Stretch:
    """Arcs of one level sorted by target node: a step of the lattice with a block."""

    step: Ints
    block: Ints
    source: Ints
    starts: Ints
    hop_cost: Floats
    hop_max: Floats


@dataclass(frozen=True)
class _Walk:
    """What one shortest path tells: its bound, its route, and its shares' view of the slowest stage."""

    bound: float
    route: Route | None
    slowest: tuple[float, float] = (math.inf, math.inf)
    averages: tuple[float, float] = (0.0, 0.0)
    times: Floats = field(default_factory=lambda: np.zeros((0, 2)))


class Thresholds:
    """Over the columns kept of one lattice. `slack` [step, border, border] per level: arcs above 0 lead to nothing good."""

    def __init__(self, lattice: Lattice, kept: Kept, arcs: list[tuple[Ints, Ints]], effort: Effort) -> None:
        """`arcs`: per level, steps and blocks."""
        self._lattice = lattice
        self._kept, self._effort = kept, effort
        self._work = _PASSES * (CALL * len(arcs) + len(kept.cost) + sum(len(steps) for steps, _ in arcs))
        self._weights = np.array(lattice.weights[:2])
        self._of_column = np.repeat(kept.kind, np.diff(np.append(kept.starts, len(kept.cost))))
        self._group = lattice.group[self._of_column]
        self._seconds = np.ascontiguousarray(kept.seconds.T)
        self._stretches: list[_Stretch] = []
        self._sizes: list[int] = [1]
        self._open = self._lay(arcs)

    def _lay(self, arcs: list[tuple[Ints, Ints]]) -> bool:
        """Nodes of a level are numbered by (state, border); arcs from nodes that nothing reaches are left out."""
        width = self._lattice.units + 1
        nodes = np.array([0])
        for level, (steps, blocks) in zip(self._lattice.levels, arcs, strict=True):
            source = level.source[steps] * width + self._kept.first[blocks]
            found = np.minimum(np.searchsorted(nodes, source), len(nodes) - 1)
            reached = np.flatnonzero(nodes[found] == source)
            if not len(reached):
                return False
            target = level.target[steps[reached]] * width + self._kept.end[blocks[reached]]
            order = reached[np.argsort(target, kind="stable")]
            nodes, starts = np.unique(np.sort(target), return_index=True)
            step, block, at = steps[order], blocks[order], found[order]
            hops = level.hop_sum[step]
            cost = hops[:, 0] + self._lattice.weights[2] * hops[:, 1]
            self._stretches.append(_Stretch(step, block, at, starts, cost, level.hop_max[step]))
        return len(nodes) == 1

    def solve(self, shares: Floats, cutoff: float, tolerance: float) -> tuple[Route | None, float]:
        """The best route below `cutoff`, and a bound of all others: `cutoff`, or what was found less the tolerance; lower only
        where the effort ends before. `shares` [groups, phase].
        """
        if not self._open:
            return None, cutoff
        shares, walk = self._tuned(shares, cutoff)
        best = self._better(None, walk, cutoff)
        ceiling = min(cutoff, best.objective * (1 - tolerance)) if best else cutoff
        queue = [(walk.bound, 0, Limits((0.0, 0.0), (math.inf, math.inf)), walk)]
        number = 0
        while queue and queue[0][0] < ceiling and self._effort.ended_by is None:
            bound, _, limits, walk = heapq.heappop(queue)
            for part in self._split(limits, walk):
                number += 1
                walked = self._walk(shares, part)
                best = self._better(best, walked, cutoff)
                ceiling = min(cutoff, best.objective * (1 - tolerance)) if best else cutoff
                if walked.bound < ceiling:
                    heapq.heappush(queue, (max(bound, walked.bound), number, part, walked))
        return best, min(queue[0][0], ceiling) if queue else ceiling

    @staticmethod
    def _better(best: Route | None, walk: _Walk, cutoff: float) -> Route | None:
        limit = best.objective if best else cutoff
        return walk.route if walk.route is not None and walk.route.objective < limit else best

    def _split(self, limits: Limits, walk: _Walk) -> tuple[Limits, Limits]:
        """At the phase whose slowest stage the shares see least, between their mean and it."""
        missing = [self._weights[phase] * (walk.slowest[phase] - walk.averages[phase]) for phase in (0, 1)]
        phase = int(missing[1] > missing[0])
        return limits.halves(phase, (walk.slowest[phase] + max(walk.averages[phase], limits.low[phase])) / 2)

    def _tuned(self, shares: Floats, cutoff: float) -> tuple[Floats, _Walk]:
        """Shares with a better bound for what is left."""
        everything = Limits((0.0, 0.0), (math.inf, math.inf))
        ascent = Ascent(self._lattice, shares)
        for _ in range(_ROUNDS):
            walk = self._walk(ascent.shares, everything)
            if walk.route is None:
                return shares, walk
            if not ascent.move(walk.bound, walk.times, min(cutoff, walk.route.objective)):
                break
        return ascent.best, self._walk(ascent.best, everything)

    def _walk(self, shares: Floats, limits: Limits) -> _Walk:
        kept, (prefill, decode) = self._kept, self._seconds
        self._effort.spend(self._work)
        mine = shares[self._group]
        lifted = np.maximum(prefill, limits.low[0]), np.maximum(decode, limits.low[1])
        costs = kept.cost + mine[:, 0] * lifted[0] + mine[:, 1] * lifted[1]
        if math.isfinite(limits.high[0]):
            costs[prefill > limits.high[0]] = np.inf
        if math.isfinite(limits.high[1]):
            costs[decode > limits.high[1]] = np.inf
        blocks = np.minimum.reduceat(costs, kept.starts)
        reach, arrivals = [np.zeros(1)], []
        for stretch in self._stretches:
            arrived = reach[-1][stretch.source] + blocks[stretch.block] + stretch.hop_cost
            slow = (stretch.hop_max > limits.high).any(1)
            if slow.any():
                arrived[slow] = np.inf
            arrivals.append(arrived)
            reach.append(np.minimum.reduceat(arrived, stretch.starts))
        bound = float(reach[-1][0])
        if not math.isfinite(bound):
            return _Walk(math.inf, None)
        return self._followed(bound, costs, arrivals, limits, shares)

    def _followed(self, bound: float, costs: Floats, arrivals: list[Floats], limits: Limits, shares: Floats) -> _Walk:
        kept, node = self._kept, 0
        steps, columns, slowest, total = [], [], np.zeros(2), 0.0
        for stretch, arrived in zip(reversed(self._stretches), reversed(arrivals), strict=True):
            low = stretch.starts[node]
            high = stretch.starts[node + 1] if node + 1 < len(stretch.starts) else len(arrived)
            arc = int(low + arrived[low:high].argmin())
            block = int(stretch.block[arc])
            begin = kept.starts[block]
            finish = kept.starts[block + 1] if block + 1 < len(kept.starts) else len(costs)
            column = int(begin + costs[begin:finish].argmin())
            steps.append(int(stretch.step[arc]))
            columns.append(column)
            slowest = np.maximum(slowest, np.maximum(kept.seconds[column], stretch.hop_max[arc]))
            total += kept.cost[column] + stretch.hop_cost[arc]
            node = int(stretch.source[arc])
        objective = float(total + self._weights @ slowest)
        group, mine = self._group[columns], np.maximum(kept.seconds[columns], limits.low)
        seen = (shares[group] * mine).sum(0) / np.maximum(self._weights, 1e-300)
        times = np.zeros((len(self._lattice.members), 2))
        np.add.at(times, group, mine)
        route = Route(tuple(reversed(steps)), tuple(reversed(columns)), objective)
        return _Walk(bound, route, (slowest[0], slowest[1]), (seen[0], seen[1]), times)
