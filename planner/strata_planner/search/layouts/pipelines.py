"""The best pipeline of a composition: which tensor-parallel groups, in which order, at which bits, for every load at once.

Called by `search` and `fleet`. A group is of one class (HexGen, ICML 2024, section 3.3: one type, one machine), so a composition
has few splits into groups; all loads of the ladder are priced together. What is estimated here: layers are dealt as fractions
and all layers of a replica have the same bits; `solved` decides both anew on the groups that were chosen.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, product
from math import prod

import numpy as np

from strata_planner.costs.shards import divisible
from strata_planner.errors import WorkloadError
from strata_planner.question.cluster import DeviceGroup
from strata_planner.question.request import PlanRequest
from strata_planner.search.exact.candidates import Pair
from strata_planner.search.layouts.pool import Composition, Pool
from strata_planner.search.layouts.stages import Floats, Split, Stages, StageTable
from strata_planner.search.layouts.water import capped, cheapest_first, level

DEGREES = (8, 4, 2, 1)
_MOST_OPTIONS = 64  # splits of one composition; four classes have more

Groups = tuple[tuple[int, int], ...]  # (class, degree) of each stage, in order


@dataclass(frozen=True)
class Curve:
    """One choice of groups under every load. `rung`: one where it is the best."""

    rung: int
    rates: tuple[float, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Pipeline:
    """Per rung of the ladder: tokens a second, seconds of one request, the groups, the bits, and the micro-batches that decoding
    is split into (`parts`); rate 0 where nothing fits.

    `curves`: of each choice of groups that is best at some rung, that rung with its own rates and seconds at all of them.
    `steps`: the load's concave hull as (tokens a second per sequence more, sequences more, rung).
    """

    rates: tuple[float, ...]
    seconds: tuple[float, ...]
    groups: tuple[Groups, ...]
    bits: tuple[int, ...]
    parts: tuple[int, ...]
    curves: tuple[Curve, ...] = field(repr=False)
    steps: tuple[tuple[float, int, int], ...] = field(repr=False)

    @property
    def best_rate(self) -> float:
        return max(self.rates)


class Pipelines:
    """Pipelines of one request, remembered by what costs can tell apart. `evaluations`: how many were worked out. `only`: the
    groups of compositions that are not to be chosen.
    """

    def __init__(self, request: PlanRequest, pool: Pool, only: Mapping[Composition, Groups] | None = None) -> None:
        self.request = request
        self.pool = pool
        self.stages = Stages(request)
        wished = request.tensor_parallel
        self.degrees = tuple(each for each in DEGREES if each in wished and divisible(request.model, each))
        self.evaluations = 0
        self._only = only or {}
        pricer = self.stages.pricers[0]
        self.least_bytes = pricer.least_weight_bytes
        self._most_stages = min(request.max_stages or request.model.num_layers, request.model.num_layers)
        self._found: dict[tuple[object, ...], tuple[Composition, Pipeline | None]] = {}
        self._of: dict[Composition, Pipeline | None] = {}

    def best(self, composition: Composition) -> Pipeline | None:
        """None where the devices cannot hold the model; the groups are of this composition's own classes."""
        if composition not in self._of:
            self._of[composition] = self._look(composition)
        return self._of[composition]

    def _look(self, composition: Composition) -> Pipeline | None:
        if self.pool.bytes_of(composition) < self.least_bytes:
            return None
        key = self.pool.key(composition)
        if key not in self._found:
            self.evaluations += 1
            self._found[key] = (composition, self._evaluate(composition))
        known, pipeline = self._found[key]
        return pipeline if pipeline is None or known == composition else self._renamed(pipeline, known, composition)

    def _renamed(self, pipeline: Pipeline, known: Composition, composition: Composition) -> Pipeline:
        """The same pipeline on other classes: those of alike nodes, in the order that the key compares them in."""
        names = dict(zip(self._sorted_classes(known), self._sorted_classes(composition), strict=True))
        groups = tuple(tuple((names[c], degree) for c, degree in each) for each in pipeline.groups)
        return replace(pipeline, groups=groups)

    def _sorted_classes(self, composition: Composition) -> list[int]:
        """By nodes as the key compares them."""
        return [
            c
            for node in self.pool.nodes_of(composition)
            for c, count in enumerate(composition)
            if count and self.pool.classes[c].node == node
        ]

    def _evaluate(self, composition: Composition) -> Pipeline | None:
        count = len(self.stages.rungs)
        rates, seconds = np.zeros(count), np.full(count, np.inf)
        groups: list[Groups] = [()] * count
        bits, parts = [0] * count, [1] * count
        curves: dict[Groups, Curve] = {}
        given = self._only.get(composition)
        for option in self.options(composition) if given is None else (given,):
            found_rates, found_seconds, found_bits, found_parts = self.estimate(option)
            better = np.flatnonzero(found_rates > rates)
            if better.size:
                curves[option] = Curve(-1, tuple(found_rates.tolist()), tuple(found_seconds.tolist()))
            for rung in better:
                rates[rung], seconds[rung] = found_rates[rung], found_seconds[rung]
                groups[rung], bits[rung], parts[rung] = option, int(found_bits[rung]), int(found_parts[rung])
        if not rates.any():
            return None
        steps = _hull(self.stages.rungs, rates)
        last = {option: rung for rung, option in enumerate(groups) if option}
        kept = tuple(replace(curves[option], rung=rung) for option, rung in last.items())
        return Pipeline(
            tuple(rates.tolist()), tuple(seconds.tolist()), tuple(groups), tuple(bits), tuple(parts), kept, steps
        )

    def speed(self, c: int) -> float:
        """Of a device of class c: layers a second of a request, prompt and answer, at the fewest bits it runs."""
        group = DeviceGroup(self.pool.classes[c].devices[:1])
        table = self.stages.table(self.pool.classes[c].kind, group, Split(1, 1), first=False, head=False)
        answer = self.request.workload.output_tokens
        seconds = [p + (answer - 1) * d for p, d in zip(table.prefill[:, 0], table.decode[:, 0], strict=True)]
        return float(1 / min(seconds))

    def options(self, composition: Composition) -> Iterator[Groups]:
        """Every split of each class into groups of one degree and its rest by smaller ones, in the nodes' order; where there are
        many, only those of all classes at the same degree.
        """
        way = self.pool.cycle(self.pool.nodes_of(composition))
        held = [c for node in way for c, count in enumerate(composition) if count and self.pool.classes[c].node == node]
        ways = [splits(composition[c], self.degrees) for c in held]
        if not all(ways):  # devices that no wished degree parts
            return
        alike = zip(*(_filled(way, len(self.degrees)) for way in ways), strict=True)
        for split in alike if prod(map(len, ways)) > _MOST_OPTIONS else product(*ways):
            groups = tuple((c, degree) for c, degrees in zip(held, split, strict=True) for degree in degrees)
            if self.request.min_stages <= len(groups) <= self._most_stages:
                yield groups

    def of_degrees(self, composition: Composition, degrees: Sequence[int]) -> Groups:
        """Stages of these degrees, the composition's classes in turn. Raises WorkloadError where they do not part its devices."""
        groups, left = [], list(composition)
        for degree in degrees:
            c = next((c for c, count in enumerate(left) if count), 0)
            groups.append((c, degree))
            left[c] -= degree
        if any(left):
            raise WorkloadError(
                f"degrees {list(degrees)} do not part {composition}: a stage's devices are of one class"
            )
        return tuple(groups)

    def order(self, groups: Groups, taken: dict[int, int] | None = None) -> tuple[DeviceGroup, ...]:
        """The devices of the groups, the next of each class; `taken`: how many of each class are gone, updated."""
        used = {} if taken is None else taken
        found = []
        for c, degree in groups:
            first = used.get(c, 0)
            used[c] = first + degree
            found.append(DeviceGroup(self.pool.classes[c].devices[first : first + degree]))
        return tuple(found)

    def estimate(self, groups: Groups) -> tuple[Floats, Floats, Floats, Floats]:
        """[rungs] tokens a second (0 where it does not fit), seconds of one request, bits, parts."""
        order = self.order(groups)
        last = len(order) - 1
        tokens = np.array(self.stages.rungs) * self.request.workload.output_tokens
        rates, seconds, bits, parts = (np.zeros(len(self.stages.rungs)) for _ in range(4))
        for split in self.stages.splits(len(order)):
            if split.prefill == 1 and rates.all():  # which only brings what fits no other way
                break
            tables = [
                self.stages.table(self.pool.classes[c].kind, group, split, first=place == 0, head=place == last)
                for place, ((c, _), group) in enumerate(zip(groups, order, strict=True))
            ]
            hops = self._hops(order, split)
            for row, width in enumerate(self.request.bits):
                found = self._at_bits(tables, hops, row, split) if self._is_allowed(width) else None
                if found is None:
                    continue
                rate = np.where(np.isfinite(found[0]), tokens / (found[0] + self._penalty[width]), 0.0)
                better = rate > rates
                rates, seconds, bits, parts = (
                    np.where(better, new, old)
                    for new, old in ((rate, rates), (found[1], seconds), (width, bits), (split.parts, parts))
                )
        return rates, seconds, bits, parts

    @cached_property
    def _penalty(self) -> dict[int, float]:
        """Of all layers at these bits, in seconds of the batch."""
        runs = self.stages.pricers[0].runs
        return {
            bits: self.request.theta * sum(run.units * run.omega[bits] for run in runs) for bits in self.request.bits
        }

    def _is_allowed(self, bits: int) -> bool:
        """Whether all layers at these bits keep to the bound of the penalty; those that do not may still be mixed."""
        most = self.request.penalty_bound
        return most is None or sum(run.units * run.omega[bits] for run in self.stages.pricers[0].runs) <= most

    def _hops(self, order: tuple[DeviceGroup, ...], split: Split) -> Floats:
        """[stages, 2, rungs]."""
        count = len(order)
        if count == 1:
            return np.zeros((1, 2, len(self.stages.rungs)))
        return np.array(
            [
                self.stages.hop(group, order[(place + 1) % count], split, back=place == count - 1)
                for place, group in enumerate(order)
            ]
        )

    def _at_bits(self, tables: list[StageTable], hops: Floats, row: int, split: Split) -> tuple[Floats, Floats] | None:
        """Seconds of the whole batch and of one request, per rung; infinite where it does not fit."""
        most = np.array([each.most_layers[row] for each in tables])
        layers = self.request.model.num_layers
        fits = (most.sum(axis=0) >= layers) & (most.min(axis=0) >= 1)
        if not fits.any():
            return None
        pairs, answer = self.stages.pairs(split), self.request.workload.output_tokens
        one = np.array([each.prefill[row] for each in tables]), np.array([each.decode[row] for each in tables])
        fixed = np.array([each.fixed for each in tables])
        shares = (
            1 / np.array([each.prefill for each in pairs]),
            (answer - 1) / np.array([each.decode for each in pairs]),
        )
        work = one[0] * shares[0] + one[1] * shares[1]
        beside = fixed[:, 0] * shares[0] + fixed[:, 1] * shares[1]
        batch, request = self._batch(level(work, beside, most, layers), one, fixed, hops, pairs)
        for dealt in self._uneven(work, beside, most, split.parts):
            whole, alone = self._batch(dealt, one, fixed, hops, pairs)
            quicker = whole < batch
            batch, request = np.where(quicker, whole, batch), np.where(quicker, alone, request)
        return np.where(fits, batch, np.inf), np.where(fits, request, np.inf)

    def _uneven(self, work: Floats, beside: Floats, most: Floats, parts: int) -> Iterator[Floats]:
        layers = self.request.model.num_layers
        if len(work) > 1:
            yield cheapest_first(work, most, layers)
        if 1 < parts < len(work):
            yield capped(work, beside, most, layers, parts)

    def _batch(
        self, dealt: Floats, one: tuple[Floats, Floats], fixed: Floats, hops: Floats, pairs: list[Pair]
    ) -> tuple[Floats, Floats]:
        """As `prediction.predict` counts them."""
        rungs = np.array(self.stages.rungs)
        prefills = np.ceil(rungs / np.array([each.prefill for each in pairs]))
        decodes = np.ceil(rungs / np.array([each.decode for each in pairs]))
        stage = [dealt * one[phase] + fixed[:, phase] for phase in (0, 1)]
        slowest = [np.maximum(stage[phase].max(axis=0), hops[:, phase].max(axis=0)) for phase in (0, 1)]
        total = [stage[phase].sum(axis=0) + hops[:, phase].sum(axis=0) for phase in (0, 1)]
        generation = (self.request.workload.output_tokens - 1) * np.maximum(total[1], decodes * slowest[1])
        batch = total[0] + (prefills - 1) * slowest[0] + generation
        return batch, total[0] + (prefills - 1) / 2 * slowest[0] + generation


