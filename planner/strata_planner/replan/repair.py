"""The repair of a plan that lost devices, in milliseconds: taken before any search, and served while a better plan is looked for.

`repair` is called by the operator, by `strata up` and by `strata plan --what-if`. Replicas that are whole stay as they are, to the byte. Of a
replica that lost stages the order stays, the neighbours of a lost stage take over its layers, and bits are lowered where they cost least
quality for a byte until that fits; then stages further off give way; then devices that serve nothing take a lost stage's place; then fewer
sequences are in flight; and where nothing of that fits, the replica is left out and the others serve. Knows no search: `loss_against` says
what one found better.
"""

import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from strata_planner.contract.plan import Place, Plan, Prediction, Replica, Stage
from strata_planner.contract.values import Value
from strata_planner.errors import InfeasibleError, WorkloadError
from strata_planner.question.cluster import DeviceGroup
from strata_planner.question.model import Model
from strata_planner.question.request import PlanRequest
from strata_planner.replan.holdings import Movement, holdings, movement
from strata_planner.replan.repaired import Groups, Repaired, Repairing, Short
from strata_planner.replan.running import keeps_to, whole_replica
from strata_planner.replan.shadow_room import NOTHING_TO_DO, Busiest, busiest, shadowed_bytes, still_kept
from strata_planner.replan.spans import NEVER_BYTES
from strata_planner.replan.spares import with_spares
from strata_planner.replan.steps import Step, steps
from strata_planner.search.assembly import together
from strata_planner.search.layouts.stages import with_concurrency
from strata_planner.search.metric import Metric, gain, value_of_plan, with_objective
from strata_planner.sensitivity import penalty_bound, prior
from strata_planner.units import human_bytes

RepairKind = Literal["neighbours", "reshuffle", "spareDevices", "fewerSequences", "withoutReplica"]
# Mildest first.
KINDS: tuple[RepairKind, ...] = (
    "neighbours",
    "reshuffle",
    "spareDevices",
    "fewerSequences",
    "withoutReplica",
)
_NEVER_LOWERED = 17  # bits
# Measured by this project (docs/benchmarks.md, `precision_switch`): one layer of Llama-2-7B from 8 to 4 bits, read, swapped and returned.
_NARROW_SECONDS, _NARROWED_PARAMETERS = 0.0106, 202e6


def narrow_seconds(model: Model) -> float:
    """That a layer takes which gets fewer bits where it lies."""
    return _NARROW_SECONDS * model.layers[0].linear_parameters / _NARROWED_PARAMETERS


@dataclass(frozen=True)
class Takeover:
    """What a repair may cost in quality. `min_bits`: no layer is lowered below. `max_perplexity_increase`: points of perplexity over 16 bits,
    for as long as the repair serves; None: the plan's own bound, if it has one. `exact`: no bits are lowered at all.
    """

    min_bits: int = 3
    max_perplexity_increase: float | None = None
    exact: bool = False

    def check(self) -> None:
        """Raises WorkloadError."""
        if not 2 <= self.min_bits <= 16:
            raise WorkloadError(f"takeover.minBits {self.min_bits}: choose from 2 to 16")

    @property
    def fewest_bits(self) -> int:
        return _NEVER_LOWERED if self.exact else self.min_bits

    def bound(self, request: PlanRequest) -> float | None:
        """Of the penalty. Raises WorkloadError where no losses of the model were measured."""
        most = self.max_perplexity_increase
        if most is None:
            return request.penalty_bound
        return penalty_bound(request.sensitivity or prior(request.model, ()), most)


class Lowered(msgspec.Struct, frozen=True):
    """A layer that has fewer bits than before."""

    replica: int
    layer: int
    before: int
    after: int


class RepairNote(Value, frozen=True, omit_defaults=True):
    """What is kept of a repair beside its plan. `kept_share`: of the value before the loss, by the request's metric. `shadowed_bytes`: of those to be
    loaded, what the slots that load them keep. `read_bytes`, `device_bytes`: of the slot with most to read from files, and to bring to its device.
    `narrow_seconds`: predicted, of the slot that lowers most bits in place.
    """

    kind: RepairKind
    layers_moved: int
    bits_lowered: int  # layers
    loaded_bytes: int
    kept_share: float
    milliseconds: float
    shadowed_bytes: int = 0
    read_bytes: int = 0
    device_bytes: int = 0
    narrow_seconds: float = 0.0


