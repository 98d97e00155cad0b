"""A split of one candidate in a few milliseconds: water-filled at each bit-width, rounded to whole layers.

Memory that is left goes to layers of more bits, where that pays. Called by `solved`.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from strata_planner.search.exact.problem import Counts, Problem, Solution, SolutionStatus, StopReason
from strata_planner.search.layouts.water import capped, cheapest_first, level


def rounded(problem: Problem) -> Solution | None:
    """The best by the problem's objective of all widths, and of what comes of the most bits that fit; None where no width fits all stages."""
    best: Counts | None = None
    least = math.inf
    widths = set.intersection(*(set(each) for stage in problem.stages for each in stage.seconds))
    for bits in sorted(widths, reverse=True):
        if problem.theta * sum(run.units * run.omega[bits] for run in problem.runs) >= least:
            continue
        fitting = [counts for counts in _splits(problem, bits) if problem.is_feasible(counts)]
        for counts in fitting if best is not None else [_lifted(problem, each) for each in fitting]:
            if (objective := problem.objective(counts)) < least:
                best, least = counts, objective
    if best is None:
        return None
    return Solution(SolutionStatus.FEASIBLE, StopReason.SETTLED, best, least)


class _Lift(NamedTuple):
    """Units of a run on a stage from some bits to the next more. `gain`: what one takes off the objective where its stage keeps nobody waiting, for each byte."""

    gain: float
    run: int
    stage: int
    bits: int
    more: int
    bytes: int


def _lifted(problem: Problem, counts: Counts) -> Counts:
    """With more bits where there is room and the objective gets better, the dearest bytes last."""
    best, value = counts, problem.objective(counts)
    while lifts := sorted(_lifts(problem, best), reverse=True):
        before = value
        for lift in lifts:
            many = best.get((lift.run, lift.stage, lift.bits), 0)
            many = min(many, max(1, problem.free_bytes(best, lift.stage) // max(1, lift.bytes)))
            while many:
                tried = _with(best, lift, many)
                if problem.free_bytes(tried, lift.stage) >= 0 and (less := problem.objective(tried)) < value:
                    best, value = tried, less
                    break
                many //= 2
        if value >= before:
            break
    return best


def _lifts(problem: Problem, counts: Counts) -> Iterator[_Lift]:
    for run, place, bits in counts:
        omega, stage = problem.runs[run].omega, problem.stages[place]
        seconds, sizes = stage.seconds[run], stage.bytes[run]
        more = min((each for each in seconds if each > bits and each in omega), default=None)
        if more is None:
            continue
        prefill, decode = (seconds[more][phase] - seconds[bits][phase] for phase in (0, 1))
        gain = problem.theta * (omega[bits] - omega[more]) - prefill - problem.sum_decode * decode
        size = sizes[more] - sizes[bits]
        if gain > 0 and size <= problem.free_bytes(counts, place):
            yield _Lift(gain / max(1, size), run, place, bits, more, size)


def _with(counts: Counts, lift: _Lift, many: int) -> Counts:
    low, high = (lift.run, lift.stage, lift.bits), (lift.run, lift.stage, lift.more)
    changed = {**counts, low: counts[low] - many, high: counts.get(high, 0) + many}
    return {key: count for key, count in changed.items() if count}


def _splits(problem: Problem, bits: int) -> list[Counts]:
    """Even in time, as many as fit to the cheapest stage, between the two, and, for more bits, evenly by room."""
    units = [run.units for run in problem.runs]
    shares = np.array(units) / sum(units)
    weights = np.array([problem.slowest_prefill + 1, problem.slowest_decode + problem.sum_decode])

    def mean(values: list[float]) -> float:
        return float(np.dot(shares, values))

    seconds, fixed, most = [], [], []
    for stage in problem.stages:
        prefill, decode = (mean([each[bits][phase] for each in stage.seconds]) for phase in (0, 1))
        seconds.append(weights @ (prefill, decode))
        fixed.append(weights @ stage.fixed_seconds)
        sizes = (mean([each[bits] for each in sized]) for sized in (stage.bytes, stage.weight_bytes))
        most.append(min(room // max(1.0, size) for room, size in zip(stage.room(bits), sizes, strict=True)))
    room_of = np.array(most).clip(0, sum(units))[:, None]
    if room_of.min() < 1 or room_of.sum() < sum(units):
        return []
    work, beside = np.array(seconds)[:, None], np.array(fixed)[:, None]
    dealt = [level(work, beside, room_of, sum(units)), cheapest_first(work, room_of, sum(units))]
    if problem.sum_decode and problem.slowest_decode:
        parts = 1 + problem.slowest_decode / problem.sum_decode
        dealt.append(capped(work, beside, room_of, sum(units), np.array([parts])))
    if problem.theta and bits < max(problem.runs[0].omega):
        dealt.append(np.maximum(1.0, room_of * (sum(units) / room_of.sum())))
    return [_counts(units, _whole(each[:, 0], room_of[:, 0], sum(units)), bits) for each in dealt]


def _whole(dealt: np.ndarray, most: np.ndarray, units: int) -> list[int]:
    """Fractions rounded so that they add up: down, then one more where most was cut off and there is room."""
    found = np.maximum(1, np.floor(dealt + 1e-9)).astype(int)
    while found.sum() != units:
        step = 1 if found.sum() < units else -1
        wish = (dealt - found) * step
        wish[(found >= most) if step > 0 else (found <= 1)] = -np.inf
        place = int(wish.argmax())
        if not np.isfinite(wish[place]):
            break
        found[place] += step
    return [int(each) for each in found]


def _counts(units: list[int], layers: list[int], bits: int) -> Counts:
    """Runs in order over stages in order."""
    counts: Counts = {}
    stage_of = [place for place, wanted in enumerate(layers) for _ in range(wanted)]
    run_of = [run for run, count in enumerate(units) for _ in range(count)]
    for run, place in zip(run_of, stage_of, strict=False):
        counts[run, place, bits] = counts.get((run, place, bits), 0) + 1
    return counts
