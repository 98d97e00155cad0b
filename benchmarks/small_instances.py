"""Small random planning problems and their best splits by trying everything: what solvers are held against.

Used by the planner's benchmark and tests. Evaluates splits with arrays of its own, not with the solvers' code.
"""

import itertools
import math
import random
from collections.abc import Iterator

import numpy as np

from strata_planner.search.exact.problem import Problem, Run, StageCosts

_MIB = 1 << 20
_WIDTHS = ((16,), (4, 16), (3, 8), (4, 8, 16), (3, 4, 8, 16))


def instances(number: int, seed: int) -> Iterator[Problem]:
    """Up to 5 units in runs of one or more, on up to 3 stages; every second one with units that cost unlike. Omegas and
    capacities are arbitrary: many are tight, some infeasible.
    """
    draw = random.Random(seed)
    for at in range(number):
        yield _instance(draw, alike=at % 2 == 0)


def _instance(draw: random.Random, *, alike: bool) -> Problem:
    bits = draw.choice(_WIDTHS)
    runs: list[Run] = []
    while not runs or (sum(run.units for run in runs) < 5 and draw.random() < 0.8):
        most = 5 - sum(run.units for run in runs)
        runs.append(Run(draw.randint(1, min(most, 3)), 1, {b: draw.uniform(0, 2) for b in bits}))
    classes = [0 if alike else draw.randint(0, 1) for _ in runs]
    sizes = [{b: b * draw.randint(_MIB // 2, _MIB) for b in bits} for _ in range(2)]
    weights = [{b: b * draw.randint(_MIB // 4, _MIB // 2) for b in bits} for _ in range(2)]
    stages = tuple(
        StageCosts(
            capacity_bytes=draw.randint(4 * _MIB, 70 * _MIB),
            quantized_bytes=draw.choice([0, 3 * _MIB]),
            loading_capacity_bytes=draw.randint(4 * _MIB, 70 * _MIB),
            loading_quantized_bytes=draw.choice([0, 5 * _MIB]),
            mixed_bytes=draw.choice([0, 2 * _MIB]),
            dense_bytes=draw.choice([0, 4 * _MIB]),
            seconds=tuple(_seconds(draw, bits)[c] for c in classes)
            if not alike
            else (_seconds(draw, bits)[0],) * len(runs),
            bytes=tuple(sizes[c] for c in classes),
            weight_bytes=tuple(weights[c] for c in classes),
            fixed_seconds=(draw.random(), draw.random()),
            transfer_seconds=(draw.random(), draw.random()),
        )
        for _ in range(draw.randint(1, min(3, sum(run.units for run in runs))))
    )
    phases = [draw.randint(0, 8) for _ in range(3)]
    return Problem(tuple(runs), stages, phases[0], phases[1], phases[2], draw.choice([0, draw.uniform(0, 10)]))


def _seconds(draw: random.Random, bits: tuple[int, ...]) -> list[dict[int, tuple[float, float]]]:
    return [{b: (draw.uniform(0.001, 1), draw.uniform(0.001, 1)) for b in bits} for _ in range(2)]


def best_objective(problem: Problem) -> float:
    """The least objective over all feasible splits; infinite if there is none."""
    runs = [r for r, run in enumerate(problem.runs) for _ in range(run.units)]
    bits = sorted(problem.runs[0].omega)
    every = np.array(list(itertools.product(range(len(bits)), repeat=len(runs))))
    return min(_best_of(problem, runs, bits, every, cuts) for cuts in _cuts(len(runs), len(problem.stages)))


def _cuts(units: int, stages: int) -> Iterator[tuple[int, ...]]:
    for inner in itertools.combinations(range(1, units), stages - 1):
        yield (0, *inner, units)


def _best_of(
    problem: Problem,
    runs: list[int],
    bits: list[int],
    every: "np.ndarray[tuple[int, int], np.dtype[np.int64]]",
    cuts: tuple[int, ...],
) -> float:
    """Over all dealings of bits, for one partition."""
    omega = sum(np.array([problem.runs[r].omega[b] for b in bits])[every[:, unit]] for unit, r in enumerate(runs))
    times, fits = [], np.ones(len(every), dtype=bool)
    for j, stage in enumerate(problem.stages):
        units = range(cuts[j], cuts[j + 1])
        low = (np.array(bits)[every[:, cuts[j] : cuts[j + 1]]] < 16).any(1)
        high = (np.array(bits)[every[:, cuts[j] : cuts[j + 1]]] >= 16).any(1)
        used = sum(np.array([stage.bytes[runs[u]][b] for b in bits])[every[:, u]] for u in units)
        read = sum(np.array([stage.weight_bytes[runs[u]][b] for b in bits])[every[:, u]] for u in units)
        used = used + low * stage.quantized_bytes + high * stage.dense_bytes + (low & high) * stage.mixed_bytes
        fits &= used <= stage.capacity_bytes
        fits &= read + low * stage.loading_quantized_bytes <= stage.loading_capacity_bytes
        phases = [
            sum(np.array([stage.seconds[runs[u]][b][phase] for b in bits])[every[:, u]] for u in units)
            + stage.fixed_seconds[phase]
            for phase in (0, 1)
        ]
        times.append(phases)
    hops = [stage.transfer_seconds for stage in problem.stages]
    total = problem.theta * omega
    for phase, (slowest, summed) in enumerate(
        ((problem.slowest_prefill, 1), (problem.slowest_decode, problem.sum_decode))
    ):
        stages = np.array([each[phase] for each in times])
        peak = np.maximum(stages.max(0), max(hop[phase] for hop in hops))
        total = total + slowest * peak + summed * (stages.sum(0) + sum(hop[phase] for hop in hops))
    return float(np.where(fits, total, math.inf).min())
