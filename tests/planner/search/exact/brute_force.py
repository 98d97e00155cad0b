"""Every split of a Problem, tried: what the ILP and the bounds are tested against."""

import itertools
import math
from collections.abc import Iterator

from hypothesis import strategies as st

from strata_planner.search.exact.problem import Counts, Problem, Run, StageCosts

MIB = 1 << 20


def best_objective(problem: Problem) -> float:
    """The least objective over all feasible splits; infinite if there is none."""
    return min(
        (problem.objective(counts) for counts in _splits(problem) if problem.is_feasible(counts)), default=math.inf
    )


def _splits(problem: Problem) -> Iterator[Counts]:
    units = [r for r, run in enumerate(problem.runs) for _ in range(run.units)]
    stages = len(problem.stages)
    for cuts in itertools.combinations(range(1, len(units)), stages - 1):
        edges = (0, *cuts, len(units))
        place = [j for j in range(stages) for _ in range(edges[j + 1] - edges[j])]
        choices = [sorted(problem.stages[j].seconds[r]) for r, j in zip(units, place, strict=True)]
        for bits in itertools.product(*choices):
            counts: Counts = {}
            for key in zip(units, place, bits, strict=True):
                counts[key] = counts.get(key, 0) + 1
            yield counts


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Up to 5 units in up to 5 runs over up to 3 stages at up to 3 bit-widths; many are tight, some infeasible."""
    bits = draw(st.sampled_from([(16,), (4, 16), (3, 8), (4, 8, 16)]))
    runs = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4).filter(lambda units: sum(units) <= 5))
    seconds = st.floats(0.001, 1.0)
    built = tuple(
        Run(
            units,
            1,
            {b: draw(st.floats(0, 2.0)) for b in bits},
        )
        for units in runs
    )
    both = tuple({b: b * draw(st.integers(MIB // 2, MIB)) for b in bits} for _ in built)
    weights_only = tuple({b: b * draw(st.integers(MIB // 4, MIB // 2)) for b in bits} for _ in built)
    share = draw(st.sampled_from([1, 2]))  # the first stage may be a group of devices that share its units
    stages = tuple(
        StageCosts(
            capacity_bytes=draw(st.integers(4 * MIB, 60 * MIB)),
            quantized_bytes=draw(st.sampled_from([0, 3 * MIB])),
            loading_capacity_bytes=draw(st.integers(4 * MIB, 60 * MIB)),
            loading_quantized_bytes=draw(st.sampled_from([0, 5 * MIB])),
            mixed_bytes=draw(st.sampled_from([0, 2 * MIB])),
            dense_bytes=draw(st.sampled_from([0, 4 * MIB])),
            seconds=tuple({b: (draw(seconds), draw(seconds)) for b in bits} for _ in built),
            bytes=tuple({b: size // (share if j == 0 else 1) for b, size in each.items()} for each in both),
            weight_bytes=tuple(
                {b: size // (share if j == 0 else 1) for b, size in each.items()} for each in weights_only
            ),
            fixed_seconds=(draw(seconds), draw(seconds)),
            transfer_seconds=(draw(seconds), draw(seconds)),
        )
        for j in range(draw(st.integers(1, min(3, sum(runs)))))
    )
    weights = st.integers(0, 8)
    return Problem(built, stages, draw(weights), draw(weights), draw(weights), draw(st.floats(0, 10)))
