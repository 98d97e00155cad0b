"""Plans moved towards what devices already hold: equal devices exchanged, borders and bits shifted, nothing much slower for it.

Called by `decision`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from strata_planner.contract.plan import Plan, Replica
from strata_planner.contract.shares import lowest
from strata_planner.costs.shards import portions
from strata_planner.question.cluster import DeviceGroup
from strata_planner.question.request import PlanRequest
from strata_planner.replan.holdings import Held, Movement, Place, held_at, holdings, movement_to
from strata_planner.replan.matching import closest
from strata_planner.replan.numbering import numbers_of
from strata_planner.replan.placement import Placement, Units, arranged, placement_of
from strata_planner.search.assembly import assemble, combined
from strata_planner.search.exact.candidates import Pricer
from strata_planner.search.exact.found import Found
from strata_planner.search.exact.orders import fleet_of
from strata_planner.search.exact.problem import Problem, Solution, SolutionStatus, StopReason
from strata_planner.search.layouts.solved import SolvedReplica


def weight(moved: Movement) -> float:
    """Bytes to read decide; a layer that only changes its owner counts as a byte."""
    return moved.loaded_bytes + moved.moved_layers


class Moves:
    """Of one replanning: the request, and what the devices hold (`before`)."""

    def __init__(self, request: PlanRequest, running: Plan) -> None:
        self.before = holdings(running)
        self._running = running.replicas
        self._fleet = fleet_of(request.cluster)

    def towards(self, replicas: Sequence[SolvedReplica], slack: float) -> Plan:
        """On the devices that hold most of it; each replica's batch at most `slack` longer than it was. What stays as it was keeps its number."""
        parts = [_Part.of(each, self.before) for each in replicas]
        own = self._counterparts(parts)
        spots = [(part, own.get(at), j) for at, part in enumerate(parts) for j in range(len(part.order))]

        def cost(at: int, group: DeviceGroup) -> float:
            part, running, j = spots[at]
            is_own = running is not None and running.stages[j].places == group.places
            return weight(part.arranged(j, group).stage_movement(j, group)) + (0 if is_own else _ANOTHER)

        named = closest(tuple(part.order[j] for part, _, j in spots), self._fleet, cost)
        plans = []
        for part in parts:
            order, named = named[: len(part.order)], named[len(part.order) :]
            plans.append(part.on(order).nearer(slack).plan())
        return combined(plans, numbers_of([plan.replicas[0] for plan in plans], self._running))

    def _counterparts(self, parts: Sequence["_Part"]) -> dict[int, Replica]:
        """Of parts with as many units a stage as a running replica: that one, where there are several one on the same devices. Stages of
        replicas that are alike hold the same, and would else be exchanged for each other.
        """
        found, free = dict[int, Replica](), list(self._running)
        alike = [(at, each) for at, part in enumerate(parts) for each in free if part.is_like(each)]
        for at, each in sorted(alike, key=lambda pair: not parts[pair[0]].is_on(pair[1])):
            if at not in found and each in free:
                found[at] = each
                free.remove(each)
        return found


_ANOTHER = 0.01  # bytes: what holds as much and belongs to another replica is the next best


@dataclass(frozen=True)
class _Part:
    """A replica on named devices, unit by unit."""

    request: PlanRequest
    pricer: Pricer
    units: Units
    found: Found
    placement: Placement
    before: dict[Place, Held]

    @classmethod
    def of(cls, solved: SolvedReplica, before: dict[Place, Held]) -> "_Part":
        pricer = Pricer(solved.request)
        placement = placement_of(solved.found.solution.counts, len(solved.order))
        return cls(solved.request, pricer, Units.of(pricer.layer_runs), solved.found, placement, before)

    @property
    def order(self) -> tuple[DeviceGroup, ...]:
        return self.found.candidate.order

    @property
    def problem(self) -> Problem:
        return self.found.problem

    def is_like(self, replica: Replica) -> bool:
        """As many layers on every stage, on as many devices."""
        bits = self.placement.layer_bits(self.units)
        own = [(group.degree, lowest(group.shares), len(mine)) for group, mine in zip(self.order, bits, strict=True)]
        return own == [(stage.tensor_parallel, stage.shares, len(stage.bits)) for stage in replica.stages]

    def is_on(self, replica: Replica) -> bool:
        return [group.places for group in self.order] == [stage.places for stage in replica.stages]

    def on(self, order: tuple[DeviceGroup, ...]) -> "_Part":
        """The same on equal devices, each with as much of its own as it may keep."""
        candidate = replace(self.found.candidate, order=order)
        moved = replace(self, found=replace(self.found, candidate=candidate, problem=self.pricer.problem(candidate)))
        for j, group in enumerate(order):
            moved = moved.arranged(j, group)
        return moved

    def arranged(self, j: int, group: DeviceGroup) -> "_Part":
        formats, held = self.pricer.formats(group), self._held(group)
        return replace(self, placement=arranged(self.placement, j, self.units, formats, held))

    def nearer(self, slack: float) -> "_Part":
        """Small changes, each of which moves less and keeps to memory and to the slack."""
        ceiling = self._objective() * (1 + slack)
        part = self
        while (better := part._better(ceiling)) is not None:
            part = better
        return part

    def _better(self, ceiling: float) -> "_Part | None":
        allowed = [sorted(set.intersection(*map(set, stage.seconds))) for stage in self.problem.stages]
        now = weight(self.movement())
        for placement in self.placement.neighbours(allowed):
            other = replace(self, placement=placement)
            if weight(other.movement()) >= now:
                continue
            counts = placement.counts(self.units)
            if self.problem.objective(counts) <= ceiling and self.problem.is_feasible(counts):
                return other
        return None

    def movement(self) -> Movement:
        total = Movement()
        for j, group in enumerate(self.order):
            total += self.stage_movement(j, group)
        return total

    def stage_movement(self, j: int, group: DeviceGroup) -> Movement:
        tables = (j == 0, j == len(self.placement.stages) - 1)
        wanted = self.placement.held(j, self.units, self.pricer.formats(group), tables=tables)
        return movement_to(
            self._held(group),
            wanted,
            self.request.model,
            self.request.compute_type,
            portions(group.degree, group.shares),
        )

    def plan(self) -> Plan:
        counts = self.placement.counts(self.units)
        solution = Solution(SolutionStatus.FEASIBLE, StopReason.SETTLED, counts, self._objective())
        bits = self.placement.layer_bits(self.units)
        return assemble(self.request, replace(self.found, solution=solution), self.pricer, bits)

    def _objective(self) -> float:
        return self.problem.objective(self.placement.counts(self.units))

    def _held(self, group: DeviceGroup) -> Held:
        return held_at(self.before, group.places, group.shares)
