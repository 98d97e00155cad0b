"""The best pipeline of a composition: which tensor-parallel groups, in which order, at which bits, for every load at once.

Called by `search` and `fleet`. A composition has few splits into groups (`groups`); `ways` estimates all of them for all loads of the
ladder together. `solved` decides layers and bits anew on the groups that were chosen.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from strata_planner.contract.shares import Shares
from strata_planner.costs.shards import degrees_of, equal_shares
from strata_planner.errors import WorkloadError
from strata_planner.question.cluster import DeviceGroup
from strata_planner.question.request import PlanRequest
from strata_planner.search.layouts.groups import Group, Grouping, Groups, alike
from strata_planner.search.layouts.pool import Composition, Pool
from strata_planner.search.layouts.stages import EVENLY, Floats, Kind, Split, Stages
from strata_planner.search.layouts.unlike import worth_a_try
from strata_planner.search.layouts.ways import Estimate, Indices, Way, Ways


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

    `curves`: of each choice of groups that is best at some rung, that rung with its own rates and seconds at all of them; none where they are not asked for.
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
    """Pipelines of one request, remembered by what costs can tell apart. `evaluations`: how many were worked out, `work`: that this took, about a
    microsecond each, and what whoever uses them adds. `only`: the groups of compositions that are not to be chosen. `curves`: whether they are told.
    """

    def __init__(
        self,
        request: PlanRequest,
        pool: Pool,
        only: Mapping[Composition, Groups] | None = None,
        *,
        curves: bool = False,
    ) -> None:
        self.request, self.pool, self.curves = request, pool, curves
        self.stages = Stages(request)
        self.degrees = degrees_of(request.model, request.tensor_parallel)
        unlike = tuple(each for each in self.degrees if each > 1)
        self._grouping = Grouping(pool, self.degrees, unlike, self._shares)
        self._shares_of: dict[tuple[int, ...], tuple[Shares, ...]] = {}
        self.evaluations = self._spent = 0
        self.only = only or {}
        pricer = self.stages.pricers[0]
        self.least_bytes = pricer.least_weight_bytes
        self._most_stages = min(request.max_stages or request.model.num_layers, request.model.num_layers)
        self._found: dict[tuple[object, ...], tuple[Composition, Pipeline | None]] = {}
        self._of: dict[Composition, Pipeline | None] = {}

    @property
    def work(self) -> int:
        return self._spent + self.stages.work

    def spend(self, work: int) -> None:
        self._spent += work

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
        given = self.only.get(composition)
        options = list(self.options(composition)) if given is None else [given]
        ways = [self._way(option) for option in options]
        rates, seconds, penalties, places, splits = self._estimated(ways)
        curves = self._curves(ways, places) if self.curves else ()
        if not rates.any():
            return None
        groups = tuple(options[place] if place >= 0 else () for place in places)
        told = tuple(rates.tolist()), tuple(seconds.tolist()), tuple(penalties.tolist())
        tried = tuple(split or Split(1, EVENLY) for split in splits)
        return Pipeline(*told, groups, tried, curves, _hull(self.stages.rungs, rates))

    def _estimated(self, ways: Sequence[Way]) -> Estimate:
        made = Ways(self.stages, ways)
        found = made.estimate()
        self.spend(made.work)
        return found

    def _curves(self, ways: Sequence[Way], places: Indices) -> tuple[Curve, ...]:
        """Of those that are the best somewhere, each alone; with the last of those rungs."""
        last = {int(place): rung for rung, place in enumerate(places) if place >= 0}
        found = ((rung, self._estimated([ways[place]])) for place, rung in last.items())
        return tuple(Curve(rung, tuple(each.rates.tolist()), tuple(each.seconds.tolist())) for rung, each in found)

    def _way(self, groups: Groups) -> Way:
        return Way(tuple(self._kind(group) for group in groups), self.order(groups))

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
