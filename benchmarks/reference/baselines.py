"""Partitions of other systems, priced by our costs: what a plan is compared with.

Called by benchmarks. Each method takes a candidate's Problem and gives a Solution, its bits chosen as that system would: one
precision for all layers, the highest that fits, unless the method mixes them. `best` tries every order and pair.

| method       | source                                            | layers of a stage                                         |
|--------------|---------------------------------------------------|-----------------------------------------------------------|
| even         | what most pipelines do                            | as many on every stage                                    |
| uniform      | LLM-PQ's "Uniform" (arXiv 2403.01136, section 6.1) | even, and micro-batches of one size in both phases        |
| pipeedge     | PipeEdge (arXiv 2110.14895)                       | the slowest stage as fast as possible, by dynamic programming |
| proportional | exo's ring: by the memory of devices              | in proportion to memory                                   |
| greedy       | Parallax (arXiv 2509.26182)                       | each stage full before the next                           |
| water        | Parallax's water-filling                          | in proportion to speed, no stage beyond its memory        |
| adabits      | LLM-PQ's start of bit-width transfer              | the least penalty that fits, whatever the seconds         |
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence

from strata_planner.question.request import PlanRequest
from strata_planner.search.exact import transfer
from strata_planner.search.exact.candidates import Candidate, Pricer
from strata_planner.search.exact.found import Found
from strata_planner.search.exact.orders import fleet_of, orders
from strata_planner.search.exact.problem import Problem, Solution, SolutionStatus, StopReason
from strata_planner.search.exact.split import Splits

Method = Callable[[Problem], Solution]
Sizes = Callable[[Splits, int], Sequence[int] | None]  # units of each stage at a precision (by index); None: it cannot

_NOTHING = Solution(SolutionStatus.UNKNOWN, StopReason.PROVED)


def even(problem: Problem) -> Solution:
    return _at_one_precision(problem, _even_sizes)


def pipeedge(problem: Problem) -> Solution:
    return _at_one_precision(problem, _balanced_sizes)


def proportional(problem: Problem) -> Solution:
    return _at_one_precision(problem, _proportional_sizes)


def greedy(problem: Problem) -> Solution:
    return _at_one_precision(problem, _greedy_sizes)


def water(problem: Problem) -> Solution:
    return _at_one_precision(problem, _water_sizes)


def adabits(problem: Problem) -> Solution:
    return transfer.adabits(problem)


def best(
    request: PlanRequest, method: Method, *, all_devices: bool = True, same_micro_batches: bool = False
) -> Found | None:
    """Over all orders and pairs. `all_devices`: no fewer stages than devices. `same_micro_batches`: eta = xi."""
    pricer, fleet = Pricer(request), fleet_of(request.cluster)
    least = fleet.size if all_devices else 1
    deadline = time.monotonic() + request.time_limit_seconds
    found: Found | None = None
    for order in orders(fleet, range(least, fleet.size + 1)):
        for candidate in _candidates(pricer, order, same_micro_batches=same_micro_batches):
            if time.monotonic() > deadline:
                return found
            problem = pricer.problem(candidate)
            solution = method(problem)
            if solution.counts and (found is None or solution.objective < found.solution.objective):
                found = Found(candidate, problem, solution)
    return found


def _candidates(pricer: Pricer, order: Sequence[object], *, same_micro_batches: bool) -> Iterable[Candidate]:
    candidates = list(pricer.micro_batches(tuple(order)))  # type: ignore[arg-type]
    return [each for each in candidates if not same_micro_batches or each.prefill == each.decode]


def _at_one_precision(problem: Problem, sizes: Sizes) -> Solution:
    """The highest precision at which the method's partition fits."""
    splits = Splits(problem)
    able = set(range(len(splits.bits))).intersection(*(splits.able(j) for j in range(len(problem.stages))))
    for b in sorted(able, reverse=True):
        units = sizes(splits, b)
        if units is None or min(units) < 1:
            continue
        stages = tuple((b,) * count for count in units)
        priced = splits.priced(stages)
        if priced.fits:
            return Solution(SolutionStatus.FEASIBLE, StopReason.PROVED, splits.counts(stages), priced.objective)
    return _NOTHING


