"""Finding a layout: the room's front door. `best_layout` deals out a cluster, `replan_layout` what has changed of one.

Called by planning and benchmarks. Genetic search over estimates; the exact solver on the best few of them, now and then; of what it
makes of them the best by the request's metric is kept.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from strata_planner.contract.plan import Place, Plan
from strata_planner.errors import ClusterError, InfeasibleError, WorkloadError
from strata_planner.question.request import PlanRequest
from strata_planner.search.assembly import together
from strata_planner.search.exact.effort import Effort
from strata_planner.search.exact.orders import Order
from strata_planner.search.exact.problem import StopReason
from strata_planner.search.layouts.genetic import Genetic, Genome, Individual, Limits
from strata_planner.search.layouts.goals import Goal, goal_of
from strata_planner.search.layouts.groups import Groups
from strata_planner.search.layouts.pipelines import Pipeline, Pipelines
from strata_planner.search.layouts.pool import Composition, Pool
from strata_planner.search.layouts.solved import SolvedReplica, nearly_solved, plan_of, proven, turned
from strata_planner.search.layouts.stages import Split, with_concurrency
from strata_planner.search.metric import Metric
from strata_planner.search.watch import Progress, Watch, unwatched

_SEARCH_SHARE = 0.8  # of the time; the rest is for solving the replicas exactly
_LEAST_STALL, _STALL_OF_EACH, _MOST_STALL = 150, 30, 1200  # of each device
_PROVEN_IN_THE_END = 3  # of the layouts that were solved, those that are solved exactly
_SOLVED_OF_EACH = 6  # layouts of a population that the solver is asked for in the end; on the way it is the best one
_SOLVED_OF_FEW = 3
_UNSURE = 0.05  # by which solving may change what is estimated, as a share
_MOST_TURNS = 8  # of a replica's ring of stages
_FILLS = 4  # halvings of the sequences in flight between two rungs of the ladder
_MOST_WORK = 2_500_000  # of estimating pipelines and solving replicas: two or three seconds
_SOLVING_SHARE = 0.5  # of a population's work, for solving the best of it
_WORK_OF_SOLVING, _LEAST_WORK = 40_000, 0.1  # the latter of all work, of the last population at least
_WORK_OF_PROOFS = 400e6  # as exact searches count it: one to two seconds
_SECONDS_OF_WORK = 5.0  # time that a search has for that; with less of it there is less to do
_ISLANDS, _MANY_DEVICES = 3, 24  # populations that know nothing of each other; of many devices there is one


@dataclass(frozen=True)
class LayoutStats:
    """`evaluations`: unlike compositions whose pipelines were worked out; `score`: the goal's, as estimated."""

    evaluations: int
    mutations: int
    seconds: float
    score: float
    cut_after_seconds: float | None = None  # by the clock; None: it was not
    ended_by_work: bool = False
    proof: StopReason = StopReason.SETTLED  # of layers and bits, for the devices of each replica that was dealt out
    improvements: tuple[tuple[float, float], ...] = ()  # seconds since the start, the value by the request's metric


@dataclass(frozen=True)
class Layout:
    """Replicas on devices of their own; `idle`: devices that serve nothing."""

    goal: Goal
    replicas: tuple[SolvedReplica, ...]
    idle: int
    stats: LayoutStats

    def value(self, request: PlanRequest) -> float:
        """By the request's metric."""
        return value_of(request, self.replicas)

    @property
    def tokens_per_second(self) -> float:
        """As predicted, all sequences in flight."""
        return sum(each.prediction.tokens_per_second for each in self.replicas)


@dataclass(frozen=True)
class Wish:
    """How to search: for how long, with which seed of all chance, and what for where that is not the request's own objective. `stall`:
    mutations without a better layout that end it; None: by the number of devices. `work`: of estimates, judging and solving, by their own count, that
    ends it too, and in proportion that of proofs. Not `thorough`: one population, of which few are solved. Not `proves`: layers and bits are as they were found.
    """

    goal: Goal | None = None
    seconds: float = 4.0
    seed: int = 0
    stall: int | None = None
    work: float = _MOST_WORK
    thorough: bool = True
    proves: bool = True
    watch: Watch = unwatched


