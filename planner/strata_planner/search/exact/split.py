"""A split as the heuristics see it: how many units each stage has at which bits, priced by arrays.

Used by `transfer`, and by the partitions that benchmarks compare with. Within a stage the least sensitive units get the fewest bits.
"""

from dataclasses import dataclass

import numpy as np

from strata_planner.search.exact.lattice import Floats, Ints, unit_runs
from strata_planner.search.exact.problem import Counts, Problem

Stages = tuple[tuple[int, ...], ...]  # bits (by index) of each unit of every stage, ascending


@dataclass(frozen=True)
class Priced:
    """`fits`: within memory and the bound of the penalty. `slowest` [phase]: the slowest stage, hops left out."""

    objective: float
    fits: bool
    slowest: tuple[int, int]


class Splits:
    """Of one candidate."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.bits = tuple(sorted(problem.runs[0].omega))
        self.runs = unit_runs(problem)
        never = (np.inf, np.inf)
        self._seconds = np.array(
            [[[stage.seconds[r].get(b, never) for b in self.bits] for r in self.runs] for stage in problem.stages]
        )
        omega = np.array([[problem.runs[r].omega[b] for b in self.bits] for r in self.runs])
        self._omega = omega
        self._spread: Floats = omega[:, 0] - omega[:, -1]

    def able(self, place: int) -> list[int]:
        """Bits (by index) that a stage has for all units."""
        return [b for b in range(len(self.bits)) if np.isfinite(self._seconds[place, :, b]).all()]

    def dealt(self, stages: Stages) -> list[Ints]:
        """The bits (by index) of each stage's units, in order."""
        found, first = [], 0
        for bits in stages:
            order = np.argsort(self._spread[first : first + len(bits)], kind="stable")
            mine = np.empty(len(bits), dtype=np.int64)
            mine[order] = bits
            found.append(mine)
            first += len(bits)
        return found

    def counts(self, stages: Stages) -> Counts:
        counts: Counts = {}
        unit = 0
        for j, mine in enumerate(self.dealt(stages)):
            for b in mine:
                key = (self.runs[unit], j, self.bits[b])
                counts[key] = counts.get(key, 0) + 1
                unit += 1
        return counts

    def times(self, stages: Stages) -> Floats:
        """[stages, phase] of a micro-batch."""
        found, first = [], 0
        for j, mine in enumerate(self.dealt(stages)):
            units = np.arange(first, first + len(mine))
            found.append(self._seconds[j, units, mine].sum(0) + self.problem.stages[j].fixed_seconds)
            first += len(mine)
        return np.array(found)

    def priced(self, stages: Stages) -> Priced:
        problem, counts = self.problem, self.counts(stages)
        times = self.times(stages)
        slowest = (int(times[:, 0].argmax()), int(times[:, 1].argmax()))
        if not np.isfinite(times).all() or not all(stages):
            return Priced(np.inf, fits=False, slowest=slowest)
        hops = np.array([stage.transfer_seconds for stage in problem.stages])
        peak, total = np.maximum(times.max(0), hops.max(0)), times.sum(0) + hops.sum(0)
        penalty = sum(self._omega[at, b] for at, b in enumerate(b for mine in self.dealt(stages) for b in mine))
        objective = problem.slowest_prefill * peak[0] + problem.slowest_decode * peak[1]
        objective += total[0] + problem.sum_decode * total[1] + problem.theta * penalty
        fits = penalty <= problem.penalty_bound and all(
            problem.free_bytes(self._stage_counts(counts, j), j) >= 0 for j in range(len(stages))
        )
        return Priced(float(objective), fits=fits, slowest=slowest)

    @staticmethod
    def _stage_counts(counts: Counts, j: int) -> Counts:
        return {key: count for key, count in counts.items() if key[1] == j}

    def stages_of(self, counts: Counts) -> Stages:
        found: list[list[int]] = [[] for _ in self.problem.stages]
        for (_, j, b), count in counts.items():
            found[j] += [self.bits.index(b)] * count
        return tuple(tuple(sorted(each)) for each in found)