def splits(count: int, degrees: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Ways to part equal devices into groups: for each largest degree as many as go, the rest by the next ones."""
    ways = []
    for place, largest in enumerate(degrees):
        left, way = count, []
        for degree in degrees[place:]:
            way += [degree] * (left // degree)
            left %= degree
        if left == 0 and largest <= count:
            ways.append(tuple(way))
    return ways


def _filled(ways: list[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """The first again for each degree that is too large."""
    return [ways[0]] * (count - len(ways)) + ways


def _hull(rungs: tuple[int, ...], rates: Floats) -> tuple[tuple[float, int, int], ...]:
    """Steps of the concave hull of rates over sequences, from (0, 0); falling ends are left out."""
    corners: list[tuple[int, float, int]] = [(0, 0.0, -1)]
    for rung, (sequences, rate) in enumerate(zip(rungs, rates.tolist(), strict=True)):
        if rate <= corners[-1][1]:
            continue
        while len(corners) > 1 and _slope(corners[-2], corners[-1]) <= _slope(corners[-1], (sequences, rate, rung)):
            corners.pop()
        corners.append((sequences, rate, rung))
    return tuple((_slope(a, b), b[0] - a[0], b[2]) for a, b in pairwise(corners))


def _slope(a: tuple[int, float, int], b: tuple[int, float, int]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])
