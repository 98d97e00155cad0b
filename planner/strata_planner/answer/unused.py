"""Why devices serve nothing: for each class of equal idle ones what the plan would be with one of them, or with all, forced in.

Called by `strata plan`. The layouts' estimates choose the best place for the devices (a replica of their own, or a stage more of one
that there is), the exact solver says what it comes to. What turns out to be better than the plan is the plan.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec

from strata_planner.answer.alternatives import with_alternatives
from strata_planner.contract.plan import Plan, UnusedDevices
from strata_planner.errors import InfeasibleError
from strata_planner.question.cluster import Accelerator, DeviceGroup
from strata_planner.question.request import ONE_PIPELINE, REFERENCES, PlanRequest
from strata_planner.search.canonical import canonical
from strata_planner.search.layouts.genetic import Genetic, Genome
from strata_planner.search.layouts.goals import goal_of
from strata_planner.search.layouts.pool import Composition, Pool, plus
from strata_planner.search.layouts.search import Layout, Wish, laid, layout_plan
from strata_planner.search.metric import Metric, gain, value_of_plan
from strata_planner.search.planning import IDLE, PlanOutcome, exchanged

_ROUNDS = 8  # times that the plan may turn out to be better with an idle device
_MOST_SOLVED = 8  # classes of idle devices; of more the estimate has to do
_PLACES_SOLVED = 3  # of one class, in unlike replicas
_SECONDS = 2.0  # of solving one layout
_NO_MEMORY = "no memory is left beside what the framework takes of it"
_NO_REPLICA = "no replica with it holds the model with its KV, by the search's estimates"
_SAME = 1e-6  # plans whose values are apart by less are equally good


@dataclass(frozen=True)
class _Place:
    """A layout with idle devices in its replica `at`. `how`: as what, in words; `breaks`: the field of `placement` that does not allow it."""

    genome: Genome
    at: int
    how: str
    breaks: str


def explained(request: PlanRequest, outcome: PlanOutcome) -> PlanOutcome:
    """With its alternatives and its unused devices; neither is better than the plan."""
    for _ in range(_ROUNDS):
        told = with_alternatives(request, outcome)
        outcome = with_unused(request, told)
        if outcome.replicas is told.replicas:
            break
    return outcome


def with_unused(request: PlanRequest, outcome: PlanOutcome) -> PlanOutcome:
    """The outcome whose plan says of all idle devices why they are. None of them would make the plan better."""
    outcome = replace(outcome, notes=tuple(note for note in outcome.notes if not note.endswith(IDLE)))
    for _ in range(_ROUNDS):
        found = _Idle(request, outcome.plan).reasons()
        if not isinstance(found, Layout):
            return replace(outcome, plan=msgspec.structs.replace(outcome.plan, unused=found))
        outcome = exchanged(request, outcome, found)
    return outcome


class _Idle:
    """The idle devices of one plan."""

    def __init__(self, request: PlanRequest, plan: Plan) -> None:
        self._request = replace(request, cluster=canonical(request.cluster))
        self._free = replace(self._request, max_replicas=None, max_stages=None)
        self._plan, self._value = plan, value_of_plan(request, plan)
        self._pool = Pool(self._request.cluster)
        costs = [each.devices[0].hourly_cost or 0.0 for each in self._pool.classes]
        self._genetic = Genetic(self._free, self._pool, goal_of(request), costs)
        self._pipelines = self._genetic.pipelines

    def reasons(self) -> tuple[UnusedDevices, ...] | Layout:
        """Or the layout that is better than the plan. Devices of one type and one reason are told of together."""
        told = {(type_, _NO_MEMORY): devices for type_, devices in self._without_memory().items()}
        for number, (idle, devices) in enumerate(self._classes()):
            reason = self._why(idle, solved=number < _MOST_SOLVED)
            if isinstance(reason, Layout):
                return reason
            told.setdefault((devices[0].type, reason), []).extend(devices)
        return tuple(_told(devices, reason) for (_, reason), devices in told.items())

    def _without_memory(self) -> dict[str, list[Accelerator]]:
        """By type."""
        none: dict[str, list[Accelerator]] = {}
        for each in self._request.cluster.accelerators():
            if each.usable_bytes <= 0:
                none.setdefault(each.type, []).append(each)
        return none

    def _classes(self) -> Iterator[tuple[Composition, list[Accelerator]]]:
        """Equal idle devices: those of one node, with those of other nodes that nothing tells apart from it."""
        used = self._plan.places
        joined_as = self._request.cluster.joined_as
        found: dict[tuple[int, object], tuple[list[int], list[Accelerator]]] = {}
        for c, each in enumerate(self._pool.classes):
            idle = [device for device in each.devices if device.place not in used]
            if idle:
                key = (each.kind, joined_as(each.node))
                counts, devices = found.setdefault(key, ([0] * len(self._pool.classes), []))
                counts[c] = len(idle)
                devices.extend(idle)
        kinds = [kind for kind, _ in found]
        classes = [(tuple(counts), devices) for counts, devices in found.values()]
        each_kind_first = sorted(range(len(kinds)), key=lambda place: kinds.index(kinds[place]) != place)
        yield from (classes[place] for place in each_kind_first)

    def _why(self, idle: Composition, *, solved: bool) -> str | Layout:
        first = next(c for c, count in enumerate(idle) if count)
        if not self._holds_a_layer(first):
            bits = min(self._request.bits)
            return f"too small for one layer with its KV, also at {bits} bits"
        one = tuple(int(c == first) for c in range(len(idle)))
        places = [each for each in self._places(one, idle) if self._holds(each)]
        if not places:
            return _NO_REPLICA
        scored = [(score, each) for each in places if (score := self._estimate(each)) is not None]
        if not scored:
            return f"all {self._request.workload.concurrency} sequences in flight are better served without it"
        scored.sort(key=lambda pair: -pair[0])
        score, best = scored[0]
        if solved or score > self._genetic.judged(self._parts).score:
            return self._solved(_in_unlike_replicas(each for _, each in scored))
        return f"not better {best.how}, by the search's estimates"

    def _holds_a_layer(self, c: int) -> bool:
        """By the layouts' own table: the fewest bits, one sequence in flight, in the middle of a pipeline."""
        each = self._pool.classes[c]
        stages, group = self._pipelines.stages, DeviceGroup(each.devices[:1])
        table = stages.table(((each.kind,), ()), group, 1, first=False, head=False)
        return bool(table.most_layers[stages.columns(1).rung == 0].max() >= 1)

    def _places(self, one: Composition, idle: Composition) -> Iterator[_Place]:
        """One device of the class, and all of it that are idle: as a replica, or in one of the replicas that there are."""
        parts = self._parts
        most_replicas, most_stages = self._request.max_replicas, self._request.max_stages
        for unit in dict.fromkeys((one, idle)):
            count = sum(unit)
            them, stages = ("it", "a stage") if count == 1 else (f"all {count}", "stages")
            if self._request.solver not in ONE_PIPELINE:
                full = most_replicas is not None and len(parts) >= most_replicas
                yield _Place((*parts, unit), len(parts), f"with {them} as a replica", "maxReplicas" if full else "")
            for r, part in enumerate(parts):
                full = most_stages is not None and len(self._plan.replicas[r].stages) + count > most_stages
                genome = (*parts[:r], plus(part, unit), *parts[r + 1 :])
                where = f" of replica {r}" if len(parts) > 1 else ""
                yield _Place(genome, r, f"with {them} as {stages} more{where}", "maxStages" if full else "")

    @cached_property
    def _parts(self) -> tuple[Composition, ...]:
        return self._pool.parts_of(self._plan)

    def _holds(self, place: _Place) -> bool:
        return all(self._pipelines.best(each) is not None for each in place.genome)

    def _estimate(self, place: _Place) -> float | None:
        """None where no sequence would go there."""
        judged = self._genetic.judged(place.genome)
        return judged.score if judged.shares[place.at] else None

    def _solved(self, places: Iterable[_Place]) -> str | Layout:
        """Of the best of them, which estimates alone do not tell apart."""
        laid_out = [(layout.value(self._request), layout, place) for place in places if (layout := self._laid(place))]
        if not laid_out:
            return _NO_REPLICA
        value, layout, place = max(
            laid_out, key=lambda each: (self._is_better(each[0]) and not each[2].breaks, each[0])
        )
        better = gain(value, self._value)
        if not self._is_better(value):
            return self._worse(layout, value, place)
        would = f"{place.how} the plan would be {better:.1%} better"
        if place.breaks:
            limits = {"maxReplicas": self._request.max_replicas, "maxStages": self._request.max_stages}
            return f"placement.{place.breaks} {limits[place.breaks]}: {would}"
        if self._request.solver in REFERENCES:
            return f"{would}, which the solver '{self._request.solver}' did not find"
        return layout

    def _is_better(self, value: float) -> bool:
        return gain(value, self._value) > _SAME

    def _laid(self, place: _Place) -> Layout | None:
        try:
            return laid(self._free if place.breaks else self._request, place.genome, Wish(seconds=_SECONDS))
        except InfeasibleError:
            return None

    def _worse(self, layout: Layout, value: float, place: _Place) -> str:
        worse = -gain(value, self._value)
        said = Metric.for_request(self._request).said(value)
        if worse < 0.0005:
            return f"the plan is as good without it: {said} {place.how}"
        bound = layout_plan(layout).prediction.bound_by
        if self._request.objective.goal == "cost":
            return f"costs more than it gives: {place.how} {said}, {worse:.1%} worse"
        return f"{place.how} the plan is {worse:.1%} worse ({said}), bound by {bound}"


def _in_unlike_replicas(places: Iterable[_Place]) -> list[_Place]:
    """Of places from the best down the first of each replica, so many as are solved."""
    firsts: dict[int, _Place] = {}
    for each in places:
        firsts.setdefault(each.at, each)
    return [*firsts.values()][:_PLACES_SOLVED]


def _told(devices: Sequence[Accelerator], reason: str) -> UnusedDevices:
    return UnusedDevices(
        type=devices[0].type,
        nodes=tuple(dict.fromkeys(device.node for device in devices)),
        count=len(devices),
        reason=reason,
    )