@dataclass(frozen=True)
class Repair:
    """`kind`: the furthest that any replica had to go. `value`: by the request's metric, more is better. `gained`: over the plan before the loss,
    no more than 0 if that was the best; devices that are lost have no price any more, so that neither plan is told by what it costs.
    `steps`: each within memory. `shadowed_bytes`: of what they load, that which slots keep already.
    """

    plan: Plan
    kind: RepairKind
    lost: tuple[Place, ...]
    lowered: tuple[Lowered, ...]
    movement: Movement
    steps: tuple[Step, ...]
    value: float
    gained: float
    seconds: float
    shadowed_bytes: int = 0
    busiest: Busiest = NOTHING_TO_DO
    narrow_seconds: float = 0.0

    @property
    def note(self) -> RepairNote:
        return RepairNote(
            self.kind,
            self.movement.moved_layers,
            len(self.lowered),
            self.movement.loaded_bytes,
            round(max(0.0, 1 + self.gained), 4),
            round(1e3 * self.seconds, 1),
            self.shadowed_bytes,
            self.busiest.read_bytes,
            self.busiest.loaded_bytes,
            round(self.narrow_seconds, 3),
        )

    def loss_against(self, fresh: float) -> float:
        """The share of a fresh plan's value that the repair is worse by; 0 where it is as good."""
        return max(0.0, -gain(self.value, fresh))


def repair(request: PlanRequest, running: Plan, wishes: Takeover | None = None) -> Repair:
    """`request`: what the running plan answers, on the devices that are left.

    Raises InputError for wishes that make no sense, and InfeasibleError with reasons where there is nothing to repair or no repair.
    """
    started = time.perf_counter()
    wishes = wishes or Takeover()
    wishes.check()
    request = _as_running(request, running)
    request.check()
    if not keeps_to(replace(request, min_stages=1), running):
        raise InfeasibleError(
            ["the plan in force answers another request than this one: it is planned anew, not repaired"]
        )
    mending = _Mending(replace(request, penalty_bound=wishes.bound(request)), running, wishes)
    if not mending.lost:
        raise InfeasibleError(["every device of the plan is there: nothing is to be repaired"])
    changed, plan = mending.run()
    before = msgspec.structs.replace(
        running, replicas=tuple(each for each in running.replicas if each.replica in mending.broken)
    )
    after = msgspec.structs.replace(plan, replicas=changed)
    plan = msgspec.structs.replace(plan, shadows=still_kept(running, plan, request.model))
    moves = steps(before, after, request.model, serving=False)
    most = busiest(running, moves)
    return Repair(
        plan=with_objective(request, plan),
        kind=mending.kind,
        lost=mending.lost,
        lowered=tuple(_lowered(before, after)),
        movement=movement(holdings(before), after, request.model),
        steps=moves,
        value=value_of_plan(request, plan),
        gained=gain(_served(request, plan), _served(request, running)),
        seconds=time.perf_counter() - started,
        shadowed_bytes=shadowed_bytes(running, moves),
        busiest=most,
        narrow_seconds=most.narrowed_layers * narrow_seconds(request.model),
    )


def _served(request: PlanRequest, plan: Plan) -> float:
    """By the request's metric, whatever the devices cost."""
    return Metric.for_request(request).of(plan.prediction, sum(each.concurrency for each in plan.replicas))


def _as_running(request: PlanRequest, running: Plan) -> PlanRequest:
    """With the arithmetic of the plan in force: what is best for the devices that are left may be another, and would load everything anew."""
    model = msgspec.structs.replace(request.model, head_format=running.head_format)
    return replace(request, model=model, compute_type=running.compute_type)


