"""What a layout is to be good at, and how the load is shared out for it. Called by `search`.

throughput  most tokens a second with all of the workload's sequences in flight
latency     least seconds within which all of them can be answered: the slowest replica's
slo         most requests a second answered within a deadline, over several deadlines (`Deadlines`)
cost        least money per token with all sequences in flight; replicas that are not worth theirs stay out
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from strata_planner.question.request import GoalName, PlanRequest
from strata_planner.search.layouts.pipelines import Curve, Pipeline
from strata_planner.search.metric import SPARE, share_in_time


@dataclass(frozen=True)
class Deadlines:
    """Seconds of a request, each a level of service, and the rates at which requests come."""

    seconds: tuple[float, ...]
    requests_per_second: tuple[float, ...]


@dataclass(frozen=True)
class Goal:
    """`deadlines`: needed by `slo` and only there."""

    name: GoalName = "throughput"
    deadlines: Deadlines | None = None


def goal_of(request: PlanRequest) -> Goal:
    """As the request's objective says."""
    asked = request.objective
    if asked.goal != "slo":
        return Goal(asked.goal)
    assert asked.deadline_seconds is not None, "the request is checked"
    assert asked.requests_per_second is not None, "the request is checked"
    return Goal("slo", Deadlines((asked.deadline_seconds,), (asked.requests_per_second,)))


@dataclass(frozen=True)
class Load:
    """`rungs`: sequences of each rung of the ladder; `total`: all that are in flight; `tokens`: of an answer."""

    rungs: tuple[int, ...]
    total: int
    tokens: int


@dataclass(frozen=True)
class Judged:
    """`score`: more is better, whatever the goal. `shares`: sequences in flight on each replica, 0 for one that stays out.
    `rungs`: where each replica's groups are looked up, None: at its share.
    """

    score: float
    shares: tuple[int, ...]
    rungs: tuple[int, ...] | None = None


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
    """Requests go to replicas in proportion to what these can do, as the coordinator's least-loaded routing comes to. Each
    replica has the groups with which most of its own are in time; a replica too loaded is in time for none.
    """
    total = sum(each.best_rate for each in pipelines)
    if not total:
        return Judged(-math.inf, (0,) * len(pipelines))
    used = [rate * load.tokens / total for rate in deadlines.requests_per_second]
    score, shares, rungs = 0.0, [], []
    for each in pipelines:
        value, curve = max(
            ((_punctual(curve, each.best_rate, used, deadlines), curve) for curve in each.curves),
            key=lambda pair: (pair[0], pair[1].rung),
        )
        score += value * each.best_rate / total
        shares.append(_most_within(curve, load, deadlines.seconds[-1]))
        rungs.append(curve.rung)
    return Judged(score - SPARE * max(used), in_proportion(shares, load.total), tuple(rungs))


def in_proportion(shares: Sequence[int], total: int) -> tuple[int, ...]:
    """The shares, less in proportion where they are more than `total` sequences; the last go without where each would have one."""
    if sum(shares) <= total:
        return tuple(shares)
    found = [max(1, share * total // sum(shares)) for share in shares]
    while sum(found) > total:
        place = max(range(len(found)), key=lambda each: (found[each], each))
        found[place] -= 1
    return tuple(found)


def _punctual(curve: Curve, best_rate: float, used: Sequence[float], deadlines: Deadlines) -> float:
    """The mean over rates and deadlines of the share in time: all of it well below the deadline, none well above."""
    score = 0.0
    for share in used:
        rung = next((rung for rung, rate in enumerate(curve.rates) if rate >= share * best_rate), None)
        if rung is None:
            continue
        seconds = curve.seconds[rung]
        score += sum(share_in_time(deadline, seconds) for deadline in deadlines.seconds)
    return score / len(used) / len(deadlines.seconds)


def _most_within(curve: Curve, load: Load, seconds: float) -> int:
    """The most sequences with which requests are in time; all that there is room for where none are."""
    fitting = [rung for rung, rate in enumerate(curve.rates) if rate > 0]
    within = [rung for rung in fitting if curve.seconds[rung] <= seconds]
    return load.rungs[(within or fitting)[-1]]


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