DEFAULT = Wish()


def best_layout(request: PlanRequest, wish: Wish = DEFAULT, starts: Sequence[Genome] = ()) -> Layout:
    """`starts`: layouts to begin with, beside the search's own. Raises InputError, and InfeasibleError where no part of the
    cluster holds the model.
    """
    request.check()
    started, goal = time.monotonic(), wish.goal or goal_of(request)
    pool = Pool(request.cluster)
    if not pool.classes:
        raise InfeasibleError(["no device has usable memory: add nodes with devices"])
    genetic = _genetic(request, pool, goal)
    return _finished(request, wish, genetic, (), started, starts)


def replan_layout(request: PlanRequest, running: Layout, wish: Wish = DEFAULT) -> Layout:
    """Replicas whose devices are all still there stay as they are; the others' devices and sequences are dealt out anew."""
    request.check()
    started, goal = time.monotonic(), wish.goal or goal_of(request)
    pool = Pool(request.cluster)
    there = {device.place for each in pool.classes for device in each.devices}
    kept = tuple(each for each in running.replicas if each.places <= there)
    rest = Pool(request.cluster, without=frozenset[Place]().union(*(each.places for each in kept)))
    free = request.workload.concurrency - sum(each.concurrency for each in kept)
    more = len(rest.classes) if request.max_replicas is None else request.max_replicas - len(kept)
    if kept and (free <= 0 or more <= 0 or not rest.classes):
        idle = sum(each.usable_bytes > 0 for each in request.cluster.accelerators())
        idle -= sum(group.degree for each in kept for group in each.order)
        return Layout(goal, kept, idle, LayoutStats(0, 0, time.monotonic() - started, 0.0))
    others = replace(with_concurrency(request, free), max_replicas=None if request.max_replicas is None else more)
    genetic = _genetic(others, rest, goal)
    return _finished(request, wish, genetic, kept, started, ())


def layout_plan(layout: Layout) -> Plan:
    return plan_of(layout.replicas)


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
    started, goal = time.monotonic(), wish.goal or goal_of(request)
    pool = Pool(request.cluster)
    only = {}
    if degrees is not None:
        free = Pipelines(request, pool)
        only = {each: free.of_degrees(each, given) for each, given in zip(genome, degrees, strict=True)}
    genetic = _genetic(request, pool, goal, only)
    return _solved(request, wish, genetic, genome, (), started)


def _genetic(request: PlanRequest, pool: Pool, goal: Goal, only: Mapping[Composition, Groups] | None = None) -> Genetic:
    return Genetic(request, pool, goal, _checked_costs(goal, pool), only)


def _finished(
    request: PlanRequest,
    wish: Wish,
    genetic: Genetic,
    kept: tuple[SolvedReplica, ...],
    started: float,
    starts: Sequence[Genome],
) -> Layout:
    """The best of what the exact solver makes of the best estimates: a longer search has seen all that a shorter one has."""
    stall = wish.stall or min(_MOST_STALL, max(_LEAST_STALL, _STALL_OF_EACH * sum(genetic.pool.whole)))
    latest = started + wish.seconds * _SEARCH_SHARE
    work = wish.work * _share_of_work(wish)
    solver = _Solver(request, wish.goal or goal_of(request), genetic, kept, started)
    bests: list[Genome] = []

    def step() -> None:
        wish.watch(Progress(solver.value, min(1.0, genetic.pipelines.work / work)))

    islands = _ISLANDS if wish.thorough and sum(genetic.pool.whole) <= _MANY_DEVICES else 0
    few = _SOLVED_OF_EACH if wish.thorough else _SOLVED_OF_FEW
    for island in range(islands + 1):
        begin = starts if island < islands else [*starts, *bests]  # the last one goes on from what the others found
        people: list[Individual] = []
        done = genetic.pipelines.work
        own = max(work - done, _LEAST_WORK * work) / (islands + 1 - island)  # solving may have taken all that was left
        limits = Limits(latest, stall=stall, work=done + (1 - _SOLVING_SHARE) * own, step=step)
        for people in genetic.run(wish.seed + island, limits, begin):
            solver.offer(people[0].genome)
        found = [each.genome for each in (*people[:few], *_near_best(genetic, people[0]))]
        bests += [genome for genome in found if genome not in bests]
        solver.offer_all(found, latest, done + own)
        if genetic.was_cut:
            break
    return solver.best(started + wish.seconds, _PROVEN_IN_THE_END if wish.thorough else 1, _proofs(wish))


