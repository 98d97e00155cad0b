"""From measured seconds of strategies to the table of lengths at which a stage switches.

Called for stages whose ranks were timed where they run; `switching` predicts the same for others.
"""

import math
from collections.abc import Iterable, Mapping

from strata_planner.contract.latencies import StrategyPoint
from strata_planner.contract.strategies import MEGATRON_ONLY, StrategyName, StrategyTable

NOISE = 0.02  # of a measured step: who is ahead by less is not ahead


def measured_table(points: Iterable[StrategyPoint]) -> StrategyTable:
    """The fastest strategy from each length on. Beyond the longest what was the fastest there goes on; Megatron where nothing was measured."""
    seconds: dict[int, dict[StrategyName, float]] = {}
    for point in points:
        seconds.setdefault(point.tokens, {})[point.strategy] = point.layer_seconds
    table: list[tuple[int, StrategyName]] = list(MEGATRON_ONLY)
    shorter: tuple[int, Mapping[StrategyName, float]] | None = None
    for tokens, taken in sorted(seconds.items()):
        now = table[-1][1]
        best = min(taken, key=lambda name: (taken[name], name))
        if now not in taken or taken[best] < taken[now] * (1 - NOISE):
            start = tokens if shorter is None else _crossing(shorter, (tokens, taken), (now, best))
            table = [*(each for each in table if each[0] < start), (max(1, start), best)]
        shorter = tokens, taken
    return tuple(table)


def _crossing(
    shorter: tuple[int, Mapping[StrategyName, float]],
    longer: tuple[int, Mapping[StrategyName, float]],
    names: tuple[StrategyName, StrategyName],
) -> int:
    """Between two lengths, where the second of the names takes over: their ratio goes evenly with the logarithm of the length."""
    (low, at_low), (high, at_high) = shorter, longer
    before, after = names
    if not {before, after} <= at_low.keys() & at_high.keys():
        return high
    behind, ahead = at_low[after] / at_low[before] - 1, at_high[after] / at_high[before] - 1
    if behind <= 0:  # it was ahead there already, by noise
        return low + 1
    share: float = behind / (behind - ahead)
    return max(low + 1, round(low * math.pow(high / low, share)))
