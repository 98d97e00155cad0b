"""What one stage makes of a range of layers: the bits at which they fit beside each other, the bytes that are short, the seconds.

Called by `borders` and `repair`. Bits start as the plan in force has them and are lowered only as far as memory asks, always where it
costs least quality for the byte that it frees; layers that can be narrowed where they lie, or are read anyway, come before those that would
have to be read again. All of it is worked out once for a stage, so that a range takes some microseconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from strata_planner.search.exact.problem import Problem

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Span(NamedTuple):
    """`free_bytes`: while serving or loading, whichever is less; below 0 it does not fit at the fewest bits either."""

    bits: tuple[int, ...]
    free_bytes: int
    penalty: float
    seconds: tuple[float, float]


@dataclass(frozen=True)
class Begin:
    """`bits[u]`: of each unit in the plan in force. `fewest`: no unit is lowered below. `read_again[j]`: units whose weights stage j could
    not narrow where they lie.
    """

    bits: Sequence[int]
    fewest: int
    read_again: Sequence[frozenset[int]]


@dataclass(frozen=True)
class _Table:
    """Of one stage, by unit; `step_...` by lowering, in the order in which they are taken."""

    size: Integers  # cumulated from 0, at the bits that units begin with
    weights: Integers
    penalty: Floats
    start: Integers
    seconds: Floats  # [units, bits, 2]
    step_unit: Integers
    step_to: Integers
    step_freed: Integers
    step_penalty: Floats


class Spans:
    """Of one problem, whose `run[u]` says of which run each unit is."""

    def __init__(self, problem: Problem, run: Sequence[int], begin: Begin) -> None:
        self.problem, self._run, self._begin = problem, run, begin
        self._tables: dict[tuple[int, int, int, frozenset[int]], _Table] = {}
        self._known: dict[tuple[int, int, int], Span] = {}

    @property
    def units(self) -> int:
        return len(self._run)

    def of(self, j: int, first: int, end: int) -> Span:
        """Units `first` to `end` - 1 on stage j, at least one."""
        key = (j, first, end)
        if key not in self._known:
            self._known[key] = self._span(j, first, end)
        return self._known[key]

    def most_units(self, j: int) -> int:
        """That stage j holds at the fewest bits, were all units as the model's mean."""
        table, stage = self._table(j), self.problem.stages[j]
        least = int(table.size[-1]) - int(table.step_freed.sum())
        room = stage.capacity_bytes - stage.quantized_bytes
        return max(0, min(self.units, room * self.units // max(1, least)))

    def seconds_of_a_unit(self, j: int) -> float:
        """The mean over all units at the bits that they begin with, as the objective weighs the slowest stage's phases."""
        table, problem = self._table(j), self.problem
        mean = table.seconds[np.arange(self.units), table.start].mean(axis=0)
        return float(mean @ (problem.slowest_prefill + 1, problem.slowest_decode + problem.sum_decode))

    def _span(self, j: int, first: int, end: int) -> Span:
        table, stage = self._table(j), self.problem.stages[j]
        steps = np.flatnonzero((table.step_unit >= first) & (table.step_unit < end))
        freed = np.cumsum(table.step_freed[steps])
        size, weights = (int(each[end] - each[first]) for each in (table.size, table.weights))
        taken = 0
        while True:
            bits = table.start[first:end].copy()
            lowered = steps[:taken]
            bits[table.step_unit[lowered] - first] = table.step_to[lowered]  # of one unit's steps the last one counts
            low, less = bool((bits < _DENSE).any()), int(freed[taken - 1]) if taken else 0
            dense = bool((bits >= _DENSE).any())
            beside = low * stage.quantized_bytes + dense * stage.dense_bytes + (low and dense) * stage.mixed_bytes
            free = min(
                stage.capacity_bytes - (size - less) - beside,
                stage.loading_capacity_bytes - (weights - less) - low * stage.loading_quantized_bytes,
            )
            if free >= 0 or taken == len(steps):
                break
            taken = min(len(steps), max(taken + 1, int(np.searchsorted(freed, less - free)) + 1))
        penalty = float(table.penalty[end] - table.penalty[first] + table.step_penalty[steps[:taken]].sum())
        seconds = table.seconds[np.arange(first, end), bits].sum(axis=0) + stage.fixed_seconds
        return Span(tuple(map(int, bits)), int(free), penalty, (float(seconds[0]), float(seconds[1])))

    def _table(self, j: int) -> _Table:
        stage = self.problem.stages[j]
        # Alike stages share them.
        key = (
            id(stage.seconds),
            id(stage.bytes),
            id(stage.weight_bytes),
            self._begin.read_again[j],
        )
        if key not in self._tables:
            self._tables[key] = self._made(j)
        return self._tables[key]

    def _made(self, j: int) -> _Table:
        stage, runs = self.problem.stages[j], self.problem.runs
        kinds: dict[tuple[int, int], _Kind] = {}
        each: list[_Kind] = []
        for run, bits in zip(self._run, self._begin.bits, strict=True):
            if (run, bits) not in kinds:
                can = tuple(sorted(stage.seconds[run]))
                kinds[run, bits] = _kind(can, bits, self._begin.fewest, stage.bytes[run], runs[run].omega)
            each.append(kinds[run, bits])
        refused = np.array(
            [kind.start < min(bits, self._begin.fewest) for kind, bits in zip(each, self._begin.bits, strict=True)]
        )
        again, steps = self._begin.read_again[j], list[tuple[bool, float, int, _Step]]()
        for unit, kind in enumerate(each):
            steps += [(unit in again, step.price, unit, step) for step in kind.steps]
        steps.sort(key=lambda one: one[:3])  # a unit's own steps stay in their order
        seconds = np.zeros((self.units, _DENSE + 1, 2))
        for unit, run in enumerate(self._run):
            for bits, both in stage.seconds[run].items():
                seconds[unit, bits] = both
        start = [kind.start for kind in each]
        begun = list(zip(self._run, start, strict=True))
        return _Table(
            size=_cumulated([stage.bytes[r][b] for r, b in begun]) + _cumulated(refused * NEVER_BYTES),
            weights=_cumulated([stage.weight_bytes[r][b] for r, b in begun]),
            penalty=_cumulated([runs[r].omega[b] for r, b in begun]),
            start=np.array(start),
            seconds=seconds,
            step_unit=np.array([unit for _, _, unit, _ in steps], dtype=np.int64),
            step_to=np.array([step.to for *_, step in steps], dtype=np.int64),
            step_freed=np.array([step.freed for *_, step in steps], dtype=np.int64),
            step_penalty=np.array([step.penalty for *_, step in steps]),
        )


_DENSE = 16  # bits
NEVER_BYTES = 1 << 50  # of a unit that a stage's devices may not hold at any bits


class _Step(NamedTuple):
    to: int
    freed: int
    penalty: float

    @property
    def price(self) -> float:
        return self.penalty / self.freed


@dataclass(frozen=True)
class _Kind:
    """Of a unit with these bits: those that it begins with on a stage, and how it is lowered."""

    start: int
    steps: tuple[_Step, ...]


def _kind(can: tuple[int, ...], now: int, fewest: int, size: Mapping[int, int], omega: Mapping[int, float]) -> _Kind:
    """`can`: the bits that the stage's devices store. What they cannot have begins with more, if there are more."""
    start = next((bits for bits in can if bits >= now), can[-1])
    steps, here = list[_Step](), start
    while below := [bits for bits in can if fewest <= bits < here and size[bits] < size[here]]:
        ways = [_Step(bits, size[here] - size[bits], omega[bits] - omega[here]) for bits in below]
        best = min(ways, key=lambda way: (way.price, -way.to))  # the lower hull: prices rise from step to step
        steps.append(best)
        here = best.to
    return _Kind(start, tuple(steps))


def _cumulated(values: npt.ArrayLike) -> npt.NDArray[Any]:
    """[n + 1], from 0."""
    return np.concatenate([[0], np.cumsum(values)])
