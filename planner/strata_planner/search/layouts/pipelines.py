"""The best pipeline of a composition: which tensor-parallel groups, in which order, at which bits, for every load at once.

Called by `search` and `fleet`. A composition has few splits into groups (`groups`); all loads of the ladder are priced together. What is
estimated here: layers are dealt as fractions, and all layers of a replica have the same bits, or two neighbouring widths that fill its memory; `solved`
decides both anew on the groups that were chosen.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from strata_planner.contract.shares import Shares
from strata_planner.costs.shards import degrees_of, equal_shares
from strata_planner.errors import WorkloadError
from strata_planner.question.cluster import DeviceGroup
from strata_planner.question.request import PlanRequest
from strata_planner.search.layouts.groups import Group, Grouping, Groups, alike
from strata_planner.search.layouts.pool import Composition, Pool
from strata_planner.search.layouts.stages import EVENLY, Columns, Floats, Kind, Split, Stages, StageTable
from strata_planner.search.layouts.unlike import worth_a_try
from strata_planner.search.layouts.water import capped, cheapest_first, level
from strata_planner.search.steady import Load, StageSteps, Steady, long_rounds, steady

Indices = npt.NDArray[np.intp]

_NEAR = 0.8  # of the best way to run a load with layers dealt evenly: only those are dealt otherwise too, which seldom gains a tenth
_WORK_BESIDE = 2000  # of looking at a pipeline, however small it is: as long as so many stages times loads take


@dataclass(frozen=True)
class Curve:
    """One choice of groups under every load. `rung`: one where it is the best."""

    rung: int
    rates: tuple[float, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Pipeline:
    """Per rung of the ladder: tokens a second, seconds of one request, what its bits cost in seconds, the groups, and how its steps are split; rate 0
    where nothing fits.

    `curves`: of each choice of groups that is best at some rung, that rung with its own rates and seconds at all of them.
    `steps`: the load's concave hull as (tokens a second per sequence more, sequences more, rung).
    """

    rates: tuple[float, ...]
    seconds: tuple[float, ...]
    penalties: tuple[float, ...]
    groups: tuple[Groups, ...]
    splits: tuple[Split, ...]
    curves: tuple[Curve, ...] = field(repr=False)
    steps: tuple[tuple[float, int, int], ...] = field(repr=False)

    @property
    def best_rate(self) -> float:
        return max(self.rates)


class Pipelines:
    """Pipelines of one request, remembered by what costs can tell apart. `evaluations`: how many were worked out, `work`: stages times loads
    that this took, about, and what whoever uses them adds. `only`: the groups of compositions that are not to be chosen.
    """

    def __init__(self, request: PlanRequest, pool: Pool, only: Mapping[Composition, Groups] | None = None) -> None:
        self.request = request
        self.pool = pool
        self.stages = Stages(request)
        self.degrees = degrees_of(request.model, request.tensor_parallel)
        unlike = tuple(each for each in self.degrees if each > 1)
        self._grouping = Grouping(pool, self.degrees, unlike, self._shares)
        self._shares_of: dict[tuple[int, ...], tuple[Shares, ...]] = {}
        self.evaluations = self.work = 0
        self.only = only or {}
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
        groups = tuple(tuple(group.renamed(names) for group in each) for each in pipeline.groups)
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
        rates, seconds, penalties = np.zeros(count), np.full(count, np.inf), np.zeros(count)
        groups: list[Groups] = [()] * count
        ways = [Split(1, EVENLY)] * count
        curves: dict[Groups, Curve] = {}
        given = self.only.get(composition)
        for option in self.options(composition) if given is None else (given,):
            found = self.estimate(option)
            better = np.flatnonzero(found.rates > rates)
            if better.size:
                curves[option] = Curve(-1, tuple(found.rates.tolist()), tuple(found.seconds.tolist()))
            tried = self.stages.columns(len(option)).splits
            for rung in better:
                groups[rung], ways[rung] = option, tried[found.split[rung]]
            for mine, theirs in zip((rates, seconds, penalties), found, strict=False):
                mine[better] = theirs[better]
        if not rates.any():
            return None
        steps = _hull(self.stages.rungs, rates)
        last = {option: rung for rung, option in enumerate(groups) if option}
        kept = tuple(replace(curves[option], rung=rung) for option, rung in last.items())
        told = tuple(rates.tolist()), tuple(seconds.tolist()), tuple(penalties.tolist())
        return Pipeline(*told, tuple(groups), tuple(ways), kept, steps)

    def speed(self, c: int) -> float:
        """Of a device of class c: layers a second of a request, prompt and answer, at the fewest bits it runs."""
        group = DeviceGroup(self.pool.classes[c].devices[:1])
        table, columns = (
            self.stages.table(((self.pool.classes[c].kind,), ()), group, 1, first=True, head=True),
            self.stages.columns(1),
        )
        one = np.flatnonzero(columns.rung == 0)
        prompts = columns.load.prompt_steps[one] * (table.prompts[one] + table.decode[one])
        return float(1 / (prompts + self.request.workload.output_tokens * table.decode[one]).min())

    def options(self, composition: Composition) -> Iterator[Groups]:
        """Of as many stages as the request allows."""
        for groups in self._grouping.options(composition):
            if self.request.min_stages <= len(groups) <= self._most_stages:
                yield groups

    def _shares(self, classes: tuple[int, ...]) -> tuple[Shares, ...]:
        """Worth a try for a group of such devices."""
        if classes not in self._shares_of:
            devices = tuple(self.pool.classes[c].devices[0] for c in classes)
            self._shares_of[classes] = worth_a_try(self.stages, devices, classes)
        return self._shares_of[classes]

    def of_degrees(self, composition: Composition, degrees: Sequence[int]) -> Groups:
        """Stages of these degrees, the composition's classes in turn. Raises WorkloadError where they do not part its devices."""
        groups, left = [], list(composition)
        for degree in degrees:
            c = next((c for c, count in enumerate(left) if count), 0)
            groups.append(alike(c, degree, equal_shares(self.request.model, degree)))
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
        for classes, shares in groups:
            devices = []
            for c in classes:
                devices.append(self.pool.classes[c].devices[used.get(c, 0)])
                used[c] = used.get(c, 0) + 1
            found.append(DeviceGroup(tuple(devices), shares))
        return tuple(found)

    def _kind(self, group: Group) -> Kind:
        return tuple(self.pool.classes[c].kind for c in group.classes), group.shares

    def estimate(self, groups: Groups) -> "Estimate":
        """The best of every way to run a pipeline of these groups, for each number of sequences in flight."""
        order = self.order(groups)
        columns = self.stages.columns(len(order))
        tables = [
            self.stages.table(self._kind(group), devices, len(order), first=place == 0, head=place == len(order) - 1)
            for place, (group, devices) in enumerate(zip(groups, order, strict=True))
        ]
        room = np.array([each.most_layers for each in tables])
        layers = self.request.model.num_layers
        most = np.minimum(np.floor(room), layers)
        fits = (most.sum(axis=0) >= layers) & (most.min(axis=0) >= 1) & columns.worth
        if not fits.any():
            return Estimate.nothing(len(self.stages.rungs))
        steps = partial(_Steps, tables, self._hops(order), np.array([[group.step_variation] for group in order]))
        best = _Best(columns)
        chosen = np.flatnonzero(fits & (self._penalty[columns.width] <= self._most_penalty))
        self.work += _WORK_BESIDE + chosen.size * len(order)
        alike = len({self._kind(group) for group in groups}) == 1  # the sum is the same then, however layers are dealt
        for evenly in (True,) if alike else (True, False):
            if not chosen.size:
                break
            load, at = columns.load.at(chosen), steps(chosen)
            penalty = self.request.theta * self._penalty[columns.width[chosen]]
            for dealt in self._dealt(at, most[:, chosen], columns.decode_size[chosen], load, evenly=evenly):
                best.offer(chosen, load, steady(at.of(dealt), load), penalty)
            chosen = chosen[best.rates[chosen] >= _NEAR * columns.best_of_rungs(best.rates)[columns.rung[chosen]]]
        self._offer_mixed(best, steps, room, fits)
        return best.of_rungs()

    def _offer_mixed(
        self, best: "_Best", steps: Callable[[Indices], "_Steps"], room: Floats, fits: npt.NDArray[np.bool_]
    ) -> None:
        """Where layers of more bits do not fit all: of the two widths the mixture of whole layers that fills all stages. Another is seldom better, as
        seconds and penalty are both nearly proportional to how many layers have more bits.
        """
        columns, layers = best.columns, self.request.model.num_layers
        dearer = np.roll(fits, -1)  # the next width of the same load
        runs = np.roll(room, -1, axis=1).min(axis=0) > 0
        chosen = np.flatnonzero(fits & ~dearer & runs & (columns.width < columns.widths - 1))
        if not chosen.size or not (self.request.theta or self.request.penalty_bound):
            return
        low, high = (room[:, at].sum(axis=0) for at in (chosen, chosen + 1))
        whole = np.floor(room[:, chosen]).sum(axis=0)  # a part of a layer that is left in a stage is left
        share = np.floor(layers * np.clip((whole / layers - 1) / np.maximum(low / high - 1, 1e-9), 0.0, 1.0)) / layers
        width = columns.width[chosen]
        penalty = (1 - share) * self._penalty[width] + share * self._penalty[width + 1]
        kept = penalty <= self._most_penalty
        chosen, share, penalty = chosen[kept], share[kept], penalty[kept]
        if not chosen.size:
            return
        self.work += chosen.size * len(room)
        load, dealt = columns.load.at(chosen), np.maximum(1.0, room[:, chosen] * (layers / low[kept]))
        cheap, dear = steps(chosen).of(dealt), steps(chosen + 1).of(dealt)
        best.offer(chosen, load, steady(cheap.towards(dear, share), load), self.request.theta * penalty)

    @cached_property
    def _penalty(self) -> Floats:
        """[widths] of all layers."""
        return np.array([self.stages.penalty[bits] for bits in self.request.bits])

    @cached_property
    def _most_penalty(self) -> float:
        bound = self.request.penalty_bound
        return math.inf if bound is None else bound

    def _hops(self, order: tuple[DeviceGroup, ...]) -> Floats:
        """[stages, 3, columns]."""
        count = len(order)
        if count == 1:
            return np.zeros((1, 3, len(self.stages.columns(1).width)))
        return np.array(
            [
                self.stages.hop(group, order[(place + 1) % count], count, back=place == count - 1)
                for place, group in enumerate(order)
            ]
        )

    def _dealt(self, steps: "_Steps", most: Floats, decode_size: Floats, load: Load, *, evenly: bool) -> list[Floats]:
        """Layers of the stages, [stages, columns]: even in time; or the cheapest first, and between the two."""
        layers = self.request.model.num_layers
        _, long = long_rounds(load, load.in_flight, load.prompt_steps)
        # What a request takes of a step's seconds, over all the steps that it is part of.
        a_request = load.output_tokens / decode_size
        work = (steps.decode + long * steps.prompts) * a_request
        beside = (steps.fixed_decode + long * steps.fixed_prompts) * a_request
        if evenly:
            return [level(work, beside, most, layers)]
        return [cheapest_first(work, most, layers), capped(work, beside, most, layers, load.micro_batches)]


