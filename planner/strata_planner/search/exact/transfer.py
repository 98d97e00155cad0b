"""LLM-PQ's heuristic, bit-width transfer (arXiv 2403.01136, section 4.3, algorithm 2), for one candidate.

Called by `search` where a user asks for it, and by benchmarks. It starts from adabits, the plan of least penalty that fits
(the ILP without its latency terms), and relieves the slowest stage as long as that lowers the objective. A rule (b_st, b_pi, n)
gives n units at b_st bits of the slowest stage to another one (the pioneer) for one of its units at b_pi bits. Two more kinds
of step, which the paper's text implies: a unit moves without return, and a unit of the slowest stage changes its bits.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from strata_planner.search.exact import exact
from strata_planner.search.exact.effort import Effort
from strata_planner.search.exact.problem import Problem, Solution, SolutionStatus, StageCosts, StopReason
from strata_planner.search.exact.split import Priced, Splits, Stages

_MOST_GIVEN = 3  # units that one rule takes from the slowest stage


def solve(problem: Problem, cutoff: float = math.inf, effort: Effort | None = None) -> Solution:
    """A split better than `cutoff`, never proven to be the best."""
    effort = effort or Effort()
    start = adabits(problem, effort)
    if not start.counts:
        return replace(start, objective=math.inf, bound=-math.inf)
    splits = Splits(problem)
    stages, priced = _improved(splits, splits.stages_of(start.counts), effort)
    if priced.objective >= cutoff or not priced.fits:
        return Solution(SolutionStatus.UNKNOWN, StopReason.PROVED)
    return Solution(SolutionStatus.FEASIBLE, StopReason.PROVED, splits.counts(stages), priced.objective)


def adabits(problem: Problem, effort: Effort | None = None) -> Solution:
    """The split of least penalty that fits, whatever its seconds; its objective is the whole one."""
    still = replace(
        problem,
        stages=tuple(_timeless(stage) for stage in problem.stages),
        slowest_prefill=0,
        slowest_decode=0,
        sum_decode=0,
        theta=1.0,
    )
    found = exact.solve(still, math.inf, effort)
    return replace(found, objective=problem.objective(found.counts) if found.counts else math.inf, bound=-math.inf)


def _timeless(stage: StageCosts) -> StageCosts:
    seconds = {id(each): dict.fromkeys(each, (0.0, 0.0)) for each in stage.seconds}
    return replace(
        stage,
        seconds=tuple(seconds[id(each)] for each in stage.seconds),
        fixed_seconds=(0.0, 0.0),
        transfer_seconds=(0.0, 0.0),
    )


def _improved(splits: Splits, stages: Stages, effort: Effort) -> tuple[Stages, Priced]:
    """Steps, each the best there is, until none is better or the effort ends."""
    priced = splits.priced(stages)
    while effort.ended_by is None:
        steps = ((splits.priced(each), each) for each in set(_steps(splits, stages, priced)))
        best = min((step for step in steps if step[0].fits), key=lambda step: step[0].objective, default=None)
        if best is None or best[0].objective >= priced.objective * (1 - exact.RELATIVE_GAP):
            break
        priced, stages = best
    return stages, priced


def _steps(splits: Splits, stages: Stages, priced: Priced) -> Iterator[Stages]:
    for slowest in set(priced.slowest):
        mine = set(stages[slowest])
        for old, new in product(mine, splits.able(slowest)):
            if old != new:
                yield _changed(stages, {slowest: ([old], [new])})
        for pioneer in range(len(stages)):
            if pioneer == slowest:
                continue
            for given, bits in product(mine, splits.able(pioneer)):
                yield _changed(stages, {slowest: ([given], []), pioneer: ([], [bits])})
            for given, back, count in product(mine, set(stages[pioneer]), range(1, _MOST_GIVEN + 1)):
                if stages[slowest].count(given) >= count:
                    many = [given] * count
                    yield _changed(stages, {slowest: (many, [back]), pioneer: ([back], many)})


def _changed(stages: Stages, changes: dict[int, tuple[list[int], list[int]]]) -> Stages:
    """Per stage: bits that go, and bits that come."""
    found = []
    for j, bits in enumerate(stages):
        now = list(bits)
        gone, come = changes.get(j, ([], []))
        for each in gone:
            now.remove(each)
        found.append(tuple(sorted(now + come)))
    return tuple(found)
