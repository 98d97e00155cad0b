"""From chosen groups to a plan: the exact solver decides layers, bits and micro-batches of each replica, assembly the rest.

Called by `search`. Each replica is planned alone for its share of the workload's sequences.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from strata_planner.contract.plan import Place, Plan, Prediction
from strata_planner.question.request import PlanRequest
from strata_planner.search.assembly import assemble, combined
from strata_planner.search.exact.candidates import Candidate, Pricer
from strata_planner.search.exact.effort import Effort
from strata_planner.search.exact.exact import solve
from strata_planner.search.exact.found import Found
from strata_planner.search.exact.orders import Order
from strata_planner.search.exact.phases import Pair
from strata_planner.search.exact.problem import Problem, Solution, SolutionStatus, StopReason
from strata_planner.search.layouts.rounded import rounded
from strata_planner.search.layouts.stages import CHUNKS, Split, near_chunks, pair_of, with_concurrency
from strata_planner.search.metric import Metric
from strata_planner.search.prediction import predict

_WORK_WHERE_NOTHING_ROUNDS = 20e6  # of the exact solver
_PRICES = 16  # of the penalty that are tried, to keep within its bound


@dataclass(frozen=True)
class SolvedReplica:
    """`request`: the question for this replica alone, its share of the sequences in flight and the widths it was searched among.
    `found`: its candidate has the groups in order.
    """

    request: PlanRequest
    found: Found
    prediction: Prediction

    @property
    def concurrency(self) -> int:
        return self.request.workload.concurrency

    @property
    def order(self) -> Order:
        return self.found.candidate.order

    def on(self, order: Order) -> "SolvedReplica":
        """The same on equal devices."""
        return replace(self, found=replace(self.found, candidate=replace(self.found.candidate, order=order)))

    @property
    def layers(self) -> tuple[int, ...]:
        """Of each stage, in units of the solver (layers, where they are not grouped)."""
        counts = self.found.solution.counts
        return tuple(sum(n for (_, j, _), n in counts.items() if j == place) for place in range(len(self.order)))

    @property
    def places(self) -> frozenset[Place]:
        return frozenset(place for group in self.order for place in group.places)


def nearly_solved(
    request: PlanRequest, order: Order, concurrency: int, split: Split | None = None
) -> SolvedReplica | None:
    """The best by the request's metric over sizes of micro-batches and chunks, each with its layers dealt quickly; None where nothing fits.
    `split`: to begin with; where none is given or it does not fit, several are.
    """

    def quick(problem: Problem) -> Solution:
        return rounded(problem) or solve(
            problem, effort=Effort.of(request.time_limit_seconds, _WORK_WHERE_NOTHING_ROUNDS)
        )

    return _Climb(with_concurrency(request, concurrency), order, quick).run(split)


def turned(near: SolvedReplica, order: Order) -> SolvedReplica | None:
    """Nearly solved, with the same micro-batches, for its groups in another order; None where it does not fit."""

    def quick(problem: Problem) -> Solution:
        return rounded(problem) or Solution(SolutionStatus.UNKNOWN, StopReason.SETTLED)

    return _Climb(near.request, order, quick).better(None, [near.found.candidate.pair])


def proven(request: PlanRequest, near: SolvedReplica, effort: Effort) -> tuple[SolvedReplica, StopReason]:
    """These micro-batches with the split that is proven to be best by LLM-PQ's objective, where that is better by the metric too; and how the proof
    ended: SETTLED where only a price of the penalty keeps its bound, which proves nothing of other plans within it.
    """
    if (ended_by := effort.ended_by) is not None:
        return near, ended_by
    stops: list[StopReason] = []
    theta = request.theta

    def split(problem: Problem) -> Solution:
        """With half of what is left where another split, or another price of the penalty, may follow."""
        if (ended_by := effort.ended_by) is not None:
            stops.append(ended_by)
            return Solution(SolutionStatus.UNKNOWN, ended_by)
        parts = 2 if problem.slowest_decode or request.penalty_bound is not None else 1
        solution = solve(problem, effort=effort.part(parts))
        is_priced = solution.stop is StopReason.PROVED and problem.theta != theta
        stops.append(StopReason.SETTLED if is_priced else solution.stop)
        return solution

    climb = _Climb(with_concurrency(request, near.concurrency), near.order, split)
    better = climb.better(near, [near.found.candidate.pair]) or near
    worst = (StopReason.TIME_LIMIT, StopReason.WORK_LIMIT, StopReason.SETTLED)
    return better, next((stop for stop in worst if stop in stops), StopReason.PROVED)


class _Climb:
    """From neighbour to neighbour while it gets better: half or twice as many micro-batches, chunks half or twice as large."""

    def __init__(self, share: PlanRequest, order: Order, split: Callable[[Problem], Solution]) -> None:
        self._share, self._order, self._split = share, order, split
        self._pricer, self._metric = Pricer(share), Metric.for_request(share)
        self._seen: dict[Pair, SolvedReplica | None] = {}

    def run(self, begin: Split | None) -> SolvedReplica | None:
        stages = len(self._order)
        best = None if begin is None else self.better(None, [self._pair(begin)])
        if best is None:
            first = (Split(parts, chunk) for parts in dict.fromkeys((stages, 1)) for chunk in CHUNKS)
            best = self.better(None, [self._pair(each) for each in first])
        while best is not None:
            pair = best.found.candidate.pair
            parts, chunk = pair.count or stages, pair.chunk
            near = [Split(each, chunk) for each in (min(stages, parts * 2), max(1, parts // 2))]
            near += [Split(parts, each) for each in near_chunks(chunk)]
            found = self.better(best, [self._pair(each) for each in near])
            if found is best:
                break
            best = found
        return best

    def _pair(self, split: Split) -> Pair:
        return pair_of(self._share, split, len(self._order))

    def better(self, best: SolvedReplica | None, pairs: Sequence[Pair]) -> SolvedReplica | None:
        for pair in pairs:
            if pair not in self._seen:
                self._seen[pair] = self._solved(pair)
            one = self._seen[pair]
            if one is not None and (best is None or self._value(one) > self._value(best)):
                best = one
        return best

    def _value(self, one: SolvedReplica) -> float:
        return self._metric.of(one.prediction, one.concurrency)

    def _solved(self, pair: Pair) -> SolvedReplica | None:
        """LLM-PQ's objective fills the pipeline anew for every token; continuous batching does not, and takes the better of what that
        gives and of what is best where a round takes all stages in turn.
        """
        share, candidate = self._share, Candidate(self._order, pair)
        problem = self._pricer.problem(candidate)
        if any(stage.capacity_bytes < 0 for stage in problem.stages):
            return None
        best: SolvedReplica | None = None
        in_turn = [replace(problem, slowest_decode=0.0)] if problem.slowest_decode else []
        for asked in (problem, *in_turn):
            solution = self._within(asked)
            if solution is None:
                return best
            told = Solution(solution.status, solution.stop, solution.counts, problem.objective(solution.counts))
            found = Found(candidate, problem, told)
            one = SolvedReplica(share, found, predict(self._pricer, found))
            best = one if best is None or self._value(one) > self._value(best) else best
        return best

    def _within(self, problem: Problem) -> Solution | None:
        """The best split within the bound of the penalty, which a dearer penalty leads to; None where there is none."""
        free, theta = replace(problem, penalty_bound=math.inf), problem.theta
        solution = self._split(free)
        if not solution.counts or problem.penalty(solution.counts) <= problem.penalty_bound:
            return solution if solution.counts else None
        low, high, kept = theta, max(theta, 1e-6) * 4, None
        for _ in range(_PRICES):
            price = high if kept is None else math.sqrt(low * high) if low > 0 else high / 4
            solution = self._split(replace(free, theta=price))
            if solution.counts and problem.penalty(solution.counts) <= problem.penalty_bound:
                kept, high = solution, price
            else:
                low, high = price, high * 16 if kept is None else high
        return kept


def plan_of(replicas: Sequence[SolvedReplica]) -> Plan:
    """One plan of all replicas."""
    return combined([assemble(each.request, each.found, Pricer(each.request)) for each in replicas])