class _Mending:
    """Of one loss: replica after replica, those that are whole first in nothing but what they keep."""

    def __init__(self, request: PlanRequest, running: Plan, wishes: Takeover) -> None:
        self._request, self._running, self._wishes = request, running, wishes
        self._groups = {each.replica: tuple(self._group(stage) for stage in each.stages) for each in running.replicas}
        self.lost = request.cluster.lacks(running.places)
        self.broken = {number for number, groups in self._groups.items() if () in groups}
        self._reasons: list[str] = []
        self._taken = set(running.places)
        self._told: dict[Hashable, Prediction] = {}
        self.kind: RepairKind = "neighbours"

    def _group(self, stage: Stage) -> tuple[DeviceGroup, ...]:
        found = self._request.cluster.group(stage.places, stage.shares)
        return () if found is None else (found,)

    def run(self) -> tuple[tuple[Replica, ...], Plan]:
        """The replicas that were mended, and the whole plan."""
        replicas, predictions, mended = list[Replica](), list[Prediction](), list[Replica]()
        for replica in self._running.replicas:
            if replica.replica not in self.broken:
                replicas.append(replica)
                predictions.append(self._prediction(replica))
                continue
            one = self._mended(replica)
            if one is None:
                self._note("withoutReplica")
                continue
            changed = msgspec.structs.replace(one.replicas[0], replica=replica.replica)
            replicas.append(changed)
            mended.append(changed)
            predictions.append(one.prediction)
        if not replicas:
            raise InfeasibleError(self._reasons)
        prediction = together(predictions, [each.concurrency for each in replicas], [each.replica for each in replicas])
        plan = msgspec.structs.replace(
            self._running,
            replicas=tuple(replicas),
            prediction=prediction,
            alternatives=(),
            unused=(),
            search=None,
            orders=None,
        )
        return tuple(mended), plan

    def _prediction(self, replica: Replica) -> Prediction:
        """Of one that stays. Alike replicas are told once."""
        key = self._looks(replica)
        if key not in self._told:
            self._told[key] = self._predicted(replica)
        return self._told[key]

    def _looks(self, replica: Replica) -> Hashable:
        """All that a prediction depends on."""
        cluster = self._request.cluster
        groups = [group for each in self._groups[replica.replica] for group in each]
        links = [cluster.link(a.leader, b.leader) for a, b in zip(groups, [*groups[1:], *groups[:1]], strict=True)]
        inner = [cluster.slowest_link(group) if group.degree > 1 else None for group in groups]
        devices = [
            (each.own.type, each.degree, each.shares, each.usable_bytes, msgspec.json.encode(each.profile))
            for group in groups
            for each in group.ranks
        ]
        bits = [stage.bits for stage in replica.stages]
        return replica.concurrency, replica.micro_batch, tuple(devices), tuple(links), tuple(inner), tuple(bits)

    def _predicted(self, replica: Replica) -> Prediction:
        solved = whole_replica(with_concurrency(self._request, replica.concurrency), replica, grouped=False)
        if solved is None:
            raise InfeasibleError(
                [f"replica {replica.replica} lost nothing and does not fit its devices any more: it is planned anew"]
            )
        return solved.prediction

    def _mended(self, replica: Replica) -> Plan | None:
        repairing = Repairing(self._request, replica, self._wishes.fewest_bits)
        groups = self._groups[replica.replica]
        filled = with_spares(self._request, replica, groups, frozenset(self._taken))
        # Idle devices last, whatever they would make of it: they must be started first, while everybody waits.
        orders = [each for each in (groups, filled) if each and sum(map(len, each)) >= max(1, self._request.min_stages)]
        nearest: Short | None = None
        for sequences in _halved(replica.concurrency):
            chosen: Repaired | None = None
            for order in orders:
                tried = repairing.repaired(order, sequences)
                if isinstance(tried, Repaired):
                    chosen = tried
                    alone = order is groups
                    self._note(("neighbours" if tried.reach == 1 else "reshuffle") if alone else "spareDevices")
                    break
                nearest = nearest or tried
            if chosen is None:
                continue
            if sequences < replica.concurrency:
                self._note("fewerSequences")
            self._taken |= chosen.plan.places
            return chosen.plan
        self._reasons.append(self._reason(replica, groups, nearest))
        return None

    def _note(self, kind: RepairKind) -> None:
        self.kind = max(self.kind, kind, key=KINDS.index)

    def _reason(self, replica: Replica, groups: Groups, short: Short | None) -> str:
        gone = [stage.slot for stage, group in zip(replica.stages, groups, strict=True) if not group]
        what = f"replica {replica.replica} lost {', '.join(gone)}"
        left = sum(map(len, groups))
        if short is None:
            return f"{what}, and {left} of its stages are left where placement.minStages asks for {max(1, self._request.min_stages)}: add devices"
        fewest = "without lowering bits" if self._wishes.exact else f"at {self._wishes.min_bits} bits or more"
        if short.missing_bytes >= NEVER_BYTES:
            return (
                f"{what}, and no device that is left stores its layers {fewest}: allow more widths in precision.allowed"
            )
        if short.missing_bytes:
            helps = (
                "set replanning.takeover.exact to false"
                if self._wishes.exact
                else "lower replanning.takeover.minBits, allow fewer bits in precision.allowed"
            )
            return f"{what}: {human_bytes(short.missing_bytes)} are missing on those that are left {fewest}; {helps}, or add a device"
        return f"{what}: what fits costs more quality than allowed; raise replanning.takeover.maxPerplexityIncrease, or add a device"


def _halved(sequences: int) -> Iterator[int]:
    while sequences:
        yield sequences
        sequences //= 2


def _lowered(before: Plan, after: Plan) -> Iterator[Lowered]:
    old = {replica.replica: [bits for stage in replica.stages for bits in stage.bits] for replica in before.replicas}
    for replica in after.replicas:
        bits = [each for stage in replica.stages for each in stage.bits]
        for layer, (was, now) in enumerate(zip(old[replica.replica], bits, strict=True)):
            if now < was:
                yield Lowered(replica.replica, layer, was, now)
