"""What a layout is to be good at, and how the load is shared out for it. Called by `search`.

throughput  most tokens a second with all of the workload's sequences in flight
latency     least seconds within which all of them can be answered: the slowest replica's
slo         most requests a second answered within a deadline, over several deadlines (`Deadlines`)
cost        least money per token with all sequences in flight; replicas that are not worth theirs stay out
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from strata_planner.layout.pipelines import Pipeline
from strata_planner.request import GoalName

_SPARE = 0.02  # what rate beyond the asked one is worth


@dataclass(frozen=True)
class Deadlines:
    """Seconds of a request, each a level of service; `requests_per_second`: beyond this nothing is asked for."""

    seconds: tuple[float, ...]
    requests_per_second: float


@dataclass(frozen=True)
class Goal:
    """`deadlines`: needed by `slo` and only there."""

    name: GoalName = "throughput"
    deadlines: Deadlines | None = None


THROUGHPUT = Goal()


@dataclass(frozen=True)
class Load:
    """`rungs`: sequences of each rung of the ladder; `total`: all that are in flight; `tokens`: of an answer."""

    rungs: tuple[int, ...]
    total: int
    tokens: int


@dataclass(frozen=True)
class Judged:
    """`score`: more is better, whatever the goal. `shares`: sequences in flight on each replica, 0 for one that stays out."""

    score: float
    shares: tuple[int, ...]


def judge(goal: Goal, load: Load, pipelines: Sequence[Pipeline], costs: Sequence[float]) -> Judged:
    """`costs`: an hour of each pipeline's devices; only read by the goal of costs."""
    match goal.name:
        case "latency":
            return _quickest(load, pipelines)
        case "slo":
            assert goal.deadlines is not None, "the search checks its goal"
            return _in_time(goal.deadlines, load, pipelines)
        case "cost":
            return _cheapest(load, pipelines, costs)
        case _:
            return most_tokens(load, pipelines)


def most_tokens(load: Load, pipelines: Sequence[Pipeline]) -> Judged:
    """Sequences go where each brings most: the steps of all concave hulls, steepest first."""
    steps = sorted((-gain, place, more) for place, each in enumerate(pipelines) for gain, more, _ in each.steps)
    shares, left, rate = [0] * len(pipelines), load.total, 0.0
    for negative, place, more in steps:
        taken = min(more, left)
        rate -= negative * taken
        left -= taken
        shares[place] += taken
    return Judged(rate, tuple(shares))


def _quickest(load: Load, pipelines: Sequence[Pipeline]) -> Judged:
    shares, placed, worst = [0] * len(pipelines), 0, 0.0
    ends = sorted(
        (seconds, load.rungs[rung], place)
        for place, each in enumerate(pipelines)
        for rung, seconds in enumerate(each.seconds)
        if each.rates[rung] > 0
    )
    for seconds, sequences, place in ends:
        if placed >= load.total:
            break
        more = min(sequences - shares[place], load.total - placed)
        if more > 0:
            shares[place] += more
            placed += more
            worst = seconds
    missing = load.total - placed
    return Judged(-1e9 - missing if missing else -worst, tuple(shares))


def _in_time(deadlines: Deadlines, load: Load, pipelines: Sequence[Pipeline]) -> Judged:
    """Of each deadline the share of the asked rate that is met; a little for what is beyond it, which takes bursts."""
    score, shares = 0.0, [0] * len(pipelines)
    for deadline in deadlines.seconds:
        rungs = [_most_within(each, deadline) for each in pipelines]
        rate = sum(each.rates[rung] for each, rung in zip(pipelines, rungs, strict=True) if rung is not None)
        met = rate / load.tokens / deadlines.requests_per_second
        score += min(1.0, met) + _SPARE * min(met, 10.0)
        held = (0 if rung is None else load.rungs[rung] for rung in rungs)
        shares = [max(old, new) for old, new in zip(shares, held, strict=True)]
    return Judged(score / len(deadlines.seconds), tuple(shares))


def _most_within(pipeline: Pipeline, deadline: float) -> int | None:
    """The rung with the highest rate whose requests are in time."""
    within = [rung for rung, seconds in enumerate(pipeline.seconds) if seconds <= deadline and pipeline.rates[rung] > 0]
    return max(within, key=lambda rung: pipeline.rates[rung], default=None)


def _cheapest(load: Load, pipelines: Sequence[Pipeline], costs: Sequence[float]) -> Judged:
    """Replicas join, best rate for their cost first, as long as sequences have no place or tokens get cheaper by it."""
    ranked = sorted(range(len(pipelines)), key=lambda place: (-pipelines[place].best_rate / costs[place], place))
    best = Judged(-math.inf, (0,) * len(pipelines))
    for count in range(1, len(ranked) + 1):
        chosen = ranked[:count]
        judged = most_tokens(load, [pipelines[place] for place in chosen])
        if sum(judged.shares) < load.total and count < len(ranked):
            continue
        tokens_for_one = judged.score * 3600 / max(sum(costs[place] for place in chosen), 1e-9)
        if tokens_for_one > best.score:
            shares = dict(zip(chosen, judged.shares, strict=True))
            best = Judged(tokens_for_one, tuple(shares.get(place, 0) for place in range(len(pipelines))))
    return best