def _near_best(genetic: Genetic, best: Individual) -> list[Individual]:
    """The best of as many replicas, of each number of them, where estimates do not tell them apart for sure."""
    least = best.judged.score - _UNSURE * abs(best.judged.score)
    return [each for _, each in sorted(genetic.best_of_count.items()) if each.judged.score >= least]


def _solved(
    request: PlanRequest,
    wish: Wish,
    genetic: Genetic,
    genome: Genome,
    kept: tuple[SolvedReplica, ...],
    started: float,
) -> Layout:
    solver = _Solver(request, wish.goal or goal_of(request), genetic, kept, started)
    solver.offer(genome)
    return solver.best(started + wish.seconds, 1, _proofs(wish))


def _proofs(wish: Wish) -> float:
    """Work that proofs may take."""
    return _WORK_OF_PROOFS * wish.work / _MOST_WORK * _share_of_work(wish) if wish.proves else 0.0


def _share_of_work(wish: Wish) -> float:
    return min(1.0, wish.seconds / _SECONDS_OF_WORK)


def value_of(request: PlanRequest, replicas: Sequence[SolvedReplica]) -> float:
    """By the request's metric."""
    shares = [each.concurrency for each in replicas]
    prediction = together([each.prediction for each in replicas], shares)
    devices = (device for each in replicas for group in each.order for device in group.devices)
    cost = sum(device.hourly_cost or 0.0 for device in devices)
    return Metric.for_request(request).of(prediction, sum(shares), cost)