class _Steps:
    """A pipeline's tables and hops at the columns `chosen`, as arrays [stages, columns]."""

    def __init__(self, tables: Sequence[StageTable], hops: Floats, varies: Floats, chosen: Indices) -> None:
        self.decode = np.array([each.decode[chosen] for each in tables])
        self.prompts = np.array([each.prompts[chosen] for each in tables])
        self.fixed_decode = np.array([each.fixed_decode[chosen] for each in tables])
        self.fixed_prompts = np.array([each.fixed_prompts[chosen] for each in tables])
        self.begun = np.array([each.begun[chosen] for each in tables])
        self._send_prompts, self._send, self._latency = (hops[:, each][:, chosen] for each in range(3))
        self._varies = varies

    def of(self, dealt: Floats) -> StageSteps:
        """With so many layers on each stage."""
        decode, prompts = dealt * self.decode + self.fixed_decode, dealt * self.prompts + self.fixed_prompts
        begun = dealt * self.begun
        return StageSteps(decode, prompts, self._send, self._send_prompts, self._latency, self._varies, begun)


class Estimate(NamedTuple):
    """Per rung of the ladder: tokens a second (0 where nothing fits), seconds of one request, seconds that its bits cost, and the place of the split
    among the columns'.
    """

    rates: Floats
    seconds: Floats
    penalties: Floats
    split: Indices

    @classmethod
    def nothing(cls, rungs: int) -> "Estimate":
        return cls(np.zeros(rungs), np.zeros(rungs), np.zeros(rungs), np.zeros(rungs, dtype=np.intp))


