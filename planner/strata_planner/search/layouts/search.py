"""Finding a layout: the room's front door. `best_layout` deals out a cluster, `replan_layout` what has changed of one.

Called by planning and benchmarks. Genetic search over estimates, then the exact solver on the groups that won.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from strata_planner.contract.plan import Plan
from strata_planner.errors import ClusterError, InfeasibleError, WorkloadError
from strata_planner.question.request import PlanRequest
from strata_planner.search.layouts.genetic import Genetic, Genome, Limits
from strata_planner.search.layouts.goals import THROUGHPUT, Goal
from strata_planner.search.layouts.pipelines import Pipeline, Pipelines
from strata_planner.search.layouts.pool import Composition, Pool
from strata_planner.search.layouts.solved import Place, SolvedReplica, plan_of, solved
from strata_planner.search.layouts.stages import with_concurrency

_SEARCH_SHARE = 0.8  # of the time; the rest is for solving the replicas exactly


@dataclass(frozen=True)
class LayoutStats:
    """`evaluations`: unlike compositions whose pipelines were worked out; `score`: the goal's, as estimated."""

    evaluations: int
    mutations: int
    seconds: float
    score: float


@dataclass(frozen=True)
class Layout:
    """Replicas on devices of their own; `idle`: devices that serve nothing."""

    goal: Goal
    replicas: tuple[SolvedReplica, ...]
    idle: int
    stats: LayoutStats

    @property
    def tokens_per_second(self) -> float:
        """As predicted, all sequences in flight."""
        return sum(each.prediction.tokens_per_second for each in self.replicas)


@dataclass(frozen=True)
class Wish:
    """How to search: what for, for how long, and the seed of all chance."""

    goal: Goal = THROUGHPUT
    seconds: float = 4.0
    seed: int = 0
    stall: int = 1500


DEFAULT = Wish()


def best_layout(request: PlanRequest, wish: Wish = DEFAULT, starts: Sequence[Genome] = ()) -> Layout:
    """`starts`: layouts to begin with, beside the search's own. Raises InputError, and InfeasibleError where no part of the
    cluster holds the model.
    """
    request.check()
    started = time.monotonic()
    pool = Pool(request.cluster)
    genetic = Genetic(Pipelines(request, pool), wish.goal, _checked_costs(wish.goal, pool))
    return _finished(request, wish, genetic, (), started, starts)


def replan_layout(request: PlanRequest, running: Layout, wish: Wish = DEFAULT) -> Layout:
    """Replicas whose devices are all still there stay as they are; the others' devices and sequences are dealt out anew."""
    request.check()
    started = time.monotonic()
    pool = Pool(request.cluster)
    there = {device.place for each in pool.classes for device in each.devices}
    kept = tuple(each for each in running.replicas if each.places <= there)
    rest = Pool(request.cluster, without=frozenset[Place]().union(*(each.places for each in kept)))
    free = request.workload.concurrency
    if wish.goal.name != "slo":  # whose replicas have room for all sequences that can be in time, each
        free = max(1, free - sum(each.concurrency for each in kept))
    genetic = Genetic(Pipelines(with_concurrency(request, free), rest), wish.goal, _checked_costs(wish.goal, rest))
    if not rest.classes:
        return _solved(request, wish, genetic, (), kept, started)
    return _finished(request, wish, genetic, kept, started, ())


def layout_plan(request: PlanRequest, layout: Layout) -> Plan:
    return plan_of(request, layout.replicas)


def composition_of(pool: Pool, counts: dict[str, int]) -> Composition:
    """So many devices of each named node; the node's first classes first."""
    left = dict(counts)
    found = []
    for each in pool.classes:
        taken = min(left.get(each.node, 0), len(each.devices))
        left[each.node] = left.get(each.node, 0) - taken
        found.append(taken)
    short = {node: count for node, count in left.items() if count}
    if short:
        raise ClusterError(f"the pool has no {short} devices more; name at most what each node has")
    return tuple(found)