class _Solver:
    """What the exact solver makes of layouts, and which of them is the best so far. Replicas are solved once, whatever they are part of."""

    def __init__(
        self, request: PlanRequest, goal: Goal, genetic: Genetic, kept: tuple[SolvedReplica, ...], started: float
    ) -> None:
        self._request, self._goal, self._genetic, self._kept, self._started = request, goal, genetic, kept, started
        self._nearly: dict[_Key, SolvedReplica | None] = {}
        self._exactly: dict[_Key, SolvedReplica] = {}
        self._proofs: dict[_Key, StopReason] = {}
        self._seen: set[Genome] = set()
        self._found: list[_Found] = []  # best first
        self._improvements: list[tuple[float, float]] = []

    @property
    def value(self) -> float | None:
        """Of the best so far."""
        return self._found[0].value if self._found else None

    def offer(self, genome: Genome) -> None:
        if genome in self._seen:
            return
        self._seen.add(genome)
        judged = self._genetic.judged(genome)
        dealt, taken = list[tuple[_Key, SolvedReplica]](), dict[int, int]()
        rungs = judged.rungs or (None,) * len(judged.shares)
        for (_, pipeline), share, rung in zip(self._genetic.replicas(genome), judged.shares, rungs, strict=True):
            one = self._replica(pipeline, _Choice(share, rung), taken) if share else None
            if one is not None:
                dealt.append(one)
        replicas = self._with_kept(dealt)
        if not replicas:
            return
        value = self._value(replicas, judged.score)
        if not self._found or value > self._found[0].value:
            self._improvements.append((time.monotonic() - self._started, value))
        found = [*self._found, _Found(value, judged.score, tuple(dealt))]
        self._found = sorted(found, key=lambda each: -each.value)[:_PROVEN_IN_THE_END]

    def offer_all(self, genomes: Sequence[Genome], latest: float, work: float) -> None:
        """As many as there is time for, and work."""
        for genome in genomes:
            if self._is_over(latest):
                break
            if genome in self._seen:
                continue
            if self._found and self._genetic.pipelines.work >= work:
                self._genetic.ended_by_work = True
                break
            self.offer(genome)

    def best(self, latest: float, count: int, work: float) -> Layout:
        """Of the `count` best layouts, with their splits proven as far as there is time and `work`. Raises InfeasibleError where no offered layout holds
        the model.
        """
        if not self._found:
            raise InfeasibleError([f"no part of the cluster holds {self._request.model_uri} with a sequence of its KV"])
        both = [way for each in self._found[:count] for way in (each, self._turned(each, latest))]
        full = [self._filled(each, latest) for place, each in enumerate(both) if each not in both[:place]]
        if work:
            self._prove([pair for each in full for pair in each.dealt], Effort(latest, work))
        solved = [(self._proven(each.dealt), each.score, each.dealt) for each in full]
        found, score, dealt = max(solved, key=lambda each: self._value(*each[:2]))
        ends = (self._proofs.get(key, StopReason.SETTLED) for key, _ in dealt)
        proof = next((each for each in ends if each is not StopReason.PROVED), StopReason.PROVED)
        self._improvements.append((time.monotonic() - self._started, self._value(found, score)))
        used = sum(group.degree for each in found for group in each.order)
        devices = sum(each.usable_bytes > 0 for each in self._request.cluster.accelerators())
        genetic, seconds = self._genetic, time.monotonic() - self._started
        stats = LayoutStats(
            genetic.pipelines.evaluations,
            genetic.mutations,
            seconds,
            score,
            round(latest - self._started, 3) if genetic.was_cut else None,
            genetic.ended_by_work,
            proof,
            tuple(self._improvements),
        )
        return Layout(self._goal, found, devices - used, stats)

    def _value(self, found: Sequence[SolvedReplica], score: float) -> float:
        return value_of(self._request, found) if self._goal == goal_of(self._request) else score

    def _is_over(self, latest: float) -> bool:
        over = time.monotonic() >= latest
        self._genetic.was_cut |= over
        return over

    def _turned(self, found: "_Found", latest: float) -> "_Found":
        """With the ring of each replica begun at another of its stages, or gone round the other way, where that is better: hops are the same all around, and the
        search has looked at one beginning. What the first and the last stage hold besides layers is not the same for all devices.
        """
        best = found
        for place, (key, replica) in enumerate(() if self._genetic.pipelines.only else found.dealt):
            for turn in _turns(key.groups):
                if self._is_over(latest):
                    return best
                other = key._replace(groups=tuple(key.groups[at] for at in turn))
                order = tuple(replica.order[at] for at in turn)
                if other not in self._nearly:
                    self._nearly[other] = turned(replica, order)
                best = self._with(best, place, other, order) or best
        return best

    def _filled(self, found: "_Found", latest: float) -> "_Found":
        """With as many sequences in flight more as make it better: between two rungs of the ladder nobody has looked."""
        best = found
        for place in range(len(found.dealt)):
            if self._is_over(latest):
                return best
            low, high = 0, min(self._free(best), self._to_the_next_rung(best.dealt[place][0].share))
            for _ in range(_FILLS):
                more = (low + high + 1) // 2
                tried = self._with_more(best, place, more - low) if more > low else None
                best, low, high = (tried, more, high) if tried is not None else (best, low, more - 1)
        return best

    def _free(self, found: "_Found") -> int:
        taken = sum(each.concurrency for each in self._kept) + sum(key.share for key, _ in found.dealt)
        return max(0, self._request.workload.concurrency - taken)

    def _to_the_next_rung(self, share: int) -> int:
        rungs = self._genetic.pipelines.stages.rungs
        return next((rung for rung in rungs if rung > share), share) - share

    def _with_more(self, found: "_Found", place: int, more: int) -> "_Found | None":
        key, replica = found.dealt[place]
        return self._with(found, place, key._replace(share=key.share + more), replica.order)

    def _with(self, found: "_Found", place: int, key: "_Key", order: Order) -> "_Found | None":
        """With this in place of one of its replicas; None where it does not fit, or gains nothing."""
        near = self._near(key, order)
        if near is None:
            return None
        dealt = (*found.dealt[:place], (key, near), *found.dealt[place + 1 :])
        value = self._value(self._with_kept(dealt), found.score)
        return _Found(value, found.score, dealt) if value > found.value else None

    def _near(self, key: "_Key", order: Order) -> SolvedReplica | None:
        if key not in self._nearly:
            self._genetic.pipelines.spend(_WORK_OF_SOLVING)
            self._nearly[key] = nearly_solved(self._request, order, key.share, key.split)
        known = self._nearly[key]
        return None if known is None else known.on(order)

    def _with_kept(self, dealt: Sequence[tuple["_Key", SolvedReplica]]) -> tuple[SolvedReplica, ...]:
        return (*self._kept, *(replica for _, replica in dealt))

    def _prove(self, dealt: Sequence[tuple["_Key", SolvedReplica]], effort: Effort) -> None:
        """Alike replicas are solved once; each may take its part of what those before it have left."""
        alike = dict(dealt)
        for (key, replica), own in zip(alike.items(), effort.parts(len(alike)), strict=True):
            self._exactly[key], self._proofs[key] = proven(self._request, replica, own)
            self._genetic.was_cut |= self._proofs[key] is StopReason.TIME_LIMIT

    def _proven(self, dealt: Sequence[tuple["_Key", SolvedReplica]]) -> tuple[SolvedReplica, ...]:
        """With those that are kept."""
        best = ((self._exactly.get(key, replica), replica.order) for key, replica in dealt)
        return (*self._kept, *(each.on(order) for each, order in best))

    def _replica(
        self, pipeline: Pipeline, choice: "_Choice", taken: dict[int, int]
    ) -> tuple["_Key", SolvedReplica] | None:
        """On the best groups for its share, or for less where the whole of it does not fit after all."""
        rungs = self._genetic.pipelines.stages.rungs
        start = next((rung for rung, sequences in enumerate(rungs) if sequences >= choice.share), len(rungs) - 1)
        for rung in range(start, -1, -1):
            at = rung if choice.rung is None else choice.rung
            groups = pipeline.groups[at]
            if not groups:
                continue
            used = dict(taken)
            order = self._genetic.pipelines.order(groups, used)
            key = _Key(groups, min(choice.share, rungs[rung]), pipeline.splits[at])
            if (known := self._near(key, order)) is not None:
                taken.update(used)
                return key, known
        return None


def _turns(groups: Groups) -> list[tuple[int, ...]]:
    """Other ways around a ring of stages, by their places, each with other stages at its ends: at most so many of a long one."""
    count, seen, found = len(groups), {(groups[0], groups[-1])}, list[tuple[int, ...]]()
    for step in (1, -1):
        for begin in range(count):
            turn = tuple((begin + step * k) % count for k in range(count))
            ends = groups[turn[0]], groups[turn[-1]]
            if ends not in seen and len(found) < _MOST_TURNS:
                seen.add(ends)
                found.append(turn)
    return found


class _Key(NamedTuple):
    """What a replica is solved from; equal devices of a class are as good as each other."""

    groups: Groups
    share: int
    split: Split


@dataclass(frozen=True)
class _Found:
    """A layout whose replicas, beside those that are kept, are nearly solved."""

    value: float
    score: float
    dealt: tuple[tuple[_Key, SolvedReplica], ...]


@dataclass(frozen=True)
class _Choice:
    """Sequences of a replica, and the rung whose groups it has; None: its share's."""

    share: int
    rung: int | None


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