def _even_sizes(splits: Splits, _: int) -> Sequence[int]:
    units, places = len(splits.runs), len(splits.problem.stages)
    return [units // places + (j < units % places) for j in range(places)]


def _proportional_sizes(splits: Splits, _: int) -> Sequence[int]:
    return _shared_out(len(splits.runs), [max(stage.capacity_bytes, 0) for stage in splits.problem.stages])


def _shared_out(units: int, weights: Sequence[float]) -> Sequence[int]:
    """Whole numbers in proportion to the weights, at least 1 each, the largest remainders rounded up."""
    total = sum(weights)
    if not total or units < len(weights):
        return [0] * len(weights)
    ideal = [1 + (units - len(weights)) * weight / total for weight in weights]
    whole = [math.floor(each) for each in ideal]
    by_remainder = sorted(range(len(ideal)), key=lambda j: whole[j] - ideal[j])
    for j in by_remainder[: units - sum(whole)]:
        whole[j] += 1
    return whole


def _greedy_sizes(splits: Splits, b: int) -> Sequence[int] | None:
    places, left = len(splits.problem.stages), len(splits.runs)
    sizes = []
    for j in range(places):
        reserved = places - 1 - j
        size = min(_room(splits, j, b), left - reserved)
        sizes.append(size)
        left -= size
    return sizes if not left else None


def _water_sizes(splits: Splits, b: int) -> Sequence[int] | None:
    """Stages fill in proportion to their speed; what one cannot hold the others take."""
    places = range(len(splits.problem.stages))
    rooms = [_room(splits, j, b) for j in places]
    speeds = [1 / _decode_seconds(splits, j, b) for j in places]
    capped: dict[int, int] = {}
    while True:
        free = [j for j in places if j not in capped]
        left = len(splits.runs) - sum(capped.values())
        if not free:
            return None
        shares = dict(zip(free, _shared_out(left, [speeds[j] for j in free]), strict=True))
        over = [j for j in free if shares[j] > rooms[j]]
        if not over:
            return [capped.get(j, shares.get(j, 0)) for j in places]
        capped |= {j: rooms[j] for j in over}


def _balanced_sizes(splits: Splits, b: int) -> Sequence[int] | None:
    """PipeEdge: the partition whose slowest stage or hop is fastest, by dynamic programming over stages and layers."""
    problem = splits.problem
    units = len(splits.runs)
    least = [[math.inf] * (units + 1) for _ in range(len(problem.stages) + 1)]
    came = [[0] * (units + 1) for _ in range(len(problem.stages) + 1)]
    least[0][0] = 0.0
    for j, stage in enumerate(problem.stages):
        room, second = _room(splits, j, b), _weighed_seconds(splits, j, b)
        fixed = sum(_phase_weights(problem)[phase] * stage.fixed_seconds[phase] for phase in (0, 1))
        for end in range(1, units + 1):
            for first in range(max(0, end - room), end):
                slowest = max(least[j][first], second * (end - first) + fixed)
                if slowest < least[j + 1][end]:
                    least[j + 1][end], came[j + 1][end] = slowest, first
    if math.isinf(least[-1][units]):
        return None
    sizes, end = [], units
    for j in range(len(problem.stages), 0, -1):
        sizes.append(end - came[j][end])
        end = came[j][end]
    return sizes[::-1]


def _phase_weights(problem: Problem) -> tuple[float, float]:
    """Micro-batches of each phase: what a second of the slowest stage is worth."""
    return problem.slowest_prefill + 1, problem.slowest_decode + problem.sum_decode


def _weighed_seconds(splits: Splits, j: int, b: int) -> float:
    prefill, decode = splits.problem.stages[j].seconds[0][splits.bits[b]]
    weights = _phase_weights(splits.problem)
    return weights[0] * prefill + weights[1] * decode


def _decode_seconds(splits: Splits, j: int, b: int) -> float:
    return splits.problem.stages[j].seconds[0][splits.bits[b]][1]


def _room(splits: Splits, j: int, b: int) -> int:
    """How many units of the first run's size a stage holds at a precision."""
    bits, units = splits.bits[b], len(splits.runs)
    low, high = 0, units
    while low < high:
        middle = (low + high + 1) // 2
        fits = splits.problem.free_bytes({(0, j, bits): middle}, j) >= 0
        low, high = (middle, high) if fits else (low, middle - 1)
    return low
