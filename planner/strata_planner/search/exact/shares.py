"""Shares of the slowest stage: Lagrangian multipliers of "no stage takes longer", improved by subgradients.

Used by `decomposition` and `thresholds`. `shares` [groups, phase]: what a second of a stage of the group weighs beside its
part of the sum. Never negative; over the stages of a pipeline they add up to the weight of the slowest, so that the slowest
stage is never less than what they see, and every shortest path under them is a lower bound.
"""

import numpy as np

from strata_planner.search.exact.lattice import Floats, Lattice

_PATIENCE = 2  # rounds without a better bound, after which the step is halved
_PROGRESS = 1e-6


def even_shares(lattice: Lattice) -> Floats:
    """In proportion to each group's speed, as if every stage took as long."""
    fastest = lattice.seconds.min(1)
    speed = np.zeros((len(lattice.members), 2))
    np.maximum.at(speed, lattice.group, 1 / np.maximum(fastest, 1e-12))
    total = (speed * lattice.members[:, None]).sum(0)
    shares: Floats = speed / total * np.array(lattice.weights[:2])
    return shares


class Ascent:
    """Polyak's subgradient steps from some shares; `shares` is where to evaluate next, `best` the best seen."""

    def __init__(self, lattice: Lattice, start: Floats) -> None:
        self.shares = self.best = start
        self.bound = -np.inf
        self._members = lattice.members[:, None]
        self._weights = np.array(lattice.weights[:2])
        self._agility = 1.0
        self._stale = 0
        self._best_times = np.zeros_like(start)

    def move(self, bound: float, times: Floats, target: float) -> bool:
        """`bound` at the current shares; `times` [groups, phase]: seconds of its path's stages; `target`: what the optimum may
        be. False where nothing is left to gain.
        """
        if bound > self.bound + _PROGRESS * abs(bound):
            self.best, self.bound, self._best_times, self._stale = self.shares, bound, times, 0
        else:
            self._stale += 1
            if self._stale == _PATIENCE:
                self._agility, self._stale = self._agility / 2, 0
                self.shares, bound, times = self.best, self.bound, self._best_times
        slopes = self._weights * times / self._members
        slopes = slopes - (slopes * self._members).sum(0) / self._members.sum()
        norm = float((slopes**2).sum())
        if norm < 1e-18 or self.bound >= target:
            return False
        weights = np.maximum(self._weights, 1e-300)
        portions = self.shares * self._members / weights + self._agility * (target - bound) / norm * slopes
        projected = np.stack([_on_simplex(portions[:, phase]) for phase in (0, 1)], axis=1)
        self.shares = projected * self._weights / self._members
        return True


def _on_simplex(values: Floats) -> Floats:
    """The nearest point whose parts are not negative and add up to 1."""
    order = np.sort(values)[::-1]
    over = (np.cumsum(order) - 1) / np.arange(1, len(values) + 1)
    last = int(np.flatnonzero(order > over)[-1])
    nearest: Floats = np.maximum(values - over[last], 0.0)
    return nearest
