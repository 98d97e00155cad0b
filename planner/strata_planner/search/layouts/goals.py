"""What a layout is to be good at, and how the load is shared out for it. Called by `search`.

throughput  most tokens a second with all of the workload's sequences in flight
latency     least seconds of a request, all of the load there at once, and what its bits cost beside
slo         most requests a second answered within a deadline, over several deadlines (`Deadlines`)
cost        least money per token, as often as the load takes turns; replicas that are not worth theirs stay out
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from strata_planner.question.request import GoalName, PlanRequest
from strata_planner.search.layouts.pipelines import Curve, Pipeline
from strata_planner.search.metric import SPARE, share_in_time

_NEARLY = 1e-3  # of a request in time: what one is worth that is late


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
    """Sequences go where each brings most, the steps of all concave hulls, steepest first, as long as all together get better: what the bits of one
    cost is taken off the mean.
    """
    steps = sorted(
        (-gain, place, more, rung) for place, each in enumerate(pipelines) for gain, more, rung in each.steps
    )
    dealt, placed = [_Dealt()] * len(pipelines), 0
    tokens = lost = best = 0.0  # a second, nothing taken off; of all sequences together
    taken, until = list[tuple[int, int]](), 0
    for negative, place, most, rung in steps:
        more, old = min(most, load.total - placed), dealt[place]
        if not more:
            break
        there = pipelines[place].penalties[rung]
        penalty = old.penalty + (there - old.penalty) * more / most if old.share else there
        new = dealt[place] = _Dealt(old.share + more, old.rate - negative * more, penalty)
        placed += more
        tokens += new.tokens(load) - old.tokens(load)
        lost += new.share * new.penalty - old.share * old.penalty
        taken.append((place, more))
        score = placed * load.tokens / (placed * load.tokens / tokens + lost / placed)
        if score > best:
            best, until = score, len(taken)
    shares = [0] * len(pipelines)
    for place, more in taken[:until]:
        shares[place] += more
    return Judged(best, tuple(shares))


class _Dealt(NamedTuple):
    """To a replica: sequences, tokens a second with what its bits cost taken off, and that in seconds of the batch."""

    share: int = 0
    rate: float = 0.0
    penalty: float = 0.0

    def tokens(self, load: Load) -> float:
        """A second, nothing taken off."""
        return self.rate / max(1 - self.penalty * self.rate / (self.share * load.tokens), 1e-9) if self.share else 0.0


def _quickest(load: Load, pipelines: Sequence[Pipeline]) -> Judged:
    """Sequences go where a request costs least, as long as all of them wait less for it: those that find no place wait their turn."""
    shares, seconds, placed = [0] * len(pipelines), [(0.0, 0.0)] * len(pipelines), 0
    best = Judged(-math.inf, tuple(shares))
    ends = sorted(
        (seconds + each.penalties[rung], place, rung)
        for place, each in enumerate(pipelines)
        for rung, seconds in enumerate(each.seconds)
        if each.rates[rung] > 0
    )
    for _, place, rung in ends:
        more = min(load.rungs[rung] - shares[place], load.total - placed)
        if more <= 0:
            continue
        shares[place] += more
        placed += more
        seconds[place] = pipelines[place].seconds[rung], pipelines[place].penalties[rung]
        taken, lost = (sum(n * each[k] for n, each in zip(shares, seconds, strict=True)) / placed for k in range(2))
        score = -(load.total / placed * taken + lost)
        if score > best.score:
            best = Judged(score, tuple(shares))
    return best


def _in_time(deadlines: Deadlines, load: Load, pipelines: Sequence[Pipeline]) -> Judged:
    """Replicas that are in time for nobody stay out, then those for fewest, as long as the others are in time for more without them."""
    serving, best = list(range(len(pipelines))), Judged(-math.inf, (0,) * len(pipelines))
    while serving:
        judged, values = _in_time_together(deadlines, load, pipelines, serving)
        dealt = [place for place in serving if judged.shares[place]]
        if 0 < len(dealt) < len(serving):  # more replicas than sequences: they can do nothing for anyone
            serving = dealt
            continue
        punctual = [place for place in serving if values[place] > _NEARLY]
        if 0 < len(punctual) < len(serving):
            serving = punctual
            continue
        if judged.score <= best.score:
            break
        best = judged
        serving.remove(min(serving, key=lambda place: (values[place], -place)))
    return best


def _in_time_together(
    deadlines: Deadlines, load: Load, pipelines: Sequence[Pipeline], serving: Sequence[int]
) -> tuple[Judged, dict[int, float]]:
    """Requests go to replicas in proportion to what these can do, as the coordinator's least-loaded routing comes to. Each
    replica has the groups with which most of its own are in time. Beside it the share of each that is.
    """
    total = sum(pipelines[place].best_rate for place in serving)
    shares, rungs, values = [0] * len(pipelines), [0] * len(pipelines), dict[int, float]()
    used = [rate * load.tokens / total for rate in deadlines.requests_per_second]
    for place in serving:
        one = pipelines[place]
        values[place], curve = max(
            ((_punctual(curve, one.best_rate, used, deadlines), curve) for curve in one.curves),
            key=lambda pair: (pair[0], pair[1].rung),
        )
        most = _most_in_time(curve, max(used) * one.best_rate, deadlines.seconds)
        shares[place], rungs[place] = load.rungs[most], curve.rung
    score = sum(value * pipelines[place].best_rate / total for place, value in values.items())
    dealt = in_proportion([shares[place] for place in serving], load.total)
    for place, share in zip(serving, dealt, strict=True):
        shares[place] = share
    return Judged(score - SPARE * min(1.0, max(used)), tuple(shares), tuple(rungs)), values


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
    """The mean over rates and deadlines of the share in time: all of it well below the deadline, none well above, where nearer is a little better.
    Of a load that is too much, what is served counts, with as many sequences as make most of it.
    """
    score = 0.0
    for share in used:
        rung = next((rung for rung, rate in enumerate(curve.rates) if rate >= share * best_rate), None)
        if rung is None:
            rung = _most_in_time(curve, share * best_rate, deadlines.seconds)
        served, seconds = min(1.0, curve.rates[rung] / (share * best_rate)), curve.seconds[rung]
        for deadline in deadlines.seconds:
            score += served * (share_in_time(deadline, seconds) + _NEARLY * min(1.0, deadline / seconds))
    return score / len(used) / len(deadlines.seconds)


def _most_in_time(curve: Curve, asked: float, deadlines: Sequence[float]) -> int:
    """The rung, of those with room, at which most of what is `asked`, in tokens a second, is served in time; the one with the most sequences of equals."""
    best, most = -1.0, 0
    for rung in range(len(curve.rates) - 1, -1, -1):
        if not curve.rates[rung]:
            continue
        shares = sum(share_in_time(each, curve.seconds[rung]) for each in deadlines) / len(deadlines)
        in_time = min(asked, curve.rates[rung]) * shares
        if in_time > best:
            best, most = in_time, rung
        if in_time >= asked:
            break
    return most


def _cheapest(load: Load, pipelines: Sequence[Pipeline], costs: Sequence[float]) -> Judged:
    """Replicas join, best rate for their cost first; the fewer sequences have a place, the more turns the load takes."""
    ranked = sorted(range(len(pipelines)), key=lambda place: (-pipelines[place].best_rate / costs[place], place))
    best = Judged(-math.inf, (0,) * len(pipelines))
    for count in range(1, len(ranked) + 1):
        chosen = ranked[:count]
        judged = most_tokens(load, [pipelines[place] for place in chosen])
        used = sum(costs[place] for place, share in zip(chosen, judged.shares, strict=True) if share)
        tokens_for_one = judged.score * 3600 / max(used, 1e-9) * sum(judged.shares) / load.total
        if tokens_for_one > best.score:
            shares = dict(zip(chosen, judged.shares, strict=True))
            best = Judged(tokens_for_one, tuple(shares.get(place, 0) for place in range(len(pipelines))))
    return best