class _Best:
    """The best that was offered of each column."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self.rates, self._seconds, self._penalties = (np.zeros(len(columns.width)) for _ in range(3))

    def offer(self, chosen: Indices, load: Load, running: Steady, penalty: Floats) -> None:
        """Of the columns `chosen`. `penalty`: what bits cost, in seconds of the batch."""
        rates = load.in_flight * load.output_tokens / (load.in_flight / running.requests_per_second + penalty)
        better = rates > self.rates[chosen]
        a_request = running.first_token + (load.output_tokens - 1) * running.next_token
        for known, offered in ((self.rates, rates), (self._seconds, a_request), (self._penalties, penalty)):
            known[chosen[better]] = offered[better]

    def of_rungs(self) -> Estimate:
        """The best of each rung, of equals the first."""
        columns = self.columns
        ways = len(columns.splits), -1, columns.widths
        by_rung = self.rates.reshape(ways).transpose(1, 0, 2).reshape(-1, ways[0] * ways[2])
        best = by_rung.argmax(axis=1)
        split, width = np.divmod(best, columns.widths)
        at = (split, np.arange(len(best)), width)
        rates, seconds, penalties = (each.reshape(ways)[at] for each in (self.rates, self._seconds, self._penalties))
        return Estimate(rates, seconds, penalties, split)


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
