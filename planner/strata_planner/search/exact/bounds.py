"""Lower bounds in microseconds, of a candidate or of all orders of a pool: most are never solved.

Called by the searches. A Lagrangian relaxation of the ILP: the slowest stage is at least any average of the stages (weights
chosen so that every device is equally attractive at its fastest bits), memory is pooled over the stages and priced.
What remains is the cheapest (stage, bits) of each unit.
"""

import math

import numpy as np

from strata_planner.search.exact.lattice import NEVER, Lattice
from strata_planner.search.exact.problem import Problem
from strata_planner.search.exact.shares import even_shares

_PRICES = 24  # memory prices tried; each gives a valid bound, the best is kept


def lower_bound(problem: Problem) -> float:
    """No solution of the candidate has a smaller objective; infinite where even pooled memory does not suffice."""
    capacity = sum(stage.capacity_bytes for stage in problem.stages)
    if least_bytes(problem) > capacity or any(stage.capacity_bytes < 0 for stage in problem.stages):
        return math.inf
    costs = _unit_costs(problem)
    if any(not cost for cost in costs):
        return math.inf
    fixed = sum(
        prefill + problem.sum_decode * decode
        for stage in problem.stages
        for prefill, decode in (stage.fixed_seconds, stage.transfer_seconds)
    )
    return fixed + max(_priced(problem, costs, capacity, price) for price in _prices(costs))


def least_bytes(problem: Problem) -> int:
    """What the units take at least, each on the stage and at the bits where it is smallest."""
    return sum(
        run.units * min(size for stage in problem.stages for size in stage.bytes[r].values())
        for r, run in enumerate(problem.runs)
    )


def _unit_costs(problem: Problem) -> list[dict[int, float]]:
    """Per run: bytes -> least cost of a unit of that size on any stage, with the stages' shares of the slowest stage added."""
    shares = [_shares(problem, phase, weight) for phase, weight in enumerate(_weights(problem))]
    costs: list[dict[int, float]] = []
    for r, run in enumerate(problem.runs):
        best: dict[int, float] = {}
        for j, stage in enumerate(problem.stages):
            for bits, (prefill, decode) in stage.seconds[r].items():
                cost = (1 + shares[0][j]) * prefill + (problem.sum_decode + shares[1][j]) * decode
                size = stage.bytes[r][bits]
                best[size] = min(best.get(size, math.inf), cost + problem.theta * run.omega[bits])
        costs.append(best)
    return costs


def _weights(problem: Problem) -> tuple[tuple[float, float], tuple[float, float]]:
    """For each phase: how often the slowest stage counts, how often the sum."""
    return (problem.slowest_prefill, 1.0), (problem.slowest_decode, problem.sum_decode)


def _shares(problem: Problem, phase: int, weights: tuple[float, float]) -> list[float]:
    """The weight of the slowest stage, spread over the stages: never negative, summing to that weight."""
    slowest, total = weights
    fastest = [
        max(sum(min(units[bits][phase] for bits in units) for units in stage.seconds if units), 1e-12)
        for stage in problem.stages
    ]
    # Equal cost K on every stage: (total + share) * time = K; stages too slow for that get no share.
    used = sorted(range(len(fastest)), key=lambda j: fastest[j])
    while True:
        level = (slowest + total * len(used)) / sum(1 / fastest[j] for j in used)
        if total * fastest[used[-1]] <= level or len(used) == 1:
            break
        used.pop()
    shares = [0.0] * len(fastest)
    for j in used:
        shares[j] = max(0.0, level / fastest[j] - total)
    scale = slowest / sum(shares) if sum(shares) else 0.0
    return [share * scale for share in shares]


def _prices(costs: list[dict[int, float]]) -> list[float]:
    """Prices of a byte at which some run changes its bits: the bound's maximum lies at one of them (or at 0)."""
    found = {0.0}
    for cost in costs:
        for low in cost:
            for high in cost:
                if high > low and cost[low] > cost[high]:
                    found.add((cost[low] - cost[high]) / (high - low))
        if len(found) > _PRICES:
            break
    return sorted(found)


def _priced(problem: Problem, costs: list[dict[int, float]], capacity: int, price: float) -> float:
    total = -price * capacity
    for run, cost in zip(problem.runs, costs, strict=True):
        total += run.units * min(value + price * size for size, value in cost.items())
    return total


def pooled_bound(lattice: Lattice) -> float:
    """The same for all paths of a lattice; infinite where even pooled memory does not suffice."""
    groups = range(len(lattice.members))
    kinds = [np.flatnonzero(lattice.group == group) for group in groups]
    capacity = float(sum(lattice.members[g] * lattice.capacity[kinds[g]].max() for g in groups))
    _, _, rounds = lattice.weights
    weighed = lattice.seconds * (even_shares(lattice)[lattice.group][:, None, :] + np.array([1.0, rounds]))
    costs = np.array([weighed[kinds[g][0]].sum(1) for g in groups])
    sizes = np.array([lattice.bytes[kinds[g][0]] for g in groups])
    smallest = np.where(costs < NEVER, sizes, np.inf).min()
    if smallest * lattice.units > capacity:
        return math.inf
    fixed = lattice.fixed @ np.array([1.0, rounds])
    total = float(sum(lattice.members[g] * fixed[kinds[g]].min() for g in groups))
    total += float(sum((level.hop_sum @ np.array([1.0, rounds])).min() for level in lattice.levels))
    scale = lattice.penalty.max() + costs[costs < NEVER].max()
    prices = np.concatenate([[0.0], scale / sizes.min() * np.geomspace(1e-4, 1.0, _PRICES)])
    units = (costs + lattice.penalty[:, None, :]).reshape(lattice.units, -1)
    bought = (units + prices[:, None, None] * sizes.reshape(-1)).min(2).sum(1)
    return total + float((bought - prices * capacity).max())
