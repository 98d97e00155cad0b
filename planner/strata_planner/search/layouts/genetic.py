"""Genetic search over replicas: a layout is a list of compositions that share out the pool. Called by `search`.

As in HexGen (ICML 2024, section 4.2): groups of well-joined nodes to start from; merge two replicas, split one evenly or by type,
swap devices; what cannot hold the model is told by its bytes and costs nothing more. A part of the pool that holds no model is
kept, as idle devices, for later merges.
"""

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from strata_planner.question.request import PlanRequest
from strata_planner.search.layouts.clusters import grouped
from strata_planner.search.layouts.goals import Goal, Judged, Load, judge
from strata_planner.search.layouts.groups import Groups
from strata_planner.search.layouts.pipelines import Pipeline, Pipelines
from strata_planner.search.layouts.pool import Composition, Pool, minus, plus

Genome = tuple[Composition, ...]

POPULATION = 24
_FIRST_SHOWN = 100  # mutations
_WORK_OF_JUDGING = 40  # a replica, in microseconds about
_ROOMS = (1.02, 1.15, 1.4, 2.0)  # times the model's bytes: what replicas of the first layouts have


@dataclass(frozen=True)
class Limits:
    """`stall`: mutations without a better layout that end the search; `work`: of the pipelines, by their own count."""

    # By time.monotonic; a safety: the same question has the same answer only where it does not cut. It does not before something holds the model.
    latest: float
    mutations: int = 40_000
    stall: int = 4_000
    work: float = math.inf
    step: Callable[[], None] | None = None  # is called with every mutation


@dataclass(frozen=True)
class Individual:
    """`serving`: its parts that serve, and the sequences of each; how the idle rest is parted makes no other layout of it."""

    genome: Genome
    judged: Judged
    serving: tuple[tuple[Composition, int], ...]


