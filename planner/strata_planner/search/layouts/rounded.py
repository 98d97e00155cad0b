"""A split of one candidate in a millisecond: water-filled at each bit-width, rounded to whole layers. Called by `solved`.

Near the best where all layers of a replica may well have the same bits; what mixes them is the exact solver's.
"""

import numpy as np

from strata_planner.search.exact.problem import Counts, Problem, Solution, SolutionStatus, StopReason
from strata_planner.search.layouts.water import capped, cheapest_first, level


def rounded(problem: Problem) -> Solution | None:
    """The best by the problem's objective of all widths; None where no width fits all stages."""
    best: Counts | None = None
    widths = set.intersection(*(set(each) for stage in problem.stages for each in stage.seconds))
    for bits in sorted(widths):
        for counts in _splits(problem, bits):
            if problem.is_feasible(counts) and (best is None or problem.objective(counts) < problem.objective(best)):
                best = counts
    if best is None:
        return None
    return Solution(SolutionStatus.FEASIBLE, StopReason.SETTLED, best, problem.objective(best))


def _splits(problem: Problem, bits: int) -> list[Counts]:
    """Even in time, as many as fit to the cheapest stage, and between the two."""
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
        room = stage.capacity_bytes - (stage.quantized_bytes if bits < 16 else stage.dense_bytes)
        most.append(room // max(1.0, mean([each[bits] for each in stage.bytes])))
    room_of = np.array(most).clip(0, sum(units))[:, None]
    if room_of.min() < 1 or room_of.sum() < sum(units):
        return []
    work, beside = np.array(seconds)[:, None], np.array(fixed)[:, None]
    dealt = [level(work, beside, room_of, sum(units)), cheapest_first(work, room_of, sum(units))]
    if problem.sum_decode and problem.slowest_decode:
        parts = 1 + problem.slowest_decode / problem.sum_decode
        dealt.append(capped(work, beside, room_of, sum(units), np.array([parts])))
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