def laid(
    request: PlanRequest, genome: Genome, wish: Wish = DEFAULT, degrees: Sequence[Sequence[int]] | None = None
) -> Layout:
    """The layout of given compositions; nothing is searched but their pipelines, or not even these where `degrees` names
    the tensor-parallel degree of every stage.
    """
    started = time.monotonic()
    pool = Pool(request.cluster)
    only = {}
    if degrees is not None:
        free = Pipelines(request, pool)
        only = {each: free.of_degrees(each, given) for each, given in zip(genome, degrees, strict=True)}
    genetic = Genetic(Pipelines(request, pool, only), wish.goal, _checked_costs(wish.goal, pool))
    return _solved(request, wish, genetic, genome, (), started)


def _finished(
    request: PlanRequest,
    wish: Wish,
    genetic: Genetic,
    kept: tuple[SolvedReplica, ...],
    started: float,
    starts: Sequence[Genome],
) -> Layout:
    limits = Limits(seconds=wish.seconds * _SEARCH_SHARE, stall=wish.stall)
    best = genetic.run(wish.seed, limits, starts)[0]
    return _solved(request, wish, genetic, best.genome, kept, started)


def _solved(
    request: PlanRequest,
    wish: Wish,
    genetic: Genetic,
    genome: Genome,
    kept: tuple[SolvedReplica, ...],
    started: float,
) -> Layout:
    judged = genetic.judged(genome)
    pipelines, found = genetic.pipelines, list(kept)
    taken: dict[int, int] = {}
    rungs = judged.rungs or (None,) * len(judged.shares)
    for (_, pipeline), share, rung in zip(genetic.replicas(genome), judged.shares, rungs, strict=True):
        one = _replica(request, pipelines, pipeline, _Choice(share, rung), taken) if share else None
        if one is not None:
            found.append(one)
    if not found:
        raise InfeasibleError([f"no part of the cluster holds {request.model_uri} with a sequence of its KV"])
    used = sum(group.degree for each in found for group in each.order)
    devices = sum(each.usable_bytes > 0 for each in request.cluster.accelerators())
    stats = LayoutStats(pipelines.evaluations, genetic.mutations, time.monotonic() - started, judged.score)
    return Layout(wish.goal, tuple(found), devices - used, stats)


@dataclass(frozen=True)
class _Choice:
    """Sequences of a replica, and the rung whose groups it has; None: its share's."""

    share: int
    rung: int | None


def _replica(
    request: PlanRequest, pipelines: Pipelines, pipeline: Pipeline, choice: _Choice, taken: dict[int, int]
) -> SolvedReplica | None:
    """On the best groups for its share, or for less where the whole of it does not fit after all."""
    rungs = pipelines.stages.rungs
    start = next((rung for rung, sequences in enumerate(rungs) if sequences >= choice.share), len(rungs) - 1)
    for rung in range(start, -1, -1):
        groups = pipeline.groups[rung if choice.rung is None else choice.rung]
        if not groups:
            continue
        used = dict(taken)
        one = solved(request, pipelines.order(groups, used), min(choice.share, rungs[rung]))
        if one is not None:
            taken.update(used)
            return one
    return None


def _checked_costs(goal: Goal, pool: Pool) -> tuple[float, ...]:
    """An hour of a device of each class."""
    if goal.name == "slo" and goal.deadlines is None:
        raise WorkloadError("the goal slo needs deadlines: name seconds and requests per second")
    if goal.name != "cost":
        return (0.0,) * len(pool.classes)
    found = []
    for each in pool.classes:
        cost = each.devices[0].hourly_cost
        if cost is None or cost <= 0:
            raise ClusterError(
                f"node '{each.node}' device '{each.devices[0].type}': hourlyCost {cost}; the goal cost needs an amount above 0 of "
                "every device: add hourlyCost to the cluster"
            )
        found.append(cost)
    return tuple(found)


__all__ = ["Goal", "Layout", "LayoutStats", "Wish", "best_layout", "laid", "layout_plan", "replan_layout"]