class Genetic:
    """Deals out a pool. `costs`: an hour of a device of each class. `only`: as Pipelines'."""

    def __init__(
        self,
        request: PlanRequest,
        pool: Pool,
        goal: Goal,
        costs: Sequence[float],
        only: Mapping[Composition, Groups] | None = None,
    ) -> None:
        self.pipelines = Pipelines(request, pool, only, curves=goal.name == "slo")
        self.pool = pool
        self.mutations = 0
        self.was_cut = False  # by the clock
        self.ended_by_work = False
        self._goal = goal
        self._costs = costs
        self._most = request.max_replicas or sum(self.pool.whole)
        self._load = Load(self.pipelines.stages.rungs, request.workload.concurrency, request.workload.output_tokens)
        self._judged: dict[Genome, Individual] = {}
        self.best_of_count: dict[int, Individual] = {}  # by how many replicas serve

    def run(self, seed: int, limits: Limits, starts: Sequence[Genome] = ()) -> Iterator[list[Individual]]:
        """The population, best first: at the start, whenever four times as much is done, and at the end. The same for the same seed
        unless the time limit cuts it short.
        """
        draw = random.Random(seed)
        people = self._ranked(self._begun((*starts, *self._small(seed)), self._large(), limits))
        yield people
        mutations = stalled = 0
        shown = _FIRST_SHOWN
        while mutations < limits.mutations and stalled < limits.stall and self.pipelines.work < limits.work:
            if time.monotonic() >= limits.latest:
                self.was_cut = True
                break
            if mutations >= shown:
                shown *= 4
                yield people
            if limits.step is not None:
                limits.step()
            self.mutations += 1
            mutations += 1
            stalled += 1
            parent = people[min(int(draw.expovariate(4.0 / POPULATION)), len(people) - 1)]
            genome = parent.genome
            for _ in range(draw.choice((1, 1, 1, 2, 2, 3))):
                genome = self._mutated(draw, genome)
            child = self._individual(genome)
            worst, best = people[-1].judged.score, people[0].judged.score
            if len(people) == POPULATION and child.judged.score <= worst:
                continue
            people = self._ranked([*people, child])
            if child.judged.score > best * (1 + 1e-9 * (1 if best > 0 else -1)):
                stalled = 0
        self.ended_by_work |= self.pipelines.work >= limits.work
        yield people

    def _begun(self, small: Iterable[Genome], large: Iterable[Genome], limits: Limits) -> Iterator[Individual]:
        """Of the large ones as many as there is work for, and all until one holds the model."""
        found = [self._individual(genome) for genome in small]
        yield from found
        holds = any(each.serving for each in found)
        for genome in large:
            if holds and (self.pipelines.work >= limits.work or time.monotonic() >= limits.latest):
                self.was_cut |= self.pipelines.work < limits.work
                return
            one = self._individual(genome)
            holds |= bool(one.serving)
            yield one

    def replicas(self, genome: Genome) -> list[tuple[Composition, Pipeline]]:
        """Those that hold the model."""
        found = ((each, self.pipelines.best(each)) for each in genome)
        return [(each, pipeline) for each, pipeline in found if pipeline is not None]

    def judged(self, genome: Genome) -> Judged:
        """Its shares are those of `replicas`, in their order."""
        replicas = self.replicas(genome)
        costs = [sum(n * cost for n, cost in zip(each, self._costs, strict=True)) for each, _ in replicas]
        pipelines = [pipeline for _, pipeline in replicas]
        if len(pipelines) <= self._most:
            return judge(self._goal, self._load, pipelines, costs)
        ranked = sorted(range(len(pipelines)), key=lambda place: (-pipelines[place].best_rate, place))
        chosen = sorted(ranked[: self._most])  # the others serve nothing
        judged = judge(self._goal, self._load, [pipelines[p] for p in chosen], [costs[p] for p in chosen])
        shares = dict(zip(chosen, judged.shares, strict=True))
        rungs = dict(zip(chosen, judged.rungs or (), strict=False))
        places = range(len(pipelines))
        return Judged(
            judged.score,
            tuple(shares.get(place, 0) for place in places),
            tuple(rungs.get(place, 0) for place in places) if judged.rungs else None,
        )

    def _individual(self, genome: Genome) -> Individual:
        ordered = tuple(sorted(each for each in genome if any(each)))
        if ordered not in self._judged:
            judged = self.judged(ordered)
            self.pipelines.spend(_WORK_OF_JUDGING * len(judged.shares))
            parts = (part for part, _ in self.replicas(ordered))
            serving = tuple((part, share) for part, share in zip(parts, judged.shares, strict=True) if share)
            one = self._judged[ordered] = Individual(ordered, judged, serving)
            best = self.best_of_count.get(len(serving))
            if best is None or judged.score > best.judged.score:
                self.best_of_count[len(serving)] = one
        return self._judged[ordered]

    @staticmethod
    def _ranked(people: Iterable[Individual]) -> list[Individual]:
        """The best first, and each once: with the idle rest in as few parts as can be, which mutations part again."""
        ranked = sorted(people, key=lambda each: (-each.judged.score, len(each.genome), each.genome))
        found: dict[object, Individual] = {}
        for each in ranked:
            found.setdefault(each.serving or each.genome, each)
        return list(found.values())[:POPULATION]

    def _small(self, seed: int) -> Iterator[Genome]:
        """Replicas that just hold the model, and somewhat larger ones."""
        free, groups = self.pool.whole, grouped(self.pool, seed)
        for room in _ROOMS:
            yield tuple(part for nodes in groups for part in self._carved(self._within(free, nodes), room))
            yield tuple(part for node in self.pool.nodes for part in self._carved(self._within(free, [node]), room))

    def _large(self) -> Iterator[Genome]:
        """Replicas of many devices, which take more work."""
        yield from self._by_kind(self.pool.whole)
        yield from self._by_speed(self.pool.whole)

    def _by_speed(self, free: Composition) -> Iterator[Genome]:
        """The fastest devices as one replica, then the next class too, to all of them; each class that is left by itself."""
        classes = [c for c, count in enumerate(free) if count]
        ranked = sorted(classes, key=lambda c: (-self.pipelines.speed(c), c))
        for most in range(1, len(ranked) + 1):
            chosen = set(ranked[:most])
            one = tuple(count if c in chosen else 0 for c, count in enumerate(free))
            yield (one, *self._alone(free, set(ranked[most:])))

    def _by_kind(self, free: Composition) -> Iterator[Genome]:
        """Equal devices, on whatever nodes, as a replica; and every device by itself."""
        kinds = {each.kind for each in self.pool.classes}
        parts = (
            tuple(count if each.kind == kind else 0 for each, count in zip(self.pool.classes, free, strict=True))
            for kind in sorted(kinds)
        )
        yield tuple(part for part in parts if any(part))
        alone = (tuple(int(at == c) for at in range(len(free))) for c, count in enumerate(free) for _ in range(count))
        yield tuple(alone)

    @staticmethod
    def _alone(free: Composition, classes: set[int]) -> tuple[Composition, ...]:
        parts = (tuple(count if at == c else 0 for at, count in enumerate(free)) for c in sorted(classes))
        return tuple(part for part in parts if any(part))

    def _within(self, free: Composition, nodes: Sequence[str]) -> Composition:
        return tuple(count if each.node in nodes else 0 for each, count in zip(self.pool.classes, free, strict=True))

    def _carved(self, free: Composition, room: float) -> list[Composition]:
        """Replicas of at least `room` times the model's bytes, the next devices in turn; the rest is idle."""
        wanted = room * self.pipelines.least_bytes
        parts, part = [], [0] * len(free)
        for c, count in enumerate(free):
            for _ in range(count):
                part[c] += 1
                if self.pool.bytes_of(tuple(part)) >= wanted:
                    parts.append(tuple(part))
                    part = [0] * len(free)
        return [*parts, tuple(part)] if any(part) else parts

    def _mutated(self, draw: random.Random, genome: Genome) -> Genome:
        if len(genome) < 2:
            return self._split(draw, genome)
        kind = draw.random()
        if kind < 0.15:
            return self._merge(draw, genome)
        if kind < 0.3:
            return self._split(draw, genome)
        return self._swap(draw, genome) if kind < 0.75 else self._dealt_anew(draw, genome)

    @staticmethod
    def _merge(draw: random.Random, genome: Genome) -> Genome:
        a, b = draw.sample(range(len(genome)), 2)
        rest = tuple(each for place, each in enumerate(genome) if place not in {a, b})
        return (*rest, plus(genome[a], genome[b]))

    @staticmethod
    def _split(draw: random.Random, genome: Genome) -> Genome:
        """Half of each class, or whole classes."""
        place = draw.randrange(len(genome))
        one = genome[place]
        if draw.random() < 0.5:
            half = tuple((count + draw.randrange(2)) // 2 for count in one)
        else:
            half = tuple(count * draw.randrange(2) for count in one)
        other = minus(one, half)
        parts = tuple(each for each in (half, other) if any(each))
        return (*genome[:place], *genome[place + 1 :], *parts)

    @staticmethod
    def _swap(draw: random.Random, genome: Genome) -> Genome:
        """Devices of one class go from one replica to another, at times for others."""
        a, b = draw.sample(range(len(genome)), 2)
        changed = {a: list(genome[a]), b: list(genome[b])}
        for source, target in ((a, b), (b, a))[: draw.choice((1, 2))]:
            held = [c for c, count in enumerate(changed[source]) if count]
            if held:
                c = draw.choice(held)
                count = draw.choice((1, 1, 2, changed[source][c]))
                count = min(count, changed[source][c])
                changed[source][c] -= count
                changed[target][c] += count
        return tuple(
            tuple(changed.get(place, each)) for place, each in enumerate(genome) if any(changed.get(place, each))
        )

    @staticmethod
    def _dealt_anew(draw: random.Random, genome: Genome) -> Genome:
        """The devices of two replicas, each class parted at random."""
        a, b = draw.sample(range(len(genome)), 2)
        both = plus(genome[a], genome[b])
        part = tuple(draw.randint(0, count) for count in both)
        rest = tuple(each for place, each in enumerate(genome) if place not in {a, b})
        return (*rest, *(each for each in (part, minus(both, part)) if any(each)))
